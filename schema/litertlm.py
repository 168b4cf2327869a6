"""LiteRT-LM bundles (.litertlm): several models and their metadata in one file, as sections aligned to 16 KiB.

Reads where the sections lie, and writes a bundle in which some sections are replaced. Everything else goes over byte
for byte: of the header, only the sections' positions change.

Of the executor metadata, a protocol buffer in a section of its own, it reads the window of sliding layers and known
facts about each cache.

Source of the formats: the PyPI package litert-lm-builder (litertlm_core, litertlm_header_schema_py_generated,
runtime/proto/executor_metadata_pb2).
"""

import os
import struct
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple

import flatbuffers
from flatbuffers import number_types

from edge_opt.base.errors import ModelFormatError
from edge_opt.schema.data import Data, Source
from edge_opt.schema.table import Table
from edge_opt.schema.writer import Piece, Progress, check_suffix, lay_out, write_pieces

MAGIC: Final = b"LITERTLM"
SUFFIX: Final = ".litertlm"
ALIGNMENT: Final = 16 << 10
_MAJOR_VERSION: Final = 1
_HEADER_BEGIN: Final = 32
_LARGEST_HEADER: Final = 16 << 20
# Bundles have a dozen sections, of a few entries each; lists may share their bytes.
_MOST_LISTED: Final = 128
_LONGEST_TEXT: Final = 4096

_TFLITE_MODEL: Final = 3

# Slots of the header's tables. Of the values of entries, only texts are read.
_SECTIONS = 1  # LiteRTLMMetaData
_ITEMS, _BEGIN, _END, _DATA_TYPE = 0, 1, 2, 3  # SectionObject
_KEY, _VALUE_TYPE, _VALUE, _STRING_VALUE = 0, 1, 2, 9  # KeyValuePair

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


