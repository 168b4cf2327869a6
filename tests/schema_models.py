"""Small models for the tests of edge_opt.schema, as objects of TFLite's own bindings, and comparisons with those."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import flatbuffers
import numpy as np
from ai_edge_litert import schema_py_generated as tfl

from edge_opt.schema import TABLES, Data, Table, model_bytes, new_table
from edge_opt.schema.table import STORED_AFTER

_DEPRECATED = {
    "ResizeBilinearOptions": ("new_height", "new_width"),
    "SignatureDef": ("deprecated_tag",),
}
"""Table -> its fields that the bindings do not read any more."""


def pack(model: Any) -> bytes:
    builder = flatbuffers.Builder(1024)
    builder.Finish(model.Pack(builder), file_identifier=b"TFL3")
    return bytes(builder.Output())


def unpack(content: bytes) -> Any:
    return tfl.ModelT.InitFromObj(tfl.Model.GetRootAs(content, 0))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def int32s(*values: int) -> Any:
    return np.array(values, np.int32)


def build(kind: str, fields: dict[str, Any]) -> Table:
    """A table from plain values; a union's is (its table, the fields)."""
    made = dict(fields)
    for name, given in fields.items():
        field = TABLES[kind].by_name[name]
        if field.kind == "union":
            made[name] = build(*given)
        elif field.kind == "tables":
            made[name] = [build(field.element, each) for each in given]
        elif field.kind == "table":
            made[name] = build(field.element, given)
        elif field.kind == "scalars":
            made[name] = Data(bytes(given)) if kind == "Buffer" else list(given)
    return new_table(kind, **made)


_QUANTIZATIONS: dict[str, dict[str, Any]] = {
    "per_tensor": {"min": [-1.5], "max": [1.5], "scale": [0.25], "zero_point": [-3]},
    "per_axis": {"scale": [0.5, 0.25], "zero_point": [0, 1], "quantized_dimension": 1},
    "empty": {"scale": []},
    "blockwise": {"details": (
        "BlockwiseQuantization", {"scales": 3, "zero_points": -1, "block_size": 32, "block_shape": [1, 32]},
    )},
    "custom": {"details": ("CustomQuantization", {"custom": range(5)})},
}  # fmt: skip
_SPARSITY = {"traversal_order": [0, 1], "block_map": [], "dim_metadata": [
    {"format": 0, "dense_size": 4},
    {
        "format": 1, "array_segments": ("Uint8Vector", {"values": [0, 2]}),
        "array_indices": ("Uint16Vector", {"values": [1, 3]}),
    },
]}  # fmt: skip
_TENSORS = [
    *(
        {"name": name, "shape": [2, 2], "type": tfl.TensorType.INT8, "buffer": 1, "quantization": parameters}
        for name, parameters in _QUANTIZATIONS.items()
    ),
    {"name": "scalar", "shape": [], "has_rank": True},
    {"name": "state", "shape": [1], "is_variable": True, "shape_signature": [-1]},
    {"name": "sparse", "shape": [4, 4], "buffer": 2, "sparsity": _SPARSITY, "external_buffer": 7},
    {
        "name": "вариант", "type": tfl.TensorType.VARIANT,
        "variant_tensors": [{"shape": [3], "type": tfl.TensorType.INT4, "has_rank": True}],
    },
]  # fmt: skip
_COMPOSITE = {
    "name": "odml.rms_norm", "decomposition_subgraph_index": 1, "composite_attributes": range(7), "version": 1,
}  # fmt: skip
_OPERATORS = [
    {
        "inputs": [0, -1], "outputs": [1], "builtin_options": ("ReshapeOptions", {"new_shape": [4]}),
        "mutating_variable_inputs": [True, False], "intermediates": [], "debug_metadata_index": 3,
    },
    {"opcode_index": 1, "inputs": [1], "outputs": [2], "custom_options": range(9)},
    {
        "opcode_index": 2, "inputs": [2], "outputs": [3],
        "builtin_options_2": ("StableHLOCompositeOptions", _COMPOSITE),
    },
]  # fmt: skip


