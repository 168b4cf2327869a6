"""Generate text greedily with two models: prefill and decode with caches, planned from their signatures.

One model is loaded at a time, with its embedder and auxiliary model if the export has separate ones.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from edge_opt.base.errors import UsageError
from edge_opt.base.words import many
from edge_opt.comparison.findings import GenerationComparison, measured, name_of
from edge_opt.ir.opening import (
    AUXILIARY_SECTION,
    EMBEDDER_SECTION,
    PER_LAYER_SECTION,
    ModelLike,
    Opened,
    Part,
)
from edge_opt.runtime import noise
from edge_opt.runtime.description import describe
from edge_opt.runtime.loop import Call, Loop, is_basic
from edge_opt.runtime.protocol import Array
from edge_opt.runtime.runner import Worker
from edge_opt.runtime.tensors import (
    MAIN,
    Kernels,
    SignatureInfo,
    TensorInfo,
    cache_length,
    caches_of,
    longest_prefill,
    named_shapes,
    new_tokens,
    role_of,
)
from edge_opt.schema.litertlm import read_executor_metadata

EMBEDDER = "embedder"
AUXILIARY = "auxiliary"
_HELPERS = {
    EMBEDDER: EMBEDDER_SECTION,
    AUXILIARY: AUXILIARY_SECTION,
    "per_layer_embedder": PER_LAYER_SECTION,
}
"""The helpers by the names of their files, and the purposes of their sections in a bundle."""
_PREFIXES = {"per_layer_embedder": "per_layer_"}
"""Gemma 4's per-layer embedder calls its output `embeddings`, as the embedder does; the main model has a prefix."""
_MOST_TOKENS = 100_000

Prompt = tuple[tuple[int, ...], ...]
"""Tokens: those of a prompt by batch row, or those that were generated, by step and batch row."""
Described = Mapping[str, Sequence[SignatureInfo]]


def find_parts(given: ModelLike) -> dict[str, Part]:
    """Return the main model, and any separate embedders and auxiliary model, from the bundle or files beside it.

    Raises:
        ModelFormatError: a file cannot be read.
        UsageError: a bundle has no prefill/decode model, or it is compiled for an NPU.
    """
    opened = Opened(given)
    parts = {MAIN: opened.main()}
    for name, kind in _HELPERS.items():
        if opened.path is None or opened.bundle is not None:
            part = opened.find(kind)
        else:
            part = _beside(Path(opened.path), name)
        if part is not None:
            parts[name] = part
    return parts


def _beside(path: Path, name: str) -> Part | None:
    """The model of this name in the folder of the main model, if there is one."""
    stem = path.name.split(".", 1)[0]
    for file in (path.with_name(f"{stem}.{name}.tflite"), path.with_name(f"{name}.tflite")):
        if file.is_file():
            return Part(file)
    return None


def window_of(given: ModelLike) -> int:
    """The positions that sliding layers see, by the bundle's executor metadata; 0 if unknown."""
    metadata = read_executor_metadata(Opened(given).bundle)
    return 0 if metadata is None else metadata.window or 0


@contextmanager
def open_parts(parts: Mapping[str, Part]) -> Iterator[tuple[dict[str, Path], Described]]:
    """The models' files, and their signatures."""
    files: dict[str, Path] = {}
    described: dict[str, list[SignatureInfo]] = {}
    with ExitStack() as stack:
        for name, part in parts.items():
            files[name] = stack.enter_context(part.file())
            described[name] = list(describe(part.model).values())
        yield files, described


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
    window = window_of(a) or window_of(b)
    with Worker() as worker:

        def generate(
            name: str, parts: Mapping[str, Part], prompt: Prompt | None
        ) -> tuple[Loop, Array]:
            with open_parts(parts) as (files, described):
                loop = plan_loop(name, described, count, seed, prompt)
                loop = replace(loop, window=window)
                return loop, worker.generate(files, loop, kernels)

        loop, logits_a = generate(name_of(a, "a"), {**theirs, **ours}, None)
        other, logits_b = generate(name_of(b, "b"), {**ours, **theirs}, loop.prompt)
    difference = measured(loop.logits, other.logits, [(logits_a, logits_b)], logits=True)
    tokens_a = _tuples(logits_a.argmax(axis=-1))
    tokens_b = _tuples(logits_b.argmax(axis=-1))
    return GenerationComparison(count, loop.prompt, tokens_a, tokens_b, difference)


