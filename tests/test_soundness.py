"""Broken quantization is named, by tensor; a healthy model is not accused."""

from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
from bundles import GENERIC, bundle, model_part
from cli_runs import DEMO, QUANTIZED, Captured, run
from pass_runs import changed

from edge_opt import load
from edge_opt.inspection import inspect
from edge_opt.ir import Buffer, DType, Model, Quantization, Tensor, to_bytes, to_text
from edge_opt.ir.parse import parse
from edge_opt.runtime.protocol import RuntimeCrashed, RuntimeRefused
from edge_opt.runtime.runner import Worker
from edge_opt.schema import Data, new_table
from edge_opt.soundness import broken_ranges, sentences, unequal_caches

ATTENTION = """
signature prefill_4 = #0 (q=%q, k=%k, kv_cache_v_0=%v, mask=%mask) -> (y=%y)
subgraph prefill_4 (
  %q: int16[1,1,4,8] q(0.0001, 0), %k: int16[1,1,6,8] q(0.0001, 0),
  %v: int16[1,1,6,8] q(0.0001, 0), %mask: int16[1,1,4,6] q(MASK, 0)
) {
  %scores: int16[1,1,4,6] q(SCORES, 0) = BATCH_MATMUL(%q, %k) {adj_y: true}
  %masked: int16[1,1,4,6] q(MASKED, 0) = ADD(%scores, %mask)
  %weights: int16[1,1,4,6] q(0.000030517578125, 0) = SOFTMAX(%masked) {beta: 1.0}
  %values: int16[1,1,6,8] q(0.0001, 0) = RESHAPE(%v, int32{1, 1, 6, 8})
  %y: int16[1,1,4,8] q(VALUES, 0) = BATCH_MATMUL(%weights, %values)
  return %y
}
"""
HEALTHY = {"SCORES": "0.0002", "MASKED": "0.0032", "MASK": "0.00305176", "VALUES": "0.00006"}


def attention(**changed: str) -> Model:
    """The attention with other scales."""
    text = ATTENTION
    for name, scale in {**HEALTHY, **changed}.items():
        text = text.replace(f"q({name}, 0)", f"q({scale}, 0)")
    return parse(text)


@pytest.mark.parametrize("scales", [
    {}, {"VALUES": "1e-8"}, {"VALUES": "0.0000002"}, {"MASK": "0.305", "MASKED": "0.31"},
    {"MASK": "1.3", "MASKED": "1.3"}, {"SCORES": "0.00001", "MASK": "2", "MASKED": "2"},
])  # fmt: skip
def test_healthy_ranges_are_not_accused(scales: dict[str, str]) -> None:
    """One new token among thousands has a small weight; equal logits are uniform by themselves."""
    assert list(broken_ranges(attention(**scales))) == []


def test_a_quantized_model_real_numbers_and_integers_without_scales_are_not_accused() -> None:
    graph = "subgraph f (%x: {0}[2,2]) {{ %y: {0}[2,2] = {1}(%x, %x) return %y }}"
    texts = graph.format("float32", "BATCH_MATMUL"), graph.format("int16", "ADD")
    assert [
        found for model in (load(QUANTIZED), *map(parse, texts)) for found in broken_ranges(model)
    ] == []


@pytest.mark.parametrize(("scales", "rule", "tensor", "text"), [
    ({"VALUES": "3.05e-14"}, "range-too-narrow", "y", "'kv_cache_v_0' has no effect"),
    ({"MASK": "30518", "MASKED": "30518"}, "mask-in-range", "weights", "attention is uniform"),
    ({"SCORES": "30518", "MASKED": "30518"}, "range-too-wide", "scores", "it is always 0"),
])  # fmt: skip
def test_broken_ranges_are_named(scales: dict[str, str], rule: str, tensor: str, text: str) -> None:
    (one,) = broken_ranges(attention(**scales))
    assert (one.rule, one.signature, one.tensor) == (rule, "prefill_4", tensor)
    assert text in one.message


def test_a_broken_range_is_told_of_every_signature_of_its_subgraph() -> None:
    text = to_text(attention(VALUES="3.05e-14"))
    line = next(line for line in text.splitlines() if line.startswith("signature prefill_4"))
    model = parse(f"{text}\n{line.replace('prefill_4', 'also')}")
    assert [one.signature for one in broken_ranges(model)] == ["prefill_4", "also"]


