"""Attention that plain torch writes through litert-torch: hand-written blocks and transformers models.

Rows of FAMILIES for make_families.py: name, what is special, and what writes the file. Sizes are those of its
Sizes: N=4, H=20, T=14, S=44, hidden 72. This module converts; it names no expected result.
"""

import importlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

Make = Callable[[Path], None]
Forward = Callable[..., Any]
Shapes = Mapping[str, Sequence[int]]  # input name -> shape; an input named mask* is boolean

HIDDEN = 72


def lib(name: str) -> Any:
    """Import a heavy library at the moment it is needed."""
    return importlib.import_module(name)


def torch_block(forward: Forward, shapes: Shapes, kv_heads: int = 4) -> Make:
    """Convert `forward(m, *inputs)`; m holds projections q, k, v, o, an nn.MultiheadAttention, an encoder."""

    def make(target: Path) -> None:
        torch = lib("torch")
        torch.manual_seed(0)
        nn, module = torch.nn, type("Block", (torch.nn.Module,), {"forward": forward})()
        wide, narrow = 4 * 20, kv_heads * 20
        module.q, module.o = nn.Linear(HIDDEN, wide), nn.Linear(wide, HIDDEN)
        module.k, module.v = nn.Linear(HIDDEN, narrow), nn.Linear(HIDDEN, narrow)
        module.mha = nn.MultiheadAttention(HIDDEN, 4, batch_first=True)
        layer = nn.TransformerEncoderLayer(HIDDEN, 4, 104, batch_first=True)
        module.encoder = nn.TransformerEncoder(layer, 2)
        kinds = {name: torch.bool if name.startswith("mask") else torch.float32 for name in shapes}
        inputs = tuple(
            torch.ones(tuple(shape), dtype=kinds[name]) for name, shape in shapes.items()
        )
        lib("litert_torch").convert(module.eval(), inputs).export(str(target))

    return make


def _split(x: Any, heads: int) -> Any:
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def _merge(m: Any, y: Any) -> Any:
    return m.o(y.transpose(1, 2).flatten(2))


def _qkv(m: Any, x: Any, source: Any = None, kv_heads: int = 4) -> tuple[Any, Any, Any]:
    source = x if source is None else source
    return _split(m.q(x), 4), _split(m.k(source), kv_heads), _split(m.v(source), kv_heads)


def _scores(q: Any, k: Any) -> Any:
    return q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5


def _sdpa(m: Any, x: Any, mask: Any = None, **options: Any) -> Any:
    attend = lib("torch").nn.functional.scaled_dot_product_attention
    return _merge(m, attend(*_qkv(m, x), attn_mask=mask, **options))


def _sdpa_gqa(m: Any, x: Any) -> Any:
    attend = lib("torch").nn.functional.scaled_dot_product_attention
    return _merge(m, attend(*_qkv(m, x, kv_heads=2), is_causal=True, enable_gqa=True))


def _filled(m: Any, x: Any, mask: Any) -> Any:
    for _ in range(2):
        q, k, v = _qkv(m, x)
        x = x + _merge(m, _scores(q, k).masked_fill(mask.unsqueeze(1) == 0, -1e9).softmax(-1) @ v)
    return x


def _repeated(m: Any, x: Any) -> Any:
    q, k, v = _qkv(m, x, kv_heads=2)
    k, v = (t[:, :, None].expand(-1, -1, 2, -1, -1).flatten(1, 2) for t in (k, v))
    return _merge(m, _scores(q, k).softmax(-1) @ v)


def _einsum(m: Any, x: Any) -> Any:
    einsum, (q, k, v) = lib("torch").einsum, (f(x).unflatten(-1, (4, -1)) for f in (m.q, m.k, m.v))
    weights = einsum("btnh,bsnh->bnts", q * q.shape[-1] ** -0.5, k).softmax(-1)
    return m.o(einsum("bnts,bsnh->btnh", weights, v).flatten(2))


def _einsum_gqa(m: Any, x: Any) -> Any:
    einsum, q = lib("torch").einsum, m.q(x).unflatten(-1, (2, 2, -1))
    k, v = (f(x).unflatten(-1, (2, -1)) for f in (m.k, m.v))
    weights = einsum("btkgh,bskh->bkgts", q * q.shape[-1] ** -0.5, k).softmax(-1)
    return m.o(einsum("bkgts,bskh->btkgh", weights, v).flatten(2))


def _cross(m: Any, x: Any, source: Any) -> Any:
    q, k, v = _qkv(m, x, source)
    return _merge(m, _scores(q, k).softmax(-1) @ v)


