"""Tensors, operators and subgraphs with use-def chains. Edit through `Subgraph`, which keeps the chains consistent.

An operator outside a subgraph does not register with its tensors, so a rewrite can be built first and then added to
the graph in one step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_opt.base.words import listed, shortened
from edge_opt.ir.dtypes import NOT_QUANTIZED, DType, Quantization
from edge_opt.ir.operators import OPERATOR_NAMES, default_options
from edge_opt.schema.data import Data
from edge_opt.schema.table import Table, new_table

UNTRUSTED = "UNTRUSTED"
"""The name of an operator whose recorded shapes are wrong."""

Shape = tuple[int, ...]

_NO_TABLE = new_table("Tensor").key()
# Fields of the file's table that a `Tensor` has itself. All others count, also those of newer schemas.
_MODELLED_FIELDS = (
    "name",
    "shape",
    "type",
    "buffer",
    "quantization",
    "is_variable",
    "shape_signature",
    "has_rank",
)


@dataclass(slots=True, eq=False)
class Buffer:
    """Bytes shared by constant tensors; `data` is None for the empty buffer. Never edited in place."""

    data: Data | None = None
    table: Table | None = None


@dataclass(slots=True, eq=False, repr=False)
class Tensor:
    """One value of a subgraph. Dynamic sizes in `shape` are as the file records them, usually 1."""

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
        """Operators that read this tensor, each once, in the order in which they were added as readers."""
        return list(self.readers)

    @property
    def has_rank(self) -> bool:
        """False if the file records an unknown number of dimensions."""
        # Older writers omit `has_rank`; a constant with an empty shape is a scalar.
        table = self.table
        return bool(self.shape) or table is None or bool(table.get("has_rank")) or self.is_constant

    @property
    def is_dynamic(self) -> bool:
        """True if a dimension is known only at run time."""
        return self.shape_signature is not None and -1 in self.shape_signature

    @property
    def data(self) -> Data | None:
        """The bytes in the tensor's buffer, of a variable, too; None without any."""
        return None if self.buffer is None else self.buffer.data

    @property
    def is_constant(self) -> bool:
        """True if the tensor's bytes are stored in the file."""
        return self.data is not None and not self.is_variable

    @property
    def is_sparse(self) -> bool:
        """True if the file stores only some of the elements, with their positions."""
        return self.table is not None and self.table.get("sparsity") is not None

    @property
    def is_outside(self) -> bool:
        """True if the tensor's bytes are in another file, or in another section of a bundle; neither is opened."""
        return self.table is not None and bool(self.table.get("external_buffer"))

    @property
    def has_numbers(self) -> bool:
        """True if `array` can return the numbers: a dense constant of a type that numpy supports."""
        return self.is_constant and self.dtype.numpy is not None and not self.is_sparse

    @property
    def wrong_size(self) -> str | None:
        """Why a constant's size in bytes does not match its shape; None if it matches or cannot be checked."""
        data = self.data
        if data is None or self.is_variable or self.is_sparse:
            return None
        expected = self.dtype.byte_size(self.elements)
        if expected in (None, data.length):
            return None
        title = f"{self.dtype.name}{list(self.shape)}"
        return f"{title} needs {expected} bytes, its buffer holds {data.length}"

    @property
    def kind(self) -> Hashable:
        """Everything that gives the bytes their meaning: type, shape, quantization, and fields such as sparsity."""
        others = _NO_TABLE if self.table is None else self.table.key(_MODELLED_FIELDS)
        return self.dtype, self.shape, (self.quantization or NOT_QUANTIZED).key(), others

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def is_quantized(self) -> bool:
        """True if the stored integers represent real numbers."""
        return self.quantization is not None and self.quantization.is_affine

    def array(self) -> NDArray[np.generic]:
        """The constant's stored numbers in shape `shape`, read from the file on demand.

        Raises:
            ValueError: if `has_numbers` is False.
        """
        dtype = self.dtype.numpy
        data = self.data
        if not self.has_numbers or dtype is None or data is None:
            raise ValueError(f"tensor '{self.name}' ({self.dtype.name}) has no numbers to read")
        return data.view().view(dtype).reshape(self.shape)

    def numpy(self) -> NDArray[np.generic]:
        """The same as `array`, under the name that onnx_ir and torch use."""
        return self.array()

    @property
    def is_blockwise(self) -> bool:
        """True for blockwise-quantized weights, which are valid only in their own subgraph."""
        return self.quantization is not None and self.quantization.is_blockwise

    def real(self) -> float:
        """The real value of a constant's first element."""
        stored = float(self.array().ravel()[0])
        parameters = self.quantization
        if parameters is None or not parameters.is_affine:
            return stored
        return parameters.real(stored)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """Return a copy for another graph, without a producer or readers."""
        return replace(self, buffer=deepcopy(self.buffer, memo))

    def __repr__(self) -> str:
        return f"Tensor({self.name!r}, {self.dtype.name}{list(self.shape)})"


