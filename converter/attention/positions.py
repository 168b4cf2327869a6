"""Rotary embeddings by dataflow: the operators that make cosines and sines of positions, and the same in float.

Nothing goes by names. The way up from a COS or SIN ends at one integer input of the graph. The index of a position is
followed through every operator, which shows that each entry of the result depends on one position alone.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_opt.ir import DType, Operator, Subgraph, Tensor
from edge_opt.ir.graph import Buffer
from edge_opt.ir.refusal import RefusedError
from edge_opt.ir.walk import backward_slice
from edge_opt.schema.data import Data

_Array = NDArray[Any]
_Move = Callable[[Operator, list[_Array]], _Array]

_ANGLES = frozenset({"COS", "SIN"})
_RETYPED = frozenset({"QUANTIZE", "DEQUANTIZE"})
_CONSTANT, _MIXED = -1, -2
_BLOCK = 1 << 12
_HALF_A_STEP = 0.501  # quantizers divide in float32


class FloatForm:
    """`operators` on float tensors that read `position` and make `result`: no QUANTIZE, constants in real numbers.

    `angles` has the integer tensors of the original in front of the COS or SIN, each with the float one in its place.
    `exact` has constants to take instead, see `exact_constants`.

    Raises:
        RefusedError: an operator is not understood.
    """

    def __init__(
        self, operators: Sequence[Operator], position: Tensor, exact: Mapping[Tensor, Tensor]
    ) -> None:
        self.position = position
        self.operators: list[Operator] = []
        self.angles: list[tuple[Tensor, Tensor]] = []
        floats = {**exact, position: position}
        for operator in operators:
            old = operator.outputs[0]
            if operator.name in _RETYPED:
                source = operator.input(0)
                if source not in floats and not source.has_numbers:
                    raise RefusedError("it takes numbers that cannot be read here", operator)
                floats[old] = floats.get(source) or _in_float(source)
            else:
                _check(operator)
                inputs = [t and (floats.get(t) or _in_float(t)) for t in operator.inputs]
                is_real = old.is_quantized or old.dtype.is_float
                floats[old] = Tensor(old.name, old.shape, DType.FLOAT32 if is_real else old.dtype)
                self.operators.append(Operator(operator.code, inputs, [floats[old]], operator.options))
            is_angle = _is_code(old) and not floats[old].is_constant
            if is_angle and not any(each.name in _ANGLES for each in self.operators):
                self.angles.append((floats[old], old))
        self.result = floats[operators[-1].outputs[0]]

    def evaluate(self, positions: _Array) -> dict[Tensor, _Array]:
        """Every tensor; the last axis counts runs: `positions` has the position's shape and that one."""

        def compute(operator: Operator, values: list[_Array]) -> _Array:
            result = np.asarray(_COMPUTES[operator.name](*values))
            return result.astype(operator.outputs[0].dtype.numpy)

        return self._followed(positions, lambda constant: constant.array(), compute)

    def origins(self) -> dict[Tensor, _Array]:
        """For every tensor the index of the position that each entry depends on, with a last axis of size 1."""
        indices = np.arange(self.position.elements).reshape(*self.position.shape, 1)
        return self._followed(
            indices, lambda constant: np.full(constant.shape, _CONSTANT), lambda _, values: _joined(values)
        )

    def _followed(
        self,
        positions: _Array,
        constant: Callable[[Tensor], _Array],
        compute: Callable[[Operator, list[_Array]], _Array],
    ) -> dict[Tensor, _Array]:
        arrays = {self.position: positions}
        for operator in self.operators:
            values = [
                arrays[tensor] if tensor in arrays else constant(tensor)[..., np.newaxis]
                for tensor in operator.inputs
                if tensor is not None
            ]
            if operator.name in _MOVES:
                runs = max(value.shape[-1] for value in values)
                values = [np.broadcast_to(value, (*value.shape[:-1], runs)) for value in values]
                arrays[operator.outputs[0]] = _MOVES[operator.name](operator, values)
            else:
                arrays[operator.outputs[0]] = compute(operator, values)
        return arrays


