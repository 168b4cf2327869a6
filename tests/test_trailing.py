"""What stands behind a model and no table names, as the zip archive that TFLite Metadata appends, is kept."""

import io
import zipfile
from pathlib import Path

import pytest
from ai_edge_litert.interpreter import Interpreter

from edge_opt import convert, testdata
from edge_opt.ir import load
from edge_opt.schema import model_bytes, read_model

DEMO = Path(testdata.__file__).parent / "demo_gemma3.tflite"
LABELS = b"cat\ndog\n" * 40


def appended(model: bytes) -> bytes:
    """As TFLite Metadata does it: positions in the archive count from the file's begin."""
    file = io.BytesIO(model)
    with zipfile.ZipFile(file, "a") as archive:
        archive.writestr("labels.txt", LABELS)
    return file.getvalue()


def joined(model: bytes) -> bytes:
    """As `cat` does it: they count from the archive's own begin."""
    return model + appended(b"")


def labels(content: bytes) -> bytes:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        return archive.read("labels.txt")


def directory_distance(content: bytes) -> int:
    """How far behind its recorded place the directory lies; readers other than Python's refuse it in front of that."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        recorded = int.from_bytes(content[-6:-2], "little")
        return archive.start_dir - recorded


@pytest.mark.parametrize("attach", [appended, joined])
@pytest.mark.parametrize("extract", [None, "decode"])
def test_an_archive_behind_the_model_opens_again_after_the_conversion(
    tmp_path: Path, attach: object, extract: str | None
) -> None:
    source, output = tmp_path / "in.tflite", tmp_path / "out.tflite"
    assert callable(attach)
    source.write_bytes(attach(DEMO.read_bytes()))
    assert convert(source, output, verify="none", extract_signature=extract).converted
    written = output.read_bytes()
    assert labels(written) == LABELS
    assert directory_distance(written) >= 0
    Interpreter(model_path=str(output)).allocate_tensors()


def test_a_model_that_stays_as_it_is_keeps_what_stands_behind_it(tmp_path: Path) -> None:
    output = tmp_path / "out.tflite"
    convert(appended(DEMO.read_bytes()), output, passes=["tile_rows"])
    assert labels(output.read_bytes()) == LABELS


def test_bytes_of_any_kind_are_kept_and_once_written_stay_as_they_are() -> None:
    once = model_bytes(read_model(DEMO.read_bytes() + b"\0" * 100 + b"signature").root)
    assert once.endswith(b"\0" * 100 + b"signature")
    assert model_bytes(read_model(once).root) == once


def test_zeros_up_to_a_boundary_are_no_content() -> None:
    model = read_model(DEMO.read_bytes() + b"\0" * 32)
    assert model.root.trailing is None
    assert model_bytes(model.root) == model_bytes(read_model(DEMO).root)
    assert model.flatbuffer_size == DEMO.stat().st_size


def test_weights_behind_the_flatbuffer_are_no_trailing_bytes() -> None:
    quantized = DEMO.with_name("demo_gemma3_a16w8.tflite").read_bytes()
    assert read_model(quantized).root.trailing is None
    assert load(appended(quantized)).signatures
    assert labels(model_bytes(read_model(appended(quantized)).root)) == LABELS
