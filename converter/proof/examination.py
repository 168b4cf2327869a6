"""Runs one region on a worker and decides whether the demand is met, with the wording for the report."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from edge_opt.base.errors import ModelFormatError
from edge_opt.base.words import many
from edge_opt.ir import DType, Model, Tensor, to_tables
from edge_opt.passes.contract import Proof, Ran
from edge_opt.passes.rewrite import Demand
from edge_opt.proof.sizes import FACTOR, multiply_adds, shrunk
from edge_opt.runtime.extremes import KINDS
from edge_opt.runtime.metrics import Difference
from edge_opt.runtime.pair import DRAWS, VERSIONS, Outcome, ProofRequest
from edge_opt.runtime.protocol import RuntimeCrashed, RuntimeFailed, RuntimeRefused, RuntimeTimedOut
from edge_opt.runtime.runner import Worker
from edge_opt.runtime.tensors import Kernels
from edge_opt.schema.writer import model_bytes

_KERNELS: tuple[Kernels, ...] = ("xnnpack", "reference")
_IN_FULL = 1 << 26  # regions of at most this many multiply-adds are run in full
_LEAST_SECONDS = 60.0
_SLOWEST = 2e7  # multiply-adds per second: a hundredth of the slowest kernel's, to allow for a busy machine
_ROUNDING = 1e-6  # relative, for floats whose rounding in optimized kernels depends on shape
_STEPS = {DType.INT16: 128}  # by how much such a rounding may change codes, by type; otherwise one


@dataclass(frozen=True)
class Question:
    """Both versions of a region cut out as models, the inputs to run them on, and the demand.

    `name` identifies the region in messages; its lengths were divided by `divided`.
    """

    before: Model
    after: Model
    name: str
    demand: Demand
    request: ProofRequest
    divided: int = 1

    @cached_property
    def cost(self) -> int:
        """Multiply-adds of one run of both versions."""
        return multiply_adds(self.before) + multiply_adds(self.after)

    @cached_property
    def rounds_by_shape(self) -> str:
        """The operator whose optimized kernel rounds by shape, if bits must be equal; empty if there is none."""
        graphs = [*self.before.subgraphs, *self.after.subgraphs]
        for operator in (operator for graph in graphs for operator in graph):
            if self.demand.kind != "bitwise":
                break
            if operator.name == "ADD" and operator.output.dtype is DType.INT16:
                return "int16 ADD"  # AVX2 for operands of one shape, another kernel where one broadcasts
            is_float_softmax = operator.name == "SOFTMAX" and operator.output.dtype.is_float
            if is_float_softmax and operator.option("beta") != 1.0:
                return "SOFTMAX with beta"  # XNNPACK declines it; the fallback rounds by the number of rows
        return ""

    def in_part(self) -> Question | None:
        """The question at a fraction of the lengths; None if the region is small or must be run in full.

        Clipping, and demands other than bitwise, may depend on particular elements, which a fraction could miss.
        """
        if self.cost <= _IN_FULL or self.request.limits or self.demand.kind != "bitwise":
            return None
        before, after = shrunk(self.before), shrunk(self.after)
        if before is None or after is None:
            return None
        request = replace(self.request, parts=None)
        return replace(self, before=before, after=after, request=request, divided=FACTOR)


def unproved(demand: Demand, reason: str, *, is_open: bool = True) -> Proof:
    """A failed verification, or, if `is_open`, one without a result either way."""
    return Proof(demand, holds=False, bitwise=False, max_abs=math.inf, reason=reason, open=is_open)


def examine(worker: Worker, question: Question) -> Proof:
    """Verify that the demand is met; open without a result, or if no inputs distinguish right from wrong.

    A small region is run in full, on both kernel sets. A large one is run at a fraction of its lengths on both, extreme
    inputs included; then in full, on XNNPACK's kernels if these must give the same bits, else on the reference kernels.
    A large region that does not run at a fraction of its lengths is treated like a small one.
    """
    part = question.in_part()
    try:
        return (part and _at_size(worker, question, part)) or _ask(worker, question)[0]
    except RuntimeTimedOut as error:
        return unproved(
            question.demand, f"verification timed out: {error}, or skip verification (--verify none)"
        )
    except ModelFormatError as error:
        reason = f"the region alone is not a valid model: {error}"
    except RuntimeRefused as error:
        alone = error.reason.startswith(VERSIONS[0])
        what = "cannot run the region alone" if alone else "refuses the new region"
        reason = f"the runtime {what}: {error.reason.split(': ', 1)[-1]}"
    except RuntimeFailed as error:
        return unproved(question.demand, f"the verification could not be run: {error}")
    return unproved(question.demand, reason, is_open=False)


def _at_size(worker: Worker, question: Question, part: Question) -> Proof | None:
    """The answer for a large region; None if it must be run like a small one."""
    try:
        in_part, scale = _ask(worker, part)
    except (RuntimeRefused, RuntimeCrashed, ModelFormatError):
        return None
    if not in_part.holds:
        return None if in_part.open else in_part
    # The fastest kernels that run the region and must give the same bits.
    fast, reference = (kernels in (each.kernels for each in in_part.ran) for kernels in _KERNELS)
    only = _KERNELS[0] if fast and not (question.rounds_by_shape and reference) else _KERNELS[1]
    # The deviation of a sum grows with the square root of the number of products.
    request = replace(question.request, extremes=(), scales=(scale / FACTOR**0.25,), kernels=(only,))
    in_full, _ = _ask(worker, replace(question, request=request))
    if not in_full.holds:
        return in_full
    # Both meet the same demand, and the full run shows no difference.
    return replace(in_part, ran=(*in_full.ran, *(each for each in in_part.ran if each.kernels != only)))


def _ask(worker: Worker, question: Question) -> tuple[Proof, float]:
    """Run the region; the verdict, and the scale of operands at which results are most sensitive."""
    request = question.request
    runs = len(request.kernels) * (len(request.scales) + DRAWS * len(request.extremes))
    limit = _LEAST_SECONDS + question.cost * runs / _SLOWEST
    before, after = (model_bytes(to_tables(model)) for model in (question.before, question.after))
    for is_last in (False, True):
        try:
            outcome = worker.prove(before, after, request, seconds=limit, where=question.name)
            break
        except RuntimeCrashed:  # it may have been killed between requests: not the region's fault
            if is_last:
                raise
    return judge(outcome, question), outcome.scale


def judge(outcome: Outcome, question: Question) -> Proof:
    """The verdict on the figures; open if both versions agree, but many wrong ones would, too."""
    demand, violated = question.demand, ""
    for kind, found in outcome.found.items():
        if not violated and not _holds(found, question):
            where = f" on {KINDS[kind]}" if kind else ""
            violated = f"the new region differs{where}: {_figures(found)}, but must be {demand.words}"
    if not violated and outcome.untold:
        return unproved(
            demand, f"cannot be verified: {outcome.untold}, so a wrong rewrite would give the same result"
        )
    ran = outcome.found[""]
    differences = [difference for found in ran.values() for difference in found]
    exact = not question.request.limits and not question.rounds_by_shape
    steps = max((each.steps for each in differences if each.steps is not None), default=None)
    return Proof(
        demand,
        holds=not violated,
        bitwise=exact and all(difference.bitwise for difference in differences),
        max_abs=max(difference.max_abs for difference in differences),
        steps=steps,
        reason=violated,
        note="; ".join(_notes(question, ran, differences, steps)),
        ran=tuple(Ran(kernels, question.divided) for kernels in ran),
        extremes=len(outcome.found) > 1,
    )


def _holds(found: Mapping[str, Sequence[Difference]], question: Question) -> bool:
    """True if the demand is met; optimized kernels that round by shape need only stay within a bound."""
    demand = question.demand

    def met(tensor: Tensor, difference: Difference, kernels: str) -> bool:
        steps = math.inf if difference.steps is None else difference.steps
        figures = {"relative": difference.max_rel, "absolute": difference.max_abs, "steps": steps}
        if demand.kind in figures:
            return figures[demand.kind] <= demand.tolerance
        if not question.rounds_by_shape or kernels == "reference" or "reference" not in found:
            return False
        return difference.max_rel <= _ROUNDING or steps <= _STEPS.get(tensor.dtype, 1)

    outputs = question.before.subgraphs[0].outputs
    return all(
        difference.bitwise or met(tensor, difference, kernels)
        for kernels, differences in found.items()
        for tensor, difference in zip(outputs, differences, strict=True)
    )


def _notes(
    question: Question, ran: Collection[str], differences: Sequence[Difference], steps: int | None
) -> Iterator[str]:
    """Remarks on kernels that were left out and on optimized kernels that are held to a bound."""
    if len(ran) < len(question.request.kernels):
        yield f"on {', '.join(ran)} kernels only: the others cannot run the region on its own"
    if not question.rounds_by_shape:
        return
    note = f"optimized kernels round {question.rounds_by_shape} differently for some shapes"
    if "reference" not in ran:
        yield f"{note}, and the reference kernels cannot run it"
    elif steps is not None:
        most = max(_STEPS.get(tensor.dtype, 1) for tensor in question.before.subgraphs[0].outputs)
        yield f"{note}: results may differ by up to {many(most, 'step')} (here by {steps})"
    else:
        worst = max(difference.max_rel for difference in differences)
        yield f"{note}: results may differ by up to {_ROUNDING:g} of their range (here by {worst:.1e})"


def _figures(found: Mapping[str, Sequence[Difference]]) -> str:
    worst = {kernels: max(each, key=lambda difference: difference.max_abs) for kernels, each in found.items()}
    return "; ".join(
        f"{most.differing} of {most.elements} elements, by up to {most.max_abs:.3g}"
        f"{f' ({most.steps} steps)' if most.steps else ''} on {kernels}"
        for kernels, most in worst.items()
    )
