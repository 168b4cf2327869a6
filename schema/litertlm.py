"""LiteRT-LM bundles (.litertlm): several models and their metadata in one file, as sections aligned to 16 KiB.

Reads where the sections lie, and writes a bundle in which some sections are replaced. Everything else goes over byte
for byte: of the header, only the sections' positions change. `stamp_by_content` is for bundles that must come out the
same whenever they are made.

Of the executor metadata, a protocol buffer in a section of its own, it reads the window of sliding layers and what is
known of each cache.

Source of the formats: the PyPI package litert-lm-builder (litertlm_core, litertlm_header_schema_py_generated,
runtime/proto/executor_metadata_pb2).
"""

import contextlib
import hashlib
import os
import struct
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final, NamedTuple

from edge_opt.base.errors import ModelFormatError
from edge_opt.schema.data import Source, beginning, write_bytes
from edge_opt.schema.reader import Reader, objects_allowed
from edge_opt.schema.sections import Bundle, Content, Place, place_content
from edge_opt.schema.table import Schema, Table, TableSpec

MAGIC: Final = b"LITERTLM"
ALIGNMENT: Final = 16 << 10
_MAJOR_VERSION: Final = 1
_HEADER_BEGIN: Final = 32
_LARGEST_HEADER: Final = 16 << 20

_TFLITE_MODEL: Final = 3

# Of the values of entries only texts are read.
_UNIONS: Final = {"VData": {9: "StringValue"}}
_FIELDS: Final[dict[str, dict[str, str]]] = {
    "LiteRTLMMetaData": {"system_metadata": "SystemMetadata", "section_metadata": "SectionMetadata"},
    "SystemMetadata": {"entries": "[KeyValuePair]"},
    "SectionMetadata": {"objects": "[SectionObject]"},
    "SectionObject": {
        "items": "[KeyValuePair]", "begin_offset": "uint64", "end_offset": "uint64", "data_type": "uint8"
    },
    "KeyValuePair": {"key": "string", "value_type": "uint8", "value": "VData"},
    "StringValue": {"value": "string"},
}  # fmt: skip
_TABLES: Final = {
    table: TableSpec(
        table,
        len(fields),
        [(name, slot, kind, None) for slot, (name, kind) in enumerate(fields.items())],
        _UNIONS,
    )
    for table, fields in _FIELDS.items()
}
_SCHEMA: Final = Schema(_TABLES, _UNIONS, complete=False)

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


@dataclass(eq=False, repr=False)
class LiteRTLMBundle(Bundle):
    """An open bundle: its header and where its sections lie."""

    suffix: ClassVar = ".litertlm"
    source: Source
    header: bytes
    sections: list[LiteRTLMSection]

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
        """The header with the new places.

        Positions may be stored in bytes that mean something else too; then writing one of them spoils the header.
        """
        header = bytearray(self.header)
        for section, place in zip(self.sections, places, strict=True):
            struct.pack_into("<Q", header, section.begin_at, place.begin)
            struct.pack_into("<Q", header, section.end_at, place.stop)
        again: list[LiteRTLMSection] = []
        with contextlib.suppress(ModelFormatError):
            again = _sections(self.source, bytes(header), max(place.stop for place in places))
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
        header = _header(source)
        return LiteRTLMBundle(source, header, _sections(source, header, source.size))
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
    header = _stamped(bundle.header, {_UUID: str(uuid.UUID(int=0)), _TIME: _NO_TIME})
    digest = hashlib.sha256(header)
    for at in range(len(header), bundle.source.size, _CHUNK):
        digest.update(bundle.source.view(at, min(_CHUNK, bundle.source.size - at)).data)
    header = _stamped(header, {_UUID: str(uuid.uuid5(uuid.NAMESPACE_OID, digest.hexdigest()))})
    bundle.source.close()
    with path.open("r+b") as file:
        file.write(header)


def _stamped(header: bytes, texts: Mapping[str, str]) -> bytes:
    """The header with other texts for these keys, wherever the old ones are as long."""
    system = _tables(header)[0].get("system_metadata")
    old = {} if system is None else _texts(system.get("entries"))
    for key, text in texts.items():
        if len(old.get(key, "").encode()) == len(text):
            header = header.replace(old[key].encode(), text.encode())
    return header


def _header(source: Source) -> bytes:
    """The first bytes of a bundle, up to the end of the flatbuffer that says where the sections lie."""
    begin = bytes(source.view(0, min(_HEADER_BEGIN, source.size)))
    if begin[: len(MAGIC)] != MAGIC or len(begin) < _HEADER_BEGIN:
        raise source.refusal("this is no LiteRT-LM bundle")
    major, end = int.from_bytes(begin[8:12], "little"), int.from_bytes(begin[24:32], "little")
    if major != _MAJOR_VERSION:
        newer = f"version {major} was written by a newer program, this one reads version {_MAJOR_VERSION}"
        raise source.refusal(newer)
    if not _HEADER_BEGIN + 4 <= end <= min(source.size, _LARGEST_HEADER):
        raise source.refusal(f"the header ends at byte {end}, of {source.size}")
    return bytes(source.view(0, end))


def _tables(header: bytes) -> tuple[Table, Reader]:
    reader = Reader(Source(header), objects_allowed(), _SCHEMA)
    return reader.root("LiteRTLMMetaData", _HEADER_BEGIN, 4), reader


def _sections(source: Source, header: bytes, size: int) -> list[LiteRTLMSection]:
    """Where the sections of a file of that size lie, checked to be inside the file and apart."""
    root, reader = _tables(header)
    metadata = root.get("section_metadata")
    items: dict[int, dict[str, str]] = {}  # many sections may share one list
    sections: list[LiteRTLMSection] = []
    for index, table in enumerate((metadata and metadata.get("objects")) or ()):
        if not (table.has("begin_offset") and table.has("end_offset")):
            raise source.refusal(f"section {index} has no position")
        begin, end = table.get("begin_offset"), table.get("end_offset")
        if not len(header) <= begin <= end <= size:
            raise source.refusal(
                f"section {index} lies at bytes {begin} to {end}, of {size}: the file is damaged, copy it again"
            )
        pairs = table.get("items")
        if id(pairs) not in items:
            items[id(pairs)] = _texts(pairs)
        places = reader.position(table, "begin_offset"), reader.position(table, "end_offset")
        sections.append(LiteRTLMSection(begin, end, table.get("data_type") or 0, items[id(pairs)], *places))
    if not sections:
        raise source.refusal("the bundle has no sections")
    end = 0
    for begin, stop in sorted({section[:2] for section in sections}):
        if begin < end:
            raise source.refusal(f"sections overlap at byte {begin}")
        end = stop
    return sections


def _texts(pairs: list[Table] | None) -> dict[str, str]:
    """The texts among the values, by key."""
    values = {pair.get("key"): pair.get("value") for pair in pairs or ()}
    return {
        key: value.get("value")
        for key, value in values.items()
        if key is not None and value is not None and value.has("value")
    }


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


def section_of(bundle: LiteRTLMBundle) -> int | None:
    """The index of the bundle's section with executor metadata; None where it has none."""
    return next((i for i, one in enumerate(bundle.sections) if one.data_type == SECTION_TYPE), None)


def read_executor_metadata(bundle: Bundle | None) -> ExecutorMetadata | None:
    """The bundle's executor metadata; None where it has none, or is no .litertlm bundle.

    Raises:
        ModelFormatError: the section is damaged.
    """
    index = section_of(bundle) if isinstance(bundle, LiteRTLMBundle) else None
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
