"""How long the caches of a build's layers are: whole, or a ring for layers that see a window of positions only.

Knows no framework: what a checkpoint says of its layers comes in as plain values.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edge_opt.output.errors import UsageError

SETTING = "sliding_window_ring_buffer_size"
"""litert-torch's name for the length of a ring."""
RUNTIME = "0.18"
"""The first release of LiteRT-LM that reads the window and the lengths of rings from a bundle's executor metadata."""

_STEP = 64


@dataclass(frozen=True, slots=True)
class SlidingLayers:
    """Of a checkpoint's language model: how many layers slide, of how many, and how many positions those see.

    `window` is 0 where none slides.
    """

    window: int = 0
    sliding: int = 0
    count: int = 0

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "SlidingLayers":
        """Of a configuration as transformers completes it."""
        kinds = config.get("layer_types") or ()
        sliding = sum(kind == "sliding_attention" for kind in kinds)
        window = config.get("sliding_window") or 0
        return cls(window, sliding, len(kinds)) if sliding and window else cls(0, 0, len(kinds))


def shortest_ring(window: int, prefill: Sequence[int]) -> int:
    """The shortest ring that keeps what sliding layers see: `max(window, longest prefill)`, in steps of 64.

    A row at position p sees the keys of p - window + 1 to p. A prefill of T tokens reads its caches before they are
    updated, and has its own keys beside them: its first row needs window - 1 keys of the ring, later rows fewer.
    LiteRT-LM may take one token back, which needs one more, and litert-torch refuses less than the window. Then the T
    new keys go into the ring, which must hold them all: LiteRT-LM refuses a slice that is longer than the cache. Steps
    of 64, because litert-torch rounds to 32, and older releases of LiteRT-LM guess lengths as multiples of 64.

    A runtime that writes keys before it reads them, as gemma.cpp does, needs window - 1 + T.
    """
    return -(-max(window, *prefill) // _STEP) * _STEP


def ring_of(
    layers: SlidingLayers, prefill: Sequence[int], cache: int, chosen: int | None, *, whole: bool
) -> int | None:
    """The length of the rings to export; None for whole caches.

    Args:
        layers: the checkpoint's.
        prefill: lengths of the prefill.
        cache: length of the shortest cache that is exported.
        chosen: a length that the user set.
        whole: the user wants whole caches.

    Raises:
        UsageError: rings of the chosen length cannot work.
    """
    least = shortest_ring(layers.window, prefill)
    if chosen is None:
        return least if 0 < layers.sliding < layers.count and least < cache and not whole else None
    where = f"{SETTING} {chosen}"
    if whole:
        raise UsageError(f"{where} asks for rings, and whole_caches=True for none: leave one of them out")
    if not layers.sliding:
        raise UsageError(f"{where}: the checkpoint has no sliding layers, so leave it out")
    if chosen < layers.window:
        raise UsageError(
            f"{where} is shorter than the window, {layers.window} positions: set {least} or more"
        )
    if chosen < max(prefill):
        raise UsageError(
            f"{where} is shorter than the longest prefill, {max(prefill)} tokens, which LiteRT-LM refuses: set "
            f"{least} or more, or give a shorter prefill=..."
        )
    if chosen % _STEP:
        raise UsageError(f"{where} is no multiple of {_STEP}: set {-(-chosen // _STEP) * _STEP}")
    if chosen >= cache:
        raise UsageError(
            f"{where} is not shorter than the cache, {cache} positions: give a longer cache=..., or whole_caches=True"
        )
    return chosen


def notes(layers: SlidingLayers, ring: int | None, prefill: Sequence[int]) -> list[str]:
    """What a user has to know of the caches, in sentences."""
    sentences = []
    if ring is not None:
        sentences.append(
            f"{layers.sliding} of {layers.count} layers see {layers.window} positions back and keep a ring of {ring}; "
            f"this needs LiteRT-LM {RUNTIME} or newer, an older one says other things without a word "
            f"(--whole-caches builds without rings)"
        )
    if layers.window and max(prefill) > layers.window:
        sentences.append(
            f"a prefill of {max(prefill)} tokens is longer than the window of {layers.window}: LiteRT-LM 0.18 masks no "
            f"window within one chunk, so its rows see up to {max(prefill)} positions back; give --prefill "
            f"{layers.window} or less to keep what the checkpoint says"
        )
    return sentences
