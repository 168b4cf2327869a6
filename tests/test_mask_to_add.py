"""A softmax masked by SELECT gets one additive mask: where that is exact, where it is refused, what notes say."""

from typing import Any

import numpy as np
import pytest
from cli_runs import Patch
from pass_runs import (
    SELECT_PAGE,
    convert_text,
    names,
    only,
    reread,
    rewrites_of,
    run,
    statuses,
)
from syrupy.assertion import SnapshotAssertion

from edge_opt.ir import Model, Quantization, to_bytes
from edge_opt.ir.parse import parse
from edge_opt.ir.text import graphs_text as to_text
from edge_opt.passes import Site, magnitude, mask_to_add
from edge_opt.passes.mask_to_add import ABSORBING
from edge_opt.runtime.runner import Worker
from edge_opt.schema.table import new_table
from edge_opt.targets import Target
from edge_opt.verification.examine import Verifier

T, N, S = 6, 2, 10
LOGITS = f"[1,{N},{T},{S}]"
PROBABILITIES = {
    "float32": f"float32{LOGITS}",
    "int16": f"int16{LOGITS} q(3.0517578e-05, 0)",
    "int8": f"int8{LOGITS} q(0.00390625, -128)",
}
BOOL = f"%open: bool[1,1,{T},{S}]"
MASK = f"%mask: float32[1,{T},{S}]"
NEW_SHAPE = f"{{new_shape: [1, 1, {T}, {S}]}}"
RESHAPED = f"%mask4: float32[1,1,{T},{S}] = RESHAPE(%mask, int32{{1, 1, {T}, {S}}}) {NEW_SHAPE}"
OPEN = f"{BOOL} = NOT_EQUAL(%mask4, float32(0.0))"


def block(
    *mask: str,
    given: str = MASK,
    select: str = "SELECT_V2(%open, %x, float32(-1e+09))",
    kind: str = "float32",
    path: str = "",
    last: str = "%masked",
    out: str = "%p",
) -> str:
    """Logits `%x`, the operators that make `%open`, the SELECT, what lies behind it, the SOFTMAX."""
    dtype, _, quantization = kind.partition(" ")
    typed = f"{dtype}{LOGITS} {quantization}".rstrip()
    keys = f"{dtype}[{S},{S}] {quantization}".rstrip()
    made = "".join(f"  {line}\n" for line in mask)
    return f"""\
subgraph main ({given}, %q: {typed}, %k: {keys}) {{
  %x: {typed} = BATCH_MATMUL(%q, %k)
{made}  %masked: {typed} = {select}
{path}  %p: {PROBABILITIES[dtype]} = SOFTMAX({last}) {{beta: 1.0}}
  return {out}
}}
"""


PLAIN = block(RESHAPED, OPEN)
CAUSAL = f"bool[1,1,{T},{S}]{{{','.join(str(key <= row + S - T).lower() for row in range(T) for key in range(S))}}}"


def of_constant(constant: str) -> str:
    return PLAIN.replace("-1e+09", constant)


def converted(
    text: str, verifier: Any = None, target: Target | None = None, status: str = "converted"
) -> tuple[Model, Site]:
    """The model, and the report of its only site; what does not end as converted leaves it as it was."""
    model, report = only(text, "mask_to_add", verifier=verifier, target=target)
    assert report.status == status, report.reason
    assert status == "converted" or to_text(model) == to_text(parse(text))
    return model, report


def skipped(text: str, why: str, named: str, **options: Any) -> None:
    """The SELECT stays, for this kind of reason, which names a tensor or a number."""
    _, report = converted(text, status="skipped", **options)
    assert report.why == why
    assert named in report.reason


def verified(text: str, verifier: Verifier) -> Model:
    """The converted model, with the same bits."""
    model, report = converted(text, verifier)
    assert (str(report.proof.check), report.proof.bitwise) == ("bitwise", True)
    return model


def added(model: Model) -> float:
    """What the mask is where it hides."""
    return float(
        next(op for op in model.subgraphs[0].operators if op.name == "MUL").input(1).array()
    )


def test_the_reference_select_becomes_an_add(
    verifier: Verifier, snapshot: SnapshotAssertion
) -> None:
    model = verified(PLAIN, verifier)
    assert to_text(model) == snapshot
    assert to_text(reread(model)) == to_text(model)


