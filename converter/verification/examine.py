"""Runs both versions of a region in a child process, and judges the figures by the region's check."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from functools import partial
from itertools import chain

from edge_opt.base.errors import ModelFormatError
from edge_opt.base.words import many, shortened
from edge_opt.ir import load, to_tables
from edge_opt.ir.refusal import RefusedError
from edge_opt.runtime.description import describe
from edge_opt.runtime.metrics import Difference
from edge_opt.runtime.protocol import RuntimeCrashed, RuntimeFailed, RuntimeRefused, RuntimeTimedOut
from edge_opt.runtime.runner import Worker
from edge_opt.runtime.tensors import Kernels
from edge_opt.schema.writer import model_bytes
from edge_opt.verification import trial
from edge_opt.verification.check import ROUNDING, Check, Exact, Table, rounding_of
from edge_opt.verification.extremes import KINDS
from edge_opt.verification.fraction import FACTOR, shrunk
from edge_opt.verification.region import Region, Structure, region_of, structure
from edge_opt.verification.rewrite import Rewrite
from edge_opt.verification.trial import DRAWS, ORDINARY, Outcome, Trial
from edge_opt.verification.verdict import Proof, Ran

_REFUSED = {"before": "cannot run the region alone", "after": "refuses the new region"}
_IN_FULL = 1 << 26  # regions of at most this many multiply-adds are run in full
_LEAST_SECONDS = 60.0
_SLOWEST = 2e7  # multiply-adds per second: a hundredth of the slowest kernel's, to allow for a busy machine


class Verifier(AbstractContextManager["Verifier"]):
    """Runs regions in a child process; of several regions with the same structure (see `Structure`), only the first.

    Args:
        model: the model's name, for messages.
        seed: seed of the random inputs.

    A run may take a minute plus the time that its multiply-adds take on a very slow machine.
    """

    def __init__(self, *, model: str = "", seed: int = 0) -> None:
        self._worker = Worker()
        self._seed = seed
        self._of_model = f" of model '{model}'" if model else ""
        self._answers = defaultdict[Hashable, list[tuple[Structure, Proof]]](list)

    def __exit__(self, *_: object) -> None:
        self._worker.close()

    def start(self) -> None:
        """Start the child now, so that loading the runtime overlaps with other work."""
        self._worker.start()

    def verify(self, rewrite: Rewrite, check: Check) -> Proof:
        """Verify that the new region passes the check; a failure is returned with its reason.

        A region that only differs in its numbers from one that was verified gets the same answer, if there is one.

        Raises:
            RuntimeUnavailable: no worker can be started, so no region can be verified.
        """
        if not rewrite.changed():
            return inconclusive(check, "nothing reads its results, so there is nothing to compare")
        if isinstance(check, Table) and (check.reference is None or check.count < 1):
            return inconclusive(check, "its pass gives no reference or no number of values")
        place = f"'{rewrite.subgraph.name}' up to '{shortened(rewrite.old[-1].label)}'"
        region = region_of(rewrite, check, f"{place}{self._of_model}", self._seed)
        own = structure(region.before, region.after)
        answers = self._answers[check, region.trial, own.form]
        for known, answer in answers:
            if known == own or (answer.holds and known.covers(own)):
                return answer
        proof = examine(self._worker, region)
        if not proof.is_inconclusive:
            answers.append((own, replace(proof, like=place)))
        return proof


def inconclusive(check: Check, reason: str) -> Proof:
    """A verification without a result either way."""
    return Proof(check, holds=False, reason=reason, is_inconclusive=True)


def examine(worker: Worker, region: Region) -> Proof:
    """Verify that the check holds; inconclusive without a result, or if no inputs distinguish right from wrong.

    A small region is run in full, on both kernel sets. A large one is run at a fraction of its lengths on both, extreme
    inputs included; then in full, on XNNPACK's kernels if these must give the same bits, else on the reference kernels.
    Only a difference in full is a verdict: a large region that does not run at a fraction of its lengths, or differs
    there alone, is treated like a small one.
    """
    try:
        proof = _judge_in_part(worker, region) if _is_large(region) else None
        return proof or judge(_run(worker, region), region)
    except RuntimeTimedOut as error:
        reason = f"verification timed out: {error}, or skip verification (--verify none)"
    except ModelFormatError as error:
        reason = f"the region alone is not a valid model: {error}"
        return Proof(region.check, holds=False, reason=reason)
    except RuntimeRefused as error:
        version, _, why = error.reason.partition(": ")
        what = _REFUSED.get(version)
        reason = f"the runtime {what}: {why}" if what else error.reason
        return Proof(region.check, holds=False, reason=reason)
    except RuntimeFailed as error:
        reason = f"the verification could not be run: {error}"
    return inconclusive(region.check, reason)


def _is_large(region: Region) -> bool:
    """True if a fraction of the region's lengths is run first."""
    # Other checks may depend on particular elements, which a fraction could miss.
    return region.cost > _IN_FULL and isinstance(region.check, Exact)


