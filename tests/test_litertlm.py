"""LiteRT-LM bundles: models are replaced, everything else goes over byte for byte, damaged files are refused."""

import os
import random
import re
import struct
import uuid
from pathlib import Path

import pytest
from bundles import BLOCK, GENERIC, bundle, model_part
from text_parser import parse

from edge_opt.base.errors import EdgeOptError, ModelFormatError, UsageError
from edge_opt.comparison.compare import compare
from edge_opt.conversion import convert
from edge_opt.ir import from_tables, to_bytes
from edge_opt.schema.litertlm import Bundle, is_bundle, read_bundle, stamp_by_content
from edge_opt.schema.reader import read_model

TESTDATA = Path(__file__).parent.parent / "testdata"
DEMO = (TESTDATA / "demo_gemma3.tflite").read_bytes()
SMALL = to_bytes(parse("subgraph main (%x: float32[2]) {\n  %y: float32[2] = ABS(%x)\n  return %y\n}"))
METADATA = bytes(range(256)) * 70
PARTS = [
    (GENERIC, {"name": "tokenizer"}, METADATA),
    model_part("prefill_decode", DEMO),
    model_part("embedder", SMALL),
]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.litertlm"
    path.write_bytes(bundle(PARTS))
    return path


def contents(made: Bundle) -> list[bytes]:
    return [bytes(part.view(0, part.size)) for part in map(made.content, range(len(made.sections)))]


def test_sections_are_found_with_what_they_are_for(file: Path) -> None:
    made = read_bundle(file)
    assert is_bundle(file)
    assert [section.model_type for section in made.sections] == ["", "prefill_decode", "embedder"]
    assert made.sections[1].items["backend_constraint"] == "cpu"
    assert contents(made) == [METADATA, DEMO, SMALL]


def test_a_bundle_written_without_changes_is_the_same_file(file: Path, tmp_path: Path) -> None:
    output = tmp_path / "same.litertlm"
    read_bundle(file).write({}, output)
    assert output.read_bytes() == file.read_bytes()


def test_a_model_is_replaced_and_all_else_goes_over_byte_for_byte(file: Path) -> None:
    result = convert(file)
    assert result.output == str(file.with_name("model.opt.litertlm"))
    before, after = read_bundle(file), read_bundle(result.output)
    old, new = contents(before), contents(after)
    assert new[0] == old[0]
    assert new[2] == old[2]
    assert new[1] != old[1]
    assert [(s.data_type, s.items) for s in after.sections] == [
        (s.data_type, s.items) for s in before.sections
    ]
    assert all(section.begin % BLOCK == 0 for section in after.sections)
    assert compare(old[1], new[1]).bitwise
    assert len(result.converted) == 5


def test_all_models_are_rewritten_on_request_and_named_by_what_they_are_for(
    file: Path, tmp_path: Path
) -> None:
    result = convert(file, tmp_path / "all.litertlm", sections="all", verify="full")
    assert {summary.name for summary in result.signatures} == {
        "prefill_decode/prefill_8",
        "prefill_decode/decode",
        "embedder/main",
    }


def test_a_bundle_in_which_nothing_is_rewritten_stays_byte_for_byte(file: Path, tmp_path: Path) -> None:
    convert(file, tmp_path / "same.litertlm", sections="all", passes=["quantized_mask"])
    assert (tmp_path / "same.litertlm").read_bytes() == file.read_bytes()


MASKS = """
signature prefill_mask_4 = #0 (open=%open) -> (mask=%mask)
subgraph masks (%open: bool[1,1,4,6]) {
  %n: bool[1,1,4,6] = LOGICAL_NOT(%open)
  %f: float32[1,1,4,6] = CAST(%n) {in_data_type: 6}
  %m: float32[1,1,4,6] = MUL(%f, float32(-100.0))
  %mask: int16[1,1,4,6] q(0.00305176, 0) = QUANTIZE(%m)
  return %mask
}
"""


def test_the_masks_of_the_auxiliary_model_are_rewritten_on_request_only(tmp_path: Path) -> None:
    path = tmp_path / "model.litertlm"
    path.write_bytes(bundle([*PARTS, model_part("aux", to_bytes(parse(MASKS)))]))
    passes = ["quantized_mask", "tile_rows"]
    alone = convert(path, tmp_path / "alone.litertlm", passes=passes)
    both = convert(path, tmp_path / "both.litertlm", sections="all", passes=passes)
    assert alone.converted == []
    assert contents(read_bundle(tmp_path / "alone.litertlm"))[3] == contents(read_bundle(path))[3]
    (masks,) = both.converted
    assert (masks.signature, masks.pass_name) == ("aux/prefill_mask_4", "quantized_mask")
    assert masks.proof is not None
    assert masks.proof.bitwise


def test_a_bundle_without_the_model_says_which_it_has(tmp_path: Path) -> None:
    path = tmp_path / "aux.litertlm"
    path.write_bytes(bundle([model_part("embedder", SMALL)]))
    with pytest.raises(UsageError, match="no prefill_decode model, its models are: embedder"):
        convert(path)


