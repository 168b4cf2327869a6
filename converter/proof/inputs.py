"""Realistic and hostile inputs for a signature, from names, shapes and a seed; must not load the runtime.

`plan` decides what each input is (a mask, a position, a cache, ...) and how the masks, positions and caches of one
signature fit together; `array_of` makes the array of one plan. A plan is plain data, so that big arrays are made where
they are used. The same seed gives the same numbers whatever the order of the inputs, and the same real numbers to a
float tensor and to its quantized counterpart.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from edge_opt.proof import extremes, noise
from edge_opt.proof.extremes import Extreme, Side
from edge_opt.proof.roles import Role, cache_length, role_of
from edge_opt.proof.tensors import SignatureInfo, TensorInfo

Kind = Literal["realistic", "masked_rows", "large", "denormal", "nan", Extreme]
"""How inputs are made: of a whole model the first five, of a region realistic and extreme ones."""

HOSTILE: tuple[Kind, ...] = ("masked_rows", "large", "denormal", "nan")

_MASKED = -100.0  # what the exporter's own masks add
_KNOWN_TOKENS = 128
_WINDOW = 512
_LARGE = 1000.0
_PIECE = 1 << 15  # elements that are worked on at a time, so that they stay in a core's cache
_SMALL = {"float16": 2.0**-20, "float64": 2.0**-1060}  # makes values of about 1 denormal


@dataclass(frozen=True, slots=True)
class InputHint:
    """What a caller knows of an input and a name does not say.

    `masked` and `opened` are the values of a masked and an open entry of a mask (by default those that its type and
    exporters have). `masked_rows` are the query rows (along axis -2) that are masked everywhere. `spread`
    scales plain data: a quarter stays that much closer to zero. `side` is where a region's input goes. `every` has all
    values that an input of integers takes, in as many runs as that needs; beyond `ends` the first version
    gets the nearer of them.
    """

    role: Role = "data"
    masked: float | None = None
    opened: float | None = None
    masked_rows: tuple[int, ...] = ()
    spread: float = 1.0
    side: Side = "other"
    every: tuple[int, ...] = ()
    ends: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Stored:
    """An array that lies in a file, in the dtype and quantization of `info`."""

    path: str
    offset: int
    info: TensorInfo

    def array(self) -> NDArray[Any]:
        """The array, mapped."""
        return np.memmap(self.path, np.dtype(self.info.dtype), "r", self.offset, self.info.shape)


@dataclass(frozen=True, slots=True)
class InputPlan:
    """How to make one input: `info` says for which tensor, `key` names the stream of random numbers.

    `start` is the position of the first new token, `past` the number of leading mask columns that stand for the
    cache, `padding` the number of masked tokens at the beginning, `window` how far back a row sees (0: all the way),
    `limit` the end of the range of a token or of an index into a table. `source` is the quantized counterpart whose
    range the real numbers take, `spread` what they are multiplied by. `stored` is where the real numbers lie that it
    takes instead of random ones. The rest is as in `InputHint`.
    """

    info: TensorInfo
    key: str
    seed: int
    role: Role
    kind: Kind = "realistic"
    start: int = 0
    past: int = 0
    window: int = 0
    limit: int = 2
    padding: int = 0
    masked: float | None = None
    opened: float | None = None
    masked_rows: tuple[int, ...] = ()
    source: TensorInfo | None = None
    spread: float = 1.0
    side: Side = "other"
    every: tuple[int, ...] = ()
    ends: tuple[int, int] | None = None
    stored: Stored | None = None


@dataclass(frozen=True, slots=True)
class _Scene:
    """How the inputs of one signature fit together: the masks' cache part, the first position, the tokens.

    `rows` is how many columns of a mask stand for the new tokens; what is before them is the cache, or a shorter ring.
    """

    past: int
    rows: int
    start: int
    vocabulary: int


def plan(
    signature: SignatureInfo,
    *,
    seed: int = 0,
    run: int = 0,
    kind: Kind = "realistic",
    hints: Sequence[InputHint | None] | None = None,
    start: int | None = None,
) -> tuple[InputPlan, ...]:
    """One plan per input of the signature.

    With `hints` (one per input, None for plain data) names do not decide. Later runs differ in position and in the
    kind of mask: causal, with padding, sliding window, empty cache. `start` is the position of the first new token,
    by default one that the seed decides.
    """
    if hints is None:
        known = [InputHint(role_of(info)) for info in signature.inputs]
    else:
        known = [hint or InputHint() for hint in hints]
    scene = _scene(signature, [hint.role for hint in known], seed, run)
    scene = scene if start is None else replace(scene, start=start)
    plans = []
    for info, hint in zip(signature.inputs, known, strict=True):
        key = f"{signature.name}/{run}/{_stream(info.name, hint.role)}"
        plans.append(replace(_plan_one(info, hint, scene, run), seed=seed, kind=kind, key=key))
    return tuple(plans)


def pair(made: InputPlan, other: TensorInfo) -> tuple[InputPlan, InputPlan]:
    """The plan for this input and for its counterpart in another model: the same real numbers.

    If one of the two is quantized, both take its range: what it cannot represent would be no fair comparison.
    """
    source = made.info if made.info.quantized or not other.quantized else other
    return replace(made, source=source), replace(made, source=source, info=other)


def extreme_of(made: InputPlan, realistic: NDArray[Any]) -> NDArray[Any]:
    """The array of a plan of extreme inputs, made of the realistic one of the same tensor."""
    plain = np.dtype(made.info.dtype).kind in "iu" and not made.info.quantized
    if made.role not in {"data", "cache", "rotary", "embedding"} or plain or not realistic.size:
        return realistic
    seed = noise.seed_of(_seed(made), made.kind)
    return extremes.extreme(realistic, made.kind, made.side, seed, made.info.zero_point)


def array_of(made: InputPlan) -> NDArray[Any]:
    """The array of one plan, in the dtype of its tensor; where it takes `every` value, with a first axis for runs."""
    if made.every:
        runs = math.ceil(len(made.every) / math.prod(made.info.shape))
        return np.resize(np.array(made.every, made.info.dtype), (runs, *made.info.shape))
    if made.kind in extremes.KINDS:
        return extreme_of(made, array_of(replace(made, kind="realistic")))
    if made.stored is not None:
        return converted(made.stored.array(), made.stored.info, made.info)
    source = made.source or made.info
    if made.role == "mask":
        return _encode(_mask(made), made.info)
    if made.role == "position":
        return _encode(_positions(made), made.info)
    if made.role in {"token", "index"}:
        first = int(made.role == "token")  # 0 often stands for padding
        return _encode(_integers(made, first, max(made.limit, first + 1)), made.info)
    if made.role == "rotary":
        return _hostile(_encode(_rotary(made), made.info), made)
    if np.dtype(source.dtype).kind in "iub" and not source.quantized:
        return _plain_integers(made)
    return _hostile(_data(made, source), made)


def converted(array: NDArray[Any], source: TensorInfo, target: TensorInfo) -> NDArray[Any]:
    """The same real numbers in the type that the target has."""
    if array.dtype == target.dtype and source.quantization == target.quantization:
        return array
    return _encode(source.reals(array), target)


def _stream(name: str, role: Role) -> str:
    """The cosine and the sine of one table come from the same angles."""
    return re.sub(r"(^|_)(cos|sin)(?=$|_)", r"\1", name.lower()) if role == "rotary" else name


def _scene(signature: SignatureInfo, roles: Sequence[Role], seed: int, run: int) -> _Scene:
    inputs = list(zip(signature.inputs, roles, strict=True))
    masks = [info.shape for info, role in inputs if role == "mask"]
    masks += [info.shape for info in signature.outputs if "mask" in info.name]
    masks = [shape for shape in masks if len(shape) > 2 or (len(shape) == 2 and shape[0] > 1)]
    positions = [info.shape[-1] for info, role in inputs if role == "position" and info.shape]
    rows = max([shape[-2] for shape in masks] + positions, default=1)
    width = max((shape[-1] for shape in masks), default=0)
    caches = [info for info, role in inputs if role == "cache"]
    past, room = _cache_columns(width, rows, [info.shape[1:] for info in caches if "slice" not in info.name])
    if not width and caches:
        room = max(cache_length(signature) - rows, 0)
    begin, span = room // 4, room // 2
    tables = [info.entries for info, role in inputs if role == "position" and info.entries]
    if tables:
        last = max(min(tables) - rows, 0)
        # Where nothing else depends on the position, it may be anywhere in its table.
        room, begin, span = (min(room, last), begin, span) if width or caches else (last, 0, last)
    start = 0 if run % 4 == 3 else noise.seed_of(seed, "start", run) % (span + 1) + begin
    words = [info.shape[-1] for info in signature.outputs if "logits" in info.name and info.shape]
    return _Scene(past, width - past, min(start, room), min(words, default=_KNOWN_TOKENS))


def _cache_columns(width: int, rows: int, caches: Sequence[tuple[int, ...]]) -> tuple[int, int]:
    """How many leading mask columns are the cache alone, and the last position that still leaves room for `rows`."""
    sizes = {size for shape in caches for size in shape}
    if width in sizes and width - rows not in sizes:
        return 0, max(width - rows, 0)
    if width > rows:
        return width - rows, max(width - 2 * rows, 0)
    return 0, 0 if width else 3 * _KNOWN_TOKENS // 8


def _plan_one(info: TensorInfo, hint: InputHint, scene: _Scene, run: int) -> InputPlan:
    made = InputPlan(info, "", 0, start=scene.start, **asdict(hint))
    if info.entries and hint.role in {"token", "data"}:
        return replace(made, role="index", limit=info.entries)
    if hint.role == "token":
        return replace(made, limit=scene.vocabulary)
    if hint.role != "mask":
        return made
    width = info.shape[-1] if info.shape else 1
    sliding = "local" in info.name or "sliding" in info.name or run % 4 == 2
    return replace(
        made,
        past=max(width - scene.rows, 0) if scene.past else 0,
        window=min(_WINDOW, max(width // 4, 1)) if sliding else 0,
        padding=min(scene.start // 4 + 1, width // 4) if run % 4 == 1 else 0,
    )


def _mask(made: InputPlan) -> NDArray[np.float32]:
    """Causal over the new tokens, open over the filled part of the cache; one-row masks of rank 2 are padding."""
    shape = made.info.shape
    width = shape[-1] if shape else 1
    rows = shape[-2] if len(shape) > 1 else 1
    column = np.arange(width)[np.newaxis, :]
    row = np.arange(rows)[:, np.newaxis]
    if len(shape) < 3 and rows == 1 and np.dtype(made.info.dtype).kind != "f":
        visible = column < max(width - width // 4 * (made.padding > 0), 1)
    elif made.past:
        # Columns [0, past) are the cache, each with the last position before `start` that goes there: in a whole cache
        # its own number, in a ring one some turns later. The others are the new tokens themselves.
        row = row % max(width - made.past, 1)
        cached = made.start - 1 - (made.start - 1 - column) % made.past
        position = np.where(column < made.past, cached, column - made.past + made.start)
        visible = (position >= 0) & _seen(position, row + made.start, made)
    else:
        visible = _seen(column, row % width + (made.start if width > rows else 0), made)
    additive = np.dtype(made.info.dtype).kind == "f" or made.info.quantized
    masked = (_MASKED if additive else 0.0) if made.masked is None else made.masked
    opened = (0.0 if additive else 1.0) if made.opened is None else made.opened
    values = np.where(visible, np.float32(opened), np.float32(masked))
    for index in _masked_rows(made, rows):
        values[index] = masked
    return values.reshape(shape) if len(shape) < 3 else np.broadcast_to(values, shape)


def _seen(column: NDArray[np.int64], row: NDArray[np.int64], made: InputPlan) -> NDArray[np.bool_]:
    visible = (column <= row) & (column >= made.padding) | (column == row)
    if made.window:
        visible &= column > row - made.window
    return np.asarray(visible)


def _masked_rows(made: InputPlan, rows: int) -> Sequence[int]:
    if made.masked_rows:
        return [row for row in made.masked_rows if row < rows]
    return range(0, rows, 4) if made.kind == "masked_rows" else ()


def _positions(made: InputPlan) -> NDArray[np.float32]:
    count = made.info.shape[-1] if made.info.shape else 1
    values = (made.start + np.arange(count)).astype(np.float32)
    return np.broadcast_to(values, made.info.shape or (1,)).reshape(made.info.shape)


def _rotary(made: InputPlan) -> NDArray[np.float32]:
    cosine, sine = noise.circle(_seed(made), math.prod(made.info.shape))
    return (sine if "sin" in made.info.name.lower() else cosine).reshape(made.info.shape)


def _data(made: InputPlan, source: TensorInfo) -> NDArray[Any]:
    """Normal values in the tensor's type; where there are more of them than different ones, each is made once."""
    summed = noise.sums(_seed(made), math.prod(made.info.shape))
    many = summed.size > noise.SUMS
    wanted = np.arange(noise.SUMS, dtype=np.uint32) if many else summed
    values = np.empty(wanted.size, made.info.dtype)
    for begin in range(0, wanted.size, _PIECE):
        piece = noise.normal_of(wanted[begin : begin + _PIECE])
        values[begin : begin + _PIECE] = _encode(_real(piece, made, source), made.info)
    return (values[summed] if many else values).reshape(made.info.shape)


