"""Why something is not done: a value. Functions deep inside raise it, to the one that returns or reports it."""

from dataclasses import dataclass, field

from edge_opt.base.words import shortened
from edge_opt.ir.graph import Operator, Shape, Tensor


@dataclass(frozen=True, slots=True)
class Refusal:
    """The condition that failed, where, and what was expected there: words, or shapes."""

    condition: str
    operator: Operator | None = None
    tensor: Tensor | None = None
    expected: str | Shape = ""
    actual: str | Shape = ""
    place: str = field(init=False, default="", repr=False)

    def __post_init__(self) -> None:
        # Now: a shape error of the operator is part of its title, and only while the graph is looked at.
        object.__setattr__(self, "place", "" if self.operator is None else self.operator.title)

    def __str__(self) -> str:
        text = self.condition
        comparison = [
            f"{word} {value if isinstance(value, str) else list(value)}"
            for word, value in (("expected", self.expected), ("found", self.actual))
            if value != ""
        ]
        if comparison:
            text += f" ({', '.join(comparison)})"
        if self.place:
            text += f", at {self.place}"
        if self.tensor is not None:
            text += f", tensor '{shortened(self.tensor.name)}'"
        return text


class RefusedError(Exception):
    """Carries a refusal; it never reaches a user, who is told the refusal.

    Args:
        condition: the condition that failed, or the whole refusal.
        operator, tensor, expected, actual: as of a `Refusal`.
    """

    def __init__(
        self,
        condition: str | Refusal,
        operator: Operator | None = None,
        tensor: Tensor | None = None,
        expected: str | Shape = "",
        actual: str | Shape = "",
    ) -> None:
        if isinstance(condition, str):
            condition = Refusal(condition, operator, tensor, expected, actual)
        super().__init__(str(condition))
        self.refusal = condition
