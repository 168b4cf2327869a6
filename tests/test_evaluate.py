"""`edge-opt evaluate`: the arithmetic, the refusals and the gate. The models are small functions here."""

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest
from bundles import bundle, model_part
from cli_runs import run
from pretend_stages import COMPILED, FLOAT, METADATA, QUANTIZED, checkpoint
from text_parser import parse

from edge_opt.base.errors import EdgeOptError, UsageError
from edge_opt.build import evaluation, stages
from edge_opt.build.evaluation import Checkpoint, Evaluation, ModelScore, Runtime, Said, cut
from edge_opt.build.stages import Job, Processes, StageAnswer, StageFailedError
from edge_opt.ir import to_bytes

TEXTS = ["one two three four", "five six seven eight nine ten"]
HUGGING_FACE = (6, {}, b"words")


def said(text: str, *, chance: float, wrong: int = 0) -> Said:
    """A token a word, whose id is its length; each has this chance."""
    parts = cut(text)
    assert parts is not None
    before, scored = ([len(word) for word in part.split()] for part in parts)
    generated = [("a", 1 + (at < wrong)) for at in range(4)]
    return Said(before, scored, [math.log(chance)] * len(scored), generated)


@dataclass
class Runtimes(Processes):
    """Models by the stem of their path: how likely each finds every token, and how many generated ones are wrong."""

    models: dict[str, tuple[float, int]]
    instead: Callable[[Job, list[Said]], list[Said]] = lambda _, found: found
    jobs: list[Job] = field(default_factory=list)

    def check_runtimes(self, *, checkpoint: bool) -> None:
        """All is there."""

    def carry_out(self, job: Job, log: Path, scratch: Path, progress: Any) -> StageAnswer:
        """One model."""
        self.jobs.append(job)
        progress(job.stage, 1, 2)
        chance, wrong = self.models[Path(job.inputs["model"]).stem]
        found = self.instead(job, [said(text, chance=chance, wrong=wrong) for text in TEXTS])
        judged = job.options.get("judged", {})
        agreed = {name: sum(one[1] == 1 for every in said for one in every) for name, said in judged.items()}
        return StageAnswer({"said": [asdict(one) for one in found], "agreed": agreed})


