"""Where memory is short, a stage keeps its large blocks of memory in files, which Linux can write out."""

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest
from cli_runs import Patch
from pretend_stages import Place, Stages

from edge_opt.base import processes
from edge_opt.building import large_blocks

needs_compiler = pytest.mark.skipif(
    shutil.which("cc") is None or platform.libc_ver()[0] != "glibc",
    reason="needs a C compiler on Linux with glibc",
)
_MIB = 1 << 20


def run(code: str, folder: Path) -> str:
    """What Python prints that keeps its large blocks in `folder`."""
    variables = large_blocks.variables(folder)
    assert variables
    done = subprocess.run(
        [sys.executable, "-c", dedent(code)],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert not done.returncode, done.stderr
    return done.stdout.strip()


@needs_compiler
def test_large_blocks_are_in_files_without_a_name(tmp_path: Path) -> None:
    anonymous, in_files = run(
        """
        held = bytearray(b"x") * (96 << 20)
        status = open("/proc/self/status").read()
        print(*(status.split(name)[1].split()[0] for name in ("RssAnon:", "RssShmem:")))
        print(sum("(deleted)" in line for line in open("/proc/self/maps")))
        """,
        tmp_path,
    ).splitlines()
    assert int(anonymous.split()[0]) * 1024 < 64 * _MIB
    assert int(in_files) >= 1
    assert not [*tmp_path.iterdir()]


@needs_compiler
def test_contents_survive_as_blocks_grow_and_shrink_across_the_limit(tmp_path: Path) -> None:
    said = run(
        """
        import ctypes
        libc = ctypes.CDLL(None)
        for name in ("malloc", "calloc", "realloc", "aligned_alloc"):
            getattr(libc, name).restype = ctypes.c_void_p
        libc.free.argtypes = [ctypes.c_void_p]
        sizes = [100, 20 << 20, 40 << 20, 9 << 20, 5000, 7 << 20, 8 << 20]
        block = libc.malloc(ctypes.c_size_t(sizes[0]))
        ctypes.memset(block, 7, sizes[0])
        for before, now in zip(sizes, sizes[1:]):
            block = libc.realloc(ctypes.c_void_p(block), ctypes.c_size_t(now))
            kept = ctypes.string_at(block, min(before, now))
            assert kept == b"\\7" * len(kept), (before, now)
            ctypes.memset(block, 7, now)
        libc.free(block)
        assert libc.realloc(ctypes.c_void_p(libc.malloc(ctypes.c_size_t(9 << 20))), ctypes.c_size_t(0)) is None
        zeros = libc.calloc(ctypes.c_size_t(3), ctypes.c_size_t(5 << 20))
        assert not any(ctypes.string_at(zeros, 15 << 20))
        libc.free(zeros)
        aligned = libc.aligned_alloc(ctypes.c_size_t(1 << 16), ctypes.c_size_t(16 << 20))
        assert aligned % (1 << 16) == 0
        libc.free(aligned)
        print("done")
        """,
        tmp_path,
    )
    assert said == "done"


@needs_compiler
def test_a_forked_process_does_not_write_to_blocks_of_its_parent(tmp_path: Path) -> None:
    said = run(
        """
        import os
        held = bytearray(32 << 20)
        child = os.fork()
        if child == 0:
            held[0] = 1
            os._exit(0)
        _, status = os.waitpid(child, 0)
        print(os.WIFSIGNALED(status), held[0])
        """,
        tmp_path,
    )
    assert said == "True 0"


@needs_compiler
def test_a_forked_process_may_free_what_it_does_not_have(tmp_path: Path) -> None:
    said = run(
        """
        import os
        held = bytearray(32 << 20)
        child = os.fork()
        if child == 0:
            own = bytearray(b"y") * (32 << 20)
            del held
            os._exit(own[0] == own[-1] == ord("y"))
        _, status = os.waitpid(child, 0)
        print(os.WIFEXITED(status), os.WEXITSTATUS(status))
        """,
        tmp_path,
    )
    assert said == "True 1"


@needs_compiler
def test_without_room_for_a_file_a_block_is_in_memory(tmp_path: Path) -> None:
    assert run("print(len(bytearray(32 << 20)))", tmp_path / "missing") == str(32 * _MIB)


def test_without_a_c_compiler_nothing_changes(monkeypatch: Patch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CC", "false")
    assert large_blocks.variables(tmp_path) == {}


@needs_compiler
def test_what_was_preloaded_before_still_is(monkeypatch: Patch, tmp_path: Path) -> None:
    monkeypatch.setenv("LD_PRELOAD", "other.so")
    assert large_blocks.variables(tmp_path)["LD_PRELOAD"].endswith(":other.so")


@pytest.mark.parametrize("gigabytes", [1, 1000])
def test_a_stage_spares_memory_only_if_it_needs_more_than_is_free(
    monkeypatch: Patch, place: Place, gigabytes: int
) -> None:
    monkeypatch.setattr(processes, "free_memory", lambda: gigabytes * 10**9)
    spares: list[bool] = []
    place.build(stages=Stages({"export": lambda job: spares.append(job.spares_memory)}))
    assert spares == [gigabytes == 1]


@pytest.mark.parametrize(
    ("folder", "limit", "used"), [("", "max", "anon"), ("memory", "limit_in_bytes", "total_rss")]
)
def test_memory_is_free_up_to_what_the_limit_of_a_container_leaves(
    monkeypatch: Patch, tmp_path: Path, folder: str, limit: str, used: str
) -> None:
    monkeypatch.setattr(processes, "_CONTROL_GROUPS", tmp_path)
    unlimited = processes.free_memory()
    group = tmp_path / folder
    group.mkdir(exist_ok=True)
    (group / "memory.stat").write_text(f"cache 7\n{used} 300000\n", encoding="ascii")
    limits = group / f"memory.{limit}"
    limits.write_text("max\n", encoding="ascii")
    assert abs(processes.free_memory() - unlimited) < unlimited / 4
    limits.write_text("1000000\n", encoding="ascii")
    assert processes.free_memory() == 700000
    (group / "memory.stat").rename(group / "other")
    assert processes.free_memory() == 1000000
    (group / "other").rename(group / "memory.stat")
    limits.write_text("200000\n", encoding="ascii")
    assert processes.free_memory() == 0
