"""What is mended in an exported bundle before it is calibrated."""

from pathlib import Path

import pytest
from pretend_stages import write

from edge_opt.building.mending import fold_constants, mend_export
from edge_opt.ir.opening import Opened
from edge_opt.ir.parse import parse

GRAPH = """
signature decode = #0 (x=%x) -> (y=%y{more})
subgraph decode (%x: float32[1,4,2]) {{
  %p: float32[4,3] = FULLY_CONNECTED(%x, int8[3,2]{{1, 2, 3, 4, 5, 6}} q([1, 2, 3], [0, 0, 0], axis 0), {bias})
  %s: float32[4,3] = {addition}
  %y: float32[1,4,1,3] = RESHAPE(%s, int32[4]{{1, 4, 1, 3}})
  return %y{more_returned}
}}
"""
BIAS = "float32[3]{7, 8, 9}"
ADDED = f"ADD(%p, {BIAS})"
AS_IT_WAS = ["FULLY_CONNECTED", "ADD", "RESHAPE"]


@pytest.mark.parametrize(
    ("addition", "bias", "more", "operators"),
    [
        (ADDED, "none", "", ["FULLY_CONNECTED", "RESHAPE"]),
        (ADDED, BIAS, "", AS_IT_WAS),
        (ADDED, "none", "p", AS_IT_WAS),
        (ADDED, "none", "s", AS_IT_WAS),
        ("ADD(%p, float32[1]{7})", "none", "", AS_IT_WAS),
        ("ADD(%p, %p)", "none", "", AS_IT_WAS),
        (f"{ADDED} {{fused_activation_function: 1}}", "none", "", AS_IT_WAS),
        (f"MUL(%p, {BIAS})", "none", "", ["FULLY_CONNECTED", "MUL", "RESHAPE"]),
    ],
)
def test_a_bias_that_is_added_becomes_an_operand_of_its_product(
    tmp_path: Path, addition: str, bias: str, more: str, operators: list[str]
) -> None:
    text = GRAPH.format(
        bias=bias,
        addition=addition,
        more=f", {more}=%{more}" if more else "",
        more_returned=f", %{more}" if more else "",
    )
    path = write(tmp_path / "float.litertlm", text)
    mend_export(path)
    (signature,) = Opened(path).main().model.signatures
    assert [operator.name for operator in signature.subgraph] == operators
    if len(operators) == 2:
        product = next(iter(signature.subgraph))
        assert product.input(2).array().tolist() == [7, 8, 9]
        assert product.output.shape == (1, 4, 3)
        assert product.option("keep_num_dims")
    assert [file.name for file in tmp_path.iterdir()] == ["float.litertlm"]


SCALED = """
signature prefill = #0 (x=%x) -> (y=%y)
signature decode = #1 (x=%x) -> (y=%y)
subgraph prefill (%x: float32[4,2]) {
  %w: float32[3,2] = MUL(float32[3,2]{1, 2, 3, 4, 5, 6}, float32{0.5})
  %y: float32[4,3] = FULLY_CONNECTED(%x, %w, none)
  return %y
}
subgraph decode (%x: float32[1,2]) {
  %w: float32[3,2] = MUL(float32[3,2]{1, 2, 3, 4, 5, 6}, float32{0.5})
  %p: float32[1,3] = FULLY_CONNECTED(%x, %w, none)
  %y: float32[1,3] = MUL(%p, float32{2})
  return %y
}
"""


def test_weights_are_stored_times_their_factor_and_stay_shared(tmp_path: Path) -> None:
    model = parse(SCALED)
    prefill, decode = (next(iter(graph)) for graph in model.subgraphs)
    constants = [one.buffer for one in prefill.given]
    for other, buffer in zip(decode.given, constants, strict=True):
        other.buffer = buffer
    fold_constants(model)
    names = [[operator.name for operator in graph] for graph in model.subgraphs]
    assert names == [["FULLY_CONNECTED"], ["FULLY_CONNECTED", "MUL"]]
    weights = [next(iter(graph)).input(1) for graph in model.subgraphs]
    assert weights[0].array().tolist() == [[0.5, 1], [1.5, 2], [2.5, 3]]
    assert weights[0].buffer is weights[1].buffer
    assert not any(buffer in model.buffers for buffer in constants)
    path = write(tmp_path / "float.litertlm", SCALED)
    mend_export(path)
    mended = [
        [operator.name for operator in graph] for graph in Opened(path).main().model.subgraphs
    ]
    assert mended == names


def test_a_factor_that_two_products_read_in_two_shapes_gives_two_weights() -> None:
    model = parse("""
    subgraph decode (%x: float32[1,2]) {
      %a: float32[2,2] = MUL(float32[2,2]{1, 1, 1, 1}, float32[2,1]{2, 3})
      %b: float32[2,2] = MUL(float32[2,2]{1, 1, 1, 1}, float32[1,2]{2, 3})
      %y: float32[1,2] = FULLY_CONNECTED(%x, %a, none)
      %z: float32[1,2] = FULLY_CONNECTED(%x, %b, none)
      return %y, %z
    }""")
    first, second, *_ = model.subgraphs[0]
    for one, other in zip(first.given, second.given, strict=True):
        other.buffer = one.buffer
    fold_constants(model)
    weights = [product.input(1).array().tolist() for product in model.subgraphs[0]]
    assert weights == [[[2, 2], [3, 3]], [[2, 3], [2, 3]]]


def test_the_weights_of_a_norm_are_stored_with_the_one_that_is_added_to_them() -> None:
    model = parse("""
    subgraph decode (%x: float32[1,2]) {
      %w: float32[2] = ADD(float32[2]{0.5, 2}, float32{1})
      %p: float32[1,2] = MUL(%x, %w)
      %y: float32[1,2] = ADD(%p, float32{1})
      return %y
    }""")
    fold_constants(model)
    product, addition = model.subgraphs[0]
    assert product.input(1).array().tolist() == [1.5, 3]
    assert addition.name == "ADD"


NORM = """
signature decode = #0 (x=%x) -> (y=%y)
subgraph decode (%x: float32[1,4]) {
  %y: float32[1,4] = STABLEHLO_COMPOSITE(%x) {name: "odml.rms_norm", decomposition_subgraph_index: 1}
  return %y
}
subgraph body (%a: float32[1,4]) {
  %mul: float32[1,4] = MUL(%a, %a)
  %rsqrt: float32[1,4] = RSQRT(%mul)
  return %rsqrt
}
"""


def test_tensors_of_a_norm_are_named_after_it_so_that_the_quantizer_keeps_it_in_float(
    tmp_path: Path,
) -> None:
    path = write(tmp_path / "float.litertlm", NORM)
    mend_export(path)
    mend_export(path)  # again, nothing is left to do
    model = Opened(path).main().model
    names = [operator.output.name for operator in model.subgraphs[1]]
    assert names == ["odml.rms_norm/mul", "odml.rms_norm/rsqrt"]
    assert model.subgraphs[1].inputs[0].name == "a"
    assert model.subgraphs[0].outputs[0].name == "y"
