"""A model that `load` refuses is not written, neither to a file nor as bytes."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from text_parser import parse

from edge_opt.base.errors import ModelFormatError
from edge_opt.ir import Buffer, DType, Model, Operator, Signature, Subgraph, Tensor, load, to_bytes
from edge_opt.ir.graph import OperatorCode
from edge_opt.schema.data import Data

_TEXT = """
signature run = #0 (x=%x) -> (y=%y)
subgraph main (%x: float32[2,2]) {
  %y: float32[2,2] = ADD(%x, float32[2,2]{1.0, 2.0, 3.0, 4.0})
  return %y
}
"""


def constant(model: Model) -> Tensor:
    return model.subgraphs[0].operators[0].input(1)


def shape(*sizes: int) -> Callable[[Model], None]:
    def change(model: Model) -> None:
        model.subgraphs[0].inputs[0].shape = sizes

    return change


def short(model: Model) -> None:
    constant(model).buffer = Buffer(Data(b"1234"))


def empty(model: Model) -> None:
    model.subgraphs.clear()
    model.signatures.clear()


def twice(model: Model) -> None:
    model.signatures.append(model.signatures[0])


def foreign_subgraph(model: Model) -> None:
    model.signatures.append(Signature("other", Subgraph("other"), {}, {}))


def foreign_tensor(model: Model) -> None:
    model.signatures[0].inputs["z"] = Tensor("z", (1,), DType.FLOAT32)


def undefined(model: Model) -> None:
    graph = model.subgraphs[0]
    graph.set_input(graph.operators[0], 0, Tensor("nobody's", (2, 2), DType.FLOAT32))


def undefined_output(model: Model) -> None:
    tensor = model.subgraphs[0].add_tensor(Tensor("z", (1,), DType.FLOAT32))
    model.signatures[0].outputs["late"] = tensor


def undefined_result(model: Model) -> None:
    model.subgraphs[0].outputs.append(Tensor("z", (1,), DType.FLOAT32))


def body_missing(model: Model) -> None:
    graph = model.subgraphs[0]
    graph.append(Operator(OperatorCode(32), [graph.inputs[0]], [Tensor("z", (1,), DType.FLOAT32)]))
    graph.append(model.new_operator("WHILE", [], [], cond_subgraph_index=7, body_subgraph_index=0))


REFUSED = [
    (shape(-1, 2), r"tensor \d 'x': shape \[-1, 2\] is not one that memory can hold"),
    (shape(*[1] * 40), r"40 dimensions, expected at most 32"),
    (shape(1 << 31), r"shape \[2147483648\] has a size over 2147483647"),
    (short, r"FLOAT32\[2, 2\] needs 16 bytes, its buffer holds 4"),
    (empty, "expected at least one subgraph, found none"),
    (twice, "signature 'run' is there twice"),
    (foreign_subgraph, "signature 'other': its subgraph is not one of the model's"),
    (foreign_tensor, "signature 'run': its subgraph does not hold 'z'"),
    (undefined, r"operator 0 \(ADD\): reads 'nobody's' before it is defined"),
    (undefined_output, "signature 'run': nothing defines its output 'late'"),
    (undefined_result, "subgraph 'main': nothing defines its output 'z'"),
    (body_missing, "subgraph 7 does not exist, there are 1"),
]


@pytest.mark.parametrize(("change", "sentence"), REFUSED)
def test_a_model_that_load_would_refuse_is_not_written(
    change: Callable[[Model], None], sentence: str, tmp_path: Path
) -> None:
    model = parse(_TEXT)
    change(model)
    with pytest.raises(ModelFormatError, match=sentence):
        model.save(tmp_path / "model.tflite")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ModelFormatError, match=sentence):
        to_bytes(model)


def test_a_model_that_is_written_can_be_read() -> None:
    model = parse(_TEXT)
    model.subgraphs[0].inputs[0].shape = ((1 << 31) - 1, 2)
    again = load(to_bytes(model))
    assert again.subgraphs[0].inputs[0].shape == ((1 << 31) - 1, 2)
    assert np.array_equal(constant(again).array(), constant(model).array())
