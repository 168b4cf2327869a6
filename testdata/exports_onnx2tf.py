"""Attention that PyTorch's ONNX export and onnx2tf write: rows for `make_families.py --from exports_onnx2tf`.

Needs onnx2tf, tf-keras, onnx, onnxscript, transformers and torch, whose versions suit no other exporter's: an
environment of its own (benchmarks/exports.py makes it). Random weights; N=4, K=2, H=20, T=14 where a family has
them. This module converts; it names no expected result.
"""

import importlib
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

Make = Callable[[Path], None]
LENGTH, HIDDEN, HEADS, HEAD_SIZE = 14, 80, 4, 20


def lib(name: str) -> Any:
    """Import a heavy library at the moment it is needed."""
    return importlib.import_module(name)


def through_onnx(
    model: Any, inputs: tuple[Any, ...], target: Path, *, names: list[str] | None = None
) -> None:
    """Export a torch module to ONNX, and that to .tflite."""
    torch = lib("torch")
    torch.manual_seed(0)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(
                parameter, 0.0, 0.2
            )  # as small as usual every softmax is all but uniform
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        file = Path(folder) / "model.onnx"
        torch.onnx.export(
            model.eval(), inputs, str(file), input_names=names, dynamo=True, external_data=False
        )
        keep = {"keep_shape_absolutely_input_names": names} if names else {}
        lib("onnx2tf").convert(
            input_onnx_file_path=str(file), output_folder_path=folder, non_verbose=True,
            copy_onnx_input_output_names_to_tflite=True, disable_model_save=False, **keep,
        )  # fmt: skip
        shutil.move(Path(folder) / "model_float32.tflite", target)


# --- transformers ---


def hugging_face(config: str, model: str, **options: Any) -> Make:
    """The last hidden state of a model on 14 tokens (or what `hugging_face_on` is given)."""
    return hugging_face_on(None, config, model, **options)


def hugging_face_on(shape: tuple[int, ...] | None, config: str, model: str, **options: Any) -> Make:
    """The same on floats of a shape, images or sounds."""

    def make(target: Path) -> None:
        torch, transformers = lib("torch"), lib("transformers")
        attention = options.pop("attention", "sdpa")
        cfg = getattr(transformers, config)(**options)
        cfg._attn_implementation = attention  # noqa: SLF001  as `from_pretrained(attn_implementation=..)` does
        inner = getattr(transformers, model)(cfg)

        class Last(torch.nn.Module):  # type: ignore[name-defined,misc]
            def __init__(self) -> None:
                super().__init__()
                self.inner = inner

            def forward(self, x: Any) -> Any:
                caches = (
                    {"use_cache": False}
                    if hasattr(inner.config, "use_cache") and shape is None
                    else {}
                )
                return self.inner(x, **caches)[0]

        x = torch.ones((1, LENGTH), dtype=torch.int64) if shape is None else torch.randn(shape)
        through_onnx(Last(), (x,), target, names=["x"])

    return make


_DECODER = {
    "vocab_size": 320, "hidden_size": 80, "intermediate_size": 104, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0,
}  # fmt: skip
_ENCODER = {
    "vocab_size": 320, "hidden_size": 80, "intermediate_size": 104, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 128, "pad_token_id": 0,
}  # fmt: skip
_IMAGE = {
    "hidden_size": 80, "intermediate_size": 104, "num_hidden_layers": 2, "num_attention_heads": 4,
    "image_size": 24, "patch_size": 8,
}  # fmt: skip

# --- torch modules ---


def torch_module(build: Callable[[Any], Any], *shapes: tuple[int, ...]) -> Make:
    """The module that `build(torch)` gives, on random inputs of these shapes."""

    def make(target: Path) -> None:
        torch = lib("torch")
        inputs = tuple(torch.randn(shape) for shape in shapes)
        through_onnx(build(torch), inputs, target, names=[f"x{i}" for i in range(len(shapes))])

    return make


def _functional(call: Callable[..., Any], *widths: tuple[int, int]) -> Callable[[Any], Any]:
    """A module of Linear layers of these widths that runs `call(torch, layers, *inputs)`."""

    def build(torch: Any) -> Any:
        class Module(torch.nn.Module):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__()
                self.layers = torch.nn.ModuleList(torch.nn.Linear(*width) for width in widths)

            def forward(self, *inputs: Any) -> Any:
                return call(torch, self.layers, *inputs)

        return Module()

    return build


