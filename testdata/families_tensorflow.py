"""Attention that TensorFlow, Keras and JAX (through jax2tf) write with TensorFlow Lite's converter.

Rows of FAMILIES for make_families.py: name, what is special, and what writes the file. Sizes are those of its
Sizes: N=4, K=2, H=20, T=14, S=44, hidden 72. This module converts; it names no expected result.
"""

import importlib
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Make = Callable[[Path], None]
Spec = tuple[str, Sequence[int | None]]  # dtype and shape; None is a dynamic dimension
HIDDEN, HEADS, HEAD_SIZE = 72, 4, 20
MASKED = -2.3819763e38


def lib(name: str) -> Any:
    """Import a heavy library at the moment it is needed."""
    return importlib.import_module(name)


def _save(target: Path, converter: Any) -> None:
    target.write_bytes(converter.convert())


# --- hand-written TensorFlow ---


class Weights:
    """Projections of a hand-written block: `heads(x, "q")` is `[B,T,N,H]`, `output(y)` is `[B,T,hidden]`."""

    def __init__(self) -> None:
        """Draw the same random weights each time."""
        self.tf = lib("tensorflow")
        wide = HEADS * HEAD_SIZE
        shapes = {
            "q": (HIDDEN, wide),
            "k": (HIDDEN, wide),
            "v": (HIDDEN, wide),
            "o": (wide, HIDDEN),
        }
        self.weights = {
            name: self.tf.Variable(self.tf.random.stateless_normal(shape, (7, seed)))
            for seed, (name, shape) in enumerate(shapes.items())
        }

    def heads(self, x: Any, name: str) -> Any:
        """Project `[B,T,hidden]` to `[B,T,N,H]`."""
        return self.tf.reshape(x @ self.weights[name], (x.shape[0], x.shape[1], HEADS, HEAD_SIZE))

    def first(self, x: Any, name: str) -> Any:
        """Project `[B,T,hidden]` to `[B,N,T,H]`."""
        return self.tf.transpose(self.heads(x, name), (0, 2, 1, 3))

    def output(self, y: Any) -> Any:
        """Merge `[B,T,N,H]` and project it back."""
        return self.tf.reshape(y, (y.shape[0], y.shape[1], HEADS * HEAD_SIZE)) @ self.weights["o"]

    def last(self, y: Any) -> Any:
        """Merge `[B,N,T,H]` and project it back."""
        return self.output(self.tf.transpose(y, (0, 2, 1, 3)))


def _save_signature(
    target: Path, owner: Any, call: Callable[..., Any], specs: Sequence[Spec]
) -> None:
    """Convert `call` through a saved model that holds `owner`'s variables; its one signature has fixed shapes."""
    tf = lib("tensorflow")
    module = tf.Module()
    module.owner = owner
    inputs = [
        tf.TensorSpec(shape, getattr(tf, kind), f"x{i}") for i, (kind, shape) in enumerate(specs)
    ]

    def outputs(*tensors: Any) -> dict[str, Any]:
        made = call(*tensors)
        return {
            f"y{i}": y for i, y in enumerate(made if isinstance(made, tuple | list) else (made,))
        }

    signature = tf.function(outputs, autograph=False).get_concrete_function(*inputs)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        tf.saved_model.save(module, folder, signatures={"serving_default": signature})
        _save(target, tf.lite.TFLiteConverter.from_saved_model(folder))


def tensorflow_block(build: Callable[..., Any], *specs: Spec) -> Make:
    """Convert `build(Weights(), *inputs)`."""

    def make(target: Path) -> None:
        weights = Weights()
        _save_signature(target, weights.weights, lambda *x: build(weights, *x), specs)

    return make


def _einsum(w: Weights, x: Any) -> Any:
    scores = w.tf.einsum("btnh,bsnh->bnts", w.heads(x, "q") * HEAD_SIZE**-0.5, w.heads(x, "k"))
    return w.output(w.tf.einsum("bnts,bsnh->btnh", w.tf.nn.softmax(scores), w.heads(x, "v")))


