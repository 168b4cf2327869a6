"""A region on some of its rows gives what the whole region gives in those rows, and it misses no head and no tile."""

import re
from typing import Any

import numpy as np
import pytest
from fault_graphs import PARAMETERS, Size, attention
from numpy.typing import NDArray
from pass_runs import refusal, rewrites_of
from text_parser import parse

from edge_opt.ir import Model, to_bytes
from edge_opt.ir.walk import cut_out
from edge_opt.passes.rewrite import Rewrite
from edge_opt.proof.rows import Rows, multiply_adds, sample
from edge_opt.proof.structure import Structure, structure
from edge_opt.runtime import noise
from edge_opt.runtime.pair import take
from edge_opt.runtime.runner import Worker
from edge_opt.shapes import check_operators
from edge_opt.targets import Target, load_target

SIZE = Size(queries=64, heads=4, kv_heads=2, cache=96, width=16)
TILES = Target("tiles", "", rows_per_tile=16)
TARGETS = {"whole": load_target("generic"), "tiled": TILES}
KERNELS = ("xnnpack", "reference")


def versions(dtype: str, how: str) -> tuple[Model, Model]:
    rewrite = rewrites_of("mha_to_sha", parse(attention(dtype, SIZE)), TARGETS[how])[0]
    return both(rewrite)


def both(rewrite: Rewrite) -> tuple[Model, Model]:
    """The two versions of a region as models."""
    called, inputs, outputs = rewrite.model, rewrite.inputs(), rewrite.outputs()
    return cut_out(called, rewrite.old, inputs, outputs), cut_out(called, rewrite.new, inputs, outputs)


def numbers(model: Model) -> list[NDArray[Any]]:
    """Random inputs that quantized logits can tell apart."""
    made = []
    for place, tensor in enumerate(model.subgraphs[0].inputs):
        values = noise.normal_of(noise.sums(place, tensor.elements)).reshape(tensor.shape)
        assert tensor.dtype.numpy is not None
        if tensor.quantization is not None:
            values = np.clip(values * np.iinfo(tensor.dtype.numpy).max / 4, -127 * 256, 127 * 256)
        made.append(values.astype(tensor.dtype.numpy))
    return made


def results(worker: Worker, model: Model, inputs: list[NDArray[Any]], kernels: Any) -> list[NDArray[Any]]:
    source = to_bytes(model)
    (described,) = worker.describe(source)
    named = {info.name: array for info, array in zip(described.inputs, inputs, strict=True)}
    found = worker.run(source, None, named, kernels)
    return [found[info.name] for info in described.outputs]


def check(worker: Worker, whole: Model, part: Model, boxes: Any, rows: list[int], axis: int) -> None:
    if len(part.subgraphs) == 1:  # what a composite gives is derived from its body only in a whole model
        assert refusal(check_operators, part.subgraphs[0].operators) is None
    inputs = numbers(whole)
    for kernels in KERNELS:
        (expected,) = results(worker, whole, inputs, kernels)
        own = [take(array, box) for array, box in zip(inputs, boxes, strict=True)]
        (found,) = results(worker, part, own, kernels)
        assert np.array_equal(found, expected.take(rows, axis))
        assert len(np.unique(found)) >= 8


def check_both(worker: Worker, before: Model, after: Model, found: Rows) -> None:
    for whole, part, boxes in zip((before, after), (found.before, found.after), found.cut.boxes, strict=True):
        check(worker, whole, part, boxes, list(found.rows), axis=1)


def sampled(before: Model, after: Model, seed: int = 0) -> Rows:
    found = sample(before, after, seed)
    assert found is not None
    return found


@pytest.mark.parametrize("how", TARGETS)
@pytest.mark.parametrize("dtype", PARAMETERS)
def test_both_versions_of_attention_give_the_rows_of_the_whole(dtype: str, how: str, worker: Worker) -> None:
    before, after = versions(dtype, how)
    files = to_bytes(before), to_bytes(after)
    found = sampled(before, after)
    assert (to_bytes(before), to_bytes(after)) == files
    check_both(worker, before, after, found)
    assert multiply_adds(found.before) < multiply_adds(before) / 2
    assert multiply_adds(found.after) < multiply_adds(after) / 2


