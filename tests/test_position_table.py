"""Rope in integers stops at the end of their range; a table by position does not, and is proved at every position."""

from pathlib import Path

import numpy as np
import pytest
from ai_edge_litert.interpreter import Interpreter
from bundles import bundle, model_part
from numpy.typing import NDArray
from pass_runs import TESTDATA, but, changed, rewrites_of, statuses

from edge_opt import convert, inspect
from edge_opt.attention.float_form import COMPUTES
from edge_opt.attention.positions import find_rotary
from edge_opt.ir import Buffer, Model, load, to_bytes
from edge_opt.ir.parse import parse
from edge_opt.passes import Exact, Proof, Table, Verdict
from edge_opt.schema.data import Data
from edge_opt.schema.litertlm import SECTION_TYPE, read_bundle
from edge_opt.verification.examine import Verifier

TEXT = (TESTDATA / "pass_position_table.txt").read_text()
"""Positions count to 10 of 24; angles are p and p * 3277 / 32767."""
COSINES = ("cq: int16[1,4,4]", "cos: int16[1,4,1,4]")
HALF_A_STEP = 3.051851e-05 / 2
DECODER = """
signature prefill_4 = #0 (kv_cache_k_0=%cache, kv_slice_k_0=%slice) -> (kv_cache_k_0=%kept)
subgraph prefill_4 (%cache: int16[1,1,24,2] q(0.0001, 0), %slice: int16[1,1,4,2] q(0.0001, 0)) {
  %kept: int16[1,1,24,2] q(0.0001, 0) = RESHAPE(%cache, int32{1, 1, 24, 2})
  return %kept
}
"""
ROPE_ALONE = TEXT[: TEXT.index("subgraph cache_update_4")].replace(TEXT.splitlines()[1] + "\n", "")
COUNTS_TO_1000 = "0.0003051851 -> 0.03051851"
ONLY_A_RING = b"\x0a\x04\x12\x02\x30\x03"
"""Executor metadata of one state buffer, a local key cache."""


def sites(text: str) -> list[Verdict]:
    return convert(parse(text), skip=but("position_table")).sites


def rope(model: Model, positions: list[int]) -> dict[str, NDArray[np.float64]]:
    runner = Interpreter(model_content=to_bytes(model)).get_signature_runner("rope_4")
    found = runner(input_pos=np.array(positions, np.int32))
    return {name: array[0, :, 0] * 3.051851e-05 for name, array in found.items()}


def angles(positions: list[int]) -> NDArray[np.float64]:
    frequencies = np.array([32767, 3277] * 2) * 3.051851e-05
    return np.outer(positions, frequencies)


def test_every_position_of_the_cache_has_its_own_cosine_and_sine() -> None:
    model = parse(TEXT)
    before = rope(model, [10, 11, 23, 23])["pos_emb_cos"]
    assert (before[0] == before[2]).all()
    result = convert(model)
    for first in range(0, 24, 4):
        positions = list(range(first, first + 4))
        found = rope(model, positions)
        for name, function in (("pos_emb_cos", np.cos), ("pos_emb_sin", np.sin)):
            assert np.abs(found[name] - function(angles(positions))).max() <= HALF_A_STEP + 1e-6
    found = [(site.status, type(site.proof.check)) for site in result.sites]
    assert found == [("converted", Table)] * 2
    assert result.sites[0].note == "without this, RoPE is wrong after position 10 of 24"
    assert result.soundness == []


def test_without_the_pass_a_conversion_says_where_positions_stop() -> None:
    wrong = (
        "is wrong after position 10 of 24, because RoPE's integers end there (and 1 more like it)"
    )
    said = convert(parse(TEXT), skip="position_table").summary()
    assert f"{wrong}: run position_table on this signature" in said
    counts_on = convert(parse(changed(TEXT, COUNTS_TO_1000)), skip="position_table")
    assert counts_on.soundness == []


