"""The `file` section of the text form: fields of a model's tables that its graphs' text does not give.

    file {
      place subgraphs[0].tensors of 5: [0, 3, 4, 1:3]
      description: 'MLIR Converted.'
      subgraphs[0].tensors[1:3].name: each ['arith.constant', 'arith.constant1']
      subgraphs[0].tensors[4].quantization: same subgraphs[0].tensors[3].quantization
      buffers[1:3].at: each [1024, 1152]
    }

`place` says where the tensors or buffers of the text are in the file's list; those at one place become one. Then paths
of schema.fbs have values: `none` is an absent field, `{}` a new table, `same` the same object as elsewhere, `base64`
bytes or many numbers. `at` is a position in the flatbuffer, `after` one behind it; a copy keeps order and alignment of
weights, which both depend on it. `digest` stands for bytes that are not in the text.
"""

import base64
import json
from collections.abc import Hashable, Iterator, Sequence
from hashlib import sha256
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np

from edge_opt.ir.dtypes import DType
from edge_opt.ir.graph import Buffer, OperatorCode, Subgraph, Tensor
from edge_opt.ir.model import Model
from edge_opt.schema.data import Data, Source
from edge_opt.schema.table import NUMPY_TYPES, UNIONS, FieldSpec, Table, new_table, vector
from edge_opt.schema.writer import lay_out

MOST_BYTES: Final = 1 << 30
"""Constants of a text may take this many bytes, expanded, and reach this far in the file."""

_MOST_LISTED: Final = 64
_STORED: Final = {"Buffer": "data", "Operator": "custom_options", "Model": "trailing"}
# Fields in the text that the tables do not have.
_POSITIONS: Final = {
    name: FieldSpec("", name, -1, "uint64", None, "scalar", "uint64", "Q", 8)
    for name in ("at", "after")
}
_TRAILING: Final = FieldSpec("Model", "trailing", -1, "[uint8]", None, "scalars", "uint8", "I", 4)

Path = tuple[str | int, ...]
_Item = TypeVar("_Item", Tensor, Buffer, OperatorCode)


class Omitted(Data):
    """Stands for `size` bytes that are not in the text, or not in its graphs; `line` says where they are left out."""

    __slots__ = ("line",)

    def __init__(self, line: int, size: int = 0) -> None:
        super().__init__(b"", 0, size)
        self.line = line


# Places


def place_tensors(graph: Subgraph, places: Sequence[int], count: int) -> None:
    """Move the listed tensors to these places of a list of `count`; readers of one that is not first read the first.

    Places without a tensor get an empty one.
    """
    placed, kept = _placed(graph.tensors, places, count)
    for old, new in kept.items():
        if old is not new:
            graph.replace_uses(old, new)
    graph.tensors = [Tensor("", (), DType.FLOAT32) if one is None else one for one in placed]


def place_buffers(model: Model, places: Sequence[int], count: int) -> None:
    """Move the buffers of a model, as `place_tensors` moves tensors."""
    placed, kept = _placed(model.buffers, places, count)
    for tensor in model.tensors():
        if tensor.buffer is not None:
            tensor.buffer = kept[tensor.buffer]
    model.buffers = [Buffer() if one is None else one for one in placed]


def place_codes(model: Model, places: Sequence[int], count: int) -> None:
    """Move the operator codes of a model, as `place_tensors` moves tensors."""
    placed, kept = _placed(model.operator_codes, places, count)
    for operator in model.operators():
        operator.code = kept[operator.code]
    # Equal codes are one, so each place without one gets a version that no code has.
    model.operator_codes = [
        OperatorCode(0, -1 - place) if one is None else one for place, one in enumerate(placed)
    ]


def _placed(
    items: Sequence[_Item], places: Sequence[int], count: int
) -> tuple[list[_Item | None], dict[_Item, _Item]]:
    """A list of `count` with the items at these places, and for each item the first one at its place."""
    if len(places) != len(items):
        raise ValueError(f"{len(places)} places for {len(items)}")
    placed: list[_Item | None] = [None] * count
    kept: dict[_Item, _Item] = {}
    for item, place in zip(items, places, strict=True):
        present = placed[place]
        kept[item] = item if present is None else present
        placed[place] = kept[item]
    return placed, kept


