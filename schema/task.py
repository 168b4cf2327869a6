"""MediaPipe task bundles (.task): a zip archive of stored members, some of them models.

Reads where the members lie, and writes an archive in which some models are replaced. Everything else goes over byte for
byte and in its order; members that have to move keep their alignment, up to a page.

Sources: PKWARE's APPNOTE.TXT, 4.3 (records) and 4.5.3 (zip64); MediaPipe's model_asset_bundle_utils.py (stored members,
aligned by zeros in front of their headers) and llm_bundler.py (their names); LiteRT-LM's zip_utils.cc (what is read).
"""

from __future__ import annotations

import io
import os
import struct
import zipfile
import zlib
from typing import TYPE_CHECKING, Final, NamedTuple

from edge_opt.schema.atomic import replacing, resolve_target
from edge_opt.schema.data import Source, beginning
from edge_opt.schema.errors import ModelFormatError
from edge_opt.schema.reader import IDENTIFIER
from edge_opt.schema.transfer import copy_range, write_bytes
from edge_opt.schema.writer import Progress, counter, place_model, write_placed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from edge_opt.schema.placement import Placement
    from edge_opt.schema.table import Table

_LOCAL, _CENTRAL = b"PK\x03\x04", b"PK\x01\x02"
_END, _WIDE_END, _WIDE_LOCATOR = b"PK\x05\x06", b"PK\x06\x06", b"PK\x06\x07"
_LOCAL_SIZE, _CENTRAL_SIZE = 30, 46
# Where fields stand in the fixed part of a local header and of a directory's record.
_LOCAL_FLAGS, _LOCAL_CRC, _LOCAL_NAME, _LOCAL_EXTRA = 6, 14, 26, 28
_FLAGS, _CRC, _SIZES, _NAME, _OFFSET = 8, 16, 20, 28, 42

_ENCRYPTED, _SIZES_BEHIND = 1, 8
# From this value on, a field holds the mark instead, and zip64 the value.
_WIDE: Final = 0xFFFFFFFF
_MARK: Final = 0xFFFFFFFF
_WIDE_EXTRA, _WIDE_VERSION = 1, 45
_PAGE: Final = 4096
_CHUNK: Final = 1 << 20

# A bundle has some ten members; the directory, with what may follow it, has to fit in memory many times over.
_LARGEST_DIRECTORY: Final = 1 << 20

# What `zipfile` raises for archives that are damaged, or that use what it does not know.
_BROKEN = (
    zipfile.BadZipFile,
    NotImplementedError,
    ValueError,
    OverflowError,
    OSError,
    EOFError,
    struct.error,
)


class Member(NamedTuple):
    """One file of an archive: its local header from `begin`, its content from `data` to `end`."""

    name: str
    begin: int
    data: int
    end: int
    crc: int
    header: bytes
    record: bytes
    is_model: bool

    @property
    def model_type(self) -> str:
        """What a model is for: `prefill_decode` of TF_LITE_PREFILL_DECODE; empty for other members."""
        return self.name.lower().removeprefix("tf_lite_").removesuffix(".tflite") if self.is_model else ""


