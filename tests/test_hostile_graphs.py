"""Files that load, of graphs that no exporter writes: converted or left with a reason, in time, never a traceback."""

import re

import fuzz
import numpy as np
import pytest
from attention_checks import MERGED, attention_text
from growth_shapes import SHAPES, visits

import edge_opt
from edge_opt.attention import around, find, heads, labels, pairs, plan, positions
from edge_opt.attention.around import find_mask
from edge_opt.attention.find import find_blocks
from edge_opt.attention.positions import find_rotary
from edge_opt.conversion import ConversionResult, convert
from edge_opt.inspection import inspect
from edge_opt.ir import Model, Subgraph, load, to_bytes, walk
from edge_opt.ir.parse import parse
from edge_opt.npu import parts as npu_parts
from edge_opt.passes import Status
from edge_opt.schema import new_table

LOGITS, RESULT = "float32[1,4,6,8]", "float32[1,4,6,5]"
PLAIN = attention_text()
# What a chain begins with, its type, and the part of the text that reads its end.
PLACES = {
    "queries": ("%q", RESULT, "scores", f"%l: {LOGITS} = BATCH_MATMUL(END, %k) {{adj_y: true}}"),
    "logits": ("%l", LOGITS, "softmax", f"%p: {LOGITS} = SOFTMAX(END) {{beta: 1.0}}"),
    "probabilities": ("%p", LOGITS, "then", f"%w: {LOGITS} = NEG(END)"),
    "result": ("%o", RESULT, "tail", MERGED.replace("%o", "END")),
}


def converted(model: Model) -> ConversionResult:
    """The model after a way through its file."""
    return convert(to_bytes(model), verify="none", dry_run=True)


@pytest.mark.parametrize(
    "lie",
    [
        "RESHAPE(%l, int32{1, 4, 6, 9})",
        "RESHAPE(%l, int32{1, 6, 4, 8})",
        "RESHAPE(%l, int32{-1, -1, 6, 8})",
        "RESHAPE(%l, int32{0, 4, 6, 8})",
        "TRANSPOSE(%l, int32{0, 1, 3, 2})",
        "TRANSPOSE(%l, int32{0, 1, 2, 2})",
        "TRANSPOSE(%l, int32{0, 1, 2, 9})",
        "ADD(%l, float32[5,5]{splat 0.0})",
        "CONCATENATION(%l, %l) {axis: 3}",
        "CONCATENATION(%l) {axis: 77}",
        "SLICE(%l, int32{0, 0, 0, 3}, int32{1, 4, 6, 8})",
        "SLICE(%l, int32{0, 0}, int32{1, 4, 6, 8})",
        "GATHER(%l, int32{0, 1, 7}) {axis: 9}",
    ],
)
def test_operators_that_lie_about_their_result_are_left_alone(lie: str) -> None:
    assert len(converted(parse(PLAIN)).converted) == 1, "the plain one"
    text = PLAIN.replace("  %p:", f"  %m: {LOGITS} = {lie}\n  %p:").replace(
        "SOFTMAX(%l)", "SOFTMAX(%m)"
    )
    result = converted(parse(text))
    assert not result.converted
    assert all(site.reason for site in result.sites)


@pytest.mark.parametrize("scale", ["q(0.0, 0)", "q(0.5, 0)"])
def test_zero_scales_do_no_harm(scale: str) -> None:
    """A row of nothing but zeros has scale 0: exporters write that, and nobody may divide by it."""
    with np.errstate(all="raise"):
        result = converted(parse(re.sub(r"float32(\[.*?\])", rf"int16\1 {scale}", PLAIN)))
    assert load(to_bytes(result.model))
    assert result.sites


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        (r"(%[vo]: float32\[1,4,\d),5", r"\1,0", "is empty"),
        (r"(%k: float32)\[.*?\]", r"\1[]", ""),
        (r"(%[kv]: float32)\[.*?\]", r"\1[]", ""),
    ],
)
def test_keys_and_values_without_elements_or_axes(old: str, new: str, reason: str) -> None:
    model = parse(re.sub(old, new, PLAIN))
    (match,) = find_blocks(model.subgraphs[0])
    assert reason in str(match.reason)
    (site,) = converted(model).sites
    assert (site.status, site.is_bug) == (Status.SKIPPED, False)


def test_a_product_of_a_tensor_whose_rank_the_file_leaves_out_is_left() -> None:
    model = parse(PLAIN)
    query = model.subgraphs[0].inputs[0]
    query.shape, query.table = (), new_table("Tensor", has_rank=False)
    (site,) = converted(model).sites
    assert site.why == "open-lengths"
    assert "BATCH_MATMUL" in site.reason


@pytest.mark.parametrize("operator", range(5))
def test_a_result_whose_rank_the_file_leaves_out_does_no_harm(operator: int) -> None:
    tail = f"  %e: {RESULT} = ADD(%o, %o)\n{MERGED.replace('%o', '%e')}"
    model = parse(attention_text(tail=tail))
    result = model.subgraphs[0].operators[operator].output
    result.shape, result.table = (), new_table("Tensor", has_rank=False)
    assert not any(site.is_bug for site in converted(model).sites)


