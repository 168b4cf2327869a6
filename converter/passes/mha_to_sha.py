"""Multi-head attention -> one single-head attention per head, or per tile of query rows; reports of what is skipped."""

from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from edge_opt.attention.block import AS_FOUND, FORMS, Block, Form, NotABlock, row_tiles
from edge_opt.attention.find import find_blocks
from edge_opt.attention.split import split_heads
from edge_opt.ir import Model, Subgraph
from edge_opt.ir.composites import COMPOSITE, composite_name
from edge_opt.ir.operators import subgraph_indices
from edge_opt.ir.refusal import RefusedError
from edge_opt.ir.walk import walked
from edge_opt.passes.contract import Context, Pass, Site
from edge_opt.passes.inline_composites import InlineComposites
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
        """One site for each SOFTMAX."""
        for match in find_blocks(context.subgraph):
            if isinstance(match, NotABlock):
                yield Site(match.softmax, None, match.reason, settled=not match.is_attention)
                continue
            reason = context.target.no_gain(context.signature, match) if match.heads > 1 else ""
            if reason:
                reason = f"target '{context.target.name}' gains nothing from splitting {reason}"
                yield Site(match.softmax, None, reason, True, match.heads, match.kv_heads)
            else:
                yield _site(context, match)


def _site(context: Context, block: Block) -> Site:
    """Heads and rows are cut in one rewrite, so that a tile's heads are joined to finished rows."""
    target, heads, kv_heads = context.target.for_attention(block), block.heads, block.kv_heads
    note = ""
    try:
        tiled = _tiled(target, block)
    except RefusedError as refused:
        if heads == 1:
            return Site(block.softmax, reason=str(refused))
        tiled, note = block, f"rows are not cut: {refused}"
    if heads == 1 and tiled is block:
        return Site(block.softmax, None, "already single-head", True, heads, kv_heads)
    as_found = "split" if heads == 1 or block.merged else "unpack"
    form = FORMS[as_found if heads == 1 or target.form == AS_FOUND else target.form]
    if heads > 1 and block.head_size < (target.norm_per_head_from or 0):
        form = replace(form, composites=False)
    build = partial(_build, context, tiled, form, note)
    return Site(block.softmax, build, heads=heads, kv_heads=kv_heads)


def _tiled(target: Target, block: Block) -> Block:
    """Cut attention into as few equal blocks of rows as the target allows; return it unchanged if one is enough.

    Raises:
        RefusedError: its rows cannot be cut that way.
    """
    rows = block.query_length
    if target.rows_per_tile is None or target.rows_per_tile >= rows:
        return block
    size = max(size for size in range(1, target.rows_per_tile + 1) if rows % size == 0)
    if 2 * size < target.rows_per_tile:
        text = f"{rows} rows have no equal blocks of {target.rows_per_tile} rows or somewhat fewer"
        raise RefusedError(text, block.softmax, None, f"{-(-target.rows_per_tile // 2)} or more", str(size))
    return row_tiles(block, rows // size)


def _build(context: Context, block: Block, form: Form, note: str) -> Rewrite:
    old, new = split_heads(context.model, context.subgraph, block, form, context.constants)
    rewrite = context.rewrite(old, new, note=note, parts=(block.output, block.factored))
    for operator in rewrite.new if block.heads > 1 else ():
        if operator in block.core and operator.name in ("BATCH_MATMUL", "SOFTMAX"):
            raise RefusedError("another operator reads a result that holds several heads", operator)
    return rewrite


def attention_left(
    model: Model, graph: Subgraph, signature: str, sites: Sequence[Site], *, split: bool
) -> Iterator[Site]:
    """Skipped sites for multi-head attention of an entry point that is in none of its `sites`.

    It is in a graph that an operator calls (a branch of IF, a composite), or `split` is False.
    """
    index = sum(site.pass_name == MhaToSha.name for site in sites)
    reported = {site.operator for site in sites if site.pass_name == InlineComposites.name}
    for current, reason in with_callees(model, graph, reported):
        for match in () if split and current is graph else find_blocks(current):
            if match.is_attention and match.heads != 1:
                site = Site(match.softmax, reason=reason, heads=match.heads, kv_heads=match.kv_heads)
                site.pass_name, site.signature, site.index = MhaToSha.name, signature, index
                site.operator = match.softmax.outputs[0].name
                yield site
                index += 1


def with_callees(
    model: Model, graph: Subgraph, reported: Container[str] = ()
) -> Iterator[tuple[Subgraph, str]]:
    """A graph and all graphs that its operators call, each once, with the reason why attention in it is skipped.

    Composites in `reported` have their own sites and are left out.
    """
    reasons = {graph: f"pass {MhaToSha.name} was skipped"}

    def callees(current: Subgraph) -> Iterator[Subgraph]:
        for operator in current.operators:
            is_composite = operator.name == COMPOSITE
            if current is graph and is_composite and operator.outputs[0].name in reported:
                continue
            reason = f"inside a graph that {operator.title} calls: only a signature's own graph is rewritten"
            if is_composite:
                name = f"'{composite_name(operator)}'"
                remedy = "a target with inline_composites opens all"
                reason = f"inside the composite {name}, which was not opened: {remedy}"
            for place in subgraph_indices(operator.options):
                reasons.setdefault(model.subgraphs[place], reason)
                yield model.subgraphs[place]

    for current in walked([graph], callees):
        yield current, reasons[current]
