"""What is written reads back field by field; weights keep their place, their sharing and their alignment."""

import errno
import os
from pathlib import Path
from typing import Any

import flatbuffers
import numpy as np
import pytest
from ai_edge_litert.interpreter import Interpreter
from ai_edge_litert.tools import flatbuffer_utils
from schema_models import (
    assert_same,
    everything,
    int32s,
    names,
    pack,
    tfl,
    unpack,
    with_data_after,
    with_options_after,
)

from edge_opt.base.errors import ModelFormatError
from edge_opt.schema import Data, Table, model_bytes, new_table, read_model, write_model, writer
from edge_opt.schema.table import UNIONS


def stored(root: Table) -> list[Data]:
    return [buffer.get("data") for buffer in root.get("buffers") if buffer.has("data")]


def values(item: Any) -> Any:
    """A table as plain values, to compare what is present in two files."""
    if isinstance(item, Table):
        return (item.name, {name: values(value) for name, value in sorted(item.fields.items())})
    if isinstance(item, list):
        return [values(part) for part in item]
    if isinstance(item, Data):
        return (item.external, bytes(item.view()))
    return (item.dtype.str, item.tolist()) if isinstance(item, np.ndarray) else item


@pytest.fixture
def inside() -> bytes:
    return pack(everything())


@pytest.fixture
def after() -> bytes:
    return with_data_after(everything(), b"first" * 9, b"second", b"third")


@pytest.mark.parametrize("placed", ["inside", "after"])
def test_what_is_written_is_what_was_read(placed: str, request: pytest.FixtureRequest) -> None:
    content = request.getfixturevalue(placed)
    written = model_bytes(read_model(content).root)
    assert values(read_model(written).root) == values(read_model(content).root)
    assert_same(read_model(written).root, unpack(written), written)


def test_the_runtime_tools_read_it_as_they_read_the_original(after: bytes) -> None:
    written = model_bytes(read_model(after).root)
    ours = flatbuffer_utils.read_model_from_bytearray(written)
    theirs = flatbuffer_utils.read_model_from_bytearray(after)
    assert [bytes(buffer.data) for buffer in ours.buffers[1:]] == [
        bytes(buffer.data) for buffer in theirs.buffers[1:]
    ]


def test_large_custom_options_stay_after_the_flatbuffer() -> None:
    written = model_bytes(read_model(with_options_after(everything(), b"large options")).root)
    operator = unpack(written).subgraphs[0].operators[0]
    start = operator.largeCustomOptionsOffset
    assert written[start : start + operator.largeCustomOptionsSize] == b"large options"
    assert operator.customOptions is None


def test_a_file_is_written_as_its_bytes_are(tmp_path: Path, after: bytes) -> None:
    source = tmp_path / "in.tflite"
    source.write_bytes(after)
    heard: list[tuple[int, int]] = []
    with read_model(source) as file:
        root = file.root
        write_model(root, tmp_path / "out.tflite", progress=lambda *step: heard.append(step))
        assert (tmp_path / "out.tflite").read_bytes() == model_bytes(root)
    assert heard[-1][0] == heard[-1][1]
    assert heard == sorted(heard)


def test_the_same_input_gives_the_same_bytes(inside: bytes) -> None:
    once = model_bytes(read_model(inside).root)
    assert once == model_bytes(read_model(inside).root)
    assert once == model_bytes(read_model(once).root)


def test_every_weight_is_aligned_to_sixteen_bytes(inside: bytes, after: bytes) -> None:
    for content in (inside, after):
        assert {
            data.offset % 16 for data in stored(read_model(model_bytes(read_model(content).root)).root)
        } == {0}


def test_every_number_in_the_tables_is_aligned_to_its_size(after: bytes) -> None:
    """The runtime reads them in place; Python's bindings would not mind."""
    written = model_bytes(read_model(after).root)
    model = tfl.Model.GetRootAs(written, 0)
    for index in range(model.BuffersLength()):
        table = model.Buffers(index)._tab
        assert all((table.Pos + table.Offset(slot)) % 8 == 0 for slot in (6, 8) if table.Offset(slot))
    zero_point = model.Subgraphs(0).Tensors(0).Quantization()._tab
    assert zero_point.Vector(zero_point.Offset(10)) % 8 == 0


