"""Tiny models made by hand with the runtime's own schema bindings, for tests that need a file and no IR."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import flatbuffers
import numpy as np
from ai_edge_litert import schema_py_generated as schema

_TYPES = {
    "float32": schema.TensorType.FLOAT32,
    "float16": schema.TensorType.FLOAT16,
    "int8": schema.TensorType.INT8,
    "int16": schema.TensorType.INT16,
    "int32": schema.TensorType.INT32,
    "int64": schema.TensorType.INT64,
    "bool": schema.TensorType.BOOL,
}


@dataclass
class T:
    """A tensor: name, shape and dtype, a constant value or a quantization if it has one."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    value: np.ndarray | None = None
    scale: float | None = None
    zero_point: int = 0


@dataclass
class Op:
    """An operator: builtin name, input and output tensor names (None for an absent input), options."""

    name: str
    inputs: Sequence[str | None]
    outputs: Sequence[str]
    options: Any = None
    custom_code: str | None = None


@dataclass
class Graph:
    """A subgraph, and the key of its signature ("" for none)."""

    tensors: Sequence[T]
    operators: Sequence[Op]
    inputs: Sequence[str]
    outputs: Sequence[str]
    key: str = ""
    names: Mapping[str, str] = field(default_factory=dict)


def options(kind: str, **fields: Any) -> Any:
    """The options table `kind` ("AddOptions") with these fields (camelCase, as the bindings have them)."""
    table = getattr(schema, f"{kind}T")()
    for name, value in fields.items():
        setattr(table, name, value)
    return table


def build(*graphs: Graph) -> bytes:
    """The bytes of a model with these subgraphs; each graph with a key gets a signature."""
    model = schema.ModelT()
    model.version = 3
    model.description = "tiny"
    model.buffers = [schema.BufferT()]
    model.operatorCodes = []
    model.signatureDefs = []
    model.subgraphs = [_subgraph(model, graph) for graph in graphs]
    for index, graph in enumerate(graphs):
        if graph.key:
            model.signatureDefs.append(_signature(graph, index))
    builder = flatbuffers.Builder(1024)
    builder.Finish(model.Pack(builder), file_identifier=b"TFL3")
    return bytes(builder.Output())


def _subgraph(model: Any, graph: Graph) -> Any:
    subgraph = schema.SubGraphT()
    subgraph.name = graph.key or "main"
    index = {tensor.name: i for i, tensor in enumerate(graph.tensors)}
    subgraph.tensors = [_tensor(model, tensor) for tensor in graph.tensors]
    subgraph.operators = [_operator(model, op, index) for op in graph.operators]
    subgraph.inputs = [index[name] for name in graph.inputs]
    subgraph.outputs = [index[name] for name in graph.outputs]
    return subgraph


def _tensor(model: Any, tensor: T) -> Any:
    made = schema.TensorT()
    made.name = tensor.name
    made.shape = [max(size, 1) for size in tensor.shape]
    if -1 in tensor.shape:
        made.shapeSignature = list(tensor.shape)
    made.type = _TYPES[tensor.dtype]
    made.buffer = 0
    made.hasRank = True
    if tensor.value is not None:
        data = schema.BufferT()
        data.data = np.frombuffer(np.asarray(tensor.value, tensor.dtype).tobytes(), np.uint8)
        model.buffers.append(data)
        made.buffer = len(model.buffers) - 1
    if tensor.scale is not None:
        made.quantization = schema.QuantizationParametersT()
        made.quantization.scale = [tensor.scale]
        made.quantization.zeroPoint = [tensor.zero_point]
    return made


def _operator(model: Any, op: Op, index: Mapping[str, int]) -> Any:
    code = schema.OperatorCodeT()
    code.builtinCode = getattr(schema.BuiltinOperator, op.name)
    code.deprecatedBuiltinCode = min(code.builtinCode, 127)
    code.customCode = op.custom_code
    code.version = 1
    model.operatorCodes.append(code)
    made = schema.OperatorT()
    made.opcodeIndex = len(model.operatorCodes) - 1
    made.inputs = [-1 if name is None else index[name] for name in op.inputs]
    made.outputs = [index[name] for name in op.outputs]
    if op.options is not None:
        made.builtinOptionsType = getattr(schema.BuiltinOptions, type(op.options).__name__.removesuffix("T"))
        made.builtinOptions = op.options
    return made


def _signature(graph: Graph, subgraph_index: int) -> Any:
    index = {tensor.name: i for i, tensor in enumerate(graph.tensors)}
    made = schema.SignatureDefT()
    made.signatureKey = graph.key
    made.subgraphIndex = subgraph_index
    made.inputs = [_mapped(graph.names.get(name, name), index[name]) for name in graph.inputs]
    made.outputs = [_mapped(graph.names.get(name, name), index[name]) for name in graph.outputs]
    return made


def _mapped(name: str, index: int) -> Any:
    made = schema.TensorMapT()
    made.name = name
    made.tensorIndex = index
    return made
