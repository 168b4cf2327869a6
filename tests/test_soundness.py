"""A model that was ruined before it came here is told of, by tensor; a healthy one is not."""

from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
from bundles import GENERIC, bundle, model_part
from cli_runs import QUANTIZED, run
from text_parser import parse

from edge_opt import load
from edge_opt.inspection import inspect
from edge_opt.ir import to_bytes
from edge_opt.runtime.errors import RuntimeCrashed
from edge_opt.runtime.runner import Worker
from edge_opt.soundness import Unsound, broken_ranges, sentences

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


def found(**changed: str) -> list[Unsound]:
    """What is said of the attention with other scales."""
    text = ATTENTION
    for name, scale in {**HEALTHY, **changed}.items():
        text = text.replace(f"q({name}, 0)", f"q({scale}, 0)")
    return list(broken_ranges(parse(text)))


def test_healthy_ranges_are_not_accused() -> None:
    assert found() == []
    assert list(broken_ranges(load(QUANTIZED))) == []


def test_a_product_with_a_cache_that_was_never_filled_is_told_of_by_name() -> None:
    (one,) = found(VALUES="3.05e-14")
    assert (one.rule, one.signature, one.tensor) == ("range-too-narrow", "prefill_4", "y")
    assert "what 'kv_cache_v_0' holds has no effect" in one.message
    assert "prompts that go on well beyond one prefill" in one.remedy


@pytest.mark.parametrize("scale", ["1e-8", "0.0000002"])
def test_a_product_that_is_small_and_not_lost_is_healthy(scale: str) -> None:
    """One new token among thousands has a weight like that."""
    assert found(VALUES=scale) == []


def test_a_mask_in_the_range_of_the_logits_makes_attention_uniform() -> None:
    (one,) = found(MASK="30518", MASKED="30518")
    assert (one.rule, one.tensor) == ("mask-in-range", "weights")
    assert "attention is uniform" in one.message


def test_a_mask_of_ten_thousand_leaves_the_logits_some_steps() -> None:
    assert found(MASK="0.305", MASKED="0.31") == []
    assert found(MASK="3", MASKED="3") == [], "the scores end at 6.6"


def test_logits_that_are_all_but_equal_are_uniform_by_themselves() -> None:
    assert found(SCORES="0.00001", MASK="2", MASKED="2") == []


def test_a_product_below_half_a_step_of_its_result_is_always_0() -> None:
    (one,) = found(SCORES="30518", MASKED="30518")
    assert (one.rule, one.tensor) == ("range-too-wide", "scores")


def test_values_in_steps_beyond_the_end_of_what_takes_them_are_cut_off() -> None:
    text = """
signature update = #0 (slice=%s) -> (cache=%c)
subgraph update (%s: int16[4] q(0.0001, 0)) {
  %c: int16[4] q(3e-14, 0) = QUANTIZE(%s)
  return %c
}
"""
    (one,) = broken_ranges(parse(text))
    assert (one.rule, one.tensor) == ("values-cut-off", "c")
    assert list(broken_ranges(parse(text.replace("3e-14", "0.00001")))) == []


POSITIONS = """
subgraph main (%x: int16[128,1] q(SCALE, 0), %one: int16[] q(0.000030518509475997192, 0)) {
  %y: int16[128,1] q(SCALE, 0) = ADD(%x, %one)
  return %y
}
"""


@pytest.mark.parametrize(("ends_at", "aborts"), [(512, True), (512.3, True), (512.6, False), (517, False)])
def test_a_sum_that_broadcasts_in_powers_of_two_ends_the_process(ends_at: float, aborts: bool) -> None:
    """The runtime is asked, too: the rule is of its kernel."""
    content = to_bytes(parse(POSITIONS.replace("SCALE", f"{ends_at / 32767}")))
    rules = [broken.rule for broken in broken_ranges(load(content))]
    assert rules == ["sum-cannot-broadcast"] * aborts
    inputs = {"x": np.ones((128, 1), np.int16), "one": np.int16(32767)}
    with Worker() as worker, pytest.raises(RuntimeCrashed) if aborts else nullcontext():
        assert worker.run(content, None, inputs)["y"].shape == (128, 1)


def test_floats_are_not_looked_at() -> None:
    text = "subgraph f (%x: float32[2,2]) {\n  %y: float32[2,2] = BATCH_MATMUL(%x, %x)\n  return %y\n}"
    assert list(broken_ranges(parse(text))) == []


def ruined(folder: Path) -> Path:
    """A file with a ruined product."""
    path, text = folder / "ruined.tflite", ATTENTION
    for name, scale in {**HEALTHY, "VALUES": "3.05e-14"}.items():
        text = text.replace(f"q({name}, 0)", f"q({scale}, 0)")
    path.write_bytes(to_bytes(parse(text)))
    return path


def test_convert_says_it_and_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = ruined(tmp_path), tmp_path / "out.tflite"
    ran = run(capsys, "convert", path, "-o", out, "--report", tmp_path / "r.md")
    assert (ran.code, out.exists()) == (0, True)
    for text in (ran.out, (tmp_path / "r.md").read_text()):
        assert "Broken in the input: prefill_4: 'y' ends at 1e-09" in text


def test_inspect_says_it_and_so_does_its_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = ruined(tmp_path)
    assert "Not sound:\n  prefill_4: 'y' ends at 1e-09" in run(capsys, "inspect", path).out
    (told,) = run(capsys, "inspect", path, "--json").json["soundness"]
    assert (told["rule"], told["signature"], told["tensor"]) == ("range-too-narrow", "prefill_4", "y")
    assert "Not sound" not in run(capsys, "inspect", QUANTIZED).out


def test_of_a_bundle_every_model_is_looked_at_and_one_that_is_only_copied_may_be_strange(
    tmp_path: Path,
) -> None:
    path = tmp_path / "ruined.litertlm"
    model = ruined(tmp_path).read_bytes()
    parts = [model_part("prefill_decode", QUANTIZED.read_bytes()), model_part("aux", model)]
    path.write_bytes(bundle([*parts, model_part("odd", b"no model"), (GENERIC, {}, b"words")]))
    (told,) = inspect(path).soundness
    assert told.model == "aux"
    assert sentences([told, told])[0].startswith("aux/prefill_4: 'y' ends at")
    assert "(and 1 more like it)" in sentences([told, told])[0]
