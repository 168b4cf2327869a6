"""LiteRT-LM bundles (.litertlm): several models and their metadata in one file, as sections aligned to 16 KiB.

Reads the positions of the sections, and writes a bundle with some sections replaced. Everything else is copied byte for
byte: in the header, only the sections' positions change.

From the executor metadata, a protocol buffer in its own section, it reads the window of sliding layers and facts about
each cache.

Source of the formats: the PyPI package litert-lm-builder (litertlm_core, litertlm_header_schema_py_generated,
runtime/proto/executor_metadata_pb2).
"""

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any, Final, NamedTuple, Unpack

from edge_opt.base.errors import ModelFormatError
from edge_opt.schema.data import Data, Source
from edge_opt.schema.reader import Reader
from edge_opt.schema.table import ENUMS, Table, new_table
from edge_opt.schema.writer import Piece, Writing, lay_out, table_bytes, write_pieces

MAGIC: Final = b"LITERTLM"
SUFFIX: Final = ".litertlm"
ALIGNMENT: Final = 16 << 10
_MAJOR_VERSION: Final = 1
# The file begins: magic, major version, three more numbers; the end of the header's tables; these tables.
_END_FIELD: Final = 24
_HEADER_BEGIN: Final = 32
_LARGEST_HEADER: Final = 16 << 20
# Bundles have a dozen sections with a few items each; in a damaged file, lists may share their bytes.
_MOST_ITEMS: Final = 4096

# litert-lm-builder writes these. litert-torch takes any key for a component, and its value for a file, but has none of
# these names.
_PLAIN_KEYS: Final = frozenset({"Authors", "creation_timestamp", "uuid"})

_TYPES: Final = ENUMS["AnySectionDataType"]


class Section(NamedTuple):
    """One section of a bundle: the range of its bytes, and those of its items that are texts."""

    place: tuple[int, int]
    data_type: int
    items: dict[str, str]

    @property
    def is_model(self) -> bool:
        """True for a TFLite model."""
        return self.data_type == _TYPES["TFLiteModel"]

    @property
    def model_type(self) -> str:
        """The role of a model, e.g. `prefill_decode`; empty for other sections."""
        if not self.is_model:
            return ""
        return self.items.get("model_type", "").lower().removeprefix("tf_lite_")


