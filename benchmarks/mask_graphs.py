"""Logits that a SELECT masks, some of them masked before in another way; inputs for which only both hide whole rows."""

from collections.abc import Callable
from typing import Any

import numpy as np
from attention_checks import random_inputs
from attention_graphs import Builder, Case, cases
from hypothesis import strategies as st
from numpy.typing import NDArray

from edge_opt.ir import DType, Model, Quantization, Tensor

LOW = -1e9
_WIDE = {DType.INT8: Quantization.affine(16.0, 3), DType.INT16: Quantization.affine(0.05, 0)}
_LOWEST = {DType.INT8: -128, DType.INT16: -32768}


def masked_twice(build: Builder, logits: Tensor) -> Tensor:
    """The logits, perhaps masked in the case's other way, masked by a SELECT with a very low number."""
    q = None
    if not build.is_float:
        # Only with wide steps can codes hold a mask.
        q = _WIDE[build.dtype]
        logits = build.op("QUANTIZE", logits, q=q)
    logits = OTHER_MASKS[build.case.other](build, logits)
    low = build.stored(LOW if build.is_float else _LOWEST[build.dtype], build.dtype, q)
    is_open = build.given("open", build.mask_shape(logits), DType.BOOL)
    operands = (low, logits) if build.case.reversed else (logits, low)
    if build.case.reversed:
        is_open = build.op("LOGICAL_NOT", is_open)
    return build.op("SELECT_V2", is_open, *operands, q=q)


def inputs_masked_twice(model: Model) -> dict[str, NDArray[Any]]:
    """Random numbers; the SELECT hides the first columns, the other mask those behind the diagonal."""
    values = random_inputs(model)
    for name, tensor in model.inputs()[0][1].items():
        if name.startswith(("open", "seen", "causal")):
            row, column = np.ogrid[: tensor.shape[-2], : tensor.shape[-1]]
            shown = (
                column >= 2 + tensor.shape[-2] // 2
                if name.startswith("open")
                else _seen(row, column)
            )
            low = _LOWEST.get(tensor.dtype, LOW)
            numbers = np.where(shown, 0, low) if name.startswith("causal") else shown
            values[name] = np.broadcast_to(numbers, tensor.shape).astype(values[name].dtype)
    return values


def _seen(row: Any, column: Any) -> Any:
    return column <= row + 1


def _table(build: Builder, logits: Tensor, low: float | None = None, more: int = 0) -> Tensor:
    """A constant `[rows + more, columns + more]`, low behind the diagonal."""
    rows, columns = build.mask_shape(logits)[-2:]
    row, column = np.ogrid[: rows + more, : columns + more]
    if not build.is_float:
        low = _LOWEST[build.dtype] if low is None else low
    return build.stored(
        np.where(_seen(row, column), 0, LOW if low is None else low),
        build.dtype,
        logits.quantization,
    )


def _added(build: Builder, logits: Tensor, mask: Tensor, name: str = "ADD") -> Tensor:
    return build.op(
        name, logits, mask, **(build.add_options if build.is_float or name == "ADD" else {})
    )


def _flags(build: Builder, logits: Tensor) -> Tensor:
    """1 where hidden, in floats."""
    seen = build.given("seen", build.mask_shape(logits), DType.BOOL)
    return build.op("CAST", build.op("LOGICAL_NOT", seen), dtype=DType.FLOAT32, q=None)


def _in_type(build: Builder, logits: Tensor, mask: Tensor) -> Tensor:
    """A mask in floats as the logits are stored."""
    return (
        mask
        if build.is_float
        else build.op("QUANTIZE", mask, dtype=build.dtype, q=logits.quantization)
    )


def _computed(build: Builder, logits: Tensor, name: str, factor: float, then: str = "") -> Tensor:
    mask = build.op("MUL", _flags(build, logits), build.stored(factor))
    return _added(
        build, logits, _in_type(build, logits, build.op(then, mask) if then else mask), name
    )


def _bias(build: Builder, logits: Tensor) -> Tensor:
    low = -1.0 if build.is_float else -2
    return _added(build, logits, _table(build, logits, low))


def _constant(build: Builder, logits: Tensor) -> Tensor:
    return _added(build, logits, _table(build, logits))


def _cut(build: Builder, logits: Tensor) -> Tensor:
    sizes = build.mask_shape(logits)[-2:]
    table = _table(build, logits, more=3)
    return _added(
        build, logits, build.op("SLICE", table, build.integers(0, 0), build.integers(*sizes))
    )


def _looked_up(build: Builder, logits: Tensor) -> Tensor:
    rows = build.mask_shape(logits)[-2]
    return _added(
        build, logits, build.op("GATHER", _table(build, logits), build.integers(*range(rows)))
    )


def _input(build: Builder, logits: Tensor) -> Tensor:
    given = build.given("causal", build.mask_shape(logits), build.dtype, logits.quantization)
    return _added(build, logits, given)


