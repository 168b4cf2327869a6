"""Weights in another file, which the model names and nobody opens: counted, kept, and refused where they are needed."""

from pathlib import Path

import pytest
from bundles import bundle, model_part
from cli_runs import Captured, run
from text_parser import parse

from edge_opt import convert, load
from edge_opt.base.errors import ModelFormatError
from edge_opt.inspection import inspect
from edge_opt.ir import to_bytes
from edge_opt.ir.opening import weights_outside
from edge_opt.npu.compiler import cut_entry_point
from edge_opt.schema.table import new_table

GRAPH = """
signature main = #0 (x=%x) -> (y=%y)
subgraph main (%x: float32[2,8]) {
  %y: float32[2,4] = FULLY_CONNECTED(%x, float32[4,8]{splat 2.0}, none)
  return %y
}
"""
SAID = r"has weights in another file or section \('weights.bin'\), which LiteRT's interpreter cannot read"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    model = parse(GRAPH)
    weight = model.subgraphs[0].operators[0].input(1)
    weight.buffer = None
    weight.table = new_table("Tensor", has_rank=True, name=weight.name, external_buffer=7)
    place = new_table("ExternalBuffer", id=7, group=0, length=128, packing="raw")
    group = new_table("ExternalBufferGroup", name="weights.bin")
    model.table = new_table(
        "Model", version=3, external_buffer_groups=[group], external_buffers=[place]
    )
    path = tmp_path / "model.tflite"
    path.write_bytes(to_bytes(model))
    return path


def test_they_are_counted_and_a_conversion_keeps_them(path: Path, capsys: Captured) -> None:
    assert inspect(path).to_dict()["weights_outside"] == {"weights.bin": 128}
    assert (
        "Weights outside the model: 128 B in 'weights.bin', which is not read."
        in run(capsys, "inspect", path).out
    )
    written = convert(path, path.with_name("out.tflite")).model
    assert written is not None
    assert weights_outside(load(path.with_name("out.tflite"))) == {"weights.bin": 128}


@pytest.mark.parametrize("suffix", [".tflite", ".litertlm"])
@pytest.mark.parametrize(
    "command",
    [["compare", "IN", "IN"], ["golden", "record", "IN"], ["convert", "IN", "--verify", "full"]],
    ids=str,
)
def test_what_runs_the_model_says_why_it_cannot(
    command: list[str], suffix: str, path: Path, capsys: Captured
) -> None:
    if suffix == ".litertlm":
        packed = bundle([model_part("prefill_decode", path.read_bytes())])
        path = path.with_suffix(suffix)
        path.write_bytes(packed)
    ran = run(capsys, *[str(path) if word == "IN" else word for word in command])
    assert "weights in another file or section ('weights.bin')" in ran.failed_in_one_sentence(3)


def test_a_compiler_gets_no_model_without_its_weights(path: Path) -> None:
    with pytest.raises(ModelFormatError, match=SAID):
        cut_entry_point(load(path), "main")
