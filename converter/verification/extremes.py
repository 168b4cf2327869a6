"""Extreme inputs of a region: exporters' masks, limits of types, large and tiny numbers, -0, NaN, infinity.

Each kind is one run in which only some inputs are extreme, so that NaN in one does not hide a difference in another.
The choice depends on the input's side: a value that is extreme for a mask may be harmless for a key.
"""

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_opt.runtime import noise
from edge_opt.runtime.inputs import InputPlan, array_of

KINDS: dict[str, str] = {
    "closed": "masks that close every row",
    "masks": "masks as exporters write them, masks of the lowest codes with few open keys",
    "high": "large positive logits, queries of the highest code",
    "low": "large negative logits, queries of the lowest code",
    "tiny": "tiny numbers, 0 and -0, masks of the highest codes",
    "highest keys": "keys of the highest code",
    "lowest keys": "large negative keys, keys of the lowest code",
    "highest logits": "logits of the highest code",
    "lowest logits": "logits of the lowest code",
    "nan added": "NaN and infinity in the mask",
    "nan left": "NaN and infinity in the queries",
    "nan right": "NaN and infinity in the keys",
    "nan other": "NaN and infinity in the values",
}
"""The kinds of extreme values, with their names in messages."""

_MASKS = (0.0, 0.0, 0.0, -0.0, -12.0, -100.0, -65472.0, -1e9, -3.4e38, -np.inf)
_CLOSED_ROW = 4  # one in so many rows of a mask is closed everywhere, never the first
_LARGE = 30.0  # factor for operands of the logits; the product of two is over a hundred
_LARGE_VALUE = 1000.0
_GRADES = 0.6  # factor for operands whose counterpart is at its limit, so that logits stay within their type


def extreme(planned: InputPlan, array: NDArray[Any], kind: str) -> NDArray[Any]:
    """A plan's array with extreme values of this kind; the array itself if the kind does not affect such inputs."""
    if planned.role == "mask" and kind == "closed":
        return array_of(replace(planned, opened=planned.masked))
    is_float = array.dtype.kind == "f"
    if planned.role != "data" or not array.size or not (is_float or planned.info.quantized):
        return array
    seed = noise.seed_of(planned.stream, kind)
    draw = noise.octets(seed, array.size).reshape(array.shape).astype(np.int64)
    make = _floats if is_float else _codes
    with np.errstate(over="ignore"):
        return np.asarray(make(planned, array, kind, draw), array.dtype)


def _floats(planned: InputPlan, array: NDArray[Any], kind: str, draw: NDArray[np.int64]) -> Any:
    draw %= 16
    match kind, planned.side:
        case "masks", "added":
            return _exporters_masks(array, draw)
        case "high" | "low", "other":
            return array * _LARGE_VALUE
        case ("low", "left") | ("lowest keys", "right"):
            return np.abs(array) * -_LARGE
        case "high" | "low", "left" | "right":
            return np.abs(array) * _LARGE
        case "tiny", "added":
            return np.select([draw < 4, draw < 8], [0.0, -0.0], array)
        case "tiny", "other":
            tiny = array * (2.0**-18 if array.dtype == np.float16 else 2.0**-110)
            tiniest = array * 2.0**-140
            return np.select([draw == 0, draw == 1, draw == 2], [0.0, -0.0, tiniest], tiny)
        case "tiny", "right":
            # Every other key is 0, whichever of the last two axes the keys are on, and so are its logits.
            is_zero = (_along(array.shape, -1) | _along(array.shape, -2)) % 2 == 1
            return np.where(is_zero, 0.0, array)
    if kind != f"nan {planned.side}":
        return array
    return np.select([draw < 2, draw == 2, draw == 3], [np.nan, np.inf, -np.inf], array)


def _exporters_masks(array: NDArray[Any], draw: NDArray[np.int64]) -> Any:
    """Values as in exporters' masks; in one row of four, only one value, which closes the row."""
    values = np.array(_MASKS, array.dtype)[draw % len(_MASKS)]
    rows = values.reshape(-1, array.shape[-1] if array.ndim else 1)
    for place, row in enumerate(rows[_CLOSED_ROW - 1 :: _CLOSED_ROW]):
        row[:] = _MASKS[-1 - place % 4]
    return values


def _codes(planned: InputPlan, array: NDArray[Any], kind: str, draw: NDArray[np.int64]) -> Any:
    """Codes at the limits of their type, mixed with others so that results still differ."""
    shape = array.shape
    zero_point = planned.info.zero_point
    limits = np.iinfo(array.dtype)
    least = int(limits.min)
    most = int(limits.max)
    match kind, planned.side:
        case "masks", "added":
            # Rows are closed but for one key in 256, of short rows about one each: its weight is the highest code.
            return np.where(draw % max(shape[-1:], default=1), least + draw % 8 // 2, zero_point)
        case "tiny", "added":
            return most - draw % 8 // 2
        case "masks" | "tiny", "other":
            # Whole rows or columns, so that sums reach their limits.
            turn = _along(shape, -1 if kind == "masks" else -2) % 4
            return np.select([turn == 0, turn == 1], [most, least], array.astype(np.int64))
        case "high" | "low", "other":
            return np.select([draw % 8 < 2, draw % 8 < 4], [least, most], array.astype(np.int64))
        case "highest logits" | "lowest logits", "right":
            turn = _along(shape, -2 if kind == "highest logits" else -1) % 4
            return np.where(turn < 3, most, array)
        case ("high" | "highest logits", "left") | ("highest keys", "right"):
            return np.full(shape, most)
        case ("low" | "lowest logits", "left") | ("lowest keys", "right"):
            return np.full(shape, least)
        case ("high" | "low", "right") | ("highest keys" | "lowest keys", "left"):
            room = planned.spread * min(most - zero_point, zero_point - least)
            return np.floor(_grades(shape) * room + draw / 256) + zero_point
    return array


def _grades(shape: tuple[int, ...]) -> Any:
    """Numbers that are similar along one of the last two axes, so that sums over it are as large as of random ones."""
    steps = sum(((_along(shape, axis) * 7) % 13 - 6) / 12 for axis in (-1, -2))
    return _GRADES * steps / np.sqrt(min(shape[-2:], default=1))


def _along(shape: tuple[int, ...], axis: int) -> NDArray[np.int64]:
    """The index of every element along an axis, or along the first if there are too few axes."""
    places = np.indices(shape, sparse=True)
    return np.broadcast_to(places[max(axis, -len(shape))] if shape else 0, shape)
