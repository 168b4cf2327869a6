"""How far two arrays are from each other, in one pass over bounded pieces; knows nothing of models or files.

Two elements are *bitwise* equal if their bits are, or if both are NaN: payload and sign of a NaN are not specified
by any kernel, +0 and -0 on the other hand differ. Quantized integers are compared as codes for `bitwise` and
`steps`, and as the real numbers they stand for in everything else.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_opt.proof.tensors import TensorInfo
from edge_opt.schema.strict_json import strict

_PIECE = 1 << 19
_LOGITS_WIDTH = 1024
_ULP_LIMITS = (0, 1, 4, 16, 256, 65536)
_ULP_NAMES = ("0", "1", "2-4", "5-16", "17-256", "257-65536", ">65536", "nan")
_WITH_ULPS = (np.float32, np.float16)

Floats = NDArray[np.float64]
_Real = Callable[[NDArray[Any]], Floats]


@dataclass(frozen=True, slots=True)
class Difference:
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

    def to_json(self) -> dict[str, Any]:
        """The figures as JSON values; a figure that is not a finite number (no noise at all) is null."""
        ulps = None if self.ulps is None else dict(self.ulps)
        judged = {"bitwise": self.bitwise, "equal": self.equal}
        return strict({**judged, **asdict(self), "max_rel": self.max_rel, "ulps": ulps})


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
    real_a, real_b = _reals(quantized_a), _reals(quantized_b)
    bits, sums = _Bits(one, other), _Sums(a.shape, atol, rtol)
    for begin in range(0, one.size, _PIECE):
        piece = slice(begin, begin + _PIECE)
        bits.add(one[piece], other[piece])
        sums.add(begin, real_a(one[piece]), real_b(other[piece]))
    found = replace(sums.result(), differing=bits.differing, steps=bits.steps, ulps=bits.ulps())
    if quantized_a and quantized_b and quantized_a.quantization != quantized_b.quantization:
        found = replace(found, steps=None)
    if logits and a.size and a.ndim and a.shape[-1] > 1:
        rows = one.reshape(-1, a.shape[-1]), other.reshape(-1, a.shape[-1])
        kl, top1, top5 = _rows_agreement(*rows, real_a, real_b)
        found = replace(found, kl=kl, top1=top1, top5=top5)
    return found


def _reals(info: TensorInfo | None) -> _Real:
    return info.reals if info else lambda values: values.astype(np.float64)


def merge(one: Difference, other: Difference) -> Difference:
    """The worse of two comparisons of the same output, figure by figure; counts add up."""
    worse = other if other.max_abs > one.max_abs else one
    return replace(
        worse,
        elements=one.elements + other.elements,
        finite=one.finite + other.finite,
        differing=one.differing + other.differing,
        outside=one.outside + other.outside,
        largest=max(one.largest, other.largest),
        snr_db=float(np.minimum(one.snr_db, other.snr_db)),
        cosine=float(np.minimum(one.cosine, other.cosine)),
        **{name: _of_both(choose, one, other, name) for name, choose in _MERGED.items()},
    )


def _of_both(choose: Callable[[Any, Any], Any], one: Difference, other: Difference, name: str) -> Any:
    figures = getattr(one, name), getattr(other, name)
    return None if None in figures else choose(*figures)


def _added(
    one: tuple[tuple[str, int], ...], other: tuple[tuple[str, int], ...]
) -> tuple[tuple[str, int], ...]:
    return tuple((name, count + more) for (name, count), (_, more) in zip(one, other, strict=True))


_MERGED: dict[str, Callable[[Any, Any], Any]] = {
    "steps": max,
    "kl": max,
    "top1": min,
    "top5": min,
    "ulps": _added,
}


def are_logits(info: TensorInfo) -> bool:
    """Whether an output is taken for logits: by its name, or by a wide last axis that is no cache or embedding."""
    name = info.name.lower()
    if "logit" in name:
        return True
    other = any(word in name for word in ("cache", "slice", "embed", "mask", "pos"))
    return not other and len(info.shape) > 1 and info.shape[-1] >= _LOGITS_WIDTH


class _Bits:
    """What is counted over the pieces in bits: elements that differ, steps of codes, units in the last place."""

    def __init__(self, a: NDArray[Any], b: NDArray[Any]) -> None:
        same = a.dtype == b.dtype
        self.differing = 0
        self.steps = 0 if same and a.dtype.kind in "iu" else None
        self._counts = np.zeros(len(_ULP_NAMES), np.int64) if same and a.dtype in _WITH_ULPS else None

    def add(self, a: NDArray[Any], b: NDArray[Any]) -> None:
        if a.dtype != b.dtype:
            self.differing += a.size
            return
        other = (a.view(np.uint8) != b.view(np.uint8)).reshape(a.size, -1).any(axis=1)
        differ = other & ~(np.isnan(a) & np.isnan(b)) if other.any() else other
        self.differing += int(np.count_nonzero(differ))
        if self.steps is not None:
            self.steps = max(self.steps, int(np.abs(a.astype(np.int64) - b.astype(np.int64)).max()))
        if self._counts is not None:
            places = np.zeros(a.size, np.int64)
            places[differ] = np.searchsorted(_ULP_LIMITS, np.abs(_ordered(a[differ]) - _ordered(b[differ])))
            places[differ & (np.isnan(a) | np.isnan(b))] = len(_ULP_LIMITS) + 1
            self._counts += np.bincount(places, minlength=len(_ULP_NAMES))

    def ulps(self) -> tuple[tuple[str, int], ...] | None:
        return None if self._counts is None else tuple(zip(_ULP_NAMES, self._counts.tolist(), strict=True))


def _ordered(values: NDArray[Any]) -> NDArray[np.int64]:
    """Neighbouring floats are neighbouring integers once negative ones are mirrored."""
    width = np.int16 if values.dtype == np.float16 else np.int32
    bits = values.view(width).astype(np.int64)
    return np.where(bits < 0, -(bits & np.iinfo(width).max), bits)


class _Sums:
    """What is added up over the pieces in real numbers."""

    def __init__(self, shape: tuple[int, ...], atol: float, rtol: float) -> None:
        self.shape = shape
        self.atol = atol
        self.rtol = rtol
        self.finite = 0
        self.outside = 0
        self.max_abs = 0.0
        self.worst: int | None = None
        self.values: tuple[float, float] | None = None
        self.largest = 0.0
        self.aa = self.bb = self.ab = self.noise = 0.0

    def add(self, begin: int, a: Floats, b: Floats) -> None:
        finite = np.abs(a[np.isfinite(a)])
        self.finite += finite.size
        self.largest = max(self.largest, float(finite.max(initial=0.0)))
        with np.errstate(invalid="ignore", over="ignore"):
            if finite.size == a.size and np.array_equal(a, b):
                # The usual case; the rest would find no difference, in ten times the time.
                power = float(a @ a)
                self.aa, self.bb, self.ab = self.aa + power, self.bb + power, self.ab + power
                return
            same = (a == b) | (np.isnan(a) & np.isnan(b))
            gap = np.where(same, 0.0, np.abs(a - b))
            gap[np.isnan(gap)] = math.inf
            close = (gap <= self.atol + self.rtol * np.abs(a)) & np.isfinite(gap)
            self.outside += int(np.count_nonzero(~same & ~close))
            self.aa += float(a @ a)
            self.bb += float(b @ b)
            self.ab += float(a @ b)
            self.noise += float(gap @ gap)
        place = int(gap.argmax())
        if gap[place] > self.max_abs:
            self.max_abs = float(gap[place])
            self.worst = begin + place
            self.values = float(a[place]), float(b[place])

    def result(self) -> Difference:
        worst = None
        if self.worst is not None:
            worst = tuple(int(i) for i in np.unravel_index(self.worst, self.shape))
        return Difference(
            elements=math.prod(self.shape),
            finite=self.finite,
            outside=self.outside,
            max_abs=self.max_abs,
            worst=worst,
            worst_values=self.values,
            largest=self.largest,
            snr_db=self._snr(),
            cosine=self._cosine(),
        )

    def _snr(self) -> float:
        if self.noise == 0:
            return math.inf
        ratio = self.aa / self.noise
        return 10 * math.log10(ratio) if math.isfinite(ratio) and ratio > 0 else math.nan

    def _cosine(self) -> float:
        if self.noise == 0:
            return 1.0
        product = math.sqrt(self.aa) * math.sqrt(self.bb)
        return min(self.ab / product, 1.0) if product > 0 and math.isfinite(product) else math.nan


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
        log_one, log_other = _log_softmax(one[finite]), _log_softmax(other[finite])
        divergence += float((np.exp(log_one) * (log_one - log_other)).sum())
        first += float(np.count_nonzero(one.argmax(axis=1) == other.argmax(axis=1)))
        best_one, best_other = _best(one, top), _best(other, top)
        five += float((best_one[:, :, np.newaxis] == best_other[:, np.newaxis, :]).any(axis=2).sum()) / top
    return max(divergence / rows, 0.0), first / rows, five / rows


def _log_softmax(rows: Floats) -> Floats:
    shifted = rows - rows.max(axis=1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)))


def _best(rows: Floats, count: int) -> NDArray[np.intp]:
    return np.argpartition(rows, rows.shape[1] - count, axis=1)[:, rows.shape[1] - count :]
