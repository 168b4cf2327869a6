"""Shape inference from graph inputs: one rule per operator, without the interpreter."""

from edge_opt.shapes import arranging, numeric  # noqa: F401 - each registers its rules
from edge_opt.shapes.closing import Folded, close_shapes, folded_regions
from edge_opt.shapes.dimension import Shape, ShapeError, broadcast, matmul, verify_broadcast
from edge_opt.shapes.inference import (
    Disagreement,
    ShapeReport,
    check_operators,
    doubted,
    infer_operator,
    infer_shapes,
    shape_report,
)
from edge_opt.shapes.rules import Fact

__all__ = [
    "Disagreement",
    "Fact",
    "Folded",
    "Shape",
    "ShapeError",
    "ShapeReport",
    "broadcast",
    "check_operators",
    "close_shapes",
    "doubted",
    "folded_regions",
    "infer_operator",
    "infer_shapes",
    "matmul",
    "shape_report",
    "verify_broadcast",
]
