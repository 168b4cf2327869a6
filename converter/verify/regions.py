"""Proves rewrites: cuts both versions of a region out as small models and has the worker run them on equal inputs."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import TYPE_CHECKING, Self, cast

from edge_opt.ir import Model, to_bytes
from edge_opt.ir.effects import is_pure
from edge_opt.ir.extract import cut_out
from edge_opt.passes.contract import Demand, Proof, Ran
from edge_opt.schema.errors import ModelFormatError
from edge_opt.verify.errors import RuntimeCrashed, RuntimeFailed, RuntimeRefused, RuntimeTimedOut
from edge_opt.verify.inputs import InputHint
from edge_opt.verify.proof import Cut
from edge_opt.verify.rows import multiply_adds, peak_bytes, sample
from edge_opt.verify.runner import Worker
from edge_opt.verify.structure import structure

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from types import TracebackType

    from edge_opt.ir import Operator, Tensor
    from edge_opt.passes.rewrite import Rewrite
    from edge_opt.verify.inputs import Kind
    from edge_opt.verify.metrics import Difference
    from edge_opt.verify.proof import OutputProof
    from edge_opt.verify.proof import Proof as Outcome
    from edge_opt.verify.rows import Rows
    from edge_opt.verify.tensors import Kernels

_KERNELS: tuple[Kernels, ...] = ("xnnpack", "reference")
_ROUNDING = 1e-6
_IN_FULL = (
    1 << 26
)  # multiply-adds of a region that is run in full on every kernel set, whatever was proved before
_AT_ONCE_BYTES = 512 << 20  # of intermediate tensors in both versions together
_LEAST_SECONDS = 60.0
_MEASURED = 1 << 22  # multiply-adds below which a run says nothing of the machine's speed
_MARGIN = 10.0  # the machine may be that much busier than it was when its speed was measured
_SLOW = 5e7  # multiply-adds a second, where nothing was measured yet: a fourteenth of the slowest kernel's


@dataclass(frozen=True, slots=True)
class _Question:
    """Equal questions have equal answers."""

    before: bytes
    after: bytes
    demand: Demand
    hints: tuple[InputHint | None, ...]
    row_axes: tuple[int | None, ...]
    limits: tuple[tuple[int, int] | None, ...] = ()
    must_compare: bool = True
    at_once: bool = False
    parts: int = 1

    def digest(self) -> _Question:
        """The question with digests in place of its models, to be remembered by."""
        return replace(self, before=sha256(self.before).digest(), after=sha256(self.after).digest())

    @property
    def can_be_sampled(self) -> bool:
        """Whether rows are alike in it: none is masked everywhere on purpose, and no clipped value is left out."""
        return self.demand.kind == "bitwise" and not self.limits and not self.row_axes

    def others(self) -> Iterator[tuple[_Question, Kind]]:
        """The same with other inputs, should these not tell right from wrong: all of each range, then its ends."""
        yield self, "realistic"
        whole = tuple(hint and replace(hint, spread=1.0) for hint in self.hints)
        if whole != self.hints:
            yield replace(self, hints=whole), "realistic"
        yield replace(self, hints=whole), "large"


@dataclass(frozen=True, slots=True)
class _Region:
    """Both versions cut out as models, what they cost, and the region's name for messages."""

    before: Model
    after: Model
    name: str

    @property
    def cost(self) -> int:
        """Multiply-adds of one run of both."""
        return multiply_adds(self.before) + multiply_adds(self.after)


