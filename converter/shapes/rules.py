"""The table of shape rules, and a rule's view of its operator: shapes, options, known values."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

from numpy.typing import NDArray

from edge_opt.ir import Operator, Tensor
from edge_opt.shapes.dimension import OPEN, Shape, ShapeError, may_be_equal, product, shape_text

Array: TypeAlias = NDArray[Any]
Results: TypeAlias = Sequence[Shape | None]

_MOST_UNKNOWN_ELEMENTS = 64
_MOST_BYTES = 1 << 16  # of a value that shapes may depend on; larger ones stay on disk


class UnknownError(Exception):
    """Too little is known: ends a rule or folder without a result, and is never shown to users."""


class Fact(NamedTuple):
    """Known facts about a tensor: its shape (None: unranked) and its value (None: unknown)."""

    shape: Shape | None
    value: Array | None = None

    @property
    def is_known_scalar(self) -> bool:
        """True for a scalar whose value is known."""
        return self.shape == () and self.value is not None

    @property
    def is_open(self) -> bool:
        """True if a size is known only at run time."""
        return self.shape is not None and OPEN in self.shape

    @property
    def key(self) -> object:
        """A value that is equal for equal facts, for use in a dictionary."""
        value = self.value
        return self.shape if value is None else (self.shape, value.dtype.str, value.tobytes())


class Call(NamedTuple):
    """One operator and the known facts about its inputs.

    Methods raise `UnknownError` if the answer is unknown, and `ShapeError` if the input is invalid.
    """

    op: Operator
    inputs: Sequence[Fact]

    def option(self, name: str) -> int:
        """An integer option; 0 or 1 for a boolean."""
        return int(self.op.option(name))

    def has(self, index: int) -> bool:
        """True if input `index` exists; optional ones may be omitted or missing at the end."""
        return index < len(self.op.inputs) and self.op.inputs[index] is not None

    def labels(self) -> list[str]:
        """The name of every input, for messages."""
        return [
            "nothing" if tensor is None else f"tensor '{tensor.name}'" for tensor in self.op.inputs
        ]

    def expect(self, fine: bool, what: str) -> None:
        """Raise a ShapeError with every input's name and shape unless `fine`; `what` was expected."""
        if fine:
            return
        shapes = [shape_text(fact.shape) for fact in self.inputs]
        texts = map(" ".join, zip(self.labels(), shapes, strict=True))
        raise ShapeError(f"{', '.join(texts)}: expected {what}")

    def shape(
        self, index: int, *, rank: int | None = None, least: int = 0, most: int = 64
    ) -> Shape:
        """The shape of input `index`, which must have `rank`, or a rank from `least` to `most`."""
        shape = self.inputs[index].shape
        if shape is None:
            raise UnknownError
        if rank is not None:
            least = most = rank
        if not least <= len(shape) <= most:
            ranks = str(least) if least == most else f"{least} to {most}"
            self.expect(False, f"rank {ranks} of {self.labels()[index]}")
        return shape

    def all_shapes(self) -> list[Shape]:
        """The shapes of all inputs."""
        return [self.shape(index) for index in range(len(self.inputs))]

    def common_shape(self, indices: Iterable[int], beside: int | None = None) -> Shape:
        """The shape that inputs share, except on axis `beside`; a size is open only if it is open in all of them."""
        first, *others = map(self.shape, indices)
        sizes = list(first)
        for shape in others:
            self.expect(len(shape) == len(sizes), "one rank")
            for axis, size in enumerate(shape):
                if axis == beside:
                    continue
                self.expect(may_be_equal(sizes[axis], size), f"equal sizes in axis {axis}")
                sizes[axis] = max(sizes[axis], size)
        return tuple(sizes)

    def value(self, index: int) -> Array:
        """The value of input `index`, which must be known."""
        value = self.inputs[index].value if self.has(index) else None
        if value is None:
            raise UnknownError
        return value

    def integers(self, index: int, rank: int | None = None) -> list[int]:
        """The elements of an integer input (of this rank), which must be known."""
        self.shape(index, rank=rank)
        value = self.value(index)
        self.expect(value.dtype.kind in "iu", f"whole numbers in {self.labels()[index]}")
        elements: list[int] = value.ravel().tolist()
        return elements

    def integers_if_known(self, index: int, rank: int | None = None) -> list[int | None]:
        """Like `integers`, but each element is None if they are unknown."""
        if self.inputs[index].value is not None:
            return list[int | None](self.integers(index, rank))
        count = product(*self.shape(index, rank=rank))
        if not 0 <= count <= _MOST_UNKNOWN_ELEMENTS:
            raise UnknownError
        return [None] * count

    def sizes(self, index: int, rank: int | None = None) -> Shape:
        """The sizes, or other counts, in input `index`; -1 for unknown ones."""
        elements = self.integers_if_known(index, rank)
        fine = all(element is None or element >= 0 for element in elements)
        self.expect(fine, f"sizes in {self.labels()[index]}, not {elements}")
        return tuple(OPEN if element is None else element for element in elements)

    def axis(self, axis: int, rank: int) -> int:
        """The axis counted from the front."""
        self.expect(-rank <= axis < rank, f"an axis from -{rank} to {rank - 1}, not {axis}")
        return axis % rank

    def axis_option(self, rank: int) -> int:
        """The axis in the operator's option `axis`, counted from the front."""
        return self.axis(self.option("axis"), rank)

    def integer(self, index: int) -> int:
        """The only element of an integer input, which must be known."""
        numbers = self.integers(index)
        self.expect(len(numbers) == 1, f"one element in {self.labels()[index]}")
        return numbers[0]


def recorded_shape(tensor: Tensor) -> Shape | None:
    """The shape that the file records, -1 for open dimensions, None for an unranked tensor."""
    if tensor.shape_signature:
        return tensor.shape_signature
    return tensor.shape if tensor.has_rank else None


def small_value(tensor: Tensor | None) -> Array | None:
    """A small constant's numbers; None for other tensors and for types that numpy lacks."""
    if tensor is None or not tensor.has_numbers or tensor.wrong_size is not None:
        return None
    assert tensor.data is not None
    return tensor.array() if tensor.data.length <= _MOST_BYTES else None


def recorded_fact(tensor: Tensor | None) -> Fact:
    """An operator's input as the file records it: its shape, and the value of a small constant."""
    if tensor is None:
        return Fact(None)
    return Fact(recorded_shape(tensor), small_value(tensor))


Rule: TypeAlias = Callable[[Call], Results]


RULES: dict[str, Rule] = {}
"""The rules by operator. Their docstrings name the source in TFLite's kernels, for the page of shape rules."""


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule for operators, with names also separated by spaces."""
    operators = " ".join(names).split()
    assert RULES.keys().isdisjoint(operators), f"two rules for one of {operators}"

    def enter(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(operators, function))
        return function

    return enter
