"""Weights that a file stores sparsely have no numbers to cut: they stay whole wherever they are read."""

import numpy as np
from ai_edge_litert.interpreter import Interpreter
from text_parser import parse

from edge_opt.ir import Buffer, Model, load, to_bytes
from edge_opt.ir.text import to_text
from edge_opt.ir.walk import cut_out
from edge_opt.schema import Data, new_table

# Row 0 has columns 0 and 5, row 1 column 7, row 2 none.
ROWS, COLUMNS, KEPT = [0, 2, 3, 3], [0, 5, 7], [2.0, 3.0, 5.0]


def sparse_projection() -> Model:
    """A projection with weights [3,8] as TFLite stores sparse ones: row by row."""
    weights = ", ".join(map(str, range(24)))
    model = parse(f"""
    subgraph main (%x: float32[1,4,8], %b: float32[3]) {{
      %r: float32[1,4,8] = RELU(%x)
      %out: float32[1,4,3] = FULLY_CONNECTED(%r, float32[3,8]{{{weights}}}, %b) {{keep_num_dims: true}}
      return %out
    }}""")
    tensor = model.subgraphs[0].operators[1].input(1)
    dense = new_table("DimensionMetadata", format=0, dense_size=3)
    vectors = [new_table("Int32Vector", values=values) for values in (ROWS, COLUMNS)]
    sparse = new_table("DimensionMetadata", format=1, array_segments=vectors[0], array_indices=vectors[1])
    sparsity = new_table("SparsityParameters", traversal_order=[0, 1], dim_metadata=[dense, sparse])
    tensor.table, tensor.buffer = (
        new_table("Tensor", sparsity=sparsity),
        Buffer(Data(np.array(KEPT, np.float32))),
    )
    return load(to_bytes(model))


def test_a_region_that_reads_them_computes_what_the_model_does() -> None:
    model = sparse_projection()
    assert "float32[3,8]{...}" in to_text(model)
    operator = model.subgraphs[0].operators[1]
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
