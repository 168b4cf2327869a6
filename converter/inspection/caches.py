"""A model's caches: their lengths, ring buffers among them, and LiteRT-LM's assumptions about them."""

from collections import Counter
from dataclasses import dataclass, replace

from edge_opt.base.record import Record
from edge_opt.base.words import many
from edge_opt.ir import Model
from edge_opt.ir.opening import AUXILIARY_SECTION, MAIN_SECTION, Opened
from edge_opt.runtime.description import describe
from edge_opt.runtime.tensors import caches_of, growing_axes
from edge_opt.schema.litertlm import (
    ASSUMED_WINDOW,
    Bundle,
    ExecutorMetadata,
    read_executor_metadata,
)


@dataclass(frozen=True, slots=True)
class Cache:
    """One cache: its input, position axis and length, and whether it is a ring buffer."""

    name: str
    axis: int
    positions: int
    ring: bool


@dataclass(frozen=True, slots=True)
class Caches(Record):
    """All caches of a model; `window`: positions that the sliding layers see; `notes`: LiteRT-LM's assumptions."""

    caches: tuple[Cache, ...] = ()
    window: int | None = None
    notes: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """The caches as lines of text."""
        if not self.caches:
            return []
        counts = Counter((cache.positions, cache.ring) for cache in self.caches)
        lengths: list[str] = []
        for (positions, is_ring), count in counts.items():
            lengths.append(f"{many(count, 'ring buffer') if is_ring else count} with {positions}")
        seen = "" if self.window is None else f"; sliding layers see {self.window} positions"
        return [f"caches: {', '.join(lengths)} positions{seen}", *self.notes]


def find_caches(model: Model, bundle: Bundle | None = None) -> Caches:
    """Caches with a separate output for the new part, as in exports for NPUs; `bundle` contains the model.

    ModelFormatError if the bundle's executor metadata is damaged.
    """
    metadata = read_executor_metadata(bundle)
    found: dict[str, Cache] = {}
    for signature in describe(model).values():
        axes = growing_axes(signature)
        for info in signature.inputs:
            axis = axes.get(info.name)
            if axis is not None:
                found[info.name] = Cache(info.name, axis, info.shape[axis], ring=False)
    longest = max((cache.positions for cache in found.values()), default=0)
    caches = tuple(replace(cache, ring=cache.positions < longest) for cache in found.values())
    window = None if metadata is None else metadata.window
    is_silent = bundle is not None and window is None
    if not caches or not is_silent or not _slides(model):
        return Caches(caches, window)
    return Caches(caches, window, (_assumed(caches, metadata),))


NOT_FOR_NPUS = (
    "not exported for an NPU: its prefill/decode model has no cache whose new keys are an output of their own; export "
    "it with split_cache, or give the checkpoint"
)


def made_for_cpus(opened: Opened, model: Model) -> str:
    """A sentence for a bundle whose language model updates whole caches, with no auxiliary model; empty for others."""
    has_caches = any(caches_of(one) for one in describe(model).values())
    is_language_model = has_caches and opened.find(MAIN_SECTION) is not None
    is_for_npus = opened.find(AUXILIARY_SECTION) is not None or find_caches(model).caches
    return "" if is_for_npus or not is_language_model else f"Made for CPUs, {NOT_FOR_NPUS}."


def _slides(model: Model) -> bool:
    """True if an input is the mask of sliding layers."""
    for signature in model.signatures:
        for name in signature.inputs:
            if "mask" in name and "local" in name:
                return True
    return False


def _assumed(caches: tuple[Cache, ...], metadata: ExecutorMetadata | None) -> str:
    """LiteRT-LM 0.18's assumptions about a bundle that does not name the window."""
    rings = [cache.positions for cache in caches if cache.ring]
    window = min(rings) if rings and metadata is not None and metadata.rings else ASSUMED_WINDOW
    axes = ", and treats the longer axis of a cache as its positions" if metadata is None else ""
    return (
        f"The bundle does not say how far its sliding layers see: LiteRT-LM assumes {window} positions{axes}. If "
        f"sliding_window in the checkpoint's config.json differs, build from the checkpoint."
    )
