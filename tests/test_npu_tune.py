"""tune: a signature in every form, ranked by what a compiler says of it; the best becomes a target."""

import signal
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from cli_runs import DEMO, QUANTIZED, Captured, Patch, run
from fault_graphs import Size, attention
from pretend_npu import figures, pretend, require_qnn

from edge_opt.attention.block import Block
from edge_opt.attention.find import find_blocks
from edge_opt.base.errors import UsageError
from edge_opt.base.processes import _running
from edge_opt.conversion import convert
from edge_opt.ir import Model, load, save
from edge_opt.ir.parse import parse
from edge_opt.npu import (
    Compiler,
    Figures,
    Measured,
    Tuning,
    profiling,
    tune,
    tuned_target,
    write_target,
)
from edge_opt.npu.tuning import Trial, applied, largest_attention, rewritten, variants
from edge_opt.targets import Target, load_target

BASE = load_target("qualcomm-htp")
interrupted = Event()
SPLIT = {"form": "split", "rows_per_tile": None}
ALONE = replace(BASE, split_signatures=("prefill*",))


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """Two layers, without norms and with one cache each: nothing is joined."""
    path = tmp_path / "bare.tflite"
    save(parse(attention("float32", Size(queries=8))), path)
    return path


def count(model: Model) -> int:
    return sum(operator.name == "SOFTMAX" for operator in model.entry_points()[0][1].operators)


def tuned(answers: dict[int, Figures], path: Path, **options: Any) -> Tuning:
    """Figures by the SOFTMAX of a layer, none is a failure; numbers are off with `wrong` SOFTMAX."""

    def per_layer(model: Model) -> int:
        return count(model) // 2

    asked, wrong = options.pop("asked", []), options.pop("wrong", 0)
    reason = options.pop("reason", "")

    def measure(model: Model, signature: str, compiler: Compiler) -> Measured:
        asked.append((compiler.chip, compiler.flags))
        found = answers.get(per_layer(model))
        return Measured(signature, found, "" if found else f"nothing for {per_layer(model)}")

    def compare(_: Any, model: Model, compiler: Compiler) -> Any:
        asked.append((per_layer(model), compiler.chip))
        told = {
            "signatures": [SimpleNamespace(reason=reason)],
            "summary": lambda: "numbers are off",
        }
        return SimpleNamespace(equal=per_layer(model) != wrong, **told)

    with (
        patch("edge_opt.npu.tuning.measure", measure),
        patch("edge_opt.npu.tuning.compare_on_npu", compare),
        patch("edge_opt.npu.qualcomm.Qualcomm.check_installed"),
        patch("edge_opt.npu.qualcomm.Qualcomm.check_emulator"),
    ):
        return tune(path, **{"jobs": 2, **options})


def forms(tuning: Tuning) -> list[str]:
    return [trial.form for trial in tuning.trials]


def test_a_model_without_attention_of_several_heads_or_another_vendor_is_refused() -> None:
    with pytest.raises(
        UsageError, match="signature 'prefil' does not exist, did you mean 'prefill_8'"
    ):
        largest_attention(load(DEMO), "prefil")
    model = convert(DEMO, dry_run=True, verify="none").model
    with pytest.raises(UsageError, match="the model has no multi-head attention"):
        largest_attention(model)
    with pytest.raises(
        UsageError, match="edge-opt cannot run the compiler of target 'generic': give qualcomm"
    ):
        tune(DEMO, "generic")


def test_every_form_is_tried_and_tiles_of_the_one_that_is_mostly_the_best() -> None:
    target = replace(BASE, on_chip_bytes=1, long_context={"rows_per_tile": 2})
    block = replace(largest_attention(load(DEMO), "prefill_8")[1], query_length=320)
    tried = dict(variants(block, target))
    assert [*tried] == [
        "as exported", "as exported, the mask before the join", "split", "unpack", "split-above",
        "split-above, a norm for each head", "split-above, the mask after the join",
        "split-above, tiles of 80 rows", "split-above, tiles of 64 rows",
    ]  # fmt: skip
    small = dict(variants(block, replace(target, norm_per_head_from=block.head_size)))
    assert small["split-above, one norm for all"]["norm_per_head_from"] == block.head_size + 1
    model = rewritten(load(DEMO), applied(target, tried["unpack"]))
    found = [match for _, graph in model.entry_points() for match in find_blocks(graph)]
    blocks = [match for match in found if isinstance(match, Block)]
    assert {(block.heads, block.query_length) for block in blocks} == {(1, 1), (1, 8)}


