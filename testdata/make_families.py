"""Make one tiny random-weight .tflite per way that an exporter writes attention; reads no model.

    make_families.py OUT_DIR [--from MODULE] [--only NAME ...] [--list]

Every family is made in a process of its own (a converter may crash, and peak memory stays that of one export)
and lands in OUT_DIR/NAME.tflite, beside it the exporter's chatter in NAME.log. Needs the extras `torch` and
`tensorflow`; `--from` takes the families of a module exports_*.py instead, which says what it needs. Sizes differ
from each other wherever the exporter allows it, so that no axis passes for another by chance: N=4, H=20, T=14,
S=44, hidden 72, vocabulary 320.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checkpoints import HuggingFace, Sizes, lib

Make = Callable[[Path], None]


@dataclass(frozen=True)
class Family:
    """One way of writing attention: its name, what is special about it, and what writes the file."""

    name: str
    about: str
    make: Make


# --- litert-torch, today's route: a transformers checkpoint through export_hf ---

_K1, _K2, _KN, _N8, _DEEP = (
    Sizes(kv_heads=1),
    Sizes(),
    Sizes(kv_heads=4),
    Sizes(heads=8),
    Sizes(layers=4),
)
_BLOCKS = Sizes(head_size=24, hidden=96, ffn=160)
_RING = {"sliding_window_ring_buffer_size": 32}
_ONE = {"split_cache": False}
_EMBEDDED = {**_ONE, "externalize_embedder": True}
_LAYOUT = {"k_ts_idx": 3, "v_ts_idx": 2}
_LENGTHS = {"prefill_lengths": [14, 6], "cache_lengths": [44, 52]}
_GPU = {**_ONE, "apply_gpu_composites": True}
_PICTURES = {"task": "image_text_to_text", "export_vision_encoder": False}
_ONLY_SDPA = {
    "use_rope_composite": False, "use_swiglu_composite": False, "use_qkv_norm_rope_composite": False,
    "fuse_qkv": False, "fuse_gate_up": False, "enable_gpu_dynamic_cache": False, "use_bool_mask": False,
    "use_sdpa_composite": True,
}  # fmt: skip
# name, what is special, architecture, sizes, export options
_HUGGING_FACE: list[tuple[str, str, str, Sizes, dict[str, Any]]] = [
    ("gemma3_k1", "split cache, K=1", "gemma3", _K1, {}),
    ("gemma3_k2", "split cache, K=2 of N=4", "gemma3", _K2, {}),
    ("gemma3_kn", "split cache, K=N", "gemma3", _KN, {}),
    ("gemma3_n8k2", "split cache, N=8, K=2", "gemma3", _N8, {}),
    ("gemma3_layout", "the other cache layout", "gemma3", _K2, _LAYOUT),
    ("gemma3_lengths", "several prefill and cache lengths", "gemma3", _K2, _LENGTHS),
    ("gemma3_ring", "ring buffer: local and global masks differ in width", "gemma3", _K2, _RING),
    ("gemma3_fp16", "fp16 cache", "gemma3", _K2, {"experimental_use_fp16": True}),
    ("gemma3_one_cache", "not split, K=2", "gemma3", _K2, _ONE),
    ("gemma3_one_cache_k1", "not split, K=1", "gemma3", _K1, _ONE),
    ("gemma3_one_cache_kn", "not split, K=N", "gemma3", _KN, _ONE),
    ("gemma3_one_cache_layout", "not split, other layout", "gemma3", _K2, {**_ONE, **_LAYOUT}),
    ("gemma3_one_cache_bool", "boolean mask, added", "gemma3", _K2, {**_ONE, "use_bool_mask": True}),
    ("gemma3_embedder", "embeddings come in", "gemma3", _K2, _EMBEDDED),
    ("gemma3_batch2", "not split, batch 2", "gemma3", _K2, {**_ONE, "batch_size": 2}),
    ("gemma3_split_batch2", "split cache, batch 2", "gemma3", _K2, {"batch_size": 2}),
    ("gemma3_fused_qkv", "one projection for Q, K and V", "gemma3", _K2, {"fuse_qkv": True}),
    ("gemma3_light", "lightweight", "gemma3", _K2, {"experimental_lightweight_conversion": True}),
    ("gemma3_mixed", "mixed precision", "gemma3", _K2, {"experimental_use_mixed_precision": True}),
    ("gemma3_gpu", "every GPU composite, K=2", "gemma3", _K2, _GPU),
    ("gemma3_gpu_k1", "every GPU composite, K=1", "gemma3", _K1, _GPU),
    ("gemma3_gpu_kn", "every GPU composite, K=N", "gemma3", _KN, _GPU),
    ("gemma3_gpu_bmm", "odml.runtime_bmm and Select", "gemma3", _K2, {**_GPU, "use_sdpa_composite": False}),
    ("gemma3_gpu_ring", "GPU composites over a ring buffer", "gemma3", _K2, {**_GPU, **_RING}),
    ("gemma3_gpu_fused", "odml.fused_sdpa_cache_update", "gemma3", _K2,
     {**_GPU, **_RING, "use_fused_sdpa_cache_update": True}),
    ("gemma3_gpu_sdpa", "odml.sdpa_transposed, the other composites off", "gemma3", _K2,
     {**_GPU, **_ONLY_SDPA}),
    ("gemma3_gpu_batch2", "GPU composites, batch 2", "gemma3", _K2, {**_GPU, "batch_size": 2}),
    ("gemma3_gpu_fp16", "GPU composites, fp16 cache", "gemma3", _K2, {**_GPU, "experimental_use_fp16": True}),
    ("gemma3_dynamic", "dynamic lengths, K=1", "gemma3", _K1, {**_ONE, "enable_dynamic_shape": True}),
    ("gemma2_k2", "soft-capping, split cache", "gemma2", _K2, {}),
    ("gemma2_one_cache", "soft-capping, not split", "gemma2", _K2, _ONE),
    ("gemma2_gpu", "odml.sdpa_transposed with soft-capping", "gemma2", _K2, _GPU),
    ("gemma4_k2", "no scale, V norm, two head sizes", "gemma4", _K2, {}),
    ("gemma4_one_cache", "the same, not split", "gemma4", _K2, _ONE),
    ("gemma4_gpu", "odml.sdpa_transposed, two head sizes", "gemma4", _K2, _GPU),
    ("gemma4_shared", "the last layers read an earlier cache", "gemma4_shared", _DEEP, {}),
    ("gemma4_shared_one_cache", "the same, not split", "gemma4_shared", _DEEP, _EMBEDDED),
    ("qwen2_k2", "split cache, biased projections", "qwen2", _K2, {}),
    ("qwen3_k2", "split cache, norms on Q and K", "qwen3", _K2, {}),
    ("qwen3_one_cache", "the same, not split", "qwen3", _K2, _ONE),
    ("qwen3_5_one_cache", "gated attention beside linear attention", "qwen3_5", _K2, _ONE),
    ("gemma3n_one_cache", "AltUp, the last layers read an earlier cache", "gemma3n", _DEEP, _EMBEDDED),
    ("llama_k2", "split cache", "llama", _K2, {}),
    ("llama_blocks", "split cache, sizes that blocks of 32 weights divide", "llama", _BLOCKS, {}),
    ("llama_kn", "split cache, K=N", "llama", _KN, {}),
    ("llama_one_cache", "not split", "llama", _K2, _ONE),
    ("llama_gpu", "odml.sdpa_transposed, one mask", "llama", _K2, _GPU),
    ("mistral_one_cache", "every layer has a window", "mistral", _K2, _ONE),
    ("phi3_k2", "fused projections", "phi3", _K2, {}),
    ("smollm3_k2", "layers without RoPE", "smollm3", _K2, {}),
    ("lfm2_one_cache", "convolution layers between", "lfm2", _K2, _ONE),
    ("olmo2_k2", "norms over N*H before the heads are made", "olmo2", _K2, {}),
    ("gemma3_converter2", "litert-torch's second converter", "gemma3", _K2, {**_ONE, "use_v2": True}),
    ("qwen3_gpu", "GPU composites, norms and RoPE in one", "qwen3", _K2, _GPU),
    ("lfm2_gpu", "GPU composites, convolutions among them", "lfm2", _K2, {**_GPU, "use_short_conv_composite": True}),
    ("qwen3_5_k2", "split cache", "qwen3_5", _K2, {}),
    ("deepseek_v3_one_cache", "latent attention, latents cached", "deepseek_v3", _K2, _ONE),
    ("paligemma_one_cache", "the text model", "paligemma", _K2, {**_ONE, **_PICTURES}),
    ("paligemma_k2", "the text model, split cache", "paligemma", _K2, _PICTURES),
    ("lfm2_vl_one_cache", "the text model", "lfm2_vl", _K2, {**_ONE, **_PICTURES}),
    ("gemma4_unified_one_cache", "the text model", "gemma4_unified", _K2, _ONE),
    ("gemma4_unified_k2", "the text model, split cache", "gemma4_unified", _K2, {}),
]  # fmt: skip


# --- litert-torch, the earlier route: reauthored models and the layers they are built of ---


def shrink(config: Any, sizes: Sizes, heads_of_layer: Sequence[tuple[int, int]]) -> Any:
    """Cut a reauthored model's configuration to `sizes`, in place; (N, K) is given for each layer."""
    config.vocab_size, config.max_seq_len, config.embedding_dim = sizes.vocab, 256, sizes.hidden
    config.num_layers = len(heads_of_layer)
    if config.embedding_scale is not None:
        config.embedding_scale = sizes.hidden**0.5
    blocks = (
        config.block_configs if isinstance(config.block_configs, list) else [config.block_configs]
    )
    if len(blocks) > 1:
        config.block_configs = blocks = blocks[: len(heads_of_layer)]
    for block, (heads, kv_heads) in zip(blocks, heads_of_layer, strict=False):
        attention = block.attn_config
        attention.num_heads, attention.num_query_groups = heads, kv_heads
        attention.head_dim = sizes.head_size
        if attention.sliding_window_size:
            attention.sliding_window_size = sizes.window
        block.ff_config.intermediate_size = sizes.ffn
    return config


