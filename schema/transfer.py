"""Copies a stretch of one open file into another: shares blocks where the file system can, else in bounded memory."""

import errno
import fcntl
import os
import struct
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from edge_opt.output.errors import ModelFormatError

# File systems share whole blocks; stretches whose ends lie alike within a page have some.
PAGE: Final = 4096

# Fits a processor's cache: on ext4 as quick as `cp`, where steps of 1 MiB took three times as long, and
# copy_file_range a quarter longer, unless both ends lie alike within 64 KiB.
_STEP: Final = 512 << 10

_FLUSH: Final = 64 << 20

# FICLONERANGE of linux/fs.h. Where blocks are shared copy_file_range would do the same; where they cannot be, this
# says so at once.
_CLONE_RANGE: Final = 0x4020940D

# What a kernel or file system answers that cannot share blocks between these two files.
_CANNOT_SHARE: Final = {
    errno.EXDEV,
    errno.EINVAL,
    errno.ENOSYS,
    errno.EOPNOTSUPP,
    errno.ENOTSUP,
    errno.ENOTTY,
    errno.EBADF,
    errno.EPERM,
    errno.EACCES,
    errno.ETXTBSY,
}


def copy_range(
    source: int, start: int, target: int, at: int, length: int, *, advance: Callable[[int], None]
) -> None:
    """Copy `length` bytes from `start` of one descriptor to `at` of another; `advance` hears of each step.

    Raises:
        ModelFormatError: the source ended early: somebody shortened it.
        OSError: the target could not be written.
    """
    head = min(length, -at % PAGE)  # what follows it is written page by page
    _read_and_write(source, start, target, at, head, advance)
    start, at, length = start + head, at + head, length - head
    shared = 0 if start % PAGE else _share(source, start, target, at, length - length % PAGE)
    if shared:
        advance(shared)
    _read_and_write(source, start + shared, target, at + shared, length - shared, advance)


def write_bytes(content: memoryview, target: int, at: int, advance: Callable[[int], None]) -> None:
    """Write all of `content` at `at`.

    Raises:
        OSError: the target could not be written.
    """
    while content:
        count = os.pwrite(target, content[:_FLUSH], at)
        advance(count)
        content = content[count:]
        at += count


def _share(source: int, start: int, target: int, at: int, length: int) -> int:
    """How many bytes are shared now: all of them or none."""
    if not length:
        return 0
    try:
        fcntl.ioctl(target, _CLONE_RANGE, struct.pack("=qQQQ", source, start, length, at))
    except OSError as error:
        if error.errno not in _CANNOT_SHARE:
            raise
        return 0
    return length


def _read_and_write(
    source: int, start: int, target: int, at: int, length: int, advance: Callable[[int], None]
) -> None:
    done = flushed = 0
    while done < length:
        content = os.pread(source, min(length - done, _STEP), start + done)
        if not content:
            missing = length - done
            raise ModelFormatError(f"the model file became {missing} bytes too short: read it again")
        write_bytes(memoryview(content), target, at + done, advance)
        done += len(content)
        if done - flushed >= _FLUSH:
            _start_flush(target, at + flushed, done - flushed)
            flushed = done


def _start_flush(target: int, at: int, length: int) -> None:
    """Have the kernel send what was just written to the disk while we go on, so that the fsync at the end is short.

    The advice is that the pages may be dropped, and Linux writes fresh ones out before it drops them (`generic_fadvise`
    in its mm/fadvise.c). Where the advice is not taken, nothing is lost.
    """
    if hasattr(os, "posix_fadvise"):
        with suppress(OSError):
            os.posix_fadvise(target, at, length, os.POSIX_FADV_DONTNEED)
