"""What the figures of a run mean: whether the demand is met, and in which words that is told. Runs nothing."""

import math
from collections.abc import Sequence
from dataclasses import replace

from edge_opt.ir.refusal import RefusedError
from edge_opt.passes.contract import Demand, Proof, Ran
from edge_opt.proof.extremes import KINDS
from edge_opt.proof.metrics import Difference
from edge_opt.proof.pair import Outcome

_ROUNDING = 1e-6


def failed(demand: Demand, reason: str) -> Proof:
    """It does not hold."""
    return Proof(demand, holds=False, bitwise=False, max_abs=math.inf, reason=reason)


def undecided(demand: Demand, reason: str) -> Proof:
    """Nothing was shown either way."""
    return replace(failed(demand, reason), open=True)


def all_of(proofs: Sequence[Proof]) -> Proof:
    """One verdict on runs that all hold: the worst figures, and the last run's words."""
    steps = [proof.steps for proof in proofs if proof.steps is not None]
    masked = [p.fully_masked_rows_max_abs for p in proofs if p.fully_masked_rows_max_abs is not None]
    return replace(
        proofs[-1],
        bitwise=all(proof.bitwise for proof in proofs),
        max_abs=max(proof.max_abs for proof in proofs),
        steps=max(steps, default=None),
        fully_masked_rows_max_abs=max(masked, default=None),
        note=next((proof.note for proof in reversed(proofs) if proof.note), ""),
        repeated=all(proof.repeated for proof in proofs),
        extremes=any(proof.extremes for proof in proofs),
    )


def judge(
    outcome: Outcome,
    demand: Demand,
    ran: tuple[Ran, ...],
    *,
    clipped: bool = False,
    must_compare: bool = True,
) -> Proof:
    """What the figures mean. `clipped`: elements that the old region clipped were counted apart.

    Raises:
        RefusedError: both versions agree, but so would many a wrong one, and they `must_compare`.
    """
    if outcome.mismatch is not None:
        return failed(demand, f"the two versions cannot be compared: {outcome.mismatch}")
    proofs = outcome.all()
    if must_compare and clipped and not all(proof.open_rows.elements for proof in proofs):
        return failed(demand, "every value is clipped inside the old region, so nothing can be compared")
    reason, note = _violation(outcome, demand, clipped=clipped)
    for kind, outputs in outcome.extremes.items():
        reason = reason or _violation(Outcome(outputs), demand, on=f"on {KINDS[kind]}", clipped=clipped)[0]
    if not reason and outcome.untold and must_compare:
        raise RefusedError(outcome.untold)
    has_masked = any(proof.masked_rows is not None for proof in proofs)
    return Proof(
        demand,
        holds=not reason,
        bitwise=outcome.bitwise,
        max_abs=outcome.worst(lambda difference: difference.max_abs),
        steps=_steps(outcome),
        fully_masked_rows_max_abs=outcome.worst(lambda d: d.max_abs, masked=True) if has_masked else None,
        reason=reason,
        note=note,
        ran=ran,
        extremes=bool(outcome.extremes),
    )


def _violation(outcome: Outcome, demand: Demand, *, on: str = "", clipped: bool) -> tuple[str, str]:
    """Why the demand is not met, empty where it is; and a note on how it is met."""
    holds, note = _holds(outcome, demand)
    if not holds:
        return f"the new region differs{on and ' '}{on}: {_figures(outcome)}, demanded {demand}", note
    if not clipped:
        return "", note
    proofs = outcome.all()
    most, short = max(proof.saturated for proof in proofs), max(proof.short for proof in proofs)
    total = max(proof.saturated + proof.open_rows.elements for proof in proofs)
    if short > demand.tolerance:
        new = f"{on}{on and ' '}the new region"
        return f"{new} stays {short} steps short of where the old one was clipped", ""
    if most:
        note = f"{most} of {total} random values were clipped inside the old region and are not any more"
    return "", note if most else ""


def _holds(outcome: Outcome, demand: Demand) -> tuple[bool, str]:
    """Whether the demand is met, and a note where that is so on the reference kernels alone."""
    if demand.kind == "relative":
        return outcome.worst(lambda difference: difference.max_rel) <= demand.tolerance, ""
    if demand.kind == "absolute":
        return outcome.worst(lambda difference: difference.max_abs) <= demand.tolerance, ""
    if demand.kind == "steps":
        opened = [proof.open_rows for proof in outcome.all()]
        return all(o.bitwise or (o.steps is not None and o.steps <= demand.tolerance) for o in opened), ""
    if outcome.bitwise:
        return True, ""
    # Where XNNPACK declines an operator, the interpreter's optimized kernel runs. Its float softmax rounds a row
    # differently depending on how many rows there are (up to 1.2e-7), its int16 ADD an element depending on whether an
    # operand is broadcast (one step in a million). The reference kernels do not.
    measured = [difference for proof in outcome.all() for difference in proof.measured]
    if not outcome.bitwise_on("reference") or not all(map(_is_rounding, measured)):
        return False, ""
    steps = _steps(outcome)
    gap = f"{max(difference.max_rel for difference in measured):.1e} relative"
    how = "by row count"
    if steps is not None:
        gap, how = f"{steps} step{'s'[: steps != 1]}", "a sum by whether it broadcasts"
    return True, f"bitwise on reference kernels; {gap} on optimized ones, which round {how}"


def _is_rounding(difference: Difference) -> bool:
    return difference.max_rel <= _ROUNDING if difference.steps is None else difference.steps <= 1


def _steps(outcome: Outcome) -> int | None:
    """The most steps in rows that are not masked everywhere."""
    steps = (proof.open_rows.steps for proof in outcome.all())
    return max((count for count in steps if count is not None), default=None)


def _figures(outcome: Outcome) -> str:
    texts = []
    for kernels, proofs in outcome.outputs.items():
        rows = [(proof.open_rows, "") for proof in proofs]
        rows += [(p.masked_rows, " in rows masked everywhere") for p in proofs if p.masked_rows is not None]
        worst, where = max(rows, key=lambda row: row[0].max_abs)
        steps = f" ({worst.steps} steps)" if worst.steps else ""
        texts.append(
            f"{worst.differing} of {worst.elements} elements, by up to {worst.max_abs:.3g}{steps}{where} on {kernels}"
        )
    return "; ".join(texts)
