"""The table of shape rules, and what a rule sees of its operator: shapes, options, known values."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from numpy.typing import NDArray

from edge_opt.ir import Operator, Tensor
from edge_opt.ir.operators import KINDS, default_options
from edge_opt.ir.refusal import RefusedError
from edge_opt.shapes.dimension import (
    Element,
    Shape,
    ShapeError,
    as_shape,
    may_be_equal,
    product,
    shape_text,
    size_of,
)

Array: TypeAlias = NDArray[Any]
Constant: TypeAlias = Callable[[int], Array | None]
"""Gives the value of input i where it is known. Of an integer value some elements may be unknown: then it is
an object array with None in their places."""

Results: TypeAlias = Sequence[Shape | None]

_MOST_UNKNOWN_ELEMENTS = 64
_MOST_BYTES = 1 << 16  # of a value that may say something about shapes; large ones stay on disk


def recorded_shape(tensor: Tensor) -> Shape | None:
    """The shape that the file records, -1 for dynamic dimensions, None for an unranked tensor."""
    if tensor.shape_signature:
        return tensor.shape_signature
    return tensor.shape if tensor.has_rank else None


class Fact(NamedTuple):
    """What is known of a tensor: its shape (None unranked) and its value (None, or as `Constant` has it)."""

    shape: Shape | None
    value: Array | None = None


Enter: TypeAlias = Callable[[int, Sequence[Fact]], Sequence[Fact] | None]
"""Derives the outputs of a subgraph from what is known of its inputs; None where it cannot."""


@dataclass(slots=True)
class Call:
    """One operator with the shapes of its inputs, and what gives their values.

    `enter` derives a subgraph's outputs.

    A rule asks for what it needs. Each question raises `RefusedError` where the answer is not known, which ends the
    rule without a result, and `ShapeError` where the input is not what is asked for.
    """

    op: Operator
    shapes: Sequence[Shape | None]
    constant: Constant
    enter: Enter = lambda *_: None

    @property
    def name(self) -> str:
        """The operator's name."""
        return self.op.name

    def option(self, name: str, default: Any = None) -> Any:
        """Return an option's value, the schema's default where it is left out; `default` for an absent vector."""
        options = self.op.options or default_options(self.name)
        try:
            value = None if options is None else options.get(name)
        except KeyError:
            raise ShapeError(f"its options are those of another operator: they have no {name}") from None
        return default if value is None else value

    def number(self, name: str) -> int:
        """Return a whole number given as an option; of a boolean 0 or 1."""
        return int(self.option(name, 0))

    def listed(self, name: str, count: int | None = None) -> list[int]:
        """Return the whole numbers of a vector given as an option; refuse it where there are not `count`."""
        values = [int(value) for value in self.option(name, ())]
        if count is not None and len(values) != count:
            text = f"its {name} has {len(values)} numbers: expected {count}, one per axis of {self.text(0)}"
            raise ShapeError(text)
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

    def text(self, index: int) -> str:
        """Name input `index` with its shape."""
        return f"{self.label(index)} {shape_text(self.shapes[index])}"

    def shape(self, index: int, *, rank: int | None = None, least: int = 0, most: int | None = None) -> Shape:
        """Return the shape of input `index`; refuse another rank than `rank`, or than `least` to `most`."""
        shape = self.shapes[index]
        if shape is None:
            raise RefusedError("the rank is not known", self.op)
        low, high = (least, most) if rank is None else (rank, rank)
        if len(shape) < low or (high is not None and len(shape) > high):
            ranks = f"{low} or more" if high is None else str(low) if low == high else f"{low} to {high}"
            raise ShapeError(f"{self.text(index)} has rank {len(shape)}: expected rank {ranks}")
        return shape

    def all_shapes(self) -> list[Shape]:
        """Return the shapes of all inputs."""
        return [self.shape(index) for index in range(len(self.shapes))]

    def merged(self, indices: Iterable[int], beside: int | None = None) -> Shape:
        """Return the shape that inputs share but for axis `beside`, each size as far as any of them knows it."""
        first, *others = indices
        sizes = list(self.shape(first))
        for index in others:
            shape, pair = self.shape(index), f"{self.label(first)} and {self.label(index)}"
            if len(shape) != len(sizes):
                raise ShapeError(f"{self.text(first)} and {self.text(index)} have different ranks")
            for axis, size in enumerate(shape):
                if axis != beside and not may_be_equal(sizes[axis], size):
                    where = "every axis" if beside is None else f"every axis but {beside}"
                    text = f"{pair} have sizes {sizes[axis]} and {size} in axis {axis}"
                    raise ShapeError(f"{text}: expected equal sizes in {where}")
                if axis != beside and sizes[axis] < 0:
                    sizes[axis] = size
        return tuple(sizes)

    def value(self, index: int) -> Array | None:
        """Return what is known of the value of input `index`: all of it, or some elements, or None."""
        return self.constant(index) if self.has(index) else None

    def is_known(self, index: int) -> bool:
        """Whether every element of input `index` is known."""
        value = self.value(index)
        return value is not None and value.dtype != object

    def some(self, index: int) -> Array:
        """Return the value of input `index`, of which some elements may be unknown."""
        value = self.value(index)
        if value is None:
            raise RefusedError("the value is not known", self.op)
        return value

    def numbers(self, index: int) -> Array:
        """Return the value of input `index`, of which every element is known."""
        if not self.is_known(index):
            raise RefusedError("a number is not known", self.op)
        return self.some(index)

    def elements(self, index: int, rank: int | None = None) -> list[Element]:
        """Return the elements of an integer input, None for each that is unknown; refuse another rank."""
        if rank is not None:
            self.shape(index, rank=rank)
        value = self.value(index)
        if value is None:
            count = product(*self.shape(index)) if self.has(index) else -1
            if not 0 <= count <= _MOST_UNKNOWN_ELEMENTS:
                raise RefusedError("the number of elements is not known, or too large", self.op)
            return [None] * count
        if value.dtype.kind not in "iuO":
            raise ShapeError(f"{self.label(index)} has the type {value.dtype}: expected whole numbers")
        elements: list[Element] = value.ravel().tolist()
        return elements

    def integers(self, index: int) -> list[int]:
        """Return the elements of an integer input, of which every one is known."""
        elements = self.elements(index)
        known = [element for element in elements if element is not None]
        if len(known) < len(elements):
            raise RefusedError("a number is not known", self.op)
        return known

    def sizes(self, index: int, rank: int | None = None) -> Shape:
        """Return the sizes, or other counts, that input `index` spells out; -1 for each that is unknown."""
        elements = self.elements(index, rank)
        if any(element is not None and element < 0 for element in elements):
            raise ShapeError(f"{self.label(index)} has a negative size: {elements}")
        return tuple(map(size_of, elements))

    def scalar(self, index: int) -> Element:
        """Return the only element of an integer input, None where unknown."""
        try:
            elements = self.elements(index)
        except RefusedError:
            return None
        if len(elements) != 1:
            raise ShapeError(f"{self.label(index)} has {len(elements)} elements: expected one")
        return elements[0]

    def size(self, index: int) -> int:
        """Return the size, or other count, that the scalar input `index` gives; -1 where unknown."""
        element = self.scalar(index)
        if element is not None and element < 0:
            raise ShapeError(f"{self.label(index)} is {element}: expected 0 or more")
        return size_of(element)

    def require_single(self, *indices: int) -> None:
        """Refuse inputs that cannot have exactly one element; of one that is left out nothing is asked."""
        for index in indices:
            shape = self.shapes[index] if self.has(index) else None
            if shape is not None and any(size >= 0 and size != 1 for size in shape):
                raise ShapeError(f"{self.text(index)}: expected one element")

    def axis(self, axis: int, rank: int, what: str) -> int:
        """Return the axis counted from the front."""
        if not -rank <= axis < rank:
            raise ShapeError(f"axis {axis} lies outside {what}: expected -{rank} to {rank - 1}")
        return axis % rank

    def axis_of(self, index: int, axis: int | None = None) -> int:
        """As `axis`, of input `index`; by default the one that the option `axis` names."""
        rank = len(self.shape(index))
        return self.axis(self.number("axis") if axis is None else axis, rank, self.text(index))

    def given_axis(self, index: int, given: int) -> int:
        """As `axis_of`, the one that the scalar input `given` names."""
        axis = self.scalar(given)
        if axis is None:
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


