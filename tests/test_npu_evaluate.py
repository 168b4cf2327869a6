"""evaluate --on npu: text is read as a phone reads it, and what a bundle predicts is judged against the checkpoint."""

import math
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import generation_models as models
import numpy as np
import pytest
from cli_runs import Captured, Patch, run
from pretend_npu import Compilers, calls, emulator, require_qnn
from pretend_stages import at_once, checkpoint

from edge_opt import evaluate
from edge_opt.base.errors import UsageError
from edge_opt.base.words import no_progress
from edge_opt.building import evaluation, stages
from edge_opt.building.evaluation import ratio_of, score_of
from edge_opt.building.stages import Job, StageFailedError
from edge_opt.npu import Compiler, CompilerFailedError
from edge_opt.npu.qualcomm import Qualcomm
from edge_opt.npu.scoring import Text, read

LONG = Text((3, 14, 15, 92, 65, 35, 89, 79, 32), (38, 46, 26))
TEXTS = [LONG, Text((2, 71), (82, 81, 8)), Text((5,), (77, 21, 5))]


@pytest.fixture
def gemma(tmp_path: Path) -> Path:
    return models.packed(tmp_path)


def test_every_token_is_predicted_from_all_before_it_however_they_were_read(gemma: Path) -> None:
    found = read(gemma, TEXTS)
    assert [array.shape for array in found] == [(3, models.WORDS)] * 3
    for text, rows in zip(TEXTS, found, strict=True):
        longer = [
            Text((*text.before, *text.scored[:at]), (token,))
            for at, token in enumerate(text.scored)
        ]
        for row, (again,) in zip(rows, read(gemma, longer), strict=True):
            np.testing.assert_allclose(again, row, rtol=1e-5, atol=1e-5)


def test_the_emulator_reads_as_the_cpu_and_tells_steps(gemma: Path, compiler: Compilers) -> None:
    steps: list[tuple[int, int]] = []
    sdk = compiler(emulator())
    found = read(gemma, TEXTS, Compiler(sdk=sdk), lambda *step: steps.append(step))
    for rows, expected in zip(found, read(gemma, TEXTS), strict=True):
        np.testing.assert_array_equal(rows, expected)
    prefills, decodes = 2 + 1, 3 * 3
    assert steps == [(done, prefills + decodes) for done in range(prefills + decodes + 1)]
    assert len(calls(sdk)) == 2, "prefill and decode are compiled once each"


def test_a_prefill_that_no_text_needs_is_not_compiled(gemma: Path, compiler: Compilers) -> None:
    sdk = compiler(emulator())
    read(gemma, [Text((5,), (77,))], Compiler(sdk=sdk))
    assert len(calls(sdk)) == 1


def test_a_failing_emulator_names_the_entry_point_and_a_long_text_is_refused(
    gemma: Path, compiler: Compilers
) -> None:
    words = r"gemma\.litertlm, (prefill_4|decode): the compiler ended with code 6"
    with pytest.raises(CompilerFailedError, match=words):
        read(gemma, TEXTS, Compiler(sdk=compiler("raise SystemExit(6)")))
    with pytest.raises(UsageError, match="17 tokens do not fit into its cache of 16"):
        read(gemma, [Text(tuple(range(1, 16)), (1, 2, 3))])


def test_closeness_is_by_position() -> None:
    rows = np.log(np.array([[0.5, 0.25, 0.25], [0.1, 0.1, 0.8]]))
    other = np.log(np.array([[0.25, 0.5, 0.25], [0.1, 0.1, 0.8]])) + 7
    found = score_of(rows, [0, 2], (), "m", other)
    assert found.kl == pytest.approx((0.5 * math.log(2) - 0.25 * math.log(2)) / 2)
    assert found.top1_agreement == 0.5
    assert found.perplexity == pytest.approx(1 / math.sqrt(0.25 * 0.8))


class Pretended:
    """A checkpoint that predicts what the bundle does on the CPU, a little less surely."""

    def __init__(self, bundle: Path, words: int = models.WORDS) -> None:
        self.bundle, self.words = bundle, words
        self.factor = 0.9
        self.read: list[tuple[str, int]] = []

    def text(self, text: str, count: int, cache: int, most: int = 120) -> Text:
        """One of the texts after the other."""
        assert cache == models.CACHE
        self.read.append((text, count))
        return TEXTS[len(self.read) % 2 - 1]

    def logits(self, text: Text) -> Any:
        """As torch has them."""
        (rows,) = read(self.bundle, [text])
        return SimpleNamespace(numpy=lambda: self.factor * rows[:, : self.words])


@pytest.fixture
def pretended(gemma: Path, monkeypatch: Patch) -> Pretended:
    """In the place of the checkpoint's model."""
    model = Pretended(gemma)
    monkeypatch.setattr(evaluation, "Checkpoint", lambda _: model)
    monkeypatch.setattr(evaluation, "check_runtimes", lambda bundles: {})
    monkeypatch.setattr(stages, "carry_out", at_once)
    return model