@dataclass(frozen=True)
class Reauthored:
    """Builds one of litert-torch's reauthored models; `place` is module, class and configuration function."""

    place: tuple[str, str, str]
    heads: tuple[tuple[int, int], ...] = ((4, 2), (4, 2))
    transposed: bool = False
    composites: bool = False
    mask_input: bool = False
    decode_batch: int = 1

    def __call__(self, target: Path) -> None:
        """Write `target` with the signatures prefill_14 and decode."""
        sizes, generative = Sizes(), "litert_torch.generative"
        module, model_class, configuration = self.place
        example = lib(f"{generative}.examples.{module}")
        config = shrink(getattr(example, configuration)(), sizes, self.heads)
        config.enable_hlfb = self.composites
        mask_size = 0 if self.mask_input else sizes.cache
        model = fill(getattr(example, model_class)(config, mask_cache_size=mask_size))
        cache = lib(f"{generative}.layers.kv_cache")
        export_config = lib(f"{generative}.utilities.export_config").ExportConfig(
            kvcache_layout=cache.KV_LAYOUT_TRANSPOSED
            if self.transposed
            else cache.KV_LAYOUT_DEFAULT,
            mask_as_input=self.mask_input,
            decode_batch_size=self.decode_batch,
        )
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            made = lib(f"{generative}.utilities.converter").convert_to_tflite(
                model, output_path=scratch, output_name_prefix="m", prefill_seq_len=sizes.prefill,
                kv_cache_max_len=sizes.cache, quantize="none", export_config=export_config,
            )  # fmt: skip
            shutil.move(made, target)


