"""LiteRT-LM bundles: models are replaced, everything else goes over byte for byte, damaged files are refused."""

import struct
from pathlib import Path
from typing import Any

import fuzz
import pytest
from bundles import BLOCK, GENERIC, bundle, model_part, schema, started
from cli_runs import DEMO, Captured, run
from schema_models import plain

from edge_opt.base.errors import ModelFormatError, UsageError
from edge_opt.building.sections import section_name
from edge_opt.comparison.compare import compare
from edge_opt.conversion import convert
from edge_opt.ir import load, to_bytes
from edge_opt.ir.opening import Opened
from edge_opt.ir.parse import parse
from edge_opt.schema import new_table
from edge_opt.schema.litertlm import Bundle, is_bundle, read_bundle
from edge_opt.schema.writer import table_bytes

SMALL = to_bytes(
    parse("subgraph main (%x: float32[2]) {\n  %y: float32[2] = ABS(%x)\n  return %y\n}")
)
METADATA = bytes(range(256)) * 70
PARTS = [
    (GENERIC, {"name": "tokenizer"}, METADATA),
    model_part("prefill_decode", DEMO.read_bytes()),
    model_part("embedder", SMALL),
]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.litertlm"
    path.write_bytes(bundle(PARTS))
    return path


def contents(made: Bundle) -> list[bytes]:
    return [part.read(0, part.size) for part in map(made.content, range(len(made.sections)))]


def test_sections_are_found_with_what_they_are_for(file: Path) -> None:
    made, opened = read_bundle(file), Opened(file)
    assert is_bundle(file)
    assert [section.model_type for section in made.sections] == ["", "prefill_decode", "embedder"]
    assert made.sections[1].items["backend_constraint"] == "cpu"
    assert contents(made) == [METADATA, DEMO.read_bytes(), SMALL]
    assert [(part.index, part.kind) for part in opened.parts] == [
        (1, "prefill_decode"),
        (2, "embedder"),
    ]
    assert [signature.key for signature in opened.main().model.signatures] == [
        "prefill_8",
        "decode",
    ]
    with load(file, model="embedder") as small:
        assert len(small.subgraphs) == 1
    assert made.content(1).fd is not None, "a section is not read into memory"
    with opened.main().file() as path:
        assert path.read_bytes() == DEMO.read_bytes()
    for name in ("aux", "prefill"):
        with pytest.raises(UsageError, match=r"model '\w+' does not exist"):
            load(file, model=name)
    with pytest.raises(UsageError, match="is not a bundle: leave out model='aux'"):
        load(DEMO, model="aux")


def test_a_model_is_replaced_and_all_else_goes_over_byte_for_byte(file: Path) -> None:
    result = convert(file)
    assert result.output == str(file.with_name("model.opt.litertlm"))
    before, after = read_bundle(file), read_bundle(result.output)
    old, new = contents(before), contents(after)
    assert [one == other for one, other in zip(old, new, strict=True)] == [True, False, True]
    kinds = [[(s.data_type, s.items) for s in made.sections] for made in (before, after)]
    assert kinds[0] == kinds[1]
    assert all(section.place[0] % BLOCK == 0 for section in after.sections)
    assert compare(old[1], new[1]).bitwise
    assert len(result.converted) == 5


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


def test_all_models_are_rewritten_on_request_and_named_by_kind(
    file: Path, capsys: Captured
) -> None:
    file.write_bytes(bundle([*PARTS, model_part("aux", to_bytes(parse(MASKS)))]))
    alone = convert(file, file.with_name("alone.litertlm"), verify="none")
    options = ("-o", file.with_name("all.litertlm"), "--all-models", "--verify", "full", "--json")
    both = run(capsys, "convert", file, *options).json
    assert {summary.name for summary in alone.signatures} == {"prefill_8", "decode"}
    assert {summary["name"] for summary in both["signatures"]} == {
        "prefill_decode/prefill_8", "prefill_decode/decode", "embedder/main", "aux/prefill_mask_4"
    }  # fmt: skip
    (masks,) = (site for site in both["sites"] if site["signature"] == "aux/prefill_mask_4")
    assert (masks["pass"], masks["status"]) == ("quantized_mask", "converted")
    kept, changed = (
        contents(read_bundle(output))[3] for output in (str(alone.output), both["output"])
    )
    assert kept == contents(read_bundle(file))[3] != changed


