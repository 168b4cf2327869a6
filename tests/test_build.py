"""From a checkpoint to a bundle for the NPU: what is done again, what is kept, and what is said when it fails.

The stages are small functions here; those marked slow run the real ones.
"""

import errno
import shlex
import sys
from collections.abc import Callable
from functools import partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from bundles import bundle, model_part
from cli_runs import DEMO, run
from pretend_stages import (
    COMPILED,
    FLOAT,
    METADATA,
    QUANTIZED,
    TOKENIZER,
    WEIGHTS,
    Place,
    Stages,
    bundle_of,
    write,
)
from text_parser import parse

from edge_opt.base.errors import ModelFormatError, OutputError, UsageError
from edge_opt.build import BuildCheckError, Job, StageFailedError
from edge_opt.build.sections import faults, keep_sections, weights
from edge_opt.build.vendors import QUALCOMM, find_chip, find_compiler, next_steps
from edge_opt.build.work import WorkFolder
from edge_opt.comparison.compare import compare
from edge_opt.conversion import convert
from edge_opt.inspection import inspect
from edge_opt.ir import load, to_bytes
from edge_opt.npu import CompilerMissingError
from edge_opt.npu.sdk import SDK_VARIABLES

ALL = ["configure", "export", "calibrate", "quantize", "optimize", "compile"]


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


# --- what runs ---


def test_a_checkpoint_runs_through_every_stage(place: Place) -> None:
    stages, result = place.build()
    assert stages.ran == ALL
    assert place.output.read_bytes() == bundle_of(COMPILED)
    assert result.output == str(place.output)
    assert result.sections_put_back == ["metadata"]
    assert [(stage.name, stage.made_now) for stage in result.stages] == [(name, True) for name in ALL]
    assert result.stages[-1].peak_bytes == 5 << 20


def test_a_float_bundle_starts_at_calibration_and_a_quantized_one_at_the_rewriting(place: Place) -> None:
    exported = write(place.folder / "float.litertlm", FLOAT)
    assert place.build(exported)[0].ran == ["configure", "calibrate", "quantize", "optimize", "compile"]
    quantized = write(place.folder / "quantized.litertlm", QUANTIZED)
    work = place.folder / "other.work"
    assert place.build(quantized, prompts=None, work=work)[0].ran == ["configure", "optimize", "compile"]


def test_the_cache_of_a_bundle_is_told_by_its_shape(place: Place) -> None:
    stages, _ = place.build(write(place.folder / "quantized.litertlm", QUANTIZED), prompts=None)
    assert stages.jobs["configure"].options["cache_shape"] == (1, 1, 8, 16)


def test_lengths_and_settings_reach_the_stages(place: Place) -> None:
    stages, _ = place.build(cache=4096, prefill=[128, 512], settings={"overwrite": False})
    settings = {"cache_length": 4096, "prefill_lengths": [128, 512], "overwrite": False}
    assert stages.jobs["configure"].options["settings"] == settings
    assert stages.jobs["export"].config == {"soc_model": "SM8750", **settings}


def test_flags_and_libraries_reach_the_compiler(place: Place) -> None:
    stages, _ = place.build()
    assert stages.jobs["compile"].options == {"compile_configs": {"prefill_decode": {"compile": True}}}
    assert stages.jobs["compile"].libraries == str(place.sdk)
    assert stages.jobs["optimize"].options == {
        "target": "qualcomm-htp",
        "sdk": str(place.sdk),
    }


TARGET = """name = "qualcomm-htp"
summary = "Found by a search."
form = "unpack"
"""


def test_a_target_file_is_what_our_stage_converts_for_and_runs_it_again_when_it_changes(place: Place) -> None:
    place.build()
    file = place.folder / "mine.toml"
    file.write_text(TARGET)
    stages, _ = place.build(target=str(file))
    assert (stages.ran, stages.jobs["optimize"].options["target"]) == (["optimize"], str(file))
    assert place.build(target=str(file))[0].ran == []
    file.write_text(TARGET.replace("unpack", "split"))
    assert place.build(target=str(file))[0].ran == ["optimize"]
    assert place.build(target="generic")[0].jobs["optimize"].options["target"] == "generic"


def test_a_target_that_cannot_be_read_is_refused_before_anything_runs(place: Place) -> None:
    stages = Stages()
    with pytest.raises(UsageError, match=r"target file no\.toml cannot be read"):
        place.build(stages=stages, target="no.toml")
    for other in ("mediatek", "ethos-u85"):
        with pytest.raises(
            UsageError, match=f"target '{other}' is for other NPUs than that of SM8750: leave"
        ):
            place.build(stages=stages, target=other)
    assert stages.ran == []


