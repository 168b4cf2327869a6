"""From a checkpoint to a bundle for the NPU: what is done again, what is kept, and what is said when it fails.

The stages are small functions here; test_build_real.py runs the real ones.
"""

import errno
import json
import math
import re
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from bundles import BLOCK, GENERIC, bundle, model_part
from cli_runs import DEMO, Captured, Patch, run
from doc_pages import ROOT
from pretend_stages import (
    COMPILED,
    FLOAT,
    KEPT,
    NOTE,
    QUANTIZED,
    TOKENIZER,
    WEIGHTS,
    Place,
    Stages,
    adapter,
    bundle_of,
    write,
)

from edge_opt import evaluate
from edge_opt.base.errors import ModelFormatError, OutputError, UsageError
from edge_opt.building import BuildCheckError, StageFailedError, recipe
from edge_opt.building import run as build_run
from edge_opt.building import stages as build_stages
from edge_opt.building.evaluation import Evaluation, ModelScore
from edge_opt.building.needs import needs_of
from edge_opt.building.rings import SETTING
from edge_opt.building.sections import faults, keep_sections
from edge_opt.building.stage_process import STAGES
from edge_opt.building.stages import Job, Stage
from edge_opt.comparison.compare import compare
from edge_opt.conversion import convert
from edge_opt.inspection import inspect
from edge_opt.ir import to_bytes
from edge_opt.ir.parse import parse
from edge_opt.npu import CompilerMissingError
from edge_opt.npu.qualcomm import Qualcomm
from edge_opt.targets import load_target

ALL = ["configure", "export", "check", "calibrate", "quantize", "optimize", "compile"]
PROMPTS = [f"prompt number {number}" for number in range(12)]
Change = Callable[[Place], dict[str, Any]]


def many(place: Place, *texts: str, name: str = "prompts.jsonl") -> Path:
    path = place.folder / name
    path.write_text("".join(json.dumps(text) + "\n" for text in texts))
    return path


def command(place: Place, *more: object) -> list[object]:
    words = ["build", place.checkpoint, "-o", place.output, "--soc", "SM8750", "--sdk", place.sdk]
    return [*words, "--prompts", place.prompts, *more]


def test_every_stage_has_a_function_an_estimate_and_a_row_on_the_page() -> None:
    stages = {one.name for one in vars(recipe).values() if isinstance(one, Stage)}
    assert stages == STAGES.keys()
    page = (ROOT / "docs" / "build.md").read_text(encoding="utf-8")
    table = page.partition("| stage | by |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| (\w+) \|", table, re.MULTILINE)
    assert {*rows} == stages
    needs = needs_of([], rounds=True, streams=True)
    assert stages - needs.memory.keys() == {"configure", "merge"}, "they need little"


def test_a_checkpoint_runs_through_every_stage(place: Place) -> None:
    stages, result = place.build(cache=4096, prefill=[128, 512], settings={"k_ts_idx": 2})
    assert stages.ran == ALL
    assert place.output.read_bytes() == bundle_of(COMPILED)
    assert result.output == str(place.output)
    assert [(stage.name, stage.made_now) for stage in result.stages] == [
        (name, True) for name in ALL
    ]
    settings = {"cache_length": 4096, "prefill_lengths": [128, 512], "k_ts_idx": 2}
    assert stages.jobs["configure"].options["settings"] == settings
    assert stages.jobs["export"].config == {"soc_model": "SM8750", "rotate": True, **settings}
    assert stages.jobs["optimize"].options["target"] == load_target("qualcomm-htp").to_dict()
    assert stages.jobs["compile"].options["compile_configs"] == {
        "prefill_decode": {"compile": True}
    }
    libraries = [stages.jobs[stage].libraries for stage in ("quantize", "optimize", "compile")]
    assert libraries == [None, str(place.sdk), str(place.sdk)]


def test_a_float_bundle_starts_at_calibration_and_a_quantized_one_at_the_rewriting(
    place: Place,
) -> None:
    exported = write(place.folder / "float.litertlm", FLOAT)
    stages, result = place.build(exported)
    assert stages.ran == ["configure", "calibrate", "quantize", "optimize", "compile"]
    assert result.caches == {"window": None, "ring": None, "notes": ["caches: 1 with 16 positions"]}
    quantized = write(place.folder / "quantized.litertlm", QUANTIZED)
    stages, _ = place.build(quantized, prompts=None, work=place.folder / "other.work")
    assert stages.ran == ["configure", "optimize", "compile"]
    assert stages.jobs["configure"].options["cache"] == 16


def test_logits_in_4_bits_are_a_stage_of_their_own_behind_the_quantizer(place: Place) -> None:
    stages, _ = place.build(weights="4-logits")
    assert stages.ran == [*ALL[:5], "narrow", *ALL[5:]]
    assert stages.jobs["narrow"].inputs["checkpoint"] == str(place.checkpoint)
    assert stages.jobs["optimize"].inputs["model"] == str(place.work / "narrow" / "model.litertlm")
    assert stages.jobs["narrow"].options == {"rotated": False}
    stages, _ = place.build(stages=Stages(rotated=True), weights="4-logits", cache=512)
    assert stages.jobs["narrow"].options == {"rotated": True}


