"""Puts the heads' results side by side again: PACK or CONCATENATION, and one RESHAPE if need be."""

import math
from dataclasses import dataclass

from edge_opt.attention import factors as fx
from edge_opt.attention.assembly import Assembly
from edge_opt.attention.cuts import SPLIT_TYPES
from edge_opt.attention.factors import Factor, Factored
from edge_opt.attention.form import Form
from edge_opt.ir import Shape, Tensor
from edge_opt.output.words import name_below

Run = tuple[int, list["Factor"]]
"""Elements of a head in front of some labelled factors that stand side by side, and these factors."""


def join_heads(
    assembly: Assembly, form: Form, heads: list[Tensor], output: Tensor, factored: Factored
) -> None:
    """Define `output`, which has the heads where `factored` says, from the pieces of all heads.

    `[.., (N)(H)]` is one CONCATENATION along H; where labels stand apart, as in `[B, (K), H, (G)(T)]`, it is one for
    each: first along T for every k, then along K.
    """
    joiner = _Joiner(assembly, form, output)
    tensors = dict(enumerate(heads))
    runs = labelled_runs(factored)
    for position, run in reversed(list(enumerate(runs))):
        tensors = joiner.join(tensors, run, last=position == 0)


def labelled_runs(factored: Factored) -> list[Run]:
    """The labelled factors in row-major order, those side by side together."""
    runs: list[Run] = []
    front, beside = 1, False
    for factor in fx.merge_neighbours(factor for axis in factored for factor in axis):
        if not factor.stride:
            front *= factor.size
        elif beside:
            runs[-1][1].append(factor)
        else:
            runs.append((front, [factor]))
        beside = factor.stride > 0
    return runs


@dataclass(eq=False)
class _Joiner:
    assembly: Assembly
    form: Form
    output: Tensor

    def join(self, tensors: dict[int, Tensor], run: Run, *, last: bool) -> dict[int, Tensor]:
        """Tensors by head, with those put together that differ in the run's digits of the head only."""
        front, digits = run
        groups: dict[int, dict[int, Tensor]] = {}
        for head, tensor in tensors.items():
            others = head - sum(factor.digit(head) * factor.stride for factor in digits)
            groups.setdefault(others, {})[fx.mixed_index(digits, head)] = tensor
        return {
            head: self._side_by_side([parts[i] for i in range(len(parts))], front, last=last)
            for head, parts in groups.items()
        }

    def _side_by_side(self, parts: list[Tensor], front: int, *, last: bool) -> Tensor:
        parts = self._cuttable(parts, front)
        shape, count = parts[0].shape, len(parts)
        places = _boundaries(shape, front)
        if last and self.form.cut == "unpack" and self.output.dtype in SPLIT_TYPES:
            for axis in places:
                if self.output.shape == (*shape[:axis], count, *shape[axis:]):
                    self.assembly.emit("PACK", parts, self.output, values_count=count, axis=axis)
                    return self.output
        joined = {axis: _times(shape, axis, count) for axis in places if axis < len(shape)}
        exact = next((axis for axis, sizes in joined.items() if sizes == self.output.shape), None)
        axis = max(joined) if exact is None else exact
        if last and exact is not None:
            self.assembly.emit("CONCATENATION", parts, self.output, axis=axis)
            return self.output
        made = self.assembly.tensor(name_below(self.output.name, "heads"), joined[axis], self.output)
        self.assembly.emit("CONCATENATION", parts, made, axis=axis)
        return self.assembly.reshape_to(made, self.output) if last else made

    def _cuttable(self, parts: list[Tensor], front: int) -> list[Tensor]:
        """The parts in a shape that has an axis behind `front` elements.

        A reshape of every part is left out where it can be: the joined ones are reshaped as one.
        """
        roots = [self.assembly.source(part) for part in parts]
        for candidates in (roots, parts):
            shape = candidates[0].shape
            if any(axis < len(shape) for axis in _boundaries(shape, front)):
                return candidates
        flat = (front, parts[0].elements // front)
        return [self.assembly.reshaped(part, flat, name_below(part.name, "flat")) for part in parts]


def _boundaries(shape: Shape, front: int) -> list[int]:
    """Axes in front of which a shape has `front` elements, i.e. where something can be put side by side."""
    return [axis for axis in range(len(shape) + 1) if math.prod(shape[:axis]) == front]


def _times(shape: Shape, axis: int, count: int) -> Shape:
    return (*shape[:axis], shape[axis] * count, *shape[axis + 1 :])
