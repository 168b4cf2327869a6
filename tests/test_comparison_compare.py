"""Two models on the same inputs, signature by signature."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import proof_models as models
import pytest
from tiny_models import Graph, Op, T, build, options

from edge_opt.base.errors import ModelFormatError, UsageError
from edge_opt.comparison import compare as comparing
from edge_opt.comparison.compare import compare
from edge_opt.runtime.errors import RuntimeRefused
from edge_opt.runtime.runner import Worker
from edge_opt.testing import assert_equivalent

WEIGHT = np.random.default_rng(0).standard_normal((12, 5)).astype(np.float32)


def changed(amount: float) -> np.ndarray:
    other = WEIGHT.copy()
    other[7, 2] += amount
    return other


def two(first: str, second: str, *, outputs: str = "z") -> bytes:
    """Two signatures that add; their keys and the output's name can be chosen."""
    tensors = [T("x", (1, 4)), T("y", (1, 4)), T("z", (1, 4))]
    add = Op("ADD", ["x", "y"], ["z"], options("AddOptions"))
    return build(*(Graph(tensors, [add], ["x", "y"], ["z"], key, {"z": outputs}) for key in (first, second)))


def test_a_model_equals_itself_bit_for_bit_on_both_kernel_sets() -> None:
    model = models.projection(WEIGHT)
    report = compare(model, model, backend="both", runs=2, hostile=True)
    assert report.equal
    assert report.bitwise
    assert [(s.name, s.backend) for s in report.signatures] == [("main", "xnnpack"), ("main", "reference")]
    assert report.summary() == "the only output of 1 signature is bitwise equal on 2 kernel sets"


def test_one_changed_weight_is_found_and_placed() -> None:
    report = compare(models.projection(WEIGHT), models.projection(changed(0.5)))
    (output,) = report.signatures[0].outputs
    assert not report.equal
    assert output.difference is not None
    assert output.difference.differing == 3
    assert output.difference.worst is not None
    assert output.difference.worst[1] == 7
    assert "output 'logits': 3 of 36 elements differ" in report.summary()


def test_tolerances_decide_what_is_equal_but_not_what_is_bitwise() -> None:
    report = compare(models.projection(WEIGHT), models.projection(changed(1e-4)), atol=1e-2)
    assert (report.equal, report.bitwise) == (True, False)
    assert "equal within atol=0.01" in report.summary()


def test_the_dict_keeps_the_contract_is_plain_json_and_follows_the_seed() -> None:
    pair = models.projection(WEIGHT), models.projection(changed(0.5))
    first, again, other = (compare(*pair, hostile=True, seed=seed).to_dict() for seed in (0, 0, 1))
    assert first == again
    assert first["signatures"] != other["signatures"]
    told = json.loads(json.dumps(first, allow_nan=False))
    assert set(told) >= {"equal", "bitwise", "signatures"}
    (signature,) = told["signatures"]
    assert set(signature) >= {"name", "outputs"}
    figures = {"name", "bitwise", "max_abs", "snr_db", "cosine", "kl", "top1", "top5"}
    assert set(signature["outputs"][0]) >= figures


def test_a_signature_of_one_model_only_is_a_difference(tmp_path: Path) -> None:
    one, other = tmp_path / "one.tflite", tmp_path / "other.tflite"
    one.write_bytes(two("prefill", "decode"))
    other.write_bytes(two("prefill", "verify"))
    report = compare(one, other)
    assert not report.equal
    assert {s.name: s.reason for s in report.signatures} == {
        "prefill": "",
        "decode": f"only in {one}",
        "verify": f"only in {other}",
    }
    assert compare(one, other, signatures=["prefill"]).bitwise


def test_an_output_of_one_model_only_is_a_difference() -> None:
    report = compare(two("a", "b"), two("a", "b", outputs="w"))
    assert not report.equal
    assert [o.reason for o in report.signatures[0].outputs] == ["only in <a>", "only in <b>"]


def test_other_inputs_are_a_difference() -> None:
    (signature,) = compare(models.adder(shape=(1, 4)), models.adder(shape=(1, 5))).signatures
    assert "input 'x' has shape (1, 4) in a, (1, 5) in b" in signature.reason
    (signature,) = compare(models.adder(), models.softmax(shape=(2, 4))).signatures
    assert "only in" in signature.reason


