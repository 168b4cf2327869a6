"""What a model holds, and what a conversion would do or did to it: as data, node data for Model Explorer, a report.

Changes no model that a caller gave.
"""

import hashlib
import os
import platform
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from edge_opt.attention.block import Match, NotABlock
from edge_opt.attention.find import find_blocks
from edge_opt.base.record import Record
from edge_opt.base.words import many
from edge_opt.comparison.models import signature_info
from edge_opt.conversion import GENERIC, ConversionResult, convert
from edge_opt.conversion.container import (
    Sections,
    choose_parts,
    find_stopped,
    find_unsound,
    fix_inputs,
    positions_in,
    positions_of,
)
from edge_opt.conversion.result import unsound
from edge_opt.ir import Buffer, Constants, DType, Model, Operator, Subgraph, Tensor, load
from edge_opt.ir.composites import COMPOSITE, Composite, composites
from edge_opt.ir.opening import ModelLike, Opened, Part, is_compiled, made_from, readable
from edge_opt.ir.refusal import RefusedError
from edge_opt.passes import PASSES, Context, SiteReport, Status, run_pass
from edge_opt.passes.inline_composites import InlineComposites
from edge_opt.passes.mha_to_sha import with_callees
from edge_opt.report import Example, Report
from edge_opt.report.document import hoisted
from edge_opt.runtime.tensors import growing_axes
from edge_opt.schema.litertlm import ASSUMED_WINDOW, Bundle, ExecutorMetadata, read_executor_metadata
from edge_opt.shapes.inference import doubted
from edge_opt.soundness import Unsound
from edge_opt.targets import Finding, Target, TargetLike, lint, load_target


@dataclass(frozen=True, slots=True)
class Cache:
    """One cache: the input that it is, the axis that counts positions, how many it holds, and whether it is a ring.

    A ring is shorter than the longest cache: what it holds is overwritten by later positions.
    """

    name: str
    axis: int
    positions: int
    ring: bool


@dataclass(frozen=True, slots=True)
class Caches(Record):
    """All caches of a model; `window` is what its bundle says that sliding layers see, None where it does not.

    `notes` are sentences on what LiteRT-LM will assume.
    """

    caches: tuple[Cache, ...] = ()
    window: int | None = None
    notes: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """For people."""
        if not self.caches:
            return []
        lengths = Counter((cache.positions, cache.ring) for cache in self.caches)
        counts = ", ".join(f"{many(n, 'ring') if ring else n} of {s}" for (s, ring), n in lengths.items())
        seen = "" if self.window is None else f"; sliding layers see {self.window} positions"
        return [f"caches: {counts}{seen}", *self.notes]


def find_caches(model: Model, bundle: Bundle | None = None) -> Caches:
    """The caches that grow by a part of their own, as a split export has them; `bundle` is what holds the model.

    Raises:
        ModelFormatError: the bundle's executor metadata is damaged.
    """
    metadata = read_executor_metadata(bundle)
    axes: dict[str, int] = {}
    sizes: dict[str, int] = {}
    for signature in model.signatures:
        for name, axis in growing_axes(signature_info(signature)).items():
            if axis is not None:
                axes[name], sizes[name] = axis, signature.inputs[name].shape[axis]
    longest = max(sizes.values(), default=0)
    caches = tuple(Cache(name, axes[name], size, size < longest) for name, size in sizes.items())
    inputs = [name for signature in model.signatures for name in signature.inputs]
    slides = any("mask" in name and "local" in name for name in inputs)
    window = metadata and metadata.window
    unsaid = slides and bool(caches) and bundle is not None and window is None
    return Caches(caches, window, (_assumed(caches, metadata),) if unsaid else ())


