"""Extreme inputs of a region: masks as exporters write them, ends of types, large and tiny numbers, -0, NaN, infinity.

The side says where each input of a region goes, because a value is extreme for a mask and harmless for a key. Each kind
of extreme values is one run in which some inputs are extreme, so that NaN in one does not hide a difference in another.
"""

from collections.abc import Collection
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from edge_opt.runtime import noise

Side = Literal["added", "left", "right", "other"]
"""Where an input goes first: added to what a SOFTMAX normalizes, an operand of a product in front of it, or neither."""

KINDS: dict[str, str] = {
    "masks": "masks as exporters write them, masks of the lowest codes",
    "high": "large positive logits, queries of the highest code",
    "low": "large negative logits, queries of the lowest code",
    "tiny": "tiny numbers, 0 and -0, masks of the highest codes",
    "highest keys": "keys of the highest code",
    "lowest keys": "keys of the lowest code",
    "highest logits": "logits of the highest code",
    "lowest logits": "logits of the lowest code",
    "nan added": "NaN and infinity in the mask",
    "nan left": "NaN and infinity in the queries",
    "nan right": "NaN and infinity in the keys",
    "nan other": "NaN and infinity in the values",
}
"""The kinds of extreme values, and how messages name them."""

_SIDES = {
    "masks": ("added",),
    "high": ("left", "right", "other"),
    "low": ("left", "right", "other"),
    "tiny": ("added", "right", "other"),
    **{kind: (kind.removeprefix("nan "),) for kind in KINDS if kind.startswith("nan ")},
}
"""On which sides floats of a kind differ from realistic ones."""

_OF_CODES = frozenset({"highest keys", "lowest keys", "highest logits", "lowest logits"})
"""The kinds that change only codes."""

_MASKS = (0.0, 0.0, 0.0, -0.0, -12.0, -100.0, -65472.0, -1e9, -3.4e38, -np.inf)
_CLOSED_ROW = 4  # of so many rows of a mask one is closed everywhere, which the first one is not
_LARGE = 30.0  # an operand of the logits; the product of two of them is over a hundred
_LARGE_VALUE = 1000.0
_GRADES = 0.6  # of operands beside ones at their ends, so that logits stay within their type
_TINY = {"float16": 2.0**-18}


def kinds_for(floats: Collection[Side], codes: Collection[Side], spared: Collection[str]) -> tuple[str, ...]:
    """The kinds that differ from realistic inputs where floats and codes are on these sides, without spared ones."""

    def differs(kind: str) -> bool:
        if kind in _OF_CODES:
            return "right" in codes
        if kind in {"masks", "tiny"} and "added" not in codes:
            return bool(floats)
        return not kind.startswith("nan") or kind.removeprefix("nan ") in floats

    return tuple(kind for kind in KINDS if kind not in spared and differs(kind))


def extreme(
    array: NDArray[Any], kind: str, side: Side, seed: int, zero_point: int, spread: float
) -> NDArray[Any]:
    """What a kind makes of a realistic array of floats or codes, which fills `spread` of its range.

    `zero_point` is the code that stands for 0.
    """
    draw = noise.octets(seed, array.size).reshape(array.shape).astype(np.int64)
    if array.dtype.kind == "f":
        if side not in _SIDES.get(kind, ()):
            return array
        with np.errstate(over="ignore"):
            return np.asarray(_floats(array, kind, side, draw % 16).astype(array.dtype))
    if array.dtype.kind not in "iu" or kind.startswith("nan"):
        return array
    limits = np.iinfo(array.dtype)
    codes = _codes(array.astype(np.int64), kind, side, draw, zero_point, spread, limits)
    return np.asarray(np.clip(codes, limits.min, limits.max), array.dtype)


def _floats(array: NDArray[Any], kind: str, side: Side, draw: NDArray[np.int64]) -> NDArray[Any]:
    match kind, side:
        case "masks", _:
            values = np.array(_MASKS, array.dtype)[draw % len(_MASKS)]
            rows = values.reshape(-1, array.shape[-1] if array.ndim else 1)
            for place, row in enumerate(rows[_CLOSED_ROW - 1 :: _CLOSED_ROW]):
                row[:] = _MASKS[-1 - place % 4]
            return values
        case "high" | "low", "other":
            return np.asarray(array * _LARGE_VALUE)
        case "high" | "low", _:
            return np.asarray(np.abs(array) * (-_LARGE if (kind, side) == ("low", "left") else _LARGE))
        case "tiny", "added":
            return np.where(draw < 8, np.where(draw < 4, 0.0, -0.0), array)
        case "tiny", "other":
            tiny = array * _TINY.get(array.dtype.name, 2.0**-110)
            return np.select([draw == 0, draw == 1, draw == 2], [0.0, -0.0, array * 2.0**-140], tiny)
        case "tiny", _:
            # Every other key is 0, along whichever of the last two axes keys lie, and so are its logits.
            return np.where((_along(array.shape, -1) | _along(array.shape, -2)) % 2 == 1, 0.0, array)
    return np.select([draw < 2, draw == 2, draw == 3], [np.nan, np.inf, -np.inf], array)


def _codes(
    array: NDArray[Any],
    kind: str,
    side: Side,
    draw: NDArray[np.int64],
    zero_point: int,
    spread: float,
    limits: "np.iinfo[Any]",
) -> NDArray[Any]:
    """Codes at the ends of their type, beside others such that results still differ."""
    match kind, side:
        case "masks" | "tiny", "added":
            near = draw % 8 // 2
            return limits.min + near if kind == "masks" else limits.max - near
        case "masks" | "tiny", "other":
            # Of a whole row or column, so that sums reach their ends.
            turn = _along(array.shape, -1 if kind == "masks" else -2) % 4
            return np.select([turn == 0, turn == 1], [limits.max, limits.min], array)
        case "high" | "low", "other":
            return np.select([draw % 8 < 2, draw % 8 < 4], [limits.min, limits.max], array)
        case "highest logits" | "lowest logits", "right":
            axis = -2 if kind == "highest logits" else -1
            return np.where(_along(array.shape, axis) % 4 < 3, limits.max, array)
        case ("high" | "highest logits", "left") | ("highest keys", "right"):
            return np.full(array.shape, limits.max)
        case ("low" | "lowest logits", "left") | ("lowest keys", "right"):
            return np.full(array.shape, limits.min)
        case ("high" | "low", "right") | ("highest keys" | "lowest keys", "left"):
            most = min(limits.max - zero_point, zero_point - limits.min)
            return np.floor(_graded(array.shape) * spread * most + draw / 256) + zero_point
    return array


def _graded(shape: tuple[int, ...]) -> NDArray[np.float64]:
    """Numbers alike along one of the last two axes, so that sums over it are as large as sums of random ones."""
    steps = sum(((_along(shape, axis) * 7) % 13 - 6) / 12 for axis in (-1, -2))
    return np.asarray(_GRADES * steps / np.sqrt(min(shape[-2:], default=1)))


def _along(shape: tuple[int, ...], axis: int) -> NDArray[np.int64]:
    """The place of every element along an axis, or along the first where there are too few."""
    places = np.indices(shape, sparse=True)
    return np.broadcast_to(places[max(axis, -len(shape))] if shape else 0, shape)
