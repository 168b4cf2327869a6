"""How a stage of `edge-opt build` is carried out in a process of its own, and what the command says of it."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from textwrap import dedent, indent
from threading import Barrier, Event
from types import SimpleNamespace
from typing import Any

import pytest
from cli_runs import Patch
from pretend_stages import FLOAT, TOKENIZER, Place, Stages, write
from terminal_signals import gone

from edge_opt.base import packages, processes
from edge_opt.base.errors import EdgeOptError, OutputError, UsageError
from edge_opt.base.words import Progress
from edge_opt.building import StageFailedError, exportable, pipeline, stages
from edge_opt.building.evaluation import check_runtimes
from edge_opt.building.mending import widen_sums, write_window
from edge_opt.building.stages import Job, OutOfMemoryError
from edge_opt.npu import CompilerFailedError, CompilerMissingError

ROOT = Path(__file__).parent.parent
NO_SETTING = "from edge_opt.base.errors import UsageError\nraise UsageError('no such setting')"


def test_the_extra_holds_a_version_that_was_tried() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extra = project["optional-dependencies"]["build"]
    assert f"litert-torch=={stages.TRIED[0]}.*" in extra


def test_the_version_of_edge_opt_changes_with_its_code_wherever_it_is(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    """`build` reuses a stage's result only if the versions are the same."""
    monkeypatch.setattr(stages, "version", lambda _: "1.0")
    monkeypatch.setattr(packages, "version_of", lambda _: "2.0")
    place = tmp_path / "one"

    def found() -> str:
        folders = {"edge_opt": "edge_opt", "edge_opt.schema": "schema"}
        monkeypatch.setattr(stages, "files", lambda package: place / folders[package])
        return stages.tool_versions()["edge-opt"]

    for path in ("edge_opt/building/a.py", "edge_opt/targets/b.toml", "schema/c.json"):
        (place / path).parent.mkdir(parents=True, exist_ok=True)
        (place / path).write_text(path)
    editable = found()
    assert re.fullmatch(r"1\.0\+[0-9a-f]{16}", editable)
    place = place.rename(tmp_path / "other")
    os.utime(place / "schema" / "c.json", (1, 1))
    (place / "edge_opt" / "__pycache__").mkdir()
    (place / "edge_opt" / "__pycache__" / "a.pyc").write_text("bytecode")
    (place / "edge_opt" / ".#a.py").symlink_to("nowhere")  # as editors leave
    assert found() == editable
    seen = {editable}
    for name, content in (
        ("building/a.py", "x"),
        ("targets/b.toml", "x"),
        ("../schema/c.json", "x"),
        ("d.py", ""),
    ):
        (place / "edge_opt" / name).write_text(content)
        seen.add(found())
    (place / "edge_opt" / "d.py").rename(place / "edge_opt" / "e.py")
    seen.add(found())
    assert len(seen) == 6


@pytest.fixture
def installed(monkeypatch: Patch) -> dict[str, list[str]]:
    """The packages that provide each module, as if nightly builds of all were installed."""
    modules = "litert_torch ai_edge_quantizer ai_edge_litert litert_lm_builder tensorflow torch transformers litert_lm"
    found = {module: [f"{module.replace('_', '-')}-nightly"] for module in modules.split()}
    monkeypatch.setattr(packages, "_providers", lambda: found)
    monkeypatch.setattr(packages.metadata, "version", lambda _: "0.11.0.dev1")
    return found


@pytest.mark.parametrize(
    ("missing", "check", "sentence"),
    [
        ("torch", stages.tool_versions, "torch is not installed: pip install '.[build]"),
        ("ai_edge_quantizer", stages.tool_versions, "ai-edge-quantizer is not installed: pip install '.[build]"),
        ("torch", check_runtimes, "torch is not installed: pip install '.[build]"),
        ("litert_lm", check_runtimes, "litert-lm is not installed: pip install '.[lm]'"),
    ],
)  # fmt: skip
def test_a_missing_package_is_a_sentence(
    installed: dict[str, list[str]], missing: str, check: Callable[[], object], sentence: str
) -> None:
    del installed[missing]
    with pytest.raises(UsageError, match=re.escape(sentence)):
        check()


