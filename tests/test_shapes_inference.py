"""Whole graphs: values folded along the way, subgraphs entered, what a file lies about; cost, and damaged graphs."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from shapes_referee import T, compare_all, one_operator
from syrupy.assertion import SnapshotAssertion

from edge_opt import ir
from edge_opt.ir.parse import parse
from edge_opt.ir.refusal import RefusedError
from edge_opt.schema.data import Data
from edge_opt.schema.table import new_table
from edge_opt.shapes import infer_shapes, inference
from edge_opt.shapes.inference import Disagreement, check_operators, doubted, infer_operator
from edge_opt.shapes.inference import shape_report as report_of

Shape = tuple[int, ...]

MERGED = """
    subgraph main (%x: float32[{0},4,8]) {{
      %sizes: int32[3] = SHAPE(%x) {{out_type: 2}}
      %first: int32[] = STRIDED_SLICE(%sizes, int32{{0}}, int32{{1}}, int32{{1}}) {{shrink_axis_mask: 1}}
      %target: int32[2] = PACK(%first, int32(32)) {{values_count: 2}}
      %y: float32[{0},32] = RESHAPE(%x, %target)
      return %y
    }}
    """
UNSTACKED = """
    subgraph main (%x: float32[?,?]) {
      %sizes: int32[2] = SHAPE(%x) {out_type: 2}
      %rows: int32[], %columns: int32[] = UNPACK(%sizes) {num: 2}
      %target: int32[3] = PACK(%columns, %rows, int32(1)) {values_count: 3}
      %y: float32[?,?,1] = RESHAPE(%x, %target)
      return %y
    }
    """
ENTERED = """
    subgraph main (%x: float32[2,6], %n: int32[2]) {{
      %t: int32[2] = STABLEHLO_COMPOSITE({}) {{name: 'target', decomposition_subgraph_index: 1}}
      %y: float32[{}] = RESHAPE(%x, %t)
      return %y
    }}
    subgraph body (%given: int32[2]) {{
      %sum: int32[2] = ADD(%given, int32{{2, 1}})
      return %sum
    }}
    """


@pytest.mark.parametrize(("text", "resized", "result"), [
    (MERGED.format(5), None, (5, 32)), (MERGED.format("?"), None, (-1, -1)), (MERGED.format("?"), (7, 4, 8), (7, 32)),
    (UNSTACKED, None, (-1, -1, -1)), (UNSTACKED, (2, 5), (5, 2, 1)),
    (ENTERED.format("int32{2, 2}", "4,3"), None, (4, 3)), (ENTERED.format("%n", "?,?"), None, (-1, -1)),
])  # fmt: skip
def test_values_are_followed_to_the_shape_of_results(
    text: str, resized: Shape | None, result: Shape
) -> None:
    model = parse(text)
    (graph, *_) = model.subgraphs
    report = report_of(model, resize={} if resized is None else {graph.inputs[0]: resized})
    assert report.disagreements == ()
    assert report.shapes[graph.outputs[0]] == result


def test_a_recorded_shape_that_is_a_lie_is_found_and_what_follows_from_it() -> None:
    model = parse("""
    subgraph main (%x: float32[2,3]) {
      %lie: float32[2,4] = RELU(%x)
      %y: float32[2,4] = RELU(%lie)
      return %y
    }
    """)
    first, second = infer_shapes(model)
    assert first == Disagreement("main", "lie", "0 (RELU)", (2, 4), (2, 3), first.reason)
    assert second == Disagreement("main", "y", "1 (RELU)", (2, 4), (2, 3), second.reason)
    assert "it follows from tensor 'lie'" in second.reason
    assert second.to_dict()["recorded"] == [2, 4]
    model.subgraphs[0].operators[0].options = new_table("AddOptions")
    model.subgraphs[0].operators[0].code = model.operator_code("SQUEEZE")
    assert "it has AddOptions, expected SqueezeOptions" in infer_shapes(model)[0].reason


def test_operands_that_cannot_go_together_are_reported_once(snapshot: SnapshotAssertion) -> None:
    model = parse("""
    subgraph main (%q: float32[1,4,16,256], %k: float32[1,4,64,128]) {
      %l: float32[1,4,16,64] = BATCH_MATMUL(%q, %k) {adj_y: true}
      %p: float32[1,4,16,64] = SOFTMAX(%l) {beta: 1.0}
      return %p
    }
    """)
    (found,) = infer_shapes(model)
    assert str(found) == snapshot
    report = report_of(model)
    assert (report.tensors, report.inferred, report.unknown, found.inferred) == (4, 3, 1, None)
    assert report.to_dict()["unknown"] == 1


def test_what_is_not_known_is_as_recorded() -> None:
    """Without a rule nothing is inferred; operands of one shape share sizes."""
    model = parse("""
    subgraph main (%w: int64[2,3], %a: float32[?,3,?], %b: float32[2,?,?]) {
      %y: float32[7] = SEGMENT_SUM(%w, %w)
      %z: float32[7] = RELU(%y)
      %c: float32[?,?,?] = ATAN2(%a, %b)
      return %z, %c
    }
    """)
    report = report_of(model)
    assert (report.disagreements, report.unknown) == ((), 1)
    assert [report.shapes[tensor] for tensor in model.subgraphs[0].outputs] == [(7,), (2, 3, -1)]


def test_an_unranked_tensor_is_not_a_scalar() -> None:
    model = ir.load(one_operator("RELU", [T((2, 3))], [T((2, 3))]))
    (graph,) = model.subgraphs
    graph.inputs[0].shape = ()
    assert len(infer_shapes(model)) == 1
    graph.inputs[0].table.set("has_rank", False)
    assert (infer_shapes(model), report_of(model).unknown) == ([], 1)


def test_a_constant_whose_bytes_do_not_fill_its_shape_is_found() -> None:
    """The reader refuses such a file; a rewrite may still make one."""
    model = parse(
        "subgraph main (%x: float32[2]) { %y: float32[2] = ADD(%x, float32{1, 2}) return %y }"
    )
    next(tensor for tensor in model.subgraphs[0].tensors if tensor.is_constant).shape = (2, 3)
    assert "needs 24 bytes, its buffer holds 8" in str(infer_shapes(model)[0])


def test_a_masked_bound_of_a_strided_slice_may_be_unknown() -> None:
    model = parse("""
    subgraph main (%x: float32[?,3], %bounds: int32[2]) {
      %begin: float32[?,3] = STRIDED_SLICE(%x, %bounds, int32{0, 3}, int32{1, 1}) {begin_mask: 2}
      %end: float32[?,3] = STRIDED_SLICE(%x, int32{0, 0}, %bounds, int32{1, 1}) {end_mask: 2}
      %both: float32[?,3] = STRIDED_SLICE(%x, %bounds, %bounds, int32{1, 1}) {begin_mask: 2, end_mask: 2}
      return %begin, %end, %both
    }
    """)
    report = report_of(model)
    assert [report.shapes[tensor] for tensor in model.subgraphs[0].outputs] == [(-1, 3)] * 3


def test_a_composite_that_is_entered_with_another_shape_is_found() -> None:
    """The interpreter resizes the body silently; whoever reads the file without it sees the recorded shapes."""
    model = parse("""
    subgraph main (%x: float32[2,5]) {
      %y: float32[2,5] = STABLEHLO_COMPOSITE(%x) {name: 'f', decomposition_subgraph_index: 1}
      return %y
    }
    subgraph body (%a: float32[2,3]) { %b: float32[2,3] = RELU(%a) return %b }
    """)
    first, second = infer_shapes(model)
    assert (first.subgraph, first.tensor, first.inferred) == ("body", "a", (2, 5))
    assert "it follows from tensor 'a'" in second.reason
    (graph, _) = model.subgraphs
    with pytest.raises(RefusedError, match="but gets"):
        check_operators(graph.operators, model.subgraphs)
    # Made after reading, which refuses it: a subgraph that enters itself.
    graph.operators[0].options = new_table(
        "StableHLOCompositeOptions", decomposition_subgraph_index=0
    )
    assert [one.reason for one in infer_shapes(model) if one.subgraph == "main"] == []


@pytest.mark.parametrize(("rows", "shared"), [(2, None), (3, (3, 4))])
def test_a_subgraph_has_what_its_callers_share_wherever_it_is_listed(
    rows: int, shared: tuple[int, int] | None
) -> None:
    """And resizing is no disagreement."""
    model = parse("""
    subgraph body (%x: float32[?,4]) { %y: float32[?,4] = NEG(%x) return %y }
    subgraph main (%a: float32[2,4], %b: float32[3,4]) {
      %c: float32[?,4] = CALL(%a) {subgraph: 0}
      %d: float32[3,4] = CALL(%b) {subgraph: 0}
      return %c, %d
    }
    """)
    body, main = model.subgraphs
    report = report_of(model, resize={main.inputs[0]: (rows, 4)})
    assert report.disagreements == ()
    assert [report.shapes[tensor] for tensor in body.tensors] == [shared] * 2
    assert [report.shapes[tensor] for tensor in main.outputs] == [(rows, 4), (3, 4)]


def test_operators_whose_recorded_shapes_do_not_fit_are_doubted() -> None:
    model = parse("""
    subgraph main (%x: float32[?,3], %y: float32[2,3], %n: int32[]) {
      %a: float32[2,3] = RELU(%x)
      %b: float32[2,4] = RELU(%y)
      %c: float32[2,3] = NEG(%y)
      %d: float32[1,3] = STRIDED_SLICE(%y, int32{0}, %n, int32{1})
      %e: float32[1,3] = NEG(%d)
      %f: float32[1] = SEGMENT_SUM(%x, %y)
      return %a, %b, %c, %e, %f
    }
    """)
    (graph,) = model.subgraphs
    with doubted([graph]), doubted([graph]):
        errors = [bool(operator.shape_error) for operator in graph.operators]
    assert errors == [True, True, False, True, False, True]
    assert not any(operator.shape_error for operator in graph.operators)


LAYER = """
  %q{0}: float32[1,8,16] = FULLY_CONNECTED(%x{0}, %weights, none) {{keep_num_dims: true}}
  %split{0}: float32[1,8,4,4] = RESHAPE(%q{0}, int32{{1, 8, 4, 4}})
  %scores{0}: float32[1,8,4,4] = BATCH_MATMUL(%split{0}, %split{0}) {{adj_y: true}}
  %merged{0}: float32[1,8,16] = RESHAPE(%scores{0}, int32{{1, -1, 16}})
  %sizes{0}: int32[3] = SHAPE(%x{0}) {{out_type: 2}}
  %x{1}: float32[1,8,16] = RESHAPE(%merged{0}, %sizes{0})
