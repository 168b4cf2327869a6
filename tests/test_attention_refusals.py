"""What is not a multi-head attention, or cannot be followed: left as it is, with the reason."""

from dataclasses import dataclass

import pytest
from attention_checks import heads_found, only_block
from text_parser import parse

from edge_opt.attention.block import NotABlock
from edge_opt.attention.find import find_blocks
from edge_opt.ir import Buffer, Constants, Metadata, Model
from edge_opt.ir.text import to_text
from edge_opt.passes import Context, SiteReport, Status, run_pass
from edge_opt.passes.mha_to_sha import MhaToSha
from edge_opt.schema.data import Data
from edge_opt.targets import Target

GENERIC = Target("generic", "")


def refused(model: Model, target: Target = GENERIC) -> SiteReport:
    """The report of the only site, which must have left the graph alone."""
    before = to_text(model)
    graph = model.subgraphs[0]
    (report,) = run_pass(MhaToSha(), Context(model, graph, "main", target, Constants(model)))
    assert report.status is not Status.CONVERTED
    assert to_text(model) == before
    return report


MERGE = """%t: float32[1,6,4,5] = TRANSPOSE(%o, int32{0, 2, 1, 3})
           %r: float32[1,6,20] = RESHAPE(%t, int32{1, 6, 20})"""


def attention(
    logits: str = "%p: float32[1,4,6,8] = SOFTMAX(%l)",
    tail: str = MERGE,
    result: str = "%r",
    inputs: str = "",
) -> str:
    """Four heads of size 5, six queries, eight keys; `logits` leads from %l to %p, `tail` from %o to `result`."""
    return f"""
    subgraph main (%q: float32[1,4,6,5], %k: float32[1,4,8,5], %v: float32[1,4,8,5]{inputs}) {{
      %l: float32[1,4,6,8] = BATCH_MATMUL(%q, %k) {{adj_y: true}}
      {logits}
      %o: float32[1,4,6,5] = BATCH_MATMUL(%p, %v)
      {tail}
      return {result}
    }}
    """


BATCH = """
subgraph main (%q: float32[4,6,5], %k: float32[4,8,5], %v: float32[4,8,5]) {
  %l: float32[4,6,8] = BATCH_MATMUL(%q, %k) {adj_y: true}
  %p: float32[4,6,8] = SOFTMAX(%l)
  %o: float32[4,6,5] = BATCH_MATMUL(%p, %v)
"""
MOVED_BATCH = """
subgraph main (%q: float32[4,6,5], %k: float32[4,8,5], %v: float32[4,8,5]) {
  %qm: float32[1,4,6,5] = RESHAPE(%q, int32{1, 4, 6, 5})
  %km: float32[1,4,8,5] = RESHAPE(%k, int32{1, 4, 8, 5})
  %vm: float32[1,4,8,5] = RESHAPE(%v, int32{1, 4, 8, 5})
  %l: float32[1,4,6,8] = BATCH_MATMUL(%qm, %km) {adj_y: true}
  %p: float32[1,4,6,8] = SOFTMAX(%l)
  %o: float32[1,4,6,5] = BATCH_MATMUL(%p, %vm)
  return %o
}
"""


@dataclass(frozen=True)
class Example:
    """A graph and why it is left; `settled` where nothing is to be done about it."""

    name: str
    graph: str
    reason: str
    settled: bool = False


