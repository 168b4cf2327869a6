"""Writes a model: tables first, then the weights, from file to file. It must not hold a weight in memory.

    [tables][length, weights inside the flatbuffer]...[weights after it]...[what no table names]

The same tables give the same bytes. Weights inside the flatbuffer stay inside while it is under 2 GB. Within each part,
weights of the same old file keep their order, and neighbours keep their distance, so that they go over in one copy; new
weights follow. The bytes of every weight are 16-byte aligned, or as they were.
"""

import os
import struct
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final, NamedTuple, NoReturn

import flatbuffers
import numpy as np
from flatbuffers import number_types
from flatbuffers.builder import BuilderSizeError

from edge_opt.base.atomic import replacing, resolve_target
from edge_opt.base.errors import ModelFormatError
from edge_opt.schema.data import PAGE, Data, Source, copy_range, write_bytes
from edge_opt.schema.table import (
    IDENTIFIER,
    MAX_FLATBUFFER_SIZE,
    NUMPY_TYPES,
    SCALAR_CODES,
    STORED_AFTER,
    UNIONS,
    FieldSpec,
    Table,
)

_NUMBERS = {name: getattr(number_types, f"{name.capitalize()}Flags") for name in SCALAR_CODES}


class Hole(NamedTuple):
    """A place in the tables that wants the position of `data`: a uoffset if inside, else a uint64 offset."""

    at: int
    data: Data
    external: bool


class Built(NamedTuple):
    """The tables' bytes and the holes in them."""

    content: bytearray
    holes: list[Hole]


def build(root: Table, *, inside: bool) -> Built:
    """The flatbuffer of everything below `root`; `inside=False` moves all weights behind it.

    Raises:
        ModelFormatError: a field holds something that the format cannot.
    """
    stored = (table.fields.get("data") for table in root.fields.get("buffers", ()))
    # New bytes go where the model keeps its others.
    new_after = any(isinstance(data, Data) and data.external for data in stored)
    tables = _TableBuilder(inside, new_after)
    try:
        content = tables.finish(root)
    except BuilderSizeError:
        message = "the tables take over 2 GB, which no flatbuffer can: remove something"
        raise ModelFormatError(message) from None
    # A builder writes back to front: until the end, positions count from there.
    return Built(content, [hole._replace(at=len(content) - hole.at) for hole in tables.holes])