def test_sections_that_are_the_same_bytes_stay_so(tmp_path: Path) -> None:
    path, output = tmp_path / "a.litertlm", tmp_path / "b.litertlm"
    content = bytearray(bundle([model_part("embedder", SMALL), model_part("aux", SMALL)]))
    path.write_bytes(content)
    first, second = read_bundle(path).sections
    struct.pack_into("<Q", content, second.begin_at, first.begin)
    struct.pack_into("<Q", content, second.end_at, first.end)
    path.write_bytes(content)
    read_bundle(path).write({}, output)
    again = read_bundle(output).sections
    assert (again[0].begin, again[0].end) == (again[1].begin, again[1].end)


def stamped(path: Path, content: bytes, **system: str) -> bytes:
    path.write_bytes(bundle([(GENERIC, {}, content)], system={"Authors": "us", **system}))
    stamp_by_content(path)
    assert bytes(read_bundle(path).content(0).view(0, len(content))) == content
    return path.read_bytes()


def test_a_bundle_that_is_stamped_by_its_content_tells_neither_when_nor_which_time_it_was_made(
    tmp_path: Path,
) -> None:
    first, again, other = (
        stamped(
            tmp_path / str(run),
            content,
            uuid=str(uuid.uuid4()),
            creation_timestamp=f"2026-01-0{run}T10:00:00.123456+00:00",
        )
        for run, content in ((1, b"same"), (2, b"same"), (3, b"else"))
    )
    assert first == again
    assert b"1970-01-01T00:00:00.000000+00:00" in first
    ids = [re.search(rb"[0-9a-f]{8}-[0-9a-f]{4}-5[0-9a-f]{3}-[0-9a-f-]{17}", made) for made in (first, other)]
    assert ids[0]
    assert ids[1]
    assert ids[0][0] != ids[1][0]


def test_stamps_of_another_length_and_bundles_without_any_stay_as_they_are(tmp_path: Path) -> None:
    assert b"mine" in stamped(tmp_path / "a", b"content", uuid="mine")
    plain = bundle([(GENERIC, {}, b"content")])
    (tmp_path / "b").write_bytes(plain)
    stamp_by_content(tmp_path / "b")
    assert (tmp_path / "b").read_bytes() == plain


def test_a_model_in_a_section_is_read_from_where_it_lies(file: Path) -> None:
    made = read_bundle(file)
    model = from_tables(read_model(made.content(1)))
    assert [signature.key for signature in model.signatures] == ["prefill_8", "decode"]


@pytest.mark.parametrize(
    ("at", "value", "complaint"),
    [
        ("magic", b"LITERTLX", "not a LiteRT-LM bundle"),
        ("version", struct.pack("<I", 2), "written by a newer program"),
        ("header", struct.pack("<Q", 1 << 60), "the header ends at byte"),
        ("begin", struct.pack("<Q", 1 << 62), "lies at bytes"),
        ("end", struct.pack("<Q", 3), "lies at bytes"),
        ("overlap", b"", "sections overlap"),
    ],
)
def test_a_damaged_header_is_refused(file: Path, at: str, value: bytes, complaint: str) -> None:
    content = bytearray(file.read_bytes())
    sections = read_bundle(file).sections
    places = {
        "magic": 0,
        "version": 8,
        "header": 24,
        "begin": sections[1].begin_at,
        "end": sections[1].end_at,
    }
    if at == "overlap":
        struct.pack_into("<Q", content, sections[2].begin_at, sections[1].begin + BLOCK)
    else:
        content[places[at] : places[at] + len(value)] = value
    file.write_bytes(content)
    with pytest.raises(ModelFormatError, match=complaint):
        read_bundle(file)


def test_any_damage_is_either_read_or_refused(file: Path, tmp_path: Path) -> None:
    original = file.read_bytes()
    chance = random.Random(7)
    mutant = tmp_path / "mutant.litertlm"
    header = struct.unpack_from("<Q", original, 24)[0]
    outcomes = set()
    for _ in range(250):
        content = bytearray(original[: chance.choice((len(original), BLOCK * 2, header, 40))])
        for _ in range(chance.randint(1, 4)):
            content[chance.randrange(min(len(content), header))] = chance.choice((0, 1, 127, 255))
        mutant.write_bytes(content)
        try:
            read_bundle(mutant)
            outcomes.add("read")
        except EdgeOptError:
            outcomes.add("refused")
    assert outcomes == {"read", "refused"}


def test_a_bundle_that_is_changed_while_it_is_copied_is_refused(file: Path, tmp_path: Path) -> None:
    def touch(*_: int) -> None:
        os.utime(file, (1, 1))

    with pytest.raises(ModelFormatError, match="was changed while it was in use"):
        read_bundle(file).write({}, tmp_path / "out.litertlm", progress=touch)
    assert not (tmp_path / "out.litertlm").exists()