# Fields


class NewTable(NamedTuple):
    """`{}`, or with a union's member, `BlockwiseQuantization {}`."""

    member: str = ""


class Shared(NamedTuple):
    """`same PATH`."""

    target: "Target"


class Target(NamedTuple):
    """A field of a table, or an element of its list."""

    table: Table
    field: FieldSpec
    element: int | None = None

    @property
    def type(self) -> str:
        """The value's type, as in schema.fbs."""
        return self.field.type if self.element is None else self.field.element

    def get(self) -> Any:
        """The value; None if the field is absent."""
        value = self.table.fields.get(self.field.name)
        return value if self.element is None or value is None else value[self.element]

    def set(self, value: Any) -> None:
        """Give the field a value that was read; ValueError if the value does not fit."""
        fitting = self._fitting(value)
        fields = self.table.fields
        if self.element is not None:
            fields[self.field.name][self.element] = fitting
        elif self.field.kind == "union":
            self.table.set(self.field.name, fitting)
        elif fitting is None:
            fields.pop(self.field.name, None)
        else:
            fields[self.field.name] = fitting

    def _fitting(self, value: Any) -> Any:
        if value is None and self.element is None:
            return None
        if isinstance(value, Shared):
            if value.target.type == self.type and value.target.get() is not None:
                return value.target.get()
        elif self.element is None:
            made = fitting(self.field, value)
            if made is not None:
                return made
        raise ValueError(f"{self.field.name} is {self.type}, which this value does not fit")


def field_of(table: Table, name: str) -> FieldSpec:
    """A field as the text names it; ValueError if there is none."""
    field = table.spec.by_name.get(name)
    if name in _POSITIONS and table.name in _STORED:
        field = _POSITIONS[name]
    if name == _TRAILING.name and table.name == _TRAILING.table:
        field = _TRAILING
    if field is None:
        raise ValueError(f"{table.name} has no field {name}")
    return field


def fitting(field: FieldSpec, value: Any) -> Any:
    """A value from a text as the field holds it, or None if it does not fit; OverflowError if it is too large."""
    element = field.element
    kind = field.kind
    if kind == "string":
        return value if isinstance(value, str) else None
    if kind == "scalar":
        return _scalar(element, value)
    if kind == "scalars" and isinstance(value, bytes):
        is_data = _STORED.get(field.table) == field.name and field.table != "Operator"
        return Data(value) if is_data else np.frombuffer(value, NUMPY_TYPES[element])
    if kind == "scalars" and isinstance(value, list):
        numbers = [_scalar(element, one) for one in value]
        return None if None in numbers else vector(element, numbers)
    if kind == "tables" and isinstance(value, list):
        are_new = all(one == NewTable() for one in value)
        return [new_table(element) for _ in value] if are_new else None
    if not isinstance(value, NewTable):
        return None
    if kind == "table":
        return None if value.member else new_table(element)
    is_member = kind == "union" and value.member in UNIONS[element].values()
    return new_table(value.member) if is_member else None


def _scalar(element: str, value: Any) -> Any:
    """A number as a table holds it; None if the value is not of that type."""
    if element == "bool":
        return value if isinstance(value, bool) else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if element.startswith("float"):
        return float(value)
    if isinstance(value, float):
        return None
    vector(element, [value])  # raises if it is too large
    return value


# Positions


class _Placed(NamedTuple):
    """Bytes with a position, behind the flatbuffer or in it."""

    position: int
    content: bytes
    external: bool


def lay_out_text(root: Table) -> None:
    """Give the bytes with `at` or `after` these positions; ValueError if they overlap or lie too far away."""
    placed: dict[int, _Placed] = {}
    for table in _storing(root):
        content = table.fields.get(_STORED[table.name])
        for name in _POSITIONS:
            position = table.fields.pop(name, None)
            if position is None or content is None or isinstance(content, Omitted):
                continue
            if id(content) not in placed:
                placed[id(content)] = _Placed(position, _bytes(content), name == "after")
    source = Source(_joined(sorted(placed.values(), key=lambda one: one.position)))
    for table in _storing(root):
        name = _STORED[table.name]
        own = placed.get(id(table.fields.get(name)))
        if own is not None:
            table.fields[name] = Data(source, own.position, len(own.content), own.external)
    root.trailing = root.fields.pop(_TRAILING.name, None)