def test_the_line_of_a_stage_shows_what_its_tools_print_last(place: Place) -> None:
    place.build()
    work = WorkFolder(place.work)
    work.log("export").write_bytes(b"first\nsecond 1/3\rsecond 2/3\n")
    assert work.last_line("export") == "second 2/3"
    assert work.last_line("nothing") == ""


# --- what to do next ---


def test_the_end_names_the_bundle_to_try_and_the_files_for_this_very_chip(place: Place) -> None:
    _, result = place.build()
    assert result.next is not None
    assert result.next.bundle == str(place.work / "optimize" / "model.litertlm")
    assert f"Engine({result.next.bundle!r}, backend=npu)" in result.next.python
    names = [Path(file.path).name for file in result.next.files]
    assert names == [
        "litert_lm_main",
        "libLiteRtDispatch_Qualcomm.so",
        "libQnnHtp.so",
        "libQnnSystem.so",
        "libQnnHtpV79Stub.so",
        "libQnnHtpV79Skel.so",
    ]
    assert result.next.files[-1].path == "$QNN_SDK_ROOT/lib/hexagon-v79/unsigned/libQnnHtpV79Skel.so"
    assert all(file.path in result.next.commands[1] for file in result.next.files)
    assert "libQnnHtpV75Skel.so" in str(place.build(soc="SM8650")[1].next)


def test_libraries_for_the_phone_are_named_where_a_whole_sdk_is_at_hand(place: Place) -> None:
    compiler = place.sdk / "lib" / "x86_64-linux-clang"
    for folder in (compiler, compiler.parent / "aarch64-android"):
        folder.mkdir(parents=True)
    (compiler / "libQnnHtp.so").write_bytes(b"compiles")
    _, result = place.build()
    assert result.next is not None
    assert result.next.files[-2].path == str(place.sdk / "lib" / "aarch64-android" / "libQnnHtpV79Stub.so")


def test_without_a_compiler_only_the_trial_here_is_left(place: Place) -> None:
    with pytest.raises(CompilerMissingError) as caught:
        place.build(soc="MT6993", sdk=None)
    told = caught.value.result.to_dict()["next"]  # type: ignore[attr-defined]
    assert (told["bundle"], told["files"]) == (str(place.work / "optimize" / "model.litertlm"), [])


# --- a compiled bundle is known as one ---


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


def test_a_bundle_that_calibration_ruined_is_no_result_then_and_later(place: Place) -> None:
    def ruin(job: Job) -> None:
        write(
            job.model, QUANTIZED.replace("%y: int16[1,1,4,16] q(0.1, 0)", "%y: int16[1,1,4,16] q(3e-14, 0)")
        )

    for ran in (["configure", "export", "calibrate", "quantize"], []):
        stages = Stages(instead={"quantize": ruin})
        with pytest.raises(
            BuildCheckError, match=r"ruined, so nothing is delivered: .*'kv_cache_k_0' holds has no effect"
        ):
            place.build(stages=stages)
        assert stages.ran == ran
        assert not place.output.exists()
    ruin(Job("", str(place.folder)))
    with pytest.raises(BuildCheckError, match="calibrate again"):
        place.build(place.folder / "model.litertlm", prompts=None, work=place.folder / "other")


