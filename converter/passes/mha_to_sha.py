"""Multi-head attention -> one single-head attention per head, or per tile of query rows."""

from collections.abc import Iterable
from dataclasses import replace
from functools import partial

from edge_opt.attention.block import AS_FOUND, FORMS, Block, Form, NotABlock, row_tiles
from edge_opt.attention.find import find_blocks
from edge_opt.attention.rules import multiplies_activations
from edge_opt.attention.split import split_heads
from edge_opt.ir.refusal import RefusedError
from edge_opt.ir.walk import called_by
from edge_opt.passes.contract import Context, Pass, Site, Status
from edge_opt.passes.rewrite import Rewrite
from edge_opt.targets import Target


class MhaToSha(Pass):
    """`softmax` is per row and `BATCH_MATMUL` per batch and row, so heads never mix before the output projection.

    `[B,K,G*T,S]` becomes N x `[B,1,T,S]`, with N = K*G. Exact: the same products are summed in the same order. Query
    rows never mix either: if the target asks for it, each head (or the only one) is cut into blocks of rows,
    `[.., T, S]` -> T/R x `[.., R, S]`, joined at the value product. The mask is cut once for all heads and layers.
    """

    name = "mha_to_sha"
    summary = "splits multi-head attention into one single-head attention per head, or per block of its rows"

    def sites(self, context: Context) -> Iterable[Site]:
        """One site for each SOFTMAX, then one for each operator that calls a graph with attention."""
        for match in find_blocks(context.subgraph):
            if isinstance(match, NotABlock):
                status = Status.SKIPPED if match.is_attention else Status.SETTLED
                yield Site(match.softmax, reason=match.reason, status=status)
            else:
                yield _site(context, match)
        for operator in context.subgraph.operators:
            inner = [one for graph in called_by([operator], context.model.subgraphs) for one in graph]
            if any(one.name == "SOFTMAX" for one in inner) and any(map(multiplies_activations, inner)):
                reason = "attention may be in a graph that it calls, which is not rewritten"
                yield Site(operator, reason=reason)


def _site(context: Context, block: Block) -> Site:
    """Heads and rows are cut in one rewrite, so that a tile's heads are joined to finished rows."""
    target, heads, note = context.target.for_attention(block), block.heads, ""
    site = partial(Site, block.softmax, heads=heads, kv_heads=block.kv_heads)
    if heads > 1 and (reason := context.target.no_gain(context.signature, block)):
        reason = f"target '{context.target.name}' gains nothing from splitting {reason}"
        return site(reason=reason, status=Status.SETTLED)
    try:
        tiled = _tiled(target, block)
    except RefusedError as refused:
        if heads == 1:
            return Site(block.softmax, reason=str(refused))
        tiled, note = block, f"rows are not cut: {refused}"
    if heads == 1 and tiled is block:
        return site(reason="already single-head", status=Status.SETTLED)
    preferred = target.form
    if heads == 1 or preferred == AS_FOUND:
        preferred = "split" if heads == 1 or block.merged else "unpack"
    forms = {preferred: FORMS[preferred], **(FORMS if heads > 1 else {})}
    builds = {name: partial(_build, context, tiled, form, note) for name, form in forms.items()}
    return site(build=builds.pop(preferred), others=builds)


def _tiled(target: Target, block: Block) -> Block:
    """Cut attention into as few equal blocks of rows as the target allows, maybe one; RefusedError if it cannot be."""
    rows = block.query_length
    if target.rows_per_tile is None or target.rows_per_tile >= rows:
        return block
    size = max(size for size in range(1, target.rows_per_tile + 1) if rows % size == 0)
    if 2 * size < target.rows_per_tile:
        text = f"{rows} rows have no equal blocks of {target.rows_per_tile} rows or somewhat fewer"
        raise RefusedError(text, block.softmax, None, f"{-(-target.rows_per_tile // 2)} or more", str(size))
    return row_tiles(block, rows // size)


def _build(context: Context, block: Block, form: Form, note: str) -> Rewrite:
    if block.heads > 1 and block.head_size < (context.target.norm_per_head_from or 0):
        form = replace(form, composites=False)
    old, new = split_heads(context.model, context.subgraph, block, form, context.constants)
    rewrite = context.rewrite(old, new, note=note, parts=(block.output, block.factored))
    for operator in rewrite.new if block.heads > 1 else ():
        if operator in block.core and operator.name in ("BATCH_MATMUL", "SOFTMAX"):
            raise RefusedError("another operator reads a result that holds several heads", operator)
    return rewrite
