"""What a rule sees of the operator it is asked about: shapes, options and known values; it knows no rule."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

from numpy.typing import NDArray

from edge_opt.ir import Operator, Tensor
from edge_opt.ir.options import default_options
from edge_opt.ir.refusal import RefusedError
from edge_opt.shapes.dimension import (
    DYNAMIC,
    Element,
    Shape,
    ShapeError,
    as_dimension,
    element_count,
    is_negative,
    is_number,
    may_be_equal,
    shape_text,
)

Array: TypeAlias = NDArray[Any]
Constant: TypeAlias = Callable[[int], Array | None]
"""Gives the value of input i where it is known. Of an integer value some elements may be unknown: then it is
an object array with None in their places."""

Results: TypeAlias = Sequence[Shape | None]

_MOST_UNKNOWN_ELEMENTS = 64
_MOST_BYTES = 1 << 16  # of a value that may say something about shapes; large ones stay on disk
_ANY_RANK = 1 << 16


def recorded_shape(tensor: Tensor) -> Shape | None:
    """The shape that the file records, -1 for dynamic dimensions, None for an unranked tensor."""
    if tensor.shape_signature:
        return tensor.shape_signature
    return tensor.shape if tensor.has_rank else None


class Fact(NamedTuple):
    """What is known of a tensor: its shape (None unranked) and its value (None, or as `Constant` has it)."""

    shape: Shape | None
    value: Array | None = None


Enter: TypeAlias = Callable[[int, Sequence[Shape | None], Sequence[Array | None]], Sequence[Fact] | None]
"""Derives the outputs of a subgraph from the shapes and known values of its inputs; None where it cannot."""


class Call:
    """One operator with the shapes of its inputs.

    `enter` derives a subgraph's outputs; `assigned` gives the shape assigned to the variable behind input i.

    A rule asks for what it needs. Each question raises `RefusedError` where the answer is not known, which ends the
    rule without a result, and `ShapeError` where the input is not what is asked for.
    """

    __slots__ = ("_constant", "_options", "assigned", "enter", "name", "op", "shapes")

    def __init__(
        self,
        op: Operator,
        shapes: Sequence[Shape | None],
        constant: Constant,
        enter: Enter = lambda *_: None,
        assigned: Callable[[int], Shape | None] = lambda _: None,
    ) -> None:
        self.op = op
        self.name = op.name
        self.shapes = shapes
        self.enter = enter
        self.assigned = assigned
        self._constant = constant
        self._options = op.options or default_options(op.name)

    def option(self, name: str, default: Any = None) -> Any:
        """Return an option's value, the schema's default where it is left out; `default` for an absent vector."""
        if self._options is None:
            return default
        try:
            value = self._options.get(name)
        except KeyError:
            raise ShapeError(f"its options are those of another operator: they have no {name}") from None
        return default if value is None else value

    def flag(self, name: str) -> bool:
        """Return a boolean option."""
        return bool(self.option(name, False))

    def number(self, name: str) -> int:
        """Return a whole number given as an option."""
        return int(self.option(name, 0))

    def listed(self, name: str, count: int | None = None) -> list[int]:
        """Return the whole numbers of a vector given as an option; refuse it where there are not `count`."""
        values = [int(value) for value in self.option(name, ())]
        if count is not None and len(values) != count:
            raise ShapeError(
                f"its {name} has {len(values)} numbers: expected {count}, one per axis of {self.described(0)}"
            )
        return values

    def has(self, index: int) -> bool:
        """Whether input `index` is there; an optional one may be left out, or cut off."""
        return index < len(self.op.inputs) and self.op.inputs[index] is not None

    def label(self, index: int) -> str:
        """Name input `index` in a sentence."""
        tensor = self.op.inputs[index] if index < len(self.op.inputs) else None
        return f"input {index}" if tensor is None else f"tensor '{tensor.name}'"

    def labels(self) -> list[str]:
        """Name every input."""
        return [self.label(index) for index in range(len(self.shapes))]

    def described(self, index: int) -> str:
        """Name input `index` with its shape."""
        return f"{self.label(index)} {shape_text(self.shapes[index])}"

    def recorded(self, index: int) -> Shape | None:
        """Return the recorded shape of output `index`, for operators whose results nothing else states."""
        return recorded_shape(self.op.outputs[index])

    def shape(self, index: int, *, rank: int | None = None, least: int = 0, most: int = _ANY_RANK) -> Shape:
        """Return the shape of input `index`."""
        shape = self.shapes[index]
        if shape is None:
            raise RefusedError("the rank is not known", self.op)
        low, high = (least, most) if rank is None else (rank, rank)
        if low <= len(shape) <= high:
            return shape
        wanted = f"{low} or more" if high == _ANY_RANK else str(low) if low == high else f"{low} to {high}"
        raise ShapeError(f"{self.described(index)} has rank {len(shape)}: expected rank {wanted}")

    def all_shapes(self) -> list[Shape]:
        """Return the shapes of all inputs."""
        return [self.shape(index) for index in range(len(self.shapes))]

    def merged(self, indices: Iterable[int], beside: int | None = None) -> Shape:
        """Return the shape that inputs share but for axis `beside`, each size as far as any of them knows it."""
        first, *others = indices
        dims = list(self.shape(first))
        for index in others:
            shape = self.shape(index)
            if len(shape) != len(dims):
                raise ShapeError(f"{self.described(first)} and {self.described(index)} have different ranks")
            for axis, size in enumerate(shape):
                if axis == beside:
                    continue
                if not may_be_equal(dims[axis], size):
                    where = "in every axis" if beside is None else f"in every axis but {beside}"
                    raise ShapeError(
                        f"{self.described(first)} and {self.described(index)} differ in axis {axis}: "
                        f"expected equal sizes {where}"
                    )
                if dims[axis] < 0 <= size:
                    dims[axis] = size
        return tuple(dims)

    def known(self, index: int) -> Array | None:
        """Return what is known of the value of input `index`: all of it, or some elements, or None."""
        return self._constant(index) if self.has(index) else None

    def is_known(self, index: int) -> bool:
        """Whether every element of input `index` is known."""
        value = self.known(index)
        return value is not None and value.dtype != object

    def value(self, index: int) -> Array:
        """Return the value of input `index`, of which some elements may be unknown."""
        value = self.known(index)
        if value is None:
            raise RefusedError("the value is not known", self.op)
        return value

    def numbers(self, index: int) -> Array:
        """Return the value of input `index`."""
        if not self.is_known(index):
            raise RefusedError("a number is not known", self.op)
        return self.value(index)

    def elements(self, index: int) -> list[Element]:
        """Return the elements of an integer input, None for each that is unknown."""
        value = self.known(index)
        if value is None:
            count = element_count(self.shape(index)) if self.has(index) else DYNAMIC
            if not 0 <= count <= _MOST_UNKNOWN_ELEMENTS:
                raise RefusedError("the number of elements is not known, or too large", self.op)
            return [None] * count
        if value.dtype != object and value.dtype.kind not in "iu":
            raise ShapeError(f"{self.label(index)} has the type {value.dtype}: expected whole numbers")
        elements: list[Element] = value.ravel().tolist()
        return elements

    def integers(self, index: int) -> list[int]:
        """Return the elements of an integer input."""
        elements = self.elements(index)
        known = [element for element in elements if is_number(element)]
        if len(known) < len(elements):
            raise RefusedError("a number is not known", self.op)
        return known

    def vector(self, index: int) -> list[Element]:
        """Return the elements of an input that is a vector, as `elements`."""
        self.shape(index, rank=1)
        return self.elements(index)

    def sizes(self, index: int) -> Shape:
        """Return the shape that input `index` spells out, a vector."""
        sizes = self.vector(index)
        if any(map(is_negative, sizes)):
            raise ShapeError(f"{self.label(index)} has a negative size: {sizes}")
        return tuple(as_dimension(size) for size in sizes)

    def scalar(self, index: int) -> Element:
        """Return the only element of an integer input, None where unknown."""
        try:
            elements = self.elements(index)
        except RefusedError:
            return None
        if len(elements) != 1:
            raise ShapeError(f"{self.label(index)} has {len(elements)} elements: expected one")
        return elements[0]

    def require_single(self, index: int) -> None:
        """Refuse an input that cannot have exactly one element."""
        shape = self.shapes[index]
        if shape is not None and any(dim >= 0 and dim != 1 for dim in shape):
            raise ShapeError(f"{self.described(index)}: expected one element")

    def axis(self, axis: int, rank: int, what: str) -> int:
        """Return the axis counted from the front."""
        if not -rank <= axis < rank:
            raise ShapeError(f"axis {axis} lies outside {what}: expected -{rank} to {rank - 1}")
        return axis % rank

    def axis_of(self, index: int, axis: int | None = None) -> int:
        """As `axis`, of input `index`; by default the one that the option `axis` names."""
        rank = len(self.shape(index))
        return self.axis(self.number("axis") if axis is None else axis, rank, self.described(index))

    def given_axis(self, index: int, given: int) -> int:
        """As `axis_of`, the one that the scalar input `given` names."""
        axis = self.scalar(given)
        if not is_number(axis):
            raise RefusedError("the axis is not known", self.op)
        return self.axis_of(index, axis)


def small_value(tensor: Tensor | None) -> Array | None:
    """The constant's numbers; None for other tensors, large ones, and types that numpy does not have."""
    if tensor is None or not tensor.has_numbers or tensor.wrong_size is not None:
        return None
    assert tensor.buffer is not None
    assert tensor.buffer.data is not None
    return tensor.array() if tensor.buffer.data.length <= _MOST_BYTES else None


def constants_of(operator: Operator) -> Constant:
    """Gives the values of the operator's small constant inputs."""
    return lambda index: small_value(operator.inputs[index])
