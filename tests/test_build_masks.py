"""Masks of attention get a larger scale where scores are farther apart than what they subtract."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ai_edge_litert.interpreter import Interpreter, OpResolverType
from bundles import bundle, model_part

from edge_opt.building import pipeline, run
from edge_opt.building.masks import widen_masks
from edge_opt.building.stages import Job
from edge_opt.ir import Model, to_bytes
from edge_opt.ir.opening import Opened
from edge_opt.ir.parse import parse
from edge_opt.soundness import broken_ranges

MASK_STEP = 100 / 32767
QUERY_STEP = 0.01
SLOTS = 3
"""Two keys with large negative scores, and an empty slot of the cache, whose score is 0."""


JOINED = f"%j: int16[1,1,{2 * SLOTS}] q({500 / 32767}, 0) = CONCATENATION(%a, %a) {{axis: 2}}"


def decoder(
    score_end: float,
    logits_end: float | None = None,
    also: str = "",
    name: str = "mask_global",
    softmax: str = "SOFTMAX",
    returns: str = "%p",
    mask: str = f"[1,1,{SLOTS}] q({MASK_STEP}, 0)",
) -> Model:
    """Queries `[1,2]`, keys `[3,2]` and a mask `[1,3]` to probabilities."""
    options = "{beta: 1}" if softmax == "SOFTMAX" else ""
    score_step = score_end / 32767
    logits_step = (logits_end or max(score_end, 100 + score_end)) / 32767
    return parse(f"""
    signature decode = #0 (q=%q, k=%k, {name}=%m) -> (p=%p)
    subgraph decode (
      %q: int16[1,1,2] q({QUERY_STEP}, 0), %k: int16[1,{SLOTS},2] q({QUERY_STEP}, 0),
      %m: int16{mask}
    ) {{
      %s: int16[1,1,{SLOTS}] q({score_step}, 0) = BATCH_MATMUL(%q, %k) {{adj_y: true}}
      %r: int16[1,1,{SLOTS}] q({MASK_STEP}, 0) = RESHAPE(%m, int32{{1, 1, {SLOTS}}})
      %a: int16[1,1,{SLOTS}] q({logits_step}, 0) = ADD(%s, %r)
      %p: int16[1,1,{SLOTS}] q(0.000030517578125, 0) = {softmax}(%a) {options}
      {also}
      return {returns}
    }}""")


def probabilities(model: Model) -> Any:
    """Of two keys with scores of -300 and -301 and of a masked empty slot, with a mask in LiteRT-LM's codes."""
    plain = OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES
    runner = Interpreter(model_content=to_bytes(model), experimental_op_resolver_type=plain)
    run = runner.get_signature_runner("decode")
    queries = np.array([[[10, 0]]]) / QUERY_STEP
    keys = np.array([[[-30, 0], [-30.1, 0], [0, 0]]]) / QUERY_STEP
    mask = np.array([[[0, 0, -32767]]], np.int16)
    given = {"q": np.rint(queries).astype(np.int16), "k": np.rint(keys).astype(np.int16)}
    return run(**given, mask_global=mask)["p"].ravel() * 2.0**-15


def step_of(model: Model, name: str) -> float:
    (found,) = [tensor for tensor in model.tensors() if tensor.name == name]
    assert found.quantization is not None
    return float(found.quantization.scale[0])


def test_an_empty_slot_outweighs_all_keys_if_their_scores_are_below_the_mask() -> None:
    assert probabilities(decoder(400)) == pytest.approx([0, 0, 1], abs=1e-3)


def test_a_wider_mask_hides_it() -> None:
    model = decoder(400)
    assert widen_masks(model) == "Widened 1 mask, which subtracted less than scores may be apart"
    weights = 1 / (1 + np.exp([-1, 1]))
    assert probabilities(model) == pytest.approx([*weights, 0], abs=0.01)


def test_the_mask_subtracts_20_more_than_scores_may_be_apart() -> None:
    model = decoder(400)
    widen_masks(model)
    assert step_of(model, "r/times_8.2") * 32767 == pytest.approx(820)


def test_the_input_keeps_its_type_and_scale() -> None:
    model = decoder(400)
    widen_masks(model)
    (mask,) = [
        one for name, one in model.arguments("decode").inputs.items() if name == "mask_global"
    ]
    assert step_of(model, "m") == pytest.approx(MASK_STEP)
    assert "MUL" in [reader.name for reader in mask.consumers]


def test_logits_get_room_below_the_smallest_score() -> None:
    model = decoder(400, logits_end=400)
    widen_masks(model)
    assert step_of(model, "a") * 32767 == pytest.approx(420)


def test_layers_with_the_same_scores_share_a_wider_mask() -> None:
    step = 400 / 32767
    again = f"""
      %a2: int16[1,1,{SLOTS}] q({step}, 0) = ADD(%s, %r)
      %p2: int16[1,1,{SLOTS}] q(0.000030517578125, 0) = SOFTMAX(%a2) {{beta: 1}}"""
    model = decoder(400, also=again)
    assert "2 masks" in widen_masks(model)
    assert [operator.name for operator in model.operators()].count("MUL") == 1


