"""The models that a conversion works on, and static shapes for their inputs."""

from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import replace
from numbers import Integral
from typing import Literal, TypeVar, get_args

from edge_opt.base.errors import ModelFormatError, UsageError, unknown
from edge_opt.comparison.facts import signature_info
from edge_opt.ir import Model, Shape, Tensor, to_bytes
from edge_opt.ir.cleanup import parts_in_use, remove_unused
from edge_opt.ir.opening import AUXILIARY_SECTION, MAIN_SECTION, ExportedModel, Opened, Part
from edge_opt.passes.contract import shape_options
from edge_opt.passes.merging import remove_dead
from edge_opt.passes.position_table import PositionTable
from edge_opt.runtime.tensors import known_length
from edge_opt.schema.litertlm import read_executor_metadata
from edge_opt.shapes import Folded, close_shapes
from edge_opt.soundness import Unsound, broken_ranges, stopped_positions

Sections = Literal["prefill-decode", "all"]
OF_HELPERS = frozenset({PositionTable.name})
"""Passes that run on every model of a bundle."""


def choose_parts(opened: Opened, sections: Sections = "prefill-decode") -> list[Part]:
    """What a conversion works on; of a bundle the prefill/decode model, or `all` of its models.

    An auxiliary model that was not asked for comes last, as a helper.

    Raises:
        ModelFormatError: a chosen model is not valid.
        UsageError: `sections` is unknown, or the bundle has no such model.
    """
    if sections not in get_args(Sections):
        raise UsageError(f"sections '{sections}' do not exist; there are: {', '.join(get_args(Sections))}")
    main = opened.main(compiled=True)
    if opened.bundle is None:
        return [main]
    chosen = [part for part in opened.parts if sections == "all" or part.kind == MAIN_SECTION]
    for part in chosen if len(chosen) > 1 else ():
        part.label = part.kind or f"section_{part.index}"
    for part in opened.parts:
        if part not in chosen and part.kind == AUXILIARY_SECTION and is_readable(part):
            part.label, part.is_helper = part.kind, True
            chosen.append(part)
    return chosen


def is_readable(part: Part) -> bool:
    """Whether we can read it; one that is only copied need not be of a kind that we read."""
    try:
        return bool(part.model)
    except ModelFormatError:
        return False


def positions_in(opened: Opened, parts: Iterable[Part]) -> int | None:
    """How many positions the longest cache of these models has room for; None where nothing tells.

    The length of a ring does not limit positions. LiteRT-LM knows them by other caches that are longer, or by the
    executor metadata.
    """
    metadata = read_executor_metadata(opened.bundle)
    if metadata is not None and metadata.buffers and all(cache.local for cache in metadata.buffers):
        return None
    return positions_of(part.model for part in parts)


def positions_of(models: Iterable[Model]) -> int | None:
    """How many positions the longest cache of these models has room for; None where nothing tells."""
    infos = (signature_info(signature) for model in models for signature in model.signatures)
    return max(map(known_length, infos), default=0) or None


def find_unsound(opened: Opened) -> list[Unsound]:
    """What is broken in a model before a conversion, and in every model of a bundle."""
    return [
        replace(one, model=part.kind)
        for part in opened.parts
        if is_readable(part)
        for one in broken_ranges(part.model)
    ]


def find_stopped(parts: Iterable[Part], positions: int | None) -> list[Unsound]:
    """Where models, as they are now, stop counting positions before their caches are full."""
    return [
        replace(one, model=part.kind) for part in parts for one in stopped_positions(part.model, positions)
    ]


Exported = TypeVar("Exported", bound=ExportedModel)


def remade(exported: Exported, model: Model) -> Exported:
    """A model of the same class that holds `model`; the given one stays as it is."""
    kind: Callable[[bytes], Exported] = type(exported)
    return kind(to_bytes(model))


def fix_inputs(parts: Sequence[Part], shapes: Mapping[str, Sequence[int]]) -> None:
    """Give inputs static shapes, by `NAME` (in each signature with it), `signature/NAME` or `model/signature/NAME`.

    Raises:
        UsageError: there is no such input, a shape does not fit it, another input of its signature stays open, or
            operators cannot take such inputs.
    """
    available = [
        key
        for part in parts
        for signature, inputs in part.model.inputs()
        for name in inputs
        for key in _keys(part, signature, name)
    ]
    for key in shapes:
        if key not in available:
            raise unknown("input", key, dict.fromkeys(available))
    for part in parts:
        chosen = _chosen(part, shapes)
        if chosen:
            fix_shapes(part.model, chosen)
            part.changed = True


def _chosen(part: Part, shapes: Mapping[str, Sequence[int]]) -> dict[Tensor, Shape]:
    """The shapes by input of one model, each checked to fit."""
    chosen: dict[Tensor, Shape] = {}
    for signature, inputs in part.model.inputs():
        for name, tensor in inputs.items():
            keys = [key for key in _keys(part, signature, name) if key in shapes]
            if keys:  # what names one signature comes before what names all
                shape = _fitting(f"{part.signature(signature)}/{name}", tensor, shapes[keys[-1]])
                if chosen.setdefault(tensor, shape) != shape:
                    raise UsageError(
                        f"input '{part.signature(signature)}/{name}' is that of another signature too: give one shape "
                        "to both"
                    )
    for signature, inputs in part.model.inputs():
        left = {name: tensor for name, tensor in inputs.items() if tensor.is_dynamic and tensor not in chosen}
        if left and any(tensor in chosen for tensor in inputs.values()):
            raise UsageError(
                f"signature '{part.signature(signature)}' has other inputs of open lengths: add "
                f"{' '.join(shape_options(left))}"
            )
    return chosen


def _keys(part: Part, signature: str, name: str) -> tuple[str, str, str]:
    """What an input is called, the name that fits it alone last."""
    return name, f"{signature}/{name}", f"{part.signature(signature)}/{name}"


def _fitting(where: str, tensor: Tensor, given: Sequence[int]) -> Shape:
    declared = tensor.shape_signature or tensor.shape
    if not isinstance(given, Sized):
        raise UsageError(f"input '{where}' has {len(declared)} axes, and {given!r} was given")
    if len(given) != len(declared):
        raise UsageError(f"input '{where}' has {len(declared)} axes, and {len(given)} sizes were given")
    for axis, (size, wanted) in enumerate(zip(declared, given, strict=True)):
        is_size = isinstance(wanted, Integral) and 1 <= wanted < 1 << 31
        if not is_size or size not in (-1, wanted):
            expected = "from 1 to 2147483647" if size < 0 else size
            raise UsageError(f"axis {axis} of input '{where}' must be {expected}, and {wanted!r} was given")
    return tuple(given)


def fix_shapes(model: Model, given: Mapping[Tensor, Shape]) -> list[Folded]:
    """Close the shapes of a model, see `close_shapes`, and drop what nobody reads any more.

    Raises:
        UsageError: operators cannot take such inputs; the model is as it was then.
    """
    usage = parts_in_use(model)
    folded = close_shapes(model, given)
    for graph, operator, _ in folded:
        producers = [tensor.producer for tensor in operator.inputs if tensor is not None]
        remove_dead(graph, filter(None, producers), model.subgraphs)
    remove_unused(model, usage)
    return folded
