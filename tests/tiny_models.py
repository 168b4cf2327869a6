"""Tiny models for tests that need a file, by tables of tensors and operators; nothing checks whether they are right."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from edge_opt.ir import (
    Buffer,
    DType,
    Model,
    Operator,
    OperatorCode,
    Quantization,
    Signature,
    Subgraph,
    Tensor,
)
from edge_opt.ir.model import to_tables
from edge_opt.ir.operators import BUILTIN_OPERATORS
from edge_opt.schema import Data, Table, model_bytes, new_table


@dataclass
class T:
    """A tensor: name, shape and dtype, a constant value or a quantization if it has one."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    value: np.ndarray | None = None
    scale: float | None = None
    zero_point: int = 0

    def made(self) -> Tensor:
        sizes = tuple(max(size, 1) for size in self.shape)
        raw = None if self.value is None else Buffer(Data(np.asarray(self.value, self.dtype).tobytes()))
        quantization = None if self.scale is None else Quantization.affine(self.scale, self.zero_point)
        made = Tensor(self.name, sizes, DType[self.dtype.upper()], quantization=quantization, buffer=raw)
        made.shape_signature = self.shape if -1 in self.shape else None
        return made


@dataclass
class Op:
    """An operator: builtin name, input and output tensor names (None for an absent input), options."""

    name: str
    inputs: Sequence[str | None]
    outputs: Sequence[str]
    options: Table | None = None
    custom_code: str | None = None


@dataclass
class Graph:
    """A subgraph, and the key of its signature ("" for none), whose arguments may have other `names`."""

    tensors: Sequence[T]
    operators: Sequence[Op]
    inputs: Sequence[str]
    outputs: Sequence[str]
    key: str = ""
    names: Mapping[str, str] = field(default_factory=dict)


def options(kind: str, **fields: Any) -> Table:
    """The options table `kind` ("AddOptions") with these fields (camelCase, as the runtime's bindings have them)."""
    return new_table(kind, **{re.sub(r"(?=[A-Z])", "_", name).lower(): fields[name] for name in fields})


def build(*graphs: Graph) -> bytes:
    """The bytes of a model with these subgraphs; each graph with a key gets a signature."""
    model = Model()
    for graph in graphs:
        subgraph = Subgraph(graph.key or "main")
        model.subgraphs.append(subgraph)
        named = {tensor.name: subgraph.add_tensor(tensor.made()) for tensor in graph.tensors}
        for op in graph.operators:
            read = [None if name is None else named[name] for name in op.inputs]
            code = OperatorCode(BUILTIN_OPERATORS[op.name], 1, op.custom_code)
            subgraph.append(Operator(code, read, [named[name] for name in op.outputs], op.options))
        subgraph.inputs, subgraph.outputs = (
            [named[n] for n in side] for side in (graph.inputs, graph.outputs)
        )
        if graph.key:
            sides = (
                {graph.names.get(n, n): named[n] for n in side} for side in (graph.inputs, graph.outputs)
            )
            model.signatures.append(Signature(graph.key, subgraph, *sides))
    return model_bytes(to_tables(model))
