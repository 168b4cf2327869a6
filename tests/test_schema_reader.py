"""Reading gives what TFLite's own bindings give, keeps what they lose, and leaves weights in the file."""

import os
from pathlib import Path

import numpy as np
import pytest
from schema_models import (
    assert_same,
    everything,
    int32s,
    pack,
    tfl,
    unpack,
    with_data_after,
    with_options_after,
)

from edge_opt.base.errors import ModelFormatError
from edge_opt.schema import Data, read_model


def test_every_field_is_what_the_bindings_read() -> None:
    content = pack(everything())
    assert_same(read_model(content).root, unpack(content), content)


def test_every_field_is_what_the_bindings_read_when_weights_follow_the_flatbuffer() -> None:
    content = with_data_after(everything(), b"first" * 9, b"second")
    assert_same(read_model(content).root, unpack(content), content)


def test_a_file_reads_as_its_bytes_do(tmp_path: Path) -> None:
    content = pack(everything())
    path = tmp_path / "model.tflite"
    path.write_bytes(content)
    with read_model(path) as file:
        assert_same(file.root, unpack(content), content)
        assert (file.path, file.size, file.flatbuffer_size) == (path, len(content), len(content))


def test_default_values_that_are_stored_are_told_from_absent_ones() -> None:
    builder = tfl.flatbuffers.Builder(64)
    builder.ForceDefaults(True)
    builder.Finish(tfl.ModelT(version=0).Pack(builder), file_identifier=b"TFL3")
    assert read_model(bytes(builder.Output())).root.has("version")
    assert not read_model(pack(tfl.ModelT(version=0))).root.has("version")


def test_empty_vectors_are_told_from_absent_ones() -> None:
    tensors = read_model(pack(everything())).root.get("subgraphs")[0].get("tensors")
    by_name = {tensor.get("name"): tensor for tensor in tensors}
    assert by_name["scalar"].get("shape").shape == (0,)
    assert not by_name["вариант"].has("shape")


def test_weights_are_regions_of_the_file_until_somebody_looks(tmp_path: Path) -> None:
    path = tmp_path / "model.tflite"
    path.write_bytes(with_data_after(everything(), b"weights"))
    with read_model(path) as file:
        inside, after = file.root.get("buffers")[1].get("data"), file.root.get("buffers")[-1].get("data")
        assert (inside.length, inside.external) == (40, False)
        assert (after.length, after.external) == (7, True)
        assert file.flatbuffer_size == after.offset
        assert bytes(after.view()) == b"weights"
        assert not after.view().flags.writeable


def test_an_offset_of_one_is_a_placeholder_as_in_the_runtime() -> None:
    buffer = read_model(pack(everything())).root.get("buffers")[4]
    assert buffer.fields == {"offset": 1, "size": 1}


def test_any_other_offset_is_a_place_in_the_file() -> None:
    model = everything()
    model.buffers[4].offset = 2
    data = read_model(pack(model)).root.get("buffers")[4].get("data")
    assert (data.offset, data.length, data.external) == (2, 1, True)


def test_large_custom_options_are_data() -> None:
    model = everything()
    content = with_options_after(model, b"large options")
    options = read_model(content).root.get("subgraphs")[0].get("operators")[0].get("custom_options")
    assert isinstance(options, Data)
    assert options.external
    assert bytes(options.view()) == b"large options"


def test_shared_tables_and_vectors_are_the_same_object() -> None:
    shared = tfl.TensorT(name="same", shape=int32s(1))
    content = bytearray(pack(tfl.ModelT(subgraphs=[tfl.SubGraphT(tensors=[shared, shared])])))
    tensors = tfl.Model.GetRootAs(content, 0).Subgraphs(0)._tab
    slot = tensors.Vector(tensors.Offset(4))
    # Both entries count from themselves, so the first is four more than the second.
    second = int.from_bytes(content[slot + 4 : slot + 8], "little")
    content[slot : slot + 4] = (second + 4).to_bytes(4, "little")
    first, again = read_model(bytes(content)).root.get("subgraphs")[0].get("tensors")
    assert first is again


def test_closing_gives_the_file_back_but_arrays_stay_valid(tmp_path: Path) -> None:
    path = tmp_path / "model.tflite"
    path.write_bytes(pack(everything()))
    file = read_model(path)
    descriptor, data = file.source.fd, file.root.get("buffers")[1].get("data")
    view = data.view()
    file.close()
    file.close()
    assert descriptor is not None
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
    assert view.tolist() == list(range(40))
    with pytest.raises(ModelFormatError, match="was closed"):
        data.view()


def test_vectors_are_read_only_and_little_endian() -> None:
    tensor = read_model(pack(everything())).root.get("subgraphs")[0].get("tensors")[0]
    assert tensor.get("shape").dtype == np.dtype("<i4")
    with pytest.raises(ValueError, match="read-only"):
        tensor.get("shape")[0] = 5


def test_a_file_that_changes_while_it_is_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from edge_opt.schema import reader

    path = tmp_path / "model.tflite"
    path.write_bytes(pack(everything()))
    read = reader.Reader.model

    def interrupted(self: reader.Reader) -> reader.ModelFile:
        path.write_bytes(path.read_bytes() + b"more")
        return read(self)

    monkeypatch.setattr(reader.Reader, "model", interrupted)
    with pytest.raises(ModelFormatError, match="was changed"):
        read_model(path)
