"""Each rule on its own: one operator, split by head, gives every head its part of what the operator gives at once."""

import math
import re
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from attention_checks import random_inputs
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from pass_runs import refusal

from edge_opt.attention import factors as fx
from edge_opt.attention.assembly import Assembly, cancel_transposes
from edge_opt.attention.axes import MAPPERS
from edge_opt.attention.block import FORMS
from edge_opt.attention.factors import Factor, Factored
from edge_opt.attention.joining import join_heads
from edge_opt.attention.labelled import Labelled, OneHead
from edge_opt.attention.labels import HeadLayouts
from edge_opt.attention.rules import RULES
from edge_opt.ir import Constants, DType, Model, Operator, Subgraph, Tensor, to_bytes
from edge_opt.ir.operators import KINDS
from edge_opt.ir.parse import parse
from edge_opt.ir.text import operator_text
from edge_opt.ir.walk import needed_for, reads
from edge_opt.runtime.native import Session
from edge_opt.shapes.inference import check_operators

Array = NDArray[Any]


@dataclass(frozen=True)
class Example:
    """One operator, how result `output` is labelled, and how many operators a head keeps (None: it doesn't matter).

    Inputs are `x 2,3` (float32) or `c bool 2,3`; the label is written `1, 2@2 2@1 3, 5`: axes by comma, factors by
    blank, `size@stride` where they hold heads.
    """

    inputs: str
    line: str
    label: str
    left: int | None = None
    output: int = 0

    def __str__(self) -> str:
        return f"{self.line} as [{self.label}]"

    def factored(self) -> Factored:
        axes = []
        for axis in self.label.split(","):
            pairs = [(*map(int, word.split("@")), 0)[:2] for word in axis.split()]
            axes.append(tuple(Factor(size, stride) for size, stride in pairs if size > 1 or stride))
        return tuple(axes)

    def model(self) -> Model:
        inputs = []
        for entry in self.inputs.split("; "):
            name, *dtype, shape = entry.split()
            inputs.append(f"%{name}: {dtype[0] if dtype else 'float32'}[{shape}]")
        results = ", ".join(re.findall(r"%\w+", self.line.split(" = ")[0]))
        model = parse(f"subgraph main ({', '.join(inputs)}) {{ {self.line} return {results} }}")
        (operator,) = model.subgraphs[0].operators
        operator.code = replace(operator.code, version=2 if operator.name == "BROADCAST_TO" else 1)
        model.operator_codes = [operator.code]
        return model


def part(values: Array, factored: Factored, head: int, *, keep_axes: bool) -> Array:
    """One head's part of an array, by numpy alone."""
    flat = [factor for axis in factored for factor in axis]
    index = tuple(f.digit(head) if f.stride else slice(None) for f in flat)
    taken = np.ascontiguousarray(values.reshape([f.size for f in flat])[index])
    return taken.reshape(fx.piece_shape(factored, keep_axes=keep_axes))


def computed(graph: Subgraph, model: Model, inputs: dict[str, Array]) -> list[Array]:
    """What the runtime makes of the only subgraph."""
    model.subgraphs = [graph]
    return [*Session(to_bytes(model), "reference").run(None, inputs).values()]


def for_one_head(
    operator: Operator, example: Example, head: int, values: dict[str, Array], *, keep_axes: bool
) -> tuple[Array, list[Operator]]:
    """The operator's result for one head, from that head's parts of the operands, and the operators it took."""
    model = Model()
    assembly = Assembly(model, Constants(model))
    of = Labelled(operator.outputs[example.output], example.factored(), keep_axes)
    operands = HeadLayouts()
    # A rule may read the whole of an operand that all heads share.
    wholes = [one.tensor for one in operands.above(of).values() if not one.tensor.is_constant]
    numbers = {tensor: values[tensor.name] for tensor in wholes}

    def piece(own: Labelled) -> Tensor:
        whole = own.tensor
        of_all = numbers[whole] if whole in numbers else whole.array()
        numbers_of_head = part(of_all, own.factored, head, keep_axes=keep_axes)
        if whole.is_constant:
            return assembly.constants.make("part", numbers_of_head, whole.dtype)
        made = Tensor(f"{whole.name}/head", own.piece_shape, whole.dtype)
        numbers[made] = numbers_of_head
        return made

    result = operands.made(OneHead(assembly, of, operands.above(of), head, piece, f"head_{head}"))
    made = assembly.finished(result)
    if not made:
        return numbers[result], made
    assert refusal(check_operators, made) is None
    graph = Subgraph("main")
    for new in made:
        graph.append(Operator(new.code, new.inputs, new.outputs, new.options))
    graph.inputs = [tensor for tensor in reads(made) if not tensor.is_constant]
    graph.outputs = [result]
    model.operator_codes = [new.code for new in made]
    return computed(graph, model, {tensor.name: numbers[tensor] for tensor in graph.inputs})[
        0
    ], made


