"""Messages carry every array as it is, and nothing else is taken for one."""

import socket
from collections.abc import Iterator
from io import BufferedRWPair, BytesIO

import numpy as np
import pytest

from edge_opt.runtime.protocol import DeclinedError, RuntimeFailed, RuntimeRefused, receive, send
from edge_opt.runtime.runner import _refusal

Ends = tuple[BufferedRWPair, BufferedRWPair]
DTYPES = ("float32", "float16", "float64", "int8", "uint8", "int16", "int32", "int64", "bool")


@pytest.fixture
def ends() -> Iterator[Ends]:
    first, second = socket.socketpair()
    second.settimeout(0.1)
    with first, second, first.makefile("rwb") as one, second.makefile("rwb") as other:
        yield one, other


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (2, 3, 4)])
def test_arrays_come_back_as_they_were(dtype: str, shape: tuple[int, ...], ends: Ends) -> None:
    array = np.arange(int(np.prod(shape))).reshape(shape).astype(dtype)
    send(ends[0], {"a": [1, None]}, {"first": array, "second": array.T})
    header, arrays = receive(ends[1])
    assert header == {"a": [1, None]}
    for name, expected in (("first", array), ("second", array.T)):
        assert (arrays[name].dtype, arrays[name].shape) == (expected.dtype, expected.shape)
        assert np.array_equal(arrays[name], expected)


def pickled() -> bytes:
    """An array of objects, which to read runs code."""
    np.save(file := BytesIO(), np.array([None], object), allow_pickle=True)
    return file.getvalue()


@pytest.mark.parametrize(
    "sent",
    [
        b"INFO: created delegate\n",
        b"{[\n",
        b"{}\n",
        b"[]\n",
        b'{"arrays": ["a"]}\nno array at all',
        b'{"arrays": ["a"]}\n' + pickled(),
    ],
)
def test_objects_and_other_words_are_not_read(sent: bytes, ends: Ends) -> None:
    ends[0].write(sent)
    ends[0].flush()
    with pytest.raises(EOFError, match="not a message"):
        receive(ends[1])


def test_a_time_limit_is_kept_and_an_end_is_told(ends: Ends) -> None:
    with pytest.raises(TimeoutError):
        receive(ends[1])
    first, second = socket.socketpair()
    with second, second.makefile("rwb") as channel:
        first.close()
        with pytest.raises(EOFError, match="nothing more is sent"):
            receive(channel)


def test_objects_are_not_sent(ends: Ends) -> None:
    with pytest.raises(DeclinedError, match="tensor 'words'"):
        send(ends[0], {}, {"words": np.array(["a"], object)})


@pytest.mark.parametrize(
    ("kind", "reason", "error", "said"),
    [
        (
            "internal",
            "KeyError",
            RuntimeFailed,
            "region: a fault of edge-opt, please report it: KeyError",
        ),
        ("refused", "no kernel", RuntimeRefused, "region: the runtime refused it: no kernel"),
        (
            "refused",
            "out of memory",
            RuntimeRefused,
            "out of memory; it was allowed 3 MiB of memory",
        ),
        (
            "refused",
            "no reason given",
            RuntimeRefused,
            "no reason given; it was allowed 3 MiB of memory",
        ),
    ],
)
def test_each_kind_of_error_has_a_type(
    kind: str, reason: str, error: type[Exception], said: str
) -> None:
    made = _refusal({"error": kind, "reason": reason}, "region", 3 << 20)
    assert type(made) is error
    assert str(made).endswith(said)
