"""Lazy bytes: a region of an open file or of memory, read or copied only when needed.

It must not interpret the bytes, or open files that a model names. Files are read, not memory-mapped: if another process
truncates a mapped file, an access ends the process (SIGBUS); a read only comes back short.
"""

import os
import stat
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import IO, Any, Final, TypeVar

import numpy as np
import numpy.typing as npt

from edge_opt.base.atomic import contents_of, path_of
from edge_opt.base.errors import ModelFormatError
from edge_opt.base.mistaken import remedy_if_missing

Bytes = npt.NDArray[np.uint8]

_Read = TypeVar("_Read", bytes, int)

_KINDS: Final = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
# Fits in a processor's cache: steps of 1 MiB took two to three times as long.
_STEP: Final = 512 << 10
_NEAR: Final = 16 << 10


class Source:
    """Bytes in memory, or a model file that is open for reading until `close` or until the source is deleted.

    It may also be a section of a file that begins at byte `base`; offsets count from there.
    """

    def __init__(
        self,
        content: bytes | None,
        *,
        path: Path | None = None,
        fd: int | None = None,
        base: int = 0,
        size: int = 0,
    ) -> None:
        """Use `content`, or if None, `size` bytes of the open file `fd`, which is closed with the source."""
        self.content = content
        self.path = path
        self.fd = fd
        self.base = base
        self.size = size if content is None else len(content)
        self._near = (0, b"")
        self._stat = None if fd is None else _stat_of(fd)
        self._finalizer: Any = None if fd is None else weakref.finalize(self, os.close, fd)

    @classmethod
    def of(cls, given: "str | os.PathLike[str] | bytes | IO[bytes] | Source") -> "Source":
        """A source itself, bytes, the rest of an open file, or the file of this name, opened."""
        if isinstance(given, Source):
            return given
        content = contents_of(given)
        return cls.open(path_of(given, "a model")) if content is None else cls(content)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> "Source":
        """Open a regular file; ModelFormatError for anything else, before anything is read."""
        try:
            # Without O_NONBLOCK, opening a FIFO would wait for a writer.
            fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except ValueError as error:
            raise ModelFormatError(f"{str(path)!r} is not a file name: {error}") from error
        except FileNotFoundError as error:
            raise ModelFormatError(f"{path} does not exist: {remedy_if_missing(path)}") from error
        except OSError as error:
            raise ModelFormatError(f"{path} cannot be opened: {error.strerror}") from error
        status = os.fstat(fd)
        source = cls(None, path=Path(path), fd=fd, size=status.st_size)
        if status.st_size and stat.S_ISREG(status.st_mode):
            return source
        source.close()
        if stat.S_ISREG(status.st_mode):
            raise ModelFormatError(f"{path} is empty: export or download it again")
        remedy = "give a .tflite model"
        if stat.S_ISDIR(status.st_mode) and (Path(path) / "config.json").exists():
            remedy = "for a checkpoint, use `edge-opt build`"
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "a device")
        raise ModelFormatError(f"{path} is {kind}, not a file: {remedy}")

    @property
    def name(self) -> str:
        """The name for messages."""
        if self.path is None:
            return "the model in memory"
        return f"the model at byte {self.base} of {self.path}" if self.base else str(self.path)

    def refusal(self, message: str) -> ModelFormatError:
        """Return a ModelFormatError about this file."""
        return ModelFormatError(f"{self.name}: {message}")

    def read(self, offset: int, length: int) -> bytes:
        """`length` bytes from `offset` on; ModelFormatError if the file was closed, shortened or cannot be read."""
        if self.content is not None:
            return self.content[offset : offset + length]
        if self.fd is None:
            raise ModelFormatError(
                f"{self.name} was closed: keep it open while its weights are needed"
            )
        if length > _NEAR // 2:
            return self._read(self.fd, offset, length)
        # Tables that lie side by side are read at once. Another thread may replace `_near` meanwhile.
        begin, near = self._near
        if not begin <= offset <= begin + len(near) - length:
            begin = max(0, offset - _NEAR // 2)
            near = self._read(self.fd, begin, min(_NEAR, self.size - begin))
            self._near = begin, near
        return near[offset - begin : offset - begin + length]

    def read_into(self, buffer: memoryview, offset: int) -> int:
        """Fill the beginning of a buffer with the bytes from `offset` on; returns their number. Raises as `read`."""
        if self.fd is None:
            buffer[:] = self.read(offset, len(buffer))
            return len(buffer)
        return self._checked(partial(os.preadv, self.fd, [buffer]), offset)

    def _read(self, fd: int, offset: int, length: int) -> bytes:
        content = b""
        while len(content) < length:  # one call reads at most 2 GB
            content += self._checked(
                partial(os.pread, fd, length - len(content)), offset + len(content)
            )
        return content

    def _checked(self, read: Callable[[int], _Read], offset: int) -> _Read:
        """The result of reading from `offset` on; ModelFormatError if there is nothing to read."""
        try:
            some = read(self.base + offset)
        except OSError as error:
            raise ModelFormatError(f"{self.name} cannot be read: {error.strerror}") from error
        if not some:
            raise self.refusal("it was shortened while it was in use: read it again")
        return some

    def check_unchanged(self) -> None:
        """Raise ModelFormatError if the file was changed since it was opened."""
        if self.fd is not None and _stat_of(self.fd) != self._stat:
            raise self.refusal("it was changed while it was in use: read it again")

    def close(self) -> None:
        """Close the file; bytes that were not read yet are no longer available."""
        self.fd = None
        if self._finalizer is not None:
            self._finalizer()

    def __deepcopy__(self, memo: dict[int, Any]) -> "Source":
        """Return itself: it is only read."""
        return self


class Data:
    """Bytes in a region of a `Source`, uint8[length]: `length` bytes from `offset` on, or the rest.

    The caller must have checked the bounds. `external`: True if the bytes lie after the flatbuffer, False if inside;
    None, for new bytes, follows the other weights of the model.
    """

    __slots__ = ("external", "length", "offset", "source")

    def __init__(
        self,
        source: bytes | Source,
        offset: int = 0,
        length: int | None = None,
        external: bool | None = None,
    ) -> None:
        self.source = Source(source) if isinstance(source, bytes) else source
        self.length = self.source.size - offset if length is None else length
        self.offset = offset
        self.external = external

    @property
    def key(self) -> tuple[Source, int, int]:
        """Equal for the same bytes of the same source."""
        return (self.source, self.offset, self.length)

    def view(self) -> Bytes:
        """The bytes as a read-only uint8[length]; a file is read on each call (ModelFormatError)."""
        return np.frombuffer(self.source.read(self.offset, self.length), np.uint8)

    def write(self, target: int, at: int = 0) -> None:
        """Write the bytes at offset `at` of a descriptor."""
        # One buffer for all steps: a new one each time takes four times as long, for its fresh pages.
        buffer = memoryview(bytearray(min(_STEP, self.length)))
        done = 0
        while done < self.length:
            count = self.source.read_into(buffer[: self.length - done], self.offset + done)
            done += os.pwrite(target, buffer[:count], at + done)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Data":
        """Return itself: the bytes never change."""
        return self

    def __repr__(self) -> str:
        return f"Data({self.length} bytes, {self.source.name} at {self.offset})"


def _stat_of(fd: int) -> tuple[int, ...]:
    status = os.fstat(fd)
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