class TaskBundle:
    """An open archive; `sections` in the order of its directory."""

    __slots__ = ("_comment", "_directory", "_wide", "sections", "source")

    def __init__(
        self, source: Source, sections: list[Member], directory: int, comment: bytes, *, wide: bool
    ) -> None:
        """`directory` is where it begins; `wide` where it ends in zip64's way."""
        self.source = source
        self.sections = sections
        self._directory = directory
        self._comment = comment
        self._wide = wide

    def content(self, index: int) -> Source:
        """The bytes of a member, as something that `read_model` reads.

        Raises:
            ModelFormatError: they are not those that the archive has a checksum of.
        """
        member = self.sections[index]
        self._check(member)
        return self.source.section(member.data, member.end - member.data)

    def _check(self, member: Member) -> None:
        found = _checksum(
            self.source.view(at, min(_CHUNK, member.end - at)).data
            for at in range(member.data, member.end, _CHUNK)
        )
        if found != member.crc:
            raise _fail(
                self.source,
                f"member '{member.name}' has the checksum {found:08x} and {member.crc:08x} is recorded: the file is "
                "damaged, export or download it again",
            )

    def write(
        self,
        models: Mapping[int, Table],
        path: str | os.PathLike[str],
        *,
        overwrite: bool = False,
        progress: Progress | None = None,
        check: Callable[[Path], None] | None = None,
    ) -> None:
        """Write the archive with the models of some members (by index) replaced; weights go from file to file.

        Raises:
            UsageError: the output is the input, or exists and `overwrite` is false.
            OutputError: it could not be written; nothing was left behind.
            ModelFormatError: a member is damaged, tables hold what the format cannot, or the input was changed.
        """
        inputs = (self.source.identity,)
        resolve_target(path, overwrite=overwrite, inputs=inputs)
        for index, member in enumerate(self.sections):
            if index not in models:
                self._check(member)
        first = min(member.begin for member in self.sections)
        places, stop = self._lay_out(models, first)
        total = sum(place.stop - place.begin for place in places.values())
        advance = counter(total, progress)
        with replacing(path, overwrite=overwrite, inputs=inputs, check=check) as target:
            os.ftruncate(target, stop)  # what no member fills is zeros
            sums = {index: self._write_member(place, target, advance) for index, place in places.items()}
            records = [
                _record(member, places[index], sums[index]) for index, member in enumerate(self.sections)
            ]
            directory = b"".join(records)
            ending = _ending(len(records), len(directory), stop, self._comment, wide=self._wide)
            write_bytes(memoryview(directory + ending), target, stop, lambda _: None)
            self.source.check_unchanged()

    def _lay_out(self, models: Mapping[int, Table], stop: int) -> tuple[dict[int, _Place], int]:
        """Members keep their order in the file, and move by whole pages; the end of the last one."""
        order = sorted(range(len(self.sections)), key=lambda index: self.sections[index].begin)
        followers = [self.sections[index].begin for index in order[1:]] + [self._directory]
        places: dict[int, _Place] = {}
        for index, follower in zip(order, followers, strict=True):
            member = self.sections[index]
            if index in models:
                placement = place_model(models[index])
                header = _header(member, placement.size)
                begin = member.data + _up(stop + len(header) - member.data) - len(header)
                stop = begin + len(header) + placement.size
                places[index] = _Place(member, begin, stop, header, placement)
            else:
                begin = member.begin + _up(stop - member.begin)
                stop = begin + follower - member.begin
                places[index] = _Place(member, begin, stop, member.header, None)
        return places, stop

    def _write_member(self, place: _Place, target: int, advance: Callable[[int], None]) -> int:
        """Write a member where it belongs; its checksum."""
        member = place.member
        if place.placement is None:
            self._copy(member.begin, target, place.begin, place.stop - place.begin, advance)
            return member.crc
        data = place.begin + len(place.header)
        write_placed(place.placement, target, data, advance)
        # Read back: the weights went from file to file, past this process.
        checksum = _checksum(
            os.pread(target, min(_CHUNK, place.stop - at), at) for at in range(data, place.stop, _CHUNK)
        )
        struct.pack_into("<I", place.header, _LOCAL_CRC, checksum)
        write_bytes(memoryview(place.header), target, place.begin, advance)
        return checksum

    def _copy(self, start: int, target: int, at: int, length: int, advance: Callable[[int], None]) -> None:
        assert self.source.fd is not None
        copy_range(self.source.fd, self.source.base + start, target, at, length, advance=advance)


class _Place(NamedTuple):
    """Where a member goes; `placement` for a model that is written anew, under a new local header."""

    member: Member
    begin: int
    stop: int
    header: bytes | bytearray
    placement: Placement | None

    @property
    def size(self) -> int:
        return self.member.end - self.member.data if self.placement is None else self.placement.size


