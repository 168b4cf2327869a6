"""Checks a checkpoint's weights, and rotates its residual stream, so that no channel is far larger than the others.

Some checkpoints have one huge number in the first token's residual stream: 25,000 in SmolLM2-135M, where other numbers
are below 10. In int16 a single scale must cover them all. A layer reads the stream through an RmsNorm and a product,
and adds a product to it, so an orthogonal matrix Q can be folded into the weights of both:

    x [T,D] -> x Q        reading weights [N,D]: W -> W diag(norm) Q        writing weights [D,N]: W -> Q' W

The function stays the same, since `rms(x Q) = rms(x)` (QuaRot, Ashkboos et al. 2024, https://arxiv.org/abs/2404.00456).
Checkpoints with norms after a product, such as Gemma 2 and 3, or with LayerNorms, such as OLMo and Cohere, cannot be
rotated: every weight must be listed here, every norm must compute `weight * x / rms(x)`, and the logits of a few tokens
must be the same before and after.
"""

import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edge_opt.building.checkpoint import Stored, Streamed, load

_LAYER = r"(model\.layers\.\d+\.)"
_NORMS = {
    "input_layernorm": re.compile(_LAYER + r"self_attn\.(?:q|k|v|qkv)_proj\.weight"),
    "post_attention_layernorm": re.compile(_LAYER + r"mlp\.(?:gate|up|gate_up)_proj\.weight"),
}
"""Norms of a layer, and the products that read each one's result."""
_WRITES = re.compile(_LAYER + r"(?:self_attn\.o_proj|mlp\.down_proj)\.(?:weight|bias)")
_OTHERS = re.compile(_LAYER + r"self_attn\.(?:(?:q|k|v|qkv)_proj\.bias|[qk]_norm\.weight)")
_EMBEDDING = "model.embed_tokens.weight"
NORM = "model.norm.weight"
"""The final norm's weights."""
_HEAD = "lm_head.weight"
_KNOWN = (
    *_NORMS.values(),
    _WRITES,
    _OTHERS,
    re.compile(_LAYER + f"(?:{'|'.join(_NORMS)})\\.weight"),
    re.compile("|".join(map(re.escape, (_EMBEDDING, NORM, _HEAD)))),
)
_TOKENS = 64
_SAME = 1e-4
"""Largest difference that counts as float32 rounding, relative to the largest logit; 5e-6 for SmolLM2-135M."""
_GAIN = 2.0
"""Factor by which the stream's largest number must shrink."""


class Prepared(NamedTuple):
    """The outcome of a rotation: `note`, for the user, says what was rotated, or why nothing was.

    `streamed` is true if the weights did not have to be loaded as a whole.
    """

    rotated: bool
    note: str
    streamed: bool = True


def prepare(source: Path, output: Path, *, rotate: bool) -> Prepared:
    """Check a checkpoint's weights and, if `rotate`, write an equivalent checkpoint to the new folder `output`.

    No folder is written if the checkpoint cannot be rotated, or if that does not help.

    Raises:
        UsageError: weights are missing, truncated, of another shape, NaN or infinite; or transformers refuses the
            generation settings.
    """
    weights = load(source)
    prepared = Prepared(rotated=False, note="")
    if rotate:
        prepared = rotate_stream(weights, source, output)
    return prepared._replace(streamed=weights.streamed)


def rotate_stream(
    weights: Streamed, source: Path, output: Path, *, least_gain: float = _GAIN
) -> Prepared:
    """Write a checkpoint whose residual stream is rotated to the new folder `output`, in float32.

    No folder is written if a weight or a norm rules it out, if the model's function would change, or if the largest
    number in the stream shrinks by less than `least_gain`.
    """
    obstacle = _obstacle(weights)
    if obstacle:
        return _left(obstacle)
    before, largest = run_once(weights.model)
    _write_rotated(weights, weights.prepare_copy(source, output, weights.names, untie=True))
    after, smaller = run_once(load(output).model)
    reason = change_of(before, after)
    if not reason and not 0 < smaller * least_gain <= largest:
        reason = f"its largest number would change from {largest:,.1f} to {smaller:,.1f}"
    if reason:
        shutil.rmtree(output)
        return _left(reason)
    note = f"Rotated the residual stream: its largest number changes from {largest:,.0f} to {smaller:,.0f}"
    return Prepared(rotated=True, note=note)