@pytest.mark.parametrize("factor", [-9.0, math.nan])
def test_an_export_that_predicts_other_tokens_than_its_checkpoint_ends_the_build(
    gemma: Path, tmp_path: Path, pretended: Pretended, factor: float
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('"one two"\n"one two three four"\n')
    inputs = {"exported": str(gemma), "base": "hf", "prompts": str(prompts)}
    job = Job("check", "", inputs)
    (note,) = evaluation.check_export(job, no_progress)["notes"]
    assert re.fullmatch(
        r"Compared with the checkpoint: mean KL divergence 0\.0\d+ nats on 3 tokens after 9", note
    )
    assert pretended.read == [("one two three four", 16)]
    pretended.factor = 0.7
    (note,) = evaluation.check_export(job, no_progress)["notes"]
    assert note.startswith(
        "Warning: the export's predictions differ from the checkpoint's: mean KL"
    )
    pretended.factor = factor
    with pytest.raises(StageFailedError, match="are not the checkpoint's: mean KL divergence"):
        evaluation.check_export(job, no_progress)


@pytest.fixture
def command(gemma: Path, tmp_path: Path, pretended: Pretended) -> tuple[object, ...]:
    prompts = tmp_path / "held.jsonl"
    prompts.write_text('"one two three four"\n"five six seven"\n')
    return ("evaluate", checkpoint(tmp_path / "hf"), gemma, "--prompts", prompts, "--on", "npu")


def test_the_command_has_a_row_for_cpu_and_npu(
    command: tuple[object, ...], compiler: Compilers, capsys: Captured
) -> None:
    sdk = compiler(emulator("array = array * np.float32(0.8)"))
    options = ("--tokens", 6, "--sdk", sdk)
    reference, cpu, npu = run(capsys, *command, *options, "--json").json["models"]
    assert (reference["kl"], reference["top1_agreement"], reference["tokens"]) == (0, 1, 6)
    assert 0 < cpu["kl"] < 0.05
    assert (cpu["top1_agreement"], cpu["on_npu"]) == (1, False)
    assert npu["kl"] > cpu["kl"]
    assert npu["on_npu"]
    shown = run(capsys, *command, *options)
    assert shown.code == 0, shown
    _, *rows = shown.out.splitlines()
    assert rows[0].split() == [
        str(command[1]),
        *rows[0].split()[1:-4],
        "1.000",
        "100.0",
        "%",
        "0.0000",
    ]
    assert "in the NPU's emulator" in shown.out
    assert "Scored on 2 held-out prompts." in shown.out
    assert run(capsys, *command, *options, "--max-perplexity-ratio", 0.1).code == 1


def test_prompts_are_spread_over_those_given_and_another_vocabulary_is_refused(
    gemma: Path, tmp_path: Path, monkeypatch: Patch, pretended: Pretended
) -> None:
    for check in ("check_emulator", "libraries"):
        monkeypatch.setattr(Qualcomm, check, lambda *_: None)
    monkeypatch.setattr(evaluation, "read", lambda name, texts, *_: read(name, texts))
    prompts = tmp_path / "held.jsonl"
    prompts.write_text("".join(f'"a prompt {number}"\n' for number in range(12)))
    reference = checkpoint(tmp_path / "hf")
    found = evaluate(reference, gemma, prompts, on="npu", tokens=9)
    assert [model.on_npu for model in found.models] == [False, False, True]
    assert [one.ratio_error for one in found.models if one.ratio == 1] == [0]
    assert pretended.read == [(f"a prompt {at}", 3) for at in (0, 3, 6, 9)]
    pretended.words = 100
    with pytest.raises(
        UsageError, match="a vocabulary of 128 tokens, and the checkpoint one of 100"
    ):
        evaluate(reference, gemma, prompts, on="npu")


def test_the_error_of_a_ratio_in_the_emulator_is_that_of_its_texts(
    gemma: Path, monkeypatch: Patch, command: tuple[object, ...], compiler: Compilers
) -> None:
    lengths: list[Sequence[int]] = []

    def noted(own: Any, reference: Any, of_texts: Sequence[int] = ()) -> tuple[float, float]:
        lengths.append(of_texts)
        return ratio_of(own, reference, of_texts)

    monkeypatch.setattr(evaluation, "ratio_of", noted)
    sdk = compiler(emulator("array = array * np.float32(0.8)"))
    evaluate(command[1], gemma, command[4], on="npu", tokens=6, compiler=Compiler(sdk=sdk))
    assert [*filter(None, lengths)] == [[3, 3]] * 3  # the checkpoint, CPU kernels, the emulator


def test_what_cannot_be_evaluated_is_refused(
    command: tuple[object, ...], compiler: Compilers, capsys: Captured
) -> None:
    assert "onnxruntime-qnn" in run(capsys, *command).failed_in_one_sentence(2)
    sdk = ("--sdk", compiler(emulator()))
    name, _, gemma, *rest = command
    other = shutil.copy(Path(str(gemma)), Path(str(gemma)).with_name("float.litertlm"))
    told = run(capsys, name, other, gemma, *rest, *sdk).failed_in_one_sentence(2)
    assert "float.litertlm is a float bundle: give the checkpoint first" in told
    told = run(capsys, *command[:-1], "cpu", *sdk).failed_in_one_sentence(2)
    assert "--sdk does not apply with --on cpu" in told


def test_a_text_of_one_token_is_not_scored(
    command: tuple[object, ...], compiler: Compilers, capsys: Captured, pretended: Pretended
) -> None:
    pretended.text = lambda *_: Text((), (5,))  # type: ignore[method-assign]
    told = run(capsys, *command, "--sdk", compiler(emulator())).failed_in_one_sentence(2)
    assert "no token of the held-out prompts could be scored: give longer prompts" in told


@pytest.mark.slow
def test_the_real_emulator_reads_a_tiny_model_as_the_cpu_does(gemma: Path) -> None:
    require_qnn()
    found = read(gemma, TEXTS, Compiler())
    on_cpu = read(gemma, TEXTS)
    for rows, own, text in zip(on_cpu, found, TEXTS, strict=True):
        for expected, one, token in zip(rows, own, text.scored, strict=True):
            assert (score_of(expected[None], [token], (), "npu", one[None]).kl or 0) < 1e-3