def test_rows_are_the_ends_both_sides_of_every_cut_and_others() -> None:
    found = sampled(*versions("int16", "tiled"))
    assert {0, 15, 16, 31, 32, 47, 48, 63} < set(found.rows)
    assert found.length == 64
    another = sampled(*versions("int16", "tiled"), seed=1)
    assert set(another.rows) != set(found.rows)


def test_every_operator_takes_part() -> None:
    before, after = versions("int16", "tiled")
    found = sampled(before, after)
    kinds = [
        [operator.name for operator in model.subgraphs[0].operators if operator.name != "GATHER"]
        for model in (before, found.before, after, found.after)
    ]
    assert kinds[0] == kinds[1]
    assert kinds[2] == kinds[3]


NORMED = """
subgraph main (%q: float32[1,64,16], %k: float32[1,1,24,8], %v: float32[1,1,24,8]) {
  %f: float32[1,64,2,8] = RESHAPE(%q, int32{1, 64, 2, 8}) {new_shape: [1, 64, 2, 8]}
  %t: float32[1,2,64,8] = TRANSPOSE(%f, int32{0, 2, 1, 3})
  %n: float32[1,2,64,8] = STABLEHLO_COMPOSITE(%t, float32[8]{splat 2.0}) {name: 'norm', BODY: 1}
  %r: float32[1,1,128,8] = RESHAPE(%n, int32{1, 1, 128, 8}) {new_shape: [1, 1, 128, 8]}
  %l: float32[1,1,128,24] = BATCH_MATMUL(%r, %k) {adj_y: true}
  %p: float32[1,1,128,24] = SOFTMAX(%l) {beta: 1.0}
  %h: float32[1,1,128,8] = BATCH_MATMUL(%p, %v)
  %b: float32[1,2,64,8] = RESHAPE(%h, int32{1, 2, 64, 8}) {new_shape: [1, 2, 64, 8]}
  %s: float32[1,64,2,8] = TRANSPOSE(%b, int32{0, 2, 1, 3})
  %out: float32[1,64,16] = RESHAPE(%s, int32{1, 64, 16}) {new_shape: [1, 64, 16]}
  return %out
}
subgraph norm (%x: float32[1,2,64,8], %w: float32[8]) {
  %sq: float32[1,2,64,8] = MUL(%x, %x)
  %m: float32[1,2,64,1] = SUM(%sq, int32{3}) {keep_dims: true}
  %i: float32[1,2,64,1] = RSQRT(%m)
  %u: float32[1,2,64,8] = MUL(%x, %i)
  %y: float32[1,2,64,8] = MUL(%u, %w)
  return %y
}
""".replace("BODY", "composite_attributes: [0], decomposition_subgraph_index")


def test_composites_in_a_region_have_bodies_on_the_same_rows(worker: Worker) -> None:
    """The norm of the queries is done for both heads in the old version, for each by itself in the new one."""
    (rewrite,) = rewrites_of("mha_to_sha", parse(NORMED), Target("above", "", form="split-above"))
    before, after = both(rewrite)
    found = sampled(before, after)
    shapes = [graph.inputs[0].shape for model in (found.before, found.after) for graph in model.subgraphs[1:]]
    assert shapes == [(1, 2, len(found.rows), 8), *[(1, 1, len(found.rows), 8)] * 2]
    check_both(worker, before, after, found)


def test_cuts_of_rows_in_the_body_of_a_composite_count() -> None:
    body = NORMED.index("  %sq")
    text = (
        NORMED[:body].replace(", float32[8]{splat 2.0})", ")").replace(", %w: float32[8])", ")")
        + """
  %first: float32[1,2,27,8] = SLICE(%x, int32{0, 0, 0, 0}, int32{1, 2, 27, 8})
  %rest: float32[1,2,37,8] = SLICE(%x, int32{0, 0, 27, 0}, int32{1, 2, 37, 8})
  %y: float32[1,2,64,8] = CONCATENATION(%first, %rest) {axis: 2}
  return %y
}"""
    )
    (rewrite,) = rewrites_of("mha_to_sha", parse(text), Target("above", "", form="split-above"))
    found = sampled(*both(rewrite))
    assert {26, 27} < set(found.rows)


