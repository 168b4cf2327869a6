"""Builds models of one operator and asks the interpreter for the shapes: the referee of the shape rules."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from ai_edge_litert.interpreter import Interpreter, OpResolverType

from edge_opt import ir
from edge_opt.ir.walk import called_by
from edge_opt.schema.data import Data
from edge_opt.shapes import ShapeError
from edge_opt.shapes.inference import infer_operator, shape_report
from edge_opt.shapes.rules import Fact

Shape = tuple[int, ...]
Options = dict[str, Any] | None


@dataclass(frozen=True)
class T:
    """A tensor: its shape, type, and value where it is constant."""

    shape: Shape
    dtype: str = "FLOAT32"
    value: Any = None
    scale: float | None = None
    zero_point: int = 0


def const(value: Any, dtype: str = "INT32") -> T:
    """A constant tensor."""
    array = np.asarray(value, dtype.lower())
    return T(array.shape, dtype, array)


def one_operator(
    name: str, inputs: Sequence[T | None], outputs: Sequence[T], how: Options = None
) -> bytes:
    """A model of one operator; the outputs' recorded shapes are what `outputs` says, `[]` unless stated."""
    model, graph = ir.Model(), ir.Subgraph("main")
    model.subgraphs.append(graph)
    given = [tensor for tensor in inputs if tensor is not None]
    tensors = [_tensor(tensor, f"t{index}") for index, tensor in enumerate([*given, *outputs])]
    places = iter(tensors)
    read = [None if tensor is None else next(places) for tensor in inputs]
    for tensor in tensors:
        graph.add_tensor(tensor)
    graph.inputs = [tensor for tensor in read if tensor is not None and not tensor.is_constant]
    graph.outputs = tensors[len(given) :]
    graph.append(model.new_operator(name, read, graph.outputs, **(how or {})))
    return ir.to_bytes(model)


def _tensor(t: T, name: str) -> ir.Tensor:
    buffer = None if t.value is None else ir.Buffer(Data(np.ascontiguousarray(t.value).tobytes()))
    scale = None if t.scale is None else ir.Quantization.affine(t.scale, t.zero_point)
    return ir.Tensor(name, t.shape, ir.DType[t.dtype], buffer=buffer, quantization=scale)


def interpreter(model: bytes) -> Interpreter:
    """The interpreter without delegates: every tensor stays as the graph has it. (BUILTIN_REF lacks operators.)"""
    return Interpreter(
        model_content=model,
        experimental_op_resolver_type=OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES,
        experimental_preserve_all_tensors=True,
    )


def runtime_shapes(model: bytes) -> list[Shape] | None:
    """The output shapes that the interpreter allocates, None where it refuses."""
    try:
        runtime = interpreter(model)
        runtime.allocate_tensors()
    except (RuntimeError, ValueError):
        return None
    return [tuple(int(size) for size in detail["shape"]) for detail in runtime.get_output_details()]


def only_operator(model: bytes) -> ir.Operator:
    """The operator of a model of one."""
    return ir.load(model).subgraphs[0].operators[0]


def stored_facts(operator: ir.Operator) -> list[Fact]:
    """The shapes of the operator's inputs, and the values of constant ones."""
    given = operator.inputs
    return [
        Fact(t and t.shape, t.array() if t is not None and t.is_constant else None) for t in given
    ]


def inferred(model: bytes) -> list[Fact] | ShapeError:
    """What we infer for the outputs, or our refusal."""
    operator = only_operator(model)
    try:
        return list(infer_operator(operator, stored_facts(operator)))
    except ShapeError as error:
        return error


def check_dynamic(model: bytes, results: Sequence[Shape | None]) -> None:
    """Assert that whatever is hidden of the inputs, the rule still accepts them and what it derives fits."""
    operator = only_operator(model)
    facts = stored_facts(operator)
    for shapes in _hidden([fact.shape for fact in facts]):
        for values in ([fact.value for fact in facts], [None] * len(facts)):
            derived = infer_operator(operator, list(map(Fact, shapes, values)))
            assert all(
                fits(ours.shape, theirs) for ours, theirs in zip(derived, results, strict=True)
            ), f"{shapes} give {derived}, which does not cover {results}"