def test_layers_in_4_bits_are_rounded_before_the_export_and_stored_behind_the_quantizer(
    place: Place,
) -> None:
    stages, result = place.build(weights="4")
    assert stages.ran == [ALL[0], "round", *ALL[1:5], "narrow", *ALL[5:]]
    assert stages.jobs["round"].options == {"ratio": 1.05, "plan": None, "rotate": True}
    assert stages.jobs["export"].inputs["base"] == str(place.work / "round" / "checkpoint")
    assert stages.jobs["export"].options["rotate"] is False, "the rounded checkpoint is"
    assert stages.jobs["narrow"].inputs["rounded"] == str(place.work / "round")
    assert result.output is not None
    plan = place.folder / "plan.json"
    choice = {"layer": 0, "name": "o", "weights": 0, "bits": 4, "kl": 0.5}
    plan.write_text(json.dumps({"products": [choice | {"weights": 7}], "together": 0.1}))
    stages, _ = place.build(weights="4", plan=plan, max_perplexity_ratio=1.2)
    options = {"ratio": None, "plan": {"products": [choice]}, "rotate": True}
    assert stages.jobs["round"].options == options
    plan.write_text(json.dumps({"products": [choice]}))
    stages, _ = place.build(weights="4", plan=plan, max_perplexity_ratio=1.3)
    assert "round" not in stages.ran, "nothing that rounding depends on has changed"


@pytest.mark.parametrize("how", ["beside it", "as the adapter names it", "as given"])
def test_a_lora_folder_is_merged_with_its_base_before_all_other_stages(
    place: Place, monkeypatch: Patch, how: str
) -> None:
    monkeypatch.setattr(build_run, "versions_of", lambda *_: {"peft": "1"})
    tuned = adapter(place.folder / "tuned")
    base = place.checkpoint
    options: dict[str, Any] = {}
    if how != "beside it":
        base = place.checkpoint.rename(place.folder / "base")
        options = {"base": base}
    if how == "as the adapter names it":
        tuned = adapter(place.folder / "other", base_model_name_or_path=str(options.pop("base")))
    ran, _ = place.build(tuned, **options)
    assert ran.ran == ["merge", *ALL]
    assert ran.jobs["merge"].inputs == {"source": str(base), "adapter": str(tuned)}
    merged = str(place.work / "merge" / "checkpoint")
    assert ran.jobs["configure"].inputs["source"] == merged
    assert ran.jobs["export"].inputs["base"] == merged
    (tuned / "adapter_model.safetensors").write_bytes(WEIGHTS + b"other")
    again, _ = place.build(tuned, **options)
    assert again.ran[0] == "merge"
    with pytest.raises(UsageError, match="is a LoRA folder: give merge/checkpoint in the work"):
        evaluate(tuned, place.output, place.prompts)


def test_a_bundle_worse_than_allowed_stays_in_the_work_folder(place: Place) -> None:
    many(place, *PROMPTS)
    text = r"perplexity is 2\.000 \+- 0\.000 times the checkpoint's, more than 1\.05, so nothing was written"
    with pytest.raises(BuildCheckError, match=text) as raised:
        place.build(weights="4")
    assert not place.output.exists()
    assert str(place.work / "compile" / "model.litertlm") in str(raised.value)
    accepted = f"accept it: plan={place.work / 'round' / 'plan.json'} with a larger max_perplexity"
    assert accepted in str(raised.value)
    assert raised.value.exit_code == 1
    for allowed in ({"weights": "4", "max_perplexity_ratio": 2.5}, {}):
        place.build(**allowed)
        assert place.output.exists()
    _, result = place.build(weights="4", evaluate=False)
    (warning,) = result.warnings
    assert warning.startswith(
        "Perplexity was not measured, so it may be more than 1.05 times the checkpoint's"
    )


@pytest.mark.parametrize(
    ("likelihoods", "outcome"),
    [([-4.0], "not measured"), ([-1.0] * 5 + [-8.0] * 3, "too bad"), ([-1.0, -1.1], "within")],
)
def test_a_ruined_bundle_is_not_delivered_because_few_tokens_were_scored(
    place: Place, likelihoods: list[float], outcome: str
) -> None:
    many(place, *PROMPTS)

    def evaluate(job: Job) -> dict[str, Any]:
        expected = [-1.0] * len(likelihoods)
        checkpoint, bundle = job.inputs
        scores = [
            ModelScore.of(checkpoint, expected, expected),
            ModelScore.of(bundle, likelihoods, expected),
        ]
        return asdict(Evaluation(scores, 1))

    stages = Stages()
    stages.evaluate = evaluate  # type: ignore[method-assign]
    if outcome == "too bad":
        with pytest.raises(BuildCheckError, match=r"perplexity is 13\.805 \+- 17\.682 times"):
            place.build(stages=stages, weights="4")
    else:
        _, result = place.build(stages=stages, weights="4")
        told = any(one.startswith("Perplexity was not measured") for one in result.warnings)
        assert told == (outcome == "not measured")


