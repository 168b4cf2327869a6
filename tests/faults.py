"""Ways to corrupt a rewrite, and what must catch each; `fault_page` makes docs/faults.md of them."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from fault_graphs import PARAMETERS, Edit, like, number

from edge_opt.ir import DType, Operator, Quantization, Tensor
from edge_opt.schema.table import new_table

FRAME, SHAPES, PROOF = "frame rule", "shape check", "region proof"
GRAPH, VERSION, PARAMETERS_OF = "graph check", "version check", "parameter check"
CHECKS = {
    FRAME: "reads only what the old region read, defines exactly what it defined, in order, in its place",
    SHAPES: "every shape of the new region is derived again and compared with the recorded one",
    PARAMETERS_OF: "a new quantized tensor has the scale and zero point of one in the old region",
    VERSION: "a new operator carries the version that its types need",
    PROOF: "both regions are cut out and run on equal random and extreme inputs, on XNNPACK and the reference kernels",
    GRAPH: "after a pass, everything outside its rewrites must be what it was before; a difference ends the conversion",
}
FOUND, HOSTILE, EQUAL = "found", "found on hostile inputs", "no number changes"
ANY = "not asked"
_ATTENTION = tuple(f"attention {dtype}" for dtype in PARAMETERS)
_FLOAT, _INT16, _INT8 = (_ATTENTION[i : i + 1] for i in range(3))
_QUANTIZED = _ATTENTION[1:]
# `compare` is run on the last, and a single row or key may be too little for int8.
_FINEST_LAST = _ATTENTION[::-1]
_TILED = tuple(f"tiled {dtype}" for dtype in PARAMETERS)[::-1]


@dataclass(frozen=True)
class Fault:
    """One way to corrupt a rewrite, what must stop it, and what it takes for `compare` to find it."""

    name: str
    caught: str
    apply: Callable[[Edit], object]
    graphs: tuple[str, ...]
    pass_name: str = "mha_to_sha"
    compare: str = FOUND


FAULTS: list[Fault] = []


def fault(
    name: str,
    caught: str = PROOF,
    graphs: tuple[str, ...] = (),
    pass_name: str = "mha_to_sha",
    *,
    compare: str = FOUND,
) -> Callable[[Callable[[Edit], object]], Callable[[Edit], object]]:
    """Register a function that corrupts a rewrite. Only a proof runs numbers, so only there do types matter."""
    where = graphs or (_ATTENTION if caught == PROOF else _FLOAT)

    def register(apply: Callable[[Edit], object]) -> Callable[[Edit], object]:
        FAULTS.append(Fault(name, caught, apply, where, pass_name, compare))
        return apply

    return register


_JOIN = "out1/heads"


# Heads

fault("two heads swapped where they are joined")(lambda e: e.swap(_JOIN, 0, 1))
fault("one head joined twice, another left out")(lambda e: e.read(_JOIN, 1, e.find(_JOIN).input(0)))
fault("heads joined group by group the wrong way round")(lambda e: e.swap(_JOIN, 1, 2))


@fault("query parts of two heads swapped")
def _(e: Edit) -> None:
    split = e.find("turned1/unscaled/head_0")
    a, b, *rest = split.outputs
    e.change(split, outputs=[b, a, *rest])


@fault("heads joined as rows instead of side by side")
def _(e: Edit) -> None:
    e.change(_JOIN, axis=2)
    e.retyped(_JOIN, shape=(1, 1, e.size.heads * e.size.queries, e.size.width))


fault("another permutation of the queries, of the same shape")(
    lambda e: e.read("turned1/unscaled", 1, number([0, 1, 2, 3]))
)
fault("heads cut off along another axis", SHAPES)(lambda e: e.read("turned1/unscaled/head_0", 0, number(2)))
fault("the query of another head in one of two products")(
    lambda e: e.read("new1/head_1", 0, "scaled1/head_0")
)

# Scale


@fault("the scale dropped")
def _(e: Edit) -> None:
    for head in range(4):
        e.drop(f"scaled1/head_{head}")


fault("the scale of one head dropped")(lambda e: e.drop("scaled1/head_2"))


fault("the scale applied twice")(
    lambda e: e.behind("scaled1/head_1", "MUL", e.find("scaled1/head_1").input(1))
)
fault("a stale constant: the scale of another layer")(
    lambda e: e.read("scaled1/head_3", 1, e.outside("scaled2").input(1))
)

# Keys and values

fault("adj_y of a logits product left out, the matrix being square")(
    lambda e: e.change("old1/head_0", adj_y=False)
)
fault("adj_y of a logits product left out, the matrix not being square", SHAPES)(
    lambda e: e.change("new1/head_0", adj_y=False)
)
fault("adj_y of a value product left out, the matrix being square")(
    lambda e: e.change("part1/head_3", adj_y=False)
)
fault("adj_x set where adj_y should be", SHAPES)(lambda e: e.change("part1/head_0", adj_x=True, adj_y=False))


@fault("a KV head taken twice")
def _(e: Edit) -> None:
    for head in (2, 3):
        e.read(f"old1/head_{head}", 1, "k_cache1/group_0")


fault("the values of another KV head")(lambda e: e.read("rest1/head_1", 1, "v1/group_1"))


@fault("KV heads counted round robin instead of in groups")
def _(e: Edit) -> None:
    for head, group in ((1, 1), (2, 0)):
        for product, source in (("old1", "k_cache1"), ("new1", "k1"), ("part1", "v_cache1"), ("rest1", "v1")):
            e.read(f"{product}/head_{head}", 1, f"{source}/group_{group}")


fault("keys where values belong")(lambda e: e.read("part1/head_0", 1, "k_cache1/group_0"))
fault("the cache of another layer", FRAME)(lambda e: e.read("k_cache1/group_0", 1, "k_cache2"))


fault("a value product left out of the sum")(
    lambda e: e.read("sum1/head_0", 1, e.find("sum1/head_0").input(0))
)
fault("the other product of another head in the sum")(lambda e: e.read("sum1/head_3", 0, "part1/head_2"))
fault("products multiplied instead of added")(lambda e: e.change("sum1/head_2", "MUL"))
fault("an activation fused into the sum")(lambda e: e.change("sum1/head_1", fused_activation_function=1))

# Logits and mask

fault("cached and new keys concatenated in another order")(lambda e: e.swap("logits1/head_0", 0, 1))
fault("logits concatenated along another axis", SHAPES)(lambda e: e.change("logits1/head_0", axis=2))
fault("the mask of another layer", FRAME)(lambda e: e.read("masked1/head_0", 1, "mask_local"))
fault("the mask left out")(lambda e: e.drop("masked1/head_3"))


fault("the mask added twice", compare=HOSTILE)(
    lambda e: e.behind("masked1/head_0", "ADD", e.find("masked1/head_0").input(1))
)
fault("the mask subtracted")(lambda e: e.change("masked1/head_0", "SUB"))

# Softmax and slices


@fault("the softmax along the queries")
def _(e: Edit) -> None:
    softmax = e.find("p1/head_0")
    source, result = softmax.input(0), softmax.outputs[0]
    shape = (1, 1, e.size.keys, e.size.queries)
    turned = [like(tensor, f"turned/{tensor.name}", shape=shape) for tensor in (source, result)]
    at, axes = e.new.index(softmax), number([0, 1, 3, 2])
    e.change(softmax, inputs=[turned[0]], outputs=[turned[1]])
    e.insert(at + 1, "TRANSPOSE", [turned[1], axes], result)
    e.insert(at, "TRANSPOSE", [source, axes], turned[0])


fault("another beta of the softmax")(lambda e: e.change("p1/head_1", beta=2.0))
fault("the softmax left out")(lambda e: e.drop("p1/head_0"))
fault("a slice that begins one too early")(
    lambda e: e.read("p_new1/head_0", 1, number([0, 0, 0, e.size.cache - 1]))
)
fault("a slice that begins one too late", SHAPES)(
    lambda e: e.read("p_new1/head_0", 1, number([0, 0, 0, e.size.cache + 1]))
)
fault("the two slices exchanged", SHAPES)(lambda e: e.read("rest1/head_0", 0, "p_old1/head_0"))

# One row, one column, one key, one tile, one number


def _coarser(tensor: Tensor) -> Quantization:
    own = tensor.quantization
    assert own is not None
    return Quantization.affine(float(own.scale[0]) * 1.01, int(own.zero_point[0]))


def _middle(e: Edit) -> int:
    """A row that is none of those next to a cut."""
    return e.size.queries // 2 + 1


fault("one row of one head taken from another head", graphs=_FINEST_LAST)(
    lambda e: e.patch("sum1/head_1", 2, _middle(e), "sum1/head_0", _middle(e))
)
fault("one row of one head taken from the row before", graphs=_FINEST_LAST)(
    lambda e: e.patch("sum1/head_2", 2, _middle(e), "sum1/head_2", _middle(e) - 1)
)


@fault("one number of one head moved by a step", graphs=_FINEST_LAST)
def _(e: Edit) -> None:
    total = e.find("sum1/head_1")
    result = total.output
    step = np.zeros(result.shape, np.float32)
    step[0, 0, _middle(e), e.size.width // 2] = 1.0
    e.behind(total, "ADD", number(step, result.dtype, result.quantization))


fault("one column of one head taken from its neighbour", graphs=_FINEST_LAST)(
    lambda e: e.patch("sum1/head_3", 3, e.size.width // 2, "sum1/head_3", e.size.width // 2 + 1)
)
fault("one key of one head taken from its neighbour", graphs=_FINEST_LAST)(
    lambda e: e.patch("logits1/head_0", 3, e.size.cache, "logits1/head_0", e.size.cache + 1)
)


@fault("one row of the mask taken from the row before, in one head", graphs=_FINEST_LAST)
def _(e: Edit) -> None:
    masked, row = e.find("masked1/head_1"), _middle(e)
    mask = e.patched(masked.input(1), 2, row, masked.input(1), row - 1, e.new.index(masked))
    e.read(masked, 1, mask)


@fault("the last row of a tile taken from the next tile", graphs=_TILED)
def _(e: Edit) -> None:
    tile = e.tensor("sum1/rows_0/head_0").shape[2]
    e.patch("sum1/rows_0/head_0", 2, tile - 1, "sum1/rows_1/head_0", 0)


fault("two heads of one tile swapped", graphs=_TILED)(lambda e: e.swap("out1/heads_2", 1, 2))


@fault("the mask rows of one tile begin one too early", graphs=_TILED)
def _(e: Edit) -> None:
    masked = e.find("masked1/rows_1/head_3")
    rows = masked.output.shape[2]
    mask = e.cut(e.tensor("mask_global"), 2, rows - 1, 2 * rows - 1, e.new.index(masked))
    e.read(masked, 1, mask)


@fault("the query rows of one tile begin one too early", graphs=_TILED)
def _(e: Edit) -> None:
    product = e.find("old1/rows_1/head_2")
    rows = product.output.shape[2]
    whole = e.tensor("rows1/piece_1")
    e.read(product, 0, e.cut(whole, 2, rows - 1, 2 * rows - 1, e.new.index(product)))


@fault("the scale of one head of one tile off by a hundredth", graphs=_TILED)
def _(e: Edit) -> None:
    product = e.find("new1/rows_1/head_1")
    query = product.input(0)
    if query.quantization is None:
        factor = number(1.01, query.dtype)
        e.read(product, 0, e.insert(e.new.index(product), "MUL", [query, factor], like(query, "scaled")))
    else:
        e.retyped(product, quantization=_coarser(product.output))


fault("a scale off by a hundredth in one head", graphs=_QUANTIZED[::-1])(
    lambda e: e.retyped("part1/head_1", quantization=_coarser(e.tensor("part1/head_1")))
)


@fault("the scale of one head off by a hundredth", graphs=_FINEST_LAST)
def _(e: Edit) -> None:
    scale = e.find("scaled1/head_3")
    right = scale.input(1)
    wrong = np.asarray(right.array()).astype(np.float64) * 1.01
    e.read(scale, 1, number(wrong, right.dtype, right.quantization))


# What only extreme inputs show


def _limited(
    what: str, name: str, *, low: float | None = None, high: float | None = None, dtype: str = "float32"
) -> None:
    """One tensor (of one head) that keeps within limits: numbers, or codes of its own quantization."""
    (graph,) = (each for each in _ATTENTION if each.endswith(dtype))

    @fault(what, graphs=(graph,), compare=ANY)
    def _(e: Edit) -> None:
        kind, limit = ("MINIMUM", high) if low is None else ("MAXIMUM", low)
        tensor = e.tensor(name)
        e.over(name, kind, number(limit, tensor.dtype, tensor.quantization))


def _replaced(what: str, name: str, test: str, than: float | None, value: float, of: str = "") -> None:
    """Numbers of one tensor of one head that are another one where they (or their sizes) pass a test."""

    @fault(what, graphs=_FLOAT, compare=ANY)
    def _(e: Edit) -> None:
        tested = tensor = e.tensor(name)
        at = 1 + e.new.index(e.find(name))
        if of:
            tested = e.insert(at, of, [tensor], like(tensor, "tested"))
            at += 1
        other = tested if than is None else number(than, DType.FLOAT32)
        where = e.insert(at, test, [tested, other], like(tensor, "where", dtype=DType.BOOL))
        e.over(name, "SELECT_V2", where, number(value, DType.FLOAT32), at=at + 1, first=2)


_limited("logits of one head clamped at 100", "logits1/head_1", high=100)
_limited("logits of one head clamped at -60", "logits1/head_2", low=-60)
_limited("values of one head clamped at 100", "sum1/head_0", high=100)
_limited("the mask clamped at -10", "mask_global", low=-10)
_replaced("NaN of the logits of one head made 0", "masked1/head_3", "NOT_EQUAL", None, 0.0)
_replaced("NaN of the result of one head made 0", "sum1/head_1", "NOT_EQUAL", None, 0.0)
_replaced("numbers of one head under 1e-30 flushed to 0", "sum1/head_2", "LESS", 1e-30, 0.0, of="ABS")
_replaced("a logit of exactly 0 changed", "logits1/head_0", "EQUAL", 0.0, 1.0)
for _role, _name in {
    "logits": "logits1/head_1", "mask": "mask_global", "queries": "turned1/unscaled/head_2", "keys": "k_cache1",
    "cached values": "v_cache1", "result": "sum1/head_3",
}.items():  # fmt: skip
    _limited(f"one code less at the upper end of the {_role}", _name, high=126, dtype="int8")
    _limited(f"one code less at the lower end of the {_role}", _name, low=-127, dtype="int8")
_limited("one code less at the upper end of the 16 bit values", "v_cache1", high=32766, dtype="int16")
_limited("one code less at the lower end of the 16 bit values", "v_cache1", low=-32767, dtype="int16")

# Types


@fault("a scale that is one unit in the last place off", PARAMETERS_OF, _QUANTIZED, compare=ANY)
def _(e: Edit) -> None:
    own = e.tensor("part1/head_1").quantization
    assert own is not None
    scale = np.nextafter(np.float32(own.scale[0]), np.float32(1))
    e.retyped("part1/head_1", quantization=Quantization.affine(float(scale), int(own.zero_point[0])))


fault("the quantization parameters of a neighbour", graphs=_QUANTIZED)(
    lambda e: e.retyped("part1/head_0", quantization=e.tensor("rest1/head_0").quantization)
)


@fault("the quantization parameters of the operand", graphs=_QUANTIZED)
def _(e: Edit) -> None:
    for head in range(4):
        e.retyped(f"scaled1/head_{head}", quantization=e.tensor("q1").quantization)


fault("a zero point that is off by one", graphs=_INT8)(
    lambda e: e.retyped("p_new1/head_0", quantization=Quantization.affine(1 / 256, -127))
)


@fault("a tensor of another element type")
def _(e: Edit) -> None:
    wrong = DType.INT8 if e.tensor("q1").dtype is DType.INT16 else DType.INT16
    e.retyped("old1/head_0", dtype=wrong, quantization=Quantization.affine(0.001))


fault("a wrong shape on record", SHAPES, compare=EQUAL)(
    lambda e: e.retyped("scaled1/head_0", shape=(1, 4, 1, 8))
)


@fault("the version of an operator too low for its types", VERSION, _QUANTIZED, compare=EQUAL)
def _(e: Edit) -> None:
    split = e.find("turned1/unscaled/head_0")
    made = Operator(e.model.operator_code("SPLIT", 1), split.inputs, split.outputs, split.options)
    e.new[e.new.index(split)] = made


# The frame


@fault("the result under another tensor of the same name", FRAME)
def _(e: Edit) -> None:
    result = e.last.outputs[0]
    e.change(e.last, outputs=[like(result)])


fault("the result dropped", FRAME)(lambda e: e.new.pop())
fault("the result defined twice", FRAME)(
    lambda e: e.new.append(Operator(e.last.code, e.last.inputs, e.last.outputs, e.last.options))
)
fault("a tensor that is made later in the graph", FRAME)(lambda e: e.read("out1/heads", 3, "out2"))
fault("an input of the graph that the block did not read", FRAME)(
    lambda e: e.read("turned1/unscaled", 0, "q2")
)


@fault("an operator in front of what it reads", FRAME)
def _(e: Edit) -> None:
    scale = e.find("scaled1/head_0")
    e.new.remove(scale)
    e.new.append(scale)


@fault("a result of another block defined anew", FRAME)
def _(e: Edit) -> None:
    result = e.tensor("out2")
    e.new.append(Operator(e.last.code, e.last.inputs, [result], e.last.options))


fault("a part of the old region left out, its result still read", FRAME)(
    lambda e: e.read("out1/heads", 0, "heads1")
)

# The graph around the rewrite


@fault("options edited that old and new operators share", GRAPH)
def _(e: Edit) -> None:
    softmax = next(op for op in e.rewrite.old if op.name == "SOFTMAX")
    assert softmax.options is not None
    softmax.options.set("beta", 2.0)
    for operator in list(e.new):
        if operator.name == "SOFTMAX":
            e.change(operator, options=softmax.options)


@fault("the quantization of a graph output edited", GRAPH, _INT16)
def _(e: Edit) -> None:
    e.tensor("out1").quantization = Quantization.affine(0.5)


@fault("an output of the signature renamed", GRAPH)
def _(e: Edit) -> None:
    outputs = e.model.signatures[0].outputs
    outputs["other"] = outputs.pop("out1")


fault("an operator of another layer made to read this one's input", GRAPH)(
    lambda e: e.rewrite.subgraph.set_input(e.outside("scaled2"), 0, e.tensor("q1"))
)


@fault("bytes of another constant put in place", GRAPH)
def _(e: Edit) -> None:
    e.outside("scaled2").input(1).buffer = e.outside("scaled1").input(1).buffer


# Other passes

_masks = partial(fault, graphs=("masked softmax",), pass_name="mask_to_add")
_products = partial(fault, graphs=("converted product",), pass_name="matmul_convert")
_integers = partial(fault, graphs=("integer mask",), pass_name="quantized_mask")
_tiles = partial(fault, graphs=("one head",), pass_name="tile_rows")
_joins = partial(fault, graphs=("joined logits",), pass_name="mask_before_join")

_masks("masked and open exchanged")(lambda e: e.change("open/masked", "NOT_EQUAL"))
_masks("a mask constant that hides too little")(
    lambda e: e.read("open/additive", 1, number(-10.0, DType.FLOAT32))
)
_masks("the mask multiplied instead of added")(lambda e: e.change("masked/masked", "MUL"))


@_masks("one row of the mask for all")
def _(e: Edit) -> None:
    mask = e.find("open/additive/reshaped")
    e.read("masked/masked", 1, e.cut(mask.output, 2, 0, 1, e.new.index(mask) + 1))


_products("the operands of the product exchanged")(lambda e: e.swap(e.last, 0, 1))
_products("adj_y of the product left out")(lambda e: e.change(e.last, adj_y=False))


@_products("the product's own scale kept")
def _(e: Edit) -> None:
    result = e.last.outputs[0]
    product = like(result, "p", quantization=Quantization.affine(0.002))
    e.change(e.last, outputs=[product])
    options = new_table("ReshapeOptions", new_shape=list(result.shape))
    e.insert(len(e.new), "RESHAPE", [product, number(result.shape)], result, options)


_integers("the two values of the mask exchanged")(lambda e: e.swap(e.last, 1, 2))


@_integers("a value of the mask that is off by one step")
def _(e: Edit) -> None:
    right = e.last.input(2)
    e.read(e.last, 2, number(right.array() + np.int16(1), DType.INT16, right.quantization))


_tiles("blocks of rows joined in another order")(lambda e: e.swap(e.last, 0, 1))


@_tiles("the mask rows of another block")
def _(e: Edit) -> None:
    adds = [op for op in e.new if op.name == "ADD"]
    e.read(adds[0], 1, adds[1].input(1))


_joins("the masked parts joined in another order")(lambda e: e.swap(e.last, 0, 1))
_joins("the mask's columns of another part")(lambda e: e.read(e.new[1], 1, number([0, 0, 0, 0])))
_joins("the mask's columns begin one too early")(lambda e: e.read(e.new[1], 1, number([0, 0, 0, 7])))
_joins("one part without its mask")(lambda e: e.read(e.last, 1, e.tensor("new")))
