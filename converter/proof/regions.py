"""Verifies rewrites: cuts both versions of a region out as small models, and has a worker run them on equal inputs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Self

from edge_opt.base.words import shortened
from edge_opt.ir import DType, Model, Operator, OperatorCode, Subgraph, Tensor
from edge_opt.ir.operators import BUILTIN_OPERATORS, Effect, operators_that
from edge_opt.ir.walk import cut_out, is_pure, needed_for
from edge_opt.passes.codes import code_limits
from edge_opt.passes.contract import Proof
from edge_opt.passes.rewrite import Demand, Reference, Rewrite
from edge_opt.proof.examination import Examiner, Question, Region, all_of, undecided
from edge_opt.proof.sizes import peak_bytes
from edge_opt.proof.structure import Structure
from edge_opt.runtime.errors import RuntimeTimedOut
from edge_opt.runtime.extremes import Side, kinds_for
from edge_opt.runtime.inputs import InputHint
from edge_opt.runtime.pair import ProofRequest
from edge_opt.runtime.runner import Worker

_PRODUCTS = operators_that(Effect.PRODUCT)
_DEQUANTIZE = OperatorCode(BUILTIN_OPERATORS["DEQUANTIZE"], 3)
_AT_ONCE_BYTES = 512 << 20  # of intermediate tensors in both versions together


@dataclass(frozen=True, slots=True)
class _Answer:
    """The answer to a question of a region of this structure."""

    structure: Structure
    name: str
    proof: Proof

    def serves(self, structure: Structure) -> bool:
        """Whether it answers the same question of a region of another structure."""
        return structure == self.structure or (self.proof.holds and self.structure.covers(structure))


class RegionProver:
    """Runs regions in a child process. Of regions of one structure (see `structure`) the first is run.

    Args:
        model: its name, for messages.
        seed: decides the inputs.
        time_limit: seconds for each run; by default a minute, and what the multiply-adds take on a very slow machine.
    """

    def __init__(self, *, model: str = "", seed: int = 0, time_limit: float | None = None) -> None:
        self._worker = Worker()
        self._examiner = Examiner(self._worker, seed, time_limit)
        self._of_model = f" of model '{model}'" if model else ""
        self._answers: defaultdict[object, list[_Answer]] = defaultdict(list)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._worker.close()

    def start(self) -> None:
        """Start the child now, so that loading the runtime overlaps with other work."""
        self._worker.start()

    def prove(self, rewrite: Rewrite, demand: Demand) -> Proof:
        """Whether the new region does what the old one did, to the demand; a failure is a value with its reason.

        Raises:
            RuntimeUnavailable: no worker can be started, so nothing can be verified of any region.
        """
        if not rewrite.outputs():
            return undecided(demand, "nothing reads its results, so there is nothing to compare")
        proofs: list[Proof] = []
        for question in self._questions(rewrite, demand):
            proofs.append(self._answer(question))
            if not proofs[-1].holds:
                return proofs[-1]
        return all_of(proofs)

    def _answer(self, question: Question) -> Proof:
        """The answer that a region of its structure has, else what its own examination gives."""
        region = question.region
        answers = self._answers[question.demand, question.request, question.must_compare]
        for known in answers:
            if known.serves(region.structure):
                return replace(known.proof, like=known.name)
        try:
            proof = self._examiner.examine(question)
        except RuntimeTimedOut as error:
            return undecided(question.demand, f"there was no time to prove it: {error}")
        answers.append(_Answer(region.structure, region.name.removesuffix(self._of_model), proof))
        return proof

    def _questions(self, rewrite: Rewrite, demand: Demand) -> Iterator[Question]:
        """What to ask of the region, one after the other; the last closes every row of a mask that must be exact."""
        if rewrite.reference is not None:
            yield self._against(rewrite, rewrite.reference, demand)
            return
        old, new, outputs = _changed(rewrite)
        model, inputs = rewrite.model, rewrite.inputs()
        before, after = (cut_out(model, operators, inputs, outputs) for operators in (old, new))
        region = Region(before, after, self._name(rewrite))
        request = ProofRequest(
            limits=rewrite.clipped,
            at_once=peak_bytes(before) + peak_bytes(after) <= _AT_ONCE_BYTES,
            parts=rewrite.parts,
        )
        yield Question(
            region, demand, _with_extremes(_with_mask(request, rewrite), before.subgraphs[0], demand)
        )
        if rewrite.mask is not None and rewrite.mask.exact:
            closed = _with_mask(request, rewrite, close_all=True)
            yield Question(region, demand, closed, must_compare=False)

    def _against(self, rewrite: Rewrite, reference: Reference, demand: Demand) -> Question:
        """The new region against its reference, at every value of its input; results in real numbers."""
        _, new, (result,) = _changed(rewrite)
        (position,) = rewrite.inputs()
        real = result
        if not result.dtype.is_float:
            real = Tensor("real", result.shape, DType.FLOAT32)
            new.append(Operator(_DEQUANTIZE, [result], [real]))
        before = cut_out(Model(), reference.operators, [position], [reference.result])
        after = cut_out(Model(), new, [position], [real])
        least, most = code_limits(position)
        every = (least, -1, *range(reference.count), reference.count, most)
        request = ProofRequest((InputHint("position", every=every, ends=(0, reference.count - 1)),))
        return Question(Region(before, after, self._name(rewrite)), demand, request)

    def _name(self, rewrite: Rewrite) -> str:
        """The region's, for messages: model, subgraph, and the tensor that it ends in."""
        return (
            f"'{rewrite.subgraph.name}' up to '{shortened(rewrite.anchor.outputs[0].name)}'{self._of_model}"
        )


