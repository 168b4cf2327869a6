"""Runs one region on one worker, and judges the figures: whether the demand is met, and in which words that is said."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from edge_opt.base.errors import ModelFormatError
from edge_opt.base.words import many
from edge_opt.ir import DType, Model, Operator, to_tables
from edge_opt.ir.refusal import RefusedError
from edge_opt.passes.contract import Proof, Ran
from edge_opt.passes.rewrite import Demand
from edge_opt.proof.sizes import FACTOR, multiply_adds, shrunk
from edge_opt.proof.structure import Structure, structure
from edge_opt.runtime.errors import RuntimeCrashed, RuntimeFailed, RuntimeRefused, RuntimeTimedOut
from edge_opt.runtime.extremes import KINDS
from edge_opt.runtime.metrics import Difference
from edge_opt.runtime.pair import Outcome, ProofRequest
from edge_opt.runtime.runner import Worker
from edge_opt.runtime.tensors import Kernels
from edge_opt.schema.writer import model_bytes

_KERNELS: tuple[Kernels, ...] = ("xnnpack", "reference")
_IN_FULL = 1 << 26  # multiply-adds up to which everything is run in full
_DRAWS = 3
_LEAST_SECONDS = 60.0
_SLOWEST = 2e7  # multiply-adds a second: a hundredth of the slowest kernel's, for a machine as busy as that
_ROUNDING = 1e-6  # relative, of floats that optimized kernels round by shape
_STEPS = {DType.INT16: 128}  # of codes that follow such a rounding, by type; otherwise one


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
        extremes=any(proof.extremes for proof in proofs),
    )


@dataclass(frozen=True)
class Region:
    """Both versions cut out as models, and the region's name for messages; at its lengths `divided` by so much."""

    before: Model
    after: Model
    name: str
    divided: int = 1

    @cached_property
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

    @cached_property
    def rounds_by_shape(self) -> str:
        """The operator whose optimized kernel gives other numbers for other shapes; empty where there is none."""
        operators = (
            operator
            for model in (self.before, self.after)
            for graph in model.subgraphs
            for operator in graph.operators
        )
        return next(filter(None, map(_rounds_by_shape, operators)), "")

    @property
    def bounds(self) -> list[int]:
        """By how many codes each result may differ where such an operator rounds."""
        return [_STEPS.get(tensor.dtype, 1) for tensor in self.before.subgraphs[0].outputs]