def test_on_the_pages_graph_one_mask_feeds_every_head_of_every_block_at_rank_3(
    verifier: Verifier,
) -> None:
    model, reports = convert_text(SELECT_PAGE, "mask_to_add", "mha_to_sha", verifier=verifier)
    assert statuses(reports) == ["converted"] * 6
    operators = list(model.subgraphs[0].operators)
    adds = [op for op in operators if op.name == "ADD"]
    assert len(adds) == 12
    (mask,) = {op.input(1) for op in adds}
    made = [("EQUAL", (1, 16, 64)), ("CAST", (1, 16, 64)), ("MUL", (1, 16, 64))]
    assert [(op.name, op.output.shape) for op in operators[:3]] == made
    assert mask.producer is operators[2]
    assert {len(op.input(0).shape) for op in operators if op.name == "SOFTMAX"} == {3}
    assert (names(model).count("UNPACK"), names(model).count("PACK")) == (9, 3)
    assert not {"RESHAPE", "SELECT_V2", "NOT_EQUAL"} & set(names(model))
    text = to_text(model)
    assert run(model, "mask_to_add", "quantized_mask") == []
    assert to_text(model) == text


CONDITIONS: dict[str, tuple[str, list[str]]] = {
    "not equal": (PLAIN, ["EQUAL", "CAST", "MUL", "RESHAPE"]),
    "constant first": (
        PLAIN.replace("%mask4, float32(0.0)", "float32(0.0), %mask4"), ["EQUAL", "CAST", "MUL", "RESHAPE"]
    ),
    "constant of many axes": (
        PLAIN.replace("float32(0.0)", "float32[1,1,1,1]{0.0}"), ["EQUAL", "CAST", "MUL", "RESHAPE"]
    ),
    "equal to one": (PLAIN.replace("NOT_EQUAL(%mask4, float32(0.0))", "EQUAL(%mask4, float32(1.0))"),
                     ["NOT_EQUAL", "CAST", "MUL", "RESHAPE"]),
    "greater": (PLAIN.replace("NOT_EQUAL", "GREATER"), ["RESHAPE", "GREATER", "LOGICAL_NOT", "CAST", "MUL"]),
    "a boolean": (block(given=BOOL), ["LOGICAL_NOT", "CAST", "MUL"]),
    "a constant": (
        block(select=f"SELECT_V2({CAUSAL}, %x, float32(-1e+09))"), ["LOGICAL_NOT", "CAST", "MUL"]
    ),
    "a negated boolean": (block(f"{BOOL} = LOGICAL_NOT(%shut)", given=BOOL.replace("open", "shut")), ["CAST", "MUL"]),
    "of a whole shape": (block(given=f"%open: bool{LOGITS}"), ["LOGICAL_NOT", "CAST", "MUL"]),
    "two masks compared": (
        block(f"{BOOL} = EQUAL(%ids, %others)", given=f"%ids: int32[1,1,{T},1], %others: int32[1,1,1,{S}]"),
        ["EQUAL", "LOGICAL_NOT", "CAST", "MUL"],
    ),
    "SELECT of version 1": (
        block(given=f"%open: bool{LOGITS}", select=f"SELECT(%open, %x, float32{LOGITS}{{splat -1e+09}})"),
        ["LOGICAL_NOT", "CAST", "MUL"],
    ),
    "read by others too": (
        block(RESHAPED, OPEN, out="%p, %open"), ["RESHAPE", "NOT_EQUAL", "EQUAL", "CAST", "MUL", "RESHAPE"]
    ),
}  # fmt: skip


@pytest.mark.parametrize(("text", "made"), CONDITIONS.values(), ids=CONDITIONS)
def test_conditions_of_either_polarity(text: str, made: list[str], verifier: Verifier) -> None:
    assert names(verified(text, verifier)) == ["BATCH_MATMUL", *made, "ADD", "SOFTMAX"]
    # The other polarity: closed where the condition holds.
    other = text.replace(
        "SELECT_V2(%open, %x, float32(-1e+09))", "SELECT_V2(%open, float32(-1e+09), %x)"
    )
    assert not {"SELECT", "SELECT_V2"} & set(names(verified(other, verifier)))


