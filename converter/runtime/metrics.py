"""How far two arrays are from each other, in one pass over bounded pieces; knows nothing of models or files.

Two elements are *bitwise* equal if their bits are, or if both are NaN: payload and sign of a NaN are not specified
by any kernel, +0 and -0 on the other hand differ. Quantized integers are compared as codes for `bitwise` and
`steps`, and as the real numbers they stand for in everything else.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_opt.base.record import Record
from edge_opt.runtime.tensors import TensorInfo

_PIECE = 1 << 19
_LOGITS_WIDTH = 1024
_ULP_LIMITS = (0, 1, 4, 16, 256, 65536)
_ULP_NAMES = ("0", "1", "2-4", "5-16", "17-256", "257-65536", ">65536", "nan")
_WITH_ULPS = (np.float32, np.float16)

Floats = NDArray[np.float64]
_Real = Callable[[NDArray[Any]], Floats]


@dataclass(frozen=True, slots=True)
class Difference(Record):
    """How output `b` differs from output `a`; worst values over everything that was merged into it.

    `finite` counts the elements of `a` that are finite numbers: where there are none, a comparison says little.
    `differing` counts elements whose bits differ, `outside` those with |a-b| > atol + rtol*|a|. `max_abs` is infinite
    if only one of two values is NaN or infinite; `worst` is its index, with both values. `max_rel` is `max_abs` over
    `largest`, the largest finite |a|. `snr_db` is infinite and `cosine` 1 where nothing differs, NaN where they have
    no meaning (all zero, or not finite). `steps` is the largest difference of codes where both are integers with the
    same quantization. `ulps` counts elements by distance in units in the last place. `kl` (nats), `top1` and `top5`
    are means over rows, for logits.
    """

    elements: int
    finite: int = 0
    differing: int = 0
    outside: int = 0
    max_abs: float = 0.0
    worst: tuple[int, ...] | None = None
    worst_values: tuple[float, float] | None = None
    largest: float = 0.0
    snr_db: float = math.inf
    cosine: float = 1.0
    steps: int | None = None
    ulps: tuple[tuple[str, int], ...] | None = None
    kl: float | None = None
    top1: float | None = None
    top5: float | None = None

    _properties = ("bitwise", "equal", "max_rel")

    @property
    def bitwise(self) -> bool:
        """Whether no element's bits differ."""
        return self.differing == 0

    @property
    def equal(self) -> bool:
        """Whether every element is within the tolerances."""
        return self.outside == 0

    @property
    def max_rel(self) -> float:
        """`max_abs` relative to the range of `a`."""
        if self.max_abs == 0:
            return 0.0
        return self.max_abs / self.largest if self.largest else math.inf

    def to_dict(self) -> dict[str, Any]:
        """The figures as JSON values; a figure that is not a finite number (no noise at all) is null."""
        return {**Record.to_dict(self), "ulps": None if self.ulps is None else dict(self.ulps)}


def measure(
    a: NDArray[Any],
    b: NDArray[Any],
    *,
    quantized_a: TensorInfo | None = None,
    quantized_b: TensorInfo | None = None,
    atol: float = 0.0,
    rtol: float = 0.0,
    logits: bool = False,
) -> Difference:
    """Compares two arrays of the same shape.

    Args:
        a: the reference.
        b: what is judged; its dtype may differ (then no element is bitwise equal).
        quantized_a: quantization of `a`, if its integers stand for real numbers.
        quantized_b: the same of `b`.
        atol: absolute tolerance of `equal`, in real numbers.
        rtol: tolerance relative to |a|, element by element.
        logits: whether rows along the last axis are logits.
    """
    assert a.shape == b.shape, "shapes are compared before elements are"
    one, other = (np.ascontiguousarray(array).reshape(-1) for array in (a, b))
    real_a, real_b = (
        info.reals if info else lambda values: values.astype(np.float64)
        for info in (quantized_a, quantized_b)
    )
    difference, powers = Difference(0), np.zeros(4)
    for begin in range(0, max(one.size, 1), _PIECE):
        piece = slice(begin, begin + _PIECE)
        part, more = _in_reals(real_a(one[piece]), real_b(other[piece]), begin, atol, rtol)
        part = replace(part, **_in_bits(one[piece], other[piece]))
        difference = merge(difference, part) if begin else part
        powers += more
    figures: dict[str, Any] = {}
    if difference.worst is not None:
        figures["worst"] = tuple(int(index) for index in np.unravel_index(difference.worst[0], a.shape))
    if quantized_a and quantized_b and quantized_a.quantization != quantized_b.quantization:
        figures["steps"] = None
    if logits and a.size and a.ndim and a.shape[-1] > 1:
        rows = one.reshape(-1, a.shape[-1]), other.reshape(-1, a.shape[-1])
        figures["kl"], figures["top1"], figures["top5"] = _rows_agreement(*rows, real_a, real_b)
    return replace(difference, snr_db=_snr(*powers.tolist()), cosine=_cosine(*powers.tolist()), **figures)


def merge(one: Difference, other: Difference) -> Difference:
    """The worse of two comparisons of the same output, figure by figure; counts add up."""

    def both(name: str, choose: Callable[[Any, Any], Any]) -> Any:
        figures = getattr(one, name), getattr(other, name)
        return None if None in figures else choose(*figures)

    return replace(
        other if other.max_abs > one.max_abs else one,
        elements=one.elements + other.elements,
        finite=one.finite + other.finite,
        differing=one.differing + other.differing,
        outside=one.outside + other.outside,
        largest=max(one.largest, other.largest),
        snr_db=float(np.minimum(one.snr_db, other.snr_db)),
        cosine=float(np.minimum(one.cosine, other.cosine)),
        steps=both("steps", max),
        ulps=both("ulps", _added),
        kl=both("kl", max),
        top1=both("top1", min),
        top5=both("top5", min),
    )