class _TableBuilder:
    """Writes each table, vector and string once, and what they refer to before them; equal numbers share a vector."""

    def __init__(self, inside: bool, new_after: bool) -> None:
        self.holes: list[Hole] = []
        self._inside = inside
        self._new_after = new_after
        self._builder = flatbuffers.Builder()
        self._tables: dict[int, int] = {}
        self._vectors: dict[tuple[str, int], int] = {}
        self._numbers: dict[tuple[str, bytes], int] = {}

    def finish(self, root: Table) -> bytearray:
        self._builder.Finish(self._table(root), file_identifier=IDENTIFIER)
        content: bytearray = self._builder.Output()
        return content

    def _table(self, table: Table) -> int:
        written = self._tables.get(id(table))
        if written is not None:
            return written
        spec = table.spec
        fields, stored, hole = table.fields, None, ""
        if not fields.keys() <= spec.by_name.keys():
            unknown = next(name for name in fields if name not in spec.by_name)
            raise ModelFormatError("is no field of this table: remove it", table=spec.name, field=unknown)
        if spec.name in STORED_AFTER:
            fields, stored, hole = self._placed(table)
        present = [field for field in spec.largest_first if field.name in fields]
        references = {
            field.name: self._reference(field, fields)
            for field in present
            if field.kind != "scalar" and field.name != hole
        }
        builder = self._builder
        builder.StartObject(spec.slots)
        for field in present:
            if field.name in references:
                builder.PrependUOffsetTRelative(references[field.name])
            elif field.kind != "scalar":
                builder.PrependUint32(0)
            else:
                self._number(field, fields[field.name])
            builder.Slot(field.slot)
            if field.name == hole and stored is not None:
                self.holes.append(Hole(builder.Offset(), stored, external=field.kind == "scalar"))
        position: int = builder.EndObject()
        self._tables[id(table)] = position
        return position

    def _placed(self, table: Table) -> tuple[dict[str, Any], Data | None, str]:
        """The fields of a table whose bytes may lie behind the tables, the bytes, and the field that says where."""
        inside, offset, size = STORED_AFTER[table.spec.name]
        fields = table.fields
        data = fields.get(inside)
        if not isinstance(data, Data):
            return fields, None, ""
        external = self._new_after if data.placement is None else data.placement
        if self._inside and not external:
            return fields, data, inside
        fields = {name: value for name, value in fields.items() if name != inside}
        return fields | {offset: 0, size: data.length}, data, offset

    def _number(self, field: FieldSpec, value: Any) -> None:
        try:
            self._builder.Prepend(_NUMBERS[field.element], value)
        except (TypeError, OverflowError, struct.error) as error:
            _refuse(field, f"holds {value!r:.80}, which is no {field.type} ({error})")

    def _reference(self, field: FieldSpec, fields: dict[str, Any]) -> int:
        value = fields[field.name]
        if field.kind == "string":
            return self._string(field, value)
        if field.kind in {"table", "union"}:
            return self._child(field, value, fields.get(f"{field.name}_type", 0))
        position = self._vectors.get((field.type, id(value)))
        if position is None:
            position = self._vectors[field.type, id(value)] = self._vector(field, value)
        return position

    def _child(self, field: FieldSpec, value: Any, member: int = 0) -> int:
        """A table; `member` says which of a union's it is."""
        is_union = field.kind == "union"
        expected = UNIONS[field.element].get(member, "nothing") if is_union else field.element
        if not isinstance(value, Table) or value.spec.name != expected:
            wrong = f"but {field.name}_type says {expected}: set both"
            _refuse(field, f"holds {value!r:.80}, {wrong if is_union else f'not a table of type {expected}'}")
        return self._table(value)

    def _string(self, field: FieldSpec, text: Any) -> int:
        if not isinstance(text, str):
            _refuse(field, f"holds {text!r:.80}, which is no text")
        try:
            position: int = self._builder.CreateSharedString(text)
        except UnicodeEncodeError as error:
            _refuse(field, f"holds {text!r:.80}, which is no text ({error})")
        return position

    def _vector(self, field: FieldSpec, value: Any) -> int:
        builder: Any = self._builder
        if field.kind == "scalars":
            numbers = _numbers(field, value)
            content = (field.element, numbers.tobytes())
            if content not in self._numbers:
                self._numbers[content] = builder.CreateNumpyVector(numbers)
            return self._numbers[content]
        write = self._child if field.kind == "tables" else self._string
        targets = [write(field, item) for item in value]
        builder.StartVector(4, len(targets), 4)
        for target in reversed(targets):
            builder.PrependUOffsetTRelative(target)
        position: int = builder.EndVector()
        return position


def _numbers(field: FieldSpec, value: Any) -> np.ndarray[Any, Any]:
    """The vector in the field's type, unless that would change a value."""
    array = np.asarray(value)
    dtype = NUMPY_TYPES[field.element]
    if array.dtype == dtype and array.ndim == 1 and field.table != "Buffer":
        return array
    if array.ndim != 1 or field.table == "Buffer" or array.dtype.kind not in "biuf":
        expected = "Data" if field.table == "Buffer" else f"a vector of {field.element}"
        _refuse(field, f"holds {value!r:.80}, not {expected}")
    with np.errstate(invalid="ignore"):
        cast = array.astype(dtype)
    if not np.array_equal(cast, array.astype(np.float32) if dtype.kind == "f" else array):
        _refuse(field, f"holds {value!r:.80}, which does not fit {field.element}")
    return cast


def _refuse(field: FieldSpec, message: str) -> NoReturn:
    raise ModelFormatError(message, table=field.table, field=field.name)


Progress = Callable[[int, int], None]

ALIGNMENT: Final = 16

