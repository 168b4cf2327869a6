"""Extreme inputs of a region: masks as exporters write them, ends of types, large and tiny numbers, -0, NaN, infinity.

Each kind of extreme values is one run in which some inputs are extreme, so that NaN in one does not hide a difference
in another. Which ones depends on their side: a value is extreme for a mask and harmless for a key.
"""

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_opt.runtime import noise
from edge_opt.runtime.inputs import InputPlan, array_of

KINDS: dict[str, str] = {
    "closed": "masks that close every row",
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

_MASKS = (0.0, 0.0, 0.0, -0.0, -12.0, -100.0, -65472.0, -1e9, -3.4e38, -np.inf)
_CLOSED_ROW = 4  # of so many rows of a mask one is closed everywhere, which the first one is not
_LARGE = 30.0  # an operand of the logits; the product of two of them is over a hundred
_LARGE_VALUE = 1000.0
_GRADES = 0.6  # of operands beside ones at their ends, so that logits stay within their type
_TINY = {"float16": 2.0**-18}


def extreme(planned: InputPlan, array: NDArray[Any], kind: str) -> NDArray[Any]:
    """A kind of extreme values made of a plan's array; the array itself where the kind leaves such inputs alone."""
    if planned.role == "mask" and kind == "closed":
        return array_of(replace(planned, opened=planned.masked))
    is_float = array.dtype.kind == "f"
    if planned.role != "data" or not array.size or not (is_float or planned.info.quantized):
        return array
    seed = noise.seed_of(planned.stream, kind)
    draw = noise.octets(seed, array.size).reshape(array.shape).astype(np.int64)
    with np.errstate(over="ignore"):
        made = (_floats if is_float else _codes)(planned, array, kind, draw)
        if made is array:
            return array
        if not is_float:
            made = np.clip(made, np.iinfo(array.dtype).min, np.iinfo(array.dtype).max)
        return np.asarray(made, array.dtype)


def _floats(planned: InputPlan, array: NDArray[Any], kind: str, draw: NDArray[np.int64]) -> NDArray[Any]:
    draw %= 16
    match kind, planned.side:
        case "masks", "added":
            values = np.array(_MASKS, array.dtype)[draw % len(_MASKS)]
            rows = values.reshape(-1, array.shape[-1] if array.ndim else 1)
            for place, row in enumerate(rows[_CLOSED_ROW - 1 :: _CLOSED_ROW]):
                row[:] = _MASKS[-1 - place % 4]
            return values
        case "high" | "low", "other":
            return np.asarray(array * _LARGE_VALUE)
        case "high" | "low", "left" | "right":
            return np.asarray(
                np.abs(array) * (-_LARGE if (kind, planned.side) == ("low", "left") else _LARGE)
            )
        case "tiny", "added":
            return np.where(draw < 8, np.where(draw < 4, 0.0, -0.0), array)
        case "tiny", "other":
            tiny = array * _TINY.get(array.dtype.name, 2.0**-110)
            return np.select([draw == 0, draw == 1, draw == 2], [0.0, -0.0, array * 2.0**-140], tiny)
        case "tiny", "right":
            # Every other key is 0, along whichever of the last two axes keys lie, and so are its logits.
            return np.where((_along(array.shape, -1) | _along(array.shape, -2)) % 2 == 1, 0.0, array)
    if kind != f"nan {planned.side}":
        return array
    return np.select([draw < 2, draw == 2, draw == 3], [np.nan, np.inf, -np.inf], array)


def _codes(planned: InputPlan, array: NDArray[Any], kind: str, draw: NDArray[np.int64]) -> NDArray[Any]:
    """Codes at the ends of their type, beside others such that results still differ."""
    shape, zero_point = array.shape, planned.info.zero_point
    least, most = int(np.iinfo(array.dtype).min), int(np.iinfo(array.dtype).max)
    match kind, planned.side:
        case "masks", "added":
            return least + draw % 8 // 2
        case "tiny", "added":
            return most - draw % 8 // 2
        case "masks" | "tiny", "other":
            # Of a whole row or column, so that sums reach their ends.
            turn = _along(shape, -1 if kind == "masks" else -2) % 4
            return np.select([turn == 0, turn == 1], [most, least], array)
        case "high" | "low", "other":
            return np.select([draw % 8 < 2, draw % 8 < 4], [least, most], array)
        case "highest logits" | "lowest logits", "right":
            return np.where(_along(shape, -2 if kind == "highest logits" else -1) % 4 < 3, most, array)
        case ("high" | "highest logits", "left") | ("highest keys", "right"):
            return np.full(shape, most)
        case ("low" | "lowest logits", "left") | ("lowest keys", "right"):
            return np.full(shape, least)
        case ("high" | "low", "right") | ("highest keys" | "lowest keys", "left"):
            # Alike along one of the last two axes, so that sums over it are as large as sums of random ones.
            steps = sum(((_along(shape, axis) * 7) % 13 - 6) / 12 for axis in (-1, -2))
            grades = _GRADES * steps / np.sqrt(min(shape[-2:], default=1))
            room = planned.spread * min(most - zero_point, zero_point - least)
            return np.asarray(np.floor(grades * room + draw / 256) + zero_point)
    return array


def _along(shape: tuple[int, ...], axis: int) -> NDArray[np.int64]:
    """The place of every element along an axis, or along the first where there are too few."""
    places = np.indices(shape, sparse=True)
    return np.broadcast_to(places[max(axis, -len(shape))] if shape else 0, shape)