class RegionProver:
    """Runs regions in a child process; regions that are equal but for names are proved once.

    A region of many multiply-adds is run in full, on XNNPACK's kernels, if it is the first of its structure (see
    `structure`). The others of that structure are run on rows that reach every head and tile, and so are the reference
    kernels: their arithmetic takes no part in what is cut where.

    Args:
        model: its name, for messages.
        seed: decides inputs and random rows.
        time_limit: seconds for each run; by default a minute, and ten times what the multiply-adds take at the speed
            measured so far.
        exhaustive: run everything in full on both kernel sets.
    """

    def __init__(
        self, *, model: str = "", seed: int = 0, time_limit: float | None = None, exhaustive: bool = False
    ) -> None:
        self._worker = Worker()
        self._model = model
        self._seed = seed
        self._time_limit = time_limit
        self._exhaustive = exhaustive
        self._known: dict[_Question, Proof] = {}
        self._structures: dict[tuple[bytes, Demand], Proof] = {}
        self._speeds: dict[tuple[Kernels, ...], float] = {}
        self.regions = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._worker.close()

    def start(self) -> None:
        """Start the child now, so that loading the runtime overlaps with other work."""
        self._worker.start()

    @property
    def distinct(self) -> int:
        """How many different regions were run."""
        return len(self._known)

    def prove(self, rewrite: Rewrite, demand: Demand) -> Proof:
        """Whether the new region does what the old one did, to the demand; a failure is a value with its reason.

        Raises:
            RuntimeUnavailable: no worker can be started, so nothing can be proved of any region.
        """
        inputs = rewrite.inputs()
        old, new, outputs = _changed(rewrite)
        model = rewrite.calls or Model()
        region = _Region(
            cut_out(model, old, inputs, outputs), cut_out(model, new, inputs, outputs), self._name(rewrite)
        )
        self.regions += 1
        saturation = rewrite.saturation
        limits = () if saturation is None else ((saturation.low, saturation.high),) * len(outputs)
        at_once = peak_bytes(region.before) + peak_bytes(region.after) <= _AT_ONCE_BYTES
        before, after = to_bytes(region.before), to_bytes(region.after)
        proofs: list[Proof] = []
        for hints, row_axes in _runs(rewrite, inputs):
            question = _Question(
                before, after, demand, hints, row_axes, limits, not proofs, at_once, rewrite.parts
            )
            proofs.append(self._answer(question, region))
            if not proofs[-1].holds:
                return proofs[-1]
        return _all_of(proofs)

    def _answer(self, question: _Question, region: _Region) -> Proof:
        key = question.digest()
        known = self._known.get(key)
        if known is not None:
            return replace(known, repeated=True)
        proof = self._telling(question, region)
        self._known[key] = proof
        return proof

    def _name(self, rewrite: Rewrite) -> str:
        """The region's, for messages: model, subgraph, and the tensor that it ends in."""
        of_model = f" of model '{self._model}'" if self._model else ""
        return f"'{rewrite.subgraph.name}' up to '{rewrite.anchor.outputs[0].name}'{of_model}"

    def _telling(self, question: _Question, region: _Region) -> Proof:
        """The first answer that says something; none, where no inputs make the results tell."""
        untold = ""
        for other, kind in question.others():
            try:
                return self._run(other, region, kind)
            except _UntoldError as error:
                untold = untold or str(error)
        reason = f"not provable: {untold}, whatever inputs are tried, so a wrong rewrite would give the same"
        return _open(question.demand, reason)

    def _run(self, question: _Question, region: _Region, kind: Kind) -> Proof:
        run = _Run(question, region, kind)
        try:
            if self._exhaustive or region.cost <= _IN_FULL or not question.can_be_sampled:
                return self._where_possible(run, _KERNELS)
            return self._at_size(run)
        except ModelFormatError as error:
            return _failed(question.demand, f"the region alone is no model that may be run: {error}")
        except RuntimeTimedOut as error:
            return _open(question.demand, f"there was no time to prove it: {error}")
        except RuntimeRefused as error:
            if error.reason.startswith("before:"):
                return _failed(
                    question.demand, f"the runtime cannot run the region as it was: {error.reason}"
                )
            return _failed(question.demand, f"the runtime refuses the new region: {error.reason}")
        except RuntimeFailed as error:
            return _failed(question.demand, f"the proof could not be run: {error}")

    def _at_size(self, run: _Run) -> Proof:
        """On rows first, which is quick; then in full, unless the structure was proved in full already."""
        part = sample(run.region.before, run.region.after, self._seed)
        if part is None:
            return self._where_possible(run, _KERNELS)
        on_rows = self._where_possible(run.on(part), _KERNELS)
        if not on_rows.holds:
            return on_rows
        key = structure(run.region.before, run.region.after), run.question.demand
        if key in self._structures:
            return replace(on_rows, note=on_rows.note or self._structures[key].note)
        first = on_rows.ran[0].kernels
        in_full = self._ask(run, (cast("Kernels", first),))
        if not in_full.holds and len(on_rows.ran) > 1:
            # Where XNNPACK declines an operator, only the reference kernels may be bitwise; and the report is whole.
            in_full = self._ask(run, _KERNELS)
        if not in_full.holds:
            return in_full
        self._structures[key] = in_full
        done = {ran.kernels for ran in in_full.ran}
        rest = tuple(ran for ran in on_rows.ran if ran.kernels not in done)
        return replace(_all_of([on_rows, in_full]), ran=(*in_full.ran, *rest))

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
        limit = self._limit(kernels, operations)
        started = time.monotonic()
        try:
            outcome = self._worker.prove(
                question.before,
                question.after,
                kernels=kernels,
                seed=self._seed,
                kind=run.kind,
                hints=question.hints,
                row_axes=question.row_axes,
                limits=question.limits,
                at_once=question.at_once,
                parts=question.parts,
                cut=run.cut,
                seconds=limit,
                where=run.region.name,
            )
        except RuntimeTimedOut as error:
            raise RuntimeTimedOut(
                f"region {run.region.name} took longer than {limit:.3g} s; --proof-seconds {2 * limit:.0f} gives each "
                "run of a region longer, --verify none proves nothing"
            ) from error
        if operations > _MEASURED:
            self._speeds[kernels] = operations / (time.monotonic() - started)
        return _judge(outcome, run, kernels)

    def _limit(self, kernels: tuple[Kernels, ...], operations: int) -> float:
        if self._time_limit is not None:
            return self._time_limit
        speed = self._speeds.get(kernels) or min(self._speeds.values(), default=_SLOW)
        return _LEAST_SECONDS + _MARGIN * operations / speed


