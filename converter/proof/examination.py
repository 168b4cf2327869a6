"""Runs one region on one worker, and judges the figures.

It decides on what kernels, on which rows, with which inputs and for how long; then whether the demand is met, and in
which words that is said.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import cast

from edge_opt.base.errors import ModelFormatError
from edge_opt.ir import Model, to_tables
from edge_opt.ir.refusal import RefusedError
from edge_opt.passes.contract import Proof, Ran
from edge_opt.passes.rewrite import Demand
from edge_opt.proof.rows import Rows, multiply_adds, sample
from edge_opt.proof.structure import Structure, structure
from edge_opt.proof.sums import sums_differ, sums_of_one_shape, sums_that_broadcast
from edge_opt.runtime.errors import RuntimeCrashed, RuntimeFailed, RuntimeRefused, RuntimeTimedOut
from edge_opt.runtime.extremes import KINDS
from edge_opt.runtime.metrics import Difference
from edge_opt.runtime.pair import Outcome, ProofRequest
from edge_opt.runtime.runner import Worker
from edge_opt.runtime.tensors import Kernels
from edge_opt.schema.writer import model_bytes

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
    # differently depending on how many rows there are (up to 1.2e-7). The reference kernels do not.
    measured = [difference for proof in outcome.all() for difference in proof.measured]
    if not outcome.bitwise_on("reference") or not all(map(_is_rounding, measured)):
        return False, ""
    gap = f"{max(difference.max_rel for difference in measured):.1e} relative"
    return True, f"bitwise on reference kernels; {gap} on optimized ones, which round by row count"


def _is_rounding(difference: Difference) -> bool:
    return difference.bitwise or (difference.steps is None and difference.max_rel <= _ROUNDING)


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


_ONE_SUM = (
    "bitwise where one kernel computes the sums of int16, of which the runtime has two that round differently"
)
_KERNELS: tuple[Kernels, ...] = ("xnnpack", "reference")
_LEAST_SECONDS = 60.0
_MARGIN = 10.0  # the machine may be that much busier than it was when its speed was measured
# In multiply-adds: up to which a region is always run in full on both kernel sets; below which a run says nothing of
# the machine's speed; and how many a second are assumed before one was measured, a fourteenth of the slowest kernel's.
_IN_FULL = 1 << 26
_MEASURED = 1 << 22
_SLOW = 5e7


@dataclass(frozen=True)
class Region:
    """Both versions cut out as models, and the region's name for messages; on these `rows` of `length`, or all."""

    before: Model
    after: Model
    name: str
    rows: tuple[int, ...] = ()
    length: int = 0

    @property
    def cost(self) -> int:
        """Multiply-adds of one run of both."""
        return multiply_adds(self.before) + multiply_adds(self.after)

    @cached_property
    def structure(self) -> Structure:
        """What other regions are compared with."""
        return structure(self.before, self.after)

    @cached_property
    def files(self) -> tuple[bytes, bytes]:
        """Both versions as a worker takes them, which reads and checks them before they go out."""
        return model_bytes(to_tables(self.before)), model_bytes(to_tables(self.after))


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked of a region; questions with equal keys have equal answers."""

    region: Region
    demand: Demand
    request: ProofRequest
    must_compare: bool = True

    @property
    def key(self) -> Hashable:
        """What a question is remembered by."""
        return self.region.structure, self.demand, self.request, self.must_compare

    @property
    def can_be_sampled(self) -> bool:
        """Whether rows are alike in it: none is masked everywhere on purpose, and no clipped value is left out."""
        return self.demand.kind == "bitwise" and not self.request.limits and not self.request.row_axes

    def others(self) -> Iterator[Question]:
        """The same with other inputs, should these not tell right from wrong: all of each range, then its ends."""
        yield self
        whole = replace(
            self.request, hints=tuple(hint and replace(hint, spread=1.0) for hint in self.request.hints)
        )
        if whole != self.request:
            yield replace(self, request=whole)
        yield replace(self, request=replace(whole, kind="large"))

    def without_extremes(self) -> Question:
        """The same on realistic inputs alone."""
        return replace(self, request=replace(self.request, extremes=()))

    @property
    def sums_of_one_shape(self) -> bool:
        """Whether the runtime may take either of its kernels for sums of int16."""
        return any(map(sums_of_one_shape, (self.region.before, self.region.after)))

    def with_sums_that_broadcast(self) -> Question:
        """The same of versions that sum int16 by one of the runtime's two kernels."""
        before, after = map(sums_that_broadcast, (self.region.before, self.region.after))
        return replace(self, region=replace(self.region, before=before, after=after))

    def on(self, part: Rows) -> Question:
        """The same on some rows."""
        region = Region(part.before, part.after, self.region.name, part.rows, part.length)
        return replace(self, region=region, request=replace(self.request, at_once=True, cut=part.cut))


