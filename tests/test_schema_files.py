"""Reading gives what TFLite's own bindings give; what is written reads back field by field, and weights keep their
place, their sharing and their alignment."""

import os
import zipfile
from collections.abc import Callable
from functools import partial
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import Any

import flatbuffers
import numpy as np
import pytest
import schema_models
from ai_edge_litert.interpreter import Interpreter
from cli_runs import DEMO, QUANTIZED, Patch
from make_tables import generate
from schema_models import as_bindings, everything, names, pack, plain, tfl, unpack, values

from edge_opt import schema
from edge_opt.base.errors import ModelFormatError
from edge_opt.conversion import convert
from edge_opt.schema import TABLES, UNIONS, Data, Table, model_bytes, new_table, read_model
from edge_opt.schema.data import Source
from edge_opt.schema.table import TABLES_FILE
from edge_opt.schema.writer import lay_out, write_pieces

INSIDE = pack(everything())
AFTER = schema_models.with_data_after(everything(), b"first" * 9, b"second", b"third")
OPTIONS_AFTER = schema_models.with_options_after(everything(), b"large options")
LAYOUT = {4096: bytes(64), 16: b"seven...", 32: bytes(33), 256: bytes(12), 64: bytes(200)}


def stored(root: Table) -> list[Data]:
    return [buffer.fields["data"] for buffer in root.get("buffers") if "data" in buffer.fields]


def written(root: Table) -> Table:
    return read_model(model_bytes(root))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "in.tflite"
    path.write_bytes(AFTER)
    return path


def test_tables_agree_with_the_installed_bindings() -> None:
    """Where the schema is newer, write them again with `python testdata/make_tables.py`."""
    assert TABLES_FILE.read_text(encoding="utf-8") == generate()


def test_no_table_nests_in_itself_so_the_schema_bounds_the_depth() -> None:
    def depth(name: str, above: tuple[str, ...]) -> int:
        assert name not in above
        below = [0]
        for field in TABLES[name].fields:
            children = UNIONS.get(field.element, {0: field.element}).values()
            below += [depth(child, (*above, name)) for child in children if child in TABLES]
        return 1 + max(below)

    assert depth("Model", ()) <= 8
    assert depth("LiteRTLMMetaData", ()) == 5


def test_present_with_the_default_is_not_absent_and_a_union_takes_its_type_along() -> None:
    tensor = new_table("Tensor", buffer=0, name="x", shape=[1, 2])
    assert (tensor.get("is_variable"), tensor.get("quantization")) == (False, None)
    assert ("buffer" in tensor.fields, "is_variable" in tensor.fields) == (True, False)
    tensor.copy().set("name", "y")
    assert tensor.get("name") == "x"
    tensor.set("name", None)
    assert "name" not in tensor.fields
    operator = new_table("Operator", builtin_options=new_table("ReshapeOptions", new_shape=[2, 3]))
    assert operator.get("builtin_options_type") == 17
    operator.set("builtin_options", None)
    assert operator.fields == {}
    misuses = partial(tensor.get, "shap"), partial(tensor.set, "shap", 1)
    for misuse in (*misuses, partial(operator.set, "builtin_options", tensor)):
        with pytest.raises(KeyError):
            misuse()


def test_arrays_are_little_endian_and_read_only() -> None:
    shape = new_table("Tensor", shape=[1, 2]).get("shape")
    read = read_model(INSIDE).get("subgraphs")[0].get("tensors")[0].get("shape")
    assert schema.vector("bool", [True]).dtype == np.bool_
    for array in (shape, read, Data(b"12").view()):
        assert array.dtype.newbyteorder("<") == array.dtype
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 3


@pytest.mark.parametrize(
    "content", [INSIDE, AFTER, OPTIONS_AFTER], ids=["inside", "after", "options after"]
)
def test_every_field_is_what_the_bindings_read_also_written_again(
    content: bytes, tmp_path: Path
) -> None:
    (tmp_path / "model.tflite").write_bytes(content)
    root = read_model(tmp_path / "model.tflite")
    assert as_bindings(root) == plain(unpack(content))
    again = model_bytes(root)
    assert values(read_model(again)) == values(read_model(content))
    assert as_bindings(read_model(again)) == plain(unpack(again))
    assert model_bytes(read_model(again)) == again


