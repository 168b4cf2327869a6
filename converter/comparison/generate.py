"""Prefill and decode in the worker: caches are filled for realistic inputs, and two models generate text greedily.

Both models that are compared get the caches that the prefill of the reference model left, run on realistic inputs, one
chunk of tokens after the other, up to the position where a signature begins. Loops are planned from what the
signatures say, one model at a time with its embedder and auxiliary model, where the export has them apart.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from edge_opt.base.errors import UsageError
from edge_opt.comparison.findings import GenerationComparison, measured
from edge_opt.ir.opening import AUXILIARY_SECTION, EMBEDDER_SECTION, ModelLike, Opened, Part
from edge_opt.ir.refusal import RefusedError
from edge_opt.runtime import noise
from edge_opt.runtime.errors import RuntimeFailed
from edge_opt.runtime.inputs import InputPlan, Stored, plan
from edge_opt.runtime.loop import Call, Loop, is_basic
from edge_opt.runtime.protocol import Arrays
from edge_opt.runtime.runner import Worker
from edge_opt.runtime.tensors import (
    MAIN,
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

EMBEDDER, AUXILIARY = "embedder", "auxiliary"
_MOST_CALLS = 4  # twice what a comparison itself runs of the prefill, once in each model
_MOST_TOKENS = 100_000

Prompt = tuple[tuple[int, ...], ...]
Described = Mapping[str, Sequence[SignatureInfo]]


def find_parts(given: ModelLike) -> dict[str, Part]:
    """The main model and the two that an export may keep apart: a bundle's, or files beside the model.

    Raises:
        ModelFormatError: a file cannot be read.
        UsageError: a bundle holds no prefill/decode model, or it is compiled for an NPU.
    """
    opened = Opened(given)
    parts = {MAIN: opened.main()}
    for name, kind in ((EMBEDDER, EMBEDDER_SECTION), (AUXILIARY, AUXILIARY_SECTION)):
        part = opened.find(kind)
        if opened.path is not None and opened.bundle is None:
            path = Path(opened.path)
            files = (
                path.with_name(f"{path.name.split('.', 1)[0]}.{name}.tflite"),
                path.with_name(f"{name}.tflite"),
            )
            part = next((Part(file) for file in files if file.is_file()), None)
        if part is not None:
            parts[name] = part
    return parts


@dataclass(slots=True)
class FilledCaches:
    """Fills the caches of one model's signatures, and plans inputs with them; `folder` is where they go.

    `filled` has the position up to which those of a signature are, `stored` the caches by signature and name. `notes`
    say, for people, what the caches of which signatures hold.
    """

    worker: Worker
    model: Path
    described: Mapping[str, SignatureInfo]
    seed: int
    folder: Path
    filled: dict[str, int] = field(default_factory=dict)
    stored: dict[tuple[str, str], Stored] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def plan(self, name: str, run: int = 0) -> tuple[InputPlan, ...]:
        """Realistic inputs of one run, filled caches among them, not beyond the position that these reach to."""
        plans = plan(self.described[name], seed=self.seed, run=run)
        reach = self.filled.get(name)
        if reach is not None and any(one.start > reach for one in plans):
            plans = plan(self.described[name], seed=self.seed, run=run, start=reach)
        return tuple(
            replace(one, stored=self.stored.get((name, one.info.name))) if one.role == "cache" else one
            for one in plans
        )

    def fill(self, names: Iterable[str]) -> None:
        """Fill the caches that these signatures read, each by the longest prefill that has them."""
        served = defaultdict[str, list[str]](list)
        for name in (name for name in names if caches_of(self.described[name])):
            filler = longest_prefill(self.described.values(), self.described[name])
            served[filler.name if filler is not None and _can_fill(filler) else ""].append(name)
        for filler_name, listed in sorted(served.items(), reverse=True):
            try:
                how = "random, because no prefill signature of a fills them"
                how = self._fill(self.described[filler_name], listed) if filler_name else how
            except RuntimeFailed as error:
                how = f"random, because the prefill that would fill them failed: {error}"
            self.notes.append(f"caches of {', '.join(listed)}: {how}")

    def _fill(self, prefill: SignatureInfo, names: Sequence[str]) -> str:
        """Run one prefill, chunk after chunk, as far as the signatures need it, and not beyond the cache's end."""
        step, last = new_tokens(prefill), max(cache_length(prefill) - new_tokens(prefill), 0)
        starts = (one.start for name in names for one in plan(self.described[name], seed=self.seed))
        count = min(max(starts, default=0), _MOST_CALLS * step)
        chunks = [
            (min(begin, last), noise.seed_of(self.seed, "fill", begin)) for begin in range(0, count, step)
        ]
        arrays = self.worker.fill(self.model, prefill, chunks)
        for cache, array in keep(arrays, self.folder / "caches").items():
            assert isinstance(array, np.memmap)
            place = Stored(str(self.folder / "caches"), array.offset, caches_of(prefill)[cache])
            self.stored.update({(name, cache): place for name in names})
        self.filled.update(dict.fromkeys(names, count))
        return f"filled by {prefill.name} up to position {count}"


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
    if not 1 <= count <= _MOST_TOKENS:
        raise UsageError(f"{count} tokens to generate, expected 1 to {_MOST_TOKENS}")
    prompt: Prompt | None = None
    results = []
    for name, parts in zip(names, (a, b), strict=True):
        with ExitStack() as stack:
            files = {role: stack.enter_context(part.file()) for role, part in parts.items()}
            described = {role: worker.describe(file) for role, file in files.items()}
            loop = plan_loop(name, described, count, seed, prompt)
            prompt = loop.prompt
            tokens, logits = worker.generate(files, loop, kernels)
        outputs = (info for call in loop.decode for info in call.signature.outputs)
        info = next(info for info in outputs if info.name == loop.logits)
        results.append((tuple(map(tuple, tokens)), info, logits))
    (ours, info_a, logits_a), (theirs, info_b, logits_b) = results
    difference = measured(info_a, info_b, logits_a, logits_b, logits=True)
    return GenerationComparison(count, loop.prompt, ours, theirs, difference)


