"""Gives inputs of open lengths static shapes: all other shapes are derived again, and what SHAPE gives is folded.

It rewrites no attention and proves nothing: the comparison of whole models does, at the same sizes.
"""

from collections.abc import Iterator, Mapping, Sequence

from edge_opt.conversion.container import Container, Part
from edge_opt.ir import Buffer, Model, Operator, Shape, Subgraph, Tensor
from edge_opt.ir.cleanup import called, parts_in_use, remove_unused
from edge_opt.output.errors import UsageError, unknown
from edge_opt.passes.contract import shape_options
from edge_opt.passes.rewrite import remove_dead
from edge_opt.schema.data import Data
from edge_opt.shapes import ShapeError, derive, infer_operator
from edge_opt.shapes.call import Array, Call, constants_of, recorded_shape
from edge_opt.shapes.folding import fold


def fix_inputs(container: Container, shapes: Mapping[str, Sequence[int]]) -> None:
    """Give inputs static shapes, by `NAME` (in each signature with it), `signature/NAME` or `model/signature/NAME`.

    Raises:
        UsageError: there is no such input, a shape does not fit it, another input of its signature stays open, or
            operators cannot take such inputs.
    """
    available = [
        key
        for part in container.parts
        for signature, inputs in part.model.inputs()
        for name in inputs
        for key in _keys(part, signature, name)
    ]
    for key in shapes:
        if key not in available:
            raise unknown("input", key, dict.fromkeys(available))
    for part in container.parts:
        chosen = _chosen(part, shapes)
        if chosen:
            fix_shapes(part.model, chosen)
            part.changed = True


def _chosen(part: Part, shapes: Mapping[str, Sequence[int]]) -> dict[Tensor, Shape]:
    """The shapes by input of one model, each checked to fit."""
    chosen: dict[Tensor, Shape] = {}
    for signature, inputs in part.model.inputs():
        for name, tensor in inputs.items():
            keys = [key for key in _keys(part, signature, name) if key in shapes]
            if keys:  # what names one signature comes before what names all
                shape = _fitting(f"{part.signature(signature)}/{name}", tensor, shapes[keys[-1]])
                if chosen.setdefault(tensor, shape) != shape:
                    raise UsageError(
                        f"input '{part.signature(signature)}/{name}' is that of another signature too: give one shape "
                        "to both"
                    )
    for signature, inputs in part.model.inputs():
        left = {name: tensor for name, tensor in inputs.items() if tensor.is_dynamic and tensor not in chosen}
        if left and any(tensor in chosen for tensor in inputs.values()):
            raise UsageError(
                f"signature '{part.signature(signature)}' has other inputs of open lengths: add "
                f"{' '.join(shape_options(left))}"
            )
    return chosen


def _keys(part: Part, signature: str, name: str) -> tuple[str, str, str]:
    """What an input is called, the name that fits it alone last."""
    return name, f"{signature}/{name}", f"{part.signature(signature)}/{name}"


def _fitting(where: str, tensor: Tensor, given: Sequence[int]) -> Shape:
    declared = tensor.shape_signature or tensor.shape
    if len(given) != len(declared):
        raise UsageError(f"input '{where}' has {len(declared)} axes, and {len(given)} sizes were given")
    for axis, (size, wanted) in enumerate(zip(declared, given, strict=True)):
        if wanted < 1 or size not in (-1, wanted):
            expected = "1 or more" if size < 0 else size
            raise UsageError(f"axis {axis} of input '{where}' must be {expected}, and {wanted} was given")
    return tuple(given)


def fix_shapes(model: Model, given: Mapping[Tensor, Shape]) -> None:
    """Edit the model so that these inputs have these shapes, and the subgraphs that read them no open lengths.

    Lengths that follow from data (of WHERE, say), or differ between the callers of one subgraph, stay open.

    Raises:
        UsageError: operators cannot take such inputs; the model is as it was then.
    """
    before = {(one.subgraph, one.operator) for one in derive(model).disagreements}
    report = derive(model, resize=given)
    for one in report.disagreements:
        if one.derived is None and (one.subgraph, one.operator) not in before:
            raise UsageError(f"the given shapes do not go together: {one}")
    roots = [graph for graph in model.subgraphs if any(tensor in given for tensor in graph.inputs)]
    reached = called(model, roots)
    usage = parts_in_use(model)
    for graph in (graph for graph in model.subgraphs if graph in reached):
        for tensor in graph.tensors:
            shape = report.shapes.get(tensor)
            if shape is not None and not tensor.is_constant:
                tensor.shape = tuple(max(size, 1) if size < 0 else size for size in shape)
                tensor.shape_signature = shape if -1 in shape else None
        folded = list(_folded(graph))
        sources = [tensor.producer for operator in folded for tensor in operator.inputs if tensor is not None]
        remove_dead(graph, filter(None, sources), model.subgraphs)
    remove_unused(model, usage)


def _folded(graph: Subgraph) -> Iterator[Operator]:
    """Make whole numbers that are known constants; the operators that computed them, which are taken out."""
    for operator in graph.operators:
        values = _values(operator)
        if not values or any(graph.is_output(tensor) for tensor in operator.outputs):
            continue
        for tensor, value in zip(operator.outputs, values, strict=True):
            tensor.buffer = Buffer(Data(value.tobytes()))
        graph.remove(operator)
        yield operator


def _values(operator: Operator) -> Sequence[Array]:
    """The results of an operator on plain whole numbers or truth values, where all are known; else none.

    Real numbers are left to the kernels, which may round otherwise, and codes of quantized tensors are not what they
    say.
    """
    tensors = [tensor for tensor in (*operator.inputs, *operator.outputs) if tensor is not None]
    kinds = {tensor.dtype.numpy and tensor.dtype.numpy.kind for tensor in operator.outputs}
    if not kinds or kinds - {"i", "u", "b"} or any(tensor.is_quantized for tensor in tensors[1:]):
        return ()
    shapes, results = (
        [None if tensor is None else recorded_shape(tensor) for tensor in listed]
        for listed in (operator.inputs, operator.outputs)
    )
    try:
        if list(infer_operator(operator, shapes, constants_of(operator))) != results:
            return ()
    except ShapeError:
        return ()
    values = fold(Call(operator, shapes, constants_of(operator)), results)
    numbers = [value for value in values if value is not None and value.dtype != object]
    return numbers if len(numbers) == len(operator.outputs) else ()