def _added(
    one: tuple[tuple[str, int], ...], other: tuple[tuple[str, int], ...]
) -> tuple[tuple[str, int], ...]:
    return tuple((name, count + more) for (name, count), (_, more) in zip(one, other, strict=True))


def are_logits(info: TensorInfo) -> bool:
    """Whether an output is taken for logits: by its name, or by a wide last axis that is no cache or embedding."""
    name = info.name.lower()
    if "logit" in name:
        return True
    other = any(word in name for word in ("cache", "slice", "embed", "mask", "pos"))
    return not other and len(info.shape) > 1 and info.shape[-1] >= _LOGITS_WIDTH


def _in_bits(a: NDArray[Any], b: NDArray[Any]) -> dict[str, Any]:
    """What two pieces differ in as bits: elements, steps of codes, units in the last place."""
    if a.dtype != b.dtype:
        return {"differing": a.size}
    other = (a.view(np.uint8) != b.view(np.uint8)).reshape(-1, a.itemsize).any(axis=1)
    differ = other & ~(np.isnan(a) & np.isnan(b)) if other.any() else other
    figures: dict[str, Any] = {"differing": int(np.count_nonzero(differ))}
    if a.dtype.kind in "iu":
        figures["steps"] = int(np.abs(a.astype(np.int64) - b.astype(np.int64)).max(initial=0))
    if a.dtype in _WITH_ULPS:
        places = np.zeros(a.size, np.int64)
        places[differ] = np.searchsorted(_ULP_LIMITS, np.abs(_ordered(a[differ]) - _ordered(b[differ])))
        places[differ & (np.isnan(a) | np.isnan(b))] = len(_ULP_LIMITS) + 1
        counts = np.bincount(places, minlength=len(_ULP_NAMES)).tolist()
        figures["ulps"] = tuple(zip(_ULP_NAMES, counts, strict=True))
    return figures


def _ordered(values: NDArray[Any]) -> NDArray[np.int64]:
    """Neighbouring floats are neighbouring integers once negative ones are mirrored."""
    width = np.int16 if values.dtype == np.float16 else np.int32
    bits = values.view(width).astype(np.int64)
    return np.where(bits < 0, -(bits & np.iinfo(width).max), bits)


def _in_reals(
    a: Floats, b: Floats, begin: int, atol: float, rtol: float
) -> tuple[Difference, tuple[float, float, float, float]]:
    """How two pieces differ as real numbers, and their powers: of a, of b, of both, of the noise.

    `worst` counts from `begin`, in row-major order.
    """
    finite = np.abs(a[np.isfinite(a)])
    difference = Difference(a.size, finite.size, largest=float(finite.max(initial=0.0)))
    with np.errstate(invalid="ignore", over="ignore"):
        if finite.size == a.size and np.array_equal(a, b):
            # The usual case; the rest would find no difference, in ten times the time.
            power = float(a @ a)
            return difference, (power, power, power, 0.0)
        same = (a == b) | (np.isnan(a) & np.isnan(b))
        gap = np.where(same, 0.0, np.abs(a - b))
        gap[np.isnan(gap)] = math.inf
        close = (gap <= atol + rtol * np.abs(a)) & np.isfinite(gap)
        powers = float(a @ a), float(b @ b), float(a @ b), float(gap @ gap)
    difference = replace(difference, outside=int(np.count_nonzero(~same & ~close)))
    place = int(gap.argmax())
    if gap[place] > 0:
        values = float(a[place]), float(b[place])
        difference = replace(
            difference, max_abs=float(gap[place]), worst=(begin + place,), worst_values=values
        )
    return difference, powers


def _snr(power: float, _other: float, _both: float, noise: float) -> float:
    if noise == 0:
        return math.inf
    ratio = power / noise
    return 10 * math.log10(ratio) if math.isfinite(ratio) and ratio > 0 else math.nan


def _cosine(power: float, other: float, both: float, noise: float) -> float:
    if noise == 0:
        return 1.0
    product = math.sqrt(power) * math.sqrt(other)
    return min(both / product, 1.0) if product > 0 and math.isfinite(product) else math.nan


def _rows_agreement(
    a: NDArray[Any], b: NDArray[Any], real_a: _Real, real_b: _Real
) -> tuple[float, float, float]:
    """Mean over rows of KL(softmax(a) || softmax(b)), of equal arg max, and of the overlap of the five highest.

    Rows that are not finite on both sides have no divergence and count as none.
    """
    rows, width = a.shape
    step = max(_PIECE // width, 1)
    divergence = first = five = 0.0
    top = min(5, width)
    for begin in range(0, rows, step):
        one, other = real_a(a[begin : begin + step]), real_b(b[begin : begin + step])
        finite = np.isfinite(one).all(axis=1) & np.isfinite(other).all(axis=1)
        log_one, log_other = (_log_softmax(values[finite]) for values in (one, other))
        divergence += float((np.exp(log_one) * (log_one - log_other)).sum())
        first += float(np.count_nonzero(one.argmax(axis=1) == other.argmax(axis=1)))
        best_one, best_other = (np.argpartition(v, width - top, axis=1)[:, -top:] for v in (one, other))
        five += float((best_one[:, :, np.newaxis] == best_other[:, np.newaxis, :]).any(axis=2).sum()) / top
    return max(divergence / rows, 0.0), first / rows, five / rows


def _log_softmax(rows: Floats) -> Floats:
    shifted = rows - rows.max(axis=1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)))
