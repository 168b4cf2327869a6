"""Lengths known only at run time: settled while a model is rewritten, open again in what is written.

With every axis at a size that no other has, passes see a model of known shapes. What they make is then made true for
all lengths: a size that follows from them becomes -1, or the end of its axis. Proofs run at several choices.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np

from edge_opt.attention.refusal import Refusal, RefusedError
from edge_opt.ir import Constants, DType, Model, Operator, Shape, Tensor
from edge_opt.passes.rewrite import Rewrite
from edge_opt.shapes import ShapeError, infer_operator
from edge_opt.shapes.call import Array, constants_of
from edge_opt.shapes.lengths import Lengths, choose_lengths, open_sizes

_OPEN = -1
_SIZES = {"RESHAPE": 1, "SLICE": 2, "STRIDED_SLICE": 2}
"""Which input says how far the result of an operator reaches; others that hold a length fit no other length."""


@contextmanager
def settled(model: Model) -> Iterator[OpenLengths | None]:
    """Within the block every tensor has the shape of the first choice; None where no length is open, or none fits."""
    lengths = choose_lengths(model)
    if not lengths:
        yield None
        return
    known = OpenLengths(model, lengths)
    known.settle()
    try:
        yield known
    finally:
        known.restore()


class OpenLengths:
    """The lengths of one model, from `settle` to `restore`."""

    def __init__(self, model: Model, lengths: tuple[Lengths, ...]) -> None:
        self.lengths = lengths
        self._model = model
        self._open = open_sizes(lengths)
        self._recorded: dict[Tensor, tuple[Shape, Shape | None]] = {}

    def settle(self) -> None:
        """Give every tensor the shape of the first choice."""
        for graph in self._model.subgraphs:
            for tensor in graph.tensors:
                shape = self.lengths[0].shapes.get(tensor)
                self._recorded[tensor] = tensor.shape, tensor.shape_signature
                if shape is not None and not tensor.is_constant:
                    tensor.shape, tensor.shape_signature = shape, None

    def restore(self) -> None:
        """Give old tensors what the file records, and new ones -1 for what differs between the choices."""
        first, second = self.lengths[0].shapes, self.lengths[1].shapes
        for graph in self._model.subgraphs:
            for tensor in graph.tensors:
                if tensor in self._recorded:
                    tensor.shape, tensor.shape_signature = self._recorded[tensor]
                elif first.get(tensor) != second.get(tensor):
                    signature = tuple(
                        _OPEN if a != b else a for a, b in zip(first[tensor], second[tensor], strict=True)
                    )
                    tensor.shape = tuple(1 if size == _OPEN else size for size in signature)
                    tensor.shape_signature = signature

    def stated(self, size: int) -> int:
        """A size of the first choice as a file states it: -1 where another choice gives another."""
        return _OPEN if self._is_open(size) else size

    def opened(self, rewrite: Rewrite, constants: Constants) -> Rewrite | Refusal:
        """The rewrite for all lengths, to be proved at several."""
        kept = set(rewrite.old)
        try:
            new = tuple(op if op in kept else self._operator(op, constants) for op in rewrite.new)
            for lengths in self.lengths:
                for operator in new:
                    _derive(operator, lengths, self.lengths[0])
        except RefusedError as refused:
            return refused.refusal
        return replace(rewrite, new=new, lengths=self.lengths)

    def _is_open(self, size: int) -> bool:
        return size > 1 and any(size % own == 0 for own in self._open)

    def _operator(self, operator: Operator, constants: Constants) -> Operator:
        """The operator with its sizes open, where they are a constant that it reads."""
        index = _SIZES.get(operator.name)
        tensor = None if index is None else operator.inputs[index]
        if index is None or tensor is None or not tensor.has_numbers:
            return operator
        sizes = tensor.array().copy()
        places = [i for i, size in enumerate(sizes.ravel()) if self._is_open(int(size))]
        if not places:
            return operator
        if operator.name == "RESHAPE" and len(places) > 1:
            return self._sizeless(operator, constants)
        options = operator.options and operator.options.copy()
        if operator.name == "STRIDED_SLICE" and options is not None:
            options.set("end_mask", int(options.get("end_mask")) | sum(1 << i for i in places))
        else:
            sizes[places] = _OPEN
        if operator.name == "RESHAPE" and options is not None and options.has("new_shape"):
            options.set("new_shape", sizes.astype(np.int32))
        inputs = list(operator.inputs)
        inputs[index] = constants.make(tensor.name, sizes, tensor.dtype)
        return Operator(operator.code, inputs, operator.outputs, options, operator.table)

    def _sizeless(self, operator: Operator, constants: Constants) -> Operator:
        """A RESHAPE that only moves or drops axes of size 1, or adds one, as an operator that needs no sizes."""
        source, result = operator.input(0), operator.output
        if len(source.shape) == len(result.shape) and _others(source.shape) == _others(result.shape):
            ones, others = (iter(axes) for axes in _ones_and_others(source.shape))
            order = np.array([next(ones if size == 1 else others) for size in result.shape], np.int32)
            named = constants.make(f"{result.name}/order", order, DType.INT32)
            return self._model.new_operator("TRANSPOSE", [source, named], [result])
        dropped, added = _dropped(source.shape, result.shape), _dropped(result.shape, source.shape)
        if dropped is not None:
            axes = np.array(dropped, np.int32)
            return self._model.new_operator("SQUEEZE", [source], [result], squeeze_dims=axes)
        if added is not None and len(added) == 1:
            axis = constants.make(f"{result.name}/axis", np.array(added, np.int32), DType.INT32)
            return self._model.new_operator("EXPAND_DIMS", [source, axis], [result])
        raise RefusedError(Refusal("a RESHAPE to several lengths that are known only at run time", operator))


def _others(shape: Shape) -> list[int]:
    return [size for size in shape if size != 1]


def _ones_and_others(shape: Shape) -> tuple[list[int], list[int]]:
    axes = range(len(shape))
    return [axis for axis in axes if shape[axis] == 1], [axis for axis in axes if shape[axis] != 1]


def _dropped(source: Shape, result: Shape) -> list[int] | None:
    """The axes of size 1 without which `source` is `result`: `[1,B,1,T]` without axis 0 is `[B,1,T]`."""
    dropped, kept = [], 0
    for axis, size in enumerate(source):
        if kept < len(result) and size == result[kept]:
            kept += 1
        elif size == 1:
            dropped.append(axis)
        else:
            return None
    return dropped if kept == len(result) else None


def _derive(operator: Operator, lengths: Lengths, first: Lengths) -> None:
    """Take up the shapes of an operator's results with one choice of lengths."""
    shapes = [None if t is None else lengths.shapes.get(t, t.shape) for t in operator.inputs]
    read = constants_of(operator)

    def value(index: int) -> Array | None:
        tensor = operator.inputs[index]
        return lengths.values[tensor] if tensor in lengths.values else read(index)

    try:
        results = infer_operator(operator, shapes, value)
    except ShapeError as error:
        raise RefusedError(Refusal(f"with other lengths: {error}", operator)) from error
    for tensor, found in zip(operator.outputs, results, strict=True):
        known = found is not None and _OPEN not in found
        shape = found if found is not None and known else _by_sizes(operator, tensor, lengths, first)
        if lengths.shapes.setdefault(tensor, shape) != shape:
            known_as = str(lengths.shapes[tensor])
            text = "another shape with other lengths"
            raise RefusedError(Refusal(text, operator, tensor, known_as, str(shape)))


def _by_sizes(operator: Operator, tensor: Tensor, lengths: Lengths, first: Lengths) -> Shape:
    """Of a composite's result: what its operands' sizes of the first choice have become."""
    sizes = {
        size: other
        for source in operator.inputs
        if source is not None and source in first.shapes
        for size, other in zip(first.shapes[source], lengths.shapes[source], strict=True)
    }
    return tuple(sizes.get(size, size) for size in tensor.shape)
