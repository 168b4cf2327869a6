"""The table of rules: which function derives the results of which operator; it contains no rule itself."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeAlias

from edge_opt.shapes.call import Call, Results
from edge_opt.shapes.errors import ShapeError

Rule: TypeAlias = Callable[[Call], Results]


class RuleEntry(NamedTuple):
    """A rule and what it is told of the operator's form."""

    rule: Rule
    inputs: tuple[int, int | None]
    optional: frozenset[int]
    outputs: int | None
    data_dependent: bool

    @property
    def words(self) -> tuple[str, str]:
        """What the rule says, and where it comes from: the first line of its docstring, and what follows `Source:`."""
        text = self.rule.__doc__ or ""
        match = re.search(r"Source: (.+?)(?:\n\s*\n|\Z)", text, re.DOTALL)
        return text.partition("\n")[0], " ".join(match[1].split()).rstrip(".") if match else ""


_TABLE: dict[str, RuleEntry] = {}


def rule(
    names: str,
    *,
    inputs: int | tuple[int, int | None],
    outputs: int | None = 1,
    optional: tuple[int, ...] = (),
    data_dependent: bool = False,
) -> Callable[[Rule], Rule]:
    """Enter a rule for the named operators.

    Args:
        names: the schema's names of the operators, one after the other.
        inputs: how many inputs they take, or (fewest, most) with None for no limit.
        outputs: how many outputs they have, None for any number.
        optional: inputs that may be left out.
        data_dependent: whether a result's sizes follow from the data, so that only a bound (-1) is derived.
    """
    span = inputs if isinstance(inputs, tuple) else (inputs, inputs)

    def enter(function: Rule) -> Rule:
        for name in names.split():
            assert name not in _TABLE, f"{name} has two rules"
            _TABLE[name] = RuleEntry(function, span, frozenset(optional), outputs, data_dependent)
        return function

    return enter


def find(name: str) -> RuleEntry | None:
    """The rule of an operator, None where there is none."""
    return _TABLE.get(name)


def entries() -> Iterator[tuple[str, RuleEntry]]:
    """Every operator that has a rule."""
    return iter(_TABLE.items())


def apply(entry: RuleEntry, call: Call) -> Results:
    """Derive the shapes of the results.

    Raises:
        ShapeError: the inputs cannot go together; the sentence has no place yet.
    """
    _check_form(entry, call)
    results = entry.rule(call)
    assert len(results) == len(call.op.outputs), f"{call.name}: {len(results)} results"
    return results


def _check_form(entry: RuleEntry, call: Call) -> None:
    count = len(call.op.inputs)
    low, high = entry.inputs
    if count < low or (high is not None and count > high):
        raise ShapeError(f"it has {count} inputs: expected {_span_text(low, high)}")
    if entry.outputs is not None and len(call.op.outputs) != entry.outputs:
        raise ShapeError(f"it has {len(call.op.outputs)} outputs: expected {entry.outputs}")
    for index, tensor in enumerate(call.op.inputs):
        if tensor is None and index not in entry.optional:
            raise ShapeError(f"input {index} is left out, but it is not optional")


def _span_text(low: int, high: int | None) -> str:
    if high is None:
        return f"{low} or more"
    return str(low) if low == high else f"{low} to {high}"