@pytest.mark.parametrize(("scale", "rules"), [("3e-14", ["values-cut-off"]), ("0.00001", [])])
def test_values_in_steps_beyond_the_end_of_what_takes_them_are_cut_off(
    scale: str, rules: list[str]
) -> None:
    text = f"subgraph f (%s: int16[4] q(0.0001, 0)) {{ %c: int16[4] q({scale}, 0) = QUANTIZE(%s) return %c }}"
    assert [one.rule for one in broken_ranges(parse(text))] == rules
    fine = text.replace(") {", ", %t: int16[4] q(1e-12, 0)) {").replace(
        "QUANTIZE(%s)", "ADD(%s, %t)"
    )
    assert list(broken_ranges(parse(fine))) == [], "the other operand's steps are small"


@pytest.mark.parametrize(("step", "effect"), [
    ("0.5", ""), ("3.92", "at most 5 of them differ, and attention is coarse"), ("39.2", "attention is uniform"),
])  # fmt: skip
@pytest.mark.parametrize("masked", [
    "ADD(%joined, %mask)", "SELECT_V2(%seen, %joined, %mask)", "SELECT_V2(%seen, %biased, %mask)",
    "MINIMUM(%joined, %mask)",
])  # fmt: skip
def test_logits_that_an_int8_mask_makes_coarse_are_judged_by_what_their_operands_give(
    masked: str, step: str, effect: str
) -> None:
    """Everything between the products and the SELECT may have taken the range of the mask."""
    end = "0.05" if "ADD" in masked else step
    found = list(broken_ranges(parse(int8_logits(step, end, masked))))
    assert [one.rule for one in found] == ["mask-in-range"] * bool(effect)
    assert all(effect in one.message and "a mask of -100" in one.remedy for one in found)


INT8_LOGITS = """
subgraph main (%q: int8[1,4,64] q(0.004, 0), %k: int8[1,6,64] q(0.1, 0), %new: int8[1,2,64] q(0.1, 0),
               %seen: bool[1,4,8], %bias: int8[1,4,8] q(0.01, 0), %mask: int8[1,4,8] q(STEP, 127)) {
  %old: int8[1,4,6] q(END, 127) = BATCH_MATMUL(%q, %k) {adj_y: true}
  %own: int8[1,4,2] q(END, 127) = BATCH_MATMUL(%q, %new) {adj_y: true}
  %joined: int8[1,4,8] q(END, 127) = CONCATENATION(%old, %own) {axis: 2}
  %biased: int8[1,4,8] q(END, 127) = ADD(%joined, %bias)
  %masked: int8[1,4,8] q(STEP, 127) = MASKED
  %weights: int8[1,4,8] q(0.00390625, -128) = SOFTMAX(%masked) {beta: 1.0}
  return %weights
}
"""
"""One worst case of the products is 64 * 0.5 * 12.8 = 416, far more than a step of a mask of -10000."""


def int8_logits(
    step: str = "3.92", end: str = "3.92", masked: str = "SELECT_V2(%seen, %joined, %mask)"
) -> str:
    """The logits before the mask end where steps of `end` do."""
    return INT8_LOGITS.replace("STEP", step).replace("END", end).replace("MASKED", masked)


def test_integers_around_operators_in_float_are_judged_too() -> None:
    """As a recipe leaves them that keeps products and SOFTMAX in float."""
    in_float = """%qf: float32[1,4,64] = DEQUANTIZE(%q)
  %kf: float32[1,6,64] = DEQUANTIZE(%k)
  %oldf: float32[1,4,6] = BATCH_MATMUL(%qf, %kf) {adj_y: true}
  %old: int8[1,4,6] q(3.92, 127) = QUANTIZE(%oldf)"""
    text = changed(
        int8_logits(),
        "SOFTMAX(%masked) -> SOFTMAX(%real)",
        "  %weights: int8[1,4,8] q(0.00390625, -128) -> "
        "  %real: float32[1,4,8] = DEQUANTIZE(%masked)\n  %weights: float32[1,4,8]",
        f"%old: int8[1,4,6] q(3.92, 127) = BATCH_MATMUL(%q, %k) {{adj_y: true}} -> {in_float}",
    )
    assert [one.rule for one in broken_ranges(parse(text))] == ["mask-in-range"]


def test_a_scale_behind_the_product_counts() -> None:
    large = changed(int8_logits(), "0.004 -> 0.4")
    assert list(broken_ranges(parse(large))) == [], "logits up to 870"
    scaled = "  %scaled: int8[1,4,8] q(3.92, 127) = MUL(%joined, int8(100) q(0.0001, 0))\n  %masked"
    text = large.replace("  %masked", scaled, 1).replace("%joined, %mask)", "%scaled, %mask)")
    assert [one.rule for one in broken_ranges(parse(text))] == ["mask-in-range"]


