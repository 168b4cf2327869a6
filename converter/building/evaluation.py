"""Evaluates bundles against the checkpoint that they were made from, on text not used for calibration."""

import math
import multiprocessing
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from edge_opt.base.atomic import AnyPath, path_of, scratch_folder
from edge_opt.base.errors import UsageError
from edge_opt.base.packages import versions_of
from edge_opt.base.record import Record, from_dict
from edge_opt.base.words import Progress, many, no_progress
from edge_opt.building import stages
from edge_opt.building.checkpoint import load
from edge_opt.building.held_out import Halves, in_turn, read_texts
from edge_opt.building.litert_lm import float_softmax, score_text
from edge_opt.building.prompts import read_prompts, text_of
from edge_opt.building.recipe import EMULATE, EVALUATE
from edge_opt.building.source import ADAPTER_CONFIG, Kind, look_at
from edge_opt.building.stages import Job, StageFailedError, Values
from edge_opt.ir import DType
from edge_opt.ir.opening import Opened
from edge_opt.npu.compiler import Compiler
from edge_opt.npu.scoring import Text, read
from edge_opt.npu.vendors import backend_of
from edge_opt.runtime.metrics import log_softmax
from edge_opt.runtime.protocol import Array

ERROR = 0.01
"""Standard error of the perplexity ratio, by tokens, at which scoring stops."""
TOKENS = 20
"""Default number of tokens to score in the emulator: each takes many seconds."""
_WORST_EXPORT = 0.5
"""Nats of mean KL divergence from the checkpoint above which an export is another model, not a less precise one."""
_DOUBTFUL_EXPORT = 0.05
"""Nats above which there is a warning. Gemma 3 270M's export has 0.009; 0.04 to 0.11 with another window or RoPE."""
_CHECKED = 16  # tokens of an export whose predictions are compared
_BATCH = 4  # prompts scored before the error is looked at again
_PROMPTS = 5
_MOST_READ = 120
_NOTHING_SCORED = "no token of the held-out prompts could be scored: give longer prompts"
_INSTALL_LM = (
    "pip install '.[lm]' in a checkout of edge-opt (with evaluate=False, a build does not need it)"
)


@dataclass(frozen=True, slots=True)
class ModelScore:
    """A model's scores on `tokens` held-out tokens.

    `ratio` is its perplexity relative to the reference's on the same tokens, `ratio_error` the standard error of texts.
    `weights` are its bytes of constants by type, of a bundle's main model; empty for a checkpoint.
    `top1_agreement` is the share of tokens for which its most likely token is the reference's, `kl` the mean divergence
    from the reference in nats; both are None from LiteRT-LM, which does not report them. `on_npu` is True if
    the model ran in the NPU's emulator.
    """

    source: str
    tokens: int
    perplexity: float
    top1_agreement: float | None = None
    kl: float | None = None
    on_npu: bool = False
    ratio: float | None = None
    ratio_error: float | None = None
    weights: Mapping[str, int] = field(default_factory=dict)

    @property
    def bits(self) -> float | None:
        """Mean bits of a weight; None for a checkpoint."""
        elements = 0.0
        for name, count in self.weights.items():
            elements += 8 * count / (DType[name].bits or 8)
        return 8 * sum(self.weights.values()) / elements if elements else None

    @classmethod
    def of(
        cls,
        source: str,
        likelihoods: Sequence[float],
        reference: Sequence[float],
        lengths: Sequence[int] = (),
        **others: Any,
    ) -> "ModelScore":
        """The score by the log-likelihoods of all tokens, the reference's, the lengths of texts, and other fields."""
        count = len(likelihoods)
        perplexity = ratio_of(likelihoods, [0.0] * count).ratio  # to one that is always sure
        ratio, error = ratio_of(likelihoods, reference, lengths)
        return cls(source, count, perplexity, ratio=ratio, ratio_error=error, **others)

    def exceeds(self, limit: float) -> bool:
        """True if the ratio exceeds a limit by more than its error, both in nats; True for NaN.

        In nats, because few tokens and a large ratio have an error that is larger than the ratio.
        """
        assert self.ratio is not None
        assert self.ratio_error is not None
        with np.errstate(all="ignore"):
            ratio = np.float64(self.ratio)
            least = np.log(ratio) - self.ratio_error / ratio
        return not least <= math.log(limit)


class Ratio(NamedTuple):
    """The ratio of two perplexities on the same tokens, and its standard error."""

    ratio: float
    error: float


