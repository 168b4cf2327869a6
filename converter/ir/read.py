"""Tables become a graph, which is checked before anything walks it."""

from collections.abc import Sequence
from typing import Any

from edge_opt.base.errors import ModelFormatError
from edge_opt.ir.checks import check_model
from edge_opt.ir.dtypes import DType, Quantization
from edge_opt.ir.graph import Buffer, Operator, OperatorCode, Signature, Subgraph, Tensor
from edge_opt.ir.model import Metadata, Model
from edge_opt.ir.operators import BUILTIN_OPERATORS
from edge_opt.schema.reader import ModelFile
from edge_opt.schema.table import Table


def from_tables(file: ModelFile) -> Model:
    """The model that the file's tables describe.

    Raises:
        ModelFormatError: for indices out of range, two producers of a tensor, use before definition, constants
            whose bytes do not fit their shape, names used twice, options of another operator, subgraphs that call
            themselves.
    """
    root = file.root
    model = Model(table=root, file=file)
    model.operator_codes = [_operator_code(table) for table in root.get("operator_codes") or []]
    model.buffers = [Buffer(table.fields.get("data"), table) for table in root.get("buffers") or []]
    for index, table in enumerate(root.get("subgraphs") or []):
        model.subgraphs.append(_read_subgraph(model, table, index))
    model.signatures.extend(_read_signature(model, table) for table in root.get("signature_defs") or [])
    check_model(model.subgraphs, model.signatures)
    for table in root.get("metadata") or []:
        name = table.get("name") or ""
        buffer = _at(model.buffers, table.get("buffer"), f"metadata '{name}'", "buffer")
        model.metadata.append(Metadata(name, buffer, table))
    model.metadata_buffers = _listed(model.buffers, root, "metadata_buffer", "metadata_buffer", "buffer")
    return model


def _operator_code(table: Table) -> OperatorCode:
    deprecated, builtin = table.get("deprecated_builtin_code"), table.get("builtin_code")
    # Writers before TFLite schema 3a fill only the deprecated field; the runtime takes the larger of the two.
    code = max(deprecated, builtin)
    custom = table.get("custom_code") if code == BUILTIN_OPERATORS["CUSTOM"] else None
    return OperatorCode(code, table.get("version"), custom, table)


def _at(items: Sequence[Any], index: int, where: str, what: str) -> Any:
    if 0 <= index < len(items):
        return items[index]
    raise ModelFormatError(f"{where}: {what} {index} does not exist, there are {len(items)}")


def _listed(items: Sequence[Any], table: Table, field: str, where: str, what: str) -> list[Any]:
    return [_at(items, index, where, what) for index in _integers(table, field)]


def _integers(table: Table, field: str) -> tuple[int, ...]:
    values = table.get(field)
    return () if values is None else tuple(values.tolist())


def _read_subgraph(model: Model, table: Table, index: int) -> Subgraph:
    graph = Subgraph(table.get("name") or "", table)
    place = f"subgraph '{graph.name or f'#{index}'}'"
    graph.tensors = [
        _read_tensor(model, tensor, f"{place}, tensor {position} '{tensor.get('name') or ''}'")
        for position, tensor in enumerate(table.get("tensors") or [])
    ]
    graph.inputs = _listed(graph.tensors, table, "inputs", f"{place} inputs", "tensor")
    graph.outputs = _listed(graph.tensors, table, "outputs", f"{place} outputs", "tensor")
    for position, operator in enumerate(table.get("operators") or []):
        graph.append(_read_operator(model, graph.tensors, operator, f"{place}, operator {position}"))
    return graph


def _read_tensor(model: Model, table: Table, where: str) -> Tensor:
    quantization, dynamic = table.get("quantization"), table.get("shape_signature") is not None
    buffer = _at(model.buffers, table.get("buffer"), where, "buffer")
    return Tensor(
        table.get("name") or "",
        _integers(table, "shape"),
        DType(table.get("type")),
        quantization=None if quantization is None else Quantization(quantization),
        # Buffer 0 says that there are no bytes, whatever it holds: the runtime never looks into it.
        buffer=buffer if table.get("buffer") else None,
        shape_signature=_integers(table, "shape_signature") if dynamic else None,
        is_variable=table.get("is_variable"),
        table=table,
    )


def _read_operator(model: Model, tensors: list[Tensor], table: Table, place: str) -> Operator:
    code: OperatorCode = _at(model.operator_codes, table.get("opcode_index"), place, "operator code")
    place = f"{place} ({code.name})"
    inputs = _integers(table, "inputs")
    read = [None if index == -1 else _at(tensors, index, place, "input tensor") for index in inputs]
    outputs = _listed(tensors, table, "outputs", place, "output tensor")
    for position, tensor in enumerate(outputs):
        if tensor.producer is not None or tensor in outputs[:position]:
            raise ModelFormatError(f"{place}: defines '{tensor.name}', which is already defined")
    intermediates = _listed(tensors, table, "intermediates", place, "intermediate tensor")
    first, second = table.get("builtin_options"), table.get("builtin_options_2")
    if first is not None and second is not None:
        raise ModelFormatError(f"{place}: has two kinds of options, {first.name} and {second.name}")
    return Operator(code, read, outputs, first if second is None else second, table, intermediates)


def _read_signature(model: Model, table: Table) -> Signature:
    key = table.get("signature_key") or ""
    where = f"signature '{key}'"
    subgraph: Subgraph = _at(model.subgraphs, table.get("subgraph_index"), where, "subgraph")

    def arguments(field: str) -> dict[str, Tensor]:
        named: dict[str, Tensor] = {}
        for entry in table.get(field) or []:
            name = entry.get("name") or ""
            if name in named:
                raise ModelFormatError(f"{where}: {field} names '{name}' twice")
            named[name] = _at(subgraph.tensors, entry.get("tensor_index"), where, f"{field}: tensor")
        return named

    return Signature(key, subgraph, arguments("inputs"), arguments("outputs"), table)