def _assumed(caches: tuple[Cache, ...], metadata: ExecutorMetadata | None) -> str:
    """What LiteRT-LM 0.18 takes where nothing names the window."""
    rings = [cache.positions for cache in caches if cache.ring]
    window = min(rings) if rings and metadata is not None and metadata.buffers else ASSUMED_WINDOW
    axes = ", and takes the longer axis of a cache for its positions" if metadata is None else ""
    return (
        f"The bundle does not say how far its sliding layers see: LiteRT-LM assumes {window} positions{axes}. If "
        f"sliding_window in the checkpoint's config.json is another number, build from the checkpoint."
    )


_Named = list[tuple[str, Tensor]]

# From a mask back to the input it comes from there are a few reshapes, repetitions and conversions.
_DEEPEST = 32


@dataclass(frozen=True, slots=True)
class AttentionBlock(Record):
    """One attention: sizes as in its matmuls, `mask` the argument it comes from, or the tensor where it is made."""

    signature: str
    form: Literal["multi-head", "single-head"]
    heads: int
    kv_heads: int
    head_size: int
    query_length: int
    key_lengths: tuple[int, ...]
    mask: str | None
    softmax: str


@dataclass(frozen=True, slots=True)
class Argument(Record):
    """An input or output of a signature; a dimension known only at run time is -1."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class SignatureContent:
    """One entry point; `unmatched` counts attentions whose form is not understood (`explain` says why)."""

    name: str
    operators: Mapping[str, int]
    inputs: tuple[Argument, ...]
    outputs: tuple[Argument, ...]
    composites: tuple[Composite, ...]
    unmatched: int

    def to_dict(self) -> dict[str, Any]:
        """For reports."""
        return {
            "name": self.name,
            "operators": sum(self.operators.values()),
            "operator_counts": dict(self.operators),
            "composites": [composite.to_dict() for composite in self.composites],
            "inputs": [argument.to_dict() for argument in self.inputs],
            "outputs": [argument.to_dict() for argument in self.outputs],
            "attention_unmatched": self.unmatched,
        }


@dataclass(slots=True, repr=False)
class Inspection(Record):
    """Everything that `edge-opt inspect` says of a model; sizes in bytes, `weights` by element type.

    `compiled`: it calls an NPU, and nothing here can rewrite it; `made_from` is the bundle that can, where it is known.
    """

    file: str | None
    size: int | None
    flatbuffer_size: int | None
    subgraphs: int
    weights: Mapping[str, int]
    signatures: list[SignatureContent] = field(default_factory=list)
    attention: list[AttentionBlock] = field(default_factory=list)
    target: str | None = None
    lint: list[Finding] = field(default_factory=list)
    compiled: bool = False
    made_from: str | None = None
    soundness: list[Unsound] = field(default_factory=list)
    caches: Caches = field(default_factory=Caches)

    def __repr__(self) -> str:
        entries = ", ".join(f"{one.name}: {sum(one.operators.values())} operators" for one in self.signatures)
        return f"Inspection({self.file!r}, {entries}; {many(len(self.attention), 'attention block')})"


@dataclass(frozen=True, slots=True)
class Explanation:
    """One site's verdict, and what the attention there looks like where it is understood."""

    verdict: SiteReport
    block: AttentionBlock | None

    def to_dict(self) -> dict[str, Any]:
        """For `--json` and reports."""
        block = None if self.block is None else self.block.to_dict()
        return {**self.verdict.to_dict(), "settled": self.verdict.settled, "attention": block}


