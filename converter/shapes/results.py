"""Check result types that kernels determine, and quantization parameters of operators that copy numbers."""

import math
from collections.abc import Iterator
from typing import Final, TypeAlias

from edge_opt.ir import Operator, Quantization, Tensor
from edge_opt.ir.dtypes import DType
from edge_opt.ir.operators import KINDS, Effect, OperatorKind

Wrong: TypeAlias = tuple[Tensor, str, str, str]
"""A result; its recorded type or parameters, those that its kernel writes, and the reason, as text."""

_WIDER_PRODUCTS: Final = ((DType.INT8, DType.INT32), (DType.UINT8, DType.INT16), (DType.INT8, DType.INT16))
"""Types of operands and results. Kernels also accept int16 to int8 and back, but compute garbage."""
_INTEGERS: Final = (DType.INT8, DType.UINT8, DType.INT16, DType.INT4)


def wrong_results(op: Operator) -> Iterator[Wrong]:
    """Results whose recorded type or parameters differ from those that the operator's kernel writes."""
    kind = KINDS.get(op.name)
    if kind is not None and op.outputs:
        yield from _wrong_types(op, kind)
        # A UINT8 CONCATENATION rescales its operands.
        if kind.copies and (op.name, op.outputs[0].dtype) != ("CONCATENATION", DType.UINT8):
            yield from _wrong_copies(op, kind)


def _wrong_types(op: Operator, kind: OperatorKind) -> Iterator[Wrong]:
    data, result, is_product = kind.data_operands(op.inputs), op.outputs[0], kind.effect is Effect.PRODUCT
    types = [tensor.dtype for tensor in data]
    expected, reason = DType.__members__.get(kind.result), f"{op.name} writes this type"
    if is_product and data and (types[0], result.dtype) in _WIDER_PRODUCTS:
        return
    if kind.result == "data":
        expected, reason = (types[0], f"it has the type of tensor '{data[0].name}'") if data else (None, "")
    elif kind.result and expected is None and op.options is not None and op.options.name == kind.options:
        chosen, reason = op.option(kind.result), f"its option {kind.result} says so"
        expected = DType(int(chosen)) if chosen in frozenset(DType) else None
    if expected is None:
        return
    for wrong in (tensor for tensor in kind.data_results(op.outputs) if tensor.dtype != expected):
        yield wrong, wrong.dtype.name, expected.name, reason
    if len(set(types)) > 1 and not is_product:
        texts = (f"tensor '{tensor.name}' is {tensor.dtype.name}" for tensor in data)
        yield result, result.dtype.name, types[0].name, f"{', '.join(texts)}: expected one type"


def _wrong_copies(op: Operator, kind: OperatorKind) -> Iterator[Wrong]:
    """Per-axis parameters are not compared: only weights have them, and no operator computes a constant."""
    for copy in kind.data_results(op.outputs):
        for operand in kind.data_operands(op.inputs):
            both = copy.quantization, operand.quantization
            per_axis = any(one is not None and one.is_per_axis for one in both)
            if operand.dtype == copy.dtype and copy.dtype in _INTEGERS and not per_axis and not _alike(*both):
                reason = f"{op.name} copies the stored numbers of '{operand.name}'"
                yield copy, _text(both[0]), _text(both[1]), reason
                break


def _alike(a: Quantization | None, b: Quantization | None) -> bool:
    if a is None or b is None or not a.is_affine or not b.is_affine:
        return _text(a) == _text(b)
    return math.isclose(a.scale[0], b.scale[0], rel_tol=1e-6) and int(a.zero_point[0]) == int(b.zero_point[0])


def _text(parameters: Quantization | None) -> str:
    if parameters is None or not parameters.is_affine:
        return "no parameters"
    return f"scale {float(parameters.scale[0]):.9g}, zero point {int(parameters.zero_point[0])}"
