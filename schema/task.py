"""MediaPipe task bundles (.task): a zip archive of stored members, some of them models.

Reads where the members lie, and writes an archive in which some models are replaced. Every other member goes over byte
for byte and in its order, and keeps its alignment, up to a page. Python's `zipfile` reads and writes the directory.

Sources: PKWARE's APPNOTE.TXT, 4.3 (records); MediaPipe's model_asset_bundle_utils.py (stored members, aligned by zeros
in front of their headers) and llm_bundler.py (their names); LiteRT-LM's zip_utils.cc (what is read).
"""

import io
import os
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Final, NamedTuple

from edge_opt.schema.data import Source, beginning, write_bytes
from edge_opt.schema.sections import Bundle, Content, Place, place_content
from edge_opt.schema.table import IDENTIFIER

_LOCAL, _END = b"PK\x03\x04", b"PK\x05\x06"
_LOCAL_SIZE: Final = 30
_METHOD_AT, _NAME_AT = 8, 26  # of a local header
_ENCRYPTED, _SIZES_BEHIND = 1, 8
_PAGE: Final = 4096
_CHUNK: Final = 1 << 20

# A bundle has some ten members; the directory has to fit in memory many times over.
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

    info: zipfile.ZipInfo
    begin: int
    data: int
    end: int
    is_model: bool

    @property
    def name(self) -> str:
        """The file's name."""
        return self.info.filename

    @property
    def model_type(self) -> str:
        """What a model is for: `prefill_decode` of TF_LITE_PREFILL_DECODE; empty for other members."""
        return self.name.lower().removeprefix("tf_lite_").removesuffix(".tflite") if self.is_model else ""


@dataclass(eq=False, repr=False)
class TaskBundle(Bundle):
    """An open archive; `sections` in the order of its directory, which begins at byte `directory`."""

    suffix: ClassVar = ".task"
    source: Source
    sections: list[Member]
    directory: int
    comment: bytes

    def content(self, index: int) -> Source:
        """The bytes of a member, of which the archive has a checksum, as something that `read_model` reads."""
        member = self.sections[index]
        self._check(member)
        return self.source.section(member.data, member.end - member.data)

    def _check(self, member: Member) -> None:
        checksum = _checksum(
            self.source.view(at, min(_CHUNK, member.end - at)).data
            for at in range(member.data, member.end, _CHUNK)
        )
        if checksum != member.info.CRC:
            sums = f"member '{member.name}' has the checksum {checksum:08x} and {member.info.CRC:08x} is recorded"
            raise self.source.refusal(f"{sums}: the file is damaged, export or download it again")

    def _lay_out(self, contents: Mapping[int, Content]) -> tuple[list[Place], Callable[[int], None]]:
        """Members keep their order in the file, and move by whole pages."""
        order = sorted(range(len(self.sections)), key=lambda index: self.sections[index].begin)
        followers = [self.sections[index].begin for index in order[1:]] + [self.directory]
        stop = self.sections[order[0]].begin
        places: dict[int, Place] = {}
        for index, follower in zip(order, followers, strict=True):
            member = self.sections[index]
            if index in contents:
                placement = place_content(contents[index])
                header = len(_anew(member, placement.size).FileHeader())
                data = member.data + _up(stop + header - member.data)
                places[index] = Place(data, placement.size, 0, placement)
            else:
                self._check(member)
                begin = member.begin + _up(stop - member.begin)
                places[index] = Place(begin, follower - member.begin, member.begin, None)
            stop = places[index].stop
        laid_out = [places[index] for index in range(len(places))]
        return laid_out, partial(self._complete, laid_out, stop)

    def _complete(self, places: Sequence[Place], stop: int, target: int) -> None:
        """Write the headers of new members, and at `stop` the directory."""
        infos = [
            _moved(member.info, place) if place.placement is None else _write_header(member, place, target)
            for member, place in zip(self.sections, places, strict=True)
        ]
        with os.fdopen(os.dup(target), "r+b") as file:
            file.seek(stop)
            with zipfile.ZipFile(file, "w") as archive:
                archive.comment = self.comment
                archive.infolist().extend(infos)


