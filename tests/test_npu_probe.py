"""The probe: built once with the machine's C compiler, trusted with known libraries only, and read line by line."""

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from edge_opt.npu import CompilerMissingError
from edge_opt.npu.hexagon import Outcome
from edge_opt.npu.probe import LIBRARY, build_probe

FAKE = Path(__file__).with_name("fake_qnn.c")
COMPILER = shutil.which("cc")
needs_compiler = pytest.mark.skipif(
    COMPILER is None or (platform.system(), platform.machine()) != ("Linux", "x86_64"),
    reason="needs a C compiler on x86-64 Linux",
)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the user wants it, also if nothing is there yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "not" / "there"))
    monkeypatch.delenv("CC", raising=False)


def test_every_line_of_the_log_is_read_and_events_belong_to_the_graph_before_them() -> None:
    heard = Outcome().with_log(
        "interface\tknown\t2.40.0\t5.51.0\n"
        "finalized\tfirst\t0\nevent\t2006\t700\nevent\t2006\t900\n"
        "finalized\tsecond\t1002\nmissing\tx y\nrunning\tsecond\nran\tsecond\t0\n"
    )
    assert (heard.known, heard.interface) == (True, "2.40.0")
    assert (heard.finalized, heard.events) == ([0, 1002], [{2006: 700}, {}])
    assert (heard.missing, heard.running, heard.ran) == (["x y"], True, 0)
    assert Outcome().with_log("ran\tg\t0\nrunning\tg\n").ran is None, "the second run did not end"


@needs_compiler
def test_it_is_built_once_and_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = build_probe()
    assert folder.parent == Path(os.environ["XDG_CACHE_HOME"], "edge-opt")
    assert (folder / LIBRARY).is_file()
    monkeypatch.setenv("PATH", os.devnull)
    assert build_probe() == folder


@pytest.mark.parametrize(
    ("machine", "variables", "words"),
    [
        ("x86_64", {"PATH": os.devnull}, r"C compiler.*install one \(as `cc`\)"),
        ("x86_64", {"CC": "false"}, "`false` fails"),
        ("x86_64", {"CC": "/no/such/compiler"}, "`/no/such/compiler` fails"),
        ("arm64", {}, "x86-64 Linux"),
    ],
)
def test_where_it_cannot_be_built_the_error_says_what_is_needed(
    monkeypatch: pytest.MonkeyPatch, machine: str, variables: dict[str, str], words: str
) -> None:
    monkeypatch.setattr("platform.system", lambda: "Linux")
    monkeypatch.setattr("platform.machine", lambda: machine)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(CompilerMissingError, match=words):
        build_probe()


def listen(tmp_path: Path, version: int, code: str) -> tuple[str, str]:
    """What a user of the interface prints, with the probe in front of a library of that version; and the log."""
    real = tmp_path / "real" / LIBRARY
    real.parent.mkdir()
    command = [
        COMPILER or "cc",
        "-w",
        "-shared",
        "-fPIC",
        f"-DVERSION={version}",
        "-o",
        str(real),
        str(FAKE),
    ]
    subprocess.run(command, check=True)
    log = tmp_path / "log"
    paths = {"QNN_REAL": real, "PROBE_LOG": log, "PROBE_RUN": tmp_path / "folders"}
    told = {
        "PROBE": str(build_probe() / LIBRARY),
        **{f"EDGE_OPT_{name}": str(paths[name]) for name in paths},
    }
    program = [sys.executable, "-c", dedent(PROLOGUE) + dedent(code)]
    done = subprocess.run(
        program, env=os.environ | told, check=True, capture_output=True, text=True
    )
    return done.stdout, log.read_text()


PROLOGUE = """
    import ctypes as c, os
    def table(path):
        found, count = c.POINTER(c.POINTER(c.c_uint64))(), c.c_uint32()
        assert c.CDLL(path).QnnInterface_getProviders(c.byref(found), c.byref(count)) == 0
        return found[0]
    def call(position, *values):
        return c.CFUNCTYPE(c.c_uint64, *[c.c_void_p] * len(values))(probe[5 + position])(*values)
    probe, real = table(os.environ["PROBE"]), table(os.environ["EDGE_OPT_QNN_REAL"])
"""
RUN = """
    handle = c.c_void_p()
    class Tensor(c.Structure):
        _fields_ = [("version", c.c_uint32), ("_0", c.c_uint32), ("id", c.c_uint32), ("_1", c.c_uint32),
                    ("name", c.c_char_p), ("type", c.c_uint32), ("format", c.c_uint32), ("dtype", c.c_uint32),
                    ("_2", c.c_uint32), ("quantization", c.c_uint64 * 5), ("rank", c.c_uint32), ("_3", c.c_uint32),
                    ("sizes", c.POINTER(c.c_uint32)), ("rest", c.c_uint64 * 6)]
    assert c.sizeof(Tensor) == 144
    call(9, 1, None, None, c.byref(handle))
    call(15, handle, c.c_char_p(b"graph"), None, c.byref(handle))
    for name, kind in ((b"x", 0), (b"y", 1), (b"inner", 3)):
        sizes = (c.c_uint32 * 2)(1, 4)
        tensor = Tensor(version=2, name=name, type=kind, dtype=0x0308, rank=2, sizes=sizes)
        call(24, handle, c.byref(tensor))
    call(19, handle, None, None)
"""


@needs_compiler
def test_a_library_of_an_unknown_version_is_handed_through_untouched(tmp_path: Path) -> None:
    told, log = listen(tmp_path, 41, "print(probe[5 + 19] == real[5 + 19])")
    assert told.strip() == "True"
    heard = Outcome().with_log(log)
    assert (heard.known, heard.interface) == (False, "2.41.0")


@needs_compiler
@pytest.mark.parametrize("version", [36, 40])
@pytest.mark.parametrize("size", [3, 4])
def test_a_finalized_graph_is_profiled_and_run_in_folders(
    tmp_path: Path, version: int, size: int
) -> None:
    folders = [tmp_path / "first", tmp_path / "second"]
    for place, folder in enumerate(folders):
        folder.mkdir()
        (folder / "x.in").write_bytes(bytes([1 + place, 2, 3, 4][:size]))
    (tmp_path / "folders").write_text("".join(f"{folder}\n" for folder in folders))
    _, log = listen(tmp_path, version, RUN)
    heard = Outcome().with_log(log)
    assert (heard.known, heard.interface, heard.ran) == (True, f"2.{version}.0", 0)
    assert heard.events == [{2006: 20060, 2019: 20190}]
    assert heard.missing == ([] if size == 4 else ["x", "x"]), "an input of another size is told"
    for place, folder in enumerate(folders):
        assert (folder / "y.out").read_bytes() == bytes(
            [2 + 2 * place, 4, 6, 8 if size == 4 else 0]
        )
        assert (folder / "done").exists()