def _joined(placed: Sequence[_Placed]) -> bytes:
    end = 0
    for one in placed:
        if one.position < end:
            place = f"bytes at {one.position} overlap those before them"
            raise ValueError(f"{place}, which end at {end}")
        end = one.position + len(one.content)
    if end > MOST_BYTES:
        raise ValueError(f"bytes at {end}, at most {MOST_BYTES} are read")
    joined = bytearray(end)
    for one in placed:
        joined[one.position : one.position + len(one.content)] = one.content
    return bytes(joined)


def _bytes(content: Any) -> bytes:
    return bytes(content.view().data) if isinstance(content, Data) else bytes(content.data)


def _storing(root: Table) -> Iterator[Table]:
    """The tables that may store bytes apart from the others."""
    yield from root.tables("buffers")
    for graph in root.tables("subgraphs"):
        yield from graph.tables("operators")
    yield root


# Printing


class Differences:
    """Statements of the `file` section that make the tables of `drawn`, which a graph's text gives, those of `file`.

    `most` bytes of a weight or of metadata are printed, longer ones as a digest.
    """

    def __init__(self, drawn: Table, file: Table, most: int) -> None:
        self._most = most
        # Path without its last index -> path -> value.
        self._values: dict[Path, dict[Path, str]] = {}
        self._shared: dict[Path, dict[Path, str]] = {}
        self._seen: dict[Hashable, Path] = {}
        self._data: list[tuple[Path, Data]] = []
        self._compare_tables((), drawn, file)
        if file.trailing is not None:
            self._compare(("trailing",), _TRAILING, None, file.trailing)
        self._note_positions(file)

    def lines(self) -> list[str]:
        """The statements; those of owners before those of their fields, `same` last."""
        owners_first = sorted(self._values.items(), key=lambda entry: len(entry[0]))
        return [_statement(found) for _, found in [*owners_first, *self._shared.items()]]

    def _note(self, path: Path, text: str, *, shared: bool = False) -> None:
        last = _last_index(path)
        column = (*path[:last], *path[last + 1 :], last)
        columns = self._shared if shared else self._values
        columns.setdefault(column, {})[path] = text

    def _compare_tables(self, path: Path, drawn: Table, file: Table) -> None:
        set_with_a_value: set[str] = set()
        for field in file.spec.fields:
            name = field.name
            if field.kind == "union" and (name in file.fields or name in drawn.fields):
                set_with_a_value.add(f"{name}_type")
        for field in file.spec.fields:
            name = field.name
            if name not in set_with_a_value:
                self._compare((*path, name), field, drawn.fields.get(name), file.fields.get(name))

    def _compare(self, path: Path, field: FieldSpec | None, drawn: Any, file: Any) -> None:
        """One value; `field` is None for an element of a list."""
        if file is None:
            if drawn is not None:
                self._note(path, "none")
        elif isinstance(file, Table | list | Data):
            first = self._seen.setdefault(file.key if isinstance(file, Data) else id(file), path)
            if first == path:
                self._compare_object(path, field, drawn, file)
            else:
                self._note(path, f"same {path_text(first)}", shared=True)
        elif field is not None and not _is_same(field, drawn, file):
            self._note(path, value_text(field, file))

    def _compare_object(self, path: Path, field: FieldSpec | None, drawn: Any, file: Any) -> None:
        if isinstance(file, Table):
            self._compare_table(path, field, drawn, file)
        elif isinstance(file, list):
            self._compare_lists(path, drawn, file)
        else:
            self._data.append((path, file))
            if drawn is None or isinstance(drawn, Omitted) or _bytes(drawn) != _bytes(file):
                self._note(path, self._content(file))

    def _compare_lists(self, path: Path, drawn: list[Table] | None, file: list[Table]) -> None:
        if drawn is None or len(drawn) != len(file):
            drawn = [new_table(one.name) for one in file]
            self._note(path, f"[{', '.join('{}' for _ in file)}]")
        for index, (ours, theirs) in enumerate(zip(drawn, file, strict=True)):
            self._compare((*path, index), None, ours, theirs)

    def _compare_table(self, path: Path, field: FieldSpec | None, drawn: Any, file: Table) -> None:
        if drawn is None or drawn.name != file.name:
            drawn = new_table(file.name)
            self._note(
                path, f"{file.name} {{}}" if field is not None and field.kind == "union" else "{}"
            )
        self._compare_tables(path, drawn, file)

    def _content(self, data: Data) -> str:
        if data.length > self._most:
            return f"digest('{sha256(data.view().data).hexdigest()[:16]}', {data.length})"
        return _encoded(_bytes(data))

    def _note_positions(self, root: Table) -> None:
        """Positions of all weights, if they come from a file, whose order and alignment a copy keeps."""
        data = [one for _, one in self._data]
        if all(map(_is_new, data)):
            return
        positions = {piece.data.key: piece.at for piece in lay_out(root)}
        is_outside = any(one.external for one in data)
        for path, one in self._data:
            after = is_outside if one.external is None else one.external
            owner = path[:-1]
            self._note((*owner, "after" if after and owner else "at"), str(positions[one.key]))