@pytest.mark.parametrize("batch", [2, 3])
@pytest.mark.parametrize(("rows", "form"), [(1, "[{b},{s}]"), (4, "[{b},4,{s}]")])
def test_rows_of_a_padding_mask_are_the_batch(
    batch: int, rows: int, form: str, verifier: Verifier
) -> None:
    """`[B, S]` with B a divisor of T, or `[B, T, S]`: which rows of the result a closed row of the mask closes."""
    wide, logits = f"[{batch},1,{rows},{S}]", f"[{batch},{N},4,{S}]"
    text = block(
        f"%mask4: float32{wide} = RESHAPE(%mask, int32{{{batch}, 1, {rows}, {S}}})",
        f"%open: bool{wide} = NOT_EQUAL(%mask4, float32(0.0))",
        given=f"%mask: float32{form.format(b=batch, s=S)}",
    )
    # Of every mask a row was closed, and its rows were measured apart.
    assert "SELECT_V2" not in names(verified(text.replace(LOGITS, logits), verifier))


@pytest.mark.parametrize(
    ("shape", "operator"),
    [
        (f"[1,1,{N * T},{S}]", f"RESHAPE(%masked, int32{{1, 1, {N * T}, {S}}})"),
        (f"[{N},{T},{S}]", "SQUEEZE(%masked)"),
    ],
)
def test_rearrangements_before_the_softmax_are_kept(
    shape: str, operator: str, verifier: Verifier
) -> None:
    text = block(RESHAPED, OPEN, path=f"  %r: float32{shape} = {operator}\n", last="%r")
    model = verified(text.replace(f"%p: float32{LOGITS}", f"%p: float32{shape}"), verifier)
    assert names(model)[-3:] == ["ADD", operator.partition("(")[0], "SOFTMAX"]


@pytest.mark.parametrize(
    ("code", "closed", "opened"), [("5", 1.0, 0.0), ("3", 0.0, 1.0), ("-1", -2.0, 0.0)]
)
def test_a_quantized_condition_stands_for_a_real_number(
    code: str, closed: float, opened: float
) -> None:
    open_ = f"{BOOL} = NOT_EQUAL(%m, int8({code}) q(0.5, 3))"
    model = parse(block(open_, given=f"%m: int8[1,1,{T},{S}] q(0.5, 3)"))
    (rewrite,) = rewrites_of("mask_to_add", model)
    assert (rewrite.mask.masked, rewrite.mask.opened) == (closed, opened)


@pytest.mark.parametrize("constant", ["-1e+09", "-3.4028235e+38", "-1128.0"])
def test_every_logit_vanishes_in_what_is_added(constant: str, verifier: Verifier) -> None:
    """And logits that another mask has closed stay finite."""
    full = f"float32{LOGITS}{{splat {constant}}}"
    model = verified(block(RESHAPED, OPEN, select=f"SELECT_V2(%open, %x, {full})"), verifier)
    assert added(model) == ABSORBING
    logits = np.array([-3.7e22, -1.0, 0.0, 3.7e22], np.float32)
    assert (logits + np.float32(ABSORBING) == np.float32(ABSORBING)).all()
    assert np.isfinite(
        np.array([np.finfo("f4").min, ABSORBING], "f4") + np.float32(ABSORBING)
    ).all()


FLOATS = f"float32{LOGITS}"
ROWS = f"float32[{T},{S}]"
WIDE = f"float32[{T + 1},{S}]"
FLAT = f"float32[{N * T},{S}]"
MASKS = f"float32[1,1,{T},{S}]"
PADDING = f"%padding: {MASKS}"
FLAGS = f"%flags: bool[1,1,{T},{S}]"
ADDED = f"%other: {FLOATS} = ADD(%x, %low)"
FLATTENED = f"%rows: {FLAT} = RESHAPE(%q, int32{{{N * T}, {S}}})"
APART = f"%other: {FLOATS} = RESHAPE(%plus, int32{{1, {N}, {T}, {S}}})"
NUMBERS = f"%number: {MASKS} = CAST(%flags)"

