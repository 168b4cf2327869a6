"""Random attention graphs: every way that exporters are known to write the same computation, mixed freely."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from attention_cases import Case
from graph_builder import GraphBuilder, shuffle

from edge_opt.ir import DType, Model, Quantization, Tensor

# role -> (scale, zero point) of int8; those of one role are equal where TFLite's kernels want them equal.
_INT8 = {
    "query": (1 / 32, 3),
    "key": (1 / 32, -5),
    "value": (1 / 32, 7),
    "query-scaled": (1 / 50, -2),
    "key-scaled": (1 / 40, 4),
    "logits": (0.4, 5),
    "logits-scaled": (0.22, -9),
    "small": (1 / 100, 1),
    "tanh": (1 / 128, 0),
    "mask": (0.5, 127),
    "masked": (0.45, 60),
    "probability": (1 / 256, -128),
    "out": (1 / 60, 6),
    "factor": (1 / 254, 0),
    "cap": (0.4, 0),
}
_INT16 = {
    "tanh": (1 / 32768, 0),
    "probability": (1 / 32768, 0),
    "factor": (1 / 65534, 0),
    "cap": (50 / 32767, 0),
    "small": (1 / 20000, 0),
}


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
        self.outputs: list[Tensor] = []
        self.escaped: list[Tensor] = []
        self.masks: dict[Any, Tensor] = {}
        self.is_float = not case.quantized
        self.dtype = DType.FLOAT32 if self.is_float else DType[case.numbers.upper()]
        self.add_options = {"pot_scale_int16": False} if case.numbers == "int16" else {}

    def build(self) -> Attention:
        case = self.case
        hidden: Tensor | None = None
        for index in range(case.blocks):
            hidden = self.block(hidden, index)
            hidden = None if case.tail == "heads" else hidden
        for tensor in self.escaped:
            # One kind of reader is the caller, the other an operator.
            self.outputs.append(tensor if case.quantized else self.g.op("SUM", tensor, self.g.integers(-1)))
        model = self.g.finish(self.outputs)
        if case.order:
            picks = iter(case.order * (1 + len(self.g.graph) // len(case.order)))
            shuffle(self.g.graph, lambda count: next(picks) % count)
        block = Expected(case.heads, case.kv_heads, case.head_size, case.length, case.segments)
        return Attention(case, model, [block] * case.blocks)

    # Numbers

    def q(self, role: str) -> Quantization | None:
        """Parameters of a tensor by what it is for."""
        if self.is_float:
            return None
        scale, point = _INT8[role]
        if self.case.numbers == "int16":
            scale, point = _INT16.get(role, (scale / 128, 0))
        return Quantization.affine(scale, point)

    def constant(self, values: Any, role: str) -> Tensor:
        """A constant, stored as this graph stores its numbers."""
        parameters = self.q(role)
        if parameters is None:
            return self.g.constant(values)
        info = np.iinfo(self.case.numbers)
        stored = np.round(np.asarray(values) / parameters.scale[0]) + parameters.zero_point[0]
        return self.g.constant(np.clip(stored, info.min, info.max), self.dtype, parameters)

    def input(self, name: str, *shape: int, role: str) -> Tensor:
        return self.g.input(name, shape, self.dtype, self.q(role))

    def scaled(self, tensor: Tensor, role: str) -> Tensor:
        """The tensor multiplied by a number (logits also by one for each head), if the case scales this role."""
        scaling, rank = self.case.scaling, len(tensor.shape)
        if role not in self.case.scale:
            return tensor
        divides = scaling == "DIV" and self.is_float
        value = np.full((1,) * rank if scaling == "full-rank" else (), 2.0 if divides else 0.5)
        if scaling == "per head" and role == "logits":
            front = tensor.shape[:-1] if rank == 3 else (1, *tensor.shape[1:-1])
            value = np.linspace(0.2, 0.5, int(np.prod(front))).reshape((*front, 1))
        factor = self.constant(value, "factor")
        operands = (factor, tensor) if scaling == "swapped" else (tensor, factor)
        return self.g.op("DIV" if divides else "MUL", *operands, q=self.q(f"{role}-scaled"))

    def escape(self, tensor: Tensor, name: str) -> Tensor:
        if name in self.case.escapes:
            self.escaped.append(tensor)
        return tensor

    # One layer

    def block(self, hidden: Tensor | None, index: int) -> Tensor:
        keys, values = self.segments("key"), self.segments("value")
        logits = self.escape(self.logits(self.arranged(self.query(hidden)), keys), "logits")
        masked = self.masked(logits, index)
        if self.case.sink:
            masked = self.with_sink(masked)
        probabilities = self.g.op("SOFTMAX", masked, q=self.q("probability"), beta=1.0)
        parts = self.parts(self.escape(probabilities, "probabilities"))
        return self.tail(self.weighted(parts, values))

    def query(self, hidden: Tensor | None) -> Tensor:
        """Queries at `[B, N, T, H]`, scaled."""
        case, g = self.case, self.g
        b, n, t, h = case.batch, case.heads, case.length, case.head_size
        if hidden is None and case.query == "BNTH":
            return self.scaled(self.input("query", b, n, t, h, role="query"), "query")
        if hidden is None and case.query == "TNH":
            heads = self.scaled(self.input("query", t, n, h, role="query"), "query")
            return g.with_one(g.transpose(heads, 1, 0, 2), 0)
        if hidden is None and case.query == "BTNH":
            hidden = self.input("query", b, t, n, h, role="query")
        elif hidden is None and case.query == "projected" and self.is_float:
            hidden = self.projected(g.input("hidden", (b, t, 16)), n * h)
        elif hidden is None:
            hidden = self.input("query", b, t, n * h, role="query")
        source = hidden if hidden.shape == (b, t, n, h) else g.reshape(hidden, b, t, n, h)
        scaled = self.scaled(source, "query")
        source = scaled if scaled is source else self.escape(scaled, "scaled")
        by_reshape = t == 1 and case.tail_by_reshape
        return g.reshape(source, b, n, t, h) if by_reshape else g.transpose(source, 0, 2, 1, 3)

    def projected(self, source: Tensor, width: int) -> Tensor:
        rng = np.random.default_rng(width)
        weights = self.g.constant(rng.normal(0, 0.3, (width, source.shape[-1])))
        bias = self.g.constant(np.zeros(width))
        return self.g.op("FULLY_CONNECTED", source, weights, bias, keep_num_dims=len(source.shape) > 2)

    # Keys and values

    def segments(self, role: str) -> list[Tensor]:
        """Keys or values of each segment, in the layout that the case stores them in, ready for a product."""
        layout = self.case.layout
        if layout == "one":
            at = self.g.integers(0, 0, 0, 0)
            made = [self.g.op("DYNAMIC_UPDATE_SLICE", self.cached(role, plain=True), self.new(role), at)]
            self.outputs.append(made[0])
        else:
            made = [self.cached(role)] if layout != "none" else []
            made += [self.new(role)] if layout != "cross" else []
        return [self.ready(tensor, role) for tensor in made]

    def layout(self, role: str) -> str:
        return self.case.key_layout if role == "key" else self.case.value_layout

    def cached(self, role: str, *, plain: bool = False) -> Tensor:
        b, k, s, h = self.case.batch, self.case.kv_heads, self.case.cache, self.case.head_size
        shape = {"KTH": (b, k, s, h), "KHT": (b, k, h, s), "TKH": (b, s, k, h)}[self.layout(role)]
        name, numbers = f"{role}_cache", "" if plain else self.case.numbers
        if numbers == "float16":
            return self.g.op("CAST", self.g.input(name, shape, DType.FLOAT16), dtype=DType.FLOAT32)
        if numbers == "dequantized":
            narrow = self.g.input(name, shape, DType.INT8, Quantization.affine(1 / 32, 3))
            return self.g.op("DEQUANTIZE", narrow, dtype=DType.FLOAT32, q=None)
        return self.input(name, *shape, role=role)

    def new(self, role: str) -> Tensor:
        """Of this step; they come as `[B, T, K, H]`."""
        b, k, t, h = self.case.batch, self.case.kv_heads, self.case.length, self.case.head_size
        source = self.input(f"{role}_new", b, t, k, h, role=role)
        if self.layout(role) == "TKH":
            return source
        if self.layout(role) == "KHT":
            moved = self.g.transpose(source, 0, 2, 3, 1)
        else:
            moved = (
                self.g.reshape(source, b, k, t, h) if 1 in (t, k) else self.g.transpose(source, 0, 2, 1, 3)
            )
        if "kv" in self.case.escapes:
            self.outputs.append(moved)
        return moved

    def ready(self, tensor: Tensor, role: str) -> Tensor:
        """Scaled, with the heads in front, repeated where the product has no groups."""
        case = self.case
        if self.layout(role) == "TKH":
            tensor = self.g.transpose(tensor, 0, 2, 1, 3)
        if role == "key":
            tensor = self.scaled(tensor, "key")
        matrix = tensor.shape[2:]
        if case.product == "five":
            return self.g.with_one(tensor, 2)
        if case.product in ("repeat", "flat") and case.groups > 1:
            tensor = self.repeated(tensor)
        return self.g.reshape(tensor, case.batch * case.heads, *matrix) if case.product == "flat" else tensor

    def repeated(self, tensor: Tensor) -> Tensor:
        """`[B, K, ...] -> [B, N, ...]`: head k*G + g is a copy of k; where they are interleaved, head g*K + k is."""
        case, g = self.case, self.g
        b, k, groups = case.batch, case.kv_heads, case.groups
        matrix = tensor.shape[2:]
        if case.interleaved and case.repeat == "concat":
            return g.op("CONCATENATION", *[tensor] * groups, axis=1)
        axis = 1 if case.interleaved else 2
        apart = g.with_one(tensor, axis)
        if case.repeat == "broadcast":
            shape = (b, groups, k, *matrix) if case.interleaved else (b, k, groups, *matrix)
            wide = g.op("BROADCAST_TO", apart, g.integers(*shape))
        elif case.repeat == "concat":
            wide = g.op("CONCATENATION", *[apart] * groups, axis=axis)
        else:
            wide = g.op("TILE", apart, g.integers(*(groups if i == axis else 1 for i in range(5))))
        return g.reshape(wide, b, k * groups, *matrix)

    # Products

    def product(self, left: tuple[Tensor, bool], right: tuple[Tensor, bool], role: str) -> Tensor:
        """The product of two matrices, each with whether it is stored the other way round."""
        turned = {"adj_x": left[1], "adj_y": right[1]}
        return self.g.op("BATCH_MATMUL", left[0], right[0], q=self.q(role), **turned)

    def flipped(self, tensor: Tensor, role: str, *, turned: bool) -> tuple[Tensor, bool]:
        """The tensor, or its transposition, and whether that is stored the other way round."""
        flips = role in self.case.flips
        return (self.g.swap(tensor) if flips else tensor), turned != flips

    def arranged(self, query: Tensor) -> Tensor:
        case = self.case
        b, k, g, t, h = case.batch, case.kv_heads, case.groups, case.length, case.head_size
        shapes = {"five": (b, k, g, t, h), "flat": (b * k * g, t, h)}
        if case.product == "fold" and g > 1:
            return self.g.reshape(query, b, k, g * t, h)
        return self.g.reshape(query, *shapes[case.product]) if case.product in shapes else query

    def logits(self, query: Tensor, keys: list[Tensor]) -> Tensor:
        left = self.flipped(query, "query", turned=False)
        products = []
        for segment in keys:
            right = self.flipped(segment, "key", turned=self.case.key_layout != "KHT")
            if self.case.keys_first:
                turned = (right[0], not right[1]), (left[0], not left[1])
                products.append(self.g.swap(self.product(*turned, "logits")))
            else:
                products.append(self.product(left, right, "logits"))
        axis = -1 if self.case.reversed else len(products[0].shape) - 1
        return self.g.op("CONCATENATION", *products, axis=axis) if len(products) > 1 else products[0]

    def with_sink(self, logits: Tensor) -> Tensor:
        """One more column, which no key stands for, with a number for each head."""
        shape = (*logits.shape[:-1], 1)
        values = np.linspace(-1, 1, int(np.prod(shape))).reshape(shape)
        stored = np.round(values * 5) if logits.quantization else values
        sink = self.g.constant(stored, self.dtype, logits.quantization)
        return self.g.op("CONCATENATION", logits, sink, axis=len(shape) - 1)

    # Masks

    def masked(self, logits: Tensor, index: int) -> Tensor:
        """Scaled, capped and masked; comes back in the shape of the logits."""
        case, tensor = self.case, self.scaled(logits, "logits")
        if case.soft_cap:
            small = self.g.op("MUL", tensor, self.constant(0.02, "factor"), q=self.q("small"))
            curve = self.g.op("TANH", small, q=self.q("tanh"))
            tensor = self.g.op("MUL", curve, self.constant(50.0, "cap"), q=self.q("logits"))
        if case.mask == "absent":
            return tensor
        b, k, g, t = case.batch, case.kv_heads, case.groups, case.length
        fronts = {"heads": (b, k * g, t), "five": (b, k, g, t)}
        wanted = (*fronts.get(case.mask_at, tensor.shape[:-1]), tensor.shape[-1])
        moved = tensor if wanted == tensor.shape else self.g.reshape(tensor, *wanted)
        if case.mask == "select":
            rows = t if wanted[-2] == t else 1
            is_open = self.g.input("open", (*[1] * (len(wanted) - 2), rows, wanted[-1]), DType.BOOL)
            low = self.constant(-100.0, "logits")
            result = self.g.op("SELECT_V2", is_open, moved, low, q=moved.quantization)
        else:
            mask = self.mask(wanted, index)
            operands = (mask, moved) if case.reversed else (moved, mask)
            result = self.g.op("ADD", *operands, q=self.q("masked"), **self.add_options)
        return result if moved is tensor else self.g.reshape(result, *tensor.shape)

    def mask(self, shape: tuple[int, ...], index: int) -> Tensor:
        """A mask that broadcasts to the logits; layers share it, unless each has its own."""
        key = (shape, index if self.case.mask_source == "layers" else 0)
        if key not in self.masks:
            own = {"per head": self.mask_per_head, "slopes": self.slopes}.get(self.case.mask)
            self.masks[key] = self.fitted(shape, index) if own is None else own(shape)
        return self.masks[key]

    def fitted(self, shape: tuple[int, ...], index: int) -> Tensor:
        g, case, size = self.g, self.case, shape[-1]
        if case.mask == "rank 2":
            return self.source((case.length if shape[-2] == case.length else 1, size), index)
        batch = case.batch if case.mask in ("batched", "padding") else 1
        rows = 1 if case.mask == "padding" else case.length
        mask = self.source((batch, 1, rows, size), index)
        if len(shape) == 3:
            if batch == 1:
                return g.reshape(mask, 1, rows, size)
            wide = g.op("BROADCAST_TO", mask, g.integers(batch, case.heads, rows, size))
            return g.reshape(wide, batch * case.heads, rows, size)
        if len(shape) == 5:
            return g.reshape(mask, batch, 1, 1, rows, size)
        axis = 1 if rows in (1, shape[2]) else 2
        count = shape[1] if axis == 1 else case.groups
        if axis == 1 and (count == 1 or case.mask not in ("tile", "concat")):
            return mask
        if case.mask == "tile":
            return g.op("TILE", mask, g.integers(*(count if i == axis else 1 for i in range(4))))
        return g.op("CONCATENATION", *[mask] * count, axis=axis)

    def mask_per_head(self, shape: tuple[int, ...]) -> Tensor:
        own = list(shape) if len(shape) == 3 else [1, *shape[1:]]
        if self.case.reversed and shape[-2] == self.case.length:
            own[-2] = 1
        return self.constant(np.random.default_rng(shape).uniform(-4, 0, own), "mask")

    def slopes(self, shape: tuple[int, ...]) -> Tensor:
        """Distances times a number for each head."""
        heads = (*(shape[:-1] if len(shape) == 3 else (1, *shape[1:-1])), 1)
        slopes = self.constant(np.linspace(0.1, 0.5, int(np.prod(heads))).reshape(heads), "factor")
        distances = self.input("distances", *[1] * (len(shape) - 1), shape[-1], role="mask")
        return self.g.op("MUL", distances, slopes, q=self.q("mask"))

    def source(self, shape: tuple[int, ...], index: int) -> Tensor:
        g, kind = self.g, self.case.mask_source
        if kind == "layers" and len(shape) == 4:
            packed_shape = (shape[0], self.case.blocks + 1, *shape[2:])
            if packed_shape not in self.masks:
                self.masks[packed_shape] = self.input("masks", *packed_shape, role="mask")
            return g.op("SLICE", self.masks[packed_shape], g.integers(0, index, 0, 0), g.integers(*shape))
        if kind == "select":
            is_open, numbers = g.input("open", shape, DType.BOOL), (0.0, -50.0)
            return g.op("SELECT_V2", is_open, *(self.constant(x, "mask") for x in numbers), q=self.q("mask"))
        if kind == "chain":
            closed = g.op("LOGICAL_NOT", g.input("open", shape, DType.BOOL))
            mask = g.op("MUL", g.op("CAST", closed, dtype=DType.FLOAT32), g.constant(-50.0))
            return mask if self.is_float else g.op("QUANTIZE", mask, dtype=self.dtype, q=self.q("mask"))
        return self.input("mask", *shape, role="mask")

    # Behind the softmax

    def parts(self, probabilities: Tensor) -> list[Tensor]:
        """The probabilities of each segment of keys."""
        sizes = (*self.case.segments, 1) if self.case.sink else self.case.segments
        used, (*front, _) = len(self.case.segments), probabilities.shape
        if len(sizes) == 1:
            return [probabilities]
        if self.case.slices == "SPLIT_V":
            axis, count = self.g.constant(len(front), DType.INT32), len(sizes)
            lengths = self.g.integers(*sizes)
            made = self.g.ops("SPLIT_V", probabilities, lengths, axis, outputs=count, num_splits=count)
            return list(made[:used])
        begins = [self.g.integers(*[0] * len(front), sum(sizes[:i])) for i in range(used)]
        wide = [self.g.integers(*front, size) for size in sizes]
        return [
            self.g.op("SLICE", probabilities, begin, size) for begin, size in zip(begins, wide, strict=False)
        ]

    def weighted(self, parts: list[Tensor], values: list[Tensor]) -> Tensor:
        """The sum of the value products, at `[.., rows, H]`, or `[.., H, rows]` where the values come first."""
        products = []
        for part, segment in zip(parts, values, strict=True):
            left = self.flipped(part, "probabilities", turned=False)
            right = self.flipped(segment, "value", turned=self.case.value_layout == "KHT")
            if self.case.values_first:
                left, right = (right[0], not right[1]), (left[0], not left[1])
            products.append(self.product(left, right, "out"))
        if len(products) == 1:
            return products[0]
        return self.g.op(
            "ADD", *products[:: -1 if self.case.reversed else 1], q=self.q("out"), **self.add_options
        )

    def tail(self, product: Tensor) -> Tensor:
        case, g = self.case, self.g
        b, n, t, h = case.batch, case.heads, case.length, case.head_size
        if case.tail == "heads":
            rows = g.swap(product) if case.values_first else product
            self.outputs.append(rows if rows.shape == (b, n, t, h) else g.reshape(rows, b, n, t, h))
            return self.outputs[-1]
        if case.values_first:
            if product.shape == (b, n, h, t) and case.tail_by_reshape:
                return self.merged(g.transpose(product, 0, 3, 1, 2))
            product = g.swap(product)
        if t == 1 and case.tail_by_reshape and case.tail != "unmerged":
            return self.merged(product)
        if case.product == "flat" and b == 1 and case.tail_by_reshape:
            return self.merged(g.with_one(g.transpose(product, 1, 0, 2), 0))
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
            result = tensor
        elif case.tail.startswith("flat"):
            flat = g.reshape(tensor, b, t * n * h)
            result = g.op("ABS", flat) if case.tail == "flat then mapped" else flat
        else:
            merged = (
                g.reshape(tensor, b * t, n * h) if case.tail == "rows" else g.reshape(tensor, b, t, n * h)
            )
            result = self.projected(merged, n * h) if case.project and self.is_float else merged
        self.outputs.append(result)
        return result
