"""Keeps a process's large blocks of memory in files, where memory is short: as swap, but it needs no administrator.

Qwen2.5-Coder-1.5B, compiled: the same bytes, with 3.4 instead of 12.2 GB that have to stay in memory.
"""

import os
import platform
from importlib import resources
from pathlib import Path

from edge_opt.npu.compiler import CompilerMissingError
from edge_opt.npu.probe import build_library

_LIBRARY = "large_blocks.so"


def variables(folder: Path) -> dict[str, str]:
    """Environment variables for a process that is to keep its large blocks in `folder`.

    Empty if that is not possible: it needs Linux with glibc, and a C compiler.
    """
    if platform.libc_ver()[0] != "glibc":
        return {}
    source = resources.files(__package__) / "large_blocks.c"
    try:
        library = build_library(source.read_bytes(), _LIBRARY) / _LIBRARY
    except CompilerMissingError:
        return {}
    before = os.environ.get("LD_PRELOAD")
    preloaded = f"{library}:{before}" if before else str(library)
    return {"LD_PRELOAD": preloaded, "EDGE_OPT_LARGE_BLOCKS": str(folder)}