def same_type(a: Tensor, b: Tensor) -> bool:
    """True if all that gives bytes their meaning agrees, so that one tensor's bytes can replace the other's."""
    return a.kind == b.kind


@dataclass(frozen=True, slots=True)
class OperatorCode:
    """An operator type and version; `custom_code` names a custom operator. Equal codes are interchangeable."""

    builtin: int
    version: int = 1
    custom_code: str | None = None
    table: Table | None = field(default=None, compare=False)
    name: str = field(init=False, compare=False)
    """The schema's name, e.g. BATCH_MATMUL; CUSTOM for every custom operator."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", OPERATOR_NAMES[self.builtin])


class Operator:
    """One step of a subgraph. An omitted optional input is None.

    Do not change `outputs`; change `inputs` only with `Subgraph.set_inputs`.
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
        """Why the recorded shapes differ from the inferred ones; empty if they agree or were not checked."""
        self.subgraph: Subgraph | None = None

    @property
    def name(self) -> str:
        """The schema's name, e.g. BATCH_MATMUL; UNTRUSTED if there is a `shape_error`, so that no rule matches."""
        return UNTRUSTED if self.shape_error else self.code.name

    @property
    def title(self) -> str:
        """The operator as messages show it: the schema's name and any shape error."""
        return f"{self.code.name} ({self.shape_error})" if self.shape_error else self.code.name

    @property
    def label(self) -> str:
        """The first output's name; without outputs, the operator's name and its place in its subgraph."""
        if self.outputs:
            return self.outputs[0].name
        siblings = () if self.subgraph is None else self.subgraph.operators
        place = siblings.index(self) if self in siblings else "?"
        return f"{self.code.name} {place}"

    @property
    def given(self) -> tuple[Tensor, ...]:
        """The inputs that are not omitted."""
        return tuple(tensor for tensor in self.inputs if tensor is not None)

    @property
    def computed(self) -> list[Tensor]:
        """The inputs that are neither omitted nor constant."""
        return [tensor for tensor in self.given if not tensor.is_constant]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors that the operator names."""
        return (*self.given, *self.outputs, *self.intermediates)

    @property
    def output(self) -> Tensor:
        """The only output; the operator must have exactly one."""
        assert len(self.outputs) == 1
        return self.outputs[0]

    def input(self, index: int) -> Tensor:
        """Input `index`, which must be a required input of the operator."""
        tensor = self.inputs[index]
        assert tensor is not None
        return tensor

    def option(self, name: str) -> int | float | bool:
        """A scalar option's value, or the schema's default if it is omitted."""
        options = self.options or default_options(self.code.name)
        assert options is not None
        value: int | float | bool = options.get(name)
        return value

    @property
    def has_activation(self) -> bool:
        """True if an activation is fused into the operator, which then clips its result."""
        options = self.options
        return options is not None and bool(options.fields.get("fused_activation_function"))

    def on(self, other: Callable[[Tensor], Tensor]) -> Operator:
        """A copy, in no subgraph yet, on other tensors: `other(t)` in place of each tensor `t`."""
        inputs = [None if tensor is None else other(tensor) for tensor in self.inputs]
        outputs = [*map(other, self.outputs)]
        intermediates = [*map(other, self.intermediates)]
        copy = Operator(self.code, inputs, outputs, self.options, self.table, intermediates)
        copy.shape_error = self.shape_error
        return copy

    def __repr__(self) -> str:
        # A PACK may have thousands of inputs, and a name may be any text of a file.
        inputs = ["none" if one is None else repr(shortened(one.name)) for one in self.inputs]
        outputs = [
            f"{shortened(one.name)!r} {one.dtype.name}{list(one.shape)}" for one in self.outputs
        ]
        return f"Operator({self.code.name}({listed(inputs, 3)}) -> {listed(outputs, 2)})"


class Subgraph:
    """A graph with its operators in execution order."""

    def __init__(self, name: str = "", table: Table | None = None) -> None:
        self.name = name
        self.table = table
        self.tensors: list[Tensor] = []
        self.inputs: list[Tensor] = []
        self.outputs: list[Tensor] = []
        self.signatures: list[Signature] = []
        self.is_checked = False
        """True once every operator with wrong recorded shapes has a `shape_error`."""
        self._places: dict[Operator, int] = {}  # in execution order
        self._operators: tuple[Operator, ...] | None = None
        self._listed: set[Tensor] = set()

    def __len__(self) -> int:
        return len(self._places)

    def __deepcopy__(self, memo: dict[int, Any]) -> Subgraph:
        """Return an independent graph; constants still share their bytes."""
        copy = memo[id(self)] = Subgraph(self.name, self.table)
        copy.tensors = deepcopy(self.tensors, memo)
        for operator in self.operators:
            copied = copy.append(operator.on(lambda tensor: deepcopy(tensor, memo)))
            copied.options = deepcopy(operator.options, memo)
        copy.inputs = deepcopy(self.inputs, memo)
        copy.outputs = deepcopy(self.outputs, memo)
        copy.signatures = deepcopy(self.signatures, memo)
        return copy

    def __repr__(self) -> str:
        return f"Subgraph({self.name!r}, {len(self)} operators)"

    @property
    def operators(self) -> tuple[Operator, ...]:
        """The current operators in execution order."""
        if self._operators is None:
            self._operators = tuple(self._places)
        return self._operators

    def __iter__(self) -> Iterator[Operator]:
        return iter(self.operators)

    def is_output(self, tensor: Tensor) -> bool:
        """True if the tensor is an output of the subgraph or of one of its signatures."""
        named = (signature.outputs.values() for signature in self.signatures)
        return tensor in self.outputs or any(tensor in tensors for tensors in named)

    def add_tensor(self, tensor: Tensor) -> Tensor:
        """List a tensor: it is written even if unused, and before unlisted tensors."""
        self.tensors.append(tensor)
        self._listed.add(tensor)
        return tensor

    def lists(self, tensor: Tensor) -> bool:
        """True if the tensor is listed."""
        # `tensors` may have been edited directly.
        if len(self._listed) != len(self.tensors):
            self._listed = set(self.tensors)
        return tensor in self._listed

    def place(self, operator: Operator) -> int:
        """A number that grows along the execution order; valid until the next operator is added."""
        return self._places[operator]

    def after(self, operator: Operator) -> Operator | None:
        """The operator that runs next; None after the last one."""
        index = self.operators.index(operator) + 1
        return self.operators[index] if index < len(self) else None

    def append(self, operator: Operator) -> Operator:
        """Add an operator at the end and register it with its tensors."""
        self._register(operator)
        self._places[operator] = 1 + next(reversed(self._places.values()), -1)
        self._operators = None
        return operator

    def put(self, operator: Operator, before: Operator | None = None) -> None:
        """Add an operator in front of another one, or at the end; one of this graph moves there."""
        self.replace((), {operator: before})

    def remove(self, operator: Operator) -> None:
        """Remove an operator; its outputs then have no producer."""
        assert operator.subgraph is self
        operator.subgraph = None
        del self._places[operator]
        self._operators = None
        for tensor in operator.given:
            tensor.readers.pop(operator, None)
        for output in operator.outputs:
            output.producer = None

    def replace(
        self, removed: Iterable[Operator], placed: Mapping[Operator, Operator | None]
    ) -> None:
        """Remove operators, then put others in front of those given for them, or at the end."""
        for operator in removed:
            self.remove(operator)
        in_front: dict[Operator | None, list[Operator]] = {}
        for operator, before in placed.items():
            assert before is None or (before in self._places and before not in placed)
            in_front.setdefault(before, []).append(operator)
        row: list[Operator] = []
        for present in self.operators:
            row += in_front.get(present, ())
            if present not in placed:
                row.append(present)
        for operator in placed:
            if operator.subgraph is not self:
                self._register(operator)
        row += in_front.get(None, ())
        self._places = {operator: place for place, operator in enumerate(row)}
        self._operators = None

    def _register(self, operator: Operator) -> None:
        """Make an operator, which is in no graph, known to its tensors."""
        assert operator.subgraph is None
        operator.subgraph = self
        for tensor in operator.given:
            tensor.readers[operator] = None
        for output in operator.outputs:
            assert output.producer is None, f"{output} is defined twice"
            output.producer = operator

    def arrange(self, operators: Iterable[Operator]) -> None:
        """Make these the graph's operators, in this order: add new ones, remove missing ones."""
        order = dict[Operator, None].fromkeys(operators)
        self.replace([operator for operator in self.operators if operator not in order], order)

    def set_input(self, operator: Operator, index: int, tensor: Tensor | None) -> None:
        """Make an operator of this subgraph read another tensor."""
        self.set_inputs(operator, (*operator.inputs[:index], tensor, *operator.inputs[index + 1 :]))

    def set_inputs(self, operator: Operator, tensors: Sequence[Tensor | None]) -> None:
        """Make an operator of this subgraph read other tensors."""
        assert operator.subgraph is self
        read = set(tensors)
        for tensor in operator.given:
            if tensor not in read:
                tensor.readers.pop(operator, None)
        operator.inputs = tuple(tensors)
        for tensor in operator.given:
            tensor.readers[operator] = None

    def replace_uses(self, old: Tensor, new: Tensor) -> None:
        """Make every reader of `old` read `new`; graph outputs do not change."""
        for operator in old.consumers:
            self.set_inputs(
                operator, [new if tensor is old else tensor for tensor in operator.inputs]
            )


def used_tensors(graph: Subgraph) -> Iterator[Tensor]:
    """Yield the tensors of the subgraph's inputs, operators and outputs, with repeats."""
    yield from graph.inputs
    for operator in graph.operators:
        yield from operator.tensors
    yield from graph.outputs


@dataclass(slots=True, eq=False)
class Signature:
    """A named entry point: argument names of one subgraph's inputs and outputs.

    A signature registers with its subgraph, which then treats the tensors in `outputs` as its outputs.
    """

    key: str
    subgraph: Subgraph
    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]
    table: Table | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        self.subgraph.signatures.append(self)
