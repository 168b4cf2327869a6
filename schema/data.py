"""Bytes that stay where they are: a region of an open file, or of memory, until they are read or copied.

It must not interpret the bytes, and it never opens a file by a name found inside a model. Files are read, not
mapped: looking into a mapping whose file somebody else shortens ends the process (SIGBUS), a read comes back short.
"""

import errno
import os
import stat
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from edge_opt.base.errors import ModelFormatError

Bytes = npt.NDArray[np.uint8]


class Source:
    """A model file, open for reading (until `close`, or as long as the source lives), or a bytes object.

    It may also be a section of a file, which begins at its byte `base`; offsets count from there.
    """

    __slots__ = ("__weakref__", "_array", "_finalizer", "_stat", "base", "content", "fd", "path", "size")

    def __init__(
        self,
        content: bytes | None,
        *,
        path: Path | None = None,
        fd: int | None = None,
        base: int = 0,
        size: int = 0,
        status: tuple[int, ...] | None = None,
    ) -> None:
        """The bytes, or where None a part of an open file, whose descriptor is closed with the source."""
        self.content, self.path, self.fd, self.base = content, path, fd, base
        # All arrays look into this one: four times cheaper than a buffer each.
        self._array: Bytes | None = None if content is None else np.frombuffer(content, np.uint8)
        self.size = size if content is None else len(content)
        self._stat = status
        self._finalizer: Any = None if fd is None else weakref.finalize(self, os.close, fd)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> "Source":
        """Open a regular file; anything else is refused before a byte of it is read.

        Raises:
            ModelFormatError: the file is missing, unreadable, empty, or no regular file.
        """
        try:
            # Without O_NONBLOCK, opening a FIFO would wait for a writer.
            fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except (OSError, ValueError) as error:
            raise ModelFormatError(_cannot_open(Path(path), error)) from error
        status = os.fstat(fd)
        source = cls(None, path=Path(path), fd=fd, size=status.st_size, status=_identity(status))
        wrong = _no_model(Path(path), status)
        if wrong is not None:
            source.close()
            raise ModelFormatError(wrong)
        return source

    def section(self, begin: int, size: int) -> "Source":
        """A part of this file as a source of its own, with a descriptor of its own.

        Raises:
            ModelFormatError: the part does not lie inside.
        """
        if not 0 <= begin <= begin + size <= self.size:
            where = f"bytes {begin} to {begin + size}, of {self.size}"
            raise self.refusal(f"a section lies outside the file ({where})")
        if self.fd is None:
            return Source(bytes(self.view(begin, size)))
        fd = os.dup(self.fd)
        return Source(None, path=self.path, fd=fd, base=self.base + begin, size=size, status=self._stat)

    def __reduce__(self) -> tuple[Any, ...]:
        """The bytes, or how to open the file again: a descriptor's number is another file's in another process."""
        if self.path is None:
            return Source, (self.content,)
        return Source._again, (self.path, self.base, self.size, self._stat, self.fd is not None)

    @classmethod
    def _again(cls, path: Path, base: int, size: int, status: tuple[int, ...], is_open: bool) -> "Source":
        """A source as it was pickled; ModelFormatError where its file was changed since."""
        if not is_open:
            return cls(None, path=path, base=base, size=size, status=status)
        source = cls.open(path)
        if source._stat != status:  # noqa: SLF001  of this class
            raise source.refusal("it was changed since the model was pickled or copied: read it again")
        source.base, source.size = base, size
        return source

    @property
    def name(self) -> str:
        """What to call it in a message."""
        return "the model in memory" if self.path is None else str(self.path)

    def refusal(self, message: str) -> ModelFormatError:
        """The error that says this of the file."""
        return ModelFormatError(f"{self.name}: {message}")

    @property
    def identity(self) -> tuple[int, int] | None:
        """Device and inode of the file; None for bytes."""
        return None if self._stat is None else (self._stat[0], self._stat[1])

    def view(self, offset: int, length: int) -> Bytes:
        """`length` bytes from `offset` on, uint8[length], read-only; those of a file are read now, into memory.

        Raises:
            ModelFormatError: the file was closed, shortened meanwhile, or cannot be read.
        """
        if length == 0:
            return np.empty(0, np.uint8)
        if self._array is not None:
            return self._array[offset : offset + length]
        if self.fd is None:
            raise ModelFormatError(f"{self.name} was closed: keep it open while its weights are needed")
        content = np.empty(length, np.uint8)
        done = 0
        while done < length:
            try:
                count = os.preadv(self.fd, [content[done:].data], self.base + offset + done)
            except OSError as error:
                raise ModelFormatError(f"{self.name} cannot be read: {error.strerror}") from error
            if count == 0:
                missing = length - done
                raise ModelFormatError(f"{self.name} became {missing} bytes too short: read it again")
            done += count
        content.flags.writeable = False
        return content

    def check_unchanged(self) -> None:
        """Compare size and modification time with those at opening.

        Raises:
            ModelFormatError: somebody wrote to the file meanwhile, so what was read of it is worth nothing.
        """
        if self.fd is not None and _identity(os.fstat(self.fd)) != self._stat:
            raise ModelFormatError(f"{self.name} was changed while it was in use: read it again")

    def close(self) -> None:
        """Give back the descriptor; bytes that were not read yet can then no longer be read."""
        self.fd = None
        if self._finalizer is not None:
            self._finalizer()


