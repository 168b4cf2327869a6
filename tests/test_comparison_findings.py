"""What a comparison says of what it found: sentences, verdicts, and data for programs. Nothing is run."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from syrupy.assertion import SnapshotAssertion

from edge_opt.comparison import findings
from edge_opt.comparison.compare import _move
from edge_opt.comparison.findings import (
    ComparisonReport,
    FirstDifference,
    OutputComparison,
    measured,
)
from edge_opt.runtime.metrics import Tolerance
from edge_opt.runtime.tensors import TensorInfo
from edge_opt.verification.whole import Allowance, WholeSignature

Y = TensorInfo("y", "y", (2, 2), (2, 2), "float32")
A = np.array([[1, 2], [3, 4]], np.float32)
ROOM = Allowance(1e-3, 24, because="2 sites of p")


def output(b: Any, a: Any = A, **how: Any) -> OutputComparison:
    return measured(Y, Y, [(np.asarray(a, np.float32), np.asarray(b, np.float32))], **how)


SAME = output(A)
NEAR = output(np.add(A, [[0, 0], [0, 0.5]]), tolerance=Tolerance(atol=1.0))
FAR = output(np.add(A, [[0, 3], [1, 0]]))
MISSING = OutputComparison(name="z", reason="missing in b")


def signature(
    *outputs: OutputComparison, name: str = "decode", **more: Any
) -> findings.SignatureComparison:
    return findings.SignatureComparison(name, outputs, **more)


def report(*signatures: findings.SignatureComparison, **more: Any) -> ComparisonReport:
    return ComparisonReport("a", "b", "cpu", 0, 0.5, 0.25, signatures, **more)


def tokens(*b: int) -> findings.GenerationComparison:
    """Three steps, the first model's are 1, 2 and 3."""
    return findings.GenerationComparison(
        3, ((7, 8, 9, 9),), ((1,), (2,), (3,)), tuple((one,) for one in b), NEAR
    )


def test_an_output_says_how_many_elements_differ_and_where_most(
    snapshot: SnapshotAssertion,
) -> None:
    signs = output([[1, 2], [3, -0.0]], [[1, 2], [3, 0.0]])
    found = (SAME, FAR, signs, MISSING, measured(Y, Y, [(A, A[:1])]))
    assert "\n".join(one.sentence() for one in found) == snapshot


def test_complex_numbers_are_not_compared_with_real_ones() -> None:
    assert not measured(Y, Y, [(A, A.astype(np.complex64))]).equal
    assert measured(Y, Y, [(A.astype(np.complex64), A)]).reason == "complex64 in a, float32 in b"


def test_several_runs_give_the_worse_figures() -> None:
    for gaps in ((1, 3), (3, 1)):
        merged = measured(Y, Y, [(A, A + gap) for gap in gaps])
        assert (merged.elements, merged.max_abs) == (8, 3)


NAN = output(np.full((2, 2), np.nan), np.full((2, 2), np.nan))
LOGITS = output(np.add(A, [[0, 9], [0, 0]]), logits=True)
FOUND = FirstDifference("decode", "t", "%1", FAR, ("%0",), ("x",), ("y",), {"%1": "t"}, ("w",))
ON_NPU = signature(replace(SAME, db=(40.0, 30.0)), replace(SAME, name="z", db=(50.0, 9.0)))
# Whether it is equal, and bit for bit.
REPORTS = {
    "same": (True, True, report(signature(SAME, SAME), generation=tokens(1, 2, 3))),
    "near": (True, False, report(signature(SAME, SAME), signature(SAME, NEAR))),
    "far": (
        False,
        False,
        report(signature(NEAR, FAR), signature(SAME, MISSING), first_difference=FOUND),
    ),
    "quantization": (False, False, report(signature(replace(SAME, reason="quantization")))),
    "nothing": (False, False, report()),
    "no outputs": (False, False, report(signature())),
    "nothing in common": (False, False, report(signature(MISSING))),
    "a signature alone": (False, False, report(signature(reason="missing in b"))),
    "other tokens": (False, True, report(signature(SAME), generation=tokens(1, 0, 5))),
    "not judged": (
        False,
        False,
        report(signature(NAN, SAME, MISSING, LOGITS), remarks=("filled",)),
    ),
    "on the NPU": (False, False, report(ON_NPU, signature(reason="a crashed"))),
}


@pytest.mark.parametrize("name", REPORTS)
def test_a_report_is_as_equal_as_its_outputs(name: str, snapshot: SnapshotAssertion) -> None:
    equal, bitwise, made = REPORTS[name]
    data = json.loads(json.dumps(made.to_dict(), allow_nan=False))
    assert (made.equal, made.bitwise, bool(made)) == (equal, bitwise, equal)
    assert (data["equal"], data["bitwise"]) == (equal, bitwise)
    lines = [
        made.summary(),
        "",
        *made.differences(),
        "",
        *made.notes(),
        "",
        *map(" | ".join, made.rows()),
    ]
    assert "\n".join(lines) == snapshot


def test_a_report_as_json_has_null_for_what_is_empty_or_infinite() -> None:
    data = REPORTS["far"][-1].to_dict()
    assert data["first_difference"]["figures"]["max_abs"] == 3
    assert (data["first_difference"]["reason"], data["first_difference"]["tensor"]) == (None, "t")
    same, missing = data["signatures"][1]["outputs"]
    assert (same["max_abs"], same["snr_db"], same["reason"]) == (0, None, None)
    assert missing == {
        "name": "z",
        "bitwise": False,
        "equal": False,
        "reason": "missing in b",
        "db": None,
    }


def whole(allowance: Allowance, *outputs: OutputComparison, **more: Any) -> WholeSignature:
    return WholeSignature("decode", allowance, signature(*outputs, **more))


def off(name: str, gap: float, **more: Any) -> OutputComparison:
    figures = {"differing": 1, "largest": 2.0, **more}
    return OutputComparison(4, 4, max_abs=gap, name=name, **figures)


def test_what_is_allowed_and_found_is_said_in_steps_and_in_range(
    snapshot: SnapshotAssertion,
) -> None:
    near = off("codes", 1.0, steps=3), off("more", 0.5, steps=7), off("y", 1e-3)
    found = [
        whole(Allowance(), SAME, SAME),
        whole(Allowance(1e-3, 0, because="1 site of p"), *near),
        whole(ROOM, *near),
        whole(ROOM, off("near", 1e-3), off("far", 0.5), off("farther", 1.0)),
        whole(ROOM, reason="missing in b"),
    ]
    assert [one.holds for one in found] == [True, False, True, False, False]
    assert found[3].to_dict()["holds"] is False
    texts = [f"{one.allowance}\n{one.outcome}\n{one.violation}\n" for one in found[:4]]
    assert "\n".join([*texts, found[4].violation]) == snapshot


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
def test_room_is_relative_to_the_range_or_in_steps(
    compared: OutputComparison, permitted: bool
) -> None:
    assert whole(ROOM, compared).holds is permitted
    assert not whole(Allowance(), compared).holds


def test_what_is_moved_to_a_file_is_what_was_given(tmp_path: Path) -> None:
    arrays = {
        str(place): np.arange(10 * place, dtype=np.int16).reshape(5, -1).T for place in range(5)
    }
    arrays["real"] = np.ones(3, np.float32)
    moved = dict(arrays)
    _move(moved, str(tmp_path / "0"))
    assert all(np.array_equal(moved[name], array) for name, array in arrays.items())
    assert all(isinstance(array, np.memmap) for array in moved.values())
