"""The table of shape rules, and what a rule sees of its operator: shapes, options, known values."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeAlias

from numpy.typing import NDArray

from edge_opt.ir import Operator, Tensor
from edge_opt.ir.operators import KINDS, default_options
from edge_opt.ir.refusal import RefusedError
from edge_opt.shapes.dimension import OPEN, Shape, ShapeError, as_shape, may_be_equal, product, shape_text

Array: TypeAlias = NDArray[Any]
Element: TypeAlias = int | None
"""One number of a value that shapes depend on, None where unknown: there -1 is a number, e.g. an axis."""
Constant: TypeAlias = Callable[[int], Array | None]
"""Gives the value of input i where it is known. Of an integer value some elements may be unknown: then it is
an object array with None in their places."""
Results: TypeAlias = Sequence[Shape | None]

_MOST_UNKNOWN_ELEMENTS = 64
_MOST_BYTES = 1 << 16  # of a value that may say something about shapes; large ones stay on disk


class Fact(NamedTuple):
    """What is known of a tensor: its shape (None unranked) and its value (None, or as `Constant` has it)."""

    shape: Shape | None
    value: Array | None = None


CALLS: Final = {"CALL": "subgraph", "STABLEHLO_COMPOSITE": "decomposition_subgraph_index"}
"""Operators that compute what a subgraph does, and the option that names it."""

Enter: TypeAlias = Callable[[int, Sequence[Fact]], Sequence[Fact] | None]
"""Infers the outputs of a subgraph from what is known of its inputs; None where it cannot."""


@dataclass(slots=True)
class Call:
    """One operator with the shapes of its inputs, what gives their values, and what infers a subgraph's outputs.

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
        """An option's value, the schema's default where it is left out; `default` for an absent vector."""
        options = self.op.options or default_options(self.name)
        try:
            value = None if options is None else options.get(name)
        except KeyError:
            raise ShapeError(f"its options are those of another operator: they have no {name}") from None
        return default if value is None else value

    def number(self, name: str) -> int:
        """A whole number given as an option; of a boolean 0 or 1."""
        return int(self.option(name, 0))

    def listed(self, name: str) -> list[int]:
        """The whole numbers of a vector given as an option."""
        return [int(value) for value in self.option(name, ())]

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

    def expect(self, fine: bool, what: str) -> None:
        """Refuse the inputs, naming each with its shape, unless they are `fine`; `what` says what is expected."""
        if not fine:
            raise ShapeError(f"{', '.join(map(self.text, range(len(self.shapes))))}: expected {what}")

    def shape(self, index: int, *, rank: int | None = None, least: int = 0, most: int = 64) -> Shape:
        """The shape of input `index`, which must have `rank`, or a rank from `least` to `most`."""
        shape = self.shapes[index]
        if shape is None:
            raise RefusedError("the rank is not known", self.op)
        least, most = (least, most) if rank is None else (rank, rank)
        if not least <= len(shape) <= most:
            ranks = str(least) if least == most else f"{least} to {most}"
            raise ShapeError(f"{self.text(index)} has rank {len(shape)}: expected {ranks}")
        return shape

    def all_shapes(self) -> list[Shape]:
        """The shapes of all inputs."""
        return [self.shape(index) for index in range(len(self.shapes))]

    def merged(self, indices: Iterable[int], beside: int | None = None) -> Shape:
        """The shape that inputs share except for axis `beside`, each size as far as any of them knows it."""
        first, *others = indices
        sizes = list(self.shape(first))
        for shape in map(self.shape, others):
            self.expect(len(shape) == len(sizes), "one rank")
            for axis, size in enumerate(shape):
                if axis != beside:
                    self.expect(may_be_equal(sizes[axis], size), f"equal sizes in axis {axis}")
                    sizes[axis] = max(sizes[axis], size)
        return tuple(sizes)

    def value(self, index: int) -> Array | None:
        """What is known of the value of input `index`: all of it, or some elements, or None."""
        return self.constant(index) if self.has(index) else None

    def is_known(self, index: int) -> bool:
        """Whether every element of input `index` is known."""
        value = self.value(index)
        return value is not None and value.dtype != object

    def some(self, index: int) -> Array:
        """The value of input `index`, of which some elements may be unknown."""
        value = self.value(index)
        if value is None:
            raise RefusedError("the value is not known", self.op)
        return value

    def numbers(self, index: int) -> Array:
        """The value of input `index`, of which every element is known."""
        if not self.is_known(index):
            raise RefusedError("a number is not known", self.op)
        return self.some(index)

    def elements(self, index: int, rank: int | None = None) -> list[Element]:
        """The elements of an integer input (of this rank), None for each that is unknown."""
        if rank is not None:
            self.shape(index, rank=rank)
        value = self.value(index)
        if value is None:
            count = product(*self.shape(index)) if self.has(index) else OPEN
            if not 0 <= count <= _MOST_UNKNOWN_ELEMENTS:
                raise RefusedError("the number of elements is not known, or too large", self.op)
            return [None] * count
        if value.dtype.kind not in "iuO":
            raise ShapeError(f"{self.label(index)} has the type {value.dtype}: expected whole numbers")
        elements: list[Element] = value.ravel().tolist()
        return elements

    def integers(self, index: int) -> list[int]:
        """The elements of an integer input, of which every one is known."""
        elements = self.elements(index)
        known = [element for element in elements if element is not None]
        if len(known) < len(elements):
            raise RefusedError("a number is not known", self.op)
        return known

    def sizes(self, index: int, rank: int | None = None) -> Shape:
        """The sizes, or other counts, that input `index` spells out; -1 for each that is unknown."""
        elements = self.elements(index, rank)
        if any(element is not None and element < 0 for element in elements):
            raise ShapeError(f"{self.label(index)} has a negative size: {elements}")
        return tuple(OPEN if element is None else element for element in elements)

    def scalar(self, index: int) -> Element:
        """The only element of an integer input, None where unknown."""
        elements = self.elements(index)
        self.expect(len(elements) == 1, f"one element in {self.label(index)}")
        return elements[0]

    def axis(self, axis: int, rank: int) -> int:
        """The axis counted from the front."""
        self.expect(-rank <= axis < rank, f"an axis from -{rank} to {rank - 1}, not {axis}")
        return axis % rank

    def axis_of(self, index: int, axis: int | None = None) -> int:
        """As `axis`, of input `index`; by default the one that the option `axis` names."""
        return self.axis(self.number("axis") if axis is None else axis, len(self.shape(index)))

    def given_axis(self, index: int, given: int) -> int:
        """As `axis_of`, the one that the scalar input `given` names."""
        axis = self.scalar(given)
        if axis is None:
            raise RefusedError("the axis is not known", self.op)
        return self.axis_of(index, axis)

    def entered(self) -> Sequence[Fact]:
        """What the subgraph of a composite or call gives for the inputs."""
        facts = [Fact(shape, self.value(index)) for index, shape in enumerate(self.shapes)]
        results = self.enter(self.number(CALLS[self.name]), facts)
        if results is None:
            raise RefusedError("the results of the subgraph are not known", self.op)
        if len(results) != len(self.op.outputs):
            raise ShapeError(f"its subgraph has {len(results)} outputs: expected {len(self.op.outputs)}")
        return results


