"""Runs one region on a worker and decides whether the demand is met, with the wording for the report."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

from edge_opt.base.errors import ModelFormatError
from edge_opt.base.words import many
from edge_opt.ir import DType, Model, Tensor, to_tables
from edge_opt.ir.refusal import RefusedError
from edge_opt.passes.contract import Proof, Ran
from edge_opt.passes.rewrite import Demand
from edge_opt.proof.sizes import FACTOR, multiply_adds, shrunk
from edge_opt.proof.structure import Structure, structure
from edge_opt.runtime.errors import RuntimeCrashed, RuntimeFailed, RuntimeRefused, RuntimeTimedOut
from edge_opt.runtime.extremes import KINDS
from edge_opt.runtime.metrics import Difference
from edge_opt.runtime.pair import DRAWS, Outcome, ProofRequest
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
    def structure(self) -> Structure:
        """The structure that other regions are compared with."""
        return structure(self.before, self.after)

    @cached_property
    def files(self) -> tuple[bytes, bytes]:
        """Both versions serialized, as a worker takes them."""
        return model_bytes(to_tables(self.before)), model_bytes(to_tables(self.after))

    @cached_property
    def rounds_by_shape(self) -> str:
        """An operator whose rounding in LiteRT's optimized kernel depends on shapes; empty if there is none."""
        graphs = [*self.before.subgraphs, *self.after.subgraphs]
        for operator in (operator for graph in graphs for operator in graph):
            if operator.name == "ADD" and operator.output.dtype is DType.INT16:
                return "int16 ADD"  # AVX2 for operands of one shape, another kernel where one broadcasts
            if (
                operator.name == "SOFTMAX"
                and operator.output.dtype.is_float
                and operator.option("beta") != 1.0
            ):
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
    """Verify that the demand is met; open if a run takes too long or no inputs distinguish right from wrong.

    A small region is run in full, on both kernel sets. A large one is run at a fraction of its lengths on both, extreme
    inputs included; then in full, on XNNPACK's kernels if these must give the same bits, else on the reference kernels.
    A large region that does not run at a fraction of its lengths is treated like a small one.
    """
    try:
        return _at_size(worker, question) or _ask(worker, question)[0]
    except RefusedError as untold:
        reason = f"cannot be verified: {untold}, so a wrong rewrite would give the same"
        return unproved(question.demand, reason)
    except RuntimeTimedOut as error:
        return unproved(question.demand, f"verification timed out: {error}")
    except ModelFormatError as error:
        reason = f"the region alone is not a valid model: {error}"
    except RuntimeRefused as error:
        alone = error.reason.startswith("before:")
        what = "cannot run the region alone" if alone else "refuses the new region"
        reason = f"the runtime {what}: {error.reason}"
    except RuntimeFailed as error:
        reason = f"the verification could not be run: {error}"
    return unproved(question.demand, reason, is_open=False)


def _at_size(worker: Worker, question: Question) -> Proof | None:
    """The answer for a large region; None if it must be run like a small one."""
    part = question.in_part()
    if part is None:
        return None
    try:
        in_part, scale = _ask(worker, part)
    except (RuntimeRefused, RuntimeCrashed, RefusedError, ModelFormatError):
        return None
    if not in_part.holds:
        return in_part
    # The fastest kernels that run the region and must give the same bits.
    ran = [each.kernels for each in in_part.ran]
    only = (
        _KERNELS[1]
        if _KERNELS[0] not in ran or (question.rounds_by_shape and _KERNELS[1] in ran)
        else _KERNELS[0]
    )
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
    run = partial(worker.prove, *question.files, request, seconds=limit, where=question.name)
    try:
        try:
            outcome = run()
        except RuntimeCrashed:
            outcome = run()  # the worker may have been killed between requests: not the region's fault
    except RuntimeTimedOut as error:
        raise RuntimeTimedOut(
            f"region {question.name} took longer than {limit:.3g} s; --verify none skips verification"
        ) from error
    return judge(outcome, question), outcome.scale


def judge(outcome: Outcome, question: Question) -> Proof:
    """The verdict on the figures.

    Raises:
        RefusedError: both versions agree, but many wrong ones would, too.
    """
    demand, violated = question.demand, ""
    extremes = {f" on {KINDS[kind]}": found for kind, found in outcome.extremes.items()}
    for where, found in {"": outcome.outputs, **extremes}.items():
        if not violated and not _holds(found, question):
            violated = f"the new region differs{where}: {_figures(found)}, but must be {demand.words}"
    if not violated and outcome.untold:
        raise RefusedError(outcome.untold)
    differences = [difference for found in outcome.outputs.values() for difference in found]
    steps = [difference.steps for difference in differences if difference.steps is not None]
    exact = not question.request.limits and not (demand.kind == "bitwise" and question.rounds_by_shape)
    return Proof(
        demand,
        holds=not violated,
        bitwise=exact and all(difference.bitwise for difference in differences),
        max_abs=max(difference.max_abs for difference in differences),
        steps=max(steps, default=None),
        reason=violated,
        note="; ".join(_notes(outcome, question, differences)),
        ran=tuple(Ran(kernels, question.divided) for kernels in outcome.outputs),
        extremes=bool(outcome.extremes),
    )


def _holds(found: Mapping[str, Sequence[Difference]], question: Question) -> bool:
    """True if the demand is met; optimized kernels that round by shape need only stay within a bound."""
    demand = question.demand

    def met(tensor: Tensor, difference: Difference, kernels: str) -> bool:
        steps = math.inf if difference.steps is None else difference.steps
        match demand.kind:
            case "relative":
                return difference.max_rel <= demand.tolerance
            case "absolute":
                return difference.max_abs <= demand.tolerance
            case "steps":
                return steps <= demand.tolerance
        if not question.rounds_by_shape or kernels == "reference" or "reference" not in found:
            return False
        return difference.max_rel <= _ROUNDING or steps <= _STEPS.get(tensor.dtype, 1)

    outputs = question.before.subgraphs[0].outputs
    return all(
        difference.bitwise or met(tensor, difference, kernels)
        for kernels, differences in found.items()
        for tensor, difference in zip(outputs, differences, strict=True)
    )


def _notes(outcome: Outcome, question: Question, differences: Sequence[Difference]) -> list[str]:
    """Remarks on kernels that were left out and on optimized kernels that are held to a bound."""
    notes = []
    if len(outcome.outputs) < len(question.request.kernels):
        notes.append(f"on {', '.join(outcome.outputs)} kernels only: the others refuse the region alone")
    if question.demand.kind != "bitwise" or not question.rounds_by_shape:
        return notes
    note = f"{question.rounds_by_shape} rounds by shape on optimized kernels"
    steps = [difference.steps for difference in differences if difference.steps is not None]
    if "reference" not in outcome.outputs:
        note += ", and the reference kernels cannot run it"
    elif steps:
        most = max(_STEPS.get(tensor.dtype, 1) for tensor in question.before.subgraphs[0].outputs)
        note += f": results may differ by up to {many(most, 'step')} (here by {max(steps)})"
    else:
        worst = max(difference.max_rel for difference in differences)
        note += f": results may differ by up to {_ROUNDING:g} of their range (here by {worst:.1e})"
    return [*notes, note]


def _figures(found: Mapping[str, Sequence[Difference]]) -> str:
    worst = {kernels: max(each, key=lambda difference: difference.max_abs) for kernels, each in found.items()}
    return "; ".join(
        f"{most.differing} of {most.elements} elements, by up to {most.max_abs:.3g}"
        f"{f' ({most.steps} steps)' if most.steps else ''} on {kernels}"
        for kernels, most in worst.items()
    )
