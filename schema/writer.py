"""Writes a model: tables first, then the weights, from file to file. It must not hold a weight in memory.

    [tables][length, weights inside the flatbuffer]...[weights after it]...[what no table names]

The same tables give the same bytes. Weights inside the flatbuffer stay inside while it is under 2 GB. Within each part,
weights of the same old file keep their order, and neighbours keep their distance, so that they go over in one copy; new
weights follow. The bytes of every weight are 16-byte aligned, or as they were.
"""

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final, NamedTuple

from edge_opt.output.atomic import replacing, resolve_target
from edge_opt.schema.builder import Built, Hole, build
from edge_opt.schema.data import Data, Source
from edge_opt.schema.table import Table
from edge_opt.schema.tables import MAX_FLATBUFFER_SIZE
from edge_opt.schema.transfer import PAGE, copy_range, write_bytes

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
