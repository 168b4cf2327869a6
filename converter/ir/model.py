"""A whole model: its subgraphs, signatures, buffers and metadata. What is in a file, `read` and `write` know."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from edge_opt.ir.graph import BUILTIN_OPERATORS, Buffer, Operator, OperatorCode, Tensor
from edge_opt.ir.operators import options_table
from edge_opt.ir.versions import required_version
from edge_opt.ir.write import save as write_tables
from edge_opt.schema.data import Data
from edge_opt.schema.table import new_table

if TYPE_CHECKING:
    import os
    from collections.abc import Hashable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from edge_opt.ir.dtypes import DType
    from edge_opt.ir.graph import Shape, Subgraph
    from edge_opt.ir.quantization import Quantization
    from edge_opt.schema.reader import ModelFile
    from edge_opt.schema.table import Table


@dataclass(slots=True)
class Signature:
    """A named entry point: argument names of one subgraph's inputs and outputs."""

    key: str
    subgraph: Subgraph
    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]
    table: Table | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        self.subgraph.name_outputs(self.outputs.values())


@dataclass(slots=True)
class Metadata:
    """A named blob beside the graphs."""

    name: str
    buffer: Buffer
    table: Table | None = field(default=None, repr=False)


@dataclass(slots=True, repr=False)
class Model:
    """Everything a .tflite file says. `copy.deepcopy` gives one to be edited apart; weights stay where they are.

    `buffers[0]` is the empty one that tensors without bytes refer to. `metadata_buffers` are those that the deprecated
    field `metadata_buffer` lists.
    """

    subgraphs: list[Subgraph] = field(default_factory=list)
    signatures: list[Signature] = field(default_factory=list)
    buffers: list[Buffer] = field(default_factory=lambda: [Buffer()])
    operator_codes: list[OperatorCode] = field(default_factory=list)
    metadata: list[Metadata] = field(default_factory=list)
    metadata_buffers: list[Buffer] = field(default_factory=list)
    table: Table | None = None
    file: ModelFile | None = None
    constant_buffers: dict[bytes, Buffer] = field(default_factory=dict)
    new_codes: dict[Hashable, OperatorCode] = field(default_factory=dict)

    def __repr__(self) -> str:
        where = "in memory" if self.file is None or self.file.path is None else repr(str(self.file.path))
        entries = ", ".join(f"{name}: {len(graph)} operators" for name, graph in self.entry_points())
        return f"Model({where}, {entries or 'empty'}; {len(self.subgraphs)} subgraphs in all)"

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Write a .tflite file, whole or not at all; weights go from file to file.

        Raises:
            UsageError: the output is the file that the model was read from, or exists and `overwrite` is False.
            OutputError: the output cannot be written; nothing is left behind.
            ModelFormatError: the model holds what the format cannot, or its file was changed meanwhile.
        """
        write_tables(self, path, overwrite=overwrite)

    def operator_code(self, name: str, version: int = 1) -> OperatorCode:
        """The model's code for a builtin operator in that version.

        A new one is listed when the model is written and an operator has it: a rewrite that is dropped leaves none.
        """
        code = OperatorCode(BUILTIN_OPERATORS[name], version)
        for known in self.operator_codes:
            if known.key() == code.key():
                return known
        return self.new_codes.setdefault(code.key(), code)

    def new_operator(
        self, name: str, inputs: Sequence[Tensor | None], outputs: Sequence[Tensor], **options: object
    ) -> Operator:
        """A builtin operator that is in no subgraph yet, in the version that its types need.

        Raises:
            KeyError: its options have no such field.
        """
        table = options_table(name)
        fields = None if table is None else new_table(table, **options)
        made = Operator(OperatorCode(BUILTIN_OPERATORS[name]), inputs, outputs, fields)
        made.code = self.operator_code(name, required_version(made))
        return made

    def signature_name(self, subgraph: Subgraph) -> str:
        """The name users know the subgraph by: its signature's key, else its own name."""
        for signature in self.signatures:
            if signature.subgraph is subgraph:
                return signature.key
        return subgraph.name

    def entry_points(self) -> list[tuple[str, Subgraph]]:
        """What a caller can run, by name: the signatures, or the first subgraph of a model without any."""
        if self.signatures:
            return [(signature.key, signature.subgraph) for signature in self.signatures]
        return [(subgraph.name or "main", subgraph) for subgraph in self.subgraphs[:1]]


class Constants:
    """Makes constant tensors for one subgraph; equal values of equal type share a tensor, and the bytes a buffer."""

    def __init__(self, model: Model) -> None:
        self._buffers = model.constant_buffers
        self._made: dict[tuple[object, ...], Tensor] = {}

    def make(
        self,
        name: str,
        array: NDArray[np.generic],
        dtype: DType,
        quantization: Quantization | None = None,
    ) -> Tensor:
        """A constant with the numbers of `array` (already in the type that stores `dtype`) and its shape."""
        raw, shape = array.tobytes(), tuple(int(size) for size in array.shape)
        key = (raw, shape, dtype, None if quantization is None else quantization.key())
        known = self._made.get(key)
        if known is None:
            known = self._made[key] = self._new(name, raw, shape, dtype, quantization)
        return known

    def _new(
        self, name: str, raw: bytes, shape: Shape, dtype: DType, quantization: Quantization | None
    ) -> Tensor:
        buffer = self._buffers.get(raw)
        if buffer is None:
            buffer = self._buffers[raw] = Buffer(Data(raw))
        return Tensor(name, shape, dtype, quantization=quantization, buffer=buffer)
