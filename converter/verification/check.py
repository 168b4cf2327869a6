"""When a rewrite is accepted: the four checks. A pass hands one over with its rewrite.

| check | holds if, on every kernel set |
|---|---|
| `Exact` | all bits are equal, on random and on extreme inputs |
| `Steps` | integers are at most so many quantization steps apart |
| `Within` | results are within a fraction of the largest value |
| `Table` | results are within a tolerance of a reference in float, for every input |

Each knows the inputs that it needs (`trial`), what must hold (`tolerance`), and its words for users.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from edge_opt.base.record import Record
from edge_opt.base.words import many
from edge_opt.ir import DType, Operator, Tensor
from edge_opt.runtime.inputs import InputHint
from edge_opt.runtime.metrics import NONE, Tolerance
from edge_opt.verification.extremes import KINDS
from edge_opt.verification.trial import Parts, Trial

ROUNDING = 1e-6
"""Of the largest value; for floats that optimized kernels round differently for some shapes."""
_STEPS = {DType.INT16: 128}  # the same for integers, in steps by type; otherwise one


class Check(Record, ABC):
    """When a new region may replace the old one."""

    __slots__ = ()
    changes_results: ClassVar[bool] = False
    """True if the old region is wrong, so that the new one is compared with something else."""
    spared: tuple[str, ...] = ()
    """The kinds of extreme inputs (`edge_opt.verification.extremes.KINDS`) that are not run."""
    clipped: tuple[int, int] | None = None
    """The codes to which only the old region clips its result."""

    @property
    @abstractmethod
    def words(self) -> str:
        """What must hold, as users read it."""

    @property
    def tolerance(self) -> Tolerance:
        """How far results may be apart; by default, not at all."""
        return NONE

    def trial(self, hints: Sequence[InputHint], parts: Parts | None) -> Trial:
        """The runs of both versions: inputs of these roles, and the extreme kinds that this check covers."""
        extremes = tuple(kind for kind in KINDS if kind not in self.spared)
        return Trial(tuple(hints), parts=parts, clipped=self.clipped, extremes=extremes)


@dataclass(frozen=True, slots=True)
class Exact(Check):
    """The same bits on random inputs and on every kind of extreme inputs, on every kernel set.

    Optimized kernels of some operators round by shape: where these are part of a region, the reference kernels must
    give the same bits, the optimized ones stay within a bound, and the report says so. `spared`: the kinds of extreme
    inputs (`edge_opt.verification.extremes.KINDS`) on which both versions may rightly differ.
    """

    spared: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "bitwise"

    @property
    def words(self) -> str:
        """What must hold, as users read it."""
        return "bit-identical"


@dataclass(frozen=True, slots=True)
class Steps(Check):
    """Integers at most `count` quantization steps apart, on random and on all extreme inputs.

    `clipped`: the old region clips its result to these codes, and the new one does not; codes beyond count as these.
    """

    count: int
    clipped: tuple[int, int] | None = None

    def __str__(self) -> str:
        return f"steps {self.count}"

    @property
    def words(self) -> str:
        """What must hold, as users read it."""
        return f"at most {many(self.count, 'quantization step')} apart"

    @property
    def tolerance(self) -> Tolerance:
        """So many steps."""
        return Tolerance(steps=self.count)


@dataclass(frozen=True, slots=True)
class Within(Check):
    """`|a - b| <= relative * max|a|` on rows that are not masked everywhere, with the maximum of the whole tensor.

    Extreme inputs are not run, because a softmax amplifies small differences between large logits. `because`: why bits
    may differ.
    """

    relative: float
    because: str = ""

    spared = tuple(KINDS)

    def __str__(self) -> str:
        return f"relative {self.relative:g}"

    @property
    def words(self) -> str:
        """What must hold, as users read it."""
        return f"within {self.relative:g} of the largest value"

    @property
    def tolerance(self) -> Tolerance:
        """A fraction of the largest value."""
        return Tolerance(relative=self.relative)


@dataclass(frozen=True, slots=True)
class Reference:
    """The float version of a region that is wrong: `operators` compute `result` (float32) from the region's input."""

    operators: tuple[Operator, ...]
    result: Tensor


@dataclass(frozen=True, slots=True)
class Table(Check):
    """`|a - b| <= atol`, where `a` is the reference in float, for every value of the region's only input of integers.

    The values are 0 to `count` - 1, and some beyond both ends, where the new region must match the reference at the
    nearest of those.
    """

    atol: float
    count: int = 0
    reference: Reference | None = field(default=None, compare=False, repr=False)

    changes_results = True
    _only_here = ("reference",)

    def __str__(self) -> str:
        return f"absolute {self.atol:g}"

    @property
    def words(self) -> str:
        """What must hold, as users read it."""
        return f"within {self.atol:.3g} of the result in float"

    @property
    def tolerance(self) -> Tolerance:
        """An absolute distance."""
        return Tolerance(atol=self.atol)

    def trial(self, hints: Sequence[InputHint], parts: Parts | None) -> Trial:
        """Every value."""
        del hints, parts
        return Trial(every_below=self.count)


def rounded_by_shape(operators: Iterable[Operator]) -> str:
    """The first operator whose optimized kernel rounds by the shape of its operands; empty if there is none."""
    for operator in operators:
        # AVX2 for operands of one shape, another kernel where one broadcasts.
        if operator.name == "ADD" and operator.output.dtype is DType.INT16:
            return "int16 ADD"
        # XNNPACK declines it; the fallback rounds by the number of rows.
        is_float_softmax = operator.name == "SOFTMAX" and operator.output.dtype.is_float
        if is_float_softmax and operator.option("beta") != 1.0:
            return "SOFTMAX with beta"
    return ""


def rounding_of(output: Tensor) -> Tolerance:
    """By how much optimized kernels that round by shape may change an output."""
    return Tolerance(relative=ROUNDING, steps=_STEPS.get(output.dtype, 1))
