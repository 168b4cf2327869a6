"""Where each weight goes in the file to be written, and which stretches of the old file go over in one piece.

It must not read or write a byte of the weights.

    [tables][length, weights inside the flatbuffer]...[weights after it]...[what no table names]

Within each part, weights of the same old file keep their order, and neighbours keep their distance, so that
they go over in one copy; new weights follow. The bytes of every weight are 16-byte aligned, or as they were.
"""

from collections.abc import Iterable
from typing import Final, NamedTuple

from edge_opt.schema.builder import Built, Hole
from edge_opt.schema.data import Data, Source
from edge_opt.schema.transfer import PAGE

ALIGNMENT: Final = 16

# A flatbuffer addresses its own bytes with signed 32-bit offsets.
MAX_FLATBUFFER_SIZE: Final = 2**31 - 1

# Neighbours at most this far apart are copied with what lies between them: padding and a length. Exporters
# leave old tables in the larger gaps.
_MAX_GAP: Final = 64

# A stretch of at least this size keeps its place within a page, so that a filesystem may share the blocks.
_PAGED_SIZE: Final = 1 << 20


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


def place(built: Built) -> Placement:
    """Give every weight its position and write the positions into the tables.

    Raises:
        OverflowError: tables and the weights inside take more than a flatbuffer can.
    """
    tables = built.content
    inside, end = _lay_out(_runs(built.holes, external=False), len(tables), prefixed=True)
    if end > MAX_FLATBUFFER_SIZE:
        raise OverflowError(f"a flatbuffer of {end} bytes")
    outside, end = _lay_out(_runs(built.holes, external=True), end, prefixed=False)
    for hole in built.holes:
        if hole.external:
            position = outside.positions[_key(hole.data)]
            tables[hole.at : hole.at + 8] = position.to_bytes(8, "little")
        else:
            position = inside.positions[_key(hole.data)] - 4
            tables[hole.at : hole.at + 4] = (position - hole.at).to_bytes(4, "little")
    return Placement(tables, inside.pieces + outside.pieces, end)


def with_trailing(placement: Placement, trailing: Data) -> Placement:
    """Put what no table names at the file's end, from where readers look for it, and no nearer to the file's begin.

    Positions in it count from its own begin or from the file's. Readers of zip archives find either by what stands in
    front of it, which may have grown (as with self-extracting archives) but not shrunk.
    """
    at = max(placement.size, trailing.offset)
    return placement._replace(pieces=[*placement.pieces, Piece(at, trailing)], size=at + trailing.length)


def _key(data: Data) -> tuple[int, int, int]:
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
        last = runs[-1] if runs else None
        stop = data.offset + data.length
        if last is not None and _joins(last, data):
            last.weights.append(data)
            runs[-1] = last._replace(stop=stop)
        else:
            runs.append(_Run(data.source, data.offset, stop, [data]))
    return runs


def _joins(run: _Run, data: Data) -> bool:
    kept_apart = (data.offset - run.start) % ALIGNMENT == 0
    same_kind = run.weights[-1].external == data.external
    return same_kind and kept_apart and 0 <= data.offset - run.stop <= _MAX_GAP


class _LaidOut(NamedTuple):
    positions: dict[tuple[int, int, int], int]
    pieces: list[Piece]


def _lay_out(runs: list[_Run], end: int, *, prefixed: bool) -> tuple[_LaidOut, int]:
    """Positions from `end` on; `prefixed`: each weight has its length in the four bytes before it."""
    positions: dict[tuple[int, int, int], int] = {}
    pieces: list[Piece] = []
    for run in runs:
        at = _aligned(end + (4 if prefixed else 0), run)
        for data in run.weights:
            positions[_key(data)] = at + data.offset - run.start if run.source is not None else at
        if prefixed:
            pieces.append(_prefix(at, run.weights[0]))
        pieces.append(Piece(at, run.data()))
        end = at + run.stop - run.start
    return _LaidOut(positions, pieces), end


def _prefix(at: int, data: Data) -> Piece:
    """The vector's length; those of the neighbours behind it come over with the bytes between them."""
    return Piece(at - 4, Data(data.length.to_bytes(4, "little")))


def _aligned(end: int, run: _Run) -> int:
    """The first place from `end` on where each weight is aligned at least as it was, up to a page."""
    if run.source is not None and run.stop - run.start >= _PAGED_SIZE:
        return end + (run.start - end) % PAGE
    if run.source is None or run.start % ALIGNMENT:
        return end + -end % ALIGNMENT
    alignment = max(data.offset & -data.offset for data in run.weights)
    return end + (run.start - end) % min(alignment, PAGE)