READ = {
    "a constant added": [f"%other: {FLOATS} = ADD(%x, float32(@))"],
    "a constant subtracted": [f"%other: {FLOATS} = SUB(%x, float32(@))"],
    "a constant that is cut": [
        f"%low: {ROWS} = SLICE({WIDE}{{splat @}}, int32{{0, 0}}, int32{{{T}, {S}}})", ADDED
    ],
    "a constant that is looked up": [f"%low: {ROWS} = GATHER({WIDE}{{splat @}}, int32[{T}]{{splat 0}})", ADDED],
    "a constant in float16": [f"%low: {ROWS} = DEQUANTIZE(float16[{T},{S}]{{splat @}})", ADDED],
    "a constant in codes": [f"%low: {ROWS} = DEQUANTIZE(int8[{T},{S}]{{splat 100}} q(@, 99))", ADDED],
    "integers times a constant": [
        f"%one: {ROWS} = CAST(int32[{T},{S}]{{splat 1}})", f"%low: {ROWS} = MUL(%one, float32(@))", ADDED
    ],
    "scaled": [f"%other: {FLOATS} = MUL(%x, float32(@))"],
    "scaled twice": [
        f"%half: {FLOATS} = MUL(%x, float32(@))", f"%other: {FLOATS} = DIV(%half, float32(0.5))"
    ],
    "scaled by head": [f"%other: {FLOATS} = MUL(%x, float32[{N},1,1]{{1.0, @}})"],
    "soft-capped": [f"%curve: {FLOATS} = TANH(%x)", f"%other: {FLOATS} = MUL(%curve, float32(@))"],
    "an operand scaled": [
        f"%scaled: {FLOATS} = MUL(%q, float32(@))", f"%other: {FLOATS} = BATCH_MATMUL(%scaled, %k)"
    ],
    "one of two parts": [
        f"%more: {FLOATS} = ADD(%x, float32(@))",
        f"%both: float32[1,{2 * N},{T},{S}] = CONCATENATION(%x, %more) {{axis: 1}}",
        f"%other: {FLOATS}, %second: {FLOATS} = SPLIT(int32(1), %both) {{num_splits: 2}}",
    ],
    "a bias": [
        FLATTENED, f"%plus: {FLAT} = FULLY_CONNECTED(%rows, %k, float32[{S}]{{splat @}})", APART
    ],
}  # fmt: skip
"""What makes `%other` of the logits `%x`, and a number."""

