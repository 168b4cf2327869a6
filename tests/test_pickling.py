"""Results and errors reach other processes: every one pickles, and says the same there."""

import copy
import importlib
import pickle
import pkgutil
import types
import typing
from collections.abc import Mapping, Sequence
from enum import Enum
from inspect import isabstract
from pathlib import Path
from typing import Any

import pytest
from toy_passes import CHAIN

import edge_opt
from edge_opt.base.errors import EdgeOptError
from edge_opt.base.record import Record, to_json
from edge_opt.conversion import convert
from edge_opt.ir import Model, Operator, Tensor, to_bytes
from edge_opt.ir.parse import parse

BESIDE = ("testdata", "tests", "benchmarks", "docs", "examples", "__main__")


def kinds(of: type[Any]) -> list[type[Any]]:
    """A class of the package and its subclasses, of every module."""
    for module in pkgutil.walk_packages(edge_opt.__path__, "edge_opt."):
        if module.name.split(".")[1] not in BESIDE:
            importlib.import_module(module.name)
    found = [of]
    for kind in found:
        found += [each for each in kind.__subclasses__() if each not in found]
    # A dataclass with slots is a second class of its name.
    return [
        kind
        for kind in found
        if getattr(importlib.import_module(kind.__module__), kind.__name__) is kind
        and not isabstract(kind)
    ]


ERRORS = kinds(EdgeOptError)
RECORDS = kinds(Record)[1:]
PLAIN = {str: "text", int: 3, float: 0.5, bool: True, bytes: b"bytes", Path: Path("model.tflite")}


def sample(hint: Any) -> Any:
    """A value of a field's type that is as hard to pickle as can be: with graphs and functions in it."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is None:
        return of_class(hint)
    if origin in (typing.Union, types.UnionType):
        return sample(next(each for each in inner if each is not type(None)))
    if origin is tuple:
        return tuple(sample(item) for item in inner if item is not ...)
    if origin in (list, Sequence):
        return [sample(inner[0])]
    if origin in (dict, Mapping):
        return {sample(inner[0]): sample(inner[1])}
    return inner[0] if origin is typing.Literal else lambda *_: None


def of_class(hint: Any) -> Any:
    if hint in (Model, Operator, Tensor):
        model = parse(CHAIN)
        operator = model.subgraphs[0].operators[0]
        return {Model: model, Operator: operator, Tensor: operator.output}[hint]
    if isinstance(hint, type) and issubclass(hint, Enum):
        return next(iter(hint))
    if isinstance(hint, type) and hasattr(hint, "__dataclass_fields__"):
        return made(kinds(hint)[-1] if isabstract(hint) else hint)
    return PLAIN.get(hint, "anything")


def made(kind: type[Any]) -> Any:
    """An object of a dataclass, with every field filled."""
    hints = typing.get_type_hints(kind)
    return kind(**{name: sample(hints[name]) for name in kind.__dataclass_fields__})


def through(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


@pytest.mark.parametrize("kind", RECORDS, ids=lambda kind: kind.__name__)
def test_every_result_pickles_and_says_the_same(kind: type[Any]) -> None:
    value = made(kind)
    for other in (through(value), copy.deepcopy(value)):
        assert type(other) is kind
        for name in kind.__dataclass_fields__:
            if name not in kind._only_here:
                assert to_json(getattr(other, name)) == to_json(getattr(value, name))


@pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: kind.__name__)
def test_every_error_pickles_with_its_message_and_its_result(kind: type[EdgeOptError]) -> None:
    error = kind("message")
    error.result = convert(to_bytes(parse(CHAIN)), verify="none")
    other = through(error)
    assert (type(other), str(other), other.exit_code) == (kind, str(error), error.exit_code)
    assert other.result.summary() == error.result.summary()
    assert {**vars(other), "result": None} == {**vars(error), "result": None}
