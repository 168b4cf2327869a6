"""Cosines and sines of positions that are computed in integers -> a table by position, read with GATHER."""

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_opt.attention.assembly import Assembly
from edge_opt.attention.positions import Rotary, exact_constants, find_rotary
from edge_opt.ir import DType, Tensor
from edge_opt.ir.refusal import RefusedError
from edge_opt.ir.walk import still_needed
from edge_opt.passes.codes import code_limits, real_range
from edge_opt.passes.contract import Context, Pass, Site
from edge_opt.passes.rewrite import Demand, Reference, Rewrite

_MOST_POSITIONS = 1 << 17

_MOST_CUT = 2.0**-8
"""Of a cosine, where the range of the result ends below 1; more is left to be reverted."""
_ROUNDING = 2.0**-21
"""Of cosines in float32, as kernels compute them: four units in the last place of 1."""


class PositionTable(Pass):
    """`quantize(cos(p * f))` for p = 0 .. S - 1 is a table `[S, H]`, and row `clamp(p, 0, S - 1)` of it is the result.

    S is the number of positions that the bundle's caches hold, or that the integers tell apart where these are more; f
    are the graph's own frequencies. A quantized graph computes `p * f` in integers whose range ends at the last
    position of the calibration: all later positions get the cosines of that one. So the old region is no reference. The
    new one is held to the old one in float (no QUANTIZE, constants in real numbers), at every position from 0 to S - 1
    and at some beyond both ends, to half a step of the result. Given the entry points before they were quantized, f and
    the region in float are the export's.
    """

    name = "position_table"
    summary = "reads cosines and sines of positions from a table where integers computed them"
    repairs = True
    demand = Demand("absolute", 2.0**-16)

    def sites(self, context: Context) -> Iterable[Site]:
        """One for each COS or SIN of an integer input with integers that stand for angles on the way."""
        exported = context.exported.get(context.model.signature_name(context.subgraph))
        exact = {} if exported is None else exact_constants(context.subgraph, exported)
        for rotary in find_rotary(context.subgraph, exact):
            yield Site(rotary.operators[-1], partial(_build, context, rotary))


def _build(context: Context, rotary: Rotary) -> Rewrite:
    """Raises RefusedError where a table cannot stand for the operators."""
    position, result, axis = rotary.position, rotary.result, rotary.axis
    tolerance = _ROUNDING
    if result.dtype is not DType.FLOAT32:
        if result.quantization is None or len(result.quantization.scale) != 1 or result.dtype.numpy is None:
            raise RefusedError("the table needs one scale", rotary.operators[-1], result)
        tolerance += float(result.quantization.scale[0]) / 2  # half a step
    count, notes = _counted(context, rotary)
    tolerance += _beyond(rotary.values(count), result)

    def constant(value: object, dtype: DType) -> Tensor:
        return context.constants.make("positions/constant", np.asarray(value, dtype.numpy), dtype)

    make = Assembly(context.model, context.constants)
    index = position
    for name, bound in (("MAXIMUM", 0), ("MINIMUM", count - 1)):
        limit = context.constants.make(
            "positions/constant", np.asarray(bound, position.dtype.numpy), position.dtype
        )
        index = make.emit(name, [index, limit], replace(position, name=f"positions/{name.lower()}"))
    if len(position.shape) != 1:
        index = make.reshape_to(index, Tensor("positions/flat", (position.elements,), position.dtype))
    codes = _stored(rotary.values(count), result)
    first, second = np.array_split(codes, 2, axis=-1)
    is_doubled = axis != codes.ndim - 1 and np.array_equal(first, second)
    values = np.ascontiguousarray(first if is_doubled else codes)
    table = context.constants.make("positions/table", values, result.dtype, result.quantization)
    if is_doubled:
        half = make.tensor("positions/half", (*result.shape[:-1], first.shape[-1]), result)
        make.emit("GATHER", [table, index], half, axis=axis)
        make.emit("CONCATENATION", [half, half], result, axis=len(result.shape) - 1)
    else:
        make.emit("GATHER", [table, index], result, axis=axis)
    if rotary.is_exact:
        notes.append("has the exact frequencies of the export")
    kept = still_needed(context.subgraph, rotary.operators, rotary.operators[-1])
    return Rewrite(
        context.model,
        context.subgraph,
        rotary.operators,
        (*kept, *make.finished(result)),
        demand=Demand("absolute", tolerance),
        note="; ".join(notes),
        reference=Reference(rotary.form.operators, rotary.form.result, count),
    )


def _counted(context: Context, rotary: Rotary) -> tuple[int, list[str]]:
    """How many positions the table needs, and what to tell of them.

    What the integers tell apart stays apart, also beyond the cache: a ring may be shorter than what is counted, and a
    time step of a diffusion is no position at all.
    """
    count = context.positions
    if not count:
        raise RefusedError(
            "the number of positions is not known: no cache of the model or its bundle tells it"
        )
    stopped = rotary.last_position(_MOST_POSITIONS)
    if stopped is None:
        text = f"the integers tell {_MOST_POSITIONS:,} positions apart, and no table is that long"
        raise RefusedError(text, rotary.operators[-1], rotary.result)
    notes = [f"RoPE was wrong after position {stopped} of {count}; fixed"]
    return max(count, stopped + 1), notes if stopped < count - 1 else []


def _beyond(values: NDArray[np.float32], result: Tensor) -> float:
    """By how little the values leave the range of the result, which calibration measured at few positions."""
    if result.quantization is None or result.dtype.is_float:
        return 0.0
    lowest, highest = real_range(result)
    beyond = max(0.0, float(values.max()) - highest, lowest - float(values.min()))
    return beyond if beyond <= _MOST_CUT else 0.0


def _stored(values: NDArray[np.float32], result: Tensor) -> NDArray[Any]:
    """Real numbers as the result stores them: the nearest codes."""
    assert result.dtype.numpy is not None
    if result.quantization is None or result.dtype.is_float:
        return values.astype(result.dtype.numpy)
    scale, zero_point = float(result.quantization.scale[0]), int(result.quantization.zero_point[0])
    codes = np.rint(values.astype(np.float64) / scale) + zero_point
    return np.asarray(np.clip(codes, *code_limits(result)), result.dtype.numpy)
