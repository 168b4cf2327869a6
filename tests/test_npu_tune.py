"""tune: one block of the real model in every form, ranked by what a compiler says of it; the best becomes a target."""

import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from cli_runs import DEMO, QUANTIZED, run
from fault_graphs import Size, attention
from pretend_npu import pretend
from sdk import require_qnn
from text_parser import parse

from edge_opt.attention.block import Block
from edge_opt.attention.find import find_blocks
from edge_opt.base.errors import UsageError
from edge_opt.base.processes import _running
from edge_opt.conversion import convert
from edge_opt.ir import load, save
from edge_opt.npu import (
    CompilerFailedError,
    CompilerMissingError,
    CompilerTimeoutError,
    Profile,
    SpillFigures,
    TimeEstimate,
    Trial,
    Tuning,
    VelaFigures,
    profile,
    tune,
    tuned_target,
    write_target,
)
from edge_opt.npu.ethos import find_vela
from edge_opt.npu.layers import cut_layers
from edge_opt.npu.sdk import LIBRARY, libraries_digest
from edge_opt.npu.search import Choice, TrialPlan, choices, rank
from edge_opt.targets import Target, load_target

# As exported, in three forms, one of them cut at the norm in the other way, and two with the mask at its other place.
TRIALS = 7
Captured = pytest.CaptureFixture[str]


def figures(
    us: int | None, *, read: int = 100, taken: int = 9, partitions: int = 1, steps: int = 5
) -> SpillFigures:
    time = None if us is None else TimeEstimate("SA0", 2 * us, us, 3 * us, us, us, us, 0)
    return SpillFigures("prefill_8", 9, taken, partitions, 0, 0, read, 0, steps, floor=100, time=time)


class FakeEmulator:
    """Finds the numbers wrong of a model with that many SOFTMAX."""

    def __init__(self, wrong: int = 0) -> None:
        self._wrong = wrong
        self.asked: list[tuple[int, int]] = []

    def __call__(self, a: Any, b: Any, *, layers: int, **_: Any) -> Any:
        self.asked.append((softmaxes(b), layers))
        return SimpleNamespace(equal=softmaxes(b) != self._wrong, summary=lambda: "numbers are off")


def softmaxes(path: Any) -> int:
    operators = load(Path(path)).entry_points()[0][1].operators
    return sum(operator.name == "SOFTMAX" for operator in operators)


