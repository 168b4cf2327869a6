"""Chooses the models to convert, finds their faults and positions, and gives open inputs static shapes."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from numbers import Integral
from typing import Literal, get_args

import numpy as np

from edge_opt.attention.positions import find_rotary
from edge_opt.base.errors import ModelFormatError, UsageError, unknown
from edge_opt.ir import Buffer, Model, Shape, Subgraph, Tensor, to_bytes
from edge_opt.ir.cleanup import parts_in_use, remove_unused
from edge_opt.ir.model import Metadata
from edge_opt.ir.opening import AUXILIARY_SECTION, MAIN_SECTION, Opened, Part
from edge_opt.ir.refusal import RefusedError
from edge_opt.ir.walk import reads
from edge_opt.passes.contract import shape_options
from edge_opt.runtime.description import describe
from edge_opt.runtime.runner import Worker
from edge_opt.runtime.tensors import known_length
from edge_opt.schema.data import Data
from edge_opt.schema.litertlm import read_executor_metadata
from edge_opt.shapes.closing import Folded, close_shapes, folded_regions
from edge_opt.shapes.dimension import size_text
from edge_opt.soundness import Unsound, broken_ranges, unequal_caches
from edge_opt.verification.audit import UnverifiedChangeError
from edge_opt.verification.rewrite import remove_dead

Sections = Literal["prefill-decode", "all"]
_MARK = "edge-opt target"  # metadata that names the target of the last conversion
_LONGEST_NAME = 200


def choose_parts(opened: Opened, sections: Sections) -> list[Part]:
    """Models to convert: in a bundle, the main model or `all`, then an auxiliary model as a helper.

    UsageError if `sections` is unknown or the bundle has no main model, ModelFormatError if that is invalid.
    """
    if sections not in get_args(Sections):
        raise unknown("choice of sections", sections, get_args(Sections))
    chosen = [*opened.parts]
    if sections != "all" or not chosen:
        main = opened.main(may_be_compiled=True)
        chosen = [part for part in opened.parts if part is main or part.kind == opened.wanted]
    if len(chosen) > 1:
        for part in chosen:
            part.label = part.name
    for part in opened.parts:
        if part not in chosen and part.kind == AUXILIARY_SECTION and _is_readable(part):
            part.label = part.kind
            part.is_helper = True
            chosen.append(part)
    return chosen


def _is_readable(part: Part) -> bool:
    """True if a model can be read; models that are only copied may have other formats."""
    try:
        return bool(part.model)
    except ModelFormatError:
        return False


def mark_converted(model: Model, target: str) -> None:
    """Note in the model's metadata that it was converted for a target."""
    kept = [entry for entry in model.metadata if entry.name != _MARK]
    model.metadata = [*kept, Metadata(_MARK, Buffer(Data(target.encode())))]


def find_notes(
    opened: Opened, parts: Iterable[Part], target: str, *, dry_run: bool
) -> Iterator[str]:
    """Notes on the models; UsageError, or a note in a dry run, if one was converted for another target."""
    for part in parts:
        yield from part.model.notes
        for entry in part.model.metadata:
            mark = entry.buffer.data
            if entry.name != _MARK or mark is None or mark.length > _LONGEST_NAME:
                continue
            earlier = mark.view().tobytes().decode(errors="replace")
            if earlier == target:
                continue
            text = (
                f"{opened.path or 'the model'} was converted for target '{earlier}', which cannot be reverted: for "
                f"'{target}', give the original file"
            )
            if not dry_run:
                raise UsageError(text)
            yield text


def positions_in(opened: Opened, parts: Iterable[Part]) -> int | None:
    """The number of positions in the longest cache of these models; None if unknown.

    The length of a ring buffer does not limit positions. LiteRT-LM detects ring buffers by the executor metadata,
    or by longer caches beside them.
    """
    metadata = read_executor_metadata(opened.bundle)
    if metadata is not None and metadata.rings and all(metadata.rings):
        return None
    longest = 0
    for part in parts:
        for signature in describe(part.model).values():
            if not signature.positional:
                longest = max(longest, known_length(signature))
    return longest or None


def find_unsound(opened: Opened) -> list[Unsound]:
    """Broken quantization in a model, or in every model of a bundle."""
    found: list[Unsound] = []
    sharing: list[tuple[str, Model]] = []
    for part in filter(_is_readable, opened.parts):
        found += broken_ranges(part.model, part.kind)
        if part.kind in ("", MAIN_SECTION, AUXILIARY_SECTION):
            sharing.append((part.kind, part.model))
    return [*found, *unequal_caches(sharing)]


