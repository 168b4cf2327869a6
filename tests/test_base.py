"""What all rooms rest on: an output appears at once or not at all, records go through JSON, children end in time."""

import errno
import json
import math
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import pytest
from cli_runs import Patch
from schema_models import names
from terminal_signals import gone, started

from edge_opt.base import atomic
from edge_opt.base.errors import OutputError, UsageError
from edge_opt.base.mistaken import recognized
from edge_opt.base.record import Record, RecordError, from_dict, to_json
from edge_opt.base.words import shortened, signal_name


def write(
    path: Path, content: bytes, *, overwrite: bool = False, error: type[BaseException] | None = None
) -> None:
    with atomic.replacing(path, overwrite=overwrite) as target:
        os.pwrite(target, content, 0)
        assert not path.exists() or overwrite
        if error is not None:
            raise error


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_the_file_appears_when_the_block_ends_well(
    tmp_path: Path, error: type[BaseException]
) -> None:
    path = tmp_path / ("ü" * 120 + ".tflite")  # a long name still has room for the temporary one
    write(path, b"old")
    with pytest.raises(error):
        write(path, b"new", overwrite=True, error=error)
    assert path.read_bytes() == b"old"
    write(path, b"new", overwrite=True)
    assert path.read_bytes() == b"new"
    assert names(tmp_path) == [path.name]


@pytest.mark.parametrize(
    ("function", "code", "reason"),
    [
        ("pwrite", errno.ENOSPC, "disk is full"),
        ("pwrite", errno.EFBIG, "ulimit"),
        ("open", errno.EACCES, "no permission to write in this folder"),
    ],
)
def test_a_disk_that_refuses_is_an_error(
    tmp_path: Path, monkeypatch: Patch, function: str, code: int, reason: str
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, function, refuse)
    with pytest.raises(OutputError, match=reason) as caught:
        write(tmp_path / "model.tflite", b"")
    assert caught.value.exit_code == 5
    assert names(tmp_path) == []


def test_an_existing_output_needs_overwrite_also_one_that_was_made_meanwhile(
    tmp_path: Path,
) -> None:
    path = tmp_path / "model.tflite"
    with pytest.raises(UsageError, match="meanwhile"), atomic.replacing(path, overwrite=False):
        path.write_bytes(b"old")
    with pytest.raises(UsageError, match="overwrite=True") as caught:
        write(path, b"new")
    assert caught.value.exit_code == 2
    assert (path.read_bytes(), names(tmp_path)) == (b"old", ["model.tflite"])


def test_the_output_is_never_the_input_and_a_symlink_is_what_it_points_to(tmp_path: Path) -> None:
    path, link, hard = (tmp_path / name for name in ("model.tflite", "link.tflite", "hard.tflite"))
    path.write_bytes(b"old")
    link.symlink_to(path)
    hard.hardlink_to(path)
    for output in (path, link, hard, tmp_path / "." / "model.tflite"):
        with pytest.raises(UsageError, match="is the input itself"):
            atomic.resolve_target(output, overwrite=True, inputs=[None, tmp_path / "gone", path])
    with pytest.raises(UsageError, match="is the input itself"):
        atomic.resolve_target(path, overwrite=True, inputs=[f"{path}:embedder"])
    write(link, b"new", overwrite=True)
    assert link.is_symlink()
    assert path.read_bytes() == b"new"


