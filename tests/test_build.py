"""From a checkpoint to a bundle for the NPU: what is done again, what is kept, and what is said when it fails.

The stages are small functions here; test_build_real.py runs the real ones.
"""

import errno
import json
import math
import shlex
import sys
from collections.abc import Callable
from functools import partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from bundles import BLOCK, bundle, model_part
from cli_runs import DEMO, run
from pretend_stages import COMPILED, FLOAT, QUANTIZED, TOKENIZER, WEIGHTS, Place, Stages, bundle_of, write
from text_parser import parse

from edge_opt.base.errors import EdgeOptError, ModelFormatError, OutputError, UsageError
from edge_opt.build import BuildCheckError, Job, StageFailedError, building
from edge_opt.build.phone import next_steps
from edge_opt.build.rotation import ROTATED
from edge_opt.build.sections import faults, keep_sections
from edge_opt.comparison.compare import compare
from edge_opt.conversion import convert
from edge_opt.inspection import inspect
from edge_opt.ir import to_bytes
from edge_opt.npu import CompilerMissingError
from edge_opt.npu.sdk import SDK_VARIABLES
from edge_opt.targets import load_target

ALL = ["configure", "export", "calibrate", "quantize", "optimize", "compile"]


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


PROMPTS = [f"prompt number {number}" for number in range(12)]


def many(place: Place, *texts: str, name: str = "prompts.jsonl") -> Path:
    path = place.folder / name
    path.write_text("".join(json.dumps(text) + "\n" for text in texts))
    return path


def command(place: Place, *more: object) -> list[object]:
    words = ["build", place.checkpoint, "-o", place.output, "--soc", "SM8750", "--sdk", place.sdk]
    return [*words, "--prompts", place.prompts, *more]


# --- what runs ---


def test_a_checkpoint_runs_through_every_stage(place: Place) -> None:
    stages, result = place.build(cache=4096, prefill=[128, 512], settings={"overwrite": False})
    assert stages.ran == ALL
    assert place.output.read_bytes() == bundle_of(COMPILED)
    assert result.output == str(place.output)
    assert result.stages[3].notes == ["put back: metadata"]
    assert [(stage.name, stage.made_now) for stage in result.stages] == [(name, True) for name in ALL]
    assert result.stages[-1].peak_bytes == 5 << 20
    settings = {"cache_length": 4096, "prefill_lengths": [128, 512], "overwrite": False}
    assert stages.jobs["configure"].options["settings"] == settings
    assert stages.jobs["export"].config == {"soc_model": "SM8750", **settings}
    assert stages.jobs["optimize"].options["sdk"] == str(place.sdk)
    assert stages.jobs["optimize"].options["target"] == load_target("qualcomm-htp").to_dict()
    assert stages.jobs["compile"].options == {"compile_configs": {"prefill_decode": {"compile": True}}}
    assert stages.jobs["compile"].libraries == str(place.sdk)


def test_a_float_bundle_starts_at_calibration_and_a_quantized_one_at_the_rewriting(place: Place) -> None:
    exported = write(place.folder / "float.litertlm", FLOAT)
    assert place.build(exported)[0].ran == ["configure", "calibrate", "quantize", "optimize", "compile"]
    quantized = write(place.folder / "quantized.litertlm", QUANTIZED)
    stages, _ = place.build(quantized, prompts=None, work=place.folder / "other.work")
    assert stages.ran == ["configure", "optimize", "compile"]
    assert stages.jobs["configure"].options["cache_shape"] == (1, 1, 8, 16)


def test_logits_in_4_bits_are_a_stage_of_their_own_behind_the_quantizer(place: Place) -> None:
    config = place.checkpoint / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "vocab_size": 262144}))
    stages, _ = place.build(weights="4-logits")
    assert stages.ran == [*ALL[:4], "narrow", *ALL[4:]]
    assert stages.jobs["narrow"].inputs["checkpoint"] == str(place.checkpoint)
    assert stages.jobs["optimize"].inputs["model"] == str(place.work / "narrow" / "model.litertlm")
    rotated = place.work / "export" / ROTATED
    instead = Stages(instead={"export": lambda job: Path(job.output, ROTATED).mkdir()})
    stages, _ = place.build(stages=instead, weights="4-logits", cache=64)
    assert stages.jobs["narrow"].inputs["checkpoint"] == str(rotated)
    config.write_text('{"text_config": {"vocab_size": 16384}}')
    with pytest.raises(UsageError, match="16384 tokens, of which 16384 stay at 8 bits"):
        place.build(weights="4-logits")
    quantized = write(place.folder / "quantized.litertlm", QUANTIZED)
    with pytest.raises(UsageError, match="needs a checkpoint and a Qualcomm NPU"):
        place.build(quantized, prompts=None, weights="4-logits")