def _rounds_by_shape(operator: Operator) -> str:
    """The optimized kernels of LiteRT whose arithmetic depends on the shape of what they are given."""
    if operator.name == "ADD" and operator.output.dtype is DType.INT16:
        return "int16 ADD"  # AVX2 for operands of one shape, another kernel where one broadcasts
    if operator.name == "SOFTMAX" and operator.output.dtype.is_float and operator.option("beta") != 1.0:
        return "SOFTMAX with beta"  # XNNPACK declines it, and the other kernel rounds by the number of rows
    return ""


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked of a region: to run it on inputs, and to judge the results by a demand."""

    region: Region
    demand: Demand
    request: ProofRequest
    must_compare: bool = True
    draw: int = 0

    @property
    def draws(self) -> int:
        """On how many random inputs the region is run: codes of a small one on several."""
        inputs = self.region.before.subgraphs[0].inputs
        small = self.region.cost <= _IN_FULL and any(tensor.is_quantized for tensor in inputs)
        return _DRAWS if small else 1

    def in_part(self) -> Question | None:
        """The same at a fraction of the lengths; None where the region is small, or no part stands for it.

        Rows that are masked on purpose and clipped values are places, so such a region has no part.
        """
        region = self.region
        placed = self.request.limits or self.request.row_axes or self.demand.kind != "bitwise"
        if region.cost <= _IN_FULL or placed:
            return None
        before, after = shrunk(region.before), shrunk(region.after)
        if before is None or after is None:
            return None
        return replace(self, region=Region(before, after, region.name, FACTOR))

    def on_realistic(self, scale: float) -> Question:
        """The same without extreme inputs, its operands at a scale."""
        return replace(self, request=replace(self.request, extremes=(), scale=scale))


@dataclass(frozen=True, slots=True)
class Examiner:
    """Examines regions on a worker.

    A small region is run in full, on both kernel sets. A large one is run at a fraction of its lengths on both, extreme
    inputs included; then in full, on XNNPACK's kernels where these must give the same bits, else on the reference ones.
    A region that does not run at such a fraction is run in full like a small one.
    """

    worker: Worker
    seed: int = 0
    time_limit: float | None = None

    def examine(self, question: Question) -> Proof:
        """Whether the demand is met; an open answer where no inputs make the results tell right from wrong.

        Raises:
            RuntimeTimedOut: the region takes too long, which says nothing of it.
        """
        try:
            return self._at_size(question) or self._drawn(question)[0]
        except RefusedError as untold:
            reason = f"not provable: {untold}, so a wrong rewrite would give the same"
            return undecided(question.demand, reason)
        except ModelFormatError as error:
            reason = f"the region alone is no model that may be run: {error}"
        except RuntimeTimedOut:
            raise
        except RuntimeRefused as error:
            alone = error.reason.startswith("before:")
            what = "cannot run the region alone" if alone else "refuses the new region"
            reason = f"the runtime {what}: {error.reason}"
        except RuntimeFailed as error:
            reason = f"the proof could not be run: {error}"
        return failed(question.demand, reason)

    def _at_size(self, question: Question) -> Proof | None:
        """The answer for a large region; None where it has to be run like a small one."""
        part = question.in_part()
        if part is None:
            return None
        try:
            in_part, scale = self._drawn(part)
        except (RuntimeRefused, RuntimeCrashed, RefusedError, ModelFormatError):
            return None
        if not in_part.holds:
            # Without numbers that were compared, the lengths may be at fault.
            return in_part if in_part.ran else None
        # The kernels that must give the same bits, and of these the faster ones.
        kernels = _KERNELS[1:] if question.region.rounds_by_shape else _KERNELS[:1]
        # Sums of so many times the products deviate by the root of that.
        whole = question.on_realistic(scale / FACTOR**0.25)
        in_full, _ = self._where_possible(whole, kernels)
        if not in_full.holds:
            return in_full
        done = {ran.kernels for ran in in_full.ran}
        rest = tuple(ran for ran in in_part.ran if ran.kernels not in done)
        return replace(all_of([in_part, in_full]), ran=(*in_full.ran, *rest))

    def _drawn(self, question: Question) -> tuple[Proof, float]:
        """The verdict on several draws of codes: rounding may hide in one what another shows."""
        proofs: list[Proof] = []
        while True:
            proof, scale = self._where_possible(replace(question, draw=len(proofs)), _KERNELS)
            proofs.append(proof)
            if not proof.holds or len(proofs) == question.draws:
                return all_of(proofs) if proof.holds else proof, scale

    def _where_possible(self, question: Question, kernels: tuple[Kernels, ...]) -> tuple[Proof, float]:
        """Some operators exist in one kernel set only; then that one has to do, and the proof says so."""
        try:
            return self._ask(question, kernels)
        except RuntimeRefused as error:
            if not error.reason.startswith("before:"):
                raise
            refusal = error
        for only in _KERNELS:
            try:
                proof, scale = self._ask(question, (only,))
            except RuntimeTimedOut:
                raise
            except RuntimeFailed:
                continue
            note = f"on {only} kernels only: the others refuse the region alone"
            return replace(proof, note="; ".join(filter(None, (note, proof.note)))), scale
        raise refusal

    def _ask(self, question: Question, kernels: tuple[Kernels, ...]) -> tuple[Proof, float]:
        """The verdict on one run, and the scale of its operands."""
        outcome = self._outcome(question, kernels)
        ran = tuple(Ran(name, question.region.divided) for name in kernels)
        return judge(outcome, question, ran), outcome.scale

    def _outcome(self, question: Question, kernels: tuple[Kernels, ...]) -> Outcome:
        region, request = question.region, question.request
        limit = self.time_limit
        if limit is None:
            runs = len(kernels) * (1 + len(request.extremes))
            limit = _LEAST_SECONDS + region.cost * runs / _SLOWEST
        request = replace(request, kernels=kernels, seed=self.seed * _DRAWS + question.draw)
        for last in (False, True):
            try:
                return self.worker.prove(*region.files, request, seconds=limit, where=region.name)
            except RuntimeCrashed:
                # A worker killed by somebody between two requests says nothing of a region; a second time, it does.
                if last:
                    raise
            except RuntimeTimedOut as error:
                raise RuntimeTimedOut(
                    f"region {region.name} took longer than {limit:.3g} s; --verify none proves nothing"
                ) from error
        raise AssertionError("the second attempt answers or raises")


def judge(outcome: Outcome, question: Question, ran: tuple[Ran, ...]) -> Proof:
    """What the figures mean.

    Raises:
        RefusedError: both versions agree, but so would many a wrong one, and the question is to tell them apart.
    """
    demand, clipped = question.demand, bool(question.request.limits)
    if outcome.mismatch is not None:
        return failed(demand, f"the two versions cannot be compared: {outcome.mismatch}")
    proofs = outcome.all()
    if question.must_compare and clipped and not all(proof.open_rows.elements for proof in proofs):
        return failed(demand, "every value is clipped inside the old region, so nothing can be compared")
    reason, note = _violation(outcome, question)
    for kind, outputs in outcome.extremes.items():
        reason = reason or _violation(Outcome(outputs), question, on=f"on {KINDS[kind]}")[0]
    if not reason and outcome.untold and question.must_compare:
        raise RefusedError(outcome.untold)
    has_masked = any(proof.masked_rows is not None for proof in proofs)
    return Proof(
        demand,
        holds=not reason,
        bitwise=outcome.bitwise and not (demand.kind == "bitwise" and question.region.rounds_by_shape),
        max_abs=outcome.worst(lambda difference: difference.max_abs),
        steps=_steps(outcome),
        fully_masked_rows_max_abs=outcome.worst(lambda d: d.max_abs, masked=True) if has_masked else None,
        reason=reason,
        note=note,
        ran=ran,
        extremes=bool(outcome.extremes),
    )


def _violation(outcome: Outcome, question: Question, *, on: str = "") -> tuple[str, str]:
    """Why the demand is not met, empty where it is; and a note on how it is met."""
    demand = question.demand
    holds, note = _holds(outcome, question)
    if not holds:
        return f"the new region differs{on and ' '}{on}: {_figures(outcome)}, demanded {demand}", note
    if not question.request.limits:
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


def _holds(outcome: Outcome, question: Question) -> tuple[bool, str]:
    """Whether the demand is met, and a note where optimized kernels are held to a bound instead of the same bits."""
    demand, region = question.demand, question.region
    if demand.kind == "relative":
        return outcome.worst(lambda difference: difference.max_rel) <= demand.tolerance, ""
    if demand.kind == "absolute":
        return outcome.worst(lambda difference: difference.max_abs) <= demand.tolerance, ""
    if demand.kind == "steps":
        opened = [proof.open_rows for proof in outcome.all()]
        return all(o.bitwise or (o.steps is not None and o.steps <= demand.tolerance) for o in opened), ""
    if not region.rounds_by_shape:
        return outcome.bitwise, ""
    note = f"{region.rounds_by_shape} rounds by shape on optimized kernels"
    if "reference" not in outcome.outputs:
        return outcome.bitwise, f"{note}, and others cannot run it"
    bounds = region.bounds
    within = all(
        _is_rounding(difference, bounds[proof.output])
        for proof in outcome.all()
        for difference in proof.measured
    )
    return outcome.on("reference").bitwise and within, f"{note}: results may differ {_bound(outcome, bounds)}"


def _is_rounding(difference: Difference, steps: int) -> bool:
    if difference.steps is None:
        return difference.bitwise or difference.max_rel <= _ROUNDING
    return difference.steps <= steps


def _bound(outcome: Outcome, bounds: Sequence[int]) -> str:
    """By how much results may differ on optimized kernels, and do here."""
    steps = _steps(outcome)
    if steps is None:
        worst = outcome.worst(lambda difference: difference.max_rel)
        return f"by up to {_ROUNDING:g} of their range (here by {worst:.1e})"
    return f"by up to {many(max(bounds), 'step')} (here by {steps})"


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