def test_cosines_beyond_the_range_of_the_result_are_the_ends_of_it() -> None:
    """Calibration saw a few positions, of which none had a cosine of 1."""
    narrow = [f"{name} q(3.051851e-05 -> {name} q(3.04e-05" for name in COSINES]
    model = parse(changed(TEXT, *narrow))
    assert {*statuses(convert(model).sites)} == {"converted"}
    assert rope(model, [0, 11, 12, 23])["pos_emb_cos"].max() == pytest.approx(32767 * 3.051851e-05)


def test_a_position_that_rounds_to_the_last_code_is_counted() -> None:
    (graph, *_) = parse(changed(TEXT, "0.0003051851 -> 0.0003051807")).subgraphs
    assert [rotary.last_position(24) for rotary in find_rotary(graph)] == [10, 10]


def test_thousands_of_positions_are_evaluated_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    runs, cosine = list[None](), COMPUTES["COS"]
    monkeypatch.setitem(COMPUTES, "COS", lambda *given: runs.append(None) or cosine(*given))
    rotary = next(find_rotary(parse(changed(TEXT, "0.0003051851 -> 5.0")).subgraphs[0]))
    assert rotary.last_position(1 << 16) is None
    assert len(runs) == 16


def test_what_the_integers_tell_apart_beyond_the_cache_stays_apart() -> None:
    """A ring is shorter than what is counted, and a time step of diffusion is no position of a cache."""
    model = parse(changed(TEXT, COUNTS_TO_1000))
    (note,) = {site.note for site in convert(model).sites}
    assert note == ""
    positions = [24, 100, 900, 999]
    expected = np.cos(angles(positions))
    assert np.abs(rope(model, positions)["pos_emb_cos"] - expected).max() <= 4 * HALF_A_STEP
    beyond = rope(model, [1000, 1001, 5000, 9000])["pos_emb_cos"]
    assert (beyond == rope(model, [1000] * 4)["pos_emb_cos"]).all()


OTHER = "%other: int16[1,4,2] q(0.0003051851, 0) = MUL(%position, int16{100, 7} q(3.051851e-05, 0))"
OTHER_HALF = changed(
    TEXT, f"  %angles ->   {OTHER}\n  %angles", "(%angle, %angle) -> (%angle, %other)"
)


@pytest.mark.parametrize(
    ("text", "width"), [(TEXT, 2), (OTHER_HALF, 4)], ids=["equal", "different"]
)
def test_equal_halves_of_a_row_are_stored_once(text: str, width: int) -> None:
    model = parse(text)
    convert(model)
    tables = [op.input(0).shape for op in model.subgraphs[0].operators if op.name == "GATHER"]
    assert tables == [(1, 24, 1, width)] * 2


EXPORTED = """
signature rope_4 = #0 (input_pos=%input_pos) -> (pos_emb_cos=%cos, pos_emb_sin=%sin)
subgraph rope_4 (%input_pos: int32[4]) {
  %row: int32[1,4,1] = RESHAPE(%input_pos, int32{1, 4, 1})
  %position: float32[1,4,1] = CAST(%row)
  %angle: float32[1,4,2] = MUL(%position, float32{1, 0.1})
  %angles: float32[1,4,4] = CONCATENATION(%angle, %angle) {axis: 2}
  %c: float32[1,4,4] = COS(%angles)
  %s: float32[1,4,4] = SIN(%angles)
  %cos: float32[1,4,1,4] = RESHAPE(%c, int32{1, 4, 1, 4})
  %sin: float32[1,4,1,4] = RESHAPE(%s, int32{1, 4, 1, 4})
  return %cos, %sin
}
"""


def cosines_off(exported: str, frequencies: list[float]) -> float:
    """How far the cosines of the last four positions are from those of frequencies, given the model in float."""
    model = parse(TEXT)
    result = convert(model, exported=dict(parse(exported).entry_points()))
    assert statuses(result.sites) == ["converted"] * 2
    is_told = "; has the exact frequencies of the export" in result.sites[0].note
    assert is_told == (exported == EXPORTED)
    positions = [20, 21, 22, 23]
    expected = np.cos(np.outer(positions, frequencies * 2))
    return float(np.abs(rope(model, positions)["pos_emb_cos"] - expected).max())


