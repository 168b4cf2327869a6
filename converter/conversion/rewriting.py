"""One model of a container: runs the passes on each entry point and cleans up behind them."""

from edge_opt.conversion.choices import Progress
from edge_opt.conversion.container import Container, Part
from edge_opt.conversion.result import ConversionResult, SignatureSummary
from edge_opt.ir import Constants, Subgraph
from edge_opt.ir.cleanup import Usage, keep_signature, name_apart, remove_unused
from edge_opt.ir.runtime import raise_runtime_version
from edge_opt.passes import PASSES, Context, Pass, SiteReport, Status, run_pass
from edge_opt.passes.left import attention_left
from edge_opt.passes.mha_to_sha import MhaToSha
from edge_opt.passes.open_lengths import settled
from edge_opt.passes.shapes_above import ShapesAbove
from edge_opt.proof.regions import RegionProver
from edge_opt.schema.errors import UsageError, unknown
from edge_opt.targets import Target


def extract(container: Container, key: str) -> None:
    """Keep one entry point of the model and drop the others.

    Raises:
        UsageError: there is no such signature, or it is a bundle.
    """
    known = [signature.key for part in container.parts for signature in part.model.signatures]
    if key not in known:
        raise unknown("signature", key, known)
    if container.bundle is not None:
        raise UsageError("a bundle needs all signatures of its models: extract from the .tflite file instead")
    keep_signature(container.parts[0].model, key)


def rewrite(
    part: Part,
    passes: list[Pass],
    target: Target,
    wanted: frozenset[str],
    prover: RegionProver | None,
    result: ConversionResult,
    progress: Progress | None,
) -> None:
    """Run the passes on the wanted entry points of one model, and add what they did to the result."""
    model = part.model
    entries = [entry for entry in model.entry_points() if part.signature(entry[0]) in wanted]
    usage = Usage.of(model)
    old = [tensor for graph in model.subgraphs for tensor in graph.tensors]
    graphs = {id(graph) for _, graph in entries}
    summaries = [
        (
            graph,
            SignatureSummary(
                part.signature(name), len(graph), largest_tensor_bytes_before=largest_intermediate(graph)
            ),
        )
        for name, graph in model.entry_points()
    ]
    result.signatures.extend(summary for _, summary in summaries)
    done = len(result.sites)
    # An estimate: most sites stand at a SOFTMAX, and most passes have none in a given model.
    total = done + sum(_softmaxes(graph) for _, graph in entries)

    def on_site(report: SiteReport) -> None:
        result.sites.append(report)
        if progress is not None:
            progress("rewriting", len(result.sites), max(total, len(result.sites)))

    with settled(model) as open_lengths:
        for name, graph in entries:
            if id(graph) not in graphs:
                continue
            graphs.discard(id(graph))
            context = Context(model, graph, part.signature(name), target, Constants(model), prover, on_site)
            context.open_lengths = open_lengths
            before = len(result.sites)
            split = PASSES[MhaToSha.name] in passes
            # Only heads need it: nobody who asked for another pass gets it.
            for chosen_pass in (ShapesAbove(), *passes) if open_lengths and split else passes:
                run_pass(chosen_pass, context)
            own = result.sites[before:]
            for site in attention_left(model, graph, context.signature, own, split=split):
                on_site(site)
    own = result.sites[done:]
    if any(site.status is Status.CONVERTED for site in own):
        raise_runtime_version(model)
        remove_unused(model, usage)
        name_apart(model, old)
        part.changed = True
    for graph, summary in summaries:
        summary.operators_after = len(graph)
        summary.largest_tensor_bytes_after = largest_intermediate(graph)
        sites = [site for site in own if site.signature == summary.name]
        summary.blocks = sum((site.heads or 0) > 1 for site in sites)
        summary.blocks_converted = sum(
            site.status is Status.CONVERTED and (site.heads or 0) > 1 for site in sites
        )


def _softmaxes(graph: Subgraph) -> int:
    return sum(operator.name == "SOFTMAX" for operator in graph.operators)


def largest_intermediate(graph: Subgraph) -> int:
    """Bytes of the largest tensor that an operator of the subgraph defines."""
    sizes = (
        tensor.dtype.byte_size(tensor.elements) or 0
        for operator in graph.operators
        for tensor in operator.outputs
    )
    return max(sizes, default=0)