def test_what_calibration_does_with_the_prompts_is_said_also_of_an_earlier_run(
    place: Place, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Joins(Stages):
        def calibrate(self, job: Job) -> dict[str, Any]:
            return {**super().calibrate(job), "notes": ["Joined from your prompts: one"]}

    monkeypatch.setattr("edge_opt.build.building.Processes", Joins)
    words = ["build", place.checkpoint, "-o", place.output, "--soc", "SM8750", "--prompts", place.prompts]
    for again in ([], ["--force"]):
        ran = run(capsys, *words, "--sdk", place.sdk, *again)
        assert "\n  Joined from your prompts: one\nquantize" in ran.err, ran
    told = run(capsys, *words, "--sdk", place.sdk, "--force", "--json").json
    assert [stage["notes"] for stage in told["stages"]][2] == ["Joined from your prompts: one"]


# --- what is kept ---


def test_a_second_run_makes_nothing_again(place: Place) -> None:
    place.build()
    first = place.output.read_bytes()
    stages, result = place.build()
    assert stages.ran == []
    assert not any(stage.made_now for stage in result.stages)
    assert place.output.read_bytes() == first


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


CHANGES: dict[str, tuple[Change, list[str]]] = {
    "chip": (options(soc="SM8650"), ["configure", "optimize", "compile"]),
    "weights": (put("gemma/model.safetensors", WEIGHTS + b"more"), ["export"]),
    "prompts": (put("prompts.jsonl", '"something else"'), ["configure", "calibrate", "quantize"]),
    "length": (options(cache=64), ["configure", "export"]),
    "calibration": (options(settings={"max_calibration_decode_steps": 2}), ["configure", "calibrate"]),
    "compiler": (put("sdk/libQnnHtp.so", "another"), ["optimize", "compile"]),
    "edge-opt": (lambda _: {"stages": Stages(installed={"edge-opt": "2"})}, ["configure", "calibrate", "optimize"]),
    "result": (put("gemma.work/quantize/model.litertlm", "another"), ["quantize"]),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_what_was_made_of_something_else_is_made_again_and_nothing_more(place: Place, change: str) -> None:
    """Where a stage made the same bytes as before, those behind it are not run again either."""
    place.build()
    made, again = CHANGES[change]
    stages, _ = place.build(**made(place))
    assert stages.ran == again


@pytest.mark.parametrize("stage", ALL)
def test_a_build_that_is_interrupted_goes_on_and_ends_the_same(place: Place, stage: str) -> None:
    def interrupt(job: Job) -> None:
        (Path(job.output) / "half").write_bytes(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        place.build(stages=Stages({stage: interrupt}))
    assert caught.value.__notes__ == [f"what is done so far is in {place.work}: run it again to go on"]
    assert not place.output.exists()
    stages, _ = place.build()
    assert stages.ran == ALL[ALL.index(stage) :]
    assert place.output.read_bytes() == bundle_of(COMPILED)
    assert not (place.work / "scratch").exists()
    assert not list(place.work.glob("*.partial"))


def test_two_builds_do_not_share_a_work_folder(place: Place) -> None:
    def second(_: Job) -> None:
        place.build()

    with pytest.raises(UsageError, match="another build is at work in"):
        place.build(stages=Stages({"export": second}))


def test_a_folder_with_other_files_is_no_work_folder(place: Place) -> None:
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
    place: Place, stage: str
) -> None:
    with pytest.raises(StageFailedError) as caught:
        place.build(stages=Stages({stage: failing(StageFailedError("it is too hot"))}))
    log = place.work / f"{stage}.log"
    assert str(caught.value) == f"stage '{stage}': it is too hot; its log is {log}"
    assert log.read_text() == f"noise of {stage}\n"
    assert caught.value.exit_code == 3
    assert [report.name for report in caught.value.result.stages] == ALL[: ALL.index(stage)]
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
    with pytest.raises((UsageError, OutputError)) as caught:
        place.build(stages=Stages({"export": failing(error)}))
    assert caught.value.exit_code == code
    assert str(caught.value).startswith("stage 'export': ")


BAD_BUNDLES = {
    "its sections are": bundle([model_part("prefill_decode", to_bytes(parse(COMPILED)))]),
    "its data is not what it was": bundle_of(COMPILED).replace(b"words", b"wards"),
    "keeps 1 operators of 'prefill_4' off the NPU, BATCH_MATMUL": bundle_of(QUANTIZED),
    "prefill_decode model has not the signatures that it had": bundle_of(COMPILED.replace("logits=", "logit=")),
    "model has not the signatures": bundle_of(COMPILED.replace("%e: int16[1,1,4,8]", "%e: int16[1,1,8,8]")),
    "seems to hold some of its own": bundle_of(COMPILED, METADATA, padding=20_000),
    "calls the NPU 2 times in 'prefill_4'": bundle_of(
        COMPILED.replace(
            "  return",
            "  %z: int16[1,1,4,16] q(0.1, 0) = CUSTOM 'DISPATCH_OP' (%y)\n  return",
        ).replace("(logits=%y)", "(logits=%z)").replace("return %y", "return %z")
    ),
    "holds 2 subgraphs": bundle_of(COMPILED + "subgraph left (%a: float32[1]) {\n  return %a\n}\n"),
}  # fmt: skip


@pytest.mark.parametrize("told", BAD_BUNDLES)
def test_a_compiled_bundle_that_is_not_as_it_has_to_be_is_not_delivered(place: Place, told: str) -> None:
    def spoil(job: Job) -> None:
        job.model.write_bytes(BAD_BUNDLES[told])

    with pytest.raises(BuildCheckError, match=told) as caught:
        place.build(stages=Stages({"compile": spoil}))
    assert caught.value.exit_code == 1
    assert not place.output.exists()


# --- bad input, before anything runs ---


def safetensors(end: int) -> bytes:
    """A whole file of one tensor."""
    header = b'{"w": {"data_offsets": [0, %d]}}' % end
    return len(header).to_bytes(8, "little") + header + bytes(end)


AUXILIARY = model_part("aux", to_bytes(parse(FLOAT)))
CONFIG, WEIGHT_FILE, INDEX = (
    f"gemma/{name}" for name in ("config.json", "model.safetensors", "model.safetensors.index.json")
)
BAD: dict[str, Change] = {
    "is no Hugging Face checkpoint: it has no config.json": put(CONFIG, None),
    "has no tokenizer": put("gemma/tokenizer.json", None),
    "has no weights": put(WEIGHT_FILE, None),
    "names no model_type": put(CONFIG, '"something else"'),
    "config.json cannot be read": put(CONFIG, "{"),
    "tokenizer.json cannot be read": put("gemma/tokenizer.json", "[" * 100_000),
    "is no safetensors file: it is broken, or": put(WEIGHT_FILE, "version https://git-lfs.github.com/spec/v1"),
    "model.safetensors has 43 bytes of 80: copy it again": put(WEIGHT_FILE, safetensors(end=40)[:-37]),
    "has no model-2.safetensors, which model.safetensors.index.json names": put(
        INDEX, '{"weight_map": {"w": "model-2.safetensors"}}'
    ),
    "does not exist: give a Hugging Face folder": lambda place: {"source": place.folder / "nowhere"},
    "is neither a Hugging Face folder nor a .litertlm bundle": options(source=DEMO),
    "is compiled for an NPU already": put("in", bundle_of(COMPILED), "source"),
    "is not exported for an NPU": put("in", bundle_of(FLOAT.replace("kv_cache_k_0=", "k=")), "source"),
    "has no prefill_decode model, its models are: aux": put("in", bundle([AUXILIARY, TOKENIZER]), "source"),
    "is empty: give some ten": put("prompts.jsonl", "\n\n"),
    "line 2 is no JSON": put("prompts.jsonl", '"one"\ntwo\n'),
    "line 1 is no prompt": put("prompts.jsonl", '{"question": "?"}\n'),
    "line 1 is no prompt: write a string": put("prompts.jsonl", '{"prompt": ["?"]}\n'),
    "or messages of which one is the user's": put("prompts.jsonl", '{"messages": ["?"]}\n'),
    "line 4 is no prompt": put(
        "prompts.jsonl", '"one"\n\n{"text": "two"}\n{"messages": [{"role": "system", "content": "three"}]}\n'
    ),
    "line 1 is no JSON": put("prompts.jsonl", "[" * 100_000),
    "line 1 is no JSON text": put("prompts.jsonl", '"half an emoji: \\ud83d"\n'),
    "prompts .* cannot be read: No such file": put("none.jsonl", None, "prompts"),
    "prompts .* cannot be read: it is not UTF-8 text": put("prompts.jsonl", b"\xe9"),
    "is calibrated on text: give prompts=FILE": options(prompts=None),
    "is quantized already: leave prompts=... out": put("in", bundle_of(QUANTIZED), "source"),
    "has its lengths already": lambda place: {"source": write(place.folder / "f.litertlm", FLOAT), "cache": 64},
    "chip 'SM8751' does not exist, did you mean 'SM8750'?": options(soc="SM8751"),
    "chip 'nothing' does not exist, there are: ": options(soc="nothing"),
    "the Hexagon compiler needs Qualcomm's QNN libraries": options(sdk=None),
    "holds no libQnnHtp.so": lambda place: {"sdk": place.checkpoint},
    "exists: pass overwrite=True": lambda place: {**put("gemma.litertlm", "")(place), "overwrite": False},
    "is the input itself": put("gemma.litertlm", bundle_of(FLOAT), "source"),
    "is the output, too": lambda place: {"work": place.output},
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


def test_commands_for_the_phone_can_be_pasted_whatever_the_bundle_is_called() -> None:
    steps = next_steps(QUALCOMM, "SM8750", None, "w/model.litertlm", "out dir/my gemma.litertlm")
    _, push, run = (shlex.split(command) for command in steps.commands)
    assert push[2] == "out dir/my gemma.litertlm"
    assert push[5:9] == [file.path for file in steps.files[2:]]
    assert "--model_path=my gemma.litertlm" in shlex.split(run[2])


# --- other vendors ---


def test_a_folder_of_libraries_for_a_vendor_that_nothing_compiles_for_is_refused_with_the_remedy() -> None:
    vendor, _ = find_chip("Tensor_G5")
    with pytest.raises(CompilerMissingError, match=r"no compiler for Google Tensor.*; leave sdk=\.\.\. out"):
        find_compiler(vendor, "/sdk")


@pytest.mark.parametrize(
    ("chip", "vendor", "target", "sentence"),
    [
        ("mt6993", "mediatek", "mediatek", "MediaTek's compiler is missing: `pip install ai-edge-litert-sdk-mediatek`"),
        ("tensor_g5", "google_tensor", "google-tensor", "litert-torch's pipeline has no compiler for Google Tensor"),
    ],
)  # fmt: skip
def test_without_their_sdk_other_vendors_bundles_are_converted_and_kept(
    place: Place, chip: str, vendor: str, target: str, sentence: str
) -> None:
    stages = Stages()
    with pytest.raises(CompilerMissingError) as caught:
        place.build(stages=stages, soc=chip, sdk=None)
    assert stages.ran == ALL[:-1]
    assert stages.jobs["configure"].options["vendor"] == vendor
    assert stages.jobs["optimize"].options["target"] == target
    kept = place.work / "optimize" / "model.litertlm"
    assert str(caught.value).startswith(sentence)
    assert str(caught.value).endswith(f"what is converted until there, is {kept}")
    assert caught.value.result.converted == str(kept)
    assert kept.exists()


def test_a_folder_with_mediateks_compiler_is_taken(place: Place) -> None:
    (place.sdk / "lib").mkdir()
    (place.sdk / "lib" / "libneuronusdk_adapter.mtk.so").write_bytes(b"")
    stages, _ = place.build(soc="MT6993")
    assert stages.ran == ALL
    assert stages.jobs["compile"].libraries == str(place.sdk / "lib")
    with pytest.raises(CompilerMissingError, match="give the folder of MediaTek's SDK"):
        place.build(soc="MT6993", sdk=place.checkpoint)


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


def test_chips_are_found_however_they_are_spelled() -> None:
    found = [find_chip(name)[1] for name in ("sm8750", " MT6993 ", "TENSOR_G5")]
    assert found == ["SM8750", "MT6993", "Tensor_G5"]


# --- sections ---


def test_sections_that_a_stage_loses_are_put_back_where_they_were(tmp_path: Path) -> None:
    vision = model_part("vision_encoder", to_bytes(parse(FLOAT)))
    before = write(tmp_path / "before", FLOAT, (5, {}, b"meta"), vision)
    after = tmp_path / "after"
    after.write_bytes(bundle([model_part("prefill_decode", to_bytes(parse(QUANTIZED))), TOKENIZER]))
    assert keep_sections(before, after) == ["metadata", "vision_encoder"]
    assert after.read_bytes() == bundle_of(QUANTIZED, (5, {}, b"meta"), vision)
    assert keep_sections(before, after) == []


def test_a_bundle_that_is_as_it_has_to_be_has_no_faults(tmp_path: Path) -> None:
    assert faults(write(tmp_path / "a", QUANTIZED), write(tmp_path / "b", COMPILED), shared=True) == []


@pytest.mark.parametrize(
    ("made", "told"),
    [
        (QUANTIZED, []),
        (COMPILED, []),
        (QUANTIZED.replace("0.1", "0.2"), ["its aux model is another one, and not compiled"]),
        (COMPILED.replace("logits=", "logit="), ["its aux model has not the signatures that it had"]),
    ],
)
def test_other_models_are_as_they_were_or_compiled(tmp_path: Path, made: str, told: list[str]) -> None:
    before, after = (model_part("aux", to_bytes(parse(text))) for text in (QUANTIZED, made))
    assert faults(write(tmp_path / "a", QUANTIZED, before), write(tmp_path / "b", COMPILED, after)) == told


def test_weights_that_signatures_share_are_counted_once() -> None:
    once, each = weights(load(DEMO))
    assert once < each <= 2 * once