E = Example
EXAMPLES = [
    E("x 1,2,6,5", "%y: float32[1,4,3,5] = RESHAPE(%x, int32{1, 4, 3, 5})", "1, 4@1, 3, 5", 0),
    E("x 1,12,5", "%y: float32[1,4,3,5] = RESHAPE(%x, int32{1, 4, 3, 5})", "1, 2@1 2, 3, 5", 1),
    E("x 2,1,3", "%y: float32[2,3] = SQUEEZE(%x) {squeeze_dims: [1]}", "2@1, 3"),
    E("x 2,3", "%y: float32[2,1,3] = EXPAND_DIMS(%x, int32(1))", "2@1, 1, 3"),
    E("x 1,4,3,5", "%y: float32[1,3,4,5] = TRANSPOSE(%x, int32{0, 2, 1, 3})", "1, 3, 4@1, 5", 1),
    E("x 1,4,1,5", "%y: float32[1,1,4,5] = TRANSPOSE(%x, int32{0, 2, 1, 3})", "1, 1, 4@1, 5", 0),
    E("x 1,4,3,5", "%y: float32[1,4,5,3] = TRANSPOSE(%x, int32{0, 1, 3, 2})", "1, 4@1, 5, 3", 1),
    E("x 2,4,3,5", "%y: float32[5,4,3,2] = TRANSPOSE(%x, int32{3, 1, 2, 0})", "5, 4@1, 3, 2", 1),
    E("x 2,4,3; m 1,3", "%y: float32[2,4,3] = ADD(%x, %m)", "2, 4@1, 3", 1),
    E("x 2,8,3; m 2,1,3", "%y: float32[2,8,3] = MUL(%m, %x)", "2, 4@1 2, 3", 1),
    E("x 2,4; z 2,4; c bool 2,4", "%y: float32[2,4] = SELECT(%c, %x, %z)", "2, 4@1", 1),
    E("x 2,4; c bool 1,4", "%y: float32[2,4] = SELECT_V2(%c, %x, float32(0.0))", "2@1, 4", 1),
    E("a 2,3,5; b 2,4,5", "%y: float32[2,3,4] = BATCH_MATMUL(%a, %b) {adj_y: true}", "2@1, 3, 4", 1),
    E("a 2,5,3; b 2,5,4", "%y: float32[2,3,4] = BATCH_MATMUL(%a, %b) {adj_x: true}", "2@1, 3, 4", 1),
    E("x 6,5; w 4,5", "%y: float32[6,4] = FULLY_CONNECTED(%x, %w, none)", "2@1 3, 4", 1),
    E("x 6,5; w 4,5; b 4", "%y: float32[6,4] = FULLY_CONNECTED(%x, %w, %b)", "6, 2@1 2", 1),
    E("x 2,3,5; w 4,5", "%y: float32[6,4] = FULLY_CONNECTED(%x, %w, none)", "2 3@1, 4"),
    E("x 2,3,5; w 4,5", "%y: float32[2,3,4] = FULLY_CONNECTED(%x, %w, none) {keep_num_dims: true}", "2, 3@1, 4"),
    E("a 6,5; b 2,5,4", "%y: float32[2,6,4] = BATCH_MATMUL(%a, %b)", "2@1, 6, 4", 1),
    E("a 1,6,5; b 2,4,5", "%y: float32[2,6,4] = BATCH_MATMUL(%a, %b) {adj_y: true}", "2, 2@1 3, 4", 1),
    E("x 2,6,4", "%y: float32[2,6,4] = LOG_SOFTMAX(%x)", "2, 3@1 2, 4", 1),
    E("x 2,12,5", "%y: float32[2,5] = SUM(%x, int32{1})", "2@1, 5", 1),
    E("x 2,12,5", "%y: float32[2,1,5] = MEAN(%x, int32{-2}) {keep_dims: true}", "2@1, 1, 5", 1),
    E("x 2,12,5", "%y: float32[1,12,1] = REDUCE_MAX(%x, int32{2, 0}) {keep_dims: true}", "1, 4@1 3, 1", 1),
    E("x 2,3; z 2,1", "%y: float32[2,4] = CONCATENATION(%x, %z) {axis: -1}", "2@1, 4", 1),
    E("x 6,2; z 6,2", "%y: float32[12,2] = CONCATENATION(%x, %z) {axis: 0}", "2@1 6, 2", 0),
    E("x 6,2; z 6,2", "%y: float32[12,2] = CONCATENATION(%x, %z) {axis: 0}", "2@2 2@1 3, 2"),
    E("x 2,3", "%y: float32[2,3] = CONCATENATION(%x) {axis: 1}", "2@1, 3"),
    E("x 2,3; z 2,3", "%y: float32[2,2,3] = PACK(%x, %z) {values_count: 2, axis: 1}", "2, 2@1, 3", 1),
    E("x 2,3; z 2,3", "%y: float32[2,2,3] = PACK(%x, %z) {values_count: 2, axis: 1}", "2@1, 2, 3", 1),
    E("x 2,3", "%y: float32[1,2,3] = PACK(%x) {values_count: 1}", "1, 2@1, 3", 1),
    E("x 2,6", "%y: float32[2,3], %z: float32[2,3] = SPLIT(int32(1), %x) {num_splits: 2}", "2@1, 3", 1, output=1),
    E("x 2,6", "%y: float32[2,6] = SPLIT(int32(-1), %x) {num_splits: 1}", "2, 2@1 3", 1),
    E("x 2,6", "%y: float32[2,1], %z: float32[2,5] = SPLIT_V(%x, int32{1, 5}, int32(-1)) {num_splits: 2}",
      "2@1, 5", 1, output=1),
    E("x 2,4,6", "%y: float32[2,4,3] = SLICE(%x, int32{0, 0, 2}, int32{2, -1, 3})", "2, 4@1, 3", 1),
    E("x 2,6", "%y: float32[2,2] = STRIDED_SLICE(%x, int32{0, -9}, int32{2, 2}, int32{1, 1})", "2@1, 2", 1),
    E("x 2,4,6", "%y: float32[2,4,2] = STRIDED_SLICE(%x, int32{0, 1, -4}, int32{1, 0, -2}, int32{1, 1, 1})"
      " {begin_mask: 3, end_mask: 3}", "2, 4@1, 2", 1),
    E("x 1,1,3", "%y: float32[2,4,3] = TILE(%x, int32{2, 4, 1})", "2, 4@1, 3", 1),
    E("x 1,2,3", "%y: float32[1,8,3] = TILE(%x, int32{1, 4, 1})", "1, 4@1 2, 3", 0),
    E("x 1,2,3", "%y: float32[1,8,3] = TILE(%x, int32{1, 4, 1})", "1, 4@2 2@1, 3", 0),
    E("x 3,1,5", "%y: float32[3,8,5] = BROADCAST_TO(%x, int32{3, 8, 5})", "3, 4@1 2, 5", 1),
    E("x 3,1", "%y: float32[2,3,5] = BROADCAST_TO(%x, int32{2, 3, 5})", "2@1, 3, 5", 1),
    E("x 2,3,5", "%y: float32[2,3,7] = PAD(%x, int32[3,2]{0, 0, 0, 0, 1, 1})", "2@3, 3@1, 7", 1),
    E("x 1,3,5", "%y: float32[3,3,5] = PADV2(%x, int32[3,2]{1, 1, 0, 0, 0, 0}, float32(0.5))", "3, 3@1, 5", 1),
    E("x 3,2,5", "%y: float32[3,2,8] = MIRROR_PAD(%x, int32[3,2]{0, 0, 0, 0, 1, 2})", "3, 2@1, 8", 1),

]  # fmt: skip


