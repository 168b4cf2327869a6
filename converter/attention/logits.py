"""How large one head's logits are on an NPU. Bytes from shapes; no graph is changed."""

from edge_opt.attention.found import Block, SingleHead
from edge_opt.ir import Tensor

_HALF = 2


def logits_bytes(match: Block | SingleHead) -> int:
    """Bytes of one head's logits `[T, S]`, S being all keys; floats count as fp16. T is that of a whole head."""
    rows = match.query_length * (match.tiles if isinstance(match, Block) else 1)
    return rows * sum(match.key_lengths) * element_bytes(match.softmax.input(0))


def element_bytes(tensor: Tensor) -> int:
    """Bytes of an element on an NPU, which keeps floats in half precision."""
    return _HALF if tensor.dtype.is_float else max((tensor.dtype.bits or 8) // 8, 1)
