"""Proves rewrites: cuts both versions of a region out as small models, and has workers run them on equal inputs.

Which of several regions is run in full follows from the order in which they are asked for, not from who is free when.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

from edge_opt.ir import DType, Model, Operator, OperatorCode, Subgraph, Tensor
from edge_opt.ir.operators import BUILTIN_OPERATORS, Effect, operators_that
from edge_opt.ir.walk import cut_out, is_pure, needed_for
from edge_opt.passes.contract import Proof
from edge_opt.passes.rewrite import Demand, Reference, Rewrite
from edge_opt.passes.spreads import code_limits, constant_factor, is_integer, real_range
from edge_opt.proof.examination import Examiner, Question, Region, Settings, all_of
from edge_opt.proof.rows import peak_bytes
from edge_opt.proof.structure import Structure
from edge_opt.runtime.extremes import Side, kinds_for
from edge_opt.runtime.inputs import InputHint
from edge_opt.runtime.pair import ProofRequest
from edge_opt.runtime.runner import Worker, WorkerPool, free_cores

_HintsAndAxes = tuple[tuple[InputHint | None, ...], tuple[int | None, ...]]

_PRODUCTS = operators_that(Effect.PRODUCT)
_DEQUANTIZE = OperatorCode(BUILTIN_OPERATORS["DEQUANTIZE"], 3)
_AT_ONCE_BYTES = 512 << 20  # of intermediate tensors in both versions together
_HIGHEST_LOGIT = 8.0  # of extreme codes: others in reach of it have weights of a step or more
_LARGE = 1 << 30  # multiply-adds of a region that a worker of its own pays for: it takes 40 MiB


@dataclass(slots=True)
class _Examination:
    """One question: begun, perhaps before it is asked; answered once it has a `proof`.

    `is_complete`: that proof leaves nothing to the proof of another region of its structure.
    """

    structure: Structure
    demand: Demand
    running: Future[Proof]
    proof: Proof | None = None
    is_complete: bool = False


class RegionProver:
    """Runs regions in child processes; regions that are equal but for names are proved once.

    A region of many multiply-adds is run in full, on XNNPACK's kernels, if it is the first of its structure (see
    `structure`), and the reference kernels on rows that reach every head and tile: their arithmetic takes no part in
    what is cut where. The others of that structure are run on such rows, on XNNPACK's kernels alone where these give
    the same bits.

    Args:
        model: its name, for messages.
        seed: decides inputs and random rows.
        time_limit: seconds for each run; by default a minute, and ten times what the multiply-adds take at the speed
            measured so far.
        exhaustive: run everything in full on both kernel sets.
        workers: most processes at a time, by default one for each core; more than one only for large regions. Small
            ones share one, and are prepared while it runs another. The answers do not depend on their number.
    """

    def __init__(
        self,
        *,
        model: str = "",
        seed: int = 0,
        time_limit: float | None = None,
        exhaustive: bool = False,
        workers: int | None = None,
    ) -> None:
        self._pool = WorkerPool(free_cores() if workers is None else workers)
        self._model = model
        self._settings = Settings(seed, time_limit, exhaustive)
        self._examinations: dict[Hashable, _Examination] = {}
        self._expected: Iterator[tuple[Rewrite, Demand]] = iter(())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.close()

    def start(self) -> None:
        """Start a child now, so that loading the runtime overlaps with other work."""
        self._pool.start()

    def expect(self, coming: Iterator[tuple[Rewrite, Demand]]) -> None:
        """What will probably be asked for next: begun while a region takes its time."""
        self._expected = coming

    def prove(self, rewrite: Rewrite, demand: Demand) -> Proof:
        """Whether the new region does what the old one did, to the demand; a failure is a value with its reason.

        Raises:
            RuntimeUnavailable: no worker can be started, so nothing can be proved of any region.
        """
        proofs: list[Proof] = []
        for question in self._questions(rewrite, demand):
            proofs.append(self._answer(question))
            if not proofs[-1].holds:
                return proofs[-1]
        return all_of(proofs)

    def _questions(self, rewrite: Rewrite, demand: Demand) -> Iterator[Question]:
        """What to ask of the region, one after the other."""
        if rewrite.reference is not None:
            yield self._against(rewrite, rewrite.reference, demand)
            return
        old, new, outputs = _changed(rewrite)
        model, inputs = rewrite.model, rewrite.inputs()
        before, after = (cut_out(model, operators, inputs, outputs) for operators in (old, new))
        at_once = peak_bytes(before) + peak_bytes(after) <= _AT_ONCE_BYTES
        region = Region(before, after, self._name(rewrite))
        for place, (hints, axes) in enumerate(_runs(rewrite, inputs)):
            request = ProofRequest(hints, axes, rewrite.clipped, at_once, rewrite.parts)
            if not place:
                request = _with_extremes(request, before.subgraphs[0], demand)
            yield Question(region, demand, request, must_compare=not place)

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
        of_model = f" of model '{self._model}'" if self._model else ""
        return f"'{rewrite.subgraph.name}' up to '{rewrite.anchor.outputs[0].name}'{of_model}"

    def _answer(self, question: Question) -> Proof:
        """The proof of an equal question, or the result of this one's examination."""
        key = question.key
        examination = self._examinations.pop(key, None) or self._begin(question)
        self._examinations[key] = examination  # in the order in which they are asked
        if examination.proof is not None:
            return replace(examination.proof, repeated=True)
        self._begin_expected(examination.running)
        proof = examination.running.result()
        if proof.holds and self._settings.relies(question):
            complete = next((e.proof for e in self._covering(question) if e.is_complete), None)
            if complete is None and not self._is_complete(question, proof):
                # What it relied on failed, or was not asked in the end.
                proof = self._submit(question).result()
            examination.is_complete = proof.holds and self._is_complete(question, proof)
            if complete is not None and not examination.is_complete:
                proof = replace(proof, note=proof.note or complete.note)
        examination.proof = proof
        return proof

    def _begin_expected(self, current: Future[Proof]) -> None:
        """Begin what comes next, as much as runs at a time, as long as the current one is not done."""
        while not current.done():
            running = [each for each in self._examinations.values() if not each.running.done()]
            if len(running) >= max(self._pool.count, 2):
                return
            expected = next(self._expected, None)
            if expected is None:
                return
            question = next(self._questions(*expected))
            if question.key not in self._examinations:
                self._examinations[question.key] = self._begin(question)
            elif question.region.cost <= _LARGE:
                return  # Layers are alike: to look further costs more than another region's proof would save.

    def _begin(self, question: Question) -> _Examination:
        """Have it examined; less of it, if a region of its structure was proved completely or will be by then."""
        covered = self._settings.relies(question) and any(self._covering(question))
        running = self._submit(question, covered=covered)
        return _Examination(question.region.structure, question.demand, running)

    def _covering(self, question: Question) -> Iterator[_Examination]:
        """The examinations whose proof stands, or may come to stand, for the structure of this question."""
        for each in self._examinations.values():
            stands = each.is_complete or each.proof is None
            if stands and each.demand == question.demand and each.structure.covers(question.region.structure):
                yield each

    def _is_complete(self, question: Question, proof: Proof) -> bool:
        """Whether the proof left nothing to that of another region of its structure."""
        if self._settings.samples(question):
            return not all(ran.rows for ran in proof.ran)
        return proof.extremes

    def _submit(self, question: Question, *, covered: bool = False) -> Future[Proof]:
        def examine(worker: Worker) -> Proof:
            return Examiner(worker, self._settings, covered=covered).examine(question)

        return self._pool.submit(examine, alone=question.region.cost > _LARGE)


