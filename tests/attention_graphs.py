"""Random attention graphs: every way that exporters are known to write the same computation, mixed freely."""

from dataclasses import make_dataclass, replace
from typing import Any

import numpy as np
from hypothesis import strategies as st

from edge_opt.ir import Constants, DType, Model, Quantization, Signature, Subgraph, Tensor
from edge_opt.shapes.inference import infer_operator
from edge_opt.shapes.rules import Fact, small_value

MASKS = ("shared", "batched", "absent", "concat", "tile", "per head", "padding", "select")


def _some(*names: str) -> st.SearchStrategy[frozenset[str]]:
    return st.frozensets(st.sampled_from(names), max_size=len(names))


def _choice(*names: str) -> st.SearchStrategy[str]:
    return st.sampled_from(names)


_CHOICES: dict[str, st.SearchStrategy[Any]] = {
    "batch": st.sampled_from((1, 1, 2, 3)),
    "length": st.sampled_from((1, 4, 3, 8)),
    "cache": st.sampled_from((8, 5, 12)),
    "head_size": st.sampled_from((8, 4, 5)),
    "numbers": _choice("float32", "float32", "float16", "int8", "int16"),
    "layout": _choice("split", "one", "none", "cross"),
    "query": _choice("BTD", "BTNH", "BNTH"),
    "product": _choice("fold", "repeat", "flat", "five"),
    "repeat": _choice("broadcast", "tile", "concat"),
    "scale": _some("query", "key", "logits"),
    "scaling": _choice("MUL", "DIV", "per head"),
    "soft_cap": st.booleans(),
    "mask": _choice(*MASKS),
    "other": st.just("none"),
    "mask_at": _choice("product", "heads", "five"),
    "reversed": st.booleans(),
    "key_layout": _choice("KTH", "KHT", "TKH"),
    "value_layout": _choice("KHT", "KTH", "TKH"),
    "flips": _some("query", "key", "probabilities", "value"),
    "values_first": st.booleans(),
    "tail": _choice("merged", "rows", "unmerged", "flat", "heads"),
    "tail_by_reshape": st.booleans(),
    "blocks": st.sampled_from((1, 1, 1, 2, 3)),
    "weights": _choice(
        "softmax", "softmax", "softmax", "sigmoid", "relu", "exp", "normalized", "softmax by EXP"
    ),
    "written": _choice(
        "BATCH_MATMUL", "BATCH_MATMUL", "BATCH_MATMUL", "BATCH_MATMUL", "FULLY_CONNECTED", "sums"
    ),
    "mixing": _choice("none", "none", "none", "none", "none", "logits", "probabilities"),
    "mixing_by": _choice("FULLY_CONNECTED", "BATCH_MATMUL", "sums", "computed"),
    "escapes": st.one_of(
        st.just(frozenset()), _some("kv", "logits", "probabilities", "scaled", "tail")
    ),
}


class Case(make_dataclass("Choices", ("groups", "kv_heads", *_CHOICES), frozen=True)):
    """One graph: G, K, and one of each of the choices; the first of each is the plainest."""

    @property
    def quantized(self) -> bool:
        """True where the products are in integers."""
        return self.numbers in ("int8", "int16")

    @property
    def heads(self) -> int:
        """N."""
        return self.groups * self.kv_heads

    @property
    def segments(self) -> tuple[int, ...]:
        """Key lengths, in the order of the logits."""
        lengths = {"split": (self.cache, self.length), "none": (self.length,)}
        return lengths.get(self.layout, (self.cache,))


@st.composite
def cases(draw: st.DrawFn, /, **fixed: Any) -> Case:
    """A case; `fixed` pins some of its fields."""
    sizes = ((4, 1), (2, 2), (1, 4), (3, 1), (1, 2), (2, 3), (1, 3), (4, 2), (2, 1))
    groups, kv_heads = draw(st.sampled_from(sizes))
    chosen = {
        name: fixed[name] if name in fixed else draw(strategy)
        for name, strategy in _CHOICES.items()
    }
    return possible(Case(**{"groups": groups, "kv_heads": kv_heads, **chosen, **fixed}))


