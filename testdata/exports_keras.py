"""Attention that Keras 3 and keras-hub write: rows for `make_families.py --from exports_keras`.

Needs tensorflow and keras-hub in an environment of their own (benchmarks/exports.py makes it). Random weights;
N=4, K=2, H=20, T=14 where a family has them. This module converts; it names no expected result.
"""

from pathlib import Path
from typing import Any

from families_tensorflow import (
    HEAD_SIZE,
    HEADS,
    Make,
    Spec,
    Weights,
    _save_signature,
    keras_block,
    lib,
    tensorflow_block,
)


def backbone(name: str, *inputs: tuple[str, Spec], **options: Any) -> Make:
    """The hidden states of a keras-hub backbone; `inputs` are its own names, each with dtype and shape."""

    def make(target: Path) -> None:
        tf, hub = lib("tensorflow"), lib("keras_hub")
        lib("keras").utils.set_random_seed(0)
        model = getattr(hub.models, name)(**options)
        variables = [variable.value for variable in model.variables]
        draw = tf.random.Generator.from_seed(7)
        for variable in variables:
            if variable.shape.rank > 1:
                variable.assign(draw.normal(variable.shape, stddev=0.2))

        def call(*tensors: Any) -> Any:
            made = model({key: tensor for (key, _), tensor in zip(inputs, tensors, strict=True)})
            return list(tf.nest.flatten(made))

        _save_signature(target, variables, call, [spec for _, spec in inputs])

    return make


def _scores(layers: Any, x: Any, mask: Any) -> Any:
    """Returned scores and a mask."""
    return layers.MultiHeadAttention(HEADS, HEAD_SIZE)(
        x, x, attention_mask=mask, return_attention_scores=True
    )


def _dropout(layers: Any, x: Any, mask: Any) -> Any:
    return layers.MultiHeadAttention(HEADS, HEAD_SIZE, dropout=0.1)(x, x, attention_mask=mask)


def _axes(layers: Any, x: Any) -> Any:
    """Attention over two axes of a picture."""
    return layers.MultiHeadAttention(HEADS, HEAD_SIZE, attention_axes=(1, 2))(x, x)


def _one_axis(layers: Any, x: Any) -> Any:
    """Attention over the rows of a picture, every column by itself."""
    return layers.MultiHeadAttention(HEADS, HEAD_SIZE, attention_axes=(1,))(x, x)


def _grouped(layers: Any, x: Any, mask: Any) -> Any:
    return layers.GroupQueryAttention(HEAD_SIZE, HEADS, 2, dropout=0.1)(
        x, x, attention_mask=mask, return_attention_scores=True
    )


def _softmax_layer(layers: Any, q: Any, k: Any, v: Any, mask: Any) -> Any:
    """Keras 3's Softmax layer, which fills what is masked with 0 afterwards."""
    scores = lib("keras").ops.einsum("bnth,bnsh->bnts", q, k)
    return lib("keras").ops.einsum("bnts,bnsh->btnh", layers.Softmax()(scores, mask=mask), v)


def _folded(w: Weights, x: Any) -> Any:
    """One key head: the query heads are rows beside the sequence, and the products are of rank 2."""
    q = w.tf.reshape(w.heads(x, "q"), (x.shape[1] * HEADS, HEAD_SIZE)) * HEAD_SIZE**-0.5
    k, v = (w.heads(x, name)[0, :, 0] for name in "kv")
    p = w.tf.nn.softmax(w.tf.matmul(q, k, transpose_b=True))
    return w.output(w.tf.reshape(w.tf.matmul(p, v), (1, x.shape[1], HEADS, HEAD_SIZE)))