DEAD = """
signature main = #0 (x=%x, kv_cache_k_0=%k) -> (y=%y)
subgraph main (%x: int16[1,4] q(0.001, 0), %k: int16[1,8,4] q(3.0518e-14, 0)) {
  %y: int16[1,8] q(0.0006, 0) = PRODUCT
  return %y
}
"""


@pytest.mark.parametrize(("product", "remedies"), [
    ("BATCH_MATMUL(%x, %k) {adj_y: true}", ["for a cache, on prompts much longer than one prefill"]),
    ("FULLY_CONNECTED(%x, int8[8,4]{splat 0} q(7.874e-12, 0), none)", []),
    ("FULLY_CONNECTED(%x, int8[8,4]{splat 5} q(1e-9, 0), none)", ["no product of these operands fills the range"]),
])  # fmt: skip
def test_the_remedy_for_a_dead_tensor_is_that_of_its_role(
    product: str, remedies: list[str]
) -> None:
    """A cache that calibration never filled, weights of 0, and a range from elsewhere; no mask is near."""
    found = list(broken_ranges(parse(DEAD.replace("PRODUCT", product))))
    assert len(found) == len(remedies)
    assert all(remedy in one.remedy for remedy, one in zip(remedies, found, strict=True))
    assert not any("mask" in one.remedy for one in found)


UNUSABLE = """
subgraph main (%x: int8[1,4] q(0.1, 0)) {
  %y: int8[1,2] q(0.2, 0) = FULLY_CONNECTED(%x, int8[2,4]{splat 3} q([0.1, 0.2], [0, 0], axis 0), none)
  return %y
}
"""


@pytest.mark.parametrize("scale", [0.0, 1e-39])
@pytest.mark.parametrize("place", ["x", "weights", "y"])
def test_a_scale_of_0_is_named_in_any_tensor(place: str, scale: float) -> None:
    """XNNPACK is asked, too."""
    model = parse(UNUSABLE)
    (operator,) = model.subgraphs[0].operators
    tensor = {"x": operator.input(0), "weights": operator.input(1), "y": operator.output}[place]
    assert list(broken_ranges(model)) == []
    old = tensor.quantization
    assert old is not None
    table = old.table.copy()
    table.set("scale", np.array([scale, *old.scale[1:]], np.float32))
    tensor.quantization = Quantization(table)
    (one,) = [found for found in broken_ranges(model) if found.rule == "unusable-scale"]
    assert one.tensor == tensor.name
    assert ("rows or blocks of zeros" in one.remedy) == (place == "weights")
    with Worker() as worker, pytest.raises((RuntimeRefused, RuntimeCrashed)):
        worker.run(to_bytes(model), None, {"x": np.ones((1, 4), np.int8)})


def test_a_block_of_zeros_has_a_scale_of_0() -> None:
    """As ai-edge-quantizer leaves it: its smallest scale is 0 in float16."""
    model = parse(UNUSABLE.replace(" q([0.1, 0.2], [0, 0], axis 0)", ""))
    graph = model.subgraphs[0]
    for first, found in (
        (6e-8, []),
        (0, ["has a scale of 0 (1 of 2 are not normal numbers above 0)"]),
    ):
        content = np.array([[first], [1]], np.float16)
        scales = Tensor("scales", (2, 1), DType.FLOAT16, buffer=Buffer(Data(content.tobytes())))
        graph.add_tensor(scales)
        blocks = new_table(
            "BlockwiseQuantization", scales=graph.tensors.index(scales), block_size=4
        )
        table = new_table("QuantizationParameters", details=blocks)
        graph.operators[0].input(1).quantization = Quantization(table)
        assert [one.message.split(":")[0] for one in broken_ranges(model)] == found


POSITIONS = """
subgraph main (%x: int16[128,1] q(SCALE, 0), %one: int16[] q(0.000030518509475997192, 0)) {
  %y: int16[128,1] q(SCALE, 0) = ADD(%x, %one)
  return %y
}
"""


@pytest.mark.parametrize(
    ("ends_at", "aborts"), [(512, True), (512.3, True), (512.6, False), (517, False)]
)
def test_a_sum_that_broadcasts_in_powers_of_two_ends_the_process(
    ends_at: float, aborts: bool
) -> None:
    """The runtime is asked, too: the rule is of its kernel."""
    content = to_bytes(parse(POSITIONS.replace("SCALE", f"{ends_at / 32767}")))
    rules = [broken.rule for broken in broken_ranges(load(content))]
    assert rules == ["sum-cannot-broadcast"] * aborts
    inputs = {"x": np.ones((128, 1), np.int16), "one": np.int16(32767)}
    with Worker() as worker, pytest.raises(RuntimeCrashed) if aborts else nullcontext():
        assert worker.run(content, None, inputs)["y"].shape == (128, 1)


