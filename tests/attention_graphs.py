"""Random attention graphs: every way that exporters are known to write the same computation, mixed freely."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from attention_cases import Case
from attention_keys import KeyBuilder
from attention_masks import MaskBuilder
from attention_numbers import Numbers, scaled
from graph_builder import GraphBuilder, shuffle

from edge_opt.ir import DType, Model, Quantization, Tensor


@dataclass
class Expected:
    """What must be found of one block."""

    heads: int
    kv_heads: int
    head_size: int
    query_length: int
    key_lengths: tuple[int, ...]


@dataclass
class Attention:
    """A graph and what is in it."""

    case: Case
    model: Model
    expected: list[Expected] = field(default_factory=list)


def build(case: Case) -> Attention:
    """The graph of a case."""
    return _Build(case).build()


class _Build:
    def __init__(self, case: Case) -> None:
        self.case = case
        self.g = GraphBuilder("attend")
        self.numbers = Numbers(case.numbers)
        self.outputs: list[Tensor] = []
        self.escaped: list[Tensor] = []
        self.masks = MaskBuilder(case, self.g, self.numbers)
        self.keys = KeyBuilder(case, self.g, self.numbers, self.outputs)
        self.last_product: Tensor | None = None

    def build(self) -> Attention:
        case = self.case
        hidden: Tensor | None = None
        for index in range(case.blocks):
            if "mask" not in case.shared:
                self.masks.forget()
            hidden = self.block(hidden, index)
            chains = case.chained and index + 1 < case.blocks
            self.last_product = hidden if chains else None
            hidden = None if case.tail == "heads" else hidden
        for tensor in self.escaped:
            # One kind of reader is the caller, the other an operator.
            self.outputs.append(tensor if case.quantized else self.g.op("SUM", tensor, self.g.integers(-1)))
        model = self.g.finish(self.outputs)
        if case.order:
            picks = iter(case.order * (1 + len(self.g.graph) // len(case.order)))
            shuffle(self.g.graph, lambda count: next(picks) % count)
        gathers = (
            case.repeat == "gather"
            and case.product in ("repeat", "flat")
            and min(case.groups, case.kv_heads) > 1
        )
        kv_heads = case.heads if gathers else case.kv_heads
        block = Expected(case.heads, kv_heads, case.head_size, case.length, case.segments)
        return Attention(case, model, [block] * case.blocks)

    def q(self, role: str) -> Quantization | None:
        return self.numbers.q(role)

    def escape(self, tensor: Tensor, name: str) -> Tensor:
        if name in self.case.escapes:
            self.escaped.append(tensor)
        return tensor

    # One layer

    def block(self, hidden: Tensor | None, index: int) -> Tensor:
        segments = self.keys.segments()
        if self.last_product is None:
            query, turned = self.arranged(self.query(hidden)), False
        else:
            query, turned = self.scaled_query(self.last_product), self.case.values_first
        logits = self.escape(self.logits(query, [keys for keys, _ in segments], turned=turned), "logits")
        masked = self.masked(logits, index)
        if self.case.sink:
            masked = self.with_sink(masked)
        probabilities = self.g.op("SOFTMAX", masked, q=self.q("probability"), beta=1.0)
        parts = self.parts(self.escape(probabilities, "probabilities"))
        product = self.weighted(parts, [values for _, values in segments])
        chains = self.case.chained and index + 1 < self.case.blocks
        return product if chains else self.tail(product)

    def query(self, hidden: Tensor | None) -> Tensor:
        """Queries at `[B, N, T, H]`, scaled."""
        case, g = self.case, self.g
        b, n, t, h = case.batch, case.heads, case.length, case.head_size
        if hidden is None and case.query == "BNTH":
            return self.scaled_query(self.query_input(b, n, t, h))
        if hidden is None and case.query == "TNH":
            heads = g.transpose(self.scaled_query(self.query_input(t, n, h)), 1, 0, 2)
            return g.with_one(heads, 0, case.size_one)
        source = self.query_source(hidden)
        if not case.scale_late:
            source = self.scaled_query(source)
        by_reshape = t == 1 and case.tail_by_reshape
        moved = g.reshape(source, b, n, t, h) if by_reshape else g.transpose(source, 0, 2, 1, 3)
        return self.scaled_query(moved) if case.scale_late else moved

    def query_source(self, hidden: Tensor | None) -> Tensor:
        """Queries at `[B, T, N, H]`."""
        case, g = self.case, self.g
        b, n, t, h = case.batch, case.heads, case.length, case.head_size
        if hidden is not None:
            return hidden if hidden.shape == (b, t, n, h) else g.reshape(hidden, b, t, n, h)
        if case.query == "BTNH":
            return self.query_input(b, t, n, h)
        if case.query == "projected" and self.numbers.is_float:
            return g.reshape(self.projected(g.input("hidden", (b, t, 16)), n * h), b, t, n, h)
        return g.reshape(self.query_input(b, t, n * h), b, t, n, h)

    def query_input(self, *shape: int) -> Tensor:
        return self.g.input("query", shape, self.numbers.dtype, self.q("query"))

    def scaled_query(self, tensor: Tensor) -> Tensor:
        result = scaled(self.case, self.g, self.numbers, tensor, "query")
        return result if result is tensor else self.escape(result, "scaled")

    def projected(self, source: Tensor, width: int) -> Tensor:
        rng = np.random.default_rng(width)
        weights = self.g.constant(rng.normal(0, 0.3, (width, source.shape[-1])))
        bias = self.g.constant(np.zeros(width))
        return self.g.op("FULLY_CONNECTED", source, weights, bias, keep_num_dims=len(source.shape) > 2)

    # Products

    def multiply(
        self, left: Tensor, right: Tensor, turned: tuple[bool, bool], q: Quantization | None
    ) -> Tensor:
        """The product of two matrices; `turned` says which is stored the other way round."""
        return self.g.op("BATCH_MATMUL", left, right, q=q, adj_x=turned[0], adj_y=turned[1])

    def flipped(self, tensor: Tensor, role: str, *, turned: bool) -> tuple[Tensor, bool]:
        """The tensor, or its transposition, and whether that is stored the other way round."""
        if role in self.case.flips:
            return self.g.swap(tensor), not turned
        return tensor, turned

    def arranged(self, query: Tensor) -> Tensor:
        case = self.case
        b, k, g, t, h = case.batch, case.kv_heads, case.groups, case.length, case.head_size
        if case.product == "fold" and g > 1:
            return self.g.reshape(query, b, k, g * t, h)
        if case.product == "five":
            return self.g.reshape(query, b, k, g, t, h)
        if case.product == "flat":
            return self.g.reshape(query, b * k * g, t, h)
        return query

    def logits(self, query: Tensor, keys: list[Tensor], *, turned: bool) -> Tensor:
        left, left_turned = self.flipped(query, "query", turned=turned)
        products = []
        for segment in keys:
            right, right_turned = self.flipped(segment, "key", turned=self.case.key_layout != "KHT")
            if self.case.keys_first:
                product = self.g.swap(self.product(right, left, (not right_turned, not left_turned)))
            else:
                product = self.product(left, right, (left_turned, right_turned))
            products.append(product)
        if len(products) == 1:
            return products[0]
        axis = len(products[0].shape) - 1
        return self.g.op("CONCATENATION", *products, axis=-1 if self.case.mask_first else axis)

    def product(self, left: Tensor, right: Tensor, turned: tuple[bool, bool]) -> Tensor:
        if not (self.case.requantize and self.case.quantized):
            return self.multiply(left, right, turned, self.q("logits"))
        return self.g.op("QUANTIZE", self.multiply(left, right, turned, self.q("raw")), q=self.q("logits"))

    def with_sink(self, logits: Tensor) -> Tensor:
        """One more column, which no key stands for, with a number for each head."""
        shape = (*logits.shape[:-1], 1)
        values = np.linspace(-1, 1, int(np.prod(shape))).reshape(shape)
        parameters = logits.quantization
        if parameters is None:
            sink = self.g.constant(values)
        else:
            sink = self.g.constant(np.round(values * 5), self.numbers.dtype, parameters)
        return self.g.op("CONCATENATION", logits, sink, axis=len(shape) - 1)

    def masked(self, logits: Tensor, index: int) -> Tensor:
        """Scaled, capped and masked; comes back in the shape of the logits."""
        tensor = scaled(self.case, self.g, self.numbers, logits, "logits")
        if self.case.soft_cap:
            tensor = self.capped(tensor)
        if self.case.mask == "absent":
            return tensor
        moved = self.placed(tensor)
        result = self.masks.apply(moved, index)
        return result if moved is tensor else self.g.reshape(result, *tensor.shape)

    def capped(self, tensor: Tensor) -> Tensor:
        low = self.numbers.constant(self.g, 0.02, "factor")
        high = self.numbers.constant(self.g, 50.0, "cap")
        small = self.g.op("MUL", tensor, low, q=self.q("small"))
        curve = self.g.op("TANH", small, q=self.q("tanh"))
        return self.g.op("MUL", curve, high, q=self.q("logits"))

    def placed(self, tensor: Tensor) -> Tensor:
        case = self.case
        b, k, g, t = case.batch, case.kv_heads, case.groups, case.length
        shapes = {"heads": (b, k * g, t), "five": (b, k, g, t)}
        wanted = (*shapes.get(case.mask_at, tensor.shape[:-1]), tensor.shape[-1])
        return tensor if wanted == tensor.shape else self.g.reshape(tensor, *wanted)

    # Behind the softmax

    def parts(self, probabilities: Tensor) -> list[Tensor]:
        """The probabilities of each segment of keys."""
        if self.case.cast_probabilities:
            probabilities = self.narrowed(probabilities)
        sizes = (*self.case.segments, 1) if self.case.sink else self.case.segments
        used = len(self.case.segments)
        if len(sizes) == 1:
            return [probabilities]
        front, total = probabilities.shape[:-1], probabilities.shape[-1]
        rank = len(probabilities.shape)
        axis = self.g.constant(rank - 1, DType.INT32)
        if self.case.slices == "SPLIT":
            return list(self.g.ops("SPLIT", axis, probabilities, outputs=len(sizes), num_splits=len(sizes)))
        if self.case.slices == "SPLIT_V":
            lengths = self.g.integers(*sizes)
            count = len(sizes)
            made = self.g.ops("SPLIT_V", probabilities, lengths, axis, outputs=count, num_splits=count)
            return list(made[:used])
        found, begin = [], 0
        for size in sizes[:used]:
            begins = (0,) * (rank - 1) + (begin,)
            found.append(self.sliced(probabilities, begins, (*front, size), total))
            begin += size
        return found

    def sliced(self, source: Tensor, begins: Sequence[int], size: Sequence[int], total: int) -> Tensor:
        if self.case.slices == "SLICE":
            return self.g.op("SLICE", source, self.g.integers(*begins), self.g.integers(*size))
        rank = len(begins)
        ends = [begin + width for begin, width in zip(begins, size, strict=True)]
        last = ends[-1] == total
        return self.g.op(
            "STRIDED_SLICE",
            source,
            self.g.integers(*begins),
            self.g.integers(*ends[:-1], 0 if last else ends[-1]),
            self.g.integers(*[1] * rank),
            begin_mask=(1 << (rank - 1)) - 1,
            end_mask=(1 << (rank - 1)) - 1 | (1 << (rank - 1) if last else 0),
        )

    def narrowed(self, tensor: Tensor) -> Tensor:
        if self.case.quantized:
            return self.g.op("QUANTIZE", tensor, q=self.q("coarse"))
        if self.case.numbers == "dequantized":
            narrow = self.g.op("QUANTIZE", tensor, dtype=DType.INT8, q=Quantization.affine(1 / 256, -128))
            return self.g.op("DEQUANTIZE", narrow, dtype=DType.FLOAT32, q=None)
        narrow = self.g.op("CAST", tensor, dtype=DType.FLOAT16)
        return self.g.op("CAST", narrow, dtype=DType.FLOAT32)

    def weighted(self, parts: list[Tensor], values: list[Tensor]) -> Tensor:
        """The sum of the value products, at `[.., rows, H]`, or `[.., H, rows]` where the values come first."""
        products = []
        for part, segment in zip(parts, values, strict=True):
            left, left_turned = self.flipped(part, "probabilities", turned=False)
            right, right_turned = self.flipped(segment, "value", turned=self.case.value_layout == "KHT")
            if self.case.values_first:
                turned = (not right_turned, not left_turned)
                products.append(self.multiply(right, left, turned, self.q("out")))
            else:
                products.append(self.multiply(left, right, (left_turned, right_turned), self.q("out")))
        if len(products) == 1:
            return products[0]
        if self.case.mask_first:
            products.reverse()
        return self.g.op("ADD", *products, q=self.q("out"), **self.numbers.add_options)

    def tail(self, product: Tensor) -> Tensor:
        case, g = self.case, self.g
        b, n, t, h = case.batch, case.heads, case.length, case.head_size
        if case.tail == "heads":
            rows = g.swap(product) if case.values_first else product
            self.outputs.append(rows if rows.shape == (b, n, t, h) else g.reshape(rows, b, n, t, h))
            return self.outputs[-1]
        if case.values_first:
            whole = product.shape == (b, n, h, t)
            if whole and case.tail_by_reshape:
                return self.merged(g.transpose(product, 0, 3, 1, 2))
            product = g.swap(product)
        if t == 1 and case.tail_by_reshape and case.tail != "unmerged":
            return self.merged(product)
        if case.product == "flat" and b == 1 and case.tail_by_reshape:
            return self.merged(g.with_one(g.transpose(product, 1, 0, 2), 0, case.size_one))
        if case.product == "five" and case.tail_by_reshape and case.tail != "unmerged":
            return self.merged(self.escape(g.transpose(product, 0, 3, 1, 2, 4), "tail"))
        heads = product if product.shape == (b, n, t, h) else g.reshape(product, b, n, t, h)
        moved = g.transpose(heads, 0, 2, 1, 3)
        self.escape(moved if case.tail_by_reshape else heads, "tail")
        return self.merged(moved)

    def merged(self, tensor: Tensor) -> Tensor:
        case, g = self.case, self.g
        b, n, t, h = case.batch, case.heads, case.length, case.head_size
        if case.tail == "unmerged":
            self.outputs.append(tensor)
            return tensor
        if case.tail.startswith("flat"):
            flat = g.reshape(tensor, b, t * n * h)
            self.outputs.append(g.op("ABS", flat) if case.tail == "flat then mapped" else flat)
            return self.outputs[-1]
        merged = g.reshape(tensor, b * t, n * h) if case.tail == "rows" else g.reshape(tensor, b, t, n * h)
        result = self.projected(merged, n * h) if case.project and self.numbers.is_float else merged
        self.outputs.append(result)
        return result
