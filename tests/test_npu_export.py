"""edge-opt as a stage of litert-torch's NPU pipeline: what is kept, what is said, and what the compiler is told."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from bundles import GENERIC, bundle, model_part
from cli_runs import DEMO, QUANTIZED
from pretend_npu import calls, compiling, figures, pretend

from edge_opt.base.errors import UsageError
from edge_opt.integrations import npu_export
from edge_opt.integrations.npu_export import Optimized, npu_optimize
from edge_opt.ir import load
from edge_opt.npu.profiling import Measured
from edge_opt.schema.litertlm import read_bundle

SHARED = "--qualcomm_enable_weight_sharing=true"
TEXT = (GENERIC, {"name": "metadata"}, b"tokens")


def config(**fields: Any) -> Any:
    """As the pipeline's own, as far as it is read."""
    return SimpleNamespace(**{"backend": "qualcomm", "soc_model": "SM8750", **fields})


class Stage:
    """The stage between a quantized bundle and its output, with a pretended compiler."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.out = folder, folder / "out.litertlm"
        self.calls = folder / "apply_plugin_main.calls"
        self._monkeypatch = monkeypatch
        self.quantized = folder / "quantized.litertlm"
        self.quantized.write_bytes(bundle([TEXT, model_part("prefill_decode", DEMO.read_bytes())]))

    def __call__(self, *runs: Sequence[object], **options: Any) -> Optimized:
        """Run it; without `runs` there is no compiler. Other fields than options are of the configuration."""
        told = {name: options.pop(name) for name in ("target", "sdk") if name in options}
        if runs:
            told["sdk"] = self.pretend(compiling([one for every in runs for one in every]))
        return npu_optimize(config(**options), self.quantized, self.out, **told)

    def pretend(self, program: str) -> Path:
        """Put a program in the compiler's place; its runs are in order."""
        self._monkeypatch.setattr(npu_export, "_COMPILERS", 1)
        return pretend(self.folder, self._monkeypatch, program)

    def grown(self) -> list[bool]:
        """Of both entry points, whether there are more operators than before."""
        before, after = (operators(path) for path in (self.quantized, self.out))
        return [new > old for old, new in zip(before, after, strict=True)]


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    return Stage(tmp_path, monkeypatch)


def operators(path: Path) -> list[int]:
    part = read_bundle(path).content(1)
    return [len(graph) for _, graph in load(part.read(0, part.size)).entry_points()]


def ran(*times: int | None) -> Sequence[tuple[int | None, int, int]]:
    return [(time, 40, 9) for time in times]


def test_what_is_quicker_is_kept_and_told_with_both_figures(stage: Stage) -> None:
    done = stage(ran(1000, 500), ran(600, 510))
    assert all(site.proof is not None for site in done.conversion.converted)
    assert [str(entry) for entry in done.signatures] == [
        "prefill_8 kept as converted: estimated 1.000 ms as exported, estimated 0.600 ms as converted (ratio 0.600)",
        "decode kept as exported: estimated 0.500 ms as exported, estimated 0.510 ms as converted (ratio 1.020)",
    ]
    assert "times are for SA8797" in done.summary()
    assert stage.grown() == [True, False]
    assert json.loads(json.dumps(done.to_dict()))["signatures"][0]["after"]["time"]["us"] == 600


def test_where_nothing_gains_the_bundle_is_the_same_bytes(stage: Stage) -> None:
    done = stage(ran(1000, 500), ran(1000, 500))
    assert [entry.kept for entry in done.signatures] == ["exported", "exported"]
    assert stage.out.read_bytes() == stage.quantized.read_bytes()


def test_what_leaves_the_npu_decides_then_time_then_bytes() -> None:
    changes: list[tuple[int | None, int | None, dict[str, int], bool, str]] = [
        (900, None, {"read": 30}, True, "100 bytes moved as exported, 30 bytes"),
        (None, 900, {"read": 500}, False, "100 bytes moved as exported, 500 bytes"),
        (900, 9, {"taken": 8}, False, "0 operators off the NPU as exported, 1 operators"),
    ]
    for before, after, changed, better, why in changes:
        found, told = figures(before).gain(figures(after, **changed))
        assert (found, told.startswith(why)) == (better, True)


def test_a_repair_is_kept_although_it_takes_longer() -> None:
    measured = [{"decode": Measured("decode", figures(us))} for us in (500, 510)]
    entry = SimpleNamespace(name="decode")
    for name, kept in (("balanced_norms", "converted"), ("mha_to_sha", "exported")):
        sites = [SimpleNamespace(signature="decode", pass_name=name)]
        (gain,) = npu_export._gains(SimpleNamespace(converted=sites, signatures=[entry]), *measured)
        assert gain.kept == kept


