"""What a derivation costs: linear in the operators, and no weight is read."""

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from shapes_referee import Graph, T, const, model_bytes

from edge_opt import ir
from edge_opt.schema.table import new_table
from edge_opt.shapes import derive

LAYER_OPERATORS = 10


def layers(count: int) -> ir.Model:
    """A chain of attention-like layers, ten operators each, shapes from constants and from folded values."""
    model = ir.Model(subgraphs=[ir.Subgraph("main")])
    build = Builder(model)
    x = build.subgraph.add_tensor(ir.Tensor("x", (1, 8, 16), ir.DType.FLOAT32))
    build.subgraph.inputs.append(x)
    for _ in range(count):
        x = build.layer(x)
    build.subgraph.outputs.append(x)
    return model


class Builder:
    """Adds operators to the model's only subgraph."""

    def __init__(self, model: ir.Model) -> None:
        self.model, self.subgraph, self.constants = model, model.subgraphs[0], ir.Constants(model)
        self.weights = self.constant("weights", np.zeros((16, 16), np.float32))
        self.heads, self.back, self.axes = (
            self.constant(name, np.array(value, np.int32))
            for name, value in (("heads", [1, 8, 4, 4]), ("back", [1, -1, 16]), ("axes", [0, 2, 1, 3]))
        )

    def constant(self, name: str, array: np.ndarray[Any, Any]) -> ir.Tensor:
        return self.subgraph.add_tensor(self.constants.make(name, array, ir.DType[str(array.dtype).upper()]))

    def add(
        self,
        name: str,
        inputs: list[ir.Tensor | None],
        shape: tuple[int, ...],
        table: str = "",
        **options: object,
    ) -> ir.Tensor:
        dtype = ir.DType.INT32 if name == "SHAPE" else ir.DType.FLOAT32
        result = self.subgraph.add_tensor(ir.Tensor(f"t{len(self.subgraph.tensors)}", shape, dtype))
        fields = new_table(table, **options) if table else None
        self.subgraph.append(ir.Operator(self.model.operator_code(name), inputs, [result], fields))
        return result

    def layer(self, x: ir.Tensor) -> ir.Tensor:
        add = self.add
        q = add(
            "FULLY_CONNECTED",
            [x, self.weights, None],
            (1, 8, 16),
            "FullyConnectedOptions",
            keep_num_dims=True,
        )
        split = add("RESHAPE", [q, self.heads], (1, 8, 4, 4), "ReshapeOptions")
        swapped = add("TRANSPOSE", [split, self.axes], (1, 4, 8, 4), "TransposeOptions")
        scores = add("BATCH_MATMUL", [swapped, swapped], (1, 4, 8, 8), "BatchMatMulOptions", adj_y=True)
        soft = add("SOFTMAX", [scores], (1, 4, 8, 8), "SoftmaxOptions")
        mixed = add("BATCH_MATMUL", [soft, swapped], (1, 4, 8, 4), "BatchMatMulOptions")
        again = add("TRANSPOSE", [mixed, self.axes], (1, 8, 4, 4), "TransposeOptions")
        merged = add("RESHAPE", [again, self.back], (1, 8, 16), "ReshapeOptions")
        sizes = add("SHAPE", [x], (3,), "ShapeOptions", out_type=2)
        return add("RESHAPE", [merged, sizes], (1, 8, 16), "ReshapeOptions")


def seconds(model: ir.Model) -> float:
    """CPU time of the fastest of three runs."""
    times = []
    for _ in range(3):
        start = time.process_time()
        report = derive(model)
        times.append(time.process_time() - start)
        assert report.disagreements == ()
        assert report.unknown == 0
    return min(times)


def test_twice_the_operators_cost_twice_the_time() -> None:
    small, large = layers(500), layers(1000)
    assert len(large.subgraphs[0]) == 1000 * LAYER_OPERATORS
    assert seconds(large) <= 2.6 * seconds(small)


def test_large_constants_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = Graph()
    x, y = graph.tensor(T((1, 64)), is_input=True), graph.tensor(T((1, 512)), is_output=True)
    weights = graph.tensor(const(np.zeros((512, 64)), "FLOAT32"))
    graph.operator("FULLY_CONNECTED", [x, weights, -1], [y], ("FullyConnectedOptions", {}))
    model = ir.load(model_bytes([graph]))

    def refuse(self: ir.Tensor) -> None:
        raise AssertionError(f"read {self.name}")

    monkeypatch.setattr(ir.Tensor, "array", refuse)
    assert derive(model).disagreements == ()


def test_the_package_never_loads_the_interpreter() -> None:
    folder = Path(__file__).parent.parent / "converter" / "shapes"
    loaded = [path.name for path in folder.glob("*.py") if "ai_edge_litert" in path.read_text()]
    assert loaded == []