def _moved(info: zipfile.ZipInfo, place: Place) -> zipfile.ZipInfo:
    moved = copy(info)
    moved.header_offset = place.begin
    return moved


def _anew(member: Member, size: int) -> zipfile.ZipInfo:
    """What is said of a new model: its sizes, which stand in the header now, and no fields for the old ones."""
    info = copy(member.info)
    info.file_size = info.compress_size = size
    info.flag_bits &= ~_SIZES_BEHIND
    info.extra = b""
    return info


def _write_header(member: Member, place: Place, target: int) -> zipfile.ZipInfo:
    """Write the header in front of a new model; its bytes are read back, since the weights went past this process."""
    info = _anew(member, place.size)
    info.CRC = _checksum(
        os.pread(target, min(_CHUNK, place.stop - at), at) for at in range(place.begin, place.stop, _CHUNK)
    )
    header = info.FileHeader()
    info.header_offset = place.begin - len(header)
    write_bytes(memoryview(header), target, info.header_offset, lambda _: None)
    return info


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
    assert source.fd is not None
    try:
        with _Bounded(os.dup(source.fd)) as file, zipfile.ZipFile(file) as archive:
            infos, begin, comment = archive.infolist(), archive.start_dir, archive.comment
    except _BROKEN as error:
        raise source.refusal(
            f"the zip archive cannot be read ({error}): export or download it again"
        ) from error
    if not infos:
        raise source.refusal("the zip archive has no members")
    members = [_member(source, info, begin) for info in infos]
    _check_apart(source, members)
    return TaskBundle(source, members, begin, comment)


def _member(source: Source, info: zipfile.ZipInfo, directory: int) -> Member:
    """A member, checked to be stored and to lie in front of the directory under a header that agrees with it."""
    name = info.filename
    if info.flag_bits & _ENCRYPTED:
        raise source.refusal(f"member '{name}' is encrypted, and readers of bundles have no password")
    if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size:
        raise source.refusal(
            f"member '{name}' is compressed, and readers map stored members only: pack it with `zip -0`"
        )
    begin = info.header_offset
    if not 0 <= begin <= directory - _LOCAL_SIZE:
        raise source.refusal(
            f"member '{name}' begins at byte {begin}, not before the directory at {directory}"
        )
    header = bytes(source.view(begin, _LOCAL_SIZE))
    name_size, extra_size = struct.unpack_from("<2H", header, _NAME_AT)
    name_at, data = begin + _LOCAL_SIZE, begin + _LOCAL_SIZE + name_size + extra_size
    end = data + info.file_size
    if end > directory:
        raise source.refusal(
            f"member '{name}' ends at byte {end}, behind the directory's begin at {directory}"
        )
    stored = bytes(source.view(name_at, name_size))
    method = struct.unpack_from("<H", header, _METHOD_AT)[0]
    if not header.startswith(_LOCAL) or stored != name.encode() or method != zipfile.ZIP_STORED:
        raise source.refusal(f"member '{name}' has another header at byte {begin} than in the directory")
    start = bytes(source.view(data, min(8, info.file_size)))
    return Member(info, begin, data, end, start[4:] == IDENTIFIER)


def _check_apart(source: Source, members: Sequence[Member]) -> None:
    names: set[str] = set()
    end = 0
    for member in sorted(members, key=lambda member: member.begin):
        if member.begin < end:
            raise source.refusal(f"members overlap at byte {member.begin}, where '{member.name}' begins")
        if member.name in names:
            raise source.refusal(f"there are two members '{member.name}'")
        end = member.end
        names.add(member.name)


class _Bounded(io.FileIO):
    """A file for `zipfile`, which reads a whole directory at once, as long as that says it is."""

    def read(self, size: int | None = -1) -> bytes:
        left = os.fstat(self.fileno()).st_size - self.tell()
        count = left if size is None or size < 0 else min(size, left)
        if count > _LARGEST_DIRECTORY:
            raise ValueError(f"its directory of {count:,} bytes is far too large")
        return super().read(max(count, 0)) or b""