@dataclass(frozen=True)
class Rotary:
    """`operators`, in execution order, make `result` of the graph input `position`, with integers in between.

    `position` holds T integers, and they lie along an axis of size T of `result`. `exact` is as `exact_constants` gives
    it.
    """

    position: Tensor
    operators: tuple[Operator, ...]
    exact: Mapping[Tensor, Tensor] = field(default_factory=dict)

    @property
    def is_exact(self) -> bool:
        """Whether constants of the float model stand in for all that are quantized."""
        read = [tensor for operator in self.operators for tensor in operator.inputs if tensor is not None]
        return bool(self.exact) and all(t in self.exact for t in read if t.is_constant and _is_code(t))

    @property
    def result(self) -> Tensor:
        """The cosines or sines, as others read them."""
        return self.operators[-1].outputs[0]

    @cached_property
    def form(self) -> FloatForm:
        """The same in float; raises RefusedError where an operator is not understood."""
        return FloatForm(self.operators, self.position, self.exact)

    @cached_property
    def axis(self) -> int:
        """The axis of the result on which the positions lie.

        Raises:
            RefusedError: an entry depends on several positions, or they have no axis of their own.
        """
        origins = self.form.origins()[self.form.result][..., 0]
        for axis, size in enumerate(origins.shape):
            along = np.arange(size).reshape(-1, *[1] * (origins.ndim - axis - 1))
            if size == self.position.elements and (origins == along).all():
                return axis
        text = "its entries do not depend on one position each, in order along one axis"
        raise RefusedError(text, self.operators[-1], self.result)

    def values(self, count: int) -> NDArray[np.float32]:
        """The result in float at positions 0 to `count` - 1: these lie along `axis`."""
        shape, axis = list(self.result.shape), self.axis
        shape[axis] = -1
        runs = (arrays[self.form.result] for _, arrays in self._evaluated(count))
        parts = [np.moveaxis(array, -1, axis).reshape(shape) for array in runs]
        return np.concatenate(parts, axis).take(range(count), axis)

    def last_position(self, count: int) -> int | None:
        """The last position that the integers in between can count to; None where that is `count` - 1 or more."""
        origins = self.form.origins()
        for first, arrays in self._evaluated(count):
            beyond = [count]
            for tensor, stored in self.form.angles:
                assert stored.quantization is not None
                assert stored.dtype.numpy is not None
                limits = np.iinfo(stored.dtype.numpy.name)
                # Real numbers up to half a step beyond the ends round to a code.
                low, high = map(stored.quantization.real, (limits.min - 0.5, limits.max + 0.5))
                *_, run = outside = np.nonzero((arrays[tensor] < low) | (arrays[tensor] > high))
                places = origins[tensor][(*outside[:-1], 0)]
                beyond += [int((first + run * self.position.elements + places).min())] if run.size else []
            if min(beyond) < count:
                return min(beyond) - 1
        return None

    def _evaluated(self, count: int) -> Iterator[tuple[int, dict[Tensor, _Array]]]:
        """Every tensor at all positions up to `count`, some runs at a time; with the first position of these."""
        size = self.position.elements
        block, end = math.ceil(_BLOCK / size), math.ceil(count / size)
        for begin in range(0, end, block):
            runs = np.arange(begin, min(begin + block, end))
            given = (np.arange(size)[:, np.newaxis] + runs * size).reshape(*self.position.shape, -1)
            yield begin * size, self.form.evaluate(given)


def exact_constants(graph: Subgraph, exported: Subgraph) -> dict[Tensor, Tensor]:
    """The float constants that the codes of a quantized graph were rounded from, by the latter.

    `exported` is the graph before it was quantized: the same operators in the same order, QUANTIZE and DEQUANTIZE left
    out. Nothing is found where it has others, nor for a constant whose numbers do not round to the codes.
    """
    stored, real = ([one for one in each.operators if one.name not in _RETYPED] for each in (graph, exported))
    if [operator.name for operator in stored] != [operator.name for operator in real]:
        return {}
    read = [(old.inputs, new.inputs) for old, new in zip(stored, real, strict=True)]
    pairs = [pair for both in read for pair in zip(*both, strict=False)]
    return {old: new for old, new in pairs if old is not None and new is not None and _rounds_to(new, old)}


def _rounds_to(real: Tensor, stored: Tensor) -> bool:
    """Whether a float constant has the codes of another one: it is at most half a step away."""
    parameters = stored.quantization
    if parameters is None or len(parameters.scale) != 1 or not _is_code(stored):
        return False
    if real.dtype is not DType.FLOAT32 or real.shape != stored.shape:
        return False
    if not (real.has_numbers and stored.has_numbers):
        return False
    apart = np.abs(real.array().astype(np.float64) - _in_float(stored).array().astype(np.float64))
    return bool((apart <= _HALF_A_STEP * float(parameters.scale[0])).all())