@pytest.mark.parametrize("example", EXAMPLES, ids=str)
def test_every_head_has_its_part_of_the_whole(example: Example) -> None:
    model = example.model()
    (operator,) = model.subgraphs[0].operators
    values = random_inputs(model)
    whole = computed(model.subgraphs[0], model, values)[example.output]
    factored = example.factored()
    assert fx.sizes(factored) == whole.shape
    for keep_axes in (True, False):
        for head in range(fx.piece_count(factored)):
            result, made = for_one_head(operator, example, head, values, keep_axes=keep_axes)
            np.testing.assert_array_equal(result, part(whole, factored, head, keep_axes=keep_axes))
            assert example.left is None or not keep_axes or len(made) == example.left
            # An operand that a rule passes on is at most reshaped.
            of = Labelled(operator.outputs[example.output], factored, keep_axes)
            passed_on = RULES[operator.name].passed_on(of, head) is not None
            assert passed_on == all(new.name == "RESHAPE" for new in made)


def test_an_operator_with_a_rule_is_followed_without_regard_to_heads_too() -> None:
    """Blocks are found without heads: where only the rule knows an operator, its attention would be skipped."""
    ignored = {name for name in RULES if not KINDS[name].is_followed}
    assert ignored == set(), "operators.toml gives them an effect that rewrites ignore"
    unknown = {name for name in RULES if not {name, KINDS[name].effect} & MAPPERS.keys()}
    assert unknown == set(), "attention/axes.py does not say where their axes lie"