UNKNOWN = {
    "a SELECT": (FLAGS, [f"%other: {FLOATS} = SELECT_V2(%flags, %x, float32(-inf))"]),
    # As Hugging Face exports it: a causal mask by SELECT, and padding that the caller gives.
    "an input added": (PADDING, [f"%other: {FLOATS} = ADD(%x, %padding)"]),
    "an input subtracted": (PADDING, [f"%other: {FLOATS} = SUB(%x, %padding)"]),
    "an input as a factor": (PADDING, [f"%other: {FLOATS} = MUL(%x, %padding)"]),
    "an input that is cut": (
        f"%padding: {WIDE}", [f"%low: {ROWS} = SLICE(%padding, int32{{0, 0}}, int32{{{T}, {S}}})", ADDED]
    ),
    "an input that is looked up": (
        f"%padding: {WIDE}", [f"%low: {ROWS} = GATHER(%padding, int32[{T}]{{splat 0}})", ADDED]
    ),
    "an input in codes": (
        f"%padding: int8[1,1,{T},{S}] q(1000.0, 0)", [f"%low: {MASKS} = DEQUANTIZE(%padding)", ADDED]
    ),
    "an input's negative": (PADDING, [f"%low: {MASKS} = NEG(%padding)", ADDED]),
    "flags times a constant": (FLAGS, [NUMBERS, f"%low: {MASKS} = MUL(%number, float32(-1e9))", ADDED]),
    "the logarithm of flags": (FLAGS, [NUMBERS, f"%low: {MASKS} = LOG(%number)", ADDED]),
    "a minimum": (PADDING, [f"%other: {FLOATS} = MINIMUM(%x, %padding)"]),
    "an update": (PADDING, [f"%other: {FLOATS} = DYNAMIC_UPDATE_SLICE(%x, %padding, int32{{0, 0, 0, 0}})"]),
    "a low column": (
        PADDING,
        [f"%inner: float32[1,{N},{T},{S - 1}] = SLICE(%x, int32{{0, 0, 0, 1}}, int32{{1, {N}, {T}, {S - 1}}})",
         f"%other: {FLOATS} = PADV2(%inner, int32[4,2]{{0, 0, 0, 0, 0, 0, 1, 0}}, float32(-1e9))"],
    ),
    "an activation function": (PADDING, [f"%other: {FLOATS} = ADD(%x, float32(1)) {{fused_activation_function: 1}}"]),
    "not a number": (PADDING, [f"%other: {FLOATS} = ADD(%x, float32(nan))"]),
    "a tiny divisor": (PADDING, [f"%other: {FLOATS} = DIV(%x, float32(1e-9))"]),
    "a divisor of 0": (PADDING, [f"%other: {FLOATS} = DIV(%x, float32(0.0))"]),
    "a table that a product looks up": (
        PADDING, [f"%low: {MASKS} = BATCH_MATMUL(%padding, float32[{S},{S}]{{splat -1e9}})", ADDED]
    ),
    "what a product carries along": (
        PADDING, [f"%low: {MASKS} = BATCH_MATMUL(%padding, float32[{S},{S}]{{splat 1.0}})", ADDED]
    ),
    "a number in an operand": (
        FLAGS,
        [f"%low: {FLOATS} = SELECT_V2(%flags, %q, float32(-1e9))", f"%other: {FLOATS} = BATCH_MATMUL(%low, %k)"],
    ),
    "a mask in the keys": (
        f"%padding: float32[1,{N},1,{S}]",
        [f"%wide: float32[1,{N},{T},{S + 1}] = CONCATENATION(%q, float32[1,{N},{T},1]{{splat 1.0}}) {{axis: 3}}",
         f"%both: float32[1,{N},{S + 1},{S}] = CONCATENATION(%k, %padding) {{axis: 2}}",
         f"%other: {FLOATS} = BATCH_MATMUL(%wide, %both)"],
    ),
    "a mask in the keys, and queries padded with ones": (
        f"%padding: float32[1,{N},1,{S}]",
        [f"%wide: float32[1,{N},{T},{S + 1}] = PADV2(%q, int32[4,2]{{0, 0, 0, 0, 0, 0, 0, 1}}, float32(1.0))",
         f"%both: float32[1,{N},{S + 1},{S}] = CONCATENATION(%k, %padding) {{axis: 2}}",
         f"%other: {FLOATS} = BATCH_MATMUL(%wide, %both)"],
    ),
    "a mask in the keys, and queries written beside ones": (
        f"%padding: float32[1,{N},1,{S}]",
        [f"%ones: float32[1,{N},{T},{S + 1}] = ABS(float32[1,{N},{T},{S + 1}]{{splat 1.0}})",
         f"%wide: float32[1,{N},{T},{S + 1}] = DYNAMIC_UPDATE_SLICE(%ones, %q, int32{{0, 0, 0, 0}})",
         f"%both: float32[1,{N},{S + 1},{S}] = CONCATENATION(%k, %padding) {{axis: 2}}",
         f"%other: {FLOATS} = BATCH_MATMUL(%wide, %both)"],
    ),
    "a mask in the keys, and queries or ones chosen": (
        f"%padding: float32[1,{N},1,{S}]",
        [f"%zeros: float32[1,{N},{T},{S + 1}] = PAD(%q, int32[4,2]{{0, 0, 0, 0, 0, 0, 0, 1}})",
         f"%wide: float32[1,{N},{T},{S + 1}] = SELECT_V2(bool[{S + 1}]{{{'true, ' * S}false}}, %zeros, float32(1.0))",
         f"%both: float32[1,{N},{S + 1},{S}] = CONCATENATION(%k, %padding) {{axis: 2}}",
         f"%other: {FLOATS} = BATCH_MATMUL(%wide, %both)"],
    ),
    "a row that a column repeats": (
        f"%padding: float32[1,1,1,{S}], %ones: float32[1,1,{T},1]",
        [f"%low: {MASKS} = BATCH_MATMUL(%ones, %padding)", ADDED],
    ),
    "a bias that comes in": (
        f"%padding: float32[{S}]", [FLATTENED, f"%plus: {FLAT} = FULLY_CONNECTED(%rows, %k, %padding)", APART]
    ),
}  # fmt: skip
"""What comes in, and what makes `%other` of the logits `%x` and of that."""


def of_other(lines: list[str], given: str = "") -> str:
    """The SELECT masks `%other`."""
    return block(*lines, given=BOOL + given, select="SELECT_V2(%open, %other, float32(-1e+09))")