def test_the_quantizer_may_have_its_new_name(installed: dict[str, list[str]]) -> None:
    installed["litert_quantizer"] = [installed.pop("ai_edge_quantizer")[0]]
    assert stages.tool_versions()["litert-quantizer"] == "0.11.0.dev1"


def test_an_untried_litert_torch_is_a_warning(place: Place) -> None:
    for version, warnings in (("0.11.0.dev1", 0), ("0.12.0", 1)):
        _, result = place.build(stages=Stages(versions={"litert-torch": version}))
        assert len(result.warnings) == warnings
    assert result.warnings[0].startswith("litert-torch is 0.12.0, and edge-opt was tried with 0.10")


@pytest.mark.parametrize("what", ["module", "function"])
def test_a_pipeline_that_lacks_what_is_called_is_refused_by_name(
    monkeypatch: Patch, what: str
) -> None:
    offered = SimpleNamespace(**dict.fromkeys(pipeline._CALLED))
    monkeypatch.setattr(pipeline, "_lib", lambda _: offered)
    pipeline.check_pipeline()
    sentence = "litert-torch's NPU pipeline has no quant_func: pip install"
    if what == "module":
        monkeypatch.undo()
        monkeypatch.setattr(pipeline, "_EXPORT", "edge_opt.nowhere")
        sentence = (
            "litert-torch's NPU pipeline is not there (No module named 'edge_opt.nowhere'): pip"
        )
    else:
        del offered.quant_func
    with pytest.raises(UsageError, match=re.escape(sentence)):
        pipeline.check_pipeline()


@pytest.mark.parametrize(
    ("model_type", "settings", "refusal"),
    [
        ("llama", {}, None),
        ("gemma3", {"layer_types": ["sliding_attention", "full_attention"]}, None),
        ("gemma4", {"hidden_size_per_layer_input": 12}, None),
        ("gemma4_text", {"hidden_size_per_layer_input": 0}, None),
        ("gemma4_text", {"hidden_size_per_layer_input": 12}, "type is gemma4_text, and .*only for gemma4"),
        ("lfm2", {"layer_types": ["full_attention", "conv"]}, "of the kind conv, and"),
        ("qwen3_5_text", {"layer_types": ["linear_attention"]}, "of the kind linear_attention, and"),
    ],
)  # fmt: skip
def test_layers_that_need_more_than_split_caches_are_refused_before_the_export(
    model_type: str, settings: dict[str, Any], refusal: str | None
) -> None:
    text = SimpleNamespace(**settings)
    described = SimpleNamespace(model_type=model_type, get_text_config=lambda: text)
    with pytest.raises(UsageError, match=refusal) if refusal else nullcontext():
        exportable.check_layers(described)


DEFAULT = {"rope_type": "default", "rope_theta": 1e4}
LONG = {"rope_type": "longrope", "original_max_position_embeddings": 4096}


@pytest.mark.parametrize(
    ("parameters", "refusal"),
    [
        (LONG, "RoPE is longrope, whose frequencies change after 4096 positions"),
        ({"a": DEFAULT, "b": LONG}, "RoPE is longrope"),
        ({"rope_type": "dynamic"}, "RoPE is dynamic, whose frequencies change after 8192"),
        (None, "positions are not RoPE, and litert-torch exports only"),
        ({"rope_type": "mrope"}, "positions are mrope, and litert-torch exports only"),
    ],
)
def test_frequencies_that_change_within_the_cache_are_refused_before_the_export(
    parameters: Any, refusal: str
) -> None:
    text = SimpleNamespace(rope_parameters=parameters, max_position_embeddings=8192)
    if parameters is None:
        del text.max_position_embeddings  # models with ALiBi have none
    described = SimpleNamespace(get_text_config=lambda: text)
    with pytest.raises(UsageError, match=refusal):
        exportable.check_rope(described, 8193)