@pytest.mark.parametrize("role", ["source", "base", "prompts", "held_out"])
def test_inputs_in_the_work_folder_are_refused(place: Place, role: str) -> None:
    place.build()
    prompts = place.work / "prompts.jsonl"
    before = prompts.read_text()
    with pytest.raises(UsageError, match=r"is in the work folder .*: choose another place for it"):
        place.build(**{role: prompts})
    assert prompts.read_text() == before


def test_prompts_that_cannot_be_written_are_an_output_error(place: Place) -> None:
    place.build()
    (place.work / "prompts.jsonl").unlink()
    (place.work / "prompts.jsonl").symlink_to("/dev/full")
    with pytest.raises(OutputError, match=r"prompts\.jsonl cannot be written"):
        place.build()


def test_a_target_file_is_what_our_stage_converts_for_and_runs_it_again_when_it_changes(
    place: Place,
) -> None:
    place.build()
    file = place.folder / "mine.toml"
    text = 'name = "mine"\nsummary = "Found by a search."\nform = "unpack"\n'
    file.write_text(text)
    stages, _ = place.build(target=str(file))
    assert (stages.ran, stages.jobs["optimize"].options["target"]["name"]) == (["optimize"], "mine")
    assert place.build(target=str(file))[0].ran == []
    file.write_text(text.replace("unpack", "split"))
    assert place.build(target=str(file))[0].ran == ["optimize"]
    assert place.build(target="generic")[0].jobs["optimize"].options["target"]["name"] == "generic"


def test_the_console_has_stages_warnings_estimates_and_quality(
    place: Place, capsys: Captured
) -> None:
    many(place, *PROMPTS)
    more = ("--set", "cache_length=512", "--force")
    with Stages().in_place():
        done, again = (run(capsys, *command(place, *more)) for _ in range(2))
        values = run(capsys, *command(place, *more, "--json"))
    assert done.code == 0, done.err
    lines = [line for line in done.err.splitlines() if not line.startswith(" ")]
    assert [line.split()[0] for line in lines] == [*ALL, "evaluate", "emulate"]
    assert "5.00 MiB of memory" in lines[1]
    warning, file, times, quality, then = done.out.splitlines()
    assert warning.startswith("Warning: Perplexity is 2.000 +- 0.")
    assert "times the checkpoint's, more than 1.05" in warning
    assert file.startswith(f"{place.output} (")
    assert times.startswith("prefill_4 2.000 -> 1.000 ms, as the compiler estimates")
    assert "2.000 times the checkpoint's on 2 tokens, mean KL 0.2000 in the NPU's emu" in quality
    assert quality.endswith("Held out for evaluation: 3 of 12 prompts, every fifth")
    assert f"{place.work / 'optimize' / 'model.litertlm'} runs on this machine" in then
    assert again.err.count("  reused  ") == len(lines)
    for told in (done, again):
        assert f"\n  {KEPT}\n  {NOTE}\ncompile" in told.err
        assert "\n  put back: metadata\noptimize" in told.err
    assert {stage["made_now"] for stage in values.json["stages"]} == {False}
    assert values.json["settings"]["export"] == {"cache_length": 512, "rotate": True}
    assert values.err == ""


def test_estimates_and_notes_are_printed_before_a_later_stage_fails(
    place: Place, capsys: Captured
) -> None:
    with Stages({"compile": failing(StageFailedError("no licence"))}).in_place():
        told = run(capsys, *command(place))
    assert told.code != 0
    assert (
        told.err.index("1.0 ms as converted") < told.err.index(NOTE) < told.err.index("no licence")
    )


def test_a_path_with_a_space_is_quoted_in_the_next_command(place: Place, capsys: Captured) -> None:
    output = place.folder / "my gemma.litertlm"
    with Stages().in_place():
        told = run(capsys, *command(place, "-o", output))
    assert f"adb push '{output}' /data" in told.out


@pytest.mark.parametrize(
    ("chip", "vendor", "target"),
    [("mt6993", "mediatek", "mediatek"), (" tensor_G5", "google_tensor", "google-tensor")],
)
def test_other_vendors_compilers_leave_the_bundle(
    place: Place, chip: str, vendor: str, target: str
) -> None:
    stages = Stages({"compile": failing(StageFailedError("no SDK"))})
    with pytest.raises(StageFailedError) as caught:
        place.build(stages=stages, soc=chip, sdk=None)
    assert stages.ran == ALL
    assert stages.jobs["configure"].options["vendor"] == vendor
    assert stages.jobs["optimize"].options["target"]["name"] == target
    kept = place.work / "optimize" / "model.litertlm"
    assert str(caught.value).endswith(f"the bundle before compilation is {kept}")
    _, result = place.build(soc=chip, sdk=None)
    assert result.converted == str(kept)
    refused = {
        "mediatek": "holds no libneuron_adapter.so",
        "google_tensor": "not for google_tensor: leave it out",
    }
    with pytest.raises(UsageError, match=refused[vendor]):
        place.build(soc=chip)


