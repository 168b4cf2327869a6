"""Keys and values of random attention graphs: cached, new, shared, repeated for the query heads."""

from attention_cases import Case
from attention_numbers import Numbers, scaled
from graph_builder import GraphBuilder

from edge_opt.ir import DType, Quantization, Tensor

Segment = tuple[Tensor, Tensor]


class KeyBuilder:
    """Makes the keys and values of one block, or gives those of the last one again."""

    def __init__(self, case: Case, g: GraphBuilder, numbers: Numbers, outputs: list[Tensor]) -> None:
        self.case = case
        self.g = g
        self.numbers = numbers
        self.outputs = outputs
        self._made: list[Segment] | None = None

    def segments(self) -> list[Segment]:
        """Keys and values of each segment, each in the layout that the case stores it in, ready for a product."""
        if self._made is None or "keys" not in self.case.shared:
            self._made = [(self._ready(k, "key"), self._ready(v, "value")) for k, v in self._raw()]
        return self._made

    def _raw(self) -> list[Segment]:
        case = self.case
        if case.layout == "one":
            return [(self._updated("key"), self._updated("value"))]
        segments: list[Segment] = []
        if case.layout in ("split", "cross"):
            segments.append((self._cached("key"), self._cached("value")))
        if case.layout in ("split", "none"):
            segments.append((self._new("key"), self._new("value")))
        return segments

    def _layout(self, role: str) -> str:
        return self.case.key_layout if role == "key" else self.case.value_layout

    def _shape(self, role: str, size: int) -> tuple[int, ...]:
        b, k, h = self.case.batch, self.case.kv_heads, self.case.head_size
        return {"KTH": (b, k, size, h), "KHT": (b, k, h, size), "TKH": (b, size, k, h)}[self._layout(role)]

    def _cached(self, role: str) -> Tensor:
        shape, name = self._shape(role, self.case.cache), f"{role}_cache"
        if self.case.numbers == "float16":
            return self.g.op("CAST", self.g.input(name, shape, DType.FLOAT16), dtype=DType.FLOAT32)
        if self.case.numbers == "dequantized":
            narrow = self.g.input(name, shape, DType.INT8, Quantization.affine(1 / 32, 3))
            return self.g.op("DEQUANTIZE", narrow, dtype=DType.FLOAT32, q=None)
        return self.g.input(name, shape, self.numbers.dtype, self.numbers.q(role))

    def _new(self, role: str) -> Tensor:
        """Of this step; they come as `[B, T, K, H]`."""
        b, k, t, h = self.case.batch, self.case.kv_heads, self.case.length, self.case.head_size
        source = self.g.input(f"{role}_new", (b, t, k, h), self.numbers.dtype, self.numbers.q(role))
        layout = self._layout(role)
        if layout == "TKH":
            return source
        if layout == "KHT":
            moved = self.g.transpose(source, 0, 2, 3, 1)
        elif 1 in (t, k):
            moved = self.g.reshape(source, b, k, t, h)
        else:
            moved = self.g.transpose(source, 0, 2, 1, 3)
        if "kv" in self.case.escapes:
            self.outputs.append(moved)
        return moved

    def _updated(self, role: str) -> Tensor:
        shape = self._shape(role, self.case.cache)
        cache = self.g.input(f"{role}_cache", shape, self.numbers.dtype, self.numbers.q(role))
        at = self.g.integers(0, 0, 0, 0)
        result = self.g.op("DYNAMIC_UPDATE_SLICE", cache, self._new(role), at)
        self.outputs.append(result)
        return result

    def _ready(self, tensor: Tensor, role: str) -> Tensor:
        """Scaled, with the heads in front, repeated where the product has no groups."""
        case = self.case
        if self._layout(role) == "TKH":
            tensor = self.g.transpose(tensor, 0, 2, 1, 3)
        if role == "key":
            tensor = scaled(case, self.g, self.numbers, tensor, "key")
        matrix = tensor.shape[2:]
        if case.product == "five":
            return self.g.with_one(tensor, 2, case.size_one)
        if case.product in ("repeat", "flat") and case.groups > 1:
            tensor = self._repeated(tensor)
        if case.product == "flat":
            return self.g.reshape(tensor, case.batch * case.heads, *matrix)
        return tensor

    def _repeated(self, tensor: Tensor) -> Tensor:
        """`[B, K, ...] -> [B, N, ...]`: head k*G + g is a copy of k; where they are interleaved, head g*K + k is."""
        case, g = self.case, self.g
        b, k, groups = case.batch, case.kv_heads, case.groups
        matrix = tensor.shape[2:]
        if case.repeat == "gather":
            heads = range(k * groups)
            return g.op(
                "GATHER",
                tensor,
                g.integers(*(n % k if case.interleaved else n // groups for n in heads)),
                axis=1,
            )
        if case.interleaved and case.repeat == "tile":
            return g.op("TILE", tensor, g.integers(1, groups, 1, 1))
        if case.interleaved and case.repeat == "concat":
            return g.op("CONCATENATION", *[tensor] * groups, axis=1)
        axis = 1 if case.interleaved else 2
        apart = g.with_one(tensor, axis, case.size_one)
        wide_shape = (b, groups, k, *matrix) if case.interleaved else (b, k, groups, *matrix)
        if case.repeat == "broadcast":
            wide = g.op("BROADCAST_TO", apart, g.integers(*wide_shape))
        elif case.repeat == "concat":
            wide = g.op("CONCATENATION", *[apart] * groups, axis=axis)
        else:
            wide = g.op("TILE", apart, g.integers(*(groups if i == axis else 1 for i in range(5))))
        return g.reshape(wide, b, k * groups, *matrix)