def test_given_the_exported_model_the_table_has_its_exact_frequencies() -> None:
    """0.1 is stored as 3277 steps, which are 0.100009; at position 23 that is 0.0002 too far."""
    assert cosines_off(EXPORTED, [1, 0.1]) <= HALF_A_STEP + 1e-6


OTHER_EXPORTS = {
    "numbers that round to other codes": "{1, 0.1} -> {1, 0.2}",
    "other operators": "= COS( -> = SIN(",
    "another shape": "float32{1, 0.1} -> float32[1,4,2]{1, 0.1, 1, 0.1, 1, 0.1, 1, 0.1}",
}


@pytest.mark.parametrize("edit", OTHER_EXPORTS.values(), ids=OTHER_EXPORTS)
def test_what_does_not_round_to_the_codes_is_not_what_was_exported(edit: str) -> None:
    stored = [32767 * 3.051851e-05, 3277 * 3.051851e-05]
    assert cosines_off(changed(EXPORTED, edit), stored) <= HALF_A_STEP + 1e-6
    assert cosines_off(changed(EXPORTED, edit), [1, 0.1]) > 4 * HALF_A_STEP


def proved(
    verifier: Verifier, spoilt: str = "", index: int = 0, place: tuple[int, ...] = ()
) -> Proof:
    """Of the cosines, with one number of a constant off by one where an operator is to be spoilt."""
    rewrite = rewrites_of("position_table", parse(TEXT), positions=24)[0]
    for tensor in (operator.input(index) for operator in rewrite.new if operator.name == spoilt):
        array = np.array(tensor.array())
        array[place] -= 1
        tensor.buffer = Buffer(Data(array.tobytes()))
    return verifier.verify(rewrite, rewrite.check or Exact())


def test_one_entry_of_the_table_that_is_off_by_a_step_fails_the_proof(verifier: Verifier) -> None:
    proof = proved(verifier)
    assert (proof.holds, [ran.kernels for ran in proof.ran]) == (True, ["xnnpack", "reference"])
    spoilt = proved(verifier, "GATHER", 0, (0, 23, 0, 1))
    assert not spoilt.holds
    assert "of the result in float" in spoilt.reason
    assert HALF_A_STEP < spoilt.max_abs < 4 * HALF_A_STEP
    assert proved(verifier, "MINIMUM", 1).max_abs > 0.1, "a last position that is cut off"


def test_an_output_whose_scale_cannot_hold_the_cosines_stays() -> None:
    """A table of what is cut off at 0.5 would not be rope."""
    narrow = [f"{name} q(3.051851e-05, 0) -> {name} q(1.5e-05, 0)" for name in COSINES]
    cosine, sine = sites(changed(TEXT, *narrow))
    assert (cosine.why, sine.status) == ("different", "converted")
    assert "by up to 0.508" in cosine.reason


C_INT8 = "cq: int16[1,4,4] q(3.051851e-05, 0) -> cq: int8[1,4,4] q(0.00787402, 0)"
COS_INT8 = "cos: int16[1,4,1,4] q(3.051851e-05, 0) -> cos: int8[1,4,1,4] q(0.00787402, 0)"
SCALED = "u: float32[1,4,4] = COS(%real)\n  %c: float32[1,4,4] = MUL(%u, float32(0.75))"
CAST_INT64 = "CAST(%row) {in_data_type: 4}"
SHIFTED = "one: int32[1,4,1] = ADD(%row, int32(1))\n  %float: float32[1,4,1] = CAST(%one)"
MULTIPLIED = "MUL(%position, int16{32767, 3277} q(3.051851e-05, 0))"
QUANTIZED = "%f: int16[2] q(3.051851e-05, 0) = QUANTIZE(float32{1, 0.1})\n  %angle: int16"