def _judge_in_part(worker: Worker, region: Region) -> Proof | None:
    """The verdict on a large region; None if runs at a fraction of its lengths settle nothing.

    at 1/8 of its lengths, all kernel sets, extreme inputs, too -> in_part, the most sensitive scale
    in full, one kernel set, ordinary inputs at that scale      -> in_full
    """
    try:
        part = _at_a_fraction(region)
        outcome = _run(worker, part)
    except (RefusedError, RuntimeRefused, RuntimeCrashed, ModelFormatError):
        return None
    in_part = judge(outcome, part)
    if in_part.is_inconclusive:
        return None
    whole = _in_full(region, outcome)
    in_full = judge(_run(worker, whole), whole)
    if not in_full.holds:
        return in_full
    if not in_part.holds:
        return None
    # Both pass the same check, and the full run shows no difference.
    others = [each for each in in_part.ran if each.kernels not in whole.trial.kernels]
    return replace(in_part, ran=(*in_full.ran, *others))


def _at_a_fraction(region: Region) -> Region:
    """The region at a fraction of its lengths, without its `parts`, whose sizes do not fit there; see `shrunk`."""
    return replace(
        region,
        before=shrunk(region.before),
        after=shrunk(region.after),
        trial=replace(region.trial, parts=None),
        divided=FACTOR,
    )


def _in_full(region: Region, outcome: Outcome) -> Region:
    """The region, with one run on one kernel set, chosen by the outcome of its runs at a fraction of the lengths."""
    # The fastest kernels that run the region and must give the same bits.
    supported = [kernels for kernels in region.trial.kernels if kernels in outcome.found[ORDINARY]]
    only = supported[-1 if region.rounded else 0]
    # The deviation of a sum grows with the square root of the number of products.
    scale = outcome.scale / FACTOR**0.25
    asked = replace(region.trial, extremes=(), scales=(scale,), kernels=(only,))
    return replace(region, trial=asked)


def _run(worker: Worker, region: Region) -> Outcome:
    """Run both versions; if the worker ends, again without the kernel sets that abort on the first one.

    The worker may also have been killed between requests.

    Raises:
        RuntimeFailed: no kernel set runs the first version, or the second does not run.
    """
    asked = region.trial
    runs = len(asked.kernels) * (len(asked.scales) + DRAWS * len(asked.extremes))
    seconds = _LEAST_SECONDS + region.cost * runs / _SLOWEST
    before = model_bytes(to_tables(region.before))
    after = model_bytes(to_tables(region.after))
    run = partial(run_versions, worker, before, seconds=seconds, where=f"region {region.name}")
    try:
        return run(after, asked)
    except RuntimeCrashed as error:
        aborted = f"LiteRT aborts on the operators as they were, {error}"
    # The first version takes the second one's place, too.
    run_before = partial(run, before)
    left = tuple(kernels for kernels in asked.kernels if not _aborts(run_before, asked, kernels))
    if not left:
        raise RuntimeCrashed(aborted)
    return run(after, replace(asked, kernels=left))


def _aborts(run: Callable[[Trial], Outcome], asked: Trial, kernels: Kernels) -> bool:
    """True if a run on this kernel set ends the worker; one that is refused does not."""
    try:
        with suppress(RuntimeRefused):
            run(replace(asked, kernels=(kernels,), extremes=()))
    except RuntimeCrashed:
        return True
    return False