class Bundle:
    """An open bundle: its header's tables and its sections."""

    def __init__(self, source: Source) -> None:
        """Read the header; ModelFormatError if it is damaged or of a newer version."""
        self.source = source
        start = source.read(0, min(_HEADER_BEGIN, source.size))
        if not start.startswith(MAGIC) or len(start) < _HEADER_BEGIN:
            raise source.refusal("this is not a LiteRT-LM bundle")
        major = int.from_bytes(start[8:12], "little")
        end = int.from_bytes(start[_END_FIELD:_HEADER_BEGIN], "little")
        if major != _MAJOR_VERSION:
            newer = f"version {major} was written by a newer program, this one reads version {_MAJOR_VERSION}"
            raise source.refusal(newer)
        if not _HEADER_BEGIN + 8 <= end <= min(source.size, _LARGEST_HEADER):
            raise source.refusal(f"the header ends at byte {end}, of {source.size}")
        self._header = source.read(0, end)
        try:
            self._root = Reader(Source(self._header[_HEADER_BEGIN:])).root("LiteRTLMMetaData")
        except ModelFormatError as error:
            raise source.refusal(f"its header cannot be read ({error})") from error
        metadata = self._root.get("section_metadata")
        self._tables: list[Table] = [] if metadata is None else metadata.tables("objects")
        self.sections = _sections(source, self._tables, end)

    @property
    def loose(self) -> list[str]:
        """Keys of the header's entries about the whole bundle, except those that are known to name no file."""
        return [key for key in self._own_keys if key not in _PLAIN_KEYS]

    @property
    def words(self) -> list[str]:
        """Keys of all entries of the header, and all purposes of models."""
        keys = self._own_keys
        kinds: list[str] = []
        # Not from `sections`: of several values with one key, these hold the last.
        for table in self._tables:
            for item in table.tables("items"):
                key = item.get("key") or ""
                value = item.get("value")
                keys.append(key)
                if key == "model_type" and value is not None:
                    kinds.append(str(value.get("value")))
        return keys + kinds

    def drop_loose(self) -> None:
        """Leave the `loose` entries out of the header that `write` writes."""
        system = self._root.get("system_metadata")
        if system is None:
            return
        kept = [entry for entry in system.tables("entries") if entry.get("key") in _PLAIN_KEYS]
        self._root.set("system_metadata", new_table("SystemMetadata", entries=kept))
        self._header = self._moved([section.place for section in self.sections])

    @property
    def _own_keys(self) -> list[str]:
        """Keys of the header's entries about the whole bundle."""
        system = self._root.get("system_metadata") or new_table("SystemMetadata")
        return [entry.get("key") or "" for entry in system.tables("entries")]

    def content(self, index: int) -> Source:
        """The bytes of a section, as a source for `read_model`."""
        begin, end = self.sections[index].place
        assert self.source.fd is not None
        fd = os.dup(self.source.fd)
        return Source(None, path=self.source.path, fd=fd, base=begin, size=end - begin)

    def write(
        self,
        contents: Mapping[int, Table | bytes],
        path: str | os.PathLike[str],
        **how: Unpack[Writing],
    ) -> None:
        """Write the bundle with some sections replaced, by index: models by root tables; raises as `write_pieces`."""
        old = [section.place for section in self.sections]
        places = [*old]
        pieces: list[Piece] = []
        end = max(len(self._header), len(self._moved(old)))
        # Sections keep their order in the file.
        for index in sorted(range(len(old)), key=old.__getitem__):
            begin, stop = old[index]
            content = contents.get(index, Data(self.source, begin, stop - begin))
            at = -(-end // ALIGNMENT) * ALIGNMENT
            if isinstance(content, Table):
                pieces += [Piece(at + one.at, one.data) for one in lay_out(content)]
            else:
                pieces.append(Piece(at, content if isinstance(content, Data) else Data(content)))
            end = pieces[-1].end
            places[index] = at, end
        header = self._header if places == old else self._moved(places)
        pieces.insert(0, Piece(0, Data(header)))
        trailing = Data(self.source, max(stop for _, stop in old))
        # Zeros up to a boundary are padding.
        if trailing.length >= ALIGNMENT or trailing.view().any():
            pieces.append(Piece(max(end, trailing.offset), trailing))
        write_pieces(pieces, path, SUFFIX, **how)

    def _moved(self, places: Sequence[tuple[int, int]]) -> bytes:
        """The header with sections moved to these ranges; its length does not depend on the ranges."""
        objects: list[Table] = []
        root = self._root.copy()
        for table, (begin, end) in zip(self._tables, places, strict=True):
            moved = table.copy()
            moved.fields["begin_offset"] = begin
            moved.fields["end_offset"] = end
            objects.append(moved)
        root.set("section_metadata", new_table("SectionMetadata", objects=objects))
        tables = table_bytes(root)
        end = _HEADER_BEGIN + len(tables)
        return self._header[:_END_FIELD] + end.to_bytes(8, "little") + tables


def is_bundle(path: str | os.PathLike[str]) -> bool:
    """True if the file begins like a bundle; False if it cannot be opened."""
    try:
        with closing(Source.open(path)) as source:
            return source.read(0, min(len(MAGIC), source.size)) == MAGIC
    except ModelFormatError:
        return False


def read_bundle(path: str | os.PathLike[str]) -> Bundle:
    """Open a bundle; ModelFormatError if it is missing, not a bundle, or its sections overlap."""
    return Bundle(Source.open(path))


def _sections(source: Source, tables: list[Table], first: int) -> list[Section]:
    """The sections, checked not to overlap and to lie inside the file from byte `first` on."""
    if not tables:
        raise source.refusal("the bundle has no sections")
    if sum(len(table.tables("items")) for table in tables) > _MOST_ITEMS:
        raise source.refusal(f"its sections have over {_MOST_ITEMS} items")
    sections = []
    for index, table in enumerate(tables):
        items: dict[str, str] = {}
        for item in table.tables("items"):
            value = item.get("value")
            if value is not None and value.name == "StringValue":
                items[item.get("key") or ""] = value.get("value") or ""
        begin = table.get("begin_offset")
        end = table.get("end_offset")
        sections.append(Section((begin, end), table.get("data_type"), items))
        if not first <= begin <= end <= source.size:
            raise source.refusal(
                f"section {index} lies at bytes {begin} to {end}, of {source.size}: the file is damaged, copy it again"
            )
    free = 0
    for begin, end in sorted(section.place for section in sections):
        if begin < free:
            raise source.refusal(f"sections overlap at byte {begin}")
        free = end
    return sections


SECTION_TYPE: Final = _TYPES["ExecutorMetadataProto"]
ASSUMED_WINDOW: Final = 512
"""LiteRT-LM's window of sliding layers if the metadata names none."""

# Field numbers of the executor metadata.
_LANGUAGE_MODEL = 1
_CACHES = 2
_MASKS = 3
_WINDOW = 3
_KIND = 6
_LOCAL_KINDS = frozenset({3, 4})  # TYPE_LOCAL_KEY_CACHE, TYPE_LOCAL_VALUE_CACHE


class ExecutorMetadata(NamedTuple):
    """The `window` of a bundle's sliding layers in positions, None if not given, and for each cache if it is a ring."""

    window: int | None
    rings: tuple[bool, ...]


def section_of(bundle: Bundle, data_type: int = SECTION_TYPE) -> int | None:
    """The index of the bundle's first section of a type, by default of executor metadata; None without one."""
    types = [section.data_type for section in bundle.sections]
    return types.index(data_type) if data_type in types else None


def read_executor_metadata(bundle: Bundle | None) -> ExecutorMetadata | None:
    """The bundle's executor metadata; None without any, ModelFormatError if damaged."""
    index = None if bundle is None else section_of(bundle)
    if bundle is None or index is None:
        return None
    source = bundle.content(index)
    window = None
    rings: list[bool] = []
    try:
        for model in map(_fields, _fields(source.read(0, source.size))[_LANGUAGE_MODEL]):
            caches = map(_fields, model[_CACHES])
            rings += [not _LOCAL_KINDS.isdisjoint(cache[_KIND]) for cache in caches]
            for mask in map(_fields, model[_MASKS]):
                for value in filter(None, mask[_WINDOW]):
                    window = int(value)  # the last one counts
    except (TypeError, ValueError, AttributeError) as error:
        raise source.refusal("its executor metadata is damaged: build the bundle again") from error
    return ExecutorMetadata(window, tuple(rings))


def _fields(data: bytes) -> Mapping[int, list[Any]]:
    """Values of a protocol buffer by field number: integers, or bytes of texts and messages; ValueError if damaged."""
    from google.protobuf import empty_pb2, message, unknown_fields  # noqa: PLC0415 - takes 60 ms, for some bundles

    fields: dict[int, list[Any]] = defaultdict(list)
    try:
        for field in unknown_fields.UnknownFieldSet(empty_pb2.Empty.FromString(data)):
            fields[field.field_number].append(field.data)
    except message.DecodeError as error:
        raise ValueError(error) from error
    return fields
