"""What one head of an attention has in memory at once. Bytes from shapes, as an NPU keeps them; no graph is changed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edge_opt.attention.found import Block
from edge_opt.attention.tail import value_products

if TYPE_CHECKING:
    from edge_opt.attention.found import SingleHead
    from edge_opt.ir import Tensor

_HALF = 2


def working_set(match: Block | SingleHead) -> int:
    """Bytes of one head's logits `[T, S]`, mask `[T, S]`, keys and values `[S, H]` each; floats count as fp16.

    T is that of the attention before its rows were cut: a tile's mask is a part of what a SPLIT cut.
    """
    keys, rows = sum(match.key_lengths), _rows(match)
    products = value_products(match.softmax)
    assert isinstance(products, dict)
    product, (side, _) = next(iter(products.items()))
    caches = 2 * keys * match.head_size * element_bytes(product.input(1 - side))
    mask = 0 if match.mask is None else rows * keys * element_bytes(match.mask)
    return caches + mask + rows * keys * element_bytes(match.softmax.input(0))


def _rows(match: Block | SingleHead) -> int:
    if isinstance(match, Block):
        return match.query_length * match.tiles
    cut = 1 if match.mask is None else match.mask.elements
    return match.query_length * (1 if match.mask is None else _uncut(match.mask).elements // cut)


def element_bytes(tensor: Tensor) -> int:
    """Bytes of an element on an NPU, which keeps floats in half precision."""
    return _HALF if tensor.dtype.is_float else max((tensor.dtype.bits or 8) // 8, 1)


def _uncut(mask: Tensor) -> Tensor:
    while mask.producer is not None and mask.producer.name == "SPLIT":
        mask = mask.producer.input(1)
    return mask
