"""Realistic inputs for a signature from names, shapes and a seed; must not load the runtime.

`plan` decides what each input is (a mask, a position, a cache, ...) and how the masks, positions and caches of one
signature fit together; `array_of` makes the array of one plan. A plan is plain data, so that big arrays are made where
they are used. The same seed gives the same numbers in any order of inputs, and the same real numbers for a float
tensor and its quantized counterpart.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edge_opt.runtime import noise
from edge_opt.runtime.protocol import DeclinedError
from edge_opt.runtime.tensors import Role, SignatureInfo, TensorInfo, cache_length, role_of

_MASKED = -100.0  # the value in the exporter's own masks
_KNOWN_TOKENS = 128
_ROOM = 48  # positions before the new tokens if neither a mask nor a cache gives their number
_WINDOW = 512

VARIANTS = 6
"""Kinds of random integers for an input that may hold any, one for each run.

    0, 1    0 and 1, then the opposite
    2, 3    all bits
    4, 5    4 to 14 bits; these are also the large floats of further runs, where quantized inputs get any codes
    6, ..   the numbers `near` constants that it is compared with, if there are any
"""
_WHOLE = 2
_SHORTER = 4

_LARGEST = 1 << 16

_MOST_ROWS = 8
"""If an input accepts no more integers, each of its elements has all of them in turn, one in each run."""

Side = Literal["added", "left", "right", "other"]
"""Use of an input: added to the logits of a SOFTMAX, an operand of the product before it, or something else."""


@dataclass(frozen=True, slots=True)
class InputHint:
    """A caller's knowledge about an input, beyond its name.

    `masked` and `opened` are the values of masked and open entries of a mask (by default, the usual ones for its type).
    `side` is the use of a region's input.
    """

    role: Role = "data"
    masked: float | None = None
    opened: float | None = None
    side: Side = "other"


@dataclass(frozen=True, slots=True, kw_only=True)
class InputPlan(InputHint):
    """How to make one input: for the tensor `info`, from random numbers of its own, with the seed `stream`.

    `start` is the position of the first new token. For a mask, `past` columns stand for the cache, the first `padding`
    tokens are masked, and a row sees `window` positions (0: all). `limit` ends the range of a token or of an index into
    a table. Real numbers fill `spread` of the range of the quantized `source`. Integers that may be any are of the
    kind `variant`; others are `variant` higher than drawn, modulo `limit`.
    """

    info: TensorInfo
    stream: int = 0
    start: int = 0
    spread: float = 1.0
    past: int = 0
    window: int = 0
    limit: int = 2
    padding: int = 0
    variant: int = 0
    source: TensorInfo | None = None


Planned = tuple[str | None, Sequence[InputPlan]]
"""One call of a signature (None: the model's only one), and its inputs."""


class _Scene(NamedTuple):
    """How masks, positions and caches of one signature fit together.

        the widest mask, `[.., new, past + new]`:   [columns of the cache, `past`][columns of new tokens, `new`]
        positions of the new tokens:                start, start + 1, ...

    The cache holds the positions before `start`. A mask over a shorter ring buffer has fewer columns for it.
    """

    past: int
    new: int
    start: int


def plan(
    signature: SignatureInfo,
    *,
    seed: int = 0,
    run: int = 0,
    hints: Sequence[InputHint] | None = None,
    further: bool = False,
) -> tuple[InputPlan, ...]:
    """One plan per input of the signature.

    `hints`, one per input, replace guessing from names. A second run has other positions, and padding in front of its
    tokens. In a `further` run, names decide nothing: inputs may be all that their readers accept.
    """
    if hints is None:
        hints = [InputHint(role_of(info)) for info in signature.inputs]
    scene = _scene(signature, [hint.role for hint in hints], seed, run)
    if further:
        hints = [InputHint(_unnamed(info)) for info in signature.inputs]
    logits = [info.shape[-1] for info in signature.outputs if "logits" in info.name and info.shape]
    tokens = min(logits, default=_KNOWN_TOKENS)
    plans: list[InputPlan] = []
    for info, hint in zip(signature.inputs, hints, strict=True):
        variant = run % _kinds(info, hint.role)
        planned = InputPlan(**asdict(hint), info=info, start=scene.start, variant=variant)
        if further and info.quantized:
            planned = replace(planned, role="code")
        elif further and info.is_float:
            planned = replace(planned, role="integer", variant=_SHORTER + run % 2)
        elif _has_no_role(info, hint.role):
            planned = _by_readers(planned)
        elif hint.role == "token":
            planned = replace(planned, limit=tokens)
        elif hint.role == "mask":
            planned = _with_scene(planned, scene, run)
        # Some runs change the numbers that an earlier one drew: to the opposite of 0 and 1, or to the next row.
        drawn = run
        if planned.role != "integer" or variant == 1:
            drawn -= variant
        stream = noise.seed_of(seed, f"{signature.name}/{drawn}/{_stream(info, hint.role)}")
        plans.append(replace(planned, stream=stream))
    return tuple(plans)


def _stream(info: TensorInfo, role: Role) -> str:
    """The name of an input's random numbers: the cosine and the sine of one table come from the same angles."""
    if role == "rotary":
        return re.sub(r"(^|_)(cos|sin)(?=$|_)", r"\1", info.name.lower())
    return info.name


def is_sliding(info: TensorInfo) -> bool:
    """True for a mask of layers with a sliding window, by its name."""
    return "local" in info.name or "sliding" in info.name


def _with_scene(planned: InputPlan, scene: _Scene, run: int) -> InputPlan:
    """The plan of a mask, from its width and its name."""
    info = planned.info
    width = info.shape[-1] if info.shape else 1
    return replace(
        planned,
        past=max(width - scene.new, 0) if scene.past else 0,
        window=min(_WINDOW, max(width // 4, 1)) if is_sliding(info) else 0,
        padding=min(scene.start // 4 + 1, width // 4) if run else 0,
    )


def _unnamed(info: TensorInfo) -> Role:
    """The role without regard to the name, unless only the name tells which integers are safe."""
    return role_of(info) if info.is_plain_integer and info.accepts is None else "data"


def _has_no_role(info: TensorInfo, role: Role) -> bool:
    """True for a plain integer whose name says nothing, or no more than its readers."""
    is_row = role == "token" and max(info.accepts or 0, info.entries) > 0
    return info.is_plain_integer and (role == "data" or is_row)


def _by_readers(planned: InputPlan) -> InputPlan:
    """The plan of an integer, from the numbers that its readers accept."""
    info = planned.info
    if info.accepts == 0:
        return replace(planned, role="integer", limit=max(info.entries, 2))
    limit = info.accepts
    if limit is None and role_of(info) == "token":
        limit = info.entries
    return replace(planned, role="index", limit=limit) if limit else planned


def _kinds(info: TensorInfo, role: Role) -> int:
    """The number of runs in which an input differs in kind: kinds of integers, rows of a small table, both flags."""
    if not _has_no_role(info, role):
        is_flag = role == "data" and np.dtype(info.dtype).kind == "b"
        return 2 if is_flag else 1
    if info.accepts is None:
        return 1
    if info.accepts == 0:
        return VARIANTS + math.ceil(len(info.near) / max(info.elements, 1))
    return info.accepts if info.accepts <= _MOST_ROWS else 1


def runs_for(signature: SignatureInfo) -> tuple[int, int]:
    """The numbers of ordinary and of further runs that a comparison needs."""
    ordinary = [_kinds(info, role_of(info)) for info in signature.inputs]
    further = map(_further_kinds, signature.inputs)
    return max(ordinary, default=1), max(further, default=0)


def _further_kinds(info: TensorInfo) -> int:
    """The number of further runs in which an input differs in kind; 0 if ordinary ones show all that it may be."""
    if info.is_float or info.quantized:
        return 2 if info.elements == 1 else 1  # a single number is of either sign
    role = role_of(info)
    if role == _unnamed(info) or _has_no_role(info, role):
        return 0
    return _kinds(info, "data")


def integer_remarks(signature: SignatureInfo) -> Iterator[str]:
    """Name the integer inputs whose range is unknown and the numbers that they get, and those that get few of many."""
    for info in signature.inputs:
        if max(info.elements, _MOST_ROWS) < (info.accepts or 0):
            of = f"{info.elements} of the {info.accepts} integers that it accepts"
            yield f"{signature.name}/{info.name}: each run has at most {of}"
        if info.is_plain_integer and not info.accepts:
            role = role_of(info)
            known = "unknown role" if role == "data" else f"{role} by its name"
            drawn = f"drawn as any {info.dtype}"
            if info.accepts is None:
                narrow = "0 or 1" if role == "data" else "such"
                drawn = f"drawn as {narrow}, because it may steer shapes, indices or loops"
            elif role != "data":
                drawn = f"in further runs {drawn}"
            yield f"{signature.name}/{info.name}: {known}, {drawn}"


def _scene(signature: SignatureInfo, roles: Sequence[Role], seed: int, run: int) -> _Scene:
    """The scene of one run: its position is drawn from those that leave room for the new tokens."""
    by_role = defaultdict[Role, list[TensorInfo]](list)
    for info, role in zip(signature.inputs, roles, strict=True):
        by_role[role].append(info)
    positions = by_role["position"]
    caches = by_role["cache"]
    masks = _mask_shapes(by_role["mask"], signature.outputs)
    lengths = [info.shape[-1] for info in positions if info.shape]
    new = max([shape[-2] for shape in masks] + lengths, default=1)
    width = max((shape[-1] for shape in masks), default=0)
    cached: set[int] = set()
    for info in caches:
        if "slice" not in info.name:
            cached.update(info.shape[1:])
    # A mask as wide as the cache has no columns for the new tokens: these are written into the cache first.
    holds_new = width in cached and width - new not in cached
    past = 0 if holds_new else max(width - new, 0)
    capacity = _ROOM + new
    if width:
        capacity = width if holds_new else past
    elif caches:
        capacity = cache_length(signature)
    room = max(capacity - new, 0)
    tables = [info.entries for info in positions if info.entries]
    last = max(min(tables, default=room + new) - new, 0)
    # The middle half of the room.
    first = room // 4
    choices = room // 2 + 1
    if tables and not (width or caches):
        # Nothing else depends on the position, so it may be anywhere in its table.
        first = 0
        choices = last + 1
    start = first + noise.seed_of(seed, "start", run) % choices
    return _Scene(past, width - past, min(start, last))


def _mask_shapes(
    inputs: Sequence[TensorInfo], outputs: Sequence[TensorInfo]
) -> list[tuple[int, ...]]:
    """The shapes of masks with a row for each new token, also of those that the signature computes."""
    computed = [info for info in outputs if "mask" in info.name]
    shapes = [info.shape for info in (*inputs, *computed)]
    return [shape for shape in shapes if len(shape) > 2 or (len(shape) == 2 and shape[0] > 1)]


def twins(
    planned: InputPlan, other: TensorInfo, *, recorded: bool = False
) -> tuple[InputPlan, InputPlan]:
    """Plans for this input and its counterpart in another model, with the same real numbers.

    If one of the two is quantized, both use its range: values that it cannot represent would not be a fair comparison.
    Plain integers are in the range of both types. Numbers that were `recorded` are the first one's, whatever the other
    can represent.
    """
    own = planned.info
    source = own
    if not recorded:
        if own.is_plain_integer and other.is_plain_integer:
            own = other
        elif other.quantized and not own.quantized:
            own = other
            source = other
    return replace(planned, source=own), replace(planned, source=source, info=other)


def array_of(planned: InputPlan) -> NDArray[Any]:
    """The array of one plan, in the dtype of its tensor; if the `source` is another one, with the numbers of that.

    Raises:
        DeclinedError: numpy lacks the type.
    """
    info = planned.info
    source = planned.source or info
    both_plain = info.is_plain_integer and source.is_plain_integer
    if not both_plain and not info.has_type_of(source):
        original = array_of(replace(planned, info=source, source=None))
        return converted(original, source, info)
    dtype = np.dtype(info.dtype)
    if dtype.kind in "cS":
        why = "numpy lacks its type: text, bfloat16, or fewer than 8 bits"
        if dtype.kind == "c":
            why = "its numbers are complex"
        raise DeclinedError(f"edge-opt draws no numbers for input '{info.name}': {why}")
    if planned.role == "code":
        return _any_codes(planned)
    values: NDArray[Any]
    if planned.role == "mask":
        values = _mask(planned)
    elif planned.role == "position":
        shape = info.shape or (1,)
        row = planned.start + np.arange(shape[-1], dtype=np.float32)
        values = np.broadcast_to(row, shape)
    elif planned.role == "rotary":
        cosine, sine = noise.circle(planned.stream, info.elements)
        values = sine if "sin" in info.name.lower() else cosine
    elif _is_whole(planned):
        values = _integers(planned)
    else:
        return _data(planned)
    return _encode(values.reshape(info.shape), info)


def _is_whole(planned: InputPlan) -> bool:
    """True if whole numbers are drawn."""
    if planned.role in {"token", "index"}:
        return True
    is_plain = np.dtype(planned.info.dtype).kind in "iub" or planned.role == "integer"
    return is_plain and not planned.info.quantized


def converted(array: NDArray[Any], source: TensorInfo, target: TensorInfo) -> NDArray[Any]:
    """The same real numbers in the target's type."""
    if source.has_type_of(target):
        return array
    return _encode(source.reals(array), target)


def _mask(planned: InputPlan) -> NDArray[np.float32]:
    """Causal over the new tokens, open over the filled part of the cache; one-row masks of rank 2 are padding."""
    info = planned.info
    shape = info.shape
    rows, width = (1, 1, *shape)[-2:]
    if len(shape) < 3 and rows == 1 and not info.is_float:
        hidden = width // 4 if planned.padding else 0
        visible = np.arange(width)[np.newaxis, :] < max(width - hidden, 1)
    else:
        visible = _visible(planned, rows, width)
    is_added = info.is_float or info.quantized
    masked = planned.masked
    if masked is None:
        masked = _MASKED if is_added else 0.0
    opened = planned.opened
    if opened is None:
        opened = 0.0 if is_added else 1.0
    values = np.where(visible, np.float32(opened), np.float32(masked))
    return values if len(shape) < 3 else np.broadcast_to(values, shape)


def _visible(planned: InputPlan, rows: int, width: int) -> NDArray[np.bool_]:
    """The entries that each row of a causal mask sees, `[rows, width]`: no later ones, no padding, none too old.

    Columns [0, past) are the cache; each holds the last position before `start` that was stored in it: in a whole cache
    its own index, in a ring buffer maybe a later one. The other columns are the new tokens.
    """
    past = planned.past
    start = planned.start
    column = np.arange(width)[np.newaxis, :]
    held = column
    if past:
        cached = start - 1 - (start - 1 - column) % past
        held = np.where(column < past, cached, column - past + start)
    new = np.arange(rows)[:, np.newaxis] % max(width - past, 1)
    own = new + start if width > rows else new
    is_earlier = (held < own) & (held >= planned.padding)
    is_in_window = held > own - (planned.window or math.inf)
    return np.asarray((is_earlier | (held == own)) & is_in_window)


def _data(planned: InputPlan) -> NDArray[Any]:
    """Normal values around the middle of a quantized tensor's range that fill most of it, times `spread`."""
    info = planned.info
    middle = 0.0
    width = 1.0
    if info.quantized:
        low, high = info.reals(np.array(info.limits))
        middle = (low + high) / 2
        width = (high - low) / 6
    pieces: list[NDArray[Any]] = [np.empty(0, info.dtype)]
    for values in noise.normal(planned.stream, info.elements):
        reals = np.asarray((middle + width * values) * planned.spread, np.float32)
        pieces.append(_encode(reals, info))
    return np.concatenate(pieces).reshape(info.shape)


def _any_codes(planned: InputPlan) -> NDArray[Any]:
    """Any codes of a quantized tensor, about one in eighteen of them the lowest, as many the highest."""
    info = planned.info
    low, high = info.limits
    beyond = (high - low) // 16
    drawn = noise.integers(planned.stream, info.elements, low - beyond, high + beyond)
    return drawn.clip(low, high).astype(info.dtype).reshape(info.shape)


def _integers(planned: InputPlan) -> NDArray[np.int64]:
    """Tokens and indices in their range, any integers, or 0 and 1 for inputs that may steer something."""
    low = 0
    high = 2
    if planned.role == "integer":
        return _wide(planned)
    if planned.role in {"token", "index"}:
        low = int(planned.role == "token")  # 0 often stands for padding
        high = max(planned.limit, low + 1)
    drawn = noise.integers(planned.stream, planned.info.elements, 0, high - low)
    return (drawn + planned.variant) % (high - low) + low


def _wide(planned: InputPlan) -> NDArray[np.int64]:
    """Integers for an input that may hold any, by `variant` (see `VARIANTS`).

    If the input also indexes, 0 to `limit` - 1 take the place of 0 and 1. In types of 8 and 16 bits, all other variants
    are from the whole range. Positive and negative numbers alternate, by element and by variant.
    """
    source = planned.source or planned.info
    count = planned.info.elements
    limits = [info.limits for info in (planned.info, source) if info.is_plain_integer]
    low = max((low for low, _ in limits), default=-_LARGEST)
    high = min((high for _, high in limits), default=_LARGEST)
    if planned.variant >= VARIANTS:
        first = (planned.variant - VARIANTS) * count
        return np.resize(np.roll(source.near, -first), count).clip(low, high)
    if planned.variant < _WHOLE:
        drawn = noise.integers(planned.stream, count, 0, planned.limit)
        return (drawn + planned.variant) % planned.limit
    if high < _LARGEST:
        return noise.integers(planned.stream, count, low, high + 1)
    sizes = np.full(count, min(high.bit_length(), 63))
    if planned.variant >= _SHORTER:
        sizes = noise.integers(noise.seed_of(planned.stream, "bits"), count, 4, 15)
        sizes[:1] = 14  # a single number should not be small
    words = noise.bits(planned.stream, count)
    values = (words >> (64 - sizes).astype(np.uint64)).astype(np.int64)
    is_negative = (np.arange(count) + planned.variant) % 2 == 0
    return np.where(is_negative & (low < 0), ~values, values)


def _encode(values: NDArray[Any], info: TensorInfo) -> NDArray[Any]:
    dtype = np.dtype(info.dtype)
    if info.quantized:
        with np.errstate(divide="ignore", invalid="ignore"):
            steps = np.rint(values / np.float64(info.scales[0]))
        codes = np.nan_to_num(steps + info.zero_point)
        return np.asarray(np.clip(codes, *info.limits), dtype)
    if dtype.kind == "b":
        return np.asarray(values > 0.5)
    if dtype.kind == "f":
        limit = np.finfo(dtype).max
        finite = np.isfinite(values).all()
        return np.asarray(np.clip(values, -limit, limit) if finite else values, dtype)
    return np.asarray(np.rint(values), dtype)
