"""Evaluates bundles against the model that they were made from: likelihoods of held-out text, and agreement.

LiteRT-LM gives the likelihoods of a text, and the tokens that it generates; not which token would have been most likely
in place of each one of the text. So agreement is measured on what is generated. Each model is loaded in a process of
its own, which runs `score`.
"""

import importlib
import math
import os
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

from edge_opt.base.atomic import AnyPath
from edge_opt.base.errors import UsageError
from edge_opt.base.record import Record
from edge_opt.base.words import Progress
from edge_opt.build.prompts import read_prompts, text_of
from edge_opt.build.source import Kind, look_at
from edge_opt.build.stages import Job, Processes, StageFailedError

Part = tuple[str, str]
"""A prompt in two parts: what is read, and what is scored."""
Generated = list[tuple[str, int]]
"""Tokens, as text and id."""

GENERATED = 16
"""Tokens that a bundle generates after the first part of each prompt."""
_MOST_SCORED = 512
"""Characters of a prompt that are scored: each token of them is one decode step."""
_FEWEST, _SHARE = 10, 5
"""Prompts to hold one in so many out of."""
_HIGHEST = 700.0
"""Nats whose exponential is still a number."""
_COMPLAINT = re.compile(r"^[EF]\d{4} .*?\] (.+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Said:
    """What a model says of one prompt: ids of the tokens `before` and `scored`, and the log-likelihood of the latter.

    `generated` are the tokens that it finds most likely after `before`, one after the other.
    """

    before: list[int] = field(default_factory=list)
    scored: list[int] = field(default_factory=list)
    likelihoods: list[float] = field(default_factory=list)
    generated: Generated = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ModelScore:
    """One model: over how many held-out tokens its perplexity is.

    `top1_agreement` is the share of the tokens that the model generates greedily, which the reference, too, finds most
    likely at that place; of the reference it is 1, and None where nothing was generated. `on_npu`: on the NPU's own
    arithmetic, see `evaluate_on_npu`, which also gives the mean divergence `kl` from the reference, in nats.
    """

    source: str
    tokens: int
    perplexity: float
    top1_agreement: float | None
    kl: float | None = None
    on_npu: bool = False

    @classmethod
    def of(cls, source: str, said: Sequence[Said], agreed: int | None) -> "ModelScore":
        """The figures of one model; `agreed` is how many generated tokens are the reference's, too; None for itself."""
        likelihoods = [value for one in said for value in one.likelihoods]
        generated = sum(len(one.generated) for one in said)
        share = 1.0 if agreed is None else agreed / generated if generated else None
        return cls(source, len(likelihoods), perplexity_of(likelihoods), share)


def perplexity_of(likelihoods: Sequence[float]) -> float:
    """One over the mean chance, infinite beyond what a number holds."""
    mean = -sum(likelihoods) / len(likelihoods)
    return math.inf if mean > _HIGHEST else math.exp(mean)


@dataclass(frozen=True, slots=True)
class Evaluation(Record):
    """The reference, then the bundles in the order in which they were given.

    `prompts` is how many were scored, `skipped` how many were longer than the cache.
    """

    models: list[ModelScore]
    prompts: int
    skipped: int = 0

    def within(self, limit: float) -> bool:
        """Whether every bundle's perplexity is at most `limit` times the reference's; a model of NaN is not."""
        reference, *bundles = (model.perplexity for model in self.models)
        return all(perplexity <= limit * reference for perplexity in bundles)


def evaluate(
    reference: AnyPath,
    bundles: AnyPath | Sequence[AnyPath],
    prompts: AnyPath,
    *,
    progress: Progress | None = None,
    toolchain: Processes | None = None,
) -> Evaluation:
    """Whether bundles are still the model that they were made from: perplexity on held-out text, and agreement.

    Bundles run in LiteRT-LM's executor for NPUs on CPU kernels, as they are before the vendor's compiler. Of each
    prompt the second half, at most 512 characters, is scored: the prefill reads what stands before it, decode the rest.

    Args:
        reference: the checkpoint, a Hugging Face folder, or a float .litertlm.
        bundles: .litertlm bundles for NPUs, not compiled.
        prompts: JSON lines, as `edge_opt.build.build` has them, that no bundle was calibrated on.
        progress: called with (source, done, total).
        toolchain: what runs the models; processes where None.

    Raises:
        UsageError: something given cannot be evaluated, or a package is missing.
        ModelFormatError: a bundle cannot be read.
        StageFailedError: a model did not run.
    """
    given = [bundles] if isinstance(bundles, str | os.PathLike) else [*bundles]
    models = {os.fspath(path): Path(path) for path in (reference, *given)}
    tools, text = toolchain or Processes(), choose(prompts, None)
    check_models(Path(reference), [Path(path) for path in given])
    tools.check_runtimes(checkpoint=Path(reference).is_dir())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        return compare(tools, models, text, folder / "log", folder, progress or (lambda *_: None))[0]


# The text


@dataclass(frozen=True, slots=True)
class HeldOut:
    """The text to evaluate on.

    `parts` are empty where nothing is evaluated; `note` says where the text came from, or why there is none. `rest` are
    the prompts that are left to calibrate with, where these were chosen among them; then long ones are skipped.
    """

    parts: list[Part] = field(default_factory=list)
    rest: list[Any] | None = None
    note: str = ""


def choose(path: AnyPath | None, prompts: AnyPath | None) -> HeldOut:
    """The text of a file, else every fifth prompt; the others are left to calibrate with.

    Raises:
        UsageError: a file cannot be read, or its text is too short or was calibrated on.
    """
    given = [] if prompts is None else read_prompts(Path(prompts))
    if path is not None:
        seen = {text_of(prompt).strip() for prompt in given}
        parts = [_checked(path, *entry, seen) for entry in enumerate(read_prompts(Path(path)), 1)]
        return HeldOut(parts, note=f"Evaluated on {path}")
    if len(given) < _FEWEST:
        return HeldOut(
            note=f"Not evaluated: at least {_FEWEST} prompts are needed to hold some out, or give --held-out FILE.jsonl"
        )
    rest = [prompt for at, prompt in enumerate(given) if at % _SHARE]
    texts = {text_of(prompt).strip() for prompt in rest}
    chosen = [text_of(prompt) for prompt in given[::_SHARE]]
    scored = [part for text in chosen if text.strip() not in texts and (part := cut(text))]
    note = (
        f"Held out of the calibration, to evaluate with: {len(chosen)} of {len(given)} prompts, every fifth"
    )
    return HeldOut(scored, rest if scored else None, note)


def _checked(path: AnyPath, number: int, prompt: Any, seen: set[str]) -> Part:
    """A held-out prompt, cut in two; UsageError where it is too short, or was calibrated on."""
    where, text = f"held-out prompts {os.fspath(path)}, prompt {number}", text_of(prompt)
    if text.strip() in seen:
        raise UsageError(f"{where} is among those to calibrate with: take it out of one of the files")
    part = cut(text)
    if part is None:
        raise UsageError(f"{where} is too short to be scored: give at least two words")
    return part


def cut(text: str) -> Part | None:
    """The part of a prompt that is read, and the part that is scored; None where it is too short for both.

    The second half is scored, of a long one its end, from a space on: so tokenizers make the same of both parts as of
    the whole.
    """
    text = text.strip()
    earliest = max(len(text) // 2, len(text) - _MOST_SCORED)
    space = re.search(r"\s", text[earliest:])
    at = earliest + space.start() if space else earliest
    return (text[:at], text[at:]) if text[:at].strip() and text[at:].strip() else None


# The models, from outside


def check_models(reference: Path, bundles: Sequence[Path]) -> None:
    """UsageError where a model is not what it has to be, as far as files tell."""
    if {*bundles} <= {reference}:
        raise UsageError("there is nothing to evaluate: give a bundle beside the reference")
    kinds = {path: look_at(path).kind for path in (reference, *bundles)}
    for path in bundles:
        if kinds[path] is Kind.CHECKPOINT:
            raise UsageError(f"{path} is a checkpoint: give it first, as the reference, and bundles after it")


def compare(
    tools: Processes, models: Mapping[str, Path], text: HeldOut, log: Path, scratch: Path, progress: Progress
) -> tuple[Evaluation, int]:
    """The scores of models by the names that they go by, the reference first, and the most memory of one in bytes.

    The bundles run first: the reference scores the very tokens that LiteRT-LM made, and judges what they generated.

    Args:
        tools: run the models.
        models: the reference, then the bundles.
        text: with parts.
        log: for what the models print; that of the last one stays.
        scratch: an empty folder.
        progress: called with (name, done, total).

    Raises:
        UsageError: the models make other tokens of a prompt.
        StageFailedError: a model did not run.
    """
    reference, *bundles = models
    folder = str(models[reference].resolve()) if models[reference].is_dir() else None
    peaks = [0]

    def run(name: str, **more: Any) -> dict[str, Any]:
        options = {"parts": text.parts, "skip_long": text.rest is not None, **more}
        job = Job("score", "", {"model": str(models[name].resolve())}, options=options)
        place = Path(tempfile.mkdtemp(dir=scratch))
        try:
            done = tools.carry_out(job, log, place, lambda _, *step: progress(name, *step))
        except StageFailedError as error:
            complaints = _COMPLAINT.findall(log.read_text(encoding="utf-8", errors="replace"))
            complaint = f" ({complaints[-1]})" if complaints else ""
            raise StageFailedError(f"{Path(name).name} did not run: {error}{complaint}") from error
        peaks.append(done.peak_bytes or 0)
        return done.values

    said = {name: [Said(**one) for one in run(name, tokenizer=folder)["said"]] for name in bundles}
    first = said[bundles[0]]
    own = run(
        reference,
        said=None if folder is None else [asdict(one) for one in first],
        judged={name: [one.generated for one in every] for name, every in said.items()},
    )
    said[reference] = [Said(**one) for one in own["said"]]
    for every in said.values():
        for at, (one, other) in enumerate(zip(every, first, strict=True)):
            _check_tokens(at, (one.before, one.scored), (other.before, other.scored))
    skipped = sum(not one.scored for one in said[reference])
    scores = [ModelScore.of(name, said[name], own["agreed"].get(name)) for name in models]
    return Evaluation(scores, len(text.parts) - skipped, skipped), max(peaks)


def _check_tokens(at: int, theirs: Sequence[Sequence[int]], ours: Sequence[Sequence[int]]) -> None:
    """UsageError where the reference makes other tokens of the two parts of the prompt at this place."""
    for their_part, part in zip(theirs, ours, strict=True):
        if their_part != part:
            raise UsageError(
                f"the reference has another vocabulary than the bundle: it splits held-out prompt {at + 1} into "
                f"different tokens ({len(their_part)} in a part, the bundle {len(part)}); give the model that the "
                f"bundle was made from"
            )


# One model, in its own process


def score(
    model: str,
    step: Callable[[int, int], None],
    *,
    parts: Sequence[Part],
    skip_long: bool,
    tokenizer: str | None = None,
    said: Sequence[Mapping[str, Any]] | None = None,
    judged: Mapping[str, Sequence[Generated]] | None = None,
) -> dict[str, Any]:
    """What a model says of each prompt (`said`), and with how many generated tokens of others it agrees (`agreed`).

    Args:
        model: a bundle, or the folder of a checkpoint.
        step: called with (done, total).
        parts: the prompts, as `cut` cuts them.
        skip_long: give nothing for a prompt that is longer than a bundle's cache, instead of the error.
        tokenizer: of a bundle, the folder of the reference, whose tokenizer must give the same tokens.
        said: for a checkpoint, what a bundle said of the prompts: their tokens.
        judged: what others generated, by name, prompt by prompt.

    Raises:
        UsageError: a prompt is longer than the cache, or the reference's tokens are others.
    """
    scorer: Any
    texts: Sequence[Any]
    if said is not None:
        scorer, texts = Checkpoint(model), [Said(**one) for one in said]
    else:
        scorer = Runtime(model)
        if tokenizer is not None:
            scorer.check_tokens(parts, tokenizer)
        texts = scorer.fitting(parts, skip_long=skip_long)
    scored, agreed = [], dict.fromkeys(judged or {}, 0)
    for at, text in enumerate(texts):
        step(at, len(texts))
        scored.append(asdict(scorer.say(text)))
        for name, generated in (judged or {}).items():
            agreed[name] += scorer.agreeing(text, generated[at])
    step(len(texts), len(texts))
    return {"said": scored, "agreed": agreed}


class Runtime:
    """A bundle in LiteRT-LM's executor for NPUs, which runs on CPU kernels where it is given no NPU.

    `room` is the length of its cache in tokens.
    """

    def __init__(self, path: str) -> None:
        lm = importlib.import_module("litert_lm")
        self._engine: Any = lm.Engine(path, backend=lm.Backend.NPU(litert_dispatch_lib_dir=""))
        self._begin: int | None = self._engine.bos_token_id
        self.room: int = lm.ModelInfo(path).max_context_tokens

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without the one that every prompt begins with."""
        return list(self._engine.tokenize(text))

    def fitting(self, parts: Sequence[Part], *, skip_long: bool) -> list[Part | None]:
        """The prompts; None for one that is longer than the cache, which is a UsageError without `skip_long`."""
        lengths = [(len(self.encode(before)), len(self.encode(scored))) for before, scored in parts]
        fits = [1 + read + max(rest, GENERATED) < self.room for read, rest in lengths]
        if not (all(fits) or (skip_long and any(fits))):
            at = fits.index(False)
            raise UsageError(
                f"held-out prompt {at + 1} has {sum(lengths[at])} tokens, and the bundle's cache holds {self.room}, "
                f"which must leave room for {GENERATED} more: give a shorter one"
            )
        return [part if fit else None for part, fit in zip(parts, fits, strict=True)]

    def check_tokens(self, parts: Sequence[Part], checkpoint: str) -> None:
        """UsageError where the tokenizer of this folder makes other tokens of a prompt."""
        tokenizer = importlib.import_module("transformers").AutoTokenizer.from_pretrained(checkpoint)
        for at, part in enumerate(parts):
            theirs = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in part]
            _check_tokens(at, theirs, [self.encode(text) for text in part])

    def say(self, part: Part | None) -> Said:
        """Likelihoods of the second part after the first, and what the bundle generates there; nothing for None."""
        if part is None:
            return Said()
        before, scored = part
        with self._engine.create_session(apply_prompt_template=False) as session:
            session.run_prefill([before])
            likelihoods = session.run_text_scoring([scored]).token_scores[0]
        begin = [] if self._begin is None else [self._begin]
        ids = [*begin, *self.encode(before)], self.encode(scored)
        return Said(*ids, likelihoods, self.generate([before], GENERATED))

    def generate(self, texts: Sequence[str], count: int) -> Generated:
        """The most likely tokens after the texts, as text and id; fewer than `count` where the model ends."""
        with self._engine.create_session(apply_prompt_template=False, max_output_tokens=count) as session:
            session.run_prefill([*texts])
            pieces = [one.texts[0] for one in session.run_decode_async()]
        # Pieces of which the tokenizer makes other tokens (half a character, say) have no id here.
        while len(ids := self.encode("".join(pieces))) != len(pieces):
            pieces.pop()
        return list(zip(pieces, ids, strict=True))

    def agreeing(self, part: Part | None, generated: Generated) -> int:
        """How many tokens of another model are most likely here, too, each after the other model's tokens before it."""
        agreed = at = 0
        while part is not None and at < len(generated):
            before = "".join(piece for piece, _ in generated[:at])
            own = self.generate([part[0], before] if before else [part[0]], len(generated) - at)
            pairs = zip(own, generated[at:], strict=False)
            same = sum(1 for _ in takewhile(lambda pair: pair[0][1] == pair[1][1], pairs))
            agreed += same
            at += same + 1
        return agreed


class Checkpoint:
    """The checkpoint of a Hugging Face folder, in float32; it scores the very tokens that a bundle scored."""

    def __init__(self, folder: str) -> None:
        self._torch: Any = importlib.import_module("torch")
        loaded = importlib.import_module("transformers").AutoModelForCausalLM
        self._model: Any = loaded.from_pretrained(folder, dtype=self._torch.float32).eval()

    def say(self, text: Said) -> Said:
        """The log-likelihood of each token of `text.scored` after all before it."""
        likelihoods = []
        if text.scored:
            rows = self.logits(text.before, text.scored).log_softmax(-1)
            likelihoods = [float(row[token]) for row, token in zip(rows, text.scored, strict=True)]
        return replace(text, likelihoods=likelihoods, generated=[])

    def agreeing(self, text: Said, generated: Generated) -> int:
        """How many generated tokens are the most likely ones, each after all before it."""
        tokens = [token for _, token in generated]
        if not tokens:
            return 0
        most_likely = self.logits(text.before, tokens).argmax(-1).tolist()
        return sum(own == token for own, token in zip(most_likely, tokens, strict=True))

    def logits(self, before: Sequence[int], tokens: Sequence[int]) -> Any:
        """Float logits `[len(tokens), vocabulary]`: what is expected in the place of each of the tokens."""
        ids = self._torch.tensor([[*before, *tokens]])
        with self._torch.no_grad():
            logits = self._model(input_ids=ids, logits_to_keep=len(tokens) + 1).logits
        return logits[0, :-1].float()
