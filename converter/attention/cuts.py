"""The operators that cut a tensor into the heads' pieces."""

from dataclasses import dataclass

import numpy as np

from edge_opt.attention import factors as fx
from edge_opt.attention.assembly import Assembly
from edge_opt.attention.factors import Factored
from edge_opt.attention.form import Form
from edge_opt.attention.movement_rules import keeps_order
from edge_opt.attention.plan import Cut, Step, leading
from edge_opt.attention.rule import Labelled, name_of_piece
from edge_opt.ir import DType, Quantization, Tensor
from edge_opt.output.words import name_below
from edge_opt.schema.table import Table

# Types that the runtime's kernels take (LiteRT, kernels/split.cc and unpack.cc); others are cut by SLICE, or by SPLIT.
SPLIT_TYPES = frozenset({DType.FLOAT32, DType.INT8, DType.UINT8, DType.INT16, DType.INT32, DType.INT64})
_NOT_UNPACKED = frozenset({DType.INT64, DType.BFLOAT16, DType.INT4})


@dataclass(eq=False)
class Cutter:
    """Makes cuts, each once."""

    form: Form
    assembly: Assembly
    pieces: int
    tiles: int

    def __post_init__(self) -> None:
        self._sources: dict[Cut, Tensor] = {}
        self._pieces: dict[tuple[Tensor, Factored, tuple[int, ...]], Tensor] = {}
        self._parts: dict[tuple[Tensor, int, int], tuple[Tensor, ...]] = {}

    def source(self, cut: Cut) -> Tensor:
        """The tensor that is cut: rearranged as the cut says, those moves left out that are a RESHAPE at most."""
        if cut not in self._sources:
            source = cut.source
            for move in cut.moves:
                if not keeps_order(Labelled(move.operator, fx.plain(move.tensor.shape))):
                    inputs = [self._unscaled(source, move.input(0)), *move.operator.inputs[1:]]
                    name = name_below(move.tensor.name, "unscaled")
                    moved = self.assembly.tensor(name, move.tensor.shape, source)
                    source = self.assembly.copy(move.operator, inputs, moved)
            if cut.moves:
                source = self._unscaled(source, cut.moves[-1].tensor)
            # A scaling may raise the rank: `[N,T,H] * [1,1,1,1]`.
            shape, name = fx.sizes(cut.factored), name_below(source.name, "ranked")
            self._sources[cut] = self.assembly.reshaped(source, shape, name)
        return self._sources[cut]

    def _unscaled(self, source: Tensor, like: Tensor) -> Tensor:
        return self.assembly.reshaped(source, like.shape, name_below(like.name, "unscaled"))

    def piece(self, tensor: Tensor, factored: Factored, head: int) -> Tensor:
        """One head's part of a tensor, cut off."""
        if fx.is_shared(factored):
            return tensor
        key = (tensor, factored, fx.piece_key(factored, head))
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
        key = (tensor, axis, count)
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
