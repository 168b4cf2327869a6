"""What runs where: the operators of a signature that the NPU runs, and those that stay on the CPU, with the reasons."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from edge_opt.base.record import Record
from edge_opt.base.words import listed, many, shortened
from edge_opt.ir import Model, Operator
from edge_opt.ir.composites import composite_name
from edge_opt.ir.opening import CALL
from edge_opt.targets.lint import refused_tensors
from edge_opt.targets.target import Target

_NAMED = 3


@dataclass(frozen=True, slots=True)
class OnCpu(Record):
    """An operator that stays on the CPU: its kind, its place in the signature, its first result, and why if known."""

    operator: str
    index: int
    result: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Placement(Record):
    """What runs where in one signature.

    `calls`: pieces on the NPU, each one call; None if only a target's facts are known, which name the least that stays.
    `failure`: why the compiler gave no result.
    """

    signature: str
    calls: int | None
    on_cpu: tuple[OnCpu, ...] = ()
    failure: str = ""

    @property
    def kinds(self) -> list[str]:
        """A line for each kind of operator that stays on the CPU."""
        groups: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
        for one in self.on_cpu:
            groups[one.operator, one.reason].append(f"#{one.index} '{shortened(one.result)}'")
        lines: list[str] = []
        for (operator, reason), places in groups.items():
            why = f": {reason}" if reason else ""
            lines.append(f"{len(places)} {operator}, {listed(places, _NAMED)}{why}")
        return lines

    @property
    def headline(self) -> str:
        """The number of calls to the NPU, and of operators on the CPU."""
        if self.failure:
            return f"not compiled, {self.failure}"
        left = f"{many(len(self.on_cpu), 'operator')} on the CPU"
        if self.calls is None:
            return f"at least {left}"
        if self.calls == 1 and not self.on_cpu:
            return "on the NPU as a whole"
        return f"{many(self.calls, 'call')} to the NPU, {left}"


def placed_by_file(model: Model) -> list[Placement]:
    """What runs where in a compiled model: the CPU runs all but its calls to the NPU."""
    found: list[Placement] = []
    for name, graph in model.entry_points():
        on_cpu: list[OnCpu] = []
        for place, operator in enumerate(graph.operators):
            if operator.code.custom_code != CALL:
                on_cpu.append(on_the_cpu(place, operator))
        found.append(Placement(name, len(graph) - len(on_cpu), tuple(on_cpu)))
    return found


def placed_by_facts(model: Model, target: Target) -> list[Placement]:
    """Signatures with operators that stay on the CPU, as far as the target's facts tell."""
    found: list[Placement] = []
    for name, graph in model.entry_points():
        on_cpu: list[OnCpu] = []
        for place, operator in enumerate(graph.operators):
            reason = _refusal(operator, target)
            if reason:
                on_cpu.append(on_the_cpu(place, operator, reason))
        if on_cpu:
            found.append(Placement(name, None, tuple(on_cpu)))
    return found


def on_the_cpu(place: int, operator: Operator, reason: str = "") -> OnCpu:
    """An operator at this place in its signature, as one that stays on the CPU."""
    kind = composite_name(operator) or operator.name
    result = operator.outputs[0].name if operator.outputs else ""
    return OnCpu(kind, place, result, reason)


def _refusal(operator: Operator, target: Target) -> str:
    """Why the target refuses an operator; empty if it is not known to."""
    if target.refuses(operator):
        return f"{target.name} does not take this kind"
    for kind in refused_tensors(target):
        if any(map(kind.includes, (*operator.computed, *operator.outputs))):
            return kind.text
    return ""


def facts_about(target: Target) -> str:
    """The name of a target's facts as a source."""
    return f"known facts about {target.name}"


def placement_lines(found: Iterable[Placement], source: str) -> list[str]:
    """What runs where, by `source`: first every signature, then the operators; empty if nothing is known."""
    lines: list[str] = []
    details: list[str] = []
    for one in found:
        lines.append(f"  {one.signature}: {one.headline}")
        details += (f"    {one.signature}, {line}" for line in one.kinds)
    return [f"What runs where, by {source}:", *lines, *details] if lines else []