def _is_new(data: Data) -> bool:
    return data.offset == 0 and data.external is None and data.length == data.source.size


def _is_same(field: FieldSpec, drawn: Any, file: Any) -> bool:
    if drawn is None or field.kind == "string":
        return drawn is not None and bool(drawn == file)
    ours = vector(field.element, np.atleast_1d(drawn))
    return ours.tobytes() == vector(field.element, np.atleast_1d(file)).tobytes()


def value_text(field: FieldSpec, value: Any) -> str:
    """A string, number or vector of numbers as text."""
    if field.kind == "string":
        return string_text(value)
    numbers = vector(field.element, np.atleast_1d(value))
    if field.kind == "scalar":
        return number_text(numbers[0])
    if field.element == "uint8" or len(numbers) > _MOST_LISTED or np.isnan(numbers).any():
        return _encoded(numbers.tobytes())
    return f"[{', '.join(map(number_text, numbers))}]"


def number_text(value: Any) -> str:
    """A number; of a numpy type, the shortest text that reads back as the same number of that type."""
    if isinstance(value, bool | np.bool_):
        return "true" if value else "false"
    if isinstance(value, np.floating):
        # Numpy's own text depends on its version: -1e+09 or -1000000000.0.
        return repr(float(np.format_float_scientific(value)))
    return str(value)


def string_text(value: str) -> str:
    """Quote with single quotes, or as JSON if the value has a single quote or more than printable ASCII characters."""
    is_plain = value.isascii() and value.isprintable() and "'" not in value
    return f"'{value}'" if is_plain else json.dumps(value)


def _encoded(content: bytes) -> str:
    return f"base64 '{base64.b64encode(content).decode()}'"


def _statement(found: dict[Path, str]) -> str:
    """One line for fields of one name in several tables: one value for all, or one for each."""
    path = next(iter(found))
    last = _last_index(path)
    values = list(found.values())
    text = values[0] if len(set(values)) == 1 else f"each [{', '.join(values)}]"
    if last == len(path):
        return f"{path_text(path)}: {text}"
    indices = [int(one[last]) for one in found]
    return f"{path_text(path[:last])}{indices_text(indices)}{path_text(('', *path[last + 1 :]))}: {text}"


def _last_index(path: Path) -> int:
    """The place of a path's last index, or its length."""
    return max(
        (place for place, part in enumerate(path) if isinstance(part, int)), default=len(path)
    )


def path_text(path: Path) -> str:
    """`subgraphs[0].tensors[3].name`."""
    text = ""
    for place, part in enumerate(path):
        text += f"[{part}]" if isinstance(part, int) else f"{'.' if place else ''}{part}"
    return text


def indices_text(indices: Sequence[int]) -> str:
    """`[0, 4:6]`: half-open ranges, as in Python."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][1]:
            runs[-1][1] += 1
        else:
            runs.append([index, index + 1])
    return f"[{', '.join(map(_run_text, runs))}]"


def _run_text(run: Sequence[int]) -> str:
    begin, end = run
    return str(begin) if end == begin + 1 else f"{begin}:{end}"