INPUTS = {
    name: f"%{name}: {shape}"
    for name, shape in {
        "x": "float32[1,80,10]", "y": "float32[1,128,10]", "row": "float32[1,1,8]", "turned": "float32[1,8,64]",
        "heads": "float32[1,64,2,4]", "some": "bool[1,64,1]", "a": "float32[1,64,8]", "b": "float32[1,64,8]",
        "w": "float32[8,8]", "c": "float32[1,8,8]", "first": "float32[1,10,8]", "second": "float32[1,54,8]",
        "vector": "float32[8]", "half": "float32[1,64,4]", "s": "float32[1,64]", "r": "float32[1,64]",
        "alone": "float32[1,1,64,8]", "matrix": "float32[64,8]", "deep": "float32[1,64,8,3]",
        "several": "float32[5,64,8]", "wide": "float32[1,64,16]", "long": "float32[1,128,8]", "tall": "float32[1,80,8]",
        "eleven": "float32[1,64,11]", "single": "float32[1,1]", "m": "float32[1,8]", "n": "float32[1,8]",
    }.items()
}  # fmt: skip
# One operator each, of whose 64 rows some are asked for.
CASES = {
    "slice": "SLICE(%x, int32{0, 7, 1}, int32{1, 64, 8})",
    "strided slice": "STRIDED_SLICE(%x, int32{0, 2, 1}, int32{1, 66, 9}, int32{1, 1, 1})",
    "every second row": "STRIDED_SLICE(%y, int32{0, 1, 1}, int32{1, 128, 9}, int32{1, 2, 1})",
    "broadcast": "BROADCAST_TO(%row, int32{1, 64, 8})",
    "transposed": "TRANSPOSE(%turned, int32{0, 2, 1})",
    "regrouped": "RESHAPE(%heads, int32{1, 64, 8}) {new_shape: [1, 64, 8]}",
    "regrouped by its options": "RESHAPE(%heads) {new_shape: [1, 64, 8]}",
    "selected": "SELECT_V2(%some, %a, %b)",
    "fully connected": "FULLY_CONNECTED(%a, %w, none) {keep_num_dims: true}",
    "softmax": "SOFTMAX(%a) {beta: 1.0}",
    "joined": "CONCATENATION(%first, %second) {axis: 1}",
    "product": "BATCH_MATMUL(%a, %c)",
    "product of a turned operand": "BATCH_MATMUL(%turned, %c) {adj_x: true}",
    "product of broadcast matrices": "BATCH_MATMUL(%a, %w)",
    "of two ranks": "MUL(%a, %vector)",
    "log softmax": "LOG_SOFTMAX(%a)",
    "joined along another axis": "CONCATENATION(%half, %half) {axis: -1}",
    "packed": "PACK(%s, %r, %s, %r, %s, %r, %s, %r) {values_count: 8, axis: -1}",
    "unpacked": "UNPACK(%alone) {num: 1, axis: 0}",
    "squeezed": "SQUEEZE(%alone) {squeeze_dims: [0]}",
    "expanded": "EXPAND_DIMS(%matrix, int32(0))",
    "summed": "SUM(%deep, int32{-1})",
    "summed over the batch": "MEAN(%several, int32{0}) {keep_dims: true}",
    "a part": "%out: float32[1,64,8], %rest: float32[1,64,8] = SPLIT(int32(2), %wide) {num_splits: 2}",
    "a part of the rows": "%rest: float32[1,64,8], %out: float32[1,64,8] = SPLIT(int32(-2), %long) {num_splits: 2}",
    "a part of some length": "%rest: float32[1,16,8], %out: float32[1,64,8] = "
    "SPLIT_V(%tall, int32{16, 64}, int32(1)) {num_splits: 2}",
    "a part of some width": "%rest: float32[1,64,3], %out: float32[1,64,8] = "
    "SPLIT_V(%eleven, int32{3, 8}, int32(-1)) {num_splits: 2}",
    "softmax over the rows": "%p: float32[1,8,64] = SOFTMAX(%turned) {beta: 1.0} "
    "%out: float32[1,64,8] = BATCH_MATMUL(%p, %c) {adj_x: true}",
    "packed rows": f"%p: float32[1,64,8] = PACK({', '.join(['%m, %n'] * 32)}) {{values_count: 64, axis: 1}} "
    "%out: float32[1,64,8] = BATCH_MATMUL(%p, %c)",
    "by a number without its axes": "%z: float32[] = SQUEEZE(%single) %out: float32[1,64,8] = MUL(%a, %z)",
    "a slice with an open begin": "STRIDED_SLICE(%x, int32{0, 5, 1}, int32{1, 64, 9}, int32{1, 1, 1}) {begin_mask: 2}",
    "a slice with an open end": "STRIDED_SLICE(%x, int32{0, 16, 1}, int32{1, 17, 9}, int32{1, 1, 1}) {end_mask: 2}",
}


