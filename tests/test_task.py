"""MediaPipe's .task bundles: models are replaced, all else goes over byte for byte, hostile archives are refused."""

import io
import random
import struct
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from bundles import task
from cli_runs import DEMO, run
from text_parser import parse

from edge_opt.base.errors import EdgeOptError, ModelFormatError, UsageError
from edge_opt.comparison.compare import compare
from edge_opt.conversion import convert
from edge_opt.inspection import inspect
from edge_opt.ir import from_tables, to_bytes, to_tables
from edge_opt.schema.reader import read_model
from edge_opt.schema.task import is_task, read_task

MODEL = DEMO.read_bytes()
SMALL = to_bytes(parse("subgraph main (%x: float32[2]) {\n  %y: float32[2] = ABS(%x)\n  return %y\n}"))
TOKENIZER = bytes(range(256)) * 21 + b"!"
MEMBERS = {
    "TOKENIZER_MODEL": TOKENIZER,
    "TF_LITE_PREFILL_DECODE": MODEL,
    "METADATA": b"\x0a\x05hello",
    "TF_LITE_EMBEDDER": SMALL,
}
DIRECTORY = b"PK\x01\x02"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.task"
    path.write_bytes(task(MEMBERS, comment=b"made for a test"))
    return path


def contents(path: Path) -> dict[str, bytes]:
    """What Python's own zip reader finds, checksums looked at."""
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        return {info.filename: archive.read(info) for info in archive.infolist()}


def data_offsets(path: Path) -> list[int]:
    return [member.data for member in read_task(path).sections]


def test_members_are_found_with_what_they_are_for(file: Path) -> None:
    made = read_task(file)
    assert is_task(file)
    assert [section.name for section in made.sections] == list(MEMBERS)
    assert [section.model_type for section in made.sections] == ["", "prefill_decode", "", "embedder"]
    assert bytes(made.content(0).view(0, len(TOKENIZER))) == TOKENIZER


def test_a_model_is_replaced_and_all_else_goes_over_byte_for_byte(file: Path) -> None:
    result = convert(file, verify="none")
    output = Path(str(result.output))
    assert output == file.with_name("model.opt.task")
    assert len(result.converted) == 5
    found = contents(output)
    assert list(found) == list(MEMBERS)
    assert [name for name in MEMBERS if found[name] != MEMBERS[name]] == ["TF_LITE_PREFILL_DECODE"]
    assert compare(MODEL, found["TF_LITE_PREFILL_DECODE"]).bitwise
    with zipfile.ZipFile(output) as archive:
        assert archive.comment == b"made for a test"


@pytest.mark.parametrize("alignment", [4, 64, 4096])
def test_members_keep_their_alignment(alignment: int, tmp_path: Path) -> None:
    path, output = tmp_path / "a.task", tmp_path / "b.task"
    path.write_bytes(task(MEMBERS, alignment=alignment))
    convert(path, output, verify="none")
    assert len(output.read_bytes()) != len(path.read_bytes())
    for before, after in zip(data_offsets(path), data_offsets(output), strict=True):
        assert after % alignment == 0
        assert (after - before) % 4096 == 0


def test_an_archive_written_without_changes_is_the_same_file(tmp_path: Path) -> None:
    path, output = tmp_path / "a.task", tmp_path / "b.task"
    path.write_bytes(task(MEMBERS, comment=b"x" * 300))
    read_task(path).write({}, output)
    assert output.read_bytes() == path.read_bytes()


def test_a_smaller_model_gives_its_room_back(tmp_path: Path) -> None:
    path, output = tmp_path / "a.task", tmp_path / "b.task"
    path.write_bytes(task(MEMBERS))
    small = to_tables(from_tables(read_model(SMALL)))
    read_task(path).write({1: small}, output)
    assert contents(output) == {**MEMBERS, "TF_LITE_PREFILL_DECODE": SMALL}
    assert len(output.read_bytes()) < len(path.read_bytes()) - len(MODEL) + len(SMALL) + 4096


