"""Biases that the quantizer clipped to 32 bits get their values back, and their rows of weights coarser steps."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ai_edge_litert.interpreter import Interpreter, OpResolverType

from edge_opt.building.biases import restore_clipped
from edge_opt.ir import Model, load, to_bytes
from edge_opt.ir.parse import parse
from edge_opt.soundness import broken_ranges

ROWS, COLUMNS = 4, 3
BIAS = np.array([354.0, -320.0, 0.5, 3.0], np.float32)
WEIGHTS = np.array([[127, 5, -90], [3, -127, 64], [-127, 100, 1], [0, 0, 0]])
STEPS = np.array([2.0**-11, 2.0**-11, 2.0**-6, 2.0**-37])
INPUT_STEPS = {"prefill": 2.0**-13, "decode": 2.0**-14}  # as each was calibrated
LARGEST = 2**31 - 1


def numbers(values: Any) -> str:
    return ", ".join(str(value) for value in np.ravel(values).tolist())


def of_text(body: dict[str, str]) -> Model:
    """Entry points with one product each, whose bias is named as exporters do."""
    graphs = [
        f"signature {name} = #{number} (x=%x) -> (y=%y)\nsubgraph {name} {text}"
        for number, (name, text) in enumerate(body.items())
    ]
    model = parse("\n".join(graphs))
    first = next(iter(model.subgraphs[0])).input(1)
    for graph in model.subgraphs:
        (product,) = graph
        product.input(1).buffer = first.buffer
        product.input(2).name = f"bias of {graph.name}"
        # The quantizer wants a name for each tensor.
        for tensor in (*product.inputs[:2], *product.outputs):
            assert tensor is not None
            tensor.name = f"{tensor.name} of {graph.name}"
    return model


def exported(bias: Any = BIAS) -> Model:
    """In float."""
    weights = f"float32[{ROWS},{COLUMNS}]{{{numbers(WEIGHTS * STEPS[:, None])}}}"
    body = f"""(%x: float32[1,{COLUMNS}]) {{
      %y: float32[1,{ROWS}] = FULLY_CONNECTED(%x, {weights}, float32{{{numbers(bias)}}}) {{keep_num_dims: true}}
      return %y
    }}"""
    return of_text(dict.fromkeys(INPUT_STEPS, body))


def quantized(bias: Any = BIAS) -> Model:
    """As ai-edge-quantizer stores it."""
    body = {}
    for name, step in INPUT_STEPS.items():
        scales = step * STEPS
        codes = np.clip(np.rint(bias / scales), -LARGEST, LARGEST).astype(np.int64)
        zeros = numbers([0] * ROWS)
        body[name] = f"""(%x: int16[1,{COLUMNS}] q({step}, 0)) {{
          %y: int16[1,{ROWS}] q(0.0109375, 0) = FULLY_CONNECTED(
            %x, int8[{ROWS},{COLUMNS}]{{{numbers(WEIGHTS)}}} q([{numbers(STEPS)}], [{zeros}], axis 0),
            int64{{{numbers(codes)}}} q([{numbers(scales)}], [{zeros}], axis 0)
          ) {{keep_num_dims: true}}
          return %y
        }}"""
    return of_text(body)


def results(model: Model, name: str, x: Any) -> Any:
    plain = OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES
    runner = Interpreter(model_content=to_bytes(model), experimental_op_resolver_type=plain)
    codes = np.rint(x / INPUT_STEPS[name]).astype(np.int16)
    return runner.get_signature_runner(name)(x=codes)["y"] * 0.0109375


def test_a_clipped_bias_gets_its_value_back_in_both_entry_points() -> None:
    model = quantized()
    x = np.array([[0.5, -1.25, 1.5]], np.float32)
    wanted = x @ (WEIGHTS * STEPS[:, None]).T + BIAS
    before = {name: results(model, name, x) for name in INPUT_STEPS}
    assert np.abs(before["prefill"] - before["decode"]).max() > 50
    note = restore_clipped(model, exported())
    assert note == "Restored 3 numbers of biases that the quantizer clipped to 32 bits"
    for name in INPUT_STEPS:
        assert np.abs(results(model, name, x) - wanted).max() < 0.03
    one, other = (next(iter(graph)).input(1) for graph in model.subgraphs)
    assert one.buffer is other.buffer
    assert list(broken_ranges(model)) == []


def test_rows_that_fit_keep_their_weights() -> None:
    model = quantized()
    restore_clipped(model, exported())
    weights = next(iter(model.subgraphs[0])).input(1)
    assert weights.quantization is not None
    np.testing.assert_array_equal(np.asarray(weights.array())[2], WEIGHTS[2])
    assert weights.quantization.scale[2] == STEPS[2]
    assert weights.quantization.scale[0] < 3 * 2 * STEPS[0]


@pytest.mark.parametrize("bias", [np.zeros(ROWS), [0.1, -0.1, 0.5, 0.0]])
def test_without_a_clipped_bias_nothing_changes(bias: Any) -> None:
    model = quantized(bias)
    before = to_bytes(model)
    assert restore_clipped(model, exported()) == ""
    assert to_bytes(model) == before


@pytest.mark.parametrize(
    ("name", "row", "number"), [("another", 0, 354.0), ("", 2, 0.75), ("", 0, 100.0)]
)
def test_a_bias_that_the_exported_model_does_not_have_stays_and_is_named(
    name: str, row: int, number: float
) -> None:
    """Under its name, with the numbers that are not clipped, and larger ones for those that are."""
    changed = BIAS.copy()
    changed[row] = number
    source = exported(changed)
    model = quantized()
    for graph in model.subgraphs:
        (product,) = graph
        product.input(2).name = name or product.input(2).name
    assert restore_clipped(model, source) == ""
    assert [one.rule for one in broken_ranges(model)] == ["clipped-bias"] * 2


@pytest.mark.slow
def test_a_clipped_bias_with_an_axis_of_size_1_stays() -> None:
    """TFLite accepts `[1,N]`, but its scales would not be those of rows."""
    model = quantized()
    source = exported()
    for graph in (*model.subgraphs, *source.subgraphs):
        (product,) = graph
        product.input(2).shape = (1, ROWS)
    assert restore_clipped(model, source) == ""


def test_the_quantizer_clips_biases_and_they_are_restored(tmp_path: Path) -> None:
    quantizer = pytest.importorskip(
        "ai_edge_quantizer.quantizer", reason="pip install '.[quantizer]'"
    )
    recipe = pytest.importorskip("ai_edge_quantizer.recipe")
    source = exported()
    path = tmp_path / "exported.tflite"
    path.write_bytes(to_bytes(source))
    tool = quantizer.Quantizer(str(path))
    tool.load_quantization_recipe(recipe.static_wi8_ai16())
    x = np.array([[0.5, -1.25, 1.5]], np.float32)
    ranges = tool.calibrate({name: [{"x": x}] for name in INPUT_STEPS})
    model = load(bytes(tool.quantize(ranges).quantized_model))
    assert [one.rule for one in broken_ranges(model)] == ["clipped-bias"] * 2
    assert restore_clipped(model, source) != ""
    assert list(broken_ranges(model)) == []
    plain = OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES
    wanted = x @ (WEIGHTS * STEPS[:, None]).T + BIAS
    for signature in model.signatures:
        given = signature.inputs["x"].quantization
        taken = signature.outputs["y"].quantization
        assert given is not None
        assert taken is not None
        codes = np.rint(x / given.scale[0]).astype(np.int16)
        runner = Interpreter(model_content=to_bytes(model), experimental_op_resolver_type=plain)
        found = runner.get_signature_runner(signature.key)(x=codes)["y"] * taken.scale[0]
        assert np.abs(found - wanted).max() < 0.05
