"""`edge-opt build` with every stage real: litert-torch's on a freshly made checkpoint, Qualcomm's compiler, ours."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import pytest
from cli_runs import Patch
from pretend_npu import require_qnn
from real_builds import OPTIONS, SCRIPT, require_packages

from edge_opt import compare, convert, evaluate
from edge_opt.base.errors import UsageError
from edge_opt.building import build, pipeline
from edge_opt.building.rings import SETTING
from edge_opt.building.settings import DEFAULTS, FILES, FIXED, NAMES
from edge_opt.building.stages import Job
from edge_opt.inspection import inspect
from edge_opt.schema.litertlm import read_bundle

pytestmark = pytest.mark.slow
EXAMPLES = SCRIPT.parent.parent / "examples"
BETTER = ["position_table", "balanced_norms"]
"""Passes that change answers, for the better."""


@pytest.fixture(scope="module", autouse=True)
def _installed() -> None:
    require_packages()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint of three layers and prompts."""
    require_qnn()
    made = tmp_path_factory.mktemp("build")
    command = [sys.executable, SCRIPT, made / "gemma"]
    subprocess.run(command, check=True, capture_output=True)
    return made


def killed(folder: Path, stage: str) -> None:
    """The same build as a command, killed in the middle of a stage."""
    words = [
        "build",
        "gemma",
        "-o",
        "gemma.litertlm",
        "--soc",
        "SM8750",
        "--prompts",
        "gemma.jsonl",
    ]
    words += ["--prefill", "128", "--cache", "1024", "--set", "max_calibration_decode_steps=4"]
    with subprocess.Popen([sys.executable, "-m", "edge_opt", *words], cwd=folder) as command:
        log = folder / "gemma.work" / f"{stage}.log"
        while command.poll() is None and not (log.exists() and log.stat().st_size):
            time.sleep(0.1)
        command.kill()
    assert command.returncode == -signal.SIGKILL
    assert not (folder / "gemma.litertlm").exists()


def ranges_in(folder: Path) -> dict[str, Any]:
    """The ranges that calibration wrote, by model and tensor."""
    return {
        file.name: json.loads(file.read_text())["model_qsvs"]
        for file in folder.glob("*.tflite.json")
    }


def test_a_checkpoint_becomes_a_bundle_although_killed_on_the_way(
    folder: Path, tmp_path: Path
) -> None:
    killed(folder, "compile")
    work, output = folder / "gemma.work", folder / "gemma.litertlm"
    result = build(folder / "gemma", output, prompts=folder / "gemma.jsonl", **OPTIONS)
    *others, last = result.stages
    assert last.made_now
    assert not any(stage.made_now for stage in others)
    assert all((stage.peak_bytes or 0) > 100 << 20 for stage in result.stages[1:])
    by_name = {stage.name: stage for stage in result.stages}
    assert by_name["quantize"].notes == [
        "Restored sections that litert-torch dropped: ExecutorMetadataProto"
    ]
    prefill, decode = result.optimized["signatures"]
    assert (prefill["kept"], decode["kept"]) == ("converted", "converted")
    assert "more accurate, although not faster" in decode["why"]
    assert prefill["after"]["time"]["us"] < 0.65 * prefill["before"]["time"]["us"]

    places = (work / stage for stage in ("export", "quantize", "optimize"))
    exported, quantized, converted = (folder / "model.litertlm" for folder in places)
    assert kinds(output) == kinds(exported)
    assert result.caches["ring"] == 512
    for bundle in (exported, output):
        told = metadata_of(bundle)
        assert told.attention_mask_settings.sliding_window_size == 512
        lengths = {
            buffer.decode_input_name: buffer.maximum_sequence_length
            for buffer in told.state_buffers
        }
        assert [lengths[f"kv_cache_k_{layer}"] for layer in range(3)] == [512, 512, 1024]
    # Rope in integers stops at the longest prompt of the calibration, and that alone may differ.
    assert {found.rule for found in inspect(quantized).soundness} <= {
        "positions-stop",
        "unread-cache",
    }
    assert inspect(converted).soundness == []
    as_quantized = folder / "as_quantized.litertlm"
    convert(quantized, as_quantized, target="qualcomm-htp", skip=BETTER, verify="none")
    report = compare(quantized, as_quantized, generate=2)
    assert report.bitwise, report.summary()

    text = folder / "held-out.jsonl"
    text.write_text(json.dumps(" ".join(f"w{(17 * word) % 390 + 4}" for word in range(200))) + "\n")
    reference, *bundles = evaluate(
        folder / "gemma", [quantized, as_quantized, converted], text
    ).models
    assert reference.tokens > 50
    assert all(bundle.perplexity < 1.05 * reference.perplexity for bundle in bundles)
    assert bundles[1].perplexity == pytest.approx(bundles[0].perplexity, rel=1e-3)

    one_core = tmp_path / "ranges"
    one_core.mkdir()
    configured = json.loads((work / "configure" / "stage.json").read_text())["values"]
    inputs = {"model": str(exported), "prompts": str(work / "prompts.jsonl")}
    with patch.object(os, "sched_getaffinity", lambda _: {0}):
        pipeline.calibrate(
            Job("calibrate", str(one_core), inputs, configured["config"]), lambda *_: None
        )
    assert ranges_in(one_core) == ranges_in(work / "calibrate")


