"""Files that load, of graphs that no exporter writes: they are left with a reason, and nothing ends in a traceback."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest
from text_parser import parse

from edge_opt.attention.labels import OperandFactors
from edge_opt.base.errors import ModelFormatError
from edge_opt.conversion import SitesLeftError, convert
from edge_opt.inspection import inspect
from edge_opt.ir import Operator, load, to_bytes
from edge_opt.ir.refusal import RefusedError
from edge_opt.passes import Context, Pass, Rewrite, Site, Status
from edge_opt.proof.row_rules import step_of
from edge_opt.schema import new_table
from edge_opt.shapes import infer_shapes
from edge_opt.targets import load_target

ATTENTION = """
  {before}
  %l: float32[1,4,6,6] = BATCH_MATMUL(%q, %k) {{adj_y: true}}
  %m: float32[1,4,6,6] = {masked}
  %p: float32[1,4,6,6] = SOFTMAX(%m) {{beta: 1.0}}
  %o: float32[1,4,6,5] = BATCH_MATMUL(%p, %v)
  %t: float32[1,6,4,5] = TRANSPOSE(%o, int32{{0, 2, 1, 3}})
  %r: float32[1,6,20] = RESHAPE(%t, int32{{1, 6, 20}}) {{new_shape: [1, 6, 20]}}
  return %r
