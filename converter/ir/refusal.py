"""Why something is skipped: inner functions raise the reason, an outer one reports it."""

from dataclasses import dataclass
from enum import StrEnum

from edge_opt.base.words import shortened
from edge_opt.ir.graph import Operator, Shape, Tensor


class Why(StrEnum):
    """The kind of a reason: a code in reports, with its meaning in docs/troubleshooting.md."""

    OPEN_LENGTHS = "open-lengths"
    NOT_ATTENTION = "not-attention"
    SINGLE_HEAD = "single-head"
    NO_GAIN = "no-gain"
    PATTERN = "pattern"
    HEADS = "heads"
    OPERATOR = "operator"
    QUANTIZATION = "quantization"
    MASK = "mask"
    SHARED_RESULT = "shared-result"
    POSITIONS = "positions"
    LIMIT = "limit"
    TARGET = "target"
    INVALID_MODEL = "invalid-model"
    FIXED_ORDER = "fixed-order"
    FRAME = "frame"
    INCONCLUSIVE = "inconclusive"
    DIFFERENT = "different"
    BUG = "bug"


MEANINGS: dict[Why, tuple[str, str]] = {
    Why.OPEN_LENGTHS: ("a length is known only at run time", "give `--shape`"),
    Why.NOT_ATTENTION: (
        "the SOFTMAX weighs no values, or has no queries and keys",
        "nothing to do",
    ),
    Why.SINGLE_HEAD: ("the block has one head, or one block of rows, already", "nothing to do"),
    Why.NO_GAIN: ("the target gains nothing from a split here", "nothing to do"),
    Why.PATTERN: (
        "attention of a form that is not split",
        "export it in another form, or report it",
    ),
    Why.HEADS: (
        "the axis of the heads is not clear, or heads are mixed or cut apart",
        "report the model",
    ),
    Why.OPERATOR: (
        "an operator has no rule, or operands that are computed",
        "report the exporter's form",
    ),
    Why.QUANTIZATION: (
        "scales, zero points or types do not allow it",
        "quantize with one scale a tensor",
    ),
    Why.MASK: ("the mask cannot become an ADD, or one SELECT", "see below, or skip the pass"),
    Why.SHARED_RESULT: ("another operator reads a result that would vanish", "nothing to do"),
    Why.POSITIONS: (
        "positions cannot be followed, or their number is unknown",
        "keep the caches in the bundle",
    ),
    Why.LIMIT: (
        "too many heads, tiles, operators or positions",
        "report the model if it is a real one",
    ),
    Why.TARGET: ("the target's compiler refuses it", "choose another target"),
    Why.INVALID_MODEL: (
        "recorded shapes or types are inconsistent",
        "run `inspect --shapes`, export again",
    ),
    Why.FIXED_ORDER: (
        "the file fixes the order of its operators",
        "export without control dependencies",
    ),
    Why.FRAME: ("the rewrite would change something outside its region", "report it"),
    Why.INCONCLUSIVE: ("the verification had no result", "see below"),
    Why.DIFFERENT: (
        "the verification found a difference, or the runtime refused the result",
        "report it",
    ),
    Why.BUG: ("an unexpected error in edge-opt", "report it"),
}
"""What each kind means, and what to do."""


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a place is skipped, reverted, or needs no rewrite: its kind, and a text that names operator and tensor."""

    why: Why
    text: str

    def __str__(self) -> str:
        return self.text


class RefusedError(Exception):
    """A failed condition: where, what was expected and what was found. Internal: users see only its `reason`."""

    def __init__(
        self,
        why: Why,
        condition: str,
        operator: Operator | None = None,
        tensor: Tensor | None = None,
        expected: str | Shape = "",
        actual: str | Shape = "",
    ) -> None:
        compared: list[str] = []
        for word, value in (("expected", expected), ("found", actual)):
            if value != "":
                compared.append(f"{word} {value if isinstance(value, str) else list(value)}")
        comparison = f" ({', '.join(compared)})" if compared else ""
        place = "" if operator is None else f", at {operator.title}"
        name = "" if tensor is None else f", tensor '{shortened(tensor.name)}'"
        self.reason = Reason(why, f"{condition}{comparison}{place}{name}")
        super().__init__(self.reason.text)
