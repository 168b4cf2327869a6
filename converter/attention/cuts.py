"""Where a tensor that comes into a block is cut into the heads' pieces, and the operators that cut it."""

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from edge_opt.attention import factors as fx
from edge_opt.attention.assembly import Assembly
from edge_opt.attention.factors import Axis, Factored
from edge_opt.attention.form import Form
from edge_opt.attention.labelling import OperandFactors
from edge_opt.attention.movement_rules import keeps_order
from edge_opt.attention.rule import Labelled, name_of_piece
from edge_opt.attention.rules import MOVEMENT
from edge_opt.ir import DType, Operator, Quantization, Subgraph, Tensor
from edge_opt.ir.region import read_outside
from edge_opt.output.words import name_below
from edge_opt.schema.table import Table

# Types that the runtime's kernels take (LiteRT, kernels/split.cc and unpack.cc); others are cut by SLICE, or by SPLIT.
SPLIT_TYPES = frozenset({DType.FLOAT32, DType.INT8, DType.UINT8, DType.INT16, DType.INT32, DType.INT64})
_NOT_UNPACKED = frozenset({DType.INT64, DType.BFLOAT16, DType.INT4})
_SCALINGS = frozenset({"MUL", "DIV"})


@dataclass(frozen=True, slots=True)
class Step:
    """One operator of the chain between a cut and the tensor that the block reads; `read` are its operand's factors."""

    result: Labelled
    operand: int
    read: Factored

    @property
    def scales(self) -> bool:
        """True for a multiplication by a number, False for a rearrangement."""
        return self.result.operator.name in _SCALINGS


@dataclass(frozen=True, slots=True)
class Cut:
    """Where a labelled tensor is cut: `source` with factors `factored`, then `steps` per head.

    `above` are the old operators that the new graph has above the cut in another shape.
    """

    source: Tensor
    factored: Factored
    steps: tuple[Step, ...] = ()
    above: tuple[Operator, ...] = ()


