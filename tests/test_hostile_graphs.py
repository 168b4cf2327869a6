"""Files that load, of graphs that no exporter writes: converted or left with a reason, in time, never a traceback."""

import re

import fuzz
import numpy as np
import pytest
from pass_runs import run
from text_parser import parse

import edge_opt
from edge_opt.attention.find import find_blocks
from edge_opt.conversion import ConversionResult, convert
from edge_opt.ir import load, to_bytes
from edge_opt.passes import Status
from edge_opt.schema import new_table

BLOCK = """
    subgraph main (%q: TYPE[1,2,4,8] SCALE, %k: TYPE[1,2,6,8] SCALE, %v: TYPE[1,2,6,8] SCALE) {
      %s: TYPE[1,2,4,8] SCALE = QUERY
      %l: TYPE[1,2,4,6] SCALE = BATCH_MATMUL(%s, %k) {adj_y: true}
      %m: TYPE[1,2,4,6] SCALE = LOGITS
      %p: TYPE[1,2,4,6] SCALE = SOFTMAX(%m)
      %r: TYPE[1,2,4,6] SCALE = WEIGHTS
      %w: TYPE[1,2,4,8] SCALE = BATCH_MATMUL(%r, %v)
      %e: TYPE[1,2,4,8] SCALE = TAIL
      %t: TYPE[1,4,2,8] SCALE = TRANSPOSE(%e, int32{0, 2, 1, 3})
      %o: TYPE[1,4,16] SCALE = RESHAPE(%t, int32{1, 4, 16})
      return %o
    }
"""
STEPS = {"QUERY": ("%q", "%s"), "LOGITS": ("%l", "%m"), "WEIGHTS": ("%p", "%r"), "TAIL": ("%w", "%e")}


def block(dtype: str = "float32", scale: str = "", **parts: str) -> bytes:
    """One attention block of two heads; `parts` say what stands in a place: lines, the last one without its tensor.

    Any other part is the shape of a tensor of that name.
    """
    text = BLOCK.replace("TYPE", dtype).replace("SCALE", scale)
    for name, (before, after) in STEPS.items():
        line = next(line for line in text.splitlines() if line.endswith(f"= {name}"))
        if name in parts:
            *lines, last = parts[name].splitlines()
            text = text.replace(line, "\n".join([*lines, line.replace(name, last)]))
        else:  # what follows reads what came before
            text = text.replace(f"{line}\n", "").replace(f"({after}", f"({before}")
    for name in parts.keys() - STEPS.keys():
        text = re.sub(rf"%{name}: float32\[[\d,]*\]", f"%{name}: float32{parts[name]}", text)
    return to_bytes(parse(text))


def converted(content: bytes) -> ConversionResult:
    return convert(content, verify="none", dry_run=True)


@pytest.mark.parametrize(
    "lie",
    [
        "RESHAPE(%l, int32{1, 2, 4, 7})",
        "RESHAPE(%l, int32{1, 4, 2, 6})",
        "RESHAPE(%l, int32{-1, -1, 4, 6})",
        "RESHAPE(%l, int32{0, 2, 4, 6})",
        "TRANSPOSE(%l, int32{0, 1, 3, 2})",
        "TRANSPOSE(%l, int32{0, 1, 2, 2})",
        "TRANSPOSE(%l, int32{0, 1, 2, 9})",
        "ADD(%l, float32[5,5]{splat 0.0})",
        "CONCATENATION(%l, %l) {axis: 3}",
        "CONCATENATION(%l) {axis: 77}",
        "SLICE(%l, int32{0, 0, 0, 3}, int32{1, 2, 4, 6})",
        "SLICE(%l, int32{0, 0}, int32{1, 2, 4, 6})",
        "GATHER(%l, int32{0, 1, 7}) {axis: 9}",
    ],
)
def test_operators_that_lie_about_their_result_are_left_alone(lie: str) -> None:
    assert len(converted(block()).converted) == 1, "the plain one"
    result = converted(block(LOGITS=lie))
    assert not result.converted
    assert all(site.reason for site in result.sites)


