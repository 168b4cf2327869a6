"""Inspects a model: its contents, which attention a conversion would rewrite, and why the rest would be skipped."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from edge_opt.attention.around import find_mask
from edge_opt.attention.block import NotABlock
from edge_opt.attention.find import find_blocks
from edge_opt.base.record import Record
from edge_opt.base.words import many, shortened
from edge_opt.base.work import made_from
from edge_opt.conversion import convert
from edge_opt.conversion.models import choose_parts, close_inputs, find_unsound
from edge_opt.inspection.caches import Caches, find_caches, made_for_cpus
from edge_opt.ir import Constants, Model, Operator, Tensor
from edge_opt.ir.composites import COMPOSITE, Composite, composites
from edge_opt.ir.opening import ModelLike, Opened, is_compiled, readable, weights_outside
from edge_opt.passes import PASSES, Context, Status, Verdict, run_pass
from edge_opt.passes.inline_composites import InlineComposites
from edge_opt.shapes.dimension import size_text
from edge_opt.shapes.inference import ShapeReport, shape_report
from edge_opt.soundness import Unsound
from edge_opt.targets import Finding, TargetLike, lint, load_target
from edge_opt.targets.placement import Placement, facts_about, placed_by_facts, placed_by_file


@dataclass(frozen=True, slots=True)
class AttentionBlock(Record):
    """One attention block, sizes as in its matmuls; `mask` names the input that it is made from, or else its tensor."""

    signature: str
    form: str
    heads: int
    kv_heads: int
    head_size: int
    query_length: int
    key_lengths: tuple[int, ...]
    mask: str | None
    softmax: str

    def __str__(self) -> str:
        keys = " + ".join(map(size_text, self.key_lengths))
        sizes = f"N={self.heads} K={self.kv_heads} H={self.head_size} T={size_text(self.query_length)}, {keys} keys"
        mask = f"mask {shortened(self.mask)}" if self.mask else "no mask"
        return f"{self.form}: {sizes}, {mask}"


@dataclass(frozen=True, slots=True)
class Argument(Record):
    """An input or output of a signature; an open dimension is -1."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class SignatureContent(Record):
    """One entry point; `attention_unmatched` counts attention blocks of unknown form (the sites say why)."""

    name: str
    operators: int
    operator_counts: Mapping[str, int]
    inputs: tuple[Argument, ...]
    outputs: tuple[Argument, ...]
    composites: tuple[Composite, ...]
    attention_unmatched: int


@dataclass(slots=True, repr=False)
class Inspection(Record):
    """Everything that `edge-opt inspect` shows about a model; sizes in bytes, `weights` by element type.

    `weights_outside`: those in other files or sections, by the name that the model has for them; they are not read.

    `sites`: outcome of an unverified conversion for `target`; if that is None, for "generic", and `lint` is empty.
    `inferred`: the result of inferring all shapes, if requested. `compiled`: the model calls an NPU and cannot be
    rewritten; `made_from`: the bundle that it was made from, if known. `node_data`: an overlay for Model Explorer with
    the sites by operator. `notes`: parts of the file that no runtime reads, and if a conversion keeps them.

    `placement`: what runs where, as the compiled file or the target's facts tell; `placed_by` says which of them.
    `for_cpus`: a sentence if the bundle is made for CPUs, not for an NPU.
    """

    file: str | None
    size: int | None
    subgraphs: int
    weights: Mapping[str, int]
    weights_outside: Mapping[str, int] = field(default_factory=dict)
    signatures: list[SignatureContent] = field(default_factory=list)
    attention: list[AttentionBlock] = field(default_factory=list)
    sites: list[Verdict] = field(default_factory=list)
    target: str | None = None
    lint: list[Finding] = field(default_factory=list)
    compiled: bool = False
    made_from: str | None = None
    soundness: list[Unsound] = field(default_factory=list)
    caches: Caches = field(default_factory=Caches)
    inferred: ShapeReport | None = None
    node_data: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    placement: list[Placement] = field(default_factory=list)
    placed_by: str = ""
    for_cpus: str = ""

    _left_out = ("node_data",)

    def __repr__(self) -> str:
        entries = ", ".join(f"{one.name}: {one.operators} operators" for one in self.signatures)
        return (
            f"Inspection({self.file!r}, {entries}; {many(len(self.attention), 'attention block')})"
        )