def test_stored_defaults_and_empty_vectors_are_told_from_absent_ones() -> None:
    builder = flatbuffers.Builder(64)
    builder.ForceDefaults(True)
    builder.Finish(tfl.ModelT(version=0).Pack(builder), file_identifier=b"TFL3")
    assert "version" in read_model(bytes(builder.Output())).fields
    assert "version" not in read_model(pack(tfl.ModelT(version=0))).fields
    tensors = read_model(INSIDE).get("subgraphs")[0].get("tensors")
    by_name = {tensor.get("name"): tensor for tensor in tensors}
    assert by_name["scalar"].get("shape").shape == (0,)
    assert "shape" not in by_name["вариант"].fields


def test_weights_are_regions_of_the_file_until_somebody_looks(file: Path) -> None:
    buffers = read_model(file).get("buffers")
    inside, after = buffers[1].get("data"), buffers[-1].get("data")
    assert (inside.length, inside.external, after.length, after.external) == (40, False, 5, True)
    descriptor, view = inside.source.fd, inside.view()
    inside.source.close()
    inside.source.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
    assert view.tolist() == list(range(40))
    with pytest.raises(ModelFormatError, match="was closed"):
        after.view()


def test_an_offset_of_one_is_a_placeholder_as_in_the_runtime_and_any_other_a_place() -> None:
    assert read_model(INSIDE).get("buffers")[4].fields == {"offset": 1, "size": 1}
    model = everything()
    model.buffers[4].offset = 2
    data = read_model(pack(model)).get("buffers")[4].get("data")
    assert (data.offset, data.length, data.external) == (2, 1, True)


def test_what_is_shared_is_one_object_and_stays_shared() -> None:
    parameters = new_table("QuantizationParameters", scale=np.array([0.5], np.float32))
    tensors = [new_table("Tensor", name=name, quantization=parameters) for name in "ab"]
    root = new_table("Model", subgraphs=[new_table("SubGraph", tensors=tensors)])
    first, second = written(root).get("subgraphs")[0].get("tensors")
    assert first.get("quantization") is second.get("quantization")
    root = read_model(AFTER)
    root.get("buffers").extend(new_table("Buffer", data=stored(root)[index]) for index in (-1, 0))
    again = stored(written(root))
    assert again[-2].offset == again[-3].offset
    assert again[-1] is again[0]


def test_equal_numbers_share_a_vector_and_equal_zeros_of_other_signs_do_not() -> None:
    sizes = []
    for last in (0.0, -0.0):
        scales = [schema.vector("float32", [0.5, 0.0]), schema.vector("float32", [0.5, last])]
        parameters = [new_table("QuantizationParameters", scale=scale) for scale in scales]
        tensors = [new_table("Tensor", quantization=each) for each in parameters]
        content = model_bytes(
            new_table("Model", subgraphs=[new_table("SubGraph", tensors=tensors)])
        )
        tensors = read_model(content).get("subgraphs")[0].get("tensors")
        read = tensors[1].get("quantization").get("scale")
        assert np.signbit(read[1]) == np.signbit(last)
        sizes.append(len(content))
    assert sizes[0] < sizes[1]


@pytest.mark.parametrize(
    "content",
    [
        schema_models.with_data_after(everything(), *LAYOUT.values(), alignments=list(LAYOUT)),
        INSIDE,
        DEMO.read_bytes(),
        QUANTIZED.read_bytes(),
    ],
    ids=["after", "inside", "demo", "quantized demo"],
)
def test_what_nobody_changed_stays_as_it_was(tmp_path: Path, content: bytes) -> None:
    """In the same order, at least as well aligned, nothing behind them; and converted again, the same bytes."""
    paths = [tmp_path / name for name in ("in.tflite", "out.tflite", "again.tflite")]
    paths[0].write_bytes(content)
    for source, target in pairwise(paths):
        write_pieces(lay_out(read_model(source)), target, ".tflite")
    old, new = read_model(paths[0]), read_model(paths[1])
    assert values(old) == values(new)
    before, after = (sorted(stored(root), key=lambda data: data.offset) for root in (old, new))
    for one, other in zip(before, after, strict=True):
        assert np.array_equal(one.view(), other.view())
        assert other.offset % 16 == 0
        assert other.offset % min(one.offset & -one.offset, 4096) == 0
    assert new.trailing is None
    assert paths[2].read_bytes() == paths[1].read_bytes()


