"""What figures mean: given what two versions of a region came to, whether that will do, and in which words."""

import math

import numpy as np
import pytest
from proof_models import tensor

from edge_opt.ir.parse import parse
from edge_opt.passes import Check, Exact, Proof, Steps, Table, Within
from edge_opt.runtime.metrics import Difference, Tolerance, measure
from edge_opt.verification.examine import judge
from edge_opt.verification.region import Region
from edge_opt.verification.trial import Outcome, Trial
from edge_opt.verification.verdict import Ran

SAME = Difference(8, finite=8, largest=4.0)
CODES = Difference(8, finite=8, largest=4.0, steps=0)
BITWISE, STEPS = Exact(), Steps(2)
RELATIVE, ABSOLUTE = Within(0.25), Table(0.25)
PLAIN = "subgraph main (%x: float32[8]) { %y: float32[8] = ABS(%x) return %y }"
SOFTMAX = "subgraph main (%x: float32[8]) { %y: float32[8] = SOFTMAX(%x) {beta: 2.0} return %y }"
SUM = """subgraph main (%x: int16[8] q(0.1, 0)) {
  %y: int16[8] q(0.1, 0) = ADD(%x, %x)
  return %y
}"""


def off(gap: float, steps: int | None = None) -> Difference:
    """One element of eight is `gap` away, the largest being 4."""
    outside = int(gap > ABSOLUTE.atol)
    return Difference(
        8, finite=8, differing=1, outside=outside, max_abs=gap, largest=4.0, steps=steps
    )


def outcome(*found: Difference, inconclusive: str = "", **extremes: Difference) -> Outcome:
    """One output on both kernel sets: first the optimized kernels, then the reference."""
    each = {name: (own,) for name, own in zip(("xnnpack", "reference"), found, strict=False)}
    return Outcome(
        {"": each, **{kind: {"xnnpack": (own,)} for kind, own in extremes.items()}}, inconclusive
    )


def judged(
    made: Outcome,
    check: Check = BITWISE,
    *,
    text: str = PLAIN,
    limits: tuple[int, int] | None = None,
) -> Proof:
    return judge(made, Region(parse(text), parse(text), "region", check, Trial(clipped=limits)))


@pytest.mark.parametrize(
    ("check", "found", "holds"),
    [
        (BITWISE, SAME, True),
        (BITWISE, off(0.5), False),
        (BITWISE, off(1e-9, 0), False),
        (STEPS, off(0.5, 2), True),
        (STEPS, off(0.5, 3), False),
        (STEPS, off(0.5), False),
        (STEPS, SAME, True),
        (RELATIVE, off(1.0), True),
        (RELATIVE, off(1.125), False),
        (ABSOLUTE, off(0.25), True),
        (ABSOLUTE, off(0.375), False),
    ],
)
def test_a_check_holds_up_to_its_tolerance(check: Check, found: Difference, holds: bool) -> None:
    for made in (outcome(found, found), outcome(SAME, found), outcome(found, SAME), outcome(found)):
        proof = judged(made, check)
        assert (proof.holds, proof.max_abs, proof.steps) == (holds, found.max_abs, found.steps)
        assert proof.bitwise is found.bitwise
        assert not proof.is_inconclusive
        assert proof.ran == tuple(map(Ran, made.found[""]))


_ROUNDS = "optimized kernels round {} differently for some shapes"
_SUMS = f"{_ROUNDS.format('int16 ADD')}: results may differ by up to 128 steps (here by"
_SOFTMAX = f"{_ROUNDS.format('SOFTMAX with beta')}: results may differ by up to 1e-06 of their range (here by"
_ONLY = "on xnnpack kernels only: the others cannot run the region on its own"
_ROUNDED_ALONE = f"{_ONLY}; {_ROUNDS.format('int16 ADD')}, and the reference kernels cannot run it"
_DIFFERS = "the new region differs"
_STEPS = (
    "0 of 8 elements, by up to 0 on xnnpack; 1 of 8 elements, by up to 0.5 (3 steps) on reference, "
    "but must be at most 2 quantization steps apart"
)
_HIGH = (
    "on large positive logits, queries of the highest code: 1 of 8 elements, by up to 0.5 on xnnpack, "
    "but must be bit-identical"
)