"""


def test_operators_are_inferred_once_and_no_large_constant_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    count, inferred = 20, list[str]()

    def counting(op: ir.Operator, *others: Any) -> Any:
        inferred.append(op.name)
        return infer_operator(op, *others)

    steps = "".join(LAYER.format(index, index + 1) for index in range(count))
    text = f"subgraph main (%x0: float32[1,8,16], %weights: float32[16,16]) {{ {steps} return %x{count} }}"
    monkeypatch.setattr(inference, "infer_operator", counting)
    report = report_of(parse(text))
    assert (report.disagreements, report.unknown, len(inferred)) == (
        (),
        0,
        count * LAYER.count(" = "),
    )
    model = parse(
        "subgraph main (%x: float32[1,64]) { %y: float32[1,64] = ADD(%x, float32{1}) return %y }"
    )
    weights = next(tensor for tensor in model.subgraphs[0].tensors if tensor.is_constant)
    weights.shape, weights.buffer = (512, 64), ir.Buffer(Data(bytes(512 * 64 * 4)))
    monkeypatch.setattr(ir.Tensor, "array", lambda tensor: pytest.fail(f"read {tensor.name}"))
    report_of(model)


ROOT = Path(__file__).parent.parent
BUNDLED = sorted((ROOT / "testdata").glob("*.tflite"))
FAMILIES = ["gemma3_k2", "gemma3_gpu_fused", "gemma3_gpu_sdpa", "gemma2_gpu", "qwen3_k2"]


def check_every_tensor(model: bytes) -> None:
    """Every inferred shape equals what the interpreter allocates."""
    report = report_of(ir.load(model))
    assert (report.disagreements, report.unknown) == ((), 0)
    erased = ir.load(model)  # the interpreter trusts some recorded shapes of results
    for tensor in (
        one for graph in erased.subgraphs for operator in graph for one in operator.outputs
    ):
        tensor.shape, tensor.shape_signature = (), None
    for given in (model, ir.to_bytes(erased)):
        count, wrong = compare_all(given, model)
        assert (wrong, count) == ([], report.tensors)


@pytest.mark.parametrize("path", BUNDLED, ids=lambda path: path.stem)
def test_bundled_models(path: Path) -> None:
    check_every_tensor(path.read_bytes())


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the families, made by one process: importing the exporter takes longer than an export."""
    pytest.importorskip(
        "litert_torch", reason="families are exported with litert-torch, in the torch extra"
    )
    folder = tmp_path_factory.mktemp("families")
    command = [
        sys.executable,
        ROOT / "testdata" / "make_families.py",
        folder,
        "--here",
        "--only",
        *FAMILIES,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_freshly_exported_families(name: str, exported: Path) -> None:
    check_every_tensor((exported / f"{name}.tflite").read_bytes())


def test_a_model_is_given_by_its_path(tmp_path: Path) -> None:
    path = tmp_path / "x.tflite"
    path.write_bytes(
        ir.to_bytes(
            parse("subgraph main (%x: float32[2,3]) { %y: float32[2,4] = RELU(%x) return %y }")
        )
    )
    assert infer_shapes(path) == infer_shapes(str(path)) == infer_shapes(ir.load(path)) != []
