"""The lengths of a checkpoint's caches: a sliding-window layer needs no whole cache, but a ring buffer."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from edge_opt.base.errors import UsageError

SETTING = "sliding_window_ring_buffer_size"
"""litert-torch's name for the length of a ring buffer."""
_RUNTIME = "0.18"  # the first LiteRT-LM that reads the lengths of windows and rings from a bundle
# litert-torch rounds lengths to 32, and older LiteRT-LM releases guess them as multiples of 64.
_STEP = 64


def plan_caches(
    config: Mapping[str, Any],
    prefill: Sequence[int],
    cache: int,
    chosen: int | None,
    *,
    whole: bool,
) -> dict[str, Any]:
    """The `window` of a checkpoint's sliding layers, the length of their `ring` buffers, and `notes` for the user.

    `window` is None if no layer slides, `ring` is None if all caches are whole, as long as `cache`.

    The shortest ring buffer that keeps all visible keys is `max(window, longest prefill)`, in steps of 64. A prefill of
    T tokens reads the caches before their update, in addition to its own keys: its first row needs window - 1 keys of
    the ring, later rows fewer. LiteRT-LM may take one token back, which needs one more. Then the T new keys enter the
    ring, which LiteRT-LM requires to hold them all.

    Args:
        config: the checkpoint's, completed by transformers.
        prefill: the lengths of prefills.
        cache: the length of a whole cache.
        chosen: the length of the rings that the user wants; None to find the shortest.
        whole: no rings, unless a length is chosen.

    Raises:
        UsageError: the chosen length is invalid, or the checkpoint names no layers that slide, but a window.
    """
    kinds = config.get("layer_types") or ()
    if not kinds:
        _check_no_window(config.get("sliding_window"), cache)
    sliding = sum(kind == "sliding_attention" for kind in kinds)
    window = (config.get("sliding_window") or 0) if sliding else 0
    longest = max(prefill)
    least = math.ceil(max(window, longest) / _STEP) * _STEP
    ring = chosen
    if chosen is not None:
        _check(chosen, least, window, longest, cache)
    elif window and sliding < len(kinds) and least < cache and not whole:
        ring = least
    notes: list[str] = []
    if ring is not None:
        notes.append(
            f"{sliding} of {len(kinds)} layers see {window} positions back and keep a ring buffer of {ring}; this "
            f"needs LiteRT-LM {_RUNTIME} or newer, an older one silently generates different text (--set "
            f"{SETTING}=null builds without rings)"
        )
    if window and longest > window:
        notes.append(
            f"a prefill of {longest} tokens is longer than the window of {window}: LiteRT-LM {_RUNTIME} does "
            f"not apply the window within one prefill, so tokens see up to {longest} positions back; give --prefill "
            f"{window} or less"
        )
    return {"window": window or None, "ring": ring, "notes": notes}


def _check_no_window(window: int | None, cache: int) -> None:
    """Raise UsageError if all layers slide: litert-torch exports no such checkpoint without `layer_types`."""
    if not window:
        return
    remedy = "set sliding_window to null in config.json, it has no effect within the cache"
    if window < cache:
        remedy = f"give cache={window} or less, and set sliding_window to null in config.json"
    raise UsageError(
        f"litert-torch does not export checkpoints with a sliding window of {window} positions in all layers and no "
        f"layer_types in config.json: {remedy}"
    )


def _check(chosen: int, least: int, window: int, longest: int, cache: int) -> None:
    """Raise UsageError if rings cannot have the chosen length."""
    if not window:
        raise UsageError(
            f"{SETTING} {chosen}: the checkpoint has no sliding layers, so leave it out"
        )
    if type(chosen) is not int or not least <= chosen < cache or chosen % _STEP:
        raise UsageError(
            f"{SETTING} {chosen} must be a multiple of {_STEP}, at least {least} for a window of {window} positions "
            f"and a prefill of {longest} tokens, and less than the cache, {cache} positions"
        )