def test_every_number_in_the_tables_is_aligned_to_its_size() -> None:
    """The runtime reads them in place; Python's bindings would not mind."""
    again = model_bytes(read_model(AFTER))
    model = tfl.Model.GetRootAs(again, 0)
    for index in range(model.BuffersLength()):
        table = model.Buffers(index)._tab
        assert all(
            (table.Pos + table.Offset(slot)) % 8 == 0 for slot in (6, 8) if table.Offset(slot)
        )
    zero_point = model.Subgraphs(0).Tensors(0).Quantization()._tab
    assert zero_point.Vector(zero_point.Offset(10)) % 8 == 0


def test_dropped_weights_leave_no_hole_and_new_ones_follow_the_old() -> None:
    root = read_model(schema_models.with_data_after(tfl.ModelT(buffers=[]), *([bytes(1000)] * 9)))
    root.set("buffers", root.get("buffers")[::4])
    assert len(model_bytes(root)) < 4000
    for content, external in ((INSIDE, False), (AFTER, True)):
        root = read_model(content)
        root.get("buffers").insert(
            1, new_table("Buffer", data=Data(np.arange(5, dtype=np.int16).tobytes()))
        )
        again = stored(written(root))
        assert (again[0].external, bytes(again[0].view()[:4])) == (external, b"\0\0\1\0")
        assert again[0].offset == max(data.offset for data in again if data.external == external)


def test_two_parts_of_a_file_that_begin_together_are_two_weights() -> None:
    parts = [Data(Source(bytes(range(32))), 8, length, external=False) for length in (4, 8)]
    parts[1].source = parts[0].source
    root = new_table("Model", buffers=[new_table("Buffer", data=part) for part in parts])
    assert [bytes(data.view()) for data in stored(written(root))] == [
        bytes(part.view()) for part in parts
    ]


def test_a_flatbuffer_over_the_limit_puts_its_weights_after_it(monkeypatch: Patch) -> None:
    root = read_model(INSIDE)
    monkeypatch.setattr(schema.writer, "MAX_FLATBUFFER_SIZE", len(model_bytes(root)) - 1)
    again = model_bytes(root)
    assert all(data.external for data in stored(read_model(again)))
    assert as_bindings(read_model(again)) == plain(unpack(again))
    root.set("description", "long" * 1024)
    monkeypatch.setattr(flatbuffers.Builder, "MAX_BUFFER_SIZE", 1024)
    with pytest.raises(ModelFormatError, match="tables take over 2 GB"):
        model_bytes(root)


def test_a_file_is_its_bytes_and_progress_counts_them(file: Path) -> None:
    root, heard = read_model(file), list[tuple[int, int]]()
    output = file.with_name("out.tflite")
    write_pieces(lay_out(root), output, ".tflite", progress=lambda *step: heard.append(step))
    assert output.read_bytes() == model_bytes(root)
    assert heard == sorted(heard)
    assert heard[-1][0] == heard[-1][1]


@pytest.mark.parametrize("length", [0, 5, (2 << 20) + 3])
def test_weights_are_copied_through_one_buffer(
    tmp_path: Path, monkeypatch: Patch, length: int
) -> None:
    """The fresh pages of a new one for each step took most of the time."""
    content = np.random.default_rng(0).bytes(length + 7)
    source, target, write = tmp_path / "in", tmp_path / "out", os.pwrite
    source.write_bytes(content)
    target.touch()
    buffers = list[object]()

    def recorded(descriptor: int, step: memoryview, at: int) -> int:
        buffers.append(step.obj)
        return write(descriptor, step[:300_000], at)

    monkeypatch.setattr(os, "pwrite", recorded)
    with target.open("r+b") as file:
        Data(Source.open(source), 7, length).write(file.fileno(), 2)
    assert target.read_bytes() == (bytes(2) + content[7:] if length else b"")
    assert len({id(buffer) for buffer in buffers}) == min(length, 1)
    assert len(buffers) >= length / 300_000


