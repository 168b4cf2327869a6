"""`compare`, `golden` and `shapes`: exit 1 where something differs, and what is said of it."""

import re
import shutil
from pathlib import Path

import pytest
from cli_runs import DEMO, NO_ATTENTION, QUANTIZED, run, state, written

Captured = pytest.CaptureFixture[str]
OTHER = NO_ATTENTION.replace("float32(0.5)", "float32(0.51)")


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    return written(tmp_path, NO_ATTENTION, "a.tflite"), written(tmp_path, OTHER, "b.tflite")


def test_equal_models_are_exit_0(capsys: Captured) -> None:
    ran = run(capsys, "compare", DEMO, DEMO)
    assert ran.code == 0
    assert "Equal: all 13 outputs of 2 signatures are bitwise equal." in ran.out


def test_different_models_are_exit_1_unless_within_the_tolerances(
    pair: tuple[Path, Path], capsys: Captured
) -> None:
    ran = run(capsys, "compare", *pair)
    assert (ran.code, ran.err) == (1, "")
    assert "Different:" in ran.out
    assert "output 'y'" in ran.out
    ran = run(capsys, "compare", *pair, "--json")
    assert (ran.code, ran.err, ran.json["equal"], ran.json["bitwise"]) == (1, "", False, False)
    (signature,) = ran.json["signatures"]
    (output,) = signature["outputs"]
    assert (signature["name"], output["name"], output["bitwise"]) == ("main", "y", False)
    assert 0 < output["max_abs"] < 0.1
    assert output["snr_db"] > 0
    assert output["cosine"] > 0.9
    ran = run(capsys, "compare", *pair, "--atol", "0.1", "--json")
    assert (ran.code, ran.json["equal"], ran.json["bitwise"]) == (0, True, False)


def test_logits_that_differ_are_told_by_what_that_means_for_the_tokens(
    pair: tuple[Path, Path], capsys: Captured
) -> None:
    shown = run(capsys, "compare", DEMO, QUANTIZED).out
    assert re.search(
        r"logits 'logits', .*top-1 agreement [\d.]+%, top-5 [\d.]+%, KL divergence [\d.e-]+ nats", shown
    )
    for models in ((DEMO, DEMO), pair):
        assert "top-1" not in run(capsys, "compare", *models).out


def test_seed_and_runs_decide_the_inputs(pair: tuple[Path, Path], capsys: Captured) -> None:
    def figure(*options: str) -> float:
        said = run(capsys, "compare", *pair, "--json", *options).json
        return float(said["signatures"][0]["outputs"][0]["max_abs"])

    assert figure("--seed", "1") == figure("--seed", "1") != figure("--seed", "2")
    assert figure("--runs", "3") >= figure()


def test_models_with_other_signatures_differ(pair: tuple[Path, Path], capsys: Captured) -> None:
    ran = run(capsys, "compare", DEMO, pair[0])
    assert ran.code == 1
    assert "prefill_8" in ran.out


def test_golden_records_and_checks(tmp_path: Path, capsys: Captured) -> None:
    model, golden = shutil.copy(DEMO, tmp_path / "model.tflite"), tmp_path / "g.npz"
    assert run(capsys, "golden", "record", model, "-o", golden).code == 0
    assert run(capsys, "golden", "check", model, golden).code == 0
    ran = run(capsys, "golden", "check", QUANTIZED, golden)
    assert (ran.code, ran.err) == (1, "")
    assert "Different:" in ran.out


def test_golden_replaces_a_file_only_with_force(tmp_path: Path, capsys: Captured) -> None:
    golden = tmp_path / "g.npz"
    golden.write_text("precious")
    before = state(tmp_path)
    assert "--force" in run(capsys, "golden", "record", DEMO, "-o", golden).failed_in_one_sentence(2)
    assert state(tmp_path) == before
    run(capsys, "golden", "check", DEMO, golden).failed_in_one_sentence(3)
    assert run(capsys, "golden", "record", DEMO, "-o", golden, "--force").code == 0
    assert run(capsys, "golden", "check", DEMO, golden).code == 0


@pytest.mark.parametrize("model", [DEMO, QUANTIZED], ids=["float32", "int16"])
def test_shapes_of_a_real_export_are_as_the_file_says(model: Path, capsys: Captured) -> None:
    ran = run(capsys, "shapes", model, "--json")
    assert ran.code == 0
    assert ran.json["disagreements"] == []
    assert ran.json["derived"] == ran.json["tensors"] > 500
    assert "all as the file says" in run(capsys, "shapes", model).out


def test_a_shape_that_the_file_has_wrong_is_exit_1(tmp_path: Path, capsys: Captured) -> None:
    wrong = NO_ATTENTION.replace("%half: float32[1,4]", "%half: float32[1,5]")
    model = written(tmp_path, wrong)
    ran = run(capsys, "shapes", model)
    assert (ran.code, ran.err) == (1, "")
    assert "'half'" in ran.out
    found = run(capsys, "shapes", model, "--json").json["disagreements"]
    assert {"tensor": "half", "recorded": [1, 5], "derived": [1, 4]}.items() <= found[0].items()