def ratio_of(
    likelihoods: Sequence[float], reference: Sequence[float], lengths: Sequence[int] = ()
) -> Ratio:
    """The ratio of a model's perplexity to the reference's, from the log-likelihoods of the same tokens.

    What quantization costs differs between texts. With the `lengths` of the texts in tokens, the error is therefore
    that of independent texts (Miller 2024, https://arxiv.org/abs/2411.00640), if it is larger than that of independent
    tokens. On 52 texts and 5,869 tokens, 4-bit weights of Qwen2.5-Coder-0.5B have 0.0062 and 0.0048.

    Raises:
        UsageError: there are no tokens.
    """
    if not likelihoods:
        raise UsageError(_NOTHING_SCORED)
    gaps = np.subtract(reference, likelihoods)
    with np.errstate(all="ignore"):
        mean = gaps.mean()
        spread = gaps.std(ddof=1) if len(gaps) > 1 else math.inf
        error = spread / math.sqrt(len(gaps))
        if len(lengths) > 1:
            texts = np.split(gaps - mean, np.cumsum(lengths)[:-1])
            sums = [text.sum() for text in texts]
            of_texts = np.linalg.norm(sums) / len(gaps) * math.sqrt(len(texts) / (len(texts) - 1))
            error = np.maximum(error, of_texts)
        ratio = np.exp(mean)
        return Ratio(float(ratio), float(ratio * error))


@dataclass(frozen=True, slots=True)
class Evaluation(Record):
    """Scores of the reference, then of the bundles in the given order.

    `prompts` is the number of scored prompts, `skipped` the number of prompts that were too long for the cache.
    After a build, `note` says which text was scored, or why none was.
    """

    models: list[ModelScore]
    prompts: int
    skipped: int = 0
    note: str = ""

    def within(self, limit: float) -> bool:
        """True if every bundle's perplexity is at most `limit` times the reference's; False for NaN."""
        return all(
            model.perplexity <= limit * self.models[0].perplexity for model in self.models[1:]
        )


def evaluate(
    reference: AnyPath,
    bundles: AnyPath | Sequence[AnyPath],
    prompts: AnyPath,
    *,
    on: Literal["cpu", "npu"] = "cpu",
    tokens: int = TOKENS,
    compiler: Compiler = Compiler(),
    progress: Progress | None = None,
) -> Evaluation:
    """Compare the perplexity of bundles on held-out text with that of the checkpoint that they were made from.

    On the CPU, uncompiled bundles run in LiteRT-LM's executor for NPUs. The second half of each prompt, at most 512
    characters, is scored in decode, after a prefill of the text before it. Long and short prompts alternate until the
    standard error of the perplexity ratio would be 1 % if tokens were independent. If no prompt fills half the cache, a
    long one is joined from them.

    On the NPU, a bundle's prefill and decode step are compiled once and run in the compiler's emulator. They read the
    beginnings of up to five prompts, at most 120 tokens or half the cache each; then the next tokens of each, two or
    more, are scored. For comparison, the bundle also runs on the same text on CPU kernels.

    Args:
        reference: the checkpoint, a Hugging Face folder.
        bundles: .litertlm bundles for NPUs, not compiled.
        prompts: JSON lines, as for `edge_opt.build`, not used for calibrating the bundles.
        on: "npu" for the NPU's arithmetic.
        tokens: on the NPU, how many tokens to score in all.
        compiler: settings of the NPU's compiler.
        progress: called with (stage, done, total).

    Raises:
        UsageError: an argument is invalid, or a package is missing.
        CompilerMissingError: the compiler, its libraries or a C compiler are not on this machine.
        ModelFormatError: a bundle cannot be read.
        StageFailedError: a model failed to run.
    """
    given = [bundles] if isinstance(bundles, str | os.PathLike) else [*bundles]
    texts = read_texts(path_of(prompts, "prompts"))
    if not given:
        raise UsageError("no bundle to evaluate: give one after the checkpoint")
    inputs: dict[str, str] = {}
    for path in (reference, *given):
        if path_of(path, "a model").joinpath(ADAPTER_CONFIG).exists():
            raise UsageError(
                f"{path} is a LoRA folder: give merge/checkpoint in the work folder of its build"
            )
        kind = look_at(Path(path)).kind
        is_first = not inputs
        is_checkpoint = kind is Kind.CHECKPOINT
        if is_checkpoint != is_first:
            raise UsageError(
                f"{path} is a {kind}: give the checkpoint first, and bundles made from it after it"
            )
        inputs[os.fspath(path)] = str(Path(path).resolve())
    check_runtimes(bundles=on == "cpu")
    if on == "cpu":
        stage = EVALUATE
        options = {"parts": in_turn(texts, *map(Path, given))}
        libraries = None
    else:
        stage = EMULATE
        options = emulation(texts, tokens, compiler)
        backend = backend_of(compiler.chip)
        backend.check_emulator(compiler)
        libraries = str(backend.libraries(compiler))
    with scratch_folder() as folder:
        job = Job(stage.name, str(folder), inputs, options=options, libraries=libraries)
        values, _ = stages.carry_out(job, folder / "log", progress or no_progress)
    return from_dict(Evaluation, values)


