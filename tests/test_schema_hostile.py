"""Files that lie about themselves are refused with one typed error, quickly and without taking memory."""

import os
import random
import struct
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import fuzz
import numpy as np
import pytest
from cli_runs import DEMO
from schema_models import everything, int32s, pack, tfl, with_data_after, with_options_after

from edge_opt.base.errors import ModelFormatError, UsageError
from edge_opt.ir import load
from edge_opt.schema import read_model
from edge_opt.schema.data import Source


def place_of(content: bytes, *path: str | int) -> tuple[int, int]:
    """Position of a table reached by camel-case method names and indices, and of its vtable."""
    table = tfl.Model.GetRootAs(content, 0)
    for step in path:
        table = getattr(table, step) if isinstance(step, str) else table(step)
    if callable(table):
        table = table()
    position = table._tab.Pos
    return position, position - struct.unpack_from("<i", content, position)[0]


def with_field(content: bytes, slot: int, code: str, value: int, *path: str | int) -> bytes:
    """The file with one inline field of a table overwritten."""
    position, vtable = place_of(content, *path)
    at = struct.unpack_from("<H", content, vtable + 4 + 2 * slot)[0]
    assert at, "the field is absent"
    changed = bytearray(content)
    struct.pack_into(f"<{code}", changed, position + at, value)
    return bytes(changed)


def with_vector_length(content: bytes, slot: int, length: int, *path: str | int) -> bytes:
    position, vtable = place_of(content, *path)
    at = position + struct.unpack_from("<H", content, vtable + 4 + 2 * slot)[0]
    changed = bytearray(content)
    struct.pack_into("<I", changed, at + struct.unpack_from("<I", content, at)[0], length)
    return bytes(changed)


def refusal(content: bytes) -> str:
    with pytest.raises(ModelFormatError) as caught:
        read_model(content)
    return str(caught.value)


TENSOR = ("Subgraphs", 0, "Tensors", 0)


@pytest.mark.parametrize(
    ("content", "remedy"),
    [
        (b"TFL3", "only 4 bytes"),
        (b"# A text file, not a model\n", "give a .tflite file"),
        (b"LITERTLM" + bytes(100), "load(path, model='prefill_decode')"),
        (b"PK\3\4" + bytes(100), "unzip it, and give the TFLite model inside"),
        (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
    ],
)
def test_what_is_no_model_is_named_with_a_remedy(content: bytes, remedy: str) -> None:
    assert remedy in refusal(content)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda path: None, "does not exist"),
        (lambda path: path.write_bytes(b""), "is empty"),
        (lambda path: path.mkdir(), "is a folder"),
        (os.mkfifo, "is a pipe"),
    ],
)
def test_what_is_no_file_is_refused_without_waiting(
    tmp_path: Path, make: Callable[[Path], None], reason: str
) -> None:
    path = tmp_path / "model.tflite"
    make(path)
    with pytest.raises(ModelFormatError, match=reason):
        read_model(path)


def test_a_device_and_an_impossible_name_are_refused() -> None:
    with pytest.raises(ModelFormatError, match="is a device"):
        read_model("/dev/zero")
    with pytest.raises(ModelFormatError, match="not a file name"):
        read_model("a\0b")


def test_a_file_on_a_failing_disk_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(5, "Input/output error")

    path = tmp_path / "model.tflite"
    path.write_bytes(pack(everything()))
    monkeypatch.setattr(os, "preadv", refuse)
    with pytest.raises(ModelFormatError, match="cannot be read: Input/output error"):
        Source.open(path).view(0, 8)


def test_a_sparse_file_of_a_terabyte_is_refused_at_once(tmp_path: Path) -> None:
    path = tmp_path / "model.tflite"
    with path.open("wb") as file:
        file.write(struct.pack("<I4s", 8, b"TFL3"))
        file.truncate(1 << 40)
    with pytest.raises(ModelFormatError, match="impossible sizes"):
        read_model(path)


def test_the_error_names_table_field_and_offset() -> None:
    with pytest.raises(ModelFormatError) as caught:
        read_model(with_field(pack(everything()), 0, "I", 0x7FFFFFFF, *TENSOR))
    assert (caught.value.table, caught.value.field) == ("Tensor", "shape")
    assert caught.value.offset is not None
    assert str(caught.value).startswith("Tensor.shape: points to byte 2147")
    assert caught.value.exit_code == 3


def test_an_offset_that_stays_in_place_is_refused() -> None:
    assert "Tensor.shape: points to" in refusal(with_field(pack(everything()), 0, "I", 0, *TENSOR))