def test_operands_are_those_of_the_operator_that_makes_a_tensor_now() -> None:
    """A rewrite defines a tensor anew, and the next block is followed through it."""
    given = "%x: float32[2,3], %z: float32[3,2]"
    model = parse(f"subgraph main ({given}) {{ %y: float32[2,3] = ABS(%x) return %y }}")
    (graph,) = model.subgraphs
    (operator,) = graph.operators
    operands, result, heads = HeadLayouts(), operator.outputs[0], ((Factor(2, 1),), (Factor(3),))
    assert operands.above(Labelled(result, heads)) == {0: (graph.inputs[0], heads, True)}
    graph.remove(operator)
    order = Constants(model).make("order", np.array([1, 0], np.int32), DType.INT32)
    graph.append(model.new_operator("TRANSPOSE", [graph.inputs[1], order], [result]))
    assert operands.above(Labelled(result, heads)) == {0: (graph.inputs[1], heads[::-1], True)}


REFUSED = [
    (E("x 2,3", "%y: float32[2,3] = SOFTMAX(%x) {beta: 1.0}", "2, 3@1"), "heads", "the axis of the softmax"),
    (E("x 6,2", "%y: float32[4,3] = RESHAPE(%x, int32{4, 3})", "4@1, 3"), "heads", "'x'"),
    (E("x 3; z 3", "%y: float32[6] = CONCATENATION(%x, %z) {axis: 0}", "3@1 2"), "heads", "joined"),
    (E("x 3; z 3", "%y: float32[6] = CONCATENATION(%x, %z) {axis: 0, fused_activation_function: 1}", "2@1 3"),
     "heads", "joined"),
    (E("x 6", "%y: float32[4] = SLICE(%x, int32{1}, int32{4})", "4@1"), "heads", "'x'"),
    (E("x 6", "%y: float32[3], %z: float32[3] = SPLIT(int32(0), %x) {num_splits: 2}", "3@1"), "heads", "'x'"),
    (E("x 3", "%y: float32[6] = TILE(%x, int32{2})", "3@1 2"), "heads", "'x'"),
    (E("x 3", "%y: float32[4] = PAD(%x, int32[1,2]{0, 1})", "4@1"), "heads", "'x'"),
    (E("x 2,3; c bool 2", "%y: float32[2,3] = SELECT(%c, %x, %x)", "2@1, 3"), "heads", "'c'"),
    (E("x 2,3; z 2,3", "%y: float32[2,2,3] = PACK(%x, %z) {values_count: 2, axis: 0}", "2@1 2, 2, 3"),
     "heads", "joined"),
    (E("x 2,3", "%y: float32[3] = STRIDED_SLICE(%x, int32{0, 0}, int32{1, 3}, int32{1, 1}) {shrink_axis_mask: 1}",
       "3@1"), "operator", "rank"),
    (E("x 2,3", "%y: float32[2,3] = TRANSPOSE(%x, int32{0, 0})", "2@1, 3"), "operator", "permutation"),
    (E("x 3,2,3; z 2,3", "%y: float32[2,3] = ADD(%x, %z)", "2@1, 3"), "invalid-model", "'x'"),
    (E("x 4", "%y: float32[2] = STRIDED_SLICE(%x, int32{0}, int32{4}, int32{2})", "2"), "operator", "plain ranges"),
    *((E(f"x {shape}; i int32 {places}", f"%y: {result} = {call}", label), "operator", "'i'")
      for shape, places, result, call, label in (
          ("3", "1,2", "float32[4]", "PAD(%x, %i)", "4"),
          ("6", "1", "float32[4]", "SLICE(%x, %i, int32{4})", "4"),
          ("6", "1", "float32[3], %z: float32[3]", "SPLIT(%i, %x) {num_splits: 2}", "3"),
          ("6", "1", "float32[3], %z: float32[3]", "SPLIT_V(%x, int32{3, 3}, %i) {num_splits: 2}", "3"),
          ("2,3", "2", "float32[3,2]", "TRANSPOSE(%x, %i)", "3, 2"),
          ("2,3", "1", "float32[2]", "SUM(%x, %i)", "2"),
      )),
]  # fmt: skip