def plan_loop(name: str, described: Described, count: int, seed: int, prompt: Prompt | None = None) -> Loop:
    """What is called to generate `count` tokens, from signatures alone; `name` is the main model's, for messages.

    Raises:
        UsageError: a signature, an embedder or an auxiliary model is missing, or the cache has too little room.
    """
    names = ", ".join(signature.name for signature in described[MAIN])
    decode = next(filter(_decodes, described[MAIN]), None)
    if decode is None:
        raise UsageError(
            f"{name} has no decode signature with caches and one output of logits, there is {names}"
        )
    prefill = longest_prefill(described[MAIN], decode)
    if prefill is None:
        raise UsageError(
            f"{name} has no prefill signature with the caches of '{decode.name}', there is {names}"
        )
    rows = new_tokens(prefill)
    room = (cache_length(decode) or _MOST_TOKENS) - count
    if room < 1:
        raise UsageError(f"{name}: {count} tokens do not fit into a cache of {room + count}: generate fewer")
    (logits,) = (info for info in decode.outputs if "logits" in info.name)
    if prompt is None:
        batch = logits.shape[0] if len(logits.shape) > 2 else 1
        length = min(rows, room) + 1
        numbers = noise.integers(noise.seed_of(seed, "prompt", 0), batch * length, 1, logits.shape[-1])
        prompt = tuple(tuple(row) for row in np.reshape(numbers, (batch, length)).tolist())
    try:
        steps = _calls(described, prefill), _calls(described, decode)
    except RefusedError as refused:
        raise UsageError(f"{name}{refused}") from refused
    return Loop(*steps, rows, prompt, count, logits.name)


def _decodes(signature: SignatureInfo) -> bool:
    """Whether a signature gives logits for one token."""
    gives = sum("logits" in info.name for info in signature.outputs) == 1
    return gives and "prefill" not in signature.name and bool(caches_of(signature))


def _calls(described: Described, step: SignatureInfo) -> tuple[Call, ...]:
    """What gives the step its inputs, the step, and what puts its new keys and values into the caches."""
    before: dict[Call, None] = {}
    for info in step.inputs:
        where = f", signature '{step.name}': input '{info.name}'"
        if -1 in info.declared:
            raise RefusedError(
                f"{where} has a dynamic shape: export with fixed lengths, or leave out generate=..."
            )
        missing, giver = _giver(described, step, info)
        if missing:
            raise RefusedError(f"{where} of {list(info.shape)} {missing}")
        before |= {} if giver is None else {giver: None}
    outputs = {info.name for info in step.outputs}
    after = () if caches_of(step).keys() & outputs else (_update(described, step),)
    computed = outputs | {info.name for call in before for info in call.signature.outputs}
    for call in (*before, *after):
        for info in call.signature.inputs:
            if info.name not in computed and not is_basic(info):
                place = f"{call.model} model, signature '{call.signature.name}'"
                raise RefusedError(f": {place}: input '{info.name}' is not known here")
    return (*before, Call(MAIN, step), *after)


def _giver(described: Described, step: SignatureInfo, info: TensorInfo) -> tuple[str, Call | None]:
    """The signature of another model that has this input as an output; None where the loop makes the input itself.

    In front of it why the input is not known, else an empty text.
    """
    role = role_of(info)
    for model in (EMBEDDER, AUXILIARY):
        for signature in described.get(model, ()):
            gives = any(out.name == info.name and out.shape == info.shape for out in signature.outputs)
            if gives and role != "cache" and not caches_of(signature):
                return "", Call(model, signature)
    # A mask that covers cache and new tokens apart is the auxiliary model's to make.
    apart = role == "mask" and any("slice" in out.name for out in step.outputs)
    if is_basic(info) and not apart:
        return "", None
    needed = EMBEDDER if role == "embedding" else AUXILIARY
    if needed in described:
        return f"is not given by the {needed} model: use the one that was exported with this model", None
    if role in {"embedding", "rotary", "mask"}:
        return f"comes from the {needed} model, and there is no {needed}.tflite beside the model", None
    return "is not known here, expected tokens, positions, masks or caches", None


def _update(described: Described, step: SignatureInfo) -> Call:
    """The signature of the auxiliary model that puts a step's new keys and values into its caches."""
    slices = {info.name: info.shape for info in step.outputs if "slice" in info.name}
    for signature in described.get(AUXILIARY, ()):
        taken = {info.name: info.shape for info in signature.inputs}
        given = {info.name for info in signature.outputs}
        if slices and slices.items() <= taken.items() and caches_of(step).keys() <= given:
            return Call(AUXILIARY, signature)
    why = f"no {AUXILIARY} model (a file {AUXILIARY}.tflite beside the model) has a signature that updates its caches"
    raise RefusedError(f", signature '{step.name}': {why}")
