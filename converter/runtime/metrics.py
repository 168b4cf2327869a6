"""How far two arrays are from each other, in one pass over bounded pieces; knows nothing of models or files.

Two elements are *bitwise* equal if their bits are, or if both are NaN: payload and sign of a NaN are not specified
by any kernel, +0 and -0 on the other hand differ. Quantized integers are compared as codes for `bitwise` and
`steps`, and as the real numbers they stand for in everything else.
"""

import math
from collections.abc import Callable, Sequence
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
    reals = [_reals(info) for info in (quantized_a, quantized_b)]
    difference, powers = Difference(0), np.zeros(4)
    for begin in range(0, max(one.size, 1), _PIECE):
        piece = one[begin : begin + _PIECE], other[begin : begin + _PIECE]
        part, more = _of_piece(*piece, reals, begin, atol, rtol)
        difference = merge(difference, part) if begin else part
        powers += more
    figures = _of_powers(*powers.tolist())
    if difference.worst is not None:
        figures["worst"] = tuple(int(index) for index in np.unravel_index(difference.worst[0], a.shape))
    if quantized_a and quantized_b and quantized_a.quantization != quantized_b.quantization:
        figures["steps"] = None
    if logits and a.size and a.ndim and a.shape[-1] > 1:
        figures |= _of_rows(one.reshape(-1, a.shape[-1]), other.reshape(-1, a.shape[-1]), reals)
    return replace(difference, **figures)


def _reals(info: TensorInfo | None) -> _Real:
    return info.reals if info else lambda values: values.astype(np.float64)


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
        ulps=both("ulps", lambda a, b: tuple((name, count + b[at][1]) for at, (name, count) in enumerate(a))),
        kl=both("kl", max),
        top1=both("top1", min),
        top5=both("top5", min),
    )


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
    if a.dtype in (np.float32, np.float16):
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


def _of_piece(
    a: NDArray[Any], b: NDArray[Any], reals: Sequence[_Real], begin: int, atol: float, rtol: float
) -> tuple[Difference, tuple[float, float, float, float]]:
    """How two pieces differ, and their powers: of a, of b, of both, of the noise; `worst` counts from `begin`."""
    bits = _in_bits(a, b)
    a, b = reals[0](a), reals[1](b)
    finite = np.abs(a[np.isfinite(a)])
    difference = Difference(a.size, finite.size, largest=float(finite.max(initial=0.0)), **bits)
    with np.errstate(invalid="ignore", over="ignore"):
        if finite.size == a.size and np.array_equal(a, b):
            # The usual case; the rest would find no difference, in ten times the time.
            power = float(a @ a)
            return difference, (power, power, power, 0.0)
        gap = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, np.abs(a - b))
        gap[np.isnan(gap)] = math.inf
        outside = (gap > 0) & ~((gap <= atol + rtol * np.abs(a)) & np.isfinite(gap))
        powers = float(a @ a), float(b @ b), float(a @ b), float(gap @ gap)
    difference = replace(difference, outside=int(np.count_nonzero(outside)))
    place = int(gap.argmax())
    if gap[place] > 0:
        worst: dict[str, Any] = {
            "worst": (begin + place,),
            "worst_values": (float(a[place]), float(b[place])),
        }
        difference = replace(difference, max_abs=float(gap[place]), **worst)
    return difference, powers


def _of_powers(power: float, other: float, both: float, noise: float) -> dict[str, Any]:
    """Signal to noise in decibel, and cosine: of equal arrays infinite and 1, NaN where they have no meaning."""
    if noise == 0:
        return {"snr_db": math.inf, "cosine": 1.0}
    ratio, product = power / noise, math.sqrt(power) * math.sqrt(other)
    return {
        "snr_db": 10 * math.log10(ratio) if math.isfinite(ratio) and ratio > 0 else math.nan,
        "cosine": min(both / product, 1.0) if product > 0 and math.isfinite(product) else math.nan,
    }


def _of_rows(a: NDArray[Any], b: NDArray[Any], reals: Sequence[_Real]) -> dict[str, float]:
    """Mean over rows of KL(softmax(a) || softmax(b)), of equal arg max, and of the overlap of the five highest.

    Rows that are not finite on both sides have no divergence and count as none.
    """
    rows, width = a.shape
    step, top = max(_PIECE // width, 1), min(5, width)
    sums = np.zeros(3)
    for begin in range(0, rows, step):
        one, other = reals[0](a[begin : begin + step]), reals[1](b[begin : begin + step])
        finite = np.isfinite(one).all(axis=1) & np.isfinite(other).all(axis=1)
        log_one, log_other = (log_softmax(values[finite]) for values in (one, other))
        best_one, best_other = (np.argpartition(v, width - top, axis=1)[:, -top:] for v in (one, other))
        sums += (
            (np.exp(log_one) * (log_one - log_other)).sum(),
            np.count_nonzero(one.argmax(axis=1) == other.argmax(axis=1)),
            (best_one[:, :, np.newaxis] == best_other[:, np.newaxis, :]).sum() / top,
        )
    divergence, first, five = (sums / rows).tolist()
    return {"kl": max(divergence, 0.0), "top1": first, "top5": five}


def log_softmax(rows: Floats) -> Floats:
    """The log-likelihoods that rows of logits stand for."""
    shifted = rows - rows.max(axis=1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)))