def _with_extremes(request: ProofRequest, graph: Subgraph, demand: Demand) -> ProofRequest:
    """The request with the extreme inputs on which the demand must hold too, and where each input goes."""
    if demand.kind == "relative" or not graph.inputs:
        return request
    sides = _sides(graph)
    hints = tuple(
        replace(hint or InputHint(), side=sides.get(tensor, "other"))
        for hint, tensor in zip(request.hints or (None,) * len(graph.inputs), graph.inputs, strict=True)
    )
    both = list(zip(hints, graph.inputs, strict=True))
    floats = {hint.side for hint, tensor in both if tensor.dtype.is_float}
    codes = {hint.side for hint, tensor in both if not tensor.dtype.is_float}
    return replace(request, hints=hints, extremes=kinds_for(floats, codes, demand.spared))


def _sides(graph: Subgraph) -> dict[Tensor, Side]:
    """Where the tensors that reach a SOFTMAX go; both operands of a product lead to others."""
    sides: dict[Tensor, Side] = {}
    pending: list[tuple[Tensor | None, Side]]
    pending = [(op.input(0), "added") for op in graph.operators if op.name == "SOFTMAX"]
    while pending:
        tensor, side = pending.pop()
        if tensor is None or tensor in sides or tensor.is_constant:
            continue
        sides[tensor] = side
        if tensor.producer is not None:
            is_product = side == "added" and tensor.producer.name in _PRODUCTS
            below: tuple[Side, ...] = ("left", "right") if is_product else ()
            below += (side,) * len(tensor.producer.inputs)
            pending += zip(tensor.producer.inputs, below, strict=False)
    return sides


def _changed(rewrite: Rewrite) -> tuple[list[Operator], list[Operator], tuple[Tensor, ...]]:
    """Old and new operators as far as they matter, and the results that might differ.

    An operator of both lists stays what it is; if it depends on such operators alone, so do its results.
    """
    called = rewrite.model.subgraphs
    everything = list(rewrite.old), list(rewrite.new), rewrite.outputs()
    if rewrite.mask is not None or not all(is_pure(op, called) for op in (*rewrite.old, *rewrite.new)):
        return everything
    new = set(rewrite.new)
    producers = {tensor: operator for operator in rewrite.old for tensor in operator.outputs}
    same: set[Operator] = set()
    for operator in rewrite.old:
        sources = [producers[tensor] for tensor in operator.inputs if tensor in producers]
        if operator in new and same.issuperset(sources):
            same.add(operator)
    outputs = tuple(tensor for tensor in rewrite.outputs() if producers[tensor] not in same)
    if not outputs:
        return everything
    return needed_for(outputs, rewrite.old), needed_for(outputs, rewrite.new), outputs


def _with_mask(request: ProofRequest, rewrite: Rewrite, *, close_all: bool = False) -> ProofRequest:
    """The request with the mask's values, and the axis of each result where rows that it closes are measured apart."""
    mask = rewrite.mask
    if mask is None:
        return request
    axes = rewrite.mask_axes()
    rows = mask.tensor.shape[-2] if len(mask.tensor.shape) > 1 else 1
    apart = not close_all and None not in axes
    closed = range(rows) if close_all else range(rows - apart, rows)
    masked = InputHint("mask", mask.masked, mask.opened, tuple(closed))
    hints = tuple(masked if tensor is mask.tensor else None for tensor in rewrite.inputs())
    return replace(request, hints=hints, row_axes=axes if apart else (None,) * len(axes))
