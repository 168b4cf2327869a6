"""The output projection of heads side by side -> one projection per head, added up; copies the weights in slices."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from edge_opt.attention.assembly import Assembly
from edge_opt.attention.block import SingleHead, find_blocks
from edge_opt.attention.refusal import Refusal
from edge_opt.ir import DType
from edge_opt.ir.region import still_needed
from edge_opt.passes.contract import Context, Demand, Pass, Site, SkippedSite
from edge_opt.passes.rewrite import Rewrite
from edge_opt.schema.table import Table, new_table

if TYPE_CHECKING:
    from collections.abc import Iterable

    from edge_opt.ir import Operator, Tensor

_ACTIVATION = "fused_activation_function"


@dataclass(frozen=True, slots=True)
class _Joined:
    """Heads side by side in the last axis of what a projection reads; `between` is what rearranges them on the way."""

    heads: tuple[Tensor, ...]
    between: tuple[Operator, ...]


class ProjectHeads(Pass):
    """`W [x_1 .. x_N] + b = (W_1 x_1 + b) + W_2 x_2 + .. + W_N x_N`, W_i the columns of W that belong to head i.

    A sum in another order, so not bit for bit but to 1e-6 of the output's range, from -m to m where m is its largest
    value; float only, since every integer sum would be rounded once more. Off unless the target asks for it
    (`projection_per_head`).
    """

    name: ClassVar[str] = "project_heads"
    summary: ClassVar[str] = "projects every head by itself, instead of all of them joined"
    demand: ClassVar[Demand] = Demand("relative", 2e-6)

    def sites(self, context: Context) -> Iterable[Site | SkippedSite]:
        """One for each FULLY_CONNECTED that reads nothing but heads side by side."""
        if not context.target.projection_per_head:
            return
        found = [match for match in find_blocks(context.subgraph) if isinstance(match, SingleHead)]
        results = {id(match.output) for match in found}
        for operator in context.subgraph.operators:
            joined = _joined(operator, results)
            if joined is None:
                continue
            refusal = _refusal(operator, joined)
            if refusal is not None:
                yield SkippedSite(operator, str(refusal), settled=True)
            else:
                yield Site(operator, partial(_build, context, operator, joined))


def _joined(projection: Operator, results: set[int]) -> _Joined | None:
    if projection.name != "FULLY_CONNECTED":
        return None
    data = projection.input(0)
    between: list[Operator] = []
    while data.producer is not None and data.producer.name == "RESHAPE":
        between.append(data.producer)
        source = data.producer.input(0)
        if not source.shape or source.shape[-1] != data.shape[-1]:
            return None
        data = source
    join = data.producer
    if join is None or join.name != "CONCATENATION" or join.option("axis") not in (-1, len(data.shape) - 1):
        return None
    heads = tuple(tensor for tensor in join.inputs if tensor is not None)
    if len(heads) < 2 or not all(id(_result(tensor)) in results for tensor in heads):
        return None
    return _Joined(heads, (join, *reversed(between)))


def _result(tensor: Tensor) -> Tensor:
    """The value product's result that a head is a RESHAPE of."""
    while tensor.producer is not None and tensor.producer.name == "RESHAPE":
        tensor = tensor.producer.input(0)
    return tensor


def _refusal(projection: Operator, joined: _Joined) -> Refusal | None:
    weights = projection.input(1)
    if projection.outputs[0].dtype is not DType.FLOAT32 or weights.dtype is not DType.FLOAT32:
        return Refusal("sums of integers would be rounded once more for each head", projection, weights)
    if weights.is_sparse:
        return Refusal(
            "the weights are stored sparsely, their columns cannot be cut out", projection, weights
        )
    if not weights.is_constant:
        return Refusal("the weights are no constant, their columns cannot be cut out", projection, weights)
    if joined.between[0].option(_ACTIVATION):
        return Refusal("the heads go through an activation together", joined.between[0])
    return None


def _build(context: Context, projection: Operator, joined: _Joined) -> Rewrite:
    assembly = Assembly(context.model, context.constants)
    output, weights = projection.outputs[0], projection.input(1)
    lead, columns = projection.input(0).shape[:-1], weights.array()
    ends = np.cumsum([head.shape[-1] for head in joined.heads])
    total: Tensor | None = None
    for number, (head, end) in enumerate(zip(joined.heads, ends, strict=True)):
        width = head.shape[-1]
        piece = assembly.constant(weights, np.ascontiguousarray(columns[:, end - width : end]), None)
        operand = assembly.reshaped(head, (*lead, width), f"{head.name}/rows")
        bias = projection.inputs[2:] if number == 0 else (None,)
        read = [operand, piece, *bias][: len(projection.inputs)]
        name = f"{output.name}/head_{number}"
        part = assembly.again(projection, read, [name], [output.shape], _plain(projection))[0]
        last = number == len(ends) - 1
        total = part if total is None else _added(assembly, projection, total, part, last=last)
    assert total is output
    old = (*joined.between, projection)
    # The heads side by side may be read elsewhere, too.
    staying = still_needed(context.subgraph, old, projection)
    new = (*(operator for operator in old if operator in staying), *assembly.finished(output))
    return Rewrite(context.subgraph, old, new, projection)


def _added(assembly: Assembly, projection: Operator, one: Tensor, other: Tensor, *, last: bool) -> Tensor:
    """The sum so far; the last one is the projection's own result, with its activation."""
    output = projection.outputs[0]
    result = output if last else assembly.tensor(f"{output.name}/sum", output.shape, output)
    activation = int(projection.option(_ACTIVATION)) if last else 0
    assembly.emit("ADD", [one, other], [result], new_table("AddOptions", **{_ACTIVATION: activation}))
    return result


def _plain(projection: Operator) -> Table | None:
    """The projection's options without its activation, which belongs to the sum."""
    table = projection.options
    if table is None or not projection.option(_ACTIVATION):
        return table
    plain = table.copy()
    plain.set(_ACTIVATION, 0)
    return plain
