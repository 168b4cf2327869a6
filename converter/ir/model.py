"""A whole model: subgraphs, signatures, buffers and metadata, with conversion from and to a file's tables.

A model is checked as it is read. Unchanged parts keep their tables; indices are assigned on writing.
"""

import os
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, fields
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, Self, SupportsIndex

import numpy as np
from numpy.typing import NDArray

from edge_opt.base.errors import ModelFormatError
from edge_opt.base.words import listed, numbered
from edge_opt.ir.checks import check_model
from edge_opt.ir.dtypes import DType, Quantization
from edge_opt.ir.graph import Buffer, Operator, OperatorCode, Signature, Subgraph, Tensor
from edge_opt.ir.operators import BUILTIN_OPERATORS, KINDS, OPERATOR_NAMES
from edge_opt.schema.data import Data, Source
from edge_opt.schema.reader import refuse_newer
from edge_opt.schema.table import UNIONS, Table, new_table
from edge_opt.schema.writer import lay_out, model_bytes, write_pieces


class Signatures(list[Signature]):
    """The signatures in the file's order; `signatures["decode"]` finds one by name."""

    def __getitem__(self, index: SupportsIndex | str) -> Signature:  # type: ignore[override]
        if not isinstance(index, str):
            return super().__getitem__(index)
        for signature in self:
            if signature.key == index:
                return signature
        raise KeyError(f"no signature '{index}', there are: {', '.join(one.key for one in self)}")


class EntryPoint(NamedTuple):
    """A signature's subgraph, inputs and outputs, by the names that callers use."""

    graph: Subgraph
    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]


@dataclass(slots=True)
class Metadata:
    """A named blob that belongs to the model."""

    name: str
    buffer: Buffer
    table: Table | None = field(default=None, repr=False)


