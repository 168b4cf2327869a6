"""Checkpoints of small random weights, and litert-torch's export of them: a transformers folder through export_hf.

Sizes differ from each other wherever the exporter allows it, so that no axis passes for another by chance: N=4, H=20,
T=14, S=44, hidden 72, vocabulary 320. This module reads no model.
"""

import importlib
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Sizes:
    """The numbers of a tiny decoder; `window` is that of its sliding-window layers."""

    layers: int = 3
    heads: int = 4
    kv_heads: int = 2
    head_size: int = 20
    hidden: int = 72
    ffn: int = 104
    vocab: int = 320
    prefill: int = 14
    cache: int = 44
    window: int = 26


def lib(name: str) -> Any:
    """Import a heavy library at the moment it is needed; typed Any, for none of them ships complete types."""
    return importlib.import_module(name)


def _common(s: Sizes) -> dict[str, Any]:
    return {
        "vocab_size": s.vocab,
        "hidden_size": s.hidden,
        "intermediate_size": s.ffn,
        "num_hidden_layers": s.layers,
        "num_attention_heads": s.heads,
        "num_key_value_heads": s.kv_heads,
        "max_position_embeddings": 512,
        "pad_token_id": 0,
        "initializer_range": 0.2,  # at the default of 0.02 every softmax is all but uniform
    }


def with_head_size(s: Sizes) -> dict[str, Any]:
    """A decoder whose heads are wider than their share of the hidden size."""
    return {**_common(s), "head_dim": s.head_size}


def with_window(s: Sizes) -> dict[str, Any]:
    """Local, global, local: a prefill's last layer has no attention, and both kinds must come before it."""
    kinds = ["full_attention" if i % 3 == 1 else "sliding_attention" for i in range(s.layers)]
    return {
        **with_head_size(s),
        "sliding_window": s.window,
        "query_pre_attn_scalar": s.head_size,
        "layer_types": kinds,
    }


def _gemma4(s: Sizes) -> dict[str, Any]:
    """Global layers have a head size of their own; the last layer has to be one of them."""
    config = with_window(s)
    del config["query_pre_attn_scalar"]
    kinds = ["full_attention" if i % 2 else "sliding_attention" for i in range(s.layers)]
    return {
        **config,
        "global_head_dim": 2 * s.head_size,
        "hidden_size_per_layer_input": 0,
        "layer_types": [*kinds[:-1], "full_attention"],
    }


def _gemma4_shared(s: Sizes) -> dict[str, Any]:
    """The small Gemma4: per-layer embeddings, and the last two layers read an earlier layer's cache."""
    vision = {
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 12,
    }
    shared = {
        "hidden_size_per_layer_input": 12,
        "vocab_size_per_layer_input": s.vocab,
        "num_kv_shared_layers": 2,
    }
    return {
        "text_config": {**_gemma4(s), **shared},
        "vision_config": {**vision, "hidden_size": 24, "intermediate_size": 32},
        "audio_config": None,
    }


def _qwen3_5(s: Sizes) -> dict[str, Any]:
    linear = {"key_head_dim": 12, "value_head_dim": 12, "num_key_heads": 2, "num_value_heads": 4}
    return {
        **with_head_size(s),
        **{f"linear_{k}": v for k, v in linear.items()},
        "layer_types": [
            "full_attention" if i % 2 == 0 else "linear_attention" for i in range(s.layers)
        ],
    }


def _gemma3n(s: Sizes) -> dict[str, Any]:
    return {
        **with_head_size(s),
        "intermediate_size": [s.ffn] * s.layers,
        "vocab_size_per_layer_input": s.vocab,
        "hidden_size_per_layer_input": 12,
        "laurel_rank": 8,
        "num_kv_shared_layers": 2,
        "sliding_window": s.window,
        "layer_types": [
            "full_attention" if i % 2 else "sliding_attention" for i in range(s.layers)
        ],
        "activation_sparsity_pattern": [0.0] * s.layers,
    }


def _lfm2(s: Sizes) -> dict[str, Any]:
    return {
        **_common(s),
        "layer_types": ["full_attention" if i % 2 == 0 else "conv" for i in range(s.layers)],
    }


def _deepseek(s: Sizes) -> dict[str, Any]:
    latent = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12}
    return {
        **_common(s),
        "num_key_value_heads": s.heads,
        "v_head_dim": 18,
        **latent,
        "first_k_dense_replace": s.layers,
    }


def tower(s: Sizes) -> dict[str, Any]:
    """A vision tower in front of a decoder: 16 patches, two layers."""
    sizes = {"hidden_size": s.hidden, "intermediate_size": s.ffn, "num_attention_heads": s.heads}
    return {**sizes, "num_hidden_layers": 2, "image_size": 28, "patch_size": 7}


def _paligemma(s: Sizes) -> dict[str, Any]:
    text = {"model_type": "gemma", **with_head_size(s)}
    own = {"image_token_id": s.vocab - 1, "projection_dim": s.hidden, "hidden_size": s.hidden}
    return {
        "text_config": text,
        "vision_config": {**tower(s), "model_type": "siglip_vision_model"},
        **own,
    }


def _lfm2_vl(s: Sizes) -> dict[str, Any]:
    vision = {k: v for k, v in tower(s).items() if k != "image_size"}
    own = {"image_token_id": s.vocab - 1, "projector_hidden_size": s.hidden}
    return {
        "text_config": {"model_type": "lfm2", **_lfm2(s)},
        "vision_config": {**vision, "model_type": "siglip2_vision_model", "vision_use_head": False},
        **own,
    }


