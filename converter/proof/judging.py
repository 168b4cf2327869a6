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
    if must_compare and clipped and not all(p.open_rows.elements for p in outcome.all()):
        return failed(demand, "every value is clipped inside the old region, so nothing can be compared")
    max_abs = outcome.worst(lambda difference: difference.max_abs)
    masked = outcome.worst(lambda difference: difference.max_abs, masked=True)
    has_masked = any(proof.masked_rows is not None for proof in outcome.all())
    holds, note = _holds(outcome, demand)
    reason = "" if holds else f"the new region differs: {_figures(outcome)}, demanded {demand}"
    if holds and clipped:
        holds, words = _turns_back(outcome, demand)
        note, reason = (words, "") if holds else ("", words)
    extreme = next(
        (text for kind in outcome.extremes if (text := _on_extreme(outcome, kind, demand, clipped))), ""
    )
    if holds and extreme:
        holds, reason = False, extreme
    if holds and outcome.untold and must_compare:
        raise RefusedError(outcome.untold)
    return Proof(
        demand,
        holds=holds,
        bitwise=outcome.bitwise,
        max_abs=max_abs,
        steps=_steps(outcome),
        fully_masked_rows_max_abs=masked if has_masked else None,
        reason=reason,
        note=note,
        ran=ran,
        extremes=bool(outcome.extremes),
    )


def _on_extreme(outcome: Outcome, kind: str, demand: Demand, clipped: bool) -> str:
    """What is wrong on extreme inputs of this kind; empty where nothing is."""
    found = replace(outcome, outputs=outcome.extremes[kind], extremes={})
    if not _holds(found, demand)[0]:
        return f"the new region differs on {KINDS[kind]}: {_figures(found)}, demanded {demand}"
    holds, words = _turns_back(found, demand) if clipped else (True, "")
    return "" if holds else f"on {KINDS[kind]} {words}"


def _holds(outcome: Outcome, demand: Demand) -> tuple[bool, str]:
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
    found = [difference for proof in outcome.all() for difference in proof.measured]
    if outcome.bitwise_on("reference") and all(map(_is_rounding, found)):
        worst = _steps(outcome)
        how = "by row count" if worst is None else "a sum by whether it broadcasts"
        relative = f"{max(difference.max_rel for difference in found):.1e} relative"
        gap = relative if worst is None else f"{worst} step{'s'[: worst != 1]}"
        return True, f"bitwise on reference kernels; {gap} on optimized ones, which round {how}"
    return False, ""


def _is_rounding(found: Difference) -> bool:
    return found.max_rel <= _ROUNDING if found.steps is None else found.steps <= 1


def _turns_back(outcome: Outcome, demand: Demand) -> tuple[bool, str]:
    """Whether elements that the old region clipped reach its clipping limits in the new one, and how many they are."""
    proofs = outcome.all()
    clipped, short = max(p.saturated for p in proofs), max(p.short for p in proofs)
    total = max(p.saturated + p.open_rows.elements for p in proofs)
    if short > demand.tolerance:
        return False, f"the new region stays {short} steps short of where the old one was clipped"
    if not clipped:
        return True, ""
    return True, f"{clipped} of {total} random values were clipped inside the old region and are not any more"


def _steps(outcome: Outcome) -> int | None:
    """The most steps in rows that are not masked everywhere."""
    found = (proof.open_rows.steps for proof in outcome.all())
    return max((steps for steps in found if steps is not None), default=None)


def _figures(outcome: Outcome) -> str:
    texts = []
    for kernels, proofs in outcome.outputs.items():
        rows = [(proof.open_rows, "") for proof in proofs]
        rows += [(p.masked_rows, " in rows masked everywhere") for p in proofs if p.masked_rows is not None]
        worst, where = max(rows, key=lambda found: found[0].max_abs)
        steps = f" ({worst.steps} steps)" if worst.steps else ""
        texts.append(
            f"{worst.differing} of {worst.elements} elements, by up to {worst.max_abs:.3g}{steps}{where} on {kernels}"
        )
    return "; ".join(texts)
