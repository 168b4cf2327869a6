"""LiteRT-LM bundles for tests, built with the format's own bindings: a header flatbuffer, sections at 16 KiB."""

import struct
from collections.abc import Mapping, Sequence
from typing import Any

import flatbuffers
from litert_lm_builder import litertlm_header_schema_py_generated as schema

BLOCK = 16 << 10
TFLITE_MODEL = 3
GENERIC = 1

Part = tuple[int, dict[str, str], bytes]
"""(data type, items, content)."""


def bundle(parts: Sequence[Part], entries: Mapping[str, str] | None = None) -> bytes:
    """A whole bundle; `entries` of its header are about all of it."""
    sections, body = [], b""
    for kind, items, content in parts:
        body += bytes(-len(body) % BLOCK)
        named, begin = _pairs(items), BLOCK + len(body)
        sections.append(schema.SectionObjectT(named, begin, begin + len(content), kind))
        body += content
    builder = flatbuffers.Builder(1024)
    about = None if entries is None else schema.SystemMetadataT(_pairs(entries))
    root = schema.LiteRTLMMetaDataT(about, schema.SectionMetadataT(sections))
    builder.Finish(root.Pack(builder))
    return started(bytes(builder.Output())).ljust(BLOCK, b"\0") + body


def _pairs(texts: Mapping[str, str]) -> list[Any]:
    values = (
        (key, schema.VData.StringValue, schema.StringValueT(text)) for key, text in texts.items()
    )
    return [schema.KeyValuePairT(*value) for value in values]


def started(header: bytes) -> bytes:
    """What a bundle begins with: its header, and in front of that what says how long it is."""
    return b"LITERTLM" + struct.pack("<IIIIQ", 1, 7, 0, 0, 32 + len(header)) + header


def model_part(kind: str, content: bytes) -> Part:
    """A TFLite model."""
    return TFLITE_MODEL, {"model_type": f"tf_lite_{kind}", "backend_constraint": "cpu"}, content
