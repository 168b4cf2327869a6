"""What `compare` runs on: inputs of lookups span their tables, state is carried, masks close whole rows."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from text_parser import parse
from tiny_models import Graph, Op, T, build, options

from edge_opt.comparison.compare import compare
from edge_opt.comparison.golden import check, record
from edge_opt.comparison.models import keeps_state, with_facts
from edge_opt.conversion import convert
from edge_opt.ir import Constants, DType, Model, Operator, Tensor, to_bytes
from edge_opt.runtime.inputs import array_of, plan
from edge_opt.runtime.tensors import SignatureInfo, TensorInfo
from edge_opt.schema.table import new_table
from edge_opt.targets import Target

ROWS = 1000


def lookup(table: np.ndarray, name: str = "ids") -> bytes:
    """Numbers that are not yet indices: `CAST`, `RESHAPE`, then a row of the table for each."""
    tensors = [
        T(name, (1, 16), "int64"),
        T("narrow", (1, 16), "int32"),
        T("shape", (1,), "int32", np.array([16], np.int32)),
        T("flat", (16,), "int32"),
        T("table", table.shape, value=table),
        T("y", (16, table.shape[1])),
    ]
    operators = [
        Op("CAST", [name], ["narrow"], options("CastOptions")),
        Op("RESHAPE", ["narrow", "shape"], ["flat"], options("ReshapeOptions", newShape=[16])),
        Op("EMBEDDING_LOOKUP", ["flat", "table"], ["y"]),
    ]
    return build(Graph(tensors, operators, [name], ["y"]))


TABLE = np.random.default_rng(0).standard_normal((ROWS, 4)).astype(np.float32)
CUT = np.where(np.arange(ROWS)[:, None] < 128, TABLE, np.float32(0))


@pytest.mark.parametrize("name", ["token_ids", "whatever"])
def test_rows_far_down_a_table_are_read(name: str) -> None:
    assert not compare(lookup(TABLE, name), lookup(CUT, name)).equal
    assert compare(lookup(TABLE, name), lookup(TABLE, name)).bitwise


def test_of_two_tables_the_shorter_one_bounds_the_inputs() -> None:
    assert compare(lookup(TABLE), lookup(TABLE[:200])).bitwise
    assert compare(lookup(TABLE[:200]), lookup(TABLE)).bitwise


def test_golden_files_are_recorded_on_the_whole_table(tmp_path: Path) -> None:
    golden = record(lookup(TABLE), tmp_path / "g.npz")
    assert check(lookup(TABLE), golden).equal
    assert not check(lookup(CUT), golden).equal


_PLAIN = "%y: float32[4,2] = EMBEDDING_LOOKUP(%i, %t)"
_SMALLER = "%y: float32[4,2] = EMBEDDING_LOOKUP(%i, float32[20,2]{splat 1.0})"
_WRAPPED = """%n: bool[4] = LESS(%i, int32(0))
  %w: int32[4] = ADD(%i, int32(60))
  %s: int32[4] = SELECT_V2(%n, %w, %i)
  %y: float32[4,2] = EMBEDDING_LOOKUP(%s, %t)"""
_COMPUTED = """%d: int32[] = ABS(int32(40))
  %y: float32[4,40] = ONE_HOT(%i, %d, float32(1.0), float32(0.0))"""
# What the graph does with the index %i and the table %t, and how many entries the index may name.
LOOKUPS = {
    "gather": ("[4]", "[3,50,2]", "%y: float32[3,4,2] = GATHER(%t, %i) {axis: 1}", 50),
    "gather, axis from the end": ("[4]", "[3,50,7]", "%y: float32[3,50,4] = GATHER(%t, %i) {axis: -1}", 7),
    "gather_nd": ("[4,2]", "[9,30,2]", "%y: float32[4,2] = GATHER_ND(%t, %i)", 9),
    "embedding": ("[4]", "[60,2]", _PLAIN, 60),
    "one_hot": ("[4]", "[1]", "%y: float32[4,40] = ONE_HOT(%i, int32(40), float32(1.0), float32(0.0))", 40),
    "one_hot, of a depth that is computed": ("[4]", "[1]", _COMPUTED, 0),
    "the smaller of two": ("[4]", "[60,2]", f"{_PLAIN.replace('y', 'a', 1)}\n  {_SMALLER}", 20),
    "negative ones wrapped": ("[4]", "[60,2]", _WRAPPED, 60),
    "what is looked up in": ("[4]", "[1]", "%y: int32[2] = GATHER(%i, int32{1, 2}) {axis: 0}", 0),
    "a sum": ("[4]", "[1]", "%y: int32[4] = ADD(%i, int32(1))", 0),
    "a size known only at run time": ("[4]", "[?,2]", _PLAIN, 0),
}


def entries(model: Model) -> list[int]:
    tensors = model.subgraphs[0].inputs
    infos = tuple(TensorInfo(t.name, t.name, t.shape, t.shape, t.dtype.name.lower()) for t in tensors)
    found = with_facts([SignatureInfo("main", infos, (), positional=True)], model)
    return [info.entries for info in found["main"].inputs]


@pytest.mark.parametrize("case", LOOKUPS)
def test_how_many_entries_the_table_has_that_an_input_indexes(case: str) -> None:
    index, table, operators, wanted = LOOKUPS[case]
    given = f"%i: int32{index}, %t: float32{table}"
    model = parse(f"subgraph main ({given}) {{\n  {operators}\n  return %y\n}}\n")
    assert entries(model) == [wanted, 0]


def test_lookups_in_the_bodies_of_composites_are_found() -> None:
    model = parse("""
