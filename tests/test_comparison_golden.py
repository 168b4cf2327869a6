"""Golden files: small, checked on every element they can hold, and harmless when broken."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import proof_models as models
import pytest
from bundles import bundle, model_part
from cli_runs import DEMO, Patch

from edge_opt.base.errors import EdgeOptError, ModelFormatError, UsageError
from edge_opt.comparison import golden
from edge_opt.comparison.compare import compare
from edge_opt.comparison.golden import GoldenError
from edge_opt.ir.parse import parse
from edge_opt.testing import assert_golden, record_golden

WIDE = np.random.default_rng(1).standard_normal((60_000, 2)).astype(np.float32)
MODEL = models.projection()


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    return record_golden(MODEL, tmp_path / "g.npz")


def meta_of(path: Path) -> Any:
    with np.load(path) as stored:
        return json.loads(stored["meta"].tobytes())


def rewrite(path: Path, edit: Any) -> None:
    """Edits the description inside a golden file."""
    meta = meta_of(path)
    with np.load(path) as stored:
        contents: dict[str, Any] = {name: stored[name] for name in stored.files}
    edit(meta, contents)
    contents["meta"] = np.frombuffer(json.dumps(meta).encode(), np.uint8)
    np.savez(path, **contents)


def test_a_model_passes_what_it_recorded_and_another_fails(recorded: Path, tmp_path: Path) -> None:
    assert assert_golden(MODEL, recorded).bitwise
    said = r"output 'logits': 3 of 36 elements differ, by at most .* \(at \["
    with pytest.raises(AssertionError, match=said):
        assert_golden(models.projection(off=0.5), recorded)
    loose = golden.record(MODEL, tmp_path / "loose.npz", atol=0.1, rtol=0)
    report = golden.check(models.projection(off=1e-3), loose)
    assert (report.equal, report.bitwise) == (True, False)


def test_a_file_that_could_not_be_read_again_is_not_written(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(golden, "_MAX_UNPACKED", 100)
    with pytest.raises(UsageError, match="unpacks to too many bytes: choose fewer signatures"):
        golden.record(MODEL, tmp_path / "g.npz")
    assert list(tmp_path.iterdir()) == []


def test_a_model_in_memory_has_no_default_file() -> None:
    with pytest.raises(UsageError, match=r"no folder to write to: give path=\.\.\."):
        record_golden(MODEL)


def test_large_outputs_are_sampled_and_the_rest_is_checked_if_demanded_bitwise(
    tmp_path: Path,
) -> None:
    model = models.projection(WIDE)
    exact = golden.record(model, tmp_path / "exact.npz", atol=0, rtol=0)
    loose = golden.record(model, tmp_path / "loose.npz")
    assert all(300_000 < path.stat().st_size < 1_000_000 for path in (exact, loose))
    assert golden.check(model, loose).bitwise
    assert not golden.check(models.projection(WIDE * 1.01), loose).equal
    places = np.arange(3 * len(WIDE), dtype=np.float32)
    part = golden._sample(places, "main", "logits", 0, meta_of(exact)["share"])
    assert np.array_equal(part, np.sort(part))
    seen = part.astype(np.int64) % len(WIDE)
    assert np.array_equal(golden._sample(places, "main", "logits", 0, places.nbytes), places)
    unit = int(np.setdiff1d(np.arange(len(WIDE)), seen)[0])
    slightly = models.projection(WIDE, off=1e-3, unit=unit)
    assert "elements beyond the sample differ" in golden.check(slightly, exact).summary()
    near = golden.check(models.projection(WIDE, off=1e-6, unit=unit), loose)
    assert (near.equal, near.bitwise) == (True, False)
    assert "by a sample, minimum, maximum and sum" in near.summary()
    elements = near.signatures[0].outputs[0]
    assert f"compared were {elements.elements} of 180000 elements, and minimum" in near.notes()[0]
    for off, figure in ((1000.0, "minimum of all elements"), (np.nan, "NaN")):
        far = golden.check(models.projection(WIDE, off=off, unit=unit), loose)
        assert not far.equal, off
        assert figure in far.summary()


FIGURES = golden._Output.of
ELEMENTS = np.array([-3.0, 0.5, 2.0, np.nan, np.inf, 1.0], np.float32)


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        ({}, ""),
        ({1: 0.55}, ""),
        ({0: -3.5}, "minimum"),
        ({2: 2.5}, "maximum"),
        ({1: 1.9, 5: 1.9}, "sum"),
        ({3: 0.0}, "NaN"),
        ({4: -np.inf}, "infinite"),
    ],
)
def test_figures_of_all_elements_bound_what_tolerances_allow(
    edit: dict[int, float], said: str
) -> None:
    info = models.tensor("y", 6)
    changed = ELEMENTS.copy()
    for place, value in edit.items():
        changed[place] = value
    found = FIGURES(ELEMENTS, info).misses(FIGURES(changed, info), 0.1, 0.05)
    assert said in found
    assert bool(found) == bool(said)


def test_whatever_the_tolerances_allow_holds_for_the_figures_too() -> None:
    values = np.random.default_rng(3)
    for _ in range(200):
        atol, rtol = values.random(2) * (1e-3, 1.5)
        old = values.standard_normal(50) * 10.0 ** values.integers(-3, 4)
        new = old + (atol + rtol * np.abs(old)) * values.choice([-1, 1, 0.5], 50)
        info = models.tensor("y", 50, dtype="float64")
        assert not FIGURES(old, info).misses(
            FIGURES(new, info), atol * (1 + 1e-9), rtol * (1 + 1e-9)
        )


@pytest.mark.parametrize(("count", "atol"), [(1, 1e-4), (1, 1.0), (200_000, 1e-4)])
def test_integers_that_stand_for_themselves_have_no_relative_tolerance(
    count: int, atol: float, tmp_path: Path
) -> None:
    """151643 and 151645 are two tokens."""
    text = f"""signature s = #0 (x=%x) -> (y=%y)
    subgraph main (%x: int32[{count}]) {{
      %zeros: int32[{count}] = SUB(%x, %x)
      %y: int32[{count}] = ADD(%zeros, int32(151643))
      return %y
    }}"""
    path = record_golden(parse(text), tmp_path / "g.npz", atol=atol)
    assert golden.check(parse(text), path).bitwise
    for token in ("151644", "151645"):
        report = golden.check(parse(text.replace("151643", token)), path)
        assert report.equal == (atol == 1.0 and token == "151644")


def test_the_bits_of_nan_do_not_matter_and_those_of_zero_do() -> None:
    info = models.tensor("y", 1)
    one, other = (np.array([bits], np.uint32).view(np.float32) for bits in (0x7FC00000, 0xFFC00001))
    assert FIGURES(one, info) == FIGURES(other, info)
    assert FIGURES(np.float32([0.0]), info) != FIGURES(np.float32([-0.0]), info)


def test_a_checksum_that_disagrees_with_a_whole_sample_is_damage(tmp_path: Path) -> None:
    path = golden.record(models.adder(), tmp_path / "g.npz", atol=0, rtol=0)
    rewrite(path, lambda meta, _: meta["outputs"][0].__setitem__(1, "another"))
    with pytest.raises(GoldenError, match="output 'z' is damaged; record it again"):
        golden.check(models.adder(), path)


def test_a_file_of_another_version_says_how_to_record_it_again(recorded: Path) -> None:
    rewrite(recorded, lambda meta, _: meta["kind"].__setitem__(1, 4))
    with pytest.raises(
        GoldenError, match=r"of another version .* record it again with: edge-opt golden record"
    ):
        golden.check(MODEL, recorded)


def test_the_same_model_gives_the_same_file_and_replaces_one_only_when_asked(
    recorded: Path,
) -> None:
    before = recorded.read_bytes()
    with pytest.raises(UsageError):
        golden.record(MODEL, recorded)
    golden.record(MODEL, recorded, overwrite=True)
    assert recorded.read_bytes() == before


@pytest.mark.parametrize(
    ("model", "other", "said"),
    [
        (MODEL, models.projection(key="decode"), "signature 'main': only in "),
        (MODEL, models.projection(name="scores"), "output 'logits': only in "),
        (MODEL, models.projection(models.WEIGHT[:11]), "float32 [3, 12] recorded, float32 [3, 11] now"),
        (models.requantized(scale=0.5), models.requantized(scale=0.25), "0 in a, scale 0.25, zero point 0 in b"),
    ],
)  # fmt: skip
def test_a_model_that_does_not_fit_differs(
    model: bytes, other: bytes, said: str, tmp_path: Path
) -> None:
    path = golden.record(model, tmp_path / "g.npz", atol=1e6)
    assert golden.check(model, path).bitwise
    report = golden.check(other, path)
    assert not report
    assert said in report.summary()


def test_the_recorded_numbers_are_run_whatever_type_the_inputs_have_now(tmp_path: Path) -> None:
    """The float model rounds to the codes that the other one takes."""
    codes = "int8[64] q(0.1, 0)"
    rounds = f"%q: {codes} = QUANTIZE(%x)\n %y: float32[64] = DEQUANTIZE(%q)"
    plain = models.written(f"subgraph main (%x: float32[64]) {{ {rounds} return %y }}")
    coded = models.written(
        f"subgraph main (%x: {codes}) {{ %y: float32[64] = DEQUANTIZE(%x) return %y }}"
    )
    path = golden.record(plain, tmp_path / "g.npz", atol=0, rtol=0)
    report = golden.check(coded, path)
    assert report.bitwise
    assert report.notes() == ["main/x: recorded float32 numbers are rounded or clipped to int8"]
    report = golden.check(plain, golden.record(coded, tmp_path / "h.npz", atol=0, rtol=0))
    assert report.bitwise
    assert not report.notes()


class Trap:
    """Runs code when it is unpickled."""

    def __reduce__(self) -> Any:
        return pytest.fail, ("code from a golden file was run",)


@pytest.mark.parametrize("folder", [".", "/"])
def test_a_folder_in_place_of_the_model_is_one_typed_error(folder: str) -> None:
    with pytest.raises(ModelFormatError, match="is a folder, not a file"):
        golden.record(folder)


def test_a_name_that_is_not_utf_8_is_run(tmp_path: Path) -> None:
    path = tmp_path / "model\udcff.tflite"
    path.write_bytes(DEMO.read_bytes())
    assert golden.record(path, signatures=["decode"]).exists()


def test_an_output_of_a_type_that_numpy_lacks_is_named() -> None:
    text = "signature main = #0 (x=%x) -> (y=%y)\nsubgraph main (%x: float32[4]) {\n"
    text += "  %y: bfloat16[4] = CAST(%x)\n  return %y\n}\n"
    with pytest.raises(EdgeOptError, match="numpy lacks the type of an output, such as bfloat16"):
        compare(parse(text), parse(text))


def test_a_missing_or_broken_file_is_one_typed_error(recorded: Path, monkeypatch: Patch) -> None:
    for bound, said in (("_MAX_FILE", "too large"), ("_MAX_UNPACKED", "unpacks to too many bytes")):
        with monkeypatch.context() as patch:
            patch.setattr(golden, bound, 100)
            with pytest.raises(GoldenError, match=said):
                golden._read(recorded)
    with pytest.raises(GoldenError, match="does not exist; record it with"):
        golden.check(MODEL, recorded.with_name("none.npz"))
    with pytest.raises(GoldenError, match="give the model first, then the file"):
        golden.check(recorded, DEMO)
    whole = recorded.read_bytes()
    values = np.random.default_rng(0)
    np.savez(packed := io.BytesIO(), meta=np.array([Trap()], object))
    for broken in (
        b"",
        b"text",
        whole[: len(whole) // 2],
        whole[:-30],
        whole[50:],
        packed.getvalue(),
    ):
        recorded.write_bytes(broken)
        with pytest.raises(GoldenError):
            golden.check(MODEL, recorded)
    for _ in range(300):
        damaged = bytearray(whole)
        for place in values.integers(0, len(whole), 3):
            damaged[place] = values.integers(0, 256)
        recorded.write_bytes(damaged)
        try:
            golden._read(recorded)
        except GoldenError:
            continue


def test_a_file_whose_signatures_have_more_calls_than_fit_in_memory_is_refused_at_once(
    recorded: Path, monkeypatch: Patch
) -> None:
    """A hundred signatures that keep state call each other 10,000 times, with as many outputs each."""

    def edit(meta: Any, _: Any) -> None:
        (one,) = meta["signatures"]
        outputs = [one["outputs"][0] | {"name": f"y{place}"} for place in range(100)]
        several = {"keeps_state": True, "outputs": outputs}
        meta["signatures"] = [one | several | {"name": f"s{place}"} for place in range(100)]

    listed: list[object] = []
    places = golden._recorded

    def counted(signatures: Any) -> Any:
        for place in places(signatures):
            listed.append(place)
            yield place

    rewrite(recorded, edit)
    monkeypatch.setattr(golden, "_recorded", counted)
    with pytest.raises(GoldenError, match="its outputs are not complete"):
        golden._read(recorded)
    assert len(listed) < 1000


@pytest.mark.parametrize(
    "edit",
    [
        lambda meta, _: meta.pop("signatures"),
        lambda meta, _: meta["signatures"][0].update(keeps_state=True),
        lambda meta, _: meta.update(signatures=meta["signatures"] * 1001),
        lambda meta, _: meta.update(rtol=-1.0),
        lambda meta, _: meta.update(kind=["edge-opt golden", 99, 0]),
        lambda meta, _: meta["signatures"][0].update(inputs=7),
        lambda meta, _: meta["signatures"][0]["inputs"][0].update(dtype="complex64"),
        lambda meta, _: meta["signatures"][0]["inputs"][0].update(dtype="bytes"),
        lambda meta, _: meta["signatures"][0]["outputs"][0].update(dtype="foo"),
        lambda meta, _: meta["outputs"].pop(),
        lambda _, contents: contents.pop("arr_0"),
        lambda _, contents: contents.update({"arr_0": np.zeros(1, np.float32)}),
    ],
)
def test_a_description_that_makes_no_sense_is_one_typed_error(recorded: Path, edit: Any) -> None:
    rewrite(recorded, edit)
    with pytest.raises(GoldenError):
        golden.check(MODEL, recorded)


def test_of_a_bundle_the_prefill_decode_model_is_recorded_and_checked(tmp_path: Path) -> None:
    path = tmp_path / "m.litertlm"
    path.write_bytes(
        bundle([model_part("aux", models.adder()), model_part("prefill_decode", MODEL)])
    )
    recorded = golden.record(path, tmp_path / "g.npz")
    assert assert_golden(path, recorded).b == str(path)
    assert assert_golden(MODEL, recorded).bitwise