def _tuples(rows: Array) -> Prompt:
    return tuple(map(tuple, rows.tolist()))


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
    vocabulary = max(logits.shape[-1:], default=0)
    if logits.elements != batch * vocabulary or logits.elements < 2 * batch:
        shape = f"output '{logits.name}' has shape {list(logits.shape)}, expected [batch, 1, vocabulary]"
        raise UsageError(f"{name}, signature '{decode.name}': {shape}")
    rows = new_tokens(prefill)
    cache = cache_length(decode) or _MOST_TOKENS
    read = 1 if prompt is None else len(prompt[0]) - 1
    # A prefill writes all of its rows. If those of the last one did not fit, they would replace earlier ones.
    stored = max(count + read, math.ceil(read / rows) * rows)
    if stored > cache:
        remedy = "generate fewer, or give a shorter prompt"
        raise UsageError(f"{name}: {stored} tokens do not fit into its cache of {cache}: {remedy}")
    if prompt is None:
        length = min(rows, cache - count) + 1
        stream = noise.seed_of(seed, "prompt", 0)
        numbers = noise.integers(stream, batch * length, 1, vocabulary)
        prompt = _tuples(numbers.reshape(batch, length))
    return Loop(
        _calls(name, described, prefill, batch * rows),
        _calls(name, described, decode, batch),
        rows,
        prompt,
        count,
        logits,
        past=_past_columns(decode),
    )


def _past_columns(step: SignatureInfo) -> dict[str, int]:
    """The number of columns of each mask that stand for the cache, if others stand for the new tokens."""
    past: dict[str, int] = {}
    if _is_split(step):
        for info in step.inputs:
            if role_of(info) == "mask" and len(info.shape) > 2:
                past[info.name] = info.shape[-1] - info.shape[-2]
    return past


def _is_split(step: SignatureInfo) -> bool:
    """True if new keys and values stand beside the caches, as the columns of masks do."""
    return any("slice" in info.name for info in step.outputs)


def _is_decode(step: SignatureInfo) -> bool:
    """True for a step of one token: it has caches, and one output of logits."""
    if "prefill" in step.name or not caches_of(step):
        return False
    return sum("logits" in info.name for info in step.outputs) == 1


def _calls(name: str, described: Described, step: SignatureInfo, count: int) -> tuple[Call, ...]:
    """Return the calls that compute a step's inputs from `count` tokens, the step, and the update of the caches."""
    where = f"{name}, signature '{step.name}'"
    helpers: list[Call] = []
    for model in _HELPERS:
        prefix = _PREFIXES.get(model, "")
        helpers += (Call(model, signature, prefix) for signature in described.get(model, ()))
    givers = _givers(step, helpers)
    given = [info for info in step.inputs if info.name in givers]
    calls = list(dict.fromkeys(givers[info.name] for info in given))
    calls.append(Call(MAIN, step))
    update = _update(step, helpers)
    if update is not None:
        calls.append(update)
    computed: set[str] = set()
    for call in calls:
        for info in call.signature.inputs:
            if info.name not in computed or -1 in info.declared:
                _check_input(where, call.model, info, count)
        computed |= {call.prefix + info.name for info in call.signature.outputs}
    if computed.isdisjoint(caches_of(step)):
        raise UsageError(
            f"{where}: no model updates its caches: put the export's {AUXILIARY}.tflite beside it"
        )
    return tuple(calls)


def _givers(step: SignatureInfo, helpers: Iterable[Call]) -> dict[str, Call]:
    """The first helper that computes an input of a step, by the input's name."""
    inputs = named_shapes(step.inputs)
    givers: dict[str, Call] = {}
    for call in helpers:
        if caches_of(call.signature):
            continue
        for info in call.signature.outputs:
            # LiteRT-LM makes masks itself; those of the auxiliary model lose a key of a ring in int16.
            is_left_out = _is_split(step) and role_of(info) == "mask"
            name = call.prefix + info.name
            if (name, info.shape) in inputs and not is_left_out:
                givers.setdefault(name, call)
    return givers


def _update(step: SignatureInfo, helpers: Iterable[Call]) -> Call | None:
    """The helper that puts a step's new keys and values into the caches, if the step does not do so itself."""
    caches = caches_of(step).keys()
    if not _is_split(step) or not caches.isdisjoint(_names(step.outputs)):
        return None
    slices = named_shapes(info for info in step.outputs if "slice" in info.name)
    for call in helpers:
        takes_slices = slices <= named_shapes(call.signature.inputs)
        if takes_slices and caches <= _names(call.signature.outputs):
            return call
    return None


def _names(infos: Iterable[TensorInfo]) -> set[str]:
    return {info.name for info in infos}


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