def test_the_notebook_runs(
    folder: Path, monkeypatch: Patch, capsys: pytest.CaptureFixture[str]
) -> None:
    notebook = json.loads((EXAMPLES / "checkpoint_to_bundle.ipynb").read_text(encoding="utf-8"))
    monkeypatch.chdir(folder)
    names: dict[str, Any] = {"__name__": "notebook"}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)
    said = capsys.readouterr().out
    assert "kept: converted" in said
    assert "K=1 H=" in said


def metadata_of(path: Path) -> Any:
    """The executor metadata of a bundle's language model, read by the package that defines it."""
    from litert_lm_builder.runtime.proto import executor_metadata_pb2

    bundle = read_bundle(path)
    content = bundle.content([kind for kind, _ in kinds(path)].index(9))
    found = executor_metadata_pb2.ExecutorMetadata.FromString(content.read(0, content.size))
    return found.llm_executor_metadata


def kinds(path: Path) -> list[tuple[int, str]]:
    """What the sections of a bundle are, in their order."""
    return [(section.data_type, section.model_type) for section in read_bundle(path).sections]


def configured(**options: Any) -> dict[str, Any]:
    """The settings for a Gemma3 of which five layers of six see 512 positions."""
    told = {"vendor": "qualcomm", "chip": "SM8750", "settings": {}, "caches": {"notes": []}}
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(
            '{"model_type": "gemma3_text", "sliding_window": 512}'
        )
        model = "float.litertlm" if "cache" in options else folder
        job = Job("configure", "", {"source": model}, options=told | options)
        return pipeline.configure(job, lambda *_: None)


def test_rings_follow_from_the_window_the_prefill_and_the_cache() -> None:
    """Lengths themselves are in test_build_caches.py."""
    for options, ring in (({}, 512), ({SETTING: 768}, 768), ({SETTING: None}, None)):
        found = configured(settings=options)
        assert found["settings"]["export"].get(SETTING) == found["caches"]["ring"] == ring
    for wrong in (256, "512", True):
        with pytest.raises(UsageError, match=SETTING):
            configured(settings={SETTING: wrong})


def test_settings_come_from_the_vendor_and_the_command_line_in_that_order() -> None:
    found = configured(settings={"cache_length": 320, "disable_aux_compilation": False})
    assert found["config"]["cache_length"] == 320
    assert found["config"]["k_ts_idx"] == 3
    assert found["settings"]["compile"]["disable_aux_compilation"] is False
    assert configured()["settings"]["compile"]["disable_aux_compilation"] is True
    assert configured(vendor="mediatek", chip="MT6993")["config"]["k_ts_idx"] == 2
    assert configured(vendor="google_tensor", chip="Tensor_G5")["config"]["v_ts_idx"] == 2
    assert configured(cache=96)["config"]["cache_length"] == 96
    assert configured()["settings"]["export"]["rotate"]
    assert not configured(settings={"rotate": False})["config"]["rotate"]


def test_the_settings_that_we_know_are_litert_torchs() -> None:
    theirs = pipeline._lib("stages").NpuPipelineConfig(model_id="", backend="", soc_model="")
    defaults = theirs.to_dict() | pipeline._DEFAULTS
    vendors = pipeline._lib("configs.vendor_configs").VENDOR_CONFIGS.values()
    names = set(defaults).union(*pipeline._used_settings().values(), *vendors)
    free = {name for name in names if name not in FIXED and not name.endswith(FILES)}
    assert set(NAMES) == free
    assert {name: defaults[name] for name in free & set(defaults)} == DEFAULTS