def inspect(
    source: ModelLike,
    *,
    target: TargetLike | None = None,
    shapes: Mapping[str, Sequence[int]] | None = None,
) -> Inspection:
    """Look at a model (of a bundle: its prefill/decode model); for a target, also at what that refuses or gets wrong.

    `shapes` gives inputs of open lengths static shapes first, as `convert` does.

    Raises:
        ModelFormatError: the source is not a valid model.
        UsageError: there is no such target or input, or a shape does not fit.
    """
    facts = None if target is None else load_target(target)
    opened, parts = _opened(source, shapes)
    model = parts[0].model
    file = model.file
    inspection = Inspection(
        file=None if file is None or file.path is None else str(file.path),
        size=None if file is None else file.size,
        flatbuffer_size=None if file is None else file.flatbuffer_size,
        subgraphs=len(model.subgraphs),
        weights=_weights(model.subgraphs),
        soundness=[*find_unsound(opened), *find_stopped(parts, positions_in(opened, parts))],
        caches=find_caches(model, opened.bundle),
    )
    if is_compiled(model):
        whole = made_from(inspection.file)
        inspection.compiled, inspection.made_from = True, None if whole is None else str(whole)
    for (name, graph), blocks in zip(model.entry_points(), _attention(model), strict=True):
        inspection.attention += [block for block in blocks if block is not None]
        operators = dict(Counter(operator.name for operator in graph.operators).most_common())
        inputs, outputs = (
            tuple(Argument(label, t.shape_signature or t.shape, DType(t.dtype).name) for label, t in named)
            for named in _arguments(model, name, graph)
        )
        called = tuple(composites(graph.operators))
        inspection.signatures.append(
            SignatureContent(name, operators, inputs, outputs, called, blocks.count(None))
        )
    if facts is not None:
        inspection.target, inspection.lint = facts.name, lint(model, facts)
    return inspection


def explain(
    source: ModelLike,
    *,
    target: TargetLike | None = None,
    shapes: Mapping[str, Sequence[int]] | None = None,
) -> list[Explanation]:
    """Every site of every pass, and what a conversion would do there. Proves nothing, and edits nothing.

    `shapes` gives inputs of open lengths static shapes first, as `convert` does.

    Raises:
        ModelFormatError: the source is not a valid model.
        UsageError: there is no such target or input, or a shape does not fit.
    """
    model = _opened(source, shapes)[1][0].model
    attention = [block for blocks in _attention(model) for block in blocks if block is not None]
    blocks = {(block.signature, block.softmax): block for block in attention}
    result = convert(readable(source), target=target, shapes=shapes, verify="none", dry_run=True)
    return [Explanation(site, blocks.get((site.signature, site.operator))) for site in result.sites]


def _opened(
    source: ModelLike, shapes: Mapping[str, Sequence[int]] | None, sections: Sections = "prefill-decode"
) -> tuple[Opened, list[Part]]:
    """What a conversion would work on; a model that the caller gave stays as it is."""
    opened = Opened(deepcopy(source) if shapes and isinstance(source, Model) else source)
    parts = choose_parts(opened, sections)
    fix_inputs(parts, shapes or {})
    return opened, parts


def _attention(model: Model) -> list[list[AttentionBlock | None]]:
    """The attentions of every entry point in execution order; None for one whose form is not understood.

    Behind them those of the graphs that it calls: branches, and composites that a conversion does not open.
    """
    model = _with_open_composites(model)
    return [
        [
            _described(match, name, _argument_names(model, name, graph))
            for called, _ in with_callees(model, graph)
            for match in find_blocks(called)
            if not isinstance(match, NotABlock) or match.is_attention
        ]
        for name, graph in model.entry_points()
    ]


def _described(match: Match, signature: str, arguments: Mapping[Tensor, str]) -> AttentionBlock | None:
    if isinstance(match, NotABlock):
        return None
    return AttentionBlock(
        signature,
        "multi-head" if match.heads > 1 else "single-head",
        match.heads,
        match.kv_heads,
        match.head_size,
        match.query_length,
        match.key_lengths,
        None if match.mask is None else _mask_name(match.mask, arguments),
        match.softmax.outputs[0].name,
    )


def _with_open_composites(model: Model) -> Model:
    """The model as a conversion sees it: what folds heads into rows may lie outside the composite of a product."""
    if all(operator.name != COMPOSITE for graph in model.subgraphs for operator in graph.operators):
        return model
    model = deepcopy(model)
    target, constants = load_target("generic"), Constants(model)
    for key, graph in model.entry_points():
        run_pass(PASSES[InlineComposites.name], Context(model, graph, key, target, constants))
    return model


