"""How large a proof's random integers are: the logits that come of them must tell keys apart, none may be lost."""

from collections.abc import Mapping

import numpy as np
import pytest
from text_parser import parse

from edge_opt.ir import Operator, Tensor
from edge_opt.passes.spreads import LOGIT_DEVIATION, attention_spreads, product_moments, product_spreads
from edge_opt.runtime.inputs import InputHint, array_of, plan
from edge_opt.runtime.tensors import SignatureInfo, TensorInfo

H = 64


def region(
    scale: float = 0.001, factor: float = 1.0, zero: int = 0
) -> tuple[list[Operator], dict[str, Tensor]]:
    kind, (q, k) = ("int8", (100, 50)) if zero else ("int16", (40, 64))
    model = parse(f"""
subgraph main (%q: {kind}[1,1,{q},{H}] q({scale}, {zero}), %k: {kind}[1,1,{k},{H}] q(0.002, {zero}),
               %mask: {kind}[1,1,{q},{k}] q(0.5, 0)) {{
  %product: {kind}[1,1,{q},{k}] q(0.5, 0) = BATCH_MATMUL(%q, %k) {{adj_y: true}}
  %scaled: {kind}[1,1,{q},{k}] q(0.5, 0) = MUL(%product, {kind}(1) q({factor}, 0))
  %masked: {kind}[1,1,{q},{k}] q(0.5, 0) = ADD(%scaled, %mask)
  %p: {kind}[1,1,{q},{k}] q(0.00003, 0) = SOFTMAX(%masked)
  return %p
}}
""")
    graph = model.subgraphs[0]
    return list(graph.operators), {tensor.name: tensor for tensor in graph.tensors}


def drawn(spreads: Mapping[Tensor, float]) -> list[np.ndarray]:
    """The real numbers that a proof puts into these inputs."""
    infos, hints = [], [InputHint(spread=spread) for spread in spreads.values()]
    for tensor in spreads:
        assert tensor.quantization is not None
        scale, zero = float(tensor.quantization.scale[0]), int(tensor.quantization.zero_point[0])
        kind = tensor.dtype.name.lower()
        infos.append(
            TensorInfo(tensor.name, tensor.name, tensor.shape, tensor.shape, kind, (scale,), (zero,))
        )
    made = plan(SignatureInfo("main", tuple(infos), ()), hints=hints)
    return [(array_of(one).astype(np.float64) - one.info.zero_points[0]) * one.info.scales[0] for one in made]


@pytest.mark.parametrize("factor", [1.0, 0.25])
def test_masked_logits_deviate_as_wanted_where_the_inputs_have_the_spread_that_is_told(factor: float) -> None:
    """Both operands share a product's excess: with f each, it is f^2."""
    operators, tensors = region(factor=factor)
    spreads = attention_spreads(operators, operators[-1])
    assert set(spreads) == {tensors["q"], tensors["k"], tensors["mask"]}
    q, k, mask = drawn({tensors[name]: spreads[tensors[name]] for name in ("q", "k", "mask")})
    product = factor * q[0, 0] @ k[0, 0].T
    assert product.std() == pytest.approx(LOGIT_DEVIATION, rel=0.2)
    assert mask.std() == pytest.approx(LOGIT_DEVIATION, rel=0.2)


def test_logits_that_are_small_already_are_left_as_they_are() -> None:
    operators, tensors = region(scale=1e-6)
    assert set(attention_spreads(operators, operators[-1])) == {tensors["mask"]}


def test_moments_are_those_of_the_numbers_that_are_drawn() -> None:
    operators, tensors = region(zero=-60)
    mean, deviation = product_moments(operators[0])
    left, right = drawn({tensors["q"]: 1.0, tensors["k"]: 1.0})
    found = left[0, 0] @ right[0, 0].T
    assert found.std() == pytest.approx(deviation, rel=0.15)
    assert found.mean() == pytest.approx(mean, abs=deviation / 2)


@pytest.mark.parametrize("zero", [0, -60])
def test_a_product_is_brought_within_its_room_by_both_operands(zero: int) -> None:
    operators, tensors = region(scale=0.05, zero=zero)
    assert product_spreads(operators[0], 1e9) == {}
    spreads = product_spreads(operators[0], 0.25)
    assert len(set(spreads.values())) == 1
    q, k = drawn({tensors[name]: spreads[tensors[name]] for name in ("q", "k")})
    found = abs(q[0, 0] @ k[0, 0].T)
    assert found.max() > 0.1
    assert np.quantile(found, 0.999) < 0.25