SPLIT = """
signature prefill_2 = #0 (x=%x, kv_cache_k_0=%k) -> (kv_slice_k_0=%new, y=%y)
signature decode = #1 (x=%x, kv_cache_k_0=%k) -> (kv_slice_k_0=%new, y=%y)
subgraph prefill_2 (%x: TYPE[1,2,4] WRITTEN, %k: TYPE[1,4,8] READ) {
  %new: TYPE[1,4,2] WRITTEN = TRANSPOSE(%x, int32{0, 2, 1})
  %y: TYPE[1,2,8] q(0.5, 0) = BATCH_MATMUL(%x, %k)
  return %new, %y
}
subgraph decode (%x: TYPE[1,1,4] WRITTEN, %k: TYPE[1,4,8] LATER) {
  %new: TYPE[1,4,1] WRITTEN = TRANSPOSE(%x, int32{0, 2, 1})
  %y: TYPE[1,1,8] q(0.5, 0) = BATCH_MATMUL(%x, %k)
  return %new, %y
}
"""
WHOLE = """
signature prefill_2 = #0 (x=%x, kv_cache_k_0=%k) -> (kv_cache_k_0=%new, y=%y)
signature decode = #1 (x=%x, kv_cache_k_0=%k) -> (kv_cache_k_0=%new, y=%y)
subgraph prefill_2 (%x: TYPE[1,2,4] WRITTEN, %k: TYPE[1,8,4] READ) {
  %new: TYPE[1,8,4] WRITTEN = DYNAMIC_UPDATE_SLICE(%k, %x, int32{0, 0, 0})
  %y: TYPE[1,2,8] q(0.5, 0) = BATCH_MATMUL(%x, %new) {adj_y: true}
  return %new, %y
}
subgraph decode (%x: TYPE[1,1,4] WRITTEN, %k: TYPE[1,8,4] LATER) {
  %new: TYPE[1,8,4] WRITTEN = DYNAMIC_UPDATE_SLICE(%k, %x, int32{0, 0, 0})
  %y: TYPE[1,1,8] q(0.5, 0) = BATCH_MATMUL(%x, %new) {adj_y: true}
  return %new, %y
}
"""


def cached(text: str, dtype: str, written: str = "", read: str = "", later: str = "") -> Model:
    """A cache in two signatures, with the parameters of what is written, and of what each of them reads."""
    for name, parameters in (("WRITTEN", written), ("READ", read), ("LATER", later)):
        text = text.replace(name, parameters or written)
    return parse(
        text.replace("TYPE", dtype)
        if written
        else text.replace("TYPE", dtype).replace(" q(0.5, 0)", "")
    )


@pytest.mark.parametrize("text", [SPLIT, WHOLE], ids=["split", "whole"])
@pytest.mark.parametrize(("dtype", "same", "other"), [
    ("int16", "q(0.00009481061, 0)", "q(0.000021937749, 0)"), ("int8", "q(0.05, 3)", "q(0.0507, 3)"),
    ("int8", "q(0.05, 3)", "q(0.05, 4)"),
])  # fmt: skip
def test_a_cache_that_is_written_with_one_scale_and_read_with_another_is_named(
    text: str, dtype: str, same: str, other: str
) -> None:
    for places in ({"read": other}, {"later": other}):
        found = list(unequal_caches([("", cached(text, dtype, same, **places))]))
        assert [one.signature for one in found] == ["prefill_2" if "read" in places else "decode"]
        assert "'prefill_2' writes" in found[0].message
    assert list(unequal_caches([("", cached(text, dtype, same))])) == []
    assert list(unequal_caches([("", cached(text, "float32"))])) == []


def test_scales_that_differ_by_rounding_are_equal_and_the_factor_is_told() -> None:
    rounded = cached(SPLIT, "int16", "q(0.00009481061, 0)", "q(0.00009481063, 0)")
    assert list(unequal_caches([("", rounded)])) == []
    (one,) = unequal_caches(
        [("", cached(SPLIT, "int16", "q(0.00009481061, 0)", "q(0.000021937749, 0)"))]
    )
    assert "2.19e-05" in one.message
    assert "9.48e-05 (a factor of 4.32)" in one.message


