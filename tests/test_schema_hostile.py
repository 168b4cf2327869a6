"""Files that lie about themselves are refused with one typed error, quickly and without taking memory."""

import gc
import os
import struct
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import fuzz
import numpy as np
import pytest
from cli_runs import DEMO, Patch
from schema_models import everything, pack, tfl, with_data_after, with_options_after

from edge_opt.base.errors import ModelFormatError, UsageError
from edge_opt.ir import load
from edge_opt.schema import Table, model_bytes, new_table, read_model
from edge_opt.schema.data import Source

EVERYTHING = pack(everything())
TENSOR = ("Subgraphs", 0, "Tensors", 0)
OPERATOR = ("Subgraphs", 0, "Operators", 0)


def place_of(content: bytes, *path: str | int) -> tuple[int, int]:
    """Position of a table reached by camel-case method names and indices, and of its vtable."""
    table = tfl.Model.GetRootAs(content, 0)
    for step in path:
        table = getattr(table, step) if isinstance(step, str) else table(step)
    if callable(table):
        table = table()
    position = table._tab.Pos
    return position, position - struct.unpack_from("<i", content, position)[0]


def patched(content: bytes, at: int, code: str, *values: int) -> bytes:
    changed = bytearray(content)
    struct.pack_into(f"<{code}", changed, at, *values)
    return bytes(changed)


def with_field(
    slot: int, code: str, value: int, *path: str | int, content: bytes = EVERYTHING
) -> bytes:
    """The file with one inline field of a table overwritten."""
    position, vtable = place_of(content, *path)
    at = struct.unpack_from("<H", content, vtable + 4 + 2 * slot)[0]
    assert at, "the field is absent"
    return patched(content, position + at, code, value)


def with_vector_length(slot: int, length: int) -> bytes:
    position, vtable = place_of(EVERYTHING)
    at = position + struct.unpack_from("<H", EVERYTHING, vtable + 4 + 2 * slot)[0]
    return patched(EVERYTHING, at + struct.unpack_from("<I", EVERYTHING, at)[0], "I", length)


def with_vtable(*sizes: int) -> bytes:
    return patched(EVERYTHING, place_of(EVERYTHING, *TENSOR)[1], "HH", *sizes)


def with_fields_over_each_other() -> bytes:
    """A tensor whose shape is where its buffer is."""
    slots = place_of(EVERYTHING, *TENSOR)[1] + 4
    return patched(EVERYTHING, slots, "H", *struct.unpack_from("<H", EVERYTHING, slots + 4))


def buffers_over_each_other() -> bytes:
    """A thousand buffers that each claim everything behind them: a thousand times the file."""
    buffers = [tfl.BufferT(data=np.zeros(4, np.uint8)) for _ in range(1000)]
    content = bytearray(pack(tfl.ModelT(buffers=buffers)))
    for index in range(1000):
        data = tfl.Model.GetRootAs(content, 0).Buffers(index)._tab
        at = data.Vector(data.Offset(4)) - 4
        struct.pack_into("<I", content, at, len(content) - at - 4)
    return bytes(content)


def weights_over_each_other() -> bytes:
    content = with_data_after(tfl.ModelT(buffers=[]), *([b"x" * 100] * 50))
    for index in range(50):
        offset = tfl.Model.GetRootAs(content, 0).Buffers(index).Offset()
        content = with_field(2, "Q", len(content) - offset, "Buffers", index, content=content)
    return content


def tables_over_each_other() -> bytes:
    """Four thousand buffers one byte apart, all with one vtable of 60,000 bytes."""
    count, body = 4000, bytearray(struct.pack("<I4sHH", 0, b"TFL3", 4, 60_000))
    root_vtable = len(body)
    body += struct.pack("<HHHHHHH", 14, 8, 0, 0, 0, 0, 4)
    body += bytes(-len(body) % 4)
    root = len(body)
    body += struct.pack("<iII", root - root_vtable, 4, count)
    first = len(body) + 4 * count
    for index in range(count):
        body += struct.pack("<I", first + 4 * index - len(body))
    for _ in range(count):
        body += struct.pack("<i", len(body) - 8)
    return patched(bytes(body + bytes(60_000)), 0, "I", root)


def newer() -> bytes:
    builder = tfl.flatbuffers.Builder(64)
    builder.StartObject(12)
    builder.PrependInt32Slot(11, 5, 0)
    builder.Finish(builder.EndObject(), file_identifier=b"TFL3")
    return bytes(builder.Output())


def tensor(name: str = "t", shape: list[int] | None = None, **fields: Any) -> Table:
    return new_table("Tensor", name=name, shape=[2] if shape is None else shape, **fields)


def operator(inputs: list[int], outputs: list[int]) -> Table:
    return new_table("Operator", opcode_index=0, inputs=inputs, outputs=outputs)


