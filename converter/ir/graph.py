"""Tensors, operators and subgraphs with use-def chains. Edits go through `Subgraph`, which keeps the chains right.

An operator that is not (yet) in a subgraph reads and defines tensors without their knowing it: a rewrite is built
aside that way, and becomes part of the graph in one step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from edge_opt.ir.dtypes import DType, Quantization, same_quantization
from edge_opt.ir.operators import BUILTIN_OPERATORS, KINDS, default_options
from edge_opt.schema.data import Data
from edge_opt.schema.table import Table

_OPERATOR_NAMES = {code: name for name, code in BUILTIN_OPERATORS.items()}

UNTRUSTED: Final = "UNTRUSTED"
"""The name of an operator whose recorded shapes are wrong."""

Shape = tuple[int, ...]


@dataclass(slots=True, eq=False, repr=False)
class Buffer:
    """Bytes that constant tensors share; `data` is None for the empty buffer. Never edited in place."""

    data: Data | None = None
    table: Table | None = None

    def __repr__(self) -> str:
        return "Buffer()" if self.data is None else f"Buffer({self.data.length} bytes)"


@dataclass(slots=True, eq=False, repr=False)
class Tensor:
    """One value of a subgraph. `shape` holds sizes (dynamic ones as the file records them, usually 1)."""

    name: str
    shape: Shape
    dtype: DType
    _: KW_ONLY
    quantization: Quantization | None = None
    buffer: Buffer | None = None
    shape_signature: Shape | None = None
    is_variable: bool = False
    table: Table | None = None
    producer: Operator | None = field(default=None, init=False)
    readers: dict[Operator, None] = field(default_factory=dict, init=False)

    @property
    def consumers(self) -> list[Operator]:
        """Operators of the subgraph that read this tensor, each once, in the order in which they began to read."""
        return list(self.readers)

    @property
    def has_rank(self) -> bool:
        """False where the file says that not even the number of dimensions is known."""
        # Older writers leave `has_rank` out; a constant's bytes say that it is a scalar.
        table = self.table
        return bool(self.shape) or table is None or bool(table.get("has_rank")) or self.is_constant

    @property
    def is_dynamic(self) -> bool:
        """True where a dimension is known only at run time."""
        return self.shape_signature is not None and -1 in self.shape_signature

    @property
    def is_constant(self) -> bool:
        """True where the bytes of the tensor are in the file."""
        return self.buffer is not None and self.buffer.data is not None and not self.is_variable

    @property
    def is_sparse(self) -> bool:
        """True where the bytes hold only some of the elements, and the file says which."""
        return self.table is not None and self.table.get("sparsity") is not None

    @property
    def has_numbers(self) -> bool:
        """True where `array` can give the numbers: a constant of a type that numpy has, with all its elements."""
        return self.is_constant and self.dtype.numpy is not None and not self.is_sparse

    @property
    def wrong_size(self) -> str | None:
        """Why the bytes of a constant do not fill its shape; None where they do, or where that is unknown."""
        expected = self.dtype.byte_size(self.elements) if self.is_constant and not self.is_sparse else None
        actual = None if self.buffer is None or self.buffer.data is None else self.buffer.data.length
        if expected in (None, actual):
            return None
        return f"{self.dtype.name}{list(self.shape)} needs {expected} bytes, its buffer holds {actual}"

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def is_quantized(self) -> bool:
        """True where the stored integers stand for real numbers."""
        return self.quantization is not None and self.quantization.is_affine

    def array(self) -> NDArray[np.generic]:
        """The constant's stored numbers, shape `shape`; reads the file only now.

        Raises:
            ValueError: if the tensor does not have `has_numbers`.
        """
        dtype, data = self.dtype.numpy, None if self.buffer is None else self.buffer.data
        if not self.has_numbers or dtype is None or data is None:
            raise ValueError(f"tensor '{self.name}' ({self.dtype.name}) has no numbers to read")
        return data.view().view(dtype).reshape(self.shape)

    @property
    def is_blockwise(self) -> bool:
        """True for weights quantized by blocks, which are right in their own subgraph only."""
        return self.quantization is not None and self.quantization.is_blockwise

    def real(self) -> float:
        """The real number that a constant's first element stands for."""
        stored = float(self.array().ravel()[0])
        parameters = self.quantization
        return parameters.real(stored) if parameters is not None and parameters.is_affine else stored

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """The same value for another graph: nothing defines or reads it yet."""
        return replace(self, buffer=deepcopy(self.buffer, memo))

    def __repr__(self) -> str:
        return f"Tensor({self.name!r}, {self.dtype.name}{list(self.shape)})"


