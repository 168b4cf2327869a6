"""The graphs whose rewrites are corrupted on purpose.

Sizes are chosen so that as many mistakes as possible still fit: as many queries as heads, as many cached keys as the
head is wide.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Size:
    """Of an attention: T, N, K, S, H."""

    queries: int = 4
    heads: int = 4
    kv_heads: int = 2
    cache: int = 8
    width: int = 8

    @property
    def rows(self) -> int:
        """Of a product before the heads are split, for each key head."""
        return self.heads // self.kv_heads * self.queries

    @property
    def keys(self) -> int:
        """Cached and new ones."""
        return self.cache + self.queries


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


def attention(dtype: str, size: Size = Size()) -> str:
    """Two layers of grouped-query attention over a split cache, a global and a local one, as exporters write them."""
    layers = [_layer(number, dtype, size) for number in (1, 2)]
    inputs = [given for layer in layers for given in layer[0]]
    lines = "".join(f"  {line}\n" for layer in layers for line in layer[1])
    arguments = ", ".join(f"{name}=%{name}" for name in (given.partition(":")[0][1:] for given in inputs))
    return (
        f"signature main = #0 ({arguments}) -> (out1=%out1, out2=%out2)\n"
        f"subgraph main ({', '.join(inputs)}) {{\n{lines}  return %out1, %out2\n}}\n"
    )


def _layer(i: int, dtype: str, size: Size) -> tuple[list[str], list[str]]:
    def t(role: str, *shape: int) -> str:
        return f"{dtype}[{','.join(map(str, shape))}] {PARAMETERS[dtype].get(role, '')}".rstrip()

    def reshape(source: str, *shape: int) -> str:
        sizes = ", ".join(map(str, shape))
        return f"RESHAPE({source}, int32{{{sizes}}}) {{new_shape: [{sizes}]}}"

    def cut(begin: int, length: int) -> str:
        return f"SLICE(%p{i}, int32{{0, 0, 0, {begin}}}, int32{{1, {k}, {r}, {length}}})"

    queries, heads, width, cache, keys = size.queries, size.heads, size.width, size.cache, size.keys
    k, r, mask = size.kv_heads, size.rows, ("mask_global", "mask_local")[i - 1]
    repeated = ", ".join([f"%{mask}"] * (heads // k))
    scale = f"{dtype}({_SCALES[dtype][i - 1]}) {PARAMETERS[dtype].get('scale', '')}".rstrip()
    inputs = [
        f"%q{i}: {t('query', 1, queries, heads, width)}",
        f"%k_cache{i}: {t('key', 1, k, cache, width)}",
        f"%k{i}: {t('key', 1, k, queries, width)}",
        f"%v_cache{i}: {t('value', 1, k, width, cache)}",
        f"%v{i}: {t('value', 1, k, width, queries)}",
        f"%{mask}: {t('mask', 1, 1, queries, keys)}",
    ]
    lines = [
        f"%scaled{i}: {t('scaled', 1, queries, heads, width)} = MUL(%q{i}, {scale})",
        f"%turned{i}: {t('scaled', 1, heads, queries, width)} = TRANSPOSE(%scaled{i}, int32{{0, 2, 1, 3}})",
        f"%rows{i}: {t('scaled', 1, k, r, width)} = {reshape(f'%turned{i}', 1, k, r, width)}",
        f"%old{i}: {t('logits', 1, k, r, cache)} = BATCH_MATMUL(%rows{i}, %k_cache{i}) {{adj_y: true}}",
        f"%new{i}: {t('logits', 1, k, r, queries)} = BATCH_MATMUL(%rows{i}, %k{i}) {{adj_y: true}}",
        f"%logits{i}: {t('logits', 1, k, r, keys)} = CONCATENATION(%old{i}, %new{i}) {{axis: 3}}",
        f"%masks{i}: {t('mask', 1, 1, r, keys)} = CONCATENATION({repeated}) {{axis: 2}}",
        f"%masked{i}: {t('masked', 1, k, r, keys)} = ADD(%logits{i}, %masks{i})",
        f"%p{i}: {t('probability', 1, k, r, keys)} = SOFTMAX(%masked{i}) {{beta: 1.0}}",
        f"%p_old{i}: {t('probability', 1, k, r, cache)} = {cut(0, cache)}",
        f"%p_new{i}: {t('probability', 1, k, r, queries)} = {cut(cache, queries)}",
        f"%part{i}: {t('part', 1, k, r, width)} = BATCH_MATMUL(%p_old{i}, %v_cache{i}) {{adj_y: true}}",
        f"%rest{i}: {t('rest', 1, k, r, width)} = BATCH_MATMUL(%p_new{i}, %v{i}) {{adj_y: true}}",
        f"%sum{i}: {t('sum', 1, k, r, width)} = ADD(%part{i}, %rest{i})",
        f"%heads{i}: {t('sum', 1, heads, queries, width)} = {reshape(f'%sum{i}', 1, heads, queries, width)}",
        f"%back{i}: {t('sum', 1, queries, heads, width)} = TRANSPOSE(%heads{i}, int32{{0, 2, 1, 3}})",
        f"%out{i}: {t('sum', 1, queries, heads * width)} = {reshape(f'%back{i}', 1, queries, heads * width)}",
    ]
    return inputs, lines


JOINED_LOGITS = """\
signature main = #0 (q=%q, k1=%k1, k2=%k2, mask=%mask) -> (p=%p)
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