def example_rewrite(
    model: Model, signature: str, chosen: str = "mha_to_sha", target: Target | None = None
) -> Example | None:
    """The first region that a pass would rewrite in an entry point, before and after; None where nothing matches.

    Tensors get short names: arguments their own, others a number.
    """
    graph = dict(model.entry_points())[signature]
    context = Context(model, graph, signature, target or load_target("generic"), Constants(model))
    context.positions = positions_of([model])
    names, numbers = _argument_names(model, signature, graph), dict[Tensor, int]()

    def short_name(tensor: Tensor) -> str:
        return f"%{names.get(tensor) or numbers.setdefault(tensor, len(numbers))}"

    with doubted(model.subgraphs):
        for site in PASSES[chosen].sites(context):
            if site.build is not None:
                with suppress(RefusedError):  # it stays as it was: the next one is shown
                    rewrite = site.build()
                    new = hoisted(_changed(rewrite.old, rewrite.new))
                    return Example(signature, rewrite.old, new, short_name)
    return None


def _changed(old: Sequence[Operator], new: Sequence[Operator]) -> list[Operator]:
    """The new operators without those that stay only because others outside still read them."""
    kept = {tensor: operator for operator in old for tensor in operator.outputs}
    read = {tensor for operator in new for tensor in operator.inputs}
    return [
        operator
        for operator in new
        if (before := kept.get(operator.outputs[0])) is None
        or (before.name, before.inputs) != (operator.name, operator.inputs)
        or not read.isdisjoint(operator.outputs)
    ]


def _weights(graphs: Iterable[Subgraph]) -> dict[str, int]:
    """Bytes of constants by element type, shared buffers counted once."""
    first: dict[Buffer | None, Tensor] = {}
    for tensor in (tensor for graph in graphs for tensor in graph.tensors if tensor.is_constant):
        first.setdefault(tensor.buffer, tensor)
    total: Counter[str] = Counter()
    for buffer, tensor in first.items():
        total[DType(tensor.dtype).name] += buffer.data.length if buffer and buffer.data else 0
    return dict(total.most_common())


def _arguments(model: Model, name: str, graph: Subgraph) -> tuple[_Named, _Named]:
    """The inputs and outputs, with what callers call them."""
    for signature in model.signatures:
        if signature.key == name and signature.subgraph is graph:
            return [*signature.inputs.items()], [*signature.outputs.items()]
    return [(tensor.name, tensor) for tensor in graph.inputs], [(t.name, t) for t in graph.outputs]


def _argument_names(model: Model, name: str, graph: Subgraph) -> dict[Tensor, str]:
    """What callers call the inputs and outputs."""
    inputs, outputs = _arguments(model, name, graph)
    return {tensor: label for label, tensor in (*outputs, *inputs)}


def _mask_name(mask: Tensor, arguments: Mapping[Tensor, str]) -> str:
    """The argument that a mask is made of, where it is made of just one."""
    tensor = mask
    for _ in range(_DEEPEST):
        if tensor in arguments and tensor.producer is None:
            return arguments[tensor]
        operands = [] if tensor.producer is None else tensor.producer.inputs
        sources = {operand for operand in operands if operand is not None and not operand.is_constant}
        if len(sources) != 1:
            break
        (tensor,) = sources
    return mask.name


_COLOURS = {Status.CONVERTED: "#bfe5cb", Status.SKIPPED: "#f7dcae", Status.ROLLED_BACK: "#f3b8b0"}
_SETTLED = "#e3e6ea"


