"""Attributes of composites are decoded wherever composites are shown; bytes of another format harm nothing."""

import random
from typing import Any

import numpy as np
import pytest
from cli_runs import DEMO, run
from flatbuffers import flexbuffers
from text_parser import parse

from edge_opt.base.errors import ModelFormatError
from edge_opt.inspection import inspect
from edge_opt.ir.composites import composites
from edge_opt.ir.text import to_text
from edge_opt.schema.flexbuffers import read_flexbuffer

# As litert-torch fills them: odml.sdpa_transposed, odml.rope, odml.swiglu; then every other kind that is read.
VALUES: list[Any] = [
    {"from_cache_update": True, "is_causal": False, "k_ts_idx": 2, "softcap": 50.0, "v_ts_idx": 3},
    {"max_timescale": 1e6, "min_timescale": 1.0, "epsilon": float(np.float32(1e-6))},
    {"activation": "gelu_tanh", "gate_size": 104},
    {},
    {"a": [1, "two", None, 3.5, False], "b": [], "d": -(2**40), "e": 2**62, "f": "ü" * 300},
    [1, 2, 3],
    7,
]


def typed_vectors() -> bytes:
    builder = flexbuffers.Builder()
    with builder.Map():
        for key, elements in (("bools", [True, False]), ("floats", [0.5, 0.1]), ("ints", [-1, 300, 70000])):
            builder.Key(key)
            builder.TypedVectorFromElements(elements)
        builder.IndirectInt("far", -5)
        builder.IndirectFloat("far float", 0.25)
    return bytes(builder.Finish())


CONTENTS = [*map(bytes, map(flexbuffers.Dumps, VALUES)), typed_vectors()]


def same(ours: Any, theirs: Any) -> bool:
    if isinstance(theirs, dict):
        return list(ours) == list(theirs) and all(same(ours[key], theirs[key]) for key in theirs)
    if isinstance(theirs, list):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    if isinstance(theirs, float):  # ours is the shortest decimal of the same four bytes
        return theirs in (ours, float(np.float32(ours)))
    return type(ours) is type(theirs) and bool(ours == theirs)


@pytest.mark.parametrize("content", CONTENTS)
def test_values_are_those_of_the_format_s_own_reader(content: bytes) -> None:
    assert same(read_flexbuffer(content), flexbuffers.Loads(content))


# Size, elements, their types; then the root: distance back to the elements, its type, its width. A vector is type 10.
ITSELF = bytes([1, 0, 40, 2, 40, 1])


@pytest.mark.parametrize("content", [flexbuffers.Dumps({"a": {"b": [1]}, "c": 2}), ITSELF])
def test_nothing_nested_is_followed(content: bytes) -> None:
    read = read_flexbuffer(bytes(content))
    assert "<nested FlexBuffer value>" in (read.values() if isinstance(read, dict) else read)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "not a FlexBuffer"),
        (bytes([9, 4, 40, 1]), "not a FlexBuffer"),
        (flexbuffers.Dumps([1] * 257), "more than 256 values"),
        (flexbuffers.Dumps("x" * 20000), "at most 16384 are read"),
    ],
)
def test_what_is_not_a_flexbuffer_or_too_large_is_refused(content: bytes, reason: str) -> None:
    with pytest.raises(ModelFormatError, match=reason):
        read_flexbuffer(bytes(content))


def test_damaged_bytes_end_in_values_or_in_the_typed_error() -> None:
    dice, refused = random.Random(26), 0
    for _ in range(20_000):
        content = bytearray(dice.choice(CONTENTS))
        for _ in range(dice.randint(1, 4)):
            content[dice.randrange(len(content))] = dice.choice((0, 1, 127, 255, dice.randrange(256)))
        del content[len(content) - dice.choice((0, 0, 0, dice.randrange(len(content)))) :]
        try:
            read_flexbuffer(bytes(content))
        except ModelFormatError:
            refused += 1
    assert 200 < refused < 19_000


COMPOSITE = """subgraph main (%x: float32[2]) {
  %y: float32[2] = STABLEHLO_COMPOSITE(%x) {name: 'odml.rope', composite_attributes: ATTRIBUTES}
  return %y
}
subgraph body (%x: float32[2]) {
  return %x
}
"""


def test_the_text_form_shows_them_bytes_that_cannot_be_read_are_counted_and_without_bytes_there_are_no_attributes() -> (
    None
):
    text = COMPOSITE.replace("ATTRIBUTES", "{kind: 'gelu', lengths: [1, 2], on: true, scale: 0.5}")
    assert to_text(parse(text)) == text
    model = parse(COMPOSITE.replace("ATTRIBUTES", "[1, 2]"))
    unread = "'<2 bytes, not a FlexBuffer (buffer is too small)>'"
    assert f"composite_attributes: {unread}" in to_text(model)
    assert list(map(str, composites(model.subgraphs[0].operators))) == [f"odml.rope {unread}"]
    model = parse(COMPOSITE.replace(", composite_attributes: ATTRIBUTES", ""))
    assert list(map(str, composites(model.subgraphs[0].operators))) == ["odml.rope {}"]


def test_inspect_shows_them_as_they_were_written(capsys: pytest.CaptureFixture[str]) -> None:
    """Its float of four bytes is 1e-06, and 9.999999974752427e-07 in Python's eight."""
    assert "  19 x odml.rms_norm {epsilon: 1e-06}\n" in run(capsys, "inspect", str(DEMO)).out
    (norm,) = inspect(DEMO).signatures[0].to_dict()["composites"]
    assert norm == {"name": "odml.rms_norm", "count": 14, "attributes": {"epsilon": 1e-06}}
