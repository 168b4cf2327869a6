"""Shapes, derived again from the inputs: rules per operator, never the interpreter's word."""

from edge_opt.shapes import (  # noqa: F401 - each enters its rules into the table
    arranging,
    control_flow,
    numeric,
    slicing,
)
from edge_opt.shapes.dimension import Shape, ShapeError, broadcast, matmul, verify_broadcast
from edge_opt.shapes.inference import Disagreement, ShapeReport, derive, infer_shapes
from edge_opt.shapes.rules import infer_operator

__all__ = [
    "Disagreement",
    "Shape",
    "ShapeError",
    "ShapeReport",
    "broadcast",
    "derive",
    "infer_operator",
    "infer_shapes",
    "matmul",
    "verify_broadcast",
]