@pytest.mark.parametrize("lines", READ.values(), ids=READ)
def test_constants_are_read_wherever_they_lie(lines: list[str]) -> None:
    text = of_other(lines)
    converted(text.replace("@", "500.0"))
    skipped(text.replace("@", "60000.0"), "mask", "another mask")


@pytest.mark.parametrize(("given", "lines"), UNKNOWN.values(), ids=UNKNOWN)
def test_what_may_be_another_mask_is_left(given: str, lines: list[str]) -> None:
    skipped(of_other(lines, f", {given}"), "mask", "another mask")


def test_a_number_that_is_stored_outside_the_model_may_be_a_mask() -> None:
    given, lines = UNKNOWN["a mask in the keys"]
    model = parse(of_other([lines[0].replace("1.0", "0.0"), *lines[1:]], f", {given}"))
    assert run(model, "mask_to_add")[0].status == "converted"
    model = parse(of_other([lines[0].replace("1.0", "0.0"), *lines[1:]], f", {given}"))
    (join, *_) = [one for one in model.subgraphs[0].operators if one.name == "CONCATENATION"]
    ones = join.input(1)
    ones.buffer = None
    ones.table = new_table("Tensor", has_rank=True, name=ones.name, external_buffer=7)
    assert run(model, "mask_to_add")[0].why == "mask"


def results(values: Any, *models: Model) -> list[Any]:
    """The probabilities of each model."""
    with Worker() as worker:
        return [worker.run(to_bytes(model), None, values)["p"] for model in models]


@pytest.mark.parametrize(("constant", "bound"), [("-2000.0", "-1896"), ("-3.4028235e+38", "")])
def test_a_constant_above_some_logits_has_a_condition(
    constant: str, bound: str, verifier: Verifier
) -> None:
    text = of_constant(constant)
    model, report = converted(text, verifier)
    assert (
        f"equal where the largest unmasked logit of a row is above {bound}" in report.note
    ) is bool(bound)
    mask = np.broadcast_to(np.arange(S) == 0, (1, T, S)).astype("f4")
    values = {
        "mask": mask,
        "q": np.full((1, N, T, S), -2100, np.float32),
        "k": np.eye(S, dtype="f4"),
    }
    before, after = results(values, parse(text), model)
    assert np.array_equal(before, after) is not bool(bound)


def test_an_infinite_constant_becomes_finite_and_rows_without_a_number_uniform(
    verifier: Verifier,
) -> None:
    """`-inf * 0` is NaN, and so was a row that is masked everywhere."""
    model, report = converted(of_constant("-inf"), verifier)
    assert (added(model), report.proof and report.proof.max_abs) == (ABSORBING, 0.0)
    assert "rows that are masked everywhere change from NaN to numbers" in report.note


def test_nan_in_a_masked_logit_spreads_and_the_note_says_so() -> None:
    """As from a cache slot that was never written. In codes there is no NaN."""
    model, report = converted(PLAIN)
    told = (
        "NaN or infinity in a masked logit, as from an unwritten cache slot, now spreads to its row"
    )
    assert report.note.endswith(told)
    assert "NaN" not in converted(quantized())[1].note
    mask = np.broadcast_to(np.arange(S) > 0, (1, T, S)).astype("f4")
    # The first key is NaN, and masked for every query.
    values = {"mask": mask, "q": np.ones((1, N, T, S), np.float32), "k": np.eye(S, dtype="f4")}
    values["k"][:, 0] = np.nan
    before, after = results(values, parse(PLAIN), model)
    assert np.isfinite(before).all()
    assert np.isnan(after).all()


def test_every_tensor_is_visited_once(monkeypatch: Patch) -> None:
    """However often it is read, and however many masks lie behind it."""
    visited: list[object] = []
    rule = magnitude._magnitude

    def counted(node: Any, read: Any) -> Any:
        visited.append(node)
        return rule(node, read)

    monkeypatch.setattr(magnitude, "_magnitude", counted)
    lines, count = [], 40
    for i in range(count):
        lines += [
            f"%x{i + 1}: {FLOATS} = ADD(%{f'x{i}' if i else 'x'}, %{f'x{i}' if i else 'x'})",
            f"%m{i}: {FLOATS} = SELECT_V2(%open, %x{i + 1}, float32(-1e9))",
            f"%p{i}: {FLOATS} = SOFTMAX(%m{i}) {{beta: 1.0}}",
        ]
    text = block(*lines, given=BOOL, out=", ".join(["%p", *(f"%p{i}" for i in range(count))]))
    _, reports = convert_text(text, "mask_to_add")
    # Sums of 2 to 1,024 products, larger ones, and the product itself.
    assert statuses(reports) == ["converted"] * 10 + ["skipped"] * (count - 10) + ["converted"]
    assert len(visited) == len(set(visited)) <= count + 4


