"""Differences between two arrays, in one pass over pieces of bounded size; independent of models and files.

Two elements are *bitwise* equal if their bits are, or if both are NaN (no kernel specifies payload and sign); +0 and
-0 differ. Quantized integers are compared as codes for `bitwise` and `steps`, otherwise as the reals they stand for.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import reduce
from operator import add
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from edge_opt.base.record import Record
from edge_opt.runtime.protocol import Array
from edge_opt.runtime.tensors import TensorInfo

_PIECE = 1 << 19
_LOGITS_WIDTH = 1024

Floats = NDArray[np.float64]
Infos = tuple[TensorInfo, TensorInfo]
"""The descriptions of two arrays, which say what numbers their elements stand for."""


@dataclass(frozen=True, slots=True)
class Tolerance(Record):
    """How far results may be apart; by default not at all, so their bits must be equal.

    One of these suffices: at most `steps` quantization steps; `relative` to the largest value; or
    |a-b| <= atol + rtol*|a| for every element. Of integers that stand for themselves, such as token IDs, only `atol`
    permits a difference: they have no rounding.
    """

    relative: float = 0.0
    steps: int = 0
    atol: float = 0.0
    rtol: float = 0.0

    def permits(self, found: Difference) -> bool:
        """True if a difference, which `measure` found with this tolerance, is within it."""
        if found.bitwise:
            return True
        if not found.plain:
            if self.steps and found.steps is not None and found.steps <= self.steps:
                return True
            if self.relative and found.max_rel <= self.relative:
                return True
        return self.atol + self.rtol > 0 and found.outside == 0  # never with NaN


NONE = Tolerance()


@dataclass(frozen=True, slots=True)
class Difference(Record):
    """Difference of output `b` from output `a`, over all comparisons merged into it.

    `finite` counts the finite numbers in `a`, `differing` the elements whose bits differ, `outside` those with
    |a-b| > atol + rtol*|a|. `max_abs` is infinite if only one of two values is NaN or infinite; `worst` is its index,
    with both values. `max_rel` is `max_abs` over `largest`, the largest finite |a|. `steps` is the largest difference
    of integers with equal quantization. `kl` (nats) and `top1` are means over rows of logits; of several runs, the
    worst. `powers` are sums of squares: of `a`, and of the difference. `plain`: the elements are integers that stand
    for themselves.
    """

    elements: int = 0
    finite: int = 0
    differing: int = 0
    outside: int = 0
    max_abs: float = 0.0
    worst: tuple[int, ...] | None = None
    worst_values: tuple[float, float] | None = None
    largest: float = 0.0
    steps: int | None = None
    kl: float | None = None
    top1: float | None = None
    powers: tuple[float, float] = (0.0, 0.0)
    plain: bool = False

    _properties = ("bitwise", "equal", "max_rel", "snr_db")
    _left_out = ("powers", "plain")

    @property
    def bitwise(self) -> bool:
        """True if no element's bits differ."""
        return self.differing == 0

    @property
    def equal(self) -> bool:
        """True if every element is within the tolerances."""
        return self.outside == 0

    @property
    def max_rel(self) -> float:
        """`max_abs` relative to the range of `a`."""
        if self.max_abs == 0:
            return 0.0
        return self.max_abs / self.largest if self.largest else math.inf

    @property
    def snr_db(self) -> float:
        """Signal to noise in decibel: infinite if nothing differs, NaN if undefined."""
        signal, noise = self.powers
        if noise == 0:
            return math.inf
        ratio = signal / noise
        return 10 * math.log10(ratio) if math.isfinite(ratio) and ratio > 0 else math.nan


def measure(
    a: Array,
    b: Array,
    infos: Infos,
    *,
    tolerance: Tolerance = NONE,
    logits: bool = False,
) -> Difference:
    """Compare two arrays of the same shape, `a` is the reference; with `logits`, rows of the last axis are logits."""
    assert a.shape == b.shape, "shapes must be equal"
    one = np.ascontiguousarray(a).reshape(-1)
    other = np.ascontiguousarray(b).reshape(-1)
    info_a, info_b = infos
    plain = info_a.is_plain_integer
    if plain:
        tolerance = replace(tolerance, rtol=0.0)
    pieces: list[Difference] = []
    for begin in range(0, max(one.size, 1), _PIECE):
        at = slice(begin, begin + _PIECE)
        pieces.append(_of_piece(one[at], other[at], infos, begin, tolerance))
    found = replace(reduce(merge, pieces), plain=plain)
    if found.worst is not None:
        indices = np.unravel_index(found.worst[0], a.shape)
        found = replace(found, worst=tuple(map(int, indices)))
    if info_a.quantization != info_b.quantization:
        found = replace(found, steps=None)
    if logits and a.size and a.ndim and a.shape[-1] > 1:
        width = a.shape[-1]
        kl, top1 = _of_rows(one.reshape(-1, width), other.reshape(-1, width), infos)
        found = replace(found, kl=kl, top1=top1)
    return found


