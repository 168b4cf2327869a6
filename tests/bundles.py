"""LiteRT-LM bundles for tests, built from the format's description: a header flatbuffer, sections at 16 KiB."""

import struct
from collections.abc import Mapping, Sequence

import flatbuffers

BLOCK = 16 << 10
STRING_VALUE = 9
TFLITE_MODEL = 3
GENERIC = 1

Part = tuple[int, dict[str, str], bytes]
"""(data type, items, content)."""


def bundle(
    parts: Sequence[Part], *, version: int = 1, system: Mapping[str, str] | None = None, repeated: int = 1
) -> bytes:
    """A whole bundle; `system` is what its header says of all of it; each entry of a list stands there `repeated`."""
    header = _header(parts, [(1, 1)] * len(parts), system, repeated)
    places, end = [], 32 + len(header)
    for _, _, content in parts:
        begin = -(-end // BLOCK) * BLOCK
        end = begin + len(content)
        places.append((begin, end))
    header = _header(parts, places, system, repeated)
    file = bytearray(end)
    file[:32] = b"LITERTLM" + struct.pack("<IIIIQ", version, 7, 0, 0, 32 + len(header))
    file[32 : 32 + len(header)] = header
    for (begin, stop), (_, _, content) in zip(places, parts, strict=True):
        file[begin:stop] = content
    return bytes(file)


def model_part(kind: str, content: bytes) -> Part:
    """A TFLite model."""
    return TFLITE_MODEL, {"model_type": f"tf_lite_{kind}", "backend_constraint": "cpu"}, content


def _header(
    parts: Sequence[Part], places: Sequence[tuple[int, int]], system: Mapping[str, str] | None, repeated: int
) -> bytes:
    builder = flatbuffers.Builder(1024)
    objects = [_section(builder, part, place, repeated) for part, place in zip(parts, places, strict=True)]
    vector = _offsets(builder, objects * repeated)
    builder.StartObject(1)
    builder.PrependUOffsetTRelativeSlot(0, vector, 0)
    metadata = builder.EndObject()
    entries = _offsets(builder, [_item(builder, key, value) for key, value in (system or {}).items()])
    builder.StartObject(1)
    builder.PrependUOffsetTRelativeSlot(0, entries, 0)
    whole = builder.EndObject()
    builder.StartObject(2)
    if system is not None:
        builder.PrependUOffsetTRelativeSlot(0, whole, 0)
    builder.PrependUOffsetTRelativeSlot(1, metadata, 0)
    builder.Finish(builder.EndObject())
    return bytes(builder.Output())


def _section(builder: flatbuffers.Builder, part: Part, place: tuple[int, int], repeated: int) -> int:
    items = _offsets(builder, [_item(builder, key, value) for key, value in part[1].items()] * repeated)
    builder.StartObject(4)
    builder.PrependUOffsetTRelativeSlot(0, items, 0)
    builder.PrependUint64Slot(1, place[0], 0)
    builder.PrependUint64Slot(2, place[1], 0)
    builder.PrependUint8Slot(3, part[0], 0)
    return int(builder.EndObject())


def _item(builder: flatbuffers.Builder, key: str, value: str) -> int:
    text = builder.CreateString(value)
    builder.StartObject(1)
    builder.PrependUOffsetTRelativeSlot(0, text, 0)
    wrapped = builder.EndObject()
    name = builder.CreateString(key)
    builder.StartObject(3)
    builder.PrependUOffsetTRelativeSlot(0, name, 0)
    builder.PrependUint8Slot(1, STRING_VALUE, 0)
    builder.PrependUOffsetTRelativeSlot(2, wrapped, 0)
    return int(builder.EndObject())


def _offsets(builder: flatbuffers.Builder, values: Sequence[int]) -> int:
    builder.StartVector(4, len(values), 4)
    for value in reversed(values):
        builder.PrependUOffsetTRelative(value)
    return int(builder.EndVector())