class Bundle:
    """An open bundle: its header, and where its sections lie."""

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
        places: dict[tuple[int, int], tuple[int, int]] = {}
        pieces = [Piece(0, Data(self.header))]
        # Sections keep the order in which they lie in the file; those that are the same bytes stay the same.
        for index, (begin, stop, *_) in sorted(enumerate(self.sections), key=lambda pair: pair[1].begin):
            if (begin, stop) not in places:
                at = -(-pieces[-1].end // ALIGNMENT) * ALIGNMENT
                content = contents.get(index)
                if isinstance(content, Table):
                    pieces += [Piece(at + one.at, one.data) for one in lay_out(content)]
                else:
                    pieces.append(Piece(at, self._region(begin, stop) if content is None else Data(content)))
                places[begin, stop] = at, pieces[-1].end
        pieces[0] = Piece(0, Data(self._moved([places[section[:2]] for section in self.sections])))
        trailing = self._region(max(section.end for section in self.sections), self.source.size)
        if trailing.length >= ALIGNMENT or trailing.view().any():  # zeros up to a boundary are no content
            pieces.append(Piece(max(pieces[-1].end, trailing.offset), trailing))
        write_pieces(pieces, path, overwrite=overwrite, progress=progress, check=check)

    def _region(self, begin: int, end: int) -> Data:
        return Data.region(self.source, begin, end - begin, external=True)

    def _moved(self, places: list[tuple[int, int]]) -> bytes:
        """The header with the new places.

        Positions may be stored in bytes that mean something else too; then writing one of them spoils the header.
        """
        header = bytearray(self.header)
        for section, place in zip(self.sections, places, strict=True):
            for at, position in zip((section.begin_at, section.end_at), place, strict=True):
                struct.pack_into("<Q", header, at, position)
        moved = zip(self.sections, places, strict=True)
        wanted = [section._replace(begin=begin, end=end) for section, (begin, end) in moved]
        try:
            again = _sections(self.source, bytes(header), max(end for _, end in places))
        except ModelFormatError:
            again = []
        if again != wanted:
            reason = "the header's tables overlap, so that no section can be moved: make the bundle again"
            raise self.source.refusal(reason)
        return bytes(header)


def is_bundle(path: str | os.PathLike[str]) -> bool:
    """True where the file begins like a bundle; a file that cannot be opened is none."""
    try:
        with closing(Source.open(path)) as source:
            return source.read(0, min(len(MAGIC), source.size)) == MAGIC
    except ModelFormatError:
        return False


def read_bundle(path: str | os.PathLike[str]) -> Bundle:
    """Read a bundle's header.

    Raises:
        ModelFormatError: the file is missing or not a bundle, or its sections lie outside it or in one another.
    """
    return Bundle(Source.open(path))


def _header(source: Source) -> bytes:
    """The first bytes of a bundle, up to the end of the flatbuffer that says where the sections lie."""
    begin = source.read(0, min(_HEADER_BEGIN, source.size))
    if begin[: len(MAGIC)] != MAGIC or len(begin) < _HEADER_BEGIN:
        raise source.refusal("this is not a LiteRT-LM bundle")
    major, end = int.from_bytes(begin[8:12], "little"), int.from_bytes(begin[24:32], "little")
    if major != _MAJOR_VERSION:
        newer = f"version {major} was written by a newer program, this one reads version {_MAJOR_VERSION}"
        raise source.refusal(newer)
    if not _HEADER_BEGIN + 4 <= end <= min(source.size, _LARGEST_HEADER):
        raise source.refusal(f"the header ends at byte {end}, of {source.size}")
    return source.read(0, end)


class _HeaderTable(flatbuffers.table.Table):  # type: ignore[misc]
    """A table of a header. Reading outside the header raises struct.error, and what is read there is checked later."""

    def place(self, slot: int) -> int:
        """Where the value of a field stands; 0 where it is absent."""
        offset: int = self.Offset(4 + 2 * slot)
        return self.Pos + offset if offset else 0

    def number(self, slot: int, flags: Any) -> int:
        """A scalar; 0 where it is absent."""
        return int(self.Get(flags, self.place(slot))) if self.place(slot) else 0

    def counted(self, slot: int, most: int) -> tuple[int, int]:
        """Where the content of a list or text begins, and its count; none where it is absent."""
        if not self.place(slot):
            return 0, 0
        begin = self.Indirect(self.place(slot)) + 4
        count = self.Get(number_types.UOffsetTFlags, begin - 4)
        if count > min(most, len(self.Bytes) - begin):
            raise struct.error(f"{count} entries or bytes, at most {most} are read")
        return begin, count

    def tables(self, slot: int) -> "list[_HeaderTable]":
        """A list of tables."""
        first, count = self.counted(slot, _MOST_LISTED)
        return [_HeaderTable(self.Bytes, self.Indirect(first + 4 * index)) for index in range(count)]

    def text(self, slot: int) -> str:
        """A text; empty where it is absent."""
        begin, size = self.counted(slot, _LONGEST_TEXT)
        return bytes(self.Bytes[begin : begin + size]).decode("utf-8", "replace")

    def table(self, slot: int) -> "_HeaderTable":
        """A table, which must be there."""
        if not self.place(slot):
            raise struct.error("a table is missing")
        return _HeaderTable(self.Bytes, self.Indirect(self.place(slot)))


def _sections(source: Source, header: bytes, size: int) -> list[Section]:
    """Where the sections of a file of that size lie, checked to be inside the file and apart."""
    try:
        root = _HeaderTable(header, _HeaderTable(header, 0).Indirect(_HEADER_BEGIN))
        sections = [_section(table) for table in root.table(_SECTIONS).tables(0)]
    except (struct.error, TypeError) as error:
        raise source.refusal(f"its header is damaged ({error}): copy it again") from error
    if not sections:
        raise source.refusal("the bundle has no sections")
    for index, (begin, end, *_) in enumerate(sections):
        if not len(header) <= begin <= end <= size:
            raise source.refusal(
                f"section {index} lies at bytes {begin} to {end}, of {size}: the file is damaged, copy it again"
            )
    for (_, end), (begin, _) in pairwise(sorted({section[:2] for section in sections})):
        if begin < end:
            raise source.refusal(f"sections overlap at byte {begin}")
    return sections


def _section(table: _HeaderTable) -> Section:
    begin, end = (table.number(slot, number_types.Uint64Flags) for slot in (_BEGIN, _END))
    items = {
        entry.text(_KEY): entry.table(_VALUE).text(0)
        for entry in table.tables(_ITEMS)
        if entry.number(_VALUE_TYPE, number_types.Uint8Flags) == _STRING_VALUE
    }
    data_type = table.number(_DATA_TYPE, number_types.Uint8Flags)
    return Section(begin, end, data_type, items, table.place(_BEGIN), table.place(_END))


SECTION_TYPE: Final = 9
ASSUMED_WINDOW: Final = 512
"""What LiteRT-LM takes for the window of sliding layers where the metadata names none."""

# Numbers of the executor metadata's fields.
_LANGUAGE_MODEL, _BUFFERS, _MASKS, _WINDOW = 1, 2, 3, 3
_INPUT, _KIND, _AXIS = 3, 6, 7
_LOCAL_KINDS = (3, 4)  # TYPE_LOCAL_KEY_CACHE, TYPE_LOCAL_VALUE_CACHE
_VARINT, _BYTES, _FIXED = 0, 2, {1: 8, 5: 4}


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
    try:
        models = [_fields(one) for one in _fields(source.read(0, source.size))[_LANGUAGE_MODEL]]
        buffers = [_buffer(_fields(one)) for model in models for one in model[_BUFFERS]]
        masks = [_fields(one) for model in models for one in model[_MASKS]]
        windows = [int(value) for mask in masks for value in mask[_WINDOW] if value]
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise source.refusal("its executor metadata is damaged: build the bundle again") from error
    return ExecutorMetadata(windows[-1] if windows else None, tuple(buffers))


def _buffer(fields: Mapping[int, list[Any]]) -> StateBuffer:
    name, axis, kind = ((*fields[number], None)[0] for number in (_INPUT, _AXIS, _KIND))
    position_axis = None if axis is None else int(axis)
    return StateBuffer((name or b"").decode("utf-8", "replace"), position_axis, kind in _LOCAL_KINDS)


def _fields(data: bytes) -> Mapping[int, list[Any]]:
    """The values of a protocol buffer by number: integers, and the bytes of texts and messages.

    LookupError or TypeError where the bytes are not one.
    """
    fields: dict[int, list[Any]] = defaultdict(list)
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        kind = key & 7
        value: Any = _FIXED.get(kind)
        if kind in (_VARINT, _BYTES):
            value, at = _varint(data, at)
        if kind != _VARINT:
            value, at = data[at : at + value], at + value
        fields[key >> 3].append(value)
    if at > len(data):
        raise IndexError(at)
    return fields


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Seven bits a byte, lowest first, and the byte behind it."""
    value = 0
    for place in range(10):
        value |= (data[at + place] & 0x7F) << (7 * place)
        if data[at + place] < 0x80:
            return value, at + place + 1
    raise IndexError(at)
