"""What litert-torch's exporter and diffusers make for painting and speaking: Flux, Bonsai, Qwen3-TTS.

Rows of FAMILIES for make_families.py: name, what is special, and what writes the file. The exporter's classes read
folders of several models, made here with small random weights; sizes that they fix themselves stay. This module
converts; it names no expected result.
"""

import json
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from checkpoints import Sizes, lib, with_head_size

Make = Callable[[Path], None]

_HF = "litert_torch.generative.export_hf"
_ROPE = [8, 4, 4, 4]  # of a head of 20
_TRANSFORMER = {
    "in_channels": 16, "num_layers": 2, "num_single_layers": 4, "attention_head_dim": 20, "num_attention_heads": 4,
    "joint_attention_dim": 216, "timestep_guidance_channels": 32, "axes_dims_rope": _ROPE, "guidance_embeds": False,
}  # fmt: skip
_DECODER = {
    "block_out_channels": [32, 32, 64, 64],
    "latent_channels": 4,
    "norm_num_groups": 8,
    "layers_per_block": 1,
}
_QWEN3 = {
    **with_head_size(Sizes(layers=4)),
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
}
_FOLDERS = {"text_encoder": _QWEN3, "transformer": _TRANSFORMER, "vae": _DECODER}


@dataclass(frozen=True)
class Painter:
    """One part of an image generator; `kind` is module and class of the exporter's model."""

    kind: tuple[str, str]
    part: str
    writes: str

    def __call__(self, target: Path) -> None:
        """Write `target`."""
        lib("torch").manual_seed(0)
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            folder = Path(scratch)
            for name, config in _FOLDERS.items():
                (folder / name).mkdir()
                (folder / name / "config.json").write_text(json.dumps(config), encoding="utf-8")
            (folder / "pipeline_meta.json").write_text(
                '{"text_encoder_out_layers": [1, 2, 3]}', encoding="utf-8"
            )
            settings = lib(f"{_HF}.core.exportable_module_config").ExportableModuleConfig(
                model=scratch, output_dir=scratch, work_dir=scratch, task="text_to_image", quantization_recipe="",
                bundle_litert_lm=False, use_random_weights=True, t2i_output_image_size=64, prefill_lengths=[14],
                extra_kwargs={"targets": [self.part]},
            )  # fmt: skip
            module, model = self.kind
            getattr(lib(f"{_HF}.model_ext.{module}"), model)(scratch, settings).export(settings)
            shutil.move(folder / self.writes, target)


@dataclass(frozen=True)
class Diffusers:
    """A transformer of diffusers, as plain torch; inputs are floats of these shapes."""

    model: str
    config: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]

    def __call__(self, target: Path) -> None:
        """Write `target`."""
        torch = lib("torch")
        torch.manual_seed(0)
        inner, names = (
            getattr(lib("diffusers"), self.model)(**self.config).eval(),
            tuple(self.shapes),
        )

        def forward(_: Any, *inputs: Any) -> Any:
            return inner(**dict(zip(names, inputs, strict=True)), return_dict=False)[0]

        module = type("Whole", (torch.nn.Module,), {"forward": forward})()
        module.inner = inner
        inputs = tuple(torch.ones(shape) for shape in self.shapes.values())
        lib("litert_torch").convert(module.eval(), inputs, strict_export=False).export(str(target))


def _flux1_blocks(target: Path) -> None:
    """The blocks of diffusers' Flux between what embeds and what puts out, RoPE's tables given."""
    torch = lib("torch")
    torch.manual_seed(0)
    inner = lib("diffusers").FluxTransformer2DModel(**_FLUX1).eval()

    def forward(_: Any, image: Any, text: Any, time: Any, cos: Any, sin: Any) -> Any:
        for blocks in (inner.transformer_blocks, inner.single_transformer_blocks):
            for block in blocks:
                text, image = block(image, text, time, image_rotary_emb=(cos, sin))
        return image

    module = type("Blocks", (torch.nn.Module,), {"forward": forward})()
    module.inner = inner
    shapes = ((1, 16, 80), (1, 14, 80), (1, 80), (30, 20), (30, 20))
    inputs = tuple(torch.ones(shape) for shape in shapes)
    lib("litert_torch").convert(module.eval(), inputs, strict_export=False).export(str(target))


@dataclass(frozen=True)
class Speaker:
    """One part of Qwen3-TTS."""

    part: str
    writes: str

    def __call__(self, target: Path) -> None:
        """Write `target`."""
        lib("torch").manual_seed(0)
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            folder, place = Path(scratch), f"{_HF}.model_ext.qwen3_tts"
            if self.part == "codec":
                _codec(place).save_pretrained(folder / "speech_tokenizer")
            if self.part == "talker":
                _talker(folder, lib(f"{place}.qwen3_tts"))
            settings = lib(f"{_HF}.core.exportable_module_config").ExportableModuleConfig(
                model=scratch, output_dir=scratch, work_dir=scratch, task="text_to_speech", quantization_recipe="",
                bundle_litert_lm=False, prefill_lengths=[14], cache_length=44, extra_kwargs={"targets": [self.part]},
            )  # fmt: skip
            lib(f"{place}.qwen3_tts").Qwen3Tts(scratch, settings).export(settings)
            shutil.move(folder / self.writes, target)


