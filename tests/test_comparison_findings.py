"""What a comparison says of what it found: sentences, verdicts, and data for programs. Nothing is run."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_opt.comparison.caches import keep
from edge_opt.comparison.findings import (
    ComparisonReport,
    FirstDifference,
    GenerationComparison,
    OutputComparison,
    SignatureComparison,
    measured,
)
from edge_opt.comparison.whole import Allowance, WholeSignature
from edge_opt.runtime.tensors import TensorInfo

Y = TensorInfo("y", "y", (2, 2), (2, 2), "float32")
A = np.array([[1, 2], [3, 4]], np.float32)


def output(b: Any, a: Any = A, **how: Any) -> OutputComparison:
    return measured(Y, Y, np.asarray(a, np.float32), np.asarray(b, np.float32), **how)


SAME = output(A)
NEAR = output(np.add(A, [[0, 0], [0, 0.5]]), atol=1.0)
FAR = output(np.add(A, [[0, 3], [1, 0]]))
MISSING = OutputComparison(name="z", reason="missing in b")
NOT = False, False


def signature(*outputs: OutputComparison, name: str = "decode", **more: Any) -> SignatureComparison:
    return SignatureComparison(name, outputs, **more)


def report(*signatures: SignatureComparison, **more: Any) -> ComparisonReport:
    return ComparisonReport("a", "b", "cpu", 0, 0.5, 0.25, signatures, **more)


def test_an_output_says_how_many_elements_differ_and_where_most() -> None:
    assert SAME.sentence() == "output 'y': bitwise equal"
    far = "output 'y': 2 of 4 elements differ, by at most 3 (at [0, 1]: 2 against 5), SNR 4.8 dB"
    assert FAR.sentence() == far
    signs = output([[1, 2], [3, -0.0]], [[1, 2], [3, 0.0]])
    assert signs.sentence() == "output 'y': 1 of 4 elements differ, SNR inf dB"
    assert MISSING.sentence() == "output 'z': missing in b"
    assert measured(Y, Y, A, A[:1]).sentence() == "output 'y': shape (2, 2) in a, (1, 2) in b"


def test_two_comparisons_of_an_output_merge_to_the_worse() -> None:
    assert FAR.merged(None) is FAR
    for one, other in ((NEAR, FAR), (FAR, NEAR)):
        merged = one.merged(other)
        assert (merged.elements, merged.max_abs) == (8, 3)
    assert MISSING.merged(SAME).reason == SAME.merged(MISSING).reason == "missing in b"


def test_a_report_is_as_equal_as_its_signatures_and_these_as_their_outputs() -> None:
    same, near, far = signature(SAME, SAME), signature(SAME, NEAR), signature(NEAR, FAR)
    reasoned = signature(replace(SAME, reason="quantization"))
    for found, verdict in ((same, (True, True)), (near, (True, False)), (far, NOT), (reasoned, NOT)):
        made = report(same, found)
        assert (found.equal, found.bitwise) == (made.equal, made.bitwise) == verdict
        assert bool(made) is made.equal
        assert (made.to_dict()["equal"], made.to_dict()["signatures"][1]["bitwise"]) == verdict
    alone, partly = signature(reason="missing in b"), signature(SAME, MISSING)
    for nothing in ((), (signature(),), (signature(MISSING),), (alone,)):
        made = report(*nothing)
        assert (made.equal, made.bitwise, bool(made)) == (False, False, False)
        assert made.to_dict()["differences"]
    assert alone.sentences() == ["signature 'decode': missing in b"]
    assert partly.sentences() == ["signature 'decode', output 'z': missing in b"]
    equal = "all 4 outputs of 2 signatures are equal within atol=0.5, rtol=0.25"
    assert report(same, near).summary() == equal
    assert report(same).summary() == "all 2 outputs of 1 signature are bitwise equal"
    assert report(near, far, partly).differences() == [*far.sentences(), *partly.sentences()]
    assert report(far).summary() == f"{far.sentences()[0]} (and 1 more)"


def test_what_is_not_judged_is_noted() -> None:
    nan = output(np.full((2, 2), np.nan), np.full((2, 2), np.nan))
    logits = output(np.add(A, [[0, 9], [0, 0]]), logits=True)
    remark, none, agreement = report(signature(nan, SAME, MISSING, logits), remarks=("filled",)).notes()
    assert (remark, none) == ("filled", "signature 'decode', output 'y': no element is finite in a")
    assert "mean over rows of logits: top-1 agreement 100.00%" in agreement


def test_generated_tokens_differ_from_the_first_that_does() -> None:
    tokens = ((1,), (2,), (3,))
    same, other = (
        GenerationComparison(3, ((7, 8, 9, 9),), tokens, b, NEAR) for b in (tokens, ((1,), (4,), (5,)))
    )
    assert (same.equal, same.first_difference) == (True, None)
    assert same.sentence() == f"3 generated tokens are the same, after a prompt of 4; {NEAR.sentence()}"
    assert (other.equal, other.first_difference) == (False, 1)
    said = "generated tokens differ from step 1 of 3 on, after a prompt of 4: (2,) against (4,)"
    made = report(signature(SAME), generation=other)
    assert (made.equal, made.bitwise, made.differences(), made.summary()) == (False, True, [said], said)
    assert report(signature(SAME), generation=same).equal


def test_a_report_is_plain_json_without_infinity() -> None:
    found = FirstDifference("decode", "t", "%1", FAR, ("%0",), ("x",), ("y",), {"%1": "t"}, ("w",))
    made = report(signature(FAR, MISSING), signature(SAME), first_difference=found)
    data = json.loads(json.dumps(made.to_dict(), allow_nan=False))
    assert [data[name] for name in ("seed", "atol", "on", "generation")] == [0, 0.5, "cpu", None]
    assert data["first_difference"]["figures"]["max_abs"] == 3
    assert (data["first_difference"]["reason"], data["first_difference"]["tensor"]) == (None, "t")
    far, missing = data["signatures"][0]["outputs"]
    assert (far["max_abs"], far["differing"], far["reason"]) == (3, 2, None)
    assert missing == {"name": "z", "bitwise": False, "equal": False, "reason": "missing in b", "db": None}
    assert data["signatures"][1]["outputs"][0]["snr_db"] is None


def test_a_row_has_the_worst_figures_and_distances_from_the_cpu_are_columns_of_their_own() -> None:
    heads, row, none = report(signature(SAME, FAR, NEAR), signature(MISSING)).rows()
    assert row == ("decode", "3", "1", "3", "4.8 dB", "0.934953")
    assert none == ("decode", "1", "0", "-", "-", "-")
    near = replace(SAME, db=(40.0, 30.0))
    far = replace(SAME, name="z", db=(50.0, 9.0))
    wider, row, other = report(signature(near, far), signature(reason="a crashed")).rows()
    assert (wider[-2:], row[-2:]) == (("a to CPU", "b to CPU"), ("40.0 dB", "9.0 dB"))
    assert len(other) == len(wider) == len(heads) + 2


# The whole models

ROOM = Allowance(1e-3, 24, "2 sites of p")


def whole(allowance: Allowance, *outputs: OutputComparison, **more: Any) -> WholeSignature:
    return WholeSignature("decode", allowance, signature(*outputs, **more))


def off(name: str, gap: float, **more: Any) -> OutputComparison:
    figures = {"differing": 1, "largest": 2.0, **more}
    return OutputComparison(4, 4, max_abs=gap, name=name, **figures)


def test_what_is_allowed_and_what_was_found_is_said_in_steps_and_in_range() -> None:
    assert str(Allowance()) == "bit for bit, as every rewritten region demands"
    assert str(ROOM) == "within 24 steps or 0.001 of the range, because of 2 sites of p"
    assert str(Allowance(1e-3, 0, "1 site of p")) == "within 0.001 of the range, because of 1 site of p"
    assert whole(ROOM, SAME, SAME).outcome == "all 2 outputs are bitwise equal"
    found = whole(ROOM, off("codes", 1.0, steps=3), off("more", 0.5, steps=7), off("y", 1e-3))
    assert found.outcome == "all 3 outputs are within 7 steps or 0.5 of the range"
    assert found.holds


@pytest.mark.parametrize(
    ("compared", "permitted"),
    [
        (off("codes", 2e-3), True),
        (off("codes", 2.1e-3), False),
        (off("codes", math.inf), False),
        (off("codes", 1.0, steps=24), True),
        (off("codes", 1.0, steps=25), False),
        (replace(SAME, name="codes", reason="quantization differs"), False),
        (OutputComparison(name="codes", reason="only in a"), False),
    ],
)
def test_room_is_relative_to_the_range_or_in_steps(compared: OutputComparison, permitted: bool) -> None:
    assert ROOM.permits(compared) is permitted
    assert not Allowance().permits(compared)


def test_the_first_output_that_is_too_far_off_is_named() -> None:
    found = whole(ROOM, off("near", 1e-3), off("far", 0.5), off("farther", 1.0))
    assert not found.holds
    said = "signature 'decode', output 'far': 1 of 4 elements differ, SNR inf dB, and it must be the same"
    assert found.violation == f"{said} {ROOM}"
    missing = whole(ROOM, reason="missing in b")
    assert (missing.violation, missing.holds) == ("signature 'decode': missing in b", False)
    assert found.to_dict()["holds"] is False


def test_what_is_kept_in_a_file_is_what_was_given(tmp_path: Path) -> None:
    arrays = {str(place): np.arange(10 * place, dtype=np.int16).reshape(5, -1).T for place in range(5)}
    arrays["real"] = np.ones(3, np.float32)
    for _ in range(2):
        given = dict(arrays)
        kept = keep(given, tmp_path / "kept")
        assert given == {}
        assert all(np.array_equal(kept[name], array) for name, array in arrays.items())
        assert [name for name in kept if not isinstance(kept[name], np.memmap)] == ["0"]
