"""Which integers an input may be: found by following its values to what reads them."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import proof_models as models
import pytest
from growth_shapes import SHAPES, visits
from literals import literal

from edge_opt.comparison import golden
from edge_opt.comparison.compare import compare
from edge_opt.ir.parse import parse
from edge_opt.runtime.description import describe
from edge_opt.runtime.inputs import VARIANTS, array_of, plan, twins
from edge_opt.runtime.tensors import SignatureInfo

SUBGRAPHS = """
subgraph twice (%a: int32[4]) { %b: int32[4] = ADD(%a, %a) return %b }
subgraph same (%c: int32[4]) { %d: int32[4] = ABS(%c) return %d }
subgraph below (%n: int32[4], %k: int32[4]) {
  %m: int32[] = REDUCE_MAX(%n, int32{0})
  %o: bool[] = LESS(%m, int32(9))
  return %o
}
subgraph body (%p: int32[4], %q: int32[4]) {
  %r: int32[4] = ADD(%p, int32(1))
  %s: int32[4] = MUL(%q, int32(3))
  return %r, %s
}
subgraph lookup (%e: int32[4]) {
  %f: float32[4,2] = EMBEDDING_LOOKUP(%e, float32[60,2]{splat 1.0})
  return %f
}
"""
WHILE = "WHILE(%one, %other) {cond_subgraph_index: 3, body_subgraph_index: 4}"
ZERO = "int32[4]{splat 0}"
TABLE = "float32[60,2]{splat 1.0}"
# What a graph does with the input %i: int32[4] or a scalar %n: int32[], and the end of the accepted integers.
CASES = {
    "a smaller number": ("%y: int32[4] = MINIMUM(%i, int32(1000))", 0),
    "arithmetic and a cast": ("%a: int32[4] = MUL(%i, %i)\n %y: float32[4] = CAST(%a)", 0),
    "a comparison": ("%b: bool[4] = LESS(%i, int32(9))\n %y: int32[4] = SELECT_V2(%b, %i, int32(1))", 0),
    "division by a positive constant": ("%y: int32[4] = FLOOR_MOD(%i, int32(7))", 0),
    "division by the input": ("%y: int32[4] = FLOOR_DIV(int32[4]{splat 7}, %i)", None),
    "its largest element's place": (
        f"%a: int32[] = ARG_MAX(%i, int32(0))\n %y: float32[2] = GATHER({TABLE}, %a) {{axis: 0}}", 0),
    "an index": (f"%y: float32[4,2] = GATHER({TABLE}, %i) {{axis: 0}}", 60),
    "an index that is changed": (
        f"%a: int32[4] = ADD(%i, int32(1))\n %y: float32[4,2] = GATHER({TABLE}, %a) {{axis: 0}}", None),
    "an index, also changed": (
        (f"%a: int32[4] = ADD(%i, int32(1))\n %z: float32[4,2] = GATHER({TABLE}, %i) {{axis: 0}}\n"
        f" %w: float32[4,2] = GATHER({TABLE}, %a) {{axis: 0}}\n %y: float32[4,2] = ADD(%z, %w)"), None),
    "an index, from floats": (
        (f"%a: float32[4] = CAST(%i)\n %b: float32[4] = FLOOR(%a)\n %c: int32[4] = CAST(%b)\n"
        f" %y: float32[4,2] = GATHER({TABLE}, %c) {{axis: 0}}"), None),
    "an index that a comparison decides": (
        (f"%b: bool[4] = LESS(%i, int32(9))\n %c: int32[4] = CAST(%b)\n"
        f" %y: float32[4,2] = GATHER({TABLE}, %c) {{axis: 0}}"), None),
    "an index of several axes": (
        ("%a: int32[2,2] = RESHAPE(%i, int32{2, 2}) {new_shape: [2, 2]}\n"
        " %y: float32[2] = GATHER_ND(float32[7,9]{splat 1.0}, %a)"), 7),
    "one of so many": (
        "%y: float32[4,12] = ONE_HOT(%i, int32(12), float32(1.0), float32(0.0)) {axis: -1}", 12),
    "a start on one axis": (
        ("%s: int32[3] = PACK(int32(0), %n, int32(0)) {values_count: 3}\n"
        " %y: float32[1,30,4] = DYNAMIC_UPDATE_SLICE(float32[1,30,4]{splat 1.0}, float32[1,5,4]{splat 2.0}, %s)"), 26),
    "a start, changed, which is clamped": (
        ("%m: int32[] = ADD(%n, int32(1))\n %s: int32[2] = PACK(%m, int32(0)) {values_count: 2}\n"
        " %y: float32[30,4] = DYNAMIC_UPDATE_SLICE(float32[30,4]{splat 1.0}, float32[5,4]{splat 2.0}, %s)"), 0),
    "a start that is clamped, also computed with": (
        ("%m: int32[] = ADD(%n, int32(1))\n %s: int32[2] = PACK(%n, int32(0)) {values_count: 2}\n"
        " %z: float32[30,4] = DYNAMIC_UPDATE_SLICE(float32[30,4]{splat 1.0}, float32[5,4]{splat 2.0}, %s)\n"
        " %c: float32[] = CAST(%m)\n %y: float32[30,4] = MUL(%z, %c)"), 0),
    "where a slice begins": (
        ("%s: int32[2] = PACK(%n, int32(0)) {values_count: 2}\n"
        f" %y: float32[8,2] = SLICE({TABLE}, %s, int32{{8, 2}})"), 53),
    "how long a slice is": (
        f"%s: int32[2] = PACK(%n, int32(2)) {{values_count: 2}}\n %y: float32[8,2] = SLICE({TABLE}, int32{{0, 0}}, %s)",
        None),
    "a shape": ("%y: float32[?] = FILL(%i, float32(1.0))", None),
    "a new shape": (f"%y: int32[?,?,?,?] = RESHAPE({ZERO}, %i)", None),
    "repeats": ("%y: int32[?] = TILE(int32[1,1,1,1]{splat 1}, %i)", None),
    "the end of a range": ("%y: int32[?] = RANGE(int32(0), %n, int32(1))", None),
    "an axis": ("%y: int32[] = REDUCE_MAX(int32[2,2,2,2]{splat 1}, %i)", None),
    "an exponent": ("%y: int32[4] = POW(int32[4]{splat 2}, %i)", None),
    "an argument": ("%y: int32[4] = STABLEHLO_COMPOSITE(%i) {name: 'e', decomposition_subgraph_index: 1}", 0),
    "a branch's operand": (
        ("%c: bool[] = LESS(int32(0), int32(1))\n"
        " %y: int32[4] = IF(%c, %i) {then_subgraph_index: 1, else_subgraph_index: 2}"), 0),
    "what a loop counts": (f"%u: int32[4], %y: int32[4] = {WHILE.replace('%one, %other', f'%i, {ZERO}')}", None),
    "what a loop carries": (f"%u: int32[4], %y: int32[4] = {WHILE.replace('%one, %other', f'{ZERO}, %i')}", 0),
    "what nobody reads": ("%y: float32[4] = ABS(float32[4]{splat 1.0})", 0),
    "a custom operator": ("%y: int32[4] = CUSTOM('mine', %i)", None),
}  # fmt: skip


EMBEDDED = f"%y: float32[4,2] = EMBEDDING_LOOKUP(%i, {TABLE})"
BRANCHES = "{then_subgraph_index: 5, else_subgraph_index: 5}"
TABLES = {
    "%y: float32[3,4,2] = GATHER(float32[3,50,2]{splat 1.0}, %i) {axis: 1}": 50,
    "%y: float32[3,50,4] = GATHER(float32[3,50,7]{splat 1.0}, %i) {axis: -1}": 7,
    EMBEDDED: 60,
    f"{EMBEDDED}\n %z: float32[4,2] = EMBEDDING_LOOKUP(%i, float32[20,2]{{splat 1.0}})": 20,
    # Negative ones are wrapped.
    f"""%b: bool[4] = LESS(%i, int32(0))
    %w: int32[4] = ADD(%i, int32(60))
    %s: int32[4] = SELECT_V2(%b, %w, %i)
    {EMBEDDED.replace("%i", "%s")}""": 60,
    "%y: float32[4,2] = STABLEHLO_COMPOSITE(%i) {name: 'e', decomposition_subgraph_index: 5}": 60,
    f"%c: bool[] = LESS(int32(0), int32(1))\n %y: float32[4,2] = IF(%c, %i) {BRANCHES}": 60,
    f"%y: float32[4,2] = IF(%i, int32{{0, 1, 2, 3}}) {BRANCHES}": 0,
    "%y: int32[2] = GATHER(%i, int32{1, 2}) {axis: 0}": 0,
    "%y: int32[4] = ADD(%i, int32(1))": 0,
    "%y: float32[4,2] = EMBEDDING_LOOKUP(%i, %t)": 0,
}
"""What a graph does with its input, and how many entries the smallest table has that this indexes."""


@pytest.mark.parametrize(("operators", "entries"), TABLES.items())
def test_how_many_entries_the_table_has_that_an_input_indexes(operators: str, entries: int) -> None:
    (signature,) = describe(parse(model(operators))).values()
    assert signature.inputs[0].entries == entries


def model(operators: str) -> str:
    given = "%n: int32[]" if "%n" in operators else "%i: int32[4], %t: float32[?,2]"
    return f"subgraph main ({given}) {{\n {operators}\n return %y\n}}\n{SUBGRAPHS}"


@pytest.mark.parametrize("case", CASES)
def test_an_input_accepts_what_its_readers_accept(case: str) -> None:
    operators, accepts = CASES[case]
    operators = re.sub(r"CUSTOM\('mine', ", "CUSTOM 'mine' (", operators)
    (signature,) = describe(parse(model(operators))).values()
    assert signature.inputs[0].accepts == accepts


@pytest.mark.parametrize("shape", SHAPES)
def test_twice_the_operators_take_at_most_little_more_than_twice_the_visits(shape: str) -> None:
    small, large = (parse(SHAPES[shape](count)) for count in (75, 150))
    assert visits(lambda: describe(large)) <= 2.2 * visits(lambda: describe(small))


def test_a_variable_passes_numbers_on() -> None:
    text = f"""
