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

import pickle
import re
import shutil
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edge_opt.base.errors import EdgeOptError, ModelFormatError, UsageError

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
TEXTS = {".json", ".model", ".jinja", ".txt"}
"""Endings of a checkpoint's files beside its weights."""
_TOKENS = 64
_ROWS_AT_ONCE = 8192
_SAME = 1e-4
"""Largest difference that counts as float32 rounding, relative to the largest logit; 5e-6 for SmolLM2-135M."""
_GAIN = 2.0
"""Factor by which the stream's largest number must shrink."""


class Prepared(NamedTuple):
    """The outcome of a rotation: `note`, for the user, says what was rotated, or why nothing was.

    `spoiled`: the model's weights have changed, although it is not rotated; it must be loaded again.
    """

    rotated: bool
    note: str
    spoiled: bool = False


def prepare(source: Path, output: Path, *, rotate: bool) -> Prepared:
    """Check a checkpoint's weights and, if `rotate`, write an equivalent checkpoint to the new folder `output`.

    No folder is written if the checkpoint cannot be rotated, or if that does not help.

    Raises:
        UsageError: weights are missing, truncated, of another shape, NaN or infinite; or transformers refuses the
            generation settings.
        EdgeOptError: memory ran out.
    """
    model = load(source)
    if not rotate:
        return Prepared(rotated=False, note="")
    prepared = rotate_stream(model)
    if prepared.rotated:
        save(model, source, output)
    return prepared


def rotate_stream(model: Any, *, least_gain: float = _GAIN) -> Prepared:
    """Rotate the residual stream of a model in place.

    The model is not rotated if a weight or a norm rules it out, if its function would change, or if the largest number
    in the stream shrinks by less than `least_gain`.
    """
    import torch

    obstacle = _obstacle(model)
    if obstacle:
        return _left(obstacle)
    before, largest = _run(model)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    model.config.tie_word_embeddings = False
    with torch.no_grad():
        _rotate_weights(model.state_dict(), torch.tensor(orthogonal(model.config.hidden_size)))
    after, smaller = _run(model)
    difference = float((after - before).abs().max() / before.abs().max())
    if not difference <= _SAME:  # NaN, too
        return _left(
            f"its logits would change by {difference:.2%} of the largest one", spoiled=True
        )
    if not smaller * least_gain <= largest:
        text = f"its largest number would only change from {largest:,.1f} to {smaller:,.1f}"
        return _left(text, spoiled=True)
    note = f"Rotated the residual stream: its largest number falls from {largest:,.0f} to {smaller:,.0f}"
    return Prepared(rotated=True, note=note)


def _left(reason: str, *, spoiled: bool = False) -> Prepared:
    return Prepared(
        rotated=False, note=f"The residual stream is not rotated: {reason}", spoiled=spoiled
    )


def save(model: Any, source: Path, output: Path) -> None:
    """Write a model that was made from a checkpoint as another one, with the tokenizer and other files."""
    model.save_pretrained(output)
    for file in source.iterdir():
        if file.is_file() and file.suffix in TEXTS and not (output / file.name).exists():
            shutil.copy(file, output)


def load(source: Path) -> Any:
    """The model in float32, checked: transformers fills missing weights with random numbers.

    Raises:
        ModelFormatError: weights are truncated.
        UsageError: weights are missing, of another shape, NaN or infinite; or transformers refuses the generation
            settings.
        EdgeOptError: memory ran out.
    """
    import safetensors
    import torch
    import transformers

    try:
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            source,
            dtype=torch.float32,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    # The last three are torch's for damaged .bin files.
    except (
        safetensors.SafetensorError,
        pickle.UnpicklingError,
        EOFError,
        RuntimeError,
    ) as error:
        cause, _, _ = (str(error) or "they are empty").partition("\n")
        if "allocate memory" in cause:
            raise EdgeOptError(
                f"not enough memory for the weights of {source} in float32 ({cause}): "
                "free some, or use a larger machine"
            ) from error
        raise ModelFormatError(
            f"weights in {source} are damaged or incomplete ({cause}): copy them again, or run `git lfs pull`"
        ) from error
    except ValueError as error:
        what = f"transformers cannot load {source} ({str(error).rstrip('.')})"
        raise UsageError(f"{what}: correct its generation_config.json or config.json") from error
    wrong = dict.fromkeys(info["missing_keys"], "is missing")
    wrong |= {name: "has another shape" for name, *_ in info["mismatched_keys"]}
    for name, how in sorted(wrong.items()):
        raise UsageError(
            f"the checkpoint's weights do not fit its config.json: {name} {how}, the first of {len(wrong)}; compare "
            f"both with the base model"
        )
    for name, weight in model.state_dict().items():
        if not torch.isfinite(weight).all():
            raise UsageError(
                f"{source}: '{name}' holds NaN or infinity, as when training diverges: give an earlier checkpoint"
            )
    return model.eval()


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