def test_litert_s_package_of_qualcomms_libraries_is_found(place: Place, monkeypatch: Patch) -> None:
    package = ModuleType("ai_edge_litert_sdk_qualcomm")
    package.__spec__ = ModuleSpec(package.__name__, None)
    package.path_to_sdk_libs = lambda: str(place.sdk)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, package.__name__, package)
    stages, _ = place.build(sdk=None)
    assert stages.jobs["compile"].libraries == str(place.sdk)
    monkeypatch.setenv(Qualcomm.variables[0], str(place.checkpoint))
    with pytest.raises(CompilerMissingError, match=r"holds no libQnnHtp\.so"):
        place.build(sdk=None)


def test_a_compiled_bundle_is_refused_with_the_one_that_can_be_rewritten(place: Place) -> None:
    place.build()
    known = place.work / "quantize" / "model.litertlm"
    again = partial(place.build, prompts=None, output=place.folder / "again.litertlm")
    for use in (convert, partial(compare, known), again):
        with pytest.raises(
            UsageError, match=f"{place.output} is compiled for an NPU already: give {known}"
        ):
            use(place.output)
    found = inspect(place.output)
    assert (found.compiled, found.made_from) == (True, str(known))
    other = place.output.rename(place.folder / "other.litertlm")
    with pytest.raises(UsageError, match="already: give the bundle that it was made from"):
        convert(other)
    assert inspect(known).compiled is False


def test_a_bundle_that_calibration_broke_is_no_result_then_and_later(place: Place) -> None:
    broken = QUANTIZED.replace("%y: int16[1,1,4,16] q(0.1, 0)", "%y: int16[1,1,4,16] q(3e-14, 0)")
    for ran in (["configure", "export", "check", "calibrate", "quantize"], []):
        stages = Stages(instead={"quantize": lambda job: write(job.model, broken)})
        with pytest.raises(
            BuildCheckError, match=r"is broken, no bundle was written: .*'kv_cache_k_0'"
        ):
            place.build(stages=stages)
        assert stages.ran == ran
        assert not place.output.exists()
    with pytest.raises(BuildCheckError, match="calibrate again"):
        place.build(write(place.folder / "in", broken), prompts=None, work=place.folder / "other")


SECOND_CALL = "%z: int16[1,1,4,16] q(0.1, 0) = CUSTOM 'DISPATCH_OP' (%y)\n  return %z"
TWICE = COMPILED.replace("return %y", SECOND_CALL)
BAD_BUNDLES = {
    "its sections are": bundle([model_part("prefill_decode", to_bytes(parse(COMPILED)))]),
    "its GenericBinaryData has changed": bundle_of(COMPILED).replace(b"words", b"wards"),
    "model has 2 operators in 'prefill_4', 2 not on the NPU, expected one call": bundle_of(QUANTIZED),
    "prefill_decode model's signatures have changed": bundle_of(COMPILED.replace("logits=", "logit=")),
    "model's signatures have changed": bundle_of(COMPILED.replace("%e: int16[1,1,4,8]", "%e: int16[1,1,8,8]")),
    "model has 2 operators in 'prefill_4', 0 not on the NPU": bundle_of(TWICE.replace("(logits=%y", "(logits=%z")),
}  # fmt: skip


@pytest.mark.parametrize("told", BAD_BUNDLES)
def test_a_compiled_bundle_that_is_not_as_it_has_to_be_is_not_delivered(
    place: Place, told: str
) -> None:
    stages = Stages({"compile": lambda job: job.model.write_bytes(BAD_BUNDLES[told])})
    with pytest.raises(BuildCheckError, match=told) as caught:
        place.build(stages=stages)
    assert caught.value.exit_code == 1
    assert not place.output.exists()


def options(**given: Any) -> Change:
    """Other options."""
    return lambda _: dict(given)


def put(name: str, content: str | bytes | None, option: str = "") -> Change:
    """Other content of a file in the place, or none; and the file as an option."""

    def go(place: Place) -> dict[str, Any]:
        path = place.folder / name
        path.unlink(missing_ok=True)
        if content is not None:
            path.write_bytes(content.encode() if isinstance(content, str) else content)
        return {option: path} if option else {}

    return go


def other_values(place: Place) -> dict[str, Any]:
    """Another number among the values of a stage's report, of the same length."""
    report = place.work / "optimize" / "stage.json"
    report.write_text(report.read_text().replace("1.0 ms", "1.1 ms"))
    return {}