def _decode(m: Any, x: Any, cache_k: Any, cache_v: Any) -> tuple[Any, Any, Any]:
    q, k, v = _qkv(m, x)
    k, v = (lib("torch").cat(pair, 2) for pair in ((cache_k, k), (cache_v, v)))
    return _merge(m, _scores(q, k).softmax(-1) @ v), k, v


def _bias(m: Any, x: Any, bias: Any) -> Any:
    q, k, v = _qkv(m, x)
    return _merge(m, (_scores(q, k) + bias).softmax(-1) @ v)


def _sink(m: Any, x: Any, sink: Any) -> Any:
    q, k, v = _qkv(m, x)
    extra = sink.reshape(1, 4, 1, 1).expand(x.shape[0], -1, x.shape[1], -1)
    return _merge(m, lib("torch").cat([_scores(q, k), extra], -1).softmax(-1)[..., :-1] @ v)


def _value_size(m: Any, x: Any) -> Any:
    q, k, _ = _qkv(m, x)
    return (_scores(q, k).softmax(-1) @ _split(x[..., :48], 4)).transpose(1, 2).flatten(2)


def _unmerged(m: Any, x: Any) -> Any:
    q, k, v = _qkv(m, x)
    return _scores(q, k).softmax(-1) @ v


def _single(m: Any, x: Any) -> Any:
    return m.o(_scores(m.q(x), m.k(x)).softmax(-1) @ m.v(x))


def _gates(m: Any, x: Any) -> tuple[Any, Any]:
    return m.o(m.q(x) * m.k(x).softmax(-1)), m.v(x).softmax(1)


def _multi_head(m: Any, x: Any, source: Any, mask: Any) -> Any:
    return m.mha(x, source, source, attn_mask=mask, need_weights=False)[0]


def _weights_out(m: Any, x: Any, mask: Any) -> Any:
    return m.mha(x, x, x, key_padding_mask=mask)


def _encoder(m: Any, x: Any, mask: Any) -> Any:
    return m.encoder(x, src_key_padding_mask=mask)


_ONE, _TWO, _SOURCE, _CACHE = (1, 14, 72), (2, 14, 72), (1, 44, 72), (1, 4, 44, 20)
_ROWS: list[tuple[str, str, Make]] = [
    ("bool", "SELECT_V2(mask, 0, -inf), ADD", torch_block(_sdpa, {"x": _ONE, "mask": (1, 1, 14, 14)})),
    ("causal", "constant causal mask", torch_block(lambda m, x: _sdpa(m, x, is_causal=True), {"x": _ONE})),
    ("fill", "Select, batch 2, 2 blocks", torch_block(_filled, {"x": _TWO, "mask": (2, 14, 14)})),
    ("gqa", "enable_gqa, K=2", torch_block(_sdpa_gqa, {"x": _ONE}, 2)),
    ("repeat", "K and V expanded, K=2", torch_block(_repeated, {"x": _ONE}, 2)),
    ("einsum", "einsum, batch 2, V^T P^T", torch_block(_einsum, {"x": _TWO})),
    ("einsum_gqa", "einsum with K and G, rank 5", torch_block(_einsum_gqa, {"x": _ONE}, 2)),
    ("cross", "cross attention", torch_block(_cross, {"x": _ONE, "source": _SOURCE})),
    ("decode", "T=1, cache grown by CONCATENATION",
     torch_block(_decode, {"x": (1, 1, 72), "k": _CACHE, "v": _CACHE})),
    ("bias", "another bias for each head", torch_block(_bias, {"x": _ONE, "bias": (4, 14, 14)})),
    ("sink", "attention sinks", torch_block(_sink, {"x": _ONE, "sink": (4,)})),
    ("value_size", "V has another head size", torch_block(_value_size, {"x": _ONE})),
    ("unmerged", "output [B,N,T,H] leaves the graph", torch_block(_unmerged, {"x": _ONE})),
    ("mha", "nn.MultiheadAttention, cross, boolean mask",
     torch_block(_multi_head, {"x": _ONE, "source": _SOURCE, "mask": (14, 44)})),
    ("mha_weights", "nn.MultiheadAttention, weights returned",
     torch_block(_weights_out, {"x": _TWO, "mask": (2, 14)})),
    ("encoder", "nn.TransformerEncoder, batch 2", torch_block(_encoder, {"x": _TWO, "mask": (2, 14)})),
    ("single", "one head", torch_block(_single, {"x": _ONE})),
    ("gates", "softmax without attention", torch_block(_gates, {"x": _ONE})),
]  # fmt: skip