def _with_extremes(request: ProofRequest, graph: Subgraph, demand: Demand) -> ProofRequest:
    """The request with the extreme inputs on which the demand must hold too."""
    if demand.kind == "relative" or not graph.inputs:
        return request
    places = _places(graph)
    hints = tuple(
        replace(hint or InputHint(), **places.get(tensor, _Place())._asdict())
        for hint, tensor in zip(request.hints or (None,) * len(graph.inputs), graph.inputs, strict=True)
    )
    both = zip(hints, graph.inputs, strict=True)
    with_floats = {hint.side for hint, tensor in both if tensor.dtype.is_float}
    return replace(request, hints=hints, extremes=kinds_for(with_floats, demand.spared))


class _Place(NamedTuple):
    """Where an input of a region goes, as `InputHint` has it."""

    side: Side = "other"
    keys: int = 0
    reach: float = 1.0


def _places(graph: Subgraph) -> dict[Tensor, _Place]:
    """Of the tensors of a region that reach a SOFTMAX; both operands of a product lead to others."""
    places: dict[Tensor, _Place] = {}
    pending = [(op.input(0), _Place("added"), 1.0) for op in graph.operators if op.name == "SOFTMAX"]
    while pending:
        tensor, place, factor = pending.pop()
        if tensor in places or tensor.is_constant:
            continue
        places[tensor] = place
        producer = tensor.producer
        if producer is None:
            continue
        sources = [source for source in producer.inputs if source is not None]
        below = [place] * len(sources)
        if place.side == "added" and producer.name in _PRODUCTS:
            operand = _logits(producer, factor)
            below = [operand._replace(side="left"), operand._replace(side="right"), place]
        if producer.name == "MUL":
            factor *= constant_factor(producer)
        pending += [(*each, factor) for each in zip(sources, below, strict=False)]
    return places


