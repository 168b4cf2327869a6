"""The models of what was opened that a conversion works on, and what is known of them: positions, broken ranges."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Literal, get_args

from edge_opt.base.errors import ModelFormatError, unknown
from edge_opt.comparison.facts import signature_info
from edge_opt.ir import Model
from edge_opt.ir.opening import AUXILIARY_SECTION, MAIN_SECTION, Opened, Part
from edge_opt.runtime.tensors import known_length
from edge_opt.schema.litertlm import read_executor_metadata
from edge_opt.soundness import Unsound, broken_ranges, mismatched_caches, stopped_positions

Sections = Literal["prefill-decode", "all"]


def choose_parts(opened: Opened, sections: Sections = "prefill-decode") -> list[Part]:
    """What a conversion works on; of a bundle the prefill/decode model, or `all` of its models.

    An auxiliary model that was not asked for comes last, as a helper.

    Raises:
        ModelFormatError: a chosen model is not valid.
        UsageError: `sections` is unknown, or the bundle has no such model.
    """
    if sections not in get_args(Sections):
        raise unknown("choice of sections", sections, get_args(Sections))
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


def find_repairable(parts: Iterable[Part], positions: int | None) -> list[Unsound]:
    """What models, as they are now, have wrong and passes repair: positions that stop, caches of two types."""
    return [
        replace(one, model=part.kind)
        for part in parts
        for one in (*stopped_positions(part.model, positions), *mismatched_caches(part.model))
    ]
