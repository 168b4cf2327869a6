"""What a comparison says of what it found: sentences, verdicts, and data for programs. Nothing is run."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_runs import DEMO

from edge_opt.comparison import golden
from edge_opt.comparison.findings import (
    ComparisonReport,
    FirstDifference,
    GenerationComparison,
    OutputComparison,
    SignatureComparison,
    measured,
)
from edge_opt.comparison.generate import keep
from edge_opt.comparison.models import find_parts
from edge_opt.comparison.whole import Allowance, WholeSignature
from edge_opt.runtime.metrics import Difference
from edge_opt.runtime.tensors import TensorInfo


def info(
    shape: tuple[int, ...], dtype: str = "float32", scales: tuple[float, ...] = (), zero: int = 0
) -> TensorInfo:
    return TensorInfo("y", "y", shape, shape, dtype, scales, (zero,) * len(scales))


Y = info((2, 2))
A = np.array([[1, 2], [3, 4]], np.float32)


def output(b: Any, a: Any = A, **how: Any) -> OutputComparison:
    return measured(Y, Y, np.asarray(a, np.float32), np.asarray(b, np.float32), **how)


SAME = output(A)
NEAR = output(np.add(A, [[0, 0], [0, 0.5]]), atol=1.0)
FAR = output(np.add(A, [[0, 3], [1, 0]]))
MISSING = OutputComparison("z", reason="missing in b")


def test_an_output_says_how_many_elements_differ_and_where_most() -> None:
    assert SAME.sentence() == "output 'y': bitwise equal"
    assert FAR.sentence() == (
        "output 'y': 2 of 4 elements differ, by at most 3 (at [0, 1]: 2 against 5), SNR 4.8 dB"
    )
    signs = output([[1, 2], [3, -0.0]], [[1, 2], [3, 0.0]])
    assert signs.sentence() == "output 'y': 1 of 4 elements differ, SNR inf dB"
    assert MISSING.sentence() == "output 'z': missing in b"
    assert measured(Y, Y, A, A[:1]).sentence() == "output 'y': shape (2, 2) in a, (1, 2) in b"


def test_what_could_not_be_measured_is_neither_equal_nor_bitwise() -> None:
    assert [(each.equal, each.bitwise) for each in (SAME, NEAR, FAR, MISSING)] == [
        (True, True), (True, False), (False, False), (False, False),
    ]  # fmt: skip
    reasoned = OutputComparison("y", SAME.difference, "quantization")
    assert (reasoned.equal, reasoned.bitwise) == (False, False)
    nothing = OutputComparison("y")
    assert (nothing.equal, nothing.bitwise) == (False, False)


def test_two_comparisons_of_an_output_merge_to_the_worse() -> None:
    assert FAR.merged(None) is FAR
    for one, other in ((NEAR, FAR), (FAR, NEAR)):
        merged = one.merged(other)
        assert merged.difference is not None
        assert (merged.difference.elements, merged.difference.max_abs) == (8, 3)
    assert MISSING.merged(SAME).reason == SAME.merged(MISSING).reason == "missing in b"


def test_figures_that_could_not_be_measured_are_null() -> None:
    assert MISSING.to_dict() == {
        "name": "z", "max_abs": None, "snr_db": None, "cosine": None, "bitwise": False, "equal": False,
        "reason": "missing in b",
    }  # fmt: skip
    found = FAR.to_dict()
    assert (found["max_abs"], found["bitwise"], found["equal"], found["differing"]) == (3, False, False, 2)
    assert "reason" not in found


def signature(*outputs: OutputComparison, name: str = "decode", **more: Any) -> SignatureComparison:
    return SignatureComparison(name, "xnnpack", outputs, **more)


def report(*signatures: SignatureComparison, **more: Any) -> ComparisonReport:
    return ComparisonReport("a", "b", "xnnpack", 0, 1, False, 0.5, 0.25, signatures, **more)


def test_a_signature_is_as_equal_as_all_of_its_outputs() -> None:
    for one, other, verdict in (
        (SAME, SAME, (True, True)),
        (SAME, NEAR, (True, False)),
        (NEAR, FAR, (False, False)),
    ):
        found = signature(one, other)
        assert (found.equal, found.bitwise) == verdict
        assert (found.to_dict()["equal"], found.to_dict()["bitwise"]) == verdict
    alone = signature(reason="missing in b")
    assert (alone.equal, alone.bitwise) == (False, False)
    assert alone.sentences() == ["signature 'decode' (xnnpack): missing in b"]
    assert alone.to_dict()["reason"] == "missing in b"
    assert signature(SAME, MISSING).sentences() == ["signature 'decode' (xnnpack), output 'z': missing in b"]


def test_rows_that_are_masked_everywhere_are_noted_and_not_judged() -> None:
    found = signature(SAME, masked_rows=(SAME, NEAR, FAR))
    assert found.bitwise
    assert found.masked_rows_sentence() == (
        "with rows that are masked everywhere, 2 of 3 outputs of signature 'decode' (xnnpack) differ, by up to 3"
    )
    assert signature(SAME, masked_rows=(SAME,)).masked_rows_sentence() == ""
    assert signature(SAME, masked_rows=(MISSING,)).masked_rows_sentence().endswith("by up to inf")
    assert len(report(found, signature(SAME)).notes()) == 1


def test_outputs_without_a_finite_element_are_noted() -> None:
    nan = np.full((2, 2), np.nan)
    empty = measured(info((0, 2)), info((0, 2)), np.zeros((0, 2), np.float32), np.zeros((0, 2), np.float32))
    assert report(signature(output(nan, nan), SAME, MISSING, empty)).notes() == [
        "signature 'decode' (xnnpack), output 'y': no element is finite in a"
    ]


def test_a_report_sums_up_what_differs_most() -> None:
    equal, near, far = signature(SAME, SAME), signature(NEAR), signature(FAR, MISSING)
    assert report(equal, signature(SAME)).summary() == "all 3 outputs of 1 signature are bitwise equal"
    assert report(equal, near).summary() == "all 3 outputs are equal within atol=0.5, rtol=0.25"
    assert report(equal, near).differences() == []
    both = report(near, far)
    assert both.differences() == far.sentences()
    assert both.summary() == f"{far.sentences()[0]} (and 1 more)"
    assert report(signature(FAR)).summary() == signature(FAR).sentences()[0]
    assert [(each.equal, each.bitwise) for each in (report(equal), report(near), report(far))] == [
        (True, True), (True, False), (False, False),
    ]  # fmt: skip


TOKENS = ((1,), (2,), (3,))


def generated(b: Any = TOKENS) -> GenerationComparison:
    return GenerationComparison(3, "reference", ((7, 8, 9, 9),), TOKENS, b, NEAR)


def test_generated_tokens_differ_from_the_first_that_does() -> None:
    same, other = generated(), generated(((1,), (4,), (5,)))
    assert (same.equal, same.first_difference) == (True, None)
    how = "after a prompt of 4 (reference)"
    assert same.sentence() == f"3 generated tokens are the same, {how}; {NEAR.sentence()}"
    assert (other.equal, other.first_difference) == (False, 1)
    assert other.sentence() == f"generated tokens differ from step 1 of 3 on, {how}: (2,) against (4,)"
    assert generated(((0,), (2,), (3,))).first_difference == 0
    made = report(signature(SAME), generation=other)
    assert (made.equal, made.bitwise, made.differences()) == (False, True, [other.sentence()])
    assert made.summary() == other.sentence()
    assert report(signature(SAME), generation=same).equal
    assert same.to_dict()["first_difference"] is None
    assert other.to_dict()["equal"] is False


def test_a_report_is_plain_json_without_infinity() -> None:
    found = FirstDifference("decode", "xnnpack", "t", "%1", FAR, ("%0",), ("x",), ("y",), {"%1": "t"}, ("w",))
    made = report(signature(FAR), signature(SAME), first_difference=found, generation=generated())
    data = json.loads(json.dumps(made.to_dict(), allow_nan=False))
    assert (data["equal"], data["bitwise"], data["seed"], data["atol"]) == (False, False, 0, 0.5)
    assert data["first_difference"]["figures"]["max_abs"] == 3
    assert (data["first_difference"]["reason"], data["first_difference"]["tensor"]) == (None, "t")
    assert data["signatures"][1]["outputs"][0]["snr_db"] is None
    assert data["generation"]["count"] == 3
    assert report(signature(SAME)).to_dict()["generation"] is None


# The whole models


def whole(allowance: Allowance, *outputs: OutputComparison, **more: Any) -> WholeSignature:
    return WholeSignature("decode", allowance, signature(*outputs, **more))


def off(name: str, gap: float, **more: Any) -> OutputComparison:
    return OutputComparison(name, Difference(4, 4, differing=1, max_abs=gap, largest=2.0, **more))


ROOM = Allowance(1e-3, {"codes": 24, "more": 96}, "2 sites of p")


def test_what_is_allowed_is_said_in_steps_and_in_range() -> None:
    assert str(Allowance()) == "bit for bit, as every rewritten region demands"
    assert str(ROOM) == "within 24 to 96 steps, floats 0.001 of the range, because of 2 sites of p"
    assert str(Allowance(1e-3, {}, "1 site of p")) == "within 0.001 of the range, because of 1 site of p"
    coded = Allowance(1e-3, {"c": 24}, "1 site of p", floats=False)
    assert str(coded) == "within 24 steps, because of 1 site of p"


def test_what_was_found_is_said_in_steps_and_in_range() -> None:
    assert whole(ROOM, SAME, SAME).outcome() == "all 2 outputs are bitwise equal"
    found = whole(ROOM, off("codes", 1.0, steps=3), off("more", 0.5, steps=7), off("y", 1e-3, top1=0.75))
    assert found.outcome() == (
        "all 3 outputs are within 7 steps, floats 0.0005 of the range, highest logits agree in 75 % of rows"
    )
    assert found.holds
    assert found.sentence() == f"decode: {found.outcome()}; demanded: {ROOM}"
    assert whole(ROOM, off("y", 2e-4)).outcome() == "all 1 outputs are within 0.0001 of the range"
    masked = whole(ROOM, SAME, masked_rows=(FAR,)).outcome()
    assert masked.startswith("all 1 outputs are bitwise equal; with rows")


def test_the_first_output_that_is_too_far_off_is_named() -> None:
    found = whole(ROOM, off("near", 1e-3), off("far", 0.5), off("farther", 1.0))
    assert not found.holds
    assert found.violation() == (
        f"signature 'decode', output 'far': 1 of 4 elements differ, SNR inf dB, and it must be the same {ROOM}"
    )
    missing = whole(ROOM, reason="missing in b")
    assert not missing.holds
    assert missing.violation() == "signature 'decode': missing in b"
    wanted = {"holds": False, "bitwise": False, "relative": 1e-3, "steps": dict(ROOM.steps)}
    assert wanted.items() <= found.to_dict().items()


# What is kept meanwhile


def test_what_is_kept_in_a_file_is_what_was_given(tmp_path: Path) -> None:
    arrays = {str(place): np.arange(10 * place, dtype=np.int16).reshape(5, -1).T for place in range(5)}
    arrays["real"] = np.ones(3, np.float32)
    for _ in range(2):
        given = dict(arrays)
        kept = keep(given, tmp_path / "kept")
        assert given == {}
        assert all(np.array_equal(kept[name], array) for name, array in arrays.items())
        assert [name for name in kept if not isinstance(kept[name], np.memmap)] == ["0"]


@pytest.mark.parametrize(
    ("files", "embedder", "auxiliary"),
    [
        ((), None, None),
        (("embedder.tflite", "auxiliary.tflite"), "embedder.tflite", "auxiliary.tflite"),
        (("m.embedder.tflite", "embedder.tflite"), "m.embedder.tflite", None),
        (("other.embedder.tflite",), None, None),
    ],
)
def test_helpers_lie_beside_the_model(
    files: tuple[str, ...], embedder: str | None, auxiliary: str | None, tmp_path: Path
) -> None:
    for name in ("m.int8.tflite", *files):
        shutil.copy(DEMO, tmp_path / name)
    found = find_parts(tmp_path / "m.int8.tflite")
    given = {name: part.source for name, part in found.items()}
    beside = {"embedder": embedder, "auxiliary": auxiliary}
    assert given == {
        "main": tmp_path / "m.int8.tflite",
        **{name: tmp_path / file for name, file in beside.items() if file},
    }
    chosen = find_parts(tmp_path / "m.int8.tflite", b"e", b"x")
    assert (chosen["embedder"].source, chosen["auxiliary"].source) == (b"e", b"x")


# Golden files


def test_statistics_are_of_real_numbers_that_are_finite() -> None:
    plain = golden._statistics(np.array([[-4, 1], [np.nan, np.inf]], np.float32), info((2, 2)))
    assert [plain[name] for name in ("shape", "dtype", "mean", "mean_abs", "low", "high")] == [
        [2, 2], "float32", -1.5, 2.5, -4, 1,
    ]  # fmt: skip
    codes = golden._statistics(np.array([12, 6], np.int8), info((2,), "int8", (0.5,), 10))
    assert (codes["mean"], codes["mean_abs"], codes["low"], codes["high"]) == (-0.5, 1.5, -2, 1)
    several = golden._statistics(np.array([12, 6], np.int8), info((2,), "int8", (0.5, 0.25), 10))
    assert several["high"] == 12
    nothing = golden._statistics(np.full(2, np.nan, np.float32), info((2,)))
    assert (nothing["mean"], nothing["low"]) == (0, 0)


def test_a_sample_has_as_many_elements_as_fit_in_its_share() -> None:
    array = np.arange(100, dtype=np.float32)
    assert np.array_equal(golden._sample(array, "s", "y", 0, 400), array)
    part = golden._sample(array, "s", "y", 0, 399)
    assert part.size == 99
    assert np.array_equal(part, np.sort(part))
    assert golden._sample(array, "s", "y", 0, 1).size == 1
    assert not np.array_equal(part, golden._sample(array, "s", "y", 1, 399))


@pytest.mark.parametrize(
    ("changed", "atol", "rtol", "said"),
    [
        ({}, 0.1, 0, ""),
        ({"mean": 1.1}, 0.11, 0, ""),
        ({"mean": 1.2}, 0.1, 0, "mean 1.2, recorded 1"),
        ({"mean": 1.2}, 0, 0.11, ""),
        ({"mean_abs": 2.3}, 0, 0.1, "mean_abs 2.3, recorded 2"),
        ({"high": 4.4}, 0, 0.1, ""),
        ({"high": 4.6}, 0, 0.1, "high 4.6, recorded 4"),
        ({"low": -5.6}, 0, 0.1, "low -5.6, recorded -5"),
        ({"low": math.nan}, 1e9, 0, "low nan, recorded -5"),
    ],
)
def test_statistics_prove_a_difference_beyond_the_sample(
    changed: dict[str, float], atol: float, rtol: float, said: str
) -> None:
    recorded = {"sha256": "a", "mean": 1.0, "mean_abs": 2.0, "low": -5.0, "high": 4.0}
    now = {**recorded, "sha256": "b", **changed}
    found = golden_of({"atol": atol, "rtol": rtol})._beyond_sample(recorded, now)
    assert found == (said and f"elements beyond the sample differ: {said}")
    exact = golden_of({"atol": 0, "rtol": 0})
    assert exact._beyond_sample(recorded, now) == "elements beyond the sample differ"
    assert exact._beyond_sample(recorded, {**now, "sha256": "a"}) == ""


def golden_of(meta: dict[str, float], **arrays: np.ndarray) -> golden._Check:
    nobody: Any = None
    return golden._Check(meta, arrays, nobody, nobody, "model.tflite")


@pytest.mark.parametrize(("shape", "dtype"), [((2,), "int32"), ((1, 2), "float32")])
def test_an_output_of_another_shape_or_type_than_recorded_is_a_difference(
    shape: tuple[int, ...], dtype: str
) -> None:
    recorded = {"key": "kept", "shape": [2], "dtype": "float32"}
    check = golden_of({"share": 99}, kept=np.zeros(2, np.float32))
    found = check._output("s", info((2,)), recorded, {"y": np.zeros(shape, dtype)}, 0)
    assert found.reason == f"float32 [2] recorded, {dtype} {list(shape)} now"
    assert check._output("s", info((2,)), recorded, {}, 0).reason == "missing in the model"


def test_where_all_was_kept_other_bytes_of_equal_values_are_no_difference() -> None:
    """-0.0 equals 0.0 and has another checksum."""
    old = np.zeros(1, np.float32)
    recorded = {"key": "kept", "shape": [1], "dtype": "float32", **golden._statistics(old, info((1,)))}
    check = golden_of({"share": 99, "atol": 0, "rtol": 0}, kept=old)
    assert check._output("s", info((1,)), recorded, {"y": -old}, 0).reason == ""