# Neighbours at most this far apart are copied with what lies between them: padding and a length. Exporters
# leave old tables in the larger gaps.
_MAX_GAP: Final = 64
_LENGTH: Final = 4  # bytes of a vector's length, in front of it

# A stretch of at least this size keeps its place within a page, so that a filesystem may share the blocks.
_PAGED_SIZE: Final = 1 << 20


_Key = tuple[int, int, int]


class Piece(NamedTuple):
    """Bytes for position `at`."""

    at: int
    data: Data


class Placement(NamedTuple):
    """All pieces in file order, the patched tables, and the size of the whole file."""

    tables: bytearray
    pieces: list[Piece]
    size: int


class _Run(NamedTuple):
    """A stretch of one source, with the weights in it; or one new weight."""

    source: Source | None
    start: int
    stop: int
    weights: list[Data]

    def data(self) -> Data:
        """The weights with what lies between them."""
        if self.source is None:
            return self.weights[0]
        return Data.region(self.source, self.start, self.stop - self.start, external=self.weights[0].external)


def write_model(
    root: Table,
    path: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    progress: Progress | None = None,
    check: Callable[[Path], None] | None = None,
) -> None:
    """Write the model below `root` to `path`, all at once; `progress(done, total)` counts bytes.

    `check` may look at the finished file before it gets its name, and refuse it by raising.

    Raises:
        UsageError: the output is the input, or exists and `overwrite` is false.
        OutputError: it could not be written; nothing was left behind.
        ModelFormatError: the tables hold what the format cannot, or the input was changed meanwhile.
    """
    sources = _sources(root)
    inputs = tuple(source.identity for source in sources)
    resolve_target(path, overwrite=overwrite, inputs=inputs)
    placement = place_model(root)
    total = len(placement.tables) + sum(piece.data.length for piece in placement.pieces)
    with replacing(path, overwrite=overwrite, inputs=inputs, check=check) as target:
        os.ftruncate(target, placement.size)
        write_placed(placement, target, 0, counter(total, progress))
        for source in sources:
            source.check_unchanged()


def model_bytes(root: Table) -> bytes:
    """The model below `root` as the bytes that `write_model` would write; weights included, so mind its size.

    Raises:
        ModelFormatError: the tables hold what the format cannot.
    """
    placement = place_model(root)
    content = bytearray(placement.size)
    content[: len(placement.tables)] = placement.tables
    for piece in placement.pieces:
        content[piece.at : piece.at + piece.data.length] = piece.data.view().data
    return bytes(content)


def _sources(root: Table) -> list[Source]:
    """The files that weights, large custom options and trailing bytes come from."""
    stored = [root.trailing, *(buffer.fields.get("data") for buffer in root.fields.get("buffers", ()))]
    for graph in root.fields.get("subgraphs", ()):
        stored += [operator.fields.get("custom_options") for operator in graph.fields.get("operators", ())]
    sources = {id(data.source): data.source for data in stored if isinstance(data, Data)}
    return [source for source in sources.values() if source is not None]


def place_model(root: Table) -> Placement:
    """Build the tables, and give every weight its place: inside the flatbuffer as far as that can be."""
    try:
        placement = place(build(root, inside=True))
    except OverflowError:
        placement = place(build(root, inside=False))
    return placement if root.trailing is None else with_trailing(placement, root.trailing)


def write_placed(placement: Placement, target: int, base: int, advance: Callable[[int], None]) -> None:
    """Write a placed model to a descriptor, from byte `base` on."""
    write_bytes(memoryview(placement.tables), target, base, advance)
    for piece in placement.pieces:
        at, data = base + piece.at, piece.data
        if data.source is None or data.source.fd is None:
            write_bytes(data.view().data, target, at, advance)
        else:
            start = data.source.base + data.offset
            copy_range(data.source.fd, start, target, at, data.length, advance=advance)


def counter(total: int, progress: Progress | None) -> Callable[[int], None]:
    """Adds up steps for `progress(done, total)`."""
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress(done, total)

    return advance


