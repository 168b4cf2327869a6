"""LiteRT-LM bundles (.litertlm): several models and their metadata in one file, as sections aligned to 16 KiB.

Reads where the sections lie, and writes a bundle in which some sections are replaced. Everything else goes over byte
for byte: of the header, only the sections' positions change. `stamp_by_content` is for bundles that must come out the
same whenever they are made.

Source of the format: the PyPI package litert-lm-builder (litertlm_core, litertlm_header_schema_py_generated).
"""

import contextlib
import hashlib
import os
import struct
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import ClassVar, Final, NamedTuple

from edge_opt.output.errors import ModelFormatError
from edge_opt.schema.data import Source, beginning
from edge_opt.schema.sections import Bundle, Content, Place, place_content
from edge_opt.schema.transfer import write_bytes

MAGIC: Final = b"LITERTLM"
ALIGNMENT: Final = 16 << 10
_MAJOR_VERSION: Final = 1
_HEADER_BEGIN: Final = 32
_LARGEST_HEADER: Final = 16 << 20

# Sections, their items and the bytes of their texts; a real header has some tens of sections. Entries may be shared,
# so the header's size bounds neither their number nor the length of what they say.
_MOST_READ: Final = 1 << 18
_ENTRY_COST: Final = 16
_TFLITE_MODEL: Final = 3
_STRING_VALUE: Final = 9

# Slots of the header's tables.
_SYSTEM_METADATA, _ENTRIES = 0, 0
_SECTION_METADATA, _OBJECTS = 1, 0
_ITEMS, _BEGIN, _END, _TYPE = 0, 1, 2, 3
_KEY, _VALUE_TYPE, _VALUE = 0, 1, 2

# What litert-lm-builder says of a file: a random UUID, and when it was made.
_UUID, _TIME = "uuid", "creation_timestamp"
_NO_TIME: Final = "1970-01-01T00:00:00.000000+00:00"
_CHUNK: Final = 1 << 22


class LiteRTLMSection(NamedTuple):
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