def find_rotary(graph: Subgraph, exact: Mapping[Tensor, Tensor] | None = None) -> Iterator[Rotary]:
    """Every cosine and sine of an integer input of the graph, where integers stand for angles on the way."""
    places: dict[Operator, int] = {}
    for angle in graph.operators:
        if angle.name not in _ANGLES:
            continue
        places = places or {operator: place for place, operator in enumerate(graph.operators)}
        above, sources = backward_slice(angle.outputs)
        through_codes = any(_is_code(tensor) for operator in above for tensor in operator.outputs)
        if len(sources) == 1 and through_codes and sources[0].dtype in (DType.INT32, DType.INT64):
            (position,) = sources
            if not position.is_quantized and position in graph.inputs:
                operators = (*sorted(above, key=places.__getitem__), *_following(graph, angle))
                yield Rotary(position, operators, exact or {})


def _following(graph: Subgraph, operator: Operator) -> Iterator[Operator]:
    """What is made of an operator's result alone, as long as nobody else reads it."""
    while True:
        (result,) = operator.outputs
        if graph.is_output(result) or len(result.consumers) != 1:
            return
        (operator,) = result.consumers
        known = operator.name in _RETYPED or operator.name in _MOVES or operator.name in _COMPUTES
        others = [t for t in operator.inputs if t is not None and t is not result and not t.is_constant]
        if not known or others:
            return
        yield operator


def _is_code(tensor: Tensor) -> bool:
    return tensor.is_quantized and not tensor.dtype.is_float


def _check(operator: Operator) -> None:
    """Raises RefusedError unless it can be evaluated."""
    if operator.name not in _MOVES and operator.name not in _COMPUTES:
        raise RefusedError("it is not known what becomes of positions here", operator)
    if operator.options is not None and operator.options.fields.get("fused_activation_function"):
        raise RefusedError("an activation is fused into it", operator)
    if any(tensor.is_dynamic for tensor in operator.outputs):
        raise RefusedError("its shape is known only at run time", operator)
    read = [tensor for tensor in operator.inputs if tensor is not None and tensor.is_constant]
    if not all(t.has_numbers for t in read) or (operator.name == "TRANSPOSE" and not read):
        raise RefusedError("it takes numbers that cannot be read here", operator)


def _in_float(tensor: Tensor) -> Tensor:
    """A constant as it is, or with the real numbers that its codes stand for."""
    parameters = tensor.quantization
    if parameters is None or not _is_code(tensor):
        return tensor
    shape = [1] * len(tensor.shape)
    if parameters.is_per_axis:
        shape[parameters.dimension] = -1
    scale, zero_point = parameters.scale.reshape(shape), parameters.zero_point.reshape(shape)
    values = (tensor.array().astype(np.int64) - zero_point).astype(np.float32) * scale
    return Tensor(tensor.name, tensor.shape, DType.FLOAT32, buffer=Buffer(Data(values.tobytes())))


def _joined(values: Sequence[_Array]) -> _Array:
    """The index that all entries agree on that are no constants."""
    joined = values[0]
    for other in values[1:]:
        agree = np.where(joined == other, joined, _MIXED)
        joined = np.where(joined == _CONSTANT, other, np.where(other == _CONSTANT, joined, agree))
    return joined


def _concatenated(operator: Operator, values: list[_Array]) -> _Array:
    axis = int(operator.option("axis"))
    return np.concatenate(values, axis if axis >= 0 else axis - 1)


def _transposed(operator: Operator, values: list[_Array]) -> _Array:
    order = [int(axis) for axis in operator.input(1).array().ravel()]
    return values[0].transpose(*order, len(order))


def _to_shape(function: Callable[[_Array, tuple[int, ...]], _Array]) -> _Move:
    return lambda operator, values: function(values[0], (*operator.outputs[0].shape, values[0].shape[-1]))


_MOVES: dict[str, _Move] = {
    "BROADCAST_TO": _to_shape(np.broadcast_to),
    "CONCATENATION": _concatenated,
    **dict.fromkeys(("EXPAND_DIMS", "RESHAPE", "SQUEEZE"), _to_shape(np.reshape)),
    "TRANSPOSE": _transposed,
}
"""Of arrays with a last axis for runs; only the first input holds what is moved, but for CONCATENATION."""

_COMPUTES: dict[str, Callable[..., _Array]] = {
    "ADD": np.add,
    "CAST": np.asarray,
    "COS": lambda angle: np.cos(angle.astype(np.float64)),
    "DIV": np.divide,
    "MAXIMUM": np.maximum,
    "MINIMUM": np.minimum,
    "MUL": np.multiply,
    "NEG": np.negative,
    "SIN": lambda angle: np.sin(angle.astype(np.float64)),
    "SUB": np.subtract,
}
"""Element by element, operands broadcast; cosines and sines are rounded once."""
