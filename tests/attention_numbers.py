"""Element types of random attention graphs, and quantization parameters that fit together."""

from typing import Any

import numpy as np
from attention_cases import Case
from graph_builder import GraphBuilder

from edge_opt.ir import DType, Quantization, Tensor

# role -> (scale, zero point) of int8; those of one role are equal where TFLite's kernels want them equal.
_INT8 = {
    "query": (1 / 32, 3),
    "key": (1 / 32, -5),
    "value": (1 / 32, 7),
    "query-scaled": (1 / 50, -2),
    "key-scaled": (1 / 40, 4),
    "raw": (0.3, -3),
    "logits": (0.4, 5),
    "logits-scaled": (0.22, -9),
    "small": (1 / 100, 1),
    "tanh": (1 / 128, 0),
    "mask": (0.5, 127),
    "masked": (0.45, 60),
    "probability": (1 / 256, -128),
    "coarse": (1 / 128, 10),
    "out": (1 / 60, 6),
    "factor": (1 / 254, 0),
    "cap": (0.4, 0),
}
_INT16 = {
    "tanh": (1 / 32768, 0),
    "probability": (1 / 32768, 0),
    "factor": (1 / 65534, 0),
    "cap": (50 / 32767, 0),
    "small": (1 / 20000, 0),
    "coarse": (1 / 16384, 0),
}


class Numbers:
    """Types and parameters of one graph: "float32", "float16" and "dequantized" (of the cache), "int8", "int16"."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    @property
    def is_float(self) -> bool:
        """True where the products are in float."""
        return self.kind not in ("int8", "int16")

    @property
    def dtype(self) -> DType:
        """Of queries and products."""
        return DType.FLOAT32 if self.is_float else DType[self.kind.upper()]

    @property
    def add_options(self) -> dict[str, Any]:
        """Options of ADD and SUB."""
        return {"pot_scale_int16": False} if self.kind == "int16" else {}

    def q(self, role: str) -> Quantization | None:
        """Parameters of a tensor by what it is for."""
        if self.is_float:
            return None
        scale, point = _INT8[role]
        if self.kind == "int16":
            scale, point = _INT16.get(role, (scale / 128, 0))
        return Quantization.affine(scale, point)

    def constant(self, g: GraphBuilder, values: Any, role: str) -> Tensor:
        """A constant, stored as this graph stores its numbers."""
        parameters = self.q(role)
        if parameters is None:
            return g.constant(values)
        info = np.iinfo(self.kind)
        stored = np.round(np.asarray(values) / parameters.scale[0]) + parameters.zero_point[0]
        return g.constant(np.clip(stored, info.min, info.max), self.dtype, parameters)


def scaled(case: Case, g: GraphBuilder, numbers: Numbers, tensor: Tensor, role: str) -> Tensor:
    """The tensor multiplied by a number (logits also by one for each head), if the case scales this role."""
    if role not in case.scale:
        return tensor
    rank = len(tensor.shape)
    divides = case.scaling == "DIV" and numbers.is_float
    value = np.full((1,) * rank if case.scaling == "full-rank" else (), 2.0 if divides else 0.5)
    if case.scaling == "per head" and role == "logits":
        front = tensor.shape[:-1] if rank == 3 else (1, *tensor.shape[1:-1])
        value = np.linspace(0.2, 0.5, int(np.prod(front))).reshape((*front, 1))
    factor = numbers.constant(g, value, "factor")
    operands = (factor, tensor) if case.scaling == "swapped" else (tensor, factor)
    return g.op("DIV" if divides else "MUL", *operands, q=numbers.q(f"{role}-scaled"))