@pytest.mark.parametrize("slot", [1, 2, 4])
def test_a_vector_of_two_billion_elements_is_refused(slot: int) -> None:
    assert "claims 2147483648 elements" in refusal(with_vector_length(pack(everything()), slot, 2**31))


def test_more_tables_than_a_model_can_have_are_refused_before_they_are_read() -> None:
    content = with_vector_length(pack(everything()) + bytes(4 << 20), 2, 600_000)
    tracemalloc.start()
    assert "set the environment variable EDGE_OPT_MAX_OBJECTS to 2000000" in refusal(content)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_the_bound_on_objects_can_be_raised_or_lowered() -> None:
    content = pack(everything())
    with pytest.raises(ModelFormatError, match="more than 20 tables"):
        read_model(content, max_objects=20)


def test_who_trusts_a_large_model_says_so_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    content = pack(everything())
    monkeypatch.setenv("EDGE_OPT_MAX_OBJECTS", "20")
    with pytest.raises(ModelFormatError, match="more than 20 tables"):
        read_model(content)
    monkeypatch.setenv("EDGE_OPT_MAX_OBJECTS", "1e6")
    with pytest.raises(UsageError, match="EDGE_OPT_MAX_OBJECTS is '1e6': give a number"):
        read_model(content)


def test_and_the_graphs_may_then_be_larger_in_proportion(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edge_opt.ir.checks.MAX_EXTENT", 10)
    with pytest.raises(ModelFormatError, match="expected at most 10: if it is trusted, set the environment"):
        load(DEMO)
    monkeypatch.setenv("EDGE_OPT_MAX_OBJECTS", str(500_000 * 1000))
    assert load(DEMO).subgraphs


@pytest.mark.parametrize("slot", range(6))
def test_a_million_nested_tables_take_no_stack(slot: int) -> None:
    """A vector of one table that holds a vector of one table, and so on: the schema ends the descent, not the file."""
    depth, start = 1_000_000, 32
    header = struct.pack("<I4sHH6H", start + 8, b"TFL3", 16, 8, *(4 if i == slot else 0 for i in range(6)))
    levels = np.tile(
        np.array([1, 4, 0, 4], "<u4"), (depth, 1)
    )  # count, offset, vtable, offset to the next count
    levels[:, 2] = start + 8 + 16 * np.arange(depth) - 8
    content = header.ljust(start, b"\0") + levels.tobytes() + bytes(16)
    with fuzz.time_limit(), suppress(ModelFormatError):
        load(content)


def test_a_vtable_outside_the_file_is_refused() -> None:
    content = bytearray(pack(everything()))
    position, _ = place_of(bytes(content), *TENSOR)
    struct.pack_into("<i", content, position, -(2**31))
    assert "vtable of Tensor lies outside" in refusal(bytes(content))


@pytest.mark.parametrize("sizes", [(3, 8), (2, 8), (0xFFFE, 8), (8, 0)])
def test_a_vtable_with_impossible_sizes_is_refused(sizes: tuple[int, int]) -> None:
    content = bytearray(pack(everything()))
    _, vtable = place_of(bytes(content), *TENSOR)
    struct.pack_into("<HH", content, vtable, *sizes)
    assert "impossible sizes" in refusal(bytes(content)) or "outside its table" in refusal(bytes(content))


def test_two_fields_at_the_same_place_are_refused() -> None:
    content = bytearray(pack(everything()))
    _, vtable = place_of(bytes(content), *TENSOR)
    content[vtable + 10 : vtable + 12] = content[vtable + 4 : vtable + 6]
    assert "overlaps another field" in refusal(bytes(content))


def test_overlapping_vectors_cannot_multiply_a_file() -> None:
    """A thousand buffers that each claim everything behind them: a thousand times the file."""
    buffers = [tfl.BufferT(data=tfl.np.zeros(4, tfl.np.uint8)) for _ in range(1000)]
    content = bytearray(pack(tfl.ModelT(buffers=buffers)))
    for index in range(1000):
        data = tfl.Model.GetRootAs(content, 0).Buffers(index)._tab
        at = data.Vector(data.Offset(4)) - 4
        struct.pack_into("<I", content, at, len(content) - at - 4)
    assert "overlap" in refusal(bytes(content))


def test_overlapping_weights_after_the_flatbuffer_cannot_multiply_it_either() -> None:
    content = with_data_after(tfl.ModelT(buffers=[]), *([b"x" * 100] * 50))
    for index in range(50):
        offset = tfl.Model.GetRootAs(content, 0).Buffers(index).Offset()
        content = with_field(content, 2, "Q", len(content) - offset, "Buffers", index)
    assert "overlap" in refusal(content)


def test_two_hundred_bytes_that_claim_four_gigabytes_are_refused() -> None:
    content = with_data_after(tfl.ModelT(buffers=[]), b"small")
    assert len(content) < 200
    assert "claims 4294967296 bytes" in refusal(with_field(content, 2, "Q", 2**32, "Buffers", 0))
    assert "Buffer.offset" in refusal(with_field(content, 1, "Q", 2**64 - 1, "Buffers", 0))


def test_large_custom_options_outside_the_file_are_refused() -> None:
    model = everything()
    content = with_options_after(model, b"options")
    changed = with_field(content, 10, "Q", 8, "Subgraphs", 0, "Operators", 0)
    assert "Operator.large_custom_options_offset: claims 8 bytes" in refusal(changed)


def test_bytes_in_two_places_are_refused() -> None:
    model = tfl.ModelT(buffers=[tfl.BufferT(data=tfl.np.zeros(4, tfl.np.uint8), offset=16, size=4)])
    assert "second place for the bytes" in refusal(pack(model))


def test_a_string_must_be_utf8_and_end_in_zero() -> None:
    content = pack(tfl.ModelT(description="description"))
    assert "not valid UTF-8" in refusal(content.replace(b"descr", b"d\xe4\x00\x00\x00"))
    assert "does not end in a zero byte" in refusal(content.replace(b"ption\0", b"ption!"))


def test_a_field_of_a_newer_schema_is_refused_by_name() -> None:
    builder = tfl.flatbuffers.Builder(64)
    builder.StartObject(12)
    builder.PrependInt32Slot(0, 3, 0)
    builder.PrependInt32Slot(11, 5, 0)
    builder.Finish(builder.EndObject(), file_identifier=b"TFL3")
    message = refusal(bytes(builder.Output()))
    assert message.startswith("Model.slot 11: a field we don't know is present")
    assert "written by a newer schema" in message


def test_an_absent_field_of_a_newer_schema_loses_nothing() -> None:
    builder = tfl.flatbuffers.Builder(64)
    builder.StartObject(12)
    builder.PrependInt32Slot(0, 3, 0)
    builder.Finish(builder.EndObject(), file_identifier=b"TFL3")
    assert read_model(bytes(builder.Output())).root.get("version") == 3


@pytest.mark.parametrize(
    ("slot", "code", "value", "path", "message"),
    [
        (3, "B", 250, ("Subgraphs", 0, "Operators", 0), "BuiltinOptions has no member 250"),
        (11, "B", 250, ("Subgraphs", 0, "Operators", 2), "BuiltinOptions2 has no member 250"),
        (3, "i", 9999, ("OperatorCodes", 0), "operator code 9999 is unknown"),
        (1, "b", 99, TENSOR, "tensor type 99 is unknown"),
    ],
)
def test_codes_of_a_newer_schema_are_refused_by_name(
    slot: int, code: str, value: int, path: tuple[str | int, ...], message: str
) -> None:
    found = refusal(with_field(pack(everything()), slot, code, value, *path))
    assert message in found
    assert "written by a newer schema" in found


def test_a_union_value_without_type_is_refused() -> None:
    changed = with_field(pack(everything()), 3, "B", 0, "Subgraphs", 0, "Operators", 0)
    assert "Operator.builtin_options: has a value but no builtin_options_type" in refusal(changed)


def test_a_union_type_without_value_is_refused() -> None:
    operator = tfl.OperatorT(builtinOptionsType=tfl.BuiltinOptions.ReshapeOptions, inputs=int32s())
    content = pack(tfl.ModelT(subgraphs=[tfl.SubGraphT(operators=[operator])]))
    assert "has the type ReshapeOptions but no value" in refusal(content)


def test_a_truncated_file_is_refused() -> None:
    content = with_data_after(everything(), b"weights" * 20)
    for length in range(0, len(content), 97):
        assert refusal(content[:length])


def test_mutants_read_or_are_refused_and_nothing_else() -> None:
    content = with_data_after(everything(), b"weights" * 9)
    chance = random.Random(7)
    accepted = 0
    for _ in range(1000):
        mutant = bytearray(content)
        for _ in range(chance.choice((1, 1, 2, 8))):
            mutant[chance.randrange(len(mutant))] = chance.choice(
                (0, 1, 0x7F, 0x80, 0xFF, chance.randrange(256))
            )
        try:
            read_model(bytes(mutant))
        except ModelFormatError:
            continue
        accepted += 1
    assert 0 < accepted < 1000