def everything() -> Any:
    """A model with a bit of everything; it makes no sense to run it."""
    return unpack(model_bytes(build("Model", {
        "version": 3, "description": "everything", "metadata_buffer": [3],
        "operator_codes": [
            {"builtin_code": 22, "deprecated_builtin_code": 22},
            {"builtin_code": 32, "deprecated_builtin_code": 32, "custom_code": "MyOp", "version": 2},
            {"builtin_code": tfl.BuiltinOperator.STABLEHLO_COMPOSITE, "deprecated_builtin_code": 127},
        ],
        "subgraphs": [
            {"tensors": _TENSORS, "inputs": [0], "outputs": [3], "operators": _OPERATORS, "name": "main"},
            {"tensors": [], "inputs": [], "outputs": [], "operators": [], "name": ""},
        ],
        "buffers": [{}, {"data": range(40)}, {"data": range(7)}, {"data": []}, {"offset": 1, "size": 1}],
        "metadata": [{"name": "min_runtime_version", "buffer": 2}],
        "signature_defs": [{
            "inputs": [{"name": "x", "tensor_index": 0}], "outputs": [{"name": "y", "tensor_index": 3}],
            "signature_key": "serving_default", "subgraph_index": 0,
        }],
        "external_buffer_groups": [{"name": "weights.bin"}],
        "external_buffers": [{"id": 7, "group": 0, "offset": 64, "length": 128, "packing": "raw"}],
    })))  # fmt: skip


def with_data_after(model: Any, *payloads: bytes, alignments: Sequence[int] = ()) -> bytes:
    """The model with these buffers stored after the flatbuffer, as ai-edge-quantizer writes them."""
    first = len(model.buffers)
    model.buffers += [tfl.BufferT(offset=2, size=len(payload)) for payload in payloads]
    content = bytearray(pack(model))
    for index, payload in enumerate(payloads, first):
        content += bytes(-len(content) % (alignments[index - first] if alignments else 16))
        _patch(content, tfl.Model.GetRootAs(content, 0).Buffers(index)._tab, 6, len(content))
        content += payload
    return bytes(content)


def with_options_after(model: Any, options: bytes) -> bytes:
    """The model with its first operator's custom options stored after the flatbuffer."""
    model.subgraphs[0].operators[0].largeCustomOptionsOffset = 2
    model.subgraphs[0].operators[0].largeCustomOptionsSize = len(options)
    content = bytearray(pack(model))
    operator = tfl.Model.GetRootAs(content, 0).Subgraphs(0).Operators(0)
    _patch(content, operator._tab, 22, len(content))
    return bytes(content) + options


def _patch(content: bytearray, table: Any, slot: int, value: int) -> None:
    at = table.Pos + table.Offset(slot)
    content[at : at + 8] = value.to_bytes(8, "little")


def values(item: Any) -> Any:
    """A table as plain values: which fields are present, and what they hold."""
    if isinstance(item, Table):
        return (item.name, {name: values(value) for name, value in sorted(item.fields.items())})
    if isinstance(item, list):
        return [values(part) for part in item]
    if isinstance(item, Data):
        return (bool(item.external), bytes(item.view()))
    return (item.dtype.str, item.tolist()) if isinstance(item, np.ndarray) else item


def plain(item: Any) -> Any:
    """An object of the generated bindings as plain values."""
    if hasattr(item, "Pack"):
        return {name.lower(): plain(value) for name, value in vars(item).items()}
    if isinstance(item, list):
        return [plain(part) for part in item]
    return item.tolist() if isinstance(item, np.ndarray) else item


def as_bindings(item: Any) -> Any:
    """A table as `plain` gives what the bindings read: every field, with where bytes lie that are behind the tables."""
    if isinstance(item, Table):
        unknown = _DEPRECATED.get(item.name, ())
        fields = {
            name: as_bindings(item.get(name)) for name in item.spec.by_name if name not in unknown
        }
        inside, offset, size = STORED_AFTER.get(item.name, ("", "", ""))
        data = item.get(inside) if inside else None
        if isinstance(data, Data) and data.external:
            fields |= {inside: None, offset: data.offset, size: data.length}
        return {name.replace("_", ""): value for name, value in fields.items()}
    if isinstance(item, list):
        return [as_bindings(part) for part in item]
    if isinstance(item, Data):
        return item.view().tolist()
    return item.encode() if isinstance(item, str) else plain(item)