def _left(reason: str) -> Prepared:
    return Prepared(rotated=False, note=f"The residual stream is not rotated: {reason}")


def orthogonal(width: int) -> NDArray[np.float64]:
    """An orthogonal matrix with entries of similar size: Hadamard for `width`'s power of two, a cosine for the rest."""
    hadamard = np.ones((1, 1))
    while width % (2 * len(hadamard)) == 0:
        hadamard = np.kron([[1, 1], [1, -1]], hadamard) / np.sqrt(2)
    rest = width // len(hadamard)
    rows, columns = np.ogrid[:rest, :rest]
    cosines = np.cos(np.pi * (2 * columns + 1) * rows / (2 * rest)) * np.sqrt(2 / rest)
    cosines[0] /= np.sqrt(2)
    return np.kron(hadamard, cosines)


def _obstacle(weights: Streamed) -> str:
    """Why a model cannot be rotated: a weight or norm of another kind; empty if all are known."""
    names = weights.names
    for name in names:
        if not any(known.fullmatch(name) for known in _KNOWN):
            return f"edge-opt has no rule for '{name}'"
    for name in (_EMBEDDING, _HEAD):
        if name not in names:
            return f"'{name}' is missing"
    for name in sorted({*filter(None, map(_norm_before, names))}):
        norm = name.removesuffix(".weight")
        if name not in names or not _is_rms_norm(weights, norm):
            return f"'{norm}' does not compute `weight * x / rms(x)`, the only norm that a rotation preserves"
    return ""


def _norm_before(name: str) -> str:
    """The weights of the norm whose result a product reads, by the name of the product's weights; or empty."""
    if name == _HEAD:
        return NORM
    for norm, readers in _NORMS.items():
        match = readers.fullmatch(name)
        if match is not None:
            return f"{match[1]}{norm}.weight"
    return ""


def _is_rms_norm(weights: Streamed, name: str) -> bool:
    """True if a norm computes `weight * x / rms(x)`; x has a mean, which a LayerNorm would subtract."""
    import torch

    norm = weights.model.get_submodule(name)
    width = weights.model.config.hidden_size
    x = torch.linspace(1e3, 9e3, width)  # large, so that epsilon does not matter
    with torch.no_grad(), weights.filled(norm):
        wanted = norm.weight * x / x.square().mean().sqrt()
        return bool(torch.allclose(norm(x[None, None])[0, 0], wanted, rtol=_SAME, atol=0))


def _write_rotated(weights: Streamed, places: Mapping[str, Stored]) -> None:
    """Write the rotated weights, computing in float64."""
    import torch

    turn = torch.tensor(orthogonal(weights.model.config.hidden_size))
    norms = {*map(_norm_before, places)}
    for name, place in places.items():
        if name in norms:
            place.codes("r+")[:] = 1
        elif _WRITES.fullmatch(name):
            place.codes("r+")[:] = turn.T @ torch.from_numpy(weights.read(name)).double()
        else:
            # What the weights are multiplied by: Q, diag(norm) Q, or nothing for those that do not read the stream.
            factor = turn if name == _EMBEDDING else None
            norm = _norm_before(name)
            if norm:
                factor = torch.from_numpy(weights.read(norm)).double()[:, None] * turn
            # Some rows at a time: those of a large vocabulary take gigabytes in float64.
            for first, rows in weights.blocks(name):
                turned = rows if factor is None else torch.from_numpy(rows).double() @ factor
                place.codes("r+")[first : first + len(rows)] = turned


def change_of(before: Any, after: Any) -> str:
    """How far logits are from those before; empty if no farther than float32 rounding."""
    change = float((after - before).abs().max())
    logit = float(before.abs().max())
    if change <= _SAME * logit:  # not NaN
        return ""
    return f"its logits would change by {change:.2g}, where the largest is {logit:.2g}"


def run_once(model: Any) -> tuple[Any, float]:
    """Logits `[1, 64, vocabulary]` of tokens from across the vocabulary, and the residual stream's largest number.

    The stream is `[1, 64, hidden]`, behind the embedding and behind each layer but the last.
    """
    import torch

    ids = torch.linspace(0, model.config.get_text_config().vocab_size - 1, _TOKENS).long()[None]
    with torch.no_grad():
        answer = model(ids, output_hidden_states=True)
    # The last state is after the final norm.
    return answer.logits, max(float(state.abs().max()) for state in answer.hidden_states[:-1])
