"""`edge-opt evaluate`: the text, the figures, the refusals and the gate. The models are small functions here."""

import json
import math
import re
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ai_edge_litert.interpreter import Interpreter
from cli_runs import Captured, run
from pretend_stages import COMPILED, QUANTIZED, at_once, checkpoint, write

from edge_opt.base.errors import EdgeOptError, UsageError
from edge_opt.building import evaluation, litert_lm, stages
from edge_opt.building.evaluation import Checkpoint, Evaluation, ModelScore, ratio_of
from edge_opt.building.held_out import cut, in_turn
from edge_opt.building.stages import Job, StageFailedError
from edge_opt.ir import save
from edge_opt.ir.opening import Opened
from edge_opt.ir.parse import parse
from edge_opt.npu.qualcomm import Qualcomm
from edge_opt.npu.scoring import Text

SOFTMAX = """
signature decode = #0 (x=%x) -> (y=%y)
subgraph decode (%x: int16[1,544] q(0.004, 0)) {
  %y: int16[1,544] q(0.000030517578125, 0) = SOFTMAX(%x) {beta: 1.0}
  return %y
}
"""
TEXTS = ["one two three four", "fiftyfive sixtysix seventyseven eight nine ten"]


class Place:
    """A checkpoint, two bundles of it, and held-out text; a token is a word, and its id the word's length.

    `chances` says how likely each model finds every token, by the stem of its path. Those of a bundle are `spread`, and
    `good` has no room for prompts with more than `room` tokens to score.
    """

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.spread, self.room = folder, 0.0, 1000
        self.reference = checkpoint(folder / "gemma")
        self.good, self.bad = (
            write(folder / f"{name}.litertlm", QUANTIZED) for name in ("good", "bad")
        )
        self.prompts = folder / "held-out.jsonl"
        self.given(*TEXTS)
        self.chances = {"gemma": 0.5, "good": 0.4, "bad": 0.1}
        self.ran = 0
        monkeypatch.setattr(evaluation, "ProcessPoolExecutor", lambda *_: ThreadPoolExecutor(1))
        monkeypatch.setattr(evaluation, "score_text", self.say)
        own = SimpleNamespace(likelihoods=lambda part, _: self.say(str(self.reference), part)[1])
        monkeypatch.setattr(evaluation, "Checkpoint", lambda _: own)
        monkeypatch.setattr(evaluation, "check_runtimes", lambda bundles: {})
        monkeypatch.setattr(stages, "carry_out", self.carry_out)

    def carry_out(self, *job: Any) -> Any:
        self.ran += 1
        return at_once(*job)

    def given(self, *texts: str) -> None:
        self.prompts.write_text("".join(json.dumps(text) + "\n" for text in texts))

    def say(self, path: str, part: tuple[str, str]) -> Any:
        before, scored = (tuple(len(word) for word in text.split()) for text in part)
        name = Path(path).stem
        if name == "good" and len(scored) > self.room:
            return None
        spread = 0 if name == "gemma" else self.spread
        chance = math.log(self.chances[name])
        return litert_lm.Scored(
            Text(before, scored), [chance + spread * (-1) ** at for at in range(len(scored))]
        )

    def evaluate(self, *bundles: Path, **options: Any) -> Evaluation:
        return evaluation.evaluate(
            self.reference, bundles or [self.good, self.bad], self.prompts, **options
        )


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    return Place(tmp_path, monkeypatch)


def test_perplexity_is_one_over_the_mean_chance_and_its_ratio_is_to_the_reference(
    place: Place,
) -> None:
    steps: list[tuple[str, int, int]] = []
    found = place.evaluate(progress=lambda *step: steps.append(step))
    assert [Path(model.source).stem for model in found.models] == ["gemma", "good", "bad"]
    assert [model.perplexity for model in found.models] == pytest.approx([2.0, 2.5, 10.0])
    assert [model.ratio for model in found.models] == pytest.approx([1.0, 1.25, 5.0])
    assert {model.tokens for model in found.models} == {4}
    assert (found.prompts, found.skipped) == (2, 0)
    assert steps == [("evaluate", 0, 2), ("evaluate", 1, 2)]


