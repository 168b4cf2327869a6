"""The new operators of one rewrite, built in order and not yet attached to a graph.

Their purpose is explained in docs/head-axis.md, "From labels to a graph".
"""

from collections import Counter
from collections.abc import Container, Hashable, Mapping, Sequence
from itertools import chain

import numpy as np

from edge_opt.base.words import UniqueNames, name_below
from edge_opt.ir import Constants, DType, Model, Operator, Quantization, Shape, Tensor
from edge_opt.ir.refusal import RefusedError, Why
from edge_opt.ir.walk import needed_for
from edge_opt.schema.table import Table, new_table
from edge_opt.shapes.rules import small_value


class Assembly:
    """Makes tensors and operators; identical ones are made only once."""

    def __init__(self, model: Model, constants: Constants) -> None:
        self._model = model
        self.constants = constants
        self._operators: list[Operator] = []
        self._reshaped_from: dict[Tensor, Tensor] = {}
        self._reshapes: dict[tuple[Tensor, Shape], Tensor] = {}
        self._resized: dict[tuple[object, ...], tuple[Tensor, ...]] = {}
        self._names = UniqueNames()

    def finished(self, *outputs: Tensor) -> list[Operator]:
        """The operators that the outputs need, in execution order."""
        return needed_for(outputs, cancel_transposes(self._operators, outputs))

    def tensor(
        self, name: str, shape: Shape, like: Tensor, quantization: Quantization | None = None
    ) -> Tensor:
        """A new tensor with the type of `like`, and its quantization unless another is given.

        Raises:
            RefusedError: the quantization is per axis, and the shape is not that of `like`.
        """
        own = quantization or like.quantization
        if own is not None and own.is_per_axis and shape != like.shape:
            text = "a tensor with several scales cannot be cut or reshaped"
            raise RefusedError(Why.QUANTIZATION, text, tensor=like)
        return Tensor(self._names.unique(name), shape, like.dtype, quantization=own)

    def emit(
        self, name: str, inputs: Sequence[Tensor], *outputs: Tensor, **options: object
    ) -> Tensor:
        """Add a builtin operator; returns its first result."""
        self._operators.append(self._model.new_operator(name, inputs, outputs, **options))
        return outputs[0]

    def copy(self, operator: Operator, inputs: Sequence[Tensor | None], output: Tensor) -> Tensor:
        """Add a copy of an operator on other tensors."""
        self._operators.append(
            Operator(operator.code, inputs, [output], operator.options, operator.table)
        )
        return output

    def copy_resized(
        self,
        operator: Operator,
        inputs: Sequence[Tensor | None],
        suffix: str,
        shapes: Sequence[Shape],
        options: Table | None,
    ) -> tuple[Tensor, ...]:
        """Add a copy of an operator on other inputs, with results of other shapes and a suffix in their names."""
        key = (operator, *inputs)
        if key not in self._resized:
            names = [name_below(like.name, suffix) for like in operator.outputs]
            outputs = tuple(map(self.tensor, names, shapes, operator.outputs))
            self._operators.append(
                Operator(operator.code, inputs, outputs, options, operator.table)
            )
            self._resized[key] = outputs
        return self._resized[key]

    def integers(self, name: str, values: object) -> Tensor:
        """An int32 constant."""
        return self.constants.make(name, np.asarray(values, np.int32), DType.INT32)

    def before_reshape(self, tensor: Tensor) -> Tensor:
        """The source of a tensor that is a RESHAPE made here; otherwise the tensor itself."""
        return self._reshaped_from.get(tensor, tensor)

    def reshaped(self, source: Tensor, shape: Shape, name: str) -> Tensor:
        """`source` with another shape; itself, or its own source, if that has the shape already."""
        root = self.before_reshape(source)
        if source.shape == shape:
            return source
        if root.shape == shape:
            return root
        key = (root, shape)
        if key not in self._reshapes:
            self._reshapes[key] = self.reshape_to(root, self.tensor(name, shape, root))
        return self._reshapes[key]

    def reshape_to(self, source: Tensor, output: Tensor) -> Tensor:
        """Define `output` as the elements of `source` in row-major order."""
        root = self.before_reshape(source)
        wanted = np.array(output.shape, np.int32)
        steering = self.integers(name_below(output.name, "shape"), wanted)
        self.emit("RESHAPE", [root, steering], output, new_shape=wanted)
        self._reshaped_from[output] = root
        return output