_Figures = TypeVar("_Figures", bound=Difference)
_MERGED: dict[str, Callable[[Any, Any], Any]] = {
    **dict.fromkeys(("elements", "finite", "differing", "outside"), add),
    **dict.fromkeys(("largest", "steps", "kl"), max),
    "top1": min,
    "powers": lambda one, other: tuple(map(add, one, other)),
}


def merge(one: _Figures, other: _Figures) -> _Figures:
    """Merge two comparisons of the same output: counts and powers are added, of other figures the worse is kept."""
    figures: dict[str, Any] = {}
    for name, choose in _MERGED.items():
        both = getattr(one, name), getattr(other, name)
        figures[name] = None if None in both else choose(*both)
    return replace(other if other.max_abs > one.max_abs else one, **figures)


def are_logits(info: TensorInfo) -> bool:
    """True if an output seems to be logits: by name, or by a wide last axis if the name says nothing else."""
    name = info.name.lower()
    if "logit" in name:
        return True
    other = any(word in name for word in ("cache", "slice", "embed", "mask", "pos"))
    return not other and len(info.shape) > 1 and info.shape[-1] >= _LOGITS_WIDTH


def _of_piece(a: Array, b: Array, infos: Infos, begin: int, tolerance: Tolerance) -> Difference:
    """The difference of two pieces that begin at element `begin`."""
    info_a, info_b = infos
    differing = _count_differing(a, b)
    steps = None
    if a.dtype == b.dtype and a.dtype.kind in "iu":
        steps = 0
        if differing:
            distances = np.abs(a.astype(np.int64) - b.astype(np.int64))
            steps = int(distances.max())
    one = info_a.reals(a)
    other = one if not differing and info_a == info_b else info_b.reals(b)
    finite = one[np.isfinite(one)]
    largest = float(np.abs(finite).max(initial=0.0))
    found = Difference(a.size, finite.size, differing, largest=largest, steps=steps)
    with np.errstate(invalid="ignore", over="ignore"):
        # Beyond 2**53, real numbers do not distinguish integers.
        are_hidden = a.itemsize == 8 and bool(steps)
        if other is one or (not are_hidden and np.array_equal(one, other)):
            # The usual case; the rest would find no difference and take ten times as long.
            return replace(found, powers=(float(one @ one), 0.0))
        gap = _gap(one, other)
        if are_hidden:
            gap[(gap == 0) & (a != b)] = 1.0
        allowed = tolerance.atol + tolerance.rtol * np.abs(one)
        outside = (gap > allowed) | np.isinf(gap)
        powers = float(one @ one), float(gap @ gap)
    found = replace(found, outside=int(np.count_nonzero(outside)), powers=powers)
    place = int(gap.argmax())
    if not gap[place]:
        return found
    values = float(one[place]), float(other[place])
    return replace(found, max_abs=float(gap[place]), worst=(begin + place,), worst_values=values)


def _count_differing(a: Array, b: Array) -> int:
    """Number of elements whose bits differ; all of them if the types do."""
    if a.dtype != b.dtype:
        return a.size
    word = f"u{a.itemsize}"
    bits = a.view(word) != b.view(word)
    if bits.any():
        bits &= ~(np.isnan(a) & np.isnan(b))
    return int(np.count_nonzero(bits))


def _gap(one: Floats, other: Floats) -> Floats:
    """|one - other| by element: 0 for two NaN or equal infinities, infinite if only one number is NaN."""
    gap = np.abs(one - other)
    gap[(one == other) | (np.isnan(one) & np.isnan(other))] = 0.0
    gap[np.isnan(gap)] = math.inf
    return gap


def _of_rows(a: Array, b: Array, infos: Infos) -> tuple[float, float]:
    """Means over rows: KL(softmax(a) || softmax(b)), 0 if a value is not finite; equal arg max."""
    rows, width = a.shape
    step = max(_PIECE // width, 1)
    divergence = 0.0
    agreeing = np.int64(0)
    for begin in range(0, rows, step):
        one = infos[0].reals(a[begin : begin + step])
        other = infos[1].reals(b[begin : begin + step])
        finite = np.isfinite(one).all(axis=1) & np.isfinite(other).all(axis=1)
        log_one = log_softmax(one[finite])
        log_other = log_softmax(other[finite])
        divergence += float((np.exp(log_one) * (log_one - log_other)).sum())
        agreeing += (one.argmax(axis=1) == other.argmax(axis=1)).sum()
    return max(divergence / rows, 0.0), float(agreeing / rows)


def log_softmax(rows: Floats) -> Floats:
    """The log-likelihoods that rows of logits stand for."""
    shifted = rows - rows.max(axis=1, keepdims=True)
    sums = np.exp(shifted).sum(axis=1, keepdims=True)
    return np.asarray(shifted - np.log(sums))