@pytest.mark.parametrize(
    ("cache", "part"), [("k_cache_0", "k_slice_0"), ("cache_k_0", "slice_k_0")]
)
def test_a_new_part_is_that_of_the_cache_of_its_name(cache: str, part: str) -> None:
    text = SPLIT.replace("kv_cache_k_0", cache).replace("kv_slice_k_0", part)
    found = list(unequal_caches([("", cached(text, "int16", "q(0.0001, 0)", "q(0.0003, 0)"))]))
    assert [(one.signature, "'prefill_2' writes" in one.message) for one in found] == [
        ("prefill_2", True)
    ]


UPDATE = """
signature cache_update = #0 (kv_cache_k_0=%k, kv_slice_k_0=%x) -> (kv_cache_k_0=%new)
subgraph cache_update (%k: int16[1,8,4] SCALE, %x: int16[1,1,4] SCALE) {
  %new: int16[1,8,4] SCALE = DYNAMIC_UPDATE_SLICE(%k, %x, int32{0, 0, 0})
  return %new
}
"""


@pytest.mark.parametrize("kind", ["aux", "drafter"])
def test_the_auxiliary_model_shares_the_caches_of_its_bundle(
    tmp_path: Path, kind: str, capsys: Captured
) -> None:
    path, main = tmp_path / "m.litertlm", to_bytes(cached(SPLIT, "int16", "q(0.0001, 0)"))
    for scale, signatures in (("q(0.0001, 0)", set[str]()), ("q(0.0003, 0)", {"cache_update"})):
        update = to_bytes(parse(UPDATE.replace("SCALE", scale)))
        path.write_bytes(bundle([model_part("prefill_decode", main), model_part(kind, update)]))
        found = inspect(path).soundness
        assert {one.signature for one in found} == (signatures if kind == "aux" else set())
    told = run(capsys, "convert", path, "-o", tmp_path / "out.litertlm").out
    assert ("aux/cache_update: 'k' is a cache that 'aux/cache_update' reads as INT16" in told) == (
        kind == "aux"
    )


def test_caches_that_are_not_read_mean_no_numbers() -> None:
    unread = SPLIT.replace(
        "BATCH_MATMUL(%x, %k)", "BATCH_MATMUL(%x, TYPE[1,4,8]{splat 1} q(0.1, 0))", 1
    )
    assert (
        list(unequal_caches([("", cached(unread, "int16", "q(0.0001, 0)", "q(0.0003, 0)"))])) == []
    )


@pytest.mark.parametrize(
    ("code", "rules"),
    [(2**31 - 1, ["clipped-bias"]), (-(2**31), ["clipped-bias"]), (2**31 - 2, [])],
)
def test_a_bias_at_an_end_of_32_bits_is_named(code: int, rules: list[str]) -> None:
    text = f"""
    subgraph main (%x: int8[1,2,2,1] q(0.01, 0)) {{
      %y: int8[1,2,2,2] q(0.1, 0) = CONV_2D(
        %x, int8[2,1,1,1]{{3, -4}} q([0.01, 0.01], [0, 0], axis 0),
        int32{{5, {code}}} q([0.0001, 0.0001], [0, 0], axis 0)
      ) {{stride_w: 1, stride_h: 1}}
      return %y
    }}"""
    assert [one.rule for one in broken_ranges(parse(text))] == rules


def test_convert_and_inspect_warn_of_every_model(tmp_path: Path, capsys: Captured) -> None:
    """In a bundle every model is looked at, and one that is only copied may be of any kind."""
    path = tmp_path / "broken.tflite"
    path.write_bytes(to_bytes(attention(VALUES="3.05e-14")))
    ran = run(capsys, "convert", path, "-o", tmp_path / "out.tflite", "--report", tmp_path / "r.md")
    shown = run(capsys, "inspect", path)
    assert (ran.code, shown.code) == (0, 0)
    for words in (ran.out, (tmp_path / "r.md").read_text(), shown.out):
        assert "prefill_4: 'y' ends at 1e-09" in words
    (told,) = run(capsys, "inspect", path, "--json").json["soundness"]
    assert (told["rule"], told["signature"], told["tensor"]) == (
        "range-too-narrow",
        "prefill_4",
        "y",
    )
    several = tmp_path / "broken.litertlm"
    parts = [model_part("prefill_decode", DEMO.read_bytes()), model_part("aux", path.read_bytes())]
    several.write_bytes(bundle([*parts, model_part("odd", b"no model"), (GENERIC, {}, b"words")]))
    (one,) = inspect(several).soundness
    assert one.model == "aux"
    (sentence,) = sentences([one, one])
    assert sentence.startswith("aux/prefill_4: 'y' ends at")
    assert "(and 1 more like it)" in sentence
