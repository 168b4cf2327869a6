"""The executor metadata of a LiteRT-LM bundle: the window of sliding layers, and what is known of each cache.

Reads the few fields that edge-opt tells of. Source of the format: the PyPI package litert-lm-builder
(runtime/proto/executor_metadata_pb2), a protocol buffer in a section of its own.
"""

from collections.abc import Iterator
from typing import Final, NamedTuple

from edge_opt.output.errors import ModelFormatError
from edge_opt.schema.data import Source
from edge_opt.schema.litertlm import LiteRTLMBundle
from edge_opt.schema.sections import Bundle

SECTION_TYPE: Final = 9
ASSUMED_WINDOW: Final = 512
"""What LiteRT-LM takes for the window of sliding layers where the metadata names none."""

# Numbers of the protocol buffer's fields.
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