EXAMPLES = (
    Example(
        "a softmax over classes",
        """
        subgraph main (%x: float32[2,10]) {
          %p: float32[2,10] = SOFTMAX(%x)
          return %p
        }
        """,
        "no value product behind this SOFTMAX: not attention",
        settled=True,
    ),
    Example(
        "a router that mixes experts",
        """
        subgraph main (%x: float32[1,4,16], %experts: float32[1,3,16]) {
          %g: float32[1,4,3] = FULLY_CONNECTED(%x, float32[3,16]{splat 0.5}, none) {keep_num_dims: true}
          %p: float32[1,4,3] = SOFTMAX(%g)
          %o: float32[1,4,16] = BATCH_MATMUL(%p, %experts)
          return %o
        }
        """,
        "no product of queries and keys leads to this SOFTMAX: not attention, at FULLY_CONNECTED",
        settled=True,
    ),
    Example(
        "probabilities that an operator takes which nobody can look into",
        """
        subgraph main (%q: float32[1,4,6,5], %k: float32[1,4,8,5], %v: float32[1,4,8,5]) {
          %l: float32[1,4,6,8] = BATCH_MATMUL(%q, %k) {adj_y: true}
          %p: float32[1,4,6,8] = SOFTMAX(%l)
          %s: float32[1,4,6,1] = SUM(%p, int32{3}) {keep_dims: true}
          %o: float32[1,4,6,5] = CUSTOM 'product' (%p, %v)
          return %o, %s
        }
        """,
        "the probabilities go into an operator that nothing is known of, at CUSTOM",
    ),
    Example(
        "logits made by an operator that nobody can look into",
        """
        subgraph main (%x: float32[1,4,6,8], %v: float32[1,4,8,5]) {
          %g: float32[1,4,6,8] = CUSTOM 'scores' (%x)
          %p: float32[1,4,6,8] = SOFTMAX(%g)
          %o: float32[1,4,6,5] = BATCH_MATMUL(%p, %v)
          return %o
        }
        """,
        "the scores are not followed through this operator, at CUSTOM",
    ),
    Example(
        "a softmax over the heads",
        attention(
            """%lt: float32[1,6,8,4] = TRANSPOSE(%l, int32{0, 2, 3, 1})
               %pt: float32[1,6,8,4] = SOFTMAX(%lt)
               %p: float32[1,4,6,8] = TRANSPOSE(%pt, int32{0, 3, 1, 2})"""
        ),
        "the heads lie on the axis of the softmax (found [1, 6, 8, (4:head)]), at SOFTMAX",
    ),
    Example(
        "a slice through the heads",
        attention(
            """%all: float32[1,4,6,8] = SOFTMAX(%l)
               %p3: float32[1,3,6,8] = SLICE(%all, int32{0, 1, 0, 0}, int32{1, 3, 6, 8})
               %v3: float32[1,3,8,5] = SLICE(%v, int32{0, 1, 0, 0}, int32{1, 3, 8, 5})
               %o3: float32[1,3,6,5] = BATCH_MATMUL(%p3, %v3)
               %t3: float32[1,6,3,5] = TRANSPOSE(%o3, int32{0, 2, 1, 3})
               %r3: float32[1,6,15] = RESHAPE(%t3, int32{1, 6, 15})
               %p: float32[1,4,6,8] = ABS(%l)""",
            result="%r3",
        ),
        "a slice cuts through the heads, at SLICE, tensor 'all'",
    ),
    Example(
        "a split through the heads",
        attention(
            """%all: float32[1,4,6,8] = SOFTMAX(%l)
               %p2: float32[1,2,6,8], %other: float32[1,2,6,8] = SPLIT(int32(1), %all) {num_splits: 2}
               %v2: float32[1,2,8,5] = SLICE(%v, int32{0, 0, 0, 0}, int32{1, 2, 8, 5})
               %o2: float32[1,2,6,5] = BATCH_MATMUL(%p2, %v2)
               %t2: float32[1,6,2,5] = TRANSPOSE(%o2, int32{0, 2, 1, 3})
               %r2: float32[1,6,10] = RESHAPE(%t2, int32{1, 6, 10})
               %p: float32[1,4,6,8] = ABS(%l)""",
            result="%r2",
        ),
        "a split cuts through the heads, at SPLIT, tensor 'all'",
    ),
    Example(
        "strides behind the softmax",
        attention(
            """%wide: float32[1,4,6,16] = CONCATENATION(%l, %l) {axis: 3}
               %all: float32[1,4,6,16] = SOFTMAX(%wide)
               %p: float32[1,4,6,8] = STRIDED_SLICE(%all, int32{0, 0, 0, 0}, int32{1, 4, 6, 16}, int32{1, 1, 1, 2})"""
        ),
        "only plain ranges of a STRIDED_SLICE are followed, at STRIDED_SLICE",
    ),
    Example(
        "logits of which one part cannot be followed",
        attention(
            """%wide: float32[1,4,6,16] = BATCH_MATMUL(%q, %k2) {adj_y: true}
               %l2: float32[1,4,6,8] = STRIDED_SLICE(%wide, int32{0, 0, 0, 0}, int32{1, 4, 6, 16}, int32{1, 1, 1, 2})
               %sum: float32[1,4,6,8] = ADD(%l, %l2)
               %p: float32[1,4,6,8] = SOFTMAX(%sum)""",
            inputs=", %k2: float32[1,4,16,5]",
        ),
        "only plain ranges of a STRIDED_SLICE are followed, at STRIDED_SLICE",
    ),
    Example(
        "a reshape through the middle of the heads",
        attention(
            """%mixed: float32[1,6,4,8] = RESHAPE(%l, int32{1, 6, 4, 8})
               %pm: float32[1,6,4,8] = SOFTMAX(%mixed)
               %p: float32[1,4,6,8] = RESHAPE(%pm, int32{1, 4, 6, 8})"""
        ),
        "the head axis is cut through the middle (expected a shape that [1, (4:head), 6, 8] refines, "
        "found [1, 6, 4, 8]), at RESHAPE, tensor 'pm'",
    ),
    Example(
        "a permutation that is no constant",
        attention(
            """%lt: float32[1,4,6,8] = TRANSPOSE(%l, %order)
               %p: float32[1,4,6,8] = SOFTMAX(%lt)""",
            inputs=", %order: int32[4]",
        ),
        "an operand that steers the operator must be constant, at TRANSPOSE, tensor 'order'",
    ),
    Example(
        "parts that are not heads",
        """
        subgraph main (%q: float32[1,4,6,5], %k: float32[1,4,8,5], %v: float32[1,4,8,5]) {
          %q1: float32[1,1,6,5] = SLICE(%q, int32{0, 0, 0, 0}, int32{1, 1, 6, 5})
          %q3: float32[1,3,6,5] = SLICE(%q, int32{0, 1, 0, 0}, int32{1, 3, 6, 5})
          %k1: float32[1,1,8,5] = SLICE(%k, int32{0, 0, 0, 0}, int32{1, 1, 8, 5})
          %k3: float32[1,3,8,5] = SLICE(%k, int32{0, 1, 0, 0}, int32{1, 3, 8, 5})
          %l1: float32[1,1,6,8] = BATCH_MATMUL(%q1, %k1) {adj_y: true}
          %l3: float32[1,3,6,8] = BATCH_MATMUL(%q3, %k3) {adj_y: true}
          %l: float32[1,4,6,8] = CONCATENATION(%l1, %l3) {axis: 1}
          %p: float32[1,4,6,8] = SOFTMAX(%l)
          %o: float32[1,4,6,5] = BATCH_MATMUL(%p, %v)
          %t: float32[1,6,4,5] = TRANSPOSE(%o, int32{0, 2, 1, 3})
          %r: float32[1,6,20] = RESHAPE(%t, int32{1, 6, 20})
          return %r
        }
        """,
        "the parts of a concatenation are not the heads, at CONCATENATION",
    ),
    Example(
        "heads that share their logits",
        """
        subgraph main (%q: float32[1,1,6,5], %k: float32[1,1,8,5], %v: float32[1,4,8,5]) {
          %l: float32[1,1,6,8] = BATCH_MATMUL(%q, %k) {adj_y: true}
          %p: float32[1,1,6,8] = SOFTMAX(%l)
          %o: float32[1,4,6,5] = BATCH_MATMUL(%p, %v)
          %t: float32[1,6,4,5] = TRANSPOSE(%o, int32{0, 2, 1, 3})
          %r: float32[1,6,20] = RESHAPE(%t, int32{1, 6, 20})
          return %r
        }
        """,
        "no product of queries and keys carries the heads, at SOFTMAX",
    ),
    Example(
        "heads that share their logits in groups",
        """
        subgraph main (%q: float32[1,2,1,6,5], %k: float32[1,2,1,8,5], %v: float32[1,2,2,8,5]) {
          %l: float32[1,2,1,6,8] = BATCH_MATMUL(%q, %k) {adj_y: true}
          %p: float32[1,2,1,6,8] = SOFTMAX(%l)
          %o: float32[1,2,2,6,5] = BATCH_MATMUL(%p, %v)
          %h: float32[1,4,6,5] = RESHAPE(%o, int32{1, 4, 6, 5})
          %t: float32[1,6,4,5] = TRANSPOSE(%h, int32{0, 2, 1, 3})
          %r: float32[1,6,20] = RESHAPE(%t, int32{1, 6, 20})
          return %r
        }
        """,
        "not every head reaches the logits (expected 4, found 2), at BATCH_MATMUL",
    ),
    Example(
        "an outermost axis that may be the batch, and stays",
        f"{BATCH} %r: float32[4,6] = MEAN(%o, int32{{-1}}) return %r }}",
        "already single-head",
        settled=True,
    ),
    Example(
        "an outermost axis that may be the batch, whose rows are summed",
        f"{BATCH} %r: float32[4,5] = SUM(%o, int32{{1}}) return %r }}",
        "already single-head",
        settled=True,
    ),
    Example(
        "an outermost axis that may be the batch, of which all else is summed",
        f"{BATCH} %r: float32[4] = SUM(%o, int32{{1, 2}}) return %r }}",
        "already single-head",
        settled=True,
    ),
    Example(
        "a batch that was moved to where heads are, beside others",
        MOVED_BATCH.replace("return %o", "%n: float32[1,4,6,10] = CONCATENATION(%o, %o) {axis: 3} return %n"),
        "already single-head",
        settled=True,
    ),
    Example(
        "a length that is known at run time only",
        """
        subgraph main (%q: float32[1,4,?,5], %k: float32[1,4,8,5], %v: float32[1,4,8,5]) {
          %l: float32[1,4,?,8] = BATCH_MATMUL(%q, %k) {adj_y: true}
          %p: float32[1,4,?,8] = SOFTMAX(%l)
          %o: float32[1,4,?,5] = BATCH_MATMUL(%p, %v)
          %t: float32[1,?,4,5] = TRANSPOSE(%o, int32{0, 2, 1, 3})
          %r: float32[1,?,20] = RESHAPE(%t, int32{1, -1, 20})
          return %r
        }
        """,
        "lengths are known only at run time: give --shape q=1,4,?,5",
    ),
)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_what_is_left_says_why(example: Example) -> None:
    report = refused(parse(example.graph))
    assert report.status is Status.SKIPPED
    assert report.reason == example.reason
    assert report.settled is example.settled