Rule: TypeAlias = Callable[[Call], Results]


class RuleEntry(NamedTuple):
    """A rule, and where it comes from."""

    rule: Rule
    source: str


RULES: dict[str, RuleEntry] = {}


def rule(names: str, source: str) -> Callable[[Rule], Rule]:
    """Enter a rule for the named operators (the schema's names, one after the other), and say where it comes from."""

    def enter(function: Rule) -> Rule:
        for name in names.split():
            assert name not in RULES, f"{name} has two rules"
            RULES[name] = RuleEntry(function, source)
        return function

    return enter


def apply(call: Call) -> Results:
    """Derive the shapes of the results by the operator's rule, None for each where too little is known.

    Raises:
        ShapeError: the inputs cannot go together; the sentence has no place yet.
    """
    outputs = call.op.outputs
    reason = KINDS[call.name].misfit(call.op.inputs, outputs)
    if reason is not None:
        raise ShapeError(f"it {reason}")
    try:
        results = RULES[call.name].rule(call)
    except RefusedError:
        return [None] * len(outputs)
    assert len(results) == len(outputs), f"{call.name}: {len(results)} results"
    return results


def infer_operator(
    op: Operator,
    input_shapes: Sequence[Shape | None],
    constant: Constant = lambda _: None,
    enter: Enter = lambda *_: None,
) -> Results:
    """Infer the shapes of an operator's results.

    Args:
        op: the operator; only its name, options and the names and dtypes of its tensors are read, recorded
            shapes are not.
        input_shapes: one for each input, -1 a dynamic dimension, None for an unranked tensor and
            for an optional input that is left out.
        constant: gives the value of input i where it is known (the shape operand of a RESHAPE), else None.
        enter: derives the outputs of a subgraph, for control flow and composites; without it those are None.

    Returns:
        One shape for each output, None where not even the rank is known (and for operators without a rule).

    Raises:
        ShapeError: the inputs cannot go together; names the operator, tensors, axes and sizes.
    """
    if op.name not in RULES:
        return [None] * len(op.outputs)
    try:
        if len(input_shapes) != len(op.inputs):
            raise ShapeError(f"{len(input_shapes)} input shapes for {len(op.inputs)} inputs")
        shapes = [as_shape(shape, f"input {index}") for index, shape in enumerate(input_shapes)]
        return apply(Call(op, shapes, constant, enter))
    except ShapeError as error:
        raise error.at(op.name) from None