@dataclass(slots=True, repr=False)
class Model:
    """The contents of a .tflite file. `copy.deepcopy` makes a copy to edit independently, which shares the weights.

    `buffers[0]` is the empty buffer of tensors without bytes. `metadata_buffers` come from the deprecated field
    `metadata_buffer`. `notes`: parts of the file that no runtime reads, and that a written file leaves out.
    """

    subgraphs: list[Subgraph] = field(default_factory=list)
    signatures: Signatures = field(default_factory=Signatures)
    buffers: list[Buffer] = field(default_factory=lambda: [Buffer()])
    operator_codes: list[OperatorCode] = field(default_factory=list)
    metadata: list[Metadata] = field(default_factory=list)
    metadata_buffers: list[Buffer] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    table: Table | None = None
    source: Source | None = None
    constant_buffers: dict[bytes, Buffer] = field(default_factory=dict)

    def __repr__(self) -> str:
        path = None if self.source is None else self.source.path
        where = "in memory" if path is None else repr(str(path))
        entries = ", ".join(
            f"{name}: {len(graph)} operators" for name, graph in self.entry_points()
        )
        return f"Model({where}, {entries or 'empty'}; {len(self.subgraphs)} subgraphs in all)"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file that the model was read from; weights not read yet are then unavailable."""
        if self.source is not None:
            self.source.close()

    def save(
        self,
        path: str | os.PathLike[str],
        *,
        overwrite: bool = False,
        progress: Callable[[int, int], None] | None = None,
        check: Callable[[Path], None] | None = None,
    ) -> None:
        """Write a .tflite file atomically; weights are copied from file to file. `progress` gets bytes done and total.

        `check` may inspect the finished file before it is renamed to `path`, and reject it by raising.

        Raises:
            UsageError: the output is the model's own file, or exists and `overwrite` is False.
            OutputError: the output cannot be written; nothing is left behind.
            ModelFormatError: the model is invalid, or its file has changed since it was read.
        """
        pieces = lay_out(checked_tables(self))
        write_pieces(pieces, path, ".tflite", overwrite=overwrite, progress=progress, check=check)

    def operator_code(self, name: str, version: int = 1) -> OperatorCode:
        """The code of a builtin operator; the file lists it once an operator uses it."""
        return OperatorCode(BUILTIN_OPERATORS[name], version)

    def new_operator(
        self,
        name: str,
        inputs: Sequence[Tensor | None],
        outputs: Sequence[Tensor],
        **options: object,
    ) -> Operator:
        """A new builtin operator, in no subgraph, of the version that its types need; KeyError for unknown options."""
        kind = KINDS[name]
        fields = None if kind.options is None else new_table(kind.options, **options)
        return Operator(
            self.operator_code(name, usual_version(name, inputs, outputs)), inputs, outputs, fields
        )

    def signature_name(self, subgraph: Subgraph) -> str:
        """The subgraph's name for users: its signature's key, else its own name."""
        keys = (signature.key for signature in self.signatures if signature.subgraph is subgraph)
        return next(keys, subgraph.name)

    def entry_points(self) -> list[tuple[str, Subgraph]]:
        """Named entry points: the signatures, or the first subgraph if there are none."""
        if self.signatures:
            return [(signature.key, signature.subgraph) for signature in self.signatures]
        return [(subgraph.name or "main", subgraph) for subgraph in self.subgraphs[:1]]

    def arguments(self, name: str) -> EntryPoint:
        """An entry point's subgraph, inputs and outputs, by the names that callers use.

        A model without signatures has only its first subgraph, with the runtime's names.
        """
        if self.signatures:
            signature = self.signatures[name]
            return EntryPoint(signature.subgraph, signature.inputs, signature.outputs)
        graph = self.subgraphs[0]
        return EntryPoint(graph, _by_name(graph.inputs), _by_name(graph.outputs))

    def weight_bytes(self) -> dict[str, int]:
        """Bytes of constants by the name of their type, most first; shared buffers are counted once."""
        counted: set[Buffer | None] = set()
        total: Counter[str] = Counter()
        for tensor in self.tensors():
            if tensor.data is None or tensor.is_variable or tensor.buffer in counted:
                continue
            counted.add(tensor.buffer)
            total[tensor.dtype.name] += tensor.data.length
        return dict(total.most_common())

    def tensors(self) -> Iterator[Tensor]:
        """The listed tensors of all subgraphs."""
        return chain.from_iterable(graph.tensors for graph in self.subgraphs)

    def operators(self) -> Iterator[Operator]:
        """The operators of all subgraphs."""
        return chain.from_iterable(self.subgraphs)

    def inputs(self) -> list[tuple[str, dict[str, Tensor]]]:
        """The inputs of every entry point, by the names that callers use."""
        return [(name, self.arguments(name).inputs) for name, _ in self.entry_points()]


def usual_version(name: str, inputs: Sequence[Tensor | None], outputs: Sequence[Tensor]) -> int:
    """The lowest version of a builtin operator for these types and ranks."""
    kind = KINDS[name]
    data = kind.data_operands(inputs)[:1]
    types = [tensor.dtype for tensor in data]
    if name == "CAST":
        types += (tensor.dtype for tensor in outputs)
    rank = len(data[0].shape) if data else 0
    return kind.version_for(*types, rank=rank)


class Constants:
    """Makes constant tensors for one subgraph; equal constants share a tensor, equal bytes a buffer."""

    def __init__(self, model: Model) -> None:
        self._buffers = model.constant_buffers
        self._tensors: dict[Hashable, Tensor] = {}

    def make(
        self,
        name: str,
        array: NDArray[np.generic],
        dtype: DType,
        quantization: Quantization | None = None,
    ) -> Tensor:
        """Return a constant with the shape and numbers of `array`, which is already in the storage type of `dtype`."""
        raw = array.tobytes()
        buffer = self._buffers.setdefault(raw, Buffer(Data(raw)))
        made = Tensor(name, array.shape, dtype, quantization=quantization, buffer=buffer)
        return self._tensors.setdefault((raw, made.kind), made)


# Tables become a model

_DTYPES = dict(enumerate(DType))  # faster than calling DType


def from_tables(root: Table, source: Source | None = None) -> Model:
    """The model that tables describe, read from `source`; ModelFormatError if `check_model` rejects it."""
    model = Model(table=root, source=source)
    model.operator_codes = [_read_code(table) for table in root.tables("operator_codes")]
    model.buffers = [Buffer(table.fields.get("data"), table) for table in root.tables("buffers")]
    for index, table in enumerate(root.tables("subgraphs")):
        model.subgraphs.append(_read_subgraph(model, table, index))
    model.signatures.extend(
        _read_signature(model, table) for table in root.tables("signature_defs")
    )
    check_model(model.subgraphs, model.signatures)
    _read_metadata(model, root)
    return model


def _read_metadata(model: Model, root: Table) -> None:
    """Read metadata. Runtimes skip entries whose buffer does not exist; a new buffer could get that number."""
    known = range(len(model.buffers))
    missing = list[str]()
    for table in root.tables("metadata"):
        name = table.get("name") or ""
        index = table.get("buffer")
        if index in known:
            model.metadata.append(Metadata(name, model.buffers[index], table))
        else:
            missing.append(f"metadata '{name}' (buffer {index})")
    for index in _integers(root, "metadata_buffer"):
        if index in known:
            model.metadata_buffers.append(model.buffers[index])
        else:
            missing.append(f"metadata_buffer (buffer {index})")
    if missing:
        model.notes.append(f"left out, because the buffer does not exist: {listed(missing)}")


def _at(items: Sequence[Any], index: int, where: str, what: str) -> Any:
    if 0 <= index < len(items):
        return items[index]
    raise ModelFormatError(f"{where}: {what} {index} does not exist, there are {len(items)}")


def _listed(items: Sequence[Any], table: Table, field: str, where: str, what: str) -> list[Any]:
    return [_at(items, index, where, what) for index in _integers(table, field)]


def _integers(table: Table, field: str) -> tuple[int, ...]:
    values = table.fields.get(field)
    return () if values is None else tuple(values.tolist())


def _read_code(table: Table) -> OperatorCode:
    # Writers before TFLite schema 3a fill only the deprecated field; the runtime takes the larger of the two.
    code = max(table.get("deprecated_builtin_code"), table.get("builtin_code"))
    if code not in OPERATOR_NAMES:
        refuse_newer("OperatorCode", "builtin_code", f"operator code {code} is unknown")
    custom = table.get("custom_code") if code == BUILTIN_OPERATORS["CUSTOM"] else None
    return OperatorCode(code, table.get("version"), custom, table)


def _read_subgraph(model: Model, table: Table, index: int) -> Subgraph:
    graph = Subgraph(table.get("name") or "", table)
    place = f"subgraph '{graph.name or f'#{index}'}'"
    graph.tensors = [
        _read_tensor(model, tensor, place, position)
        for position, tensor in enumerate(table.tables("tensors"))
    ]
    graph.inputs = _listed(graph.tensors, table, "inputs", f"{place} inputs", "tensor")
    graph.outputs = _listed(graph.tensors, table, "outputs", f"{place} outputs", "tensor")
    for position, operator in enumerate(table.tables("operators")):
        graph.append(
            _read_operator(model, graph.tensors, operator, f"{place}, operator {position}")
        )
    return graph


def _read_tensor(model: Model, table: Table, place: str, position: int) -> Tensor:
    given = table.fields
    name = given.get("name", "")
    buffer = given.get("buffer", 0)
    quantization = given.get("quantization")
    if buffer >= len(model.buffers):
        _at(model.buffers, buffer, f"{place}, tensor {position} '{name}'", "buffer")
    code = given.get("type", 0)
    if code not in _DTYPES:
        refuse_newer("Tensor", "type", f"tensor type {code} is unknown")
    return Tensor(
        name,
        _integers(table, "shape"),
        _DTYPES[code],
        quantization=None if quantization is None else Quantization(quantization),
        # Buffer 0 means no bytes, whatever it holds: the runtime never reads it.
        buffer=model.buffers[buffer] if buffer else None,
        shape_signature=_integers(table, "shape_signature") if "shape_signature" in given else None,
        is_variable=given.get("is_variable", False),
        table=table,
    )


def _read_operator(model: Model, tensors: list[Tensor], table: Table, place: str) -> Operator:
    code: OperatorCode = _at(
        model.operator_codes, table.get("opcode_index"), place, "operator code"
    )
    place = f"{place} ({code.name})"
    inputs = _integers(table, "inputs")
    read = [None if index == -1 else _at(tensors, index, place, "input tensor") for index in inputs]
    outputs = _listed(tensors, table, "outputs", place, "output tensor")
    for position, tensor in enumerate(outputs):
        if tensor.producer is not None or tensor in outputs[:position]:
            raise ModelFormatError(f"{place}: defines '{tensor.name}', which is already defined")
    intermediates = _listed(tensors, table, "intermediates", place, "intermediate tensor")
    first = table.get("builtin_options")
    second = table.get("builtin_options_2")
    if first is not None and second is not None:
        raise ModelFormatError(f"{place}: has two kinds of options, {first.name} and {second.name}")
    return Operator(code, read, outputs, first if second is None else second, table, intermediates)


def _read_signature(model: Model, table: Table) -> Signature:
    key = table.get("signature_key") or ""
    where = f"signature '{key}'"
    subgraph: Subgraph = _at(model.subgraphs, table.get("subgraph_index"), where, "subgraph")

    def arguments(field: str) -> dict[str, Tensor]:
        named: dict[str, Tensor] = {}
        for entry in table.tables(field):
            name = entry.get("name") or ""
            if name in named:
                raise ModelFormatError(f"{where}: {field} names '{name}' twice")
            named[name] = _at(
                subgraph.tensors, entry.get("tensor_index"), where, f"{field}: tensor"
            )
        return named

    return Signature(key, subgraph, arguments("inputs"), arguments("outputs"), table)


# A model becomes tables

save = Model.save


def to_bytes(model: Model) -> bytes:
    """The model as the bytes of a .tflite file; ModelFormatError if it is invalid."""
    return model_bytes(checked_tables(model))


def checked_tables(model: Model) -> Table:
    """The root table of a model; ModelFormatError if it is invalid."""
    check_model(model.subgraphs, model.signatures)
    return to_tables(model)


def to_tables(model: Model) -> Table:
    """The root table of a model, unchecked; unchanged parts keep their tables."""
    codes = _Numbering(model.operator_codes)
    buffers = _Numbering(model.buffers)
    numbers = {graph: _Numbering(graph.tensors) for graph in model.subgraphs}
    subgraphs = [_subgraph(graph, codes, buffers, numbers[graph]) for graph in model.subgraphs]
    signatures = [_signature(one, model.subgraphs, numbers) for one in model.signatures]
    metadata: list[Table] = []
    for entry in model.metadata:
        table = entry.table or new_table("Metadata", name=entry.name)
        metadata.append(_filled(table, buffer=buffers.of(entry.buffer)))
    metadata_buffers = [buffers.of(buffer) for buffer in model.metadata_buffers]
    # By now, codes and buffers include those that the model does not list.
    return _filled(
        model.table or new_table("Model", version=3),
        subgraphs=subgraphs,
        signature_defs=signatures,
        metadata=metadata,
        metadata_buffer=metadata_buffers,
        operator_codes=[code.table or _new_code(code) for code in codes.items],
        buffers=[_buffer(buffer) for buffer in buffers.items],
    )


class _Numbering:
    """Assigns indices: listed items keep theirs, new items get the next free index on first use."""

    def __init__(self, listed: Iterable[Any]) -> None:
        self.items = list(listed)
        self._index = {item: index for index, item in enumerate(self.items)}

    def of(self, item: object) -> int:
        index = self._index.setdefault(item, len(self.items))
        if index == len(self.items):
            self.items.append(item)
        return index


def _new_code(code: OperatorCode) -> Table:
    return new_table(
        "OperatorCode",
        deprecated_builtin_code=deprecated_code(code),
        version=code.version,
        builtin_code=code.builtin,
        custom_code=code.custom_code,
    )


def _subgraph(
    graph: Subgraph, codes: _Numbering, buffers: _Numbering, numbers: _Numbering
) -> Table:
    return _filled(
        graph.table or new_table("SubGraph", name=graph.name or None),
        operators=[_operator(operator, codes, numbers) for operator in graph.operators],
        inputs=[numbers.of(tensor) for tensor in graph.inputs],
        outputs=[numbers.of(tensor) for tensor in graph.outputs],
        tensors=[_tensor(tensor, buffers) for tensor in numbers.items],
    )


_OPTIONS = {"builtin_options": "BuiltinOptions", "builtin_options_2": "BuiltinOptions2"}
"""The fields of an operator's options, and their unions."""


