"""Open two models side by side: pair their signatures, plan inputs for both, and measure their outputs.

The caller runs the models, on the CPU or in an emulator. Only the outputs of one signature are kept at a time.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from edge_opt.base.errors import UsageError, match_names, unknown
from edge_opt.base.words import Progress, many, no_progress
from edge_opt.comparison.findings import (
    ComparisonReport,
    OutputComparison,
    SignatureComparison,
    measured,
    requantized,
)
from edge_opt.ir import Model, load
from edge_opt.ir.opening import ModelLike, Opened
from edge_opt.runtime.description import describe
from edge_opt.runtime.inputs import InputPlan, Planned, integer_remarks, plan, runs_for, twins
from edge_opt.runtime.metrics import Tolerance, are_logits
from edge_opt.runtime.protocol import Array, Arrays
from edge_opt.runtime.runner import Worker
from edge_opt.runtime.tensors import SignatureInfo, TensorInfo
from edge_opt.shapes.dimension import may_be_alike

_SECONDS_PER_REQUEST = 1800.0
_LEAST_CALLS = 8
"""Calls of each signature that keeps state: a value may pass through several variables before it shows."""

Shapes = Mapping[str, Sequence[int]]


@dataclass(frozen=True, slots=True)
class Pair:
    """One signature in both models, or why it cannot be run on both.

    `signature` is from `a`, with input shapes that fit both models, and keeps state if either does; `inputs` are from
    `b`. `outputs` pairs outputs of both, `alone` has outputs of only one. `differs` says how an input does.
    If `a` was `recorded`, its numbers hold, whatever `b` can represent.
    """

    signature: SignatureInfo
    inputs: Sequence[TensorInfo] = ()
    outputs: Sequence[tuple[TensorInfo, TensorInfo]] = ()
    alone: Sequence[OutputComparison] = ()
    reason: str = ""
    differs: str = ""
    recorded: bool = False

    @classmethod
    def of(
        cls,
        a: SignatureInfo | None,
        b: SignatureInfo | None,
        names: Sequence[str],
        shapes: Shapes,
        *,
        recorded: bool = False,
    ) -> "Pair":
        """Match a signature's inputs and outputs; `names` are the models' names, `shapes` set open lengths."""
        either = a or b
        assert either is not None, "the signature is of one of the models"
        if a is None or b is None:
            side = 0 if b is None else 1
            return cls(either, reason=f"only in {names[side]}")
        by_place = a.positional and b.positional
        inputs, alone = _matched(a.inputs, b.inputs, names, by_place=by_place)
        if alone:
            return cls(a, reason=f"input '{alone[0].name}' is {alone[0].reason}")
        ours: list[TensorInfo] = []
        theirs: list[TensorInfo] = []
        differs = ""
        for one, other in inputs:
            how = requantized(one, other)
            if how:
                differs = differs or f"input '{one.name}' has {how}"
            given = shapes.get(f"{a.name}/{one.name}", shapes.get(one.name))
            fitted = _fitted(one, other, given, recorded=recorded)
            if not fitted:
                asked = "" if given is None else f", requested {tuple(given)}"
                shown = f"input '{one.name}' has shape {one.declared} in a, {other.declared} in b"
                return cls(a, reason=f"{shown}{asked}")
            ours.append(fitted[0])
            theirs.append(fitted[1])
        keeps_state = a.keeps_state or b.keeps_state
        signature = replace(a, inputs=tuple(ours), keeps_state=keeps_state)
        outputs, alone = _matched(a.outputs, b.outputs, names, by_place=by_place)
        return cls(signature, theirs, outputs, alone, differs=differs, recorded=recorded)

    def plans(
        self, seed: int, run: int = 0, *, further: bool = False
    ) -> tuple[list[InputPlan], list[InputPlan]]:
        """Plan the inputs of one run for each model, with the same real numbers."""
        ours: list[InputPlan] = []
        theirs: list[InputPlan] = []
        plans = plan(self.signature, seed=seed, run=run, further=further)
        for planned, info in zip(plans, self.inputs, strict=True):
            one, other = twins(planned, info, recorded=self.recorded)
            ours.append(one)
            theirs.append(other)
        return ours, theirs


def _fitted(
    one: TensorInfo, other: TensorInfo, given: Sequence[int] | None, *, recorded: bool
) -> list[TensorInfo]:
    """Both descriptions of an input, with the shape and limits that fit both models.

    Empty if no shape, or not the `given` one, fits. The limits of `recorded` inputs hold as they are.
    """
    if not may_be_alike(one.declared, other.declared):
        return []
    declared = tuple(map(max, one.declared, other.declared))
    taken = declared if given is None else tuple(given)
    if not may_be_alike(declared, taken):
        return []
    shape = tuple(1 if size < 0 else size for size in taken)
    fitted = [replace(info, shape=shape, declared=declared) for info in (one, other)]
    if recorded:
        return fitted
    entries = _smallest((one.entries, other.entries))
    ends = (one.accepts, other.accepts)
    accepts = None if None in ends else _smallest(ends)
    near = tuple(sorted({*one.near, *other.near}))
    return [replace(info, entries=entries, accepts=accepts, near=near) for info in fitted]


def _smallest(limits: Iterable[int | None]) -> int:
    """The smallest limit; 0 stands for no limit."""
    return min(filter(None, limits), default=0)


def _matched(
    a: Sequence[TensorInfo], b: Sequence[TensorInfo], names: Sequence[str], *, by_place: bool
) -> tuple[list[tuple[TensorInfo, TensorInfo]], list[OutputComparison]]:
    """Pair inputs or outputs by position if neither model has signatures, else by name; also return the unpaired."""
    pairs: list[tuple[TensorInfo, TensorInfo]] = []
    alone: list[OutputComparison] = []
    theirs = _keyed(b, by_place=by_place)
    for key, info in _keyed(a, by_place=by_place).items():
        other = theirs.pop(key, None)
        if other is None:
            alone.append(OutputComparison(name=info.name, reason=f"only in {names[0]}"))
        else:
            pairs.append((info, other))
    alone += (
        OutputComparison(name=one.name, reason=f"only in {names[1]}") for one in theirs.values()
    )
    return pairs, alone


def _keyed(infos: Sequence[TensorInfo], *, by_place: bool) -> dict[int | str, TensorInfo]:
    return {place if by_place else info.name: info for place, info in enumerate(infos)}


class Turn(NamedTuple):
    """One call of a signature, with ordinary inputs or further ones."""

    name: str
    further: bool = False


def orders(signatures: Sequence[SignatureInfo]) -> list[list[Turn]]:
    """The calls of each session.

    A signature without state runs alone. Signatures that keep state run in one session, because one may read what
    another wrote. A difference in state may show only if the right signature runs next, so each runs directly after
    every one. Calls with further inputs, which are less like those of real use, come last.
    """
    found: list[list[Turn]] = []
    stateful: list[str] = []
    most = 0
    for signature in signatures:
        ordinary, further = runs_for(signature)
        if signature.keeps_state:
            stateful.append(signature.name)
            most = max(most, further)
        else:
            found.append(_turns([signature.name], ordinary, further))
    if stateful:
        # One cycle calls each signature once after every one of them.
        cycle = _each_after_each(stateful)
        cycles = math.ceil(_LEAST_CALLS / len(stateful))
        further_cycles = math.ceil(most / len(stateful))
        found.append(_turns(cycle, cycles, further_cycles))
    return found


def _turns(cycle: Sequence[str], ordinary: int, further: int) -> list[Turn]:
    """So many cycles with ordinary inputs, and with further ones."""
    first = [Turn(name) for name in cycle]
    last = [Turn(name, further=True) for name in cycle]
    return first * ordinary + last * further


def _each_after_each(names: Sequence[str]) -> list[str]:
    """A cycle in which each name follows each name once, itself too: the de Bruijn sequence of order 2."""
    cycle: list[str] = []
    for place, name in enumerate(names):
        cycle.append(name)
        for other in names[place + 1 :]:
            cycle += [name, other]
    return cycle


class Session(NamedTuple):
    """Signatures of a model that stays loaded, and the order of their calls."""

    pairs: Mapping[str, Pair]
    order: Sequence[Turn]

    def calls(self, seed: int) -> tuple[list[Planned], list[Planned]]:
        """The calls of each model, with the same real numbers; every call of a signature has other ones."""
        done = Counter[str]()
        ours: list[Planned] = []
        theirs: list[Planned] = []
        for name, further in self.order:
            one, other = self.pairs[name].plans(seed, done[name], further=further)
            done[name] += 1
            ours.append((name, one))
            theirs.append((name, other))
        return ours, theirs

    def remarks(self) -> Iterator[str]:
        """How signatures that keep state were called."""
        stateful = [name for name, pair in self.pairs.items() if pair.signature.keeps_state]
        if stateful:
            often = f"{len(self.order) // len(self.pairs)} times each, in every order of two"
            what = "results may depend on earlier calls or on random numbers"
            yield f"{what}; run in one session, {often}: {', '.join(stateful)}"

    def outputs_of(self, name: str, outputs: Sequence[Arrays]) -> list[Arrays]:
        """The outputs of one signature's calls, from those of all calls."""
        calls = zip(self.order, outputs, strict=True)
        return [arrays for turn, arrays in calls if turn.name == name]

    def ordinary(self, name: str) -> int:
        """The number of a signature's calls with ordinary inputs, which come first."""
        return self.order.count(Turn(name))