@pytest.mark.parametrize(
    ("constant", "found"), [("-inf", -65472), ("-1e+09", -65472), ("-10000.0", -10000)]
)
def test_a_target_gets_what_float16_holds(constant: str, found: float, verifier: Verifier) -> None:
    """In rows that are masked everywhere SELECT gives the uniform distribution, ADD another one."""
    model, report = converted(
        of_constant(constant), verifier, Target("npu", "", mask_constant=-65472.0)
    )
    assert (added(model), report.proof and str(report.proof.check)) == (found, "relative 1e-06")
    bound = "; equal where the largest unmasked logit of a row is above -9896"
    told = (
        bound
        if found == float(constant)
        else f"the mask constant {float(constant):g} becomes -65472; "
    )
    least = f"unless a masked logit is {-found - 104:g} or more above the largest unmasked one"
    for words in (told, least, "rows that are masked everywhere change"):
        assert words in report.note


def test_a_target_says_which_constants_it_takes() -> None:
    model, report = converted(PLAIN, target=Target("npu", "", mask_constant=-3e38))
    assert added(model) == ABSORBING
    told = "the mask constant -1e+09 becomes -1.26765e+30; for a compiler that computes in"
    assert report.note.startswith(told)
    skipped(PLAIN, "target", "found -100", target=Target("npu", "", mask_constant=-100.0))