def _mha(torch: Any, *, weights: bool, mask: bool = False) -> Any:
    class Module(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.attention = torch.nn.MultiheadAttention(HIDDEN, HEADS, batch_first=True)

        def forward(self, x: Any, *masks: Any) -> Any:
            given = masks[0] if mask else None
            y, p = self.attention(
                x, x, x, attn_mask=given, need_weights=weights, average_attn_weights=not weights
            )
            return (y, p) if weights else y

    return Module()


def _heads(x: Any, size: int = HEAD_SIZE) -> Any:
    return x.view(x.shape[0], x.shape[1], -1, size).transpose(1, 2)


def _merged(x: Any) -> Any:
    return x.transpose(1, 2).reshape(x.shape[0], x.shape[2], -1)


def _masked_afterwards(torch: Any, layers: Any, x: Any, mask: Any) -> Any:
    """WeNet, NeMo: masked scores, and the probabilities filled once more."""
    q, k, v = (_heads(layer(x)) for layer in layers[:3])
    hidden = mask[:, None] > 0.5
    scores = (q @ k.transpose(-1, -2) * HEAD_SIZE**-0.5).masked_fill(hidden, -1e4)
    probabilities = scores.softmax(-1).masked_fill(hidden, 0.0)
    return layers[3](_merged(probabilities @ v))


def _relative_values(torch: Any, layers: Any, x: Any, table: Any) -> Any:
    """VITS, Shaw: the probabilities also weigh vectors of relative positions, `[T, S, H]`, shared by heads."""
    q, k, v = (_heads(layer(x)) for layer in layers[:3])
    p = (q @ k.transpose(-1, -2) * HEAD_SIZE**-0.5).softmax(-1)
    relative = torch.einsum("bnts,tsh->bnth", p, table)
    return layers[3](_merged(p @ v + relative))


def _two_values(torch: Any, layers: Any, x: Any) -> Any:
    q, k, v, w = (_heads(layer(x)) for layer in layers[:4])
    p = (q @ k.transpose(-1, -2) * HEAD_SIZE**-0.5).softmax(-1)
    return layers[4](torch.cat([_merged(p @ v), _merged(p @ w)], -1))


def _two_sizes_of_values(torch: Any, layers: Any, x: Any) -> Any:
    q, k, v = (_heads(layer(x)) for layer in layers[:3])
    w = _heads(layers[3](x), 12)
    p = (q @ k.transpose(-1, -2) * HEAD_SIZE**-0.5).softmax(-1)
    return layers[4](torch.cat([_merged(p @ v), _merged(p @ w)], -1))


def _two_scores(torch: Any, layers: Any, x: Any) -> Any:
    """Content and position scores, summed; as in disentangled attention."""
    q, k, v, a, b = (_heads(layer(x)) for layer in layers[:5])
    scores = q @ k.transpose(-1, -2) + a @ b.transpose(-1, -2)
    return layers[5](_merged((scores * HEAD_SIZE**-0.5).softmax(-1) @ v))


def _shifted(torch: Any, layers: Any, x: Any, positions: Any) -> Any:
    """Transformer-XL, Conformer, Parakeet: scores by relative position, shifted by padding and cutting them."""
    q, k, v = (_heads(layer(x)) for layer in layers[:3])
    r = _heads(layers[3](positions))
    b, n, t, _ = q.shape
    scores = torch.nn.functional.pad(q @ r.transpose(-1, -2), (1, 0)).view(b, n, 2 * t, t)
    scores = scores[:, :, 1:].reshape(b, n, t, 2 * t - 1)[..., :t]
    p = ((q @ k.transpose(-1, -2) + scores) * HEAD_SIZE**-0.5).softmax(-1)
    return layers[4](_merged(p @ v))


def _difference(torch: Any, layers: Any, x: Any) -> Any:
    """Differential attention: the difference of two softmaxes weighs the values."""
    q1, k1, q2, k2, v = (_heads(layer(x)) for layer in layers[:5])
    p1 = (q1 @ k1.transpose(-1, -2) * HEAD_SIZE**-0.5).softmax(-1)
    p2 = (q2 @ k2.transpose(-1, -2) * HEAD_SIZE**-0.5).softmax(-1)
    return layers[5](_merged((p1 - 0.3 * p2) @ v))


def _xcit(torch: Any, layers: Any, x: Any) -> Any:
    """Cross-covariance attention: channels weigh channels, head by head."""
    q, k, v = (_heads(layer(x)).transpose(-1, -2) for layer in layers[:3])
    q, k = (t / (t * t).sum(-1, keepdim=True).sqrt() for t in (q, k))
    p = (q @ k.transpose(-1, -2)).softmax(-1)
    return layers[3]((p @ v).permute(0, 3, 1, 2).reshape(x.shape))


def _chunked(torch: Any, layers: Any, x: Any) -> Any:
    """Heads by cat(chunk): stacked along the batch, as in the Set Transformer."""
    q, k, v = (torch.cat(layer(x).chunk(HEADS, -1), 0) for layer in layers[:3])
    p = (q @ k.transpose(-1, -2) * HEAD_SIZE**-0.5).softmax(-1)
    return layers[3](torch.cat((p @ v).chunk(HEADS, 0), -1))


def _sigmoid(torch: Any, layers: Any, x: Any) -> Any:
    q, k, v = (_heads(layer(x)) for layer in layers[:3])
    p = torch.sigmoid(q @ k.transpose(-1, -2) * HEAD_SIZE**-0.5 - 2.0)
    return layers[3](_merged(p @ v))


def _relu(torch: Any, layers: Any, x: Any) -> Any:
    q, k, v = (_heads(layer(x)) for layer in layers[:3])
    p = torch.relu(q @ k.transpose(-1, -2) * HEAD_SIZE**-0.5) / LENGTH
    return layers[3](_merged(p @ v))


def _normalized_late(torch: Any, layers: Any, x: Any) -> Any:
    """Normalised after the value product."""
    q, k, v = (_heads(layer(x)) for layer in layers[:3])
    scores = q @ k.transpose(-1, -2) * HEAD_SIZE**-0.5
    e = (scores - scores.amax(-1, keepdim=True)).exp()
    return layers[3](_merged((e @ v) / e.sum(-1, keepdim=True)))


def _log_softmax(torch: Any, layers: Any, x: Any) -> Any:
    q, k, v = (_heads(layer(x)) for layer in layers[:3])
    p = (q @ k.transpose(-1, -2) * HEAD_SIZE**-0.5).log_softmax(-1).exp()
    return layers[3](_merged(p @ v))


def _linear_attention(torch: Any, layers: Any, x: Any) -> Any:
    q, k, v = (_heads(layer(x)) for layer in layers[:3])
    q, k = (torch.nn.functional.elu(t) + 1.0 for t in (q, k))
    return layers[3](_merged(q @ (k.transpose(-1, -2) @ v)))


def _talking_heads(torch: Any, layers: Any, x: Any) -> Any:
    """Scores and probabilities are mixed over the heads by a matrix: these heads are not independent."""
    q, k, v = (_heads(layer(x)) for layer in layers[:3])
    scores = layers[4]((q @ k.transpose(-1, -2) * HEAD_SIZE**-0.5).permute(0, 2, 3, 1)).permute(
        0, 3, 1, 2
    )
    p = layers[5](scores.softmax(-1).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
    return layers[3](_merged(p @ v))


_X = (1, LENGTH, HIDDEN)
_SQUARE = (HIDDEN, HIDDEN)


def _linears(call: Callable[..., Any], count: int, *more: tuple[int, int]) -> Callable[[Any], Any]:
    return _functional(call, *(_SQUARE,) * count, *more)


FAMILIES: list[tuple[str, str, Make]] = [
    ("o2t_bert", "BERT", hugging_face("BertConfig", "BertModel", **_ENCODER)),
    ("o2t_bert_eager", "BERT, attention written out",
     hugging_face("BertConfig", "BertModel", **_ENCODER, attention="eager")),
    ("o2t_gpt2", "GPT-2",
     hugging_face("GPT2Config", "GPT2Model", vocab_size=320, n_embd=80, n_layer=2, n_head=4, n_positions=64)),
    ("o2t_llama", "Llama, K=2", hugging_face("LlamaConfig", "LlamaModel", **_DECODER)),
    ("o2t_gemma3", "Gemma3, K=2, two kinds of layers",
     hugging_face("Gemma3TextConfig", "Gemma3TextModel", **_DECODER, head_dim=20, sliding_window=8,
                  layer_types=["sliding_attention", "full_attention"])),
    ("o2t_qwen3", "Qwen3, K=2", hugging_face("Qwen3Config", "Qwen3Model", **_DECODER, head_dim=20)),
    ("o2t_falcon", "Falcon, K=1 by multi-query",
     hugging_face("FalconConfig", "FalconModel", vocab_size=320, hidden_size=80, num_hidden_layers=2,
                  num_attention_heads=4, multi_query=True, new_decoder_architecture=False, alibi=False)),
    ("o2t_deepseek_v3", "DeepSeek-V3: MLA",
     hugging_face("DeepseekV3Config", "DeepseekV3Model", **{**_DECODER, "num_key_value_heads": 4},
                  q_lora_rank=24, kv_lora_rank=28, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=16,
                  first_k_dense_replace=2)),
    ("o2t_diffllama", "DiffLlama: differential attention",
     hugging_face("DiffLlamaConfig", "DiffLlamaModel", **_DECODER, attention="eager")),
    ("o2t_t5", "T5 encoder: bias by relative position",
     hugging_face("T5Config", "T5EncoderModel", vocab_size=320, d_model=80, d_kv=20, d_ff=104, num_layers=2,
                  num_heads=4, attention="eager")),
    ("o2t_vit", "ViT", hugging_face_on((1, 3, 24, 24), "ViTConfig", "ViTModel", **_IMAGE)),
    ("o2t_mha", "nn.MultiheadAttention", torch_module(lambda torch: _mha(torch, weights=False), _X)),
    ("o2t_mha_mask", "the same, additive mask",
     torch_module(lambda torch: _mha(torch, weights=False, mask=True), _X, (LENGTH, LENGTH))),
    ("o2t_mha_weights", "the same, weights returned",
     torch_module(lambda torch: _mha(torch, weights=True), _X)),
    ("o2t_encoder_layer", "nn.TransformerEncoderLayer",
     torch_module(lambda torch: torch.nn.TransformerEncoderLayer(HIDDEN, HEADS, 104, batch_first=True), _X)),
    ("o2t_decoder_layer", "nn.TransformerDecoderLayer",
     torch_module(lambda torch: torch.nn.TransformerDecoderLayer(HIDDEN, HEADS, 104, batch_first=True),
                  _X, (1, 44, HIDDEN))),
    ("o2t_filled", "probabilities filled by the mask",
     torch_module(_linears(_masked_afterwards, 4), _X, (1, LENGTH, LENGTH))),
    ("o2t_relative_values", "probabilities read twice",
     torch_module(_linears(_relative_values, 4), _X, (LENGTH, LENGTH, HEAD_SIZE))),
    ("o2t_two_values", "two value products",
     torch_module(_linears(_two_values, 4, (2 * HIDDEN, HIDDEN)), _X)),
    ("o2t_two_value_sizes", "two value products of different size",
     torch_module(_functional(_two_sizes_of_values, *(_SQUARE,) * 3, (HIDDEN, 48), (128, HIDDEN)), _X)),
    ("o2t_two_scores", "two score products", torch_module(_linears(_two_scores, 6), _X)),
    ("o2t_shifted", "relative positions, shifted",
     torch_module(_linears(_shifted, 5), _X, (1, 2 * LENGTH - 1, HIDDEN))),
    ("o2t_difference", "two softmaxes, one value product", torch_module(_linears(_difference, 6), _X)),
    ("o2t_xcit", "channels as keys", torch_module(_linears(_xcit, 4), _X)),
    ("o2t_chunked", "heads by cat(chunk)", torch_module(_linears(_chunked, 4), _X)),
    ("o2t_sigmoid", "sigmoid instead of softmax", torch_module(_linears(_sigmoid, 4), _X)),
    ("o2t_relu", "ReLU instead of softmax", torch_module(_linears(_relu, 4), _X)),
    ("o2t_late", "normalised after the value product", torch_module(_linears(_normalized_late, 4), _X)),
    ("o2t_log_softmax", "exp of LOG_SOFTMAX", torch_module(_linears(_log_softmax, 4), _X)),
    ("o2t_linear", "linear attention", torch_module(_linears(_linear_attention, 4), _X)),
    ("o2t_talking", "talking heads", torch_module(_linears(_talking_heads, 4, (4, 4), (4, 4)), _X)),
]  # fmt: skip