def fill(model: Any) -> Any:
    """Give every parameter random values, in place; some reauthored layers leave theirs uninitialised."""
    torch = lib("torch")
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.2)
    return model.eval()


def embedding_gemma(kv_heads: int, *, composites: bool) -> Make:
    """EmbeddingGemma, an encoder without cache: five local layers and a global one, as its class demands."""

    def make(target: Path) -> None:
        torch, example = (
            lib("torch"),
            lib("litert_torch.generative.examples.embedding_gemma.embedding_gemma"),
        )
        config = shrink(example.get_model_config(), Sizes(), [(4, kv_heads)] * 6)
        config.dense_intermediate_size, config.enable_hlfb = 88, composites
        tokens = torch.ones((1, Sizes().prefill), dtype=torch.int64)
        model = fill(example.EmbeddingGemma(config))
        lib("litert_torch").convert(model, (tokens, tokens)).export(str(target))

    return make


_GEMMA1 = ("gemma.gemma1", "Gemma1", "get_model_config_2b")
_GEMMA2 = ("gemma.gemma2", "Gemma2", "get_model_config_2b")
_GEMMA3 = ("gemma3.decoder", "Decoder", "get_decoder_config_1b")
_LLAMA = ("llama.llama", "Llama", "get_1b_model_config")
_FALCON = ("falcon.falcon", "Falcon", "get_model_config")
_OPENELM = ("openelm.openelm", "OpenELM", "get_model_config")
_PHI2 = ("phi.phi2", "Phi2", "get_model_config")
_QWEN = ("qwen.qwen", "Qwen", "get_3b_model_config")
_QWEN3 = ("qwen.qwen3", "Qwen3", "get_4b_model_config")
_ONE_KV, _ALL_KV, _GROWING = ((4, 1), (4, 1)), ((4, 4), (4, 4)), ((4, 2), (6, 3))
# name, what is special, maker
_REAUTHORED: list[tuple[str, str, Reauthored]] = [
    ("gemma1_plain", "K=1, BROADCAST_TO for K, 3-D products", Reauthored(_GEMMA1, _ONE_KV)),
    ("gemma1_sdpa", "odml.scaled_dot_product_attention, K=1", Reauthored(_GEMMA1, _ONE_KV, composites=True)),
    ("gemma1_transposed", "K=1, mask added at [1,N,T,S]", Reauthored(_GEMMA1, _ONE_KV, transposed=True)),
    ("gemma2_plain", "K=2, BROADCAST_TO, soft-capping", Reauthored(_GEMMA2)),
    ("gemma2_sdpa", "the SDPA composite, K=2, soft-capping", Reauthored(_GEMMA2, composites=True)),
    ("gemma2_transposed", "K=2, soft-capping before the mask's RESHAPE",
     Reauthored(_GEMMA2, transposed=True, mask_input=True)),
    ("gemma3_transposed", "K=2, mask added at [K,G,T,S]",
     Reauthored(_GEMMA3, transposed=True, mask_input=True)),
    ("gemma3_sdpa", "the SDPA composite, K=2", Reauthored(_GEMMA3, composites=True, mask_input=True)),
    ("llama_plain", "K=2, scale as a root on Q and on K", Reauthored(_LLAMA)),
    ("llama_sdpa", "the SDPA composite, K=2", Reauthored(_LLAMA, composites=True)),
    ("llama_transposed", "K=2, mask made in the graph", Reauthored(_LLAMA, transposed=True)),
    ("llama_batch2", "decode with batch 2, K=N", Reauthored(_LLAMA, _ALL_KV, decode_batch=2)),
    ("falcon_plain", "ALiBi: another mask for each head", Reauthored(_FALCON, _ALL_KV)),
    ("openelm_plain", "another N and K in each layer", Reauthored(_OPENELM, _GROWING)),
    ("openelm_transposed", "the same, other layout", Reauthored(_OPENELM, _GROWING, transposed=True)),
    ("phi2_plain", "K=N, RoPE on a part of the head", Reauthored(_PHI2, _ALL_KV)),
    ("phi2_transposed", "K=N, mask added at [N,1,T,S]", Reauthored(_PHI2, _ALL_KV, transposed=True)),
    ("qwen_plain", "K=2, biased projections", Reauthored(_QWEN)),
    ("qwen3_plain", "K=2, norms on Q and K", Reauthored(_QWEN3)),
]  # fmt: skip