def _real(values: NDArray[np.float32], made: InputPlan, source: TensorInfo) -> NDArray[np.float32]:
    """Values that fill most of a quantized tensor's range, around its middle, or `spread` of all that."""
    if not source.quantized:
        return values * np.float32(made.spread)
    limits = np.iinfo(source.dtype)
    low, high = source.reals(np.array([limits.min, limits.max]))
    return np.asarray(((low + high) / 2 + (high - low) / 6 * values) * made.spread, np.float32)


def _plain_integers(made: InputPlan) -> NDArray[Any]:
    """Integers that may be indices stay small; bytes and shorts take their whole range."""
    dtype = np.dtype(made.info.dtype)
    low, high = 0, 2
    if dtype.itemsize <= 2 and dtype.kind in "iu":
        limits = np.iinfo(dtype)
        low, high = int(limits.min), int(limits.max) + 1
    return _integers(made, low, high).astype(dtype)


def _integers(made: InputPlan, low: int, high: int) -> NDArray[np.int64]:
    return noise.integers(_seed(made), math.prod(made.info.shape), low, high).reshape(made.info.shape)


def _encode(values: NDArray[Any], info: TensorInfo) -> NDArray[Any]:
    dtype = np.dtype(info.dtype)
    if info.quantized:
        limits = np.iinfo(dtype)
        with np.errstate(divide="ignore", invalid="ignore"):
            codes = np.nan_to_num(np.rint(values / np.float64(info.scales[0])) + info.zero_point)
        return np.asarray(np.clip(codes, limits.min, limits.max), dtype)
    if dtype.kind == "b":
        return np.asarray(values > 0.5)
    if dtype.kind == "f":
        limit = np.finfo(dtype).max
        finite = np.isfinite(values).all()
        return np.asarray(np.clip(values, -limit, limit) if finite else values, dtype)
    return np.asarray(np.rint(values), dtype)


def _hostile(array: NDArray[Any], made: InputPlan) -> NDArray[Any]:
    """Turns realistic values into large, denormal or not finite ones.

    NaN and infinity come in through embeddings and plain data only: in a cache they would leave no number at all.
    """
    if made.kind in {"realistic", "masked_rows"} or array.size == 0:
        return array
    if array.dtype.kind != "f":
        return _extreme_codes(array, made)
    if made.kind == "large":
        return np.asarray(array * array.dtype.type(_LARGE))
    if made.kind == "denormal":
        return np.asarray(array * array.dtype.type(_SMALL.get(array.dtype.name, 2.0**-135)))
    if made.role in {"cache", "rotary"}:
        return array
    flat = array.reshape(-1)
    flat[0] = np.nan
    flat[-1] = np.inf if flat.size > 1 else np.nan
    return array


def _extreme_codes(array: NDArray[Any], made: InputPlan) -> NDArray[Any]:
    if made.kind != "large" or array.dtype.kind not in "iu":
        return array
    limits = np.iinfo(array.dtype)
    middle = np.median(array)
    return np.where(array < middle, limits.min, limits.max).astype(array.dtype)


def _seed(made: InputPlan) -> int:
    return noise.seed_of(made.seed, made.key)