def test_models_of_one_kind_are_apart_by_their_sections(file: Path) -> None:
    """Each is compared by what was done to it: the integers' room is not the floats'."""
    quantized = DEMO.with_name("demo_gemma3_a16w8.tflite").read_bytes()
    file.write_bytes(bundle([*PARTS, model_part("prefill_decode", quantized)]))
    result = convert(file, signatures="*/decode", verify="full")
    assert {site.signature for site in result.converted if site.heads} == {
        "prefill_decode_1/decode", "prefill_decode_3/decode"
    }  # fmt: skip
    allowed = {one.name: one.allowance.because for one in result.whole}
    assert allowed["prefill_decode_1/decode"] == ""
    assert allowed["prefill_decode_3/decode"] != ""


ENCODER = model_part("text_encoder", DEMO.read_bytes())


def commands_on(path: str, output: Path) -> list[list[object]]:
    """Each command that takes a model, but for those that need a chip's compiler."""
    golden = output.with_suffix(".npz")
    return [
        ["inspect", path],
        ["convert", path, "-o", output, "--verify", "none", "--force"],
        ["compare", path, path],
        ["golden", "record", path, "-o", golden, "--force"],
        ["golden", "check", path, golden],
    ]


def test_sections_of_the_newest_bundles_have_names_and_stay(tmp_path: Path) -> None:
    model = model_part("prefill_decode", DEMO.read_bytes())
    path = tmp_path / "in.litertlm"
    path.write_bytes(bundle([(12, {}, b"of images"), model, (13, {}, b"of any")]))
    convert(path, tmp_path / "out.litertlm", passes=["mha_to_sha"], verify="none")
    found = read_bundle(tmp_path / "out.litertlm")
    kinds = [section_name(section) for section in found.sections]
    assert kinds == ["Text2ImageMetadataProto", "prefill_decode", "Any2AnyMetadataProto"]
    contents = [found.content(index).read(0, 9) for index in (0, 2)]
    assert [bytes(content).rstrip(b"\0") for content in contents] == [b"of images", b"of any"]


def test_the_only_model_of_a_bundle_needs_no_name(tmp_path: Path, capsys: Captured) -> None:
    path = tmp_path / "speech.litertlm"
    path.write_bytes(bundle([PARTS[0], ENCODER]))
    for command in commands_on(str(path), tmp_path / "out.litertlm"):
        assert run(capsys, *map(str, command)).code == 0, command
    for sections in ("prefill-decode", "all"):
        result = convert(path, sections=sections, dry_run=True, verify="none")  # type: ignore[arg-type]
        assert [summary.name for summary in result.signatures] == ["prefill_8", "decode"]
        assert len(result.converted) == 5


def test_a_model_of_a_bundle_that_is_none_is_named_by_its_place(tmp_path: Path) -> None:
    path = tmp_path / "broken.litertlm"
    path.write_bytes(bundle([model_part("vision_encoder", b"no model at all")]))
    with pytest.raises(
        ModelFormatError, match=f"the model at byte {BLOCK} of .* is not a TFLite model"
    ):
        Opened(path).main()


def test_of_several_models_without_prefill_decode_one_is_chosen_by_name(
    tmp_path: Path, capsys: Captured
) -> None:
    path, output = tmp_path / "speech.litertlm", tmp_path / "out.litertlm"
    path.write_bytes(bundle([model_part("vocoder", SMALL), ENCODER, model_part("vocoder", SMALL)]))
    for command in commands_on(str(path), output):
        if command[:2] != ["golden", "check"]:
            sentence = run(capsys, *map(str, command)).failed_in_one_sentence(2)
            assert "choose one of vocoder_0, text_encoder, vocoder_2, for example" in sentence
            assert f"{path}:vocoder_0" in sentence
    for name, count in (("text_encoder", 2), ("vocoder_2", 1)):
        for command in commands_on(f"{path}:{name}", output):
            assert run(capsys, *map(str, command)).code == 0, command
        assert len(run(capsys, "inspect", f"{path}:{name}", "--json").json["signatures"]) == count
    convert(f"{path}:text_encoder", output, overwrite=True)
    old, new = contents(read_bundle(path)), contents(read_bundle(output))
    assert [one == other for one, other in zip(old, new, strict=True)] == [True, False, True]
    assert convert(path, sections="all", dry_run=True, verify="none").converted
    with pytest.raises(
        UsageError, match="model 'vocoder_1' does not exist, did you mean 'vocoder_"
    ):
        Opened(f"{path}:vocoder_1")
    path.write_bytes(bundle([PARTS[0]]))
    for sections in ("prefill-decode", "all"):
        with pytest.raises(UsageError, match="has no models"):
            convert(path, sections=sections, dry_run=True)  # type: ignore[arg-type]


