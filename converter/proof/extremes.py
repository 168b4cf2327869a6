"""Extreme inputs of a region: masks as exporters write them, ends of types, large and tiny numbers, -0, NaN, infinity.

`sides` says where each input of a region goes, because a value is extreme for a mask and harmless for a key. Each kind
of extreme values is one run in which some inputs are extreme, so that NaN in one does not hide a difference in another.
"""

import math
from collections.abc import Collection
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from edge_opt.proof import noise

Side = Literal["added", "left", "right", "other"]
"""Where an input goes first: added to what a SOFTMAX normalizes, an operand of a product in front of it, or neither."""

Extreme = Literal["masks", "high", "low", "tiny", "nan added", "nan left", "nan right", "nan other"]
KINDS: dict[str, str] = {
    "masks": "masks as exporters write them, the highest codes",
    "high": "large positive logits",
    "low": "large negative logits",
    "tiny": "tiny numbers, 0 and -0, the lowest codes",
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
_TINY = {"float16": 2.0**-18}


def kinds_for(with_floats: Collection[Side], spared: Collection[str]) -> tuple[Extreme, ...]:
    """The kinds that differ from realistic inputs where floats are on these sides, without the spared ones."""
    return tuple(
        kind
        for kind in get_args(Extreme)
        if kind not in spared and (not kind.startswith("nan") or kind.removeprefix("nan ") in with_floats)
    )


def extreme(
    array: NDArray[np.generic], kind: str, side: Side, seed: int, zero_point: int
) -> NDArray[np.generic]:
    """What a kind makes of a realistic array of floats or codes; `zero_point` is the code that stands for 0."""
    if array.dtype.kind == "f":
        return _floats(array, kind, side, seed)
    return _codes(array, kind, side, seed, zero_point) if array.dtype.kind in "iu" else array


def _floats(array: NDArray[np.generic], kind: str, side: Side, seed: int) -> NDArray[np.generic]:
    unchanged = {
        "masks": side != "added",
        "high": side == "added",
        "low": side == "added",
        "tiny": side == "left",
    }
    if unchanged.get(kind, kind != f"nan {side}"):
        return array
    values = array.astype(np.float64)
    draw = noise.octets(seed, array.size).reshape(array.shape) % 16
    if kind == "masks":
        values = np.array(_MASKS)[draw % len(_MASKS)]
        rows = values.reshape(-1, array.shape[-1] if array.ndim else 1)
        for place, row in enumerate(rows[_CLOSED_ROW - 1 :: _CLOSED_ROW]):
            row[:] = _MASKS[-1 - place % 4]
    elif kind in {"high", "low"} and side == "other":
        values = values * _LARGE_VALUE
    elif kind in {"high", "low"}:
        values = np.abs(values) * (-_LARGE if (kind, side) == ("low", "left") else _LARGE)
    elif kind == "tiny":
        values = _tiny(values, side, draw, _TINY.get(array.dtype.name, 2.0**-110))
    else:
        values = np.select([draw < 2, draw == 2, draw == 3], [np.nan, np.inf, -np.inf], values)
    with np.errstate(over="ignore"):
        return values.astype(array.dtype)


def _tiny(
    values: NDArray[np.float64], side: Side, draw: NDArray[np.uint8], factor: float
) -> NDArray[np.float64]:
    if side == "added":
        return np.where(draw < 8, np.where(draw < 4, 0.0, -0.0), values)
    if side == "other":
        return np.select([draw == 0, draw == 1, draw == 2], [0.0, -0.0, values * 2.0**-140], values * factor)
    # Every other key is 0, along whichever of the last two axes keys lie, and so are its logits.
    for axis in range(max(values.ndim - 2, 0), values.ndim):
        odd = np.arange(values.shape[axis]) % 2 == 1
        values = np.where(odd.reshape(-1, *[1] * (values.ndim - 1 - axis)), 0.0, values)
    return values


def _codes(
    array: NDArray[np.generic], kind: str, side: Side, seed: int, zero_point: int
) -> NDArray[np.generic]:
    limits = np.iinfo(array.dtype.name)
    draw = noise.octets(seed, array.size).reshape(array.shape) % 8
    if kind in {"high", "low"}:
        if side in {"left", "right"}:
            end = limits.min if (kind, side) == ("low", "left") else limits.max
            sizes = (8 + draw) / 15 * _sizes(array.shape, kind, side)
            codes = zero_point + np.rint((end - zero_point) * sizes)
        else:
            codes = np.select([draw < 2, (draw < 4) & (side == "other")], [limits.min, limits.max], array)
    elif kind in {"masks", "tiny"}:
        # A mask near one end of its type; queries, and most values, at the other one.
        least = (kind == "masks") is (side == "added")
        near = draw // 2 if side == "added" else np.uint8(0)
        codes = np.asarray(
            limits.min + near.astype(np.int64) if least else limits.max - near.astype(np.int64)
        )
        if side == "right":
            codes = array
        elif side == "other":
            codes = np.where(_upper_half(array.shape), codes, array)
    else:
        codes = array
    return np.broadcast_to(np.clip(codes, limits.min, limits.max).astype(array.dtype), array.shape)


def _upper_half(shape: tuple[int, ...]) -> NDArray[np.bool_]:
    """Where the place along one of the last two axes, of which one is the keys', is in its upper half."""
    upper = [2 * place >= size for place, size in zip(np.indices(shape, sparse=True), shape, strict=True)]
    found = np.zeros(shape, np.bool_)
    for half in upper[-2:]:
        found |= half
    return found


def _sizes(shape: tuple[int, ...], kind: str, side: Side) -> NDArray[np.float64]:
    """Factors that fall from row to row and from key to key: of the logits some lie within their type, some beyond.

    Keys may lie along either of the last two axes. Low logits show only where no other one is much higher.
    """
    places = np.indices(shape, sparse=True)
    if side == "left":
        rows = np.arange(math.prod(shape[:-1])).reshape((*shape[:-1], 1)[-len(shape) :])
        return np.broadcast_to(0.7 ** (rows % 7), shape)
    period = 64 if kind == "high" else 8
    return np.broadcast_to(0.93 ** sum(place % period for place in places[-2:]), shape)
