"""Reads a target's file: which signatures to split, in which form, and what its compiler cannot take."""

from __future__ import annotations

import difflib
import tomllib
from dataclasses import dataclass, fields
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edge_opt.attention.form import AS_FOUND, FORMS
from edge_opt.schema.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from edge_opt.ir import Operator


@dataclass(frozen=True, slots=True)
class Target:
    """Facts about one NPU compiler.

    `form`: how heads are cut. `refused_operators`: operators it does not take. `largest_rank`: of any tensor.
    `mask_constant`: the lowest value of an additive mask; lower ones, and -inf, are raised to it. `rows_per_tile`: most
    query rows of a head in one piece. `largest_mask_bytes`: of one head's mask, else its rows are cut too.
    `inline_composites`: open every composite, not only attention.
    """

    name: str
    summary: str
    form: str = AS_FOUND
    refused_operators: tuple[str, ...] = ()
    largest_rank: int | None = None
    mask_constant: float = -65472.0
    rows_per_tile: int | None = None
    largest_mask_bytes: int | None = None
    inline_composites: bool = False

    def violation(self, operators: Iterable[Operator]) -> str | None:
        """Why the target cannot take these operators; None where it can."""
        for operator in operators:
            if operator.name in self.refused_operators:
                return f"target '{self.name}' does not take {operator.name}"
            for tensor in operator.outputs:
                if self.largest_rank is not None and len(tensor.shape) > self.largest_rank:
                    rank = len(tensor.shape)
                    return f"target '{self.name}' takes rank {self.largest_rank} at most, '{tensor.name}' has {rank}"
        return None


def target_names() -> list[str]:
    """The bundled targets."""
    folder = resources.files(__package__)
    return sorted(
        entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml")
    )


def load_target(name: str) -> Target:
    """A bundled target by name, or a user's own by the path of its file.

    Raises:
        UsageError: there is no such target, or its file says what no target has.
    """
    if name in target_names():
        text = (resources.files(__package__) / f"{name}.toml").read_text(encoding="utf-8")
        return _parse(text, name)
    if not name.endswith(".toml"):
        close = difflib.get_close_matches(name, target_names(), 1)
        hint = f", did you mean '{close[0]}'?" if close else f"; there are: {', '.join(target_names())}"
        raise UsageError(f"target '{name}' does not exist{hint}")
    try:
        text = Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"target file {name} cannot be read: {error}") from error
    return _parse(text, name)


def _parse(text: str, source: str) -> Target:
    try:
        data: dict[str, Any] = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"target file {source} is not valid TOML: {error}") from error
    known = {field.name for field in fields(Target)}
    for key in data:
        if key not in known:
            raise UsageError(
                f"target file {source}: '{key}' is unknown, known are {', '.join(sorted(known))}"
            )
    for key, kind in (("name", str), ("summary", str)):
        if not isinstance(data.get(key), kind):
            raise UsageError(f"target file {source}: '{key}' must be there, as text")
    if data.get("form", AS_FOUND) not in (AS_FOUND, *FORMS):
        raise UsageError(f"target file {source}: form must be one of {', '.join((AS_FOUND, *FORMS))}")
    if "refused_operators" in data:
        data["refused_operators"] = tuple(data["refused_operators"])
    return Target(**data)