def possible(case: Case) -> Case:
    """The case, with choices that exclude each other resolved."""
    if case.quantized:
        weights = case.weights if case.weights in ("softmax", "sigmoid") else "softmax"
        case = replace(case, weights=weights, written="BATCH_MATMUL", mixing="none")
    if case.written == "FULLY_CONNECTED":  # whose weights have no batch
        case = replace(case, batch=1, groups=case.heads, kv_heads=1, product="fold")
    if case.length == 1 and max(case.segments) == 1:
        case = replace(case, mixing="none")  # numbers, not matrices
    if case.mixing_by == "computed" and case.kv_heads == 1:
        # Scores in one matrix that a computed one multiplies may as well be keys, and the product the scores.
        case = replace(case, mixing_by="BATCH_MATMUL")
    if case.written == "sums" and case.product == "five":
        case = replace(case, product="repeat")
    if case.layout == "one" and case.cache < case.length:
        case = replace(case, cache=case.length + 4)
    if case.tail == "unmerged" and case.length == 1 and case.groups > 1 and case.product == "fold":
        # `[1, 1, N, H]` says nowhere whether N are heads or rows of one head.
        case = replace(case, tail="merged")
    apart = case.length == 1 and case.query == "BTNH"
    if case.tail == "heads" and (apart or case.query == "BNTH" or case.product == "fold"):
        # Nor do heads among the rows that nothing behind the block takes apart.
        case = replace(case, tail="merged")
    return case


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


SAME = Quantization.affine(1.0)
"""Stands for the quantization of the first input."""


def build(case: Case) -> Model:
    """The graph of a case."""
    return Builder(case).build()


