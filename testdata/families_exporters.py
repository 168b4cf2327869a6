"""What litert-torch's exporter knows beside decoders: towers for pictures and sound, speech, and what paints pictures.

Rows of FAMILIES for make_families.py: name, what is special, and what writes the file. Every model goes through the
exporter's own step, from a checkpoint of small random weights; processors, which only give it example inputs, are
stood in for. This module converts; it names no expected result.
"""

import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from checkpoints import Sizes, export, lib, save_model, tower, with_head_size, with_window
from families_torch import transformer

Make = Callable[[Path], None]
Shapes = Mapping[str, Sequence[int]]

_SIZES = Sizes()
_PROCESSORS = {
    "transformers.models.auto.feature_extraction_auto": "AutoFeatureExtractor",
    "transformers.models.auto.image_processing_auto": "AutoImageProcessor",
    "transformers.models.auto.processing_auto": "AutoProcessor",
}


class _Inputs(dict[str, Any]):
    """Inputs by name, as keys and as attributes."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


def _stand_in(shapes: Shapes) -> Any:
    """What reads a processor from a checkpoint: it gives one that knows these example inputs and nothing else."""
    torch = lib("torch")
    kinds = {"image_position_ids": torch.int64}
    given = {
        name: torch.ones(tuple(shape), dtype=kinds.get(name, torch.float32))
        for name, shape in shapes.items()
    }

    def processor(*_: Any, **__: Any) -> _Inputs:
        return _Inputs(given)

    processor.feature_extractor = SimpleNamespace(sampling_rate=16000)  # type: ignore[attr-defined]
    return lambda *_, **__: processor


@dataclass(frozen=True)
class Exported:
    """One step of the exporter on one of transformers' models: `writes` is the file that becomes the family's."""

    model: tuple[str, str, Mapping[str, Any]]
    step: str
    writes: str
    options: Mapping[str, Any] = field(default_factory=dict)
    inputs: Shapes = field(default_factory=dict)

    def __call__(self, target: Path) -> None:
        """Write `target`."""
        for module, name in _PROCESSORS.items():
            getattr(lib(module), name).from_pretrained = _stand_in(self.inputs)
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            folder = Path(scratch)
            config_class, model_class, config = self.model
            save_model(config_class, model_class, config, folder / "hf", _SIZES.vocab)
            export(folder / "hf", [self.step], folder, **self.options)
            shutil.move(folder / self.writes, target)


def _vision(
    config: str, model: str, settings: Mapping[str, Any], inputs: Shapes, **extra: Any
) -> Make:
    options = {"task": "image_text_to_text", "export_vision_encoder": True, "extra_kwargs": extra}
    step = "export_vision_encoder_models"
    return Exported((config, model, settings), step, "vision_encoder.tflite", options, inputs)


def _speech(config: str, model: str, settings: Mapping[str, Any], inputs: Shapes) -> Make:
    options = {"task": "automatic_speech_recognition"}
    return Exported(
        (config, model, settings), "export_asr_models", "asr_model.tflite", options, inputs
    )


_TEXT, _TOWER = with_head_size(_SIZES), tower(_SIZES)
_PICTURE = {"pixel_values": (1, 3, 28, 28)}
_GEMMA3 = {"text_config": with_window(_SIZES), "vision_config": _TOWER, "mm_tokens_per_image": 4}
_PALIGEMMA = {
    "text_config": {"model_type": "gemma", **_TEXT},
    "vision_config": {**_TOWER, "model_type": "siglip_vision_model"},
    "image_token_id": 319, "projection_dim": 72, "hidden_size": 72,
}  # fmt: skip
_SIGLIP2 = {k: v for k, v in _TOWER.items() if k != "image_size"}
_LFM2_VL = {
    "text_config": {"model_type": "lfm2", **_TEXT, "layer_types": ["full_attention", "conv", "full_attention"]},
    "vision_config": {**_SIGLIP2, "model_type": "siglip2_vision_model", "vision_use_head": False},
    "image_token_id": 319, "projector_hidden_size": 72,
}  # fmt: skip
_GEMMA4 = {
    "text_config": {**_TEXT, "hidden_size_per_layer_input": 0, "global_head_dim": 40, "sliding_window": 26},
    "vision_config": {
        "hidden_size": 48, "intermediate_size": 104, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 20, "patch_size": 4, "position_embedding_size": 40,
    },
    "audio_config": {
        "hidden_size": 72, "num_hidden_layers": 2, "num_attention_heads": 4, "output_proj_dims": 1536,
        "subsampling_conv_channels": (128, 4),
    },
}  # fmt: skip
_PATCHES = {"pixel_values": (1, 36, 48), "image_position_ids": (1, 36, 2)}
_UNIFIED = {
    "text_config": {**_TEXT, "global_head_dim": 40, "sliding_window": 26},
    "vision_config": {
        "patch_size": 4,
        "mm_embed_dim": 24,
        "mm_posemb_size": 40,
        "output_proj_dims": 24,
    },
    "audio_config": {"audio_embed_dim": 24},
}
_WHISPER = {
    "d_model": 72, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 104, "decoder_ffn_dim": 104, "vocab_size": 320,
    "max_source_positions": 44, "num_mel_bins": 20, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "decoder_start_token_id": 1,
}  # fmt: skip
_MOONSHINE = {
    "vocab_size": 320, "hidden_size": 72, "intermediate_size": 104, "encoder_num_hidden_layers": 2,
    "decoder_num_hidden_layers": 2, "encoder_num_attention_heads": 4, "decoder_num_attention_heads": 4,
    "pad_token_id": 0,
}  # fmt: skip
_PARAKEET = {
    "hidden_size": 72, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 104,
    "subsampling_conv_channels": 8,
}  # fmt: skip
_QWEN3_ASR = {
    "audio_config": {
        "d_model": 72, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 104, "output_dim": 72,
        "num_mel_bins": 32, "downsample_hidden_size": 12,
    },
    "text_config": {**_TEXT, "vocab_size": 151936},
}  # fmt: skip
_SPEECH = {"input_features": (1, 20, 88)}

FAMILIES: list[tuple[str, str, Make]] = [
    ("gemma3_vision", "SigLIP tower",
     _vision("Gemma3Config", "Gemma3ForConditionalGeneration", _GEMMA3, _PICTURE)),
    ("paligemma_vision", "SigLIP tower",
     _vision("PaliGemmaConfig", "PaliGemmaForConditionalGeneration", _PALIGEMMA, _PICTURE)),
    ("lfm2_vl_vision", "SigLIP 2 tower, 1024 patches",
     _vision("Lfm2VlConfig", "Lfm2VlForConditionalGeneration", _LFM2_VL, {"pixel_values": (1, 1024, 147)})),
    ("gemma4_vision", "tower with RoPE in two axes, K=2",
     _vision("Gemma4Config", "Gemma4ForConditionalGeneration", _GEMMA4, _PATCHES, gemma4_vision_max_soft_tokens=4)),
    ("gemma4_audio", "attention in chunks, relative positions",
     Exported(("Gemma4Config", "Gemma4ForConditionalGeneration", _GEMMA4), "export_audio_encoder_models_for_llm",
              "audio_encoder.tflite",
              {"task": "multimodal_lm", "export_vision_encoder": False, "export_audio_encoder": True})),
    ("gemma4_unified_vision", "no tower: patches are embedded",
     _vision("Gemma4UnifiedConfig", "Gemma4UnifiedForConditionalGeneration", _UNIFIED, _PATCHES,
             gemma4_vision_max_soft_tokens=4)),
    ("whisper_speech", "SDPA composites, encode and decode",
     _speech("WhisperConfig", "WhisperForConditionalGeneration", _WHISPER, _SPEECH)),
    ("moonshine_speech", "SDPA composites, RoPE on a part of the head",
     _speech("MoonshineConfig", "MoonshineForConditionalGeneration", _MOONSHINE, {"input_values": (1, 8000)})),
    ("parakeet_ctc_speech", "relative positions, shifted",
     _speech("ParakeetCTCConfig", "ParakeetForCTC", {"encoder_config": _PARAKEET, "vocab_size": 320, "pad_token_id": 0},
             {"input_features": (1, 112, 80)})),
    ("hf_parakeet", "Conformer: relative positions, shifted",
     transformer("ParakeetEncoder", _PARAKEET, {"input_features": (1, 112, 80)})),
    ("qwen3_asr_speech", "audio in chunks, K=2",
     _speech("Qwen3ASRConfig", "Qwen3ASRForConditionalGeneration", _QWEN3_ASR,
             {"input_features": (1, 32, 200)})),
]  # fmt: skip
