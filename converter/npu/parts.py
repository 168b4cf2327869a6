"""Where the time of an entry point goes: to attention, feed-forward, norms and logits."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain

from edge_opt.base.atomic import AnyPath
from edge_opt.base.words import Progress, no_progress, size
from edge_opt.inspection.report import GainPicture, Table
from edge_opt.ir import Model, Operator, Tensor
from edge_opt.ir.composites import composite_name
from edge_opt.ir.opening import Opened
from edge_opt.ir.walk import backward_slice, cut_signature, walked
from edge_opt.npu.compiler import Compiler, CompilerFailedError, Figures
from edge_opt.npu.profiling import measure
from edge_opt.npu.tuning import largest_attention
from edge_opt.npu.vendors import backend_of

_PRODUCT = "FULLY_CONNECTED"
_LAYERS = 2
_FIRST = "before"
_LAST = "after"
_BARS = {_FIRST: "░", _LAST: "█"}
_LONGEST = 14  # characters of a bar
_WHOLE = ("all layers", "logits")
_IN_LAYERS = ("attention", "feed-forward", "norms")


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
    versions = {_FIRST: Opened(models[0]).main().model}
    if models[-1] != models[0]:
        versions[_LAST] = Opened(models[-1]).main().model
    signature, _ = largest_attention(versions[_FIRST])
    times: defaultdict[str, dict[str, int]] = defaultdict(dict)
    spills: dict[str, int] = {}
    for version, model in versions.items():
        outputs = model.arguments(signature)[2]
        whole = _up_to(model, signature, [*outputs.values()], judge)
        spills[version] = whole.spill or 0
        telling = partial(tell, f"compiling parts, {version}")
        parts = _times_in_layers(model, signature, judge, telling)
        parts["all layers"] = _us(whole)
        others = [tensor for name, tensor in outputs.items() if "logits" not in name]
        if others and len(others) < len(outputs):
            parts["logits"] = _us(whole) - _us(_up_to(model, signature, others, judge))
        for part, us in parts.items():
            times[part][version] = max(0, us)
    in_layers = {f"{part}, first layers": times[part] for part in _IN_LAYERS}
    rows: Table = [("", "", "estimated", "")]
    rows += _rows({part: times[part] for part in _WHOLE}, _milliseconds)
    rows += _rows(in_layers, _milliseconds)
    rows += _rows({"spill": spills}, size)
    note = (
        f"First layers: the first {_LAYERS}, drawn to a scale of their own. Estimates for {judge.chip}; not timed on a "
        "phone."
    )
    return GainPicture(f"Where the time of {signature} goes", rows, note)


def _times_in_layers(
    model: Model, signature: str, judge: Compiler, tell: Callable[[int, int], None]
) -> Counter[str]:
    """Microseconds of each kind of part in the first layers: up to its end, less those up to the part before it."""
    times = Counter[str]()
    points = [*_points(model, signature)]
    earlier = 0
    for place, (part, tensor) in enumerate(points):
        tell(place, len(points))
        us = _us(_up_to(model, signature, [tensor], judge))
        times[part] += us - earlier
        earlier = us
    return times


def _rows(values: Mapping[str, Mapping[str, int]], shown: Callable[[int], str]) -> Table:
    """Values by name and version, of names that the first version has; the largest of all has the longest bar."""
    largest = max(chain.from_iterable(one.values() for one in values.values()), default=0) or 1
    rows: Table = []
    for name, of_versions in values.items():
        if _FIRST not in of_versions:
            continue
        for version, value in of_versions.items():
            title = name if version == _FIRST else ""
            bar = _BARS[version] * round(_LONGEST * (value / largest))
            rows.append((title, version, shown(value), bar))
    return rows


def _milliseconds(us: int) -> str:
    return f"{us / 1000:.3f} ms"


def _points(model: Model, signature: str) -> Iterator[tuple[str, Tensor]]:
    """Ends of parts in the first layers, in execution order: norms, and products whose results join the main stream.

    Attention ends at the first product with weights below each SOFTMAX, whose shape is the main stream's.
    """
    graph = model.arguments(signature)[0]
    softmaxes = [operator for operator in graph.operators if operator.name == "SOFTMAX"]
    ends = {one for one in walked(softmaxes, _below) if one.name == _PRODUCT}
    main_stream = {one.output.shape for one in ends}
    layers = 0
    for operator in graph.operators:
        if not operator.outputs or operator.outputs[0].shape not in main_stream:
            continue
        tensor = operator.outputs[0]
        if "norm" in (composite_name(operator) or operator.name).lower():
            yield "norms", tensor
        elif operator in ends:
            layers += 1
            if layers > _LAYERS:
                return
            yield "attention", tensor
        elif operator.name == _PRODUCT:
            yield "feed-forward", tensor


def _below(operator: Operator) -> Iterable[Operator]:
    if operator.name == _PRODUCT:
        return ()
    return [reader for tensor in operator.outputs for reader in tensor.consumers]


def _up_to(model: Model, signature: str, ends: Sequence[Tensor], compiler: Compiler) -> Figures:
    """The compiler's figures for the operators that compute some tensors."""
    needed, starts = backward_slice(ends)
    operators = [one for one in model.arguments(signature)[0].operators if one in needed]
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