def model(tensors: list[Table], operators: list[Table] = [], **fields: Any) -> bytes:  # noqa: B006 - only read
    """A model of one subgraph whose first tensor is its input; the operator code is CONCATENATION."""
    graph = new_table(
        "SubGraph", tensors=tensors, inputs=[0], outputs=[0], operators=operators, name="main"
    )
    codes = [new_table("OperatorCode", builtin_code=2, deprecated_builtin_code=2)]
    root = {
        "subgraphs": [graph],
        "operator_codes": codes,
        "buffers": [new_table("Buffer")],
        **fields,
    }
    return model_bytes(new_table("Model", version=3, **root))


def shared(what: str) -> bytes:
    """Parts of a graph that are in the file once, and named so often that they would fill the memory."""
    graph = new_table(
        "SubGraph", tensors=[tensor(), tensor()], operators=[operator([0, 0], [1])], inputs=[0]
    )
    if what == "buffer":
        return model([tensor()], buffers=[new_table("Buffer")] * 170_000)
    if what == "tensors":
        tensors = [tensor(shape=[1])] * 2000
        return model(
            [tensor()], subgraphs=[new_table("SubGraph", tensors=tensors) for _ in range(80)]
        )
    if what == "subgraph":
        return model([tensor()], subgraphs=[graph] * 20_000)
    if what == "indices":
        return model([tensor()], [operator([0] * 10_000, [])] * 10_000)
    scales = np.ones(100_000, np.float32)
    parameters = [new_table("QuantizationParameters", scale=scales) for _ in range(400)]
    return model([tensor(shape=[100_000], quantization=each) for each in parameters])


AFTER = with_data_after(tfl.ModelT(buffers=[]), b"small")
TWO_PLACES = tfl.ModelT(buffers=[tfl.BufferT(data=np.zeros(4, np.uint8), offset=16, size=4)])
SENTENCES: dict[str, list[Callable[[], bytes] | bytes]] = {
    # What is not a model, with a remedy
    "only 4 bytes": [b"TFL3"],
    "give a .tflite file": [b"# A text file, not a model\n"],
    "load(path, model='prefill_decode')": [b"LITERTLM" + bytes(100)],
    "unzip it, and give the TFLite model inside": [b"PK\3\4" + bytes(100)],
    "git lfs pull": [b"version https://git-lfs.github.com/spec/v1\n"],
    # Offsets, lengths and sizes
    "the root table's offset is 0": [patched(EVERYTHING, 0, "I", 0)],
    "Tensor.shape: points to byte 2147": [with_field(0, "I", 0x7FFFFFFF, *TENSOR)],
    "Tensor.shape: points to": [with_field(0, "I", 0, *TENSOR)],
    "claims 2147483648 elements": [with_vector_length(slot, 2**31) for slot in (1, 2, 4)],
    "vtable of Tensor lies outside": [
        patched(EVERYTHING, place_of(EVERYTHING, *TENSOR)[0], "i", -(2**31))
    ],
    "impossible sizes": [with_vtable(3, 8), with_vtable(2, 8), with_vtable(0xFFFE, 8)],
    "outside its table": [with_vtable(8, 5)],
    "Tensor.buffer: lies at 12, over another field": [with_fields_over_each_other],
    "claims 4294967296 bytes": [with_field(2, "Q", 2**32, "Buffers", 0, content=AFTER)],
    "Buffer.offset": [with_field(1, "Q", 2**64 - 1, "Buffers", 0, content=AFTER)],
    "Operator.large_custom_options_offset: claims 8 bytes": [
        with_field(10, "Q", 8, *OPERATOR, content=with_options_after(everything(), b"options"))
    ],
    "second place for the bytes": [pack(TWO_PLACES)],
    "is not valid UTF-8": [pack(tfl.ModelT(description="words")).replace(b"words", b"w\xe4\0\0\0")],
    "does not end in a zero byte": [
        pack(tfl.ModelT(description="words")).replace(b"words\0", b"words!")
    ],
    "Operator.builtin_options: has a value but no builtin_options_type": [
        with_field(3, "B", 0, *OPERATOR)
    ],
    # A newer schema
    "Model.slot 11: an unknown field is present, so it was written by a newer schema": [newer],
    "BuiltinOptions has no member 250": [with_field(3, "B", 250, *OPERATOR)],
    "BuiltinOptions2 has no member 250": [with_field(11, "B", 250, "Subgraphs", 0, "Operators", 2)],
    "operator code 9999 is unknown": [with_field(3, "i", 9999, "OperatorCodes", 0)],
    "tensor type 99 is unknown": [with_field(1, "b", 99, *TENSOR)],
    # Small files that would take all memory
    "overlap": [buffers_over_each_other, weights_over_each_other, tables_over_each_other],
    "has more than 500000 tables, vectors and strings (large ones count as several): if it is trusted, set the "
    "environment variable EDGE_OPT_MAX_OBJECTS to 2000000": [
        partial(shared, what) for what in ("buffer", "tensors", "subgraph", "indices", "scales")
    ],
}


