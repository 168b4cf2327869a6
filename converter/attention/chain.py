"""Makes the pieces of an attention run one after the other, so that only one of them is on the chip at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from edge_opt.attention import factors as fx
from edge_opt.ir import DType, Tensor
from edge_opt.schema.table import new_table

if TYPE_CHECKING:
    from edge_opt.attention.assembly import Assembly
    from edge_opt.attention.found import Block
    from edge_opt.ir import Operator

_INTEGERS = frozenset({DType.INT8, DType.INT16})


class Chain:
    """Queries of a piece that cannot be read before the piece in front of it is done: `q - x*0`, x one element of that.

    `q - 0` is `q` bit for bit, also for NaN, infinity and -0. Where x is float the zero is made from a comparison,
    `CAST(x < 0) * 0`: NaN and infinity of one head must not reach the next. Where it is an integer, the zero has the
    query's own scale and zero point, and an integer SUB of three equal scales gives its left operand.
    """

    def __init__(self, assembly: Assembly, block: Block) -> None:
        self._assembly = assembly
        self._queries = {product: query_side(product, block) for product in block.logits}
        self._last: Tensor | None = None
        self._waiting: dict[int, Tensor] = {}

    def finished(self, result: Tensor) -> None:
        """The piece that was made last; what comes now waits for it."""
        self._last = self._assembly.source(result)
        self._waiting.clear()

    def operand(self, product: Operator, index: int, piece: Tensor) -> Tensor:
        """An operand of one piece's operator; the queries of a logits product are made to wait."""
        if self._last is None or self._queries.get(product) != index:
            return piece
        if id(piece) not in self._waiting:
            self._waiting[id(piece)] = self._after(self._last, piece)
        return self._waiting[id(piece)]

    def _after(self, last: Tensor, query: Tensor) -> Tensor:
        zero = self._zero(last, query)
        made = self._assembly.tensor(f"{query.name}/waiting", query.shape, query)
        pot = {} if query.dtype.is_float else {"pot_scale_int16": False}
        self._assembly.emit("SUB", [query, zero], [made], new_table("SubOptions", **pot))
        return made

    def _zero(self, last: Tensor, query: Tensor) -> Tensor:
        """A zero of the query's type that depends on `last`, of the query's rank and one element."""
        rank = len(last.shape)
        element = self._assembly.tensor(f"{last.name}/first", (1,) * rank, last)
        steering = [
            self._assembly.integers(f"{element.name}/begin", [0] * rank),
            self._assembly.integers(f"{element.name}/size", [1] * rank),
        ]
        self._assembly.emit("SLICE", [last, *steering], [element], new_table("SliceOptions"))
        one = (1,) * len(query.shape)
        element = self._assembly.reshaped(element, one, f"{last.name}/first")
        if element.dtype.is_float:
            element = self._below_zero(element)
        numbers = element.dtype.numpy
        assert numbers is not None
        quantization = element.quantization
        nought = 0 if quantization is None or element.dtype.is_float else int(quantization.zero_point[0])
        constant = self._assembly.constant(element, np.full(one, nought, numbers), quantization)
        zero = self._assembly.tensor(f"{query.name}/zero", one, query)
        self._assembly.emit("MUL", [element, constant], [zero], new_table("MulOptions"))
        return zero

    def _below_zero(self, element: Tensor) -> Tensor:
        """1.0 where the element is below 0, else 0.0: finite, whatever the element is."""
        nothing = self._assembly.constant(element, np.zeros(element.shape, np.float32), None)
        flag = Tensor(f"{element.name}/negative", element.shape, DType.BOOL)
        self._assembly.emit("LESS", [element, nothing], [flag], new_table("LessOptions"))
        number = self._assembly.tensor(f"{element.name}/number", element.shape, element)
        kinds = {"in_data_type": int(DType.BOOL), "out_data_type": int(DType.FLOAT32)}
        self._assembly.emit("CAST", [flag], [number], new_table("CastOptions", **kinds))
        return number


def query_side(product: Operator, block: Block) -> int:
    """Which operand of a logits product is the queries: the one with the most pieces, keys are shared by rows."""
    operands = block.operands(product, block.logits[product])
    assert isinstance(operands, dict)
    return max(operands, key=lambda index: fx.piece_count(operands[index]))


def chain_obstacle(block: Block) -> str | None:
    """Why the pieces of a block cannot wait for each other; None where they can."""
    if block.tiles == 1:
        return "its rows are not cut"
    result = block.output
    for product in block.logits:
        query = product.input(query_side(product, block))
        if query.dtype is not result.dtype or not (_counts(query) and _counts(result)):
            return f"its queries are {query.dtype.name.lower()}, its results {result.dtype.name.lower()}"
    return None


def _counts(tensor: Tensor) -> bool:
    """True for types that MUL and SUB take: float32, or integers with one scale."""
    if tensor.dtype not in _INTEGERS:
        return tensor.dtype is DType.FLOAT32
    quantization = tensor.quantization
    return quantization is not None and quantization.is_affine and not quantization.is_per_axis
