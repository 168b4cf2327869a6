"""Keeps Python's cycle collector from looking through a large model again and again while it is worked on."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

# A model of 10,000 operators is half a million objects that all stay; the regions cut out of it are a few thousand
# that soon go, and are still found among the young ones.
_THRESHOLDS = (50_000, 20, 100)


@contextmanager
def rare_collections() -> Iterator[None]:
    """Within the block, collect less often; the thresholds are the process's, and come back afterwards."""
    before = gc.get_threshold()
    if before[0]:  # 0: the caller has turned it off
        gc.set_threshold(*_THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*before)
