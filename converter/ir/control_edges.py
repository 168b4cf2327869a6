"""The metadata entry `model_control_dependencies`: which operators of each subgraph have to wait for which others.

Source: TensorFlow, compiler/mlir/lite/experimental/remat/metadata_util.cc. A version, the number of subgraphs, and for
each the number of its edges and two operators' places an edge; a number takes seven bits of each byte, the eighth says
that more follow.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Final

from edge_opt.schema.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

ENTRY: Final = "model_control_dependencies"
_VERSION: Final = 1
_LONGEST: Final = 10  # bytes of a number of 64 bits


def reordered(content: bytes, order: Sequence[int]) -> bytes:
    """The entry's bytes for a model that has the subgraphs `order` (their places before) and no others.

    Raises:
        UsageError: the bytes are no such entry, or of a version that is not known.
    """
    numbers = _numbers(content)
    if [_value(number) for number in islice(numbers, 1)] != [_VERSION]:
        raise _unreadable()
    graphs = [_graph(numbers) for _ in range(_count(numbers, len(content)))]
    if any(numbers) or any(place >= len(graphs) for place in order):
        raise _unreadable()
    return b"".join([bytes([_VERSION]), _written(len(order)), *(graphs[place] for place in order)])


def _graph(numbers: Iterator[bytes]) -> bytes:
    """One subgraph's edges, as they are stored."""
    head = next(numbers, b"")
    edges = list(islice(numbers, 2 * _value(head)))
    if not head or len(edges) != 2 * _value(head):
        raise _unreadable()
    return b"".join([head, *edges])


def _count(numbers: Iterator[bytes], most: int) -> int:
    count = _value(next(numbers, b""))
    if count > most:
        raise _unreadable()
    return count


def _numbers(content: bytes) -> Iterator[bytes]:
    """Each number's bytes."""
    begin = 0
    for end, byte in enumerate(content, 1):
        if end - begin > _LONGEST:
            break
        if byte < 0x80:
            yield content[begin:end]
            begin = end
    if begin < len(content):
        raise _unreadable()


def _value(number: bytes) -> int:
    return sum((byte & 0x7F) << 7 * place for place, byte in enumerate(number))


def _written(value: int) -> bytes:
    low, rest = value & 0x7F, value >> 7
    return bytes([low]) if not rest else bytes([low | 0x80]) + _written(rest)


def _unreadable() -> UsageError:
    return UsageError(
        f"the model orders operators by their place (metadata {ENTRY}) in a form that is not known, so its subgraphs "
        "cannot be moved: leave --extract-signature out"
    )
