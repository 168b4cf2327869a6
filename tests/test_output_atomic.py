"""An output appears all at once or not at all, and nothing of ours is left lying about."""

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from schema_models import everything, names, pack

from edge_opt.base import atomic
from edge_opt.base.errors import OutputError, UsageError
from edge_opt.schema import new_table, read_model, write_model

ROOT = new_table("Model", version=3)


@pytest.fixture
def umask() -> Iterator[None]:
    old = os.umask(0o027)
    yield
    os.umask(old)


def write(path: Path, content: bytes, *, overwrite: bool = False) -> None:
    with atomic.replacing(path, overwrite=overwrite) as target:
        os.write(target, content)


def test_the_file_appears_when_the_block_ends(tmp_path: Path) -> None:
    path = tmp_path / "model.tflite"
    with atomic.replacing(path, overwrite=False) as target:
        os.write(target, b"content")
        assert not path.exists()
    assert path.read_bytes() == b"content"
    assert names(tmp_path) == ["model.tflite"]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_nothing_is_left_behind_when_the_block_fails(tmp_path: Path, error: type[BaseException]) -> None:
    (tmp_path / "model.tflite").write_bytes(b"old")

    def write_half() -> None:
        with atomic.replacing(tmp_path / "model.tflite", overwrite=True) as target:
            os.write(target, b"half")
            raise error

    with pytest.raises(error):
        write_half()
    assert names(tmp_path) == ["model.tflite"]
    assert (tmp_path / "model.tflite").read_bytes() == b"old"


@pytest.mark.parametrize(("code", "reason"), [(errno.ENOSPC, "disk is full"), (errno.EFBIG, "ulimit")])
def test_a_full_disk_is_an_output_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, reason: str
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "pwrite", refuse)
    with pytest.raises(OutputError, match=reason) as caught:
        write_model(ROOT, tmp_path / "model.tflite")
    assert caught.value.exit_code == 5
    assert names(tmp_path) == []


def test_an_existing_output_needs_overwrite(tmp_path: Path) -> None:
    path = tmp_path / "model.tflite"
    path.write_bytes(b"old")
    with pytest.raises(UsageError, match="overwrite=True") as caught:
        write_model(ROOT, path)
    assert caught.value.exit_code == 2
    assert path.read_bytes() == b"old"
    write_model(ROOT, path, overwrite=True)
    assert read_model(path).root.get("version") == 3


def test_an_output_made_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "model.tflite"
    with pytest.raises(UsageError, match="meanwhile"), atomic.replacing(path, overwrite=False):
        path.write_bytes(b"somebody else's")
    assert path.read_bytes() == b"somebody else's"
    assert names(tmp_path) == ["model.tflite"]


def test_the_output_is_never_the_input_by_whatever_name(tmp_path: Path) -> None:
    path, link, hard = (tmp_path / name for name in ("model.tflite", "link.tflite", "hard.tflite"))
    path.write_bytes(pack(everything()))
    link.symlink_to(path)
    hard.hardlink_to(path)
    root = read_model(path).root
    for output in (path, link, hard, tmp_path / "." / "model.tflite"):
        with pytest.raises(UsageError, match="is the input itself"):
            write_model(root, output, overwrite=True)


def test_a_symlink_stands_for_what_it_points_to(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    link, target = tmp_path / "model.tflite", tmp_path / "there" / "real.tflite"
    link.symlink_to(target)
    write(link, b"new")
    assert link.is_symlink()
    assert target.read_bytes() == b"new"
    with pytest.raises(UsageError, match="overwrite=True"):
        write(link, b"newer")


@pytest.mark.usefixtures("umask")
def test_a_new_file_has_the_mode_of_the_umask(tmp_path: Path) -> None:
    write(tmp_path / "model.tflite", b"")
    assert stat.S_IMODE((tmp_path / "model.tflite").stat().st_mode) == 0o640


@pytest.mark.usefixtures("umask")
def test_a_replaced_file_keeps_its_mode_and_is_private_until_then(tmp_path: Path) -> None:
    path = tmp_path / "model.tflite"
    path.write_bytes(b"old")
    path.chmod(0o604)
    with atomic.replacing(path, overwrite=True) as target:
        assert stat.S_IMODE(os.fstat(target).st_mode) == 0o600
    assert stat.S_IMODE(path.stat().st_mode) == 0o604


def test_what_is_no_file_cannot_be_an_output(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    for path, reason in (
        (tmp_path, "folder, pipe or device"),
        (tmp_path / "pipe", "folder, pipe or device"),
        (tmp_path / "no" / "model.tflite", "does not exist, create it"),
        (tmp_path / "pipe" / "model.tflite", "cannot be written"),
        (loop, "cannot be written"),
        (tmp_path / ("x" * 300), "cannot be written"),
        (Path("a\0b"), "cannot be written"),
    ):
        with pytest.raises(OutputError, match=reason):
            write(path, b"")


def test_a_folder_without_permission_is_an_output_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(OutputError, match="no permission to write"):
        write(tmp_path / "model.tflite", b"")


def test_a_folder_without_permission_is_seen_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root may write to every folder, so the kernel's answer is put in place."""
    monkeypatch.setattr(os, "access", lambda path, mode: (path, mode) != (tmp_path, os.W_OK))
    with pytest.raises(OutputError, match="no permission to write in this folder"):
        atomic.resolve_target(tmp_path / "model.tflite", overwrite=False)


def test_a_long_name_still_has_room_for_the_temporary_one(tmp_path: Path) -> None:
    path = tmp_path / ("ü" * 120 + ".tflite")
    write(path, b"content")
    assert path.read_bytes() == b"content"


def test_the_file_and_its_folder_are_flushed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda fd: flushed.append(stat.S_IFMT(os.fstat(fd).st_mode)))
    write(tmp_path / "model.tflite", b"")
    assert flushed == [stat.S_IFREG, stat.S_IFDIR]