@pytest.mark.parametrize("case", CASES)
def test_each_operator_gives_the_rows_of_the_whole(case: str, worker: Worker) -> None:
    given = [shape for name, shape in INPUTS.items() if f"%{name}" in re.findall(r"%\w+", CASES[case])]
    text = f"""
subgraph main ({", ".join(given)}) {{
  {CASES[case] if "%out" in CASES[case] else "%out: float32[1,64,8] = " + CASES[case]}
  return %out
}}
"""
    model = parse(text)
    for operator in model.subgraphs[0].operators:
        operator.code.version = 2 if operator.name == "BROADCAST_TO" else 1  # it has no version 1
    found = sampled(model, model)
    check(worker, model, found.before, found.cut.boxes[0], list(found.rows), axis=1)


SCALES = f"[{', '.join(['0.5'] * 64)}], [{', '.join(['0'] * 64)}]"


@pytest.mark.parametrize(
    "line",
    [
        "float32[1,64,8] = CUMSUM(%a, int32(1))",
        "float32[1,64,8] = GATHER(%a, %some) {axis: 1}",
        "float32[1,64,8] = RESHAPE(%odd, int32{1, 64, 8}) {new_shape: [1, 64, 8]}",
        "float32[1,64,8] = SLICE(%a, %begin, int32{1, 64, 8})",
        "float32[1,64,8] = STRIDED_SLICE(%a, int32{0, 63, 0}, int32{1, -65, 8}, int32{1, -1, 1})",
        "float32[64,8] = STRIDED_SLICE(%a, int32{0, 0, 0}, int32{1, 64, 8}, int32{1, 1, 1}) {shrink_axis_mask: 1}",
        "float32[64,8] = SELECT(%rows, %matrix, %matrix)",
        "float32[64,8] = FULLY_CONNECTED(%a, %w, none)",
        "float32[64,8] = DEQUANTIZE(%codes)",
    ],
)
def test_what_mixes_rows_is_not_cut(line: str) -> None:
    text = f"""
subgraph main (%a: float32[1,64,8], %some: int32[64], %odd: float32[1,32,16], %begin: int32[3], %rows: bool[64],
               %matrix: float32[64,8], %w: float32[8,8], %codes: int8[64,8] q({SCALES}, axis 0)) {{
  %out: {line}
  return %out
}}
"""
    model = parse(text)
    assert sample(model, model, seed=0) is None


def reduced(text: str) -> Rows:
    model = parse(text)
    return sampled(model, model)


