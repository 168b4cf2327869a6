"""Writes the winner of a tuning down as a target file, which `--target` takes; never over a file without being told."""

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from edge_opt.npu.search import Tuning
from edge_opt.schema.atomic import write_whole
from edge_opt.schema.errors import UsageError
from edge_opt.targets import Target


def tuned_target(tuning: Tuning) -> Target:
    """The target with the form of the winner, and where that comes from.

    Raises:
        UsageError: every trial failed.
    """
    best = tuning.winner
    if best is None:
        raise UsageError(
            f"nothing compiled for target '{tuning.target.name}' with the right numbers: there is no winner to write"
        )
    choice = best.choice
    changed: dict[str, Any] = {"split_signatures": _split(tuning, split=choice.form is not None)}
    if choice.form is not None:
        form = {"form": choice.form, "rows_per_tile": choice.rows_per_tile}
        known = {name: value for name, value in form.items() if value is not None}
        changed |= {"long_context": known} if tuning.long_context else form
        if choice.norm_per_head_from is not None:
            changed["norm_per_head_from"] = choice.norm_per_head_from
    source = (
        f"measured with `edge-opt tune` on {tuning.extent} of {Path(tuning.model).name}, {tuning.signature}"
    )
    others = {name: text for name, text in tuning.target.sources.items() if name not in changed}
    return replace(
        tuning.target,
        **changed,
        sources={**others, **dict.fromkeys(_stated(changed), source)},
        versions={**tuning.versions, "chip": tuning.chip},
    )


def _stated(facts: Mapping[str, Any]) -> list[str]:
    """Names of the facts that say something: others are as in a target of which nothing is known."""
    blank = Target("", "")
    return [name for name, value in facts.items() if value != getattr(blank, name)]


def _split(tuning: Tuning, *, split: bool) -> tuple[str, ...]:
    """Patterns of signatures: with this one, or those that match without it."""
    known = tuning.target.split_signatures
    if split:
        return known if tuning.target.splits(tuning.signature) else (*known, tuning.signature)
    return tuple(
        pattern
        for pattern in known
        if not replace(tuning.target, split_signatures=(pattern,)).splits(tuning.signature)
    )


def write_target(target: Target, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
    """Write a target file.

    Raises:
        UsageError: its name does not end in .toml, or it exists and `overwrite` is False.
        OutputError: it cannot be written.
    """
    if not os.fspath(path).endswith(".toml"):
        raise UsageError(f"{os.fspath(path)} cannot be a target file: its name must end in .toml")
    write_whole(path, to_toml(target).encode(), overwrite=overwrite)


def to_toml(target: Target) -> str:
    """The target's facts as a target file has them; those that are as in a blank one are left out."""
    stated = {"name", "summary", *_stated(target.to_dict())}
    facts = {name: value for name, value in target.to_dict().items() if name in stated}
    tables = {name: value for name, value in facts.items() if isinstance(value, dict)}
    lines = [f"{name} = {_value(value)}" for name, value in facts.items() if name not in tables]
    for name, table in tables.items():
        lines += ["", f"[{name}]", *(f"{_key(key)} = {_value(value)}" for key, value in table.items())]
    return "\n".join(lines) + "\n"


def _key(name: str) -> str:
    return name if name.replace("_", "").replace("-", "").isalnum() and name.isascii() else _value(name)


def _value(value: object) -> str:
    """A TOML value: its strings, numbers and truths are written as in JSON, but for one control character."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(_value(entry) for entry in value)}]"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