class Builder:
    """Builds in the IR, one call an operator; shapes are derived, not written down."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.graph = Subgraph("attend")
        self.model = Model(subgraphs=[self.graph])
        self.constants = Constants(self.model)
        self.outputs: list[Tensor] = []
        self.escaped: list[Tensor] = []
        self.masks: dict[tuple[int, ...], Tensor] = {}
        self.is_float = not case.quantized
        self.dtype = DType.FLOAT32 if self.is_float else DType[case.numbers.upper()]
        self.add_options = {"pot_scale_int16": False} if case.numbers == "int16" else {}

    def build(self) -> Model:
        hidden: Tensor | None = None
        for _ in range(self.case.blocks):
            hidden = self.block(None if self.case.tail == "heads" else hidden)
        for tensor in self.escaped:
            # One kind of reader is the caller, the other an operator.
            read = tensor if self.case.quantized else self.op("SUM", tensor, self.integers(-1))
            self.outputs.append(read)
        self.graph.outputs = list(dict.fromkeys(self.outputs))
        inputs = {tensor.name: tensor for tensor in self.graph.inputs}
        named = {f"out_{i}": tensor for i, tensor in enumerate(self.graph.outputs)}
        self.model.signatures.append(Signature("attend", self.graph, inputs, named))
        return self.model

    # Operators

    def new(
        self, stem: str, shape: tuple[int, ...], dtype: DType, q: Quantization | None
    ) -> Tensor:
        return self.graph.add_tensor(
            Tensor(f"{stem}_{len(self.graph.tensors)}", shape, dtype, quantization=q)
        )

    def given(
        self, name: str, shape: tuple[int, ...], dtype: DType, q: Quantization | None = None
    ) -> Tensor:
        self.graph.inputs.append(self.new(name, shape, dtype, q))
        return self.graph.inputs[-1]

    def stored(
        self, values: Any, dtype: DType = DType.FLOAT32, q: Quantization | None = None
    ) -> Tensor:
        """A constant; equal ones are one tensor."""
        tensor = self.constants.make("const", np.asarray(values, dtype.numpy), dtype, q)
        return tensor if self.graph.lists(tensor) else self.graph.add_tensor(tensor)

    def integers(self, *values: int) -> Tensor:
        return self.stored(values, DType.INT32)

    absent: Any = None
    """An input that an operator may leave out."""

    def op(
        self, name: str, *inputs: Tensor, dtype: DType | None = None, q: Any = SAME, **options: Any
    ) -> Tensor:
        """The result has the first input's type and quantization unless told otherwise."""
        q = inputs[0].quantization if q is SAME else q
        dtype = inputs[name == "SELECT_V2"].dtype if dtype is None else dtype
        result = self.new(name.lower(), (), dtype, q)
        operator = self.model.new_operator(name, inputs, [result], **options)
        facts = [
            Fact(None) if tensor is None else Fact(tensor.shape, small_value(tensor))
            for tensor in inputs
        ]
        ((shape, _),) = infer_operator(operator, facts)
        assert shape is not None
        result.shape = shape
        return self.graph.append(operator).output

    def reshape(self, source: Tensor, *shape: int) -> Tensor:
        return self.op(
            "RESHAPE", source, self.integers(*shape), new_shape=np.array(shape, np.int32)
        )

    def with_one(self, source: Tensor, axis: int) -> Tensor:
        """The tensor with one more axis, of size 1."""
        return self.reshape(source, *source.shape[:axis], 1, *source.shape[axis:])

    def transpose(self, source: Tensor, *permutation: int) -> Tensor:
        return self.op("TRANSPOSE", source, self.integers(*permutation))

    def swap(self, source: Tensor) -> Tensor:
        """TRANSPOSE of the last two axes."""
        rank = len(source.shape)
        return self.transpose(source, *range(rank - 2), rank - 1, rank - 2)

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
            return self.stored(values)
        info = np.iinfo(self.case.numbers)
        stored = np.round(np.asarray(values) / parameters.scale[0]) + parameters.zero_point[0]
        return self.stored(np.clip(stored, info.min, info.max), self.dtype, parameters)

    def input(self, name: str, *shape: int, role: str) -> Tensor:
        return self.given(name, shape, self.dtype, self.q(role))

    def scaled(self, tensor: Tensor, role: str) -> Tensor:
        """The tensor multiplied by a number (logits also by one for each head), if the case scales this role."""
        scaling, rank = self.case.scaling, len(tensor.shape)
        if role not in self.case.scale:
            return tensor
        divides = scaling == "DIV" and self.is_float
        value = np.full((), 2.0 if divides else 0.5)
        if scaling == "per head" and role == "logits":
            front = tensor.shape[:-1] if rank == 3 else (1, *tensor.shape[1:-1])
            value = np.linspace(0.2, 0.5, int(np.prod(front))).reshape((*front, 1))
        factor = self.constant(value, "factor")
        return self.op("DIV" if divides else "MUL", tensor, factor, q=self.q(f"{role}-scaled"))

    def escape(self, tensor: Tensor, name: str) -> Tensor:
        if name in self.case.escapes:
            self.escaped.append(tensor)
        return tensor

    # One layer

    def block(self, hidden: Tensor | None) -> Tensor:
        keys, values = self.segments("key"), self.segments("value")
        logits = self.escape(self.logits(self.arranged(self.query(hidden)), keys), "logits")
        probabilities = self.weights(self.masked(self.mixed(logits, "logits")))
        parts = self.parts(self.mixed(self.escape(probabilities, "probabilities"), "probabilities"))
        return self.tail(self.weighted(parts, values))

    def query(self, hidden: Tensor | None) -> Tensor:
        """Queries at `[B, N, T, H]`, scaled."""
        case = self.case
        b, n, t, h = case.batch, case.heads, case.length, case.head_size
        if hidden is None and case.query == "BNTH":
            return self.scaled(self.input("query", b, n, t, h, role="query"), "query")
        if hidden is None and case.query == "BTNH":
            hidden = self.input("query", b, t, n, h, role="query")
        elif hidden is None:
            hidden = self.input("query", b, t, n * h, role="query")
        source = hidden if hidden.shape == (b, t, n, h) else self.reshape(hidden, b, t, n, h)
        scaled = self.scaled(source, "query")
        source = scaled if scaled is source else self.escape(scaled, "scaled")
        by_reshape = t == 1 and case.tail_by_reshape
        return (
            self.reshape(source, b, n, t, h) if by_reshape else self.transpose(source, 0, 2, 1, 3)
        )

    # Keys and values

    def segments(self, role: str) -> list[Tensor]:
        """Keys or values of each segment, in the layout that the case stores them in, ready for a product."""
        layout = self.case.layout
        if layout == "one":
            at = self.integers(0, 0, 0, 0)
            made = [
                self.op("DYNAMIC_UPDATE_SLICE", self.cached(role, plain=True), self.added(role), at)
            ]
            self.outputs.append(made[0])
        else:
            made = [self.cached(role)] if layout != "none" else []
            made += [self.added(role)] if layout != "cross" else []
        return [self.ready(tensor, role) for tensor in made]

    def layout(self, role: str) -> str:
        return self.case.key_layout if role == "key" else self.case.value_layout

    def cached(self, role: str, *, plain: bool = False) -> Tensor:
        b, k, s, h = self.case.batch, self.case.kv_heads, self.case.cache, self.case.head_size
        shape = {"KTH": (b, k, s, h), "KHT": (b, k, h, s), "TKH": (b, s, k, h)}[self.layout(role)]
        name, numbers = f"{role}_cache", "" if plain else self.case.numbers
        if numbers == "float16":
            return self.op("CAST", self.given(name, shape, DType.FLOAT16), dtype=DType.FLOAT32)
        return self.input(name, *shape, role=role)

    def added(self, role: str) -> Tensor:
        """Of this step; they come as `[B, T, K, H]`."""
        b, k, t, h = self.case.batch, self.case.kv_heads, self.case.length, self.case.head_size
        source = self.input(f"{role}_new", b, t, k, h, role=role)
        if self.layout(role) == "TKH":
            return source
        if self.layout(role) == "KHT":
            moved = self.transpose(source, 0, 2, 3, 1)
        else:
            moved = (
                self.reshape(source, b, k, t, h)
                if 1 in (t, k)
                else self.transpose(source, 0, 2, 1, 3)
            )
        if "kv" in self.case.escapes:
            self.outputs.append(moved)
        return moved

    def ready(self, tensor: Tensor, role: str) -> Tensor:
        """Scaled, with the heads in front, repeated where the product has no groups."""
        case = self.case
        if self.layout(role) == "TKH":
            tensor = self.transpose(tensor, 0, 2, 1, 3)
        if role == "key":
            tensor = self.scaled(tensor, "key")
        matrix = tensor.shape[2:]
        if case.product == "five":
            return self.with_one(tensor, 2)
        if case.product in ("repeat", "flat") and case.groups > 1:
            tensor = self.repeated(tensor)
        return (
            self.reshape(tensor, case.batch * case.heads, *matrix)
            if case.product == "flat"
            else tensor
        )

    def repeated(self, tensor: Tensor) -> Tensor:
        """`[B, K, ...] -> [B, N, ...]`: head k*G + g is a copy of k."""
        case = self.case
        b, k, groups = case.batch, case.kv_heads, case.groups
        matrix = tensor.shape[2:]
        apart = self.with_one(tensor, 2)
        if case.repeat == "broadcast":
            wide = self.op("BROADCAST_TO", apart, self.integers(b, k, groups, *matrix))
        elif case.repeat == "concat":
            wide = self.op("CONCATENATION", *[apart] * groups, axis=2)
        else:
            wide = self.op("TILE", apart, self.integers(1, 1, groups, 1, 1))
        return self.reshape(wide, b, k * groups, *matrix)

    # Products

    def product(self, left: tuple[Tensor, bool], right: tuple[Tensor, bool], role: str) -> Tensor:
        """The product of two matrices, each with whether it is stored the other way round."""
        if self.case.written == "sums":
            return self.sum_of_products(left, right)
        if self.case.written == "FULLY_CONNECTED":
            return self.fully_connected(left, right)
        turned = {"adj_x": left[1], "adj_y": right[1]}
        return self.op("BATCH_MATMUL", left[0], right[0], q=self.q(role), **turned)

    def sum_of_products(self, left: tuple[Tensor, bool], right: tuple[Tensor, bool]) -> Tensor:
        """`[.., M, C, 1] * [.., 1, C, N]`, summed over C."""
        rows, columns = (
            self.swap(tensor) if turned else tensor for tensor, turned in (left, right)
        )
        factors = (
            self.with_one(rows, len(rows.shape)),
            self.with_one(columns, len(columns.shape) - 2),
        )
        product = self.op("MUL", *factors)
        return self.op("SUM", product, self.integers(len(product.shape) - 2))

    def fully_connected(self, left: tuple[Tensor, bool], right: tuple[Tensor, bool]) -> Tensor:
        """`[M, C] x [N, C]^T`, without a batch."""
        rows = self.swap(left[0]) if left[1] else left[0]
        weights = right[0] if right[1] else self.swap(right[0])
        flat = self.reshape(weights, *weights.shape[-2:])
        return self.op("FULLY_CONNECTED", rows, flat, self.absent, keep_num_dims=True)

    # Heads that are not independent

    def mixed(self, tensor: Tensor, name: str) -> Tensor:
        """Each head a mixture of all heads, if the case mixes these; comes back in the same shape."""
        case = self.case
        if case.mixing != name:
            return tensor
        b, n, t, s = case.batch, case.heads, case.length, tensor.shape[-1]
        mixture = np.random.default_rng(n).uniform(-1, 1, (n, n))
        flat = self.reshape(tensor, b, n, t * s)
        if case.mixing_by == "FULLY_CONNECTED":
            turned = self.transpose(self.reshape(tensor, b, n, t, s), 0, 2, 3, 1)
            sums = self.op(
                "FULLY_CONNECTED", turned, self.stored(mixture), self.absent, keep_num_dims=True
            )
            return self.reshape(self.transpose(sums, 0, 3, 1, 2), *tensor.shape)
        if case.mixing_by == "sums":
            product = self.op(
                "MUL", self.with_one(flat, 1), self.stored(mixture.reshape(1, n, n, 1))
            )
            return self.reshape(self.op("SUM", product, self.integers(2)), *tensor.shape)
        by = (
            self.stored(mixture[None])
            if case.mixing_by == "BATCH_MATMUL"
            else self.given("mixture", (1, n, n), DType.FLOAT32)
        )
        return self.reshape(self.op("BATCH_MATMUL", by, flat), *tensor.shape)

    def weights(self, logits: Tensor) -> Tensor:
        """What weighs the values."""
        how, q = self.case.weights, self.q("probability")
        if how in ("sigmoid", "relu"):
            return self.op({"sigmoid": "LOGISTIC", "relu": "RELU"}[how], logits, q=q)
        if how == "softmax":
            return self.op("SOFTMAX", logits, q=q, beta=1.0)
        last = self.integers(len(logits.shape) - 1)
        if how == "softmax by EXP":
            logits = self.op("SUB", logits, self.op("REDUCE_MAX", logits, last, keep_dims=True))
        powers = self.op("EXP", logits)
        return (
            powers
            if how == "exp"
            else self.op("DIV", powers, self.op("SUM", powers, last, keep_dims=True))
        )

    def flipped(self, tensor: Tensor, role: str, *, turned: bool) -> tuple[Tensor, bool]:
        """The tensor, or its transposition, and whether that is stored the other way round."""
        flips = role in self.case.flips
        return (self.swap(tensor) if flips else tensor), turned != flips

    def arranged(self, query: Tensor) -> Tensor:
        case = self.case
        b, k, g, t, h = case.batch, case.kv_heads, case.groups, case.length, case.head_size
        shapes = {"five": (b, k, g, t, h), "flat": (b * k * g, t, h)}
        if case.product == "fold" and g > 1:
            return self.reshape(query, b, k, g * t, h)
        return self.reshape(query, *shapes[case.product]) if case.product in shapes else query

    def logits(self, query: Tensor, keys: list[Tensor]) -> Tensor:
        left = self.flipped(query, "query", turned=False)
        products = []
        for segment in keys:
            right = self.flipped(segment, "key", turned=self.case.key_layout != "KHT")
            products.append(self.product(left, right, "logits"))
        axis = -1 if self.case.reversed else len(products[0].shape) - 1
        return self.op("CONCATENATION", *products, axis=axis) if len(products) > 1 else products[0]

    # Masks

    def masked(self, logits: Tensor) -> Tensor:
        """Scaled, capped and masked; comes back in the shape of the logits."""
        case, tensor = self.case, self.scaled(logits, "logits")
        if case.soft_cap:
            small = self.op("MUL", tensor, self.constant(0.02, "factor"), q=self.q("small"))
            curve = self.op("TANH", small, q=self.q("tanh"))
            tensor = self.op("MUL", curve, self.constant(50.0, "cap"), q=self.q("logits"))
        if case.mask == "absent":
            return tensor
        b, k, g, t = case.batch, case.kv_heads, case.groups, case.length
        fronts = {"heads": (b, k * g, t), "five": (b, k, g, t)}
        wanted = (*fronts.get(case.mask_at, tensor.shape[:-1]), tensor.shape[-1])
        moved = tensor if wanted == tensor.shape else self.reshape(tensor, *wanted)
        result = self.hidden(moved)
        return result if moved is tensor else self.reshape(result, *tensor.shape)

    def hidden(self, logits: Tensor) -> Tensor:
        """The logits with a mask added, or selected by one."""
        if self.case.mask == "select":
            is_open = self.given("open", self.mask_shape(logits), DType.BOOL)
            low = self.constant(-100.0, "logits")
            return self.op("SELECT_V2", is_open, logits, low, q=logits.quantization)
        mask = self.mask(logits.shape)
        operands = (mask, logits) if self.case.reversed else (logits, mask)
        return self.op("ADD", *operands, q=self.q("masked"), **self.add_options)

    def mask_shape(self, logits: Tensor) -> tuple[int, ...]:
        """The shape of a boolean mask for all heads."""
        rows = self.case.length if logits.shape[-2] == self.case.length else 1
        return (*[1] * (len(logits.shape) - 2), rows, logits.shape[-1])

    def mask(self, shape: tuple[int, ...]) -> Tensor:
        """A mask that broadcasts to the logits; layers share it."""
        if shape not in self.masks:
            self.masks[shape] = (
                self.per_head(shape) if self.case.mask == "per head" else self.fitted(shape)
            )
        return self.masks[shape]

    def fitted(self, shape: tuple[int, ...]) -> Tensor:
        case, size = self.case, shape[-1]
        batch = case.batch if case.mask in ("batched", "padding") else 1
        rows = 1 if case.mask == "padding" else case.length
        mask = self.input("mask", batch, 1, rows, size, role="mask")
        if len(shape) == 3:
            if batch == 1:
                return self.reshape(mask, 1, rows, size)
            wide = self.op("BROADCAST_TO", mask, self.integers(batch, case.heads, rows, size))
            return self.reshape(wide, batch * case.heads, rows, size)
        if len(shape) == 5:
            return self.reshape(mask, batch, 1, 1, rows, size)
        axis = 1 if rows in (1, shape[2]) else 2
        count = shape[1] if axis == 1 else case.groups
        if axis == 1 and (count == 1 or case.mask not in ("tile", "concat")):
            return mask
        if case.mask == "tile":
            return self.op(
                "TILE", mask, self.integers(*(count if i == axis else 1 for i in range(4)))
            )
        return self.op("CONCATENATION", *[mask] * count, axis=axis)

    def per_head(self, shape: tuple[int, ...]) -> Tensor:
        own = list(shape) if len(shape) == 3 else [1, *shape[1:]]
        if self.case.reversed and shape[-2] == self.case.length:
            own[-2] = 1
        return self.constant(np.random.default_rng(shape).uniform(-4, 0, own), "mask")

    # Behind the softmax

    def parts(self, probabilities: Tensor) -> list[Tensor]:
        """The probabilities of each segment of keys."""
        sizes, (*front, _) = self.case.segments, probabilities.shape
        if len(sizes) == 1:
            return [probabilities]
        begins = [self.integers(*[0] * len(front), sum(sizes[:i])) for i in range(len(sizes))]
        wide = [self.integers(*front, size) for size in sizes]
        return [self.op("SLICE", probabilities, *each) for each in zip(begins, wide, strict=True)]

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
        operands = products[:: -1 if self.case.reversed else 1]
        return self.op("ADD", *operands, q=self.q("out"), **self.add_options)

    def tail(self, product: Tensor) -> Tensor:
        case = self.case
        b, n, t, h = case.batch, case.heads, case.length, case.head_size
        if case.tail == "heads":
            rows = self.swap(product) if case.values_first else product
            self.outputs.append(
                rows if rows.shape == (b, n, t, h) else self.reshape(rows, b, n, t, h)
            )
            return self.outputs[-1]
        if case.values_first:
            if product.shape == (b, n, h, t) and case.tail_by_reshape:
                return self.merged(self.transpose(product, 0, 3, 1, 2))
            product = self.swap(product)
        if t == 1 and case.tail_by_reshape and case.tail != "unmerged":
            return self.merged(product)
        if case.product == "flat" and b == 1 and case.tail_by_reshape:
            return self.merged(self.with_one(self.transpose(product, 1, 0, 2), 0))
        if case.product == "five" and case.tail_by_reshape and case.tail != "unmerged":
            return self.merged(self.escape(self.transpose(product, 0, 3, 1, 2, 4), "tail"))
        heads = product if product.shape == (b, n, t, h) else self.reshape(product, b, n, t, h)
        moved = self.transpose(heads, 0, 2, 1, 3)
        self.escape(moved if case.tail_by_reshape else heads, "tail")
        return self.merged(moved)

    def merged(self, tensor: Tensor) -> Tensor:
        case = self.case
        b, n, t, h = case.batch, case.heads, case.length, case.head_size
        if case.tail == "unmerged":
            result = tensor
        elif case.tail == "flat":
            result = self.reshape(tensor, b, t * n * h)
        else:
            result = self.reshape(tensor, *((b * t,) if case.tail == "rows" else (b, t)), n * h)
        self.outputs.append(result)
        return result