def test_models_without_signatures_are_compared_by_position() -> None:
    tensors = [T(name, (2, 4)) for name in "pqr"]
    renamed = build(Graph(tensors, [Op("ADD", ["p", "q"], ["r"], options("AddOptions"))], ["p", "q"], ["r"]))
    report = compare(models.adder(key=""), renamed)
    assert report.bitwise
    assert [(s.name, [o.name for o in s.outputs]) for s in report.signatures] == [("main", ["z"])]


def test_a_float_model_and_a_quantized_one_are_compared_as_real_numbers() -> None:
    shape = (1, 64)
    plain = build(Graph([T("x", shape), T("z", shape)], [Op("RELU", ["x"], ["z"])], ["x"], ["z"], "main"))
    tensors = [T(name, shape, "int8", scale=0.05) for name in "xz"]
    coded = build(Graph(tensors, [Op("RELU", ["x"], ["z"])], ["x"], ["z"], "main"))
    report = compare(plain, coded, atol=0.0251)
    assert (report.equal, report.bitwise) == (True, False)


def test_another_quantization_of_an_output_is_a_difference() -> None:
    report = compare(models.requantized(scale=0.5), models.requantized(scale=0.25), atol=1e6)
    assert not report.equal
    assert "quantization" in report.summary()


def test_large_outputs_are_asked_for_run_by_run(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = models.projection(WEIGHT), models.projection(changed(0.5))
    expected = compare(*pair, runs=3).to_dict()
    monkeypatch.setattr(comparing, "_REPLY_BYTES", 1)
    assert compare(*pair, runs=3).to_dict() == expected


def test_the_models_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    order = []
    run = Worker.run_plans

    def noted(self: Worker, model: Any, signature: Any, *rest: Any) -> Any:
        order.append((model == one, signature))
        return run(self, model, signature, *rest)

    one, other = two("prefill", "decode"), two("decode", "prefill")
    monkeypatch.setattr(Worker, "run_plans", noted)
    assert compare(one, other, signatures=["prefill", "decode"]).bitwise
    assert order == [(True, "prefill"), (False, "prefill"), (True, "decode"), (False, "decode")]


def test_progress_reaches_its_end() -> None:
    told: list[tuple[str, int, int]] = []
    compare(two("a", "b"), two("a", "b"), progress=lambda *step: told.append(step))
    assert [(done, total) for _, done, total in told] == [(0, 4), (1, 4), (2, 4), (3, 4), (4, 4)]


@pytest.mark.parametrize(
    "options",
    [
        {"backend": "gpu"},
        {"runs": 0},
        {"atol": -1.0},
        {"rtol": math.nan},
        {"signatures": ["nope"]},
        {"signatures": []},
    ],
)
def test_arguments_without_meaning_are_usage_errors(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        compare(models.adder(), models.adder(), **options)


def test_a_broken_file_never_reaches_the_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Worker, "describe", lambda *_: pytest.fail("the runtime was asked"))
    broken = bytearray(models.adder())
    broken[40:60] = b"\xff" * 20
    with pytest.raises(ModelFormatError):
        compare(models.adder(), bytes(broken))


def test_a_model_that_cannot_be_allocated_is_named_with_its_signature_and_the_reason(tmp_path: Path) -> None:
    path = tmp_path / "bad.tflite"
    path.write_bytes(models.adder(other=(2, 3)))
    said = r"bad\.tflite', signature 'main', xnnpack kernels: .* failed to prepare"
    with pytest.raises(RuntimeRefused, match=said):
        compare(path, path)


def test_assert_equivalent_reads_like_a_test_failure(tmp_path: Path) -> None:
    for name, weight in (("a", WEIGHT), ("b", changed(0.5))):
        (tmp_path / name).write_bytes(models.projection(weight))
    a, b = tmp_path / "a", tmp_path / "b"
    assert assert_equivalent(a, a).bitwise
    with pytest.raises(AssertionError) as caught:
        assert_equivalent(a, b, runs=2)
    assert str(caught.value).startswith(
        f"'{b}' differs from '{a}':\n  signature 'main' (xnnpack), output 'logits': 6 of 72"
    )
    assert assert_equivalent(a, b, atol=10).equal