def _obstacle(model: Any) -> str:
    """Why a model cannot be rotated: a weight or norm of another kind; empty if all are known."""
    weights = model.state_dict()
    known = (
        *_NORMS.values(),
        _WRITES,
        _OTHERS,
        re.compile(_LAYER + f"(?:{'|'.join(_NORMS)})\\.weight"),
    )
    norms = {NORM}
    for name in weights:
        if name not in (_EMBEDDING, NORM, _HEAD) and not any(one.fullmatch(name) for one in known):
            return f"edge-opt has no rule for '{name}'"
        norms |= {*_norm_before(name)}
    for name in (_EMBEDDING, _HEAD):
        if name not in weights:
            return f"'{name}' is missing"
    for name in sorted(norms):
        norm = name.removesuffix(".weight")
        if name not in weights or not _is_rms_norm(model, norm):
            return f"'{norm}' does not compute `weight * x / rms(x)`, the only norm that a rotation preserves"
    return ""


def _norm_before(name: str) -> list[str]:
    """The weights of the layer's norm whose result a product reads, by the name of the product's weights; or none."""
    if name == _HEAD:
        return [NORM]
    found: list[str] = []
    for norm, readers in _NORMS.items():
        match = readers.fullmatch(name)
        if match is not None:
            found.append(f"{match[1]}{norm}.weight")
    return found


def _is_rms_norm(model: Any, name: str) -> bool:
    """True if a norm computes `weight * x / rms(x)`; x has a mean, which a LayerNorm would subtract."""
    import torch

    norm = model.get_submodule(name)
    x = torch.linspace(1e3, 9e3, model.config.hidden_size)  # large, so that epsilon does not matter
    with torch.no_grad():
        wanted = norm.weight * x / x.square().mean().sqrt()
        return bool(torch.allclose(norm(x[None, None])[0, 0], wanted, rtol=_SAME, atol=0))


def _rotate_weights(state: dict[str, Any], turn: Any) -> None:
    """Rotate the weights in place, computing in float64."""
    for name, weight in state.items():
        if _WRITES.fullmatch(name):
            weight.copy_(turn.T @ weight.double())
        elif name == _EMBEDDING:
            _turn_rows(weight, turn)
        for norm in _norm_before(name):
            _turn_rows(weight, state[norm].double()[:, None] * turn)
    for name in set(chain.from_iterable(map(_norm_before, state))):
        state[name].fill_(1)


def _turn_rows(weight: Any, turn: Any) -> None:
    """Multiply rows by a matrix in place, some at a time: those of a large vocabulary take gigabytes in float64."""
    for rows in weight.split(_ROWS_AT_ONCE):
        rows.copy_(rows.double() @ turn)


def _run(model: Any) -> tuple[Any, float]:
    """Logits for tokens from across the vocabulary, and the residual stream's largest number between layers."""
    import torch

    ids = torch.linspace(0, model.config.vocab_size - 1, _TOKENS).long()[None]
    with torch.no_grad():
        answer = model(ids, output_hidden_states=True)
    # The last state is after the final norm.
    return answer.logits, max(float(state.abs().max()) for state in answer.hidden_states[:-1])
