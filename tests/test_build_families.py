"""`edge-opt build` of checkpoints of other families than Gemma 3, up to the export or to the end."""

import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from pretend_npu import require_qnn
from real_builds import OPTIONS, SCRIPT, require_packages

from edge_opt.building import StageReport, build
from edge_opt.inspection import inspect
from edge_opt.ir.composites import body_of, composite_name
from edge_opt.ir.opening import Opened
from edge_opt.schema.litertlm import read_bundle

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def _installed() -> None:
    require_packages()


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prompts for all checkpoints, which have the same tokenizer."""
    require_qnn()
    checkpoint = tmp_path_factory.mktemp("build") / "gemma"
    subprocess.run([sys.executable, SCRIPT, checkpoint], check=True, capture_output=True)
    return checkpoint.with_suffix(".jsonl")


def make_llama(checkpoint: Path) -> None:
    small = ["--layers", "1", "--hidden", "128", "--ffn", "256", "--head-size", "64"]
    subprocess.run(
        [sys.executable, SCRIPT, checkpoint, "--architecture", "llama", *small], check=True
    )


def export(checkpoint: Path, prompts: Path, **settings: object) -> Path:
    """The folder of the stage `export`, after which the build is stopped."""

    def stop(stage: StageReport) -> None:
        if stage.name == "export":
            raise KeyboardInterrupt

    options = {**OPTIONS, "settings": {**OPTIONS["settings"], **settings}}
    output = checkpoint.with_name(f"{len([*checkpoint.parent.iterdir()])}.litertlm")
    with pytest.raises(KeyboardInterrupt):
        build(checkpoint, output, prompts=prompts, on_stage=stop, **options)
    return output.with_suffix(".work") / "export"


def test_an_export_that_streams_the_weights_gives_the_same_bundle(
    prompts: Path, tmp_path: Path
) -> None:
    """Signatures and tokens that end a text are in another order."""
    from litert_torch._convert import converter_v2

    if not converter_v2.is_supported():
        pytest.skip("TensorFlow has no second converter (tf-nightly has)")
    make_llama(tmp_path / "small")
    settings = json.dumps({"eos_token_id": [3, 5, 7]})
    (tmp_path / "small" / "generation_config.json").write_text(settings)
    found = []
    for streams in (False, True):
        path = export(tmp_path / "small", prompts, use_v2=streams)
        model = Opened(path / "model.litertlm").main().model
        told = json.loads((path / "stage.json").read_text())["values"]
        assert any("tf-nightly" in note for note in told["notes"]) is not streams
        operators = {
            signature.key: Counter((one.name, one.output.shape) for one in signature.subgraph)
            for signature in model.signatures
        }
        for norm in filter(composite_name, model.operators()):
            for inner in body_of(model, norm).operators:
                assert re.search("rms_?norm", inner.output.name, re.IGNORECASE), "becomes int16"
        codes: set[tuple[object, ...]] = set()
        for graph in model.subgraphs:
            for tensor in graph.tensors:
                if tensor.has_numbers and tensor.is_constant and len(tensor.shape) > 1:
                    codes.add((tensor.dtype, tensor.shape, np.asarray(tensor.array()).tobytes()))
        found.append((operators, codes, stop_tokens(path / "model.litertlm")))
    assert found[0] == found[1]
    assert found[0][2] >= {3, 5, 7}


def stop_tokens(path: Path) -> set[int]:
    """The tokens that end a text, of a bundle's metadata."""
    from litert_lm_builder.runtime.proto import llm_metadata_pb2

    content = read_bundle(path).content(0)
    found = llm_metadata_pb2.LlmMetadata.FromString(content.read(0, content.size))
    return {number for token in found.stop_tokens for number in token.token_ids.ids}


@pytest.fixture(scope="module")
def llama(prompts: Path) -> Path:
    """A checkpoint that is rotated, since one column is large; `llama.export` beside it is the stage's folder.

    Its chat template concatenates texts, which LiteRT-LM gives as lists of parts, and begins with a token's text.
    """
    transformers = pytest.importorskip("transformers")
    safetensors = pytest.importorskip("safetensors.torch")
    checkpoint = prompts.parent / "llama"
    make_llama(checkpoint)
    weights = safetensors.load_file(checkpoint / "model.safetensors")
    weights["model.embed_tokens.weight"][:, 5] *= 1000
    safetensors.save_file(weights, checkpoint / "model.safetensors", {"format": "pt"})
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    tokenizer.chat_template = (
        "{% for turn in messages %}{{ '<bos> ' + turn['content'] + ' ' + eos_token }}\n{% endfor %}"
    )
    tokenizer.save_pretrained(checkpoint)
    export(checkpoint, prompts).rename(checkpoint.with_suffix(".export"))
    return checkpoint


def test_a_conversation_in_litert_lm_has_the_tokens_of_transformers(llama: Path) -> None:
    import litert_lm
    from transformers import AutoTokenizer

    npu = litert_lm.Backend.NPU(litert_dispatch_lib_dir="")
    turns = [{"role": "user", "content": "w7 w8"}, {"role": "assistant", "content": "w9"}]
    exported = llama.with_suffix(".export") / "model.litertlm"
    with (
        litert_lm.Engine(str(exported), backend=npu) as engine,
        engine.create_conversation(messages=turns, max_output_tokens=1) as conversation,
    ):
        conversation.send_message("w4")
        read = conversation.token_count - 1
    turns.append({"role": "user", "content": "w4"})
    tokenizer = AutoTokenizer.from_pretrained(llama)
    assert read == len(tokenizer.apply_chat_template(turns)["input_ids"])


def test_norms_of_a_rotated_checkpoint_are_still_composites(llama: Path) -> None:
    """Decomposed, they differ on the NPU; CPU kernels show nothing."""
    exported = llama.with_suffix(".export")
    names = sorted(file.name for file in exported.iterdir() if "xnnpack" not in file.name)
    assert names == ["model.litertlm", "stage.json"]
    assert json.loads((exported / "stage.json").read_text())["values"]["rotated"]
    for signature in Opened(exported / "model.litertlm").main().model.signatures:
        operators = [operator.name for operator in signature.subgraph]
        assert "STABLEHLO_COMPOSITE" in operators
        assert "RSQRT" not in operators


def test_gemma_4_s_text_decoder_becomes_a_bundle(tmp_path: Path) -> None:
    """Its global layers have another head size than its local ones, and values have a norm."""
    require_qnn()
    checkpoint = tmp_path / "gemma4"
    small = "--layers 3 --hidden 64 --ffn 128 --heads 4 --kv-heads 2 --head-size 32 --vocab 512"
    command = [sys.executable, SCRIPT, checkpoint, "--window", "64"]
    subprocess.run([*command, "--architecture", "gemma4", *small.split()], check=True)
    result = build(
        checkpoint,
        tmp_path / "out.litertlm",
        prompts=checkpoint.with_suffix(".jsonl"),
        **{**OPTIONS, "prefill": [32], "cache": 128},
    )
    prefill, decode = result.optimized["signatures"]
    assert prefill["kept"] == "converted"
    assert decode["after"]["taken"] == decode["after"]["operators"], "all of it on the NPU"
    assert result.caches["ring"] == 64
    assert {found.rule for found in inspect(str(result.converted)).soundness} == set()