@pytest.mark.parametrize(
    ("text", "check", "made", "holds", "said"),
    [
        (PLAIN, BITWISE, outcome(SAME, SAME), True, ""),
        (PLAIN, BITWISE, outcome(SAME), True, _ONLY),
        (PLAIN, STEPS, outcome(SAME, off(0.5, 3)), False, f"{_DIFFERS}: {_STEPS}"),
        (PLAIN, STEPS, outcome(SAME, SAME, high=off(0.5, 2)), True, ""),
        (PLAIN, BITWISE, outcome(SAME, SAME, tiny=SAME, high=off(0.5)), False, f"{_DIFFERS} {_HIGH}"),
        # Optimized kernels that round by shape have a bound where the reference is bitwise.
        (PLAIN, BITWISE, outcome(off(4e-6), SAME), False, None),
        (SOFTMAX, BITWISE, outcome(off(4e-6), SAME), True, f"{_SOFTMAX} 1.0e-06)"),
        (SOFTMAX, BITWISE, outcome(off(4.1e-6), SAME), False, None),
        (SOFTMAX, BITWISE, outcome(off(4e-6)), False, None),
        (SOFTMAX.replace("2.0", "1.0"), BITWISE, outcome(off(4e-6), SAME), False, None),
        (SOFTMAX, BITWISE, outcome(SAME, off(4e-6)), False, None),
        (SUM, BITWISE, outcome(off(12.8, 128), SAME), True, f"{_SUMS} 128)"),
        (SUM, BITWISE, outcome(off(12.9, 129), SAME), False, None),
        (SUM, BITWISE, outcome(off(12.7, 127), SAME), True, f"{_SUMS} 127)"),
        (SOFTMAX, BITWISE, outcome(off(0.5, 2), SAME), False, None),
        (SUM, BITWISE, outcome(CODES, CODES), True, f"{_SUMS} 0)"),
        (SUM, STEPS, outcome(CODES, CODES), True, ""),
        (SUM, BITWISE, outcome(CODES), True, _ROUNDED_ALONE),
        (PLAIN, BITWISE, outcome(off(0.5), inconclusive="output 0 is the same value everywhere"), False, None),
    ],
)  # fmt: skip
def test_what_a_proof_says(
    text: str, check: Check, made: Outcome, holds: bool, said: str | None
) -> None:
    proof = judged(made, check, text=text)
    assert proof.holds is holds
    assert said is None or (proof.note if holds else proof.reason) == said
    assert proof.extremes == (len(made.found) > 1)
    if holds:
        assert proof.bitwise is (text == PLAIN or check is STEPS)


def test_clipped_values_are_not_bitwise_and_results_that_tell_nothing_no_proof() -> None:
    assert judged(outcome(CODES, CODES), STEPS).bitwise
    assert not judged(outcome(CODES, CODES), STEPS, limits=(-5, 5)).bitwise
    proof = judged(outcome(SAME, SAME, inconclusive="output 0 is NaN"))
    assert (proof.holds, proof.is_inconclusive) == (False, True)
    said = "cannot be verified: output 0 is NaN, so a wrong rewrite would give the same result"
    assert proof.reason == said


def test_no_difference_is_within_nan() -> None:
    ones = np.ones(4, np.float32)
    info = tensor("x", 4)
    for tolerance in (Tolerance(atol=math.nan), Tolerance(relative=math.nan)):
        assert not tolerance.permits(measure(ones, 2 * ones, (info, info), tolerance=tolerance))
        assert tolerance.permits(measure(ones, ones, (info, info), tolerance=tolerance))