@pytest.mark.parametrize(
    "text",
    [
        changed(TEXT, "int32[4]) { -> int32[1,4]) {"),
        changed(TEXT, "pos: int32[4] -> pos: int64[4]", "int32[1,4,1] -> int64[1,4,1]", f"CAST(%row) -> {CAST_INT64}"),
        changed(TEXT, f"c: float32[1,4,4] = COS(%real) -> {SCALED}"),
        changed(TEXT, f"float: float32[1,4,1] = CAST(%row) -> {SHIFTED}"),
        changed(TEXT, C_INT8, COS_INT8),
        changed(TEXT, f"%angle: int16 -> {QUANTIZED}", f"{MULTIPLIED} -> MUL(%position, %f)"),
        changed(TEXT, "int32[4]) { -> int32[1]) {", "[1,4, -> [1,1,", "int32{1, 4, -> int32{1, 1,"),
    ],
    ids=["positions [1,T]", "int64", "scaled attention", "shifted", "int8", "quantized frequencies", "one token"],
)  # fmt: skip
def test_other_ways_to_write_it(text: str) -> None:
    assert statuses(sites(text)) == ["converted"] * 2


FIRST = "row: int32[1,4,1] = RESHAPE(%input_pos"
BACKWARDS = (
    "back: int32[4] = REVERSE_V2(%input_pos, int32{0})\n  %row: int32[1,4,1] = RESHAPE(%back"
)
ROWS = "cos: int16[1,4,1,4] q(3.051851e-05, 0) = RESHAPE(%cq, int32{1, 4, 1, 4})"
FLAT = "cos: int16[16] q(3.051851e-05, 0) = RESHAPE(%cq, int32{16})"
ADDED = (
    "a: int32[2,2] = RESHAPE(%input_pos, int32{2, 2})\n  %b: int32[2,2] = TRANSPOSE(%a, int32{1, 0})\n"
    "  %d: int32[2,2] = ADD(%a, %b)\n  %row: int32[1,4,1] = RESHAPE(%d"
)
OF_THREE = changed(TEXT, "[4] -> [3]", "1,4, -> 1,3,", "{1, 4, 1 -> {1, 3, 1")
AS_COMPUTED = "sizes: int32[3] = MUL(%input_pos, int32(1))\n  %row: int32[1,3,1] = RESHAPE(%input_pos, %sizes)"
COMPUTED = changed(
    OF_THREE, f"row: int32[1,3,1] = RESHAPE(%input_pos, int32{{1, 3, 1}}) -> {AS_COMPUTED}"
)
CLIPPED = "3277} q(3.051851e-05, 0)) -> 3277} q(3.051851e-05, 0)) {fused_activation_function: 1}"


def test_what_the_caller_reads_in_between_comes_from_the_table() -> None:
    read = changed(
        TEXT, "pos_emb_cos=%cos -> early=%cq, pos_emb_cos=%cos", "return %cos -> return %cq, %cos"
    )
    model = parse(read)
    convert(model, skip=but("position_table"))
    first_column = rope(model, [20, 21, 22, 23])["early"]
    assert np.abs(first_column - np.cos([20, 21, 22, 23])).max() <= HALF_A_STEP + 1e-4


@pytest.mark.parametrize(
    ("text", "why", "named"),
    [
        (ROPE_ALONE, "positions", "number of positions"),
        (changed(TEXT, f"{FIRST} -> {BACKWARDS}"), "operator", "REVERSE_V2"),
        (changed(TEXT, f"{ROWS} -> {FLAT}"), "positions", "'cos'"),
        (changed(TEXT, f"{FIRST} -> {ADDED}"), "positions", "'cos'"),
        (changed(TEXT, CLIPPED), "operator", "activation"),
        (changed(TEXT, "0.0003051851 -> 5.0"), "limit", "131,072"),
        (COMPUTED, "operator", "RESHAPE"),
        (changed(TEXT, "angle: int16 -> angle: bool", "angles: int16 -> angles: bool"), "quantization", "bool"),
    ],
    ids=["no cache", "unknown operator", "one axis", "two positions", "fused activation", "too many", "order", "bool"],
)  # fmt: skip
def test_what_is_not_understood_has_a_reason(text: str, why: str, named: str) -> None:
    site = sites(text)[0]
    assert (site.status, site.why) == ("skipped", why)
    assert named in site.reason


