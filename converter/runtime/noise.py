"""Random numbers that are the same on every machine and numpy version, made from raw bits by exact steps.

numpy guarantees stable streams only for bit generators, and functions such as `cos` differ between processors.
"""

import hashlib
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

GENERATOR_VERSION = 1
"""Must be increased when the same seed gives different numbers; golden files record it."""

_PIECE = 1 << 15
_CENTRE = 2 * 65535
_DEVIATION = 65536 / 3**0.5
_PAIR = np.uint64(0x0000FFFF0000FFFF)


def seed_of(*parts: object) -> int:
    """A 128-bit seed from the text of the parts, the same in every process."""
    text = "\0".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=16).digest(), "little")


def bits(seed: int, count: int) -> NDArray[np.uint64]:
    """`count` raw 64-bit words."""
    return np.asarray(np.random.PCG64(seed).random_raw(count), np.uint64).reshape(count)


def octets(seed: int, count: int) -> NDArray[np.uint8]:
    """`count` raw bytes."""
    return bits(seed, -(-count // 8)).astype("<u8").view(np.uint8)[:count]


def normal(seed: int, count: int) -> Iterator[NDArray[np.float32]]:
    """`count` sums of four uniform 16-bit integers (Irwin-Hall), centred and scaled: about normal, within +-3.47.

    They come in pieces, which stay in a core's cache.
    """
    stream = np.random.PCG64(seed)
    for begin in range(0, count, _PIECE):
        words = np.asarray(stream.random_raw(min(_PIECE, count - begin)), np.uint64)
        # Add two pairs within each word, then both sums.
        words = (words & _PAIR) + ((words >> np.uint64(16)) & _PAIR)
        sums = (words + (words >> np.uint64(32))) & np.uint64(0xFFFFFFFF)
        yield (sums.astype(np.float32) - np.float32(_CENTRE)) * np.float32(1 / _DEVIATION)


def integers(seed: int, count: int, low: int, high: int) -> NDArray[np.int64]:
    """`count` integers in `[low, high)`; `high` must exceed `low`."""
    return (bits(seed, count) % np.uint64(high - low)).astype(np.int64) + low


def circle(seed: int, count: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """`count` points on the unit circle's right or upper half, as cosine and sine.

    With `t` uniform in [-1, 1): (1 - t^2) / (1 + t^2) and 2 t / (1 + t^2), swapped for half of the points.
    """
    words = bits(seed, count)
    t = (words >> np.uint64(12)).astype(np.float64) / float(1 << 51) - 1
    first = (1 - t * t) / (1 + t * t)
    second = 2 * t / (1 + t * t)
    swap = (words & np.uint64(1)).astype(np.bool_)
    cosine = np.where(swap, second, first)
    sine = np.where(swap, first, second)
    return cosine.astype(np.float32), sine.astype(np.float32)