def test_what_gives_the_same_graph_is_tried_once(bare: Path) -> None:
    tried = forms(tuned({}, DEMO, signature="prefill_8"))
    assert {"split-above, a norm for each head", "split-above, the mask after the join"} <= {*tried}
    tried = forms(tuned({}, bare))
    assert "split-above" in tried
    assert not any("norm" in form or "mask" in form for form in tried)


@pytest.mark.parametrize(
    ("better", "worse"),
    [
        (figures(200), figures(100, taken=8)),
        (figures(200), figures(100, parts=2)),
        (figures(100, read=900), figures(101, read=10)),
        (figures(100, read=10), figures(100, read=11)),
        (figures(100, steps=4), figures(100, steps=5)),
        (figures(100), figures(None)),
        (figures(10**12), None),
    ],
)
def test_staying_on_the_npu_counts_first_then_time_then_bytes(
    better: Figures, worse: Figures | None
) -> None:
    assert Measured("a", better).rank < Measured("a", worse).rank


def test_the_best_comes_first_and_failures_last_with_their_reason() -> None:
    found = tuned({1: figures(300), 4: figures(120)}, QUANTIZED, signature="prefill_8")
    listed = forms(found)
    assert listed[:2] == ["split", "unpack"]
    failed = "as exported", "as exported, the mask before the join", "split-above, tiles of 2 rows"
    assert tuple(listed[-3:]) == failed
    assert found.trials[-1].measured.failure == "nothing for 16"
    assert found.winner is found.trials[0]
    assert (found.versions["qnn"], found.notes) == ("1.0", ("a note",))


def test_every_form_is_compiled_and_checked_for_the_chip_that_was_asked_for(bare: Path) -> None:
    """On the chip whose time is estimated, with the memory of the one that was asked for."""
    asked, told = list[Any](), list[tuple[str, int, int]]()
    options: dict[str, Any] = {"asked": asked, "progress": lambda *step: told.append(step)}
    found = tuned({1: figures(2), 4: figures(1)}, bare, compiler=Compiler("SSG2125P"), **options)
    trials = len(found.trials)
    assert told[: trials + 1] == [("compiling", done, trials) for done in range(trials + 1)]
    assert asked == [("SA8775", ("--qualcomm_vtcm_size=2",))] * trials + [(4, "SSG2125P")]
    assert (found.chip, found.checked) == (
        "SSG2125P",
        "bit-identical to the export in SSG2125P's emulator",
    )


@pytest.mark.parametrize(
    ("answers", "reason", "winner", "checked"),
    [
        ({4: figures(100), 1: figures(200)}, "", "as exported", "nothing to check"),
        ({4: figures(100)}, "", None, "no form gives the export's outputs"),
        (
            {4: figures(100)},
            "a: it crashes",
            "split",
            "outputs not checked: as exported, it crashes",
        ),
    ],
)
def test_a_form_whose_numbers_are_off_is_listed_and_the_next_one_taken(
    answers: dict[int, Figures], reason: str, winner: str | None, checked: str, bare: Path
) -> None:
    found = tuned(answers, bare, wrong=4, reason=reason)
    assert (found.winner and found.winner.form) == winner
    assert winner is None or found.trials[0] is found.winner
    assert checked in found.checked
    off = "numbers are off" in [trial.measured.failure for trial in found.trials]
    assert off is not bool(reason)
    if winner is None:
        with pytest.raises(UsageError, match="no target to write"):
            tuned_target(found)


def late(*arguments: Any) -> Measured:
    """A compiler that starts while the search is interrupted already."""
    interrupted.wait()
    time.sleep(0.2)
    return profiling.measure(*arguments)


@pytest.mark.parametrize("measure", [profiling.measure, late], ids=["running", "starting"])
def test_an_interrupt_leaves_no_compiler(
    bare: Path, tmp_path: Path, monkeypatch: Patch, measure: Any
) -> None:
    sdk = pretend(tmp_path, monkeypatch, "import time; time.sleep(600)")
    started: list[Any] = []
    interrupted.clear()

    def interrupt(stage: str, *_: int) -> None:
        if stage == "compiling":
            while measure is profiling.measure and not _running:
                time.sleep(0.01)
            started.extend(_running)
            interrupted.set()
            raise KeyboardInterrupt

    with patch("edge_opt.npu.tuning.measure", measure), pytest.raises(KeyboardInterrupt):
        tune(bare, compiler=Compiler(sdk=sdk), jobs=2, progress=interrupt)
    assert not _running
    assert {process.returncode for process in started} <= {-signal.SIGKILL}
    assert bool(started) == (measure is profiling.measure)