def test_the_example_that_the_refusals_vary_converts() -> None:
    model = parse(attention())
    (report,) = run_pass(MhaToSha(), Context(model, model.subgraphs[0], "main", GENERIC, Constants(model)))
    assert report.status is Status.CONVERTED
    assert (report.heads, report.kv_heads) == (4, 4)


@pytest.mark.parametrize("length", [6, 1])
@pytest.mark.parametrize("operands", ["%m, %l", "%l, %m"])
def test_one_head_has_nothing_to_split(length: int, operands: str) -> None:
    rows = f"float32[1,1,{length},8]"
    model = parse(
        f"""
        subgraph main (%q: float32[1,1,{length},5], %k: float32[1,1,8,5], %v: float32[1,1,5,8], %m: {rows}) {{
          %l: {rows} = BATCH_MATMUL(%q, %k) {{adj_y: true}}
          %s: {rows} = ADD({operands})
          %p: {rows} = SOFTMAX(%s)
          %o: float32[1,1,{length},5] = BATCH_MATMUL(%p, %v) {{adj_y: true}}
          %r: float32[1,{length},5] = RESHAPE(%o, int32{{1, {length}, 5}})
          return %r
        }}
        """
    )
    match = only_block(model.subgraphs[0])
    assert (match.heads, match.head_size, match.query_length, match.key_lengths) == (1, 5, length, (8,))
    assert match.mask is not None
    assert match.mask.name == "m"
    report = refused(model)
    assert (report.reason, report.settled) == ("already single-head", True)


