"""What is found of a SOFTMAX: an attention block with several heads, with one, or none. Values, no searching."""

from dataclasses import dataclass

from edge_opt.attention.factors import Factored
from edge_opt.attention.labelling import OperandFactors, Weighings
from edge_opt.attention.refusal import Refusal
from edge_opt.ir import Operator, Tensor


@dataclass(frozen=True, slots=True)
class Block:
    """One layer's attention, matched.

    `output` is the tensor where the heads stand side by side, with factors `factored`; `others` are more of them, where
    several products of values are never summed. `core` are the operators from the logits products to these, `logits`
    the former with the factors of their results, `products` those of the values. `heads_are_rows` is True where a
    product's rows are nothing but heads (T = 1). `kv_heads` is K, `query_length` T, `key_lengths` the segments of keys
    (S, or S and T), `head_size` H. Each of the N heads is a piece of its own; where rows are cut into `tiles`, there
    are N*tiles pieces, and `query_length` is a tile's.
    """

    softmax: Operator
    output: Tensor
    factored: Factored
    pieces: int
    kv_heads: int
    head_size: int
    query_length: int
    key_lengths: tuple[int, ...]
    mask: Tensor | None
    products: Weighings
    logits: dict[Operator, Factored]
    core: frozenset[Operator]
    operands: OperandFactors
    heads_are_rows: bool
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
class SingleHead:
    """An attention that has one head (or is one of those that were split already).

    `output` is the (sum of the) value product(s), `[.., T, H]` or `[.., H, T]`; `row_axis` is where T stands.
    """

    softmax: Operator
    head_size: int
    query_length: int
    key_lengths: tuple[int, ...]
    mask: Tensor | None
    output: Tensor
    row_axis: int
    products: Weighings
    operands: OperandFactors


@dataclass(frozen=True, slots=True)
class NotABlock:
    """A SOFTMAX that is no attention, or one that does not match; `reason` says which condition failed."""

    softmax: Operator
    reason: Refusal
    is_attention: bool = True


Match = Block | SingleHead | NotABlock
