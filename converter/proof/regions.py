"""Proves rewrites: cuts both versions of a region out as small models, and has workers run them on equal inputs.

Which of several regions is run in full follows from the order in which they are asked for, not from who is free when.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from edge_opt.attention.rules import PRODUCTS
from edge_opt.ir import DType, Model, Operator, OperatorCode, Subgraph, Tensor
from edge_opt.ir.extract import cut_out
from edge_opt.ir.graph import BUILTIN_OPERATORS
from edge_opt.ir.region import is_pure, needed_for
from edge_opt.passes.contract import Demand, Proof
from edge_opt.passes.rewrite import Reference, Rewrite
from edge_opt.proof.examination import Examiner, Question, Region, Settings
from edge_opt.proof.extremes import Side, chosen
from edge_opt.proof.inputs import InputHint
from edge_opt.proof.judging import all_of
from edge_opt.proof.pair import ProofRequest
from edge_opt.proof.pool import WorkerPool, free_cores
from edge_opt.proof.rows import peak_bytes
from edge_opt.proof.runner import Worker
from edge_opt.proof.structure import Structure, structure

_Known = tuple[tuple[InputHint | None, ...], tuple[int | None, ...]]

_DEQUANTIZE = OperatorCode(BUILTIN_OPERATORS["DEQUANTIZE"], 3)
_AT_ONCE_BYTES = 512 << 20  # of intermediate tensors in both versions together
_LARGE = 1 << 30  # multiply-adds of a region that a worker of its own pays for: it takes 40 MiB


@dataclass(frozen=True, slots=True)
class _Begun:
    """A region that is being examined, and its structure where only rows of it may be run."""

    proof: Future[Proof]
    kind: Structure | None = None


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
        self._known: dict[Hashable, Proof] = {}
        self._begun: dict[Hashable, _Begun] = {}
        self._current: _Begun | None = None
        self._proved: list[tuple[Structure, Proof]] = []
        self._coming: Iterator[tuple[Rewrite, Demand]] = iter(())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.close()

    def start(self) -> None:
        """Start a child now, so that loading the runtime overlaps with other work."""
        self._pool.start()

    def expect(self, coming: Iterator[tuple[Rewrite, Demand]]) -> None:
        """What will probably be asked for next: begun while a region takes its time."""
        self._coming = coming

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
        model, inputs = rewrite.calls or Model(), rewrite.inputs()
        saturation = rewrite.saturation
        limits = None if saturation is None else (saturation.low, saturation.high)
        before, after = (cut_out(model, operators, inputs, outputs) for operators in (old, new))
        at_once = peak_bytes(before) + peak_bytes(after) <= _AT_ONCE_BYTES
        region = Region(before, after, self._name(rewrite))
        for place, (hints, axes) in enumerate(_runs(rewrite, inputs)):
            request = ProofRequest(hints, axes, limits, at_once, rewrite.parts)
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
        assert position.dtype.numpy is not None
        limits = np.iinfo(position.dtype.numpy.name)
        every = (int(limits.min), -1, *range(reference.count), reference.count, int(limits.max))
        request = ProofRequest((InputHint("position", every=every, ends=(0, reference.count - 1)),))
        return Question(Region(before, after, self._name(rewrite)), demand, request)

    def _name(self, rewrite: Rewrite) -> str:
        """The region's, for messages: model, subgraph, and the tensor that it ends in."""
        of_model = f" of model '{self._model}'" if self._model else ""
        return f"'{rewrite.subgraph.name}' up to '{rewrite.anchor.outputs[0].name}'{of_model}"

    def _answer(self, question: Question) -> Proof:
        key = question.key
        known = self._known.get(key)
        if known is not None:
            return replace(known, repeated=True)
        begun = self._current = self._begun.pop(key, None) or self._begin(question)
        self._begin_others(begun.proof)
        proof = begun.proof.result()
        kind = begun.kind
        if kind is not None and proof.holds:
            known = self._covering(kind)
            if not self._stands_alone(question, proof) and known is None:
                # What it relied on failed, or was not asked for in the end.
                proof = self._submit(question).result()
            if proof.holds and self._stands_alone(question, proof):
                self._proved.append((kind, proof))
            elif proof.holds and known is not None:
                proof = replace(proof, note=proof.note or known.note)
        self._known[key] = proof
        return proof

    def _begin_others(self, current: Future[Proof]) -> None:
        """Begin what comes next, as much as runs at a time, as long as the current one is not done."""
        while not wait([current], timeout=0).done:
            waiting = [begun for begun in self._begun.values() if not begun.proof.done()]
            if len(waiting) >= max(self._pool.count - 1, 1):
                return
            coming = next(self._coming, None)
            if coming is None:
                return
            question = next(self._questions(*coming))
            key = question.key
            if key not in self._known and key not in self._begun:
                self._begun[key] = self._begin(question)

    def _begin(self, question: Question) -> _Begun:
        """Have it examined; less of it, if a region of its structure was proved in full or will be by then."""
        if not self._settings.relies(question):
            return _Begun(self._submit(question))
        kind = structure(question.region.before, question.region.after, question.demand)
        earlier = (begun.kind for begun in (self._current, *self._begun.values()) if begun and begun.kind)
        covered = self._covering(kind) is not None or any(known.covers(kind) for known in earlier)
        return _Begun(self._submit(question, covered=covered), kind)

    def _stands_alone(self, question: Question, proof: Proof) -> bool:
        """Whether the proof left nothing to that of another region of its structure."""
        if self._settings.samples(question):
            return not all(ran.rows for ran in proof.ran)
        return proof.extremes

    def _covering(self, kind: Structure) -> Proof | None:
        """The proof in full of a region that stands for those of this kind."""
        return next((proof for known, proof in self._proved if known.covers(kind)), None)

    def _submit(self, question: Question, *, covered: bool = False) -> Future[Proof]:
        def examine(worker: Worker) -> Proof:
            return Examiner(worker, self._settings, covered=covered).examine(question)

        return self._pool.submit(examine, alone=question.region.cost > _LARGE)


