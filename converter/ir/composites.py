"""Composites, operators that stand for a subgraph: how many there are of which name and attributes."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from edge_opt.ir.graph import Operator
from edge_opt.ir.text import attributes, option_text
from edge_opt.output.record import Record

COMPOSITE = "STABLEHLO_COMPOSITE"


@dataclass(frozen=True, slots=True)
class Composite(Record):
    """Composites with the same name and attributes; `attributes` is a text where they cannot be read."""

    name: str
    count: int
    attributes: Any

    def __str__(self) -> str:
        return f"{self.name} {option_text(self.attributes)}"


def composite_name(operator: Operator) -> str:
    """What a composite calls itself, e.g. `odml.rms_norm`; nothing for other operators."""
    named = operator.options if operator.name == COMPOSITE else None
    return "" if named is None else str(named.get("name") or "")


def composites(operators: Iterable[Operator]) -> list[Composite]:
    """The composites among operators, in the order in which each first occurs."""
    found: Counter[tuple[str, bytes]] = Counter()
    for operator in operators:
        if operator.name == COMPOSITE and operator.options is not None:
            content = operator.options.get("composite_attributes")
            found[composite_name(operator), b"" if content is None else bytes(content)] += 1
    return [Composite(name, count, attributes(content)) for (name, content), count in found.items()]