# --- transformers models as they are ---


def transformer(
    model: str,
    config: Mapping[str, Any],
    shapes: Shapes,
    attention: str = "eager",
    *,
    cache: bool | None = None,
) -> Make:
    """Convert transformers' `model` with a configuration of its class; token and mask inputs are int64."""

    def make(target: Path) -> None:
        torch, transformers = lib("torch"), lib("transformers")
        torch.manual_seed(0)
        model_class = getattr(transformers, model)
        settings = model_class.config_class(**config)
        settings._attn_implementation = attention  # noqa: SLF001, the one name that every version knows
        inner, names = model_class(settings).eval(), tuple(shapes)
        with torch.no_grad():
            for parameter in inner.parameters():
                if not parameter.any():  # a bias of zeros would be folded away
                    parameter.normal_(0.0, 0.2)
        options = {} if cache is None else {"use_cache": cache}

        def forward(_: Any, *inputs: Any) -> Any:
            return inner(**dict(zip(names, inputs, strict=True)), **options)[0]

        module = type("Whole", (torch.nn.Module,), {"forward": forward})()
        module.inner = inner
        kinds = {
            name: torch.float32 if "_features" in name or "pixel" in name else torch.int64
            for name in shapes
        }
        inputs = tuple(
            torch.ones(tuple(shape), dtype=kinds[name]) for name, shape in shapes.items()
        )
        lib("litert_torch").convert(module.eval(), inputs, strict_export=False).export(str(target))

    return make


_BASE = {
    "hidden_size": 72,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "intermediate_size": 104,
    "vocab_size": 320,
}
_IDS, _MASKED = {"input_ids": (1, 14)}, {"input_ids": (1, 14), "attention_mask": (1, 14)}
_GPT2 = {"n_embd": 72, "n_head": 4, "n_layer": 2, "vocab_size": 320}
_GEMMA = {
    **_BASE, "head_dim": 20, "use_bidirectional_attention": True, "sliding_window": 26,
    "query_pre_attn_scalar": 20, "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip
_T5 = {"d_model": 72, "d_kv": 20, "num_heads": 4, "num_layers": 2, "d_ff": 104, "vocab_size": 320}
_LATENT = {
    **_BASE, "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12, "v_head_dim": 18, "first_k_dense_replace": 2,
}  # fmt: skip
_VISION = {**_BASE, "image_size": 28, "patch_size": 7}
_SWIN = {
    "image_size": 32,
    "patch_size": 2,
    "embed_dim": 36,
    "depths": [2, 2],
    "num_heads": [2, 3],
    "window_size": 4,
}
_WHISPER = {
    "d_model": 72, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 104, "decoder_ffn_dim": 104, "vocab_size": 320,
    "max_source_positions": 44, "num_mel_bins": 20, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "decoder_start_token_id": 1,
}  # fmt: skip
_SPEECH = {"input_features": (1, 20, 88), "decoder_input_ids": (1, 14)}
_MODELS: list[tuple[str, str, Make]] = [
    ("bert", "encoder, scale after the product", transformer("BertModel", _BASE, _MASKED)),
    ("gpt2", "scale on Q and on K", transformer("GPT2Model", _GPT2, _IDS, "sdpa", cache=False)),
    ("gemma3_encoder_k1", "bidirectional, K=1, eager",
     transformer("Gemma3TextModel", {**_GEMMA, "num_key_value_heads": 1}, _MASKED, cache=False)),
    ("gemma3_encoder_k2", "bidirectional, K=2, sdpa",
     transformer("Gemma3TextModel", {**_GEMMA, "num_key_value_heads": 2}, _MASKED, "sdpa", cache=False)),
    ("t5", "relative position bias, no scale", transformer("T5EncoderModel", _T5, _MASKED)),
    ("deepseek_v3", "latent attention",
     transformer("DeepseekV3Model", _LATENT, _IDS, cache=False)),
    ("siglip", "vision, no mask",
     transformer("SiglipVisionModel", _VISION, {"pixel_values": (1, 3, 28, 28)}, "sdpa")),
    ("swin", "windows as batch, bias per head",
     transformer("SwinModel", _SWIN, {"pixel_values": (1, 3, 32, 32)})),
    ("whisper", "encoder, causal and cross attention",
     transformer("WhisperForConditionalGeneration", _WHISPER, _SPEECH, cache=False)),
]  # fmt: skip

FAMILIES = [(f"torch_{name}", about, make) for name, about, make in _ROWS]
FAMILIES += [(f"hf_{name}", about, make) for name, about, make in _MODELS]
