"""The loop that generates text: what is called in which order, as plain data, and how it is carried out.

Knows nothing of how a model is run, and must not load the runtime: the worker carries a loop out with models that it
keeps open, the parent only plans it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from edge_opt.runtime.inputs import InputPlan, array_of, converted, plan
from edge_opt.runtime.protocol import Array, Arrays
from edge_opt.runtime.tensors import SignatureInfo, TensorInfo, caches_of, growing_axes, part_of, role_of

_PARAMETERS = "param_tensor"

Invoke = Callable[["Call", Arrays], Arrays]
_Give = Callable[[TensorInfo], Array]
_Values = dict[str, tuple[Array, TensorInfo]]


@dataclass(frozen=True, slots=True)
class Call:
    """One signature of one of the models ("main", "embedder", "auxiliary")."""

    model: str
    signature: SignatureInfo


@dataclass(frozen=True, slots=True)
class Loop:
    """Calls of the prefill and of one decode step, the prompt by batch row, and how many tokens to generate.

    The prefill takes all of the prompt but its last token, `rows` tokens at a time; decoding begins with that one. The
    tokens `follow`, if any, are read behind the prompt instead of those that are generated.
    """

    prefill: tuple[Call, ...]
    decode: tuple[Call, ...]
    rows: int
    prompt: tuple[tuple[int, ...], ...]
    count: int
    logits: str
    follow: tuple[int, ...] = ()


def run(loop: Loop, invoke: Invoke) -> tuple[list[list[int]], Array]:
    """The tokens generated greedily, one list for each step, and the logits of every step."""
    values: _Values = {}
    prompt = np.array(loop.prompt, np.int64)
    filled = prompt.shape[1] - 1
    for start in range(0, filled, loop.rows):
        valid = min(loop.rows, filled - start)
        padded = np.zeros((len(prompt), loop.rows), np.int64)
        padded[:, :valid] = prompt[:, start : start + valid]
        _carry_out(
            values, loop.prefill, partial(basic_input, tokens=padded, start=start, valid=valid), invoke
        )
    tokens: list[list[int]] = []
    logits: list[Array] = []
    current = prompt[:, -1:]
    for place in range(loop.count):
        give = partial(basic_input, tokens=current, start=filled + place, valid=1)
        _carry_out(values, loop.decode, give, invoke)
        rows = values[loop.logits][0].reshape(len(prompt), -1)
        best = rows.argmax(axis=-1)
        current = np.full((1, 1), loop.follow[place]) if loop.follow else best[:, np.newaxis]
        logits.append(rows)
        tokens.append(best.tolist())
    return tokens, np.stack(logits)


def fill(signature: SignatureInfo, chunks: Sequence[tuple[int, int]], invoke: Invoke) -> Arrays:
    """The caches after a prefill that took these chunks one after the other, in the type that its inputs have.

    A chunk is the position of its first token, and the seed of what its inputs are beside the caches.
    """
    caches, axes = caches_of(signature), growing_axes(signature)
    values: _Values = {name: (_empty(info), info) for name, info in caches.items()}
    for start, seed in chunks:
        made = {
            planned.info: array_of(planned)
            for planned in plan(signature, seed=seed, start=start)
            if planned.info.name not in caches
        }
        _carry_out(values, (Call("main", signature),), made.__getitem__, invoke)
        for name, axis in axes.items():
            if part_of(name) not in values:
                continue
            # New keys and values that came apart go into their caches; a full one begins again at its front.
            (part, info), array = values.pop(part_of(name)), values[name][0]
            if axis is None:
                values[name] = part, info
                continue
            array = array.copy()
            places = (start + np.arange(part.shape[axis])) % array.shape[axis]
            array[(slice(None),) * axis + (places,)] = converted(part, info, caches[name])
            values[name] = array, caches[name]
    return {name: converted(*values[name], info) for name, info in caches.items()}


def _carry_out(values: _Values, calls: tuple[Call, ...], give: _Give, invoke: Invoke) -> None:
    """The calls of one step, in order, on what earlier calls gave; `give` makes what no call before gave."""
    for call in calls:
        inputs = {
            info.name: converted(*values[info.name], info) if info.name in values else give(info)
            for info in call.signature.inputs
        }
        outputs = invoke(call, inputs)
        values.update({info.name: (outputs[info.name], info) for info in call.signature.outputs})


def is_basic(info: TensorInfo) -> bool:
    """Whether the loop knows the input itself: tokens, positions, which tokens are valid, masks, empty caches."""
    if info.name == _PARAMETERS:
        return info.shape[-1:] == (7,)
    return role_of(info) in {"token", "position", "mask", "cache"} and "slice" not in info.name


def basic_input(info: TensorInfo, tokens: Array, start: int, valid: int) -> Array:
    """Tokens, positions, a causal mask over the whole cache, or an empty cache.

    `tokens` are the new ones by batch row, of which `valid` are no padding; `start` is the position of the first.
    """
    role, dtype = role_of(info), np.dtype(info.dtype)
    if info.name == _PARAMETERS:
        # litert-torch, export_hf/core/exportable_module.py: offset, filled length twice, length of the update.
        values = np.zeros(info.shape, dtype)
        values[..., :4] = (start, start + valid, start + valid, valid)
        return values
    if role == "token":
        return tokens.astype(dtype).reshape(info.shape)
    if role == "mask" and "valid" in info.name:
        return np.broadcast_to(np.arange(info.shape[-1]) < valid, info.shape).astype(dtype)
    if role in {"position", "mask"}:
        return array_of(InputPlan(role, info=info, start=start)).copy()
    return _empty(info)


def _empty(info: TensorInfo) -> Array:
    return converted(np.zeros(info.shape, np.float32), replace(info, dtype="float32", scales=()), info)