def _matmul(w: Weights, x: Any) -> Any:
    scores = w.tf.matmul(w.first(x, "q"), w.first(x, "k"), transpose_b=True) * HEAD_SIZE**-0.5
    return w.last(w.tf.nn.softmax(scores) @ w.first(x, "v"))


def _cross(w: Weights, x: Any, source: Any, mask: Any) -> Any:
    scores = w.tf.matmul(w.first(x, "q"), w.first(source, "k") * HEAD_SIZE**-0.5, transpose_b=True)
    return w.last(w.tf.nn.softmax(scores + mask) @ w.first(source, "v"))


def _select(w: Weights, x: Any, mask: Any) -> Any:
    for _ in range(2):
        scores = w.tf.matmul(w.first(x, "q") * HEAD_SIZE**-0.5, w.first(x, "k"), transpose_b=True)
        scores = w.tf.where(w.tf.not_equal(w.tf.expand_dims(mask, 1), 0), scores, -1e9)
        x += w.last(w.tf.nn.softmax(scores) @ w.first(x, "v"))
    return x


def _logical(w: Weights, x: Any, causal: Any, valid: Any) -> Any:
    hidden = w.tf.expand_dims(w.tf.logical_not(w.tf.logical_and(causal, valid)), 1)
    scores = w.tf.matmul(w.first(x, "q") * HEAD_SIZE**-0.5, w.first(x, "k"), transpose_b=True)
    return w.last(w.tf.nn.softmax(w.tf.where(hidden, -1e9, scores)) @ w.first(x, "v"))


def _additive(w: Weights, x: Any, valid: Any) -> Any:
    mask = w.tf.cast(w.tf.logical_not(valid), w.tf.float32)[:, None, None] * -100.0
    scores = w.tf.matmul(w.first(x, "q") * HEAD_SIZE**-0.5, w.first(x, "k"), transpose_b=True)
    return w.last(w.tf.nn.softmax(scores + mask) @ w.first(x, "v"))


def _decode(w: Weights, x: Any, cache_k: Any, cache_v: Any, mask: Any) -> tuple[Any, Any, Any]:
    k = w.tf.concat([cache_k, w.first(x, "k")], 2)
    v = w.tf.concat([cache_v, w.first(x, "v")], 2)
    scores = w.tf.matmul(w.first(x, "q"), k * HEAD_SIZE**-0.5, transpose_b=True) + mask
    return w.last(w.tf.nn.softmax(scores) @ v), k, v


def _transposed_query(w: Weights, x: Any, k: Any, v: Any) -> Any:
    q = w.tf.transpose(w.heads(x, "q"), (0, 2, 3, 1))
    scores = w.tf.matmul(q, k, transpose_a=True) * HEAD_SIZE**-0.5
    return w.last(w.tf.matmul(w.tf.nn.softmax(scores), v, transpose_b=True))


def _transposed_scores(w: Weights, x: Any) -> Any:
    scores = w.tf.matmul(w.first(x, "k"), w.first(x, "q"), transpose_b=True)
    weights = w.tf.nn.softmax(scores, axis=2)
    return w.last(w.tf.matmul(weights, w.first(x, "v"), transpose_a=True))


# --- Keras ---


def keras_block(build: Callable[..., Any], *specs: Spec, fixed: bool = True) -> Make:
    """Convert the model whose output is `build(keras.layers, *inputs)`; `fixed` pins the batch dimension."""

    def make(target: Path) -> None:
        tf, keras = lib("tensorflow"), lib("keras")
        keras.utils.set_random_seed(0)
        inputs = [keras.Input(batch_shape=tuple(shape), dtype=kind) for kind, shape in specs]
        model = keras.Model(inputs, build(keras.layers, *inputs))
        if fixed:
            variables = [variable.value for variable in model.variables]
            _save_signature(target, variables, lambda *x: model(list(x)), specs)
            return
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            model.export(folder, format="tf_saved_model", verbose=False)
            _save(target, tf.lite.TFLiteConverter.from_saved_model(folder))

    return make


