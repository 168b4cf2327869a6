"""`edge-opt evaluate`: the arithmetic, the refusals and the gate. The models are small functions here."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import pytest
from bundles import bundle, model_part
from cli_runs import run
from pretend_stages import COMPILED, METADATA, QUANTIZED, checkpoint
from text_parser import parse

from edge_opt.base.errors import EdgeOptError, UsageError
from edge_opt.build import evaluation, stages
from edge_opt.build.evaluation import (
    Checkpoint,
    Evaluation,
    ModelScore,
    Runtime,
    Said,
    cut,
    long_and_short,
    ratio_of,
)
from edge_opt.build.stages import Job, Processes, StageAnswer, StageFailedError
from edge_opt.ir import to_bytes

TEXTS = ["one two three four", "five six seven eight nine ten"]
HUGGING_FACE = (6, {}, b"words")


def said(part: tuple[str, str], *, chance: float, wrong: int = 0) -> Said:
    """A token a word, whose id is its length; each has this chance."""
    before, scored = ([len(word) for word in text.split()] for text in part)
    return Said(before, scored, [math.log(chance)] * len(scored), [1, 1, 1, 1][wrong:] + [2] * wrong)


@dataclass
class Runtimes(Processes):
    """Models by the stem of their path: how likely each finds every token, and how many generated ones are wrong."""

    models: dict[str, tuple[float, int]]
    instead: Callable[[Job, list[Said]], list[Said]] = lambda _, found: found
    jobs: list[Job] = field(default_factory=list)

    def check_runtimes(self, *, checkpoint: bool, bundles: bool = True) -> dict[str, str]:
        """All is there."""
        return {}

    def side_by_side(
        self, jobs: Sequence[Job], log: Path, scratch: Path, progress: Any, *, at_a_time: int = 1
    ) -> list[StageAnswer]:
        """One after the other."""
        return [self.carry_out(job, log, scratch, progress) for job in jobs]

    def carry_out(self, job: Job, log: Path, scratch: Path, progress: Any) -> StageAnswer:
        """One model."""
        self.jobs.append(job)
        progress(job.stage, 1, 2)
        chance, wrong = self.models[Path(job.inputs["model"]).stem]
        found = [said(part, chance=chance, wrong=wrong) for part in job.options["parts"]]
        return StageAnswer({"said": [asdict(one) for one in self.instead(job, found)]})


class Place:
    """A checkpoint, two bundles of it, and held-out text."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.reference = checkpoint(folder / "gemma")
        self.good = self.write("good", QUANTIZED)
        self.bad = self.write("bad", QUANTIZED)
        self.prompts = folder / "held-out.jsonl"
        self.prompts.write_text("".join(json.dumps(text) + "\n" for text in TEXTS))

    def write(self, name: str, text: str) -> Path:
        """A bundle with this prefill/decode model."""
        path = self.folder / f"{name}.litertlm"
        path.write_bytes(
            bundle([METADATA, HUGGING_FACE, model_part("prefill_decode", to_bytes(parse(text)))])
        )
        return path


MODELS = {"gemma": (0.5, 0), "good": (0.4, 1), "bad": (0.1, 3)}


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def evaluated(place: Place, tools: Processes | None = None, **options: Any) -> Evaluation:
    told = {
        "reference": place.reference,
        "bundles": [place.good, place.bad],
        "prompts": place.prompts,
        **options,
    }
    return evaluation.evaluate(**told, toolchain=tools or Runtimes(MODELS))


# --- the figures ---


def test_perplexity_is_one_over_the_mean_chance_and_agreement_ends_at_the_first_token_that_differs(
    place: Place,
) -> None:
    found = evaluated(place, Runtimes({**MODELS, "good": (0.4, 0)}))
    assert [Path(model.source).stem for model in found.models] == ["gemma", "good", "bad"]
    assert [model.perplexity for model in found.models] == pytest.approx([2.0, 2.5, 10.0])
    assert [model.ratio for model in found.models] == pytest.approx([1.0, 1.25, 5.0])
    assert {model.tokens for model in found.models} == {4}
    assert found.prompts == 2
    tokens = [[1, 2, 3], [1, 2, 4], [5, 2, 3], []]
    agreed = [
        ModelScore.of("m", [Said([1], [2], [0.0], one)], [Said([1], [2], [0.0], tokens[0])]).top1_agreement
        for one in tokens
    ]
    assert agreed == [1.0, 2 / 3, 0.0, None]


