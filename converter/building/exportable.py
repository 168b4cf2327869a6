"""Which checkpoints litert-torch exports for NPUs, and what its exporter needs to export RoPE as it is.

litert-torch exports `rotary_emb` as a model of its own, and the layers with its cosines and sines as inputs. It gives
these as many numbers as a head has. Where RoPE turns only a part of each head, as in Phi-4-mini, or makes each cosine
once, layers take fewer.
"""

import importlib
from collections.abc import Iterator, Mapping
from typing import Any

from edge_opt.base.errors import UsageError

_EXPORT = "litert_torch.generative.export_hf.core"
_LAYERS = {"full_attention", "sliding_attention"}
"""Kinds of layers whose caches litert-torch splits."""
_FIXED = ("default", "linear", "llama3", "proportional", "yarn")
"""Types of RoPE whose frequencies do not depend on the length of the text, which an export cannot follow."""
_CHANGING = ("dynamic", "longrope")
"""Types whose frequencies stay the same up to the length that the model was trained with first."""
_INPUTS = {"cos": "full_attention", "sin": "full_attention"}
_INPUTS |= {f"local_{name}": "sliding_attention" for name in _INPUTS}
"""The kinds of layers that read litert-torch's inputs."""


def check_layers(described: Any) -> None:
    """Raise UsageError if layers, by the configuration, need other inputs than attention whose caches can be split."""
    text = described.get_text_config()
    others = sorted({*(getattr(text, "layer_types", None) or ())} - _LAYERS)
    if others:
        raise UsageError(
            f"the checkpoint has layers of the kind {others[0]}, and litert-torch exports only "
            f"{' and '.join(sorted(_LAYERS))} for NPUs: give a checkpoint of another family"
        )
    if getattr(text, "hidden_size_per_layer_input", 0) and described.model_type != "gemma4":
        raise UsageError(
            f"the checkpoint's model type is {described.model_type}, and litert-torch exports embeddings of each layer "
            f"for NPUs only for gemma4: save a Gemma 4 as Gemma4ForConditionalGeneration, or give another family"
        )


def check_rope(described: Any, longest: int) -> None:
    """Raise UsageError if a checkpoint, by its configuration, has no RoPE or one that cannot be exported.

    `longest`: the length of the longest cache.
    """
    text = described.get_text_config()
    most = getattr(text, "max_position_embeddings", 0)
    for one in _of_layers(text).values():
        _check_type(one, most, longest)
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(described)
    if not hasattr(_layers_of(model), "rotary_emb"):
        raise UsageError(
            f"litert-torch exports only models with `model.rotary_emb`, and {type(model).__name__} has none: give a "
            f"checkpoint of another family"
        )
    for kind in filter(None, _of_layers(text)):
        if kind not in text.layer_types:
            raise UsageError(
                f"no layer of the checkpoint has '{kind}', but litert-torch exports this family only with at least one "
                f"of each kind among layer_types in config.json: give another checkpoint"
            )


def _of_layers(text: Any) -> dict[str | None, Mapping[str, Any]]:
    """The parameters of RoPE by the kind of layers; None for all layers."""
    rope = getattr(text, "rope_parameters", None) or {}
    by_kind: dict[str | None, Mapping[str, Any]] = {
        kind: one for kind, one in rope.items() if isinstance(one, dict)
    }
    return by_kind or {None: rope}


def _check_type(rope: Mapping[str, Any], most: int, longest: int) -> None:
    """Raise UsageError for a type that cannot be exported, or not for a cache as long as the `longest`."""
    how = rope.get("rope_type")
    if how in _FIXED:
        return
    if how not in _CHANGING:
        raise UsageError(
            f"the checkpoint's positions are {how or 'not RoPE'}, and litert-torch exports only RoPE of the types "
            f"{', '.join(sorted(_FIXED + _CHANGING))} (rope_type in config.json): give another checkpoint"
        )
    first = rope.get("original_max_position_embeddings", most)
    if longest > first:
        raise UsageError(
            f"the checkpoint's RoPE is {how}, whose frequencies change after {first} positions, which an export cannot "
            f"follow: give cache={first} or less"
        )


def _layers_of(model: Any) -> Any:
    """The part of a model that has `rotary_emb`."""
    inner = getattr(model, "model", None)
    return getattr(inner, "language_model", inner)


def export_as_it_is() -> None:
    """Make litert-torch's exporter, in this process, give layers the cosines that they read, with fixed frequencies."""
    package: Any = importlib.import_module(f"{_EXPORT}.external_rope.preprocess_model")
    inject = package.inject_rotary_position_embedding

    def inject_fixed(model: Any) -> Any:
        injected = inject(model)
        rotary = _layers_of(injected).original_rotary_emb
        if getattr(rotary, "rope_type", None) in _CHANGING:
            rotary.rope_type = "default"  # it keeps the frequencies that it began with
        return injected

    package.inject_rotary_position_embedding = inject_fixed
    split = importlib.import_module(f"{_EXPORT}.split_cache.exportable_module")
    exported = split.LiteRTSplitCacheExportableModuleForDecoderOnlyLM
    inputs_of = exported._get_input  # noqa: SLF001  there is no public way

    def as_made(self: Any, *given: Any) -> Any:
        inputs = inputs_of(self, *given)
        cosines = inputs["pos_emb"]
        for name, width in _widths(self.model, cosines):
            cosines[name] = cosines[name][..., :1].expand(-1, -1, -1, width).contiguous()
        return inputs

    exported._get_input = as_made  # noqa: SLF001


def _widths(model: Any, names: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """For each input with cosines or sines, how many RoPE makes for a position."""
    import torch

    layers = _layers_of(model)
    rotary = layers.original_rotary_emb
    device = next(rotary.buffers()).device
    numbers = torch.zeros(1, 1, 1, device=device)
    positions = torch.zeros(1, 1, dtype=torch.int64, device=device)
    by_kind = _of_layers(layers.config.get_text_config())
    for name in names:
        kind = _INPUTS[name]
        made = rotary(numbers, positions, *([kind] if kind in by_kind else []))
        yield name, made[0].shape[-1]