def _keras_causal(layers: Any, x: Any) -> Any:
    return layers.MultiHeadAttention(HEADS, HEAD_SIZE)(x, x, use_causal_mask=True)


def _keras_mask(layers: Any, x: Any, mask: Any) -> Any:
    for _ in range(2):
        x += layers.MultiHeadAttention(HEADS, HEAD_SIZE)(
            x, x, attention_mask=mask, use_causal_mask=True
        )
    return x


def _keras_cross(layers: Any, x: Any, source: Any) -> Any:
    return layers.MultiHeadAttention(HEADS, HEAD_SIZE, value_dim=12)(x, source)


def _keras_grouped(layers: Any, x: Any) -> Any:
    return layers.GroupQueryAttention(HEAD_SIZE, HEADS, 2)(x, x, use_causal_mask=True)


def _keras_one_group(layers: Any, x: Any) -> Any:
    return layers.GroupQueryAttention(HEAD_SIZE, HEADS, 1)(x, x)


def _keras_single(layers: Any, x: Any, source: Any) -> Any:
    return layers.Attention(use_scale=True)([x, source])


# --- JAX ---


def jax_block(build: Callable[..., Any], *specs: Spec, signature: bool = True) -> Make:
    """Convert a JAX function through jax2tf's StableHLO; it has no weights, every operand is an input."""

    def make(target: Path) -> None:
        tf = lib("tensorflow")
        converted = lib("jax.experimental.jax2tf").convert(build, with_gradient=False)
        if signature:
            _save_signature(target, [], converted, specs)
            return
        inputs = [
            tf.TensorSpec(shape, getattr(tf, kind), f"x{i}")
            for i, (kind, shape) in enumerate(specs)
        ]
        function = tf.function(converted, autograph=False).get_concrete_function(*inputs)
        _save(target, tf.lite.TFLiteConverter.from_concrete_functions([function]))

    return make


def _jax_masked(q: Any, k: Any, v: Any, mask: Any) -> Any:
    jax, root = lib("jax"), HEAD_SIZE**-0.25
    scores = jax.numpy.einsum("btnh,bsnh->bnts", q * root, k * root)
    weights = jax.nn.softmax(jax.numpy.where(mask[:, None] != 0, scores, MASKED), axis=-1)
    return jax.numpy.einsum("bnts,bsnh->btnh", weights, v)


def _jax_page(mask: Any, *qkv: Any) -> list[Any]:
    return [_jax_masked(qkv[i], qkv[i + 1], qkv[i + 2], mask) for i in range(0, len(qkv), 3)]


def _jax_chain(q: Any, k: Any, v: Any, mask: Any) -> Any:
    for _ in range(3):
        q = _jax_masked(q, k, v, mask)
    return q