def fits(derived: Shape | None, actual: Shape | None) -> bool:
    """Whether the actual shape is one of those that the derived one stands for."""
    if derived is None or actual is None:
        return derived is None
    return len(derived) == len(actual) and all(
        a in (-1, b) for a, b in zip(derived, actual, strict=True)
    )


def _hidden(static: list[Shape | None]) -> Iterator[list[Shape | None]]:
    """The input shapes with everything dynamic, one axis dynamic, one input unranked, or nothing changed."""
    yield static
    yield [None if shape is None else (-1,) * len(shape) for shape in static]
    for index, shape in enumerate(static):
        yield [*static[:index], None, *static[index + 1 :]]
        for axis in range(len(shape or ())):
            assert shape is not None
            dynamic = (*shape[:axis], -1, *shape[axis + 1 :])
            yield [*static[:index], dynamic, *static[index + 1 :]]


def check(
    name: str,
    inputs: Sequence[T | None],
    options: Options = None,
    outputs: Sequence[T] | str = "FLOAT32",
    *,
    accepted: bool | None = None,
    stricter: bool = False,
) -> None:
    """Assert that rule and interpreter agree: equal shapes, or both refuse; then hide parts of the inputs.

    `accepted` states what the interpreter must say; with `stricter` the rule may refuse what it accepts.
    """
    results = [T((), outputs)] if isinstance(outputs, str) else outputs
    model = one_operator(name, inputs, results, options)
    expected, derived = runtime_shapes(model), inferred(model)
    assert accepted is None or accepted == (expected is not None), (
        f"the interpreter says {expected}"
    )
    if isinstance(derived, ShapeError):
        assert expected is None or stricter, (
            f"the interpreter derives {expected}, we refuse: {derived}"
        )
        return
    shapes = [fact.shape for fact in derived]
    assert expected is not None, f"the interpreter refuses, we derive {shapes}"
    assert shapes == expected
    check_dynamic(model, shapes)


def runtime_values(model: bytes) -> list[Any]:
    """What the interpreter computes, of zeros where it has inputs."""
    runtime = interpreter(model)
    runtime.allocate_tensors()
    for detail in runtime.get_input_details():
        runtime.set_tensor(detail["index"], np.zeros(detail["shape"], detail["dtype"]))
    runtime.invoke()
    return [_read(runtime, detail) for detail in runtime.get_output_details()]


def _read(runtime: Interpreter, detail: dict[str, Any]) -> Any:
    """The interpreter has no buffer for a tensor without elements, and says so."""
    shape = tuple(int(size) for size in detail["shape"])
    return np.zeros(shape, detail["dtype"]) if 0 in shape else runtime.get_tensor(detail["index"])


def compare_all(model: bytes, recorded: bytes) -> tuple[int, list[str]]:
    """How many tensors there are, and each whose inferred shape is not what the interpreter allocates.

    We derive from `recorded`, which differs from the interpreter's model in recorded shapes only.
    """
    loaded, runtime = ir.load(recorded), interpreter(model)
    called = called_by(
        (operator for graph in loaded.subgraphs for operator in graph), loaded.subgraphs
    )
    for index, graph in enumerate(loaded.subgraphs):
        if graph not in called:
            runtime._interpreter.AllocateTensors(index)
    # The sizes recorded for open dimensions of graph inputs are real ones for the interpreter.
    recorded_sizes = {
        tensor: tensor.shape for subgraph in loaded.subgraphs for tensor in subgraph.inputs
    }
    derived = shape_report(loaded, resize=recorded_sizes).shapes
    wrong, count = [], 0
    for place, subgraph in enumerate(loaded.subgraphs):
        details = {detail["index"]: detail for detail in runtime.get_tensor_details(place)}
        for index, tensor in enumerate(subgraph.tensors):
            ours, theirs = (
                derived.get(tensor, tensor.shape),
                tuple(map(int, details[index]["shape"])),
            )
            count += 1
            if ours != theirs:
                wrong.append(f"{subgraph.name} {tensor.name}: we {ours}, the interpreter {theirs}")
    return count, wrong
