"""Static shapes for inputs of open lengths, as a caller names them; what follows from them is folded and verified."""

from collections.abc import Iterator, Mapping, Sequence, Sized
from numbers import Integral

import numpy as np

from edge_opt.base.errors import UsageError, unknown
from edge_opt.ir import Model, Shape, Tensor, to_bytes
from edge_opt.ir.cleanup import parts_in_use, remove_unused
from edge_opt.ir.opening import Part
from edge_opt.ir.walk import reads
from edge_opt.passes.contract import shape_options
from edge_opt.passes.ledger import UnverifiedChangeError
from edge_opt.passes.rewrite import remove_dead
from edge_opt.runtime.runner import Worker
from edge_opt.shapes import Folded, close_shapes, folded_regions


def close_inputs(parts: Sequence[Part], shapes: Mapping[str, Sequence[int]], *, verify: bool = False) -> None:
    """Give inputs static shapes, by `NAME` (in each signature with it), `signature/NAME` or `model/signature/NAME`.

    What closing folds to constants is run and compared, if asked to `verify`.

    Raises:
        UsageError: there is no such input, a shape does not fit it, another input of its signature stays open, or
            operators cannot take such inputs.
        UnverifiedChangeError: a folded value is not what the runtime computes.
    """
    available = [key for part in parts for keys, _ in _inputs(part) for key in keys]
    for key in shapes:
        if key not in available:
            raise unknown("input", key, dict.fromkeys(available))
    for part in parts:
        chosen = _chosen(part, shapes)
        if not chosen:
            continue
        model, usage = part.model, parts_in_use(part.model)
        folded = close_shapes(model, chosen)
        if verify and folded:
            _compare(model, folded)
        for graph, operators, _ in folded:
            producers = (tensor.producer for tensor in reads(operators))
            remove_dead(graph, filter(None, producers), model.subgraphs)
        remove_unused(model, usage)
        part.changed = True


def _inputs(part: Part) -> Iterator[tuple[tuple[str, str, str], Tensor]]:
    """Every input with what it is called, the name that fits it alone last."""
    for signature, inputs in part.model.inputs():
        for name, tensor in inputs.items():
            yield (name, f"{signature}/{name}", f"{part.signature(signature)}/{name}"), tensor


def _chosen(part: Part, shapes: Mapping[str, Sequence[int]]) -> dict[Tensor, Shape]:
    """The shapes by input of one model, each checked to fit."""
    chosen: dict[Tensor, Shape] = {}
    for keys, tensor in _inputs(part):
        given = [shapes[key] for key in keys if key in shapes]
        if given:  # what names one signature comes before what names all
            shape = _fitting(keys[-1], tensor, given[-1])
            if chosen.setdefault(tensor, shape) != shape:
                text = "is that of another signature too: give one shape to both"
                raise UsageError(f"input '{keys[-1]}' {text}")
    for signature, inputs in part.model.inputs():
        left = {name: tensor for name, tensor in inputs.items() if tensor.is_dynamic and tensor not in chosen}
        if left and any(tensor in chosen for tensor in inputs.values()):
            where = f"signature '{part.signature(signature)}'"
            raise UsageError(f"{where} has other inputs of open lengths: add {' '.join(shape_options(left))}")
    return chosen


def _fitting(where: str, tensor: Tensor, given: Sequence[int]) -> Shape:
    declared = tensor.shape_signature or tensor.shape
    count = len(given) if isinstance(given, Sized) else None
    if count != len(declared):
        what = f"{given!r} was given" if count is None else f"{count} sizes were given"
        raise UsageError(f"input '{where}' has {len(declared)} axes, and {what}")
    for axis, (size, wanted) in enumerate(zip(declared, given, strict=True)):
        is_size = isinstance(wanted, Integral) and 1 <= wanted < 1 << 31
        if not is_size or size not in (-1, wanted):
            expected = "from 1 to 2147483647" if size < 0 else size
            raise UsageError(f"axis {axis} of input '{where}' must be {expected}, and {wanted!r} was given")
    return tuple(given)


def _compare(model: Model, folded: Sequence[Folded]) -> None:
    """Run the folded operators of each subgraph, and compare their results with the constants that stand for them.

    Raises:
        UnverifiedChangeError: they differ, which is a mistake of ours.
    """
    with Worker() as worker:
        for region, values in folded_regions(model, folded):
            graph = region.subgraphs[0]
            given = {tensor.name: np.zeros(tensor.shape, tensor.dtype.numpy) for tensor in graph.inputs}
            found = worker.run(to_bytes(region), None, given, "reference")
            for tensor, value in zip(graph.outputs, values, strict=True):
                if not np.array_equal(found[tensor.name], value):
                    text = f"a folded tensor of shape {list(value.shape)} has other values than the runtime computes"
                    remedy = "nothing was written, please report this mistake of edge-opt with the model"
                    raise UnverifiedChangeError(f"{text}; {remedy}")
