"""Runs one region on one worker: on what kernels, on which rows, with which inputs, and for how long."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import TYPE_CHECKING, cast

from edge_opt.ir import to_bytes
from edge_opt.passes.contract import Demand, Proof, Ran
from edge_opt.proof.errors import RuntimeCrashed, RuntimeFailed, RuntimeRefused, RuntimeTimedOut
from edge_opt.proof.judging import UntoldError, all_of, failed, judge, undecided
from edge_opt.proof.rows import multiply_adds, sample
from edge_opt.schema.errors import ModelFormatError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from edge_opt.ir import Model
    from edge_opt.proof.pair import ProofRequest
    from edge_opt.proof.rows import Rows
    from edge_opt.proof.runner import Worker
    from edge_opt.proof.tensors import Kernels

_KERNELS: tuple[Kernels, ...] = ("xnnpack", "reference")
_IN_FULL = (
    1 << 26
)  # multiply-adds of a region that is run in full on every kernel set, whatever was proved before
_LEAST_SECONDS = 60.0
_MEASURED = 1 << 22  # multiply-adds below which a run says nothing of the machine's speed
_MARGIN = 10.0  # the machine may be that much busier than it was when its speed was measured
_SLOW = 5e7  # multiply-adds a second, where nothing was measured yet: a fourteenth of the slowest kernel's


@dataclass(frozen=True, slots=True)
class Question:
    """Equal questions have equal answers."""

    before: bytes
    after: bytes
    demand: Demand
    request: ProofRequest
    must_compare: bool = True

    def digest(self) -> Question:
        """The question with digests in place of its models, to be remembered by."""
        return replace(self, before=sha256(self.before).digest(), after=sha256(self.after).digest())

    @property
    def can_be_sampled(self) -> bool:
        """Whether rows are alike in it: none is masked everywhere on purpose, and no clipped value is left out."""
        return self.demand.kind == "bitwise" and not self.request.limits and not self.request.row_axes

    def others(self) -> Iterator[Question]:
        """The same with other inputs, should these not tell right from wrong: all of each range, then its ends."""
        yield self
        whole = tuple(hint and replace(hint, spread=1.0) for hint in self.request.hints)
        if whole != self.request.hints:
            yield replace(self, request=replace(self.request, hints=whole))
        yield replace(self, request=replace(self.request, hints=whole, kind="large"))


@dataclass(frozen=True, slots=True)
class Region:
    """Both versions cut out as models, what they cost, and the region's name for messages."""

    before: Model
    after: Model
    name: str

    @property
    def cost(self) -> int:
        """Multiply-adds of one run of both."""
        return multiply_adds(self.before) + multiply_adds(self.after)


@dataclass(slots=True)
class Settings:
    """What all examinations of a conversion share; `speeds` has multiply-adds a second by kernel sets, as measured."""

    seed: int
    time_limit: float | None
    exhaustive: bool
    speeds: dict[tuple[Kernels, ...], float] = field(default_factory=dict)

    def samples(self, question: Question, region: Region) -> bool:
        """Whether the region is large enough, and such, that rows may stand for all of it."""
        return not self.exhaustive and region.cost > _IN_FULL and question.can_be_sampled

    def limit(self, kernels: tuple[Kernels, ...], operations: int) -> float:
        """Seconds that a run may take."""
        if self.time_limit is not None:
            return self.time_limit
        speed = self.speeds.get(kernels) or min(self.speeds.values(), default=_SLOW)
        return _LEAST_SECONDS + _MARGIN * operations / speed


@dataclass(frozen=True, slots=True)
class _Run:
    """A question on a region, or on some rows of it, which the models of the question then are made for."""

    question: Question
    region: Region
    rows: tuple[int, ...] = ()
    length: int = 0

    def on(self, part: Rows) -> _Run:
        """The same on some rows."""
        before, after = to_bytes(part.before), to_bytes(part.after)
        request = replace(self.question.request, at_once=True, cut=part.cut)
        question = replace(self.question, before=before, after=after, request=request)
        return _Run(question, Region(part.before, part.after, self.region.name), part.rows, part.length)

    def ran(self, kernels: tuple[Kernels, ...]) -> tuple[Ran, ...]:
        """What is told of it."""
        return tuple(Ran(name, self.rows, self.length) for name in kernels)