"""
QKV = "%q: float32[1,4,6,5], %k: float32[1,4,6,5], %v: float32[1,4,6,5]"
SELECT = "SELECT_V2(%c, %l, float32(-10000.0))"


def attention(before: str, masked: str, *inputs: str, more: str = "") -> str:
    """q, k and v `[1,4,6,5]`, and what makes the mask."""
    body = ATTENTION.format(before=before, masked=masked)
    return f"subgraph main ({', '.join((QKV, *inputs))}) {{{body}}}\n{more}"


ONE_KEY = """
subgraph main (%q: float32[1,1,24,5], %k: float32[1,1,6,5], %v: float32[1,1,6,5], %m: float32[1,1,6,6]) {
  %l: float32[1,1,24,6] = BATCH_MATMUL(%q, %k) {adj_y: true}
  %r: float32[1,1,24,6] = CONCATENATION(%m, %m, %m, %m) {axis: 77}
  %a: float32[1,1,24,6] = ADD(%l, %r)
  %p: float32[1,1,24,6] = SOFTMAX(%a) {beta: 1.0}
  %o: float32[1,1,24,5] = BATCH_MATMUL(%p, %v)
  return %o
}
"""
# What would raise IndexError, ZeroDivisionError, TypeError.
GRAPHS = {
    "CONCATENATION along an axis that is not there": ONE_KEY,
    "GATHER from an axis of size 0": attention(
        "%g: float32[1,4,6,5] = GATHER(%e, int32{0, 0, 0, 0}) {axis: 1}",
        "MUL(%l, float32(2.0))",
        "%e: float32[1,0,6,5]",
    ).replace("BATCH_MATMUL(%q, %k)", "BATCH_MATMUL(%q, %g)"),
    "GATHER with real numbers as indices": """
    subgraph main (%x: int32[1]) {
      %g: int32[1] = GATHER(int32{1, 2, 3}, float32{0.5}) {axis: 0}
      %y: int32[1] = ADD(%x, %g)
      return %y
    }
    """,
    "int8 products of vectors before QUANTIZE": """
    subgraph main (%a: int8[5] q(0.1, 0), %b: int8[5] q(0.1, 0)) {
      %l: int8[] q(0.001, 0) = BATCH_MATMUL(%a, %b) {adj_x: true}
      %m: int8[] q(0.5, 0) = QUANTIZE(%l)
      return %m
    }
    """,
    "a composite whose body multiplies vectors": """
    subgraph main (%a: float32[5], %b: float32[5]) {
      %l: float32[] = STABLEHLO_COMPOSITE(%a, %b) {name: 'x', decomposition_subgraph_index: 1}
      return %l
    }
    subgraph body (%a: float32[5], %b: float32[5]) {
      %l: float32[] = BATCH_MATMUL(%a, %b) {adj_x: true}
      return %l
    }
    """,
}


@pytest.mark.parametrize("case", GRAPHS)
def test_a_graph_that_no_exporter_writes_is_looked_at_and_converted_or_left(case: str) -> None:
    content = to_bytes(parse(GRAPHS[case]))
    infer_shapes(load(content))
    inspect(content)
    for target in ("generic", "qualcomm-htp", "ethos-u85"):
        result = convert(content, target=target, inline_composites=True, dry_run=True)
        assert all(site.reason for site in result.sites if site.status is not Status.CONVERTED)
        assert not [site for site in result.sites if "bug" in site.reason]


def test_a_product_of_a_tensor_whose_rank_the_file_leaves_out_is_left() -> None:
    model = parse(attention("", "MUL(%l, float32(2.0))"))
    query = model.subgraphs[0].inputs[0]
    query.shape, query.table = (), new_table("Tensor", has_rank=False)
    content = to_bytes(model)
    assert not load(content).subgraphs[0].inputs[0].has_rank
    (site,) = convert(content, dry_run=True).sites
    assert site.reason.startswith("a dimension is known only at run time, at BATCH_MATMUL")


@pytest.mark.parametrize("name", ["STABLEHLO_COMPOSITE", "IF", "WHILE", "CALL"])
def test_an_operator_that_names_no_subgraph_to_run_is_refused(name: str) -> None:
    model = parse(f"subgraph main (%x: float32[2]) {{ %y: float32[2] = {name}(%x) return %y }}")
    (operator,) = model.subgraphs[0].operators
    operator.options = None
    with pytest.raises(ModelFormatError, match=f"operator 0 \\({name}\\): has no options"):
        load(to_bytes(model))


def test_options_that_are_left_out_are_the_schemas_defaults() -> None:
    model = parse("subgraph main (%x: float32[1,4,4,2]) { %y: float32[1,4,4,2] = NEG(%x) return %y }")
    for name, option, value in (
        ("CONV_2D", "dilation_w_factor", 1),
        ("CONV_2D", "stride_w", 0),
        ("SOFTMAX", "beta", 0.0),
    ):
        operator = Operator(model.operator_code(name), [], [])
        assert (operator.options, operator.option(option)) == (None, value)


class Broken(Pass):
    """Fails at SOFTMAXes of this name, or while it looks for sites."""

    name = "broken"
    summary = "raises"

    def __init__(self, fails_at: str) -> None:
        self.fails_at = fails_at

    def sites(self, context: Context) -> Iterator[Site]:
        for operator in context.subgraph.operators:
            if operator.name == "SOFTMAX":
                yield Site(operator, partial(self.build, operator))
        if self.fails_at == "sites":
            raise ZeroDivisionError("no reason")

    def build(self, operator: Operator) -> Rewrite:
        if self.fails_at in operator.outputs[0].name:
            raise ZeroDivisionError("no reason")
        raise RefusedError("fine")


def test_a_sum_of_a_scalar_has_no_axis_to_sum() -> None:
    """TFLite takes any axes of a scalar."""
    model = parse("subgraph main (%x: float32[]) { %y: float32[] = SUM(%x, int32{0}) return %y }")
    (operator,) = model.subgraphs[0].operators
    assert infer_shapes(model) == []
    assert OperandFactors()(operator.outputs[0], ()) == {0: ()}
    step = step_of(operator, [()])
    assert step is not None
    assert step.needs == {0: ()}


DEEP = 24


def test_composites_that_call_each_the_next_twice_are_no_more_work_than_they_are_subgraphs() -> None:
    calls = "".join(
        f"""subgraph body{depth} (%x: float32[1,4,6,5]) {{
          %y: float32[1,4,6,5] = STABLEHLO_COMPOSITE(%x) {{name: 'n', decomposition_subgraph_index: {depth + 1}}}
          %z: float32[1,4,6,5] = STABLEHLO_COMPOSITE(%y) {{name: 'n', decomposition_subgraph_index: {depth + 1}}}
          return %z
        }}
        """
        for depth in range(1, DEEP)
    )
    last = f"subgraph body{DEEP} (%x: float32[1,4,6,5]) {{ %y: float32[1,4,6,5] = TANH(%x) return %y }}"
    norm = "%n: float32[1,4,6,5] = STABLEHLO_COMPOSITE(%h) {name: 'n', decomposition_subgraph_index: 1}"
    merged = "%h: float32[1,4,6,5] = TRANSPOSE(%x, int32{0, 2, 1, 3})"
    text = attention(f"{merged}\n{norm}", "MUL(%l, float32(2.0))", "%x: float32[1,6,4,5]", more=calls + last)
    content = to_bytes(parse(text.replace("BATCH_MATMUL(%q, %k)", "BATCH_MATMUL(%n, %k)")))
    target = replace(load_target("qualcomm-htp"), norm_per_head_from=None)
    result = convert(content, target=target, verify="none", dry_run=True)
    assert result.model is not None
    assert [site.pass_name for site in result.converted] == ["mha_to_sha"]
    # A body for each head and level, and those that were there.
    assert len(result.model.subgraphs) <= 1 + 5 * DEEP


def test_pieces_of_fewer_than_half_the_rows_that_were_asked_for_are_not_made() -> None:
    rows = (
        attention("", "MUL(%l, float32(2.0))").replace(",6,", ",127,").replace("int32{1, 6,", "int32{1, 127,")
    )
    content = to_bytes(parse(rows.replace("[1, 6, 20]", "[1, 127, 20]").replace(",6]", ",127]")))
    result = convert(content, rows_per_tile=64, verify="none", dry_run=True)
    (site,) = (site for site in result.sites if site.pass_name == "mha_to_sha")
    assert site.note.startswith(
        "rows are not cut: 127 rows have no equal blocks of 64 rows or somewhat fewer"
    )


FAILURES = {"head_0": "a bug in", "sites": "looking for further sites failed: a bug in"}


@pytest.mark.parametrize(("fails_at", "reason"), FAILURES.items())
def test_an_error_that_nobody_foresaw_is_the_reason_of_one_site(
    fails_at: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = to_bytes(parse(attention("", "MUL(%l, float32(2.0))")))
    monkeypatch.delenv("EDGE_OPT_TRACEBACK", raising=False)
    result = convert(content, passes=["mha_to_sha", Broken(fails_at)], dry_run=True)
    assert [site.pass_name for site in result.converted] == ["mha_to_sha"]
    (bug,) = (site for site in result.sites if site.is_bug)
    assert bug.reason.startswith(
        f"{reason} edge-opt, please report it with the model's source: ZeroDivisionError"
    )
    with pytest.raises(SitesLeftError):
        convert(content, passes=["mha_to_sha", Broken(fails_at)], dry_run=True, require_all=True)
    monkeypatch.setenv("EDGE_OPT_TRACEBACK", "1")
    with pytest.raises(ZeroDivisionError):
        convert(content, passes=["mha_to_sha", Broken(fails_at)], dry_run=True)
