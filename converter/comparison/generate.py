"""Prefill and decode in the worker: caches are filled for realistic inputs, and two models generate text greedily.

Both models that are compared get the caches that the prefill of the reference model left, run on realistic inputs, one
chunk of tokens after the other, up to the position where a signature begins. Loops are planned from what the
signatures say, one model at a time with its embedder and auxiliary model, where the export has them apart.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from numbers import Integral
from pathlib import Path

import numpy as np

from edge_opt.base.errors import UsageError
from edge_opt.comparison.findings import GenerationComparison, measured
from edge_opt.comparison.models import AUXILIARY, EMBEDDER, MAIN
from edge_opt.ir.opening import Part
from edge_opt.runtime import noise
from edge_opt.runtime.errors import RuntimeFailed
from edge_opt.runtime.inputs import InputPlan, Stored, plan
from edge_opt.runtime.loop import Call, Chunk, Loop, is_basic
from edge_opt.runtime.protocol import Arrays
from edge_opt.runtime.runner import Worker
from edge_opt.runtime.tensors import (
    Kernels,
    SignatureInfo,
    TensorInfo,
    cache_length,
    caches_of,
    growing_axis,
    longest_prefill,
    new_tokens,
    part_of,
    role_of,
)

_MOST_CALLS = 4  # twice what a comparison itself runs of the prefill, once in each model


@dataclass(slots=True)
class FilledCaches:
    """Fills the caches of one model's signatures, and plans inputs with them; `folder` is where they go.

    `stored` has them by signature, run and name. `reach` is the position up to which those of a signature may be
    filled. `notes` say, for people, what the caches of which signatures hold.
    """

    worker: Worker
    model: Path
    described: Mapping[str, SignatureInfo]
    seed: int
    folder: Path
    stored: dict[tuple[str, int, str], Stored] = field(default_factory=dict)
    reach: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def plan(self, name: str, run: int) -> tuple[InputPlan, ...]:
        """Realistic inputs of one run, filled caches among them, not beyond the position that these reach to."""
        plans = plan(self.described[name], seed=self.seed, run=run)
        reach = self.reach.get(name)
        if reach is not None and any(one.start > reach for one in plans):
            plans = plan(self.described[name], seed=self.seed, run=run, start=reach)
        return tuple(
            replace(one, stored=self.stored.get((name, run, one.info.name))) if one.role == "cache" else one
            for one in plans
        )

    def served(self, names: Iterable[str]) -> tuple[dict[str, list[str]], list[str]]:
        """Signatures by the prefill that fills their caches, and those whose caches none fills."""
        by_filler: dict[str, list[str]] = {}
        without: list[str] = []
        for name in names:
            signature = self.described[name]
            filler = longest_prefill(self.described.values(), signature)
            if not caches_of(signature):
                continue
            if filler is None or not _can_fill(filler):
                without.append(name)
            else:
                by_filler.setdefault(filler.name, []).append(name)
        return by_filler, without

    def fill(self, filler: str, names: Sequence[str], runs: Iterable[int]) -> None:
        """Run one prefill, for each run as far as the signatures need it."""
        prefill, path, listed = self.described[filler], self.folder / "caches", ", ".join(names)
        reach = _MOST_CALLS * new_tokens(prefill)
        counts: list[int] = []
        stored: dict[tuple[str, int, str], Stored] = {}
        try:
            for run in runs:
                counts.append(min(self._needed(names, run), reach))
                filled = self.worker.fill(self.model, prefill, self._chunks(prefill, counts[-1], run))
                for cache, array in keep(filled, path).items():
                    assert isinstance(array, np.memmap)
                    place = Stored(str(path), array.offset, caches_of(prefill)[cache])
                    stored.update({(name, run, cache): place for name in names})
        except RuntimeFailed as error:
            why = f"random, because the prefill that would fill them failed: {error}"
            self.notes.append(f"caches of {listed}: {why}")
            return
        self.stored.update(stored)
        self.reach.update(dict.fromkeys(names, reach))
        tokens = ", ".join(map(str, counts))
        self.notes.append(f"caches of {listed}: filled by {filler} up to position {tokens}")

    def _needed(self, names: Iterable[str], run: int) -> int:
        """The last position at which one of the signatures begins in this run."""
        plans = (one for name in names for one in plan(self.described[name], seed=self.seed, run=run))
        return max((one.start for one in plans), default=0)

    def _chunks(self, prefill: SignatureInfo, count: int, run: int) -> tuple[Chunk, ...]:
        """Calls that take `count` tokens or a few more, none of them beyond the end of the cache."""
        step = new_tokens(prefill)
        last = max(cache_length(prefill) - step, 0)
        chunks = []
        for number in range(math.ceil(count / step)):
            start = min(number * step, last)
            seed = noise.seed_of(self.seed, "fill", run, number)
            chunks.append(Chunk(start, plan(prefill, seed=seed, start=start)))
        return tuple(chunks)


def _can_fill(prefill: SignatureInfo) -> bool:
    """Whether every cache comes out again, whole or as a part whose place is known, and has a fixed shape."""
    outputs = {info.name: info for info in prefill.outputs}
    for name, cache in caches_of(prefill).items():
        part = outputs.get(part_of(name))
        whole = name in outputs and outputs[name].shape == cache.shape
        grows = part is not None and (part.shape == cache.shape or growing_axis(cache, part) is not None)
        if -1 in cache.declared or 0 in cache.shape or not (whole or grows):
            return False
    return new_tokens(prefill) > 1 and all(-1 not in info.declared for info in prefill.inputs)


def keep(arrays: Arrays, path: Path) -> Arrays:
    """The same arrays, mapped from the end of a file that they are written to; they are taken out of `arrays`."""
    kept: Arrays = {}
    with path.open("ab") as file:
        for name in list(arrays):
            array = np.ascontiguousarray(arrays.pop(name))
            place = file.tell()
            file.write(array.reshape(-1).view(np.uint8).data)
            file.flush()
            kept[name] = np.memmap(path, array.dtype, "r", place, array.shape) if array.size else array
    return kept


Prompt = tuple[tuple[int, ...], ...]

_MOST_TOKENS = 100_000


def compare_generation(
    worker: Worker,
    a: Mapping[str, Part],
    b: Mapping[str, Part],
    name: str,
    *,
    count: int,
    seed: int = 0,
    kernels: Kernels = "xnnpack",
) -> GenerationComparison:
    """Generates `count` tokens with both models from the same random prompt; `name` is what messages call them.

    Raises:
        UsageError: a signature, an embedder or an auxiliary model is missing, or the cache has too little room.
        RuntimeFailed: a model does not run.
    """
    if not isinstance(count, Integral) or not 1 <= count <= _MOST_TOKENS:
        raise UsageError(f"{count!r} tokens to generate, expected 1 to {_MOST_TOKENS}")
    results = []
    prompt: Prompt | None = None
    for parts in (a, b):
        with ExitStack() as stack:
            files = {role: stack.enter_context(part.file()) for role, part in parts.items()}
            loop = _plan(worker, files, name, count, seed, prompt)
            prompt = loop.prompt
            results.append((loop, *worker.generate(files, loop, kernels)))
    (loop, ours, logits_a), (other, theirs, logits_b) = results
    tokens_a, tokens_b = (tuple(map(tuple, steps)) for steps in (ours, theirs))
    logits = measured(_logits(loop), _logits(other), logits_a, logits_b, logits=True)
    return GenerationComparison(count, kernels, loop.prompt, tokens_a, tokens_b, logits)


def _logits(loop: Loop) -> TensorInfo:
    return next(info for call in loop.decode for info in call.signature.outputs if info.name == loop.logits)


def _plan(
    worker: Worker, files: Mapping[str, Path], name: str, count: int, seed: int, prompt: Prompt | None
) -> Loop:
    planner = _Planner(name, {role: worker.describe(file) for role, file in files.items()})
    decode = planner.decode()
    prefill = planner.prefill(decode)
    rows = new_tokens(prefill)
    room = (cache_length(decode) or _MOST_TOKENS) - count
    if room < 1:
        said = f"{count} tokens do not fit into a cache of {room + count}: generate fewer"
        raise UsageError(f"{name}: {said}")
    (logits,) = (info for info in decode.outputs if "logits" in info.name)
    steps = planner.calls(prefill), planner.calls(decode)
    if prompt is None:
        batch = logits.shape[0] if len(logits.shape) > 2 else 1
        length = min(rows, room) + 1
        numbers = noise.integers(noise.seed_of(seed, "prompt", 0), batch * length, 1, logits.shape[-1])
        prompt = tuple(tuple(int(token) for token in row) for row in np.reshape(numbers, (batch, length)))
    return Loop(*steps, rows, prompt, count, logits.name)


class _Planner:
    """Finds which signatures a step calls; `name` is the main model's, for messages."""

    def __init__(self, name: str, described: Mapping[str, Sequence[SignatureInfo]]) -> None:
        self._name = name
        self._described = described

    def decode(self) -> SignatureInfo:
        """The signature that gives logits for one token."""
        for signature in self._described[MAIN]:
            gives = sum("logits" in info.name for info in signature.outputs) == 1
            if gives and "prefill" not in signature.name and caches_of(signature):
                return self._static(signature)
        raise self._missing("decode signature with caches and one output of logits")

    def prefill(self, decode: SignatureInfo) -> SignatureInfo:
        """The longest signature that fills the caches of the decode signature."""
        longest = longest_prefill(self._described[MAIN], decode)
        if longest is None:
            raise self._missing(f"prefill signature with the caches of '{decode.name}'")
        return self._static(longest)

    def calls(self, step: SignatureInfo) -> tuple[Call, ...]:
        """What gives the step its inputs, the step, and what puts its new keys and values into the caches."""
        givers = (self._giver(step, info) for info in step.inputs)
        before = dict.fromkeys(call for call in givers if call is not None)
        outputs = {info.name for info in step.outputs}
        after = () if caches_of(step).keys() & outputs else (self._update(step),)
        computed = outputs | {info.name for call in before for info in call.signature.outputs}
        for call in (*before, *after):
            for info in call.signature.inputs:
                if info.name not in computed and not is_basic(info):
                    where = f"{call.model} model, signature '{call.signature.name}'"
                    raise UsageError(f"{where}: input '{info.name}' is not known here")
        return (*before, Call(MAIN, step), *after)

    def _giver(self, step: SignatureInfo, info: TensorInfo) -> Call | None:
        """The signature of another model that has this input as an output; None where the loop makes it itself."""
        role = role_of(info)
        for model in (EMBEDDER, AUXILIARY):
            for signature in self._described.get(model, ()):
                gives = any(out.name == info.name and out.shape == info.shape for out in signature.outputs)
                if gives and role != "cache" and not caches_of(signature):
                    return Call(model, signature)
        # A mask that covers cache and new tokens apart is the auxiliary model's to make.
        apart = role == "mask" and any("slice" in out.name for out in step.outputs)
        if is_basic(info) and not apart:
            return None
        needed = EMBEDDER if role == "embedding" else AUXILIARY
        what = f"'{info.name}' of {'x'.join(map(str, info.shape))}"
        if needed in self._described:
            why = f"the {needed} model gives no {what}; give the one that was exported with it"
        elif role in {"embedding", "rotary", "mask"}:
            why = f"input '{info.name}' comes from the {needed} model, and there is {_beside(needed)}"
        else:
            expected = "tokens, positions, masks, caches, or what the embedder and the auxiliary model give"
            why = f"input {what} is not known here, expected {expected}"
        raise self._refused(step, why)

    def _update(self, step: SignatureInfo) -> Call:
        slices = {info.name: info.shape for info in step.outputs if "slice" in info.name}
        for signature in self._described.get(AUXILIARY, ()):
            taken = {info.name: info.shape for info in signature.inputs}
            given = {info.name for info in signature.outputs}
            if slices and slices.items() <= taken.items() and caches_of(step).keys() <= given:
                return Call(AUXILIARY, signature)
        if AUXILIARY in self._described:
            raise self._refused(step, "no signature of the auxiliary model updates its caches")
        why = f"its caches are updated by the auxiliary model, and there is {_beside(AUXILIARY)}"
        raise self._refused(step, why)

    def _static(self, signature: SignatureInfo) -> SignatureInfo:
        dynamic = next((info for info in signature.inputs if -1 in info.declared), None)
        if dynamic is not None:
            why = "has a dynamic shape, and text is generated with fixed ones only"
            remedy = "leave out generate=..., or export with fixed lengths"
            raise self._refused(signature, f"input '{dynamic.name}' {why}: {remedy}")
        return signature

    def _missing(self, what: str) -> UsageError:
        names = ", ".join(signature.name for signature in self._described[MAIN])
        return UsageError(f"{self._name} has no {what}, there is {names}")

    def _refused(self, signature: SignatureInfo, why: str) -> UsageError:
        return UsageError(f"{self._name}, signature '{signature.name}': {why}")


def _beside(needed: str) -> str:
    return f"no {needed}.tflite beside it: give one with --{needed}"
