"""Evaluates bundles against the model that they were made from: likelihoods of held-out text, and agreement.

LiteRT-LM gives the likelihoods of a text, and the tokens that it generates; not which token would have been most likely
in place of each one of the text. So agreement is measured on what is generated. Models run in processes, which run
`score`, as many side by side as there are cores.
"""

import importlib
import math
import os
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from edge_opt.base.atomic import AnyPath
from edge_opt.base.errors import UsageError
from edge_opt.base.record import Record, from_dict
from edge_opt.base.words import Progress
from edge_opt.build.prompts import read_prompts, text_of
from edge_opt.build.source import Kind, look_at
from edge_opt.build.stages import Job, Processes, StageFailedError, logs_of

Part = tuple[str, str]
"""A prompt in two parts: what is read, and what is scored."""

GENERATED = 16
"""Tokens that a model generates after the first part of each prompt."""
ERROR = 0.01
"""Standard error of a perplexity's ratio at which no more text is scored."""
_FIRST_CHARACTERS, _SPARE, _CHARACTERS = 2560, 1.2, 4
"""How much is scored at first, usually enough; how much more than is needed then; and how long a token is."""
_STEP_SECONDS, _READ_SECONDS, _CHECKPOINT_SECONDS = 1.5e-10, 3e-11, 5
"""For announcements: what a token takes for each byte of a bundle, scored and read, and a prompt in a checkpoint."""
_LONG, _JOINT = 2.25, "\n\n"
"""Characters for each position of a cache that a long prompt has: over half as many tokens, in most texts."""
_MOST_SCORED = 512
"""Characters of a prompt that are scored: each token of them is one decode step."""
_FEWEST, _SHARE = 10, 5
"""Prompts to hold one in so many out of."""
_COMPLAINT = re.compile(r"^[EF]\d{4} .*?\] (.+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Said:
    """What a model says of one prompt: ids of the tokens `before` and `scored`, and the log-likelihood of the latter.

    `generated` are the tokens that it finds most likely after `before`, one after the other. All are empty for a prompt
    that was skipped.
    """

    before: list[int] = field(default_factory=list)
    scored: list[int] = field(default_factory=list)
    likelihoods: list[float] = field(default_factory=list)
    generated: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ModelScore:
    """One model: over how many held-out tokens its perplexity is.

    `ratio` is its perplexity over the reference's, and `ratio_error` the standard error of that, paired by token.
    `top1_agreement` is the share of tokens that both models generate after the same tokens; of the reference it is 1,
    and None where nothing was generated. With `evaluate_on_npu` it is of the scored tokens, `kl` is their mean
    divergence from the reference in nats, and `on_npu` says where the model ran.
    """

    source: str
    tokens: int
    perplexity: float
    top1_agreement: float | None
    kl: float | None = None
    on_npu: bool = False
    ratio: float | None = None
    ratio_error: float | None = None

    @classmethod
    def of(cls, source: str, said: Sequence[Said], reference: Sequence[Said]) -> "ModelScore":
        """The figures of one model beside those of the reference."""
        own, theirs = ([value for one in every for value in one.likelihoods] for every in (said, reference))
        same = judged = 0
        for pair in zip(said, reference, strict=True):
            a, b = (one.generated for one in pair)
            first = next((at for at, both in enumerate(zip(a, b, strict=False)) if len({*both}) > 1), None)
            # Behind the first token that differs both models go on from different texts.
            agreed = min(len(a), len(b)) if first is None else first
            same, judged = same + agreed, judged + agreed + (first is not None)
        share = same / judged if judged else None
        ratio, error = ratio_of(own, theirs)
        return cls(source, len(own), perplexity_of(own), share, ratio=ratio, ratio_error=error)


def perplexity_of(likelihoods: Sequence[float]) -> float:
    """One over the mean chance, infinite beyond what a number holds."""
    return ratio_of(likelihoods, [0.0] * len(likelihoods))[0]


def ratio_of(likelihoods: Sequence[float], reference: Sequence[float]) -> tuple[float, float]:
    """The ratio of two perplexities on the same tokens, and its standard error."""
    gaps = np.subtract(reference, likelihoods)
    with np.errstate(all="ignore"):
        ratio = float(np.exp(gaps.mean()))
        spread = float(gaps.std(ddof=1)) if len(gaps) > 1 else math.inf
    return ratio, ratio * spread / math.sqrt(len(gaps))


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
    Prompts are scored, long and short ones in turn, until the standard error of the perplexity's ratio is 1 %. Where
    none fills half the cache, a long one is joined from them.

    Args:
        reference: the checkpoint, a Hugging Face folder, or a float .litertlm.
        bundles: .litertlm bundles for NPUs, not compiled.
        prompts: JSON lines, as `edge_opt.build.build` has them, that no bundle was calibrated on.
        progress: called with (what, done, total); `what` says about how long it takes.
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
    the prompts that are left to calibrate with, where these were chosen among them.
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
    if path is None and len(given) < _FEWEST:
        return HeldOut(
            note=f"Not evaluated: at least {_FEWEST} prompts are needed to hold some out, or give --held-out FILE.jsonl"
        )
    rest = given if path is not None else [one for at, one in enumerate(given) if at % _SHARE]
    chosen = [text_of(one) for one in (given[::_SHARE] if path is None else read_prompts(Path(path)))]
    seen = {text_of(prompt).strip() for prompt in rest}
    parts = []
    for number, text in enumerate(chosen, 1):
        where = f"held-out prompts {path}, prompt {number}"
        if text.strip() in seen:
            if path is not None:
                raise UsageError(f"{where} is among those to calibrate with: take it out of one of the files")
        elif part := cut(text):
            parts.append(part)
        elif path is not None:
            raise UsageError(f"{where} is too short to be scored: give at least two words")
    if path is not None:
        return HeldOut(parts, note=f"Evaluated on {path}")
    note = (
        f"Held out of the calibration, to evaluate with: {len(chosen)} of {len(given)} prompts, every fifth"
    )
    return HeldOut(parts, rest if parts else None, note)


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


def long_and_short(parts: Sequence[Part]) -> list[Part]:
    """The longest prompt, the shortest, the longest that is left, and so on: also the first few are of every length."""
    left = sorted(parts, key=lambda part: len(part[0]))
    return [left.pop(-1 if at % 2 == 0 else 0) for at in range(len(left))]


def with_a_long_one(parts: Sequence[Part], positions: int) -> list[Part]:
    """The prompts and, where none fills about half a cache of so many positions, one that is joined from them."""
    wanted = int(_LONG * positions)
    whole = _JOINT.join("".join(part) for part in parts)[:wanted]
    joined = cut(whole)
    longest = max((len("".join(part)) for part in parts), default=0)
    return [joined, *parts] if joined and longest < min(wanted, len(whole)) else [*parts]


# The models, from outside


def check_models(reference: Path, bundles: Sequence[Path]) -> None:
    """UsageError where a model is not what it has to be, as far as files tell."""
    if {*bundles} <= {reference}:
        raise UsageError("there is nothing to evaluate: give a bundle beside the reference")
    look_at(reference)
    for path in bundles:
        if look_at(path).kind is Kind.CHECKPOINT:
            raise UsageError(f"{path} is a checkpoint: give it first, as the reference, and bundles after it")


def compare(
    tools: Processes, models: Mapping[str, Path], text: HeldOut, log: Path, scratch: Path, progress: Progress
) -> tuple[Evaluation, int]:
    """The scores of models by the names that they go by, the reference first, and the most memory of one in bytes.

    Bundles run side by side, then a checkpoint: it scores the very tokens that LiteRT-LM made.

    Raises:
        UsageError: the models make other tokens of a prompt, or all prompts are too long.
        StageFailedError: a model did not run.
    """
    reference = next(iter(models))
    bundles = {name: path for name, path in models.items() if not path.is_dir()}
    run = partial(_run, tools, log, scratch, progress)
    said: dict[str, list[Said]] = {name: [] for name in models}
    caches = (cache for path in bundles.values() for cache in look_at(path).caches.caches)
    parts = with_a_long_one(text.parts, max((cache.positions for cache in caches), default=0))
    left, peaks, scores = long_and_short(parts), [0], list[ModelScore]()
    count = 1 + int(np.searchsorted(np.cumsum([len(part[1]) for part in left]), _FIRST_CHARACTERS))
    while left and count:
        batch, left = left[:count], left[count:]
        found = run(bundles, batch, [Said()] * len(batch), peaks)
        for at, every in enumerate(zip(*found.values(), strict=True)):
            if not all(one.scored for one in every):  # too long for one of them
                found.update({name: [*one[:at], Said(), *one[at + 1 :]] for name, one in found.items()})
        if reference not in bundles:
            own = {reference: models[reference]}
            found |= run(own, batch, next(iter(found.values())), peaks)
        for name, one in found.items():
            said[name] += one
            _check_tokens(found[reference], one, name)
        if any(one.scored for one in said[reference]):
            scores = [ModelScore.of(name, said[name], said[reference]) for name in models]
            off = max(1, *((one.ratio_error or 0) / ERROR for one in scores))
            count = math.ceil(_SPARE * len(said[reference]) * min(off**2 - 1, len(left)))
    if not scores:
        raise UsageError("every held-out prompt is longer than the bundle's cache: give shorter ones")
    skipped = sum(not one.scored for one in said[reference])
    return Evaluation(scores, len(said[reference]) - skipped, skipped), max(peaks)


def _run(
    tools: Processes,
    log: Path,
    scratch: Path,
    progress: Progress,
    models: Mapping[str, Path],
    parts: Sequence[Part],
    said: Sequence[Said],
    peaks: list[int],
) -> dict[str, list[Said]]:
    """What models say of prompts, by name; a checkpoint, which uses all cores, scores the tokens of `said`."""
    cores = len(os.sched_getaffinity(0))
    whole = any(path.is_dir() for path in models.values())
    shares = 1 if whole else min(max(cores // len(models), 1), len(parts))
    jobs = [
        Job(
            "score",
            "",
            {"model": str(path.resolve())},
            options={"parts": [*parts[at::shares]], "said": [asdict(one) for one in said[at::shares]]},
        )
        for path in models.values()
        for at in range(shares)
    ]
    minutes = math.ceil(sum(_seconds(path, parts) for path in models.values()) / cores / 60)
    what, place = f"{', '.join(models)} (about {minutes} min)", Path(tempfile.mkdtemp(dir=scratch))
    try:
        answers = tools.side_by_side(
            jobs, log, place, lambda _, *step: progress(what, *step), at_a_time=cores
        )
    except StageFailedError as error:
        printed = (one.read_text(encoding="utf-8", errors="replace") for one in logs_of(log, len(jobs)))
        complaints = _COMPLAINT.findall("".join(printed))
        complaint = f" ({complaints[-1]})" if complaints else ""
        names = " or ".join(Path(name).name for name in models)
        raise StageFailedError(f"{names} did not run: {error}{complaint}") from error
    peaks += [answer.peak_bytes or 0 for answer in answers]
    found = {name: [Said()] * len(parts) for name in models}
    for at, answer in enumerate(answers):
        found[[*models][at // shares]][at % shares :: shares] = from_dict(list[Said], answer.values["said"])
    return found


def _seconds(model: Path, parts: Sequence[Part]) -> float:
    """How long a model is going to take on one core, for announcements; each prompt is read twice."""
    if model.is_dir():
        return _CHECKPOINT_SECONDS * len(parts)
    read, scored = (sum(map(len, texts)) / _CHARACTERS for texts in zip(*parts, strict=True))
    return model.stat().st_size * (
        _READ_SECONDS * 2 * read + _STEP_SECONDS * (scored + GENERATED * len(parts))
    )


def _check_tokens(reference: Sequence[Said], found: Sequence[Said], name: str) -> None:
    """UsageError where a model made other tokens of a prompt than the reference."""
    for theirs, own in zip(reference, found, strict=True):
        if (theirs.before, theirs.scored) != (own.before, own.scored):
            raise UsageError(
                f"the reference has another vocabulary than the bundle {name}: it makes {len(theirs.before)} and "
                f"{len(theirs.scored)} tokens of a held-out prompt's two parts, the bundle {len(own.before)} and "
                f"{len(own.scored)}; give the model that the bundle was made from"
            )


# One model, in its own process


def score(
    model: str,
    step: Callable[[int, int], None],
    *,
    parts: Sequence[Part],
    said: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """What a model says of each prompt, cut into parts by `cut`; a checkpoint scores the tokens of `said`."""
    scorer: Any = Checkpoint(model) if Path(model).is_dir() else Runtime(model)
    found = []
    for at, (part, other) in enumerate(zip(parts, said, strict=True)):
        step(at, len(parts))
        found.append(asdict(scorer.say(part, from_dict(Said, other))))
    step(len(parts), len(parts))
    return {"said": found}


class Runtime:
    """A bundle in LiteRT-LM's executor for NPUs, which runs on CPU kernels where it is given no NPU."""

    def __init__(self, path: str) -> None:
        lm = importlib.import_module("litert_lm")
        self._engine: Any = lm.Engine(path, backend=lm.Backend.NPU(litert_dispatch_lib_dir=""))
        self._room: int = lm.ModelInfo(path).max_context_tokens

    def _encode(self, text: str) -> list[int]:
        """The ids of a text, without the one that every prompt begins with."""
        return list(self._engine.tokenize(text))

    def say(self, part: Part, _: Said) -> Said:
        """Likelihoods of the second part after the first, and what the bundle generates there; nothing if too long."""
        before, scored = map(self._encode, part)
        if 1 + len(before) + max(len(scored), GENERATED) >= self._room:
            return Said()
        begin = [] if self._engine.bos_token_id is None else [self._engine.bos_token_id]
        with self._engine.create_session(apply_prompt_template=False) as session:
            session.run_prefill([part[0]])
            likelihoods = [*session.run_text_scoring([part[1]]).token_scores[0]]
        return Said([*begin, *before], scored, likelihoods, self._generated(part[0]))

    def _generated(self, text: str) -> list[int]:
        """The most likely tokens after the text; fewer than `GENERATED` where the model ends."""
        limit = {"max_output_tokens": GENERATED}
        with self._engine.create_session(apply_prompt_template=False, **limit) as session:
            session.run_prefill([text])
            pieces = [one.texts[0] for one in session.run_decode_async()]
        # Pieces of which the tokenizer makes other tokens (half a character, say) have no id here.
        while len(ids := self._encode("".join(pieces))) != len(pieces):
            pieces.pop()
        return ids


class Checkpoint:
    """The checkpoint of a Hugging Face folder, in float32."""

    def __init__(self, folder: str) -> None:
        self._torch: Any = importlib.import_module("torch")
        transformers = importlib.import_module("transformers")
        self._tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
        loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=self._torch.float32)
        self._model: Any = loaded.eval()

    def say(self, part: Part, bundle: Said) -> Said:
        """The log-likelihood of each token that a bundle scored; only the tokens where the tokenizer's are others."""
        if not bundle.scored:
            return Said()
        before, scored = (self._tokenizer(text, add_special_tokens=False)["input_ids"] for text in part)
        before = [
            *bundle.before[: len(bundle.before) - len(before)],
            *before,
        ]  # what every prompt begins with
        if (before, scored) != (bundle.before, bundle.scored):
            return Said(before, scored)
        rows = self.logits(before, scored).log_softmax(-1)
        likelihoods = [float(row[token]) for row, token in zip(rows, scored, strict=True)]
        ids = self._torch.tensor([before])
        whole = self._model.generate(ids, max_new_tokens=GENERATED, do_sample=False)
        return Said(before, scored, likelihoods, whole[0, len(before) :].tolist())

    def logits(self, before: Sequence[int], tokens: Sequence[int]) -> Any:
        """Float logits `[len(tokens), vocabulary]`: what is expected in the place of each of the tokens."""
        ids = self._torch.tensor([[*before, *tokens]])
        with self._torch.no_grad():
            logits = self._model(input_ids=ids, logits_to_keep=len(tokens) + 1).logits
        return logits[0, :-1].float()