def test_a_token_that_one_bundle_cannot_score_counts_for_no_model(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_first(path: str, part: tuple[str, str]) -> Any:
        said = place.say(path, part)
        return said._replace(likelihoods=[None, *said.likelihoods[1:]]) if "bad" in path else said

    monkeypatch.setattr(evaluation, "score_text", without_first)
    found = place.evaluate()
    assert {model.tokens for model in found.models} == {2}
    assert [model.ratio for model in found.models] == pytest.approx([1.0, 1.25, 5.0])


def score(likelihoods: list[float], reference: list[float]) -> ModelScore:
    return ModelScore.of("m", likelihoods, reference)


def test_perplexity_counts_every_token_alike_and_is_infinite_without_any_chance() -> None:
    uneven = [math.log(0.5), *[math.log(0.25)] * 3]
    assert score(uneven, uneven).perplexity == pytest.approx(2 ** (7 / 4))
    found = score([-math.inf], [-1.0])
    assert found.perplexity == math.inf
    assert Evaluation([found], 1).to_dict()["models"][0]["perplexity"] is None
    models = [ModelScore("a", 1, 2.0), ModelScore("b", 1, math.nan)]
    assert not Evaluation(models, 1).within(1e9), "what is no number passes no gate"


def test_the_error_of_a_ratio_is_of_pairs_of_tokens() -> None:
    ratio, error = ratio_of([-1.0, -5.0, -3.0], [-1.1, -4.9, -3.0])
    assert ratio == pytest.approx(1.0)
    assert error == pytest.approx(0.1 / math.sqrt(3))


@pytest.mark.parametrize(("gaps", "error"), [
    ([0.1, 0.1, -0.1, -0.1], 0.1),
    ([0.1, -0.1, 0.1, -0.1], 0.1 / math.sqrt(3)),
])  # fmt: skip
def test_tokens_of_a_text_that_lose_together_count_as_one(gaps: list[float], error: float) -> None:
    """Four tokens of two texts."""
    likelihoods = [-2.0 - gap for gap in gaps]
    assert ratio_of(likelihoods, [-2.0] * 4, [2, 2]) == pytest.approx((1.0, error))
    assert ratio_of(likelihoods, [-2.0] * 4, [4])[1] == pytest.approx(0.1 / math.sqrt(3))


def test_a_bundle_that_loses_in_some_texts_only_has_the_error_of_texts(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All tokens of a text lose or gain 0.1 nats: independent tokens could not have a larger error than this."""
    place.given("one two six ten one two six ten", "red sun big map red sun big map")

    def by_text(path: str, part: tuple[str, str]) -> Any:
        said = place.say(path, part)
        gain = 0.1 if part[0].startswith("one") else -0.1
        return said._replace(likelihoods=[one + gain for one in said.likelihoods])

    monkeypatch.setattr(evaluation, "score_text", by_text)
    place.chances["good"] = place.chances["gemma"]
    (_, good) = place.evaluate(place.good).models
    assert good.ratio_error is not None
    assert good.ratio_error > 0.1 / math.sqrt(good.tokens - 1)


def test_a_ratio_of_no_tokens_is_a_sentence() -> None:
    with pytest.raises(UsageError, match="no token of the held-out prompts could be scored"):
        ratio_of([], [])


@pytest.mark.parametrize(("spread", "prompts"), [(0.0, 4), (0.4, 20), (40.0, 41)])
def test_text_is_scored_until_the_ratio_is_exact_enough(
    place: Place, spread: float, prompts: int
) -> None:
    place.spread = spread
    place.chances["good"] = 0.5
    place.given(*(f"{at} " + "word " * 200 for at in range(40)))
    found = place.evaluate(place.good)
    error = found.models[1].ratio_error
    assert (error <= 0.0101) == (spread < 1)
    assert found.prompts == prompts


def test_long_prompts_are_joined_where_there_are_none_and_take_turns_with_short_ones(
    place: Place,
) -> None:
    texts = ["one two three", "four five six"]
    assert in_turn(texts, place.good) == [cut("\n\n".join(texts)), *map(cut, texts)]
    long = ["one two " * 5 + "three"]
    assert in_turn(long, place.good) == [cut(long[0])]
    texts = ["x" * length for length in (62, 22, 102, 82, 42)]
    assert [len(before) for before, _ in in_turn(texts, place.good)] == [51, 11, 41, 21, 31]


def test_a_text_that_fits_is_cut_out_of_those_that_do_not(place: Place) -> None:
    """A prompt that does not fit calibrates as a part of a joined one, so it must not end a build here."""
    texts = ["one two three four five " * 100] * 3
    assert cut(texts[0][:36]) in in_turn(texts, place.good)


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
def test_the_second_half_or_end_of_a_prompt_is_scored(
    text: str, parts: tuple[str, str] | None
) -> None:
    assert cut(text) == parts
    long = cut("word " * 1000)
    assert 500 < len(long[1]) <= 512
    assert "".join(long) == ("word " * 1000).strip()


@pytest.mark.parametrize(("limit", "code"), [(None, 0), (5.1, 0), (4.9, 1), (1.1, 1)])
def test_a_limit_is_a_gate(place: Place, capsys: Captured, limit: float | None, code: int) -> None:
    words = [
        "evaluate",
        place.reference,
        place.good,
        place.bad,
        "--prompts",
        place.prompts,
        "--json",
    ]
    ran = run(capsys, *words, *([] if limit is None else ["--max-perplexity-ratio", limit]))
    assert ran.code == code
    models = ran.json["models"]
    assert {"source", "tokens", "perplexity", "ratio", "ratio_error"} <= set(models[0])
    assert models[2]["perplexity"] == pytest.approx(10)
    assert models[2]["ratio_error"] < 1e-9
    assert ("more than" in ran.err) == bool(code)


def test_the_table_has_a_row_for_each_model(place: Place, capsys: Captured) -> None:
    place.spread = 0.1
    ran = run(capsys, "evaluate", place.reference, place.good, "--prompts", place.prompts)
    assert ran.code == 0
    head, reference, good, note = ran.out.splitlines()
    assert reference.split() == [str(place.reference), "-", "4", "2.00", "1.000"]
    assert good.split() == [str(place.good), "32.00", "4", "2.38", "1.189", "±", "0.059"]
    assert note == "Scored on 2 held-out prompts."
    assert head.split()[:3] == ["bits", "tokens", "perplexity"]


def test_bits_are_the_mean_of_all_weights() -> None:
    assert ModelScore("m", 1, 2.0, weights={"INT4": 100, "INT8": 100}).bits == pytest.approx(16 / 3)
    assert ModelScore("m", 1, 2.0).bits is None


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda p: p.prompts.write_text(""), "is empty"),
        (lambda p: p.prompts.write_text('"word"\n"a"\n'), "prompt 2 is too short to be scored: give"),
        (lambda p: write(p.bad, COMPILED), "bad.litertlm is compiled for an NPU already: give"),
        (lambda p: {"reference": p.good}, "good.litertlm is a quantized bundle: give the checkpoint first"),
        (lambda p: {"bundles": [p.reference]}, "gemma is a checkpoint: give the checkpoint first"),
        (lambda p: {"bundles": []}, "give one after the checkpoint"),
    ],
)  # fmt: skip
def test_bad_input_is_refused_early(
    place: Place, change: Callable[[Place], Any], sentence: str
) -> None:
    changed = change(place)
    told = {
        "reference": place.reference,
        "bundles": [place.good, place.bad],
        "prompts": place.prompts,
    }
    with pytest.raises(EdgeOptError) as caught:
        evaluation.evaluate(**told | (changed if isinstance(changed, dict) else {}))
    assert sentence in str(caught.value)
    assert place.ran == 0


def test_prompts_longer_than_the_cache_are_left_out_and_refused_where_all_are(place: Place) -> None:
    place.room = 1
    found = place.evaluate()
    assert (found.prompts, found.skipped, found.models[1].tokens) == (1, 1, 1)
    place.room = 0
    with pytest.raises(UsageError, match="every held-out prompt is longer than the bundle's cache"):
        place.evaluate()


def test_a_bundle_scores_the_second_part_after_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """LiteRT-LM pretended: a token is a word, the less likely the longer it is."""
    read: list[str] = []

    def scored(texts: list[str]) -> SimpleNamespace:
        return SimpleNamespace(token_scores=[[-float(len(one)) for one in texts[0].split()]])

    session = SimpleNamespace(run_prefill=read.extend, run_text_scoring=scored)
    engine = SimpleNamespace(
        tokenize=lambda text: [len(word) for word in text.split()],
        bos_token_id=7,
        create_session=lambda **_: nullcontext(session),
    )
    monkeypatch.setattr(litert_lm, "_loaded", lambda _: (engine, 6))
    assert litert_lm.score_text("m", ("one three", " two four")) == (
        Text((7, 3, 5), (3, 4)),
        [-3.0, -4.0],
    )
    assert read == ["one three"]

    def one_token(texts: list[str]) -> SimpleNamespace:
        if len(engine.tokenize(texts[0])) > 1:
            raise RuntimeError("only supports rolling back one token")
        return scored(texts)

    session.run_text_scoring = one_token
    assert litert_lm.score_text("m", ("one three", " two four")) == (
        Text((7, 3, 5), (3, 4)),
        [-3.0, -4.0],
    )
    assert read[1:] == ["one three", "one three", "one three two"]
    engine.tokenize = lambda text: [len(word) for word in re.split(r"[ -]", text.strip())]
    said = litert_lm.score_text("m", ("one", " two-four"))
    assert said is not None
    assert said.likelihoods == [-3.0, None], "behind the hyphen, the text alone has other tokens"
    assert litert_lm.score_text("m", ("one three", " two four five")) is None
    with pytest.raises(StageFailedError, match=r"m\.litertlm did not run: 'int' object"):
        litert_lm.score_text("m.litertlm", ("one", 2))


def test_a_text_that_takes_too_long_is_scored_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def scored(texts: list[str]) -> SimpleNamespace:
        asked.append(texts[0])
        words = texts[0].split()
        if len(words) > 2:
            raise RuntimeError("DEADLINE_EXCEEDED")
        return SimpleNamespace(token_scores=[[-float(len(one)) for one in words]])

    session = SimpleNamespace(run_prefill=asked.extend, run_text_scoring=scored)
    engine = SimpleNamespace(
        tokenize=lambda text: [len(word) for word in text.split()],
        bos_token_id=None,
        create_session=lambda **_: nullcontext(session),
    )
    monkeypatch.setattr(litert_lm, "_loaded", lambda _: (engine, 9))
    monkeypatch.setattr(litert_lm, "_MOST_SECONDS", 0)
    monkeypatch.setattr(litert_lm, "_PIECE", 2)
    said = litert_lm.score_text("m", ("one", " two four three"))
    assert said is not None
    assert said.likelihoods == [-3.0, -4.0, -5.0]
    assert asked[2:] == ["one", " two four", "one two four", " three"]
    monkeypatch.setattr(litert_lm, "_PIECE", 3)
    with pytest.raises(StageFailedError, match="m did not run: scoring a text took ten minutes"):
        litert_lm.score_text("m", ("one", " two four three"))


def test_a_checkpoint_refuses_the_tokens_of_another_vocabulary() -> None:
    model = object.__new__(Checkpoint)
    model._tokenizer = lambda text, **_: {"input_ids": [len(word) for word in text.split()]}
    with pytest.raises(
        UsageError, match=r"vocabulary differs from bundle other.s: .* have 2 and 1 tokens"
    ):
        model.likelihoods(
            ("a b", " c"), {"same": Text((7, 1, 1), (1,)), "other": Text((7, 1, 2), (1,))}
        )


def test_half_a_short_cache_is_read_and_what_fits_into_the_rest_is_scored() -> None:
    model = object.__new__(Checkpoint)
    model._tokenizer = lambda text: {"input_ids": [*range(len(text.split()))]}
    assert model.text("a " * 1000, 3, 16) == Text((0, 1, 2, 3, 4, 5, 6, 7), (8, 9, 10))
    assert model.text("a " * 1000, 99, 16).scored == (8, 9, 10, 11, 12, 13, 14, 15)


@pytest.mark.slow
def test_a_checkpoint_scores_the_tokens_of_a_bundle(tmp_path: Path) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"<unk>": 0, "a": 1, "b": 2}, unk_token="<unk>")
    )
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path)
    sizes = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_attention_heads": 1,
        "num_hidden_layers": 1,
    }
    config = transformers.LlamaConfig(vocab_size=4, eos_token_id=None, **sizes)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    model = Checkpoint(str(tmp_path))
    found = model.likelihoods(("a b", " b a"), {"bundle": Text((3, 1, 2), (2, 1))})
    with torch.no_grad():
        rows = model._model(torch.tensor([[3, 1, 2, 2]])).logits[0].log_softmax(-1)
    assert found == pytest.approx([float(rows[2, 2]), float(rows[3, 1])], abs=1e-5)
    text = model.text("a b b a a", 2, 9)
    assert (text.before, text.scored) == ((1, 2), (2, 1))
    assert len(model.text("a " * 1000, 1, 1000).before) == 120


def test_masked_keys_get_nothing_on_cpu_kernels_as_on_the_npu(tmp_path: Path) -> None:
    model = parse(SOFTMAX)
    path, copy = tmp_path / "int16.tflite", tmp_path / "float.tflite"
    save(model, path)
    litert_lm.float_softmax(path, copy)
    logits = np.full((1, 544), -25000, np.int16)
    logits[0, :2] = 0
    masked = []
    for file in (path, copy):
        found = Interpreter(str(file)).get_signature_runner("decode")(x=logits)["y"][0]
        assert found[0] == found[1] > 16000
        masked.append(found[2:].max())
    assert masked == [1, 0]


def test_cpu_kernels_score_a_bundle_with_softmax_in_float_and_the_emulator_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LiteRT-LM, the checkpoint and the emulator are pretended; they note the types of the SOFTMAXes."""
    bundle = str(write(tmp_path / "m.litertlm", SOFTMAX))
    types: list[tuple[str, list[str]]] = []

    def noted(path: object, runs_on: str) -> None:
        operators = [
            one for graph in Opened(path).main().model.subgraphs for one in graph.operators
        ]
        types.append(
            (runs_on, [one.input(0).dtype.name for one in operators if one.name == "SOFTMAX"])
        )

    runtime = SimpleNamespace(
        Backend=SimpleNamespace(NPU=lambda **_: "npu"),
        Engine=lambda path, backend: noted(path, "LiteRT-LM"),
        ModelInfo=lambda _: SimpleNamespace(max_context_tokens=16),
    )
    monkeypatch.setitem(sys.modules, "litert_lm", runtime)
    litert_lm._loaded.cache_clear()
    assert litert_lm._loaded(bundle) == (None, 16)
    litert_lm._loaded.cache_clear()

    def read(
        path: object, _: object, compiler: object = None, *__: object
    ) -> list[np.ndarray[Any, Any]]:
        noted(path, "CPU" if compiler is None else "emulator")
        return [np.zeros((1, 4))]

    answers = {
        "text": lambda *_: Text((1,), (2,)),
        "logits": lambda _: SimpleNamespace(numpy=lambda: np.zeros((1, 4))),
    }
    monkeypatch.setattr(evaluation, "Checkpoint", lambda _: SimpleNamespace(**answers))
    monkeypatch.setattr(Qualcomm, "check_emulator", lambda *_: None)
    monkeypatch.setattr(evaluation, "read", read)
    monkeypatch.setattr(evaluation, "look_at", lambda _: SimpleNamespace(cache=16))
    options = {"chip": "SM8750", "flags": [], "texts": ["one two"], "tokens": 1}
    inputs = {"checkpoint": "gemma", "bundle": bundle}
    evaluation.emulate(Job("emulate", "", inputs, options=options), lambda *_: None)
    assert types == [("LiteRT-LM", ["FLOAT32"]), ("CPU", ["FLOAT32"]), ("emulator", ["INT16"])]
