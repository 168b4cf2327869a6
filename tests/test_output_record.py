"""Dataclasses as JSON, and read back: nothing of them is lost, and values of another kind are refused by name."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

import pytest

from edge_opt.base.record import Record, RecordError, from_dict, to_json


@dataclass(frozen=True)
class Leaf:
    name: str
    size: int | None = None


@dataclass(frozen=True)
class Tree(Record):
    ratio: float
    leaf: Leaf
    others: tuple[Leaf, ...] = ()
    pair: tuple[str, int] = ("a", 1)
    by_name: Mapping[str, Leaf] = field(default_factory=dict)
    either: Leaf | int = 0
    note: str = ""
    secret: object = None

    _properties = ("count",)
    _left_out = ("secret",)
    _or_null = ("note",)

    @property
    def count(self) -> int:
        return len(self.others)


TREE = Tree(0.5, Leaf("x"), (Leaf("y", 2),), ("b", 2), {"k": Leaf("z")}, either=Leaf("w"), note="n")


def test_a_record_is_what_it_was_after_a_way_through_json() -> None:
    for tree in (TREE, Tree(1, Leaf("x", 3), either=4, note="n")):
        assert from_dict(Tree, json.loads(json.dumps(tree.to_dict()))) == tree
        assert from_dict(Tree, json.loads(json.dumps(asdict(tree)))) == tree


def test_json_has_the_fields_and_the_properties_that_the_record_names() -> None:
    said = Tree(math.nan, Leaf("x"), (Leaf("y"),), secret=object()).to_dict()
    assert (said["ratio"], said["count"], said["note"]) == (None, 1, None)
    assert said["others"] == [{"name": "y", "size": None}]
    assert "secret" not in said
    assert to_json({"a": (math.inf, [TREE])})["a"][0] is None


def test_a_record_that_writes_itself_does_so_inside_another() -> None:
    @dataclass(frozen=True)
    class Loud(Record):
        name: str

        def to_dict(self) -> dict[str, object]:
            return {**Record.to_dict(self), "name": self.name.upper()}

    assert to_json([Loud("n")]) == [{"name": "N"}]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"ratio": "x"}, r"Tree: Expected `float`, got `str` - at `\$.ratio`"),
        ({"ratio": True}, "Expected `float`, got `bool`"),
        ({"leaf": {"size": 1}}, "missing required field `name`"),
        ({"others": [{"name": 1}]}, "Expected `str`, got `int`"),
        ({"pair": ["a"]}, "length"),
        ({"by_name": {"k": 1}}, "got `int`"),
        ({"either": "x"}, "got `str`"),
    ],
)
def test_values_of_another_kind_are_refused_by_name(change: dict[str, object], said: str) -> None:
    with pytest.raises(RecordError, match=said):
        from_dict(Tree, {**TREE.to_dict(), **change})