def run_versions(
    worker: Worker,
    before: bytes,
    after: bytes,
    asked: Trial,
    *,
    seconds: float | None = None,
    where: str = "",
) -> Outcome:
    """Have a worker run two small models without signatures on the same inputs; returns only figures.

    `seconds` and `where` are as for `Worker.apply`. The reason of a refusal starts with `before` or `after`.
    """
    models = {"before": before, "after": after}
    (signature,) = describe(load(before)).values()
    return worker.apply(trial.run, models, (signature, asked), seconds=seconds, where=where)


def judge(outcome: Outcome, region: Region) -> Proof:
    """The verdict on the figures; inconclusive if both versions agree, but many wrong ones would, too."""
    violated = _violation(outcome, region)
    if not violated and outcome.inconclusive:
        reason = f"cannot be verified: {outcome.inconclusive}, so a wrong rewrite would give the same result"
        return inconclusive(region.check, reason)
    ran = outcome.found[ORDINARY]
    differences = list(chain.from_iterable(ran.values()))
    steps = [difference.steps for difference in differences if difference.steps is not None]
    is_exact = not region.trial.clipped and not region.rounded
    return Proof(
        region.check,
        holds=not violated,
        bitwise=is_exact and all(difference.bitwise for difference in differences),
        max_abs=max(difference.max_abs for difference in differences),
        steps=max(steps, default=None),
        reason=violated,
        note="; ".join(_notes(region, ran, steps)),
        ran=tuple(Ran(kernels, region.divided) for kernels in ran),
        extremes=len(outcome.found) > 1,
    )


def _violation(outcome: Outcome, region: Region) -> str:
    """The first kind of inputs on which the check does not hold, and the figures; empty if it holds on all."""
    for kind, found in outcome.found.items():
        if not _holds(found, region):
            where = f" on {KINDS[kind]}" if kind else ""
            figures = _figures(found)
            return f"the new region differs{where}: {figures}, but must be {region.check.words}"
    return ""


def _holds(found: Mapping[str, Sequence[Difference]], region: Region) -> bool:
    """True if every output is within the tolerance on every kernel set.

    Optimized kernels that round by shape need only stay within a bound, if the reference kernels gave the same bits.
    """
    for kernels, differences in found.items():
        is_rounded = region.rounded and kernels != "reference" and "reference" in found
        for output, difference in zip(region.outputs, differences, strict=True):
            tolerance = rounding_of(output) if is_rounded else region.check.tolerance
            if not tolerance.permits(difference):
                return False
    return True


def _notes(
    region: Region, ran: Mapping[str, Sequence[Difference]], steps: Sequence[int]
) -> Iterator[str]:
    """Remarks on kernels that were left out, and on optimized kernels that were held to a bound.

    `steps`: how far integer outputs are apart.
    """
    if len(ran) < len(region.trial.kernels):
        yield f"on {', '.join(ran)} kernels only: the others cannot run the region on its own"
    if not region.rounded:
        return
    note = f"optimized kernels round {region.rounded} differently for some shapes"
    if "reference" not in ran:
        yield f"{note}, and the reference kernels cannot run it"
    elif steps:
        most = max(rounding_of(output).steps for output in region.outputs)
        yield f"{note}: results may differ by up to {many(most, 'step')} (here by {max(steps)})"
    else:
        worst = max(difference.max_rel for difference in chain.from_iterable(ran.values()))
        yield f"{note}: results may differ by up to {ROUNDING:g} of their range (here by {worst:.1e})"


def _figures(found: Mapping[str, Sequence[Difference]]) -> str:
    """The largest difference on each kernel set."""
    texts = []
    for kernels, differences in found.items():
        worst = max(differences, key=lambda difference: difference.max_abs)
        steps = f" ({worst.steps} steps)" if worst.steps else ""
        elements = f"{worst.differing} of {worst.elements} elements"
        texts.append(f"{elements}, by up to {worst.max_abs:.3g}{steps} on {kernels}")
    return "; ".join(texts)
