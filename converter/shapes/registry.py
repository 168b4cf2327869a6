"""The table of rules: which function derives the results of which operator; it contains no rule itself."""

import re
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from edge_opt.ir.arity import Arity
from edge_opt.shapes.call import Call, Results
from edge_opt.shapes.errors import ShapeError, UnknownError

Rule: TypeAlias = Callable[[Call], Results]


class RuleEntry(NamedTuple):
    """A rule, and the form of the operators that it is for."""

    rule: Rule
    arity: Arity
    data_dependent: bool

    @property
    def words(self) -> tuple[str, str]:
        """What the rule says, and where it comes from: the first line of its docstring, and what follows `Source:`."""
        text = self.rule.__doc__ or ""
        match = re.search(r"Source: (.+?)(?:\n\s*\n|\Z)", text, re.DOTALL)
        return text.partition("\n")[0], " ".join(match[1].split()).rstrip(".") if match else ""


RULES: dict[str, RuleEntry] = {}


def rule(
    names: str,
    *,
    inputs: int | tuple[int, int | None],
    outputs: int | None = 1,
    gaps: bool = False,
    data_dependent: bool = False,
) -> Callable[[Rule], Rule]:
    """Enter a rule for the named operators.

    Args:
        names: the schema's names of the operators, one after the other.
        inputs: how many inputs they take, or (fewest, most) with None for no limit; those in between may be left out.
        outputs: how many outputs they have, None for any number.
        gaps: whether inputs may be left out though there is no limit.
        data_dependent: whether a result's sizes follow from the data, so that only a bound (-1) is derived.
    """
    least, most = inputs if isinstance(inputs, tuple) else (inputs, inputs)
    arity = Arity(least, most, outputs, gaps)

    def enter(function: Rule) -> Rule:
        for name in names.split():
            assert name not in RULES, f"{name} has two rules"
            RULES[name] = RuleEntry(function, arity, data_dependent)
        return function

    return enter


def apply(entry: RuleEntry, call: Call) -> Results:
    """Derive the shapes of the results, None for each where too little is known.

    Raises:
        ShapeError: the inputs cannot go together; the sentence has no place yet.
    """
    outputs = call.op.outputs
    misfit = entry.arity.misfit(call.op.inputs, outputs)
    if misfit is not None:
        raise ShapeError(f"it {misfit}")
    try:
        results = entry.rule(call)
    except UnknownError:
        return [None] * len(outputs)
    assert len(results) == len(outputs), f"{call.name}: {len(results)} results"
    return results