def _codec(place: str) -> Any:
    """Codes to sound: a transformer with a window, then convolutions.

    Without the way back, which is not exported, and which transformers 5.23 does not let the exporter's class make.
    """
    module = lib(f"{place}.tokenizer_v2.modeling_qwen3_tts_tokenizer_v2")
    module.Qwen3TTSTokenizerV2Encoder = SimpleNamespace(
        _from_config=lambda _: lib("torch").nn.Identity()
    )
    config = lib(f"{place}.tokenizer_v2.configuration_qwen3_tts_tokenizer_v2").Qwen3TTSTokenizerV2Config(
        decoder_config={
            "codebook_size": 64, "codebook_dim": 32, "hidden_size": 72, "latent_dim": 72, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 20, "intermediate_size": 104, "num_hidden_layers": 2,
            "sliding_window": 26, "decoder_dim": 64, "upsample_rates": (2, 2), "upsampling_ratios": (2, 2),
        },
    )  # fmt: skip
    return module.Qwen3TTSTokenizerV2Model(config)


def _talker(folder: Path, module: Any) -> None:
    """The weights that the exporter looks for, of two layers; it fixes the width at 1024."""
    torch, transformers = lib("torch"), lib("transformers")
    small = {
        "num_hidden_layers": 2,
        "intermediate_size": 104,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    module._TALKER_SYNTH_CONFIG.update(small, head_dim=20, max_window_layers=2)  # noqa: SLF001
    config = transformers.Qwen3Config(**{**module._TALKER_SYNTH_CONFIG, "vocab_size": 320})  # noqa: SLF001
    state = transformers.Qwen3ForCausalLM(config).state_dict()
    names = {
        "lm_head.weight": "codec_head.weight",
        "model.embed_tokens.weight": "model.codec_embedding.weight",
    }
    tensors = {
        f"talker.{names.get(name, name)}": torch.clone(value) for name, value in state.items()
    }
    pad = torch.zeros(3072 - 320, 1024)
    tensors["talker.codec_head.weight"] = torch.cat([tensors["talker.codec_head.weight"], pad])
    lib("safetensors.torch").save_file(tensors, folder / "model.safetensors")


_BONSAI, _KLEIN = (
    ("bonsai_flux2.bonsai_flux2", "BonsaiFlux2"),
    ("flux2_klein.flux2_klein", "Flux2Klein"),
)
_SHARED = {"in_channels": 16, "num_layers": 2, "num_single_layers": 2, "attention_head_dim": 20,
           "num_attention_heads": 4}  # fmt: skip
_FLUX1 = {
    **_SHARED,
    "joint_attention_dim": 56,
    "pooled_projection_dim": 24,
    "axes_dims_rope": (4, 8, 8),
}
_FLUX2 = {
    **_SHARED,
    "joint_attention_dim": 56,
    "timestep_guidance_channels": 32,
    "axes_dims_rope": _ROPE,
}
_INPUTS = {"hidden_states": (1, 16, 16), "encoder_hidden_states": (1, 14, 56), "timestep": (1,)}

FAMILIES: list[tuple[str, str, Make]] = [
    ("bonsai_text", "Qwen3 as an encoder of prompts", Painter(_BONSAI, "text_encoder", "text_encoder_fp32.tflite")),
    ("bonsai_image", "joint attention of text and picture, then single", Painter(_BONSAI, "dit", "dit_fp32.tflite")),
    ("bonsai_decoder", "one head over pixels", Painter(_BONSAI, "vae_decoder", "vae_decoder_fp32.tflite")),
    ("flux2_klein_text", "a shard; the mask has every head",
     Painter(_KLEIN, "text_encoder", "text_encoder_shard_1_fp32.tflite")),
    ("flux2_klein_double", "a shard: text and picture", Painter(_KLEIN, "dit", "dit_double_block_0_fp32.tflite")),
    ("flux2_klein_single", "a shard: joint tokens", Painter(_KLEIN, "dit", "dit_single_block_0_fp32.tflite")),
    ("flux1_transformer", "diffusers",
     Diffusers("FluxTransformer2DModel", _FLUX1,
               {**_INPUTS, "pooled_projections": (1, 24), "img_ids": (16, 3), "txt_ids": (14, 3)})),
    ("flux1_blocks", "diffusers, from embedding to output: joint attention of text and picture, then single",
     _flux1_blocks),
    ("flux2_transformer", "diffusers",
     Diffusers("Flux2Transformer2DModel", _FLUX2,
               {**_INPUTS, "guidance": (1,), "img_ids": (16, 4), "txt_ids": (14, 4)})),
    ("qwen3_tts_talker", "text to codes, K=2", Speaker("talker", "talker_fp32.tflite")),
    ("qwen3_tts_predictor", "SDPA composites, five layers of real size", Speaker("mtp", "mtp_fp32.tflite")),
    ("qwen3_tts_codec", "codes to sound, a window, K=2", Speaker("codec", "codec_decoder_fp32.tflite")),
    ("qwen3_tts_speaker", "softmax over time without attention",
     Speaker("speaker_encoder", "speaker_encoder_fp32.tflite")),
]  # fmt: skip