@pytest.mark.parametrize(("example", "why", "named"), REFUSED, ids=str)
def test_what_would_mix_heads_is_refused(example: Example, why: str, named: str) -> None:
    (operator,) = example.model().subgraphs[0].operators
    refused = HeadLayouts().refusal(Labelled(operator.outputs[0], example.factored()))
    assert refused.reason.why == why
    assert named in str(refused)


@pytest.mark.parametrize("line", [
    "RESHAPE(%x, int32{3, 4})", "TRANSPOSE(%x, int32{0, 1})", "CONCATENATION(%x) {axis: 0}", "TILE(%x, int32{1, 1})",
])  # fmt: skip
@pytest.mark.parametrize("scale", ["", " q(0.5, 0)"])
def test_an_operator_that_gives_the_same_integers_another_scale_is_not_dropped(
    line: str, scale: str
) -> None:
    example = E("x int8 3,4", f"%y: int8[3,4]{scale} = {line}", "3@1, 4")
    (operator,) = example.model().subgraphs[0].operators
    refused = HeadLayouts().refusal(Labelled(operator.outputs[0], example.factored()))
    assert (refused is not None) == bool(scale)
    assert refused is None or "another scale" in str(refused)


@st.composite
def labelled_shapes(draw: st.DrawFn) -> tuple[Factored, int]:
    """A factored shape and the number of heads; the heads' digits stand anywhere, in any order."""
    digits = draw(st.lists(st.sampled_from((2, 3, 4)), min_size=1, max_size=3))
    heads = math.prod(digits)
    factors: list[Factor] = []
    stride = heads
    for size in digits:
        stride //= size
        factors.append(Factor(size, stride))
    factors += [
        Factor(size) for size in draw(st.lists(st.sampled_from((1, 2, 3, 4, 6)), max_size=4))
    ]
    axes: list[list[Factor]] = [[]]
    for factor in draw(st.permutations(factors)):
        if draw(st.booleans()):
            axes.append([])
        axes[-1].append(factor)
    return tuple(tuple(fx.merge_neighbours(axis)) for axis in axes), heads


@pytest.mark.parametrize("form", ["split", "unpack"])
@settings(max_examples=40, derandomize=True, deadline=None, database=None)
@given(case=labelled_shapes())
def test_heads_are_put_back_where_they_were(case: tuple[Factored, int], form: str) -> None:
    factored, heads = case
    whole = np.arange(np.prod(fx.sizes(factored)), dtype=np.float32).reshape(fx.sizes(factored))
    if not 0 < len(whole.shape) <= 5:
        return
    model = Model()
    assembly, graph = Assembly(model, Constants(model)), Subgraph("main")
    fed = {f"head_{n}": part(whole, factored, n, keep_axes=form == "split") for n in range(heads)}
    graph.inputs = [
        Tensor(name, tuple(values.shape), DType.FLOAT32) for name, values in fed.items()
    ]
    output = Tensor("whole", tuple(whole.shape), DType.FLOAT32)
    layout = Labelled(output, factored, FORMS[form].keep_axes)
    join_heads(assembly, list(graph.inputs), layout)
    for made in assembly.finished(output):
        graph.append(made)
        assert form == "unpack" or made.name != "PACK"
    assert refusal(check_operators, graph.operators) is None
    graph.outputs = [output]
    np.testing.assert_array_equal(computed(graph, model, fed)[0], whole)