class LiteRTLMBundle(Bundle):
    """An open bundle: its header and where its sections lie."""

    suffix: ClassVar = ".litertlm"

    def __init__(self, source: Source, header: bytes, sections: list[LiteRTLMSection]) -> None:
        self.source = source
        self.header = header
        self.sections: list[LiteRTLMSection] = sections

    def content(self, index: int) -> Source:
        """The bytes of a section, as something that `read_model` reads."""
        section = self.sections[index]
        return self.source.section(section.begin, section.end - section.begin)

    def _lay_out(self, contents: Mapping[int, Content]) -> tuple[list[Place], Callable[[int], None]]:
        """Sections keep the order in which they lie in the file; those that are the same bytes stay the same."""
        end = len(self.header)
        placed: dict[tuple[int, int], Place] = {}
        for index, section in sorted(enumerate(self.sections), key=lambda pair: pair[1].begin):
            if section[:2] not in placed:
                placement = place_content(contents[index]) if index in contents else None
                size = section.end - section.begin if placement is None else placement.size
                begin = -(-end // ALIGNMENT) * ALIGNMENT
                placed[section[:2]] = Place(begin, size, section.begin, placement)
                end = begin + size
        places = [placed[section[:2]] for section in self.sections]
        header = self._moved(places)
        return places, lambda target: write_bytes(memoryview(header), target, 0, lambda _: None)

    def _moved(self, places: list[Place]) -> bytes:
        """The header that tells the new places.

        Positions may be stored in bytes that mean something else too; then writing one of them spoils the header.
        """
        header = bytearray(self.header)
        for section, place in zip(self.sections, places, strict=True):
            struct.pack_into("<Q", header, section.begin_at, place.begin)
            struct.pack_into("<Q", header, section.end_at, place.stop)
        again: list[LiteRTLMSection] = []
        with contextlib.suppress(ModelFormatError):
            again = _Header(Source(bytes(header)), max(place.stop for place in places)).sections()
        wanted = [
            section._replace(begin=place.begin, end=place.stop)
            for section, place in zip(self.sections, places, strict=True)
        ]
        if again != wanted:
            reason = "the header's tables overlap, so that no section can be moved: make the bundle anew"
            raise self.source.refusal(reason)
        return bytes(header)


def is_bundle(path: str | os.PathLike[str]) -> bool:
    """True where the file begins like a bundle; a file that cannot be opened is none."""
    return beginning(path, len(MAGIC)) == MAGIC


def read_bundle(path: str | os.PathLike[str]) -> LiteRTLMBundle:
    """Read a bundle's header.

    Raises:
        ModelFormatError: the file is missing or no bundle, or its sections lie outside it or in one another.
    """
    source = Source.open(path)
    try:
        return _Header(source).bundle()
    except BaseException:
        source.close()
        raise


def stamp_by_content(path: Path) -> None:
    """Give a bundle the UUID that follows from its content, and the time zero: the same content is the same file.

    litert-lm-builder writes a random UUID and the time into the header. Only texts as long as the new ones are
    replaced, in place. A bundle without them stays as it is.

    Raises:
        ModelFormatError: it is no bundle.
        OSError: it cannot be written.
    """
    bundle = read_bundle(path)
    header, stamps = bytearray(bundle.header), _Header(bundle.source).stamps()
    _stamp(header, stamps, {_UUID: str(uuid.UUID(int=0)), _TIME: _NO_TIME})
    found = hashlib.sha256(header)
    for at in range(len(header), bundle.source.size, _CHUNK):
        found.update(bundle.source.view(at, min(_CHUNK, bundle.source.size - at)).data)
    _stamp(header, stamps, {_UUID: str(uuid.uuid5(uuid.NAMESPACE_OID, found.hexdigest()))})
    bundle.source.close()
    with path.open("r+b") as file:
        file.write(header)


def _stamp(header: bytearray, stamps: Mapping[str, tuple[int, int]], texts: Mapping[str, str]) -> None:
    for key, text in texts.items():
        begin, end = stamps.get(key, (0, 0))
        if end - begin == len(text) and end <= len(header):
            header[begin:end] = text.encode()


class _Header:
    """Bounded reading of the header's flatbuffer."""

    def __init__(self, source: Source, size: int | None = None) -> None:
        """`size` is that of the whole file, where `source` is only its beginning."""
        self._source = source
        self._size = source.size if size is None else size
        begin = bytes(source.view(0, min(_HEADER_BEGIN, source.size)))
        if begin[: len(MAGIC)] != MAGIC or len(begin) < _HEADER_BEGIN:
            raise self._source.refusal("this is no LiteRT-LM bundle")
        major = int.from_bytes(begin[8:12], "little")
        if major != _MAJOR_VERSION:
            raise self._source.refusal(
                f"version {major} was written by a newer program, this one reads version {_MAJOR_VERSION}"
            )
        end = int.from_bytes(begin[24:32], "little")
        if not _HEADER_BEGIN + 4 <= end <= min(source.size, _LARGEST_HEADER):
            raise self._source.refusal(f"the header ends at byte {end}, of {source.size}")
        self._bytes = bytes(source.view(0, end))
        self._left = _MOST_READ

    def _spend(self, amount: int) -> None:
        self._left -= amount
        if self._left < 0:
            raise self._source.refusal("the header's entries overlap, or there are far too many of them")

    def _unpack(self, form: str, at: int) -> int:
        if not _HEADER_BEGIN <= at <= len(self._bytes) - struct.calcsize(form):
            raise self._source.refusal(f"the header points to byte {at}, outside itself")
        value: int = struct.unpack_from(form, self._bytes, at)[0]
        return value

    def _follow(self, at: int) -> int:
        return at + self._unpack("<I", at)

    def _field(self, table: int, slot: int) -> int | None:
        """Where a field of a table stands; None where it is absent."""
        vtable = table - self._unpack("<i", table)
        if 4 + 2 * slot + 2 > self._unpack("<H", vtable):
            return None
        offset = self._unpack("<H", vtable + 4 + 2 * slot)
        return table + offset if offset else None

    def _child(self, table: int, slot: int) -> int | None:
        at = self._field(table, slot)
        return None if at is None else self._follow(at)

    def _vector(self, table: int, slot: int) -> list[int]:
        """The tables of a vector."""
        at = self._child(table, slot)
        if at is None:
            return []
        count = self._unpack("<I", at)
        if count > (len(self._bytes) - at) // 4:
            raise self._source.refusal(f"the header lists {count} entries, more than it has room for")
        self._spend(count * _ENTRY_COST)
        return [self._follow(at + 4 + 4 * index) for index in range(count)]

    def _string(self, at: int) -> str:
        length = self._unpack("<I", at)
        text = self._bytes[at + 4 : at + 4 + length]
        if len(text) < length:
            raise self._source.refusal(f"a text of {length} bytes reaches outside the header")
        self._spend(length)
        return text.decode("utf-8", "replace")

    def bundle(self) -> LiteRTLMBundle:
        return LiteRTLMBundle(self._source, self._bytes, self.sections())

    def sections(self) -> list[LiteRTLMSection]:
        """Where the sections lie, checked to be inside the file and apart."""
        root = self._follow(_HEADER_BEGIN)
        metadata = self._child(root, _SECTION_METADATA)
        objects = [] if metadata is None else self._vector(metadata, _OBJECTS)
        sections = [self._section(table, index) for index, table in enumerate(objects)]
        if not sections:
            raise self._source.refusal("the bundle has no sections")
        self._check_order(sections)
        return sections

    def _section(self, table: int, index: int) -> LiteRTLMSection:
        begin_at, end_at = self._field(table, _BEGIN), self._field(table, _END)
        if begin_at is None or end_at is None:
            raise self._source.refusal(f"section {index} has no position")
        begin, end = self._unpack("<Q", begin_at), self._unpack("<Q", end_at)
        if not len(self._bytes) <= begin <= end <= self._size:
            raise self._source.refusal(f"section {index} lies at bytes {begin} to {end}, of {self._size}")
        type_at = self._field(table, _TYPE)
        data_type = 0 if type_at is None else self._unpack("<B", type_at)
        items = dict(filter(None, (self._item(item) for item in self._vector(table, _ITEMS))))
        return LiteRTLMSection(begin, end, data_type, items, begin_at, end_at)

    def stamps(self) -> dict[str, tuple[int, int]]:
        """Where the texts begin and end that say something of the whole file, by key."""
        system = self._child(self._follow(_HEADER_BEGIN), _SYSTEM_METADATA)
        entries = map(self._entry, [] if system is None else self._vector(system, _ENTRIES))
        return {
            self._string(key): (text + 4, text + 4 + self._unpack("<I", text))
            for key, text in filter(None, entries)
        }

    def _item(self, table: int) -> tuple[str, str] | None:
        entry = self._entry(table)
        return None if entry is None else (self._string(entry[0]), self._string(entry[1]))

    def _entry(self, table: int) -> tuple[int, int] | None:
        """Where the key and the value of an entry stand; None for a value that is no text."""
        key, value, kind = (
            self._child(table, _KEY),
            self._child(table, _VALUE),
            self._field(table, _VALUE_TYPE),
        )
        if key is None or value is None or kind is None or self._unpack("<B", kind) != _STRING_VALUE:
            return None
        text = self._child(value, 0)
        return None if text is None else (key, text)

    def _check_order(self, sections: list[LiteRTLMSection]) -> None:
        end = 0
        for begin, stop in sorted({(section.begin, section.end) for section in sections}):
            if begin < end:
                raise self._source.refusal(f"sections overlap at byte {begin}")
            end = stop
