"""The one record of each operator: inputs and outputs, effect, types, options, versions.

Rooms register behaviour for an operator (a shape rule, say) in tables of their own, by name, and no facts.
"""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import cache
from importlib.resources import files
from typing import Any, Final, TypeVar

from edge_opt.ir.dtypes import DType
from edge_opt.schema.table import ENUMS, UNIONS, Table, new_table

BUILTIN_OPERATORS: dict[str, int] = ENUMS["BuiltinOperator"]
_T = TypeVar("_T")


class Effect(Enum):
    """What an operator does with the elements of its data operands."""

    ELEMENTWISE = auto()  # a result's element is computed from those at its place; operands may broadcast
    ALONG_ROWS = auto()  # a row of the last axis is computed from the operand's row, of the same length
    REDUCTION = auto()  # folds whole axes
    PRODUCT = auto()  # of matrices
    CONVOLUTION = auto()
    REARRANGING = auto()  # all elements, under other axes
    CUTTING = auto()  # parts of the operand; each result is one
    PADDING = auto()
    REPEATING = auto()  # may take elements several times
    JOINING = auto()
    CALLING = auto()  # runs subgraphs
    RANDOM = auto()
    UNKNOWN = auto()  # code that is not the runtime's
    OTHER = auto()  # nothing above; no rewrite looks at it


_UNSEEN: Final = {Effect.CALLING, Effect.RANDOM, Effect.UNKNOWN, Effect.OTHER}


@dataclass(frozen=True, slots=True)
class Version:
    """A version of an operator: the first runtime that has it, and the types or the rank that need it."""

    runtime: str
    types: frozenset[DType] = frozenset()
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class OperatorKind:
    """Known facts about an operator; operators.toml says what each means.

    It has `least` to `most` inputs (-1 is any number) and `outputs` outputs (None: any number). Inputs from `least` to
    `most` may be left out; without a limit only where there are `gaps`. `data` are the inputs that the results are made
    of (None: all). `result` is "data", the name of an option, a type, or None where nothing fixes it. Only a CUTTING
    operator has several results that are made of its data; behind the first, those of others hold indices or scratch.
    """

    effect: Effect
    least: int
    most: int
    outputs: int | None
    data: tuple[int, ...] | None
    result: DType | str | None
    copies: bool = False
    gaps: bool = False
    options: str | None = None
    versions: tuple[Version, ...] = ()

    @property
    def is_followed(self) -> bool:
        """Whether rewrites look at the operator: then a graph where it has another form is refused."""
        return self.effect not in _UNSEEN

    def misfit(self, inputs: Sequence[object], outputs: Sequence[object]) -> str | None:
        """Why an operator cannot have these inputs and outputs; None where it can."""
        least, most = self.least, self.most
        if len(inputs) < least or 0 <= most < len(inputs):
            wanted = f"{least} or more" if most < 0 else " or ".join(map(str, range(least, most + 1)))
            return f"has {len(inputs)} inputs, expected {wanted}"
        if self.is_followed and not outputs:
            return f"has 0 outputs, expected {self.outputs or '1 or more'}"
        if self.outputs not in (None, len(outputs)):
            return f"has {len(outputs)} outputs, expected {self.outputs}"
        required = inputs if most < 0 and not self.gaps else inputs[:least]
        return "leaves out an input that it needs" if None in required else None

    def has_data_at(self, place: int) -> bool:
        """Whether the results are made of the input at this place."""
        return self.data is None or place in self.data

    def data_operands(self, inputs: Sequence[_T | None]) -> list[_T]:
        """Of an operator's inputs, those that its results are made of."""
        return [given for place, given in enumerate(inputs) if given is not None and self.has_data_at(place)]

    def data_results(self, outputs: Sequence[_T]) -> Sequence[_T]:
        """Of an operator's outputs, those that are made of its data operands."""
        return outputs if self.effect is Effect.CUTTING else outputs[:1]

    def version_for(self, *types: DType, rank: int = 0) -> int:
        """The lowest version for data operands of these types and this rank; 1 for one that no rewrite adds."""
        needed = (
            number
            for number, version in enumerate(self.versions, 1)
            if not version.types.isdisjoint(types) or (version.rank is not None and rank >= version.rank)
        )
        return max(needed, default=1)

    def runtime(self, version: int) -> str:
        """The first runtime that has this version, e.g. "2.3.0"; empty for an operator that no rewrite adds."""
        return self.versions[version - 1].runtime if 0 < version <= len(self.versions) else ""


def _record(name: str, facts: Mapping[str, Any]) -> OperatorKind:
    """The record of an operator, from its entry in operators.toml; nothing is known of one that has none."""
    options = facts.get("options") or _OWN_OPTIONS.get(name.replace("_", "").lower())
    if "effect" not in facts:
        return OperatorKind(Effect.OTHER, 0, -1, None, (), None, gaps=True, options=options)
    inputs, outputs, data = facts.get("inputs", "1"), facts.get("outputs", "1"), facts.get("data", [0])
    least, _, most = inputs.rstrip("+").partition("-")
    result = facts.get("result", "data")
    return OperatorKind(
        Effect[facts["effect"].upper()],
        int(least),
        -1 if inputs.endswith("+") else int(most or least),
        None if outputs == "any" else int(outputs),
        None if data == "all" else tuple(data),
        DType[result] if result in DType.__members__ else result or None,
        facts.get("copies", False),
        facts.get("gaps", False),
        options,
        tuple(map(_version, filter(None, facts.get("versions", "").split(", ")))),
    )


def _version(text: str) -> Version:
    runtime, *needs = text.split()
    ranks = [int(word.removeprefix("RANK")) for word in needs if word.startswith("RANK")]
    return Version(runtime, frozenset(DType[word] for word in needs if word in DType.__members__), *ranks)


_FACTS: Final = tomllib.loads(files("edge_opt.ir").joinpath("operators.toml").read_text("utf-8"))
_OWN_OPTIONS: Final = {
    table.removesuffix("Options").lower(): table
    for union in ("BuiltinOptions2", "BuiltinOptions")
    for table in UNIONS[union].values()
}
KINDS: Final = {name: _record(name, _FACTS.get(name, {})) for name in BUILTIN_OPERATORS}
"""The record of each builtin operator, by its name in the schema."""

SUBGRAPH_FIELDS: Final[dict[str, tuple[str, ...]]] = {
    str(KINDS[name].options): tuple(facts["calls"]) for name, facts in _FACTS.items() if "calls" in facts
}
"""Options table -> its fields that hold subgraph indices (schema.fbs names them by these words only)."""


def operators_that(*effects: Effect) -> frozenset[str]:
    """Names of the operators with one of these effects."""
    return frozenset(name for name, kind in KINDS.items() if kind.effect in effects)


UNARY: Final = frozenset(name for name in operators_that(Effect.ELEMENTWISE) if KINDS[name].least == 1)
"""Elementwise operators of one operand."""


@cache
def default_options(operator: str) -> Table | None:
    """Options with nothing but the schema's defaults; None for an operator that has none. Not to be edited."""
    table = KINDS[operator].options
    return None if table is None else new_table(table)


def subgraph_indices(options: Table | None) -> tuple[int, ...]:
    """The subgraphs that these options name, each as often as they do."""
    if options is None:
        return ()
    indices: list[int] = []
    for field in SUBGRAPH_FIELDS.get(options.name, ()):
        value = options.get(field)
        if isinstance(value, int):
            indices.append(value)
        elif value is not None:
            indices.extend(value.tolist())
    return tuple(indices)
