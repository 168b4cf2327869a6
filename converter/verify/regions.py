"""Proves rewrites: cuts both versions of a region out as small models and has the worker run them on equal inputs."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Self

from edge_opt.ir import to_bytes
from edge_opt.passes.contract import Demand, Proof
from edge_opt.passes.rewrite import cut_out
from edge_opt.verify.errors import RuntimeFailed, RuntimeRefused
from edge_opt.verify.runner import Worker

if TYPE_CHECKING:
    from types import TracebackType

    from edge_opt.passes.rewrite import Rewrite
    from edge_opt.verify.metrics import Difference
    from edge_opt.verify.proof import Proof as Outcome
    from edge_opt.verify.tensors import Kernels

_KERNELS: tuple[Kernels, ...] = ("xnnpack", "reference")
_ROUNDING = 1e-6
_SECONDS_PER_REGION = 120.0


class RegionProver:
    """Runs regions in one child process; regions that are equal but for names are proved once.

    No weights are in a region, so the cost does not grow with the model.
    """

    def __init__(self, *, seed: int = 0, time_limit: float = _SECONDS_PER_REGION) -> None:
        self._worker = Worker(time_limit=time_limit)
        self._seed = seed
        self._known: dict[tuple[bytes, bytes, Demand], Proof] = {}
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
        """Whether the new region does what the old one did, to the demand; a failure is a value with its reason."""
        inputs, outputs = rewrite.inputs(), rewrite.outputs()
        before = to_bytes(cut_out(rewrite.old, inputs, outputs))
        after = to_bytes(cut_out(rewrite.new, inputs, outputs))
        key = (before, after, demand)
        self.regions += 1
        known = self._known.get(key)
        if known is not None:
            return replace(known, repeated=True)
        self._known[key] = proof = self._run(before, after, demand)
        return proof

    def _run(self, before: bytes, after: bytes, demand: Demand) -> Proof:
        try:
            return _judge(self._worker.prove(before, after, kernels=_KERNELS, seed=self._seed), demand, _KERNELS)
        except RuntimeRefused as error:
            if not error.reason.startswith("before:"):
                return _failed(demand, f"the runtime refuses the new region: {error.reason}")
        except RuntimeFailed as error:
            return _failed(demand, f"the proof could not be run: {error}")
        return self._run_where_possible(before, after, demand)

    def _run_where_possible(self, before: bytes, after: bytes, demand: Demand) -> Proof:
        """Some operators exist in one kernel set only; then that one has to do, and the proof says so."""
        reasons: list[str] = []
        for kernels in _KERNELS:
            try:
                outcome = self._worker.prove(before, after, kernels=(kernels,), seed=self._seed)
            except RuntimeFailed as error:
                reasons.append(str(error))
                continue
            proof = _judge(outcome, demand, (kernels,))
            return replace(proof, note=f"on {kernels} kernels only: the others refuse the region as it was")
        return _failed(demand, f"the runtime cannot run the region as it was: {reasons[0]}")


def _failed(demand: Demand, reason: str) -> Proof:
    return Proof(demand, holds=False, bitwise=False, max_abs=math.inf, reason=reason)


def _judge(outcome: Outcome, demand: Demand, kernels: tuple[Kernels, ...]) -> Proof:
    if outcome.mismatch is not None:
        return _failed(demand, f"the two versions cannot be compared: {outcome.mismatch}")
    max_abs = outcome.worst(lambda difference: difference.max_abs)
    masked = outcome.worst(lambda difference: difference.max_abs, masked=True)
    has_masked = any(p.masked_rows is not None for proofs in outcome.outputs.values() for p in proofs)
    holds, note = _holds(outcome, demand, kernels)
    reason = "" if holds else f"the new region differs: {_figures(outcome)}, demanded {demand}"
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
    if demand.kind == "steps":
        steps = _steps(outcome)
        return steps is not None and steps <= demand.tolerance, ""
    if outcome.bitwise:
        return True, ""
    # Where XNNPACK declines an operator, the interpreter's optimized kernel runs; its float softmax rounds a row
    # differently depending on how many rows there are (up to 1.2e-7). The reference kernels do not.
    floats = _steps(outcome) is None
    if floats and "reference" in kernels and outcome.bitwise_on("reference") and relative <= _ROUNDING:
        return True, f"bitwise on reference kernels; {relative:.1e} relative on optimized ones, which round by row count"
    return False, ""


def _steps(outcome: Outcome) -> int | None:
    def steps(difference: Difference) -> float:
        return -1 if difference.steps is None else difference.steps

    worst = outcome.worst(steps)
    found = any(p.open_rows.steps is not None for proofs in outcome.outputs.values() for p in proofs)
    return int(worst) if found else None


def _figures(outcome: Outcome) -> str:
    texts = []
    for kernels, proofs in outcome.outputs.items():
        worst = max((proof.open_rows for proof in proofs), key=lambda difference: difference.max_abs)
        texts.append(f"{worst.differing} of {worst.elements} elements, by up to {worst.max_abs:.3g} on {kernels}")
    return "; ".join(texts)
