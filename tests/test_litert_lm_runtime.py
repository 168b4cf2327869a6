"""A real client: the LiteRT-LM runtime prints the same tokens from a bundle before and after."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from edge_opt.integrations.litert_torch import export_language_model

TESTDATA = Path(__file__).parent.parent / "testdata"


def tokens(bundle: Path) -> list[str]:
    """What the runtime says on the CPU: sampled hot, so that every logit counts, with a fixed seed."""
    program = shutil.which("litert-lm", path=str(Path(sys.executable).parent))
    assert program is not None
    command = [program, "run", str(bundle), "--prompt", "w5 w6 w11", "--backend", "cpu", "--no-template"]
    sampled = [
        "--max-num-tokens",
        "36",
        "--temperature",
        "30",
        "--top-k",
        "40",
        "--top-p",
        "0.99",
        "--seed",
        "7",
    ]
    done = subprocess.run([*command, *sampled], capture_output=True, text=True, timeout=300, check=True)
    return done.stdout.split()


@pytest.mark.slow
def test_an_exported_bundle_says_the_same_after_the_conversion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in ("litert_torch", "litert_lm", "litert_lm_builder"):
        pytest.importorskip(package, reason=f"{package} is not installed (extras torch and lm)")
    monkeypatch.syspath_prepend(str(TESTDATA))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    import make_families

    # Wide enough that random weights do not say one word for ever.
    sizes = make_families.Sizes(
        kv_heads=1, head_size=32, hidden=128, ffn=256, vocab=512, prefill=16, cache=64
    )
    make_families.save_checkpoint("gemma3", sizes, tmp_path / "hf")
    results = export_language_model(
        tmp_path / "hf",
        tmp_path / "out",
        prefill_lengths=[16],
        cache_length=64,
        quantization_recipe="",
        bundle_litert_lm=True,
    )
    bundle = tmp_path / "out" / "model.litertlm"
    converted = bundle.with_name("model.opt.litertlm")
    assert len(results[converted].converted) == 5
    before = tokens(bundle)
    assert len(before) > 10
    assert len(set(before)) > 5
    assert tokens(converted) == before
