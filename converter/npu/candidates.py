"""Which forms are worth trying for an attention, from its shapes and what its target states. Runs nothing."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from edge_opt.attention.form import FORMS
from edge_opt.conversion import convert
from edge_opt.passes.tile_rows import rows_of_a_tile

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator
    from pathlib import Path

    from edge_opt.attention.block import Block
    from edge_opt.targets import Target

_TILES, _LEAST_ROWS = 4, 2
_CHAINED_ROWS = (64, 32, 16)


@dataclass(frozen=True, slots=True)
class Choice:
    """How one trial rewrites the attention; `form` None leaves it as exported."""

    form: str | None = None
    rows_per_tile: int | None = None
    chain: bool = False
    projection_per_head: bool = False

    def __str__(self) -> str:
        if self.form is None:
            return "as exported"
        rows = "" if self.rows_per_tile is None else f", tiles of {self.rows_per_tile} rows"
        projected = ", projected per head" if self.projection_per_head else ""
        return self.form + rows + (", chained" if self.chain else "") + projected

    def convert(self, exported: str | os.PathLike[str], output: Path, target: Target) -> None:
        """Write the exported model in this form; nothing is proved here."""
        convert(exported, output, target=self.applied(target), verify="none")

    def applied(self, target: Target) -> Target:
        """The target with this form, which must be one, for every signature and length; its other facts stay."""
        assert self.form is not None
        return replace(
            target,
            form=self.form,
            rows_per_tile=self.rows_per_tile,
            chain=self.chain,
            projection_per_head=self.projection_per_head,
            long_context={},
            quantized_long_context={},
            split_signatures=("*",),
        )


def choices(target: Target, attention: Block) -> Iterator[Choice]:
    """As exported, every form, the projection per head of floats, tiles; chains where a head does not fit on the chip.

    Rows are cut wherever the target's limit on a mask's size asks for it.
    """
    rows = attention.query_length
    most = rows_of_a_tile(replace(target, rows_per_tile=None), attention)
    cut = None if most == rows else most
    yield Choice()
    grouped = 1 < attention.kv_heads < attention.heads
    yield from (Choice(name, cut) for name, form in FORMS.items() if form.keys == "split" or grouped)
    if attention.output.dtype.is_float:
        yield Choice("split", cut, projection_per_head=True)
    if _LEAST_ROWS <= rows // _TILES < most:
        yield Choice("split", rows // _TILES)
    if target.overflows(attention):
        yield from (
            Choice("split", size, chain=True) for size in _CHAINED_ROWS if size <= most and size < rows
        )