def test_a_table_of_nothing_but_a_bool_is_aligned_to_its_vtable_offset() -> None:
    root = read_model(pack(everything())).root
    tables = [new_table("BatchMatMulOptions", adj_x=True) for _ in range(4)]
    union = next(code for code, name in UNIONS["BuiltinOptions"].items() if name == "BatchMatMulOptions")
    operators = root.get("subgraphs")[0].get("operators")
    operators[:] = [new_table("Operator", builtin_options_type=union, builtin_options=t) for t in tables]
    graph = tfl.Model.GetRootAs(model_bytes(root), 0).Subgraphs(0)
    assert [graph.Operators(index).BuiltinOptions().Pos % 4 for index in range(4)] == [0] * 4


def test_buffers_that_share_bytes_still_do() -> None:
    root = read_model(with_data_after(everything(), b"shared" * 100)).root
    root.get("buffers").append(new_table("Buffer", data=stored(root)[-1]))
    root.get("buffers").append(new_table("Buffer", data=stored(root)[0]))
    again = stored(read_model(model_bytes(root)).root)
    assert again[-2].offset == again[-3].offset
    assert again[-1] is again[0]


def test_tables_that_are_shared_still_are() -> None:
    parameters = new_table("QuantizationParameters", scale=np.array([0.5], np.float32))
    tensors = [new_table("Tensor", name=name, quantization=parameters) for name in "ab"]
    root = new_table("Model", subgraphs=[new_table("SubGraph", tensors=tensors)])
    first, second = read_model(model_bytes(root)).root.get("subgraphs")[0].get("tensors")
    assert first.get("quantization") is second.get("quantization")


def test_equal_numbers_share_a_vector_and_equal_zeros_of_other_signs_do_not() -> None:
    def tables(last: float) -> Table:
        scales = ([0.5, 0.0], [0.5, last])
        found = [new_table("QuantizationParameters", scale=np.array(s, np.float32)) for s in scales]
        tensors = [new_table("Tensor", quantization=parameters) for parameters in found]
        return new_table("Model", subgraphs=[new_table("SubGraph", tensors=tensors)])

    shared, apart = (model_bytes(tables(last)) for last in (0.0, -0.0))
    assert len(apart) > len(shared)
    (graph,) = read_model(apart).root.fields["subgraphs"]
    first, second = (tensor.fields["quantization"].fields["scale"] for tensor in graph.fields["tensors"])
    assert [np.signbit(first[1]), np.signbit(second[1])] == [False, True]


def test_weights_of_a_file_keep_their_order(tmp_path: Path) -> None:
    payloads = [bytes([index]) * (16 + index) for index in range(40)]
    source = tmp_path / "in.tflite"
    source.write_bytes(with_data_after(tfl.ModelT(buffers=[]), *payloads))
    file = read_model(source)
    file.root.get("buffers").reverse()
    write_model(file.root, tmp_path / "out.tflite")
    again = stored(read_model(tmp_path / "out.tflite").root)
    assert [bytes(data.view()) for data in again] == payloads[::-1]
    assert [data.offset for data in again] == sorted((data.offset for data in again), reverse=True)


def test_dropped_weights_leave_no_hole(tmp_path: Path) -> None:
    source = tmp_path / "in.tflite"
    source.write_bytes(with_data_after(tfl.ModelT(buffers=[]), *([bytes(1000)] * 9)))
    file = read_model(source)
    file.root.set("buffers", file.root.get("buffers")[::4])
    write_model(file.root, tmp_path / "out.tflite")
    assert (tmp_path / "out.tflite").stat().st_size < 4000


def test_new_weights_follow_the_old_ones(inside: bytes, after: bytes) -> None:
    for content, external in ((inside, False), (after, True)):
        root = read_model(content).root
        root.get("buffers").insert(1, new_table("Buffer", data=Data(np.arange(5, dtype=np.int16))))
        again = stored(read_model(model_bytes(root)).root)
        assert (again[0].external, bytes(again[0].view()[:4])) == (external, b"\0\0\1\0")
        assert again[0].offset == max(data.offset for data in again if data.external == external)