def beginning(path: str | os.PathLike[str], length: int) -> bytes:
    """The first bytes of a regular file; nothing of one that cannot be opened, or of a pipe, which they would leave."""
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            regular = stat.S_ISREG(os.fstat(file.fileno()).st_mode)
            return file.read(length) if regular else b""
    except (OSError, ValueError):
        return b""


class Data:
    """Bytes in a region of a `Source` or in memory; `external`: stored after the flatbuffer, not inside it.

    An array is looked into, not copied: leave it alone afterwards. `placement` is what `external` was said to be; None,
    for bytes in memory, means wherever the other weights of the model are.
    """

    __slots__ = ("_memory", "length", "offset", "placement", "source")

    def __init__(
        self,
        content: bytes | npt.NDArray[Any] | None,
        *,
        external: bool | None = None,
        source: Source | None = None,
        offset: int = 0,
        length: int = 0,
    ) -> None:
        self._memory = None if content is None else _as_bytes(content)
        self.placement = external
        self.source = source
        self.offset = offset
        self.length = length if self._memory is None else self._memory.nbytes

    @classmethod
    def region(cls, source: Source, offset: int, length: int, *, external: bool) -> "Data":
        """`length` bytes of `source` from `offset` on; the caller has checked that they lie inside."""
        return cls(None, external=external, source=source, offset=offset, length=length)

    @property
    def external(self) -> bool:
        """Whether the bytes lie after the flatbuffer."""
        return bool(self.placement)

    def view(self) -> Bytes:
        """The bytes, uint8[length], read-only; those of a file are read anew each time, and not kept.

        Raises:
            ModelFormatError: the file they come from was closed, shortened meanwhile, or cannot be read.
        """
        if self._memory is not None:
            return self._memory
        assert self.source is not None
        return self.source.view(self.offset, self.length)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Data":
        """Itself: the bytes never change."""
        return self

    def __len__(self) -> int:
        return self.length

    def __repr__(self) -> str:
        where = "memory" if self.source is None else f"{self.source.name} at {self.offset}"
        return f"Data({self.length} bytes, {where}{', external' if self.external else ''})"


def _as_bytes(content: bytes | npt.NDArray[Any]) -> Bytes:
    array = np.frombuffer(content, np.uint8) if isinstance(content, bytes) else content
    little = array.astype(array.dtype.newbyteorder("<"), copy=False)
    flat = np.ascontiguousarray(little).reshape(-1).view(np.uint8)
    flat.flags.writeable = False
    return flat


def _identity(status: os.stat_result) -> tuple[int, ...]:
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


def _no_model(path: Path, status: os.stat_result) -> str | None:
    """Why an opened file can be no model, and what to do; None where it can."""
    if stat.S_ISREG(status.st_mode):
        return None if status.st_size else f"{path} is empty: it is no model, export or download it again"
    kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
    kind = kinds.get(stat.S_IFMT(status.st_mode), "a device")
    if stat.S_ISDIR(status.st_mode) and (path / "config.json").exists():
        return f"{path} is {kind}, not a file: `edge-opt build` makes a model of a checkpoint"
    return f"{path} is {kind}, not a file: give a .tflite model"


def _cannot_open(path: Path, error: OSError | ValueError) -> str:
    if isinstance(error, ValueError):
        return f"{str(path)!r} is not a file name: {error}"
    if error.errno == errno.ENOENT:
        return f"{path} does not exist: check the path"
    return f"{path} cannot be opened: {error.strerror}"


_WINDOW_BITS: Final = 14
_WINDOW_PAGE: Final = 1 << _WINDOW_BITS

# Tables are read nearly in the order in which they lie: of a 270M, with 128 pages at hand instead of 1024, 563 are read
# instead of 417.
_MOST_PAGES: Final = 128


class Window:
    """Gives the reader of tables any stretch of a source, a page at a time; remembers up to 2 MiB of pages."""

    __slots__ = ("_content", "_end", "_pages", "_source", "loaded")

    def __init__(self, source: Source, end: int) -> None:
        """`end`: what lies behind it is never read."""
        self._source = source
        self._end = end
        self._content = source.content
        self._pages: dict[int, bytes] = {}
        self.loaded = 0

    def at(self, position: int, length: int) -> tuple[bytes, int]:
        """A piece of the source that holds the `length` bytes from `position` on, and where in it they start.

        Raises:
            ModelFormatError: the file was shortened meanwhile, or cannot be read.
        """
        if self._content is not None:
            return self._content, position
        page = self._pages.get(position >> _WINDOW_BITS)
        start = position & (_WINDOW_PAGE - 1)
        if page is not None and start + length <= len(page):
            return page, start
        if start + length > _WINDOW_PAGE:
            self.loaded += 1 + length // _WINDOW_PAGE
            return self._source.view(position, length).tobytes(), 0
        return self._load(position >> _WINDOW_BITS), start

    def _load(self, number: int) -> bytes:
        if len(self._pages) >= _MOST_PAGES:
            self._pages.clear()
        begin = number << _WINDOW_BITS
        page = self._source.view(begin, min(_WINDOW_PAGE, self._end - begin)).tobytes()
        self._pages[number] = page
        self.loaded += 1
        return page


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
