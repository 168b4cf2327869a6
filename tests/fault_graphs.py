"""The graphs whose rewrites are corrupted on purpose.

Sizes are chosen so that as many mistakes as possible still fit: as many queries as heads, as many cached keys as the
head is wide.
"""

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Size:
    """Of an attention: T, N, K, S, H."""

    queries: int = 4
    heads: int = 4
    kv_heads: int = 2
    cache: int = 8
    width: int = 8


# Every role has parameters of its own, so that those of a neighbour are wrong.
PARAMETERS: dict[str, dict[str, str]] = {
    "float32": {},
    "int16": {
        "query": "q(0.0001, 0)", "scale": "q(2e-05, 0)", "scaled": "q(4e-05, 0)", "key": "q(0.0001, 0)",
        "value": "q(0.00011, 0)", "logits": "q(0.0003, 0)", "mask": "q(0.00305185, 0)", "masked": "q(0.0033, 0)",
        "probability": "q(3.0517578e-05, 0)", "part": "q(0.00012, 0)", "rest": "q(0.00013, 0)", "sum": "q(0.00015, 0)",
    },
    "int8": {
        "query": "q(0.025, 3)", "scale": "q(0.003, 0)", "scaled": "q(0.01, -5)", "key": "q(0.025, 1)",
        "value": "q(0.027, -2)", "logits": "q(0.05, 4)", "mask": "q(0.1, 127)", "masked": "q(0.18, 72)",
        "probability": "q(0.00390625, -128)", "part": "q(0.03, 2)", "rest": "q(0.032, -1)", "sum": "q(0.025, 6)",
    },
}  # fmt: skip
_SCALES = {"float32": ("0.35", "0.25"), "int16": ("17500", "12500"), "int8": ("117", "83")}


_INPUTS = """
%q: query[1,T,N,H], %k_cache: key[1,K,S,H], %k: key[1,K,T,H], %v_cache: value[1,K,H,S], %v: value[1,K,H,T],
%mask: mask[1,1,T,U]"""
_LAYER = """
  %scaled: scaled[1,T,N,H] = MUL(%q, FACTOR)
  %turned: scaled[1,N,T,H] = TRANSPOSE(%scaled, int32{0, 2, 1, 3})
  %rows: scaled[1,K,R,H] = RESHAPE(%turned, int32{1, K, R, H}) {new_shape: [1, K, R, H]}
  %old: logits[1,K,R,S] = BATCH_MATMUL(%rows, %k_cache) {adj_y: true}
  %new: logits[1,K,R,T] = BATCH_MATMUL(%rows, %k) {adj_y: true}
  %logits: logits[1,K,R,U] = CONCATENATION(%old, %new) {axis: 3}
  %masks: mask[1,1,R,U] = CONCATENATION(MASKS) {axis: 2}
  %masked: masked[1,K,R,U] = ADD(%logits, %masks)
  %p: probability[1,K,R,U] = SOFTMAX(%masked) {beta: 1.0}
  %p_old: probability[1,K,R,S] = SLICE(%p, int32{0, 0, 0, 0}, int32{1, K, R, S})
  %p_new: probability[1,K,R,T] = SLICE(%p, int32{0, 0, 0, S}, int32{1, K, R, T})
  %part: part[1,K,R,H] = BATCH_MATMUL(%p_old, %v_cache) {adj_y: true}
  %rest: rest[1,K,R,H] = BATCH_MATMUL(%p_new, %v) {adj_y: true}
  %sum: sum[1,K,R,H] = ADD(%part, %rest)
  %heads: sum[1,N,T,H] = RESHAPE(%sum, int32{1, N, T, H}) {new_shape: [1, N, T, H]}
  %back: sum[1,T,N,H] = TRANSPOSE(%heads, int32{0, 2, 1, 3})
  %out: sum[1,T,W] = RESHAPE(%back, int32{1, T, W}) {new_shape: [1, T, W]}"""


def attention(dtype: str, size: Size = Size()) -> str:
    """Two layers of grouped-query attention over a split cache, as exporters write them, each with its own mask."""
    layers = [
        [_filled(text, number, dtype, size) for text in (_INPUTS, _LAYER)] for number in (1, 2)
    ]
    inputs, lines = (
        sep.join(parts) for sep, parts in zip((",", ""), zip(*layers, strict=True), strict=True)
    )
    return f"subgraph main ({inputs}) {{{lines}\n  return %out1, %out2\n}}\n"


def _filled(text: str, layer: int, dtype: str, size: Size) -> str:
    """The text with the numbers of one layer in it, and the parameters of each role."""
    n, k, t, h, s = size.heads, size.kv_heads, size.queries, size.width, size.cache
    sizes = {"N": n, "K": k, "T": t, "H": h, "S": s, "U": s + t, "R": n // k * t, "W": n * h}
    roles = {role: f" {parameters}" for role, parameters in PARAMETERS[dtype].items()}
    text = text.replace("FACTOR", f"{dtype}({_SCALES[dtype][layer - 1]}){roles.get('scale', '')}")
    text = text.replace("MASKS", ", ".join(["%mask"] * (n // k)))
    text = re.sub(r"%\w+", rf"\g<0>{layer}", text)
    text = text.replace(f"%mask{layer}", ("%mask_global", "%mask_local")[layer - 1])
    text = re.sub(r"\b[NKTHSURW]\b", lambda found: str(sizes[found[0]]), text)
    return re.sub(
        r": (\w+)(\[[\d,]+\])", lambda found: f": {dtype}{found[2]}{roles.get(found[1], '')}", text
    )


JOINED_LOGITS = """\
subgraph main (%q: int16[1,1,4,8] q(0.0001, 0), %k1: int16[1,1,8,8] q(0.0001, 0), %k2: int16[1,1,4,8] q(0.0001, 0),
               %mask: int16[1,1,4,12] q(0.003, 0)) {
  %old: int16[1,1,4,8] q(0.0005, 0) = BATCH_MATMUL(%q, %k1) {adj_y: true}
  %new: int16[1,1,4,4] q(0.0005, 0) = BATCH_MATMUL(%q, %k2) {adj_y: true}
  %logits: int16[1,1,4,12] q(0.0005, 0) = CONCATENATION(%old, %new) {axis: 3}
  %masked: int16[1,1,4,12] q(0.0031, 0) = ADD(%logits, %mask)
  %p: int16[1,1,4,12] q(3.0517578125e-05, 0) = SOFTMAX(%masked) {beta: 1.0}
  return %p
}
"""
