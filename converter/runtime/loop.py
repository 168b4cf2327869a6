"""The loop that generates text: its calls as plain data, and running them.

The parent plans a loop and the worker runs it, with models that it keeps open; `Invoke` hides how they run.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from edge_opt.runtime.inputs import InputPlan, array_of, converted, is_sliding
from edge_opt.runtime.protocol import Array, Arrays
from edge_opt.runtime.tensors import SignatureInfo, TensorInfo, role_of

_PARAMETERS = "param_tensor"
# What LiteRT-LM writes into masked and open entries of masks, whatever the scale (runtime/executor,
# `FillMasksInternal`).
_MASK_CODES = {"int8": (-128, 127), "int16": (-32767, 0)}
_MASKED = -1e9

Invoke = Callable[["Call", Arrays], Arrays]


@dataclass(frozen=True, slots=True)
class Call:
    """One signature of one of the models ("main", "embedder", ..); other calls read its outputs by `prefix` + name."""

    model: str
    signature: SignatureInfo
    prefix: str = ""


@dataclass(frozen=True, slots=True)
class Loop:
    """Calls of the prefill and of one decode step, the prompt by batch row, and how many tokens to generate.

    The prefill takes all of the prompt except its last token, `rows` tokens at a time; decoding begins with the last.
    The tokens `follow`, if any, are read after the prompt instead of the generated ones. `past`: the number of columns
    of a mask, by its name, that stand for the cache, if others stand for the new tokens. `window`: the positions that
    sliding layers see, or 0 if unknown.
    """

    prefill: tuple[Call, ...]
    decode: tuple[Call, ...]
    rows: int
    prompt: tuple[tuple[int, ...], ...]
    count: int
    logits: TensorInfo
    follow: tuple[int, ...] = ()
    past: Mapping[str, int] = field(default_factory=dict)
    window: int = 0


def run(loop: Loop, invoke: Invoke) -> Array:
    """Generate greedily: the logits of every step, `[count, batch, vocabulary]`."""
    values: dict[str, tuple[Array, TensorInfo]] = {}

    def step(calls: tuple[Call, ...], tokens: Array, start: int, valid: int) -> None:
        """Make the calls of one step in order, on results of earlier calls and on inputs that the loop can make."""
        for call in calls:
            inputs: Arrays = {}
            for info in call.signature.inputs:
                if info.name in values:
                    value, made_as = values[info.name]
                    inputs[info.name] = converted(value, made_as, info)
                else:
                    inputs[info.name] = basic_input(
                        info, tokens, start, valid, loop.past, loop.window
                    )
            outputs = invoke(call, inputs)
            for info in call.signature.outputs:
                values[call.prefix + info.name] = (outputs[info.name], info)

    prompt = np.array(loop.prompt, np.int64)
    filled = prompt.shape[1] - 1
    for start in range(0, filled, loop.rows):
        valid = min(loop.rows, filled - start)
        chunk = np.zeros((len(prompt), loop.rows), np.int64)
        chunk[:, :valid] = prompt[:, start : start + valid]
        step(loop.prefill, chunk, start, valid)
    steps: list[Array] = []
    current = prompt[:, -1:]
    for place in range(loop.count):
        step(loop.decode, current, filled + place, 1)
        logits, _ = values[loop.logits.name]
        rows = logits.reshape(len(prompt), -1)
        steps.append(rows)
        best = rows.argmax(axis=-1, keepdims=True)
        current = np.full((1, 1), loop.follow[place]) if loop.follow else best
    return np.stack(steps)


def is_basic(info: TensorInfo) -> bool:
    """True if the loop can make the input: tokens, positions, masks (also of valid tokens), empty caches."""
    if info.name == _PARAMETERS:
        return info.shape[-1:] == (7,)
    return role_of(info) in {"token", "position", "mask", "cache"} and "slice" not in info.name


def basic_input(
    info: TensorInfo, tokens: Array, start: int, valid: int, past: Mapping[str, int], window: int
) -> Array:
    """Tokens, positions, a causal mask over the whole cache or a window, or an empty cache.

    `tokens` are the new tokens by batch row, `valid` of which are not padding; `start` is the position of the first.
    """
    role = role_of(info)
    dtype = np.dtype(info.dtype)
    if info.name == _PARAMETERS:
        # litert-torch, export_hf/core/exportable_module.py: offset, filled length twice, length of the update.
        values = np.zeros(info.shape, dtype)
        values[..., :4] = (start, start + valid, start + valid, valid)
        return values
    if role == "token":
        return tokens.astype(dtype).reshape(info.shape)
    if role == "mask" and "valid" in info.name:
        is_valid = np.arange(info.shape[-1]) < valid
        return np.broadcast_to(is_valid, info.shape).astype(dtype)
    if role in {"position", "mask"}:
        cache = past.get(info.name, 0)
        # A shorter cache is a ring, as long as the window or longer.
        slides = is_sliding(info) or cache < max(past.values(), default=0)
        seen = (window or cache) if slides else 0
        masked, opened = _entries(info)
        planned = InputPlan(role, masked, opened, info=info, start=start, past=cache, window=seen)
        return array_of(planned).copy()
    empty = np.zeros(info.shape, np.float32)
    return converted(empty, replace(info, dtype="float32", scales=()), info)


def _entries(info: TensorInfo) -> tuple[float | None, float | None]:
    """The numbers that LiteRT-LM writes into a mask's masked and open entries; None for the usual ones of its type."""
    if info.quantized and info.dtype in _MASK_CODES:
        masked, opened = info.reals(np.array(_MASK_CODES[info.dtype]))
        return float(masked), float(opened)
    return (_MASKED if info.is_float else None), None
