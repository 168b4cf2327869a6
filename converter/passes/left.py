"""Attention that no pass has looked at, so that nobody takes a model for one without: told of, not touched."""

from collections.abc import Container, Iterator, Sequence

from edge_opt.attention.block import Block, Match, find_blocks
from edge_opt.attention.composite_rules import COMPOSITE
from edge_opt.ir import Model, Operator, Subgraph
from edge_opt.ir.cleanup import called
from edge_opt.ir.references import subgraph_indices
from edge_opt.passes.contract import SiteReport, Status
from edge_opt.passes.inline_composites import InlineComposites
from edge_opt.passes.mha_to_sha import MhaToSha
from edge_opt.targets.target import composite_name


def attention_left(
    model: Model, graph: Subgraph, signature: str, sites: Sequence[SiteReport], *, split: bool
) -> Iterator[SiteReport]:
    """Multi-head attention of an entry point that is in none of its `sites`, as sites that were skipped.

    It is in a graph that another operator calls (a branch of IF, a composite), or heads were not to be `split`.
    """
    index = sum(site.pass_name == MhaToSha.name for site in sites)
    reported = {site.operator for site in sites if site.pass_name == InlineComposites.name}
    for current, reason in with_callees(model, graph, reported):
        for match in () if split and current is graph else find_blocks(current):
            if match.heads > 1 if isinstance(match, Block) else match.is_attention:
                yield _left(match, signature, index, reason)
                index += 1


def attention_uncalled(model: Model) -> Iterator[SiteReport]:
    """Attention in subgraphs that neither a signature nor an operator reaches, as sites that were skipped."""
    reached = called(model)
    for place, graph in enumerate(model.subgraphs):
        if graph not in reached:
            matches = (
                match for match in find_blocks(graph) if isinstance(match, Block) or match.is_attention
            )
            reason = f"in subgraph {place}, which no signature and no operator calls"
            for index, match in enumerate(matches):
                yield _left(match, f"subgraph {place}", index, reason)


def _left(match: Match, signature: str, index: int, reason: str) -> SiteReport:
    heads, kv_heads = (match.heads, match.kv_heads) if isinstance(match, Block) else (None, None)
    name = match.softmax.outputs[0].name
    return SiteReport(MhaToSha.name, signature, index, Status.SKIPPED, reason, heads, kv_heads, operator=name)


def with_callees(
    model: Model, graph: Subgraph, reported: Container[str] = ()
) -> Iterator[tuple[Subgraph, str]]:
    """A graph and all that its operators call, each once, with why attention in it stays.

    Composites that are sites themselves are told of there.
    """
    pending: list[tuple[Subgraph, str]] = [(graph, f"the pass {MhaToSha.name} was left out")]
    seen: set[int] = set()
    while pending:
        current, reason = pending.pop()
        if id(current) in seen:
            continue
        seen.add(id(current))
        yield current, reason
        for operator in current.operators:
            if current is graph and operator.name == COMPOSITE and operator.outputs[0].name in reported:
                continue
            pending += [
                (model.subgraphs[place], _inside(operator)) for place in subgraph_indices(operator.options)
            ]


def _inside(operator: Operator) -> str:
    if operator.name == COMPOSITE:
        name = composite_name(operator)
        return f"inside the composite '{name}', which was not opened: --inline-composites opens all"
    return f"inside a graph that {operator.title} calls: only what a signature runs itself is rewritten"
