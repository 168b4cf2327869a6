"""Reasons for skipping something, as values. Inner functions raise them; an outer one returns or reports them."""

from dataclasses import dataclass, field

from edge_opt.base.words import shortened
from edge_opt.ir.graph import Operator, Shape, Tensor


@dataclass(frozen=True, slots=True)
class Refusal:
    """A failed condition: where, what was expected and what was found, as words or shapes."""

    condition: str
    operator: Operator | None = None
    tensor: Tensor | None = None
    expected: str | Shape = ""
    actual: str | Shape = ""
    place: str = field(init=False, default="", repr=False)

    def __post_init__(self) -> None:
        # Taken now: the title includes the operator's shape error, which may be cleared later.
        object.__setattr__(self, "place", "" if self.operator is None else f", at {self.operator.title}")

    def __str__(self) -> str:
        compared = [
            f"{word} {value if isinstance(value, str) else list(value)}"
            for word, value in (("expected", self.expected), ("found", self.actual))
            if value != ""
        ]
        comparison = f" ({', '.join(compared)})" if compared else ""
        tensor = "" if self.tensor is None else f", tensor '{shortened(self.tensor.name)}'"
        return f"{self.condition}{comparison}{self.place}{tensor}"


class RefusedError(Exception):
    """Carries a refusal, given as an object or as its fields; internal, users see only the refusal's text."""

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