def same_type(a: Tensor, b: Tensor) -> bool:
    """True where the bytes of one tensor may stand for the other's: shape, type and quantization agree."""
    return a.dtype == b.dtype and a.shape == b.shape and same_quantization(a.quantization, b.quantization)


@dataclass(frozen=True, slots=True, repr=False)
class OperatorCode:
    """Which operator, in which version; `custom_code` names a custom one. Equal ones are interchangeable."""

    builtin: int
    version: int = 1
    custom_code: str | None = None
    table: Table | None = field(default=None, compare=False)
    name: str = field(init=False, compare=False)
    """The schema's name, e.g. BATCH_MATMUL; CUSTOM for every custom operator."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", _OPERATOR_NAMES.get(self.builtin, f"BUILTIN_{self.builtin}"))

    def __repr__(self) -> str:
        custom = f", {self.custom_code!r}" if self.name == "CUSTOM" else ""
        return f"OperatorCode({self.name}, version {self.version}{custom})"


class Operator:
    """One step of a subgraph. Inputs may be None where an optional one is left out.

    `outputs` are not to be changed, `inputs` by `Subgraph.set_input` only.
    """

    def __init__(
        self,
        code: OperatorCode,
        inputs: Sequence[Tensor | None],
        outputs: Sequence[Tensor],
        options: Table | None = None,
        table: Table | None = None,
        intermediates: Sequence[Tensor] = (),
    ) -> None:
        self.code = code
        self.inputs = tuple(inputs)
        self.outputs = tuple(outputs)
        self.intermediates = tuple(intermediates)
        self.options = options
        self.table = table
        self.shape_error = ""
        """Why its recorded shapes are not what its inputs give; empty where they are, or were not checked."""
        self.subgraph: Subgraph | None = None

    @property
    def name(self) -> str:
        """The schema's name, e.g. BATCH_MATMUL; UNTRUSTED with a `shape_error`, so that no rule takes the operator."""
        return UNTRUSTED if self.shape_error else self.code.name

    @property
    def title(self) -> str:
        """The operator in a sentence: its schema's name, and what is wrong with its shapes."""
        return f"{self.code.name} ({self.shape_error})" if self.shape_error else self.code.name

    @property
    def output(self) -> Tensor:
        """The only output, of operators that have one."""
        assert len(self.outputs) == 1
        return self.outputs[0]

    def input(self, index: int) -> Tensor:
        """Input `index`, which the operator's definition requires to be there."""
        tensor = self.inputs[index]
        assert tensor is not None
        return tensor

    def option(self, name: str) -> int | float | bool:
        """A scalar option's value, or the schema's default where it, or all options, are left out."""
        options = self.options or default_options(self.code.name)
        assert options is not None
        value: int | float | bool = options.get(name)
        return value

    @property
    def least_version(self) -> int:
        """The version that the operator's types need; 1 for one that no rewrite adds."""
        kind = KINDS.get(self.code.name)
        data = kind.data_operands(self.inputs) if kind is not None and kind.versions else []
        if kind is None or not data:
            return 1
        types = [data[0].dtype, *(t.dtype for t in self.outputs if self.code.name == "CAST")]
        return kind.version_for(*types, rank=len(data[0].shape))

    def __deepcopy__(self, memo: dict[int, Any]) -> Operator:
        """The same step on copies of its tensors, in no subgraph; its table is shared."""
        copy = self.on(lambda tensor: deepcopy(tensor, memo))
        copy.options = deepcopy(self.options, memo)
        return copy

    def on(self, tensor: Callable[[Tensor], Tensor]) -> Operator:
        """The operator once more, in no subgraph, on what `tensor` gives for each of its own."""
        inputs = [None if t is None else tensor(t) for t in self.inputs]
        outputs, intermediates = map(tensor, self.outputs), map(tensor, self.intermediates)
        copy = Operator(self.code, inputs, tuple(outputs), self.options, self.table, tuple(intermediates))
        copy.shape_error = self.shape_error
        return copy

    def __repr__(self) -> str:
        inputs, outputs = (
            ", ".join("-" if t is None else f"{t.dtype.name}{list(t.shape)}" for t in tensors)
            for tensors in (self.inputs, self.outputs)
        )
        return f"Operator({self.title}({inputs}) -> {outputs})"


