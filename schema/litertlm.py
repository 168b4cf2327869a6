"""LiteRT-LM bundles (.litertlm): several models and their metadata in one file, as sections aligned to 16 KiB.

Reads where the sections lie, and writes a bundle in which some sections are replaced. Everything else goes over byte
for byte: of the header, only the sections' positions change. `stamp_by_content` is for bundles that must come out the
same whenever they are made.

Of the executor metadata, a protocol buffer in a section of its own, it reads the window of sliding layers and known
facts about each cache.

Source of the formats: the PyPI package litert-lm-builder (litertlm_core, litertlm_header_schema_py_generated,
runtime/proto/executor_metadata_pb2).
"""

import hashlib
import os
import struct
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from flatbuffers import number_types
from flatbuffers.table import Table as HeaderTable

from edge_opt.base.atomic import replacing, resolve_target
from edge_opt.base.errors import ModelFormatError
from edge_opt.schema.data import Source, beginning, copy_range, write_bytes
from edge_opt.schema.table import Table
from edge_opt.schema.writer import Placement, Progress, check_suffix, counter, place_model

MAGIC: Final = b"LITERTLM"
SUFFIX: Final = ".litertlm"
ALIGNMENT: Final = 16 << 10
_MAJOR_VERSION: Final = 1
_HEADER_BEGIN: Final = 32
_LARGEST_HEADER: Final = 16 << 20
# Bundles have a dozen sections with a few entries each; many may share one list.
_MOST_ENTRIES: Final = 4096
_LONGEST_TEXT: Final = 4096

_TFLITE_MODEL: Final = 3

# Slots of the header's tables, which are read with `flatbuffers`; of the values of entries, texts only.
_SYSTEM, _SECTIONS = 0, 1  # LiteRTLMMetaData
_ITEMS, _BEGIN, _END, _DATA_TYPE = 0, 1, 2, 3  # SectionObject
_KEY, _VALUE_TYPE, _VALUE = 0, 1, 2  # KeyValuePair
_STRING_VALUE: Final = 9

# What litert-lm-builder says of a file: a random UUID, and when it was made.
_UUID, _TIME = "uuid", "creation_timestamp"
_NO_TIME: Final = "1970-01-01T00:00:00.000000+00:00"
_CHUNK: Final = 1 << 22

Content = Table | bytes
"""What a section is replaced with: a model's root table, or the bytes of any other section."""


class Section(NamedTuple):
    """One part of a bundle: bytes `begin` to `end`; `begin_at` and `end_at` are where the header says so."""

    begin: int
    end: int
    data_type: int
    items: dict[str, str]
    begin_at: int
    end_at: int

    @property
    def is_model(self) -> bool:
        """True for a TFLite model."""
        return self.data_type == _TFLITE_MODEL

    @property
    def model_type(self) -> str:
        """What a model is for, e.g. `prefill_decode`; empty for other sections."""
        return self.items.get("model_type", "").lower().removeprefix("tf_lite_") if self.is_model else ""


class _Place(NamedTuple):
    """Where `size` bytes go: those from `start` of the old file on, or a new section."""

    begin: int
    size: int
    start: int
    placement: Placement | None = None

    @property
    def stop(self) -> int:
        """The byte behind the last one."""
        return self.begin + self.size


