"""Proves rewrites: cuts both versions of a region out as small models and has the worker run them on equal inputs."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import TYPE_CHECKING, Self

from edge_opt.ir import Model, to_bytes
from edge_opt.ir.extract import cut_out
from edge_opt.passes.contract import Demand, Proof
from edge_opt.schema.errors import ModelFormatError
from edge_opt.verify.errors import RuntimeCrashed, RuntimeFailed, RuntimeRefused
from edge_opt.verify.inputs import InputHint
from edge_opt.verify.runner import Worker

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from types import TracebackType

    from edge_opt.ir import Operator, Tensor
    from edge_opt.passes.rewrite import Rewrite
    from edge_opt.verify.metrics import Difference
    from edge_opt.verify.proof import Proof as Outcome
    from edge_opt.verify.tensors import Kernels

_KERNELS: tuple[Kernels, ...] = ("xnnpack", "reference")
_ROUNDING = 1e-6
_SECONDS_PER_REGION = 120.0
_AT_ONCE_BYTES = 256 << 20  # of intermediate tensors in both versions together


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

    def digest(self) -> _Question:
        """The question with digests in place of its models, to be remembered by."""
        return replace(self, before=sha256(self.before).digest(), after=sha256(self.after).digest())


class RegionProver:
    """Runs regions in one child process; regions that are equal but for names are proved once.

    No weights are in a region, so the cost does not grow with the model. `model` is its name, for messages.
    """

    def __init__(self, *, model: str = "", seed: int = 0, time_limit: float = _SECONDS_PER_REGION) -> None:
        self._worker = Worker(time_limit=time_limit)
        self._model = model
        self._seed = seed
        self._known: dict[_Question, Proof] = {}
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
        inputs, outputs = rewrite.inputs(), rewrite.outputs()
        model = rewrite.calls or Model()
        before = to_bytes(cut_out(model, rewrite.old, inputs, outputs))
        after = to_bytes(cut_out(model, rewrite.new, inputs, outputs))
        self.regions += 1
        saturation = rewrite.saturation
        limits = () if saturation is None else ((saturation.low, saturation.high),) * len(outputs)
        at_once = _bytes_between((*rewrite.old, *rewrite.new)) <= _AT_ONCE_BYTES
        proofs: list[Proof] = []
        for known in _runs(rewrite, inputs):
            question = _Question(before, after, demand, *known, limits, not proofs, at_once)
            proofs.append(self._answer(question, rewrite))
            if not proofs[-1].holds:
                return proofs[-1]
        return _all_of(proofs)

    def _answer(self, question: _Question, rewrite: Rewrite) -> Proof:
        key = question.digest()
        known = self._known.get(key)
        if known is not None:
            return replace(known, repeated=True)
        self._known[key] = proof = self._run(question, self._name(rewrite))
        return proof

    def _name(self, rewrite: Rewrite) -> str:
        """The region's, for messages: model, subgraph, and the tensor that it ends in."""
        of_model = f" of model '{self._model}'" if self._model else ""
        return f"'{rewrite.subgraph.name}' up to '{rewrite.anchor.outputs[0].name}'{of_model}"

    def _ask(self, question: _Question, kernels: tuple[Kernels, ...], where: str) -> Proof:
        try:
            return self._ask_once(question, kernels, where)
        except RuntimeCrashed:
            # A worker that somebody killed between two requests says nothing about a region; a second time, it does.
            return self._ask_once(question, kernels, where)

    def _ask_once(self, question: _Question, kernels: tuple[Kernels, ...], where: str) -> Proof:
        outcome = self._worker.prove(
            question.before,
            question.after,
            kernels=kernels,
            seed=self._seed,
            hints=question.hints,
            row_axes=question.row_axes,
            limits=question.limits,
            at_once=question.at_once,
            where=where,
        )
        return _judge(outcome, question, kernels)

    def _run(self, question: _Question, where: str) -> Proof:
        demand = question.demand
        try:
            return self._ask(question, _KERNELS, where)
        except ModelFormatError as error:
            return _failed(demand, f"the region alone is no model that may be run: {error}")
        except RuntimeRefused as error:
            if not error.reason.startswith("before:"):
                return _failed(demand, f"the runtime refuses the new region: {error.reason}")
        except RuntimeFailed as error:
            return _failed(demand, f"the proof could not be run: {error}")
        return self._run_where_possible(question, where)

    def _run_where_possible(self, question: _Question, where: str) -> Proof:
        """Some operators exist in one kernel set only; then that one has to do, and the proof says so."""
        reasons: list[str] = []
        for kernels in _KERNELS:
            try:
                proof = self._ask(question, (kernels,), where)
            except RuntimeFailed as error:
                reasons.append(str(error))
                continue
            return replace(proof, note=f"on {kernels} kernels only: the others refuse the region as it was")
        return _failed(question.demand, f"the runtime cannot run the region as it was: {reasons[0]}")


def _bytes_between(operators: Sequence[Operator]) -> int:
    """How much the operators define."""
    return sum(t.dtype.byte_size(t.elements) or 0 for operator in operators for t in operator.outputs)


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


def _judge(outcome: Outcome, question: _Question, kernels: tuple[Kernels, ...]) -> Proof:
    demand = question.demand
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
    return Proof(
        demand,
        holds=holds,
        bitwise=outcome.bitwise,
        max_abs=max_abs,
        steps=_steps(outcome),
        fully_masked_rows_max_abs=masked if has_masked else None,
        reason=reason,
        note=note,
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
    # Where XNNPACK declines an operator, the interpreter's optimized kernel runs; its float softmax rounds a row
    # differently depending on how many rows there are (up to 1.2e-7). The reference kernels do not.
    floats = _steps(outcome) is None
    if floats and "reference" in kernels and outcome.bitwise_on("reference") and relative <= _ROUNDING:
        return (
            True,
            f"bitwise on reference kernels; {relative:.1e} relative on optimized ones, which round by row count",
        )
    return False, ""


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
