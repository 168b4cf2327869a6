"""Prefill and decode in the worker: caches are filled for realistic inputs, and two models generate text greedily.

Both models that are compared get the caches that the prefill of the reference model left, run on realistic inputs, one
chunk of tokens after the other, up to the position where a signature begins. Loops are planned from what the
signatures say, one model at a time with its embedder and auxiliary model, where the export has them apart.
"""

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
from edge_opt.ir.refusal import RefusedError
from edge_opt.runtime import noise
from edge_opt.runtime.errors import RuntimeFailed
from edge_opt.runtime.inputs import InputPlan, Stored, plan
from edge_opt.runtime.loop import Call, Loop, is_basic
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

    def fill(self, names: Iterable[str], runs: int = 1) -> None:
        """Fill the caches that these signatures read, for so many runs, by the longest prefill that has them."""
        by_filler: dict[str, list[str]] = {}
        for name in (name for name in names if caches_of(self.described[name])):
            filler = longest_prefill(self.described.values(), self.described[name])
            fills = filler is not None and _can_fill(filler)
            by_filler.setdefault(filler.name if filler and fills else "", []).append(name)
        without = by_filler.pop("", [])
        for filler_name, served in by_filler.items():
            self._fill(self.described[filler_name], served, runs)
        if without:
            why = "random, because no prefill signature of a fills them"
            self.notes.append(f"caches of {', '.join(without)}: {why}")

    def _fill(self, prefill: SignatureInfo, names: Sequence[str], runs: int) -> None:
        """Run one prefill, for each run as far as the signatures need it."""
        path, listed = self.folder / "caches", ", ".join(names)
        reach = _MOST_CALLS * new_tokens(prefill)
        counts: list[int] = []
        stored: dict[tuple[str, int, str], Stored] = {}
        try:
            for run in range(runs):
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
        self.notes.append(f"caches of {listed}: filled by {prefill.name} up to position {tokens}")

    def _needed(self, names: Iterable[str], run: int) -> int:
        """The last position at which one of the signatures begins in this run."""
        plans = (one for name in names for one in plan(self.described[name], seed=self.seed, run=run))
        return max((one.start for one in plans), default=0)

    def _chunks(self, prefill: SignatureInfo, count: int, run: int) -> tuple[tuple[int, int], ...]:
        """Positions and seeds of calls that take `count` tokens or a few more, none beyond the end of the cache."""
        step = new_tokens(prefill)
        last = max(cache_length(prefill) - step, 0)
        starts = [min(begin, last) for begin in range(0, count, step)]
        seeds = [noise.seed_of(self.seed, "fill", run, number) for number in range(len(starts))]
        return tuple(zip(starts, seeds, strict=True))


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
    names: tuple[str, str],
    *,
    count: int,
    seed: int = 0,
    kernels: Kernels = "xnnpack",
) -> GenerationComparison:
    """Generates `count` tokens with both models from the same random prompt; `names` are for messages.

    Raises:
        UsageError: a signature, an embedder or an auxiliary model is missing, or the cache has too little room.
        RuntimeFailed: a model does not run.
    """
    if not isinstance(count, Integral) or not 1 <= count <= _MOST_TOKENS:
        raise UsageError(f"{count!r} tokens to generate, expected 1 to {_MOST_TOKENS}")
    results = []
    prompt: Prompt | None = None
    for name, parts in zip(names, (a, b), strict=True):
        with ExitStack() as stack:
            files = {role: stack.enter_context(part.file()) for role, part in parts.items()}
            described = {role: worker.describe(file) for role, file in files.items()}
            loop = plan_loop(name, described, count, seed, prompt)
            prompt = loop.prompt
            results.append((loop, *worker.generate(files, loop, kernels)))
    (loop, ours, logits_a), (other, theirs, logits_b) = results
    tokens_a, tokens_b = (tuple(map(tuple, steps)) for steps in (ours, theirs))
    logits = measured(_logits(loop), _logits(other), logits_a, logits_b, logits=True)
    return GenerationComparison(count, loop.prompt, tokens_a, tokens_b, logits)


def _logits(loop: Loop) -> TensorInfo:
    return next(info for call in loop.decode for info in call.signature.outputs if info.name == loop.logits)


Described = Mapping[str, Sequence[SignatureInfo]]


def plan_loop(name: str, described: Described, count: int, seed: int, prompt: Prompt | None = None) -> Loop:
    """What is called to generate `count` tokens, from signatures alone; `name` is the main model's, for messages.

    Raises:
        UsageError: a signature, an embedder or an auxiliary model is missing, or the cache has too little room.
    """
    try:
        return _plan_loop(described, count, seed, prompt)
    except RefusedError as refused:
        raise UsageError(f"{name}{refused}") from refused


