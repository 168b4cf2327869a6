"""Why something is skipped: inner functions raise the reason, an outer one reports it."""

from dataclasses import dataclass
from enum import StrEnum

from edge_opt.base.words import shortened
from edge_opt.ir.graph import Operator, Shape, Tensor


class Why(StrEnum):
    """The kind of a reason: a code in reports. Below it, for docs/troubleshooting.md: its meaning; what to do."""

    OPEN_LENGTHS = "open-lengths"
    """a length is known only at run time; give `--shape`"""
    NOT_ATTENTION = "not-attention"
    """the SOFTMAX weighs no values, or has no queries and keys; nothing to do"""
    SINGLE_HEAD = "single-head"
    """the block has one head, or one block of rows, already; nothing to do"""
    NO_GAIN = "no-gain"
    """the target gains nothing from a split here; nothing to do"""
    PATTERN = "pattern"
    """attention of a form that is not split; export it in another form, or report it"""
    HEADS = "heads"
    """the axis of the heads is not clear, or heads are mixed or cut apart; report the model"""
    OPERATOR = "operator"
    """an operator has no rule, or operands that are computed; report the exporter's form"""
    QUANTIZATION = "quantization"
    """scales, zero points or types do not allow it; quantize with one scale a tensor"""
    MASK = "mask"
    """the mask cannot become an ADD, or one SELECT; see below, or skip the pass"""
    SHARED_RESULT = "shared-result"
    """another operator reads a result that would vanish; nothing to do"""
    POSITIONS = "positions"
    """positions cannot be followed, or their number is unknown; keep the caches in the bundle"""
    LIMIT = "limit"
    """too many heads, tiles, operators or positions; report the model if it is a real one"""
    TARGET = "target"
    """the target's compiler refuses it; choose another target"""
    INVALID_MODEL = "invalid-model"
    """recorded shapes or types are inconsistent; run `inspect --shapes`, export again"""
    FIXED_ORDER = "fixed-order"
    """the file fixes the order of its operators; export without control dependencies"""
    FRAME = "frame"
    """the rewrite would change something outside its region; report it"""
    INCONCLUSIVE = "inconclusive"
    """the verification had no result; see below"""
    DIFFERENT = "different"
    """the verification found a difference, or the runtime refused the result; report it"""
    BUG = "bug"
    """an unexpected error in edge-opt; report it"""


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
