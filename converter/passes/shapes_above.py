"""What the graph asks of an attention block's shapes, asked above the block: else the block would wait for itself.

An exporter that leaves lengths open makes masks, and targets of RESHAPEs, from the shape of queries, logits and
probabilities. SHAPE reads such a tensor whole, but its result follows from lengths that tensors further up have.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import combinations
from typing import ClassVar

import numpy as np

from edge_opt.attention.assembly import Assembly
from edge_opt.attention.labelling import DEEPEST
from edge_opt.attention.rules import MOVEMENT, is_product, rule_of
from edge_opt.ir import Operator, Tensor, topological
from edge_opt.passes.contract import Context, Demand, Pass, Site
from edge_opt.passes.open_lengths import OpenLengths
from edge_opt.passes.rewrite import Rewrite


class ShapesAbove(Pass):
    """SHAPE of a tensor becomes the sizes of tensors above it, joined: `[B,N,T,S]` = B of q, N, T of q, S of k.

    Which axis above has a size is known from several choices of lengths: it has it, or a part of it, in all of them.
    Of keys that a cache and new ones make, two axes have it in sum.
    """

    name: ClassVar[str] = "shapes_above"
    summary: ClassVar[str] = "asks for lengths known only at run time above attention, not inside it"
    demand: ClassVar[Demand] = Demand("bitwise")

    def sites(self, context: Context) -> Iterable[Site]:
        """One for each SHAPE of what leads to or from a product of activations."""
        known = context.open_lengths
        for operator in list(context.subgraph.operators) if known else ():
            if operator.name != "SHAPE" or known is None:
                continue
            between, edges = _above(operator.input(0))
            if between and (any(map(is_product, between)) or _leads_to_product(operator.input(0))):
                made = _Sizes(context, known, operator, edges).made()
                if made:
                    old = topological([*between, operator])
                    new = (*old[:-1], *made)
                    rewrite = Rewrite(context.subgraph, tuple(old), new, operator, calls=context.model)
                    yield Site(operator, partial(_same, rewrite))


def _same(rewrite: Rewrite) -> Rewrite:
    return rewrite


def _above(tensor: Tensor) -> tuple[list[Operator], list[Tensor]]:
    """The operators between a tensor and those above it that attention does not reach, and these tensors."""
    between: dict[Operator, None] = {}
    edges: dict[Tensor, None] = {}
    pending = [tensor]
    while pending and len(between) < DEEPEST:
        current = pending.pop()
        operator = current.producer
        if operator is None or rule_of(operator) is None:
            edges.setdefault(current)
        elif operator not in between:
            between[operator] = None
            read = operator.inputs[:1] if operator.name in MOVEMENT else operator.inputs
            pending += [source for source in read if source is not None and not source.is_constant]
    return list(between), list(edges)


def _leads_to_product(tensor: Tensor) -> bool:
    """Depth first: a tensor that all layers read leads to the product of one long before all are looked at."""
    pending, seen = [tensor], {id(tensor)}
    while pending and len(seen) < DEEPEST:
        for operator in pending.pop().consumers:
            if is_product(operator):
                return True
            if rule_of(operator) is not None:
                pending += [result for result in operator.outputs if id(result) not in seen]
                seen.update(id(result) for result in operator.outputs)
    return False


class _Sizes:
    """Makes the result of one SHAPE of the sizes of other tensors."""

    def __init__(
        self, context: Context, known: OpenLengths, operator: Operator, edges: Sequence[Tensor]
    ) -> None:
        self._assembly = Assembly(context.model, context.constants)
        self._constants = context.constants
        self._shapes = [lengths.shapes for lengths in known.lengths]
        self._operator = operator
        self._edges = edges

    def made(self) -> list[Operator]:
        """The operators that define it; none where a size is that of no tensor above."""
        shape, result = self._operator.input(0), self._operator.output
        parts: list[Tensor] = []
        for axis in range(len(shape.shape)):
            part = self._part([shapes[shape][axis] for shapes in self._shapes])
            if part is None:
                return []
            parts.append(part)
        self._assembly.emit("CONCATENATION", parts, result, axis=0)
        return self._assembly.finished(result)

    def _part(self, sizes: list[int]) -> Tensor | None:
        """One size as a vector of length 1; `sizes`: what it is in each choice of lengths."""
        if len(set(sizes)) == 1:
            return self._number(sizes[0])
        lengths = list(self._lengths())
        for tensor, axis, columns in lengths:
            times = {divmod(size, part) for size, part in zip(sizes, columns, strict=True)}
            if len(times) == 1 and (found := times.pop())[1] == 0:
                return self._axis(tensor, axis, found[0])
        for one, other in combinations(lengths, 2):
            if [a + b for a, b in zip(one[2], other[2], strict=True)] == sizes:
                return self._sum(self._axis(*one[:2], 1), self._axis(*other[:2], 1))
        return None

    def _lengths(self) -> Iterator[tuple[Tensor, int, tuple[int, ...]]]:
        """Axes of the tensors above whose size differs between the choices, and what it is in each."""
        for tensor in self._edges:
            own = [shapes.get(tensor, tensor.shape) for shapes in self._shapes]
            for axis, columns in enumerate(zip(*own, strict=True)):
                if len(set(columns)) > 1:
                    yield tensor, axis, columns

    def _sum(self, one: Tensor, other: Tensor) -> Tensor:
        like = self._operator.output
        return self._assembly.emit("ADD", [one, other], self._assembly.tensor(f"{like.name}/sum", (1,), like))

    def _number(self, size: int) -> Tensor:
        like = self._operator.output
        return self._constants.make(f"{like.name}/size", np.array([size], like.dtype.numpy), like.dtype)

    def _axis(self, tensor: Tensor, axis: int, times: int) -> Tensor:
        like, make = self._operator.output, self._assembly
        whole = make.tensor(f"{like.name}/of", (len(tensor.shape),), like)
        make.emit("SHAPE", [tensor], whole, out_type=int(like.dtype))
        part = make.tensor(f"{like.name}/axis_{axis}", (1,), like)
        place = [
            make.integers(f"{like.name}/{word}", [value]) for word, value in (("begin", axis), ("count", 1))
        ]
        make.emit("SLICE", [whole, *place], part)
        if times == 1:
            return part
        result = make.tensor(f"{like.name}/axis_{axis}_times", (1,), like)
        return make.emit("MUL", [part, self._number(times)], result)