def test_perplexity_counts_every_token_alike_and_is_infinite_without_any_chance() -> None:
    uneven = [Said([1], [2], [math.log(0.5)]), Said([1], [2, 3, 4], [math.log(0.25)] * 3)]
    assert ModelScore.of("m", uneven, uneven).perplexity == pytest.approx(2 ** (7 / 4))
    found = ModelScore.of("m", [Said([1], [2], [-math.inf])], [Said([1], [2], [-1.0])])
    assert found.perplexity == math.inf
    assert Evaluation([found], 1).to_dict()["models"][0]["perplexity"] is None
    models = [ModelScore("a", 1, 2.0, 1.0), ModelScore("b", 1, math.nan, 1.0)]
    assert not Evaluation(models, 1).within(1e9), "what is no number passes no gate"


def test_the_error_of_a_ratio_is_of_pairs_of_tokens() -> None:
    ratio, error = ratio_of([-1.0, -5.0, -3.0], [-1.1, -4.9, -3.0])
    assert ratio == pytest.approx(1.0)
    assert error == pytest.approx(0.1 / math.sqrt(3))


@pytest.mark.parametrize(("spread", "rounds"), [(0.0, 1), (0.4, 2), (40.0, 2)])
def test_more_text_is_scored_until_the_ratio_is_known_to_a_hundredth(
    place: Place, spread: float, rounds: int
) -> None:
    def spread_out(job: Job, found: list[Said]) -> list[Said]:
        sign = 0 if Path(job.inputs["model"]).is_dir() else spread
        return [
            Said(one.before, one.scored, [sign * (-1) ** at - 1.0 for at in range(len(one.scored))])
            for one in found
        ]

    place.prompts.write_text("".join(json.dumps(f"{at} " + "word " * 200) + "\n" for at in range(40)))
    tools = Runtimes(MODELS, spread_out)
    found = evaluated(place, tools, bundles=place.good)
    of_reference = [job for job in tools.jobs if Path(job.inputs["model"]).is_dir()]
    assert len(of_reference) == rounds
    parts = [part for job in of_reference for part in job.options["parts"]]
    assert found.models[1].tokens == sum(len(scored.split()) for _, scored in parts)
    error = found.models[1].ratio_error
    assert error is not None
    assert (error <= 0.0101) == (spread < 1)
    assert (found.prompts == 40) == (spread > 1)


CACHED = """
signature decode = #0 (e0=%e, kv_cache_k_0=%k) -> (kv_slice_k_0=%s)
subgraph decode (%e: float32[1,1,40,1], %k: float32[1,1,4,40]) {
  %s: float32[1,1,4,1] = BATCH_MATMUL(%k, %e)
  return %s
}
"""


def test_where_no_prompt_fills_half_the_cache_a_long_one_is_joined_from_them(place: Place) -> None:
    tools = Runtimes({**MODELS, "cached": (0.4, 1)})
    evaluated(place, tools, bundles=place.write("cached", CACHED))
    joined = f"{TEXTS[0]}\n\n{TEXTS[1]}"
    assert tools.jobs[-1].options["parts"][0] == cut(joined)
    place.prompts.write_text(json.dumps("one two " * 12))
    evaluated(place, tools, bundles=place.write("cached", CACHED))
    assert len(tools.jobs[-1].options["parts"]) == 1


def test_long_and_short_prompts_take_turns() -> None:
    parts = [("x" * length, "y") for length in (3, 1, 5, 4, 2)]
    assert [len(before) for before, _ in long_and_short(parts)] == [5, 1, 4, 2, 3]


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
def test_the_second_half_of_a_prompt_is_scored_from_a_space_on_and_of_a_long_one_the_end(
    text: str, parts: tuple[str, str] | None
) -> None:
    assert cut(text) == parts
    long = cut("word " * 1000)
    assert long is not None
    assert 500 < len(long[1]) <= 512
    assert "".join(long) == ("word " * 1000).strip()


def test_the_reference_scores_the_tokens_that_litert_lm_made_and_bundles_share_the_cores(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(4))
    tools, told = Runtimes(MODELS), list[str]()
    evaluated(place, tools, progress=lambda what, *_: told.append(what))
    stems = [Path(job.inputs["model"]).stem for job in tools.jobs]
    assert stems == ["good", "good", "bad", "bad", "gemma"]
    assert [len(job.options["parts"]) for job in tools.jobs] == [1, 1, 1, 1, 2]
    assert [one["scored"] for one in tools.jobs[-1].options["said"]] == [[5, 4, 3], [4]]
    assert told[0] == f"{place.good}, {place.bad} (about 1 min)"


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
    assert {"source", "tokens", "perplexity", "top1_agreement", "ratio", "ratio_error"} <= set(models[0])
    assert models[2]["perplexity"] == pytest.approx(10)
    assert models[2]["ratio_error"] < 1e-9
    assert ("more than" in ran.err) == bool(code)


