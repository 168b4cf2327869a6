"""Where the time of an entry point goes: to attention, feed-forward, norms and logits."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

from edge_opt.base.atomic import AnyPath
from edge_opt.base.words import Progress, no_progress, size
from edge_opt.inspection.report import GainPicture, Table
from edge_opt.ir import Model, Operator, Subgraph, Tensor
from edge_opt.ir.composites import composite_name
from edge_opt.ir.opening import Opened
from edge_opt.ir.walk import backward_slice, cut_signature, walked
from edge_opt.npu.compiler import Compiler, CompilerFailedError, Figures
from edge_opt.npu.profiling import measure
from edge_opt.npu.tuning import largest_attention
from edge_opt.npu.vendors import backend_of

_PRODUCT = "FULLY_CONNECTED"
_LAYERS = 2
_BEFORE = "before"
_AFTER = "after"
_BARS = {_BEFORE: "░", _AFTER: "█"}
_LONGEST = 14  # characters of a bar
_ALL = "all layers"
_LOGITS = "logits"
_ATTENTION = "attention, first layers"
_FEED_FORWARD = "feed-forward, first layers"
_NORMS = "norms, first layers"
_SPILL = "spill"


def draw_gain(
    models: Sequence[AnyPath], compiler: Compiler, progress: Progress | None = None
) -> GainPicture:
    """Estimated times of the entry point with the largest attention, in the first model and in the last one.

    Parts of the first layers are timed by compiling the graph up to each part's end: the difference to the part before
    it is the part's time, with all that the compiler fuses and overlaps.

    Raises:
        UsageError: the first model has no multi-head attention, or the compiler estimates no time.
        CompilerMissingError, CompilerFailedError, ModelFormatError: as `profile`.
    """
    judge = backend_of(compiler.chip).judge(compiler)
    tell = progress or no_progress
    versions = {_BEFORE: Opened(models[0]).main().model}
    if models[-1] != models[0]:
        versions[_AFTER] = Opened(models[-1]).main().model
    signature, _ = largest_attention(versions[_BEFORE])
    figures: dict[str, Mapping[str, int]] = {}
    for version, model in versions.items():
        telling = partial(tell, f"compiling parts, {version}")
        figures[version] = _figures(model, signature, judge, telling)
    rows: Table = [("", "", "estimated", "")]
    rows += _rows(figures, (_ALL, _LOGITS), _milliseconds)
    rows += _rows(figures, (_ATTENTION, _FEED_FORWARD, _NORMS), _milliseconds)
    rows += _rows(figures, (_SPILL,), size)
    note = (
        f"First layers: the first {_LAYERS}, drawn to a scale of their own. Estimates for {judge.chip}; not timed on a "
        "phone."
    )
    return GainPicture(f"Where the time of {signature} goes", rows, note)


def _figures(
    model: Model, signature: str, judge: Compiler, tell: Callable[[int, int], None]
) -> Mapping[str, int]:
    """Microseconds of each part, and bytes of spill; a part's time is up to its end, less up to the end before it."""
    up_to = partial(_up_to, model, signature, judge)
    entry_point = model.arguments(signature)
    outputs = [*entry_point.outputs.values()]
    whole = up_to(outputs)
    figures = Counter({_SPILL: whole.spill or 0, _ALL: _us(whole)})
    others = [one for name, one in entry_point.outputs.items() if "logits" not in name]
    if others and len(others) < len(outputs):
        figures[_LOGITS] = _us(whole) - _us(up_to(others))
    ends = [*_ends_of_parts(entry_point.graph)]
    earlier = 0
    for place, (part, end) in enumerate(ends):
        tell(place, len(ends))
        us = _us(up_to([end]))
        figures[part] += us - earlier
        earlier = us
    return figures


def _rows(
    figures: Mapping[str, Mapping[str, int]], titles: Sequence[str], shown: Callable[[int], str]
) -> Table:
    """A row for each title that the first version has, and for each version; the largest has the longest bar."""
    found: list[tuple[str, str, int]] = []
    for title in titles:
        for version, one in figures.items():
            if title in figures[_BEFORE] and title in one:
                found.append((title, version, max(0, one[title])))
    largest = max((value for *_, value in found), default=0) or 1
    rows: Table = []
    for title, version, value in found:
        bar = _BARS[version] * round(_LONGEST * (value / largest))
        rows.append((title if version == _BEFORE else "", version, shown(value), bar))
    return rows


def _milliseconds(us: int) -> str:
    return f"{us / 1000:.3f} ms"


def _ends_of_parts(graph: Subgraph) -> Iterator[tuple[str, Tensor]]:
    """Ends of parts in the first layers, in execution order: norms, and products whose results join the main stream.

    Attention ends at the first product with weights below each SOFTMAX, whose shape is the main stream's.
    """
    softmaxes = [operator for operator in graph.operators if operator.name == "SOFTMAX"]
    ends = {one for one in walked(softmaxes, _below) if one.name == _PRODUCT}
    main_stream = {one.output.shape for one in ends}
    layers = 0
    for operator in graph.operators:
        if not operator.outputs or operator.outputs[0].shape not in main_stream:
            continue
        tensor = operator.outputs[0]
        if "norm" in (composite_name(operator) or operator.name).lower():
            yield _NORMS, tensor
        elif operator in ends:
            layers += 1
            if layers > _LAYERS:
                return
            yield _ATTENTION, tensor
        elif operator.name == _PRODUCT:
            yield _FEED_FORWARD, tensor


def _below(operator: Operator) -> Iterable[Operator]:
    if operator.name == _PRODUCT:
        return ()
    return [reader for tensor in operator.outputs for reader in tensor.consumers]


def _up_to(model: Model, signature: str, compiler: Compiler, ends: Sequence[Tensor]) -> Figures:
    """The compiler's figures for the operators that compute some tensors."""
    needed, starts = backward_slice(ends)
    graph = model.arguments(signature).graph
    operators = [one for one in graph.operators if one in needed]
    inputs = {f"in_{place}": tensor for place, tensor in enumerate(starts)}
    outputs = {f"out_{place}": one for place, one in enumerate(ends) if one.producer is not None}
    cut = cut_signature(model, signature, operators, inputs, outputs)
    measured = measure(cut, signature, compiler)
    if measured.figures is None:
        raise CompilerFailedError(f"{signature}: {measured.failure}")
    return measured.figures


def _us(figures: Figures) -> int:
    if figures.time is None:
        raise CompilerFailedError(f"no picture of the times: {figures.note}")
    return figures.time.us
