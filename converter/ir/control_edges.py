"""The metadata entry `model_control_dependencies`: which operators of each subgraph have to wait for which others.

Source: TensorFlow, compiler/mlir/lite/experimental/remat/metadata_util.cc. A version, the number of subgraphs, and for
each the number of its edges and two operators' places an edge; a number takes seven bits of each byte, the eighth says
that more follow.
"""

import re
from collections.abc import Sequence
from typing import Final

from edge_opt.schema.errors import UsageError

ENTRY: Final = "model_control_dependencies"
_VERSION: Final = 1
_NUMBER: Final = re.compile(rb"[\x80-\xff]{0,9}[\x00-\x7f]")  # of 64 bits at most


def reordered(content: bytes, order: Sequence[int]) -> bytes:
    """The entry's bytes for a model that has the subgraphs `order` (their places before) and no others.

    Raises:
        UsageError: the bytes are no such entry, or of a version that is not known.
    """
    numbers: list[bytes] = _NUMBER.findall(content)
    graphs: list[bytes] = []
    end = 2
    while end < len(numbers):
        begin, end = end, end + 1 + 2 * _value(numbers[end])
        graphs.append(b"".join(numbers[begin:end]))
    complete = b"".join(numbers) == content and end == len(numbers)
    if not complete or [_value(number) for number in numbers[:2]] != [_VERSION, len(graphs)]:
        raise _unreadable()
    if any(place >= len(graphs) for place in order):
        raise _unreadable()
    return b"".join([bytes([_VERSION]), _written(len(order)), *(graphs[place] for place in order)])


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