@pytest.mark.parametrize("place", range(12))
def test_a_wrong_recorded_shape_is_listed_and_positions_are_not_followed(place: int) -> None:
    """Each operator's result in turn, with another size and another rank."""
    for shape in ((1, 5, 2), (8,)):
        model = parse(TEXT)
        wrong = model.subgraphs[0].operators[place].output
        wrong.shape = shape
        content = to_bytes(model)
        inferred = inspect(content, infer=True).inferred
        assert inferred is not None
        assert wrong.name in [each.tensor for each in inferred.disagreements]
        assert all(
            site.status == "skipped" or site.operator != wrong.name
            for site in convert(content).sites
        )


def test_rope_in_float_is_no_site() -> None:
    assert len(sites(TEXT)) == 2
    assert sites(EXPORTED + DECODER.replace("= #0", "= #1")) == []


def written(folder: Path, metadata: bytes = b"") -> Path:
    path = folder / "model.litertlm"
    models = [("aux", ROPE_ALONE), ("prefill_decode", DECODER)]
    parts = [model_part(kind, to_bytes(parse(text))) for kind, text in models]
    path.write_bytes(bundle([*parts, *([(SECTION_TYPE, {}, metadata)] if metadata else [])]))
    return path


def test_the_auxiliary_model_takes_part_and_the_cache_is_that_of_the_bundle(tmp_path: Path) -> None:
    path, output = written(tmp_path), tmp_path / "opt.litertlm"
    result = convert(path, output, verify="full")
    assert [found.name.rsplit("/")[-1] for found in result.whole] == ["prefill_4"]
    assert (
        ", and the whole models compared except aux/rope_4, which a pass changes on purpose"
        in result.summary()
    )
    assert [(site.signature, site.status) for site in result.sites] == [
        ("aux/rope_4", "converted")
    ] * 2
    assert [entry.name for entry in result.signatures] == ["prefill_4", "aux/rope_4"]
    (_, before), (aux, after) = (
        [one.content(0), one.content(1)] for one in map(read_bundle, (path, output))
    )
    assert after.read(0, after.size) == before.read(0, before.size)
    assert rope(load(aux), [23] * 4)["pos_emb_cos"][0, 0] == pytest.approx(np.cos(23), abs=2e-5)
    assert convert(output, tmp_path / "again.litertlm").converted == []
    alone = convert(path, tmp_path / "alone.litertlm", signatures="prefill_4")
    assert {found.rule for found in alone.soundness} == {"positions-stop"}


def test_the_length_of_rings_is_no_number_of_positions(tmp_path: Path) -> None:
    path = written(tmp_path, metadata=ONLY_A_RING)
    assert {*statuses(convert(path, tmp_path / "opt.litertlm").sites)} == {"skipped"}
    for others in (ONLY_A_RING[:-1] + b"\x01", b"\x0a\x08\x12\x02\x30\x03\x12\x02\x30\x01"):
        whole = written(tmp_path, metadata=others)
        assert len(convert(whole, tmp_path / "whole.litertlm", overwrite=True).converted) == 2


def test_inspect_says_where_a_bundle_stops_counting(tmp_path: Path) -> None:
    path, output = written(tmp_path), tmp_path / "opt.litertlm"
    stops = "without this, RoPE is wrong after position 10 of 24"
    assert [(site.signature, site.note) for site in inspect(path).sites] == [
        ("aux/rope_4", stops)
    ] * 2
    convert(path, output)
    assert inspect(output).sites == []
