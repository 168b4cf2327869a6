"""Checks a checkpoint's weights, and rotates its residual stream, so that no channel is far larger than the others.

Some checkpoints have one huge number in the first token's residual stream: 25,000 in SmolLM2-135M, where other numbers
are below 10. In int16 a single scale must cover them all. A layer reads the stream through an RmsNorm and a product,
and adds a product to it, so an orthogonal matrix Q can be folded into the weights of both:

    x [T,D] -> x Q        reading weights [N,D]: W -> W diag(norm) Q        writing weights [D,N]: W -> Q' W

The function stays the same, since `rms(x Q) = rms(x)` (QuaRot, Ashkboos et al. 2024, https://arxiv.org/abs/2404.00456).
Checkpoints with norms after a product, such as Gemma 2 and 3, cannot be rotated.
"""

import importlib
import pickle
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_opt.base.errors import EdgeOptError, UsageError

_LAYER = r"(model\.layers\.\d+\.)"
_NORMS = {
    "input_layernorm": re.compile(_LAYER + r"self_attn\.(?:q|k|v|qkv)_proj\.weight"),
    "post_attention_layernorm": re.compile(_LAYER + r"mlp\.(?:gate|up|gate_up)_proj\.weight"),
}
"""Norms of a layer, and the products that read each one's result."""
_WRITES = re.compile(_LAYER + r"(?:self_attn\.o_proj|mlp\.down_proj)\.(?:weight|bias)")
_OTHERS = re.compile(_LAYER + r"self_attn\.(?:(?:q|k|v|qkv)_proj\.bias|[qk]_norm\.weight)")
_EMBEDDING, NORM, _HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
_TEXTS = {".json", ".model", ".jinja", ".txt"}
_TOKENS = 64
_SAME = 1e-3
"""Largest difference of logits, relative to the largest logit, that counts as float32 rounding."""
_GAIN = 2.0
"""Factor by which the stream's largest number must shrink."""


def prepare(source: Path, output: Path, *, rotate: bool) -> str:
    """Check a checkpoint's weights and, if `rotate`, write an equivalent checkpoint to the new folder `output`.

    Returns:
        A note for the user; empty, without writing a folder, if norms rule rotation out or it does not help.

    Raises:
        UsageError: weights are missing, truncated, of another shape, NaN or infinite; or transformers refuses the
            generation settings.
        EdgeOptError: memory ran out.
    """
    model = load(source)
    note = rotate_stream(model) if rotate else ""
    if note:
        save(model, source, output)
    return note


def rotate_stream(model: Any, *, least_gain: float = _GAIN) -> str:
    """Rotate the residual stream of a model in place, and return a note for the user.

    Returns an empty text if norms rule rotation out, or if it changes the function or shrinks the stream's largest
    number by less than `least_gain`; in the last two cases, load the model again.
    """
    torch = importlib.import_module("torch")
    if not _has_norms_in_front(model):
        return ""
    before, largest = _run(torch, model)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    model.config.tie_word_embeddings = False
    with torch.no_grad():
        _rotate_weights(model.state_dict(), torch.tensor(orthogonal(model.config.hidden_size)))
    after, smaller = _run(torch, model)
    if (after - before).abs().max() > _SAME * before.abs().max() or smaller * least_gain > largest:
        return ""
    return f"Rotated the residual stream: its largest number falls from {largest:,.0f} to {smaller:,.0f}"


def save(model: Any, source: Path, output: Path) -> None:
    """Write a model that was made from a checkpoint as another one, with the tokenizer and other files."""
    model.save_pretrained(output)
    for file in source.iterdir():
        if file.is_file() and file.suffix in _TEXTS and not (output / file.name).exists():
            shutil.copy(file, output)


def load(source: Path) -> Any:
    """The model in float32, checked: transformers fills missing weights with random numbers.

    Raises:
        UsageError: weights are missing, truncated, of another shape, NaN or infinite; or transformers refuses the
            generation settings.
        EdgeOptError: memory ran out.
    """
    torch, transformers, safetensors = map(importlib.import_module, ("torch", "transformers", "safetensors"))
    try:
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            source, dtype=torch.float32, output_loading_info=True, ignore_mismatched_sizes=True
        )
    # The last three are torch's for damaged .bin files.
    except (safetensors.SafetensorError, pickle.UnpicklingError, EOFError, RuntimeError) as error:
        cause, _, _ = (str(error) or "they are empty").partition("\n")
        if "allocate memory" in cause:
            raise EdgeOptError(
                f"not enough memory for the weights of {source} in float32 ({cause}): "
                "free some, or use a larger machine"
            ) from error
        raise UsageError(
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


def _has_norms_in_front(model: Any) -> bool:
    """True if the rotation supports every weight."""
    known = (*_NORMS.values(), _WRITES, _OTHERS, re.compile(_LAYER + f"(?:{'|'.join(_NORMS)})\\.weight"))
    left = model.state_dict().keys() - {_EMBEDDING, NORM, _HEAD}
    return all(any(one.fullmatch(name) for one in known) for name in left)


def _rotate_weights(state: dict[str, Any], turn: Any) -> None:
    """Rotate the weights in place, computing in float64."""
    for name, weight in state.items():
        wide = weight.double()
        if _WRITES.fullmatch(name):
            weight.copy_(turn.T @ wide)
        elif name == _EMBEDDING:
            weight.copy_(wide @ turn)
        elif name == _HEAD:
            weight.copy_((wide * state[NORM].double()) @ turn)
        for norm, readers in _NORMS.items():
            if match := readers.fullmatch(name):
                weight.copy_((wide * state[f"{match[1]}{norm}.weight"].double()) @ turn)
    for name, weight in state.items():
        if name == NORM or name.endswith(tuple(f"{norm}.weight" for norm in _NORMS)):
            weight.fill_(1)


def _run(torch: Any, model: Any) -> tuple[Any, float]:
    """Logits for tokens from across the vocabulary, and the residual stream's largest number between layers."""
    ids = torch.linspace(0, model.config.vocab_size - 1, _TOKENS).long()[None]
    with torch.no_grad():
        answer = model(ids, output_hidden_states=True)
    # The last state is after the final norm.
    return answer.logits, max(float(state.abs().max()) for state in answer.hidden_states[:-1])