def test_the_table_has_a_row_for_each_model(
    place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def unsure(job: Job, found: list[Said]) -> list[Said]:
        shift = 0.0 if Path(job.inputs["model"]).is_dir() else 0.1
        return [
            Said(
                one.before, one.scored, [value + shift * at for at, value in enumerate(one.likelihoods)], [1]
            )
            for one in found
        ]

    monkeypatch.setattr(evaluation, "Processes", lambda: Runtimes(MODELS, unsure))
    ran = run(capsys, "evaluate", place.reference, place.good, "--prompts", place.prompts)
    assert ran.code == 0
    head, reference, good, note = ran.out.splitlines()
    assert reference.split() == [str(place.reference), "2.00", "1.000", "100.0", "%"]
    assert good.split() == [str(place.good), "2.32", "1.160", "±", "0.056", "100.0", "%"]
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


def test_a_checkpoint_is_no_bundle_and_nothing_is_no_bundle(place: Place) -> None:
    with pytest.raises(UsageError, match="is a checkpoint: give it first"):
        evaluated(place, bundles=[place.good, place.reference])
    with pytest.raises(UsageError, match="give a bundle beside the reference"):
        evaluated(place, bundles=[])


def test_a_reference_of_other_tokens_is_refused(place: Place) -> None:
    def other(job: Job, found: list[Said]) -> list[Said]:
        is_good = "good" in job.inputs["model"]
        return found if is_good else [Said([9], one.scored, one.likelihoods) for one in found]

    tools = Runtimes(MODELS, other)
    with pytest.raises(UsageError, match=r"has another vocabulary than the bundle .*good"):
        evaluated(place, tools, reference=place.bad, bundles=place.good)


def test_prompts_longer_than_the_cache_are_left_out_and_refused_where_all_are(place: Place) -> None:
    def long(job: Job, found: list[Said]) -> list[Said]:
        return [one if len(one.scored) in fitting else Said() for one in found]

    fitting = [1]
    found = evaluated(place, Runtimes(MODELS, long))
    assert (found.prompts, found.skipped, found.models[1].tokens) == (1, 1, 1)
    fitting.clear()
    with pytest.raises(UsageError, match="every held-out prompt is longer than the bundle's cache"):
        evaluated(place, Runtimes(MODELS, long))


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
    class Failing(Runtimes):
        def carry_out(self, job: Job, log: Path, scratch: Path, progress: object) -> StageAnswer:
            for one in stages.logs_of(log, 2):
                one.write_text("noise\nE0000 00:00:1.5  22 engine.cc:1004] Failed to run: no room\nmore\n")
            raise StageFailedError("RuntimeError: failed")

    with pytest.raises(StageFailedError) as caught:
        evaluated(place, Failing(MODELS), bundles=place.good)
    assert str(caught.value) == "good.litertlm did not run: RuntimeError: failed (Failed to run: no room)"


# --- one model ---


class Session:
    """LiteRT-LM's, of a model that says its own words, a token each."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def run_prefill(self, texts: list[str]) -> None:
        """Read."""
        (self.read,) = texts

    def run_text_scoring(self, texts: list[str]) -> Any:
        """How long each word is."""
        return SimpleNamespace(token_scores=[[-float(len(word)) for word in texts[0].split()]])

    def run_decode_async(self) -> Any:
        """The words that were read, once more; then half a character."""
        return [SimpleNamespace(texts=[f" {word}"]) for word in [*self.read.split(), ""]]


def test_a_bundle_scores_the_second_part_after_the_first_and_generates_there() -> None:
    bundle = object.__new__(Runtime)
    engine = SimpleNamespace(
        tokenize=lambda text: [len(word) for word in text.split()],
        bos_token_id=7,
        create_session=lambda **_: Session(),
    )
    bundle._engine, bundle._room = engine, 20
    assert bundle.say(("one three", " two four"), Said()) == Said([7, 3, 5], [3, 4], [-3.0, -4.0], [3, 5])
    bundle._room = 19
    assert bundle.say(("one three", " two four"), Said()) == Said()


@pytest.mark.slow
def test_a_checkpoint_scores_the_tokens_of_a_bundle_or_gives_its_own(tmp_path: Path) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<unk>": 0, "a": 1, "b": 2}, unk_token="<unk>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(vocab_size=4, eos_token_id=None, **sizes)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    model = Checkpoint(str(tmp_path))
    found = model.say(("a b", " b a"), Said([3, 1, 2], [2, 1]))
    assert (found.before, found.scored, len(found.generated)) == ([3, 1, 2], [2, 1], 16)
    with torch.no_grad():
        rows = model._model(torch.tensor([[3, 1, 2, 2]])).logits[0].log_softmax(-1)
    assert found.likelihoods == pytest.approx([float(rows[2, 2]), float(rows[3, 1])], abs=1e-5)
    assert found.generated[0] == int(rows[2].argmax())
    assert model.say(("a b", " b a"), Said([1, 1], [2, 1])) == Said([1, 2], [2, 1])
    assert model.say(("a b", " b a"), Said()) == Said()
