"""A build ends with what it cost: the text for that is held out of the calibration."""

import json
from pathlib import Path
from typing import Any

import pytest
from cli_runs import run
from pretend_stages import FLOAT, QUANTIZED, Place, Stages, write

from edge_opt.base.errors import UsageError
from edge_opt.build import building
from edge_opt.build.work import Processes

PROMPTS = [f"prompt number {number}" for number in range(12)]


@pytest.fixture
def place(tmp_path: Path) -> Place:
    made = Place(tmp_path)
    made.prompts.write_text("".join(json.dumps(prompt) + "\n" for prompt in PROMPTS))
    return made


def calibrated_on(stages: Stages) -> list[str]:
    return [
        json.loads(line) for line in Path(stages.jobs["calibrate"].inputs["prompts"]).read_text().splitlines()
    ]


def held_out(place: Place, *texts: str) -> Path:
    path = place.folder / "held-out.jsonl"
    path.write_text("".join(json.dumps(text) + "\n" for text in texts))
    return path


def test_every_fifth_prompt_is_held_out_of_the_calibration(place: Place) -> None:
    stages, result = place.build()
    assert calibrated_on(stages) == [text for at, text in enumerate(PROMPTS) if at % 5]
    assert stages.jobs["optimize"].stage == "score"
    assert stages.jobs["optimize"].options["parts"] == [
        ("prompt number", " 0"), ("prompt number", " 5"), ("prompt number", " 10")
    ]  # fmt: skip
    assert stages.jobs["optimize"].options["skip_long"]
    assert stages.checked
    found = result.evaluation
    assert found is not None
    assert [model["source"] for model in found["models"]] == ["checkpoint", "quantized", "converted"]
    assert [model["perplexity"] for model in found["models"]] == pytest.approx([2, 4, 4])
    assert [model["top1_agreement"] for model in found["models"]] == [1, 0.5, 0.5]
    assert found["note"].endswith("3 of 12 prompts, every fifth")


def test_held_out_text_of_a_file_leaves_all_prompts_to_calibration(place: Place) -> None:
    stages, _ = place.build(held_out=held_out(place, "some other text"))
    assert calibrated_on(stages) == PROMPTS
    assert stages.jobs["optimize"].options["parts"] == [("some other", " text")]
    assert not stages.jobs["optimize"].options["skip_long"]


def test_an_evaluation_is_kept_and_made_again_for_other_text(place: Place) -> None:
    place.build()
    _, again = place.build()
    assert [(stage.name, stage.made_now) for stage in again.stages][-2:] == [
        ("evaluate", False),
        ("compile", False),
    ]
    _, other = place.build(held_out=held_out(place, "some other text"))
    assert ("evaluate", True) in [(stage.name, stage.made_now) for stage in other.stages]


def test_a_float_bundle_is_the_reference_of_its_own_build_and_a_quantized_one_too(place: Place) -> None:
    stages, result = place.build(write(place.folder / "float.litertlm", FLOAT))
    assert [model["source"] for model in (result.evaluation or {})["models"]] == [
        "float bundle", "quantized", "converted"
    ]  # fmt: skip
    assert not stages.checked
    quantized = write(place.folder / "quantized.litertlm", QUANTIZED)
    text, work = held_out(place, "some text"), place.folder / "other.work"
    _, result = place.build(quantized, prompts=None, held_out=text, work=work)
    assert [model["source"] for model in (result.evaluation or {})["models"]] == [
        "quantized bundle",
        "converted",
    ]


def test_few_prompts_are_not_split_and_that_is_said(place: Place) -> None:
    place.prompts.write_text("".join(json.dumps(prompt) + "\n" for prompt in PROMPTS[:9]))
    stages, result = place.build()
    assert calibrated_on(stages) == PROMPTS[:9]
    assert stages.checked is None
    assert result.evaluation is not None
    assert result.evaluation["models"] == []
    assert "give --held-out FILE.jsonl" in result.evaluation["note"]


def test_a_build_without_evaluation_holds_nothing_out(place: Place) -> None:
    stages, result = place.build(evaluate=False)
    assert calibrated_on(stages) == PROMPTS
    assert result.evaluation is None
    assert stages.checked is None


def test_what_is_held_out_must_not_be_calibrated_on(place: Place) -> None:
    stages = Stages()
    with pytest.raises(UsageError, match="prompt 2 is among those to calibrate with"):
        place.build(stages=stages, held_out=held_out(place, "something else", PROMPTS[3]))
    assert stages.ran == []


def test_a_missing_runtime_is_said_before_work_begins(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    class Without(Stages):
        check_runtimes = Processes.check_runtimes  # type: ignore[assignment]

    monkeypatch.setattr("edge_opt.build.work._RUNTIME", "no-such-package")
    stages = Without()
    with pytest.raises(UsageError, match=r"pip install '\.\[lm\]' .*evaluate=False"):
        place.build(stages=stages)
    assert stages.ran == []
    place.build(stages=stages, evaluate=False)


def test_the_console_has_one_table_at_the_end(
    place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Timed(Stages):
        def optimize(self, job: Any) -> dict[str, Any]:
            told = super().optimize(job)
            told["signatures"][0] |= {
                name: {"time": {"us": us}} for name, us in (("before", 2000.0), ("after", 1000.0))
            }
            return told

    monkeypatch.setattr(building, "Processes", Timed)
    words = ["build", place.checkpoint, "-o", place.output, "--soc", "SM8750", "--prompts", place.prompts]
    ran = run(capsys, *words, "--sdk", place.sdk)
    assert ran.code == 0, ran.err
    rows = [line.split() for line in ran.out.splitlines()]
    assert ["checkpoint", "2.00", "1.000", "100.0", "%", "-"] in rows
    assert ["quantized", "4.00", "2.000", "50.0", "%", "2.000"] in rows
    assert ["converted", "4.00", "2.000", "50.0", "%", "1.000"] in rows
    assert "Held out of the calibration, to evaluate with: 3 of 12 prompts, every fifth" in ran.out
