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
from edge_opt.ir.refusal import RefusedError, Why
from edge_opt.passes.codes import nearest_codes, real_range, step_of
from edge_opt.passes.contract import Context, Pass, Site
from edge_opt.verification.check import Reference, Table
from edge_opt.verification.rewrite import Rewrite

_MOST_POSITIONS = 1 << 17

_MOST_CUT = 2.0**-8
"""Most clipping of a cosine, if the result's range ends below 1; rewrites with more are reverted."""
_ROUNDING = 2.0**-21
"""Error of float32 cosines in the kernels: four units in the last place of 1."""


class PositionTable(Pass):
    """`quantize(cos(p * f))` for p = 0 .. S - 1 is a table `[S, H]`, and row `clamp(p, 0, S - 1)` of it is the result.

    S is the number of positions that the bundle's caches hold, or that the integers distinguish if these are more; f
    are the graph's own frequencies. A quantized graph computes `p * f` in integers whose range ends at the last
    position of the calibration: all later positions get the cosines of that one. So the reference is not the old region
    but its float version (no QUANTIZE, constants in real numbers): the new region must match it to half a step of the
    result, at every position from 0 to S - 1 and at some beyond both ends. If the entry points before quantization are
    given, f and the float version are the export's.
    """

    name = "position_table"
    summary = "replaces cosines and sines computed in integers by a table of all positions"
    repairs = True
    check = Table(2.0**-16)

    def sites(self, context: Context) -> Iterable[Site]:
        """One site for each COS or SIN of an integer input whose angles are computed in integers."""
        exported = context.exported.get(context.model.signature_name(context.subgraph))
        exact = {} if exported is None else exact_constants(context.subgraph, exported)
        for rotary in find_rotary(context.subgraph, exact):
            yield Site(rotary.operators[-1], partial(_build, context, rotary))


def _build(context: Context, rotary: Rotary) -> Rewrite:
    result = rotary.result
    axis = rotary.axes[result]
    parameters = None if result.dtype.is_float else result.quantization
    if result.dtype is not DType.FLOAT32 and (parameters is None or len(parameters.scale) != 1):
        raise RefusedError(
            Why.QUANTIZATION, "the table needs one scale", rotary.operators[-1], result
        )
    count, note = _count_positions(context, rotary)
    values = rotary.values(count)
    inexact = 0.0
    if parameters is not None:
        inexact = step_of(result) / 2
        # The excess of cosines over the range, which calibration measured at few positions.
        lowest, highest = real_range(result)
        beyond = max(0.0, float(values.max()) - highest, lowest - float(values.min()))
        if beyond <= _MOST_CUT:
            inexact += beyond
        values = nearest_codes(values, result)
    make = Assembly(context.model, context.constants)
    index = _row_index(make, rotary.position, count)
    _look_up(make, values, index, result, axis)
    exact = "has the exact frequencies of the export" if rotary.is_exact else ""
    return context.rewrite(
        rotary.operators,
        make.finished(result),
        note="; ".join(filter(None, (note, exact))),
        check=Table(
            _ROUNDING + inexact,
            count,
            Reference(rotary.float_form.operators, rotary.float_form.result),
        ),
    )


def _row_index(make: Assembly, position: Tensor, count: int) -> Tensor:
    """The rows of the table for the positions, `[T]`: `min(max(p, 0), count - 1)`."""
    index = position
    for name, bound in (("MAXIMUM", 0), ("MINIMUM", count - 1)):
        number = np.asarray(bound, position.dtype.numpy)
        limit = make.constants.make("positions/constant", number, position.dtype)
        index = make.emit(name, [index, limit], replace(position, name=f"positions/{name.lower()}"))
    if len(position.shape) == 1:
        return index
    return make.reshape_to(index, Tensor("positions/flat", (position.elements,), position.dtype))


def _look_up(
    make: Assembly, values: NDArray[Any], index: Tensor, result: Tensor, axis: int
) -> None:
    """Define the result as rows of a table; if both halves of every row are equal, the table has one of them.

    table [.., S, .., H]   -> GATHER -> result [.., T, .., H]
    table [.., S, .., H/2] -> GATHER -> half [.., T, .., H/2] -> CONCATENATION(half, half) -> result
    """
    first, second = np.array_split(values, 2, axis=-1)
    is_doubled = axis != values.ndim - 1 and np.array_equal(first, second)
    stored = np.ascontiguousarray(first if is_doubled else values)
    table = make.constants.make("positions/table", stored, result.dtype, result.quantization)
    if not is_doubled:
        make.emit("GATHER", [table, index], result, axis=axis)
        return
    half = make.tensor("positions/half", (*result.shape[:-1], first.shape[-1]), result)
    make.emit("GATHER", [table, index], half, axis=axis)
    make.emit("CONCATENATION", [half, half], result, axis=len(result.shape) - 1)


def _count_positions(context: Context, rotary: Rotary) -> tuple[int, str]:
    """The number of positions that the table needs, and a note for users.

    Positions that the integers distinguish stay distinct, even beyond the cache: a ring buffer may be shorter than the
    positions, and a diffusion time step is not a position.
    """
    count = context.positions
    if not count:
        raise RefusedError(
            Why.POSITIONS,
            "the number of positions is unknown: neither the model nor its bundle has a cache that gives it",
        )
    stopped = rotary.last_position(_MOST_POSITIONS)
    if stopped is None:
        text = f"the integers distinguish {_MOST_POSITIONS:,} positions, too many for a table"
        raise RefusedError(Why.LIMIT, text, rotary.operators[-1], rotary.result)
    wrong = f"without this, RoPE is wrong after position {stopped} of {count}"
    return max(count, stopped + 1), wrong if stopped < count - 1 else ""
