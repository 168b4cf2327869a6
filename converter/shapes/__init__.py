"""Shapes, derived again from the inputs: rules per operator, never the interpreter's word."""

from edge_opt.shapes.broadcast import broadcast, verify_broadcast
from edge_opt.shapes.derive import infer_operator
from edge_opt.shapes.dimension import Dim, Shape
from edge_opt.shapes.errors import ShapeError
from edge_opt.shapes.matmul import matmul

__all__ = ["Dim", "Shape", "ShapeError", "broadcast", "infer_operator", "matmul", "verify_broadcast"]