def test_the_written_target_loads_says_where_it_is_from_and_is_used(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    write_target(
        tuned_target(tuned({16: figures(1)}, QUANTIZED, signature="prefill_8"), "mine"), path
    )
    target = load_target(path)
    assert (target.name, target.form, target.rows_per_tile) == ("mine", "split-above", 2)
    said = "on demo_gemma3_a16w8.tflite, prefill_8: split-above, tiles of 2 rows"
    assert said in target.summary
    assert (target.versions["qnn"], target.versions["chip"]) == ("1.0", "SM8750")
    assert (
        target.stated().keys() - {"name", "summary", "sources", "versions"} == target.sources.keys()
    )
    assert "edge-opt tune" in target.sources["form"]
    result = convert(QUANTIZED, dry_run=True, target=path, verify="none")
    matches = list(find_blocks(result.model.entry_points()[0][1]))
    assert {(match.heads, match.query_length) for match in matches if isinstance(match, Block)} == {
        (1, 2)
    }


@pytest.mark.parametrize(
    ("base", "signature", "long", "changes", "facts"),
    [
        (BASE, "prefill_8", False, SPLIT, {"form": "split", "split_signatures": BASE.split_signatures}),
        (BASE, "decode", False, SPLIT, {"split_signatures": (*BASE.split_signatures, "decode")}),
        (BASE, "prefill_8", True, SPLIT, {"form": "split-above", "long_context": {"form": "split"}}),
        # What is best unsplit stays; other signatures are rewritten as before, if there are any.
        (BASE, "prefill_8", False, None, {"split_signatures": BASE.split_signatures[1:], "mask_before_join": True}),
        (ALONE, "prefill_8", False, None, {"split_signatures": (), "mask_before_join": False}),
        (ALONE, "prefill_8", False, {"mask_before_join": True}, {"mask_before_join": True}),
        (ALONE, "prefill_8", False, {**SPLIT, "norm_per_head_from": 1}, {"norm_per_head_from": 1}),
    ],
)  # fmt: skip
def test_what_is_best_for_a_signature_is_written_down_where_it_belongs(
    base: Target, signature: str, long: bool, changes: Any, facts: dict[str, Any]
) -> None:
    trial = Trial("a form", Measured(signature, figures(1)))
    found = tuned_target(
        Tuning("m", signature, long, base, "SM8750", {}, (trial,), changes=changes)
    )
    assert {name: getattr(found, name) for name in facts} == facts
    assert found.name == "qualcomm-htp-tuned"


def test_attention_that_does_not_fit_on_the_chip_is_told(bare: Path) -> None:
    for size in (1, 1 << 30):
        assert tuned({}, bare, target=replace(BASE, on_chip_bytes=size)).long_context is (size == 1)


def test_the_command_prints_a_table_and_writes(
    capsys: Captured, tmp_path: Path, bare: Path, monkeypatch: Patch
) -> None:
    pretended = partial(tuned, {4: figures(150)})
    monkeypatch.setattr(
        "edge_opt.npu.tune", lambda path, target, _, **o: pretended(path, target=target, **o)
    )
    file = tmp_path / "mine.toml"
    command = ("tune", bare, "-o", file)
    result = run(capsys, *command)
    assert result.code == 0
    assert "main, best first" in result.out
    assert "0.150" in result.out
    assert "Best: split, bit-identical to the export in SM8750's emulator." in result.out
    assert "skipped, as exported: nothing for 1" in result.out
    assert (load_target(file).name, load_target(file).form) == ("mine", "split")
    assert run(capsys, *command).code == 2
    data = run(capsys, *command, "--force", "--json").json
    assert (data["winner"]["form"], data["trials"][0]["form"]) == ("split", "split")


@pytest.mark.slow
def test_the_real_compiler_finds_a_form_for_the_demo_on_a_cluster_too() -> None:
    require_qnn()
    found = tune(QUANTIZED, signature="prefill_8")
    best = found.winner.measured.figures
    assert best.taken == best.operators
    assert best.time is not None
    assert found.checked == "nothing to check" or "bit-identical" in found.checked
    assert "qnn" in tuned_target(found).versions
    distributed = pytest.importorskip("distributed")
    with (
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, dashboard_address=None
        ) as cluster,
        distributed.Client(cluster) as client,
    ):
        again = tune(QUANTIZED, signature="prefill_8", executor=client.get_executor())
    assert forms(again) == forms(found)
