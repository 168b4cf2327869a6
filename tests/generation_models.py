"""Tiny language models that really generate: one layer, one head, and a next token that depends on all before it."""

from pathlib import Path

import numpy as np
from text_parser import parse

from edge_opt.ir import save

WORDS, WIDTH, ROWS, CACHE = 128, 8, 4, 16


def numbers(values: np.ndarray) -> str:
    kind = "float32" if values.dtype.kind == "f" else "int32"
    listed = ", ".join(str(value) for value in values.ravel().tolist())
    return f"{kind}[{','.join(map(str, values.shape))}]{{{listed}}}"


def table(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(WORDS, WIDTH)).round(2).astype(np.float32)


def unsplit(scale: float = 1.0, key: str = "prefill_4") -> str:
    """Tokens in, caches in and out."""
    arguments = "tokens=%tokens, input_pos=%pos, kv_cache_k_0=%ck, kv_cache_v_0=%cv, mask=%mask"
    results = "kv_cache_k_0=%nk, kv_cache_v_0=%nv"
    return "\n".join(
        [
            f"signature {key} = #0 ({arguments}) -> ({results})",
            f"signature decode = #1 ({arguments}) -> ({results}, logits=%logits)",
            _unsplit_graph(ROWS, scale, "%nk, %nv"),
            _unsplit_graph(1, scale, "%nk, %nv, %logits"),
        ]
    )


def _unsplit_graph(rows: int, scale: float, outputs: str) -> str:
    cache = f"float32[1,1,{CACHE},{WIDTH}]"
    new = f"float32[1,1,{rows},{WIDTH}]"
    return f"""
subgraph s{rows} (%tokens: int32[1,{rows}], %pos: int32[{rows}], %ck: {cache}, %cv: {cache},
    %mask: float32[1,1,{rows},{CACHE}]) {{
  %words: float32[1,{rows},{WIDTH}] = GATHER({numbers(table())}, %tokens)
  %at: int32[1] = SLICE(%pos, int32{{0}}, int32{{1}})
  %place: int32[4] = CONCATENATION(int32{{0, 0}}, %at, int32{{0}}) {{axis: 0}}
  %new: {new} = RESHAPE(%words, int32{{1, 1, {rows}, {WIDTH}}})
  %nk: {cache} = DYNAMIC_UPDATE_SLICE(%ck, %new, %place)
  %turned: {new} = REVERSE_V2(%new, int32{{3}})
  %nv: {cache} = DYNAMIC_UPDATE_SLICE(%cv, %turned, %place)
  %scaled: {new} = MUL(%new, float32({scale}))
  %scores: float32[1,1,{rows},{CACHE}] = BATCH_MATMUL(%scaled, %nk) {{adj_y: true}}
  %masked: float32[1,1,{rows},{CACHE}] = ADD(%scores, %mask)
  %weights: float32[1,1,{rows},{CACHE}] = SOFTMAX(%masked) {{beta: 1.0}}
  %mixed: {new} = BATCH_MATMUL(%weights, %nv)
{_head(rows)}
  return {outputs}
}}"""


def _head(rows: int) -> str:
    return f"""  %flat: float32[{rows},{WIDTH}] = RESHAPE(%mixed, int32{{{rows}, {WIDTH}}})
  %words_out: float32[{rows},{WORDS}] = FULLY_CONNECTED(%flat, {numbers(table(1))}, none)
  %logits: float32[1,{rows},{WORDS}] = RESHAPE(%words_out, int32{{1, {rows}, {WORDS}}})"""


def split(scale: float = 1.0) -> str:
    """Embeddings and masks in, the new keys and values out."""
    arguments = "embeddings=%e, kv_cache_k_0=%ck, kv_cache_v_0=%cv, mask_global=%mask"
    results = "kv_slice_k_0=%new, kv_slice_v_0=%turned"
    return "\n".join(
        [
            f"signature prefill_4 = #0 ({arguments}) -> ({results})",
            f"signature decode = #1 ({arguments}) -> ({results}, logits=%logits)",
            _split_graph(ROWS, scale, "%new, %turned"),
            _split_graph(1, scale, "%new, %turned, %logits"),
        ]
    )