def _with_extremes(request: ProofRequest, graph: Subgraph, demand: Demand) -> ProofRequest:
    """The request with the extreme inputs on which the demand must hold too."""
    if demand.kind == "relative":
        return request
    hints = [hint or InputHint() for hint in request.hints or (None,) * len(graph.inputs)]
    found = _sides(graph)
    hints = [
        replace(hint, side=found.get(tensor, "other"))
        for hint, tensor in zip(hints, graph.inputs, strict=True)
    ]
    dtypes = [
        tensor.dtype.numpy.name if tensor.dtype.numpy is not None else "object" for tensor in graph.inputs
    ]
    kinds = chosen(dtypes, [hint.side for hint in hints], demand.spared)
    return replace(request, hints=tuple(hints), extremes=kinds)


def _sides(graph: Subgraph) -> dict[Tensor, Side]:
    """Where the inputs of a region go that reach a SOFTMAX; both operands of a product lead to others."""
    found: dict[Tensor, Side] = {}
    pending: list[tuple[Tensor, Side]] = [
        (operator.input(0), "added") for operator in graph.operators if operator.name == "SOFTMAX"
    ]
    while pending:
        tensor, side = pending.pop()
        if tensor in found or tensor.is_constant:
            continue
        found[tensor] = side
        maker = tensor.producer
        sources = [] if maker is None else [source for source in maker.inputs if source is not None]
        product = maker is not None and side == "added" and maker.name in PRODUCTS
        sides: tuple[Side, ...] = ("left", "right", "added") if product else (side,) * len(sources)
        pending += zip(sources, sides, strict=False)
    return found


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
    return needed_for(outputs, rewrite.old), needed_for(outputs, rewrite.new), outputs


def _runs(rewrite: Rewrite, inputs: tuple[Tensor, ...]) -> Iterator[_Known]:
    """What the worker must know of the inputs, run by run; the last closes every row, if that must be equal too."""
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
