"""Weights that a file stores sparsely have no numbers to cut: they stay whole wherever they are read."""

import numpy as np
from ai_edge_litert.interpreter import Interpreter
from text_parser import parse

from edge_opt.ir import Buffer, Model, Tensor, load, to_bytes
from edge_opt.ir.text import to_text
from edge_opt.ir.walk import cut_out
from edge_opt.schema import Data, new_table

# Row 0 has columns 0 and 5, row 1 column 7, row 2 none.
ROWS, COLUMNS, KEPT = [0, 2, 3, 3], [0, 5, 7], [2.0, 3.0, 5.0]


def two_heads() -> str:
    weights = ", ".join(map(str, range(24)))
    return f"""
    subgraph main (%q: float32[1,4,4], %k: float32[1,6,4], %v: float32[1,6,4], %b: float32[3]) {{
      %l0: float32[1,4,6] = BATCH_MATMUL(%q, %k) {{adj_y: true}}
      %p0: float32[1,4,6] = SOFTMAX(%l0) {{beta: 1.0}}
      %h0: float32[1,4,4] = BATCH_MATMUL(%p0, %v)
      %l1: float32[1,4,6] = BATCH_MATMUL(%q, %k) {{adj_y: true}}
      %p1: float32[1,4,6] = SOFTMAX(%l1) {{beta: 1.0}}
      %h1: float32[1,4,4] = BATCH_MATMUL(%p1, %v)
      %all: float32[1,4,8] = CONCATENATION(%h0, %h1) {{axis: -1}}
      %out: float32[1,4,3] = FULLY_CONNECTED(%all, float32[3,8]{{{weights}}}, %b) {{keep_num_dims: true}}
      return %out
    }}"""


def sparse_projection() -> Model:
    """The projection of `two_heads` with weights [3,8] as TFLite stores sparse ones: row by row."""
    model = parse(two_heads())
    weights = projection(model)
    dense = new_table("DimensionMetadata", format=0, dense_size=3)
    sparse = new_table(
        "DimensionMetadata",
        format=1,
        array_segments=new_table("Int32Vector", values=ROWS),
        array_indices=new_table("Int32Vector", values=COLUMNS),
    )
    sparsity = new_table("SparsityParameters", traversal_order=[0, 1], dim_metadata=[dense, sparse])
    weights.table = new_table("Tensor", sparsity=sparsity)
    weights.buffer = Buffer(Data(np.array(KEPT, np.float32)))
    return load(to_bytes(model))


def projection(model: Model) -> Tensor:
    return next(op for op in model.subgraphs[0].operators if op.name == "FULLY_CONNECTED").input(1)


def test_they_are_printed_without_numbers() -> None:
    assert "float32[3,8]{...}" in to_text(sparse_projection())


def test_a_region_that_reads_them_computes_what_the_model_does() -> None:
    model = sparse_projection()
    (operator,) = [op for op in model.subgraphs[0].operators if op.name == "FULLY_CONNECTED"]
    region = cut_out(model, [operator], [operator.input(0), operator.input(2)], [operator.outputs[0]])
    interpreter = Interpreter(model_content=to_bytes(region))
    interpreter.allocate_tensors()
    heads = np.arange(32, dtype=np.float32).reshape(1, 4, 8)
    bias = np.zeros(3, np.float32)
    for detail, value in zip(interpreter.get_input_details(), (heads, bias), strict=True):
        interpreter.set_tensor(detail["index"], value)
    interpreter.invoke()
    weights = np.zeros((3, 8), np.float32)
    weights[[0, 0, 1], COLUMNS] = KEPT
    output = interpreter.get_tensor(interpreter.get_output_details()[0]["index"])
    np.testing.assert_array_equal(output, heads @ weights.T)