@pytest.mark.parametrize(
    ("call", "named"),
    [
        ("IF(%c) {then_subgraph_index: 1, else_subgraph_index: 1}", "IF 0"),
        ("CALL_ONCE() {init_subgraph_index: 1}", "CALL_ONCE 0"),
    ],
)
def test_an_operator_without_outputs_is_named_by_its_place(call: str, named: str) -> None:
    handle = "resource[] = VAR_HANDLE() {container: '', shared_name: 'v'}"
    body = f"""subgraph branch () {{
      %h: {handle}
      %q: float32[1,4,6,8] = READ_VARIABLE(%h)
      %l: float32[1,4,6,6] = BATCH_MATMUL(%q, %q) {{adj_y: true}}
      %p: float32[1,4,6,6] = SOFTMAX(%l) {{beta: 1.0}}
      %a: float32[1,4,6,8] = BATCH_MATMUL(%p, %q)
      ASSIGN_VARIABLE(%h, %a)
      return
    }}"""
    main = f"subgraph main (%c: bool[]) {{ {call} %h: {handle} %o: float32[1,4,6,8] = READ_VARIABLE(%h) return %o }}"
    model = parse(f"{main} {body}")
    (site,) = converted(model).sites
    assert (site.operator, site.status) == (named, Status.SKIPPED)
    assert inspect(to_bytes(model)).sites[0].operator == named
    assert not list(npu_parts._ends_of_parts(model.subgraphs[0]))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    ("length", "step"),
    [(1500, "NEG({0})"), (60, "ADD({0}, {0})"), (60, "MUL({0}, {0})")],
    ids=["a long chain", "2^60 paths of ADD", "2^60 paths of MUL"],
)
def test_long_chains_and_exponential_graphs_take_no_time(
    place: str, length: int, step: str
) -> None:
    value, kind, part, end = PLACES[place]
    lines = []
    for index in range(length):
        lines.append(f"%c{index}: {kind} = {step.format(value)}")
        value = f"%c{index}"
    model = parse(attention_text(**{part: "\n".join([*lines, end.replace("END", value)])}))
    with fuzz.time_limit(10):
        assert any(match.is_attention for match in find_blocks(model.subgraphs[0]))
        converted(model)


LIMITS = (
    *((module, "DEEPEST") for module in (around, find, heads, labels, plan)),
    (pairs, "_FARTHEST"),
    (positions, "_MOST_STEPS"),
    (walk, "MOST_MOVES"),
)


@pytest.fixture
def _low_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Searches stop after a quarter of the operators, so that graphs of a quarter of the size reach every limit."""
    for module, name in LIMITS:
        monkeypatch.setattr(module, name, getattr(module, name) // 4)


@pytest.mark.usefixtures("_low_limits")
@pytest.mark.parametrize("shape", SHAPES)
def test_twice_the_operators_take_at_most_little_more_than_twice_the_visits(shape: str) -> None:
    def work(graph: Subgraph) -> None:
        matches = list(find_blocks(graph))
        for match in matches:
            find_mask(match.softmax)
        for rotary in find_rotary(graph):
            assert len(rotary.operators) < 50

    small, large = (parse(SHAPES[shape](count)).subgraphs[0] for count in (75, 150))
    assert visits(lambda: work(large)) <= 2.2 * visits(lambda: work(small))


@pytest.mark.parametrize(
    ("shape", "count"),
    [
        ("interleaved_blocks", 40),
        ("joined_products", 100),
        ("composites_of_one", 100),
        ("heads", 64),
    ],
)
def test_twice_the_rewrites_take_at_most_little_more_than_twice_the_visits(
    shape: str, count: int
) -> None:
    small, large = (to_bytes(parse(SHAPES[shape](size))) for size in (count, 2 * count))

    def work(content: bytes) -> None:
        convert(content, verify="none", dry_run=True)

    assert visits(lambda: work(large)) <= 2.2 * visits(lambda: work(small))


@pytest.mark.parametrize(("heads", "status"), [(1024, Status.CONVERTED), (64_000, Status.SKIPPED)])
def test_more_than_1024_heads_are_left_with_their_number(heads: int, status: Status) -> None:
    text = PLAIN.replace("[1,4,", f"[1,{heads},").replace("[1,6,4,5]", f"[1,6,{heads},5]")
    text = text.replace("[1,6,20]", f"[1,6,{5 * heads}]").replace(
        "{1, 6, 20}", f"{{1, 6, {5 * heads}}}"
    )
    (site,) = converted(parse(text)).sites
    assert (site.status, site.why) == (status, "" if heads == 1024 else "limit")
    assert heads == 1024 or "64,000" in site.reason


@pytest.mark.parametrize(
    ("first", "other"),
    [
        ("ADD(int32{{3}}, int32{{4}})", "ADD(%x, int32{{{0}}})"),
        ("PACK(%g, int32(1)) {{values_count: 2}}", "CONCATENATION(%x, %x, int32{{1}})"),
    ],
    ids=["other values", "other sizes"],
)
def test_subgraphs_that_call_the_next_twice_take_no_time(first: str, other: str) -> None:
    """2^30 ways to enter the last one, no two alike."""
    lines = [f"subgraph main (%g: int32[]) {{ %x: int32[?] = {first.format()}"]
    for index in range(30):
        call = f"{{name: 'n', decomposition_subgraph_index: {index + 1}}}"
        lines.append(f"%a: int32[?] = STABLEHLO_COMPOSITE(%x) {call}")
        lines.append(f"%y: int32[?] = {other.format(1 << index)}")
        lines.append(f"%b: int32[?] = STABLEHLO_COMPOSITE(%y) {call}")
        lines.append(f"return %b }} subgraph g{index} (%x: int32[?]) {{")
    lines.append("%z: int32[?] = NEG(%x) return %z }")
    with fuzz.time_limit(10):
        edge_opt.infer_shapes(load(to_bytes(parse("\n".join(lines)))))
