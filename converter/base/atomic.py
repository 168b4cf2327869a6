"""Replace a file atomically: write a temporary file beside it, flush it to disk, then rename it.

A killed process leaves the temporary file, `.NAME.*.edge-opt-tmp`.
"""

import contextlib
import errno
import os
import secrets
import stat
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from edge_opt.base.errors import OutputError, UsageError

# Some filesystems cannot flush a folder; the rename is then as durable as they make it.
_CANNOT_FLUSH = {errno.EINVAL, errno.ENOTSUP, errno.EACCES, errno.EBADF}

DISK_FULL = "the disk is full, make room or write elsewhere"
_REASONS = {
    errno.ENOSPC: DISK_FULL,
    errno.EFBIG: "the file would be larger than the filesystem or `ulimit -f` allows",
    errno.EACCES: "no permission to write in this folder, choose another",
    errno.EPERM: "no permission to write in this folder, choose another",
}

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}

_PRINTED = (Path("/dev/stdout"), Path("/dev/stderr"))

AnyPath = str | os.PathLike[str]
"""A file's path, as callers give it."""


def path_of(given: object, what: str) -> Path:
    """`given` as a path; UsageError for "" and anything else, which the message calls `what`."""
    if given == "":
        raise UsageError(f"{what} is an empty path: give a name, or leave it out")
    if isinstance(given, str | os.PathLike):
        return Path(given)
    raise UsageError(f"{what} must be a path, got a {type(given).__name__}")


def output_path(given: object) -> Path:
    """`given` as an output's path; UsageError for anything else, or for `name/` if there is no such folder."""
    path = path_of(given, "an output")
    if str(given).endswith("/") and not path.is_dir():
        raise UsageError(f"{given} is a folder that does not exist: create it, or leave out the /")
    return path


def contents_of(given: Any) -> bytes | None:
    """Bytes, or the rest of an open binary file; None for anything else."""
    read = getattr(given, "read", None)
    content = read() if callable(read) else given
    return bytes(content) if isinstance(content, bytes | bytearray | memoryview) else None


def input_file(given: AnyPath) -> Path:
    """The file that an input is read from: of `BUNDLE:MODEL`, the bundle."""
    path = Path(given)
    if path.exists():
        return path
    return Path(str(given).rpartition(":")[0] or given)


def resolve_target(
    path: AnyPath, *, overwrite: bool, inputs: Iterable[AnyPath | None] = ()
) -> Path:
    """The file that writing to `path` would create or replace; symlinks are followed.

    UsageError if it is an input, or exists and `overwrite` is false; OutputError if it cannot be written.
    """
    try:
        target = output_path(path).resolve()
        status = target.stat()
    except FileNotFoundError:
        if not target.parent.is_dir():
            text = f"{path} cannot be written: folder {target.parent} does not exist, create it"
            raise OutputError(text) from None
        status = None
    except (OSError, ValueError, RuntimeError) as error:
        raise OutputError(f"{str(path)!r} cannot be written: {reason_of(error)}") from error
    if status is not None:
        files = [input_file(given) for given in inputs if given]
        for what, others in (("the input itself", files), ("where messages are printed", _PRINTED)):
            if any(other.exists() and target.samefile(other) for other in others):
                raise UsageError(f"{path} is {what}: give another output")
        if not stat.S_ISREG(status.st_mode):
            raise OutputError(
                f"{path} cannot be written: it is a folder, pipe or device, give a file name"
            )
        if not overwrite:
            raise UsageError(
                f"{path} exists: pass overwrite=True to replace it, or give another output"
            )
    if not os.access(target.parent, os.W_OK):
        raise OutputError(f"{path} cannot be written: {_REASONS[errno.EACCES]}")
    return target


@contextlib.contextmanager
def replacing(
    path: AnyPath,
    *,
    overwrite: bool,
    inputs: Iterable[AnyPath | None] = (),
    check: Callable[[Path], None] | None = None,
) -> Iterator[int]:
    """A descriptor for the new content; the file is renamed to `path` only if the block succeeds.

    `check` gets the finished temporary file before the rename, and may raise to prevent it.
    """
    target = resolve_target(path, overwrite=overwrite, inputs=inputs)
    stem = os.fsencode(target.name)[:200].decode(sys.getfilesystemencoding(), "ignore")
    temporary = target.with_name(f".{stem}.{secrets.token_hex(8)}.edge-opt-tmp")
    try:
        mode = 0o600 if target.exists() else 0o666  # readable by others only if the target will be
        fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode)
    except OSError as error:
        raise OutputError(f"{path} cannot be written: {reason_of(error)}") from error
    try:
        yield fd
        if check is not None:
            check(temporary)
        os.fsync(fd)
        if target.exists():
            if not overwrite:
                text = f"{target} was created by another process meanwhile: pass overwrite=True to replace it"
                raise UsageError(text)
            os.fchmod(fd, stat.S_IMODE(target.stat().st_mode))
        temporary.rename(target)
    except OSError as error:
        text = (
            f"{path} could not be written: {reason_of(error)}; no part of this file was left behind"
        )
        raise OutputError(text) from error
    finally:
        temporary.unlink(missing_ok=True)
        os.close(fd)
    try:
        folder = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        if error.errno not in _CANNOT_FLUSH:
            text = f"{path} was written, but a power failure may lose it: {reason_of(error)}"
            raise OutputError(text) from error


def write_whole(path: AnyPath, content: bytes | memoryview, *, overwrite: bool) -> None:
    """Write these bytes to a file; raises like `replacing`."""
    with replacing(path, overwrite=overwrite) as fd, open(fd, "wb", closefd=False) as file:
        file.write(content)


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """A folder for temporary files, which is removed at the end.

    Raises:
        OutputError: it cannot be made, or the disk is full.
    """
    try:
        folder = tempfile.TemporaryDirectory(prefix="edge-opt-")
    except OSError as error:
        raise _no_scratch(error) from error
    with folder as name:
        try:
            yield Path(name)
        except OSError as error:
            is_here = error.filename is None or str(error.filename).startswith(name)
            if error.errno in _FULL and is_here:
                raise _no_scratch(error) from error
            raise


def scratch_file() -> IO[bytes]:
    """A temporary file without a name; OutputError if it cannot be made."""
    try:
        return tempfile.TemporaryFile()
    except OSError as error:
        raise _no_scratch(error) from error


def _no_scratch(error: OSError) -> OutputError:
    return OutputError(
        f"temporary files cannot be written: {error.strerror or error}; make room, or name another folder in the "
        f"environment variable TMPDIR"
    )


def reason_of(error: Exception) -> str:
    """Why a file cannot be written, with a remedy if one is known."""
    if not isinstance(error, OSError):
        return str(error)
    return _REASONS.get(error.errno or 0) or error.strerror or str(error)