def _gemma4_unified(s: Sizes) -> dict[str, Any]:
    text = {k: v for k, v in _gemma4(s).items() if k != "hidden_size_per_layer_input"}
    vision = {"patch_size": 4, "mm_embed_dim": 24, "mm_posemb_size": 40, "output_proj_dims": 24}
    return {"text_config": text, "vision_config": vision, "audio_config": {"audio_embed_dim": 24}}


# architecture -> (configuration class, model class, configuration of the given sizes)
ARCHITECTURES: Mapping[str, tuple[str, str, Callable[[Sizes], dict[str, Any]]]] = {
    "deepseek_v3": ("DeepseekV3Config", "DeepseekV3ForCausalLM", _deepseek),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", with_window),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", with_window),
    "gemma3n": ("Gemma3nTextConfig", "Gemma3nForCausalLM", _gemma3n),
    "gemma4": ("Gemma4TextConfig", "Gemma4ForCausalLM", _gemma4),
    "gemma4_shared": ("Gemma4Config", "Gemma4ForConditionalGeneration", _gemma4_shared),
    "gemma4_unified": (
        "Gemma4UnifiedConfig",
        "Gemma4UnifiedForConditionalGeneration",
        _gemma4_unified,
    ),
    "lfm2": ("Lfm2Config", "Lfm2ForCausalLM", _lfm2),
    "lfm2_vl": ("Lfm2VlConfig", "Lfm2VlForConditionalGeneration", _lfm2_vl),
    "granite": ("GraniteConfig", "GraniteForCausalLM", _common),
    "llama": ("LlamaConfig", "LlamaForCausalLM", with_head_size),
    "mistral": ("MistralConfig", "MistralForCausalLM", with_head_size),
    "paligemma": ("PaliGemmaConfig", "PaliGemmaForConditionalGeneration", _paligemma),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM", _common),
    "phi3": ("Phi3Config", "Phi3ForCausalLM", _common),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", _common),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", with_head_size),
    "qwen3_5": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", _qwen3_5),
    "smollm3": ("SmolLM3Config", "SmolLM3ForCausalLM", _common),
}


def save_checkpoint(architecture: str, sizes: Sizes, folder: Path, **config: Any) -> None:
    """Write a checkpoint with random weights and a word-level tokenizer that the exporter is content with.

    `config`: fields of the configuration class that are to differ from the architecture's.
    """
    config_class, model_class, configure = ARCHITECTURES[architecture]
    save_model(config_class, model_class, {**configure(sizes), **config}, folder, sizes.vocab)


def save_model(
    config_class: str, model_class: str, config: Mapping[str, Any], folder: Path, vocab: int
) -> None:
    """Write any of transformers' models so; the tokenizer knows the words "w4", "w5", ..."""
    torch, transformers, tokenizers = lib("torch"), lib("transformers"), lib("tokenizers")
    torch.manual_seed(0)
    configuration = getattr(transformers, config_class)(**config)
    model = getattr(transformers, model_class)(configuration).eval()
    with torch.no_grad():  # the padding row is zero, and a zero row has no quantization scale
        for table in (
            module for module in model.modules() if isinstance(module, torch.nn.Embedding)
        ):
            if table.padding_idx is not None:
                table.weight[table.padding_idx] = table.weight[7]
    model.save_pretrained(folder)
    package = lib(type(model).__module__.rpartition(".")[0])
    for name in [name for name, value in vars(package).items() if isinstance(value, type)]:
        delattr(
            package, name
        )  # looked up again, so that the exporter finds the classes that it puts there
    special = {
        "pad_token": "<pad>",
        "eos_token": "<eos>",
        "bos_token": "<bos>",
        "unk_token": "<unk>",
    }
    words = {
        word: i for i, word in enumerate([*special.values(), *(f"w{i}" for i in range(4, vocab))])
    }
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel(words, unk_token=special["unk_token"])
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    special |= {"eoi_token": "w4", "eoa_token": "w5"}  # of a picture, of sound
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(
        folder
    )


def export(checkpoint: Path, tasks: Sequence[str], scratch: Path, **options: Any) -> None:
    """Run tasks of litert-torch's exporter on a checkpoint; models land in `scratch`, all weights as they are."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    hf = "litert_torch.generative.export_hf"
    steps, run = lib(f"{hf}.core.export_lib"), lib(f"{hf}.export").run_export_tasks
    settings = {
        "bundle_litert_lm": False,
        "keep_temporary_files": True,
        "quantization_recipe": "",
        **options,
    }
    config = lib(f"{hf}.core.exportable_module_config").ExportableModuleConfig(
        model=str(checkpoint), output_dir=str(scratch), work_dir=str(scratch), **settings
    )
    run([getattr(steps, task) for task in tasks], config)


@dataclass(frozen=True)
class HuggingFace:
    """Makes a checkpoint and exports it; `options` are fields of litert-torch's export configuration."""

    architecture: str
    sizes: Sizes = field(default_factory=Sizes)
    options: Mapping[str, Any] = field(default_factory=dict)
    auxiliary: bool = False

    def __call__(self, target: Path) -> None:
        """Write `target`; with `auxiliary` also the model that makes masks and RoPE tables, beside it."""
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            folder = Path(scratch)
            save_checkpoint(self.architecture, self.sizes, folder / "hf")
            tasks = ["export_text_prefill_decode_model"] + [
                "export_auxiliary_model"
            ] * self.auxiliary
            export(folder / "hf", tasks, folder, **self._options())
            shutil.move(folder / "model.tflite", target)
            if self.auxiliary:
                shutil.move(folder / "auxiliary.tflite", target.with_suffix(".auxiliary.tflite"))

    def _options(self) -> dict[str, Any]:
        return {
            "prefill_lengths": [self.sizes.prefill],
            "cache_length": self.sizes.cache,
            "split_cache": True,
            **self.options,
        }
