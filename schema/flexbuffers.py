"""Reads a FlexBuffer, the self-describing format that composites keep their attributes in, out of an untrusted file.

Every offset is checked before it is used. Values may share their bytes and contain themselves, so depth, number of
values and length of texts are bounded.
"""

import struct
from typing import Any, Final, NoReturn

import numpy as np

from edge_opt.base.errors import ModelFormatError

# Composites of litert-torch have at most nine attributes.
_MOST_VALUES: Final = 256
_BYTES_PER_VALUE: Final = 64
_DEEPEST: Final = 8
_LONGEST_KEY: Final = 256

_NULL, _INT, _UINT, _FLOAT, _KEY, _STRING, _MAP, _VECTOR, _BLOB, _BOOL = 0, 1, 2, 3, 4, 5, 9, 10, 25, 26
# Kinds of vectors whose elements all have one kind, and of numbers that are stored elsewhere.
_TYPED = {11: _INT, 12: _UINT, 13: _FLOAT, 14: _KEY, 36: _BOOL}
_INDIRECT = {6: _INT, 7: _UINT, 8: _FLOAT}
_CODES = {
    _INT: {1: "<b", 2: "<h", 4: "<i", 8: "<q"},
    _UINT: {1: "<B", 2: "<H", 4: "<I", 8: "<Q"},
    _FLOAT: {4: "<f", 8: "<d"},
}
_CODES[_NULL] = _CODES[_BOOL] = _CODES[_UINT]


def read_flexbuffer(content: bytes) -> Any:
    """None, a bool, int, float or text, or dicts and lists of those.

    A float of four bytes is the shortest decimal that reads back as the same four bytes: 1e-06, as it was written.
    Of blobs, and of vectors of fixed length, only the kind is given, as a text: composites have none.

    Raises:
        ModelFormatError: the bytes are no FlexBuffer, or it is deeper or has more values than is allowed.
    """
    reader = _Reader(content)
    width = reader.number(len(content) - 1, 1)
    return reader.value(len(content) - 2 - width, width, reader.number(len(content) - 2, 1), 0)


class _Reader:
    def __init__(self, content: bytes) -> None:
        self._content = content
        self._left = _MOST_VALUES

    def number(self, at: int, width: int, kind: int = _UINT) -> Any:
        code = _CODES[kind].get(width)
        if code is None:
            _fail(f"a number of {width} bytes")
        (value,) = struct.unpack(code, self._bytes(at, width))
        if kind in (_NULL, _BOOL):
            return bool(value) if kind == _BOOL else None
        return float(str(np.float32(value))) if code == "<f" else value

    def value(self, at: int, width: int, packed: int, depth: int) -> Any:
        """The value whose number, or distance back to it, stands in `width` bytes at `at`; `packed` is its type."""
        if depth > _DEEPEST:
            _fail(f"more than {_DEEPEST} levels")
        kind, wide = packed >> 2, 1 << (packed & 3)
        if kind in _CODES:
            return self.number(at, width, kind)
        there = at - self.number(at, width)
        if kind in _INDIRECT:
            return self.number(there, wide, _INDIRECT[kind])
        if kind == _KEY:
            return self._key(there)
        if kind not in (_STRING, _MAP, _VECTOR, _BLOB, *_TYPED):
            return f"<FlexBuffer type {kind}>"
        size = self.number(there - wide, wide)
        if kind == _STRING:
            return self._bytes(there, size).decode(errors="backslashreplace")
        if kind == _BLOB:
            return f"<{len(self._bytes(there, size))} bytes>"
        self._spend(size)
        kinds = [_TYPED[kind] << 2] * size if kind in _TYPED else self._bytes(there + size * wide, size)
        values = [self.value(there + i * wide, wide, packed, depth + 1) for i, packed in enumerate(kinds)]
        return values if kind != _MAP else dict(zip(self._keys(there, wide, size), values, strict=True))

    def _keys(self, at: int, wide: int, size: int) -> list[str]:
        """A map's keys: in front of its size stand the distance back to them and their own width."""
        there, width = at - 3 * wide, self.number(at - 2 * wide, wide)
        keys = there - self.number(there, wide)
        places = [keys + i * width for i in range(size)]
        return [self._key(place - self.number(place, width)) for place in places]

    def _key(self, at: int) -> str:
        end = self._content.find(b"\0", at, at + _LONGEST_KEY) if at >= 0 else -1
        if end < 0:
            _fail(f"a name at byte {at} does not end")
        return self._bytes(at, end - at).decode(errors="backslashreplace")

    def _bytes(self, at: int, size: int) -> bytes:
        if not 0 <= at <= len(self._content) - size:
            _fail(f"{size} bytes at byte {at} of {len(self._content)}")
        self._spend(size // _BYTES_PER_VALUE)
        return self._content[at : at + size]

    def _spend(self, cost: int) -> None:
        self._left -= cost
        if self._left < 0:
            _fail(f"more than {_MOST_VALUES} values")


def _fail(what: str) -> NoReturn:
    raise ModelFormatError(what)
