"""tune: a signature in every form, ranked by what a compiler says of it; the best becomes a target."""

import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from cli_runs import DEMO, QUANTIZED, run
from fault_graphs import Size, attention
from pretend_npu import pretend, require_qnn
from text_parser import parse

from edge_opt.attention.block import Block
from edge_opt.attention.find import find_blocks
from edge_opt.base.errors import UsageError
from edge_opt.base.processes import _running
from edge_opt.conversion import convert
from edge_opt.ir import Model, load, save
from edge_opt.npu import Figures, Measured, TimeEstimate, Tuning, profiling, tune, tuned_target, write_target
from edge_opt.npu.hexagon import Compiler
from edge_opt.npu.tuning import applied, largest_attention, rewritten, variants
from edge_opt.targets import Target, load_target

# Of `decode`: as exported, in two forms (unpack gives the graph of split), one of them cut at the norm in the other
# way, and two with the mask at its other place.
TRIALS = 6
Captured = pytest.CaptureFixture[str]


def figures(
    us: int | None, *, read: int = 100, taken: int = 9, partitions: int = 1, steps: int = 5
) -> Figures:
    time = None if us is None else TimeEstimate("SA0", us, us, us, 0)
    counts = (9, taken, partitions, 0, 0, read, 0, steps)
    return Figures("prefill_8", *counts, time=time, note="a note", qnn="1.0")


def count(model: Model, kind: str = "SOFTMAX") -> int:
    return sum(operator.name == kind for operator in model.entry_points()[0][1].operators)


def tuned(answers: dict[int, Figures], path: Path = DEMO, **options: Any) -> Tuning:
    """Figures by the SOFTMAX of a layer or by `judge`, none is a failure; numbers are off with `wrong` SOFTMAX."""

    def per_layer(model: Model) -> int:
        return count(model) // (2 if model.entry_points()[0][0].startswith("prefill") else 3)

    judge: Callable[[Model], Figures | None] = options.pop(
        "judge", lambda model: answers.get(per_layer(model))
    )
    asked, wrong = options.pop("asked", []), options.pop("wrong", 0)
    reason = options.pop("reason", "")

    def measure(model: Model, signature: str, compiler: Compiler) -> Measured:
        asked.append((compiler.chip, compiler.flags))
        found = judge(model)
        return Measured(signature, found, "" if found else f"nothing for {per_layer(model)}")

    def compare(_: Any, model: Model, **more: Any) -> Any:
        asked.append((per_layer(model), more["chip"]))
        told = {"signatures": [SimpleNamespace(reason=reason)], "summary": lambda: "numbers are off"}
        return SimpleNamespace(equal=per_layer(model) != wrong, **told)

    with (
        patch("edge_opt.npu.tuning.measure", measure),
        patch("edge_opt.npu.tuning.compare_on_npu", compare),
        patch("edge_opt.npu.tuning.find_sdk", lambda _: SimpleNamespace(no_probe="")),
    ):
        return tune(path, **{"jobs": 2, **options})


def at(**us: int) -> Callable[[Model], Figures]:
    """A compiler for which each operator of a kind takes so many microseconds, beside 500."""
    return lambda model: figures(500 + sum(took * count(model, kind) for kind, took in us.items()))


def forms(tuning: Tuning) -> list[str]:
    return [trial.form for trial in tuning.trials]


def test_a_signature_without_attention_of_several_heads_is_refused() -> None:
    with pytest.raises(UsageError, match="signature 'prefil' does not exist, did you mean 'prefill_8'"):
        largest_attention(load(DEMO), "prefil")
    model = convert(DEMO, dry_run=True, verify="none").model
    assert model is not None
    with pytest.raises(UsageError, match="the model has no multi-head attention"):
        largest_attention(model)


# What is tried


def test_every_form_is_tried_and_tiles_of_the_one_that_is_mostly_the_best() -> None:
    target = replace(load_target("qualcomm-htp"), on_chip_bytes=1, long_context={"rows_per_tile": 2})
    block = replace(largest_attention(load(DEMO), "prefill_8")[1], query_length=512)
    tried = dict(variants(block, target))
    assert [*tried] == [
        "as exported", "as exported, the mask before the join", "split", "unpack", "split-above",
        "split-above, a norm for each head", "split-above, the mask after the join",
        "split-above, tiles of 128 rows", "split-above, tiles of 64 rows",
    ]  # fmt: skip
    model = rewritten(load(DEMO), applied(target, tried["unpack"]))
    found = [match for _, graph in model.entry_points() for match in find_blocks(graph)]
    assert {(match.heads, match.query_length) for match in found if isinstance(match, Block)} == {
        (1, 1),
        (1, 8),
    }


