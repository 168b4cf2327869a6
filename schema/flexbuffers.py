"""Reads and writes a FlexBuffer, the self-describing format of composites' attributes, from an untrusted file.

Only top-level values are read: values may contain themselves, so nothing nested is followed.
"""

import struct
from typing import Any, Final

import numpy as np
from flatbuffers import flexbuffers

# Composites of litert-torch have at most nine attributes, in a few hundred bytes.
_MOST_BYTES: Final = 16 << 10
_MOST_VALUES: Final = 256

_DAMAGE = (
    struct.error,
    ValueError,
    LookupError,
    TypeError,
    AssertionError,
    OverflowError,
    ZeroDivisionError,
)
"""The exceptions that `flatbuffers.flexbuffers` raises on invalid bytes."""


def read_flexbuffer(content: bytes) -> Any:
    """A dict of attributes, each None, a bool, int, float, text, or a list of these; `{}` without bytes.

    A float32 becomes the shortest decimal that reads back as the same float32: 1e-06, as it was written. Other values
    and other bytes become an explanatory text.
    """
    if not len(content):
        return {}
    if len(content) > _MOST_BYTES:
        return f"<{len(content)} bytes, at most {_MOST_BYTES} are read>"
    try:
        root = flexbuffers.GetRoot(bytes(content))
        if not root.IsMap:
            return _value(root)
        keys = _items(root.AsMap.Keys)
        values = _items(root.AsMap.Values)
        return {key.AsKey: _value(value) for key, value in zip(keys, values, strict=True)}
    except _DAMAGE as error:
        return f"<{len(content)} bytes, not a FlexBuffer ({error})>"


def write_flexbuffer(value: Any) -> bytes:
    """The FlexBuffer of a dict of attributes; ValueError if they do not fit the format."""
    try:
        return bytes(flexbuffers.Dumps(value))
    except (RuntimeError, *_DAMAGE) as error:  # RuntimeError: a value in a map is invalid
        raise ValueError(f"attributes do not fit a FlexBuffer: {error}") from error


def _items(vector: Any) -> list[Any]:
    if len(vector) > _MOST_VALUES:
        raise ValueError(f"more than {_MOST_VALUES} values")
    return [vector[index] for index in range(len(vector))]


def _value(reference: Any, *, nested: bool = False) -> Any:
    if reference.IsFloat:
        value = float(reference.AsFloat)
        with np.errstate(over="ignore"):
            single = np.float32(value)
        return float(str(single)) if float(single) == value else value
    if (
        reference.IsNull
        or reference.IsBool
        or reference.IsInt
        or reference.IsString
        or reference.IsKey
    ):
        return reference.Value
    if not nested and (reference.IsTypedVector or reference.IsVector) and not reference.IsMap:
        vector = reference.AsTypedVector if reference.IsTypedVector else reference.AsVector
        return [_value(item, nested=True) for item in _items(vector)]
    return "<nested FlexBuffer value>"
