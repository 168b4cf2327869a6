"""Where a conversion changes nothing, tables and weights come out as they were: order, padding, place and alignment."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_runs import DEMO, QUANTIZED

from edge_opt.conversion import convert
from edge_opt.schema import Data, ModelFile, Table, model_bytes, new_table, read_model, write_model

# (bytes, alignment, bytes of padding more than that asks for) of weights after the flatbuffer, in file order.
LAYOUT = (
    (64, 4096, 0),
    (7, 16, 0),
    (1, 16, 48),
    (200, 64, 0),
    (33, 32, 16),
    (5000, 4096, 0),
    (0, 16, 0),
    (12, 256, 0),
)
LARGE = (1 << 20, 4096, 0)


def same(a: Any, b: Any) -> bool:
    """Equal tables: the same fields present with the same values, weights byte for byte."""
    if isinstance(a, Table) and isinstance(b, Table):
        names = a.fields.keys()
        return (a.spec.name, names) == (b.spec.name, b.fields.keys()) and all(
            same(a.fields[name], b.fields[name]) for name in names
        )
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same, a, b))
    one, other = (value.view() if isinstance(value, Data) else value for value in (a, b))
    return type(a) is type(b) and bool(np.array_equal(one, other))


def tables(places: list[tuple[int, int]]) -> Any:
    """A model of one ADD, and constants that lie at these places; buffers stand in the table in reverse order."""
    constants = [
        new_table("Tensor", name=f"w{i}", shape=[size], type=3, buffer=len(places) - i)
        for i, (_, size) in enumerate(places)
    ]
    ends = [new_table("Tensor", name=name, shape=[1], type=0) for name in "xy"]
    add = new_table("Operator", inputs=[0, 0], outputs=[1])
    graph = new_table(
        "SubGraph", tensors=[*ends, *constants], inputs=[0], outputs=[1], operators=[add], name="main"
    )
    buffers = [new_table("Buffer", offset=offset, size=size) for offset, size in reversed(places)]
    codes = [new_table("OperatorCode", builtin_code=0)]
    fields = {"subgraphs": [graph], "buffers": [new_table("Buffer"), *buffers], "operator_codes": codes}
    return new_table("Model", version=3, description="odd", **fields)


def weights_after(layout: tuple[tuple[int, int, int], ...]) -> bytes:
    """The model with its weights after the flatbuffer, and padding that is not zero."""
    end = len(model_bytes(tables([(2, size) for size, _, _ in layout])))
    places = []
    for size, alignment, more in layout:
        offset = end + more + -(end + more) % alignment
        places.append((offset, size))
        end = offset + size
    content = bytearray(model_bytes(tables(places)))
    numbers = np.random.default_rng(1)
    for offset, size in places:
        content += b"\xee" * (offset - len(content)) + numbers.bytes(size)
    return bytes(content)


def weights_inside() -> bytes:
    """The same with the weights in the flatbuffer."""
    root = read_model(weights_after(LAYOUT)).root
    for buffer in root.get("buffers"):
        if "data" in buffer.fields:
            buffer.fields["data"] = Data(buffer.get("data").view(), external=False)
    return model_bytes(root)


def stored(file: ModelFile) -> list[Data]:
    """The weights in file order."""
    found = {
        id(data): data for buffer in file.root.get("buffers") if (data := buffer.get("data")) is not None
    }
    return sorted((data for data in found.values() if data.length), key=lambda data: data.offset)


def alignment(offset: int) -> int:
    return min(offset & -offset, 4096)


@pytest.mark.parametrize(
    "content",
    [weights_after(LAYOUT), weights_after((*LAYOUT, LARGE, *LAYOUT)), weights_inside(), DEMO, QUANTIZED],
    ids=["after", "after, one large", "inside", "demo", "quantized demo"],
)
def test_what_nobody_changed_stays_as_it_was(tmp_path: Path, content: bytes | Path) -> None:
    source, target = tmp_path / "in.tflite", tmp_path / "out.tflite"
    source.write_bytes(content if isinstance(content, bytes) else content.read_bytes())
    convert(source, target, verify="none", passes=() if isinstance(content, Path) else None)
    old, new = read_model(source), read_model(target)
    assert same(old.root, new.root)
    before, after = stored(old), stored(new)
    assert [data.external for data in before] == [data.external for data in after]
    assert new.size == max(new.flatbuffer_size, after[-1].offset + after[-1].length), (
        "and nothing behind them"
    )
    for one, other in zip(before, after, strict=True):
        assert np.array_equal(one.view(), other.view()), "in the same order"
        assert alignment(other.offset) >= alignment(one.offset)


def test_a_weight_keeps_its_alignment_where_the_one_before_it_has_less(tmp_path: Path) -> None:
    layout = ((64, 16, 16), (100, 64, 0))
    source, target = tmp_path / "in.tflite", tmp_path / "out.tflite"
    source.write_bytes(weights_after(layout))
    root = read_model(source).root
    root.get("subgraphs")[0].fields["name"] = "another length of the tables"
    for longer in range(4):
        root.fields["description"] = "x" * 16 * longer
        write_model(root, target, overwrite=True)
        assert stored(read_model(target))[-1].offset % 64 == 0


def test_converting_what_was_converted_gives_the_same_bytes(tmp_path: Path) -> None:
    first, second = tmp_path / "first.tflite", tmp_path / "second.tflite"
    (tmp_path / "in.tflite").write_bytes(weights_after(LAYOUT))
    convert(tmp_path / "in.tflite", first, verify="none")
    convert(first, second, verify="none")
    assert first.read_bytes() == second.read_bytes()