SIZES = {"hidden_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
SLIDES = "sliding_attention"
WHOLE = "full_attention"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "settings", "refusal"),
    [
        ("Llama", {}, None),
        ("Olmo3", {"num_hidden_layers": 2, "layer_types": [SLIDES, WHOLE]}, None),
        ("Gemma3Text", {"layer_types": [SLIDES]}, f"no layer of the checkpoint has '{WHOLE}'"),
        ("Phi3", {"rope_parameters": {**DEFAULT, "partial_rotary_factor": 0.5}}, None),
        ("GPTNeoX", {}, "and GPTNeoXForCausalLM has none: give a"),
    ],
)
def test_rope_that_litert_torch_does_not_find_is_refused_before_the_export(
    family: str, settings: dict[str, Any], refusal: str | None
) -> None:
    transformers = pytest.importorskip("transformers")
    described = getattr(transformers, f"{family}Config")(**{**SIZES, **settings})
    with pytest.raises(UsageError, match=refusal) if refusal else nullcontext():
        exportable.check_rope(described, 1280)


@pytest.mark.slow
def test_the_exporter_gives_layers_the_cosines_that_rope_makes_with_fixed_frequencies(
    monkeypatch: Patch,
) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("litert_torch")
    from litert_torch.generative.export_hf.core.external_rope import preprocess_model
    from litert_torch.generative.export_hf.core.split_cache import exportable_module

    exported = exportable_module.LiteRTSplitCacheExportableModuleForDecoderOnlyLM
    for owner, name in (
        (preprocess_model, "inject_rotary_position_embedding"),
        (exported, "_get_input"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name))  # and back at the end
    exportable.export_as_it_is()
    factors = {"short_factor": [1.0, 2.0, 3.0], "long_factor": [4.0, 5.0, 6.0]}
    settings = {**DEFAULT, **LONG, **factors, "partial_rotary_factor": 0.5}
    config = transformers.Phi3Config(
        **SIZES, rope_parameters=settings, sliding_window=None, pad_token_id=0
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    rotary = model.model.rotary_emb
    far = torch.tensor([[5000]])
    changed, _ = rotary(torch.zeros(1), far)
    preprocess_model.inject_rotary_position_embedding(model)
    rotary.inv_freq.copy_(rotary.original_inv_freq)
    assert not torch.equal(rotary(torch.zeros(1), far)[0], changed)
    given = SimpleNamespace(
        model=model,
        device="cpu",
        export_config=SimpleNamespace(sliding_window_ring_buffer_size=None),
    )
    cosines = exported._get_input(given, 1, 8, 64)["pos_emb"]
    assert {name: tuple(one.shape) for name, one in cosines.items()} == {
        "cos": (1, 8, 1, 6),
        "sin": (1, 8, 1, 6),
    }


@pytest.mark.slow
@pytest.mark.parametrize("ends", [None, 2])
def test_a_family_without_a_default_must_say_which_token_ends_a_text(
    ends: int | None, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    transformers.Qwen2Config(**SIZES, eos_token_id=ends).save_pretrained(tmp_path)
    lengths = SimpleNamespace(prefill_lengths=[128], cache_length=1280)
    told = "names no token that ends a text, and LiteRT-LM does not start without one: add eos"
    with pytest.raises(UsageError, match=told) if ends is None else nullcontext():
        pipeline._planned_caches(lengths, tmp_path, whole=True)


@pytest.mark.parametrize("stage", ["configure", "export", "check"])
def test_a_failed_export_says_that_the_family_may_be_the_cause(place: Place, stage: str) -> None:
    def fails(_: Job) -> None:
        raise StageFailedError("no attribute 'model'")

    told = r"no attribute 'model'; its log is .*; litert-torch may not export this family: docs"
    with pytest.raises(StageFailedError, match=told):
        place.build(stages=Stages({stage: fails}))


def test_an_error_after_linux_ended_a_process_for_memory_says_so(
    place: Place, monkeypatch: Patch
) -> None:
    counts = iter((3, 4))
    monkeypatch.setattr(processes, "ended_for_memory", lambda: next(counts))
    with pytest.raises(OutOfMemoryError, match=r"ran out \(RuntimeError: the compiler failed\)"):
        child(place, monkeypatch, "raise RuntimeError('the compiler failed')")
    counts = iter((3, 4))
    with pytest.raises(UsageError, match="no such setting"):  # not for want of memory
        child(place, monkeypatch, NO_SETTING)


def test_a_compiler_that_ended_for_a_full_disk_says_so(place: Place, monkeypatch: Patch) -> None:
    code = """
        print("LLVM ERROR: IO failure on output stream: No space left on device", flush=True)
        os._exit(1)
    """
    with pytest.raises(OutputError, match="the disk is full"):
        child(place, monkeypatch, code)
    counts = iter((3, 4))
    monkeypatch.setattr(processes, "ended_for_memory", lambda: next(counts))
    with pytest.raises(OutOfMemoryError, match="exit status 1"):
        child(place, monkeypatch, code)


def test_processes_that_linux_ended_for_memory_are_counted(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(processes, "_COUNTERS", tmp_path / "vmstat")
    assert processes.ended_for_memory() == 0
    (tmp_path / "vmstat").write_text("nr_free_pages 5\noom_kill 17\n")
    assert processes.ended_for_memory() == 17


STARTS_A_PROCESS = """
    import subprocess
    started = subprocess.Popen(["sleep", "600"])
    open({told!r}, "w").write(str(started.pid))
    time.sleep(600)
"""


def put_in_place(place: Place, monkeypatch: Patch, code: str) -> None:
    """Make the stage `export` that code in every process that is started from here."""
    body = indent(dedent(code).strip(), "    ")
    (place.folder / "sitecustomize.py").write_text(
        f"import os, time\nfrom edge_opt.building import pipeline\ndef stage(job, progress):\n{body}\n"
        f"pipeline.export = stage\n"
    )
    monkeypatch.syspath_prepend(str(place.folder))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))


def child(place: Place, monkeypatch: Patch, code: str) -> tuple[Any, Any, list[tuple[int, ...]]]:
    """Carry out a stage of that code: its values, its memory, and the steps that it tells."""
    put_in_place(place, monkeypatch, code)
    monkeypatch.setattr(stages, "_LOOK_SECONDS", 0.05)
    steps: list[tuple[int, ...]] = []
    job = Job("export", str(place.folder), libraries=str(place.sdk))
    done = stages.carry_out(job, place.folder / "log", lambda _, *step: steps.append(step))
    assert not list(place.folder.glob("*.partial"))
    return *done, steps


def test_a_stages_process_tells_steps_memory_and_output(place: Place, monkeypatch: Patch) -> None:
    code = """
        progress("x", 3, 7)
        held = bytearray(200 << 20)
        print(os.environ["LD_LIBRARY_PATH"])
        print("Loading weights: 100%|###| 236/236", flush=True)
        time.sleep(0.3)
        return {"tmp": os.environ["TMPDIR"]}
    """
    values, peak_bytes, steps = child(place, monkeypatch, code)
    assert {*steps} <= {(0, 1), (3, 7)}
    assert (3, 7) in steps
    assert peak_bytes > 200 << 20
    folder = Path(values["tmp"]).parent
    assert (folder.parent, folder.suffix) == (place.folder, ".partial")
    assert str(place.sdk) in (place.folder / "log").read_text()


@pytest.mark.parametrize(
    ("code", "kind", "sentence"),
    [
        ("os.kill(os.getpid(), 9)", OutOfMemoryError,
         f"memory probably ran out (killed by SIGKILL): {processes.MORE_MEMORY}"),
        ("raise MemoryError", OutOfMemoryError, f"memory probably ran out (MemoryError: ): {processes.MORE_MEMORY}"),
        ("raise RuntimeError('Cannot allocate memory')", OutOfMemoryError,
         f"memory probably ran out (RuntimeError: Cannot allocate memory): {processes.MORE_MEMORY}"),
        ("os._exit(7)", StageFailedError, "exit status 7"),
        ("raise ValueError('a scale of zero\\nand more')", StageFailedError, "ValueError: a scale of zero"),
        (NO_SETTING, UsageError, "no such setting"),
    ],
)  # fmt: skip
def test_however_a_stages_process_ends_there_is_a_cause(
    place: Place, monkeypatch: Patch, code: str, kind: type[Exception], sentence: str
) -> None:
    with pytest.raises(kind) as caught:
        child(place, monkeypatch, code)
    assert str(caught.value) == sentence


def test_processes_that_a_stage_started_end_with_it_even_if_it_alone_is_killed(
    place: Place, monkeypatch: Patch
) -> None:
    told = place.folder / "pid"
    code = STARTS_A_PROCESS.format(told=str(told)).replace(
        "time.sleep(600)", "os.kill(os.getpid(), 9)"
    )
    with pytest.raises(OutOfMemoryError):
        child(place, monkeypatch, code)
    assert gone(int(told.read_text()), seconds=2)


def test_a_full_disk_is_the_cause_whatever_a_tool_says(place: Place, monkeypatch: Patch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
    with pytest.raises(OutputError, match="the disk is full, make room or write elsewhere"):
        child(place, monkeypatch, "raise RuntimeError('Unable to write')")


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupt_ends_a_stages_processes(
    place: Place, monkeypatch: Patch, sign: signal.Signals
) -> None:
    told = place.folder / "pid"
    put_in_place(place, monkeypatch, STARTS_A_PROCESS.format(told=str(told)))
    code = (
        "import sys, pathlib; from edge_opt.building.stages import Job, carry_out; here = pathlib.Path(sys.argv[1]); "
        "carry_out(Job('export', sys.argv[1]), here / 'log', lambda *_: None)"
    )
    script = [sys.executable, "-c", code, str(place.folder)]
    with subprocess.Popen(script, stderr=subprocess.DEVNULL) as command:
        while not told.exists() or not told.read_text():
            assert command.poll() is None
            time.sleep(0.05)
        command.send_signal(sign)
    assert gone(int(told.read_text()))


def test_an_interrupt_ends_all_parallel_stages(tmp_path: Path, monkeypatch: Patch) -> None:
    running, ended = Barrier(3), []

    def carry_out(job: Job, _log: Path, progress: Progress) -> None:
        running.wait(10)
        try:
            for _ in range(1000):
                progress(job.stage, 0, 1)
                time.sleep(0.01)
        except StageFailedError:
            ended.append(job.stage)
            raise

    monkeypatch.setattr(stages, "carry_out", carry_out)
    run = stages.Stages(tmp_path, {}, lambda *_: None, None, [])

    def interrupted() -> None:
        with run.threads(side_by_side=True) as threads:
            for name in ("evaluate", "compile"):
                threads.submit(run.result, stages.Stage(name), {})
            running.wait(10)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert sorted(ended) == ["compile", "evaluate"]
    assert run.done == []


def test_stages_that_have_not_begun_never_do_after_an_error(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    begun: list[str] = []
    first_runs = Event()

    def carry_out(job: Job, _log: Path, progress: Progress) -> None:
        begun.append(job.stage)
        first_runs.set()
        while True:
            progress(job.stage, 0, 1)
            time.sleep(0.01)

    monkeypatch.setattr(stages, "carry_out", carry_out)
    run = stages.Stages(tmp_path, {}, lambda *_: None, None, [])

    def fails() -> None:
        with run.threads(side_by_side=False) as threads:
            for name in ("compile", "evaluate"):
                threads.submit(run.result, stages.Stage(name), {})
            assert first_runs.wait(10)
            raise StageFailedError("it failed")

    with pytest.raises(StageFailedError):
        fails()
    assert begun == ["compile"]


def test_a_failing_compilers_first_complaint_is_told(place: Place, monkeypatch: Patch) -> None:
    def npu_compile(*_: object, **__: object) -> None:
        (place.folder / "tmp1.error").write_text(
            "fine\n 0.0ms [ ERROR ]   <E> no room for the weights\n"
        )
        raise ValueError("apply_plugin failed to apply plugin. See /tmp/tmp1.error for details.")

    monkeypatch.setattr(tempfile, "tempdir", str(place.folder))
    make = SimpleNamespace(from_dict=lambda values: SimpleNamespace(**values))
    pretend = SimpleNamespace(npu_compile=npu_compile, NpuPipelineConfig=make)
    monkeypatch.setattr(pipeline, "_lib", lambda _: pretend)
    job = Job(
        "compile", str(place.folder), {"model": "m"}, {"backend": "google"}, {"compile_configs": {}}
    )
    with pytest.raises(CompilerFailedError, match=r"^no room for the weights$"):
        pipeline.compile_bundle(job, lambda *_: None)
    job = replace(job, config={"backend": "mediatek", "soc_model": "MT6993"})
    with pytest.raises(
        CompilerMissingError, match=r"^MediaTek's compiler needs libneuron_adapter\.so"
    ):
        pipeline.compile_bundle(job, lambda *_: None)


@pytest.mark.parametrize(
    ("ranges", "sentence"),
    [
        ({}, "does not run prefill_4, decode, so its ranges"),
        ({"decode_kv_cache_k_0": 0}, "does not run prefill_4, so its ranges"),
        ({"decode_kv_cache_k_0": 0, "prefill_4_kv_cache_k_0": 0}, ""),
    ],
)  # fmt: skip
def test_prompts_that_leave_a_part_out_fail(
    tmp_path: Path, ranges: dict[str, int], sentence: str
) -> None:
    """The pipeline says nothing, and fails in the next stage."""
    told = json.dumps({"model_qsvs": ranges})
    (tmp_path / "Section3_tf_lite_prefill_decode.tflite.json").write_text(told)
    with pytest.raises(UsageError, match=sentence) if sentence else nullcontext():
        pipeline.check_all_ran(["prefill_4", "decode"], tmp_path)


def test_ranges_of_sums_that_litert_would_abort_on_are_widened(tmp_path: Path) -> None:
    given, sums = "%x: float32[8,1], %one: float32[]", "%y: float32[8,1] = ADD(%x, %one)"
    turned = "%z: float32[8,1] = ADD(%one, %x)"
    positions = f"subgraph main ({given}) {{\n  {sums}\n  {turned}\n  return %y, %z\n}}\n"
    model = write(tmp_path / "m.litertlm", positions)
    ranges = {name: {"min": [0.0], "max": [512.0]} for name in ("x", "y", "z")}
    file = tmp_path / "Section3_tf_lite_prefill_decode.tflite.json"
    file.write_text(json.dumps({"model_qsvs": ranges, "metadata": {}}))
    (tmp_path / "calibration.json").write_text('{"of": "another kind"}')
    widen_sums(model, tmp_path)
    told = json.loads(file.read_text())["model_qsvs"]
    wide = {"min": [0.0], "max": [517.12]}
    assert told == {"x": ranges["x"], "y": wide, "z": wide}


def test_a_window_without_metadata_to_hold_it_is_an_error(tmp_path: Path) -> None:
    bundle = write(tmp_path / "m.litertlm", FLOAT, TOKENIZER)
    with pytest.raises(EdgeOptError, match=r"assumes a window of 512 instead of 128: pip install"):
        write_window(bundle, 128)


def test_an_export_in_memory_names_what_keeps_it_from_streaming() -> None:
    assert "tf-nightly" in pipeline.memory_note(can_stream=False, streams=False)
    of_files = pipeline.memory_note(can_stream=True, streams=False)
    assert "from one model.safetensors, or from the files of an index" in of_files
    assert pipeline.memory_note(can_stream=True, streams=True) == ""
