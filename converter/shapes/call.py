"""What a rule sees of the operator it is asked about: shapes, options and known values; it knows no rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from numpy.typing import NDArray

from edge_opt.shapes.dimension import DYNAMIC, Dim, Shape, as_shape, normalize_axis, shape_text
from edge_opt.shapes.errors import ShapeError

if TYPE_CHECKING:
    from edge_opt.ir import Operator, Tensor

Array: TypeAlias = NDArray[Any]
Constant: TypeAlias = Callable[[int], Array | None]
"""Gives the value of input i where it is known. Of an integer value some elements may be unknown: then it is
an object array with None, or a `Dim`, in their places."""

Element: TypeAlias = int | None
Results: TypeAlias = Sequence[Shape | None]

_MOST_UNKNOWN_ELEMENTS = 64


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
        self._options = op.options

    def option(self, name: str, default: Any = None) -> Any:
        """Return an option's value; `default` where there are no options or the value is an absent vector.

        Raises:
            ShapeError: the options table has no such field.
        """
        if self._options is None:
            return default
        try:
            value = self._options.get(name)
        except KeyError:
            raise ShapeError(f"its options are those of another operator: they have no {name}") from None
        return default if value is None else value

    def flag(self, name: str) -> bool:
        """Return a boolean option, False where the operator has no options."""
        return bool(self.option(name, False))

    def number(self, name: str, default: int = 0) -> int:
        """Return a whole number given as an option."""
        return int(self.option(name, default))

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

    def known(self, index: int) -> Array | None:
        """Return what is known of the value of input `index`: all of it, or some elements, or None."""
        return self._constant(index) if self.has(index) else None

    def value(self, index: int) -> Array | None:
        """Return the value of input `index` where all of it is known."""
        value = self.known(index)
        return None if value is None or value.dtype == object else value

    def elements(self, index: int) -> list[Element] | None:
        """Return the elements of an integer input, None for each that is unknown.

        The result is None where not even their number is known.
        """
        if not self.has(index):
            return None
        value = self._constant(index)
        if value is None:
            return self._unknown_elements(index)
        if value.dtype != object and value.dtype.kind not in "iu":
            raise ShapeError(f"{self.label(index)} has the type {value.dtype}: expected whole numbers")
        elements: list[Element] = value.ravel().tolist()
        return elements

    def _unknown_elements(self, index: int) -> list[Element] | None:
        shape = self.shapes[index]
        if shape is None or len(shape) > 1:
            return None
        count = shape[0] if shape else 1
        return [None] * count if 0 <= count <= _MOST_UNKNOWN_ELEMENTS else None

    def integers(self, index: int) -> list[int] | None:
        """Return the elements of an integer input where all are known."""
        elements = self.elements(index)
        if elements is None:
            return None
        known = [element for element in elements if element is not None and not isinstance(element, Dim)]
        return known if len(known) == len(elements) else None

    def sizes(self, index: int) -> Shape | None:
        """Return the shape that input `index` spells out, a vector; None where not even its length is known.

        Raises:
            ShapeError: the input is no vector, or a known size is negative.
        """
        self.require_rank(index, 1)
        elements = self.elements(index)
        if elements is None:
            return None
        if any(size is not None and size < 0 and not isinstance(size, Dim) for size in elements):
            raise ShapeError(f"{self.label(index)} has a negative size: {elements}")
        return tuple(as_dimension(size) for size in elements)

    def scalar(self, index: int) -> Element:
        """Return the only element of an integer input, None where unknown.

        Raises:
            ShapeError: the input has more than one element.
        """
        elements = self.elements(index)
        if elements is None:
            return None
        if len(elements) != 1:
            raise ShapeError(f"{self.label(index)} has {len(elements)} elements: expected one")
        return elements[0]

    def require_rank(self, index: int, low: int, high: int | None = None) -> Shape | None:
        """Return the shape of input `index`, None where unranked.

        Raises:
            ShapeError: its rank lies outside [low, high].
        """
        shape = self.shapes[index]
        if shape is None or low <= len(shape) <= (low if high is None else high):
            return shape
        wanted = str(low) if high in (None, low) else f"{low} to {high}"
        raise ShapeError(f"{self.described(index)} has rank {len(shape)}: expected rank {wanted}")

    def require_single(self, index: int) -> None:
        """Refuse an input that cannot have exactly one element.

        Raises:
            ShapeError: the sizes are known, and their product is not 1.
        """
        shape = self.shapes[index]
        if shape is not None and any(dim >= 0 and dim != 1 for dim in shape):
            raise ShapeError(f"{self.described(index)}: expected one element")

    def axis(self, axis: int, rank: int, what: str) -> int:
        """Return the axis counted from the front.

        Raises:
            ShapeError: it lies outside [-rank, rank).
        """
        normal = normalize_axis(axis, rank)
        if normal is None:
            raise ShapeError(f"axis {axis} lies outside {what}: expected -{rank} to {rank - 1}")
        return normal

    def axis_of(self, index: int, axis: int | None = None) -> int:
        """As `axis`, of input `index`; by default the one that the option `axis` names."""
        rank = len(self.shapes[index] or ())
        return self.axis(self.number("axis") if axis is None else axis, rank, self.described(index))


def as_dimension(element: Element) -> int:
    """Return the dimension that an element of a shape operand stands for."""
    return DYNAMIC if element is None else element


def checked_shapes(op: Operator, shapes: Sequence[Shape | None]) -> list[Shape | None]:
    """Return the shapes as tuples of whole numbers, one for each input.

    Raises:
        ShapeError: their number is not that of the operator's inputs, or a dimension is no size.
    """
    if len(shapes) != len(op.inputs):
        raise ShapeError(f"{len(shapes)} input shapes for {len(op.inputs)} inputs")
    return [as_shape(shape, f"input {index}") for index, shape in enumerate(shapes)]