def _split_graph(rows: int, scale: float, outputs: str) -> str:
    cache, new = f"float32[1,1,{CACHE},{WIDTH}]", f"float32[1,1,{rows},{WIDTH}]"
    wide = f"float32[1,1,{rows},{CACHE + rows}]"
    return f"""
subgraph s{rows} (%e: float32[1,{rows},{WIDTH}], %ck: {cache}, %cv: {cache}, %mask: {wide}) {{
  %new: {new} = RESHAPE(%e, int32{{1, 1, {rows}, {WIDTH}}})
  %turned: {new} = REVERSE_V2(%new, int32{{3}})
  %scaled: {new} = MUL(%new, float32({scale}))
  %old_scores: float32[1,1,{rows},{CACHE}] = BATCH_MATMUL(%scaled, %ck) {{adj_y: true}}
  %new_scores: float32[1,1,{rows},{rows}] = BATCH_MATMUL(%scaled, %new) {{adj_y: true}}
  %scores: {wide} = CONCATENATION(%old_scores, %new_scores) {{axis: 3}}
  %masked: {wide} = ADD(%scores, %mask)
  %weights: {wide} = SOFTMAX(%masked) {{beta: 1.0}}
  %values: float32[1,1,{CACHE + rows},{WIDTH}] = CONCATENATION(%cv, %turned) {{axis: 2}}
  %mixed: {new} = BATCH_MATMUL(%weights, %values)
{_head(rows)}
  return {outputs}
}}"""


def embedder() -> str:
    """Tokens to embeddings."""
    graphs = [
        f"subgraph s{rows} (%t: int32[1,{rows}]) {{\n"
        f"  %e: float32[1,{rows},{WIDTH}] = GATHER({numbers(table())}, %t)\n  return %e\n}}"
        for rows in (ROWS, 1)
    ]
    signatures = [
        "signature prefill_embedder_4 = #0 (token_ids=%t) -> (embeddings=%e)",
        "signature decode_embedder = #1 (token_ids=%t) -> (embeddings=%e)",
    ]
    return "\n".join([*signatures, *graphs])


def auxiliary() -> str:
    """Masks and cache updates."""
    signatures, graphs = [], []
    for name, suffix, rows in (("prefill", "_4", ROWS), ("decode", "", 1)):
        place = len(graphs)
        masks = "time_step=%step, input_tokens=%t, valid_mask=%valid"
        caches = "kv_cache_k_0=%ck, kv_cache_v_0=%cv, kv_slice_k_0=%k, kv_slice_v_0=%v, input_pos=%pos"
        updated = "kv_cache_k_0=%nk, kv_cache_v_0=%nv"
        signatures.append(f"signature {name}_mask{suffix} = #{place} ({masks}) -> (mask_global=%mask)")
        signatures.append(f"signature {name}_cache_update{suffix} = #{place + 1} ({caches}) -> ({updated})")
        graphs += [_mask_graph(rows), _update_graph(rows)]
    return "\n".join([*signatures, *graphs])


def _mask_graph(rows: int) -> str:
    past = f"float32[1,1,{rows},{CACHE}]"
    hidden = np.triu(np.full((1, 1, rows, rows), -100.0, np.float32), 1)
    return f"""
subgraph mask{rows} (%t: int32[1,{rows}], %valid: bool[1,{rows}], %step: int32[]) {{
  %filled: bool[1,1,1,{CACHE}] = LESS({numbers(np.arange(CACHE).reshape(1, 1, 1, CACHE))}, %step)
  %ones: float32[1,1,1,{CACHE}] = CAST(%filled) {{in_data_type: 6, out_data_type: 0}}
  %less: float32[1,1,1,{CACHE}] = SUB(%ones, float32(1.0))
  %low: float32[1,1,1,{CACHE}] = MUL(%less, float32(100.0))
  %past: {past} = ADD(%low, {numbers(np.zeros((1, 1, rows, CACHE), np.float32))})
  %mask: float32[1,1,{rows},{CACHE + rows}] = CONCATENATION(%past, {numbers(hidden)}) {{axis: 3}}
  return %mask
}}"""


def _update_graph(rows: int) -> str:
    cache, new = f"float32[1,1,{CACHE},{WIDTH}]", f"float32[1,1,{rows},{WIDTH}]"
    return f"""
subgraph update{rows} (%ck: {cache}, %cv: {cache}, %k: {new}, %v: {new}, %pos: int32[{rows}]) {{
  %at: int32[1] = SLICE(%pos, int32{{0}}, int32{{1}})
  %place: int32[4] = CONCATENATION(int32{{0, 0}}, %at, int32{{0}}) {{axis: 0}}
  %nk: {cache} = DYNAMIC_UPDATE_SLICE(%ck, %k, %place)
  %nv: {cache} = DYNAMIC_UPDATE_SLICE(%cv, %v, %place)
  return %nk, %nv
}}"""


def export(folder: Path, **models: str) -> Path:
    """Writes models under their names; the folder."""
    folder.mkdir(exist_ok=True)
    for name, text in models.items():
        save(parse(text), folder / f"{name}.tflite", overwrite=True)
    return folder
