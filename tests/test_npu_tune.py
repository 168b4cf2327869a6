"""tune: one block of the real model in every form, ranked by what a compiler says of it; the best becomes a target."""

from __future__ import annotations

import json
import os
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from cli_runs import DEMO, QUANTIZED, run

from edge_opt.attention.block import Block, SingleHead, find_blocks
from edge_opt.conversion import convert
from edge_opt.ir import load
from edge_opt.npu import (
    Choice,
    CompilerFailedError,
    CompilerMissingError,
    Profile,
    SpillFigures,
    Trial,
    Tuning,
    VelaFigures,
    choices,
    cut_block,
    tune,
    tuned_target,
    write_target,
)
from edge_opt.npu.ethos import find_vela
from edge_opt.npu.hexagon import SDK_VARIABLES
from edge_opt.npu.search import rank
from edge_opt.schema.errors import UsageError
from edge_opt.targets import Target, load_target

if TYPE_CHECKING:
    from collections.abc import Sequence

Captured = pytest.CaptureFixture[str]


def figures(
    read: int, *, written: int = 0, taken: int = 9, partitions: int = 1, steps: int = 5
) -> SpillFigures:
    return SpillFigures("prefill_8", 9, taken, partitions, 0, 0, read, written, steps, floor=100)


class FakeCompiler:
    """Reads bytes by form and level from a table; what is not in it fails."""

    def __init__(self, answers: dict[tuple[int, str], SpillFigures]) -> None:
        self._answers = answers
        self.asked: list[tuple[int, str]] = []
        self._softmaxes: dict[Any, int] = {}

    def __call__(self, path: Any, target: Target, *, flags: Sequence[str] | None, **_: Any) -> Profile:
        if path not in self._softmaxes:
            operators = load(Path(path)).entry_points()[0][1].operators
            self._softmaxes[path] = sum(operator.name == "SOFTMAX" for operator in operators)
        softmaxes = self._softmaxes[path]
        level = next(flag.rpartition("=")[2] for flag in flags or () if "optimization" in flag)
        self.asked.append((softmaxes, level))
        found = self._answers.get((softmaxes, level))
        if found is None:
            raise CompilerFailedError(f"block.tflite: no {level} for {softmaxes}")
        return Profile(str(path), target.name, "SM0", tuple(flags or ()), {"fake": "1.0"}, 2.0, (found,))


def tuned(answers: dict[tuple[int, str], SpillFigures], path: Path = DEMO, **options: Any) -> Tuning:
    return tune(path, "qualcomm-htp", compiler=FakeCompiler(answers), **options)


# One block


@pytest.mark.parametrize("path", [DEMO, QUANTIZED])
def test_a_layer_has_the_real_shapes_and_one_attention(path: Path) -> None:
    model = load(path)
    name, graph = model.entry_points()[0]
    whole = [match for match in find_blocks(graph) if isinstance(match, Block)]
    layer = cut_block(model)
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
    layer = cut_block(load(QUANTIZED), "prefill_8").model
    result = convert(layer)
    assert [(site.heads, site.proof is not None and site.proof.bitwise) for site in result.converted] == [
        (4, True)
    ]


def test_several_layers_can_be_cut_out() -> None:
    layers = cut_block(load(DEMO), "decode", blocks=2)
    assert layers.blocks == 2
    assert sum(op.name == "SOFTMAX" for op in layers.model.subgraphs[0].operators) == 2
    assert cut_block(load(DEMO), "decode", blocks=99).blocks == 3


def test_a_signature_that_is_not_there_is_named() -> None:
    with pytest.raises(UsageError, match="signature 'prefil' does not exist, there are: prefill_8, decode"):
        cut_block(load(DEMO), "prefil")


def test_a_model_without_several_heads_has_nothing_to_tune_for() -> None:
    model = convert(DEMO, dry_run=True, verify="none").model
    assert model is not None
    with pytest.raises(UsageError, match="holds no multi-head attention"):
        cut_block(model)


# What is tried