TARGET = """name = "mine"
summary = "Found by a search."
form = "unpack"
"""


def test_a_target_file_is_what_our_stage_converts_for_and_runs_it_again_when_it_changes(place: Place) -> None:
    place.build()
    file = place.folder / "mine.toml"
    file.write_text(TARGET)
    stages, _ = place.build(target=str(file))
    assert (stages.ran, stages.jobs["optimize"].options["target"]["name"]) == (["optimize"], "mine")
    assert place.build(target=str(file))[0].ran == []
    file.write_text(TARGET.replace("unpack", "split"))
    assert place.build(target=str(file))[0].ran == ["optimize"]
    assert place.build(target="generic")[0].jobs["optimize"].options["target"]["name"] == "generic"


def test_the_console_has_a_line_for_each_stage_and_at_the_end_warnings_estimates_and_quality(
    place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    many(place, *PROMPTS)
    monkeypatch.setattr(building, "Processes", Stages)
    done = run(capsys, *command(place, "--set", "cache_length=64"))
    assert done.code == 0, done.err
    lines = [line for line in done.err.splitlines() if not line.startswith(" ")]
    assert [line.split()[0] for line in lines] == [*ALL[:-1], "evaluate", "emulate", "compile"]
    assert "5.00 MiB of memory" in lines[1]
    rows = [line.split() for line in done.out.splitlines()]
    assert len(rows) <= 15
    assert done.out.startswith(
        "Warning: Perplexity is 2.00 times the checkpoint's, more than 1.05: check answers"
    )
    assert "prefill_4: converted, 2.0 ms as exported, 1.0 ms as converted" in done.out
    assert ["checkpoint", "2", "2.00", "1.000", "-", "-"] in rows
    assert ["converted", "2", "4.00", "2.000", "-", "-"] in rows
    emulated = "converted, in the NPU's emulator 8 2.44 1.221 100.0 % 0.2000"
    assert emulated.split() in rows
    assert "Held out of the calibration, to evaluate with: 3 of 12 prompts, every fifth" in done.out
    assert f"Next steps, with commands for the phone: {place.work / 'NEXT.md'}" in done.out
    again = run(capsys, *command(place, "--set", "cache_length=64", "--force"))
    for told in (done, again):
        assert "\n  put back: metadata\noptimize" in told.err
        assert told.out.startswith("Warning: Perplexity is 2.00 times the checkpoint's")
    values = run(capsys, *command(place, "--set", "cache_length=64", "--force", "--json"))
    assert {stage["made_now"] for stage in values.json["stages"]} == {False}
    assert values.json["stages"][3]["notes"] == ["put back: metadata"]
    assert values.json["settings"]["export"] == {"cache_length": 64}
    assert values.err == ""


# --- what to do next ---


def test_the_end_names_the_bundle_to_try_and_commands_to_paste_with_the_files_for_this_very_chip(
    place: Place,
) -> None:
    output = place.folder / "my gemma.litertlm"
    _, result = place.build(soc="SM8845", output=output)
    assert result.next is not None
    assert result.next.bundle == str(output.with_suffix(".work") / "optimize" / "model.litertlm")
    assert f"Engine({result.next.bundle!r}, backend=npu)" in result.next.python
    _, push, run = map(shlex.split, result.next.commands)
    names = ["libQnnHtp.so", "libQnnSystem.so", "libQnnHtpV81Stub.so", "libQnnHtpV81Skel.so"]
    files = [output.name, "litert_lm_main", "libLiteRtDispatch_Qualcomm.so", *names]
    assert [Path(file).name for file in push[2:-1]] == files
    assert push[-2] == "$QNN_SDK_ROOT/lib/hexagon-v81/unsigned/libQnnHtpV81Skel.so"
    assert "--model_path=my gemma.litertlm" in shlex.split(run[2])
    page = Path(str(result.next_file)).read_text()
    assert all(text in page for text in (*result.next.commands, result.next.python))
    compiler = place.folder / "lib" / "x86_64-linux-clang"
    (compiler.parent / "aarch64-android").mkdir(parents=True)
    whole = next_steps("qualcomm", "SM8750", compiler, "model.litertlm", "out.litertlm")
    assert str(place.folder / "lib" / "aarch64-android" / "libQnnHtpV79Stub.so") in whole.commands[1].split()


@pytest.mark.parametrize(
    ("chip", "vendor", "target"),
    [("mt6993", "mediatek", "mediatek"), (" tensor_G5", "google_tensor", "google-tensor")],
)
def test_what_other_vendors_compilers_say_leaves_the_converted_bundle(
    place: Place, chip: str, vendor: str, target: str
) -> None:
    stages = Stages({"compile": failing(StageFailedError("no SDK"))})
    with pytest.raises(StageFailedError) as caught:
        place.build(stages=stages, soc=chip, sdk=None)
    assert stages.ran == ALL
    assert stages.jobs["configure"].options["vendor"] == vendor
    assert stages.jobs["optimize"].options["target"]["name"] == target
    kept = place.work / "optimize" / "model.litertlm"
    assert str(caught.value).endswith(f"the bundle before the compiler is {kept}")
    told = caught.value.result.to_dict()
    assert (told["converted"], told["next"]["bundle"], told["next"]["commands"]) == (str(kept), str(kept), [])
    assert "no commands for this vendor's phones" in Path(told["next_file"]).read_text()
    with pytest.raises(UsageError, match=rf"litert-torch finds those of {vendor} by itself"):
        place.build(soc=chip)


def test_litert_s_own_package_of_qualcomms_libraries_is_found(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = ModuleType("ai_edge_litert_sdk_qualcomm")
    package.__spec__ = ModuleSpec(package.__name__, None)
    package.path_to_sdk_libs = lambda: str(place.sdk)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, package.__name__, package)
    stages, _ = place.build(sdk=None)
    assert stages.jobs["compile"].libraries == str(place.sdk)
    monkeypatch.setenv(SDK_VARIABLES[0], str(place.checkpoint))
    with pytest.raises(CompilerMissingError, match=r"holds no libQnnHtp\.so"):
        place.build(sdk=None)


# --- what is not delivered ---


def test_a_compiled_bundle_is_refused_with_the_one_that_can_be_rewritten(place: Place) -> None:
    place.build()
    known = place.work / "quantize" / "model.litertlm"
    again = partial(place.build, prompts=None, output=place.folder / "again.litertlm")
    for use in (convert, partial(compare, known), again):
        with pytest.raises(UsageError, match=f"{place.output} is compiled for an NPU already: give {known}"):
            use(place.output)
    found = inspect(place.output)
    assert (found.compiled, found.made_from) == (True, str(known))
    other = place.output.rename(place.folder / "other.litertlm")
    with pytest.raises(UsageError, match="already: give the bundle that it was made from"):
        convert(other)
    assert inspect(known).compiled is False


def test_a_bundle_that_calibration_broke_is_no_result_then_and_later(place: Place) -> None:
    def spoil(job: Job) -> None:
        wrong = "%y: int16[1,1,4,16] q(3e-14, 0)"
        write(job.model, QUANTIZED.replace("%y: int16[1,1,4,16] q(0.1, 0)", wrong))

    for ran in (["configure", "export", "calibrate", "quantize"], []):
        stages = Stages(instead={"quantize": spoil})
        with pytest.raises(BuildCheckError, match=r"is broken, so nothing is delivered: .*'kv_cache_k_0'"):
            place.build(stages=stages)
        assert stages.ran == ran
        assert not place.output.exists()
    spoil(Job("", str(place.folder)))
    with pytest.raises(BuildCheckError, match="calibrate again"):
        place.build(place.folder / "model.litertlm", prompts=None, work=place.folder / "other")


BAD_BUNDLES = {
    "its sections are": bundle([model_part("prefill_decode", to_bytes(parse(COMPILED)))]),
    "its data has changed": bundle_of(COMPILED).replace(b"words", b"wards"),
    "keeps 1 operators of 'prefill_4' off the NPU, BATCH_MATMUL": bundle_of(QUANTIZED),
    "prefill_decode model's signatures have changed": bundle_of(COMPILED.replace("logits=", "logit=")),
    "model's signatures have changed": bundle_of(COMPILED.replace("%e: int16[1,1,4,8]", "%e: int16[1,1,8,8]")),
    "calls the NPU 2 times in 'prefill_4'": bundle_of(
        COMPILED.replace(
            "  return",
            "  %z: int16[1,1,4,16] q(0.1, 0) = CUSTOM 'DISPATCH_OP' (%y)\n  return",
        ).replace("(logits=%y)", "(logits=%z)").replace("return %y", "return %z")
    ),
}  # fmt: skip


@pytest.mark.parametrize("told", BAD_BUNDLES)
def test_a_compiled_bundle_that_is_not_as_it_has_to_be_is_not_delivered(place: Place, told: str) -> None:
    def spoil(job: Job) -> None:
        job.model.write_bytes(BAD_BUNDLES[told])

    with pytest.raises(BuildCheckError, match=told) as caught:
        place.build(stages=Stages({"compile": spoil}))
    assert caught.value.exit_code == 1
    assert not place.output.exists()


# --- what is kept ---


Change = Callable[[Place], dict[str, Any]]


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


CONFIG, WEIGHT_FILE = "gemma/config.json", "gemma/model.safetensors"


def stamped(job: Job) -> None:
    """Other bytes of a bundle's header, as a time is."""
    content = bytearray(job.model.read_bytes())
    content[12] += 1
    job.model.write_bytes(content)


CHANGES: dict[str, tuple[Change, list[str]]] = {
    "nothing": (options(), []),
    "chip": (options(soc="SM8650"), ["configure", "optimize", "compile"]),
    "weights": (put(WEIGHT_FILE, WEIGHTS + b"more"), ["export"]),
    "time": (
        lambda place: {"stages": Stages({"export": stamped}), **put(WEIGHT_FILE, WEIGHTS + b"!")(place)},
        ["export"],
    ),
    "prompts": (put("prompts.jsonl", '"something else"'), ["configure", "calibrate", "quantize"]),
    "length": (options(cache=64), ["configure", "export"]),
    "calibration": (options(settings={"max_calibration_decode_steps": 2}), ["configure", "calibrate"]),
    "compiler": (put("sdk/libQnnHtp.so", "another"), ["optimize", "compile"]),
    "edge-opt": (
        lambda _: {"stages": Stages(installed={"edge-opt": "2"})},
        ["configure", "export", "calibrate", "optimize"],
    ),
    "result": (put("gemma.work/quantize/model.litertlm", "another"), ["quantize"]),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_what_was_made_of_something_else_is_made_again_and_nothing_more(place: Place, change: str) -> None:
    """Where a stage made the same bytes as before, those behind it are not run again either."""
    place.build()
    made, again = CHANGES[change]
    stages, result = place.build(**made(place))
    assert stages.ran == again
    assert [stage.name for stage in result.stages if stage.made_now] == again
    assert place.output.read_bytes() == bundle_of(COMPILED)


def test_the_steps_of_a_stage_that_tells_none_are_the_seconds_that_it_took_before(place: Place) -> None:
    place.build()
    told = place.work / "export" / "stage.json"
    told.write_text(told.read_text().replace('"seconds": ', '"seconds": 50'))
    steps: list[tuple[str, int, int]] = []
    place.build(progress=lambda *step: steps.append(step), cache=64)
    assert ("export", 0, 500) in [(name, done, total // 10 * 10) for name, done, total in steps]
    assert ("export", 1, 1) in steps


@pytest.mark.parametrize("stage", ALL)
def test_a_build_that_is_interrupted_goes_on_and_ends_the_same(place: Place, stage: str) -> None:
    def interrupt(job: Job) -> None:
        (Path(job.output) / "half").write_bytes(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        place.build(stages=Stages({stage: interrupt}))
    assert caught.value.__notes__ == [f"completed stages are in {place.work}: run it again to continue"]
    assert not place.output.exists()
    stages, _ = place.build()
    assert stages.ran == ALL[ALL.index(stage) :]
    assert place.output.read_bytes() == bundle_of(COMPILED)
    assert not (place.work / "scratch").exists()
    assert not list(place.work.glob("*.partial"))


def test_a_work_folder_is_one_builds_alone(place: Place) -> None:
    def second(_: Job) -> None:
        place.build()

    with pytest.raises(UsageError, match="another build is running in"):
        place.build(stages=Stages({"export": second}))
    with pytest.raises(UsageError, match="holds other files"):
        place.build(work=place.checkpoint)
    assert (place.checkpoint / "config.json").exists()


# --- what fails ---


def failing(error: Exception) -> Callable[[Job], None]:
    def fail(_: Job) -> None:
        raise error

    return fail


@pytest.mark.parametrize("stage", ALL)
def test_a_failure_names_the_stage_the_cause_and_the_log_and_leaves_no_output(
    place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], stage: str
) -> None:
    fails = Stages({stage: failing(StageFailedError("it is too hot"))})
    monkeypatch.setattr(building, "Processes", lambda: fails)
    shown = run(capsys, *command(place, "--json"))
    log = place.work / f"{stage}.log"
    sentence = f"edge-opt: error: stage '{stage}': it is too hot; its log is {log}"
    assert shown.failed_in_one_sentence(3).startswith(sentence.removeprefix("edge-opt: error: "))
    assert log.read_text() == f"noise of {stage}\n"
    assert [report["name"] for report in shown.json["stages"]] == ALL[: ALL.index(stage)]
    assert shown.json["error"]["type"] == "StageFailedError"
    assert not place.output.exists()


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UsageError("no"), 2),
        (OutputError("the disk is full"), 5),
        (OSError(errno.ENOSPC, "No space left"), 5),
    ],
)
def test_a_failure_keeps_the_exit_code_of_its_kind(place: Place, error: Exception, code: int) -> None:
    with pytest.raises(EdgeOptError, match="stage 'export': ") as caught:
        place.build(stages=Stages({"export": failing(error)}))
    assert caught.value.exit_code == code


# --- bad input, before anything runs ---


AUXILIARY = model_part("aux", to_bytes(parse(FLOAT)))
BAD: dict[str, Change] = {
    "is not a Hugging Face checkpoint: it has no config.json": put(CONFIG, None),
    "has no tokenizer": put("gemma/tokenizer.json", None),
    "has no weights": put(WEIGHT_FILE, None),
    "config.json cannot be read": put(CONFIG, "{"),
    "does not exist: give a Hugging Face folder": lambda place: {"source": place.folder / "nowhere"},
    "is neither a Hugging Face folder nor a .litertlm bundle": options(source=DEMO),
    "is compiled for an NPU already": put("in", bundle_of(COMPILED), "source"),
    "is not exported for an NPU": put("in", bundle_of(FLOAT.replace("kv_cache_k_0=", "k=")), "source"),
    "has no prefill_decode model, its models are: aux": put("in", bundle([AUXILIARY, TOKENIZER]), "source"),
    "is empty: give ten": put("prompts.jsonl", "\n\n"),
    "line 2 is not JSON": put("prompts.jsonl", '"one"\ntwo\n'),
    "line 1 is not a prompt": put("prompts.jsonl", '{"question": "?"}\n'),
    "line 1 is not a prompt: write a string": put("prompts.jsonl", '{"prompt": ["?"]}\n'),
    "or messages with one from the user": put("prompts.jsonl", '{"messages": ["?"]}\n'),
    "line 4 is not a prompt": put(
        "prompts.jsonl", '"one"\n\n{"text": "two"}\n{"messages": [{"role": "system", "content": "three"}]}\n'
    ),
    "line 1 is not JSON": put("prompts.jsonl", "[" * 100_000),
    "line 1 is not JSON text": put("prompts.jsonl", '"half an emoji: \\ud83d"\n'),
    "prompts .* cannot be read: No such file": put("none.jsonl", None, "prompts"),
    "prompts .* cannot be read: it is not UTF-8 text": put("prompts.jsonl", b"\xe9"),
    "is calibrated on text: give prompts=FILE": options(prompts=None),
    "is quantized already: leave prompts=... out": put("in", bundle_of(QUANTIZED), "source"),
    "has its lengths already": lambda place: {"source": write(place.folder / "f.litertlm", FLOAT), "cache": 64},
    "chip 'SM8751' does not exist, did you mean 'SM8750'?": options(soc="SM8751"),
    "chip 'nothing' does not exist, there are: ": options(soc="nothing"),
    "weights '4' does not exist, there are: 8": options(weights="4"),
    "is quantized already .gptq, as its config.json says": put(
        CONFIG, '{"quantization_config": {"quant_method": "gptq"}}'
    ),
    "the Hexagon compiler needs Qualcomm's QNN libraries": options(sdk=None),
    "holds no libQnnHtp.so": lambda place: {"sdk": place.checkpoint},
    r"target file no\.toml cannot be read": options(target="no.toml"),
    "target 'mediatek' is not for the NPU of SM8750: leave": options(target="mediatek"),
    "target 'ethos-u85' is not for the NPU": options(target="ethos-u85"),
    "exists: pass overwrite=True": lambda place: {**put("gemma.litertlm", "")(place), "overwrite": False},
    "is the input itself": put("gemma.litertlm", bundle_of(FLOAT), "source"),
    "is also the output": lambda place: {"work": place.output},
    "must end in .litertlm": lambda place: {"output": place.folder / "gemma.bin"},
    "work folder .* cannot be used: No such file": lambda place: {"work": place.folder / "no" / "folder"},
    "held_out=... is text to evaluate on": options(held_out="nowhere.jsonl", evaluate=False),
}  # fmt: skip


@pytest.mark.parametrize("sentence", BAD)
def test_bad_input_is_a_sentence_before_anything_runs(place: Place, sentence: str) -> None:
    stages = Stages()
    with pytest.raises((UsageError, ModelFormatError, OutputError), match=sentence.replace("?", r"\?")):
        place.build(stages=stages, **BAD[sentence](place))
    assert stages.ran == []


# --- evaluation ---


def calibrated_on(stages: Stages) -> list[str]:
    text = Path(stages.jobs["calibrate"].inputs["prompts"]).read_text()
    return [json.loads(line) for line in text.splitlines()]


def test_every_fifth_prompt_is_held_out_of_the_calibration_to_evaluate_with(place: Place) -> None:
    many(place, *PROMPTS)
    stages, result = place.build()
    assert calibrated_on(stages) == [text for at, text in enumerate(PROMPTS) if at % 5]
    parts = [("prompt number", " 0"), ("prompt number", " 5"), ("prompt number", " 10")]
    assert sorted(stages.jobs["evaluate"].options["parts"]) == sorted(parts)
    assert stages.checked
    found = result.evaluation
    assert found is not None
    assert [model["source"] for model in found["models"]] == ["checkpoint", "converted", "converted"]
    assert [model["perplexity"] for model in found["models"][:2]] == pytest.approx([2, 4])
    assert [warning[:26] for warning in result.warnings] == ["Perplexity is 2.00 times t"]
    assert found["note"].endswith("3 of 12 prompts, every fifth")
    _, again = place.build()
    ended = [(stage.name, stage.made_now) for stage in again.stages][-3:]
    assert ended == [("evaluate", False), ("emulate", False), ("compile", False)]


def test_the_emulator_scores_a_few_tokens_where_it_is_here_and_its_failure_is_a_note(place: Place) -> None:
    many(place, *PROMPTS)
    stages, result = place.build()
    options = stages.jobs["emulate"].options
    assert (options["texts"], options["tokens"]) == (["prompt number 0", "prompt number 10"], 2)
    assert options["compiler"] == {"chip": "SM8750", "flags": [], "sdk": str(place.sdk)}
    assert result.evaluation["models"][-1]["on_npu"]
    fails = Stages({"emulate": failing(UsageError("no room"))})
    _, result = place.build(stages=fails, npu_tokens=1)
    assert len(fails.jobs["emulate"].options["texts"]) == 1
    assert (
        "Not evaluated in the NPU's emulator: stage 'emulate': no room; its log is"
        in result.evaluation["note"]
    )
    assert (len(result.evaluation["models"]), result.output) == (2, str(place.output))
    assert "emulate" not in [stage.name for stage in place.build(npu_tokens=0)[1].stages]


@pytest.mark.parametrize(("kl", "warned"), [(0.4, False), (0.6, True), (math.nan, True)])
def test_answers_far_from_the_checkpoints_in_the_emulator_are_a_warning(
    place: Place, kl: float, warned: bool
) -> None:
    many(place, *PROMPTS)
    _, result = place.build(stages=Stages(npu_kl=kl))
    assert any(f"mean KL divergence {kl:.2f} nats" in one for one in result.warnings) is warned


def test_held_out_text_of_a_file_leaves_all_prompts_to_calibration(place: Place) -> None:
    many(place, *PROMPTS)
    text = many(place, "some other text", name="held-out.jsonl")
    stages, _ = place.build(held_out=text)
    assert calibrated_on(stages) == PROMPTS
    assert stages.jobs["evaluate"].options["parts"] == [("some other", " text")]
    many(place, "another text", name="held-out.jsonl")
    _, other = place.build(held_out=text)
    assert ("evaluate", True) in [(stage.name, stage.made_now) for stage in other.stages]
    many(place, "something else", PROMPTS[3], name="held-out.jsonl")
    with pytest.raises(UsageError, match="prompt 2 is among those to calibrate with"):
        place.build(held_out=text)


def test_a_build_from_a_bundle_is_not_evaluated_and_all_prompts_calibrate(place: Place) -> None:
    many(place, *PROMPTS)
    exported = write(place.folder / "float.litertlm", FLOAT)
    stages, result = place.build(exported)
    assert (calibrated_on(stages), stages.checked) == (PROMPTS, False)
    assert result.evaluation["note"].startswith("Not evaluated: there is no checkpoint")
    with pytest.raises(UsageError, match=r"needs a checkpoint to compare with, and .* is a bundle"):
        place.build(exported, held_out=place.prompts)


def test_few_prompts_are_not_split_and_without_evaluation_none_is_held_out(place: Place) -> None:
    many(place, *PROMPTS[:9])
    stages, result = place.build()
    assert (calibrated_on(stages), stages.checked) == (PROMPTS[:9], False)
    assert result.evaluation is not None
    assert result.evaluation["models"] == []
    assert "give --held-out FILE.jsonl" in result.evaluation["note"]
    many(place, *PROMPTS)
    stages, result = place.build(evaluate=False)
    assert (calibrated_on(stages), stages.checked, result.evaluation) == (PROMPTS, False, None)


# --- sections ---


def test_sections_that_a_stage_loses_are_put_back_where_they_were(tmp_path: Path) -> None:
    vision = model_part("vision_encoder", to_bytes(parse(FLOAT)))
    before = write(tmp_path / "before", FLOAT, (5, {}, b"meta"), vision)
    after = tmp_path / "after"
    after.write_bytes(bundle([model_part("prefill_decode", to_bytes(parse(QUANTIZED))), TOKENIZER]))
    assert keep_sections(before, after) == ["metadata", "vision_encoder"]
    assert after.read_bytes()[BLOCK:] == bundle_of(QUANTIZED, (5, {}, b"meta"), vision)[BLOCK:]
    assert keep_sections(before, after) == []


@pytest.mark.parametrize(
    ("made", "told"),
    [
        (QUANTIZED, []),
        (COMPILED, []),
        (QUANTIZED.replace("0.1", "0.2"), ["its aux model differs and is not compiled"]),
        (COMPILED.replace("logits=", "logit="), ["its aux model's signatures have changed"]),
    ],
)
def test_other_models_are_as_they_were_or_compiled(tmp_path: Path, made: str, told: list[str]) -> None:
    before, after = (model_part("aux", to_bytes(parse(text))) for text in (QUANTIZED, made))
    assert faults(write(tmp_path / "a", QUANTIZED, before), write(tmp_path / "b", COMPILED, after)) == told