CONFIG, WEIGHT_FILE = "gemma/config.json", "gemma/model.safetensors"
CHANGES: dict[str, tuple[Change, list[str]]] = {
    "nothing": (options(), []),
    "chip": (options(soc="SM8650"), ["configure", "optimize", "compile"]),
    "weights": (put(WEIGHT_FILE, (3).to_bytes(8, "little") + b"{} "), ["configure", "export", "check"]),
    "prompts": (put("prompts.jsonl", '"something else"'), ["configure", "check", "calibrate", "quantize"]),
    "length": (options(cache=512), ["configure", "export"]),
    "calibration": (options(settings={"max_calibration_decode_steps": 2}), ["configure", "calibrate"]),
    "compiler": (put("sdk/libQnnHtp.so", "another"), ["optimize", "compile"]),
    "edge-opt": (lambda _: {"stages": Stages(versions={"edge-opt": "2"})}, ALL),
    "result": (put("gemma.work/quantize/model.litertlm", "another"), ["quantize"]),
    "values": (other_values, ["optimize"]),
    "nested values": (put("gemma.work/compile/stage.json", "[" * 100_000), ["compile"]),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_what_was_made_of_something_else_is_made_again_and_nothing_more(
    place: Place, change: str
) -> None:
    """Where a stage made the same bytes as before, those behind it are not run again either."""
    place.build()
    made, again = CHANGES[change]
    stages, result = place.build(**made(place))
    assert stages.ran == again
    assert [stage.name for stage in result.stages if stage.made_now] == again
    assert place.output.read_bytes() == bundle_of(COMPILED)


@pytest.mark.parametrize("stage", ALL)
def test_a_build_that_is_interrupted_goes_on_and_ends_the_same(place: Place, stage: str) -> None:
    def interrupt(job: Job) -> None:
        (Path(job.output) / "half").write_bytes(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        place.build(stages=Stages({stage: interrupt}))
    note = f"completed stages are in {place.work}: run the same command to continue"
    assert caught.value.__notes__ == [note]
    assert not place.output.exists()
    assert not list(place.work.rglob("half"))
    stages, _ = place.build()
    assert stages.ran == ALL[ALL.index(stage) :]
    assert place.output.read_bytes() == bundle_of(COMPILED)
    assert not list(place.work.glob("*.partial"))


def test_a_work_folder_is_one_builds_alone(place: Place) -> None:
    def second(_: Job) -> None:
        place.build()

    with pytest.raises(UsageError, match="another build is running in"):
        place.build(stages=Stages({"export": second}))
    with pytest.raises(UsageError, match="holds other files"):
        place.build(work=place.checkpoint)
    assert (place.checkpoint / "config.json").exists()


def failing(error: Exception) -> Callable[[Job], None]:
    def fail(_: Job) -> None:
        raise error

    return fail


@pytest.mark.parametrize(
    ("stage", "error", "code"),
    [
        *((stage, StageFailedError("it is too hot"), 3) for stage in ALL),
        ("export", UsageError("no"), 2),
        ("export", OutputError("the disk is full"), 5),
        ("export", OSError(errno.ENOSPC, "the disk is full, make room or write elsewhere"), 5),
    ],
)
def test_a_failure_names_the_stage_the_cause_and_the_log_and_leaves_no_output(
    place: Place, capsys: Captured, stage: str, error: Exception, code: int
) -> None:
    with Stages({stage: failing(error)}).in_place():
        shown = run(capsys, *command(place, "--json"))
    log = place.work / f"{stage}.log"
    sentence = f"stage '{stage}': {error.args[-1]}; its log is {log}"
    assert shown.failed_in_one_sentence(code).startswith(sentence)
    assert log.read_text() == f"noise of {stage}\n"
    assert [report["name"] for report in shown.json["stages"]] == ALL[: ALL.index(stage)]
    assert not place.output.exists()


def test_a_disk_that_is_full_after_a_stage_leaves_no_half_result(
    place: Place, monkeypatch: Patch
) -> None:
    def fails(*_: object) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(build_stages, "digest_of", lambda files, _: "digest" if files else fails())
    with pytest.raises(OutputError, match="'configure': the disk is full, make room or write else"):
        place.build()
    assert not list(place.work.glob("*.partial"))


AUXILIARY = model_part("aux", to_bytes(parse(FLOAT)))
BAD: dict[str, Change] = {
    "is not a Hugging Face checkpoint: it has no config.json": put(CONFIG, None),
    "--set: setting 'cache_lenght' does not exist, did you mean 'cache_length": options(settings={"cache_lenght": 3}),
    "setting 'cache_lenth' does not exist": options(settings={"cache_lenth": 3}, sdk="no such folder"),
    '--set cache_length: "long" must have the type of 1280': options(settings={"cache_length": "long"}),
    "--set max_calibration_decode_steps: 0 must be a number above 0": options(
        settings={"max_calibration_decode_steps": 0}),
    "--set calibration_range_scale: NaN must be a number": options(settings={"calibration_range_scale": math.nan}),
    r"--set prefill_lengths: \[\] must be a list": options(settings={"prefill_lengths": []}),
    r"--set prefill_lengths: \[128, null\] must be": options(settings={"prefill_lengths": [128, None]}),
    r"--set prefill_lengths: \[-5\] must be a list": options(settings={"prefill_lengths": [-5]}),
    "a cache of 64 tokens has no room for two prefills of 128": options(cache=64),
    "--set soc_model cannot be set: it follows from --soc": options(settings={"soc_model": "SM8850"}),
    "--set spm_path cannot be set: it follows from the work": options(settings={"spm_path": "x"}),
    "the bundle has its caches already": lambda place: {
        "source": write(place.folder / "f.litertlm", FLOAT), "settings": {SETTING: 512}},
    "has no tokenizer": put("gemma/tokenizer.json", None),
    "has no weights": put(WEIGHT_FILE, None),
    "is truncated, it has 9 bytes: copy": put(WEIGHT_FILE, WEIGHTS[:-1]),
    "is truncated, it has 36 bytes: copy": put(
        WEIGHT_FILE, (28).to_bytes(8, "little") + b'{"w":{"data_offsets":[0,4]}}'),
    "has a damaged header": put(WEIGHT_FILE, WEIGHTS[:-1] + b"]"),
    "has no config.json, but .*gemma has one: give that folder": lambda place: {"source": place.folder},
    "is a file of weights": lambda place: {"source": place.folder / WEIGHT_FILE},
    "if this is a name on Hugging Face, download it first: hf download google/g": options(source="google/g"),
    "is for a LoRA folder, and .*gemma has no adapter_config.json: leave it out": options(base="gemma"),
    "there is no folder google/gemini, .*gemini with its base model: give its folder with base=...": lambda place: {
        "source": adapter(place.folder / "tuned", base_model_name_or_path="google/gemini")},
    "is an adapter of type 'IA3', and only LORA is merged": lambda place: {
        "source": adapter(place.folder / "tuned", peft_type="IA3")},
    "tuned repeats layers of its base model .layer_replication., which is not merged: merge it with": lambda place: {
        "source": adapter(place.folder / "tuned", layer_replication=[[0, 2], [1, 3]])},
    "tuned has no adapter_model.safetensors: copy it": lambda place: {
        "source": adapter(place.folder / "tuned"), **put("tuned/adapter_model.safetensors", None)(place)},
    "adapter_config.json cannot be read: it is not a JSON object": lambda place: {
        "source": adapter(place.folder / "tuned"), **put("tuned/adapter_config.json", "[]")(place)},
    "config.json cannot be read": put(CONFIG, "{"),
    "config.json cannot be read: maximum recursion": put(CONFIG, "[" * 100_000),
    "does not exist: check the path": lambda place: {"source": place.folder / "nowhere"},
    "is neither a Hugging Face folder nor a .litertlm bundle": options(source=DEMO),
    "is compiled for an NPU already": put("in", bundle_of(COMPILED), "source"),
    "is not exported for an NPU": put("in", bundle_of(FLOAT.replace("kv_cache_k_0=", "k=")), "source"),
    "has no prefill_decode model, its models are: aux": put("in", bundle([AUXILIARY, TOKENIZER]), "source"),
    "is empty: give ten": put("prompts.jsonl", "\n\n"),
    "line 2 is not a prompt: write JSON": put("prompts.jsonl", '"one"\ntwo\n'),
    "prompts .* cannot be read: No such file": put("none.jsonl", None, "prompts"),
    "prompts .* cannot be read: it is not UTF-8 text": put("prompts.jsonl", b"\xe9"),
    "needs prompts: give prompts=FILE": options(prompts=None),
    "is quantized already: leave out prompts=...": put("in", bundle_of(QUANTIZED), "source"),
    "is quantized already: leave": put("in", bundle_of(QUANTIZED.replace("int16", "int8")), "source"),
    "has fixed lengths": lambda place: {"source": write(place.folder / "f.litertlm", FLOAT), "cache": 64},
    "needs a checkpoint and a Qualcomm NPU": options(weights="4-logits", soc="mt6993", sdk=None),
    "weights='8' has none to choose": options(plan="plan.json"),
    "max_perplexity_ratio=0 is below the checkpoint's own": options(weights="4", max_perplexity_ratio=0.0),
    "no.json cannot be read: No such file": options(weights="4", plan="no.json"),
    "p.json cannot be read: it is not a JSON object": lambda place: {
        "weights": "4", **put("p.json", "[]", "plan")(place)},
    "plan .*p.json is not valid: Plan: .*products.*; give the plan.json of an earlier": lambda place: {
        "weights": "4", **put("p.json", '{"products": 4}', "plan")(place)},
    "index.json names b.safetensors, which is missing: copy": put(
        "gemma/model.safetensors.index.json",
        '{"weight_map": {"x": "model.safetensors", "y": "b.safetensors"}}'),
    "chip 'SM8751' does not exist, did you mean 'SM8750'?": options(soc="SM8751"),
    "setting 'xyz' does not exist, the nearest of 73 are: [^,]*(, [^,]*){4}$": options(settings={"xyz": 1}),
    "weights 'half' does not exist, there are: 8": options(weights="half"),
    "is quantized already .gptq, as its config.json says": put(
        CONFIG, '{"quantization_config": {"quant_method": "gptq"}}'
    ),
    "the Hexagon compiler needs Qualcomm's QNN libraries": options(sdk=None),
    "holds no libQnnHtp.so": lambda place: {"sdk": place.checkpoint},
    r"target file no\.toml cannot be read": options(target="no.toml"),
    "target 'mediatek' is not for the NPU of SM8750: leave": options(target="mediatek"),
    "exists: pass overwrite=True": lambda place: {**put("gemma.litertlm", "")(place), "overwrite": False},
    "is the input itself": put("gemma.litertlm", bundle_of(FLOAT), "source"),
    "[.] must be NAME.litertlm": options(output="."),
    "/ must be NAME.litertlm": options(output="/"),
    "is also the output": lambda place: {"work": place.output},
    "must be NAME.litertlm": lambda place: {"output": place.folder / "gemma.bin"},
    "a.litertlm is in the work folder .*: choose another place for it, or give another work=...": lambda place: {
        "output": place.folder / "w" / "a.litertlm", "work": place.folder / "w"},
    "work folder .* cannot be used: No such file or directory; give another work=...": lambda place: {
        "work": place.folder / "no" / "folder"},
    "held_out=... and evaluate=False exclude": options(held_out="nowhere.jsonl", evaluate=False),
    "needs a checkpoint to compare with, and": lambda place: {
        "source": write(place.folder / "f.litertlm", FLOAT), "held_out": "nowhere.jsonl"},
}  # fmt: skip


@pytest.mark.parametrize("sentence", BAD)
def test_bad_input_is_a_sentence_before_anything_runs(place: Place, sentence: str) -> None:
    stages = Stages()
    with pytest.raises(
        (UsageError, ModelFormatError, OutputError), match=sentence.replace("?", r"\?")
    ):
        place.build(stages=stages, **BAD[sentence](place))
    assert stages.ran == []


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("generation_config.json", '{"eos_token_id": [1, 106]}'),
        ("config.json", '{"eos_token_id": 0}'),
        ("tokenizer_config.json", '{"chat_template": "{{ messages }}"}'),
        ("chat_template.jinja", "{{ messages }}"),
    ],
)
def test_the_token_that_ends_a_text_may_stand_in_any_of_these_files(
    place: Place, file: str, text: str
) -> None:
    (place.checkpoint / "generation_config.json").write_text("{}")
    (place.checkpoint / file).write_text(text)
    place.build()


