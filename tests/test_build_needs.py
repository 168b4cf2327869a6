"""A build says what it will need before it begins, and which of it this machine lacks."""

import os
from contextlib import suppress
from pathlib import Path
from threading import Barrier, BrokenBarrierError
from types import SimpleNamespace

import pytest
from cli_runs import Patch
from pretend_stages import Place, Stages

from edge_opt.base import processes
from edge_opt.building import large_blocks, needs
from edge_opt.building.checkpoint import create
from edge_opt.building.needs import needs_of
from edge_opt.building.stages import Job, OutOfMemoryError, StageReport

GIGA = 10**9


def test_needs_grow_with_the_weights_and_streaming_takes_less(tmp_path: Path) -> None:
    create(tmp_path / "small", {"a": ("BF16", (100, 1000)), "b": ("F32", (1000,))})
    (tmp_path / "other.bin").write_bytes(bytes(202_000))
    files = [tmp_path / "small"]
    small = needs_of(files, rounds=False, streams=True)
    assert small == needs_of([tmp_path / "other.bin"], rounds=False, streams=True)
    large = needs_of(files * 9, rounds=False, streams=True)
    assert large.memory["export"] > small.memory["export"]
    whole = needs_of(files, rounds=False, streams=False)
    assert whole.memory["export"] != small.memory["export"]
    heavy = needs_of(files * 9000, rounds=True, streams=True)
    assert heavy.minutes > needs_of(files * 9000, rounds=False, streams=True).minutes


def test_a_stage_that_does_not_run_needs_nothing(tmp_path: Path) -> None:
    create(tmp_path / "small", {"a": ("F32", (10,))})
    assert "round" in needs_of([tmp_path / "small"], rounds=True, streams=True).memory
    assert "round" not in needs_of([tmp_path / "small"], rounds=False, streams=True).memory


@pytest.mark.parametrize(("memory", "disk"), [(1, 1), (1, 1000), (1000, 1), (1000, 1000)])
def test_what_the_machine_lacks_is_a_warning_with_the_remedy(
    monkeypatch: Patch, tmp_path: Path, memory: int, disk: int
) -> None:
    monkeypatch.setattr(large_blocks, "variables", lambda _: {})
    monkeypatch.setattr(processes, "free_memory", lambda: memory * GIGA)
    monkeypatch.setattr(needs.shutil, "disk_usage", lambda _: SimpleNamespace(free=disk * GIGA))
    told = needs.Needs({"export": 12 * GIGA, "compile": 13 * GIGA}, 20 * GIGA, 0, 14).lines(
        tmp_path, "qualcomm"
    )
    assert "12.1 GiB of memory (stage compile), 18.6 GiB of disk" in told[0]
    assert any("add swap" in line for line in told) is (memory == 1)
    assert any("of disk is free" in line for line in told) is (disk == 1)
    assert len(told) == 1 + (memory == 1) + (disk == 1)


def test_memory_that_is_not_free_may_be_in_files_which_take_disk(
    monkeypatch: Patch, tmp_path: Path
) -> None:
    monkeypatch.setattr(processes, "free_memory", lambda: GIGA)
    monkeypatch.setattr(needs.shutil, "disk_usage", lambda _: SimpleNamespace(free=1000 * GIGA))
    estimate = needs.Needs({"compile": 13 * GIGA}, 20 * GIGA, 0, 14)
    monkeypatch.setattr(large_blocks, "variables", lambda _: {"LD_PRELOAD": "x.so"})
    told = estimate.lines(tmp_path, "qualcomm")
    assert "30.7 GiB of disk" in told[0]
    assert f"keep a part of theirs in files in {tmp_path}" in told[1]
    monkeypatch.setattr(large_blocks, "variables", lambda _: {})
    assert "18.6 GiB of disk" in estimate.lines(tmp_path, "qualcomm")[0]


@pytest.mark.parametrize(
    ("vendor", "rounds", "warns"),
    [("qualcomm", False, True), ("qualcomm", True, False), ("mediatek", False, False)],
)
def test_weights_that_are_too_many_for_one_graph_are_a_warning(
    monkeypatch: Patch, tmp_path: Path, vendor: str, rounds: bool, warns: bool
) -> None:
    """The shape of Gemma 3 4B needs 3,958,532 KiB at 8 bits, and the compiler takes 3,670,016."""
    monkeypatch.setattr(needs, "_weights_in", lambda _: 3_880_099_328)
    told = needs_of([tmp_path], rounds=rounds, streams=True).lines(tmp_path, vendor)
    said = "Warning: a graph may need 3.78 GiB, and the compiler takes 3.50 GiB for SM8750: use a"
    assert any(line.startswith(said) for line in told) is warns


def test_a_bundle_needs_what_its_size_says(tmp_path: Path) -> None:
    (tmp_path / "some.litertlm").write_bytes(bytes(1000))
    create(tmp_path / "same", {"a": ("BF16", (1000,))})
    of_bundle = needs_of([tmp_path / "some.litertlm"], rounds=False, streams=True)
    assert of_bundle == needs_of([tmp_path / "same"], rounds=False, streams=True)


def test_where_free_memory_is_not_told_all_memory_counts(
    monkeypatch: Patch, tmp_path: Path
) -> None:
    monkeypatch.setattr(processes, "_MEMORY_INFO", tmp_path / "none")
    assert processes.free_memory() > GIGA // 4
    monkeypatch.delattr(os, "posix_fallocate")
    assert create(tmp_path / "mac", {"a": ("F32", (5,))})["a"].read().tolist() == [0.0] * 5


def test_a_stage_that_runs_out_of_memory_is_named_with_its_need(place: Place) -> None:
    def fails(_: Job) -> None:
        raise OutOfMemoryError("memory ran out")

    shown: list[StageReport] = []
    with pytest.raises(OutOfMemoryError, match="stage 'export': memory ran out; it needs about 2"):
        place.build(stages=Stages({"export": fails}), on_stage=shown.append)
    assert [stage.name for stage in shown] == ["configure"]
    assert shown[0].notes[0].startswith("Estimated need: ")


@pytest.mark.parametrize("memory", [1, 1000])
def test_the_last_stages_run_side_by_side_only_if_they_fit_into_memory(
    monkeypatch: Patch, place: Place, memory: int
) -> None:
    monkeypatch.setattr(processes, "free_memory", lambda: memory * GIGA)
    fits = memory == 1000
    meeting = Barrier(2)
    met: list[str] = []

    def runs(job: Job) -> None:
        with suppress(BrokenBarrierError):
            meeting.wait(20 if fits else 0.2)
            met.append(job.stage)

    last = ("compile", "evaluate")
    toolchain = Stages(dict.fromkeys(last, runs))
    place.prompts.write_text("".join(f'"prompt number {number}"\n' for number in range(12)))
    place.build(stages=toolchain, npu_tokens=0)
    assert sorted(met) == (sorted(last) if fits else [])
    assert fits or toolchain.ran[-2:] == [*last]