class Place:
    """A checkpoint, two bundles of it, and held-out text."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.reference = checkpoint(folder / "gemma")
        self.good = self.write("good", QUANTIZED)
        self.bad = self.write("bad", QUANTIZED)
        self.prompts = folder / "held-out.jsonl"
        self.prompts.write_text("".join(json.dumps(text) + "\n" for text in TEXTS))

    def write(self, name: str, text: str, *others: Any) -> Path:
        """A bundle with this prefill/decode model."""
        path = self.folder / f"{name}.litertlm"
        path.write_bytes(
            bundle(
                [*(others or (METADATA, HUGGING_FACE)), model_part("prefill_decode", to_bytes(parse(text)))]
            )
        )
        return path


MODELS = {"gemma": (0.5, 0), "good": (0.4, 1), "bad": (0.1, 3)}


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def evaluated(place: Place, tools: Runtimes | None = None, **options: Any) -> Evaluation:
    told = {
        "reference": place.reference,
        "bundles": [place.good, place.bad],
        "prompts": place.prompts,
        **options,
    }
    return evaluation.evaluate(**told, toolchain=tools or Runtimes(MODELS))


# --- the figures ---


def test_perplexity_is_one_over_the_mean_chance_and_agreement_a_share_of_what_was_generated(
    place: Place,
) -> None:
    found = evaluated(place)
    assert [Path(model.source).stem for model in found.models] == ["gemma", "good", "bad"]
    assert [model.perplexity for model in found.models] == pytest.approx([2.0, 2.5, 10.0])
    assert [model.top1_agreement for model in found.models] == [1.0, 6 / 8, 2 / 8]
    assert {model.tokens for model in found.models} == {4}
    assert found.prompts == 2


def test_perplexity_counts_every_token_alike_and_is_infinite_without_any_chance() -> None:
    uneven = [Said([1], [2], [math.log(0.5)]), Said([1], [2, 3, 4], [math.log(0.25)] * 3)]
    assert ModelScore.of("m", uneven, 0).perplexity == pytest.approx(2 ** (7 / 4))
    found = ModelScore.of("m", [Said([1], [2], [-math.inf])], 0)
    assert found.perplexity == math.inf
    assert Evaluation([found], 1).to_dict()["models"][0]["perplexity"] is None
    models = [ModelScore("a", 1, 2.0, 1.0), ModelScore("b", 1, math.nan, 1.0)]
    assert not Evaluation(models, 1).within(1e9), "what is no number passes no gate"


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("one two three four", ("one two three", " four")),
        ("  one two\n", ("one", " two")),
        ("wordwithoutspace", ("wordwith", "outspace")),
        ("a", None),
        ("  ", None),
    ],
)
def test_the_second_half_of_a_prompt_is_scored_from_a_space_on(
    text: str, parts: tuple[str, str] | None
) -> None:
    assert cut(text) == parts


def test_of_a_long_prompt_only_the_end_is_scored() -> None:
    parts = cut("word " * 1000)
    assert parts is not None
    assert 500 < len(parts[1]) <= 512
    assert "".join(parts) == ("word " * 1000).strip()


def test_the_reference_scores_the_tokens_that_litert_lm_made_and_judges_what_was_generated(
    place: Place,
) -> None:
    tools = Runtimes(MODELS)
    evaluated(place, tools)
    assert [Path(job.inputs["model"]).stem for job in tools.jobs] == ["good", "bad", "gemma"]
    assert [one["scored"] for one in tools.jobs[-1].options["said"]] == [[4], [5, 4, 3]]
    assert list(tools.jobs[-1].options["judged"]) == [str(place.good), str(place.bad)]
    assert tools.jobs[0].options["tokenizer"] == str(place.reference.resolve())


class Engine(Runtime):
    """A bundle that says the same words whatever it is told, one token each."""

    def __init__(self, words: str) -> None:
        self.words, self.asked = words.split(), 0

    def generate(self, told: Any, count: int) -> list[tuple[str, int]]:
        self.asked += 1
        at = len("".join(told[1:]))
        return [(word, ord(word)) for word in self.words[at : at + count]]


def test_a_bundle_judges_tokens_after_the_other_models_own_words() -> None:
    engine = Engine("a b c d e f")
    other = [(word, ord(word)) for word in "axcdyf"]
    assert engine.agreeing(("told", "scored"), other) == 4
    assert engine.asked == 3  # once, and again after each token that differs
    assert engine.agreeing(("told", "scored"), []) == 0


@pytest.mark.parametrize(("limit", "code"), [(None, 0), (5.1, 0), (4.9, 1), (1.1, 1)])
def test_a_limit_is_a_gate(
    place: Place,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    limit: float | None,
    code: int,
) -> None:
    monkeypatch.setattr(evaluation, "Processes", lambda: Runtimes(MODELS))
    words = ["evaluate", place.reference, place.good, place.bad, "--prompts", place.prompts, "--json"]
    ran = run(capsys, *words, *([] if limit is None else ["--max-perplexity-ratio", limit]))
    assert ran.code == code
    models = ran.json["models"]
    assert set(models[0]) == {"source", "tokens", "perplexity", "top1_agreement", "kl", "on_npu"}
    assert models[2]["perplexity"] == pytest.approx(10)
    assert ("more than" in ran.err) == bool(code)


def test_the_table_has_a_row_for_each_model(
    place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(evaluation, "Processes", lambda: Runtimes(MODELS))
    ran = run(capsys, "evaluate", place.reference, place.good, "--prompts", place.prompts)
    assert ran.code == 0
    head, reference, good, _, note = ran.out.splitlines()
    assert reference.split() == [str(place.reference), "2.00", "1.000", "100.0", "%"]
    assert good.split() == [str(place.good), "2.50", "1.250", "75.0", "%"]
    assert note == "On 4 tokens of 2 held-out prompts."
    assert "perplexity" in head


# --- what cannot be evaluated ---


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda p: p.prompts.write_text(""), "is empty"),
        (lambda p: p.prompts.write_text('"word"\n"a"\n'), "prompt 2 is too short to be scored: give"),
        (lambda p: p.write("bad", COMPILED), "bad.litertlm is compiled for an NPU already: give"),
        (lambda p: p.bad.unlink(), "bad.litertlm does not exist"),
    ],
)  # fmt: skip
def test_bad_input_is_refused_before_anything_runs(
    place: Place, change: Callable[[Place], Any], sentence: str
) -> None:
    change(place)
    tools = Runtimes(MODELS)
    with pytest.raises(EdgeOptError) as caught:
        evaluated(place, tools)
    assert sentence in str(caught.value)
    assert tools.jobs == []


def test_a_compiled_bundle_is_refused_with_the_one_to_give_instead(place: Place) -> None:
    made = place.write("compiled", COMPILED)
    before = place.folder / "compiled.work" / "quantize" / "model.litertlm"
    before.parent.mkdir(parents=True)
    before.write_bytes(place.good.read_bytes())
    with pytest.raises(UsageError, match=str(before)):
        evaluated(place, bundles=made)


def test_a_checkpoint_is_no_bundle_and_nothing_is_no_bundle(place: Place) -> None:
    with pytest.raises(UsageError, match="is a checkpoint: give it first"):
        evaluated(place, bundles=[place.good, place.reference])
    with pytest.raises(UsageError, match="give a bundle beside the reference"):
        evaluated(place, bundles=[])


def test_a_reference_of_other_tokens_is_refused(place: Place) -> None:
    def other(job: Job, found: list[Said]) -> list[Said]:
        return (
            found
            if "good" in job.inputs["model"]
            else [Said([9], one.scored, one.likelihoods) for one in found]
        )

    reference = place.write("float", FLOAT)
    tools = Runtimes({**MODELS, "float": (0.5, 0)}, other)
    with pytest.raises(
        UsageError, match=r"has another vocabulary than the bundle: it splits held-out prompt 1"
    ):
        evaluated(place, tools, reference=reference, bundles=place.good)


def test_what_is_not_installed_is_said_before_anything_runs(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stages, "version", lambda _: "1")
    monkeypatch.setattr(stages, "find_spec", lambda name: None if name == "torch" else object())
    with pytest.raises(UsageError, match="torch is not installed: pip install"):
        evaluation.evaluate(place.reference, place.good, place.prompts)
    monkeypatch.undo()
    monkeypatch.setattr(stages, "_RUNTIME", "no-such-package")
    with pytest.raises(UsageError, match=r"pip install '\.\[lm\]'"):
        evaluation.evaluate(place.reference, place.good, place.prompts)


def test_a_model_that_does_not_run_is_named_with_what_the_runtime_said(place: Place) -> None:
    def fail(self: object, job: Job, log: Path, scratch: Path, progress: object) -> StageAnswer:
        log.write_text("noise\nE0000 00:00:1.5  22 engine.cc:1004] Failed to run prefill: no room\nmore\n")
        raise StageFailedError("RuntimeError: failed")

    tools = Runtimes(MODELS)
    tools.carry_out = fail.__get__(tools)  # type: ignore[method-assign]
    with pytest.raises(StageFailedError) as caught:
        evaluated(place, tools)
    assert (
        str(caught.value)
        == "good.litertlm did not run: RuntimeError: failed (Failed to run prefill: no room)"
    )


def test_a_prompt_longer_than_the_cache_is_refused_or_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    class Small(Engine):
        def __init__(self, _: str) -> None:
            super().__init__("a b c")
            self.room, self._begin = 40, None

        def encode(self, text: str) -> list[int]:
            return [len(word) for word in text.split()]

        def say(self, part: tuple[str, str] | None) -> Said:
            before, scored = map(self.encode, part or ("", ""))
            return Said(before, scored, [0.0] * len(scored))

    monkeypatch.setattr(evaluation, "Runtime", Small)
    parts = [("one two", " three"), ("one " * 30, " two" * 30)]
    with pytest.raises(UsageError, match="held-out prompt 2 has 60 tokens, and the bundle's cache holds 40"):
        evaluation.score("bundle", lambda *_: None, parts=parts, skip_long=False)
    found = evaluation.score("bundle", lambda *_: None, parts=parts, skip_long=True)
    assert [len(one["scored"]) for one in found["said"]] == [1, 0]


def test_a_checkpoint_has_no_likelihoods_for_what_was_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Checkpoint, "__init__", lambda *_: None)
    said = [asdict(Said())]
    found = evaluation.score(
        "folder", lambda *_: None, parts=[], skip_long=True, said=said, judged={"a": [[]]}
    )
    assert found == {"said": said, "agreed": {"a": 0}}