@pytest.fixture(autouse=True)
def _own_memory(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


class FakeCompiler:
    """Reads figures by number of SOFTMAX from a table; what is not in it fails."""

    def __init__(self, answers: dict[int, SpillFigures]) -> None:
        self._answers = answers
        self.asked: list[tuple[str, tuple[str, ...]]] = []

    def __call__(self, path: Any, target: Target, *, chip: str, flags: Sequence[str], **_: Any) -> Profile:
        self.asked.append((chip, tuple(flags)))
        count = softmaxes(path)
        if count not in self._answers:
            raise CompilerFailedError(f"block.tflite: nothing for {count}")
        return Profile(str(path), target.name, "SM0", (), {"fake": "1.0"}, 2.0, (self._answers[count],))


def tuned(answers: dict[int, SpillFigures], path: Path = DEMO, **options: Any) -> Tuning:
    given = {"target": "qualcomm-htp", "blocks": 1, "jobs": 2}
    fakes = {
        "profile": options.pop("compiler", FakeCompiler(answers)),
        "compare_on_npu": options.pop("comparer", FakeEmulator()),
        "find_sdk": lambda _: SimpleNamespace(no_probe=""),
    }
    with patch.multiple("edge_opt.npu.search", **fakes):
        return tune(path, **{**given, **options})


# One block


@pytest.mark.parametrize("path", [DEMO, QUANTIZED])
def test_a_layer_has_the_real_shapes_and_one_attention(path: Path) -> None:
    model = load(path)
    name, graph = model.entry_points()[0]
    whole = [match for match in find_blocks(graph) if isinstance(match, Block)]
    layer = cut_layers(model, blocks=1)
    assert (layer.signature, layer.blocks) == (name, 1)
    found = [match for match in find_blocks(layer.model.subgraphs[0]) if isinstance(match, Block)]
    assert len(found) == 1
    assert (found[0].heads, found[0].key_lengths) == (whole[0].heads, whole[0].key_lengths)
    assert [signature.key for signature in layer.model.signatures] == [name]
    kinds = [operator.name for operator in layer.model.subgraphs[0].operators]
    assert kinds[-1] == "FULLY_CONNECTED", "the output projection belongs to the layer"
    assert kinds.count("SOFTMAX") == 1
    assert len(kinds) < len(graph)


def test_a_layer_converts_as_the_model_does() -> None:
    layer = cut_layers(load(QUANTIZED), "prefill_8", blocks=1).model
    result = convert(layer)
    assert [(site.heads, site.proof is not None and site.proof.bitwise) for site in result.converted] == [
        (4, True)
    ]


def test_several_layers_can_be_cut_out() -> None:
    layers = cut_layers(load(DEMO), "decode", blocks=2)
    assert layers.blocks == 2
    assert sum(op.name == "SOFTMAX" for op in layers.model.subgraphs[0].operators) == 2
    assert cut_layers(load(DEMO), "decode", blocks=99).blocks == 3


def test_a_signature_that_is_not_there_is_named() -> None:
    with pytest.raises(UsageError, match="signature 'prefil' does not exist, did you mean 'prefill_8'"):
        cut_layers(load(DEMO), "prefil")


def test_a_model_without_several_heads_has_nothing_to_tune_for() -> None:
    model = convert(DEMO, dry_run=True, verify="none").model
    assert model is not None
    with pytest.raises(UsageError, match="holds no multi-head attention"):
        cut_layers(model, blocks=1)


# What is tried


def test_every_form_is_tried_and_tiles_of_the_one_that_is_mostly_the_best() -> None:
    block = replace(cut_layers(load(DEMO), "prefill_8").attention, query_length=512)
    forms = [str(choice) for choice in choices(block, load_target("qualcomm-htp"))]
    assert forms == [
        "as exported",
        "as exported, the mask before the join",
        "split",
        "unpack",
        "split-above",
        "split-above, a norm for each head",
        "split-above, the mask after the join",
        "split-above, tiles of 128 rows",
        "split-above, tiles of 64 rows",
    ]


def test_a_choice_holds_for_every_length_and_signature() -> None:
    target = replace(load_target("qualcomm-htp"), on_chip_bytes=1, long_context={"rows_per_tile": 2})
    chosen = Choice("unpack").applied(target)
    assert chosen.splits("decode")
    assert (chosen.form, chosen.rows_per_tile) == ("unpack", None)
    assert not chosen.long_context
    assert chosen.largest_joined_rows_bytes == target.largest_joined_rows_bytes


def test_both_cuts_at_the_norm_are_tried_where_queries_have_one(tmp_path: Path) -> None:
    tried = {str(trial.choice) for trial in tuned({}, signature="prefill_8").trials}
    assert {"split-above", "split-above, a norm for each head"} <= tried
    bare = tmp_path / "bare.tflite"
    save(parse(attention("float32", Size(queries=8))), bare)
    tried = {str(trial.choice) for trial in tuned({}, bare).trials}
    assert "split-above" in tried
    assert not any("norm" in choice for choice in tried)


def test_the_mask_at_its_other_place_is_tried_where_there_is_one(tmp_path: Path) -> None:
    tried = {str(trial.choice) for trial in tuned({}, signature="decode").trials}
    assert {"as exported, the mask before the join", "split-above, the mask after the join"} <= tried
    one_cache = tmp_path / "one_cache.tflite"
    save(parse(attention("float32", Size(queries=8))), one_cache)
    assert not any("mask" in str(trial.choice) for trial in tuned({}, one_cache).trials)


def compiler_that_takes(**us: int) -> Any:
    """So many microseconds for each operator of a kind, beside 500."""

    def compiled(path: Any, target: Target, **_: Any) -> Profile:
        operators = load(Path(path)).entry_points()[0][1].operators
        took = 500 + sum(us.get(operator.name, 0) for operator in operators)
        return Profile(str(path), target.name, "SM0", (), {"fake": "1.0"}, 2.0, (figures(took),))

    return compiled


@pytest.mark.parametrize(
    ("addition", "winner", "before"),
    [(-1, "as exported, the mask before the join", True), (1, "as exported", False)],
)
def test_a_target_whose_every_signature_is_best_unsplit_says_where_its_masks_go(
    addition: int, winner: str, before: bool
) -> None:
    alone = replace(load_target("qualcomm-htp"), split_signatures=("prefill*",))
    compiler = compiler_that_takes(ADD=addition, SOFTMAX=100)
    found = tuned({}, target=alone, signature="prefill_8", compiler=compiler)
    assert found.winner is not None
    assert str(found.winner.choice) == winner
    target = tuned_target(found)
    assert target.mask_before_join == before
    assert target.split_signatures == ()


def test_a_winner_that_cuts_at_the_norm_the_other_way_is_written_down(tmp_path: Path) -> None:
    compiler = compiler_that_takes(STABLEHLO_COMPOSITE=-1)
    found = tuned({}, QUANTIZED, signature="prefill_8", compiler=compiler)
    assert found.winner is not None
    assert str(found.winner.choice) == "split-above, a norm for each head"
    target = written(found, tmp_path)
    assert target.norm_per_head_from == 1
    assert "edge-opt tune" in target.sources["norm_per_head_from"]


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
        (VelaFigures("p", 9, 9, 10, 5, 1, 1, 1, 1, 1), VelaFigures("p", 9, 8, 9, 5, 1, 1, 1, 1, 1)),
        (VelaFigures("p", 9, 9, 10, 5, 1, 1, 1, 1, 1), VelaFigures("p", 9, 9, 11, 5, 1, 1, 1, 1, 1)),
        (VelaFigures("p", 9, 9, 10, 5, 1, 1, 2, 3, 1), VelaFigures("p", 9, 9, 10, 5, 1, 1, 5, 1, 1)),
        (figures(10**12), None),
    ],
)
def test_staying_on_the_npu_counts_first_then_time_then_bytes(better: Any, worse: Any) -> None:
    def trial(found: Any) -> Trial:
        return Trial(Choice(), 1.0, found)

    assert rank(trial(better)) < rank(trial(worse))