def calibrated_on(stages: Stages) -> list[str]:
    text = Path(stages.jobs["calibrate"].inputs["prompts"]).read_text()
    return [json.loads(line) for line in text.splitlines()]


def test_a_compiler_that_fails_is_reported_before_the_evaluation_ends(place: Place) -> None:
    many(place, *PROMPTS)
    instead = {stage: failing(StageFailedError(f"no {stage}")) for stage in ("compile", "evaluate")}
    with pytest.raises(StageFailedError, match="no compile"):
        place.build(stages=Stages(instead))


def test_every_fifth_prompt_is_held_out_of_the_calibration_to_evaluate_with(place: Place) -> None:
    many(place, *PROMPTS)
    stages, result = place.build()
    assert calibrated_on(stages) == [text for at, text in enumerate(PROMPTS) if at % 5]
    parts = [("prompt number", f" {at}") for at in (0, 10, 5)]
    assert sorted(stages.jobs["evaluate"].options["parts"])[:3] == parts
    assert stages.checked
    found = result.evaluation
    assert [model.source for model in found.models] == ["checkpoint", "converted", "converted"]
    assert [model.perplexity for model in found.models[:2]] == pytest.approx([2, 4])
    assert [warning[:26] for warning in result.warnings] == ["Perplexity is 2.000 +- 0.0"]
    assert found.note.endswith("3 of 12 prompts, every fifth")
    _, again = place.build()
    ended = [(stage.name, stage.made_now) for stage in again.stages][-3:]
    assert ended == [("compile", False), ("evaluate", False), ("emulate", False)]


