"""What figures mean: given what two versions of a region came to, whether that will do, and in which words."""

import numpy as np
import pytest
from text_parser import parse

from edge_opt.ir.refusal import RefusedError
from edge_opt.passes import Demand, Proof
from edge_opt.passes.contract import Ran
from edge_opt.proof.examination import Question, Region, all_of, judge
from edge_opt.runtime.metrics import Difference
from edge_opt.runtime.pair import Outcome, OutputProof, ProofRequest, untold

SAME = Difference(8, finite=8, largest=4.0)
RAN = (Ran("xnnpack"),)
BITWISE, STEPS, RELATIVE = Demand(), Demand("steps", 2), Demand("relative", 0.25)
PLAIN = "subgraph main (%x: float32[8]) { %y: float32[8] = ABS(%x) return %y }"
SOFTMAX = "subgraph main (%x: float32[8]) { %y: float32[8] = SOFTMAX(%x) {beta: 2.0} return %y }"
SUM = """subgraph main (%x: int16[8] q(0.1, 0)) {
  %y: int16[8] q(0.1, 0) = ADD(%x, %x)
  return %y
}"""


def off(gap: float, steps: int | None = None) -> Difference:
    """One element of eight is `gap` away, the largest being 4."""
    return Difference(8, finite=8, differing=1, outside=1, max_abs=gap, largest=4.0, steps=steps)


def outcome(*found: Difference, masked: Difference | None = None, untold: str = "") -> Outcome:
    """One output on both kernel sets: first the optimized kernels, then the reference."""
    names = ("xnnpack", "reference")[: len(found)]
    each = {name: (OutputProof(0, own, masked),) for name, own in zip(names, found, strict=True)}
    return Outcome(each, untold=untold)


def judged(
    made: Outcome,
    demand: Demand = BITWISE,
    *,
    text: str = PLAIN,
    clipped: bool = False,
    must_compare: bool = True,
) -> Proof:
    request = ProofRequest(limits=(-5, 5) if clipped else None)
    region = Region(parse(text), parse(text), "region")
    return judge(made, Question(region, demand, request, must_compare), RAN)


@pytest.mark.parametrize(
    ("demand", "found", "holds"),
    [
        (BITWISE, SAME, True),
        (BITWISE, off(0.5), False),
        (STEPS, off(0.5, 2), True),
        (STEPS, off(0.5, 3), False),
        (STEPS, off(0.5), False),
        (STEPS, SAME, True),
        (RELATIVE, off(1.0), True),
        (RELATIVE, off(1.125), False),
    ],
)
def test_a_demand_is_met_up_to_its_tolerance(demand: Demand, found: Difference, holds: bool) -> None:
    proof = judged(outcome(found, found), demand)
    assert (proof.holds, proof.max_abs, proof.steps, proof.ran) == (holds, found.max_abs, found.steps, RAN)
    assert proof.bitwise is found.bitwise
    assert not proof.open


def test_the_worst_of_both_kernel_sets_counts() -> None:
    assert not judged(outcome(off(0.5, 1), off(0.5, 3)), STEPS).holds
    assert not judged(outcome(off(0.5, 1), off(0.5)), STEPS).holds  # without codes there are no steps
    proof = judged(outcome(SAME, off(0.5)))
    assert proof.reason == (
        "the new region differs: 0 of 8 elements, by up to 0 on xnnpack; "
        "1 of 8 elements, by up to 0.5 on reference, demanded bitwise"
    )


def test_a_refusal_names_steps_and_rows_that_are_masked_everywhere() -> None:
    assert judged(outcome(off(0.5, 3)), STEPS).reason == (
        "the new region differs: 1 of 8 elements, by up to 0.5 (3 steps) on xnnpack, demanded steps 2"
    )
    assert judged(outcome(off(0.5), masked=off(2.0))).reason.endswith(
        "1 of 8 elements, by up to 2 in rows masked everywhere on xnnpack, demanded bitwise"
    )


def test_rows_that_are_masked_everywhere_are_told_apart_and_excused_by_a_relative_demand_alone() -> None:
    made = outcome(SAME, SAME, masked=off(3.0))
    proof = judged(made, RELATIVE)
    assert (proof.holds, proof.max_abs, proof.fully_masked_rows_max_abs) == (True, 0.0, 3.0)
    assert not judged(made).holds
    assert judged(outcome(SAME, SAME), RELATIVE).fully_masked_rows_max_abs is None


# Kernels whose result depends on the shape


@pytest.mark.parametrize(
    ("text", "found", "holds"),
    [
        (SOFTMAX, off(4e-6), True),
        (SOFTMAX, off(4.1e-6), False),
        (PLAIN, off(4e-6), False),
        (SUM, off(12.8, 128), True),
        (SUM, off(12.9, 129), False),
    ],
)
def test_optimized_kernels_that_round_by_shape_have_a_bound_where_the_reference_is_bitwise(
    text: str, found: Difference, holds: bool
) -> None:
    assert judged(outcome(found, SAME), text=text).holds is holds
    assert not judged(outcome(found), text=text).holds
    assert not judged(outcome(SAME, found), text=text).holds
    rows = {"xnnpack": (OutputProof(0, SAME, found),), "reference": (OutputProof(0, SAME, SAME),)}
    assert judged(Outcome(rows), text=text).holds is holds, "in rows that are masked everywhere, too"