class Examiner:
    """Examines a region on a worker.

    Args:
        worker: what runs it.
        settings: how.
        covered: the structure of the region is proved in full elsewhere, so that rows are enough.
    """

    def __init__(self, worker: Worker, settings: Settings, *, covered: bool) -> None:
        self._worker = worker
        self._settings = settings
        self._covered = covered

    def examine(self, question: Question, region: Region) -> Proof:
        """The first answer that says something; none, where no inputs make the results tell."""
        untold = ""
        for other in question.others():
            try:
                return self._run(other, region)
            except UntoldError as error:
                untold = untold or str(error)
        reason = f"not provable: {untold}, whatever inputs are tried, so a wrong rewrite would give the same"
        return undecided(question.demand, reason)

    def _run(self, question: Question, region: Region) -> Proof:
        run = _Run(question, region)
        try:
            if not self._settings.samples(question, region):
                return self._where_possible(run, _KERNELS)
            return self._at_size(run)
        except ModelFormatError as error:
            return failed(question.demand, f"the region alone is no model that may be run: {error}")
        except RuntimeTimedOut as error:
            return undecided(question.demand, f"there was no time to prove it: {error}")
        except RuntimeRefused as error:
            if error.reason.startswith("before:"):
                return failed(question.demand, f"the runtime cannot run the region as it was: {error.reason}")
            return failed(question.demand, f"the runtime refuses the new region: {error.reason}")
        except RuntimeFailed as error:
            return failed(question.demand, f"the proof could not be run: {error}")

    def _at_size(self, run: _Run) -> Proof:
        """On rows first, which is quick; then in full, unless the structure was proved in full already."""
        part = sample(run.region.before, run.region.after, self._settings.seed)
        if part is None:
            return self._where_possible(run, _KERNELS)
        on_rows = self._on_rows(run.on(part))
        if not on_rows.holds or self._covered:
            return on_rows
        first = on_rows.ran[0].kernels
        in_full = self._ask(run, (cast("Kernels", first),))
        if not in_full.holds and len(on_rows.ran) > 1:
            # Where XNNPACK declines an operator, only the reference kernels may be bitwise; and the report is whole.
            in_full = self._ask(run, _KERNELS)
        if not in_full.holds:
            return in_full
        done = {ran.kernels for ran in in_full.ran}
        rest = tuple(ran for ran in on_rows.ran if ran.kernels not in done)
        return replace(all_of([on_rows, in_full]), ran=(*in_full.ran, *rest))

    def _on_rows(self, run: _Run) -> Proof:
        """Where the structure is proved on both kernel sets, one of them is enough, if it gives the same bits."""
        if self._covered:
            try:
                proof = self._ask(run, _KERNELS[:1])
            except RuntimeRefused:
                proof = None
            if proof is not None and proof.holds:
                return proof
        return self._where_possible(run, _KERNELS)

    def _where_possible(self, run: _Run, wanted: tuple[Kernels, ...]) -> Proof:
        """Some operators exist in one kernel set only; then that one has to do, and the proof says so."""
        try:
            return self._ask(run, wanted)
        except RuntimeRefused as error:
            if not error.reason.startswith("before:"):
                raise
            refusal = error
        for kernels in wanted:
            try:
                proof = self._ask(run, (kernels,))
            except RuntimeTimedOut:
                raise
            except RuntimeFailed:
                continue
            return replace(proof, note=f"on {kernels} kernels only: the others refuse the region as it was")
        raise refusal

    def _ask(self, run: _Run, kernels: tuple[Kernels, ...]) -> Proof:
        try:
            return self._ask_once(run, kernels)
        except RuntimeCrashed:
            # A worker that somebody killed between two requests says nothing about a region; a second time, it does.
            return self._ask_once(run, kernels)

    def _ask_once(self, run: _Run, kernels: tuple[Kernels, ...]) -> Proof:
        question = run.question
        operations = run.region.cost * len(kernels)
        limit = self._settings.limit(kernels, operations)
        try:
            outcome = self._worker.prove(
                question.before,
                question.after,
                replace(question.request, kernels=kernels, seed=self._settings.seed),
                seconds=limit,
                where=run.region.name,
            )
        except RuntimeTimedOut as error:
            raise RuntimeTimedOut(
                f"region {run.region.name} took longer than {limit:.3g} s; --proof-seconds {2 * limit:.0f} gives each "
                "run of a region longer, --verify none proves nothing"
            ) from error
        if operations > _MEASURED:
            self._settings.speeds[kernels] = operations / outcome.seconds
        return judge(
            outcome,
            question.demand,
            run.ran(kernels),
            clipped=bool(question.request.limits),
            must_compare=question.must_compare,
        )
