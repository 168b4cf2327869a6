"""Frames carry every array as it is, and nothing else is taken for one."""

import json

import numpy as np
import pytest

from edge_opt.runtime import protocol
from edge_opt.runtime.errors import BackendMissing, RuntimeCrashed, RuntimeRefused
from edge_opt.runtime.protocol import FrameError, frame, read_frame
from edge_opt.runtime.runner import _raise_reply


def reader(data: bytes):
    rest = memoryview(data)

    def fill(view: memoryview) -> None:
        nonlocal rest
        if len(rest) < len(view):
            raise EOFError
        view[:] = rest[: len(view)]
        rest = rest[len(view) :]

    return fill


@pytest.mark.parametrize(
    "dtype", ["float32", "float16", "float64", "int8", "uint8", "int16", "int32", "int64", "bool"]
)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (2, 3, 4)])
def test_arrays_come_back_as_they_were(dtype: str, shape: tuple[int, ...]) -> None:
    array = np.arange(int(np.prod(shape))).reshape(shape).astype(dtype)
    sent = b"".join(frame({"a": [1, None]}, {"first": array, "second": array.T}))
    header, arrays = read_frame(reader(sent))
    assert header == {"a": [1, None]}
    for name, expected in (("first", array), ("second", array.T)):
        assert arrays[name].dtype == expected.dtype
        assert arrays[name].shape == expected.shape
        assert np.array_equal(arrays[name], expected)


@pytest.mark.parametrize("listed", [["a", "|O", [1]], ["a", "<f4", [1 << 40]]])
def test_objects_and_absurd_sizes_are_not_read(listed: list[object]) -> None:
    text = json.dumps({"arrays": [listed]}).encode()
    prefix = next(iter(frame({}, {})))[:4].tobytes()
    with pytest.raises(FrameError):
        read_frame(reader(prefix + len(text).to_bytes(4, "little") + text + bytes(64)))


@pytest.mark.parametrize(("magic", "length"), [(b"INFO", 2), (None, (64 << 20) + 1)])
def test_a_frame_begins_with_its_mark_and_a_length_that_can_be(magic: bytes | None, length: int) -> None:
    own = next(iter(frame({}, {})))[:4].tobytes()
    sent = (magic or own) + length.to_bytes(4, "little") + json.dumps({"arrays": []}).encode()
    with pytest.raises(FrameError, match="not a frame"):
        read_frame(reader(sent))


def test_what_is_no_json_is_no_frame() -> None:
    own = next(iter(frame({}, {})))[:4].tobytes()
    with pytest.raises(FrameError, match="not a frame"):
        read_frame(reader(own + (2).to_bytes(4, "little") + b"{["))


def test_all_arrays_of_a_frame_count_to_the_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = {"a": np.ones((2, 3), np.float32), "b": np.ones(5, np.int64)}
    sent = b"".join(frame({}, arrays))
    monkeypatch.setattr(protocol, "_MAX_PAYLOAD", 24 + 40)
    assert list(read_frame(reader(sent))[1]) == ["a", "b"]
    monkeypatch.setattr(protocol, "_MAX_PAYLOAD", 24 + 39)
    with pytest.raises(FrameError, match="not an array"):
        read_frame(reader(sent))


def test_objects_are_not_sent() -> None:
    with pytest.raises(FrameError, match="tensor 'words'"):
        list(frame({}, {"words": np.array(["a"], object)}))


@pytest.mark.parametrize(
    ("kind", "reason", "error", "said"),
    [
        (
            "missing",
            "tensorflow",
            BackendMissing,
            "is not installed: pip install '.[tensorflow]' in a checkout of edge-opt",
        ),
        ("internal", "KeyError", RuntimeCrashed, "region: the worker failed: KeyError"),
        ("refused", "no kernel", RuntimeRefused, "region: the runtime refused it: no kernel"),
        ("refused", "out of memory", RuntimeRefused, "out of memory; it was allowed 3 MiB of memory"),
        ("refused", "no reason given", RuntimeRefused, "no reason given; it was allowed 3 MiB of memory"),
    ],
)
def test_each_kind_of_error_comes_out_as_its_own_type(
    kind: str, reason: str, error: type[Exception], said: str
) -> None:
    with pytest.raises(error) as caught:
        _raise_reply({"error": kind, "reason": reason}, "region", 3 << 20)
    assert type(caught.value) is error
    assert str(caught.value).endswith(said)