_F, _I, _B = "float32", "int32", "bool"
_TOKENS = (("token_ids", (_I, (1, 14))), ("padding_mask", (_B, (1, 14))))
_SEGMENTS = (*_TOKENS, ("segment_ids", (_I, (1, 14))))
_DECODER: dict[str, Any] = {
    "vocabulary_size": 320,
    "num_layers": 2,
    "num_query_heads": 4,
    "num_key_value_heads": 2,
}
_PLAIN: dict[str, Any] = {
    "vocabulary_size": 320, "num_layers": 2, "num_heads": 4, "hidden_dim": 80, "intermediate_dim": 104,
    "max_sequence_length": 64,
}  # fmt: skip
_WIDE: dict[str, Any] = {"hidden_dim": 80, "intermediate_dim": 104}
_HEAD: Spec = (_F, (1, 4, 14, 20))
_X: Spec = (_F, (1, 14, 72))
_MASK: Spec = (_B, (1, 14, 14))

FAMILIES: list[tuple[str, str, Make]] = [
    ("hub_gemma", "Gemma, K=2", backbone("GemmaBackbone", *_TOKENS, **_DECODER, **_WIDE, head_dim=20)),
    ("hub_gemma3", "Gemma3, K=2",
     backbone("Gemma3Backbone", *_TOKENS, **_DECODER, **_WIDE, head_dim=20, image_size=16, vision_encoder=None,
              use_query_key_norm=True, sliding_window_size=8, use_sliding_window_attention=True)),
    ("hub_llama", "Llama, K=2", backbone("LlamaBackbone", *_TOKENS, **_DECODER, **_WIDE)),
    ("hub_mistral", "Mistral, K=2, a window",
     backbone("MistralBackbone", *_TOKENS, **_DECODER, **_WIDE, sliding_window=8)),
    ("hub_qwen", "Qwen2, K=2", backbone("QwenBackbone", *_TOKENS, **_DECODER, **_WIDE)),
    ("hub_gpt2", "GPT-2", backbone("GPT2Backbone", *_TOKENS, **_PLAIN)),
    ("hub_opt", "OPT", backbone("OPTBackbone", *_TOKENS, **_PLAIN)),
    ("hub_bert", "BERT", backbone("BertBackbone", *_SEGMENTS, **_PLAIN)),
    ("hub_roberta", "RoBERTa", backbone("RobertaBackbone", *_TOKENS, **_PLAIN)),
    ("hub_deberta", "DeBERTa-v3: relative positions",
     backbone("DebertaV3Backbone", *_TOKENS, **_PLAIN, bucket_size=8)),
    ("hub_falcon", "Falcon, ALiBi",
     backbone("FalconBackbone", *_TOKENS, vocabulary_size=320, num_layers=2, num_attention_heads=4, hidden_dim=80,
              intermediate_dim=104)),
    ("hub_whisper", "Whisper",
     backbone("WhisperBackbone", ("encoder_features", (_F, (1, 28, 16))), ("decoder_token_ids", (_I, (1, 14))),
              ("decoder_padding_mask", (_B, (1, 14))), vocabulary_size=320, num_layers=2, num_heads=4,
              hidden_dim=80, intermediate_dim=104, num_mels=16, max_encoder_sequence_length=28,
              max_decoder_sequence_length=14)),
    ("hub_vit", "ViT",
     backbone("ViTBackbone", ("images", (_F, (1, 24, 24, 3))), image_shape=(24, 24, 3), patch_size=8, num_layers=2,
              num_heads=4, hidden_dim=80, mlp_dim=104)),
    ("keras_scores", "MultiHeadAttention, scores returned, mask", keras_block(_scores, _X, _MASK)),
    ("keras_dropout", "MultiHeadAttention with dropout, mask", keras_block(_dropout, _X, _MASK)),
    ("keras_axes", "MultiHeadAttention over two axes", keras_block(_axes, (_F, (1, 6, 5, 72)))),
    ("keras_one_axis", "MultiHeadAttention over one of two axes", keras_block(_one_axis, (_F, (1, 6, 5, 72)))),
    ("keras_gqa_scores", "GroupQueryAttention, scores returned, mask", keras_block(_grouped, _X, _MASK)),
    ("tf_folded", "K=1, heads folded into rows, FULLY_CONNECTED with computed weights", tensorflow_block(_folded, _X)),
    ("keras_softmax", "Softmax layer with a mask",
     keras_block(_softmax_layer, _HEAD, _HEAD, _HEAD, (_B, (1, 1, 14, 14)))),
]  # fmt: skip
