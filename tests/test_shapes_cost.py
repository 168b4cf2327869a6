"""What a derivation costs: linear in the operators, and no weight is read."""

import numpy as np
import pytest
from shapes_referee import Graph, T, const, model_bytes
from text_parser import parse

from edge_opt import ir
from edge_opt.shapes import derive
from edge_opt.shapes.rules import Call, Results, apply

LAYER = """
  %q{0}: float32[1,8,16] = FULLY_CONNECTED(%x{0}, %weights, none) {{keep_num_dims: true}}
  %split{0}: float32[1,8,4,4] = RESHAPE(%q{0}, int32{{1, 8, 4, 4}})
  %swapped{0}: float32[1,4,8,4] = TRANSPOSE(%split{0}, int32{{0, 2, 1, 3}})
  %scores{0}: float32[1,4,8,8] = BATCH_MATMUL(%swapped{0}, %swapped{0}) {{adj_y: true}}
  %soft{0}: float32[1,4,8,8] = SOFTMAX(%scores{0})
  %mixed{0}: float32[1,4,8,4] = BATCH_MATMUL(%soft{0}, %swapped{0})
  %again{0}: float32[1,8,4,4] = TRANSPOSE(%mixed{0}, int32{{0, 2, 1, 3}})
  %merged{0}: float32[1,8,16] = RESHAPE(%again{0}, int32{{1, -1, 16}})
  %sizes{0}: int32[3] = SHAPE(%x{0}) {{out_type: 2}}
  %x{1}: float32[1,8,16] = RESHAPE(%merged{0}, %sizes{0})
"""


def layers(count: int) -> ir.Model:
    """A chain of attention-like layers, ten operators each, shapes from constants and from folded values."""
    steps = "".join(LAYER.format(index, index + 1) for index in range(count))
    inputs = "%x0: float32[1,8,16], %weights: float32[16,16]"
    return parse(f"subgraph main ({inputs}) {{ {steps} return %x{count} }}")


def test_each_operator_is_derived_once(monkeypatch: pytest.MonkeyPatch) -> None:
    count, derived = 20, list[str]()

    def counting(call: Call) -> Results:
        derived.append(call.name)
        return apply(call)

    monkeypatch.setattr("edge_opt.shapes.inference.apply", counting)
    report = derive(layers(count))
    assert (report.disagreements, report.unknown) == ((), 0)
    assert len(derived) == count * LAYER.count(" = ")


def test_large_constants_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = Graph()
    x, y = graph.tensor(T((1, 64)), is_input=True), graph.tensor(T((1, 512)), is_output=True)
    weights = graph.tensor(const(np.zeros((512, 64)), "FLOAT32"))
    graph.operator("FULLY_CONNECTED", [x, weights, -1], [y], {})
    model = ir.load(model_bytes([graph]))

    def refuse(self: ir.Tensor) -> None:
        raise AssertionError(f"read {self.name}")

    monkeypatch.setattr(ir.Tensor, "array", refuse)
    assert derive(model).disagreements == ()