def test_what_gives_the_same_graph_is_tried_once(tmp_path: Path) -> None:
    tried = forms(tuned({}, signature="prefill_8"))
    assert {"split-above, a norm for each head", "split-above, the mask after the join"} <= {*tried}
    bare = tmp_path / "bare.tflite"  # without a norm, and with one cache: no join
    save(parse(attention("float32", Size(queries=8))), bare)
    tried = forms(tuned({}, bare))
    assert "split-above" in tried
    assert not any("norm" in form or "mask" in form for form in tried)


# Ranking


@pytest.mark.parametrize(
    ("better", "worse"),
    [
        (figures(200), figures(100, taken=8)),
        (figures(200), figures(100, partitions=2)),
        (figures(100, read=900), figures(101, read=10)),
        (figures(100, read=10), figures(100, read=11)),
        (figures(100, steps=4), figures(100, steps=5)),
        (figures(100), figures(None)),
        (figures(None, read=10), figures(None, read=11)),
        (figures(10**12), None),
    ],
)
def test_staying_on_the_npu_counts_first_then_time_then_bytes(better: Figures, worse: Figures | None) -> None:
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


def test_every_form_is_compiled_and_checked_for_the_chip_that_was_asked_for() -> None:
    """On the chip whose time is estimated, with the memory of the one that was asked for."""
    asked, told = list[Any](), list[tuple[str, int, int]]()
    options: dict[str, Any] = {"asked": asked, "progress": lambda *step: told.append(step)}
    found = tuned({1: figures(2), 4: figures(1)}, signature="decode", chip="SSG2125P", **options)
    assert found.chip == "SSG2125P"
    assert told[: TRIALS + 1] == [("compiling", done, TRIALS) for done in range(TRIALS + 1)]
    assert asked == [("SA8775", ("--qualcomm_vtcm_size=2",))] * TRIALS + [(4, "SSG2125P")]


# Numbers


def test_a_form_whose_numbers_are_off_is_listed_and_the_next_one_taken() -> None:
    found = tuned({4: figures(100), 1: figures(200)}, wrong=4)
    assert found.winner is not None
    assert found.winner.form.startswith("as exported")
    off = [trial for trial in found.trials if trial.verdict]
    assert {trial.verdict for trial in off} == {"numbers are off"}
    assert len(off) > 1
    assert found.checked == "its numbers are those that the compiler makes of the export"
    found = tuned({4: figures(100)}, wrong=4)
    assert (found.winner, found.checked) == (None, "no trial's numbers are right")
    with pytest.raises(UsageError, match="there is no winner"):
        tuned_target(found)
    with pytest.raises(UsageError, match="no compiler for target 'generic' can be run here: give qualcomm"):
        tune(DEMO, "generic")
    found = tuned({4: figures(100)}, wrong=4, reason="a: the emulator crashes")
    assert found.winner is not None, "where the export itself does not run, nothing can be compared"
    assert found.checked == "numbers not checked: as exported, the emulator crashes"


# Interruptions


interrupted = Event()


def late(*arguments: Any) -> Measured:
    """A compiler that starts while the search is interrupted already."""
    interrupted.wait()
    time.sleep(0.2)
    return profiling.measure(*arguments)


@pytest.mark.parametrize("measure", [profiling.measure, late], ids=["running", "starting"])
def test_a_search_that_is_interrupted_leaves_no_compiler_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, measure: Any
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
        tune(DEMO, jobs=2, sdk=sdk, progress=interrupt)
    assert not _running
    assert {process.returncode for process in started} <= {-signal.SIGKILL}
    assert bool(started) == (measure is profiling.measure)


# The winner


def written(found: Tuning, folder: Path) -> Target:
    folder.mkdir(exist_ok=True)
    write_target(tuned_target(found, "mine"), folder / "mine.toml")
    return load_target(str(folder / "mine.toml"))