def test_the_best_comes_first_and_failures_last_with_their_reason() -> None:
    found = tuned({1: figures(300), 4: figures(120)}, QUANTIZED, signature="prefill_8")
    forms = [str(trial.choice) for trial in found.trials]
    assert forms[:2] == ["split", "unpack"]
    assert forms[-3:] == [
        "as exported",
        "as exported, the mask before the join",
        "split-above, tiles of 2 rows",
    ]
    assert [trial.figures and trial.figures.time and trial.figures.time.us for trial in found.trials] == [
        *[120] * (len(forms) - 3),
        *[300] * 2,
        None,
    ]
    assert found.trials[-1].failure == "nothing for 16"
    assert found.winner is found.trials[0]


def test_every_form_is_compiled_and_checked_for_the_chip_that_was_asked_for() -> None:
    """On the chip whose time is estimated, with the memory of the one that was asked for."""
    compiler, emulator = FakeCompiler({1: figures(1)}), FakeEmulator()
    tuned({}, signature="decode", chip="SSG2125P", compiler=compiler, comparer=emulator)
    assert compiler.asked == [("SA8775", ("--qualcomm_vtcm_size=2",))] * TRIALS
    assert emulator.asked == [(1, 2)]


# Numbers


def test_a_form_whose_numbers_are_off_is_listed_and_the_next_one_taken() -> None:
    found = tuned({4: figures(100), 1: figures(200)}, comparer=FakeEmulator(wrong=4))
    assert found.winner is not None
    assert found.winner.choice.form is None
    off = [trial for trial in found.trials if trial.verdict]
    assert {trial.verdict for trial in off} == {"numbers are off"}
    assert len(off) > 1
    assert not any(trial.usable for trial in off)
    assert found.checked == "its numbers are the compiler's own, 2 layers on SM8750's emulator"


@pytest.mark.parametrize("count", [1, 4])
def test_where_every_form_is_off_there_is_no_winner(count: int) -> None:
    found = tuned({count: figures(100)}, comparer=FakeEmulator(wrong=count))
    assert found.winner is None
    assert found.checked == "no trial's numbers are right"
    with pytest.raises(UsageError, match="no winner"):
        tuned_target(found)


# Memory


def test_a_search_that_was_interrupted_goes_on_where_it_was() -> None:
    answers = {1: figures(300), 4: figures(120)}
    first = tuned(answers)
    again = FakeCompiler({})
    found = tuned({}, compiler=again)
    assert again.asked == []
    assert [t.to_dict() for t in found.trials] == [t.to_dict() for t in first.trials]
    assert found.versions == {"fake": "1.0"}
    fresh = FakeCompiler(answers)
    tuned({}, compiler=fresh, fresh=True)
    assert len(fresh.asked) == len(first.trials)