@pytest.mark.parametrize(
    ("lead", "rows", "keys", "end"),
    [("1,1", 4, 8, ""), ("1", 12, 12, "%r: float32[1,3,4,5] = RESHAPE(%o, int32{1, 3, 4, 5})")],
    ids=["rows that nothing merges", "rows and columns of an image"],
)
def test_rows_that_may_be_heads_or_not_stay(lead: str, rows: int, keys: int, end: str) -> None:
    model = parse(f"""
    subgraph main (%q: float32[{lead},{rows},5], %k: float32[{lead},{keys},5], %v: float32[{lead},{keys},5]) {{
      %l: float32[{lead},{rows},{keys}] = BATCH_MATMUL(%q, %k) {{adj_y: true}}
      %p: float32[{lead},{rows},{keys}] = SOFTMAX(%l)
      %o: float32[{lead},{rows},5] = BATCH_MATMUL(%p, %v)
      {end}
      return {"%r" if end else "%o"}
    }}""")
    assert heads_found(model.subgraphs[0]) == [1]


def test_a_recorded_shape_that_is_a_lie_is_not_believed() -> None:
    model = parse(attention())
    tensor = next(t for t in model.subgraphs[0].tensors if t.name == "o")
    tensor.shape = (1, 4, 5, 6)
    assert refused(model).reason == (
        "the probabilities go into an operator that nothing is known of, at BATCH_MATMUL (axis 2 is 6, recorded as 5 "
        "of 'o')"
    )
    model = parse(attention())
    tensor = next(t for t in model.subgraphs[0].tensors if t.name == "p")
    tensor.shape = (1, 4, 6, 9)
    reason = refused(model).reason
    assert reason == ("the recorded shapes do not fit, at SOFTMAX (axis 3 is 8, recorded as 9 of 'p')")