# --- the command ---


def all_families() -> list[Family]:
    """The families above, and the FAMILIES of every module families_*.py beside this script."""
    families = [
        Family(
            name, about, HuggingFace(architecture, sizes, options, auxiliary=name == "gemma3_k1")
        )
        for name, about, architecture, sizes, options in _HUGGING_FACE
    ]
    families += [Family(f"old_{name}", about, maker) for name, about, maker in _REAUTHORED]
    families += [
        Family(f"encoder_k{k}", "EmbeddingGemma", embedding_gemma(k, composites=False))
        for k in (1, 2, 4)
    ]
    families.append(
        Family(
            "encoder_sdpa",
            "EmbeddingGemma, the SDPA composite",
            embedding_gemma(2, composites=True),
        )
    )
    for module in sorted(Path(__file__).parent.glob("families_*.py")):
        families += [Family(*row) for row in lib(module.stem).FAMILIES]
    return families


def make_in_child(family: Family, out: Path, module: str | None) -> bool:
    """Run this script for one family; True if it wrote the model."""
    target, start = out / f"{family.name}.tflite", time.monotonic()
    command = [
        sys.executable,
        str(Path(__file__).resolve()),
        str(out),
        "--only",
        family.name,
        "--here",
    ]
    command += ["--from", module] if module else []
    with target.with_suffix(".log").open("w") as log:
        code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=False).returncode
    outcome = (
        f"{target.stat().st_size:,} bytes"
        if code == 0
        else f"FAILED with exit code {code}, see {log.name}"
    )
    print(f"{family.name:24} {time.monotonic() - start:5.0f} s  {outcome}", flush=True)
    return code == 0


def main() -> int:
    """Parse the command line and make the families it names; 1 if any of them failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    modules = sorted(path.stem for path in Path(__file__).parent.glob("exports_*.py"))
    parser.add_argument("out", type=Path, nargs="?", default=Path())
    parser.add_argument(
        "--from", choices=modules, dest="module", help="another exporter's families"
    )
    parser.add_argument("--only", nargs="+", metavar="NAME")
    parser.add_argument("--list", action="store_true", help="print the table and stop")
    parser.add_argument(
        "--here", action="store_true", help="in this process, chatter and tracebacks shown"
    )
    arguments = parser.parse_args()
    families = (
        [Family(*row) for row in lib(arguments.module).FAMILIES]
        if arguments.module
        else all_families()
    )
    unknown = set(arguments.only or ()) - {family.name for family in families}
    if unknown:
        parser.error(f"no such family: {', '.join(sorted(unknown))}")
    chosen = [f for f in families if arguments.only is None or f.name in arguments.only]
    if arguments.list:
        print("\n".join(f"{f.name:24} {f.about}" for f in chosen))
        return 0
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.here:
        for family in chosen:
            family.make(arguments.out / f"{family.name}.tflite")
        return 0
    made = [make_in_child(family, arguments.out, arguments.module) for family in chosen]
    return 0 if all(made) else 1


if __name__ == "__main__":
    sys.exit(main())
