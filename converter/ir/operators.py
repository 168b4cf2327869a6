"""Facts about each operator: inputs and outputs, effect, types, options, versions.

Other packages register behaviour by operator name (a shape rule, say), but keep all facts here.
"""

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from importlib.resources import files
from typing import TypeVar

import msgspec
import numpy as np

from edge_opt.ir.dtypes import DType
from edge_opt.schema.table import ENUMS, UNIONS, Table, new_table

BUILTIN_OPERATORS: dict[str, int] = ENUMS["BuiltinOperator"]
OPERATOR_NAMES = {code: name for name, code in BUILTIN_OPERATORS.items()}
_T = TypeVar("_T")


class Effect(Enum):
    """What an operator does with the elements of its data operands."""

    ELEMENTWISE = "elementwise"  # from the elements at the result's index; operands may broadcast
    ALONG_ROWS = "along_rows"  # from the operand's row of the last axis, of the same length
    REDUCTION = "reduction"  # folds whole axes
    PRODUCT = "product"  # matrix product
    CONVOLUTION = "convolution"
    REARRANGING = "rearranging"  # all elements, on other axes
    CUTTING = "cutting"  # each result is a part of the operand
    PADDING = "padding"
    REPEATING = "repeating"  # may repeat elements
    JOINING = "joining"
    CALLING = "calling"  # runs subgraphs
    RANDOM = "random"
    UNKNOWN = "unknown"  # code outside the runtime
    OTHER = "other"  # none of these; rewrites ignore it


_UNSEEN = {Effect.CALLING, Effect.RANDOM, Effect.UNKNOWN, Effect.OTHER}


@dataclass(frozen=True, slots=True)
class OperatorKind:
    """Known facts about an operator; operators.toml documents the fields."""

    effect: Effect
    min_inputs: int = 1
    max_inputs: int = 1
    outputs: int = 1
    data: tuple[int, ...] = (0,)
    all_data: bool = False
    copies: bool = False
    may_omit: bool = False
    options: str | None = None
    calls: tuple[str, ...] = ()
    versions: tuple[str, ...] = ()

    @property
    def is_followed(self) -> bool:
        """True if rewrites handle the operator; its inputs and outputs must then have the documented form."""
        return self.effect not in _UNSEEN

    def misfit(self, inputs: Sequence[object], outputs: Sequence[object]) -> str | None:
        """Why these inputs and outputs are invalid for the operator; None if they are valid."""
        least = self.min_inputs
        most = self.max_inputs
        if len(inputs) < least or 0 <= most < len(inputs):
            counts = " or ".join(map(str, range(least, most + 1)))
            return f"has {len(inputs)} inputs, expected {counts or f'{least} or more'}"
        if self.outputs not in (-1, len(outputs)) or (self.is_followed and not outputs):
            return f"has {len(outputs)} outputs, expected {'1 or more' if self.outputs < 0 else self.outputs}"
        required = inputs if most < 0 and not self.may_omit else inputs[:least]
        return "leaves out an input that it needs" if None in required else None

    def has_data_at(self, place: int) -> bool:
        """True if the input at this index is a data operand."""
        return self.all_data or place in self.data

    def takes(self, tensor: object, inputs: Sequence[object]) -> bool:
        """True if this one of the inputs is a data operand."""
        # Without a look at all inputs: there may be thousands that are joined.
        return self.all_data or any(
            inputs[place] is tensor for place in self.data if place < len(inputs)
        )

    def data_operands(self, inputs: Sequence[_T | None]) -> list[_T]:
        """The inputs from which the results take their elements."""
        return [
            given
            for place, given in enumerate(inputs)
            if given is not None and self.has_data_at(place)
        ]

    def data_results(self, outputs: Sequence[_T]) -> Sequence[_T]:
        """The outputs made from the data operands; other outputs hold indices or scratch."""
        return outputs if self.effect is Effect.CUTTING else outputs[:1]

    def version_for(self, *types: DType, rank: int = 0) -> int:
        """The lowest version for data operands of these types and rank; 1 for operators that no rewrite adds."""
        needs = {dtype.name for dtype in types}
        needs.update(f"RANK{size}" for size in range(rank + 1))
        version = 1
        for number, reasons in enumerate(self.versions, 1):
            if not needs.isdisjoint(reasons.split()):
                version = number
        return version


_FACTS = tomllib.loads(files("edge_opt.ir").joinpath("operators.toml").read_text("utf-8"))
_NOTHING_KNOWN = {
    "effect": "other", "min_inputs": 0, "max_inputs": -1, "outputs": -1, "data": [], "may_omit": True
}  # fmt: skip
_OWN_OPTIONS = {
    table.removesuffix("Options").lower(): table
    for union in ("BuiltinOptions2", "BuiltinOptions")
    for table in UNIONS[union].values()
}


KINDS: dict[str, OperatorKind] = {}
"""Facts about each builtin operator, by schema name."""

for _name in BUILTIN_OPERATORS:
    _own = {"options": _OWN_OPTIONS.get(_name.replace("_", "").lower()), **_FACTS.get(_name, {})}
    KINDS[_name] = msgspec.convert(
        _own if "effect" in _own else {**_NOTHING_KNOWN, **_own}, OperatorKind
    )

SUBGRAPH_FIELDS = {str(kind.options): kind.calls for kind in KINDS.values() if kind.calls}
"""Options table -> its fields that hold subgraph indices (schema.fbs does not mark them)."""


def operators_that(*effects: Effect) -> frozenset[str]:
    """Names of the operators with one of these effects."""
    return frozenset(name for name, kind in KINDS.items() if kind.effect in effects)


UNARY = frozenset(
    name for name in operators_that(Effect.ELEMENTWISE) if KINDS[name].min_inputs == 1
)
"""Elementwise operators with one operand."""


@cache
def default_options(operator: str) -> Table | None:
    """An operator's options with the schema's defaults, or None if it has no options. Do not edit the result."""
    table = KINDS[operator].options
    return None if table is None else new_table(table)


def subgraph_indices(options: Table | None) -> tuple[int, ...]:
    """Subgraph indices in these options, with repeats."""
    if options is None or options.name not in SUBGRAPH_FIELDS:
        return ()
    found: list[int] = []
    for name in SUBGRAPH_FIELDS[options.name]:
        value = options.get(name)
        if value is not None:
            found += np.ravel(value).tolist()
    return tuple(found)
