"""What a report needs to know of a conversion; `ConversionResult` is one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from edge_opt.passes import MaskedRows, SiteReport


class SignatureFigures(Protocol):
    """An entry point before and after."""

    name: str
    operators_before: int
    operators_after: int
    largest_tensor_before: int
    largest_tensor_after: int
    blocks: int
    converted: int


class WholeFigures(Protocol):
    """An entry point of the whole models, compared before and after."""

    @property
    def name(self) -> str:
        """The signature."""

    def demanded(self) -> str:
        """How equal it had to be, and why."""

    def found_text(self) -> str:
        """How equal it was."""

    def sentence(self) -> str:
        """All of that."""

    def distances(self) -> dict[str, int]:
        """Elements of float outputs by their distance in units in the last place."""


class Subject(Protocol):
    """A conversion that was done."""

    input: str | None
    output: str | None
    target: str
    verified: str
    seconds: float
    compile_with: str | None

    @property
    def signatures(self) -> Sequence[SignatureFigures]:
        """The entry points."""

    @property
    def sites(self) -> Sequence[SiteReport]:
        """Every site with its verdict."""

    @property
    def converted(self) -> Sequence[SiteReport]:
        """Sites that were rewritten."""

    @property
    def masked_rows(self) -> MaskedRows | None:
        """What changes in rows that are masked everywhere."""

    @property
    def whole(self) -> Sequence[WholeFigures]:
        """What comparing the whole models found; empty where nobody asked."""

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
