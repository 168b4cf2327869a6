"""Writes a model: tables first, then the weights, from file to file. It must not hold a weight in memory.

The same tables give the same bytes. Weights inside the flatbuffer stay inside while it is under 2 GB.
"""

import os
from collections.abc import Callable
from pathlib import Path

from edge_opt.schema.atomic import replacing, resolve_target
from edge_opt.schema.builder import build
from edge_opt.schema.data import Data, Source
from edge_opt.schema.placement import Placement, place, with_trailing
from edge_opt.schema.table import Table
from edge_opt.schema.transfer import copy_range, write_bytes

Progress = Callable[[int, int], None]


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
