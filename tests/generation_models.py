"""Tiny language models that really generate: one layer, one head, and a next token that depends on all before it."""

from pathlib import Path

import numpy as np
from bundles import bundle, model_part
from literals import literal

from edge_opt.ir import save, to_bytes
from edge_opt.ir.parse import parse

WORDS, WIDTH, ROWS, CACHE = 128, 8, 4, 16


def table(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(WORDS, WIDTH)).round(2).astype(np.float32)


def unsplit() -> str:
    """Tokens in, caches in and out."""
    arguments = "tokens=%tokens, input_pos=%pos, kv_cache_k_0=%ck, kv_cache_v_0=%cv, mask=%mask"
    results = "kv_cache_k_0=%keys, kv_cache_v_0=%values"
    inputs = "%tokens: int32[1,{rows}], %pos: int32[{rows}]"
    words = literal(table()).replace("{", "{{").replace("}", "}}")
    attended = f"""
  %e: float32[1,{{rows}},{WIDTH}] = GATHER({words}, %tokens)
{_NEW}{_UPDATE}"""
    return _model(1.0, arguments, results, inputs, attended, 0)


def split(scale: float = 1.0) -> str:
    """Embeddings and masks in, the new keys and values out."""
    arguments = "embeddings=%e, kv_cache_k_0=%ck, kv_cache_v_0=%cv, mask_global=%mask"
    results = "kv_slice_k_0=%new, kv_slice_v_0=%turned"
    inputs = f"%e: float32[1,{{rows}},{WIDTH}]"
    attended = f"""{_NEW}
  %keys: {{long}} = CONCATENATION(%ck, %new) {{{{axis: 2}}}}
  %values: {{long}} = CONCATENATION(%cv, %turned) {{{{axis: 2}}}}"""
    return _model(scale, arguments, results, inputs, attended, 1)


_CACHE = f"float32[1,1,{CACHE},{WIDTH}]"
_NEW = f"""
  %new: {{new}} = RESHAPE(%e, int32{{{{1, 1, {{rows}}, {WIDTH}}}}})
  %turned: {{new}} = REVERSE_V2(%new, int32{{{{3}}}})"""
_UPDATE = f"""
  %at: int32[1] = SLICE(%pos, int32{{{{0}}}}, int32{{{{1}}}})
  %place: int32[4] = CONCATENATION(int32{{{{0, 0}}}}, %at, int32{{{{0}}}}) {{{{axis: 0}}}}
  %keys: {_CACHE} = DYNAMIC_UPDATE_SLICE(%ck, %new, %place)
  %values: {_CACHE} = DYNAMIC_UPDATE_SLICE(%cv, %turned, %place)"""


def _model(scale: float, arguments: str, results: str, inputs: str, attended: str, new: int) -> str:
    """Prefill and decode; `attended` computes keys and values, of the cache and `new` times the new tokens."""
    parts = [
        f"signature prefill_4 = #0 ({arguments}) -> ({results})",
        f"signature decode = #1 ({arguments}) -> ({results}, logits=%logits)",
    ]
    for rows in (ROWS, 1):
        seen = CACHE + new * rows
        fresh, long = (f"float32[1,1,{count},{WIDTH}]" for count in (rows, seen))
        wide = f"float32[1,1,{rows},{seen}]"
        outputs = ", ".join(result.partition("=")[2] for result in results.split(", "))
        parts.append(f"""
subgraph s{rows} ({inputs.format(rows=rows)}, %ck: {_CACHE}, %cv: {_CACHE}, %mask: {wide}) {{
{attended.format(rows=rows, new=fresh, long=long)}
  %scaled: {fresh} = MUL(%new, float32({scale}))
  %scores: {wide} = BATCH_MATMUL(%scaled, %keys) {{adj_y: true}}
  %masked: {wide} = ADD(%scores, %mask)
  %weights: {wide} = SOFTMAX(%masked) {{beta: 1.0}}
  %mixed: {fresh} = BATCH_MATMUL(%weights, %values)
  %flat: float32[{rows},{WIDTH}] = RESHAPE(%mixed, int32{{{rows}, {WIDTH}}})
  %words_out: float32[{rows},{WORDS}] = FULLY_CONNECTED(%flat, {literal(table(1))}, none)
  %logits: float32[1,{rows},{WORDS}] = RESHAPE(%words_out, int32{{1, {rows}, {WORDS}}})
  return {outputs}{", %logits" if rows == 1 else ""}
}}""")
    return "\n".join(parts)


def embedder() -> str:
    """Tokens to embeddings."""
    signatures, graphs = "", ""
    for place, (name, rows) in enumerate(
        {"prefill_embedder_4": ROWS, "decode_embedder": 1}.items()
    ):
        signatures += f"signature {name} = #{place} (token_ids=%t) -> (embeddings=%e)\n"
        graphs += f"""subgraph s{rows} (%t: int32[1,{rows}]) {{
  %e: float32[1,{rows},{WIDTH}] = GATHER({literal(table())}, %t)
  return %e
}}
"""
    return signatures + graphs


def auxiliary() -> str:
    """Cache updates."""
    signatures, graphs = [], []
    for place, (name, rows) in enumerate(
        {"prefill_cache_update_4": ROWS, "decode_cache_update": 1}.items()
    ):
        caches = "kv_cache_k_0=%ck, kv_cache_v_0=%cv, kv_slice_k_0=%new, kv_slice_v_0=%turned, input_pos=%pos"
        updated = "kv_cache_k_0=%keys, kv_cache_v_0=%values"
        signatures.append(f"signature {name} = #{place} ({caches}) -> ({updated})")
        graphs.append(_update_graph(rows))
    return "\n".join([*signatures, *graphs])


def _update_graph(rows: int) -> str:
    new = f"float32[1,1,{rows},{WIDTH}]"
    return f"""
subgraph update{rows} (%ck: {_CACHE}, %cv: {_CACHE}, %new: {new}, %turned: {new}, %pos: int32[{rows}]) {{
{_UPDATE.format()}
  return %keys, %values
}}"""


def export(folder: Path, **models: str) -> Path:
    """Writes models under their names; the folder."""
    folder.mkdir(exist_ok=True)
    for name, text in models.items():
        save(parse(text), folder / f"{name}.tflite", overwrite=True)
    return folder


def packed(folder: Path) -> Path:
    """A bundle that reads four tokens at a time into a cache of 16."""
    texts = {"prefill_decode": split(), "embedder": embedder(), "aux": auxiliary()}
    path = folder / "gemma.litertlm"
    path.write_bytes(
        bundle([model_part(kind, to_bytes(parse(text))) for kind, text in texts.items()])
    )
    return path