def test_what_took_too_long_is_tried_again() -> None:
    def slow(*_: Any, **__: Any) -> Profile:
        raise CompilerTimeoutError("m: not done after 1 seconds")

    assert tuned({}, compiler=slow).winner is None
    assert tuned({1: figures(1)}).winner is not None


def test_another_form_flag_chip_or_model_is_another_trial(tmp_path: Path) -> None:
    target = load_target("qualcomm-htp")
    plan = TrialPlan("m", Choice(), target, "SM0", ("--a",), None, 1.0)
    others = (
        replace(plan, choice=Choice("split")),
        replace(plan, flags=("--b",)),
        replace(plan, chip="SM1"),
        replace(plan, target=replace(target, largest_joined_rows_bytes=1)),
    )
    keys = {one.key("model", "libraries") for one in (plan, *others)}
    assert len(keys | {plan.key("other", "libraries"), plan.key("model", "other")}) == 7


def test_other_libraries_make_another_trial_and_another_place_for_the_same_ones_does_not(
    tmp_path: Path,
) -> None:
    for place, content in {"one": b"1", "same": b"1", "new": b"2"}.items():
        (tmp_path / place).mkdir()
        (tmp_path / place / LIBRARY).write_bytes(content)
    one, same, new = (libraries_digest(tmp_path / place) for place in ("one", "same", "new"))
    assert one == same
    assert len({one, new, libraries_digest(None)}) == 3
    (tmp_path / "one" / LIBRARY).write_bytes(b"2, put in place of the first")
    assert libraries_digest(tmp_path / "one") not in {one, new}


# Interruptions


def test_a_compiler_that_starts_while_a_search_is_interrupted_is_ended_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sdk = pretend(tmp_path, monkeypatch, "import time; time.sleep(600)")
    interrupted = Event()

    def late(*arguments: Any, **options: Any) -> Profile:
        interrupted.wait()
        time.sleep(0.2)
        return profile(*arguments, **options)

    def interrupt(stage: str, *_: int) -> None:
        if stage == "compiling":
            interrupted.set()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tuned({}, sdk=sdk, compiler=late, jobs=2, progress=interrupt)
    assert not _running


def test_a_search_that_is_interrupted_leaves_no_compiler_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sdk = pretend(tmp_path, monkeypatch, "import time; time.sleep(600)")

    started: list[Any] = []

    def interrupt(stage: str, *_: int) -> None:
        if stage == "compiling":
            while not _running:
                time.sleep(0.01)
            started.extend(_running)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tuned({}, sdk=sdk, compiler=profile, progress=interrupt)
    assert started
    assert not _running
    assert {process.returncode for process in started} == {-signal.SIGKILL}


# Executors


@pytest.mark.slow
def test_trials_go_to_a_cluster() -> None:
    distributed = pytest.importorskip("distributed")
    require_qnn()
    with (
        distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster,
        distributed.Client(cluster) as client,
    ):
        found = tune(QUANTIZED, signature="prefill_8", blocks=1, executor=client.get_executor())
    assert found.winner is not None
    assert "the compiler's own" in found.checked or "the same bits" in found.checked
    assert all(
        isinstance(trial.figures, SpillFigures) and trial.figures.time
        for trial in found.trials
        if trial.usable
    )


def test_a_target_without_a_compiler_is_refused() -> None:
    with pytest.raises(
        UsageError,
        match="target 'generic' has no compiler that can be run here; there are: qualcomm-htp, ethos-u85",
    ):
        tune(DEMO, "generic")


# The winner


def written(found: Tuning, folder: Path) -> Target:
    write_target(tuned_target(found), folder / "mine.toml")
    return load_target(str(folder / "mine.toml"))


def test_the_written_target_loads_says_where_it_is_from_and_is_used(tmp_path: Path) -> None:
    target = written(tuned({16: figures(100)}, QUANTIZED, signature="prefill_8"), tmp_path)
    assert (target.form, target.rows_per_tile) == ("split-above", 2)
    assert target.versions == {"fake": "1.0", "chip": "SM8750"}
    assert target.stated().keys() - {"name", "summary", "sources", "versions"} == target.sources.keys()
    assert "edge-opt tune" in target.sources["form"]
    result = convert(QUANTIZED, dry_run=True, target=str(tmp_path / "mine.toml"), verify="none")
    assert result.model is not None
    matches = list(find_blocks(result.model.entry_points()[0][1]))
    assert {(match.heads, match.query_length) for match in matches if isinstance(match, Block)} == {(1, 2)}


