"""Bad input and outputs that cannot be written: an exit code, one sentence, nothing written, the input untouched."""

import errno
import os
import resource
import shutil
import stat
import struct
from pathlib import Path

import pytest
from cli_runs import DEMO, run, run_apart, state

from edge_opt.base import atomic

Captured = pytest.CaptureFixture[str]
CONTENT = DEMO.read_bytes()


def with_root_at(offset: int) -> bytes:
    return struct.pack("<I", offset) + CONTENT[4:]


def scrambled() -> bytes:
    """Offsets everywhere point outside, the identifier is right."""
    return CONTENT[:8] + b"\xf0\xff\xff\x7f" * ((len(CONTENT) - 8) // 4)


BAD = {
    "empty": (b"", "is empty"),
    "text": (b"This is a text file, not a model.\n", "is no TFLite model"),
    "short": (CONTENT[:6], "no TFLite model"),
    "truncated": (CONTENT[: len(CONTENT) // 2], "damaged"),
    "cut by one byte": (CONTENT[:-1], ""),
    "root outside": (with_root_at(2**31), ""),
    "root in itself": (with_root_at(0), ""),
    "offsets outside": (scrambled(), ""),
    "missing": (None, "model.tflite does not exist"),
    "a zip file": (b"PK\x03\x04" + bytes(100), "zip archive"),
}


@pytest.mark.parametrize("command", ["convert", "inspect", "shapes", "explain"])
@pytest.mark.parametrize("kind", BAD)
def test_a_file_that_is_no_model_is_exit_3(command: str, kind: str, tmp_path: Path, capsys: Captured) -> None:
    content, expected = BAD[kind]
    path = tmp_path / "model.tflite"
    if content is not None:
        path.write_bytes(content)
    before = state(tmp_path)
    said = run(capsys, command, path).failed_in_one_sentence(3)
    assert expected in said
    assert said.count("model.tflite") == 1
    assert state(tmp_path) == before


@pytest.mark.parametrize("order", [("good", "bad"), ("bad", "good")])
def test_compare_refuses_a_file_that_is_no_model(
    order: tuple[str, str], tmp_path: Path, capsys: Captured
) -> None:
    (tmp_path / "good").write_bytes(CONTENT)
    (tmp_path / "bad").write_bytes(CONTENT[:1000])
    said = run(capsys, "compare", *[tmp_path / name for name in order]).failed_in_one_sentence(3)
    assert str(tmp_path / "bad") in said


def test_a_folder_as_model_is_exit_3(tmp_path: Path, capsys: Captured) -> None:
    for folder in (tmp_path, Path(), Path("/")):
        assert "is a folder" in run(capsys, "convert", folder).failed_in_one_sentence(3)
    (tmp_path / "config.json").write_text("{}")
    assert "`edge-opt build` makes" in run(capsys, "convert", tmp_path).failed_in_one_sentence(3)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return shutil.copy(DEMO, tmp_path / "model.tflite")


@pytest.mark.parametrize("options", [[], ["--force"]])
@pytest.mark.parametrize("kind", ["the same path", "another spelling", "a symlink", "a hard link"])
def test_the_input_as_output_is_exit_2_whatever_its_name(
    kind: str, options: list[str], model: Path, capsys: Captured
) -> None:
    out = {
        "the same path": model,
        "another spelling": model.parent / "." / ".." / model.parent.name / model.name,
    }.get(kind, model.with_name("link.tflite"))
    if kind == "a symlink":
        out.symlink_to(model)
    elif kind == "a hard link":
        out.hardlink_to(model)
    before = state(model.parent)
    sentence = run(capsys, "convert", model, "-o", out, *options).failed_in_one_sentence(2)
    assert "is the input itself" in sentence
    assert state(model.parent) == before


@pytest.mark.parametrize("named", [True, False])
def test_an_existing_output_without_force_is_exit_2(named: bool, model: Path, capsys: Captured) -> None:
    out = model.with_name("model.opt.tflite")
    out.write_text("precious")
    before = state(model.parent)
    ran = run(capsys, "convert", model, *(["-o", out] if named else []))
    sentence = ran.failed_in_one_sentence(2)
    assert "--force" in sentence
    assert "=True" not in sentence, "no sentence speaks Python"
    assert state(model.parent) == before


def test_a_folder_that_does_not_exist_or_in_place_of_a_file_is_exit_5(model: Path, capsys: Captured) -> None:
    before = state(model.parent)
    out = model.parent / "missing" / "out.tflite"
    sentence = run(capsys, "convert", model, "-o", out).failed_in_one_sentence(5)
    assert f"folder {out.parent} does not exist" in sentence
    out.parent.mkdir()
    for options in ([], ["--force"]):
        run(capsys, "convert", model, "-o", out.parent, *options).failed_in_one_sentence(5)
    assert state(model.parent) == before


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_is_exit_5(model: Path, capsys: Captured) -> None:
    folder = model.parent / "theirs"
    folder.mkdir()
    folder.chmod(stat.S_IRUSR | stat.S_IXUSR)
    run(capsys, "convert", model, "-o", folder / "out.tflite").failed_in_one_sentence(5)


def test_a_full_disk_is_exit_5_and_leaves_nothing(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    before = state(model.parent)
    monkeypatch.setattr(atomic.os, "fsync", full)
    sentence = run(capsys, "convert", model).failed_in_one_sentence(5)
    assert "the disk is full" in sentence
    assert state(model.parent) == before


@pytest.mark.parametrize("existing", [False, True])
def test_a_file_size_limit_is_exit_5_and_leaves_an_existing_output_alone(existing: bool, model: Path) -> None:
    out = model.with_name("out.tflite")
    if existing:
        out.write_text("precious")
    before = state(model.parent)

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

    # The disk refuses halfway, for real: the kernel gives EFBIG as it gives ENOSPC.
    ran = run_apart("convert", model, "-o", out, "--force", preexec_fn=limit)
    assert "could not be written" in ran.failed_in_one_sentence(5)
    assert state(model.parent) == before