@dataclass(slots=True)
class Settings:
    """What all examinations of a conversion share; `speeds` has multiply-adds a second by kernel sets, as measured."""

    seed: int
    time_limit: float | None
    exhaustive: bool
    speeds: dict[tuple[Kernels, ...], float] = field(default_factory=dict)

    def samples(self, question: Question) -> bool:
        """Whether the region is large enough, and such, that rows may stand for all of it."""
        return not self.exhaustive and question.region.cost > _IN_FULL and question.can_be_sampled

    def relies(self, question: Question) -> bool:
        """Whether the proof of another region of the same structure may stand for a part of it."""
        return self.samples(question) or (not self.exhaustive and bool(question.request.extremes))

    def limit(self, kernels: tuple[Kernels, ...], operations: int) -> float:
        """Seconds that a run may take."""
        if self.time_limit is not None:
            return self.time_limit
        speed = self.speeds.get(kernels) or min(self.speeds.values(), default=_SLOW)
        return _LEAST_SECONDS + _MARGIN * operations / speed


@dataclass(frozen=True, slots=True)
class Examiner:
    """Examines a region on a worker; `covered`: its structure is proved in full elsewhere, so that rows are enough."""

    worker: Worker
    settings: Settings
    covered: bool

    def examine(self, question: Question) -> Proof:
        """The first answer that decides; where no inputs make the results tell right from wrong, an open one."""
        untold = ""
        if self.covered:
            question = question.without_extremes()
        for other in question.others():
            try:
                return self._run(other)
            except RefusedError as refused:
                untold = untold or str(refused)
        reason = f"not provable: {untold}, whatever inputs are tried, so a wrong rewrite would give the same"
        return undecided(question.demand, reason)

    def _run(self, question: Question) -> Proof:
        try:
            return (
                self._at_size(question) if self.settings.samples(question) else self._where_possible(question)
            )
        except ModelFormatError as error:
            reason = f"the region alone is no model that may be run: {error}"
        except RuntimeTimedOut as error:
            return undecided(question.demand, f"there was no time to prove it: {error}")
        except RuntimeRefused as error:
            alone = error.reason.startswith("before:")
            what = "cannot run the region alone" if alone else "refuses the new region"
            reason = f"the runtime {what}: {error.reason}"
        except RuntimeFailed as error:
            reason = f"the proof could not be run: {error}"
        return failed(question.demand, reason)

    def _at_size(self, question: Question) -> Proof:
        """On rows first, which is quick; then in full, unless the structure was proved in full already.

        Extreme inputs are run on rows only.
        """
        part = sample(question.region.before, question.region.after, self.settings.seed)
        on_rows = None if part is None else self._on_rows(question.on(part))
        question = question.without_extremes()
        if on_rows is None:
            return self._where_possible(question)
        if not on_rows.holds or self.covered:
            return on_rows
        kernels: tuple[Kernels, ...] = (cast("Kernels", on_rows.ran[0].kernels),)
        # As they are, the two would give other codes here and there, and would have to run once more.
        alike = sums_differ(question.region.before, question.region.after)
        in_full = (self._with_one_sum(question, kernels) if alike else None) or self._ask(question, kernels)
        if not in_full.holds and len(on_rows.ran) > 1:
            # Where XNNPACK declines an operator, only the reference kernels may be bitwise; and the report is whole.
            in_full = self._ask(question, _KERNELS)
        if not in_full.holds:
            return in_full
        done = {ran.kernels for ran in in_full.ran}
        rest = tuple(ran for ran in on_rows.ran if ran.kernels not in done)
        return replace(all_of([on_rows, in_full]), ran=(*in_full.ran, *rest))

    def _on_rows(self, question: Question) -> Proof:
        """Where the structure is proved on both kernel sets, one of them is enough, if it gives the same bits."""
        if self.covered:
            with suppress(RuntimeRefused):
                proof = self._ask(question, _KERNELS[:1])
                if proof.holds:
                    return proof
        return self._where_possible(question)

    def _where_possible(self, question: Question) -> Proof:
        """Some operators exist in one kernel set only; then that one has to do, and the proof says so."""
        try:
            return self._ask(question, _KERNELS)
        except RuntimeRefused as error:
            if not error.reason.startswith("before:"):
                raise
            refusal = error
        for kernels in _KERNELS:
            try:
                proof = self._ask(question, (kernels,))
            except RuntimeTimedOut:
                raise
            except RuntimeFailed:
                continue
            only = f"on {kernels} kernels only: the others refuse the region alone"
            return replace(proof, note="; ".join(filter(None, (only, proof.note))))
        raise refusal

    def _ask(self, question: Question, kernels: tuple[Kernels, ...]) -> Proof:
        proof = self._judged(question, kernels, self._outcome(question, kernels))
        if proof.holds or question.demand.kind != "bitwise" or not question.sums_of_one_shape:
            return proof
        again = self._with_one_sum(question, kernels)
        if again is None or not again.holds:
            return proof
        note = f"{again.note}; as it runs them, results differ by {proof.steps} step{'s'[: proof.steps != 1]}"
        return replace(again, max_abs=proof.max_abs, steps=proof.steps, note=note)

    def _with_one_sum(self, question: Question, kernels: tuple[Kernels, ...]) -> Proof | None:
        """The same where one kernel computes the sums of int16; None where the runtime does not run that."""
        with suppress(RuntimeRefused, RuntimeCrashed):  # It aborts where all scales are powers of two.
            outcome = self._outcome(question.with_sums_that_broadcast(), kernels)
            proof = self._judged(question, kernels, outcome)
            return replace(proof, bitwise=False, note=_ONE_SUM) if proof.holds else proof
        return None

    def _judged(self, question: Question, kernels: tuple[Kernels, ...], outcome: Outcome) -> Proof:
        ran = tuple(Ran(name, question.region.rows, question.region.length) for name in kernels)
        clipped = bool(question.request.limits)
        return judge(outcome, question.demand, ran, clipped=clipped, must_compare=question.must_compare)

    def _outcome(self, question: Question, kernels: tuple[Kernels, ...]) -> Outcome:
        region, request = question.region, question.request
        operations = region.cost * len(kernels) * (1 + len(request.extremes))
        limit = self.settings.limit(kernels, operations)
        request = replace(request, kernels=kernels, seed=self.settings.seed)
        prove = partial(self.worker.prove, *region.files, request, seconds=limit, where=region.name)
        try:
            try:
                outcome = prove()
            except RuntimeCrashed:
                # A worker killed by somebody between two requests says nothing of a region; a second time, it does.
                outcome = prove()
        except RuntimeTimedOut as error:
            raise RuntimeTimedOut(
                f"region {region.name} took longer than {limit:.3g} s; --proof-seconds {max(1, 2 * limit):.0f} "
                "gives each run of a region longer, --verify none proves nothing"
            ) from error
        if operations > _MEASURED:
            self.settings.speeds[kernels] = operations / outcome.seconds
        return outcome
