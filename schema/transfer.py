"""Copies a stretch of one open file into another, in the kernel where it can, else with bounded memory."""

import errno
import os
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from edge_opt.schema.errors import ModelFormatError

_KERNEL_STEP: Final = 64 << 20
_BUFFER: Final = 1 << 20

# What a kernel or filesystem answers that cannot copy this way between these two files.
_UNSUPPORTED: Final = {
    errno.EXDEV,
    errno.EINVAL,
    errno.ENOSYS,
    errno.EOPNOTSUPP,
    errno.ENOTSUP,
    errno.EBADF,
    errno.EPERM,
    errno.ENOTSOCK,
}

Step = Callable[[int, int, int, int, int], int]


def copy_range(
    source: int, start: int, target: int, at: int, length: int, *, advance: Callable[[int], None]
) -> None:
    """Copy `length` bytes from `start` of one descriptor to `at` of another; `advance` hears of each step.

    Raises:
        ModelFormatError: the source ended early: somebody shortened it.
        OSError: the target could not be written.
    """
    done = 0
    for step in _STEPS:
        while done < length:
            count = step(source, start + done, target, at + done, length - done)
            if count <= 0:
                break
            _start_flush(target, at + done, count)
            done += count
            advance(count)
    if done < length:
        raise ModelFormatError(f"the model file became {length - done} bytes too short: read it again")


def write_bytes(content: memoryview, target: int, at: int, advance: Callable[[int], None]) -> None:
    """Write all of `content` at `at`.

    Raises:
        OSError: the target could not be written.
    """
    while content:
        count = os.pwrite(target, content[:_KERNEL_STEP], at)
        advance(count)
        content = content[count:]
        at += count


def _start_flush(target: int, at: int, length: int) -> None:
    """Have the kernel send what was just written to the disk while we go on, so that the fsync at the end is short.

    The advice says that the pages may go; that of the fresh ones, which are still to be written, Linux writes them
    first (`generic_fadvise` in its mm/fadvise.c). It is advice: where it is not taken, nothing is lost.
    """
    if hasattr(os, "posix_fadvise"):
        with suppress(OSError):
            os.posix_fadvise(target, at, length, os.POSIX_FADV_DONTNEED)


def _copy_file_range(source: int, start: int, target: int, at: int, length: int) -> int:
    if not hasattr(os, "copy_file_range"):
        return 0
    return _if_supported(lambda: os.copy_file_range(source, target, min(length, _KERNEL_STEP), start, at))


def _sendfile(source: int, start: int, target: int, at: int, length: int) -> int:
    if not hasattr(os, "sendfile"):
        return 0
    os.lseek(target, at, os.SEEK_SET)
    return _if_supported(lambda: os.sendfile(target, source, start, min(length, _KERNEL_STEP)))


def _read_and_write(source: int, start: int, target: int, at: int, length: int) -> int:
    content = os.pread(source, min(length, _BUFFER), start)
    write_bytes(memoryview(content), target, at, lambda _: None)
    return len(content)


def _if_supported(copy: Callable[[], int]) -> int:
    """What `copy` copied; 0 where this pair of files does not allow it, so that the next way is tried."""
    try:
        return copy()
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        return 0


_STEPS: Final[tuple[Step, ...]] = (_copy_file_range, _sendfile, _read_and_write)
