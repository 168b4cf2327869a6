"""Messages carry every array as it is, and nothing else is taken for one."""

import json
import time
from collections.abc import Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import numpy as np
import pytest

from edge_opt.runtime import protocol
from edge_opt.runtime.errors import DeclinedError, RuntimeCrashed, RuntimeRefused
from edge_opt.runtime.protocol import MessageError, receive, send
from edge_opt.runtime.runner import _raise_reply

Ends = tuple[Connection, Connection]


@pytest.fixture
def ends() -> Iterator[Ends]:
    first, second = Pipe()
    with first, second:
        yield first, second


@pytest.mark.parametrize(
    "dtype", ["float32", "float16", "float64", "int8", "uint8", "int16", "int32", "int64", "bool"]
)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (2, 3, 4)])
def test_arrays_come_back_as_they_were(dtype: str, shape: tuple[int, ...], ends: Ends) -> None:
    array = np.arange(int(np.prod(shape))).reshape(shape).astype(dtype)
    send(ends[0], {"a": [1, None]}, {"first": array, "second": array.T})
    header, arrays = receive(ends[1])
    assert header == {"a": [1, None]}
    for name, expected in (("first", array), ("second", array.T)):
        assert (arrays[name].dtype, arrays[name].shape) == (expected.dtype, expected.shape)
        assert np.array_equal(arrays[name], expected)


@pytest.mark.parametrize(
    "sent",
    [
        b"INFO: created delegate",
        b"{[",
        b"{}",
        json.dumps({"arrays": [["a", "|O", [1]]]}).encode(),
        json.dumps({"arrays": [["a", "<f4", [1 << 40]]]}).encode(),
        json.dumps({"arrays": [["a", "no type", [1]]]}).encode(),
    ],
)
def test_objects_absurd_sizes_and_other_words_are_not_read(sent: bytes, ends: Ends) -> None:
    ends[0].send_bytes(sent)
    with pytest.raises(MessageError):
        receive(ends[1])


@pytest.mark.parametrize("room", [64, 63])
def test_all_arrays_of_a_message_count_to_the_byte(
    room: int, ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    send(ends[0], {}, {"a": np.ones((2, 3), np.float32), "b": np.ones(5, np.int64)})
    monkeypatch.setattr(protocol, "_MAX_PAYLOAD", room)
    if room == 64:
        assert list(receive(ends[1])[1]) == ["a", "b"]
    else:
        with pytest.raises(MessageError):
            receive(ends[1])


@pytest.mark.parametrize("length", [4, 12])
def test_an_array_is_as_long_as_it_was_announced(length: int, ends: Ends) -> None:
    ends[0].send_bytes(json.dumps({"arrays": [["a", "<f4", [2]]]}).encode())
    ends[0].send_bytes(bytes(length))
    with pytest.raises(MessageError):
        receive(ends[1])


def test_a_deadline_is_kept_and_an_end_is_told(ends: Ends) -> None:
    with pytest.raises(TimeoutError):
        receive(ends[1], time.monotonic() + 0.05)
    ends[0].close()
    with pytest.raises(EOFError):
        receive(ends[1])


def test_objects_are_not_sent(ends: Ends) -> None:
    with pytest.raises(DeclinedError, match="tensor 'words'"):
        send(ends[0], {}, {"words": np.array(["a"], object)})


@pytest.mark.parametrize(
    ("kind", "reason", "error", "said"),
    [
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