def node_data(
    source: str | os.PathLike[str] | bytes,
    *,
    target: TargetLike | None = None,
    shapes: Mapping[str, Sequence[int]] | None = None,
) -> dict[str, Any]:
    """What a conversion makes of each operator of a model.

    Raises:
        ModelFormatError: the source is not a valid model.
        UsageError: there is no such target or input, or a shape does not fit.
    """
    model = load(source)
    places = {
        operator: (graph.name, str(place))
        for graph in model.subgraphs
        for place, operator in enumerate(graph.operators)
    }
    makers = {tensor.name: place for operator, place in places.items() for tensor in operator.outputs}
    overlay: dict[str, Any] = {}
    for site in convert(model, target=target, shapes=shapes, verify="none").sites:
        if site.status is Status.CONVERTED:
            text = f"{len(site.replaced)} operators become {site.added}"
            nodes = [places[operator] for operator in site.replaced if operator in places]
        else:
            text, nodes = site.reason, [makers[site.operator]] if site.operator in makers else []
        for graph, node in nodes:
            data = {"name": "edge-opt", "results": {}, "showExpandedSummaryOnGroupNode": True}
            # What came first about a node stays.
            overlay.setdefault(graph, data)["results"].setdefault(node, _result(site, text))
    return overlay


def _result(site: SiteReport, text: str) -> dict[str, str]:
    name = f"{site.pass_name} #{site.index}"
    verdict = f"{'nothing to do' if site.settled else site.status} ({name})"
    title = f"converted by {name}" if site.status is Status.CONVERTED else verdict
    colour = _SETTLED if site.settled else _COLOURS[site.status]
    return {"value": f"{title}: {text}", "bgColor": colour, "textColor": "#111111"}


def conversion_report(
    result: ConversionResult,
    original: str | os.PathLike[str] | bytes | None = None,
    *,
    target: TargetLike | None = None,
    sections: Sections = "prefill-decode",
    shapes: Mapping[str, Sequence[int]] | None = None,
) -> Report:
    """What `edge_opt.report.write_report` takes.

    Args:
        result: of `edge_opt.convert`.
        original: the model as it was, for the picture of one block; without it, the file that `result` names, if any.
        target: as given to `convert`.
        sections: as given to `convert`.
        shapes: as given to `convert`.

    Raises:
        ModelFormatError: the original cannot be read again.
        UsageError: there is no such target.
    """
    source = result.input if original is None else original
    facts = load_target(target or GENERIC)
    parts = _opened(source, shapes, sections)[1] if source is not None and result.converted else []
    example = next(filter(None, (_example(result, part, facts) for part in parts)), None)
    findings = [("error", text) for text in unsound(result)]
    for finding in [] if result.model is None else lint(result.model, facts):
        where = f"{finding.signature}: " if finding.signature else ""
        findings.append((finding.severity, f"{where}{finding.message}"))
    return Report(result, version("edge-opt"), example, findings, _origin(result))


def _origin(result: ConversionResult) -> dict[str, str]:
    """When the report was made and with what, and the digests of the files that it is about."""
    origin = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "edge-opt": version("edge-opt"),
        "ai-edge-litert": version("ai-edge-litert"),
        "Python": platform.python_version(),
    }
    for name, path in (("input", result.input), ("output", result.output)):
        if path is not None and Path(path).is_file():
            with Path(path).open("rb") as file:
                origin[f"{name}, SHA-256"] = hashlib.file_digest(file, "sha256").hexdigest()
    return origin


def _example(result: ConversionResult, part: Part, target: Target) -> Example | None:
    """Of the first converted block with several heads, else of whatever else was converted."""
    names = {part.signature(name): name for name, _ in part.model.entry_points()}
    sites = sorted(result.converted, key=lambda site: (site.heads or 0) < 2)
    # Of a caller's own pass there is no more than the verdicts.
    places = dict.fromkeys(
        (s.signature, s.pass_name) for s in sites if s.signature in names and s.pass_name in PASSES
    )
    examples = (example_rewrite(part.model, names[signature], chosen, target) for signature, chosen in places)
    return next(filter(None, examples), None)
