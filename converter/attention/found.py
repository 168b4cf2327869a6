"""What is found of a SOFTMAX: an attention block, with several heads or one, or none. Values, no searching."""

from dataclasses import dataclass, field

from edge_opt.attention.factors import Factored
from edge_opt.attention.labelling import OperandFactors, Weighings
from edge_opt.ir import Operator, Tensor
from edge_opt.ir.refusal import Refusal

_HALF = 2


@dataclass(frozen=True, slots=True)
class Block:
    """One layer's attention, matched.

    `output` is the tensor where the heads stand side by side, with factors `factored`; `others` are more of them, where
    several products of values are never summed. `core` are the operators from the logits products to these, `logits`
    the former with the factors of their results, `products` those of the values. `heads_are_rows` is True where a
    product's rows are nothing but heads (T = 1). `kv_heads` is K, `query_length` T, `key_lengths` the segments of keys
    (S, or S and T), `head_size` H. Each of the N heads is a piece of its own; where rows are cut into `tiles`, there
    are N*tiles pieces, and `query_length` is a tile's.

    An attention with one head (or one of those that were split already) is one piece without a label: `output` is the
    (sum of the) value product(s), and `logits` and `core` are empty.
    """

    softmax: Operator
    output: Tensor
    factored: Factored
    head_size: int
    query_length: int
    key_lengths: tuple[int, ...]
    mask: Tensor | None
    products: Weighings
    operands: OperandFactors
    pieces: int = 1
    kv_heads: int = 1
    logits: dict[Operator, Factored] = field(default_factory=dict)
    core: frozenset[Operator] = frozenset()
    heads_are_rows: bool = False
    tiles: int = 1
    others: tuple[tuple[Tensor, Factored], ...] = ()

    @property
    def heads(self) -> int:
        """N, however the rows are cut."""
        return self.pieces // self.tiles

    @property
    def merged(self) -> bool:
        """True where the heads end beside the head size in one axis, `[.., N*H]`, False for `[.., N, H]`."""
        return any(factor.stride for factor in self.factored[-1])


@dataclass(frozen=True, slots=True)
class NotABlock:
    """A SOFTMAX that is no attention, or one that does not match; `reason` says which condition failed."""

    softmax: Operator
    reason: Refusal
    is_attention: bool = True


Match = Block | NotABlock


def logits_bytes(block: Block) -> int:
    """Bytes of one head's logits `[T, S]` on an NPU, S being all keys. T is that of a whole head."""
    rows = block.query_length * block.tiles
    return rows * sum(block.key_lengths) * element_bytes(block.softmax.input(0))


def element_bytes(tensor: Tensor) -> int:
    """Bytes of an element on an NPU, which keeps floats in half precision."""
    return _HALF if tensor.dtype.is_float else max((tensor.dtype.bits or 8) // 8, 1)