class Bundle:
    """An open bundle: its header, where its sections lie, and whether bytes follow that no section names."""

    def __init__(self, source: Source) -> None:
        """Read the header; ModelFormatError where it is damaged, or of a newer version."""
        self.source = source
        self.header = _header(source)
        self.sections = _sections(source, self.header, source.size)

    def content(self, index: int) -> Source:
        """The bytes of a section, as something that `read_model` reads."""
        section = self.sections[index]
        return self.source.section(section.begin, section.end - section.begin)

    def write(
        self,
        contents: Mapping[int, Content],
        path: str | os.PathLike[str],
        *,
        overwrite: bool = False,
        progress: Progress | None = None,
        check: Callable[[Path], None] | None = None,
    ) -> None:
        """Write the bundle with some sections (by index) replaced; weights go from file to file.

        Raises:
            UsageError, OutputError, ModelFormatError: as `write_model`.
        """
        check_suffix(path, SUFFIX)
        source, inputs = self.source, (self.source.identity,)
        resolve_target(path, overwrite=overwrite, inputs=inputs)
        places = self._lay_out(contents)
        header = self._moved(places)
        distinct = {place.begin: place for place in (*places, *self._trailing(places))}.values()
        total = sum(place.placement.amount if place.placement else place.size for place in distinct)
        advance = counter(total, progress)
        with replacing(path, overwrite=overwrite, inputs=inputs, check=check) as target:
            os.ftruncate(target, max(place.stop for place in distinct))  # what no section fills is zeros
            for place in distinct:
                if place.placement is not None:
                    place.placement.write(target, place.begin, advance)
                else:
                    copy_range(source, place.start, target, place.begin, place.size, advance)
            write_bytes(memoryview(header), target, 0, lambda _: None)
            source.check_unchanged()

    def _lay_out(self, contents: Mapping[int, Content]) -> list[_Place]:
        """Sections keep the order in which they lie in the file; those that are the same bytes stay the same."""
        end = len(self.header)
        placed: dict[tuple[int, int], _Place] = {}
        for index, section in sorted(enumerate(self.sections), key=lambda pair: pair[1].begin):
            if section[:2] not in placed:
                placement = _place_content(contents[index]) if index in contents else None
                size = section.end - section.begin if placement is None else placement.size
                begin = -(-end // ALIGNMENT) * ALIGNMENT
                placed[section[:2]] = _Place(begin, size, section.begin, placement)
                end = begin + size
        return [placed[section[:2]] for section in self.sections]

    def _trailing(self, places: list[_Place]) -> list[_Place]:
        """Bytes behind the last section, no nearer to the file's begin; zeros up to a boundary are not among them."""
        start = max(section.end for section in self.sections)
        size = self.source.size - start
        if size < ALIGNMENT and not self.source.view(start, size).any():
            return []
        return [_Place(max(start, *(place.stop for place in places)), size, start)]

    def _moved(self, places: list[_Place]) -> bytes:
        """The header with the new places.

        Positions may be stored in bytes that mean something else too; then writing one of them spoils the header.
        """
        header = bytearray(self.header)
        wanted = []
        for section, place in zip(self.sections, places, strict=True):
            struct.pack_into("<Q", header, section.begin_at, place.begin)
            struct.pack_into("<Q", header, section.end_at, place.stop)
            wanted.append(section._replace(begin=place.begin, end=place.stop))
        try:
            again = _sections(self.source, bytes(header), max(place.stop for place in places))
        except ModelFormatError:
            again = []
        if again != wanted:
            reason = "the header's tables overlap, so that no section can be moved: make the bundle anew"
            raise self.source.refusal(reason)
        return bytes(header)


def _place_content(content: Content) -> Placement:
    """A model with its weights, or bytes as they are."""
    if isinstance(content, bytes):
        return Placement(bytearray(content), [], len(content))
    return place_model(content)


def is_bundle(path: str | os.PathLike[str]) -> bool:
    """True where the file begins like a bundle; a file that cannot be opened is none."""
    return beginning(path, len(MAGIC)) == MAGIC


def read_bundle(path: str | os.PathLike[str]) -> Bundle:
    """Read a bundle's header.

    Raises:
        ModelFormatError: the file is missing or not a bundle, or its sections lie outside it or in one another.
    """
    source = Source.open(path)
    try:
        return Bundle(source)
    except BaseException:
        source.close()
        raise


def stamp_by_content(path: Path) -> None:
    """Give a bundle the UUID that follows from its content, and the time zero: the same content is the same file.

    litert-lm-builder writes a random UUID and the time into the header. Only texts as long as the new ones are
    replaced, in place. A bundle without them stays as it is.

    Raises:
        ModelFormatError: it is not a bundle.
        OSError: it cannot be written.
    """
    bundle = read_bundle(path)
    header = _stamped(bundle.source, bundle.header, {_UUID: str(uuid.UUID(int=0)), _TIME: _NO_TIME})
    digest = hashlib.sha256(header)
    for at in range(len(header), bundle.source.size, _CHUNK):
        digest.update(bundle.source.view(at, min(_CHUNK, bundle.source.size - at)).data)
    header = _stamped(bundle.source, header, {_UUID: str(uuid.uuid5(uuid.NAMESPACE_OID, digest.hexdigest()))})
    bundle.source.close()
    with path.open("r+b") as file:
        file.write(header)


def _stamped(source: Source, header: bytes, texts: Mapping[str, str]) -> bytes:
    """The header with other texts for these keys, wherever the old ones are as long."""
    old = _HeaderReader(source, header).system()
    for key, text in texts.items():
        if len(old.get(key, "").encode()) == len(text):
            header = header.replace(old[key].encode(), text.encode())
    return header


def _header(source: Source) -> bytes:
    """The first bytes of a bundle, up to the end of the flatbuffer that says where the sections lie."""
    begin = bytes(source.view(0, min(_HEADER_BEGIN, source.size)))
    if begin[: len(MAGIC)] != MAGIC or len(begin) < _HEADER_BEGIN:
        raise source.refusal("this is not a LiteRT-LM bundle")
    major, end = int.from_bytes(begin[8:12], "little"), int.from_bytes(begin[24:32], "little")
    if major != _MAJOR_VERSION:
        newer = f"version {major} was written by a newer program, this one reads version {_MAJOR_VERSION}"
        raise source.refusal(newer)
    if not _HEADER_BEGIN + 4 <= end <= min(source.size, _LARGEST_HEADER):
        raise source.refusal(f"the header ends at byte {end}, of {source.size}")
    return bytes(source.view(0, end))


class _HeaderReader:
    """Reads a header's flatbuffer where it is needed; a position outside the header is damage."""

    def __init__(self, source: Source, header: bytes) -> None:
        self._source = source
        self._header = header
        self._lists: dict[int, dict[str, str]] = {}
        self._left = _MOST_ENTRIES

    def system(self) -> dict[str, str]:
        """The texts that the header says of the whole file, by key."""
        try:
            table = self._child(self._root(), _SYSTEM)
            return {} if table is None else self._texts(table, 0)
        except (struct.error, TypeError) as error:
            raise self._source.refusal(f"its header is damaged ({error}): copy it again") from error

    def sections(self) -> list[Section]:
        """The sections as the header has them, with positions that nobody has checked yet."""
        try:
            metadata = self._child(self._root(), _SECTIONS)
            return [] if metadata is None else [self._section(table) for table in self._tables(metadata, 0)]
        except (struct.error, TypeError) as error:
            raise self._source.refusal(f"its header is damaged ({error}): copy it again") from error

    def _root(self) -> Any:
        return self._at(HeaderTable(self._header, 0).Indirect(_HEADER_BEGIN))

    def _at(self, position: int) -> Any:
        """The table at a position; its vtable may lie on either side of it."""
        table = HeaderTable(self._header, position)
        vtable = position - table.Get(number_types.SOffsetTFlags, position)
        if not 0 <= vtable < len(self._header):
            raise struct.error(f"a vtable lies at byte {vtable}")
        return table

    def _place(self, table: Any, slot: int) -> int | None:
        """Where the value of a field stands; None where it is absent."""
        offset = table.Offset(4 + 2 * slot)
        return table.Pos + offset if offset else None

    def _child(self, table: Any, slot: int) -> Any:
        place = self._place(table, slot)
        return None if place is None else self._at(table.Indirect(place))

    def _tables(self, table: Any, slot: int) -> list[Any]:
        place = self._place(table, slot)
        if place is None:
            return []
        vector = table.Indirect(place)
        count = table.Get(number_types.UOffsetTFlags, vector)
        self._left -= count
        if self._left < 0:
            raise struct.error(f"more than {_MOST_ENTRIES} sections and entries")
        return [self._at(table.Indirect(vector + 4 + 4 * index)) for index in range(count)]

    def _section(self, table: Any) -> Section:
        begin_at, end_at = self._place(table, _BEGIN), self._place(table, _END)
        if begin_at is None or end_at is None:
            raise struct.error("a section has no position")
        begin, end = (table.Get(number_types.Uint64Flags, place) for place in (begin_at, end_at))
        kind = self._place(table, _DATA_TYPE)
        data_type = 0 if kind is None else table.Get(number_types.Uint8Flags, kind)
        items = self._place(table, _ITEMS)
        key = -1 if items is None else table.Indirect(items)
        if key not in self._lists:
            self._lists[key] = self._texts(table, _ITEMS)
        return Section(begin, end, data_type, self._lists[key], begin_at, end_at)

    def _texts(self, table: Any, slot: int) -> dict[str, str]:
        """The texts among the values of a list of entries, by key."""
        texts = {}
        for entry in self._tables(table, slot):
            kind = self._place(entry, _VALUE_TYPE)
            value = self._child(entry, _VALUE)
            if kind is not None and entry.Get(number_types.Uint8Flags, kind) == _STRING_VALUE and value:
                texts[self._text(entry, _KEY)] = self._text(value, 0)
        return texts

    def _text(self, table: Any, slot: int) -> str:
        place = self._place(table, slot)
        if place is None:
            return ""
        begin = table.Indirect(place)
        size = table.Get(number_types.UOffsetTFlags, begin)
        if begin + 4 + size > len(self._header) or size > _LONGEST_TEXT:
            raise struct.error(f"a text of {size} bytes")
        return self._header[begin + 4 : begin + 4 + size].decode("utf-8", "replace")


def _sections(source: Source, header: bytes, size: int) -> list[Section]:
    """Where the sections of a file of that size lie, checked to be inside the file and apart."""
    sections = _HeaderReader(source, header).sections()
    if not sections:
        raise source.refusal("the bundle has no sections")
    for index, (begin, end, *_) in enumerate(sections):
        if not len(header) <= begin <= end <= size:
            raise source.refusal(
                f"section {index} lies at bytes {begin} to {end}, of {size}: the file is damaged, copy it again"
            )
    end = 0
    for begin, stop in sorted({section[:2] for section in sections}):
        if begin < end:
            raise source.refusal(f"sections overlap at byte {begin}")
        end = stop
    return sections


SECTION_TYPE: Final = 9
ASSUMED_WINDOW: Final = 512
"""What LiteRT-LM takes for the window of sliding layers where the metadata names none."""

# Numbers of the executor metadata's fields.
_LANGUAGE_MODEL, _BUFFERS, _MASKS, _WINDOW = 1, 2, 3, 3
_INPUT, _KIND, _AXIS = 3, 6, 7
_LOCAL_KINDS = (3, 4)  # TYPE_LOCAL_KEY_CACHE, TYPE_LOCAL_VALUE_CACHE
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


class StateBuffer(NamedTuple):
    """A cache: the decode input that it is, the axis that counts positions, and whether a sliding layer's ring."""

    name: str
    axis: int | None
    local: bool


class ExecutorMetadata(NamedTuple):
    """What a bundle says of its caches; `window` in positions, None where it says nothing of it."""

    window: int | None
    buffers: tuple[StateBuffer, ...]


def section_of(bundle: Bundle) -> int | None:
    """The index of the bundle's section with executor metadata; None where it has none."""
    return next((i for i, one in enumerate(bundle.sections) if one.data_type == SECTION_TYPE), None)


def read_executor_metadata(bundle: Bundle | None) -> ExecutorMetadata | None:
    """The bundle's executor metadata; None where it has none, or there is no bundle.

    Raises:
        ModelFormatError: the section is damaged.
    """
    index = None if bundle is None else section_of(bundle)
    if bundle is None or index is None:
        return None
    source = bundle.content(index)
    data = bytes(source.view(0, source.size))
    window, buffers = None, []
    for model in _messages(source, data, _LANGUAGE_MODEL):
        buffers += [_buffer(source, one) for one in _messages(source, model, _BUFFERS)]
        for masks in _messages(source, model, _MASKS):
            window = next((value for value in _numbers(source, masks, _WINDOW) if value), window)
    return ExecutorMetadata(window, tuple(buffers))


def _buffer(source: Source, data: bytes) -> StateBuffer:
    name = next(_messages(source, data, _INPUT), b"").decode("utf-8", "replace")
    axis = next(_numbers(source, data, _AXIS), None)
    return StateBuffer(name, axis, next(_numbers(source, data, _KIND), 0) in _LOCAL_KINDS)


def _messages(source: Source, data: bytes, number: int) -> Iterator[bytes]:
    return (value for key, value in _fields(source, data) if key == number and isinstance(value, bytes))


def _numbers(source: Source, data: bytes, number: int) -> Iterator[int]:
    return (value for key, value in _fields(source, data) if key == number and isinstance(value, int))


def _fields(source: Source, data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Number and value of each field; a value is an integer, or the bytes of a text or of a message."""
    at = 0
    while at < len(data):
        key, at = _varint(source, data, at)
        number, kind = key >> 3, key & 7
        if kind == _VARINT:
            value, at = _varint(source, data, at)
            yield number, value
            continue
        if kind == _BYTES:
            size, at = _varint(source, data, at)
        else:
            size = {_FIXED64: 8, _FIXED32: 4}.get(kind, len(data) + 1)
        if size > len(data) - at:
            raise _damaged(source, at)
        yield number, data[at : at + size]
        at += size


def _varint(source: Source, data: bytes, at: int) -> tuple[int, int]:
    """Seven bits a byte, lowest first, and the byte behind it."""
    value = 0
    for place, byte in enumerate(data[at : at + 10]):
        value |= (byte & 0x7F) << (7 * place)
        if byte < 0x80:
            return value, at + place + 1
    raise _damaged(source, at)


def _damaged(source: Source, at: int) -> ModelFormatError:
    return source.refusal(f"its executor metadata is damaged at byte {at}: build the bundle again")