def _jax_grouped(q: Any, k: Any, v: Any, mask: Any) -> Any:
    jax, (b, t, n, h), groups = lib("jax"), q.shape, k.shape[2]
    q = q.reshape(b, t, groups, n // groups, h) * h**-0.5
    scores = jax.numpy.einsum("btkgh,bskh->btkgs", q, k).reshape(b, t, n, -1)
    weights = jax.nn.softmax(jax.numpy.where(mask[:, :, None], scores, MASKED), axis=-1)
    weights = weights.reshape(b, t, groups, n // groups, -1)
    return jax.numpy.einsum("btkgs,bskh->btkgh", weights, v).reshape(b, t, n * h)


def _jax_library(q: Any, k: Any, v: Any, mask: Any) -> Any:
    return lib("jax").nn.dot_product_attention(q, k, v, mask=mask[:, None])


def _jax_library_causal(q: Any, k: Any, v: Any) -> Any:
    y = lib("jax").nn.dot_product_attention(q, k, v, is_causal=True)
    return y.reshape(y.shape[0], y.shape[1], -1)


_F, _B, _I = "float32", "bool", "int32"
_X: Spec = (_F, (1, 14, 72))
_X2: Spec = (_F, (2, 14, 72))
_SOURCE: Spec = (_F, (1, 44, 72))
_PAGE: tuple[Spec, ...] = (
    (_I, (1, 14, 44)),
    *((_F, (1, 14, 4, 20)), (_F, (1, 44, 4, 20)), (_F, (1, 44, 4, 20))) * 3,
)
_CACHE: Spec = (_F, (2, 4, 44, 20))
_Q: Spec = (_F, (1, 14, 4, 20))
_KV: Spec = (_F, (1, 44, 2, 20))

FAMILIES: list[tuple[str, str, Make]] = [
    ("tf_einsum", "einsum, scale on Q", tensorflow_block(_einsum, _X)),
    ("tf_matmul", "batch 2, scale after the product", tensorflow_block(_matmul, _X2)),
    ("tf_cross", "cross attention, additive mask, scale on K",
     tensorflow_block(_cross, _X, _SOURCE, (_F, (1, 1, 14, 44)))),
    ("tf_select", "two blocks share one NOT_EQUAL", tensorflow_block(_select, _X, (_I, (1, 14, 14)))),
    ("tf_logical", "Select on NOT(AND(..)), constant first",
     tensorflow_block(_logical, _X, (_B, (1, 14, 14)), (_B, (1, 1, 14)))),
    ("tf_additive", "NOT, CAST, MUL(-100), ADD", tensorflow_block(_additive, _X2, (_B, (2, 14)))),
    ("tf_decode", "T=1, batch 2, cache grown by CONCATENATION",
     tensorflow_block(_decode, (_F, (2, 1, 72)), _CACHE, _CACHE, (_F, (2, 1, 1, 45)))),
    ("tf_adj_x", "adj_x on the query, adj_y on the values",
     tensorflow_block(_transposed_query, _X, (_F, (1, 4, 20, 44)), (_F, (1, 4, 20, 44)))),
    ("tf_scores_transposed", "softmax over axis 2", tensorflow_block(_transposed_scores, _X)),
    ("keras_causal", "MultiHeadAttention, causal", keras_block(_keras_causal, _X)),
    ("keras_causal_dynamic", "the same, dynamic batch", keras_block(_keras_causal, _X, fixed=False)),
    ("keras_mask", "two layers, one mask, batch 2", keras_block(_keras_mask, _X2, (_B, (2, 14, 14)))),
    ("keras_mask_dynamic", "the same, dynamic batch",
     keras_block(_keras_mask, _X, (_B, (1, 14, 14)), fixed=False)),
    ("keras_cross", "cross attention, V of another size", keras_block(_keras_cross, _X, _SOURCE)),
    ("keras_gqa", "GroupQueryAttention, K=2, causal", keras_block(_keras_grouped, _X)),
    ("keras_gqa_dynamic", "the same, dynamic batch", keras_block(_keras_grouped, _X, fixed=False)),
    ("keras_mqa", "GroupQueryAttention, K=1", keras_block(_keras_one_group, _X)),
    ("keras_single", "Attention: one head", keras_block(_keras_single, _X, _SOURCE)),
    ("jax_page", "the reference page's Select form, 3 blocks", jax_block(_jax_page, *_PAGE)),
    ("jax_chain", "Select form, 3 blocks, TRANSPOSEs cancelled between them",
     jax_block(_jax_chain, _Q, _Q, _Q, (_I, (1, 14, 14)), signature=False)),
    ("jax_grouped", "Gemma as flax writes it, K=2", jax_block(_jax_grouped, _Q, _KV, _KV, (_B, (1, 14, 44)))),
    ("jax_library", "dot_product_attention, K=2", jax_block(_jax_library, _Q, _KV, _KV, (_B, (1, 14, 44)))),
    ("jax_library_causal", "the same, K=N, causal", jax_block(_jax_library_causal, _Q, _Q, _Q)),
]  # fmt: skip