def _minimum(build: Builder, logits: Tensor) -> Tensor:
    return build.op(
        "MINIMUM",
        logits,
        build.given("causal", build.mask_shape(logits), build.dtype, logits.quantization),
    )


def _least_of_constants(build: Builder, logits: Tensor) -> Tensor:
    """The highest number where shown, so that the minimum is the logit."""
    table = _table(build, logits)
    stored = np.where(
        table.array() == 0, 3e38 if build.is_float else -1 - _LOWEST[build.dtype], table.array()
    )
    return build.op("MINIMUM", logits, build.stored(stored, build.dtype, logits.quantization))


def _logarithm(build: Builder, logits: Tensor) -> Tensor:
    """`log(1) = 0`, `log(0) = -inf`."""
    seen = build.given("seen", build.mask_shape(logits), DType.BOOL)
    number = build.op("CAST", seen, dtype=DType.FLOAT32, q=None)
    return _added(build, logits, _in_type(build, logits, build.op("LOG", number)))


def _chosen(build: Builder, logits: Tensor) -> Tensor:
    seen = build.given("seen", build.mask_shape(logits), DType.BOOL)
    low = build.stored(
        LOW if build.is_float else _LOWEST[build.dtype], build.dtype, logits.quantization
    )
    return build.op("SELECT_V2", seen, logits, low, q=logits.quantization)


def _in_other_numbers(build: Builder, logits: Tensor) -> Tensor:
    """A constant stored in int8, for floats, or in floats."""
    table = _table(build, logits)
    if build.is_float:
        codes = np.where(table.array() == 0, 0, -128)
        return _added(
            build,
            logits,
            build.op(
                "DEQUANTIZE",
                build.stored(codes, DType.INT8, Quantization.affine(1e7)),
                dtype=DType.FLOAT32,
                q=None,
            ),
        )
    return _added(
        build, logits, _in_type(build, logits, build.stored(np.where(table.array() == 0, 0, LOW)))
    )


def _padded(build: Builder, logits: Tensor) -> Tensor:
    """The last columns are cut off and come back low."""
    *front, columns = logits.shape
    kept = build.op(
        "SLICE",
        logits,
        build.integers(*[0] * len(logits.shape)),
        build.integers(*front, min(2, columns)),
    )
    around = np.zeros((len(logits.shape), 2), np.int32)
    around[-1, 1] = max(columns - 2, 0)
    low = build.stored(
        LOW if build.is_float else _LOWEST[build.dtype], build.dtype, logits.quantization
    )
    return build.op("PADV2", kept, build.stored(around, DType.INT32), low)


def _by_product(build: Builder, logits: Tensor) -> Tensor:
    """Rows of a constant, looked up by a product with flags; there are as many rows as columns."""
    if not build.is_float:
        return _constant(build, logits)
    columns = logits.shape[-1]
    flags = _flags(build, logits)
    low = build.stored(np.where(np.eye(columns), LOW, 0))
    return _added(build, logits, build.op("BATCH_MATMUL", flags, low))


def _capped(build: Builder, logits: Tensor) -> Tensor:
    """Masked, and then no longer: capped numbers are close to each other."""
    if not build.is_float:
        return logits
    curve = build.op("TANH", _constant(build, logits))
    return build.op("MUL", curve, build.stored(30.0))


OTHER_MASKS: dict[str, Callable[[Builder, Tensor], Tensor]] = {
    "none": lambda _, logits: logits,
    "bias": _bias,
    "constant": _constant,
    "cut": _cut,
    "looked up": _looked_up,
    "input": _input,
    "minimum": _minimum,
    "least of constants": _least_of_constants,
    "cast": lambda build, logits: _computed(build, logits, "ADD", LOW),
    "negated": lambda build, logits: _computed(build, logits, "ADD", -LOW, "NEG"),
    "subtracted": lambda build, logits: _computed(build, logits, "SUB", -LOW),
    "logarithm": _logarithm,
    "chosen": _chosen,
    "other numbers": _in_other_numbers,
    "padded": _padded,
    "product": _by_product,
    "capped": _capped,
}
"""Ways to mask logits behind the diagonal; the first leaves them as they are, a bias hides nothing."""


def cases_masked_twice() -> st.SearchStrategy[Case]:
    """Cases whose logits a SELECT masks, most of them after another mask."""
    return st.sampled_from(list(OTHER_MASKS)).flatmap(
        lambda other: cases(mask="twice", other=other)
    )


def build(case: Case) -> Model:
    """The graph of a case, whose logits may be masked twice."""
    return (_MaskedTwice if case.mask == "twice" else Builder)(case).build()


class _MaskedTwice(Builder):
    def hidden(self, logits: Tensor) -> Tensor:
        return masked_twice(self, logits)