def test_masks_that_differ_have_names_that_differ() -> None:
    near = f"""
      %s2: int16[1,1,{SLOTS}] q({400.001 / 32767}, 0) = BATCH_MATMUL(%q, %k) {{adj_y: true}}
      %a2: int16[1,1,{SLOTS}] q({500 / 32767}, 0) = ADD(%s2, %r)
      %p2: int16[1,1,{SLOTS}] q(0.000030517578125, 0) = SOFTMAX(%a2) {{beta: 1}}"""
    model = decoder(400, also=near)
    widen_masks(model)
    names = [tensor.name for tensor in model.tensors()]
    assert len({*names}) == len(names)


def test_a_wider_mask_has_as_many_keys_as_the_given_one_where_their_number_is_open() -> None:
    model = decoder(400, mask=f"[1,1,?] q({MASK_STEP}, 0)")
    widen_masks(model)
    (wide,) = [operator.output for operator in model.operators() if operator.name == "MUL"]
    assert wide.shape_signature == (1, 1, -1)


@pytest.mark.parametrize(
    "model",
    [
        decoder(79),
        decoder(400, name="bias"),
        decoder(400, softmax="LOGISTIC"),
        decoder(400, also=JOINED),
        decoder(400, returns="%p, %a"),
        decoder(400, also=f"%n: int16[1,1,{SLOTS}] = RESHAPE(%a)"),
        decoder(400, mask=f"[1,1,{SLOTS}]"),
        decoder(400, mask=f"[1,1,{SLOTS}] q(0.0, 0)"),
    ],
    ids=[
        "scores no farther apart",
        "another input is added",
        "no SOFTMAX",
        "logits are joined with others, whose steps would differ",
        "logits are an output, whose readers know the old steps",
        "logits without a scale",
        "a mask without a scale",
        "a mask with a scale of 0",
    ],
)
def test_other_sums_stay(model: Model) -> None:
    before = to_bytes(model)
    assert widen_masks(model) == ""
    assert to_bytes(model) == before


def test_inspect_finds_a_mask_that_is_too_small() -> None:
    (found,) = broken_ranges(decoder(400))
    assert (found.rule, found.tensor) == ("mask-too-small", "p")
    assert "a mask of -100, and scores down to -400" in found.message
    assert [*broken_ranges(decoder(90))] == []
    assert [*broken_ranges(decoder(400, name="bias"))] == []
    widened = decoder(400)
    widen_masks(widened)
    assert [*broken_ranges(widened)] == []


@pytest.mark.parametrize(
    ("zero_point", "count"), [(-125, 0), (125, 1)], ids=["from -6 to 499", "from -501 to 4"]
)
def test_only_negative_scores_make_a_mask_too_small(zero_point: int, count: int) -> None:
    model = parse(f"""
    signature decode = #0 (mask=%m, s=%s) -> (p=%p)
    subgraph decode (%m: int8[3] q({100 / 255}, 127), %s: int8[3] q({505 / 255}, {zero_point})) {{
      %a: int8[3] q({605 / 255}, 0) = ADD(%s, %m)
      %p: int8[3] = SOFTMAX(%a) {{beta: 1}}
      return %p
    }}""")
    assert len([*broken_ranges(model)]) == count


def test_a_mask_in_larger_steps_subtracts_no_more() -> None:
    model = parse(f"""
    signature decode = #0 (mask=%m, s=%s) -> (p=%p)
    subgraph decode (%m: int16[3] q({MASK_STEP}, 0), %s: int16[3] q({400 / 32767}, 0)) {{
      %w: int16[3] q({1000 / 32767}, 0) = QUANTIZE(%m)
      %a: int16[3] q({500 / 32767}, 0) = ADD(%s, %w)
      %p: int16[3] = SOFTMAX(%a) {{beta: 1}}
      return %p
    }}""")
    (found,) = broken_ranges(model)
    assert "a mask of -100" in found.message


@pytest.mark.parametrize(("score_end", "notes"), [(400, 1), (79, 0)])
def test_the_stage_quantize_widens_masks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, score_end: float, notes: int
) -> None:
    exported = tmp_path / "exported.litertlm"
    exported.write_bytes(bundle([model_part("prefill_decode", to_bytes(decoder(score_end)))]))

    def quantizer(_config: Any, source: str, target: str, _ranges: str) -> None:
        Path(target).write_bytes(Path(source).read_bytes())

    monkeypatch.setattr(pipeline, "_config", lambda _: None)
    monkeypatch.setattr(pipeline, "_lib", lambda _: SimpleNamespace(npu_quantize=quantizer))
    inputs = {"model": str(exported), "ranges": ""}
    job = Job("quantize", str(tmp_path), inputs, options={"restore": False})
    told = pipeline.quantize(job, lambda *_: None)["notes"]
    assert len([*filter(None, told)]) == notes
    assert [*broken_ranges(Opened(job.model).main().model)] == []


def test_a_given_bundle_with_small_masks_is_built_with_a_warning(tmp_path: Path) -> None:
    given = tmp_path / "quantized.tflite"
    given.write_bytes(to_bytes(decoder(400)))
    (warning,) = run._check_sound(given)
    assert "masked keys may outweigh all others" in warning
