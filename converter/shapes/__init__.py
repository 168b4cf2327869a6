"""Shape inference from graph inputs: one rule per operator, without the interpreter."""

from edge_opt.shapes import arranging, numeric  # noqa: F401 - each registers its rules
from edge_opt.shapes.dimension import ShapeError, broadcast, matmul, verify_broadcast
from edge_opt.shapes.inference import infer_shapes

__all__ = ["ShapeError", "broadcast", "infer_shapes", "matmul", "verify_broadcast"]