@pytest.mark.parametrize("zip64", [False, True])
def test_what_needs_it_is_written_as_zip64(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, zip64: bool
) -> None:
    path, output, again = tmp_path / "a.task", tmp_path / "b.task", tmp_path / "c.task"
    path.write_bytes(task(MEMBERS, zip64=zip64))
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 100)
    read_task(path).write({1: to_tables(from_tables(read_model(SMALL)))}, output)
    assert contents(output) == {**MEMBERS, "TF_LITE_PREFILL_DECODE": SMALL}
    content, replaced = output.read_bytes(), read_task(output).sections[1]
    assert b"PK\x06\x06" in content
    fields = content[replaced.data - 20 : replaced.data]
    assert struct.unpack("<2H2Q", fields) == (1, 16, len(SMALL), len(SMALL))
    at = record(content, "TF_LITE_PREFILL_DECODE")
    for marked in (content[replaced.begin + 18 : replaced.begin + 26], content[at + 20 : at + 28]):
        assert set(marked) == {255}, "the mark that sends readers to zip64's field"
    monkeypatch.undo()
    read_task(output).write({0: to_tables(from_tables(read_model(SMALL)))}, again)
    assert contents(again) == {**contents(output), "TOKENIZER_MODEL": SMALL}, "no field tells the old size"
    assert struct.pack("<Q", len(TOKENIZER)) not in again.read_bytes()


def test_sizes_behind_the_content_are_put_into_the_header(tmp_path: Path) -> None:
    class Pipe(io.BytesIO):
        def seek(self, *_: int) -> int:
            raise OSError("a pipe")

    pipe = Pipe()
    with zipfile.ZipFile(pipe, "w") as archive:
        for name, content in MEMBERS.items():
            archive.writestr(name, content)
    path, output = tmp_path / "a.task", tmp_path / "b.task"
    path.write_bytes(pipe.getvalue())
    convert(path, output, verify="none")
    found = contents(output)
    assert {name: content for name, content in found.items() if "PREFILL" not in name} == {
        name: content for name, content in MEMBERS.items() if "PREFILL" not in name
    }
    assert struct.unpack_from("<H", path.read_bytes(), read_task(path).sections[1].begin + 6) == (8,)
    replaced, content = read_task(output).sections[1], output.read_bytes()
    assert struct.unpack_from("<H", content, replaced.begin + 6) == (0,)
    assert struct.unpack_from("<2I", content, replaced.begin + 18) == (len(found[replaced.name]),) * 2


def test_all_models_are_rewritten_on_request(file: Path, tmp_path: Path) -> None:
    result = convert(file, tmp_path / "all.task", sections="all", verify="none")
    assert {summary.name for summary in result.signatures} == {
        "prefill_decode/prefill_8",
        "prefill_decode/decode",
        "embedder/main",
    }


