"""Copies a stretch of one open file into another, in bounded memory."""

import os
from collections.abc import Callable
from typing import Final

from edge_opt.output.errors import ModelFormatError

# File systems share whole blocks; stretches whose ends lie alike within a page have some.
PAGE: Final = 4096

_KERNEL_STEP: Final = 64 << 20
# Fits a processor's cache: steps of 1 MiB took two to three times as long.
_STEP: Final = 512 << 10


def copy_range(
    source: int, start: int, target: int, at: int, length: int, *, advance: Callable[[int], None]
) -> None:
    """Copy `length` bytes from `start` of one descriptor to `at` of another; `advance` gets the size of each step.

    The kernel copies where it can, and shares blocks where the file system can.

    Raises:
        ModelFormatError: the source ended early: somebody shortened it.
        OSError: the target could not be written.
    """
    in_kernel = hasattr(os, "copy_file_range")
    head = min(length, -at % PAGE)  # whole blocks begin behind it
    done = 0
    while done < length:
        left = (head if done < head else length) - done
        if in_kernel:
            try:
                count = os.copy_file_range(source, target, min(left, _KERNEL_STEP), start + done, at + done)
            except OSError:
                in_kernel = False  # not between these files; if nothing can be written, `pwrite` says why
                continue
        else:
            content = os.pread(source, min(left, _STEP), start + done)
            count = os.pwrite(target, content, at + done)
        if not count and in_kernel:
            in_kernel = False  # some file systems answer 0 for a file that is not at its end
            continue
        if not count:
            missing = length - done
            raise ModelFormatError(f"the model file became {missing} bytes too short: read it again")
        done += count
        advance(count)


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
