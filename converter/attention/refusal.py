"""Why something stays as it is: a value. Functions that ask for it deep inside raise it to the one that returns it."""

from dataclasses import dataclass, field

from edge_opt.ir import Operator, Shape, Tensor
from edge_opt.output.words import shortened


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
        # Now: a doubt of the operator is part of its name, and only while the graph is looked at.
        object.__setattr__(self, "place", "" if self.operator is None else self.operator.name)

    def __str__(self) -> str:
        text = self.condition
        stated = (("expected", self.expected), ("found", self.actual))
        told = [
            f"{word} {value if isinstance(value, str) else list(value)}"
            for word, value in stated
            if value != ""
        ]
        if told:
            text += f" ({', '.join(told)})"
        if self.place:
            text += f", at {self.place}"
        if self.tensor is not None:
            text += f", tensor '{shortened(self.tensor.name)}'"
        return text


class RefusedError(Exception):
    """Carries a refusal to the function that gives it as a value."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(str(refusal))
        self.refusal = refusal
