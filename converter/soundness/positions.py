"""Rotary embeddings whose integers end before the cache does: every later token gets the last position's angles."""

from collections.abc import Iterator
from contextlib import suppress

from edge_opt.attention.positions import find_rotary
from edge_opt.ir import Model
from edge_opt.ir.refusal import RefusedError
from edge_opt.soundness.findings import Unsound


def stopped_positions(model: Model, positions: int | None) -> Iterator[Unsound]:
    """Cosines and sines that are the same from some position on, of so many that the cache holds (None: not known)."""
    if positions is None:
        return
    for name, graph in model.entry_points():
        for rotary in find_rotary(graph):
            with suppress(RefusedError):  # of an operator that is not understood nothing is said
                last = rotary.last_position(positions)
                if last is not None:
                    yield Unsound(
                        "positions-stop",
                        name,
                        rotary.result.name,
                        f"stops counting at position {last} of {positions}: all later tokens are taken for that one",
                        "run `edge-opt convert` on the bundle, which makes a table of all positions",
                    )