def test_what_does_not_fit_on_the_chip_goes_where_the_target_has_it(tmp_path: Path) -> None:
    small = replace(load_target("qualcomm-htp"), on_chip_bytes=1)
    target = written(tuned({4: figures(100)}, target=small, signature="prefill_8"), tmp_path)
    assert target.form == "split-above", "what fits keeps its form"
    assert target.long_context == {"form": "split"}


def test_a_signature_that_is_best_as_exported_is_left_alone(tmp_path: Path) -> None:
    target = written(tuned({1: figures(100)}, signature="prefill_8"), tmp_path)
    assert not target.splits("prefill_8")
    assert target.splits("main")
    assert target.mask_before_join, "other signatures are rewritten as before"
    target = tuned_target(tuned({4: figures(100)}, signature="decode"))
    assert target.splits("decode")


def test_nothing_is_written_where_nothing_compiled_and_progress_is_told() -> None:
    told: list[tuple[str, int, int]] = []
    with pytest.raises(UsageError, match="there is no winner"):
        tuned_target(tuned({}, signature="decode", progress=lambda *step: told.append(step)))
    assert told == [("compiling", done, TRIALS) for done in range(TRIALS + 1)]


def test_a_file_is_not_written_over_and_must_be_a_target_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text("kept")
    target = load_target("generic")
    with pytest.raises(UsageError, match="exists"):
        write_target(target, file)
    assert file.read_text() == "kept"
    write_target(target, file, overwrite=True)
    assert load_target(str(file)) == target
    with pytest.raises(UsageError, match=r"must end in \.toml"):
        write_target(target, tmp_path / "mine.txt")


@pytest.mark.parametrize("name", ["qualcomm-htp", "intel-npu", "ethos-u85"])
def test_every_fact_survives_being_written(name: str, tmp_path: Path) -> None:
    odd = replace(load_target(name), versions={"a b": 'x"\\\n\x7f\u00e9\U0001f600', "n-1": ""})
    write_target(odd, tmp_path / "t.toml")
    assert load_target(str(tmp_path / "t.toml")) == odd


# The command


def test_the_command_prints_one_table_and_writes_the_target(
    capsys: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "edge_opt.npu.tune", lambda path, target, **o: tuned({4: figures(150)}, path, target=target, **o)
    )
    file = tmp_path / "mine.toml"
    command = ("tune", DEMO, "--layers", "1", "--signatures", "decode", "-o", file)
    result = run(capsys, *command)
    assert result.code == 0
    assert "one layer of decode, best first" in result.out
    assert "0.150" in result.out
    assert "Best: split: the same bits as exported, 2 layers on SM8750's emulator." in result.out
    assert "left out, as exported: nothing for 1" in result.out
    assert load_target(str(file)).splits("decode")
    assert run(capsys, *command).code == 2
    data = run(capsys, *command, "--force", "--json").json
    assert data["winner"]["form"] == "split"
    assert len(data["trials"]) == TRIALS


# The real ones


@pytest.mark.slow
def test_the_real_hexagon_compiler_finds_a_form_for_the_demo(tmp_path: Path) -> None:
    require_qnn()
    found = tune(QUANTIZED, signature="prefill_8", blocks=1)
    assert found.winner is not None
    assert isinstance(found.winner.figures, SpillFigures)
    assert found.winner.figures.taken == found.winner.figures.operators
    assert "qnn" in written(found, tmp_path).versions


@pytest.mark.slow
def test_the_real_vela_finds_a_form_for_the_demo(tmp_path: Path) -> None:
    try:
        find_vela()
    except CompilerMissingError as error:
        pytest.skip(str(error))
    found = tune(QUANTIZED, "ethos-u85", signature="prefill_8", blocks=1)
    assert all(trial.figures is not None for trial in found.trials)
    cycles = [trial.figures.cycles for trial in found.trials if isinstance(trial.figures, VelaFigures)]
    assert len(cycles) == len(found.trials)
    assert "ethos-u-vela" in written(found, tmp_path).versions