@pytest.mark.parametrize("scale", ["q(0.0, 0)", "q(0.5, 0)"])
def test_zero_scales_do_no_harm(scale: str) -> None:
    """A row of nothing but zeros has scale 0: exporters write that, and nobody may divide by it."""
    with np.errstate(all="raise"):
        result = converted(block("int16", scale))
    assert load(to_bytes(result.model))
    assert result.sites


@pytest.mark.parametrize(
    ("parts", "reason"),
    [({"v": "[1,2,6,0]", "w": "[1,2,4,0]"}, "is empty"), ({"k": "[]"}, ""), ({"k": "[]", "v": "[]"}, "")],
)
def test_keys_and_values_without_elements_or_axes(parts: dict[str, str], reason: str) -> None:
    (match,) = find_blocks(load(block(**parts)).subgraphs[0])
    assert reason in match.reason
    (site,) = converted(block(**parts)).sites
    assert (site.status, site.is_bug) == (Status.SKIPPED, False)


def test_a_product_of_a_tensor_whose_rank_the_file_leaves_out_is_left() -> None:
    model = load(block())
    query = model.subgraphs[0].inputs[0]
    query.shape, query.table = (), new_table("Tensor", has_rank=False)
    (site,) = converted(to_bytes(model)).sites
    assert site.reason.startswith("a dimension is known only at run time, at BATCH_MATMUL")


@pytest.mark.parametrize("operator", range(5))
def test_a_result_whose_rank_the_file_leaves_out_does_no_harm(operator: int) -> None:
    model = load(block(TAIL="ADD(%w, %w)"))
    result = model.subgraphs[0].operators[operator].output
    result.shape, result.table = (), new_table("Tensor", has_rank=False)
    assert not any(site.is_bug for site in converted(to_bytes(model)).sites)


@pytest.mark.parametrize("place", STEPS)
@pytest.mark.parametrize(
    ("length", "step"),
    [(1500, "NEG({0})"), (60, "ADD({0}, {0})"), (60, "MUL({0}, {0})")],
    ids=["a long chain", "2^60 paths of ADD", "2^60 paths of MUL"],
)
def test_long_chains_and_exponential_graphs_take_no_time(place: str, length: int, step: str) -> None:
    value, _ = STEPS[place]
    shape, lines = "[1,2,4,6]" if place in ("LOGITS", "WEIGHTS") else "[1,2,4,8]", []
    for index in range(length):
        lines.append(f"%c{index}: float32{shape} = {step.format(value)}")
        value = f"%c{index}"
    content = block(**{place: "\n".join([*lines, f"NEG({value})"])})
    with fuzz.time_limit(10):
        assert len(list(find_blocks(load(content).subgraphs[0]))) == 1
        converted(content)


def test_attention_that_feeds_attention_a_thousand_times_takes_no_stack() -> None:
    """Each block's heads are the queries of the next, with nothing between that would tell where they are."""
    lines, query = [], "%q"
    for index in range(400):
        lines.append(f"%l{index}: float32[1,2,4,6] = BATCH_MATMUL({query}, %k) {{adj_y: true}}")
        lines.append(f"%p{index}: float32[1,2,4,6] = SOFTMAX(%l{index})")
        lines.append(f"%w{index}: float32[1,2,4,8] = BATCH_MATMUL(%p{index}, %v)")
        query = f"%w{index}"
    inputs = "%q: float32[1,2,4,8], %k: float32[1,2,6,8], %v: float32[1,2,6,8]"
    end = f"%t: float32[1,4,2,8] = TRANSPOSE({query}, int32{{0, 2, 1, 3}})"
    last = "%o: float32[1,4,16] = RESHAPE(%t, int32{1, 4, 16})"
    model = parse("\n".join([f"subgraph main ({inputs}) {{", *lines, end, last, "return %o }"]))
    with fuzz.time_limit(10):
        assert len(run(model, "mha_to_sha")) == 400


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