def test_operators_that_the_file_orders_by_index_stay() -> None:
    model = parse(attention())
    model.metadata.append(Metadata("model_control_dependencies", Buffer(Data(b"x"))))
    assert "model_control_dependencies" in refused(model).reason


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        (Target("t", "", refused_operators=("SPLIT",)), "target 't' does not take SPLIT"),
        (Target("t", "", largest_rank=3), "target 't' takes rank 3 at most, 'q/head_0' has 4"),
    ],
)
def test_what_the_target_cannot_take_is_rolled_back(target: Target, reason: str) -> None:
    report = refused(parse(attention()), target)
    assert report.status is Status.ROLLED_BACK
    assert report.reason == reason


def test_a_sequence_of_attentions_is_judged_one_by_one() -> None:
    text = attention(
        tail="""%t: float32[1,6,4,5] = TRANSPOSE(%o, int32{0, 2, 1, 3})
                %r: float32[1,6,20] = RESHAPE(%t, int32{1, 6, 20})
                %c: float32[1,6,20] = SOFTMAX(%r)
                %q2: float32[1,1,6,20] = RESHAPE(%r, int32{1, 1, 6, 20})
                %l2: float32[1,1,6,8] = BATCH_MATMUL(%q2, %k2) {adj_y: true}
                %p2: float32[1,1,6,8] = SOFTMAX(%l2)
                %o2: float32[1,1,6,5] = BATCH_MATMUL(%p2, %v2)""",
        result="%c, %o2",
        inputs=", %k2: float32[1,1,8,20], %v2: float32[1,1,8,5]",
    )
    model = parse(text)
    assert heads_found(model.subgraphs[0]) == [4, 0, 1]
    reports = run_pass(MhaToSha(), Context(model, model.subgraphs[0], "main", GENERIC, Constants(model)))
    assert [report.status for report in reports] == [Status.CONVERTED, Status.SKIPPED, Status.SKIPPED]
    assert sum(op.name == "SOFTMAX" for op in model.subgraphs[0].operators) == 4 + 2


def test_of_several_value_products_the_one_without_heads_is_named() -> None:
    model = parse(
        """
        subgraph main (%q: float32[1,2,4,5], %k: float32[1,2,6,5], %v: float32[1,2,6,5], %w: float32[3,6]) {
          %l: float32[1,2,4,6] = BATCH_MATMUL(%q, %k) {adj_y: true}
          %p: float32[1,2,4,6] = SOFTMAX(%l)
          %o: float32[1,2,4,5] = BATCH_MATMUL(%p, %v)
          %rows: float32[8,6] = RESHAPE(%p, int32{8, 6})
          %other: float32[8,3] = FULLY_CONNECTED(%rows, %w, none)
          return %o, %other
        }
        """
    )
    (found,) = find_blocks(model.subgraphs[0])
    assert isinstance(found, NotABlock)
    assert found.reason.operator is not None
    assert found.reason.operator.output.name == "other"