def _logits(product: Operator, factor: float) -> _Place:
    """Of an operand of a product of integers, which becomes logits once it is multiplied by `factor`."""
    tensors = [*product.inputs[:2], product.outputs[0]]
    if product.name != "BATCH_MATMUL" or not all(t is not None and is_integer(t) for t in tensors):
        return _Place()
    left, right, end = (max(map(abs, real_range(tensor))) for tensor in tensors if tensor is not None)
    terms = product.input(0).shape[-2 if product.option("adj_x") else -1]
    largest = left * right * terms * factor
    reach = min(end * factor, _HIGHEST_LOGIT) / largest if largest else 1.0
    return _Place(keys=product.outputs[0].shape[-1], reach=min(reach, 1.0))


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


def _runs(rewrite: Rewrite, inputs: tuple[Tensor, ...]) -> Iterator[_HintsAndAxes]:
    """What to say of the inputs, run by run; the last run closes every row of the mask, if that must be equal too."""
    for spreads in rewrite.spreads:
        yield _hints(rewrite, inputs, spreads)
    if rewrite.mask is not None and rewrite.mask.exact:
        yield _hints(rewrite, inputs, rewrite.spreads[0], close_all=True)


def _hints(
    rewrite: Rewrite,
    inputs: tuple[Tensor, ...],
    spreads: Mapping[Tensor, float],
    *,
    close_all: bool = False,
) -> _HintsAndAxes:
    """What the inputs are, and the axis of each result where the mask's rows lie, if closed ones are measured apart."""
    hints = tuple(InputHint(spread=spreads[tensor]) if tensor in spreads else None for tensor in inputs)
    mask = rewrite.mask
    if mask is None:
        return (hints if any(hints) else ()), ()
    axes = rewrite.mask_axes()
    rows = mask.tensor.shape[-2] if len(mask.tensor.shape) > 1 else 1
    apart = not close_all and None not in axes
    closed = range(rows) if close_all else range(rows - apart, rows)
    masked = InputHint("mask", mask.masked, mask.opened, tuple(closed))
    hints = tuple(masked if t is mask.tensor else hint for t, hint in zip(inputs, hints, strict=True))
    return hints, axes if apart else (None,) * len(axes)