def _operator(operator: Operator, codes: _Numbering, numbers: _Numbering) -> Table:
    table = _filled(
        operator.table or new_table("Operator"),
        opcode_index=codes.of(operator.code),
        inputs=[-1 if tensor is None else numbers.of(tensor) for tensor in operator.inputs],
        outputs=[numbers.of(tensor) for tensor in operator.outputs],
        intermediates=[numbers.of(tensor) for tensor in operator.intermediates],
    )
    options = operator.options
    for place, union in _OPTIONS.items():
        is_member = options is not None and options.name in UNIONS[union].values()
        own = options if is_member else None
        if table.fields.get(place) is not own:
            table.set(place, own)
    return table


def _buffer(buffer: Buffer) -> Table:
    """The buffer's own table, which buffers may share, as long as it has these bytes."""
    own = buffer.table
    if own is not None and own.fields.get("data") is buffer.data:
        return own
    return new_table("Buffer", data=buffer.data)


def _tensor(tensor: Tensor, buffers: _Numbering) -> Table:
    return _filled(
        tensor.table or new_table("Tensor", has_rank=True, name=tensor.name),
        name=tensor.name,
        shape=list(tensor.shape),
        shape_signature=None if tensor.shape_signature is None else list(tensor.shape_signature),
        type=int(tensor.dtype),
        # A tensor without a buffer refers to buffer 0, which is always empty.
        buffer=0 if tensor.buffer is None else buffers.of(tensor.buffer),
        quantization=None if tensor.quantization is None else tensor.quantization.table,
        is_variable=tensor.is_variable,
    )