def test_new_files_follow_the_umask_replaced_ones_keep_their_mode(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    path, synced, fsync = tmp_path / "model.tflite", [], os.fsync
    old = os.umask(0o027)
    try:
        write(path, b"old")
    finally:
        os.umask(old)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    path.chmod(0o604)
    monkeypatch.setattr(
        os, "fsync", lambda fd: synced.append(stat.S_IFMT(os.fstat(fd).st_mode)) or fsync(fd)
    )
    with atomic.replacing(path, overwrite=True) as target:
        assert stat.S_IMODE(os.fstat(target).st_mode) == 0o600
    assert stat.S_IMODE(path.stat().st_mode) == 0o604
    assert synced == [stat.S_IFREG, stat.S_IFDIR], "the file, then its folder"


def test_a_name_that_the_system_s_encoding_lacks_is_written(tmp_path: Path) -> None:
    code = "import sys; from edge_opt.base import atomic; atomic.write_whole(sys.argv[1], b'', overwrite=True)"
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    path = tmp_path / "ä.tflite"
    subprocess.run([sys.executable, "-c", code, path], env={**os.environ, **ascii_only}, check=True)
    assert path.read_bytes() == b""


def test_what_is_not_a_file_cannot_be_an_output(tmp_path: Path, monkeypatch: Patch) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for path, reason in (
        (tmp_path, "folder, pipe or device"),
        (tmp_path / "pipe", "folder, pipe or device"),
        (tmp_path / "no" / "model.tflite", "does not exist, create it"),
        (tmp_path / "pipe" / "model.tflite", "cannot be written"),
        (tmp_path / "loop", "cannot be written"),
        (tmp_path / ("x" * 300), "cannot be written"),
        (Path("a\0b"), "cannot be written"),
    ):
        with pytest.raises(OutputError, match=reason):
            write(path, b"")
    # Root may write to every folder, so the kernel's answer is put in place.
    monkeypatch.setattr(os, "access", lambda path, mode: (path, mode) != (tmp_path, os.W_OK))
    with pytest.raises(OutputError, match="no permission to write in this folder"):
        atomic.resolve_target(tmp_path / "model.tflite", overwrite=False)


@dataclass(frozen=True, slots=True)
class Leaf(Record):
    """A record in a record."""

    name: str
    size: int | None = None


@dataclass(frozen=True, slots=True)
class Tree(Record):
    """Every kind of field."""

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
        """How many there are."""
        return len(self.others)


TREE = Tree(0.5, Leaf("x"), (Leaf("y", 2),), ("b", 2), {"k": Leaf("z")}, either=Leaf("w"), note="n")


@pytest.mark.parametrize("tree", [TREE, Tree(1, Leaf("x", 3), either=4, note="n")])
def test_a_record_is_what_it_was_after_a_way_through_json(tree: Tree) -> None:
    for values in (tree.to_dict(), asdict(tree)):
        assert from_dict(Tree, json.loads(json.dumps(values))) == tree


def test_json_has_the_fields_and_the_properties_that_the_record_names() -> None:
    said = Tree(math.nan, Leaf("x"), (Leaf("y"),), secret=object()).to_dict()
    assert (said["ratio"], said["count"], said["note"]) == (None, 1, None)
    assert said["others"] == [{"name": "y", "size": None}]
    assert "secret" not in said
    assert to_json({"a": (math.inf, [TREE])})["a"][0] is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"ratio": "x"}, r"Tree: Expected `float`, got `str` - at `\$.ratio`"),
        ({"ratio": True}, "Expected `float`, got `bool`"),
        ({"leaf": {"size": 1}}, "missing required field `name`"),
        ({"others": [{"name": 1}]}, "Expected `str`, got `int`"),
    ],
)
def test_values_of_another_kind_are_refused_by_name(change: dict[str, object], said: str) -> None:
    with pytest.raises(RecordError, match=said):
        from_dict(Tree, {**TREE.to_dict(), **change})


PACKAGE = "transformers.models.gemma3.modeling_gemma3"
ATTENTION = "Gemma3Attention_self_attn"
LAYERS = [
    f"litert_torch.exportable.Exportable/{PACKAGE}.Gemma3TextModel_model/{PACKAGE}.Gemma3DecoderLayer_{n}/"
    f"{PACKAGE}.Gemma3Attention_self_attn"
    for n in range(2)
]


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        (f"{LAYERS[0]};24", "...Gemma3DecoderLayer_0/Gemma3Attention_self_attn;24"),
        (
            f"{LAYERS[1]};;{LAYERS[0]};4",
            f"...Gemma3TextModel_model/Gemma3DecoderLayer_1/{ATTENTION}",
        ),
        ("model.layers.3.self_attn/add", "model.layers.3.self_attn/add"),
        ("x" * 100, "..." + "x" * 70),
        ("", ""),
    ],
)
def test_a_long_name_keeps_its_layer(name: str, shown: str) -> None:
    assert shortened(name) == shown


def test_signals_without_a_name_are_numbers() -> None:
    assert signal_name(signal.SIGKILL) == "SIGKILL"
    assert signal_name(signal.SIGRTMIN + 1) == f"signal {signal.SIGRTMIN + 1}"


_COMPILING = """
from edge_opt.base.processes import run
run(["sh", "-c", "echo $$; echo $$ > " + sys.argv[1] + "; exec sleep 60"])
"""


@pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux tells a process of the end of its parent"
)
def test_a_compiler_ends_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    told = tmp_path / "pid"
    with started(_COMPILING, told) as parent:
        while not (told.exists() and told.read_text().strip()):
            assert parent.poll() is None
        parent.kill()
    assert gone(int(told.read_text()))


@pytest.mark.parametrize(
    ("start", "said"),
    [
        (b"GGUF\3\0\0\0", "a GGUF file"),
        (b"\x08\x08\x12\x07pytorch", "an ONNX model"),
        (b"\x40\0\0\0\0\0\0\0{", "a file of weights"),
        (b"PK\3\4" + bytes(26) + b"m/data.pkl", "a file of PyTorch weights"),
        (b"\x80\x02\x8a\n", "a file of PyTorch weights"),
        (b"PK\3\4" + bytes(26) + b"TF_LITE", "a zip archive"),
        (b"\n<!DOCTYPE html>", "a web page"),
        (b"<HTML>", "a web page"),
        (b"\x1c\0\0\0TFL3", ""),
    ],
)
def test_what_is_given_by_mistake_is_recognized_by_its_beginning(start: bytes, said: str) -> None:
    assert recognized(start).startswith(said)
    assert bool(recognized(start)) == bool(said)