@pytest.mark.parametrize("change", [
    lambda path: os.truncate(path, 100), lambda path: path.open("ab").write(b"x"),
    lambda path: os.utime(path, ns=(1, 1)),
])  # fmt: skip
def test_a_changing_file_is_refused(
    file: Path, monkeypatch: Patch, change: Callable[[Path], None]
) -> None:
    """With the file mapped into memory, looking behind its end would be the end of the process (SIGBUS)."""
    read, root = schema.reader.Reader.root, read_model(file)

    def interrupted(self: schema.reader.Reader, table: str) -> Table:
        change(file)
        return read(self, table)

    monkeypatch.setattr(schema.reader.Reader, "root", interrupted)
    output = file.with_name("out.tflite")
    for use in (lambda: read_model(file), lambda: write_pieces(lay_out(root), output, ".tflite")):
        with pytest.raises(ModelFormatError, match=r"was (shortened|changed) while it was in use"):
            use()
    with pytest.raises(ModelFormatError, match="was shortened"):
        Source.open(file).read(0, 1 << 20)
    assert names(file.parent) == ["in.tflite"]


@pytest.mark.parametrize(
    ("table", "fields", "message"),
    [
        ("Tensor", {"type": 300}, "Tensor.type: holds 300, which does not fit int8"),
        ("Tensor", {"buffer": -1}, "Tensor.buffer: holds -1, which does not fit uint32"),
        ("Tensor", {"shape": np.array([2**40])}, "expected a vector of int32"),
        ("Tensor", {"shape": schema_models.int32s(1).reshape(1, 1)}, "expected a vector of int32"),
        ("Tensor", {"shape": [1]}, "Tensor.shape: holds [1], which does not fit [int32]"),
        ("Tensor", {"name": 5}, "Tensor.name: holds 5, which does not fit string"),
        ("Tensor", {"name": "\ud800"}, "does not fit string"),
        ("Tensor", {"quantization": new_table("Tensor")}, "expected QuantizationParameters"),
        ("Operator", {"builtin_options": "x"}, "expected its type beside it"),
        (
            "Operator",
            {"builtin_options": new_table("Conv2DOptions")},
            "expected its type beside it",
        ),
        ("Tensor", {"shap": 1}, "Tensor.shap: is not a field of this table"),
    ],
)
def test_a_value_a_field_cannot_hold_is_refused(
    table: str, fields: dict[str, Any], message: str
) -> None:
    made = new_table(table)
    made.fields.update(fields)
    root = new_table("Model", subgraphs=[new_table("SubGraph", **{f"{table.lower()}s": [made]})])
    with pytest.raises(ModelFormatError) as caught:
        model_bytes(root)
    assert message in str(caught.value)
    with pytest.raises(ModelFormatError, match="expected Data"):
        model_bytes(new_table("Model", buffers=[new_table("Buffer", data=np.zeros(3, np.uint8))]))


def archive(model: bytes) -> bytes:
    """The model with an archive behind it, whose positions count from the file's begin."""
    file = BytesIO(model)
    with zipfile.ZipFile(file, "a") as made:
        made.writestr("labels.txt", b"cat\ndog\n")
    return file.getvalue()


@pytest.mark.parametrize(
    "content",
    [archive(DEMO.read_bytes()), DEMO.read_bytes() + archive(b""), archive(QUANTIZED.read_bytes())],
    ids=["appended", "joined", "behind weights"],
)
def test_an_archive_behind_the_model_opens_again_after_the_conversion(
    tmp_path: Path, content: bytes
) -> None:
    output = tmp_path / "out.tflite"
    assert convert(content, output, verify="none").converted
    again = output.read_bytes()
    with zipfile.ZipFile(BytesIO(again)) as opened:
        assert opened.read("labels.txt") == b"cat\ndog\n"
        # Readers other than Python's refuse a directory in front of its recorded place.
        assert opened.start_dir >= int.from_bytes(again[-6:-2], "little")
    Interpreter(model_path=str(output)).allocate_tensors()


def test_bytes_of_any_kind_are_kept_but_zeros_up_to_a_boundary_are_not_content() -> None:
    once = model_bytes(read_model(DEMO.read_bytes() + b"\0" * 100 + b"signature"))
    assert once.endswith(b"\0" * 100 + b"signature")
    assert model_bytes(read_model(once)) == once
    assert read_model(QUANTIZED).trailing is None
    padded = read_model(DEMO.read_bytes() + b"\0" * 32)
    assert padded.trailing is None
