"""Runs one region on one worker: on what kernels, on which rows, with which inputs, and for how long."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import cast

from edge_opt.ir import Model, to_tables
from edge_opt.ir.refusal import RefusedError
from edge_opt.output.errors import ModelFormatError
from edge_opt.passes.contract import Demand, Proof, Ran
from edge_opt.proof.errors import RuntimeCrashed, RuntimeFailed, RuntimeRefused, RuntimeTimedOut
from edge_opt.proof.judging import all_of, failed, judge, undecided
from edge_opt.proof.pair import ProofRequest
from edge_opt.proof.rows import Rows, multiply_adds, sample
from edge_opt.proof.runner import Worker
from edge_opt.proof.structure import Structure, structure
from edge_opt.proof.tensors import Kernels
from edge_opt.schema.writer import model_bytes

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

    def examine(self, question: Question) -> Proof:
        """The first answer that decides; where no inputs make the results tell right from wrong, an open one."""
        untold = ""
        if self._covered:
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
                self._at_size(question)
                if self._settings.samples(question)
                else self._where_possible(question)
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
        part = sample(question.region.before, question.region.after, self._settings.seed)
        on_rows = None if part is None else self._on_rows(question.on(part))
        question = question.without_extremes()
        if on_rows is None:
            return self._where_possible(question)
        if not on_rows.holds or self._covered:
            return on_rows
        first = on_rows.ran[0].kernels
        in_full = self._ask(question, (cast("Kernels", first),))
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
        if self._covered:
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
            return replace(proof, note=f"on {kernels} kernels only: the others refuse the region alone")
        raise refusal

    def _ask(self, question: Question, kernels: tuple[Kernels, ...]) -> Proof:
        region, request = question.region, question.request
        operations = region.cost * len(kernels) * (1 + len(request.extremes))
        limit = self._settings.limit(kernels, operations)
        request = replace(request, kernels=kernels, seed=self._settings.seed)
        prove = partial(self._worker.prove, *region.files, request, seconds=limit, where=region.name)
        try:
            try:
                outcome = prove()
            except RuntimeCrashed:
                # A worker killed by somebody between two requests says nothing of a region; a second time, it does.
                outcome = prove()
        except RuntimeTimedOut as error:
            raise RuntimeTimedOut(
                f"region {region.name} took longer than {limit:.3g} s; --proof-seconds {2 * limit:.0f} gives each "
                "run of a region longer, --verify none proves nothing"
            ) from error
        if operations > _MEASURED:
            self._settings.speeds[kernels] = operations / outcome.seconds
        ran = tuple(Ran(name, region.rows, region.length) for name in kernels)
        clipped = bool(request.limits)
        return judge(outcome, question.demand, ran, clipped=clipped, must_compare=question.must_compare)
