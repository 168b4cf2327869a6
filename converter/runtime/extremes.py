"""Extreme inputs of a region: masks as exporters write them, ends of types, large and tiny numbers, -0, NaN, infinity.

`sides` says where each input of a region goes, because a value is extreme for a mask and harmless for a key. Each kind
of extreme values is one run in which some inputs are extreme, so that NaN in one does not hide a difference in another.
"""

import math
from collections.abc import Collection
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from edge_opt.runtime import noise

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

_SIDES = {
    "masks": ("added",),
    "high": ("left", "right", "other"),
    "low": ("left", "right", "other"),
    "tiny": ("added", "right", "other"),
    **{kind: (kind.removeprefix("nan "),) for kind in KINDS if kind.startswith("nan ")},
}
"""On which sides floats of a kind differ from realistic ones."""

_MASKS = (0.0, 0.0, 0.0, -0.0, -12.0, -100.0, -65472.0, -1e9, -3.4e38, -np.inf)
_CLOSED_ROW = 4  # of so many rows of a mask one is closed everywhere, which the first one is not
_LARGE = 30.0  # an operand of the logits; the product of two of them is over a hundred
_LARGE_VALUE = 1000.0
_HIGH_KEYS = 16  # of each operand
_TINY = {"float16": 2.0**-18}


def kinds_for(with_floats: Collection[Side], spared: Collection[str]) -> tuple[Extreme, ...]:
    """The kinds that differ from realistic inputs where floats are on these sides, without the spared ones."""
    return tuple(
        kind
        for kind in get_args(Extreme)
        if kind not in spared and (not kind.startswith("nan") or kind.removeprefix("nan ") in with_floats)
    )


def extreme(
    array: NDArray[np.generic],
    kind: str,
    side: Side,
    seed: int,
    zero_point: int,
    keys: int = 0,
    reach: float = 1.0,
) -> NDArray[np.generic]:
    """What a kind makes of a realistic array of floats or codes; `zero_point` is the code that stands for 0.

    `keys` and `reach` are those of `InputHint`.
    """
    if array.dtype.kind == "f":
        return _floats(array, kind, side, seed)
    if array.dtype.kind not in "iu" or kind.startswith("nan"):
        return array
    limits = np.iinfo(array.dtype.name)
    draw = noise.octets(seed, array.size).reshape(array.shape)
    if side in {"left", "right"}:
        codes = _operand(array, kind, side, draw, zero_point, keys, reach)
    elif kind in {"high", "low"}:
        codes = np.select([draw % 8 < 2, (draw % 8 < 4) & (side == "other")], [limits.min, limits.max], array)
    else:
        # A mask near one end of its type; half of the values at the other one.
        near = draw % 8 // 2 * np.int64(side == "added")
        codes = limits.min + near if (kind == "masks") is (side == "added") else limits.max - near
        if side == "other":
            codes = np.where(_upper_half(array.shape), codes, array)
    return np.asarray(np.clip(codes, limits.min, limits.max), array.dtype)


def _floats(array: NDArray[np.generic], kind: str, side: Side, seed: int) -> NDArray[np.generic]:
    if side not in _SIDES[kind]:
        return array
    draw = noise.octets(seed, array.size).reshape(array.shape) % 16
    with np.errstate(over="ignore"):
        values = _drawn(array, kind, side, draw)
        return values.astype(array.dtype)


def _drawn(array: NDArray[Any], kind: str, side: Side, draw: NDArray[np.uint8]) -> NDArray[Any]:
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
            for place in np.indices(array.shape, sparse=True)[-2:]:
                array = np.where(place % 2 == 1, 0.0, array)
            return array
    return np.select([draw < 2, draw == 2, draw == 3], [np.nan, np.inf, -np.inf], array)


def _operand(
    array: NDArray[Any],
    kind: str,
    side: Side,
    draw: NDArray[np.uint8],
    zero_point: int,
    keys: int,
    reach: float,
) -> NDArray[Any]:
    """Codes of queries (`left`) and keys: of the logits some lie within their type, and some beyond.

    Where one is at an end of its type, the other one is so small that logits differ. Sizes of less than a code are the
    share of the elements that have one.
    """
    limits, shape = np.iinfo(array.dtype.name), array.shape
    most, chance = max(limits.max - zero_point, zero_point - limits.min), draw / 256
    match kind, side:
        case "masks" | "tiny", "left":
            return np.full(shape, limits.max if kind == "masks" else limits.min)
        case _, "left":
            # Every other row is small, and of the other sign where the keys are negative.
            rows = np.arange(math.prod(shape[:-1])).reshape((*shape[:-1], 1)[: len(shape)])
            small = rows % 2 == 0
            sizes = np.where(small, 2 * reach * 0.7 ** (rows // 2 % 6), 0.7 ** (rows % 7))
            signs = np.where(small & (kind == "low"), -1, 1)
            return np.asarray(signs * np.floor(sizes * most + chance) + zero_point)
        case "masks" | "tiny", _:
            if not keys or not shape:
                return array
            sizes = reach * most * _few_high(shape, keys)
            return np.asarray(np.floor((sizes if kind == "masks" else -sizes) + chance) + zero_point)
    return np.where(chance < _sizes(shape, kind), limits.max if kind == "high" else limits.min, zero_point)


def _few_high(shape: tuple[int, ...], keys: int) -> NDArray[np.float64]:
    """Sizes of keys: some have high logits, all different, the others low ones.

    So no weight is lost in rounding, and where the values are at their end, the result is at its own.
    """
    axis = -2 if len(shape) > 1 and shape[-2] == keys else -1
    place, rest = np.divmod(np.arange(shape[axis]), max(shape[axis] // _HIGH_KEYS, 1))
    sizes = np.where(rest, -2.0, 1 - 0.6 * (place % _HIGH_KEYS) / _HIGH_KEYS)
    return np.asarray(sizes[:, np.newaxis] if axis == -2 else sizes)


def _upper_half(shape: tuple[int, ...]) -> NDArray[np.bool_]:
    """Where the place along one of the last two axes, of which one is the keys', is in its upper half."""
    upper = np.zeros(shape, np.bool_)
    for place, size in list(zip(np.indices(shape, sparse=True), shape, strict=True))[-2:]:
        upper |= 2 * place >= size
    return upper


def _sizes(shape: tuple[int, ...], kind: str) -> NDArray[np.float64]:
    """Factors that fall from key to key; keys may lie along either of the last two axes.

    Low logits show only where no other one is much higher.
    """
    period = 64 if kind == "high" else 8
    places = np.indices(shape, sparse=True)[-2:]
    return np.broadcast_to(0.93 ** sum(place % period for place in places), shape)