@dataclass(frozen=True, slots=True)
class _Run:
    """A question on inputs of one kind; or on some rows only, which the models of the question then are made for."""

    question: _Question
    region: _Region
    kind: Kind
    cut: Cut | None = None
    rows: tuple[int, ...] = ()
    length: int = 0

    def on(self, part: Rows) -> _Run:
        """The same on some rows."""
        shapes = tuple(tensor.shape for tensor in self.region.before.subgraphs[0].inputs)
        before, after = to_bytes(part.before), to_bytes(part.after)
        question = replace(self.question, before=before, after=after, at_once=True)
        region = _Region(part.before, part.after, self.region.name)
        return _Run(question, region, self.kind, Cut(shapes, part.boxes), part.rows, part.length)

    def ran(self, kernels: tuple[Kernels, ...]) -> tuple[Ran, ...]:
        """What is told of it."""
        return tuple(Ran(name, self.rows, self.length) for name in kernels)


class _UntoldError(Exception):
    """What came out tells nothing; the text says why."""


def _changed(rewrite: Rewrite) -> tuple[list[Operator], list[Operator], tuple[Tensor, ...]]:
    """Old and new operators as far as they matter, and the results that might differ.

    An operator of both lists stays what it is; if it depends on such operators alone, so do its results.
    """
    called = () if rewrite.calls is None else rewrite.calls.subgraphs
    if rewrite.mask is not None or not all(is_pure(op, called) for op in (*rewrite.old, *rewrite.new)):
        return list(rewrite.old), list(rewrite.new), rewrite.outputs()
    new = set(rewrite.new)
    made = {id(tensor): operator for operator in rewrite.old for tensor in operator.outputs}
    same: set[Operator] = set()
    for operator in rewrite.old:
        sources = [made.get(id(tensor)) for tensor in operator.inputs if tensor is not None]
        if operator in new and all(source is None or source in same for source in sources):
            same.add(operator)
    outputs = tuple(tensor for tensor in rewrite.outputs() if made[id(tensor)] not in same)
    if not outputs:
        return list(rewrite.old), list(rewrite.new), rewrite.outputs()
    return _leading_to(rewrite.old, outputs), _leading_to(rewrite.new, outputs), outputs


def _leading_to(operators: Sequence[Operator], outputs: Sequence[Tensor]) -> list[Operator]:
    needed = {id(tensor) for tensor in outputs}
    kept: list[Operator] = []
    for operator in reversed(operators):
        if any(id(tensor) in needed for tensor in operator.outputs):
            kept.append(operator)
            needed.update(id(tensor) for tensor in operator.inputs)
    return kept[::-1]


_Known = tuple[tuple[InputHint | None, ...], tuple[int | None, ...]]


def _runs(rewrite: Rewrite, inputs: tuple[Tensor, ...]) -> Iterator[_Known]:
    """What the worker must know of the inputs, run by run; the last closes every row, if that must be equal too."""
    for spreads in rewrite.spreads:
        yield _hints(rewrite, inputs, spreads)
    if rewrite.mask is not None and rewrite.mask.exact:
        yield _hints(rewrite, inputs, rewrite.spreads[0], close_all=True)


def _hints(
    rewrite: Rewrite, inputs: tuple[Tensor, ...], spreads: Mapping[Tensor, float], *, close_all: bool = False
) -> _Known:
    """What the worker must know of a mask, so that rows that are masked everywhere are measured apart."""
    mask = rewrite.mask
    data = tuple(InputHint(spread=spreads[tensor]) if tensor in spreads else None for tensor in inputs)
    if mask is None:
        return (data if any(data) else ()), ()
    axes = rewrite.mask_axes()
    rows = mask.tensor.shape[-2] if len(mask.tensor.shape) > 1 else 1
    apart = not close_all and None not in axes
    closed = tuple(range(rows)) if close_all else (rows - 1,) * apart
    hint = InputHint("mask", mask.masked, mask.opened, closed)
    hints = tuple(hint if tensor is mask.tensor else own for tensor, own in zip(inputs, data, strict=True))
    return hints, axes if apart else (None,) * len(axes)