@dataclass(eq=False)
class Cutter:
    """Chooses cuts and makes them, each once."""

    subgraph: Subgraph
    operands: OperandFactors
    form: Form
    assembly: Assembly
    pieces: int
    tiles: int

    def __post_init__(self) -> None:
        self._pieces: dict[tuple[int, Factored, tuple[int, ...]], Tensor] = {}
        self._parts: dict[tuple[int, int, int], tuple[Tensor, ...]] = {}

    # Where

    def choose(self, tensor: Tensor, factored: Factored, readers: Container[Operator]) -> Cut:
        """Follow the rearrangements and scalings above the tensor, and choose where on them to cut.

        `readers` are the operators that the rewrite replaces: what anybody else reads stays as it is.
        """
        here = Cut(tensor, factored)
        if tensor.is_constant or fx.piece_count(factored) == 1:
            return here
        chain = list(self._chain(tensor, factored, readers))
        if self.form.position == "near":
            scalings = [i for i, step in enumerate(chain) if step.scales]
            chain = chain[: scalings[-1] + 1] if scalings and self.form.sink else []
        chain.reverse()
        return (self._cut_on(chain) if chain else None) or here

    def _chain(self, tensor: Tensor, factored: Factored, readers: Container[Operator]) -> Iterator[Step]:
        """Upwards, while nobody else reads what is between."""
        for operator, operand, read in self.operands.chain(tensor, factored):
            followed = operator.name in MOVEMENT or _scales(operator, operand)
            if not followed or read_outside(self.subgraph, tensor, readers):
                return
            yield Step(Labelled(operator, factored), operand, read)
            tensor, factored, readers = operator.input(operand), read, {operator}

    def _cut_on(self, chain: list[Step]) -> Cut | None:
        """Cut on a chain given from its top; rearrangements above the cut are made once, on the unscaled tensor."""
        source = chain[0].result.input(chain[0].operand)
        places = [chain[0].read, *(step.result.factored for step in chain)]
        usable = [index for index, labelled in enumerate(places) if self._cuttable(labelled)]
        if not usable:
            return None
        index = usable[0] if self.form.position == "far" else usable[-1]
        above = chain[:index]
        # What stands above the first scaling stays as it is, outside the region.
        while above and not above[0].scales:
            source = above.pop(0).result.tensor
        source = self._moved(source, [step.result for step in above if not step.scales])
        # A scaling may raise the rank: `[N,T,H] * [1,1,1,1]`.
        source = self.assembly.reshaped(source, fx.sizes(places[index]), name_below(source.name, "ranked"))
        sunk = [step for step in above if step.scales]
        return Cut(
            source, places[index], (*sunk, *chain[index:]), tuple(step.result.operator for step in above)
        )

    def _cuttable(self, factored: Factored) -> bool:
        axes = fx.labelled_axes(factored)
        if len(axes) != 1:
            return False
        axis = factored[axes[0]]
        if self.form.cut == "unpack":
            return fx.only_labels(axis)
        return fx.take_outer(axis, fx.piece_count(factored)) is not None

    def _moved(self, source: Tensor, moves: Sequence[Labelled]) -> Tensor:
        """The rearrangements of another source; those that keep the row-major order become one RESHAPE."""
        for move in moves:
            operator, result = move.operator, move.tensor
            if keeps_order(Labelled(operator, fx.plain(result.shape))):
                continue
            inputs = [self._unscaled(source, operator.input(0)), *operator.inputs[1:]]
            moved = self.assembly.tensor(name_below(result.name, "unscaled"), result.shape, source)
            source = self.assembly.copy(operator, inputs, moved)
        return self._unscaled(source, moves[-1].tensor) if moves else source

    def _unscaled(self, source: Tensor, like: Tensor) -> Tensor:
        return self.assembly.reshaped(source, like.shape, name_below(like.name, "unscaled"))

    # How

    def piece(self, tensor: Tensor, factored: Factored, head: int) -> Tensor:
        """One head's part of a tensor, cut off."""
        if fx.is_shared(factored):
            return tensor
        key = (id(tensor), factored, fx.piece_key(factored, head))
        if key not in self._pieces:
            self._pieces[key] = self._make(tensor, factored, head)
        return self._pieces[key]

    def scaled(self, step: Step, piece: Tensor, head: int) -> Tensor:
        """A piece multiplied by a number, whatever rearrangements the cut moved in front of that."""
        of = step.result
        read = list(of.operator.inputs)
        read[step.operand] = piece
        for index, tensor in enumerate(read):
            if index != step.operand and tensor is not None and len(tensor.shape) > len(piece.shape):
                number = tensor.array().reshape(())
                read[index] = self.assembly.constant(tensor, number, tensor.quantization)
        name = name_below(of.tensor.name, name_of_piece(of, head, self.pieces, self.tiles))
        return self.assembly.again(of.operator, read, [name], [piece.shape], of.operator.options)[0]

    def _make(self, tensor: Tensor, factored: Factored, head: int) -> Tensor:
        target = fx.piece_shape(factored, keep=self.form.keep_axes)
        axes = fx.labelled_axes(factored)
        if not axes and target == tensor.shape:
            return tensor
        if tensor.has_numbers:
            return self._constant_piece(tensor, factored, head)
        if not axes:
            return self.assembly.reshaped(tensor, target, name_below(tensor.name, "squeezed"))
        axis = axes[0]
        lead = leading(factored[axis])
        if not lead:
            piece = self.piece(*self._exposed(tensor, factored, axis), head)
            return self.assembly.reshaped(piece, target, name_below(tensor.name, "piece"))
        count = fx.sizes((lead,))[0]
        rest = factored[axis][len(lead) :]
        drops = self.form.cut == "unpack" and not rest and tensor.dtype not in _NOT_UNPACKED
        part = self._split(tensor, axis, count, drops=drops)[fx.mixed_index(lead, head)]
        remaining = () if drops else (rest,)
        piece = self.piece(part, (*factored[:axis], *remaining, *factored[axis + 1 :]), head)
        return self.assembly.reshaped(piece, target, name_below(piece.name, "piece"))

    def _exposed(self, tensor: Tensor, factored: Factored, axis: int) -> tuple[Tensor, Factored]:
        """The tensor with an axis `(rows)(heads)` as two axes, so that the heads can be cut off."""
        inner = next(i for i, factor in enumerate(factored[axis]) if factor.stride)
        axes = (*factored[:axis], factored[axis][:inner], factored[axis][inner:], *factored[axis + 1 :])
        return self.assembly.reshaped(tensor, fx.sizes(axes), name_below(tensor.name, "exposed")), axes

    def _split(self, tensor: Tensor, axis: int, count: int, *, drops: bool) -> tuple[Tensor, ...]:
        """The tensor cut into `count` parts along an axis, which they have no longer where it `drops`."""
        key = (id(tensor), axis, count)
        if key not in self._parts:
            part = "piece" if self.tiles > 1 else "head" if count == self.pieces else "group"
            size = tensor.shape[axis] // count
            between = () if drops else (size,)
            shape = (*tensor.shape[:axis], *between, *tensor.shape[axis + 1 :])
            parts = [
                self.assembly.tensor(name_below(tensor.name, f"{part}_{i}"), shape, tensor)
                for i in range(count)
            ]
            if drops:
                self.assembly.emit("UNPACK", [tensor], *parts, num=count, axis=axis)
            elif tensor.dtype in SPLIT_TYPES:
                where = self.assembly.integers("split/axis", axis)
                self.assembly.emit("SPLIT", [where, tensor], *parts, num_splits=count)
            else:
                for index, made in enumerate(parts):
                    self._slice(tensor, axis, index * size, made)
            self._parts[key] = tuple(parts)
        return self._parts[key]

    def _slice(self, tensor: Tensor, axis: int, begin: int, output: Tensor) -> None:
        begins = [begin if i == axis else 0 for i in range(len(tensor.shape))]
        steering = [
            self.assembly.integers(name_below(output.name, "begin"), begins),
            self.assembly.integers(name_below(output.name, "size"), output.shape),
        ]
        self.assembly.emit("SLICE", [tensor, *steering], output)

    def _constant_piece(self, tensor: Tensor, factored: Factored, head: int) -> Tensor:
        keep = self.form.keep_axes
        values = _head_of(tensor.array(), factored, head).reshape(fx.piece_shape(factored, keep=keep))
        quantization = tensor.quantization
        if quantization is not None and quantization.is_per_axis:
            axis = quantization.dimension
            kept = fx.piece_axes(factored, keep=keep)
            fields = dict(quantization.table.fields)
            for name in ("scale", "zero_point", "min", "max"):
                if len(fields.get(name, ())) > 1:
                    fields[name] = _head_of(fields[name], (factored[axis],), head)
            fields["quantized_dimension"] = kept.index(axis) if axis in kept else 0
            quantization = Quantization(Table(quantization.table.spec, fields))
        return self.assembly.constant(tensor, values, quantization)


def _head_of(values: np.ndarray, factored: Factored, head: int) -> np.ndarray:
    """One head's part of an array, flat."""
    expanded = values.reshape([f.size for axis in factored for f in axis])
    index = tuple((f.digit(head) if f.stride else slice(None)) for axis in factored for f in axis)
    return np.ascontiguousarray(expanded[index]).ravel()


def levels(factored: Factored) -> int:
    """How many operators after one another it takes to cut the heads apart."""
    return sum(1 if leading(factored[axis]) else 2 for axis in fx.labelled_axes(factored))


def leading(axis: Axis) -> Axis:
    """The labelled factors that an axis begins with."""
    count = next((i for i, factor in enumerate(axis) if not factor.stride), len(axis))
    return axis[:count]


def _scales(operator: Operator, operand: int) -> bool:
    """True for a multiplication of that operand by a number."""
    others = [tensor for index, tensor in enumerate(operator.inputs) if index != operand]
    scalar = all(t is not None and t.has_numbers and t.elements == 1 for t in others)
    return operator.name in _SCALINGS and scalar and not operator.option("fused_activation_function")
