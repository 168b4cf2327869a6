"""The graphs whose rewrites are corrupted on purpose, and the tools to corrupt them with.

Sizes are chosen so that as many mistakes as possible still fit: as many queries as heads, as many cached keys as the
head is wide.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from edge_opt.ir import Buffer, DType, Model, Operator, Quantization, Tensor
from edge_opt.passes.rewrite import Rewrite
from edge_opt.schema.data import Data
from edge_opt.schema.table import Table, new_table


@dataclass(frozen=True)
class Size:
    """Of an attention: T, N, K, S, H."""

    queries: int = 4
    heads: int = 4
    kv_heads: int = 2
    cache: int = 8
    width: int = 8

    @property
    def rows(self) -> int:
        """Of a product before the heads are split, for each key head."""
        return self.heads // self.kv_heads * self.queries

    @property
    def keys(self) -> int:
        """Cached and new ones."""
        return self.cache + self.queries


# Every role has parameters of its own, so that those of a neighbour are wrong.
PARAMETERS: dict[str, dict[str, str]] = {
    "float32": {},
    "int16": {
        "query": "q(0.0001, 0)", "scale": "q(2e-05, 0)", "scaled": "q(4e-05, 0)", "key": "q(0.0001, 0)",
        "value": "q(0.00011, 0)", "logits": "q(0.0003, 0)", "mask": "q(0.00305185, 0)", "masked": "q(0.0033, 0)",
        "probability": "q(3.0517578e-05, 0)", "part": "q(0.00012, 0)", "rest": "q(0.00013, 0)", "sum": "q(0.00015, 0)",
    },
    "int8": {
        "query": "q(0.025, 3)", "scale": "q(0.003, 0)", "scaled": "q(0.01, -5)", "key": "q(0.025, 1)",
        "value": "q(0.027, -2)", "logits": "q(0.05, 4)", "mask": "q(0.1, 127)", "masked": "q(0.18, 72)",
        "probability": "q(0.00390625, -128)", "part": "q(0.03, 2)", "rest": "q(0.032, -1)", "sum": "q(0.025, 6)",
    },
}  # fmt: skip
_SCALES = {"float32": ("0.35", "0.25"), "int16": ("17500", "12500"), "int8": ("117", "83")}


def attention(dtype: str, size: Size = Size()) -> str:
    """Two layers of grouped-query attention over a split cache, a global and a local one, as exporters write them."""
    layers = [_layer(number, dtype, size) for number in (1, 2)]
    inputs = [given for layer in layers for given in layer[0]]
    lines = "".join(f"  {line}\n" for layer in layers for line in layer[1])
    arguments = ", ".join(f"{name}=%{name}" for name in (given.partition(":")[0][1:] for given in inputs))
    return (
        f"signature main = #0 ({arguments}) -> (out1=%out1, out2=%out2)\n"
        f"subgraph main ({', '.join(inputs)}) {{\n{lines}  return %out1, %out2\n}}\n"
    )


def _layer(i: int, dtype: str, size: Size) -> tuple[list[str], list[str]]:
    def t(role: str, *shape: int) -> str:
        return f"{dtype}[{','.join(map(str, shape))}] {PARAMETERS[dtype].get(role, '')}".rstrip()

    def reshape(source: str, *shape: int) -> str:
        sizes = ", ".join(map(str, shape))
        return f"RESHAPE({source}, int32{{{sizes}}}) {{new_shape: [{sizes}]}}"

    def cut(begin: int, length: int) -> str:
        return f"SLICE(%p{i}, int32{{0, 0, 0, {begin}}}, int32{{1, {k}, {r}, {length}}})"

    queries, heads, width, cache, keys = size.queries, size.heads, size.width, size.cache, size.keys
    k, r, mask = size.kv_heads, size.rows, ("mask_global", "mask_local")[i - 1]
    repeated = ", ".join([f"%{mask}"] * (heads // k))
    scale = f"{dtype}({_SCALES[dtype][i - 1]}) {PARAMETERS[dtype].get('scale', '')}".rstrip()
    inputs = [
        f"%q{i}: {t('query', 1, queries, heads, width)}",
        f"%k_cache{i}: {t('key', 1, k, cache, width)}",
        f"%k{i}: {t('key', 1, k, queries, width)}",
        f"%v_cache{i}: {t('value', 1, k, width, cache)}",
        f"%v{i}: {t('value', 1, k, width, queries)}",
        f"%{mask}: {t('mask', 1, 1, queries, keys)}",
    ]
    lines = [
        f"%scaled{i}: {t('scaled', 1, queries, heads, width)} = MUL(%q{i}, {scale})",
        f"%turned{i}: {t('scaled', 1, heads, queries, width)} = TRANSPOSE(%scaled{i}, int32{{0, 2, 1, 3}})",
        f"%rows{i}: {t('scaled', 1, k, r, width)} = {reshape(f'%turned{i}', 1, k, r, width)}",
        f"%old{i}: {t('logits', 1, k, r, cache)} = BATCH_MATMUL(%rows{i}, %k_cache{i}) {{adj_y: true}}",
        f"%new{i}: {t('logits', 1, k, r, queries)} = BATCH_MATMUL(%rows{i}, %k{i}) {{adj_y: true}}",
        f"%logits{i}: {t('logits', 1, k, r, keys)} = CONCATENATION(%old{i}, %new{i}) {{axis: 3}}",
        f"%masks{i}: {t('mask', 1, 1, r, keys)} = CONCATENATION({repeated}) {{axis: 2}}",
        f"%masked{i}: {t('masked', 1, k, r, keys)} = ADD(%logits{i}, %masks{i})",
        f"%p{i}: {t('probability', 1, k, r, keys)} = SOFTMAX(%masked{i}) {{beta: 1.0}}",
        f"%p_old{i}: {t('probability', 1, k, r, cache)} = {cut(0, cache)}",
        f"%p_new{i}: {t('probability', 1, k, r, queries)} = {cut(cache, queries)}",
        f"%part{i}: {t('part', 1, k, r, width)} = BATCH_MATMUL(%p_old{i}, %v_cache{i}) {{adj_y: true}}",
        f"%rest{i}: {t('rest', 1, k, r, width)} = BATCH_MATMUL(%p_new{i}, %v{i}) {{adj_y: true}}",
        f"%sum{i}: {t('sum', 1, k, r, width)} = ADD(%part{i}, %rest{i})",
        f"%heads{i}: {t('sum', 1, heads, queries, width)} = {reshape(f'%sum{i}', 1, heads, queries, width)}",
        f"%back{i}: {t('sum', 1, queries, heads, width)} = TRANSPOSE(%heads{i}, int32{{0, 2, 1, 3}})",
        f"%out{i}: {t('sum', 1, queries, heads * width)} = {reshape(f'%back{i}', 1, queries, heads * width)}",
    ]
    return inputs, lines


SELECT = """\
signature main = #0 (mask=%mask, logits=%logits) -> (p=%p)
subgraph main (%mask: float32[1,6,10], %logits: float32[1,2,6,10]) {
  %mask4: float32[1,1,6,10] = RESHAPE(%mask, int32{1, 1, 6, 10}) {new_shape: [1, 1, 6, 10]}
  %open: bool[1,1,6,10] = NOT_EQUAL(%mask4, float32(0.0))
  %masked: float32[1,2,6,10] = SELECT_V2(%open, %logits, float32(-1e+09))
  %p: float32[1,2,6,10] = SOFTMAX(%masked) {beta: 1.0}
  return %p
}
"""

CONVERT = """\
signature main = #0 (a=%a, b=%b) -> (y=%y)
subgraph main (%a: int16[1,8,8] q(0.0001, 0), %b: int16[1,8,8] q(0.0001, 0)) {
  %p: int16[1,8,8] q(0.002, 0) = BATCH_MATMUL(%a, %b) {adj_y: true}
  %y: int16[1,8,8] q(0.001, 0) = QUANTIZE(%p)
  return %y
}
"""

INTEGER_MASK = """\
signature main = #0 (open=%open) -> (mask=%mask)
subgraph main (%open: bool[1,1,6,10]) {
  %n: bool[1,1,6,10] = LOGICAL_NOT(%open)
  %f: float32[1,1,6,10] = CAST(%n) {in_data_type: 6}
  %m: float32[1,1,6,10] = MUL(%f, float32(-100.0))
  %mask: int16[1,1,6,10] q(0.00305176, 0) = QUANTIZE(%m)
  return %mask
}
"""

ONE_HEAD = """\
signature main = #0 (q=%q, k=%k, v=%v, mask=%mask) -> (out=%out)
subgraph main (%q: float32[1,1,4,8], %k: float32[1,1,8,8], %v: float32[1,1,8,8], %mask: float32[1,1,4,8]) {
  %logits: float32[1,1,4,8] = BATCH_MATMUL(%q, %k) {adj_y: true}
  %masked: float32[1,1,4,8] = ADD(%logits, %mask)
  %p: float32[1,1,4,8] = SOFTMAX(%masked) {beta: 1.0}
  %out: float32[1,1,4,8] = BATCH_MATMUL(%p, %v)
  return %out
}
"""

JOINED_LOGITS = """\
signature main = #0 (q=%q, k1=%k1, k2=%k2, mask=%mask) -> (p=%p)
subgraph main (%q: int16[1,1,4,8] q(0.0001, 0), %k1: int16[1,1,8,8] q(0.0001, 0), %k2: int16[1,1,4,8] q(0.0001, 0),
               %mask: int16[1,1,4,12] q(0.003, 0)) {
  %old: int16[1,1,4,8] q(0.0005, 0) = BATCH_MATMUL(%q, %k1) {adj_y: true}
  %new: int16[1,1,4,4] q(0.0005, 0) = BATCH_MATMUL(%q, %k2) {adj_y: true}
  %logits: int16[1,1,4,12] q(0.0005, 0) = CONCATENATION(%old, %new) {axis: 3}
  %masked: int16[1,1,4,12] q(0.0031, 0) = ADD(%logits, %mask)
  %p: int16[1,1,4,12] q(3.0517578125e-05, 0) = SOFTMAX(%masked) {beta: 1.0}
  return %p
}
"""

GRAPHS = {
    **{f"attention {dtype}": attention(dtype) for dtype in PARAMETERS},
    "masked softmax": SELECT,
    "converted product": CONVERT,
    "integer mask": INTEGER_MASK,
    "one head": ONE_HEAD,
    "joined logits": JOINED_LOGITS,
    **{f"tiled {dtype}": attention(dtype) for dtype in PARAMETERS},
}


def number(values: Any, dtype: DType = DType.INT32, q: Quantization | None = None) -> Tensor:
    """A new constant."""
    array = np.asarray(values, dtype.numpy)
    return Tensor("wrong", array.shape, dtype, quantization=q, buffer=Buffer(Data(array.tobytes())))


def options_of(name: str) -> Table:
    """The options of an operator, all as by default."""
    if name in {"MINIMUM", "MAXIMUM"}:
        return new_table("MaximumMinimumOptions")
    return new_table("".join(word.title() for word in name.split("_")) + "Options")


def like(tensor: Tensor, name: str | None = None, **changes: Any) -> Tensor:
    """A new tensor of the same type, but for the changes."""
    fields = {"shape": tensor.shape, "dtype": tensor.dtype, "quantization": tensor.quantization, **changes}
    return Tensor(name or tensor.name, **fields)


@dataclass
class Edit:
    """A rewrite being corrupted; `finish` gives what became of it.

    An operator may be given by the name of a tensor that it defines, a tensor by its own.
    """

    model: Model
    rewrite: Rewrite
    size: Size = field(default_factory=Size)
    new: list[Operator] = field(init=False)

    def __post_init__(self) -> None:
        self.new = list(self.rewrite.new)

    @property
    def last(self) -> Operator:
        """The operator that defines the result."""
        return self.new[-1]

    def outside(self, name: str) -> Operator:
        """The operator of the graph that defines a tensor of that name."""
        return next(op for op in self.rewrite.subgraph.operators if op.outputs[0].name == name)

    def insert(
        self, at: int, name: str, inputs: Sequence[Tensor], result: Tensor, options: Table | None = None
    ) -> Tensor:
        """One more operator at place `at` of the new region, and what it gives."""
        made = Operator(self.model.operator_code(name), inputs, [result], options or options_of(name))
        made.code = self.model.operator_code(name, made.least_version)
        self.new.insert(at, made)
        return result

    def find(self, which: Operator | str) -> Operator:
        """The new operator that defines a tensor of that name."""
        if isinstance(which, Operator):
            return which
        return next(op for op in self.new if any(tensor.name == which for tensor in op.outputs))

    def tensor(self, name: Tensor | str) -> Tensor:
        """A tensor of the graph or of the new region."""
        if isinstance(name, Tensor):
            return name
        made = [tensor for op in self.new for tensor in op.outputs]
        return next(t for t in (*self.rewrite.subgraph.tensors, *made) if t.name == name)

    def change(
        self,
        which: Operator | str,
        name: str | None = None,
        *,
        inputs: Sequence[Tensor | None] | None = None,
        outputs: Sequence[Tensor] | None = None,
        options: Table | None = None,
        **settings: Any,
    ) -> Operator:
        """Put another operator in the place of one; `settings` are options that differ."""
        operator = self.find(which)
        table = options or (options_of(name) if name else operator.options)
        if settings and table is not None:
            table = table.copy()
            for key, value in settings.items():
                table.set(key, value)
        made = Operator(
            self.model.operator_code(name) if name else operator.code,
            operator.inputs if inputs is None else inputs,
            operator.outputs if outputs is None else outputs,
            table,
        )
        if name is not None:
            # The fault is meant to be in what is computed, not in the version.
            made.code = self.model.operator_code(name, made.least_version)
        self.new[self.new.index(operator)] = made
        return made

    def read(self, which: Operator | str, index: int, tensor: Tensor | str) -> Operator:
        """Let an operator read another tensor."""
        operator = self.find(which)
        inputs = list(operator.inputs)
        inputs[index] = self.tensor(tensor)
        return self.change(operator, inputs=inputs)

    def swap(self, which: Operator | str, one: int, other: int) -> Operator:
        """Exchange two operands."""
        operator = self.find(which)
        inputs = list(operator.inputs)
        inputs[one], inputs[other] = inputs[other], inputs[one]
        return self.change(operator, inputs=inputs)

    def drop(self, which: Operator | str) -> None:
        """Leave an operator out: its readers get its first operand."""
        operator = self.find(which)
        self.new.remove(operator)
        self._reread(operator.outputs[0], operator.input(0))

    def behind(self, which: Operator | str, name: str, *others: Tensor) -> None:
        """Put one more operator between an operator and its readers."""
        operator = self.find(which)
        result = operator.outputs[0]
        between = like(result, f"{result.name}/between")
        at = self.new.index(operator)
        self.change(operator, outputs=[between])
        self.insert(at + 1, name, [between, *others], result)

    def over(self, name: str, kind: str, *others: Tensor, at: int | None = None, first: int = 0) -> None:
        """Let the readers of a tensor read what one more operator makes of it, as its operand number `first`."""
        tensor = self.tensor(name)
        changed = like(tensor, f"{tensor.name}/changed")
        made = [place for place, op in enumerate(self.new) if any(given is tensor for given in op.outputs)]
        at = 1 + max(made, default=-1) if at is None else at
        readers = [op for op in self.new[at:] if any(read is tensor for read in op.inputs)]
        self.insert(at, kind, [*others[:first], tensor, *others[first:]], changed)
        for reader in readers:
            self.change(reader, inputs=[changed if read is tensor else read for read in reader.inputs])

    def retyped(self, which: Operator | str, **changes: Any) -> None:
        """Let an operator define a tensor of another type, shape or quantization."""
        operator = self.find(which)
        made = like(operator.outputs[0], **changes)
        self.change(operator, outputs=[made])
        self._reread(operator.outputs[0], made)

    def _reread(self, old: Tensor, new: Tensor) -> None:
        for reader in list(self.new):
            if any(tensor is old for tensor in reader.inputs):
                self.change(reader, inputs=[new if t is old else t for t in reader.inputs])

    def patch(self, name: str, axis: int, index: int, donor: str, taken: int) -> None:
        """Let one row, column or key of a tensor (`index` along `axis`) be number `taken` of another tensor."""
        source, other = self.tensor(name), self.tensor(donor)
        readers = [op for op in self.new if any(tensor is source for tensor in op.inputs)]
        behind = max(self.new.index(op) for op in self.new if {*op.outputs} & {source, other})
        patched = self.patched(source, axis, index, other, taken, behind + 1)
        for reader in readers:
            self.change(reader, inputs=[patched if t is source else t for t in reader.inputs])

    def patched(self, source: Tensor, axis: int, index: int, other: Tensor, taken: int, at: int) -> Tensor:
        """A tensor like `source` but for that, made at place `at` of the new region."""
        length = source.shape[axis]
        parts = []
        for tensor, begin, end in (
            (source, 0, index),
            (other, taken, taken + 1),
            (source, index + 1, length),
        ):
            if end > begin:
                parts.append(self.cut(tensor, axis, begin, end, at))
                at += 1
        result = like(source, "patched")
        return self.insert(at, "CONCATENATION", parts, result, new_table("ConcatenationOptions", axis=axis))

    def cut(self, tensor: Tensor, axis: int, begin: int, end: int, at: int) -> Tensor:
        """A part of a tensor along an axis, made at place `at` of the new region."""
        shape = (*tensor.shape[:axis], end - begin, *tensor.shape[axis + 1 :])
        result = like(tensor, "cut", shape=shape)
        starts = [begin if place == axis else 0 for place in range(len(shape))]
        return self.insert(at, "SLICE", [tensor, number(starts), number(shape)], result)

    def finish(self) -> Rewrite:
        """The corrupted rewrite."""
        return replace(self.rewrite, new=tuple(self.new))


def force(rewrite: Rewrite) -> None:
    """Make a rewrite part of the graph whatever it is: what a pass without checks would do."""
    graph = rewrite.subgraph
    order = list(graph.operators)
    place = order.index(rewrite.anchor) + 1
    order[place:place] = rewrite.added()
    for operator in rewrite.removed():
        graph.remove(operator)
        order.remove(operator)
    for operator in rewrite.added():
        for tensor in operator.outputs:
            tensor.producer = None
    graph.arrange(order)
    for operator in rewrite.added():
        for read in (*operator.inputs, *operator.outputs):
            if read is not None and not graph.lists(read):
                graph.add_tensor(read)