@pytest.mark.parametrize("sentence", SENTENCES)
def test_each_lie_is_refused_with_its_sentence(sentence: str) -> None:
    for make in SENTENCES[sentence]:
        content = make() if callable(make) else make
        tracemalloc.start()
        with fuzz.time_limit(2), pytest.raises(ModelFormatError) as caught:
            load(content)
        assert tracemalloc.get_traced_memory()[1] < (200 << 20) + len(content)
        tracemalloc.stop()
        assert sentence in str(caught.value)
        assert caught.value.exit_code == 3


def test_as_many_tiny_tables_as_are_allowed_are_read_in_time() -> None:
    content = model([new_table("Tensor") for _ in range(165_000)])
    with fuzz.time_limit(10):
        assert len(load(content).subgraphs[0].tensors) == 165_000
    assert gc.isenabled(), "it is paused while a model is read"


def test_the_error_names_table_field_and_offset() -> None:
    with pytest.raises(ModelFormatError) as caught:
        read_model(with_field(0, "I", 0x7FFFFFFF, *TENSOR))
    assert (caught.value.table, caught.value.field) == ("Tensor", "shape")
    (text,) = SENTENCES["is not valid UTF-8"]
    with pytest.raises(ModelFormatError) as caught:
        read_model(text)
    assert (caught.value.table, caught.value.offset) == ("Model", text.index(b"w\xe4"))


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda path: None, "does not exist"),
        (lambda path: path.write_bytes(b""), "is empty"),
        (lambda path: path.mkdir(), "is a folder"),
        (os.mkfifo, "is a pipe"),
        (lambda path: path.symlink_to("/dev/zero"), "is a device"),
    ],
)
def test_what_is_not_a_file_is_refused(
    tmp_path: Path, make: Callable[[Path], None], reason: str
) -> None:
    make(tmp_path / "model.tflite")
    with pytest.raises(ModelFormatError, match=reason):
        read_model(tmp_path / "model.tflite")
    (tmp_path / "config.json").touch()
    with pytest.raises(ModelFormatError, match="for a checkpoint, use `edge-opt build`"):
        read_model(tmp_path)
    with pytest.raises(ModelFormatError, match="not a file name"):
        read_model("a\0b")


def test_a_failing_disk_or_a_terabyte_is_refused(tmp_path: Path, monkeypatch: Patch) -> None:
    path = tmp_path / "model.tflite"
    with path.open("wb") as file:
        file.write(struct.pack("<I4s", 8, b"TFL3"))
        file.truncate(1 << 40)
    with pytest.raises(ModelFormatError, match="impossible sizes"):
        read_model(path)

    def refuse(*_: object, **__: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "pread", refuse)
    with pytest.raises(ModelFormatError, match="cannot be read: Input/output error"):
        Source.open(path).read(0, 8)


def test_who_trusts_a_large_model_says_so_in_the_environment(monkeypatch: Patch) -> None:
    monkeypatch.setenv("EDGE_OPT_MAX_OBJECTS", "20")
    with pytest.raises(ModelFormatError, match="more than 20 tables"):
        read_model(EVERYTHING)
    monkeypatch.setenv("EDGE_OPT_MAX_OBJECTS", "1e6")
    with pytest.raises(UsageError, match="EDGE_OPT_MAX_OBJECTS is '1e6': give a number"):
        read_model(EVERYTHING)
    monkeypatch.setenv("EDGE_OPT_MAX_OBJECTS", str(500_000 * 1000))
    assert load(DEMO).subgraphs


@pytest.mark.parametrize("slot", range(6))
def test_a_million_nested_tables_take_no_stack(slot: int) -> None:
    """A vector of one table that holds a vector of one table, and so on: the schema ends the descent, not the file."""
    depth, start = 1_000_000, 32
    header = struct.pack(
        "<I4sHH6H", start + 8, b"TFL3", 16, 8, *(4 if i == slot else 0 for i in range(6))
    )
    levels = np.tile(
        np.array([1, 4, 0, 4], "<u4"), (depth, 1)
    )  # count, offset, vtable, offset to the next count
    levels[:, 2] = start + 8 + 16 * np.arange(depth) - 8
    with fuzz.time_limit(), suppress(ModelFormatError):
        load(header.ljust(start, b"\0") + levels.tobytes() + bytes(16))


def test_a_truncated_file_is_refused() -> None:
    content = with_data_after(everything(), b"weights" * 20)
    for length in range(0, len(content), 97):
        with pytest.raises(ModelFormatError):
            read_model(content[:length])
