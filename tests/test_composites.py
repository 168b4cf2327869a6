"""Composites are opened where their body is attention, or all of them where the target asks for it."""

import numpy as np
import pytest
from flatbuffers import flexbuffers
from pass_runs import INLINING, count, names, sites_of, statuses

from edge_opt.comparison.compare import compare
from edge_opt.conversion import ConversionResult, convert
from edge_opt.ir import Model, to_bytes
from edge_opt.ir.parse import parse
from edge_opt.schema.table import new_table
from edge_opt.targets import Target

BODY = "composite_attributes: [0, 0, 1], decomposition_subgraph_index"

GIVEN = "%q: float32[1,2,3,4], %k: float32[1,2,5,4], %v: float32[1,2,5,4]"
POSITIVE = f"  %positive: float32[1,2,3,4] = STABLEHLO_COMPOSITE(%q) {{name: 'test.positive', {BODY}: 1}}\n"
TWO_COMPOSITES = f"""
subgraph main ({GIVEN}) {{
{POSITIVE}  %heads: float32[1,2,3,4] = STABLEHLO_COMPOSITE(%positive, %k, %v) {{name: 'any', {BODY}: 2}}
  %t: float32[1,3,2,4] = TRANSPOSE(%heads, int32{{0, 2, 1, 3}})
  %out: float32[1,3,8] = RESHAPE(%t, int32{{1, 3, 8}}) {{new_shape: [1, 3, 8]}}
  return %out
}}
subgraph positive (%x: float32[1,2,3,4]) {{
  %y: float32[1,2,3,4] = ABS(%x)
  return %y
}}
subgraph attention ({GIVEN}) {{
  %logits: float32[1,2,3,5] = BATCH_MATMUL(%q, %k) {{adj_y: true}}
  %p: float32[1,2,3,5] = SOFTMAX(%logits) {{beta: 1.0}}
  %heads: float32[1,2,3,4] = BATCH_MATMUL(%p, %v)
  return %heads
}}
"""
NESTED = (
    TWO_COMPOSITES.replace(POSITIVE, "")
    .replace("COMPOSITE(%positive,", "COMPOSITE(%q,")
    .replace(
        "  %logits: float32[1,2,3,5] = BATCH_MATMUL(%q,",
        f"{POSITIVE}  %logits: float32[1,2,3,5] = BATCH_MATMUL(%positive,",
    )
)


def opened(model: Model, target: Target | None = None) -> tuple[ConversionResult, Model]:
    """The model converted, which computes the same bits."""
    before = to_bytes(model)
    result = convert(before, target=target)
    assert compare(before, to_bytes(result.model)).bitwise
    return result, result.model


@pytest.mark.parametrize("text", [TWO_COMPOSITES, NESTED], ids=["beside it", "in it"])
def test_a_composite_is_opened_if_its_body_is_attention_whatever_it_is_called(text: str) -> None:
    """Another composite beside it, or in its body, keeps its own body."""
    _, model = opened(parse(text))
    assert (count(model, "STABLEHLO_COMPOSITE"), count(model, "SOFTMAX")) == (1, 2), (
        "one for each head"
    )
    assert [graph.name for graph in model.subgraphs] == ["main", "positive"]
    composite = next(op for op in model.subgraphs[0].operators if op.name == "STABLEHLO_COMPOSITE")
    assert model.subgraphs[int(composite.option("decomposition_subgraph_index"))].name == "positive"


@pytest.mark.parametrize("text", [TWO_COMPOSITES, NESTED], ids=["side by side", "nested"])
def test_every_composite_is_opened_on_request(text: str) -> None:
    result, model = opened(parse(text), INLINING)
    assert [site.index for site in result.converted if site.pass_name == "inline_composites"] == [
        0,
        1,
    ]
    assert all(site.proof is not None and site.proof.bitwise for site in result.converted)
    assert "STABLEHLO_COMPOSITE" not in names(model)
    assert len(model.subgraphs) == 1


def test_a_body_of_another_type_is_left_with_the_reason() -> None:
    body = "subgraph attention (%q: float32[1,2,3,4]"
    text = TWO_COMPOSITES.replace(body, f"{body} q(0.5, 0)")
    text = text.replace(
        "%heads: float32[1,2,3,4] = BATCH", "%heads: float32[1,2,3,4] q(0.5, 0) = BATCH"
    )
    site = next(site for site in sites_of(text) if site.pass_name == "inline_composites")
    assert (site.status, site.why) == ("skipped", "invalid-model")


def test_bodies_that_double_at_every_depth_are_not_opened() -> None:
    graphs = [
        f"""subgraph g{depth} (%x: float32[4]) {{
          %a: float32[4] = STABLEHLO_COMPOSITE(%x) {{name: 'n', {BODY}: {depth + 1}}}
          %b: float32[4] = STABLEHLO_COMPOSITE(%a) {{name: 'n', {BODY}: {depth + 1}}}
          return %b
        }}"""
        for depth in range(40)
    ]
    last = "subgraph last (%x: float32[4]) { %y: float32[4] = ABS(%x) return %y }"
    sites = sites_of("\n".join([*graphs, last]), target=INLINING)
    assert {(site.status, site.why) for site in sites} == {("skipped", "limit")}


def test_a_body_that_holds_a_custom_operator_is_opened_and_proved_with_its_options() -> None:
    model = parse(f"""
    subgraph main (%x: float32[32,1]) {{
      %y: float32[1,7,5] = STABLEHLO_COMPOSITE(%x) {{name: 'sound', {BODY}: 1}}
      return %y
    }}
    subgraph sound (%x: float32[32,1]) {{
      %y: float32[1,7,5] = CUSTOM 'AudioSpectrogram' (%x)
      return %y
    }}
    """)
    (operator,) = model.subgraphs[1].operators
    options = flexbuffers.Dumps({"window_size": 8, "stride": 4, "magnitude_squared": True})
    operator.table = new_table("Operator", custom_options=np.frombuffer(bytes(options), np.uint8))
    result, model = opened(model, INLINING)
    assert statuses(result.sites) == ["converted"]
    assert result.sites[0].proof is not None
    assert names(model) == ["CUSTOM"]


COUNTING = """
subgraph main (%x: float32[4]) {
  %a: float32[4], %b: float32[4] = STABLEHLO_COMPOSITE(%x) {name: 'count', BODY: 1}
  %out: float32[8] = CONCATENATION(%a, %b)
  return %out
}
subgraph body (%x: float32[4]) {
  %h: resource[] = VAR_HANDLE() {container: '', shared_name: 'state'}
  ASSIGN_VARIABLE(%h, %x)
  %before: float32[4] = READ_VARIABLE(%h)
  %sum: float32[4] = ADD(%before, %x)
  ASSIGN_VARIABLE(%h, %sum)
  %after: float32[4] = READ_VARIABLE(%h)
  return %before, %after
}
""".replace("BODY", BODY)


def test_reads_of_a_variable_before_and_after_a_write_stay_two() -> None:
    result, model = opened(parse(COUNTING), INLINING)
    assert statuses(result.sites) == ["converted"]
    assert count(model, "READ_VARIABLE") == 2


def test_a_body_with_a_tensor_that_is_kept_between_runs_is_left() -> None:
    """Every call of the body shares that tensor; copies of the body would each have their own."""
    model = parse(TWO_COMPOSITES)
    model.subgraphs[1].tensors[1].is_variable = True
    result = convert(model, target=INLINING, verify="none")
    assert result.skipped[0].why == "invalid-model"