def test_bundles_are_inspected_and_compared_like_their_model(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert [block.heads for block in inspect(file).attention] == [4, 4, 4, 4, 4]
    convert(file, verify="none")
    assert run(capsys, "compare", file, file.with_name("model.opt.task")).code == 0


def test_an_archive_without_the_model_says_which_it_has(tmp_path: Path) -> None:
    path = tmp_path / "aux.task"
    path.write_bytes(task({"hand_detector.tflite": SMALL, "notes.txt": b"hello"}))
    with pytest.raises(UsageError, match="no prefill_decode model, its models are: hand_detector"):
        convert(path)


def patched(content: bytes, at: int, value: bytes) -> bytes:
    assert len(content[at : at + len(value)]) == len(value)
    return content[:at] + value + content[at + len(value) :]


def record(content: bytes, name: str) -> int:
    """Where a member's record in the directory begins."""
    return content.rindex(name.encode()) - 46


def compressed(members: dict[str, bytes]) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return file.getvalue()


def overlapping() -> bytes:
    """A member that lies in another, header and all."""
    inner = task({"METADATA": b"inside"}, alignment=1)[1 : 1 + 30 + 8 + 6]
    content = task({"OUTER": bytes(8) + inner, "METADATA": b"inside"})
    return patched(content, record(content, "METADATA") + 42, struct.pack("<I", content.index(inner)))


def twice() -> bytes:
    content = task({"A": b"1", "B": b"2"})
    return content.replace(b"B", b"A")


PLAIN = task(MEMBERS)
WIDE_END = (
    PLAIN[:-22]
    + struct.pack(
        "<4sQ2H2I4Q",
        b"PK\x06\x06",
        44,
        45,
        45,
        0,
        0,
        4,
        4,
        *struct.unpack_from("<2I", PLAIN, len(PLAIN) - 10),
    )
    + struct.pack("<4sIQI", b"PK\x06\x07", 0, len(PLAIN) - 22, 1)
    + PLAIN[-22:]
)
HOSTILE: dict[str, tuple[Callable[[], bytes], str]] = {
    "cut in the middle": (lambda: PLAIN[: len(PLAIN) // 2], "cannot be read"),
    "cut in the directory": (lambda: PLAIN[: record(PLAIN, "METADATA")], "cannot be read"),
    "cut by one byte": (lambda: PLAIN[:-1], "cannot be read"),
    "no members": (lambda: task({}), "has no members"),
    "compressed": (lambda: compressed(MEMBERS), "'TOKENIZER_MODEL' is compressed"),
    "a bomb": (lambda: compressed({"TF_LITE_PREFILL_DECODE": bytes(64 << 20)}), "is compressed"),
    "said to be stored": (
        lambda: patched(PLAIN, record(PLAIN, "METADATA") + 24, struct.pack("<I", 1 << 30)),
        "'METADATA' is compressed",
    ),
    "encrypted": (lambda: patched(PLAIN, record(PLAIN, "METADATA") + 8, b"\x01"), "is encrypted"),
    "overlapping": (overlapping, "members overlap"),
    "the same twice": (twice, "two members 'A'"),
    "outside": (
        lambda: patched(PLAIN, record(PLAIN, "METADATA") + 42, struct.pack("<I", 1 << 31)),
        "'METADATA' begins at byte 2147483648",
    ),
    "longer than the file": (
        lambda: patched(PLAIN, record(PLAIN, "METADATA") + 20, struct.pack("<2I", 1 << 30, 1 << 30)),
        "'METADATA' ends at byte",
    ),
    "another name in its header": (
        lambda: PLAIN.replace(b"METADATA", b"METADATB", 1),
        "'METADATA' has another header",
    ),
    "a wrong checksum of the model": (
        lambda: PLAIN.replace(MODEL, patched(MODEL, len(MODEL) - 9, b"x")),
        "'TF_LITE_PREFILL_DECODE' has the checksum",
    ),
    "a wrong checksum of another": (
        lambda: PLAIN.replace(TOKENIZER, b"x" + TOKENIZER[1:]),
        "'TOKENIZER_MODEL' has the checksum",
    ),
    "a huge directory": (
        lambda: (
            patched(PLAIN + bytes(1 << 21), len(PLAIN) - 10, struct.pack("<I", 1 << 20))
            + PLAIN[-22:-10]
            + struct.pack("<2IH", 1 << 21, 0, 0)
        ),
        "far too large",
    ),
    "zip64 sizes beyond everything": (
        lambda: patched(PLAIN, record(PLAIN, "METADATA") + 20, b"\xff" * 8),
        "'METADATA' ends at byte 4295",
    ),
    "a zip64 directory elsewhere": (
        lambda: patched(WIDE_END, len(WIDE_END) - 22 - 20 - 8, struct.pack("<Q", 1 << 60)),
        "begins at byte -1152921504606",
    ),
    "no zip": (lambda: b"PK\x03\x04" + bytes(100), "cannot be read"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_archive_is_refused_in_one_sentence(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make, complaint = HOSTILE[kind]
    path = tmp_path / "model.task"
    path.write_bytes(make())
    started = time.process_time()
    with pytest.raises(ModelFormatError) as caught:
        convert(path, verify="none")
    assert complaint in str(caught.value)
    assert time.process_time() - started < 1
    assert [entry.name for entry in tmp_path.iterdir()] == ["model.task"]
    assert complaint in run(capsys, "convert", path, "--verify", "none").failed_in_one_sentence(3)


@pytest.mark.parametrize("zip64", [False, True])
def test_any_damage_is_either_read_or_refused(tmp_path: Path, *, zip64: bool) -> None:
    original = task({**MEMBERS, "TF_LITE_PREFILL_DECODE": SMALL}, zip64=zip64)
    chance = random.Random(11)
    mutant, output = tmp_path / "mutant.task", tmp_path / "out.task"
    directory = original.index(DIRECTORY)
    headers = [at for at in range(directory) if original.startswith(b"PK\x03\x04", at)]
    outcomes = set()
    for _ in range(100):
        content = bytearray(original)
        for _ in range(chance.randint(1, 3)):
            at = chance.choice(
                [chance.choice(headers) + chance.randrange(34), chance.randrange(directory, len(original))]
            )
            content[at] = chance.choice((0, 1, 8, 127, 255))
        del content[chance.choice((len(content), len(content), chance.randrange(len(content)))) :]
        mutant.write_bytes(content)
        try:
            read_task(mutant).write({}, output, overwrite=True)
            outcomes.add("read")
        except EdgeOptError:
            outcomes.add("refused")
        else:
            contents(output)
    assert outcomes == {"read", "refused"}