def test_the_emulator_scores_a_few_tokens_where_it_is_here_and_its_failure_is_a_note(
    place: Place,
) -> None:
    many(place, *PROMPTS)
    stages, result = place.build()
    options = stages.jobs["emulate"].options
    assert (options["texts"], options["tokens"]) == (["prompt number 0", "prompt number 10"], 2)
    assert (options["chip"], stages.jobs["emulate"].libraries) == ("SM8750", str(place.sdk))
    assert result.evaluation.models[-1].on_npu
    fails = Stages({"emulate": failing(UsageError("no room"))})
    _, result = place.build(stages=fails, npu_tokens=1)
    assert len(fails.jobs["emulate"].options["texts"]) == 1
    assert (
        "Not evaluated in the NPU's emulator: stage 'emulate': no room;" in result.evaluation.note
    )
    assert (len(result.evaluation.models), result.output) == (2, str(place.output))
    assert "emulate" not in [stage.name for stage in place.build(npu_tokens=0)[1].stages]
    for kl, warned in ((0.19, False), (0.21, True), (math.nan, True)):
        _, result = place.build(stages=Stages(npu_kl=kl), work=place.folder / f"{kl}")
        text = f"mean KL divergence {kl:.2f} nats, not 0.10, on 8 tokens"
        assert any(text in one for one in result.warnings) is warned


