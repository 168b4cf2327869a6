"""Golden files: small, checked on every element they can hold, and harmless when broken."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import proof_models as models
import pytest
from bundles import bundle, model_part
from cli_runs import DEMO

from edge_opt.base.errors import UsageError
from edge_opt.comparison import golden
from edge_opt.comparison.golden import GoldenError
from edge_opt.runtime.tensors import TensorInfo
from edge_opt.testing import assert_golden

WEIGHT = np.random.default_rng(0).standard_normal((12, 5)).astype(np.float32)
WIDE = np.random.default_rng(1).standard_normal((60_000, 2)).astype(np.float32)


def changed(weight: np.ndarray, row: int, amount: float) -> np.ndarray:
    other = weight.copy()
    other[row] += amount
    return other


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    return golden.record(models.projection(WEIGHT), tmp_path / "g.npz")


def rewrite(path: Path, edit: Any) -> None:
    """Edits the description inside a golden file."""
    with np.load(path) as stored:
        contents: dict[str, Any] = {name: stored[name] for name in stored.files}
    meta = json.loads(contents["meta"].tobytes())
    edit(meta, contents)
    contents["meta"] = np.frombuffer(json.dumps(meta).encode(), np.uint8)
    np.savez(path, **contents)


def test_a_model_passes_what_it_recorded(recorded: Path) -> None:
    report = golden.check(models.projection(WEIGHT), recorded)
    assert report.bitwise
    assert assert_golden(models.projection(WEIGHT), recorded).equal


def test_another_model_fails_with_the_place(recorded: Path) -> None:
    said = r"output 'logits': 3 of 36 elements differ, by at most .* \(at \["
    with pytest.raises(AssertionError, match=said):
        assert_golden(models.projection(changed(WEIGHT, 7, 0.5)), recorded)


def test_the_recorded_tolerances_hold(tmp_path: Path) -> None:
    path = golden.record(models.projection(WEIGHT), tmp_path / "g.npz", atol=0.1, rtol=0)
    report = golden.check(models.projection(changed(WEIGHT, 7, 1e-3)), path)
    assert report.equal
    assert not report.bitwise


def test_large_outputs_are_sampled_and_the_file_stays_small(tmp_path: Path) -> None:
    model = models.projection(WIDE)
    path = golden.record(model, tmp_path / "g.npz")
    assert path.stat().st_size < 1_000_000
    assert golden.check(model, path).bitwise
    assert not golden.check(models.projection(WIDE * 1.01), path).equal


def unsampled_row(path: Path) -> int:
    """A row of WIDE that no sample of the only run looks at, in any of the three rows of the output."""
    with np.load(path) as stored:
        share = json.loads(stored["meta"].tobytes())["share"]
    places = np.arange(3 * len(WIDE), dtype=np.float32)
    seen = golden._sample(places, "main", "logits", 0, share).astype(np.int64) % len(WIDE)
    return int(np.setdiff1d(np.arange(len(WIDE)), seen)[0])


def test_an_element_beyond_the_sample_is_found_by_its_checksum_or_statistics(tmp_path: Path) -> None:
    exact = golden.record(models.projection(WIDE), tmp_path / "exact.npz", atol=0, rtol=0)
    loose = golden.record(models.projection(WIDE), tmp_path / "loose.npz")
    row = unsampled_row(exact)
    slightly, hugely = (models.projection(changed(WIDE, row, amount)) for amount in (1e-3, 1e3))
    assert "elements beyond the sample differ" in golden.check(slightly, exact).summary()
    assert golden.check(slightly, loose).equal
    assert "elements beyond the sample differ" in golden.check(hugely, loose).summary()


def test_the_same_model_gives_the_same_file_and_replaces_one_only_when_asked(recorded: Path) -> None:
    before = recorded.read_bytes()
    with pytest.raises(UsageError):
        golden.record(models.projection(WEIGHT), recorded)
    golden.record(models.projection(WEIGHT), recorded, overwrite=True)
    assert recorded.read_bytes() == before


def test_a_missing_signature_and_other_inputs_are_differences(recorded: Path) -> None:
    other = golden.check(models.projection(WEIGHT, key="decode"), recorded)
    assert "signature 'main': missing in <model>" in other.summary()
    assert (
        "input 'embeddings': expected float32 [3, 5], got none"
        in golden.check(models.adder(), recorded).summary()
    )
    renamed = golden.check(models.projection(WEIGHT, name="scores"), recorded)
    assert "missing in the model" in renamed.summary()


def test_another_quantization_of_an_output_is_a_difference(tmp_path: Path) -> None:
    path = golden.record(models.requantized(scale=0.5), tmp_path / "g.npz", atol=1e6)
    assert golden.check(models.requantized(scale=0.5), path).bitwise
    report = golden.check(models.requantized(scale=0.25), path)
    assert "quantization ((0.5,), (0,), 0) recorded, ((0.25,), (0,), 0) now" in report.summary()


def test_a_missing_or_broken_file_is_one_typed_error(recorded: Path) -> None:
    with pytest.raises(GoldenError, match="does not exist; record it with"):
        golden.check(models.adder(), recorded.with_name("none.npz"))
    whole = recorded.read_bytes()
    values = np.random.default_rng(0)
    model = models.projection(WEIGHT)
    for broken in (b"", b"text", whole[: len(whole) // 2], whole[:-30], whole[50:]):
        recorded.write_bytes(broken)
        with pytest.raises(GoldenError):
            golden.check(model, recorded)
    for _ in range(300):
        damaged = bytearray(whole)
        for place in values.integers(0, len(whole), 3):
            damaged[place] = values.integers(0, 256)
        recorded.write_bytes(damaged)
        try:
            golden._read(recorded)
        except GoldenError:
            continue


@pytest.mark.parametrize(
    "edit",
    [
        lambda meta, _: meta.pop("signatures"),
        lambda meta, _: meta.update(runs=10**9),
        lambda meta, _: meta.update(atol=None),
        lambda meta, _: meta.update(version=99),
        lambda meta, _: meta["signatures"][0].pop("results"),
        lambda meta, _: meta["signatures"][0].update(inputs=7),
        lambda meta, _: meta["signatures"][0]["results"]["logits"].pop(),
        lambda _, contents: contents.update({"0": np.zeros(1, np.float32)}),
    ],
)
def test_a_description_that_makes_no_sense_is_one_typed_error(recorded: Path, edit: Any) -> None:
    rewrite(recorded, edit)
    with pytest.raises(GoldenError):
        golden.check(models.projection(WEIGHT), recorded)


@pytest.mark.parametrize(
    ("bound", "said"), [("_MAX_FILE", "too large"), ("_MAX_UNPACKED", "unpacks to too much")]
)
def test_a_file_beyond_its_bounds_is_not_read(
    bound: str, said: str, recorded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(golden, bound, 100)
    with pytest.raises(GoldenError, match=said):
        golden._read(recorded)


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> Any:
            return pytest.fail, ("code from a golden file was run",)

    packed = io.BytesIO()
    np.savez(packed, meta=np.array([Trap()], object))
    path = tmp_path / "g.npz"
    path.write_bytes(packed.getvalue())
    with pytest.raises(GoldenError):
        golden.check(models.adder(), path)


def test_of_a_bundle_the_prefill_decode_model_is_recorded_and_checked(tmp_path: Path) -> None:
    model = models.projection(WEIGHT)
    path, other = tmp_path / "m.litertlm", tmp_path / "other.litertlm"
    path.write_bytes(bundle([model_part("aux", models.adder()), model_part("prefill_decode", model)]))
    other.write_bytes(bundle([model_part("prefill_decode", models.projection(changed(WEIGHT, 7, 0.5)))]))
    recorded = golden.record(path, tmp_path / "g.npz")
    with np.load(recorded) as stored:
        meta = json.loads(stored["meta"].tobytes())
    assert meta["model"]["bytes"] == path.stat().st_size
    assert assert_golden(path, recorded).b == str(path)
    assert assert_golden(model, recorded).bitwise
    assert not golden.check(other, recorded).equal


@pytest.mark.parametrize(
    "numbers", [{"seed": -1}, {"seed": "x"}, {"atol": float("nan")}, {"rtol": -1.0}], ids=str
)
def test_numbers_that_cannot_be_are_refused_before_the_model_runs(numbers: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"{next(iter(numbers))} is .*, expected"):
        golden.record(DEMO, tmp_path / "golden.npz", **numbers)


def test_swapped_arguments_are_told(recorded: Path) -> None:
    with pytest.raises(GoldenError, match="give the model first, the golden file second"):
        golden.check(recorded, DEMO)


# What the file keeps


def info(
    shape: tuple[int, ...], dtype: str = "float32", scales: tuple[float, ...] = (), zero: int = 0
) -> TensorInfo:
    return TensorInfo("y", "y", shape, shape, dtype, scales, (zero,) * len(scales))


def test_statistics_are_of_real_numbers_that_are_finite() -> None:
    plain = golden._statistics(np.array([[-4, 1], [np.nan, np.inf]], np.float32), info((2, 2)))
    assert [plain[name] for name in ("type", "mean", "mean_abs", "low", "high")] == [
        "float32 [2, 2]", -1.5, 2.5, -4, 1,
    ]  # fmt: skip
    codes = golden._statistics(np.array([12, 6], np.int8), info((2,), "int8", (0.5,), 10))
    assert (codes["mean"], codes["mean_abs"], codes["low"], codes["high"]) == (-0.5, 1.5, -2, 1)
    nothing = golden._statistics(np.full(2, np.nan, np.float32), info((2,)))
    assert (nothing["mean"], nothing["low"]) == (0, 0)


def test_a_sample_has_as_many_elements_as_fit_in_its_share() -> None:
    array = np.arange(100, dtype=np.float32)
    assert np.array_equal(golden._sample(array, "s", "y", 0, 400), array)
    part = golden._sample(array, "s", "y", 0, 399)
    assert part.size == 99
    assert np.array_equal(part, np.sort(part))
    assert golden._sample(array, "s", "y", 0, 1).size == 1
    assert not np.array_equal(part, golden._sample(array, "s", "y", 1, 399))


def golden_of(meta: dict[str, float], **arrays: np.ndarray) -> golden._Check:
    nobody: Any = None
    return golden._Check(meta, arrays, nobody, nobody, "model")


@pytest.mark.parametrize(
    ("changed", "atol", "rtol", "said"),
    [
        ({}, 0.1, 0, ""),
        ({"mean": 1.1}, 0.11, 0, ""),
        ({"mean": 1.2}, 0, 0.11, ""),
        ({"mean_abs": 2.3}, 0, 0.1, "mean_abs 2.3, recorded 2"),
        ({"high": 4.6}, 0, 0.1, "high 4.6, recorded 4"),
        ({"low": float("nan")}, 1e9, 0, "low nan, recorded -5"),
    ],
)
def test_statistics_prove_a_difference_beyond_the_sample(
    changed: dict[str, float], atol: float, rtol: float, said: str
) -> None:
    recorded = {"sha256": "a", "mean": 1.0, "mean_abs": 2.0, "low": -5.0, "high": 4.0}
    now = {**recorded, "sha256": "b", **changed}
    found = golden_of({"atol": atol, "rtol": rtol})._beyond_sample(recorded, now)
    assert found == (said and f"elements beyond the sample differ: {said}")
    exact = golden_of({"atol": 0, "rtol": 0})
    assert exact._beyond_sample(recorded, now) == "elements beyond the sample differ"
    assert exact._beyond_sample(recorded, {**now, "sha256": "a"}) == ""


@pytest.mark.parametrize(("shape", "dtype"), [((2,), "int32"), ((1, 2), "float32")])
def test_an_output_of_another_shape_or_type_than_recorded_is_a_difference(
    shape: tuple[int, ...], dtype: str
) -> None:
    check = golden_of({"share": 99, "atol": 0, "rtol": 0}, kept=np.zeros(2, np.float32))
    recorded = {"key": "kept", "type": "float32 [2]"}
    found = check._output("s", info((2,)), recorded, {"y": np.zeros(shape, dtype)}, 0)
    assert found.reason == f"float32 [2] recorded, {dtype} {list(shape)} now"
    assert check._output("s", info((2,)), recorded, {}, 0).reason == "missing in the model"
    # Where all was kept, other bytes of equal values are no difference: -0.0 equals 0.0.
    old = np.zeros(2, np.float32)
    recorded = {"key": "kept", **golden._statistics(old, info((2,)))}
    assert check._output("s", info((2,)), recorded, {"y": -old}, 0).reason == ""