def stopped_positions(parts: Iterable[Part], positions: int) -> Iterator[Unsound]:
    """Cosines and sines that are still wrong at the last of `positions`; `PositionTable` repairs them."""
    remedy = "run position_table on this signature"
    for part in parts:
        for signature, graph in part.model.entry_points():
            for tensor, last in _stopped(graph, positions):
                text = f"is wrong after position {last} of {positions}, because RoPE's integers end there"
                yield Unsound("positions-stop", signature, tensor.name, text, remedy, part.kind)


def _stopped(graph: Subgraph, positions: int) -> Iterator[tuple[Tensor, int]]:
    """Cosines and sines that stop before the last position, and where."""
    for rotary in find_rotary(graph):
        with suppress(RefusedError):  # positions that cannot be followed
            last = rotary.last_position(positions)
            if last is not None:
                yield rotary.result, last


def close_inputs(
    parts: Sequence[Part], shapes: Mapping[str, Sequence[int]], *, verify: bool = False
) -> None:
    """Give inputs static shapes, by `NAME` (in each signature with it), `signature/NAME` or `model/signature/NAME`.

    UsageError if an input is unknown, its shape does not fit, another input of its signature stays open, or operators
    do not support the shapes. With `verify`, values that become constant are compared with those that the runtime
    computes: UnverifiedChangeError if one differs.
    """
    short: list[str] = []
    every: list[str] = []
    for part in parts:
        for keys, _ in _inputs(part):
            short.append(keys[0])
            every += keys
    for key in shapes:
        if key not in every:
            raise unknown("input", key, dict.fromkeys(every if "/" in key else short))
    for part in parts:
        chosen = _chosen(part, shapes)
        if not chosen:
            continue
        model = part.model
        usage = parts_in_use(model)
        folded = close_shapes(model, chosen)
        if verify and folded:
            _check_folded(model, folded)
        for graph, operators in folded:
            producers = (tensor.producer for tensor in reads(operators))
            remove_dead(graph, filter(None, producers), model.subgraphs)
        remove_unused(model, usage)
        part.changed = True


def _inputs(part: Part) -> Iterator[tuple[tuple[str, str, str], Tensor]]:
    """Every input with its names, the most specific name last."""
    for signature, inputs in part.model.inputs():
        for name, tensor in inputs.items():
            yield (name, f"{signature}/{name}", f"{part.signature(signature)}/{name}"), tensor


def _chosen(part: Part, shapes: Mapping[str, Sequence[int]]) -> dict[Tensor, Shape]:
    """Requested shapes of one model's inputs, checked to fit."""
    chosen: dict[Tensor, Shape] = {}
    for keys, tensor in _inputs(part):
        given = [shapes[key] for key in keys if key in shapes]
        if given:  # the most specific name wins
            shape = _fitting(keys[-1], tensor, given[-1])
            if chosen.setdefault(tensor, shape) != shape:
                raise UsageError(
                    f"input '{keys[-1]}' is shared by two signatures: give both the same shape"
                )
    for signature, inputs in part.model.inputs():
        if chosen.keys().isdisjoint(inputs.values()):
            continue
        left = {name: tensor for name, tensor in inputs.items() if tensor not in chosen}
        options = " ".join(shape_options(left))
        if options:
            where = f"signature '{part.signature(signature)}'"
            raise UsageError(f"{where} has other inputs of open lengths: add {options}")
    return chosen


def _fitting(where: str, tensor: Tensor, given: Iterable[int]) -> Shape:
    declared = tensor.shape_signature or tensor.shape
    sizes = tuple(given) if isinstance(given, Iterable) else ()
    if len(sizes) != len(declared) or not all(map(_fits, sizes, declared)):
        wanted = ",".join(map(size_text, declared))
        open_sizes = " (? from 1 to 2147483647)" if "?" in wanted else ""
        what = ",".join(map(str, sizes)) if sizes else repr(given)
        raise UsageError(f"input '{where}' takes the shape {wanted}{open_sizes}, got {what}")
    return sizes


def _fits(size: int, declared: int) -> bool:
    return isinstance(size, Integral) and 1 <= size < 1 << 31 and declared in (-1, size)


def _check_folded(model: Model, folded: Sequence[Folded]) -> None:
    """Run the folded operators, subgraph by subgraph, and compare their results with the constants."""
    with Worker() as worker:
        for region, values in folded_regions(model, folded):
            graph = region.subgraphs[0]
            given = {one.name: np.zeros(one.shape, one.dtype.numpy) for one in graph.inputs}
            found = worker.run(to_bytes(region), None, given, "reference")
            for tensor, value in zip(graph.outputs, values, strict=True):
                if not np.array_equal(found[tensor.name], value):
                    raise UnverifiedChangeError(
                        f"a folded tensor of shape {list(value.shape)} differs from the runtime's result; "
                        "nothing was written, please report this bug in edge-opt with the model"
                    )
