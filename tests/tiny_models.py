"""Tiny models made by hand with the runtime's own schema bindings, for tests that need a file and no IR."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import flatbuffers
import numpy as np
from ai_edge_litert import schema_py_generated as schema


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
    return getattr(schema, f"{kind}T")(**fields)


def build(*graphs: Graph) -> bytes:
    """The bytes of a model with these subgraphs; each graph with a key gets a signature."""
    model = schema.ModelT(version=3, description="tiny", buffers=[schema.BufferT()], operatorCodes=[])
    model.subgraphs = [_subgraph(model, graph) for graph in graphs]
    model.signatureDefs = [_signature(graph, index) for index, graph in enumerate(graphs) if graph.key]
    builder = flatbuffers.Builder(1024)
    builder.Finish(model.Pack(builder), file_identifier=b"TFL3")
    return bytes(builder.Output())


def _places(graph: Graph) -> dict[str, int]:
    return {tensor.name: index for index, tensor in enumerate(graph.tensors)}


def _subgraph(model: Any, graph: Graph) -> Any:
    places = _places(graph)
    return schema.SubGraphT(
        name=graph.key or "main",
        tensors=[_tensor(model, tensor) for tensor in graph.tensors],
        operators=[_operator(model, op, places) for op in graph.operators],
        inputs=[places[name] for name in graph.inputs],
        outputs=[places[name] for name in graph.outputs],
    )


def _tensor(model: Any, tensor: T) -> Any:
    shape = [max(size, 1) for size in tensor.shape]
    made = schema.TensorT(
        name=tensor.name, shape=shape, type=getattr(schema.TensorType, tensor.dtype.upper()), hasRank=True
    )
    if -1 in tensor.shape:
        made.shapeSignature = list(tensor.shape)
    if tensor.value is not None:
        raw = np.asarray(tensor.value, tensor.dtype).tobytes()
        made.buffer = len(model.buffers)
        model.buffers.append(schema.BufferT(data=np.frombuffer(raw, np.uint8)))
    if tensor.scale is not None:
        made.quantization = schema.QuantizationParametersT(
            scale=[tensor.scale], zeroPoint=[tensor.zero_point]
        )
    return made


def _operator(model: Any, op: Op, places: Mapping[str, int]) -> Any:
    builtin = getattr(schema.BuiltinOperator, op.name)
    made = schema.OperatorT(
        opcodeIndex=len(model.operatorCodes),
        inputs=[-1 if name is None else places[name] for name in op.inputs],
        outputs=[places[name] for name in op.outputs],
    )
    model.operatorCodes.append(
        schema.OperatorCodeT(
            builtinCode=builtin, deprecatedBuiltinCode=min(builtin, 127), customCode=op.custom_code, version=1
        )
    )
    if op.options is not None:
        made.builtinOptionsType = getattr(schema.BuiltinOptions, type(op.options).__name__.removesuffix("T"))
        made.builtinOptions = op.options
    return made


def _signature(graph: Graph, subgraph_index: int) -> Any:
    places = _places(graph)
    inputs, outputs = (
        [schema.TensorMapT(name=graph.names.get(name, name), tensorIndex=places[name]) for name in names]
        for names in (graph.inputs, graph.outputs)
    )
    return schema.SignatureDefT(
        signatureKey=graph.key, subgraphIndex=subgraph_index, inputs=inputs, outputs=outputs
    )