@pytest.mark.parametrize(
    ("before", "after", "kept", "words"),
    [
        (ran(900, 900), [None] * 2, "exported", "the converted one does not compile: .*no room"),
        ([None] * 2, ran(900, 900), "converted", "the exported one does not compile: .*no room"),
        ([None] * 2, [None] * 2, "converted", "neither compiles: .*no room"),
    ],
)
def test_what_compiles_stays(
    stage: Stage, before: Sequence[object], after: Sequence[object], kept: str, words: str
) -> None:
    told = stage(before, after).signatures[0]
    assert told.kept == kept
    assert re.search(words, told.why)
    assert stage.grown()[0] is (kept == "converted")


def test_it_is_judged_with_the_flags_that_npu_compile_will_give(stage: Stage) -> None:
    own = {
        "prefill_decode": ["--qualcomm_optimization_level=O1", "--qualcomm_log_level=off"],
        "vision_encoder": {"compile": False, "flags": ["--own"]},
    }
    done = stage(ran(1000, 500), ran(600, 500), compile_configs=json.dumps(own))
    flags = own["prefill_decode"]
    told = {"compile": True, "flags": flags}
    assert done.compile_configs == {"prefill_decode": told, "vision_encoder": own["vision_encoder"]}
    judged = {"--soc_model=SA8797", flags[0], SHARED, "--qualcomm_vtcm_size=8"}
    given = [set(call) for call in calls(stage.folder / "sdk")]
    assert [judged <= call and flags[1] not in call for call in given] == [True] * 4
    stage.calls.unlink()
    stage(ran(1000, 500), ran(600, 500), disable_weight_sharing=True, overwrite=True)
    assert SHARED not in calls(stage.folder / "sdk")[0]


@pytest.mark.parametrize(
    ("fields", "target", "reason"),
    [
        ({}, "qualcomm-htp", "needs Qualcomm's QNN libraries: give the folder"),
        (
            {"backend": "mediatek", "soc_model": "mt6993"},
            "mediatek",
            "needs libneuron_adapter.so of MediaTek's NeuroPilot SDK: run `pip install",
        ),
        (
            {"backend": "GOOGLE", "soc_model": "Tensor_G5"},
            "google-tensor",
            "cannot run the compiler of 'GOOGLE'",
        ),
    ],
)
def test_where_nothing_can_be_measured_what_was_converted_is_kept_and_that_is_said(
    stage: Stage, fields: dict[str, str], target: str, reason: str
) -> None:
    done = stage(**fields)
    assert done.conversion.target == target
    assert str(done.signatures[0]) == "prefill_8 kept as converted: not measured"
    (note,) = done.notes
    assert note.startswith("every conversion is kept, because none could be measured: ")
    assert reason in note


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"backend": "qualcom"}, "vendor 'qualcom' has no target, did you mean 'qualcomm'"),
        (
            {"compile_configs": "{"},
            r"cfg\.compile_configs must be a dict, a JSON object or the path of",
        ),
        (
            {"compile_configs": "nowhere.json"},
            r"cfg\.compile_configs must be a dict, a JSON object or the path of",
        ),
    ],
)
def test_a_configuration_that_cannot_be_is_refused(
    stage: Stage, fields: dict[str, str], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        stage(**fields)


def test_what_cannot_be_compiled_or_written_is_said_before_the_work(stage: Stage) -> None:
    stage.out.touch()
    with pytest.raises(UsageError, match=r"out\.litertlm exists"):
        stage(ran(900))
    assert not stage.calls.exists()
    stage(overwrite=True)
    assert stage.out.stat().st_size > 0


@pytest.mark.slow
def test_the_pipelines_own_settings_come_along_for_the_models_that_are_not_rewritten(
    tmp_path: Path,
) -> None:
    manager = pytest.importorskip(
        "litert_torch.generative.export_hf.experimental.npu_export.config_manager",
        reason="extra torch is not installed",
    )
    path = tmp_path / "quantized.litertlm"
    path.write_bytes(bundle([TEXT, model_part("prefill_decode", QUANTIZED.read_bytes())]))
    for vendor, soc, kinds in (
        ("qualcomm", "SM8750", {"prefill_decode", "aux"}),
        ("mediatek", "mt6993", {"prefill_decode", "text_encoder"}),
    ):
        cfg = manager.build_pipeline_config("nowhere", vendor, soc)
        done = npu_optimize(cfg, path, tmp_path / "out.litertlm", overwrite=True)
        assert kinds <= done.compile_configs.keys()
        assert all(done.compile_configs[kind]["flags"] for kind in kinds)