def check_runtimes(*, bundles: bool = True) -> dict[str, str]:
    """The version of LiteRT-LM if `bundles`; UsageError if it, or a package that runs checkpoints, is missing."""
    versions_of(("torch", "transformers"), stages.INSTALL)
    return versions_of(("litert_lm",), _INSTALL_LM) if bundles else {}


def emulation(texts: Sequence[str], tokens: int, compiler: Compiler) -> Values:
    """Options of the emulator stage: up to five of the texts, the tokens to score of each, and the compiler's."""
    most = min(_PROMPTS, max(1, tokens // 2))
    some = texts[:: math.ceil(len(texts) / most)]
    return {
        "texts": some,
        "tokens": math.ceil(tokens / len(some)),
        "chip": compiler.chip,
        "flags": [*compiler.flags],
    }


def score(job: Job, progress: Progress) -> Values:
    """Score prompts of `parts` in LiteRT-LM until the ratio is precise enough; a bundle's prompts run in parallel.

    a batch of prompts -> each bundle in LiteRT-LM -> for each prompt, the bundles' tokens and likelihoods
                                                   -> the checkpoint's likelihoods of the same tokens
    for each token, (the checkpoint's, the first bundle's, ..) -> `[1 + bundles, tokens]` -> ratios, errors
    """
    reference, *bundles = job.inputs
    checkpoint = Checkpoint(job.inputs[reference])
    parts = job.options["parts"]
    tokens: list[tuple[Any, ...]] = []  # the log-likelihoods by all models of each token
    lengths: list[int] = []
    skipped = 0
    cores = len(os.sched_getaffinity(0))
    with ProcessPoolExecutor(cores, multiprocessing.get_context("spawn")) as pool:
        for start in range(0, len(parts), _BATCH):
            batch = parts[start : start + _BATCH]
            answers = [pool.map(partial(score_text, job.inputs[name]), batch) for name in bundles]
            prompts = zip(batch, *answers, strict=True)
            for place, (halves, *by_bundle) in enumerate(prompts, start):
                progress(job.stage, place, start + len(batch))
                if None in by_bundle:
                    skipped += 1
                    continue
                texts = {name: one.text for name, one in zip(bundles, by_bundle, strict=True)}
                found = [checkpoint.likelihoods(halves, texts)]
                found += [one.likelihoods for one in by_bundle]
                known = [token for token in zip(*found, strict=True) if None not in token]
                tokens += known
                lengths.append(len(known))
            expected, *others = np.reshape(tokens, (-1, len(job.inputs))).T.tolist()
            errors = [ratio_of(own, expected).error for own in others if expected]
            if max(errors, default=math.inf) <= ERROR:  # by tokens, not by texts
                break
    if not lengths:
        raise UsageError(
            "every held-out prompt is longer than the bundle's cache: give shorter ones"
        )
    scores = [ModelScore.of(reference, expected, expected, lengths)]
    for name, own in zip(bundles, others, strict=True):
        weights = _weights(job.inputs[name])
        scores.append(ModelScore.of(name, own, expected, lengths, weights=weights))
    return asdict(Evaluation(scores, len(lengths), skipped))


def _weights(bundle: str) -> dict[str, int]:
    return Opened(bundle).main().model.weight_bytes()


class Checkpoint:
    """A Hugging Face checkpoint in float32, most of whose weights stay on disk."""

    def __init__(self, folder: str) -> None:
        import transformers

        self._tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
        self._model = load(Path(folder)).model

    def likelihoods(self, halves: Halves, texts: Mapping[str, Text]) -> list[float]:
        """The log-likelihood of each token that the bundles scored.

        Raises:
            UsageError: a bundle tokenizes the prompt differently.
        """
        before = self._tokens(halves[0])
        scored = self._tokens(halves[1])
        for name, text in texts.items():
            without_bos = text.before[-len(before) :]
            if (without_bos, text.scored) != (before, scored):
                raise UsageError(
                    f"the checkpoint's vocabulary differs from bundle {name}'s: a held-out prompt's two parts have "
                    f"{len(before)} and {len(scored)} tokens, in the bundle {len(text.before)} and "
                    f"{len(text.scored)}; give the checkpoint that the bundle was made from"
                )
        rows = self.logits(text).log_softmax(-1)
        return [float(row[token]) for row, token in zip(rows, scored, strict=True)]

    def _tokens(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def logits(self, text: Text) -> Any:
        """Float logits `[scored, vocabulary]` that predict each of the scored tokens."""
        import torch

        ids = torch.tensor([[*text.before, *text.scored]])
        with torch.no_grad():
            logits = self._model(input_ids=ids, logits_to_keep=len(text.scored) + 1).logits
        return logits[0, :-1].float()

    def text(self, text: str, count: int, cache: int, most: int = _MOST_READ) -> Text:
        """The first half of a text's tokens, at most `most` or half the cache, and the next `count` that fit."""
        ids = self._tokenizer(text)["input_ids"][:cache]
        at = min(len(ids) // 2, most)
        return Text(tuple(ids[:at]), tuple(ids[at : at + count]))


def score_of(
    reference: Array,
    tokens: Sequence[int],
    lengths: Sequence[int],
    source: str,
    logits: Array,
    **others: Any,
) -> ModelScore:
    """The score of a model by its logits `[tokens, vocabulary]`, and by the reference's on the same tokens.

    `tokens` are those that came next, of texts of these `lengths`; `others` are other fields of the score.
    """
    theirs = log_softmax(reference.astype(np.float64))
    own = log_softmax(logits.astype(np.float64))
    divergences = (np.exp(theirs) * (theirs - own)).sum(axis=1)
    agrees = theirs.argmax(axis=1) == own.argmax(axis=1)
    came_next = (np.arange(len(tokens)), tokens)
    return ModelScore.of(
        source,
        own[came_next].tolist(),
        theirs[came_next].tolist(),
        lengths,
        kl=float(divergences.mean()),
        top1_agreement=float(agrees.mean()),
        **others,
    )


def check_export(job: Job, _: Progress) -> Values:
    """Compare the export's predictions with the checkpoint's, in the middle of the longest calibration prompt.

    Raises:
        StageFailedError: they are those of another model.
        UsageError: the prompts are too short.
    """
    bundle = job.inputs["exported"]
    checkpoint = Checkpoint(job.inputs["base"])
    prompts = map(text_of, read_prompts(Path(job.inputs["prompts"])))
    cache = look_at(Path(bundle)).cache
    text = checkpoint.text(max(prompts, key=len), _CHECKED, cache, most=cache)
    if not text.before:
        raise UsageError("the prompts have a single token: give longer ones")
    expected = checkpoint.logits(text).numpy()
    del checkpoint
    try:
        (own,) = read(bundle, [text])
    except UsageError as error:
        return {"notes": [f"Not compared with the checkpoint: {error}"]}
    kl = score_of(expected, text.scored, (), "exported", own).kl
    assert kl is not None
    found = f"mean KL divergence {kl:.4f} nats on {many(len(text.scored), 'token')} after {len(text.before)}"
    if not kl <= _WORST_EXPORT:  # NaN, too
        raise StageFailedError(f"the export's predictions are not the checkpoint's: {found}")
    how = "Compared with the checkpoint"
    if kl > _DOUBTFUL_EXPORT:
        how = "Warning: the export's predictions differ from the checkpoint's"
    return {"notes": [f"{how}: {found}"]}


def emulate(job: Job, progress: Progress) -> Values:
    """Score `tokens` tokens of each of `texts`, on CPU kernels and in the NPU's emulator."""
    reference, *bundles = job.inputs
    options = job.options
    compiler = Compiler(options["chip"], tuple(options["flags"]), job.libraries)
    backend_of(compiler.chip).check_emulator(compiler)
    checkpoint = Checkpoint(job.inputs[reference])
    cache = min(look_at(Path(job.inputs[bundle])).cache for bundle in bundles)
    cut = [checkpoint.text(text, options["tokens"], cache) for text in options["texts"]]
    texts = [text for text in cut if text.before]
    if not texts:
        raise UsageError(_NOTHING_SCORED)
    # Logits are `[tokens, vocabulary]`, of the scored tokens of all texts.
    expected = np.concatenate([checkpoint.logits(text).numpy() for text in texts])
    del checkpoint
    tokens = [*chain.from_iterable(text.scored for text in texts)]
    lengths = [len(text.scored) for text in texts]
    judged = partial(score_of, expected, tokens, lengths)
    scores = [judged(reference, expected)]
    for bundle in bundles:
        path = job.inputs[bundle]
        with scratch_folder() as folder:
            copy = folder / Path(path).name
            float_softmax(path, copy)
            cpu = np.concatenate(read(copy, texts))
        if cpu.shape != expected.shape:
            raise UsageError(
                f"{bundle} has a vocabulary of {cpu.shape[1]} tokens, and the checkpoint one of {expected.shape[1]}: "
                f"give the checkpoint that the bundle was made from"
            )
        npu = np.concatenate(read(path, texts, compiler, partial(progress, job.stage)))
        weights = _weights(path)
        scores.append(judged(bundle, cpu, weights=weights))
        scores.append(judged(bundle, npu, weights=weights, on_npu=True))
    return asdict(Evaluation(scores, len(texts)))