def recorded_shape(tensor: Tensor) -> Shape | None:
    """The shape that the file records, -1 for open dimensions, None for an unranked tensor."""
    if tensor.shape_signature:
        return tensor.shape_signature
    return tensor.shape if tensor.has_rank else None


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
    """Enter a rule for the named operators (the schema's names, separated by spaces) with its source."""

    def enter(function: Rule) -> Rule:
        for name in names.split():
            assert name not in RULES, f"{name} has two rules"
            RULES[name] = RuleEntry(function, source)
        return function

    return enter


@rule("CALL STABLEHLO_COMPOSITE", "TFLite, stablehlo_composite.cc, Prepare (CALL has no kernel)")
def composite(call: Call) -> Results:
    """The results are those of the subgraph (a composite's decomposition), entered with the inputs."""
    return [fact.shape for fact in call.entered()]


def apply(call: Call) -> Results:
    """Infer the shapes of the results by the operator's rule; None for each where too little is known.

    Raises:
        ShapeError: the inputs cannot go together; the sentence has no place yet.
    """
    outputs = call.op.outputs
    if call.name not in RULES:
        return [None] * len(outputs)
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
    op: Operator, input_shapes: Sequence[Shape | None], constant: Constant = lambda _: None
) -> Results:
    """Infer the shapes of an operator's results.

    Args:
        op: the operator; only its name, options and the names and types of its tensors are read, not their shapes.
        input_shapes: one for each input, -1 an open dimension, None for an unranked tensor and for an optional input
            that is left out.
        constant: gives the value of input i where it is known (the shape operand of a RESHAPE), else None.

    Returns:
        One shape for each output, None where not even the rank is known (and for operators without a rule).

    Raises:
        ShapeError: the inputs cannot go together; names the operator, tensors, axes and sizes.
    """
    try:
        if len(input_shapes) != len(op.inputs):
            raise ShapeError(f"{len(input_shapes)} input shapes for {len(op.inputs)} inputs")
        shapes = [as_shape(shape, f"input {index}") for index, shape in enumerate(input_shapes)]
        return apply(Call(op, shapes, constant))
    except ShapeError as error:
        raise ShapeError(error.detail, op.name) from None
