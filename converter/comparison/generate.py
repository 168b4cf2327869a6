"""Generates text greedily with two models, through prefill and decode, and compares the tokens.

Plans the loop from what the models' signatures say; it is carried out in the worker process, one model at a time with
its embedder and auxiliary model, where the export has them apart.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack

import numpy as np

from edge_opt.comparison.findings import GenerationComparison, measured
from edge_opt.comparison.models import AUXILIARY, EMBEDDER, MAIN, Models
from edge_opt.output.errors import UsageError
from edge_opt.proof import noise
from edge_opt.proof.loop import Call, Loop, is_basic
from edge_opt.proof.roles import cache_length, caches_of, longest_prefill, new_tokens, role_of
from edge_opt.proof.runner import Worker
from edge_opt.proof.source import Source
from edge_opt.proof.tensors import Kernels, SignatureInfo, TensorInfo

Prompt = tuple[tuple[int, ...], ...]

_MOST_TOKENS = 100_000


def compare_generation(
    worker: Worker, a: Models, b: Models, *, count: int, seed: int = 0, kernels: Kernels = "xnnpack"
) -> GenerationComparison:
    """Generates `count` tokens with both models from the same random prompt.

    Raises:
        UsageError: a signature, an embedder or an auxiliary model is missing, or the cache has too little room.
        RuntimeFailed: a model does not run.
    """
    if not 1 <= count <= _MOST_TOKENS:
        raise UsageError(f"{count} tokens to generate, expected 1 to {_MOST_TOKENS}")
    results = []
    prompt: Prompt | None = None
    for role, models in (("a", a), ("b", b)):
        with ExitStack() as stack:
            opened = {
                name: stack.enter_context(Source(model, f"{role}: {name}"))
                for name, model in zip((MAIN, EMBEDDER, AUXILIARY), models[1:], strict=True)
                if model is not None
            }
            loop = _plan(worker, opened, count, seed, prompt)
            prompt = loop.prompt
            runnable = {name: source.model for name, source in opened.items()}
            results.append((loop, *worker.generate(runnable, loop, kernels)))
    (loop, ours, logits_a), (other, theirs, logits_b) = results
    tokens_a, tokens_b = (tuple(map(tuple, steps)) for steps in (ours, theirs))
    logits = measured(_logits(loop), _logits(other), logits_a, logits_b, logits=True)
    return GenerationComparison(count, kernels, loop.prompt, tokens_a, tokens_b, logits)


def _logits(loop: Loop) -> TensorInfo:
    return next(info for call in loop.decode for info in call.signature.outputs if info.name == loop.logits)


def _plan(worker: Worker, opened: Mapping[str, Source], count: int, seed: int, prompt: Prompt | None) -> Loop:
    described = {name: worker.describe(source.model) for name, source in opened.items()}
    planner = _Planner(opened[MAIN].name, described)
    decode = planner.decode()
    prefill = planner.prefill(decode)
    rows = new_tokens(prefill)
    room = (cache_length(decode) or _MOST_TOKENS) - count
    if room < 1:
        said = f"{count} tokens do not fit into a cache of {room + count}: generate fewer"
        raise UsageError(f"{opened[MAIN].name}: {said}")
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
