"""Operators that compute on integers, evaluated in float at many positions at once.

    position int32[1,T] -> CAST -> QUANTIZE -> MUL (codes) -> COS (codes) -> DEQUANTIZE      the graph
    position int32[1,T] -> CAST -> ----------> MUL (float) -> COS (float) -> -----------     its float form

R runs are computed together: every array has one more axis, the last, `[1,T,R]`.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edge_opt.attention.rules import MOVEMENT
from edge_opt.ir import Buffer, DType, Operator, Tensor
from edge_opt.ir.refusal import RefusedError, Why
from edge_opt.ir.walk import reads
from edge_opt.schema.data import Data
from edge_opt.shapes.inference import check_operators

Array = NDArray[Any]

ANGLES = frozenset({"COS", "SIN"})
RETYPED = frozenset({"QUANTIZE", "DEQUANTIZE"})
_BY_PARAMETERS = MOVEMENT | {"BROADCAST_TO"}  # their operands after the first must be known
_ARRANGING = _BY_PARAMETERS | {"CONCATENATION"}
_AT_ONCE = 1 << 12  # positions


class Run(NamedTuple):
    """The first position of each run, `[R]`, and all float tensors, `[.., R]`."""

    first: Array
    arrays: dict[Tensor, Array]


@dataclass(frozen=True)
class FloatForm:
    """Operators on float tensors without QUANTIZE, with real constants, from `position` to `result`.

    `angles` pairs float tensors before the COS or SIN with the quantized originals.
    """

    position: Tensor
    operators: tuple[Operator, ...]
    result: Tensor
    angles: list[tuple[Tensor, Tensor]]

    def runs(self, count: int) -> Iterator[Run]:
        """Evaluate at positions 0 to `count` - 1, many runs at a time."""
        size = self.position.elements
        constants = [tensor for tensor in reads(self.operators) if tensor.is_constant]
        starts = np.arange(0, count, size)
        for first in np.array_split(starts, -(-count // max(size, _AT_ONCE))):
            run = Run(first, {})
            for tensor in constants:
                run.arrays[tensor] = np.broadcast_to(
                    tensor.array()[..., None], (*tensor.shape, first.size)
                )
            steps = np.arange(size).reshape(*self.position.shape, 1)
            run.arrays[self.position] = first + steps
            for operator in self.operators:
                run.arrays[operator.output] = _computed(operator, run)
            yield run


def _computed(operator: Operator, run: Run) -> Array:
    name = operator.name
    shape = (*operator.output.shape, run.first.size)
    values = [run.arrays[tensor] for tensor in operator.given]
    if name == "CONCATENATION":
        axis = int(operator.option("axis")) % (len(shape) - 1)
        result = np.concatenate(values, axis)
    elif name == "TRANSPOSE":
        result = values[0].transpose(*values[1][..., 0], -1)
    elif name == "BROADCAST_TO":
        result = np.broadcast_to(values[0], shape)
    elif name in MOVEMENT:
        result = values[0].reshape(shape)
    else:
        with np.errstate(all="ignore"):
            result = COMPUTES[name](*values)
    return np.asarray(result, operator.output.dtype.numpy)


def in_float(
    position: Tensor, operators: tuple[Operator, ...], exact: Mapping[Tensor, Tensor]
) -> FloatForm:
    """The operators in float; `exact` has float constants that replace quantized ones.

    Raises:
        RefusedError: an operator cannot be evaluated.
    """
    floats = {**exact, position: position}

    def real(tensor: Tensor) -> Tensor:
        return floats.get(tensor) or real_constant(tensor)

    made: list[Operator] = []
    angles: list[tuple[Tensor, Tensor]] = []
    is_before_angles = True
    for operator in operators:
        _check(operator)
        old = operator.outputs[0]
        new = real(operator.input(0))
        if operator.name not in RETYPED:
            is_real = old.is_quantized or old.dtype.is_float
            new = Tensor(old.name, old.shape, DType.FLOAT32 if is_real else old.dtype)
            inputs = [tensor and real(tensor) for tensor in operator.inputs]
            made.append(Operator(operator.code, inputs, [new], operator.options))
        floats[old] = new
        is_before_angles &= operator.name not in ANGLES
        if is_before_angles and is_code(old) and not new.is_constant:
            angles.append((new, old))
    return FloatForm(position, tuple(made), floats[operators[-1].outputs[0]], angles)


def can_compute(operator: Operator) -> bool:
    """True if the operator can be evaluated, or only changes the type."""
    return operator.name in _ARRANGING or operator.name in COMPUTES or operator.name in RETYPED


def is_code(tensor: Tensor) -> bool:
    """True if the tensor's numbers are integers that stand for real ones."""
    return tensor.is_quantized and not tensor.dtype.is_float


def _check(operator: Operator) -> None:
    """Raise RefusedError unless the operator can be evaluated, and its recorded shapes are right."""
    if not can_compute(operator):
        raise RefusedError(
            Why.OPERATOR, "positions cannot be followed through this operator", operator
        )
    if operator.has_activation:
        raise RefusedError(Why.OPERATOR, "an activation is fused into it", operator)
    for tensor in operator.outputs:
        if tensor.is_dynamic:
            raise RefusedError(Why.OPEN_LENGTHS, "its shape is known only at run time", operator)
        if is_code(tensor) and (tensor.dtype.numpy is None or tensor.dtype.numpy.kind not in "iu"):
            raise RefusedError(
                Why.QUANTIZATION,
                f"codes of type {tensor.dtype} cannot be evaluated",
                operator,
                tensor,
            )
    parameters = operator.inputs[1:] if operator.name in _BY_PARAMETERS else ()
    for operand in operator.inputs:
        must_be_known = operand in parameters or (operand is not None and operand.is_constant)
        if must_be_known and (operand is None or not operand.has_numbers):
            raise RefusedError(Why.OPERATOR, "its constants cannot be read", operator)
    check_operators([operator])


def real_constant(tensor: Tensor) -> Tensor:
    """The tensor itself, or, if quantized, a float constant with the same real numbers."""
    parameters = tensor.quantization
    if parameters is None or not is_code(tensor):
        return tensor
    shape = [1] * len(tensor.shape)
    if parameters.is_per_axis:
        shape[parameters.dimension] = -1
    codes = tensor.array().astype(np.int64) - parameters.zero_point.reshape(shape)
    values = codes.astype(np.float32) * parameters.scale.reshape(shape)
    return Tensor(tensor.name, tensor.shape, DType.FLOAT32, buffer=Buffer(Data(values.tobytes())))


def _cosine(angle: Array) -> Array:
    return np.cos(angle.astype(np.float64))  # rounded once


def _sine(angle: Array) -> Array:
    return np.sin(angle.astype(np.float64))


COMPUTES: dict[str, Callable[..., Array]] = {
    "ADD": np.add,
    "CAST": np.asarray,
    "COS": _cosine,
    "DIV": np.divide,
    "MAXIMUM": np.maximum,
    "MINIMUM": np.minimum,
    "MUL": np.multiply,
    "NEG": np.negative,
    "SIN": _sine,
    "SUB": np.subtract,
}
"""Elementwise operators that are one numpy function each."""