# Transposes that a matrix product can absorb


def cancel_transposes(operators: Sequence[Operator], wanted: Container[Tensor]) -> list[Operator]:
    """The same computation with fewer TRANSPOSEs; `wanted` are the tensors that are read elsewhere.

    `(A B)^T = B^T A^T`: a product whose only reader exchanges its last two axes gets its operands and flags exchanged,
    `BMM(V^T, P, adj_y) -> [.., H, T] -> TRANSPOSE` becomes `BMM(P, V^T, adj_y) -> [.., T, H]`. An adjoint
    flag and a TRANSPOSE of the last two axes cancel: `BMM(P, TRANSPOSE(V), adj_y)` becomes `BMM(P, V)`. The same
    numbers are multiplied and summed in the same order. Operators without readers stay in the list.
    """
    readers = Counter(chain.from_iterable(operator.inputs for operator in operators))
    made: dict[Tensor, Operator] = {}
    for operator in operators:
        current = operator
        if _exchanges_last_two(operator):
            between = operator.input(0)
            product = made.get(between)
            if product is not None and readers[between] == 1 and between not in wanted:
                current = _exchanged(product, operator)
        if current.name == "BATCH_MATMUL":
            current = _without_transposes(current, made)
        made.update(dict.fromkeys(operator.outputs, current))
    return list(dict.fromkeys(made.values()))


def _exchanged(product: Operator, transpose: Operator) -> Operator:
    """The product that makes the TRANSPOSE's result itself; the TRANSPOSE, if there is none."""
    if product.name != "BATCH_MATMUL" or _side(product.input(0)) != _side(product.input(1)):
        return transpose
    turned = [not product.option("adj_y"), not product.option("adj_x")]
    return _product(product, product.inputs[::-1], turned, transpose.output)


def _side(tensor: Tensor) -> Hashable:
    """The same for operands that may be exchanged.

    XNNPACK multiplies int8 only if the right operand has zero point 0, and rounds differently from the other kernel.
    """
    parameters = tensor.quantization
    return tensor.dtype, parameters is not None and parameters.zero_point.any()


def _without_transposes(product: Operator, made: Mapping[Tensor, Operator]) -> Operator:
    """The product, with operands from before a TRANSPOSE where it has an adjoint flag."""
    sides = list(product.inputs)
    turned = [bool(product.option("adj_x")), bool(product.option("adj_y"))]
    for side in (0, 1):
        maker = made.get(product.input(side))
        if turned[side] and maker is not None and _exchanges_last_two(maker):
            sides[side] = maker.input(0)
            turned[side] = False
    if sides == list(product.inputs):
        return product
    return _product(product, sides, turned, product.output)


def _exchanges_last_two(operator: Operator) -> bool:
    """True for a TRANSPOSE that only exchanges rows and columns."""
    if operator.name != "TRANSPOSE":
        return False
    order = small_value(operator.inputs[1])
    rank = len(operator.outputs[0].shape)
    return rank >= 2 and order is not None and [*order] == [*range(rank - 2), rank - 1, rank - 2]


def _product(
    like: Operator, sides: Sequence[Tensor | None], turned: Sequence[bool], output: Tensor
) -> Operator:
    options = new_table("BatchMatMulOptions") if like.options is None else like.options
    table = options.copy()
    for name, value in zip(("adj_x", "adj_y"), turned, strict=True):
        # An absent flag means false; do not add it.
        if value or name in table.fields:
            table.set(name, value)
    return Operator(like.code, sides, [output], table, like.table)