def test_a_flatbuffer_over_the_limit_puts_its_weights_after_it(
    inside: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = len(model_bytes(read_model(inside).root))
    monkeypatch.setattr(writer, "MAX_FLATBUFFER_SIZE", tables - 1)
    written = model_bytes(read_model(inside).root)
    assert all(data.external for data in stored(read_model(written).root))
    assert_same(read_model(written).root, unpack(written), written)


def test_tables_over_the_limit_are_refused(inside: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    root = read_model(inside).root
    monkeypatch.setattr(flatbuffers.Builder, "MAX_BUFFER_SIZE", 1024)
    with pytest.raises(ModelFormatError, match="tables take over 2 GB"):
        model_bytes(root)


@pytest.mark.parametrize("code", [errno.EXDEV, errno.EOPNOTSUPP, errno.ENOTTY, errno.EINVAL, None])
def test_it_copies_quietly_where_the_kernel_cannot(
    tmp_path: Path, after: bytes, monkeypatch: pytest.MonkeyPatch, code: int | None
) -> None:
    def refuse(*_: Any) -> int:
        if code is None:
            return 0
        raise OSError(code, "not between these two")

    monkeypatch.setattr(os, "copy_file_range", refuse)
    source = tmp_path / "in.tflite"
    source.write_bytes(after)
    file = read_model(source)
    write_model(file.root, tmp_path / "out.tflite")
    assert (tmp_path / "out.tflite").read_bytes() == model_bytes(file.root)


def test_an_input_that_was_changed_since_is_not_copied(tmp_path: Path, after: bytes) -> None:
    source = tmp_path / "in.tflite"
    source.write_bytes(after)
    file = read_model(source)
    os.utime(source, ns=(1, 1))
    with pytest.raises(ModelFormatError, match="was changed"):
        write_model(file.root, tmp_path / "out.tflite")
    os.truncate(source, len(after) - 8)
    with pytest.raises(ModelFormatError, match="was shortened while it was in use"):
        write_model(file.root, tmp_path / "out.tflite")
    assert names(tmp_path) == ["in.tflite"]


@pytest.mark.parametrize(
    ("table", "fields", "message"),
    [
        ("Tensor", {"type": 300}, "Tensor.type: holds 300, which is not a int8"),
        ("Tensor", {"buffer": -1}, "Tensor.buffer: holds -1, which is not a uint32"),
        ("Tensor", {"shape": np.array([2**40])}, "does not fit int32"),
        ("Tensor", {"shape": int32s(1).reshape(1, 1)}, "not a vector of int32"),
        ("Tensor", {"name": 5}, "Tensor.name: holds 5, which is not a text"),
        ("Tensor", {"name": "\ud800"}, "which is not a text"),
        ("Tensor", {"quantization": new_table("Tensor")}, "not a table of type QuantizationParameters"),
        ("Operator", {"builtin_options": "x"}, "set both"),
        ("Tensor", {"shap": 1}, "Tensor.shap: is not a field of this table"),
    ],
)
def test_a_value_that_the_field_cannot_hold_is_refused(
    table: str, fields: dict[str, Any], message: str
) -> None:
    made = new_table(table)
    made.fields.update(fields)
    root = new_table("Model", subgraphs=[new_table("SubGraph", **{f"{table.lower()}s": [made]})])
    with pytest.raises(ModelFormatError) as caught:
        model_bytes(root)
    assert message in str(caught.value)


def test_a_buffer_holds_data_and_nothing_else() -> None:
    root = new_table("Model", buffers=[new_table("Buffer", data=np.zeros(3, np.uint8))])
    with pytest.raises(ModelFormatError, match="not Data"):
        model_bytes(root)


def test_the_interpreter_runs_what_was_written_from_nothing() -> None:
    tensors = [
        new_table("Tensor", name="x", shape=[2], buffer=0, type=0),
        new_table("Tensor", name="c", shape=[2], buffer=1, type=0),
        new_table("Tensor", name="y", shape=[2], buffer=0, type=0),
    ]
    add = new_table(
        "Operator", opcode_index=0, inputs=[0, 1], outputs=[2], builtin_options=new_table("AddOptions")
    )
    graph = new_table("SubGraph", tensors=tensors, inputs=[0], outputs=[2], operators=[add], name="main")
    constant = new_table("Buffer", data=Data(np.array([10, 20], np.float32)))
    root = new_table(
        "Model",
        version=3,
        operator_codes=[new_table("OperatorCode", builtin_code=0, version=1)],
        subgraphs=[graph],
        buffers=[new_table("Buffer"), constant],
    )
    interpreter = Interpreter(model_content=model_bytes(root))
    interpreter.allocate_tensors()
    interpreter.set_tensor(0, np.array([1, 2], np.float32))
    interpreter.invoke()
    assert interpreter.get_tensor(2).tolist() == [11, 22]