def test_chains_are_tried_where_a_head_does_not_fit_on_the_chip() -> None:
    block = replace(cut_block(load(DEMO), "prefill_8").attention, query_length=512)
    target = load_target("qualcomm-htp")
    forms = [str(choice) for choice in choices(target, block)]
    assert forms == [
        "as exported",
        "split",
        "unpack",
        "split-above-rope",
        "slice",
        "split, projected per head",
        "split, tiles of 128 rows",
    ]
    grouped = [str(choice) for choice in choices(target, replace(block, kv_heads=2))]
    assert set(grouped) - set(forms) == {"split-keys-batched"}
    limited = replace(target, largest_mask_bytes=64 * sum(block.key_lengths) * 2)
    assert [str(choice) for choice in choices(limited, block)][:3] == [
        "as exported", "split, tiles of 64 rows", "unpack, tiles of 64 rows",
    ]  # fmt: skip
    small = replace(target, on_chip_bytes=1)
    assert [str(choice) for choice in choices(small, block)][len(forms) :] == [
        f"split, tiles of {rows} rows, chained" for rows in (64, 32, 16)
    ]


def test_a_choice_holds_for_every_length_and_signature() -> None:
    target = replace(load_target("qualcomm-htp"), on_chip_bytes=1)
    chosen = Choice("unpack").applied(target)
    assert chosen.splits("decode")
    assert (chosen.form, chosen.rows_per_tile, chosen.chain) == ("unpack", None, False)
    assert not chosen.long_context
    assert chosen.largest_mask_bytes == target.largest_mask_bytes


# Ranking


@pytest.mark.parametrize(
    ("better", "worse"),
    [
        (figures(200), figures(100, taken=8)),
        (figures(200), figures(100, partitions=2)),
        (figures(100, written=50), figures(140, written=20)),
        (figures(100, steps=4), figures(100, steps=5)),
        (VelaFigures("p", 9, 9, 10, 5, 1, 1, 1, 1, 1), VelaFigures("p", 9, 8, 9, 5, 1, 1, 1, 1, 1)),
        (VelaFigures("p", 9, 9, 10, 5, 1, 1, 1, 1, 1), VelaFigures("p", 9, 9, 11, 5, 1, 1, 1, 1, 1)),
        (figures(10**12), None),
    ],
)
def test_staying_on_the_npu_counts_first_then_bytes_then_steps(better: Any, worse: Any) -> None:
    def trial(found: Any) -> Trial:
        return Trial(Choice(), {}, 1.0, found)

    assert rank(trial(better)) < rank(trial(worse))


def test_the_best_comes_first_and_failures_last_with_their_reason() -> None:
    found = tuned({(1, "O3"): figures(300), (4, "O2"): figures(120), (1, "O2"): figures(200)})
    assert found.winner is not None
    assert (str(found.winner.choice), found.winner.level) == ("split", {"qualcomm_optimization_level": "O2"})
    reads = [trial.figures.ddr_read for trial in found.trials if isinstance(trial.figures, SpillFigures)]
    assert reads == sorted(reads)
    failed = [trial for trial in found.trials if trial.figures is None]
    assert found.trials[-len(failed) :] == tuple(failed)
    assert {trial.failure for trial in failed} >= {"no O1 for 1", "no O3 for 4"}


def test_every_level_is_tried_with_every_form_and_the_target_s_other_flags_stay() -> None:
    compiler = FakeCompiler({})
    target = replace(load_target("qualcomm-htp"), compiler_flags={"other": "7"})
    seen: list[Sequence[str]] = []

    def spy(path: Any, target: Target, **options: Any) -> Profile:
        seen.append(options["flags"])
        return compiler(path, target, **options)

    tune(DEMO, target, signature="decode", compiler=spy)
    assert {level for _, level in compiler.asked} == {"O1", "O2", "O3"}
    assert len(compiler.asked) == 3 * 6
    assert all(flags[0] == "--other=7" and len(flags) == 2 for flags in seen)


def test_a_target_without_a_compiler_is_refused() -> None:
    with pytest.raises(
        UsageError, match="target 'generic' has no compiler here; there are: qualcomm-htp, ethos-u85"
    ):
        tune(DEMO, "generic")


# The winner


def written(found: Tuning, folder: Path) -> Target:
    write_target(tuned_target(found), folder / "mine.toml")
    return load_target(str(folder / "mine.toml"))