def test_the_written_target_loads_says_where_it_is_from_and_is_used(tmp_path: Path) -> None:
    target = written(tuned({16: figures(100)}, QUANTIZED, signature="prefill_8"), tmp_path)
    assert (target.name, target.form, target.rows_per_tile) == ("mine", "split-above", 2)
    said = "on demo_gemma3_a16w8.tflite, prefill_8: split-above, tiles of 2 rows"
    assert said in target.summary
    assert (target.versions["qnn"], target.versions["chip"]) == ("1.0", "SM8750")
    assert target.stated().keys() - {"name", "summary", "sources", "versions"} == target.sources.keys()
    assert "edge-opt tune" in target.sources["form"]
    result = convert(QUANTIZED, dry_run=True, target=str(tmp_path / "mine.toml"), verify="none")
    assert result.model is not None
    matches = list(find_blocks(result.model.entry_points()[0][1]))
    assert {(match.heads, match.query_length) for match in matches if isinstance(match, Block)} == {(1, 2)}


@pytest.mark.parametrize(
    ("path", "took", "winner", "facts"),
    [
        (DEMO, {"ADD": -1, "SOFTMAX": 100}, "as exported, the mask before the join", (True, (), 256)),
        (DEMO, {"ADD": 1, "SOFTMAX": 100}, "as exported", (False, (), 256)),
        (
            QUANTIZED,
            {"STABLEHLO_COMPOSITE": -1},
            "split-above, a norm for each head",
            (True, ("prefill*",), 1),
        ),
    ],
)
def test_where_masks_go_and_norms_are_cut_is_written_down(
    path: Path, took: dict[str, int], winner: str, facts: Any
) -> None:
    alone = replace(load_target("qualcomm-htp"), split_signatures=("prefill*",))
    found = tuned({}, path, target=alone, signature="prefill_8", judge=at(**took))
    assert found.trials[0].form == winner
    target = tuned_target(found)
    assert target.name == f"{alone.name}-tuned"
    assert (target.mask_before_join, target.split_signatures, target.norm_per_head_from) == facts


def test_what_does_not_fit_on_the_chip_goes_where_the_target_has_it_and_what_is_best_unsplit_stays(
    tmp_path: Path,
) -> None:
    small = replace(load_target("qualcomm-htp"), on_chip_bytes=1)
    target = written(tuned({4: figures(100)}, target=small, signature="prefill_8"), tmp_path)
    assert target.form == "split-above", "what fits keeps its form"
    assert target.long_context == {"form": "split"}
    target = written(tuned({1: figures(100)}, signature="prefill_8"), tmp_path / "second")
    assert not target.splits("prefill_8")
    assert target.splits("main")
    assert target.mask_before_join, "other signatures are rewritten as before"
    target = tuned_target(tuned({4: figures(100)}, signature="decode"))
    assert target.splits("decode")


# The command


def test_the_command_prints_one_table_and_writes_the_target(
    capsys: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "edge_opt.npu.tune", lambda path, target, **o: tuned({4: figures(150)}, path, target=target, **o)
    )
    file = tmp_path / "mine.toml"
    command = ("tune", DEMO, "--signatures", "decode", "-o", file)
    result = run(capsys, *command)
    assert result.code == 0
    assert "decode, best first" in result.out
    assert "0.150" in result.out
    assert "Best: split: the same bits as exported on SM8750's emulator." in result.out
    assert "left out, as exported: nothing for 1" in result.out
    assert load_target(str(file)).splits("decode")
    assert load_target(str(file)).name == "mine"
    assert run(capsys, *command).code == 2
    data = run(capsys, *command, "--force", "--json").json
    assert (data["winner"]["form"], len(data["trials"])) == ("split", TRIALS)


# The real ones


@pytest.mark.slow
def test_the_real_compiler_finds_a_form_for_the_demo_on_a_cluster_too(tmp_path: Path) -> None:
    require_qnn()
    found = tune(QUANTIZED, signature="prefill_8")
    assert found.winner is not None
    best = found.winner.measured.figures
    assert best is not None
    assert best.taken == best.operators
    assert best.time is not None
    assert "of the export" in found.checked or "the same bits" in found.checked
    assert "qnn" in written(found, tmp_path).versions
    distributed = pytest.importorskip("distributed")
    with (
        distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster,
        distributed.Client(cluster) as client,
    ):
        again = tune(QUANTIZED, signature="prefill_8", executor=client.get_executor())
    assert forms(again) == forms(found)