def place(built: Built) -> Placement:
    """Give every weight its position and write the positions into the tables.

    Raises:
        OverflowError: tables and the weights inside take more than a flatbuffer can.
    """
    tables, end = built.content, len(built.content)
    pieces: list[Piece] = []
    positions: dict[tuple[bool, _Key], int] = {}
    for external in (False, True):
        for run in _runs(built.holes, external=external):
            at = _aligned(end if external else end + 4, run)
            positions.update(((external, _key(data)), at + data.offset - run.start) for data in run.weights)
            if not external:
                # The vector's length; those of the neighbours behind it come over with the bytes between them.
                pieces.append(Piece(at - 4, Data(run.weights[0].length.to_bytes(4, "little"))))
            pieces.append(Piece(at, run.data()))
            end = at + run.stop - run.start
        if not external and end > MAX_FLATBUFFER_SIZE:
            raise OverflowError(f"a flatbuffer of {end} bytes")
    for hole in built.holes:
        position = positions[hole.external, _key(hole.data)]
        if hole.external:
            tables[hole.at : hole.at + 8] = position.to_bytes(8, "little")
        else:
            tables[hole.at : hole.at + 4] = (position - 4 - hole.at).to_bytes(4, "little")
    return Placement(tables, pieces, end)


def with_trailing(placement: Placement, trailing: Data) -> Placement:
    """Put what no table names at the file's end, from where readers look for it, and no nearer to the file's begin.

    Positions inside it count from its own beginning or from the file's. Readers of zip archives work out which from
    what stands in front of it: that may have grown, as in self-extracting archives, but not shrunk.
    """
    at = max(placement.size, trailing.offset)
    return placement._replace(pieces=[*placement.pieces, Piece(at, trailing)], size=at + trailing.length)


def _key(data: Data) -> _Key:
    """Equal for regions that are the same bytes of the same file."""
    return (id(data), 0, 0) if data.source is None else (id(data.source), data.offset, data.length)


def _runs(holes: Iterable[Hole], *, external: bool) -> list[_Run]:
    """The distinct weights of one part of the file as stretches, in the order in which they are written."""
    distinct = {_key(hole.data): hole.data for hole in holes if hole.external == external}
    sources: dict[int, list[Data]] = {}
    new = []
    for data in distinct.values():
        if data.source is None:
            new.append(_Run(None, 0, data.length, [data]))
        else:
            sources.setdefault(id(data.source), []).append(data)
    runs = []
    for weights in sources.values():
        runs += _neighbours(sorted(weights, key=lambda data: (data.offset, data.length)))
    return runs + new


def _neighbours(weights: list[Data]) -> list[_Run]:
    """Join weights of one source, sorted by offset, that can keep their distance."""
    runs: list[_Run] = []
    for data in weights:
        stop = data.offset + data.length
        if runs and _joins(runs[-1], data):
            runs[-1].weights.append(data)
            runs[-1] = runs[-1]._replace(stop=stop)
        else:
            runs.append(_Run(data.source, data.offset, stop, [data]))
    return runs


def _joins(run: _Run, data: Data) -> bool:
    kept_apart = (data.offset - run.start) % ALIGNMENT == 0
    same_kind = run.weights[-1].external == data.external
    near = same_kind and kept_apart and 0 <= data.offset - run.stop <= _MAX_GAP
    return near and (data.external or _has_length(run, data))


def _has_length(run: _Run, data: Data) -> bool:
    """Whether the bytes between hold the vector's length: not in front of what was after the flatbuffer until now."""
    assert data.source is not None
    length = data.offset - run.stop >= _LENGTH and bytes(data.source.view(data.offset - _LENGTH, _LENGTH))
    return length == data.length.to_bytes(_LENGTH, "little")


def _aligned(end: int, run: _Run) -> int:
    """The first place from `end` on where each weight is aligned at least as it was, up to a page."""
    if run.source is not None and run.stop - run.start >= _PAGED_SIZE:
        return end + (run.start - end) % PAGE
    if run.source is None or run.start % ALIGNMENT:
        return end + -end % ALIGNMENT
    alignment = max(data.offset & -data.offset for data in run.weights)
    return end + (run.start - end) % min(alignment, PAGE)