def _up(distance: int) -> int:
    return -(-distance // _PAGE) * _PAGE


def _checksum(chunks: Iterable[bytes | memoryview]) -> int:
    total = 0
    for chunk in chunks:
        total = zlib.crc32(chunk, total)
    return total


def is_task(path: str | os.PathLike[str]) -> bool:
    """True where the file begins like a zip archive, after zeros for alignment; one that cannot be opened is none."""
    return beginning(path, _PAGE).lstrip(b"\0")[:4] in (_LOCAL, _END)


def read_task(path: str | os.PathLike[str]) -> TaskBundle:
    """Read an archive's directory.

    Raises:
        ModelFormatError: the file is missing or no zip archive, a member is compressed or encrypted, or members lie
            outside the file or in one another.
    """
    source = Source.open(path)
    try:
        return _read(source)
    except BaseException:
        source.close()
        raise


def _read(source: Source) -> TaskBundle:
    try:
        with zipfile.ZipFile(_Window(source)) as archive:
            infos, begin, comment = archive.infolist(), archive.start_dir, archive.comment
    except _BROKEN as error:
        raise _fail(
            source, f"the zip archive cannot be read ({error}): export or download it again"
        ) from error
    if not infos:
        raise _fail(source, "the zip archive has no members")
    tail = bytes(source.view(begin, source.size - begin)) if _fits(source, begin) else b""
    members, at = [], 0
    for info in infos:
        lengths = struct.unpack_from("<3H", tail, at + _NAME) if at + _CENTRAL_SIZE <= len(tail) else ()
        record = tail[at : at + _CENTRAL_SIZE + sum(lengths)]
        if not record.startswith(_CENTRAL):
            raise _fail(source, "the zip archive's directory is not where it says")
        members.append(_member(source, info, record, begin))
        at += len(record)
    wide = tail.startswith(_WIDE_END, at)
    if len(tail) - at != len(_ending(0, 0, 0, comment, wide=wide)):
        raise _fail(source, "the zip archive's directory does not end where the archive does")
    _check_apart(source, members)
    return TaskBundle(source, members, begin, comment, wide=wide)


def _fits(source: Source, begin: int) -> bool:
    return 0 <= begin <= source.size <= begin + 2 * _LARGEST_DIRECTORY


def _fail(source: Source, message: str) -> ModelFormatError:
    return ModelFormatError(f"{source.name}: {message}")


def _member(source: Source, info: zipfile.ZipInfo, record: bytes, directory: int) -> Member:
    """A member, checked to be stored and to lie in front of the directory under a header that agrees with it."""
    name = info.filename
    if info.flag_bits & _ENCRYPTED:
        raise _fail(source, f"member '{name}' is encrypted, and readers of bundles have no password")
    if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size:
        raise _fail(
            source,
            f"member '{name}' is compressed, and readers map stored members only: pack it with `zip -0`",
        )
    begin = info.header_offset
    if not 0 <= begin <= directory - _LOCAL_SIZE:
        raise _fail(
            source, f"member '{name}' begins at byte {begin}, not before the directory at {directory}"
        )
    fixed = bytes(source.view(begin, _LOCAL_SIZE))
    lengths = struct.unpack_from("<2H", fixed, _LOCAL_NAME)
    data = begin + _LOCAL_SIZE + sum(lengths)
    end = data + info.file_size
    if end > directory:
        raise _fail(
            source, f"member '{name}' ends at byte {end}, behind the directory's begin at {directory}"
        )
    header = bytes(source.view(begin, data - begin))
    stored = record[_CENTRAL_SIZE:][: struct.unpack_from("<H", record, _NAME)[0]]
    method = struct.unpack_from("<H", fixed, 8)[0]
    if not fixed.startswith(_LOCAL) or header[_LOCAL_SIZE:][: lengths[0]] != stored or method:
        raise _fail(source, f"member '{name}' has another header at byte {begin} than in the directory")
    start = bytes(source.view(data, min(8, info.file_size)))
    return Member(name, begin, data, end, info.CRC, header, record, start[4:] == IDENTIFIER)


def _check_apart(source: Source, members: Sequence[Member]) -> None:
    names: set[str] = set()
    end = 0
    for member in sorted(members, key=lambda member: member.begin):
        if member.begin < end:
            raise _fail(source, f"members overlap at byte {member.begin}, where '{member.name}' begins")
        if member.name in names:
            raise _fail(source, f"there are two members '{member.name}'")
        end = member.end
        names.add(member.name)


def _header(member: Member, size: int) -> bytearray:
    """A member's local header for a content of `size` bytes, its checksum still to come."""
    name_size, extra_size = struct.unpack_from("<2H", member.header, _LOCAL_NAME)
    name_end = _LOCAL_SIZE + name_size
    extra, had = _without_wide(member.header[name_end : name_end + extra_size])
    if had or size >= _WIDE:
        extra = struct.pack("<2H2Q", _WIDE_EXTRA, 16, size, size) + extra
    header = bytearray(member.header[:name_end] + extra)
    short = _MARK if had or size >= _WIDE else size
    _set_sizes_known(header, _LOCAL_FLAGS)
    _set_version(header, _LOCAL_FLAGS - 2, wide=short == _MARK)
    struct.pack_into("<2I", header, _LOCAL_CRC + 4, short, short)
    struct.pack_into("<H", header, _LOCAL_EXTRA, len(extra))
    return header


def _record(member: Member, place: _Place, checksum: int) -> bytes:
    """A member's entry in the directory, at its new place."""
    record = bytearray(member.record)
    name_size, extra_size, _ = struct.unpack_from("<3H", record, _NAME)
    extra_at = _CENTRAL_SIZE + name_size
    extra, _ = _without_wide(bytes(record[extra_at : extra_at + extra_size]))
    wide = []
    # The order of zip64's values: size, compressed size, offset.
    for at, value in ((_SIZES + 4, place.size), (_SIZES, place.size), (_OFFSET, place.begin)):
        long = struct.unpack_from("<I", record, at)[0] == _MARK or value >= _WIDE
        wide += [value] if long else []
        struct.pack_into("<I", record, at, _MARK if long else value)
    if wide:
        extra = struct.pack(f"<2H{len(wide)}Q", _WIDE_EXTRA, 8 * len(wide), *wide) + extra
    if place.placement is not None:
        _set_sizes_known(record, _FLAGS)
    _set_version(record, _FLAGS - 2, wide=bool(wide))
    struct.pack_into("<I", record, _CRC, checksum)
    struct.pack_into("<H", record, _NAME + 2, len(extra))
    return bytes(record[:extra_at]) + extra + bytes(record[extra_at + extra_size :])


def _set_sizes_known(header: bytearray, at: int) -> None:
    """The sizes stand in the header, not behind the content."""
    flags = struct.unpack_from("<H", header, at)[0]
    struct.pack_into("<H", header, at, flags & ~_SIZES_BEHIND)


def _set_version(header: bytearray, at: int, *, wide: bool) -> None:
    """What it takes to read the member; the high byte is no part of the number."""
    if wide:
        header[at] = max(header[at], _WIDE_VERSION)


def _without_wide(extra: bytes) -> tuple[bytes, bool]:
    """The extra fields without zip64's, and whether it was there."""
    kept, at = b"", 0
    while at + 4 <= len(extra):
        kind, size = struct.unpack_from("<2H", extra, at)
        kept += extra[at : at + 4 + size] if kind != _WIDE_EXTRA else b""
        at += 4 + size
    kept += extra[at:]
    return kept, len(kept) < len(extra)


def _ending(count: int, size: int, begin: int, comment: bytes, *, wide: bool) -> bytes:
    """What follows the directory; in zip64's way where it was so, or has to be."""
    ending = b""
    if wide or begin >= _WIDE:
        values = (44, _WIDE_VERSION, _WIDE_VERSION, 0, 0, count, count, size, begin)
        ending = struct.pack("<4sQ2H2I4Q", _WIDE_END, *values)
        ending += struct.pack("<4sIQI", _WIDE_LOCATOR, 0, begin + size, 1)
    short = (0, 0, count, count, size, _MARK if begin >= _WIDE else begin, len(comment))
    return ending + struct.pack("<4s4H2IH", _END, *short) + comment


class _Window(io.RawIOBase):
    """A file for `zipfile`, which reads a whole directory at once, as long as that says it is."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._at = 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._source.size}[whence]
        if at < 0:
            raise OSError(f"it points to byte {at}")
        self._at = at
        return at

    def read(self, size: int | None = -1) -> bytes:
        left = max(0, self._source.size - self._at)
        count = left if size is None or size < 0 else min(size, left)
        if count > _LARGEST_DIRECTORY:
            raise ValueError(f"its directory of {count:,} bytes is far too large")
        content = bytes(self._source.view(self._at, count))
        self._at += count
        return content