@pytest.mark.parametrize(
    ("text", "same", "note"),
    [
        (
            SUM,
            Difference(8, 8, steps=0),
            "int16 ADD rounds by shape on optimized kernels: results may differ by up to",
        ),
        (
            SOFTMAX,
            SAME,
            "SOFTMAX with beta rounds by shape on optimized kernels: results may differ by up to 1e-06",
        ),
    ],
)
def test_the_site_says_so_though_no_run_differed(text: str, same: Difference, note: str) -> None:
    proof = judged(outcome(same, same), text=text)
    assert (proof.holds, proof.bitwise) == (True, False)
    assert proof.note.startswith(note)


def test_versions_that_cannot_be_compared_fail_with_the_reason() -> None:
    proof = judged(Outcome({}, mismatch="output 0: shape"))
    assert (proof.holds, proof.open, proof.max_abs) == (False, False, float("inf"))
    assert proof.reason == "the two versions cannot be compared: output 0: shape"


def clipped(saturated: int, short: int, left: int = 6) -> Outcome:
    same = Difference(left, finite=left, largest=4.0, steps=0)
    return Outcome({"reference": (OutputProof(0, same, None, saturated, short),)})


def test_what_was_clipped_inside_may_go_on_and_not_turn_back() -> None:
    proof = judged(clipped(2, 2), STEPS, clipped=True)
    assert (proof.holds, proof.bitwise) == (True, False)
    assert proof.note == "2 of 8 random values were clipped inside the old region and are not any more"
    proof = judged(clipped(2, 3), STEPS, clipped=True)
    assert (proof.holds, proof.note) == (False, "")
    assert proof.reason == "the new region stays 3 steps short of where the old one was clipped"
    assert judged(clipped(0, 0), STEPS, clipped=True).note == ""


def test_where_every_value_is_clipped_nothing_can_be_compared() -> None:
    nothing = clipped(8, 0, left=0)
    assert judged(nothing, STEPS, clipped=True).reason.startswith("every value is clipped inside")
    assert judged(nothing, STEPS, clipped=True, must_compare=False).holds


def test_results_that_tell_nothing_prove_nothing_where_something_must_be_compared() -> None:
    made = outcome(SAME, SAME, untold="output 0 is the same value everywhere")
    with pytest.raises(RefusedError, match="the same value everywhere"):
        judged(made)
    assert judged(made, must_compare=False).holds
    wrong = judged(outcome(off(0.5), untold="output 0 is the same value everywhere"))
    assert wrong.reason.startswith("the new region differs")


def test_several_runs_are_as_good_as_the_worst() -> None:
    good = Proof(BITWISE, holds=True, bitwise=True, max_abs=0.0, ran=RAN)
    worse = Proof(
        BITWISE, holds=True, bitwise=False, max_abs=0.5, steps=1, fully_masked_rows_max_abs=2.0, note="n"
    )
    for proofs in ([good, worse], [worse, good]):
        found = all_of(proofs)
        assert (found.bitwise, found.max_abs, found.steps, found.note) == (False, 0.5, 1, "n")
        assert (found.fully_masked_rows_max_abs, found.ran) == (2.0, proofs[-1].ran)
    assert all_of([good]).steps is None


# What tells right from wrong


def told(values: np.ndarray, parts: int = 1) -> str:
    return untold([values], parts)


def test_results_tell_where_they_hold_two_values() -> None:
    assert told(np.arange(4, dtype=np.float32)) == ""
    assert told(np.ones(4, np.float32)) == "output 0 is the same value everywhere"
    assert told(np.full(4, np.nan, np.float32)) == "output 0 is nowhere a finite number"
    assert told(np.zeros((0, 4), np.int8)) == "output 0 is nowhere a finite number"
    assert told(np.array([np.nan, 1, 1], np.float32)) == "output 0 is the same value everywhere"
    assert told(np.array([np.nan, 1, np.inf], np.float32)) == ""
    assert untold([np.arange(4), np.ones(4)], 1) == "output 1 is the same value everywhere"


def test_a_single_number_has_one_value() -> None:
    assert told(np.ones(1, np.float32)) == ""


def test_parts_tell_where_all_of_them_differ() -> None:
    alike = np.array([[1, 2], [3, 4], [1, 2], [5, 6]], np.float32)
    assert told(alike, parts=4) == "of the 4 parts of output 0 along axis 0 some are equal"
    assert told(alike, parts=3) == ""
    assert told(alike + np.arange(4, dtype=np.float32)[:, np.newaxis], parts=4) == ""
    assert told(alike, parts=1) == ""
