"""Attributes of composites are decoded wherever composites are shown; bytes of another format harm nothing."""

import random
from typing import Any

import numpy as np
import pytest
from cli_runs import DEMO, Captured, run
from flatbuffers import flexbuffers
from text_parser import parse

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
# Size, elements, their types; then the root: distance back to the elements, its type, its width. A vector is type 10.
ITSELF = bytes([1, 0, 40, 2, 40, 1])


def typed_vectors() -> bytes:
    builder = flexbuffers.Builder()
    with builder.Map():
        for key, elements in (
            ("bools", [True, False]),
            ("floats", [0.5, 0.1]),
            ("ints", [-1, 300, 70000]),
        ):
            builder.Key(key)
            builder.TypedVectorFromElements(elements)
        builder.IndirectInt("far", -5)
        builder.IndirectFloat("far float", 0.25)
    return bytes(builder.Finish())


CONTENTS = [*map(bytes, map(flexbuffers.Dumps, VALUES)), typed_vectors()]


def rounded(value: Any) -> Any:
    """Floats as the four bytes that they are stored in: the reader gives the shortest decimal of these."""
    if isinstance(value, dict):
        return {key: rounded(one) for key, one in value.items()}
    if isinstance(value, list):
        return list(map(rounded, value))
    return np.float32(value) if isinstance(value, float) else (type(value), value)


@pytest.mark.parametrize("content", CONTENTS)
def test_values_are_those_of_the_format_s_own_reader(content: bytes) -> None:
    ours, theirs = read_flexbuffer(content), flexbuffers.Loads(content)
    assert rounded(ours) == rounded(theirs)
    assert not isinstance(theirs, dict) or list(ours) == list(theirs)


def test_floats_of_eight_bytes_keep_their_digits() -> None:
    assert read_flexbuffer(bytes(flexbuffers.Dumps(0.123456789012))) == 0.123456789012


@pytest.mark.parametrize("content", [flexbuffers.Dumps({"a": {"b": [1]}, "c": 2}), ITSELF])
def test_nothing_nested_is_followed(content: bytes) -> None:
    read = read_flexbuffer(bytes(content))
    assert "<nested FlexBuffer value>" in (read.values() if isinstance(read, dict) else read)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (bytes([9, 4, 40, 1]), "not a FlexBuffer"),
        (flexbuffers.Dumps([1] * 257), "more than 256 values"),
        (flexbuffers.Dumps("x" * 20000), "at most 16384 are read"),
    ],
)
def test_what_is_not_a_flexbuffer_or_too_large_is_a_text_that_says_so(
    content: bytes, reason: str
) -> None:
    assert reason in read_flexbuffer(content)


def test_damaged_bytes_end_in_values_or_in_that_text() -> None:
    dice, refused = random.Random(26), 0
    for _ in range(20_000):
        content = bytearray(dice.choice(CONTENTS))
        for _ in range(dice.randint(1, 4)):
            content[dice.randrange(len(content))] = dice.choice(
                (0, 1, 127, 255, dice.randrange(256))
            )
        del content[len(content) - dice.choice((0, 0, 0, dice.randrange(len(content)))) :]
        refused += "bytes, not a FlexBuffer" in str(read_flexbuffer(bytes(content)))
    assert 200 < refused < 19_000


COMPOSITE = """subgraph main (%x: float32[2]) {
  %y: float32[2] = STABLEHLO_COMPOSITE(%x) {name: 'odml.rope', composite_attributes: ATTRIBUTES}
  return %y
}
subgraph body (%x: float32[2]) {
  return %x
}
"""


def test_the_text_form_shows_attributes_and_counts_bytes_that_are_none() -> None:
    text = COMPOSITE.replace("ATTRIBUTES", "{kind: 'gelu', lengths: [1, 2], on: true, scale: 0.5}")
    assert to_text(parse(text)) == text
    unread = "'<2 bytes, not a FlexBuffer (buffer is too small)>'"
    for written, shown in (("composite_attributes: [1, 2]", unread), ("", "{}")):
        model = parse(
            COMPOSITE.replace("composite_attributes: ATTRIBUTES", written).replace(", }", "}")
        )
        assert [str(one) for one in composites(model.subgraphs[0].operators)] == [
            f"odml.rope {shown}"
        ]
        assert not written or f"composite_attributes: {unread}" in to_text(model)


def test_inspect_shows_them_as_they_were_written(capsys: Captured) -> None:
    """Its float of four bytes is 1e-06, and 9.999999974752427e-07 in Python's eight."""
    assert "  19 x odml.rms_norm {epsilon: 1e-06}\n" in run(capsys, "inspect", str(DEMO)).out
    (norm,) = inspect(DEMO).signatures[0].to_dict()["composites"]
    assert norm == {"name": "odml.rms_norm", "count": 14, "attributes": {"epsilon": 1e-06}}
