"""The new operators of one rewrite, made one after the other and attached to no graph yet."""

from collections.abc import Sequence

import numpy as np

from edge_opt.attention.transposes import cancel_transposes
from edge_opt.ir import Constants, DType, Model, Operator, Quantization, Shape, Tensor
from edge_opt.schema.table import Table


class Assembly:
    """Makes tensors and operators; what is made twice from the same is made once."""

    def __init__(self, model: Model, constants: Constants) -> None:
        self._model = model
        self._constants = constants
        self._operators: list[Operator] = []
        self._reshaped_from: dict[int, Tensor] = {}
        self._reshapes: dict[tuple[int, Shape], Tensor] = {}
        self._again: dict[tuple[object, ...], tuple[Tensor, ...]] = {}
        self._names: set[str] = set()

    def finished(self, *outputs: Tensor) -> list[Operator]:
        """The operators that the outputs need, in execution order."""
        needed = {id(output) for output in outputs}
        operators = cancel_transposes(self._operators, frozenset(needed))
        kept: list[Operator] = []
        for operator in reversed(operators):
            if any(id(tensor) in needed for tensor in operator.outputs):
                kept.append(operator)
                needed.update(id(tensor) for tensor in operator.inputs)
        return kept[::-1]

    def tensor(
        self, name: str, shape: Shape, like: Tensor, quantization: Quantization | None = None
    ) -> Tensor:
        """A tensor with the type of the one that it is a part of, and its quantization unless told otherwise."""
        unique, count = name, 1
        while unique in self._names:
            count += 1
            unique = f"{name}_{count}"
        self._names.add(unique)
        return Tensor(unique, shape, like.dtype, quantization=quantization or like.quantization)

    def emit(self, name: str, inputs: Sequence[Tensor], *outputs: Tensor, **options: object) -> Tensor:
        """A new operator of a builtin kind; gives its first result."""
        self._operators.append(self._model.new_operator(name, inputs, outputs, **options))
        return outputs[0]

    def copy(self, operator: Operator, inputs: Sequence[Tensor | None], output: Tensor) -> Tensor:
        """An operator once more, on other tensors."""
        self._operators.append(Operator(operator.code, inputs, [output], operator.options, operator.table))
        return output

    def again(
        self,
        operator: Operator,
        inputs: Sequence[Tensor | None],
        names: Sequence[str],
        shapes: Sequence[Shape],
        options: Table | None,
    ) -> tuple[Tensor, ...]:
        """The operator once more, reading other tensors; the results are like its own but for names and shapes."""
        key = (operator, tuple(id(tensor) for tensor in inputs))
        if key not in self._again:
            outputs = [
                self.tensor(name, shape, like)
                for name, shape, like in zip(names, shapes, operator.outputs, strict=True)
            ]
            self._operators.append(Operator(operator.code, inputs, outputs, options, operator.table))
            self._again[key] = tuple(outputs)
        return self._again[key]

    def integers(self, name: str, values: object) -> Tensor:
        """An int32 constant."""
        return self._constants.make(name, np.asarray(values, np.int32), DType.INT32)

    def constant(self, tensor: Tensor, values: np.ndarray, quantization: Quantization | None) -> Tensor:
        """A constant made of a part of another."""
        return self._constants.make(f"{tensor.name}/piece", values, tensor.dtype, quantization)

    def source(self, tensor: Tensor) -> Tensor:
        """What a tensor is a RESHAPE of, if one made here; else itself."""
        return self._reshaped_from.get(id(tensor), tensor)

    def reshaped(self, source: Tensor, shape: Shape, name: str) -> Tensor:
        """`source` with another shape; itself, or what it was reshaped from, where that has the shape already."""
        root = self.source(source)
        for known in (source, root):
            if known.shape == shape:
                return known
        key = (id(root), shape)
        if key not in self._reshapes:
            self._reshapes[key] = self.reshape_to(root, self.tensor(name, shape, root))
        return self._reshapes[key]

    def reshape_to(self, source: Tensor, output: Tensor) -> Tensor:
        """Define `output` as the elements of `source` in row-major order."""
        root = self.source(source)
        wanted = np.array(output.shape, np.int32)
        steering = self.integers(f"{output.name}/shape", wanted)
        self.emit("RESHAPE", [root, steering], output, new_shape=wanted)
        self._reshaped_from[id(output)] = root
        return output