def _failed(demand: Demand, reason: str) -> Proof:
    return Proof(demand, holds=False, bitwise=False, max_abs=math.inf, reason=reason)


def _open(demand: Demand, reason: str) -> Proof:
    return replace(_failed(demand, reason), open=True)


def _all_of(proofs: Sequence[Proof]) -> Proof:
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
    )


def _judge(outcome: Outcome, run: _Run, kernels: tuple[Kernels, ...]) -> Proof:
    """What the figures mean.

    Raises:
        _UntoldError: both versions agree, but so would many a wrong one.
    """
    question, demand = run.question, run.question.demand
    if outcome.mismatch is not None:
        return _failed(demand, f"the two versions cannot be compared: {outcome.mismatch}")
    if question.must_compare and question.limits and not all(p.open_rows.elements for p in outcome.all()):
        return _failed(demand, "every value is clipped inside the old region, so nothing can be compared")
    max_abs = outcome.worst(lambda difference: difference.max_abs)
    masked = outcome.worst(lambda difference: difference.max_abs, masked=True)
    has_masked = any(p.masked_rows is not None for proofs in outcome.outputs.values() for p in proofs)
    holds, note = _holds(outcome, demand, kernels)
    reason = "" if holds else f"the new region differs: {_figures(outcome)}, demanded {demand}"
    if holds and question.limits:
        holds, words = _turns_back(outcome, demand)
        note, reason = (words, "") if holds else ("", words)
    if holds and outcome.untold and question.must_compare:
        raise _UntoldError(outcome.untold)
    return Proof(
        demand,
        holds=holds,
        bitwise=outcome.bitwise,
        max_abs=max_abs,
        steps=_steps(outcome),
        fully_masked_rows_max_abs=masked if has_masked else None,
        reason=reason,
        note=note,
        ran=run.ran(kernels),
    )


def _holds(outcome: Outcome, demand: Demand, kernels: tuple[Kernels, ...]) -> tuple[bool, str]:
    relative = outcome.worst(lambda difference: difference.max_rel)
    if demand.kind == "relative":
        return relative <= demand.tolerance, ""
    relative = max(relative, outcome.worst(lambda difference: difference.max_rel, masked=True))
    if demand.kind == "steps":
        steps = _steps(outcome)
        return steps is not None and steps <= demand.tolerance, ""
    if outcome.bitwise:
        return True, ""
    # Where XNNPACK declines an operator, the interpreter's optimized kernel runs. Its float softmax rounds a row
    # differently depending on how many rows there are (up to 1.2e-7), its int16 ADD an element depending on whether an
    # operand is broadcast (one step in a million). The reference kernels do not.
    if "reference" in kernels and outcome.bitwise_on("reference") and all(map(_is_rounding, outcome.all())):
        steps = _steps(outcome)
        how = "by row count" if steps is None else "a sum by whether it broadcasts"
        gap = f"{relative:.1e} relative" if steps is None else f"{steps} step{'s'[: steps != 1]}"
        return True, f"bitwise on reference kernels; {gap} on optimized ones, which round {how}"
    return False, ""


def _is_rounding(proof: OutputProof) -> bool:
    found = [proof.open_rows] if proof.masked_rows is None else [proof.open_rows, proof.masked_rows]
    return all(
        difference.max_rel <= _ROUNDING if difference.steps is None else difference.steps <= 1
        for difference in found
    )


def _turns_back(outcome: Outcome, demand: Demand) -> tuple[bool, str]:
    """Of elements that the old region clipped: whether the new ones are at least there, and how many there were."""
    proofs = outcome.all()
    clipped, short = max(p.saturated for p in proofs), max(p.short for p in proofs)
    total = max(p.saturated + p.open_rows.elements for p in proofs)
    if short > demand.tolerance:
        return False, f"the new region stays {short} steps short of where the old one was clipped"
    if not clipped:
        return True, ""
    return True, f"{clipped} of {total} random values were clipped inside the old region and are not any more"


def _steps(outcome: Outcome) -> int | None:
    def steps(difference: Difference) -> float:
        return -1 if difference.steps is None else difference.steps

    worst = outcome.worst(steps)
    found = any(p.open_rows.steps is not None for proofs in outcome.outputs.values() for p in proofs)
    return int(worst) if found else None


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
