"""Finds rotary embeddings by dataflow: the operators that compute cosines and sines of positions, and a float form.

Names do not matter. All paths up from a COS or SIN end at one integer input of the graph. A label on the axis of the
positions, followed up like a head label, shows that each entry of the result depends on only one position.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edge_opt.attention import factors as fx
from edge_opt.attention.factors import Factor
from edge_opt.attention.labelled import Labelled
from edge_opt.attention.labels import OperandFactors
from edge_opt.attention.rules import MOVEMENT
from edge_opt.ir import DType, Operator, Subgraph, Tensor
from edge_opt.ir.graph import Buffer
from edge_opt.ir.refusal import RefusedError
from edge_opt.ir.walk import backward_slice
from edge_opt.schema.data import Data
from edge_opt.shapes.folding import NUMBERS
from edge_opt.shapes.inference import check_operators

_Array = NDArray[Any]

_ANGLES = frozenset({"COS", "SIN"})
_RETYPED = frozenset({"QUANTIZE", "DEQUANTIZE"})
# Their operands after the first must be known.
_BY_PARAMETERS = MOVEMENT | {"BROADCAST_TO", "TRANSPOSE"}
_HALF_A_STEP = 0.501  # quantizers divide in float32
_AT_ONCE = 1 << 12  # positions
_MOST_STEPS = 64  # on all paths between the positions and a cosine; real ones have under thirty


class FloatForm(NamedTuple):
    """Operators on float tensors without QUANTIZE, with real constants; `result` is the last result.

    `angles` pairs float tensors before the COS or SIN with the quantized originals.
    """

    operators: tuple[Operator, ...]
    result: Tensor
    angles: list[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Rotary:
    """`operators`, in execution order, compute `result` from the graph input `position`, in part on integers.

    The T integers of `position` lie along an axis of size T of `result`. `exact` comes from `exact_constants`.
    """

    position: Tensor
    operators: tuple[Operator, ...]
    exact: Mapping[Tensor, Tensor] = field(default_factory=dict)

    @property
    def is_exact(self) -> bool:
        """True if the float model's constants replace all quantized ones."""
        read = [tensor for operator in self.operators for tensor in operator.inputs if tensor is not None]
        return bool(self.exact) and all(t in self.exact for t in read if t.is_constant and _is_code(t))

    @property
    def result(self) -> Tensor:
        """The tensor of cosines or sines that the graph reads."""
        return self.operators[-1].outputs[0]

    @cached_property
    def form(self) -> FloatForm:
        """The operators in float; raises RefusedError if one is not supported."""
        made: list[Operator] = []
        angles: list[tuple[Tensor, Tensor]] = []
        floats = {**self.exact, self.position: self.position}
        for operator in self.operators:
            _check(operator)
            old = operator.outputs[0]
            inputs = [t and (floats.get(t) or _in_float(t)) for t in operator.inputs]
            if operator.name in _RETYPED:
                assert inputs[0] is not None
                floats[old] = inputs[0]
            else:
                is_real = old.is_quantized or old.dtype.is_float
                floats[old] = Tensor(old.name, old.shape, DType.FLOAT32 if is_real else old.dtype)
                made.append(Operator(operator.code, inputs, [floats[old]], operator.options))
            is_angle = _is_code(old) and not floats[old].is_constant
            if is_angle and not any(each.name in _ANGLES for each in made):
                angles.append((floats[old], old))
        return FloatForm(tuple(made), floats[self.result], angles)

    @cached_property
    def axes(self) -> dict[Tensor, int]:
        """The axis of the positions in the result and, with several positions, in the tensors that lead to it.

        Raises:
            RefusedError: an entry depends on several positions, or they have no axis of their own.
        """
        assert self.form is not None
        count, shape = self.position.elements, self.result.shape
        if count == 1 and 1 in shape:
            return {self.result: shape.index(1)}
        own = (Factor(count, 1),)
        for axis in (axis for axis, size in enumerate(shape) if size == count > 1):
            labelled = (*fx.plain(shape[:axis]), own, *fx.plain(shape[axis + 1 :]))
            met = list(OperandFactors().upwards([Labelled(self.result, labelled)]))
            carry = [
                of.tensor is self.position or not OperandFactors().is_end(of)
                for of in met
                if own in of.factored
            ]
            others = [of.tensor for of in met if own not in of.factored]
            if all(carry) and self.position not in (*others, *backward_slice(others)[1]):
                return {of.tensor: of.factored.index(own) for of in met if own in of.factored}
        text = "its entries do not depend on one position each, in order along one axis"
        raise RefusedError(text, self.operators[-1], self.result)

    def values(self, count: int) -> NDArray[np.float32]:
        """The result in float at positions 0 to `count` - 1, along its axis of positions."""
        axis, sizes = self.axes[self.result], list(self.result.shape)
        sizes[axis] = -1
        runs = [np.moveaxis(arrays[self.form.result], -1, axis) for _, arrays in self._runs(count)]
        return np.concatenate([run.reshape(sizes) for run in runs], axis).take(range(count), axis)

    def last_position(self, count: int) -> int | None:
        """The last position that the quantized angles can represent; None if that is `count` - 1 or more."""
        axes, size, beyond = self.axes, self.position.elements, count
        for first, arrays in self._runs(count):
            for tensor, stored in self.form.angles:
                assert stored.quantization is not None
                assert stored.dtype.numpy is not None
                limits = np.iinfo(stored.dtype.numpy.name)
                # Real numbers up to half a step beyond the limits round to a code.
                low, high = map(stored.quantization.real, (limits.min - 0.5, limits.max + 0.5))
                *places, run = np.nonzero((arrays[tensor] < low) | (arrays[tensor] > high))
                place = places[axes[stored]] if stored in axes and size > 1 else 0
                beyond = int((first[run] + place).min(initial=beyond))
            if beyond < count:
                return beyond - 1
        return None

    def _runs(self, count: int) -> Iterator[tuple[_Array, dict[Tensor, _Array]]]:
        """Many runs at once, along an additional last axis: the first position of each, and all float tensors."""
        size, operators = self.position.elements, self.form.operators
        constants = {t for operator in operators for t in operator.inputs if t is not None and t.is_constant}
        for first in np.array_split(np.arange(0, count, size), -(-count // max(size, _AT_ONCE))):
            arrays = {t: np.broadcast_to(t.array()[..., None], (*t.shape, first.size)) for t in constants}
            arrays[self.position] = first + np.arange(size).reshape(*self.position.shape, 1)
            for operator in operators:
                result, values = operator.output, [arrays[t] for t in operator.inputs if t is not None]
                with np.errstate(all="ignore"):
                    computed = _COMPUTES[operator.name](operator, (*result.shape, first.size), *values)
                    arrays[result] = np.asarray(computed, result.dtype.numpy)
            yield first, arrays


def exact_constants(graph: Subgraph, exported: Subgraph) -> dict[Tensor, Tensor]:
    """Map constants of a quantized graph to the float constants that they were rounded from.

    `exported` is the graph before quantization: the same operators in the same order, except QUANTIZE and DEQUANTIZE.
    Empty if operators differ; constants whose numbers do not round to the codes are left out.
    """
    stored, real = ([one for one in each.operators if one.name not in _RETYPED] for each in (graph, exported))
    if [operator.name for operator in stored] != [operator.name for operator in real]:
        return {}
    read = [(old.inputs, new.inputs) for old, new in zip(stored, real, strict=True)]
    pairs = [pair for both in read for pair in zip(*both, strict=False)]
    return {old: new for old, new in pairs if old is not None and new is not None and _rounds_to(new, old)}


def _rounds_to(real: Tensor, stored: Tensor) -> bool:
    """True if a float constant rounds to the codes of a quantized one: it is at most half a step away."""
    parameters, is_float = stored.quantization, real.dtype is DType.FLOAT32
    if parameters is None or len(parameters.scale) != 1 or not _is_code(stored) or not is_float:
        return False
    if real.shape != stored.shape or not (real.has_numbers and stored.has_numbers):
        return False
    apart = np.abs(real.array().astype(np.float64) - _in_float(stored).array().astype(np.float64))
    return bool((apart <= _HALF_A_STEP * float(parameters.scale[0])).all())


def find_rotary(graph: Subgraph, exact: Mapping[Tensor, Tensor] | None = None) -> Iterator[Rotary]:
    """Find every cosine and sine of an integer input of the graph that is computed through quantized angles."""
    places = {operator: place for place, operator in enumerate(graph.operators)}
    above: dict[Tensor, _Above] = {}
    for operator in places:
        read = [
            _NOTHING if t.is_constant else above.get(t, _Above((t,)))
            for t in operator.inputs
            if t is not None
        ]
        own = _joined(read, through_codes=any(map(_is_code, operator.outputs)))
        above.update(dict.fromkeys(operator.outputs, own))
        if (
            operator.name not in _ANGLES
            or not own.through_codes
            or len(own.sources) != 1
            or own.steps > _MOST_STEPS
        ):
            continue
        (position,) = own.sources
        is_integer = position.dtype in (DType.INT32, DType.INT64) and not position.is_quantized
        if is_integer and position in graph.inputs:
            leading = sorted(backward_slice(operator.outputs)[0], key=places.__getitem__)
            following = islice(_following(graph, operator), _MOST_STEPS)
            yield Rotary(position, (*leading, *following), exact or {})


class _Above(NamedTuple):
    """The computation above a tensor: where it starts (two tensors stand for more), and how long it is at most."""

    sources: tuple[Tensor, ...]
    through_codes: bool = False
    steps: int = 0


_NOTHING = _Above(())


def _joined(parts: Iterable[_Above], *, through_codes: bool) -> _Above:
    """The computation above an operator that reads these."""
    sources = dict.fromkeys(source for part in parts for source in part.sources)
    steps = min(1 + sum(part.steps for part in parts), _MOST_STEPS + 1)
    return _Above(tuple(sources)[:2], through_codes or any(part.through_codes for part in parts), steps)


def _following(graph: Subgraph, operator: Operator) -> Iterator[Operator]:
    """The chain of operators after this one, as long as each is the only reader and reads nothing else computed."""
    while True:
        (result,) = operator.outputs
        if graph.is_output(result) or len(result.consumers) != 1:
            return
        (operator,) = result.consumers
        others = [t for t in operator.inputs if t is not None and t is not result and not t.is_constant]
        if operator.name not in _COMPUTES.keys() | _RETYPED or others:
            return
        yield operator


def _is_code(tensor: Tensor) -> bool:
    return tensor.is_quantized and not tensor.dtype.is_float


def _check(operator: Operator) -> None:
    """Raise RefusedError unless the operator can be evaluated, and its recorded shapes are right."""
    if operator.name not in _COMPUTES.keys() | _RETYPED:
        raise RefusedError("positions cannot be followed through this operator", operator)
    if operator.options is not None and operator.options.fields.get("fused_activation_function"):
        raise RefusedError("an activation is fused into it", operator)
    for tensor in operator.outputs:
        if tensor.is_dynamic:
            raise RefusedError("its shape is known only at run time", operator)
        if _is_code(tensor) and (tensor.dtype.numpy is None or tensor.dtype.numpy.kind not in "iu"):
            raise RefusedError(f"codes of type {tensor.dtype} cannot be evaluated", operator, tensor)
    read = [tensor for tensor in operator.inputs if tensor is not None and tensor.is_constant]
    parameters = operator.inputs[1:] if operator.name in _BY_PARAMETERS else ()
    if not all(tensor.has_numbers for tensor in read) or not set(parameters) <= set(read):
        raise RefusedError("its constants cannot be read", operator)
    check_operators([operator])


def _in_float(tensor: Tensor) -> Tensor:
    """The tensor itself, or, if quantized, a float constant with the same real numbers."""
    parameters = tensor.quantization
    if parameters is None or not _is_code(tensor):
        return tensor
    shape = [1] * len(tensor.shape)
    if parameters.is_per_axis:
        shape[parameters.dimension] = -1
    scale, zero_point = parameters.scale.reshape(shape), parameters.zero_point.reshape(shape)
    values = (tensor.array().astype(np.int64) - zero_point).astype(np.float32) * scale
    return Tensor(tensor.name, tensor.shape, DType.FLOAT32, buffer=Buffer(Data(values.tobytes())))


def _each(function: Callable[..., _Array]) -> Callable[..., _Array]:
    return lambda _, __, *values: function(*values)


_COMPUTES: dict[str, Callable[..., _Array]] = {
    **dict.fromkeys(MOVEMENT, lambda _, shape, value, *__: value.reshape(shape)),
    "BROADCAST_TO": lambda _, shape, value, *__: np.broadcast_to(value, shape),
    "CONCATENATION": lambda op, shape, *values: np.concatenate(values, op.option("axis") % (len(shape) - 1)),
    "TRANSPOSE": lambda _, __, value, order: value.transpose(*order[..., 0], -1),
    **{name: _each(NUMBERS[name]) for name in ("ADD", "MAXIMUM", "MINIMUM", "MUL", "NEG", "SUB")},
    "CAST": _each(np.asarray),
    "COS": _each(lambda angle: np.cos(angle.astype(np.float64))),
    "DIV": _each(np.divide),
    "SIN": _each(lambda angle: np.sin(angle.astype(np.float64))),
}
"""Operators, given their results' shape, on arrays with an additional last axis; cosines and sines are rounded once."""