class Subgraph:
    """A graph, its operators in execution order."""

    def __init__(self, name: str = "", table: Table | None = None) -> None:
        self.name = name
        self.table = table
        self.tensors: list[Tensor] = []
        self.inputs: list[Tensor] = []
        self.outputs: list[Tensor] = []
        self.signatures: list[Signature] = []
        self.is_checked = False
        """Operators whose recorded shapes do not fit have a `shape_error`."""
        self._operators: dict[Operator, None] = {}
        self._order: tuple[Operator, ...] | None = None
        self._listed: set[Tensor] = set()

    def __len__(self) -> int:
        return len(self._operators)

    def __deepcopy__(self, memo: dict[int, Any]) -> Subgraph:
        """A graph of its own; constants keep their bytes where they are."""
        copy = memo[id(self)] = Subgraph(self.name, self.table)
        copy.tensors = deepcopy(self.tensors, memo)
        for operator in self.operators:
            copy.append(deepcopy(operator, memo))
        copy.inputs, copy.outputs = deepcopy(self.inputs, memo), deepcopy(self.outputs, memo)
        copy.signatures = deepcopy(self.signatures, memo)
        return copy

    def __repr__(self) -> str:
        return f"Subgraph({self.name!r}, {len(self)} operators)"

    @property
    def operators(self) -> tuple[Operator, ...]:
        """The operators that are there now, in execution order."""
        if self._order is None:
            self._order = tuple(self._operators)
        return self._order

    def __iter__(self) -> Iterator[Operator]:
        return iter(self.operators)

    def is_output(self, tensor: Tensor) -> bool:
        """True where the subgraph gives the tensor to its caller: as an output, or by a signature that names it."""
        named = (signature.outputs.values() for signature in self.signatures)
        return tensor in self.outputs or any(tensor in tensors for tensors in named)

    def add_tensor(self, tensor: Tensor) -> Tensor:
        """List a tensor: it is written even if no operator uses it, and before those that are not listed."""
        self.tensors.append(tensor)
        self._listed.add(tensor)
        return tensor

    def lists(self, tensor: Tensor) -> bool:
        """True where the tensor is listed."""
        # Others may have changed the list meanwhile.
        if len(self._listed) != len(self.tensors):
            self._listed = set(self.tensors)
        return tensor in self._listed

    def append(self, operator: Operator) -> Operator:
        """Add an operator at the end; its tensors learn of it."""
        assert operator.subgraph is None
        operator.subgraph = self
        self._operators[operator] = None
        self._order = None
        for tensor in operator.inputs:
            if tensor is not None:
                tensor.readers[operator] = None
        for output in operator.outputs:
            assert output.producer is None, f"{output} is defined twice"
            output.producer = operator
        return operator

    def remove(self, operator: Operator) -> None:
        """Take an operator out; nothing defines its outputs then."""
        assert operator.subgraph is self
        operator.subgraph = None
        del self._operators[operator]
        self._order = None
        for tensor in operator.inputs:
            if tensor is not None:
                tensor.readers.pop(operator, None)
        for output in operator.outputs:
            output.producer = None

    def arrange(self, operators: Iterable[Operator]) -> None:
        """Hold just these operators, in this order: new ones join the graph, and those that are missing leave it."""
        order = dict.fromkeys(operators)
        for operator in self.operators:
            if operator not in order:
                self.remove(operator)
        for operator in order:
            if operator.subgraph is not self:
                self.append(operator)
        self._operators, self._order = order, None

    def set_input(self, operator: Operator, index: int, tensor: Tensor | None) -> None:
        """Let an operator of this subgraph read another tensor."""
        assert operator.subgraph is self
        old = operator.inputs[index]
        operator.inputs = (*operator.inputs[:index], tensor, *operator.inputs[index + 1 :])
        if old is not None and old not in operator.inputs:
            del old.readers[operator]
        if tensor is not None:
            tensor.readers[operator] = None

    def replace_uses(self, old: Tensor, new: Tensor) -> None:
        """Let every operator that reads `old` read `new`; graph outputs stay as they are."""
        for operator in old.consumers:
            for index, tensor in enumerate(operator.inputs):
                if tensor is old:
                    self.set_input(operator, index, new)


def used_tensors(graph: Subgraph) -> Iterator[Tensor]:
    """What the subgraph's inputs, operators and outputs name, as often as they do."""
    yield from graph.inputs
    for operator in graph.operators:
        yield from (tensor for tensor in operator.inputs if tensor is not None)
        yield from (*operator.outputs, *operator.intermediates)
    yield from graph.outputs


@dataclass(slots=True, eq=False)
class Signature:
    """A named entry point: argument names of one subgraph's inputs and outputs.

    The subgraph knows its signatures: what `outputs` name is an output of it, whenever it is added.
    """

    key: str
    subgraph: Subgraph
    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]
    table: Table | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        self.subgraph.signatures.append(self)