def test_the_written_target_loads_says_where_it_is_from_and_is_used(tmp_path: Path) -> None:
    target = written(tuned({(16, "O2"): figures(100)}, QUANTIZED, signature="prefill_8"), tmp_path)
    assert (target.form, target.rows_per_tile) == ("split", 2)
    assert target.quantized_compiler_flags == {"qualcomm_optimization_level": "O2"}
    assert target.versions == {"fake": "1.0", "chip": "SM0"}
    blank = Target("", "")
    stated = {f.name for f in fields(Target) if getattr(target, f.name) != getattr(blank, f.name)}
    assert stated - {"name", "summary", "sources", "versions"} == set(target.sources)
    assert "edge-opt tune" in target.sources["form"]
    result = convert(QUANTIZED, dry_run=True, target=str(tmp_path / "mine.toml"), verify="none")
    assert result.compiler_flags == ["--qualcomm_optimization_level=O2"]
    assert result.model is not None
    matches = list(find_blocks(result.model.entry_points()[0][1]))
    assert {match.query_length for match in matches if isinstance(match, SingleHead)} == {2}


def test_what_does_not_fit_on_the_chip_goes_where_the_target_has_it(tmp_path: Path) -> None:
    small = replace(load_target("qualcomm-htp"), on_chip_bytes=1)
    found = tune(DEMO, small, compiler=FakeCompiler({(4, "O1"): figures(100)}), signature="prefill_8")
    target = written(found, tmp_path)
    assert target.form == "split-above-rope", "what fits keeps its form"
    assert target.long_context == {"form": "split", "chain": False}
    assert target.long_context_compiler_flags == {"qualcomm_optimization_level": "O1"}
    assert target.compiler_flags == {}
    quantized = tuned_target(replace(found, quantized=True))
    assert quantized.quantized_long_context == target.long_context
    assert quantized.quantized_long_context_compiler_flags == target.long_context_compiler_flags


def test_a_signature_that_is_best_as_exported_is_left_alone(tmp_path: Path) -> None:
    target = written(tuned({(1, "O2"): figures(100)}, signature="prefill_8"), tmp_path)
    assert not target.splits("prefill_8")
    assert target.splits("main")
    target = tuned_target(tuned({(4, "O2"): figures(100)}, signature="decode"))
    assert target.splits("decode")


def test_nothing_is_written_where_nothing_compiled_and_progress_is_told() -> None:
    told: list[tuple[str, int, int]] = []
    with pytest.raises(UsageError, match="there is no winner"):
        tuned_target(tuned({}, signature="decode", progress=lambda *step: told.append(step)))
    assert told[0] == ("compiling", 0, 18)
    assert told[-1] == ("compiling", 18, 18)


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
    compiler = FakeCompiler({(4, "O2"): figures(150), (1, "O3"): figures(300)})
    monkeypatch.setattr("edge_opt.cli.tune.tune", lambda *a, **o: tune(*a, **o, compiler=compiler))
    file = tmp_path / "mine.toml"
    result = run(capsys, "tune", str(DEMO), "--signature", "decode", "-o", str(file))
    assert result.code == 0
    assert "one layer of decode, best first" in result.out
    assert "1.500" in result.out
    assert "split, O1: no O1 for 4" in result.out
    assert load_target(str(file)).splits("decode")
    again = run(capsys, "tune", str(DEMO), "--signature", "decode", "-o", str(file))
    assert again.code == 2
    found = run(capsys, "tune", str(DEMO), "--signature", "decode", "-o", str(file), "--force", "--json")
    data = json.loads(found.out)
    assert data["winner"]["form"] == "split"
    assert len(data["trials"]) == 18


# The real ones


@pytest.mark.slow
def test_the_real_hexagon_compiler_finds_a_form_for_the_demo(tmp_path: Path) -> None:
    if not any(os.environ.get(name) for name in SDK_VARIABLES):
        pytest.skip(f"Qualcomm's libraries are not installed: set {' or '.join(SDK_VARIABLES)}")
    found = tune(QUANTIZED, signature="prefill_8")
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
    found = tune(QUANTIZED, "ethos-u85", signature="prefill_8")
    assert all(trial.figures is not None for trial in found.trials)
    cycles = [trial.figures.cycles for trial in found.trials if isinstance(trial.figures, VelaFigures)]
    assert len(cycles) == len(found.trials)
    assert "ethos-u-vela" in written(found, tmp_path).versions