def inspect(
    source: ModelLike,
    *,
    target: TargetLike | None = None,
    shapes: Mapping[str, Sequence[int]] | None = None,
    infer: bool = False,
) -> Inspection:
    """Show what is in a model (in a bundle: its prefill/decode model), and what a conversion would change.

    Args:
        source: a model, as for `convert`; it is not changed.
        target: the target of the conversion, "generic" if None; if given, also report problems for it.
        shapes: static shapes for inputs of open lengths, as for `convert`.
        infer: also infer all shapes, and compare them with those in the file.

    Raises:
        ModelFormatError: the source is not a valid model.
        UsageError: the target or an input is unknown, or a shape does not fit.
    """
    facts = None if target is None else load_target(target)
    source = readable(source)
    opened = Opened(deepcopy(source) if shapes and isinstance(source, Model) else source)
    parts = choose_parts(opened, "prefill-decode")
    model = parts[0].model
    makers = _makers(model)
    close_inputs(parts, shapes or {})
    file = model.source
    inspection = Inspection(
        file=None if file is None or file.path is None else str(file.path),
        size=None if file is None else file.size,
        subgraphs=len(model.subgraphs),
        weights=model.weight_bytes(),
        weights_outside=weights_outside(model),
        target=None if facts is None else facts.name,
        compiled=is_compiled(model),
        soundness=find_unsound(opened),
        caches=find_caches(model, opened.bundle),
        inferred=shape_report(model) if infer else None,
        notes=model.notes,
        for_cpus=made_for_cpus(opened, model),
    )
    opened_up = _with_open_composites(model)
    for name, _ in model.entry_points():
        blocks = [*_attention(opened_up, name)]
        inspection.attention += filter(None, blocks)
        inspection.signatures.append(_content(model, name, blocks.count(None)))
    if inspection.compiled:
        whole = made_from(inspection.file)
        inspection.made_from = None if whole is None else str(whole)
        inspection.placement = placed_by_file(model)
        inspection.placed_by = "the compiled file"
        return inspection
    expected = convert(source, target=facts, shapes=shapes, verify="none", dry_run=True)
    inspection.sites = expected.sites
    inspection.notes = expected.notes
    if facts is not None:
        counts = {one.name: one.operators_after for one in expected.signatures}
        inspection.lint = lint(model, facts, counts)
        inspection.placement = placed_by_facts(model, facts)
        inspection.placed_by = facts_about(facts)
    inspection.node_data = _node_data(inspection.sites, makers)
    return inspection


def _content(model: Model, name: str, unmatched: int) -> SignatureContent:
    graph, inputs, outputs = model.arguments(name)
    counts = Counter(operator.name for operator in graph.operators)
    return SignatureContent(
        name,
        operators=len(graph.operators),
        operator_counts=dict(counts.most_common()),
        inputs=_listed(inputs),
        outputs=_listed(outputs),
        composites=tuple(composites(graph.operators)),
        attention_unmatched=unmatched,
    )


def _listed(named: Mapping[str, Tensor]) -> tuple[Argument, ...]:
    return tuple(
        Argument(name, one.shape_signature or one.shape, one.dtype.name)
        for name, one in named.items()
    )


def _attention(model: Model, name: str) -> Iterator[AttentionBlock | None]:
    """Attention blocks of an entry point; None for an unknown form."""
    entry = model.arguments(name)
    labels = {tensor: label for label, tensor in entry.inputs.items()}
    for match in find_blocks(entry.graph):
        if not isinstance(match, NotABlock):
            yield AttentionBlock(
                signature=name,
                form="multi-head" if match.heads > 1 else "single-head",
                heads=match.heads,
                kv_heads=match.kv_heads,
                head_size=match.head_size,
                query_length=match.query_length,
                key_lengths=match.key_lengths,
                mask=_mask(match.softmax, labels),
                softmax=match.softmax.outputs[0].name,
            )
        elif match.is_attention:
            yield None


def _mask(softmax: Operator, arguments: Mapping[Tensor, str]) -> str | None:
    """Name of the only input that the mask is made from, or else of the mask's tensor; None without a mask."""
    mask = find_mask(softmax)
    if mask is None:
        return None
    source = mask
    while source.producer is not None:
        above = set(source.producer.computed)
        if len(above) != 1:
            break
        source = above.pop()
    return arguments.get(source, mask.name)


def _with_open_composites(model: Model) -> Model:
    """Inline composites as a conversion does: a matmul's composite may exclude operators that fold heads into rows."""
    if all(operator.name != COMPOSITE for operator in model.operators()):
        return model
    model = deepcopy(model)
    target = load_target("generic")
    constants = Constants(model)
    for key, graph in model.entry_points():
        run_pass(PASSES[InlineComposites.name], Context(model, graph, key, target, constants))
    return model


_COLOURS = {
    Status.CONVERTED: "#bfe5cb",
    Status.SKIPPED: "#f7dcae",
    Status.REVERTED: "#f3b8b0",
    Status.SETTLED: "#e3e6ea",
}


def _makers(model: Model) -> dict[str, tuple[str, str]]:
    """Tensor name -> graph and index of the operator that produces it."""
    makers: dict[str, tuple[str, str]] = {}
    for graph in model.subgraphs:
        for place, operator in enumerate(graph.operators):
            for tensor in operator.outputs:
                makers.setdefault(tensor.name, (graph.name, str(place)))
    return makers


def _node_data(sites: Iterable[Verdict], makers: Mapping[str, tuple[str, str]]) -> dict[str, Any]:
    """Model Explorer's overlay: the outcome of a conversion at each operator; an operator's first site counts."""
    overlay: dict[str, Any] = {}
    for site in sites:
        name = f"{site.pass_name} #{site.index}"
        if site.status is Status.CONVERTED:
            named = [operator.label for operator in site.replaced]
            text = f"converted by {name}: {len(site.replaced)} operators become {site.added}"
        else:
            named = [site.operator]
            text = f"{site.status} ({name}): {site.reason}"
        for graph, node in (makers[tensor] for tensor in named if tensor in makers):
            data = {
                "name": "edge-opt",
                "results": {},
                "showExpandedSummaryOnGroupNode": True,
            }
            result = {
                "value": text,
                "bgColor": _COLOURS[site.status],
                "textColor": "#111111",
            }
            overlay.setdefault(graph, data)["results"].setdefault(node, result)
    return overlay