def sessions(pairs: Mapping[str, Pair]) -> list[Session]:
    """The sessions in which the signatures run that can run in both models."""
    runnable = {name: pair for name, pair in pairs.items() if not pair.reason}
    found = []
    for order in orders([pair.signature for pair in runnable.values()]):
        called = {turn.name: runnable[turn.name] for turn in order}
        found.append(Session(called, order))
    return found


class Both(NamedTuple):
    """Two open models: files, graphs and paired signatures; `begun` is the report before anything is compared."""

    begun: ComparisonReport
    worker: Worker
    files: Sequence[Path]
    models: Sequence[Model]
    pairs: Mapping[str, Pair]
    tell: Progress

    def compared(self, run: Callable[[Session], Iterable[SignatureComparison]]) -> ComparisonReport:
        """Compare the signatures of every session with `run` and return the report."""
        found: dict[str, SignatureComparison] = {}
        for name, pair in self.pairs.items():
            if pair.reason:
                found[name] = SignatureComparison(name, reason=pair.reason)
        for session in sessions(self.pairs):
            self.tell(f"{', '.join(session.pairs)}: running", len(found), len(self.pairs))
            for compared in run(session):
                found[compared.name] = compared
        self.tell("compared", len(self.pairs), len(self.pairs))
        signatures = tuple(found[name] for name in self.pairs)
        return replace(self.begun, signatures=signatures, remarks=tuple(self._remarks()))

    def _remarks(self) -> Iterator[str]:
        """What the inputs do not show: other lengths, integers whose role is unknown, other types."""
        opened: list[str] = []
        retyped: list[str] = []
        for name, pair in self.pairs.items():
            inputs = list(zip(pair.signature.inputs, pair.inputs, strict=False))
            for one, _ in inputs:
                if -1 in one.declared:
                    opened.append(f"{name}/{one.name} {list(one.shape)}")
            for one, other in (*inputs, *pair.outputs):
                if one.dtype != other.dtype:
                    retyped.append(f"{name}/{one.name}, {one.dtype} in a, {other.dtype} in b")
        if opened:
            yield f"open lengths were run at one size only (--shape gives others): {', '.join(opened)}"
        for pair in self.pairs.values():
            yield from integer_remarks(pair.signature)
        if retyped:
            how = f"with another type in b (first: {retyped[0]}); inputs get the same real numbers"
            yield f"{many(len(retyped), 'argument')} {how}"

    def measure(
        self, a: TensorInfo, b: TensorInfo, runs: Iterable[tuple[Array, Array]], ordinary: int
    ) -> OutputComparison:
        """Compare one output of both models over all runs, the first of which are `ordinary`."""
        tolerance = Tolerance(atol=self.begun.atol, rtol=self.begun.rtol)
        return measured(a, b, runs, tolerance, ordinary=ordinary, logits=are_logits(a))

    def measure_all(
        self, pair: Pair, runs: Sequence[tuple[Arrays, Arrays]], ordinary: int = 1
    ) -> SignatureComparison:
        """Compare every output over all runs, as `measure` does; removes the outputs of `b` from `runs`."""
        found: list[OutputComparison] = []
        for a, b in pair.outputs:
            arrays = [(ours[a.name], theirs.pop(b.name)) for ours, theirs in runs]
            found.append(self.measure(a, b, arrays, ordinary))
        return SignatureComparison(pair.signature.name, (*found, *pair.alone), pair.differs)


