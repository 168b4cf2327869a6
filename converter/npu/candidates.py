"""Which forms are worth trying for an attention, from its shapes. Runs nothing."""

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from edge_opt.attention.block import Block
from edge_opt.attention.form import FORMS
from edge_opt.conversion import convert
from edge_opt.targets import Target

_TILES, _LEAST_ROWS = 4, 2
_SMALL_TILES = (128, 64)
_ALWAYS = 1  # a least head size that every attention has


@dataclass(frozen=True, slots=True)
class Choice:
    """How one trial rewrites the attention; `form` None leaves it as exported.

    `norm_per_head_from`: other than the target's.
    """

    form: str | None = None
    rows_per_tile: int | None = None
    norm_per_head_from: int | None = None

    def __str__(self) -> str:
        if self.form is None:
            return "as exported"
        rows = "" if self.rows_per_tile is None else f", tiles of {self.rows_per_tile} rows"
        norms = {None: "", _ALWAYS: ", a norm for each head"}.get(
            self.norm_per_head_from, ", one norm for all"
        )
        return self.form + rows + norms

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
            long_context={},
            norm_per_head_from=self.norm_per_head_from or target.norm_per_head_from,
            split_signatures=("*",),
        )


def choices(attention: Block, target: Target) -> Iterator[Choice]:
    """As exported, every form, and of the one that is mostly the best tiles of rows and the other cut at the norm."""
    rows, least = attention.query_length, target.norm_per_head_from or _ALWAYS
    yield Choice()
    yield from map(Choice, FORMS)
    other = _ALWAYS if attention.head_size < least else attention.head_size + 1
    yield Choice("split-above", norm_per_head_from=other)
    sizes = dict.fromkeys((rows // _TILES, *_SMALL_TILES))
    yield from (
        Choice("split-above", size) for size in sizes if _LEAST_ROWS <= size < rows and rows % size == 0
    )
