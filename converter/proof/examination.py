"""Runs one region on one worker, and judges the figures: whether the demand is met, and in which words that is said."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
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
from edge_opt.runtime.pair import DRAWS, Outcome, ProofRequest
from edge_opt.runtime.runner import Worker
from edge_opt.runtime.tensors import Kernels
from edge_opt.schema.writer import model_bytes

_KERNELS: tuple[Kernels, ...] = ("xnnpack", "reference")
_IN_FULL = 1 << 26  # multiply-adds up to which everything is run in full
_LEAST_SECONDS = 60.0
_SLOWEST = 2e7  # multiply-adds a second: a hundredth of the slowest kernel's, for a machine as busy as that
_ROUNDING = 1e-6  # relative, of floats that optimized kernels round by shape
_STEPS = {DType.INT16: 128}  # of codes that follow such a rounding, by type; otherwise one

_Found = Mapping[str, tuple[Difference, ...]]


def failed(demand: Demand, reason: str) -> Proof:
    """It does not hold."""
    return Proof(demand, holds=False, bitwise=False, max_abs=math.inf, reason=reason)


def undecided(demand: Demand, reason: str) -> Proof:
    """Nothing was shown either way."""
    return replace(failed(demand, reason), open=True)


@dataclass(frozen=True)
class Question:
    """Both versions of a region cut out as models, the inputs to run them on, and the demand.

    `name` is the region's, for messages; its lengths are `divided` by so much.
    """

    before: Model
    after: Model
    name: str
    demand: Demand
    request: ProofRequest
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
        graphs = (graph for model in (self.before, self.after) for graph in model.subgraphs)
        return next(filter(None, (_rounds_by_shape(op) for graph in graphs for op in graph.operators)), "")

    def in_part(self) -> Question | None:
        """The same at a fraction of the lengths; None where the region is small, or no part stands for it.

        Clipped values are places, and so is what a demand other than bitwise may concern: such a region has no part.
        """
        if self.cost <= _IN_FULL or self.request.limits or self.demand.kind != "bitwise":
            return None
        before, after = shrunk(self.before), shrunk(self.after)
        if before is None or after is None:
            return None
        return replace(
            self, before=before, after=after, request=replace(self.request, parts=None), divided=FACTOR
        )


def _rounds_by_shape(operator: Operator) -> str:
    """The optimized kernels of LiteRT whose arithmetic depends on the shape of what they are given."""
    if operator.name == "ADD" and operator.output.dtype is DType.INT16:
        return "int16 ADD"  # AVX2 for operands of one shape, another kernel where one broadcasts
    if operator.name == "SOFTMAX" and operator.output.dtype.is_float and operator.option("beta") != 1.0:
        return "SOFTMAX with beta"  # XNNPACK declines it, and the other kernel rounds by the number of rows
    return ""


@dataclass(frozen=True, slots=True)
class Examiner:
    """Examines regions on a worker.

    A small region is run in full, on both kernel sets. A large one is run at a fraction of its lengths on both, extreme
    inputs included; then in full, on XNNPACK's kernels where these must give the same bits, else on the reference ones.
    A region that does not run at such a fraction is run in full like a small one.
    """

    worker: Worker
    seed: int = 0

    def examine(self, question: Question) -> Proof:
        """Whether the demand is met; an open answer where no inputs make the results tell right from wrong.

        Raises:
            RuntimeTimedOut: the region takes too long, which says nothing of it.
        """
        try:
            return self._at_size(question) or self._ask(question)[0]
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
            in_part, scale = self._ask(part)
        except (RuntimeRefused, RuntimeCrashed, RefusedError, ModelFormatError):
            return None
        if not in_part.holds:
            return in_part
        # The kernels that must give the same bits, and of these the faster ones that take it.
        kernels = [ran.kernels for ran in in_part.ran]
        fast = _KERNELS[1 if question.rounds_by_shape and _KERNELS[1] in kernels else 0]
        only = fast if fast in kernels else _KERNELS[1]
        # Sums of so many times the products deviate by the root of that.
        request = replace(question.request, extremes=(), scales=(scale / FACTOR**0.25,), kernels=(only,))
        in_full, _ = self._ask(replace(question, request=request))
        if not in_full.holds:
            return in_full
        # Both hold to the same demand, and in full there is no difference at all.
        rest = (ran for ran in in_part.ran if ran.kernels != only)
        return replace(in_part, ran=(*in_full.ran, *rest))

    def _ask(self, question: Question) -> tuple[Proof, float]:
        """The verdict, and the scale of operands at which results tell most."""
        request = replace(question.request, seed=self.seed)
        runs = len(request.kernels) * (len(request.scales) + DRAWS * len(request.extremes))
        limit = _LEAST_SECONDS + question.cost * runs / _SLOWEST
        for last in (False, True):
            try:
                outcome = self.worker.prove(*question.files, request, seconds=limit, where=question.name)
                return judge(outcome, question), outcome.scale
            except RuntimeCrashed:
                # A worker killed by somebody between two requests says nothing of a region; a second time, it does.
                if last:
                    raise
            except RuntimeTimedOut as error:
                raise RuntimeTimedOut(
                    f"region {question.name} took longer than {limit:.3g} s; --verify none proves nothing"
                ) from error
        raise AssertionError("the second attempt answers or raises")


def judge(outcome: Outcome, question: Question) -> Proof:
    """What the figures mean.

    Raises:
        RefusedError: both versions agree, but so would many a wrong one.
    """
    demand = question.demand
    violated = (
        "" if _holds(outcome.outputs, question) else f"the new region differs: {_figures(outcome.outputs)}"
    )
    for kind, found in outcome.extremes.items():
        if not violated and not _holds(found, question):
            violated = f"the new region differs on {KINDS[kind]}: {_figures(found)}"
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
        reason=violated and f"{violated}, demanded {demand}",
        note="; ".join(_notes(outcome, question, differences)),
        ran=tuple(Ran(kernels, question.divided) for kernels in outcome.outputs),
        extremes=bool(outcome.extremes),
    )


def _holds(found: _Found, question: Question) -> bool:
    """Whether the demand is met; optimized kernels that round by shape are held to a bound instead of the same bits."""
    demand, optimized = question.demand, question.rounds_by_shape and "reference" in found
    for kernels, differences in found.items():
        for tensor, difference in zip(question.before.subgraphs[0].outputs, differences, strict=True):
            steps = math.inf if difference.steps is None else difference.steps
            if demand.kind == "relative":
                met = difference.max_rel <= demand.tolerance
            elif demand.kind == "absolute":
                met = difference.max_abs <= demand.tolerance
            elif demand.kind == "steps":
                met = steps <= demand.tolerance
            elif optimized and kernels != "reference":
                met = difference.max_rel <= _ROUNDING or steps <= _STEPS.get(tensor.dtype, 1)
            else:
                met = False
            if not met and not difference.bitwise:
                return False
    return True


def _notes(outcome: Outcome, question: Question, differences: Sequence[Difference]) -> list[str]:
    """Where kernels were left out, and where optimized ones are held to a bound."""
    notes = []
    if len(outcome.outputs) < len(question.request.kernels):
        notes.append(f"on {', '.join(outcome.outputs)} kernels only: the others refuse the region alone")
    if question.demand.kind != "bitwise" or not question.rounds_by_shape:
        return notes
    note = f"{question.rounds_by_shape} rounds by shape on optimized kernels"
    steps = [difference.steps for difference in differences if difference.steps is not None]
    if "reference" not in outcome.outputs:
        note += ", and others cannot run it"
    elif steps:
        most = max(_STEPS.get(tensor.dtype, 1) for tensor in question.before.subgraphs[0].outputs)
        note += f": results may differ by up to {many(most, 'step')} (here by {max(steps)})"
    else:
        worst = max(difference.max_rel for difference in differences)
        note += f": results may differ by up to {_ROUNDING:g} of their range (here by {worst:.1e})"
    return [*notes, note]


def _figures(found: _Found) -> str:
    worst = {kernels: max(each, key=lambda difference: difference.max_abs) for kernels, each in found.items()}
    return "; ".join(
        f"{most.differing} of {most.elements} elements, by up to {most.max_abs:.3g}"
        f"{f' ({most.steps} steps)' if most.steps else ''} on {kernels}"
        for kernels, most in worst.items()
    )
