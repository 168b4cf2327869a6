"""A real client: the LiteRT-LM runtime prints the same tokens from a bundle before and after."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from pass_runs import INLINING

from edge_opt.conversion import convert

TESTDATA = Path(__file__).parent.parent / "testdata"


def tokens(bundle: Path) -> list[str]:
    """What the runtime says on the CPU: sampled hot, so that every logit counts, with a fixed seed."""
    program = shutil.which("litert-lm", path=str(Path(sys.executable).parent))
    assert program is not None
    command = [program, "run", str(bundle), "--prompt", "w5 w6 w11", "--backend", "cpu", "--no-template"]
    sampled = "--max-num-tokens 36 --temperature 30 --top-k 40 --top-p 0.99 --seed 7"
    done = subprocess.run(
        [*command, *sampled.split()], capture_output=True, text=True, timeout=300, check=True
    )
    return done.stdout.split()


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what litert-torch exports of a tiny Gemma3, bundled, and the same bundle converted."""
    for package in ("litert_torch", "litert_lm", "litert_lm_builder"):
        pytest.importorskip(package, reason=f"{package} is not installed (extras torch and lm)")
    folder = tmp_path_factory.mktemp("exported")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(TESTDATA))
        patch.setenv("HF_HUB_OFFLINE", "1")
        import checkpoints

        # Wide enough that random weights do not say one word for ever.
        sizes = checkpoints.Sizes(
            kv_heads=1, head_size=32, hidden=128, ffn=256, vocab=512, prefill=16, cache=64
        )
        checkpoints.save_checkpoint("gemma3", sizes, folder / "hf")
        from litert_torch.generative.export_hf.export import export

        export(
            model=str(folder / "hf"),
            output_dir=str(folder / "out"),
            prefill_lengths=[16],
            cache_length=64,
            quantization_recipe="",
            bundle_litert_lm=True,
        )
    assert len(convert(folder / "out" / "model.litertlm").converted) == 5
    return folder / "out"


@pytest.mark.slow
def test_an_exported_bundle_says_the_same_after_the_conversion_of_one_or_all_of_its_models(
    exported: Path, tmp_path: Path
) -> None:
    before = tokens(exported / "model.litertlm")
    assert len(before) > 10
    assert len(set(before)) > 5
    assert tokens(exported / "model.opt.litertlm") == before
    output = tmp_path / "all.litertlm"
    convert(exported / "model.litertlm", output, sections="all", target=INLINING)
    assert tokens(output) == before