def _signature(
    signature: Signature, subgraphs: list[Subgraph], numbers: Mapping[Subgraph, _Numbering]
) -> Table:
    table = signature.table or new_table("SignatureDef")
    of_tensors = numbers[signature.subgraph]
    return _filled(
        table,
        signature_key=signature.key,
        subgraph_index=subgraphs.index(signature.subgraph),
        inputs=_arguments(table.tables("inputs"), signature.inputs, of_tensors),
        outputs=_arguments(table.tables("outputs"), signature.outputs, of_tensors),
    )


def _arguments(
    entries: list[Table], arguments: Mapping[str, Tensor], numbers: _Numbering
) -> list[Table]:
    """The tables of a signature's inputs or outputs: its own `entries` if they have these names and tensors."""
    named = [(name, numbers.of(tensor)) for name, tensor in arguments.items()]
    present = [(entry.get("name"), entry.get("tensor_index")) for entry in entries]
    if named == present:
        return entries
    return [new_table("TensorMap", name=name, tensor_index=index) for name, index in named]


def deprecated_code(code: OperatorCode) -> int:
    """The operator's code for the deprecated one-byte field."""
    return min(code.builtin, 127)


def _filled(table: Table, **values: Any) -> Table:
    """A copy with these values; fields that already have them, even as absent defaults, do not change."""
    made = table.copy()
    for name, value in values.items():
        present = table.get(name)
        if isinstance(present, np.ndarray):
            present = present.tolist()
        # An absent field means the same as an empty one, or 0.
        is_same = (present or None) == (value or None)
        if value is None or not is_same:
            made.set(name, value)
    return made


@contextmanager
def restored_on_failure(source: object) -> Iterator[None]:
    """Restore a `Model` if the block raises. Its subgraphs are then new objects: look them up again."""
    kept = deepcopy(source)
    try:
        yield
    except BaseException:
        if isinstance(source, Model):
            for entry in fields(Model):
                setattr(source, entry.name, getattr(kept, entry.name))
        raise


def _by_name(tensors: Sequence[Tensor]) -> dict[str, Tensor]:
    names = numbered([tensor.name for tensor in tensors])
    return dict(zip(names, tensors, strict=True))
