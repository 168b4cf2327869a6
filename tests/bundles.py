"""LiteRT-LM bundles for tests, built from the format's description: a header flatbuffer, sections at 16 KiB."""

import struct
from collections.abc import Callable, Sequence

import flatbuffers

BLOCK = 16 << 10
STRING_VALUE = 9
TFLITE_MODEL = 3
GENERIC = 1

Part = tuple[int, dict[str, str], bytes]
"""(data type, items, content)."""


def bundle(parts: Sequence[Part], *, version: int = 1, repeated: int = 1) -> bytes:
    """A whole bundle; each entry of a list stands there `repeated`."""
    header = _header(parts, [(1, 1)] * len(parts), repeated)
    places, end = [], 32 + len(header)
    for _, _, content in parts:
        begin = -(-end // BLOCK) * BLOCK
        end = begin + len(content)
        places.append((begin, end))
    header = _header(parts, places, repeated)
    file = bytearray(end)
    file[:32] = b"LITERTLM" + struct.pack("<IIIIQ", version, 7, 0, 0, 32 + len(header))
    file[32 : 32 + len(header)] = header
    for (begin, stop), (_, _, content) in zip(places, parts, strict=True):
        file[begin:stop] = content
    return bytes(file)


def model_part(kind: str, content: bytes) -> Part:
    """A TFLite model."""
    return TFLITE_MODEL, {"model_type": f"tf_lite_{kind}", "backend_constraint": "cpu"}, content


def _header(parts: Sequence[Part], places: Sequence[tuple[int, int]], repeated: int) -> bytes:
    """Tables as `slot: adder, value`; what a table refers to is written before it."""
    builder = flatbuffers.Builder(1024)
    offset, number, byte = (
        builder.PrependUOffsetTRelativeSlot,
        builder.PrependUint64Slot,
        builder.PrependUint8Slot,
    )

    def table(slots: dict[int, tuple[Callable[[int, int, int], None], int]]) -> int:
        builder.StartObject(max(slots) + 1)
        for slot, (add, value) in slots.items():
            add(slot, value, 0)
        return int(builder.EndObject())

    def listed(values: Sequence[int]) -> int:
        builder.StartVector(4, len(values), 4)
        for value in reversed(values):
            builder.PrependUOffsetTRelative(value)
        return int(builder.EndVector())

    def item(key: str, value: str) -> int:
        wrapped = table({0: (offset, builder.CreateString(value))})
        return table({0: (offset, builder.CreateString(key)), 1: (byte, STRING_VALUE), 2: (offset, wrapped)})

    sections = []
    for (kind, items, _), (begin, end) in zip(parts, places, strict=True):
        entries = listed([item(*pair) for pair in items.items()] * repeated)
        sections.append(table({0: (offset, entries), 1: (number, begin), 2: (number, end), 3: (byte, kind)}))
    metadata = table({0: (offset, listed(sections * repeated))})
    builder.Finish(table({1: (offset, metadata)}))
    return bytes(builder.Output())