REFUSED = {
    "-10": (of_constant("-10.0"), "mask", "at most -1128, found -10)"),
    "logits scaled by the SOFTMAX": (PLAIN.replace("beta: 1.0", "beta: 0.001"), "mask", "beta"),
    "positive": (of_constant("1e+09"), "mask", "found 1e+09"),
    "nan": (of_constant("nan"), "mask", "uniform constant"),
    "not uniform": (
        block(RESHAPED, OPEN, select=f"SELECT_V2(%open, %x, float32{{{', '.join(['-1e+09'] * (S - 1))}, -1e+10}})"),
        "mask", "uniform constant",
    ),
    "no constant": (
        block(given=f"{BOOL}, %low: float32[1]", select="SELECT_V2(%open, %x, %low)"), "mask", "'low'"
    ),
    "read elsewhere": (block(RESHAPED, OPEN, out="%p, %masked"), "shared-result", "'masked'"),
    "whole rows": (
        block(given="%open: bool[1]", select=f"SELECT(%open, %x, float32{LOGITS}{{splat -1e+09}})"), "mask", "'open'"
    ),
    "broadcast logits": (
        PLAIN.replace(f"%x: float32{LOGITS}", f"%x: float32[1,{N},1,{S}]").replace(
            f"%q: float32{LOGITS}", f"%q: float32[1,{N},1,{S}]"
        ),
        "mask", f"found [1, {N}, 1, {S}]",
    ),
    "no quantization": (
        block(given=BOOL, kind="int16", select="SELECT_V2(%open, %x, int16(-32768))"), "quantization", "'masked'"
    ),
    "a quantized constant near zero": (
        block(given=BOOL, kind="int16 q(0.05, 0)", select="SELECT_V2(%open, %x, int16(-10000) q(0.05, 0))"),
        "mask", "found -500",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("text", "why", "named"), REFUSED.values(), ids=REFUSED)
def test_what_an_add_cannot_do_is_refused_with_the_reason(text: str, why: str, named: str) -> None:
    skipped(text, why, named)


@pytest.mark.parametrize("rows", [1, T])
def test_logits_that_do_not_vanish_fail(rows: int, verifier: Verifier, monkeypatch: Patch) -> None:
    """With one query row too, where nothing but a closed row shows it."""
    text = PLAIN.replace(f",{T},", f",{rows},").replace(f", {T},", f", {rows},")
    verified(text, verifier)
    monkeypatch.setattr(mask_to_add, "ABSORBING", -1e4)
    _, report = converted(text, verifier, status="reverted")
    assert report.why == "different"
    assert "on masks that close every row" in report.reason


def quantized(dtype: str = "int16", scale: str = "0.05", code: int = -32768, zero: int = 0) -> str:
    parameters = f"q({scale}, {zero})"
    select = f"SELECT_V2(%open, %x, {dtype}({code}) {parameters})"
    return block(given=BOOL, kind=f"{dtype} {parameters}", select=select)


def test_a_quantized_mask_is_one_select_between_two_constants(snapshot: SnapshotAssertion) -> None:
    model, report = converted(quantized())
    assert report.note == ""
    assert to_text(model) == snapshot
    assert next(op for op in model.subgraphs[0].operators if op.name == "ADD").code.version == 3


@pytest.mark.parametrize(
    "text",
    [
        quantized(),
        quantized(scale="0.0625"),
        quantized(scale="0.3", code=-30000),
        quantized("int8", "16.0", -128, 0),
        quantized("int8", "8.0", -128, 100),
        quantized().replace("%x, int16(-32768) q(0.05, 0))", "int16(-32768) q(0.05, 0), %x)"),
    ],
    ids=["int16", "power of two", "not the lowest", "int8", "int8 with zero point", "other polarity"],
)  # fmt: skip
def test_quantized_masks_of_equal_scales_give_the_same_codes(text: str, verifier: Verifier) -> None:
    model, report = converted(text, verifier)
    assert (str(report.proof.check), report.proof.steps) == ("bitwise", 0)
    assert names(model) == ["BATCH_MATMUL", "SELECT_V2", "ADD", "SOFTMAX"]
    assert run(model, "mask_to_add", "quantized_mask") == []


CODES = f"int16{LOGITS} q(0.05, 0)"
OTHERS_IN_CODES = {
    "a constant added": ("", "ADD(%x, int16(-10000) q(0.05, 0))", True),
    "a low constant added": ("", "ADD(%x, int16(-30000) q(0.05, 0))", False),
    "an input added": (f", %padding: int16[1,1,{T},{S}] q(0.05, 0)", "ADD(%x, %padding)", False),
    "scaled": ("", "MUL(%x, int16(20000) q(0.00003, 0))", True),
    "moved to other numbers": ("", f"RESHAPE(%x, int32{{1, {N}, {T}, {S}}})", False),
}
"""What makes `%other`; whether its numbers are known."""


@pytest.mark.parametrize(
    ("given", "other", "is_known"), OTHERS_IN_CODES.values(), ids=OTHERS_IN_CODES
)
def test_quantized_logits_may_be_masked_already(given: str, other: str, is_known: bool) -> None:
    """Stored numbers that are copied under another scale stand for other numbers."""
    result = CODES.replace("0.05", "10.0") if other.startswith("RESHAPE") else CODES
    select = "SELECT_V2(%open, %other, int16(-32768) q(0.05, 0))"
    text = block(
        f"%other: {result} = {other}", given=BOOL + given, kind="int16 q(0.05, 0)", select=select
    )
    converted(text, status="converted" if is_known else "skipped")


def test_quantized_numbers_that_cannot_be_0_are_unknown() -> None:
    """Every logit is clipped to a low number."""
    text = quantized("int8", "16.0", -128, 0)
    skipped(text.replace("q(16.0, 0) =", "q(16.0, 128) ="), "mask", "another mask")


@pytest.mark.parametrize("rows", [1, T])
def test_a_quantized_mask_must_clip(rows: int, verifier: Verifier, monkeypatch: Patch) -> None:
    """Half of the logits' range hides them in every row with an open entry. SELECT copies codes of another scale."""
    other = quantized().replace(f"%x: int16{LOGITS} q(0.05", f"%x: int16{LOGITS} q(0.04")
    assert converted(other, verifier, status="reverted")[1].why == "different"
    parameters = Quantization.affine
    monkeypatch.setattr(Quantization, "affine", lambda scale, zero: parameters(scale / 4, zero))
    text = quantized().replace(f",{T},", f",{rows},")
    assert converted(text, verifier, status="reverted")[1].why == "different"