signature put = #0 (i=%i) -> (y=%y)
signature take = #1 () -> (z=%z)
subgraph put (%i: int32[4]) {{
  %h: resource[] = VAR_HANDLE() {{container: '', shared_name: 's'}}
  ASSIGN_VARIABLE(%h, %i)
  %y: int32[4] = ABS(%i)
  return %y
}}
subgraph take () {{
  %g: resource[] = VAR_HANDLE() {{container: '', shared_name: 's'}}
  %r: int32[4] = READ_VARIABLE(%g)
  %z: float32[4,2] = GATHER({TABLE}, %r) {{axis: 0}}
  return %z
}}
"""
    assert describe(parse(text))["put"].inputs[0].accepts == 60


PAIRS = [
    ("int32[4]", "%y: T = MINIMUM(%i, int32(NUMBER))", (1000, 1)),
    ("int32[]", "%y: T = MINIMUM(%i, int32(NUMBER))", (1000, 1)),
    ("int32[]", "%y: T = MAXIMUM(%i, int32(NUMBER))", (-1000, -3)),
    ("int32[]", "%y: T = FLOOR_MOD(%i, int32(NUMBER))", (1000, 100)),
    ("int64[]", "%y: T = MINIMUM(%i, int64(NUMBER))", (1 << 40, 1 << 20)),
    (
        "int32[]",
        "%b: bool[] = EQUAL(%i, int32(NUMBER))\n %y: T = SELECT_V2(%b, int32(5), %i)",
        (0, 2_000_000),
    ),
    (
        "int32[]",
        "%b: bool[] = EQUAL(%i, int32(NUMBER))\n %y: T = SELECT_V2(%b, int32(5), %i)",
        (0, 1),
    ),
    ("int32[]", "%y: bool[] = LESS(%i, int32(NUMBER))", (500, 5)),
    ("int64[3]", "%y: bool[3] = EQUAL(%i, int64(NUMBER))", (70_000, -3)),
    (
        "int32[]",
        "%z: T = RESHAPE(%i, int32[0]{})\n %f: float32[] = CAST(%z)\n %y: bool[] = LESS(float32(NUMBER), %f)",
        (500.5, 501.5),
    ),
    ("int32[1]", "%y: T = RIGHT_SHIFT(%i, int32[1]{NUMBER})", (3, 4)),
]


@pytest.mark.parametrize(("kind", "operators", "numbers"), PAIRS)
def test_integers_without_a_role_are_of_every_size(
    kind: str, operators: str, numbers: tuple[int, int]
) -> None:
    text = f"subgraph main (%i: {kind}) {{\n {operators.replace('T', kind, 1)}\n return %y\n}}"
    one, other = (models.written(text.replace("NUMBER", str(number))) for number in numbers)
    report = compare(one, other)
    assert not report
    assert compare(one, one).bitwise
    assert (
        f"main/i: unknown role, drawn as any {kind.partition('[')[0]}" in report.to_dict()["notes"]
    )


def test_golden_runs_the_numbers_that_the_recorded_model_tells_apart(tmp_path: Path) -> None:
    """Whatever the checked one compares with."""
    text = """subgraph main (%i: int32[]) {
      %b: bool[] = GREATER(%i, int32(500))
      %c: bool[] = GREATER(%i, int32(OTHER))
      %y: bool[] = LOGICAL_OR(%b, %c)
      return %y
    }"""
    one, same, other = (models.written(text.replace("OTHER", str(at))) for at in (500, 600, 499))
    path = golden.record(one, tmp_path / "g.npz")
    assert golden.check(one, path).bitwise
    assert golden.check(same, path).bitwise
    assert not golden.check(other, path).equal


def test_an_integer_that_steers_where_nobody_knows_stays_0_or_1_and_is_named() -> None:
    text = "subgraph main (%i: int32[2]) { %y: float32[?,?] = FILL(%i, float32(1.0)) return %y }"
    one = models.written(text)
    report = compare(one, one)
    assert report.bitwise
    assert any(
        "main/i: unknown role, drawn as 0 or 1, because it may steer" in note
        for note in report.notes()
    )


CHOICE = "%n: float32[8] = OTHER(%x)\n %o: float32[8] = SELECT_V2(%i, %x, %n)"


def chosen(kind: str, operators: str) -> bytes:
    return models.written(
        f"subgraph main (%i: {kind}, %x: float32[8]) {{\n {operators}\n return %o\n}}"
    )


def test_a_flag_is_both_true_and_false() -> None:
    for operators in (CHOICE, CHOICE.replace("%x, %n)", "%n, %x)")):
        one, other = (chosen("bool[]", operators.replace("OTHER", name)) for name in ("NEG", "EXP"))
        assert not compare(one, other)
        assert compare(one, one).bitwise


@pytest.mark.parametrize("row", range(4))
def test_every_row_of_a_small_table_is_read(row: int) -> None:
    text = "%s: float32[] = GATHER(float32[4]{ROWS}, %i) {axis: 0}\n %o: float32[8] = MUL(%x, %s)"
    rows = [5 if place == row else 1 for place in range(4)]
    one, other = (
        chosen("int32[]", text.replace("ROWS", ", ".join(map(str, each))))
        for each in ([1] * 4, rows)
    )
    assert not compare(one, other)
    assert not compare(one, one).notes()


NAMED = {
    "position": "%i: T = MINIMUM(%input_pos, int32(NUMBER))",
    "mask": "%i: T = MINIMUM(%mask, int32(NUMBER))",
    "token": "%i: T = MINIMUM(%tokens, int32(NUMBER))",
}


@pytest.mark.parametrize(("role", "operators"), NAMED.items())
def test_a_name_does_not_narrow_what_the_readers_accept(role: str, operators: str) -> None:
    name = operators.partition("(%")[2].partition(",")[0]
    text = f"subgraph main (%{name}: int32[8]) {{ {operators} return %i }}".replace(
        "T", "int32[8]", 1
    )
    one, other = (models.written(text.replace("NUMBER", number)) for number in ("1000", "300"))
    report = compare(one, other)
    assert not report
    said = f"main/{name}: {role} by its name, in further runs drawn as any int32"
    assert said in report.notes()
    assert compare(one, one).bitwise


@pytest.mark.parametrize("name", ["i", "input_pos", "tokens"])
def test_a_start_that_is_clamped_and_computed_with_is_in_its_range_and_beyond(name: str) -> None:
    text = f"""subgraph main (%{name}: int32[1], %x: float32[2]) {{
      %c: float32[9] = DYNAMIC_UPDATE_SLICE(float32[9]{{splat 0.0}}, %x, %{name})
      %o: int32[1] = MINIMUM(%{name}, int32{{NUMBER}})
      return %o, %c
    }}"""
    one, other = (models.written(text.replace("NUMBER", number)) for number in ("100", "20"))
    (info, _) = describe(parse(text.replace("NUMBER", "100")))["main"].inputs
    assert (info.entries, info.accepts) == (8, 0)
    assert not compare(one, other)
    starts = [array_of(plan(SignatureInfo("s", (info,), ()), run=run)[0]) for run in range(2)]
    assert all(0 <= start[0] < 8 for start in starts)


def test_a_token_may_be_all_that_one_hot_takes() -> None:
    weights = np.where(np.arange(300) < 128, 1, 5)
    options = "{keep_num_dims: true}"
    texts = [
        f"""subgraph main (%tokens: int32[1,8]) {{
          %h: float32[1,8,300] = ONE_HOT(%tokens, int32(300), float32(1.0), float32(0.0)) {{axis: -1}}
          %o: float32[1,8,1] = FULLY_CONNECTED(%h, {literal(np.float32(each[None]))}, none) {options}
          return %o
        }}"""
        for each in (weights, np.ones(300))
    ]
    assert not compare(*map(models.written, texts))


def test_further_runs_count_only_if_ordinary_ones_are_bit_identical() -> None:
    text = """subgraph main (%input_pos: int32[4]) {
      %f: float32[4] = CAST(%input_pos)
      %o: float32[4] = MUL(%f, float32(1.5))
      return %o
    }"""
    one, near, far = (
        models.written(text.replace("1.5", factor)) for factor in ("1.5", "1.5001", "2")
    )
    (output,) = compare(one, near, atol=0.01).signatures[0].outputs
    assert (output.equal, output.elements) == (True, 4)
    assert not compare(one, far, atol=0.01)
    (output,) = compare(one, one).signatures[0].outputs
    assert output.elements == 4 * (1 + VARIANTS)


@pytest.mark.parametrize(
    ("dtype", "cut", "end", "near"),
    [("int8", "MINIMUM", 127, 126), ("int16", "MAXIMUM", -32768, -32767)],
)
def test_further_runs_have_the_ends_of_a_quantized_range(
    dtype: str, cut: str, end: int, near: int
) -> None:
    text = f"""subgraph main (%x: {dtype}[4,1024] q(0.1, 0)) {{
      %y: {dtype}[4,1024] q(0.1, 0) = {cut}(%x, {dtype}[]{{CODE}} q(0.1, 0))
      return %y
    }}"""
    one, other = (models.written(text.replace("CODE", str(code))) for code in (end, near))
    assert not compare(one, other)


def test_the_report_says_how_few_rows_of_a_large_table_each_run_reads() -> None:
    one = models.written(
        f"subgraph main (%i: int32[3]) {{ %y: float32[3,2] = EMBEDDING_LOOKUP(%i, {TABLE}) return %y }}"
    )
    said = "main/i: each run has at most 3 of the 60 integers that it accepts"
    assert compare(one, one).notes() == [said]


def drawn(dtype: str, run: int, other: str = "") -> list[np.ndarray]:
    infos = [models.tensor("x", 4000, dtype=name) for name in (dtype, other or dtype)]
    signature = SignatureInfo("s", (replace(infos[0], accepts=0),), ())
    (planned,) = plan(signature, run=run)
    return [array_of(each) for each in twins(planned, infos[1])]


@pytest.mark.parametrize("dtype", ["int32", "int64", "uint32", "uint64"])
def test_every_run_draws_other_sizes(dtype: str) -> None:
    sizes = [np.abs(drawn(dtype, run)[0].astype(np.float64)) for run in range(VARIANTS)]
    assert set(sizes[0]) == {0, 1}
    assert np.array_equal(sizes[0], 1 - sizes[1])
    assert min(sizes[2].max(), sizes[3].max()) > 2.0 ** (np.iinfo(dtype).bits - 3)
    for run in (4, 5):
        assert 2**13 < sizes[run].max() <= 2**14
        assert np.median(sizes[run]) < 2**10


def test_both_models_get_the_same_integers_in_their_own_types() -> None:
    for run in range(VARIANTS):
        for other in ("int64", "uint32", "int16", "uint8"):
            one, two = drawn("int32", run, other)
            assert two.dtype == np.dtype(other)
            assert np.array_equal(one.astype(np.int64), two.astype(np.int64))