@pytest.mark.parametrize(
    ("length", "lines", "cuts"),
    [
        (27, "%out: float32[1,80,8] = CONCATENATION(%x, %y) {axis: 1}", [26, 27, 79]),
        (80, "%out: float32[1,64,8] = SLICE(%x, int32{0, 7, 0}, int32{1, 64, 8})", [6, 7, 63]),
        (80, "%out: float32[1,64,8] = STRIDED_SLICE(%x, int32{0, 9, 0}, int32{1, 73, 8}, int32{1, 1, 1})", [8, 9, 63]),
        (100, "%p: float32[1,30,8], %out: float32[1,70,8] = SPLIT_V(%x, int32{30, 70}, int32(1)) {num_splits: 2}",
         [29, 30, 69]),
        (120, ("%p: float32[1,40,8], %q: float32[1,40,8], %r: float32[1,40,8] = SPLIT(int32(1), %x) {num_splits: 3}"
         " %s: float32[1,40,8] = ADD(%p, %q) %t: float32[1,40,8] = ADD(%s, %r)"
         " %out: float32[1,36,8] = SLICE(%t, int32{0, 4, 0}, int32{1, 36, 8})"), [3, 4, 7, 8, 11, 12, 35]),
    ],
)  # fmt: skip
def test_both_sides_of_a_cut_are_among_the_rows_whatever_their_number(
    length: int, lines: str, cuts: list[int]
) -> None:
    model = parse(f"subgraph main (%x: float32[1,{length},8], %y: float32[1,53,8]) {{ {lines} return %out }}")
    always = set.intersection(*(set(sampled(model, model, seed).rows) for seed in range(6)))
    assert sorted(always) == [0, *cuts]


def test_rows_lie_along_the_axis_that_saves_most() -> None:
    """The longer axis is joined of sixteen parts, and both sides of every cut would be among its rows."""
    parts = ", ".join(f"%x{place}" for place in range(16))
    found = reduced(f"""
subgraph main ({parts.replace(",", ": float32[1,64,8],")}: float32[1,64,8]) {{
  %out: float32[1,64,128] = CONCATENATION({parts}) {{axis: 2}}
  return %out
}}
""")
    assert found.length == 64


def test_one_who_needs_less_of_a_tensor_than_another_gets_a_part_of_it(worker: Worker) -> None:
    text = """
subgraph main (%x: float32[1,64,8]) {
  %t: float32[1,8,64] = TRANSPOSE(%x, int32{0, 2, 1})
  %p: float32[1,64,64] = BATCH_MATMUL(%x, %t)
  %s: float32[1,64,64] = SOFTMAX(%p) {beta: 1.0}
  %out: float32[1,64,8] = BATCH_MATMUL(%s, %x)
  return %out
}
"""
    found = reduced(text)
    assert [operator.name for operator in found.before.subgraphs[0].operators].count("GATHER") == 1
    check(worker, parse(text), found.before, found.cut.boxes[0], list(found.rows), axis=1)


# Structure


def rewritten(text: str) -> list[Structure]:
    found = []
    for rewrite in rewrites_of("mha_to_sha", parse(text)):
        inputs, outputs = rewrite.inputs(), rewrite.outputs()
        models = (cut_out(Model(), part, inputs, outputs) for part in (rewrite.old, rewrite.new))
        found.append(structure(*models))
    return found


@pytest.mark.parametrize("dtype", PARAMETERS)
def test_layers_that_differ_in_numbers_only_have_one_structure(dtype: str) -> None:
    text = attention(dtype, SIZE)
    if dtype == "int16":
        text = text.replace("q(0.00012, 0) = BATCH_MATMUL(%p_old2", "q(0.00017, 0) = BATCH_MATMUL(%p_old2")
        assert "0.00017" in text
    first, second = rewritten(text)
    assert first != second
    assert first.covers(second)
    assert second.covers(first)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("adj_y: true", "adj_y: false"),
        ("q(0.00013, 0) = BATCH_MATMUL(%p_new2", "q(0.00012, 0) = BATCH_MATMUL(%p_new2"),
        ("beta: 1.0", "beta: 2.0"),
    ],
)
def test_an_option_or_which_numbers_are_equal_is_structure(old: str, new: str) -> None:
    square = Size(queries=32, heads=4, kv_heads=2, cache=32, width=32)
    lines = attention("int16", square).splitlines()
    changed = [line.replace(old, new) if "2: " in line.partition("=")[0] else line for line in lines]
    assert changed != lines
    first, second = rewritten("\n".join(changed))
    assert not second.covers(first)
