"""The JSON form of results that are dataclasses."""

import json
import math
from dataclasses import dataclass, field
from typing import Any

from edge_opt.output.record import Record


@dataclass(frozen=True, slots=True)
class Time:
    ms: float


@dataclass(frozen=True, slots=True)
class Row(Record):
    name: str
    time: Time
    flags: tuple[str, ...] = ()
    by_kind: dict[str, Time] = field(default_factory=dict)

    _properties = ("half",)

    @property
    def half(self) -> float:
        return self.time.ms / 2


@dataclass(frozen=True)
class Named(Record):
    name: str
    rows: list[Row]

    def to_dict(self) -> dict[str, Any]:
        return {**Record.to_dict(self), "name": self.name.upper()}


def test_a_record_has_its_fields_and_properties_all_the_way_down() -> None:
    row = Row("a", Time(3.0), ("x",), {"k": Time(1.0)})
    assert row.to_dict() == {
        "name": "a",
        "time": {"ms": 3.0},
        "flags": ["x"],
        "by_kind": {"k": {"ms": 1.0}},
        "half": 1.5,
    }
    assert Named("n", [row]).to_dict() == {"name": "N", "rows": [row.to_dict()]}


def test_a_number_that_is_not_finite_is_null() -> None:
    told = json.loads(json.dumps(Row("a", Time(math.nan)).to_dict(), allow_nan=False))
    assert (told["time"]["ms"], told["half"]) == (None, None)
