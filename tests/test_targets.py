"""Targets are data: every fact has a source, user files are checked, and the lint finds what a compiler cannot take."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from attention_checks import attention_text, masked_text, of_one_head, only_block
from pass_runs import TESTDATA, sites_of, statuses, tiles

from edge_opt.attention.block import logits_bytes
from edge_opt.base.errors import UsageError
from edge_opt.conversion import convert
from edge_opt.ir import load, save
from edge_opt.ir.cleanup import external_weights, new_codes
from edge_opt.ir.parse import parse
from edge_opt.ir.text import graphs_text as to_text
from edge_opt.schema.data import Data
from edge_opt.schema.table import new_table
from edge_opt.targets import Target, lint, load_target, target_names
from edge_opt.targets.target import write_target

PLAIN = {"name", "summary", "sources", "versions"}


def generic(**facts: Any) -> Target:
    return replace(load_target("generic"), **facts)


def rules(text: str, **facts: Any) -> list[str]:
    return [finding.rule for finding in lint(parse(text), generic(**facts))]


@pytest.mark.parametrize("name", target_names())
def test_every_fact_of_a_bundled_target_has_a_source(name: str) -> None:
    target = load_target(name)
    assert target.name == name
    assert target.stated().keys() - PLAIN == target.sources.keys()


def test_attention_that_does_not_fit_on_the_chip_takes_another_form() -> None:
    """T = 6, S = 8 in half precision: the logits of a head are 96 bytes."""
    fits = generic(on_chip_bytes=96, long_context={"form": "unpack", "rows_per_tile": 4})
    block = only_block(parse(attention_text()).subgraphs[0])
    assert logits_bytes(block) == 96
    assert fits.for_attention(block) is fits
    chosen = replace(fits, on_chip_bytes=95).for_attention(block)
    assert (chosen.form, chosen.rows_per_tile) == ("unpack", 4)


def test_a_single_head_of_as_many_rows_as_a_tile_has_stays() -> None:
    for rows, why in ((6, "single-head"), (3, "")):
        (site,) = sites_of(of_one_head(attention_text()), target=tiles(rows))
        assert (site.why, site.status == "nothing to do") == (why, bool(why))


def test_an_unknown_target_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(UsageError, match="did you mean 'qualcomm-htp'"):
        load_target("qualcom-htp")
    with pytest.raises(UsageError, match=r"target 'sm875' does not exist, did you mean 'SM8750'\?"):
        load_target("sm875")
    with pytest.raises(
        UsageError, match=r"there are: ethos-u85, .*, a chip, such as SM8750, a .toml file$"
    ):
        load_target("pear")
    with pytest.raises(UsageError, match="a target is an empty path"):
        convert(b"", target="")


@pytest.mark.parametrize(("line", "complaint"), [
    ("rows_per_tille = 4", "'rows_per_tille' is unknown, did you mean 'rows_per_tile'"),
    ("rows_per_tile = 0", r"Expected `int` >= 1 - at `$.rows_per_tile`"), ("rows_per_tile = true", "got `bool`"),
    ("form = 'cut'", r"matching regex '^(as-found|split|unpack|split-above)$' - at `$.form`"),
    ("int64 = 'no'", "at `$.int64`"), ("refused_operators = 'ADD'", "Expected `array`, got `str`"),
    ("mask_constant = -inf", "at `$.mask_constant`"), ("sources = 3", "at `$.sources`"),
    ("long_context = {rows = 3}", "'rows' in 'long_context' is unknown"),
    ("long_context = {form = 'cut'}", "at `$.long_context.form`"),
    ("refused_operators = ['SOFTMAXX']", "'SOFTMAXX' in 'refused_operators' is not a TFLite operator, did you mean"),
    ("unsplit_types = ['INT9']", "'INT9' in 'unsplit_types' is not a TFLite type, did you mean"),
    ("accepted_operators = [7]", "at `$.accepted_operators[0]`"), ("= 3", "not valid TOML"),
])  # fmt: skip
def test_a_user_s_target_file_is_checked(tmp_path: Path, line: str, complaint: str) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(f"name = 'mine'\nsummary = 'Mine.'\n{line}\n")
    with pytest.raises(UsageError, match=re.escape(complaint)):
        load_target(str(file))


def test_a_target_written_is_the_target_read(tmp_path: Path) -> None:
    for name in target_names():
        target = replace(load_target(name), summary='a "quoted" \x7f word')
        write_target(target, file := tmp_path / f"{name}.toml")
        assert load_target(file) == target


def test_heads_side_by_side_take_a_form_that_mediatek_takes() -> None:
    """It takes UNPACK, and no PACK."""
    text = attention_text(
        tail="%t: float32[1,6,4,5] = TRANSPOSE(%o, int32{0, 2, 1, 3})", returned="%t"
    )
    (site,) = sites_of(text, target="mediatek")
    assert site.status == "converted", site.reason


def added(
    axis: int = 2, kind: str = "float32", between: str = "%joined", scores: str = "[1,1,16,8]"
) -> str:
    """A mask of 8 rows joined to itself, 16 x 8 x 2 bytes in half precision, and added to scores."""
    joined = {1: "[1,2,8,8]", 2: "[1,1,16,8]", 3: "[1,1,8,16]"}[axis]
    return f"""
    subgraph main (%mask: {kind}[1,1,8,8], %scores: {kind}{scores}) {{
      %joined: {kind}{joined} = CONCATENATION(%mask, %mask) {{axis: {axis}}}
      %twice: {kind}[1,16,8] = RESHAPE(%joined, int32{{1, 16, 8}})
      %heads: {kind}[1,2,8,8] = RESHAPE(%joined, int32{{1, 2, 8, 8}})
      %integer: int16[1,1,16,8] q(0.01, 0) = QUANTIZE(%joined)
      %out: {kind}{scores} = ADD(%scores, {between})
      return %out
    }}"""


@pytest.mark.parametrize(("text", "named"), [
    (added(), True), (added(between="%twice", scores="[1,16,8]"), True),
    (added(between="%heads", scores="[1,2,8,8]"), False), (added(between="%integer"), False),
    (added(scores="[1,2,16,8]"), False), (added(axis=1, scores="[1,2,8,8]"), False),
    (added(axis=3, scores="[1,1,8,16]"), False), (added().replace("ADD", "SUB"), False),
    (added().replace("ADD(%scores, %joined)", "ADD(%joined, %scores)"), True), (added(kind="int8"), False),
])  # fmt: skip
def test_only_joined_rows_that_an_add_takes_as_they_are_cross_the_limit(
    text: str, named: bool
) -> None:
    """What the emulator gets wrong: neither another axis, nor what is broadcast, nor a SUB."""
    assert rules(text, largest_joined_rows_bytes=16 * 8 * 2 - 1) == (
        ["joined-rows"] if named else []
    )
    assert rules(text, largest_joined_rows_bytes=16 * 8 * 2) == []


def test_a_mask_is_not_repeated_any_more_where_heads_are_split() -> None:
    target = replace(load_target("qualcomm-htp"), largest_joined_rows_bytes=1)
    whole = load(TESTDATA / "demo_gemma3.tflite")
    before = [found for found in lint(whole, target) if found.rule == "joined-rows"]
    places = {(found.severity, found.signature) for found in before}
    assert places == {("error", "prefill_8"), ("error", "decode")}
    assert all(
        "split the heads" in found.message and "QAIRT 2.47" in found.message for found in before
    )
    result = convert(whole, target=replace(target, split_signatures=("*",)), verify="none")
    assert [found for found in lint(result.model, target) if found.rule == "joined-rows"] == []


@pytest.mark.parametrize(
    ("number", "named"), [("-65504.0", 0), ("-65505.0", 1), ("-3.4e38", 2), ("-inf", 2)]
)
def test_mask_constants_that_overflow_in_half_precision_are_named(number: str, named: int) -> None:
    findings = lint(parse(masked_text(f"float32({number})")), generic())
    assert [finding.rule for finding in findings] == ["mask-constant"] * bool(named)
    assert ["no precision left" in finding.message for finding in findings] == [named == 2] * bool(
        named
    )


INTEGERS = "subgraph main (%x: int64[?,2]) {\n  %y: int64[?,2] = ABS(%x)\n  return %y\n}"
COMPOSITE = """
subgraph main (%x: float32[2]) {
  %y: float32[2] = STABLEHLO_COMPOSITE(%x) {name: 'odml.rms_norm', decomposition_subgraph_index: 1}
  return %y
}
subgraph body (%x: float32[2]) {
  %y: float32[2] = ABS(%x)
  return %y
}
"""


@pytest.mark.parametrize(("rule", "text", "firing", "silent"), [
    ("operator", attention_text(), {"refused_operators": ("SOFTMAX",)}, {"refused_operators": ("TANH",)}),
    ("operator", INTEGERS, {"accepted_operators": ("NEG",)}, {"accepted_operators": ("NEG", "ABS")}),
    ("float", attention_text(), {"floats": False}, {"floats": True}),
    ("int64", INTEGERS, {"int64": False}, {"int64": True}),
    ("dynamic", INTEGERS, {"dynamic_shapes": False}, {"dynamic_shapes": True}),
    ("composite", COMPOSITE, {"composites": False}, {"composites": False, "accepted_composites": ("odml.rms_norm",)}),
    ("joined-rows", added(), {"largest_joined_rows_bytes": 255}, {"largest_joined_rows_bytes": 256}),
])  # fmt: skip
def test_what_is_not_taken_is_named(
    rule: str, text: str, firing: dict[str, Any], silent: dict[str, Any]
) -> None:
    assert rules(text, **firing) == [rule]
    assert rules(text, **silent) == []
    assert rules(text) == [], "what is not known is not linted"


def test_a_rewrite_may_have_what_was_refused_before() -> None:
    target = generic(accepted_operators=("BATCH_MATMUL", "TRANSPOSE", "RESHAPE"))
    assert statuses(sites_of(attention_text(), target=target)) == ["converted"], (
        "SOFTMAX was refused as it stood"
    )


def test_composites_and_several_signatures_are_named_with_the_remedy() -> None:
    target = generic(composites=False, signatures=False)
    model = convert(TESTDATA / "demo_gemma3.tflite", dry_run=True, verify="none").model
    messages = {finding.rule: finding.message for finding in lint(model, target)}
    assert "inline_composites = true" in messages["composite"]
    assert "its own file" in messages["signatures"]


def external(text: str, folder: Path) -> Path:
    """A model with its weights after the flatbuffer and without deprecated codes, as ai-edge-quantizer writes it."""
    model = parse(text)
    for buffer in model.buffers:
        if buffer.data is not None:
            buffer.data = Data(bytes(buffer.data.view()), external=True)
    model.operator_codes = [
        replace(
            code, table=new_table("OperatorCode", builtin_code=code.builtin, version=code.version)
        )
        for code in model.operator_codes
    ]
    path = folder / "external.tflite"
    save(model, path)
    return path


WEIGHTS = """
subgraph main (%x: float32[1,4]) {
  %a: float32[1,4] = MUL(%x, float32{1, 2, 3, 4})
  %b: float32[1,4] = ADD(%a, float32{5, 6, 7, 8})
  return %b
}"""


def test_weights_and_codes_are_written_where_the_target_reads_them(tmp_path: Path) -> None:
    source, output = external(WEIGHTS, tmp_path), tmp_path / "out.tflite"
    told = [finding.rule for finding in lint(load(source), load_target("intel-npu"))]
    assert told == ["external-weights", "operator-codes"]
    convert(source, output, target="intel-npu")
    made = load(output)
    assert (external_weights(made), new_codes(made)) == ([], [])
    assert to_text(made) == to_text(load(source))
    assert lint(made, load_target("intel-npu")) == []
    convert(source, output, target="generic", overwrite=True)
    assert len(external_weights(load(output))) == 2


@pytest.mark.parametrize(("facts", "kept"), [
    ({"unsplit_types": ("FLOAT32",)}, "in FLOAT32"), ({"split_from_head_size": 6}, "of size 5"),
    ({"split_signatures": ("prefill*",)}, "this signature"),
    ({"unsplit_types": ("INT8",), "split_from_head_size": 5}, None),
])  # fmt: skip
def test_attention_that_a_target_gains_nothing_from_splitting_stays(
    facts: dict[str, Any], kept: str | None
) -> None:
    (site,) = convert(parse(attention_text()), target=generic(**facts)).sites
    wanted = ("nothing to do", "no-gain", 4) if kept else ("converted", "", 4)
    assert (site.status, site.why, site.heads) == wanted
    assert kept is None or kept in site.reason