def test_a_file_with_a_colon_in_its_name_is_that_file(file: Path) -> None:
    strange = file.with_name(f"{file.name}:embedder")
    strange.write_bytes(DEMO.read_bytes())
    assert Opened(strange).bundle is None
    strange.unlink()
    assert Opened(strange).main().kind == "embedder"


@pytest.mark.parametrize("more", [b"", b"\0" * 100, b"\0" * 100 + b"signature"])
def test_a_bundle_keeps_what_follows_its_sections(file: Path, tmp_path: Path, more: bytes) -> None:
    kept = more if more.strip(b"\0") else b""
    whole = file.read_bytes() + kept
    file.write_bytes(file.read_bytes() + more)
    Opened(file).save(tmp_path / "same.litertlm")
    assert (tmp_path / "same.litertlm").read_bytes() == whole
    read_bundle(file).write({0: METADATA * 9}, tmp_path / "longer.litertlm")
    assert (tmp_path / "longer.litertlm").read_bytes().endswith(SMALL + kept)
    assert described(tmp_path / "longer.litertlm") == described(file)


def described(path: Path) -> object:
    """What the format's own bindings read of a header, but for the sections' places."""
    vars(schema)["VDataCreator"] = schema.VdataCreator  # which flatc spells in two ways
    read = schema.LiteRTLMMetaDataT.InitFromPackedBuf(path.read_bytes()[32:], 0)
    for section in read.sectionMetadata.objects:
        section.beginOffset = section.endOffset = 0
    return plain(read)


def test_the_content_decides_what_a_file_is(file: Path, tmp_path: Path) -> None:
    """A TFLite model under a bundle's name is one, and is not written under such a name; nor a bundle as a model."""
    misnamed = tmp_path / "gemma.litertlm"
    misnamed.write_bytes(DEMO.read_bytes())
    result = convert(misnamed, verify="none")
    assert result.output == str(tmp_path / "gemma.opt.tflite")
    for name in ("out.litertlm", ".litertlm", "OUT.TASK", "out.onnx"):
        with pytest.raises(UsageError, match=r"the result is a \.tflite, use its suffix"):
            convert(misnamed, tmp_path / name, verify="none")
    with pytest.raises(UsageError, match=r"the result is a \.litertlm, use its suffix"):
        read_bundle(file).write({}, tmp_path / "out.tflite")


def damage(path: Path, positions: dict[int, int]) -> None:
    """Put other positions into the header."""
    content = path.read_bytes()
    for old, new in positions.items():
        before, after = (struct.pack("<Q", value) for value in (old, new))
        assert content.count(before, 32, BLOCK) == 1
        content = content.replace(before, after, 1)
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("at", "value", "complaint"),
    [
        (0, b"LITERTLX", "not a LiteRT-LM bundle"),
        (8, struct.pack("<I", 2), "written by a newer program"),
        (24, struct.pack("<Q", 1 << 60), "the header ends at byte"),
        (32, struct.pack("<I", 1 << 30), "its header cannot be read"),
        ("begin", 1 << 62, "lies at bytes"),
        ("end", 3, "lies at bytes"),
        ("begin", 5, "lies at bytes 5 to"),
        ("begin", 2 * BLOCK + 1, "sections overlap"),
    ],
)
def test_a_damaged_header_is_refused(file: Path, at: int | str, value: Any, complaint: str) -> None:
    if isinstance(at, str):
        damage(file, {read_bundle(file).sections[2].place[at == "end"]: value})
    else:
        content = file.read_bytes()
        file.write_bytes(content[:at] + value + content[at + len(value) :])
    with pytest.raises(ModelFormatError, match=complaint):
        read_bundle(file)


@pytest.mark.parametrize("repeated", [500, 60_000])
def test_a_bundle_whose_sections_share_a_long_list_takes_no_time(
    tmp_path: Path, repeated: int
) -> None:
    """Thousands of sections that are one table, with thousands of items that are one item."""
    item = new_table("KeyValuePair", key="name", value=new_table("StringValue", value="words"))
    section = new_table(
        "SectionObject", items=[item] * repeated, begin_offset=BLOCK, end_offset=BLOCK
    )
    sections = new_table("SectionMetadata", objects=[section] * repeated)
    header = table_bytes(new_table("LiteRTLMMetaData", section_metadata=sections))
    (tmp_path / "b.litertlm").write_bytes(started(header))
    with (
        fuzz.time_limit(),
        pytest.raises(ModelFormatError, match=r"over 4096 items|more than 500000"),
    ):
        read_bundle(tmp_path / "b.litertlm")
