"""Attention beside other things: adapters, latent and integer caches, two softmaxes of one product, half precision.

Rows of FAMILIES for make_families.py: name, what is special, and what writes the file. Sizes are those of its Sizes:
N=4, H=20, T=14, S=44, hidden 72. This module converts; it names no expected result.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from families_torch import HIDDEN, lib, transformer

Make = Callable[[Path], None]
Shapes = Sequence[tuple[str, Sequence[int]]]  # dtype and shape of each input


def block(
    weights: Mapping[str, tuple[int, ...]],
    forward: Callable[..., Any],
    shapes: Shapes,
    dtype: str = "float32",
) -> Make:
    """Convert `forward(m, *inputs)`; m holds a parameter of each shape, of the type."""

    def make(target: Path) -> None:
        torch = lib("torch")
        torch.manual_seed(0)
        module = type("Block", (torch.nn.Module,), {"forward": forward})()
        for name, shape in weights.items():
            setattr(module, name, torch.nn.Parameter(torch.randn(shape) * 0.2))
        inputs = tuple(
            torch.ones(tuple(shape), dtype=getattr(torch, kind)) for kind, shape in shapes
        )
        module = module.eval().to(getattr(torch, dtype))
        lib("litert_torch").convert(module, inputs).export(str(target))

    return make


_QKVO = {"q": (HIDDEN, 80), "k": (HIDDEN, 80), "v": (HIDDEN, 80), "o": (80, HIDDEN)}
_RANK = 8
_LORA = {"qa": (HIDDEN, _RANK), "qb": (_RANK, 80), "va": (HIDDEN, _RANK), "vb": (_RANK, 80)}


def _heads(x: Any, count: int = 4) -> Any:
    return x.unflatten(-1, (count, -1)).transpose(1, 2)


def _attend(q: Any, k: Any, v: Any) -> Any:
    weights = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).softmax(-1)
    return (weights @ v).transpose(1, 2).flatten(2)


def _plain(m: Any, x: Any) -> Any:
    return _attend(_heads(x @ m.q), _heads(x @ m.k), _heads(x @ m.v)) @ m.o


def _lora(m: Any, x: Any) -> Any:
    q, v = x @ m.q + x @ m.qa @ m.qb * 2.0, x @ m.v + x @ m.va @ m.vb * 2.0
    return _attend(_heads(q), _heads(x @ m.k), _heads(v)) @ m.o


def _lora_inputs(m: Any, x: Any, qa: Any, qb: Any, va: Any, vb: Any) -> Any:
    return (
        _attend(_heads(x @ m.q + x @ qa @ qb), _heads(x @ m.k), _heads(x @ m.v + x @ va @ vb)) @ m.o
    )


def _absorbed(m: Any, x: Any, latent: Any, rope: Any) -> Any:
    """Decode of latent attention: queries go into the latent space, values come out of it, one latent for all heads."""
    einsum = lib("torch").einsum
    q = (x @ m.q).unflatten(-1, (4, 20))
    to_latent = einsum("bthd,hdc->bthc", q[..., :12], m.up_k)
    scores = einsum("bthc,bsc->bhts", to_latent, latent) + einsum(
        "bthr,bsr->bhts", q[..., 12:], rope
    )
    out = einsum("bhts,bsc->bthc", (scores * 20**-0.5).softmax(-1), latent)
    return einsum("bthc,hcv->bthv", out, m.up_v).flatten(2) @ m.o


def _integer_cache(m: Any, x: Any, cache_k: Any, cache_v: Any) -> tuple[Any, Any, Any]:
    """Keys and values of the past as int8 codes of one scale; the new ones go out as such."""
    torch, step = lib("torch"), 0.02
    q, new = _heads(x @ m.q), [_heads(x @ w, 2) for w in (m.k2, m.v2)]
    codes = [torch.clamp(torch.round(part / step), -128, 127).to(torch.int8) for part in new]
    k, v = (
        torch.cat([past, code], 2).float() * step
        for past, code in zip((cache_k, cache_v), codes, strict=True)
    )
    k, v = (part.repeat_interleave(2, 1) for part in (k, v))
    return _attend(q, k, v) @ m.o, codes[0], codes[1]


def _two_softmaxes(m: Any, x: Any, near: Any, far: Any) -> Any:
    """Two masks over one product of scores."""
    q, k, v = (_heads(x @ w) for w in (m.q, m.k, m.v))
    scores = q @ k.transpose(-1, -2) * 20**-0.5
    both = ((scores + near).softmax(-1) @ v, (scores + far).softmax(-1) @ v)
    return (both[0] + both[1]).transpose(1, 2).flatten(2) @ m.o


def _two_softmaxes_joined(m: Any, x: Any, near: Any, far: Any) -> Any:
    q, k, v = (_heads(x @ w) for w in (m.q, m.k, m.v))
    scores = q @ k.transpose(-1, -2) * 20**-0.5
    both = [((scores + mask).softmax(-1) @ v).transpose(1, 2).flatten(2) for mask in (near, far)]
    return both[0] @ m.o, both[1] @ m.o


def _folded_rows(m: Any, q: Any, k: Any, v: Any, mask: Any) -> Any:
    """The G query heads of a key head as rows, in and out; only the repeated mask tells."""
    mask = lib("torch").cat([mask] * 4, 2)
    return ((q @ k.transpose(-1, -2) * 20**-0.5 + mask).softmax(-1)) @ v + m.o


def _rows_alone(m: Any, q: Any, k: Any, v: Any) -> Any:
    return ((q @ k.transpose(-1, -2) * 20**-0.5).softmax(-1)) @ v + m.o


_X, _MASK = ("float32", (1, 14, HIDDEN)), ("float32", (1, 1, 14, 14))
_ADAPTERS = [("float32", shape) for shape in _LORA.values()]
_CACHE = ("int8", (1, 2, 44, 20))
_ROWS, _KEYS = ("float32", (1, 1, 56, 20)), ("float32", (1, 1, 44, 20))
_BIAS = {"o": (20,)}
_GEMMA3N = {
    "vocab_size": 320, "vocab_size_per_layer_input": 320, "hidden_size": 72, "hidden_size_per_layer_input": 12,
    "intermediate_size": [104] * 4, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 20, "laurel_rank": 8, "num_kv_shared_layers": 2, "sliding_window": 26,
    "layer_types": ["sliding_attention", "full_attention"] * 2, "activation_sparsity_pattern": [0.0] * 4,
}  # fmt: skip
_NEXT = {
    "vocab_size": 320, "hidden_size": 72, "intermediate_size": 104, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 20, "linear_key_head_dim": 12, "linear_value_head_dim": 12,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "num_experts": 0,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
_IDS = {"input_ids": (1, 14)}

FAMILIES: list[tuple[str, str, Make]] = [
    ("torch_half", "everything float16", block(_QKVO, _plain, [("float16", (1, 14, HIDDEN))], "float16")),
    ("torch_lora", "LoRA adapters on queries and values", block(_QKVO | _LORA, _lora, [_X])),
    ("torch_lora_inputs", "LoRA adapters come in", block(_QKVO, _lora_inputs, [_X, *_ADAPTERS])),
    ("torch_mla_absorbed", "latent attention, absorbed decode: one latent for all heads",
     block({"q": (HIDDEN, 80), "up_k": (4, 12, 16), "up_v": (4, 16, 20), "o": (80, HIDDEN)}, _absorbed,
           [("float32", (1, 1, HIDDEN)), ("float32", (1, 44, 16)), ("float32", (1, 44, 8))])),
    ("torch_int8_cache", "caches of int8 codes, K=2",
     block(_QKVO | {"k2": (HIDDEN, 40), "v2": (HIDDEN, 40)}, _integer_cache,
           [("float32", (1, 1, HIDDEN)), _CACHE, _CACHE])),
    ("torch_two_softmaxes", "two softmaxes of one product, summed", block(_QKVO, _two_softmaxes, [_X, _MASK, _MASK])),
    ("torch_two_softmaxes_apart", "two softmaxes of one product, two results",
     block(_QKVO, _two_softmaxes_joined, [_X, _MASK, _MASK])),
    ("torch_folded_mask", "query heads as rows, in and out; the mask repeats",
     block(_BIAS, _folded_rows, [_ROWS, _KEYS, _KEYS, ("float32", (1, 1, 14, 44))])),
    ("torch_folded", "query heads as rows, in and out; nothing tells",
     block(_BIAS, _rows_alone, [_ROWS, _KEYS, _KEYS])),
    ("hf_gemma3n", "AltUp, shared caches", transformer("Gemma3nTextModel", _GEMMA3N, _IDS, cache=False)),
    ("hf_qwen3_next", "gated delta net beside gated attention",
     transformer("Qwen3NextModel", _NEXT, _IDS, cache=False)),
]  # fmt: skip
