"""Builds graphs for tests in the IR, one call an operator; shapes are derived, not written down."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from edge_opt.ir import Constants, DType, Model, Quantization, Signature, Subgraph, Tensor
from edge_opt.shapes import infer_operator
from edge_opt.shapes.rules import Fact, small_value

SAME = Quantization.affine(1.0)
"""Stands for the quantization of the first input."""


class GraphBuilder:
    """One subgraph of one model; `finish` gives it a signature."""

    def __init__(self, name: str = "main") -> None:
        self.model = Model()
        self.graph = Subgraph(name)
        self.model.subgraphs.append(self.graph)
        self._constants = Constants(self.model)
        self._names: dict[str, int] = {}

    def _name(self, stem: str) -> str:
        count = self._names[stem] = self._names.get(stem, 0) + 1
        return stem if count == 1 else f"{stem}_{count}"

    def input(
        self, name: str, shape: Sequence[int], dtype: DType = DType.FLOAT32, q: Quantization | None = None
    ) -> Tensor:
        """A graph input."""
        tensor = self.graph.add_tensor(Tensor(self._name(name), tuple(shape), dtype, quantization=q))
        self.graph.inputs.append(tensor)
        return tensor

    def constant(self, values: Any, dtype: DType = DType.FLOAT32, q: Quantization | None = None) -> Tensor:
        """A constant; equal ones are one tensor."""
        tensor = self._constants.make(self._name("const"), np.asarray(values, dtype.numpy), dtype, q)
        return tensor if self.graph.lists(tensor) else self.graph.add_tensor(tensor)

    def integers(self, *values: int) -> Tensor:
        """An int32 vector."""
        return self.constant(values, DType.INT32)

    def op(self, name: str, *inputs: Tensor, **settings: Any) -> Tensor:
        """An operator with one output; see `ops`."""
        return self.ops(name, *inputs, **settings)[0]

    def ops(
        self,
        name: str,
        *inputs: Tensor,
        outputs: int = 1,
        dtype: DType | None = None,
        q: Quantization | None = SAME,
        shape: Sequence[int] | None = None,
        **options: Any,
    ) -> tuple[Tensor, ...]:
        """An operator; its results have the first input's type and quantization unless told otherwise."""
        data = inputs[1] if name in ("SPLIT", "SELECT", "SELECT_V2") else inputs[0]
        dtype, q = data.dtype if dtype is None else dtype, data.quantization if q is SAME else q
        names = [self._name(name.lower()) for _ in range(outputs)]
        made = [Tensor(own, (), dtype, quantization=q) for own in names]
        operator = self.model.new_operator(name, inputs, made, **options)
        if name == "BROADCAST_TO":  # of which the runtime has no version 1
            operator.code = self.model.operator_code(name, 2)
        facts = [Fact(tensor.shape, small_value(tensor)) for tensor in inputs]
        for tensor, (own, _) in zip(made, infer_operator(operator, facts), strict=True):
            wanted = shape if own is None else own
            assert wanted is not None, f"{name}: give the shape"
            tensor.shape = tuple(int(size) for size in wanted)
            self.graph.add_tensor(tensor)
        self.graph.append(operator)
        return operator.outputs

    def reshape(self, source: Tensor, *shape: int) -> Tensor:
        """RESHAPE."""
        return self.op("RESHAPE", source, self.integers(*shape), new_shape=np.array(shape, np.int32))

    def transpose(self, source: Tensor, *permutation: int) -> Tensor:
        """TRANSPOSE."""
        return self.op("TRANSPOSE", source, self.integers(*permutation))

    def with_one(self, source: Tensor, axis: int, how: str = "RESHAPE") -> Tensor:
        """The tensor with one more axis, of size 1, by RESHAPE, EXPAND_DIMS or PACK."""
        if how == "EXPAND_DIMS":
            return self.op(how, source, self.constant(axis, DType.INT32))
        if how == "PACK":
            return self.op(how, source, axis=axis, values_count=1)
        return self.reshape(source, *source.shape[:axis], 1, *source.shape[axis:])

    def swap(self, source: Tensor) -> Tensor:
        """TRANSPOSE of the last two axes."""
        rank = len(source.shape)
        return self.transpose(source, *range(rank - 2), rank - 1, rank - 2)

    def finish(self, outputs: Sequence[Tensor]) -> Model:
        """The model; its one signature is named after the subgraph."""
        unique = {id(tensor): tensor for tensor in outputs}
        self.graph.outputs = list(unique.values())
        inputs = {tensor.name: tensor for tensor in self.graph.inputs}
        named = {f"out_{i}": tensor for i, tensor in enumerate(self.graph.outputs)}
        self.model.signatures.append(Signature(self.graph.name, self.graph, inputs, named))
        return self.model
