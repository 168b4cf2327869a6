"""Generate text greedily with two models: prefill and decode with caches, planned from their signatures.

One model is loaded at a time, with its embedder and auxiliary model if the export has separate ones.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from edge_opt.base.errors import UsageError
from edge_opt.base.words import many
from edge_opt.comparison.findings import GenerationComparison, measured, name_of
from edge_opt.ir.opening import AUXILIARY_SECTION, EMBEDDER_SECTION, ModelLike, Opened, Part
from edge_opt.runtime import noise
from edge_opt.runtime.description import describe
from edge_opt.runtime.loop import Call, Loop, is_basic
from edge_opt.runtime.runner import Worker
from edge_opt.runtime.tensors import (
    MAIN,
    Kernels,
    SignatureInfo,
    TensorInfo,
    cache_length,
    caches_of,
    longest_prefill,
    new_tokens,
    role_of,
)

EMBEDDER = "embedder"
AUXILIARY = "auxiliary"
_MOST_TOKENS = 100_000

Prompt = tuple[tuple[int, ...], ...]
Described = Mapping[str, Sequence[SignatureInfo]]


def find_parts(given: ModelLike) -> dict[str, Part]:
    """Return the main model, and any separate embedder and auxiliary model, from the bundle or files beside it.

    Raises:
        ModelFormatError: a file cannot be read.
        UsageError: a bundle has no prefill/decode model, or it is compiled for an NPU.
    """
    opened = Opened(given)
    parts = {MAIN: opened.main()}
    for name, kind in ((EMBEDDER, EMBEDDER_SECTION), (AUXILIARY, AUXILIARY_SECTION)):
        part = opened.find(kind)
        if opened.path is not None and opened.bundle is None:
            path = Path(opened.path)
            names = f"{path.name.split('.', 1)[0]}.{name}.tflite", f"{name}.tflite"
            part = next((Part(file) for file in map(path.with_name, names) if file.is_file()), None)
        if part is not None:
            parts[name] = part
    return parts


def compare_generation(
    a: ModelLike, b: ModelLike, count: int, seed: int, kernels: Kernels
) -> GenerationComparison:
    """Generate `count` tokens with both models from the same random prompt.

    If a model has no embedder or auxiliary model, the other model's is used.

    Raises:
        UsageError: a signature, an embedder or an auxiliary model is missing, or the cache has too little room.
        RuntimeFailed: a model does not run.
    """
    if not 1 <= count <= _MOST_TOKENS:
        raise UsageError(f"{count} tokens to generate, expected 1 to {_MOST_TOKENS}")
    ours = find_parts(a)
    theirs = find_parts(b)
    sides = (name_of(a, "a"), {**theirs, **ours}), (name_of(b, "b"), {**ours, **theirs})
    prompt: Prompt | None = None
    results = []
    with Worker() as worker:
        for name, parts in sides:
            with ExitStack() as stack:
                files = {role: stack.enter_context(part.file()) for role, part in parts.items()}
                described = {role: [*describe(part.model).values()] for role, part in parts.items()}
                loop = plan_loop(name, described, count, seed, prompt)
                prompt = loop.prompt
                tokens, logits = worker.generate(files, loop, kernels)
            results.append((tuple(map(tuple, tokens)), loop.logits, logits))
    (tokens_a, info_a, logits_a), (tokens_b, info_b, logits_b) = results
    difference = measured(info_a, info_b, [(logits_a, logits_b)], logits=True)
    return GenerationComparison(count, loop.prompt, tokens_a, tokens_b, difference)


def plan_loop(
    name: str, described: Described, count: int, seed: int, prompt: Prompt | None = None
) -> Loop:
    """Plan the calls that generate `count` tokens, from signatures alone; `name` is the main model's, for messages.

    Raises:
        UsageError: a signature, an embedder or an auxiliary model is missing, or the cache has too little room.
    """
    names = f"its signatures are: {', '.join(signature.name for signature in described[MAIN])}"
    decode = next(filter(_is_decode, described[MAIN]), None)
    if decode is None:
        raise UsageError(
            f"{name} has no decode signature with caches and one output of logits, {names}"
        )
    prefill = longest_prefill(described[MAIN], decode)
    if prefill is None:
        raise UsageError(
            f"{name} has no prefill signature with the caches of '{decode.name}', {names}"
        )
    (logits,) = (info for info in decode.outputs if "logits" in info.name)
    batch = logits.shape[0] if len(logits.shape) > 2 else 1
    if logits.elements != batch * max(logits.shape[-1:], default=0) or logits.elements < 2 * batch:
        shape = f"output '{logits.name}' has shape {list(logits.shape)}, expected [batch, 1, vocabulary]"
        raise UsageError(f"{name}, signature '{decode.name}': {shape}")
    rows = new_tokens(prefill)
    cache = cache_length(decode) or _MOST_TOKENS
    stored = count + (1 if prompt is None else len(prompt[0]) - 1)
    if stored > cache:
        remedy = "generate fewer, or give a shorter prompt"
        raise UsageError(f"{name}: {stored} tokens do not fit into its cache of {cache}: {remedy}")
    if prompt is None:
        length = min(rows, cache - count) + 1
        numbers = noise.integers(
            noise.seed_of(seed, "prompt", 0), batch * length, 1, logits.shape[-1]
        )
        prompt = tuple(tuple(row) for row in np.reshape(numbers, (batch, length)).tolist())
    steps = _calls(name, described, prefill, batch * rows), _calls(name, described, decode, batch)
    past = {
        info.name: info.shape[-1] - info.shape[-2]
        for info in decode.inputs
        if role_of(info) == "mask" and len(info.shape) > 2 and _is_split(decode)
    }
    return Loop(*steps, rows, prompt, count, logits, past=past)


def _is_split(step: SignatureInfo) -> bool:
    """True if new keys and values stand beside the caches, as the columns of masks do."""
    return any("slice" in info.name for info in step.outputs)


def _is_decode(step: SignatureInfo) -> bool:
    """True for a step of one token: it has caches, and one output of logits."""
    if "prefill" in step.name or not caches_of(step):
        return False
    return sum("logits" in info.name for info in step.outputs) == 1


def _names(infos: Iterable[TensorInfo]) -> set[str]:
    return {info.name for info in infos}


def _shapes(infos: Iterable[TensorInfo]) -> set[tuple[str, tuple[int, ...]]]:
    return {(info.name, info.shape) for info in infos}


def _calls(name: str, described: Described, step: SignatureInfo, count: int) -> tuple[Call, ...]:
    """Return the calls that compute a step's inputs from `count` tokens, the step, and the update of the caches."""
    where = f"{name}, signature '{step.name}'"
    caches = caches_of(step).keys()
    inputs = _shapes(step.inputs)
    helpers = [
        Call(model, one) for model in (EMBEDDER, AUXILIARY) for one in described.get(model, ())
    ]
    givers: dict[str, Call] = {}
    for call in helpers:
        for info in call.signature.outputs if not caches_of(call.signature) else ():
            # LiteRT-LM makes masks itself; those of the auxiliary model lose a key of a ring in int16.
            if (info.name, info.shape) in inputs and not (
                _is_split(step) and role_of(info) == "mask"
            ):
                givers.setdefault(info.name, call)
    before = dict.fromkeys(givers[info.name] for info in step.inputs if info.name in givers)
    after: list[Call] = []
    if _is_split(step) and caches.isdisjoint(_names(step.outputs)):
        slices = {one for one in _shapes(step.outputs) if "slice" in one[0]}
        fitting = (call for call in helpers if slices <= _shapes(call.signature.inputs))
        after = [call for call in fitting if caches <= _names(call.signature.outputs)][:1]
    computed: set[str] = set()
    for call in (*before, Call(MAIN, step), *after):
        for info in call.signature.inputs:
            if info.name not in computed or -1 in info.declared:
                _check_input(where, call.model, info, count)
        computed |= {info.name for info in call.signature.outputs}
    if not caches & computed:
        raise UsageError(
            f"{where}: no model updates its caches: put the export's {AUXILIARY}.tflite beside it"
        )
    return (*before, Call(MAIN, step), *after)


def _check_input(where: str, model: str, info: TensorInfo, count: int) -> None:
    """Raise UsageError for an input that the loop cannot make from `count` tokens."""
    if -1 in info.declared:
        raise UsageError(
            f"{where}: input '{info.name}' has a dynamic shape: export with fixed lengths"
        )
    held = f"input '{info.name}' {list(info.shape)} of the {model} model"
    if not is_basic(info):
        raise UsageError(
            f"{where}: no model computes {held}: put {EMBEDDER}.tflite and {AUXILIARY}.tflite of the same export "
            "beside it"
        )
    if role_of(info) == "token" and info.elements != count:
        raise UsageError(f"{where}: {held} must have {many(count, 'element')}, one for each token")
