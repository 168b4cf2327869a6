"""The reason for skipping something: inner functions raise it, an outer one reports it."""

from edge_opt.base.words import shortened
from edge_opt.ir.graph import Operator, Shape, Tensor


class RefusedError(Exception):
    """A failed condition: where, what was expected and what was found. Internal: users see only its text."""

    def __init__(
        self,
        condition: str,
        operator: Operator | None = None,
        tensor: Tensor | None = None,
        expected: str | Shape = "",
        actual: str | Shape = "",
    ) -> None:
        compared = [
            f"{word} {value if isinstance(value, str) else list(value)}"
            for word, value in (("expected", expected), ("found", actual))
            if value != ""
        ]
        comparison = f" ({', '.join(compared)})" if compared else ""
        place = "" if operator is None else f", at {operator.title}"
        name = "" if tensor is None else f", tensor '{shortened(tensor.name)}'"
        super().__init__(f"{condition}{comparison}{place}{name}")