@contextmanager
def both_open(
    a: ModelLike,
    b: ModelLike,
    begun: ComparisonReport,
    *,
    signatures: Sequence[str] | None,
    shapes: Shapes | None,
    progress: Progress | None,
) -> Iterator[Both]:
    """Open two models and pair their signatures.

    Raises:
        UsageError: neither model has a chosen signature, or an input named in `shapes`.
        ModelFormatError: a model cannot be read.
    """
    tell = progress or no_progress
    shapes = shapes or {}
    with Worker(time_limit=_SECONDS_PER_REQUEST) as worker:
        worker.start()
        with Opened(a).main().file() as file_a, Opened(b).main().file() as file_b:
            models = (load(file_a), load(file_b))
            ours = describe(models[0])
            theirs = describe(models[1])
            _check_shapes(shapes, ours)
            sides = (begun.a, begun.b)
            pairs: dict[str, Pair] = {}
            for name in match_names("signature", signatures, [*(ours | theirs)]):
                pairs[name] = Pair.of(ours.get(name), theirs.get(name), sides, shapes)
            yield Both(begun, worker, (file_a, file_b), models, pairs, tell)


def _check_shapes(shapes: Shapes, signatures: Mapping[str, SignatureInfo]) -> None:
    """Raise UsageError for the shape of an input that no signature has."""
    short: dict[str, None] = {}
    full: list[str] = []
    for name, signature in signatures.items():
        for info in signature.inputs:
            short[info.name] = None
            full.append(f"{name}/{info.name}")
    for key in shapes:
        if key not in [*short, *full]:
            raise unknown("input", key, short, also=full)


def checked_numbers(seed: int, atol: float, rtol: float) -> tuple[int, float, float]:
    """Return seed and tolerances as Python numbers, because JSON cannot store numpy's.

    Raises:
        UsageError: a value is negative or NaN.
    """
    for name, value in (("seed", seed), ("atol", atol), ("rtol", rtol)):
        if not value >= 0:
            raise UsageError(f"{name} is {value}, expected at least 0")
    return int(seed), float(atol), float(rtol)