subgraph main (%i: int32[4], %t: float32[60,2]) {
  %y: float32[4,2] = STABLEHLO_COMPOSITE(%t, %i) {name: 'embedding', decomposition_subgraph_index: 1}
  return %y
}
subgraph body (%table: float32[60,2], %index: int32[4]) {
  %y: float32[4,2] = EMBEDDING_LOOKUP(%index, %table)
  return %y
}
""")
    assert entries(model) == [60, 0]


def signature(*inputs: TensorInfo) -> SignatureInfo:
    return SignatureInfo("main", inputs, ())


def test_positions_stay_inside_their_table_and_reach_all_of_it() -> None:
    info = TensorInfo("input_pos", "input_pos", (8,), (8,), "int32", entries=300)
    seen = [array_of(plan(signature(info), run=run)[0]) for run in range(200)]
    assert min(values.min() for values in seen) == 0
    assert 280 < max(values.max() for values in seen) < 300
    cache = TensorInfo("kv_cache_k_0", "k", (1, 1, 4096, 4096), (1, 1, 4096, 4096), "float32")
    seen = [array_of(plan(signature(info, cache), run=run)[0]) for run in range(50)]
    assert max(values.max() for values in seen) < 300


def test_an_index_may_be_a_float_that_is_cast_later() -> None:
    info = TensorInfo("x", "x", (500,), (500,), "float32", entries=ROWS)
    values = array_of(plan(signature(info))[0])
    assert values.dtype == np.float32
    assert (values == np.rint(values)).all()
    assert values.min() < 100
    assert 900 < values.max() < ROWS


# State


def remembering(stored: str) -> Model:
    """Gives what the run before stored: `stored` of its input, 0 at first."""
    model = parse(f"""
subgraph main (%x: float32[4]) {{
  %later: float32[4] = {stored}(%x)
  %out: float32[4] = ABS(%later)
  return %out
}}
subgraph init () {{
  %h: resource[] = VAR_HANDLE() {{container: '', shared_name: 's'}}
  return
}}
""")
    main, init = model.subgraphs

    def add(graph: Any, name: str, inputs: list[Tensor], outputs: list[Tensor], table: Any = None) -> None:
        graph.append(Operator(model.operator_code(name), inputs, outputs, table))

    zero = init.add_tensor(Constants(model).make("zero", np.zeros(4, np.float32), DType.FLOAT32))
    add(init, "ASSIGN_VARIABLE", [init.tensors[0], zero], [])
    (later,) = (t for t in main.tensors if t.name == "later")
    main.remove(list(main.operators)[-1])
    handle = main.add_tensor(Tensor("h", (), DType.RESOURCE))
    add(main, "CALL_ONCE", [], [], new_table("CallOnceOptions", init_subgraph_index=1))
    add(main, "VAR_HANDLE", [], [handle], new_table("VarHandleOptions", container="", shared_name="s"))
    add(main, "READ_VARIABLE", [handle], [main.outputs[0]])
    add(main, "ASSIGN_VARIABLE", [handle, later], [])
    return model


def test_models_that_keep_state_are_run_again_with_it() -> None:
    """The first run reads what the variable holds at first, whatever is stored then."""
    one, other = (to_bytes(remembering(stored)) for stored in ("ABS", "NEG"))
    assert keeps_state(remembering("ABS"))
    report = compare(one, other)
    assert report.runs == 2
    assert not report.equal
    assert report.first_difference is not None
    assert report.first_difference.tensor == "out"
    assert compare(one, one).bitwise


# Rows that are masked everywhere


def selected(constant: float = -1e9) -> str:
    return f"""
signature main = #0 (mask=%mask, x=%x) -> (p=%p)
subgraph main (%mask: bool[1,1,8,16], %x: float32[1,2,8,16]) {{
  %masked: float32[1,2,8,16] = SELECT_V2(%mask, %x, float32({constant}))
  %p: float32[1,2,8,16] = SOFTMAX(%masked) {{beta: 1.0}}
  return %p
}}
"""


def test_rows_that_are_masked_everywhere_are_compared_apart() -> None:
    before = to_bytes(parse(selected()))
    exact = convert(before).model
    half = convert(before, target=Target("npu", "", mask_constant=-65472.0)).model
    assert exact is not None
    assert half is not None
    report = compare(before, to_bytes(exact))
    assert report.bitwise
    assert report.notes() == []
    assert [output.bitwise for output in report.signatures[0].masked_rows] == [True]
    report = compare(before, to_bytes(half))
    assert (report.equal, report.bitwise) == (True, True), "no token has such a row"
    (sentence,) = report.notes()
    where = "with rows that are masked everywhere, 1 of 1 outputs of signature 'main' (xnnpack) "
    assert sentence.startswith(where)
    (figures,) = report.to_dict()["signatures"][0]["masked_rows"]
    assert f"differ, by up to {figures['max_abs']:.3g}" in sentence
    assert not compare(before, to_bytes(half), hostile=True).equal
    without = to_bytes(parse("subgraph main (%x: float32[2]) {\n  %y: float32[2] = ABS(%x)\n  return %y\n}"))
    assert compare(without, without).signatures[0].masked_rows == (), "no input is a mask"