def test_held_out_text_is_scored_again_when_it_changes_and_none_calibrates(place: Place) -> None:
    many(place, *PROMPTS)
    text = many(place, "some other text", name="held-out.jsonl")
    stages, _ = place.build(held_out=text)
    assert stages.jobs["evaluate"].options["parts"][0] == ("some other", " text")
    many(place, "another text", name="held-out.jsonl")
    assert "evaluate" in place.build(held_out=text)[0].ran
    many(place, "something else", f"{PROMPTS[3]} ", name="held-out.jsonl")
    with pytest.raises(UsageError, match="prompt 2 is also a calibration prompt"):
        place.build(held_out=text)


def test_the_note_tells_how_much_of_the_held_out_text_was_calibrated_with(place: Place) -> None:
    words = [f"word {number}" for number in range(20)]
    many(place, " ".join(words), *PROMPTS[1:])
    text = many(place, " ".join(words[2:] + words[:6]), "some other text", name="held-out.jsonl")
    _, result = place.build(held_out=text)
    assert "; 1 of 2 texts mostly repeat the prompts that were calibrated with" in (
        result.evaluation.note
    )
    many(place, " ".join(words[15:] + words[:5]), "some other text", name="held-out.jsonl")
    _, result = place.build(held_out=text)
    assert "repeat" not in result.evaluation.note, "less than half of it"


@pytest.mark.parametrize(
    ("prompts", "given", "note"),
    [
        (PROMPTS, {"held_out": "held-out.jsonl"}, "Evaluated on "),
        (PROMPTS, {"source": "float.litertlm"}, "Not evaluated: there is no checkpoint"),
        ([*PROMPTS[:9], f"{PROMPTS[0]} "], {}, "Not evaluated: 9 different prompts given, but at"),
        ([*"abcdefghijkl"], {}, "Not evaluated: every fifth prompt is too short"),
        (PROMPTS, {"evaluate": False}, None),
    ],
)
def test_all_prompts_calibrate_if_none_is_held(
    place: Place, prompts: list[str], given: dict[str, Any], note: str | None
) -> None:
    many(place, *prompts)
    many(place, "some other text", name="held-out.jsonl")
    write(place.folder / "float.litertlm", FLOAT)
    paths = {
        name: place.folder / value if isinstance(value, str) else value
        for name, value in given.items()
    }
    stages, result = place.build(**paths)
    assert calibrated_on(stages) == prompts
    assert stages.checked == ("evaluate" in stages.ran) == ("held_out" in given)
    assert note is None if result.evaluation is None else result.evaluation.note.startswith(note)


def test_sections_that_a_stage_loses_are_put_back_where_they_were(tmp_path: Path) -> None:
    vision = model_part("vision_encoder", to_bytes(parse(FLOAT)))
    before = write(tmp_path / "before", FLOAT, (5, {}, b"meta"), vision)
    after = tmp_path / "after"
    after.write_bytes(bundle([model_part("prefill_decode", to_bytes(parse(QUANTIZED))), TOKENIZER]))
    told = keep_sections(before, after)
    assert told == "Restored sections that litert-torch dropped: LlmMetadataProto, vision_encoder"
    assert after.read_bytes()[BLOCK:] == bundle_of(QUANTIZED, (5, {}, b"meta"), vision)[BLOCK:]
    assert keep_sections(before, after) == ""
    other = (GENERIC, {"name": "words"}, b"more")
    write(before, FLOAT, other)
    after.write_bytes(bundle([model_part("prefill_decode", to_bytes(parse(QUANTIZED))), TOKENIZER]))
    assert keep_sections(before, after).endswith(": GenericBinaryData")
    assert after.read_bytes()[BLOCK:] == bundle_of(QUANTIZED, other)[BLOCK:]


@pytest.mark.parametrize(
    ("made", "told"),
    [
        (QUANTIZED, []),
        (COMPILED, []),
        (QUANTIZED.replace("0.1", "0.2"), ["its aux model differs and is not compiled"]),
        (COMPILED.replace("logits=", "logit="), ["its aux model's signatures have changed"]),
    ],
)
def test_other_models_are_as_they_were_or_compiled(
    tmp_path: Path, made: str, told: list[str]
) -> None:
    before, after = (model_part("aux", to_bytes(parse(text))) for text in (QUANTIZED, made))
    assert (
        faults(write(tmp_path / "a", QUANTIZED, before), write(tmp_path / "b", COMPILED, after))
        == told
    )