def _plan_loop(described: Described, count: int, seed: int, prompt: Prompt | None) -> Loop:
    names = ", ".join(signature.name for signature in described[MAIN])
    decode = next(filter(_decodes, described[MAIN]), None)
    if decode is None:
        raise RefusedError(f" has no decode signature with caches and one output of logits, there is {names}")
    prefill = longest_prefill(described[MAIN], decode)
    if prefill is None:
        raise RefusedError(f" has no prefill signature with the caches of '{decode.name}', there is {names}")
    rows = new_tokens(prefill)
    room = (cache_length(decode) or _MOST_TOKENS) - count
    if room < 1:
        raise RefusedError(f": {count} tokens do not fit into a cache of {room + count}: generate fewer")
    (logits,) = (info for info in decode.outputs if "logits" in info.name)
    steps = _calls(described, prefill), _calls(described, decode)
    if prompt is None:
        batch = logits.shape[0] if len(logits.shape) > 2 else 1
        length = min(rows, room) + 1
        numbers = noise.integers(noise.seed_of(seed, "prompt", 0), batch * length, 1, logits.shape[-1])
        prompt = tuple(tuple(int(token) for token in row) for row in np.reshape(numbers, (batch, length)))
    return Loop(*steps, rows, prompt, count, logits.name)


def _decodes(signature: SignatureInfo) -> bool:
    """Whether a signature gives logits for one token."""
    gives = sum("logits" in info.name for info in signature.outputs) == 1
    return gives and "prefill" not in signature.name and bool(caches_of(signature))


def _calls(described: Described, step: SignatureInfo) -> tuple[Call, ...]:
    """What gives the step its inputs, the step, and what puts its new keys and values into the caches."""
    where = f", signature '{step.name}'"
    dynamic = next((info for info in step.inputs if -1 in info.declared), None)
    if dynamic is not None:
        why = (
            f"{where}: input '{dynamic.name}' has a dynamic shape, and text is generated with fixed ones only"
        )
        raise RefusedError(f"{why}: leave out generate=..., or export with fixed lengths")
    before: dict[Call, None] = {}
    for info in step.inputs:
        giver = _giver(described, step, info)
        if isinstance(giver, str):
            raise RefusedError(f"{where}: input '{info.name}' of {list(info.shape)} {giver}")
        before.update({} if giver is None else {giver: None})
    outputs = {info.name for info in step.outputs}
    after = () if caches_of(step).keys() & outputs else (_update(described, step),)
    computed = outputs | {info.name for call in before for info in call.signature.outputs}
    for call in (*before, *after):
        for info in call.signature.inputs:
            if info.name not in computed and not is_basic(info):
                place = f"{call.model} model, signature '{call.signature.name}'"
                raise RefusedError(f": {place}: input '{info.name}' is not known here")
    return (*before, Call(MAIN, step), *after)


def _giver(described: Described, step: SignatureInfo, info: TensorInfo) -> Call | str | None:
    """The signature of another model that has this input as an output, or why there is none.

    None where the loop makes the input itself.
    """
    role = role_of(info)
    for model in (EMBEDDER, AUXILIARY):
        for signature in described.get(model, ()):
            gives = any(out.name == info.name and out.shape == info.shape for out in signature.outputs)
            if gives and role != "cache" and not caches_of(signature):
                return Call(model, signature)
    # A mask that covers cache and new tokens apart is the auxiliary model's to make.
    apart = role == "mask" and any("slice" in out.name for out in step.outputs)
    if is_basic(info) and not apart:
        return None
    needed = EMBEDDER if role == "embedding" else AUXILIARY
    if needed in described:
        return f"is not given by the {needed} model: use the one that was exported with this model"
    if role in {"embedding", "rotary", "mask"}:
        return f"comes from the {needed} model, and there is no {needed}.tflite beside the model"
    return "is not known here, expected tokens, positions, masks or caches"


def _update(described: Described, step: SignatureInfo) -> Call:
    """The signature of the auxiliary model that puts a step's new keys and values into its caches."""
    slices = {info.name: info.shape for info in step.outputs if "slice" in info.name}
    for signature in described.get(AUXILIARY, ()):
        taken = {info.name: info.shape for info in signature.inputs}
        given = {info.name for info in signature.outputs}
        if slices and slices.items() <= taken.items() and caches_of(step).keys() <= given:
            return Call(AUXILIARY, signature)
    why = "no signature of the auxiliary model updates its caches"
    if AUXILIARY not in described:
        why = f"its caches are updated by the {AUXILIARY} model, and there is no {AUXILIARY}.tflite beside the model"
    raise RefusedError(f", signature '{step.name}': {why}")