INPUTS = """%a: float32[2,3,5], %b: float32[2,5,4], %c: float32[2,4,5], %d: int8[2,5,4],
            %e: int8[2,3,5] q(0.1, 7), %f: int8[2,5,4] q(0.1, 0)"""
PRODUCT = "%p: float32[2,3,4] = BATCH_MATMUL(%a, %b)"
TRANSPOSED = "%t: float32[2,4,3] = TRANSPOSE(%p, int32{0, 2, 1})"
MADE = "%t: float32[2,4,3] = BATCH_MATMUL"
PRODUCT_OF_C = PRODUCT.replace("%b)", "%c) {adj_y: true}")
SWAPPED_B = "%t: float32[2,4,5] = TRANSPOSE(%b, int32{0, 2, 1}) %p: float32[2,3,4] = BATCH_MATMUL"
SWAPPED_A = "%t: float32[2,5,3] = TRANSPOSE(%a, int32{0, 2, 1}) %p: float32[2,3,4] = BATCH_MATMUL"


@pytest.mark.parametrize(
    ("lines", "wanted", "kept"),
    [
        # Operands and flags are exchanged, or a flag is cancelled.
        (f"{PRODUCT} {TRANSPOSED}", "%t", f"{MADE}(%b, %a) {{adj_x: true, adj_y: true}}"),
        (f"{PRODUCT_OF_C} {TRANSPOSED}", "%t", f"{MADE}(%c, %a) {{adj_y: true}}"),
        (f"{SWAPPED_B}(%a, %t) {{adj_y: true}}", "%p", "%p: float32[2,3,4] = BATCH_MATMUL(%a, %b)"),
        (f"{SWAPPED_A}(%t, %b) {{adj_x: true}}", "%p", "%p: float32[2,3,4] = BATCH_MATMUL(%a, %b)"),
        # Somebody else reads the product, or it is given to the caller.
        (f"{PRODUCT} {TRANSPOSED} %n: float32[2,3,4] = NEG(%p)", "%t, %n", None),
        (f"{PRODUCT} {TRANSPOSED}", "%t, %p", None),
        # It moves more than rows and columns.
        (f"{PRODUCT} %t: float32[4,3,2] = TRANSPOSE(%p, int32{{2, 1, 0}})", "%t", None),
        # Without a flag there is nothing to cancel: the reference page's heads keep the TRANSPOSE of their keys.
        (f"{SWAPPED_B}(%a, %t)".replace("4,5] = TRANSPOSE(%b", "5,4] = TRANSPOSE(%c"), "%p", None),
        # Operands of two types are not alike: only the right one may be narrow.
        (f"%p: float32[2,3,4] = BATCH_MATMUL(%a, %d) {TRANSPOSED}", "%t", None),
        # Nor are these: XNNPACK multiplies int8 only if the right one has zero point 0, and rounds differently.
        (
            """%p: int8[2,3,4] q(0.3, 5) = BATCH_MATMUL(%e, %f)
               %t: int8[2,4,3] q(0.3, 5) = TRANSPOSE(%p, int32{0, 2, 1})""",
            "%t",
            None,
        ),
    ],
)
def test_a_product_does_transpositions_nobody_else_reads(
    lines: str, wanted: str, kept: str | None
) -> None:
    graph = parse(f"subgraph main ({INPUTS}) {{ {lines} return {wanted} }}").subgraphs[0]
    left = needed_for(graph.outputs, cancel_transposes(list(graph.operators), graph.outputs))
    assert list(map(operator_text, left)) == (
        [kept] if kept else list(map(operator_text, graph.operators))
    )
