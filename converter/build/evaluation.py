"""Evaluates bundles against the checkpoint that they were made from, on text not used for calibration.

LiteRT-LM returns only the likelihoods of a text's tokens, not the most likely ones; the NPU's emulator returns all
logits.
"""

import importlib
import math
import multiprocessing
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from edge_opt.base.atomic import AnyPath
from edge_opt.base.errors import UsageError
from edge_opt.base.record import Record, from_dict
from edge_opt.base.words import Progress
from edge_opt.build.prompts import read_prompts, text_of
from edge_opt.build.source import Kind, look_at
from edge_opt.build.stages import Job, Processes, StageFailedError
from edge_opt.ir import DType, Operator, Tensor
from edge_opt.ir.opening import Opened
from edge_opt.npu.emulator import check_emulator
from edge_opt.npu.hexagon import Compiler
from edge_opt.npu.scoring import Closeness, Text, read
from edge_opt.targets.chips import DEFAULT_CHIP

Part = tuple[str, str]
"""A prompt in two parts: one that is read, and one that is scored."""

CPU, NPU = "evaluate", "emulate"
"""The stages that score a checkpoint and its bundles: in LiteRT-LM on CPU kernels, and in the NPU's emulator."""
ERROR = 0.01
"""Standard error of the perplexity ratio at which scoring stops."""
TOKENS = 20
"""Default number of tokens to score in the emulator: each takes many seconds."""
_FIRST_CHARACTERS, _SPARE = 2560, 1.2
"""Characters scored first, usually enough; safety factor on the estimated rest."""
_PROMPTS, _MOST_READ = 5, 120
_LONG, _JOINT = 2.25, "\n\n"
"""Characters of a long prompt per cache position: over half as many tokens, in most texts."""
_MOST_SCORED = 512
"""Most characters scored of a prompt: each token is one decode step."""
_FEWEST, _SHARE = 10, 5
"""Fewest prompts for holding some out; one in this many is held out."""
_COMPLAINT = re.compile(r"^[EF]\d{4} .*?\] (.+)$", re.MULTILINE)
_PRINTED = "bundle-*.log"


@dataclass(frozen=True, slots=True)
class ModelScore:
    """A model's scores on `tokens` held-out tokens.

    `ratio` is its perplexity relative to the reference's on the same tokens, `ratio_error` the standard error.
    `top1_agreement` is the share of tokens for which its most likely token is the reference's, `kl` the mean divergence
    from the reference in nats; both are None from LiteRT-LM, which does not report them. `on_npu` tells whether the
    model ran in the NPU's emulator.
    """

    source: str
    tokens: int
    perplexity: float
    top1_agreement: float | None = None
    kl: float | None = None
    on_npu: bool = False
    ratio: float | None = None
    ratio_error: float | None = None

    @classmethod
    def of(cls, source: str, own: Closeness, reference: Closeness, *, on_npu: bool = False) -> "ModelScore":
        """Scores of one model relative to the reference."""
        perplexity, _ = ratio_of(own.likelihoods, [0.0] * len(own.likelihoods))
        top1, kl = (float(np.mean(values)) if values else None for values in (own.agrees, own.kl))
        ratio, error = ratio_of(own.likelihoods, reference.likelihoods)
        return cls(source, len(own.likelihoods), perplexity, top1, kl, on_npu, ratio, error)


def ratio_of(likelihoods: Sequence[float], reference: Sequence[float]) -> tuple[float, float]:
    """The ratio of two perplexities on the same tokens, and its standard error."""
    gaps = np.subtract(reference, likelihoods)
    with np.errstate(all="ignore"):
        ratio = float(np.exp(gaps.mean()))
        spread = float(gaps.std(ddof=1)) if len(gaps) > 1 else math.inf
    return ratio, ratio * spread / math.sqrt(len(gaps))


@dataclass(frozen=True, slots=True)
class Evaluation(Record):
    """Scores of the reference, then of the bundles in the given order.

    `prompts` is the number of scored prompts, `skipped` of those longer than the cache.
    """

    models: list[ModelScore]
    prompts: int
    skipped: int = 0

    def within(self, limit: float) -> bool:
        """True if every bundle's perplexity is at most `limit` times the reference's; False for NaN."""
        reference, *bundles = (model.perplexity for model in self.models)
        return all(perplexity <= limit * reference for perplexity in bundles)


def evaluate(
    reference: AnyPath,
    bundles: AnyPath | Sequence[AnyPath],
    prompts: AnyPath,
    *,
    on: Literal["cpu", "npu"] = "cpu",
    tokens: int = TOKENS,
    sdk: AnyPath | None = None,
    chip: str | None = None,
    flags: Sequence[str] = (),
    progress: Progress | None = None,
    toolchain: Processes | None = None,
) -> Evaluation:
    """Compare the perplexity of bundles on held-out text with that of the checkpoint that they were made from.

    On the CPU, uncompiled bundles run in LiteRT-LM's executor for NPUs. The second half of each prompt, at most 512
    characters, is scored in decode, after a prefill of the text before it. Long and short prompts alternate until the
    standard error of the perplexity ratio is 1 %. If no prompt fills half the cache, a long one is joined from them.

    On the NPU, a bundle's prefill and decode step are compiled once and run in the compiler's emulator. They read the
    beginnings of up to five prompts, at most 120 tokens each; then the next tokens of each, two or more, are scored.
    For comparison, the bundle also runs on the same text on CPU kernels.

    Args:
        reference: the checkpoint, a Hugging Face folder.
        bundles: .litertlm bundles for NPUs, not compiled.
        prompts: JSON lines, as for `edge_opt.build.build`, not used for calibrating the bundles.
        on: "npu" for the NPU's arithmetic.
        tokens: on the NPU, how many tokens to score in all.
        sdk: folder with Qualcomm's libraries; None takes it from EDGE_OPT_QNN or QNN_SDK_ROOT.
        chip: the compiler's name of the chip; None for SM8750.
        flags: compiler flags.
        progress: called with (stage, done, total).
        toolchain: runs the models; None for a process.

    Raises:
        UsageError: an argument is invalid, or a package is missing.
        CompilerMissingError: the compiler, its libraries or a C compiler are not on this machine.
        ModelFormatError: a bundle cannot be read.
        StageFailedError: a model failed to run.
    """
    given = [bundles] if isinstance(bundles, str | os.PathLike) else [*bundles]
    paths = {os.fspath(path): Path(path) for path in (reference, *given)}
    tools, text = toolchain or Processes(), choose(prompts, None)
    _check_models(Path(reference), *map(Path, given))
    tools.check_runtimes(bundles=on == "cpu")
    if on == "npu":
        compiler = Compiler(chip or DEFAULT_CHIP, tuple(flags), sdk)
        check_emulator(compiler)
        stage, options = NPU, emulation(text, compiler, tokens)
    else:
        stage, options = CPU, {"parts": in_turn(text.parts, [*paths.values()][1:])}
    with tempfile.TemporaryDirectory(prefix="edge-opt-") as name:
        (scratch := Path(name) / "scratch").mkdir()
        inputs = {name: str(path.resolve()) for name, path in paths.items()}
        job = Job(stage, name, inputs, options=options)
        answer = tools.carry_out(job, Path(name) / "log", scratch, progress or (lambda *_: None))
    return from_dict(Evaluation, answer.values)


def _check_models(reference: Path, *bundles: Path) -> None:
    """Raise UsageError unless the reference is a checkpoint and the others are bundles."""
    if not bundles:
        raise UsageError("no bundle to evaluate: give one after the checkpoint")
    if look_at(reference).kind is not Kind.CHECKPOINT:
        raise UsageError(
            f"{reference} is not a checkpoint: the reference is the Hugging Face folder that the bundles were made from"
        )
    for path in bundles:
        if look_at(path).kind is Kind.CHECKPOINT:
            raise UsageError(f"{path} is a checkpoint: give it first, as the reference, and bundles after it")


# The text


@dataclass(frozen=True, slots=True)
class HeldOut:
    """The text to evaluate on, or a `note` why there is none; `rest` are the prompts for calibration."""

    parts: list[Part] = field(default_factory=list)
    rest: list[Any] | None = None
    note: str = ""


def choose(path: AnyPath | None, prompts: AnyPath | None) -> HeldOut:
    """The texts of a file, else every fifth prompt; UsageError if a text is too short or is used for calibration."""
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
    """Cut a prompt into the part to read and the part to score; None if it is too short for both.

    The scored part is the second half, or the end of a long prompt. It starts at a space, so that both parts give the
    same tokens as the whole.
    """
    text = text.strip()
    earliest = max(len(text) // 2, len(text) - _MOST_SCORED)
    space = re.search(r"\s", text[earliest:])
    at = earliest + space.start() if space else earliest
    return (text[:at], text[at:]) if text[:at].strip() and text[at:].strip() else None


def in_turn(parts: Sequence[Part], bundles: Sequence[Path]) -> list[Part]:
    """Order prompts as longest, shortest, next longest, and so on, so that the first few have varied lengths.

    If none fills about half of the bundles' longest cache, a prompt joined from them comes first.
    """
    caches = [cache for path in bundles for cache in look_at(path).caches.caches]
    wanted = int(_LONG * max((cache.positions for cache in caches), default=0))
    whole = _JOINT.join("".join(part) for part in parts)[:wanted]
    joined = cut(whole)
    longest = max((len("".join(part)) for part in parts), default=0)
    left = [*parts, joined] if joined and longest < min(wanted, len(whole)) else [*parts]
    left.sort(key=lambda part: len(part[0]))
    return [left.pop(-1 if at % 2 == 0 else 0) for at in range(len(left))]


def emulation(text: HeldOut, compiler: Compiler, tokens: int) -> dict[str, Any]:
    """Options of the emulator stage: up to five of the prompts, and the tokens to score of each."""
    count = min(_PROMPTS, max(1, tokens // 2))
    texts = ["".join(part) for part in text.parts[:: -(-len(text.parts) // count)]]
    sdk = None if compiler.sdk is None else os.fspath(compiler.sdk)
    return {
        "texts": texts,
        "tokens": -(-tokens // len(texts)),
        "compiler": {"chip": compiler.chip, "flags": [*compiler.flags], "sdk": sdk},
    }


# The stages, each in a process of its own


@dataclass(frozen=True, slots=True)
class Said:
    """A bundle's result for one prompt: ids of the tokens `before` and `scored`, and log-likelihoods of the latter.

    All are empty for a prompt that does not fit into the cache.
    """

    before: list[int] = field(default_factory=list)
    scored: list[int] = field(default_factory=list)
    likelihoods: list[float] = field(default_factory=list)


def score(job: Job, progress: Progress) -> dict[str, Any]:
    """Score prompts of `parts` in LiteRT-LM until the ratio is precise enough; a bundle's prompts run in parallel."""
    (name, folder), *bundles = job.inputs.items()
    checkpoint, left = Checkpoint(folder), [*job.options["parts"]]
    likelihoods: dict[str, list[float]] = {name: [] for name in job.inputs}
    done, skipped = 0, 0
    count = 1 + int(np.searchsorted(np.cumsum([len(part[1]) for part in left]), _FIRST_CHARACTERS))
    cores, context = len(os.sched_getaffinity(0)), multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(cores, context, _print_to_file) as pool:
        while left and count:
            batch, left = left[:count], left[count:]
            waiting = {one: [pool.submit(_say, path, part) for part in batch] for one, path in bundles}
            for at, part in enumerate(batch):
                progress(job.stage, done, done + len(batch) - at)
                found = {one: _result(one, asked[at]) for one, asked in waiting.items()}
                done += 1
                if not all(said.scored for said in found.values()):
                    skipped += 1
                    continue
                likelihoods[name] += checkpoint.say(part, found)
                for one, said in found.items():
                    likelihoods[one] += said.likelihoods
            if likelihoods[name]:
                errors = [ratio_of(own, likelihoods[name])[1] / ERROR for own in likelihoods.values()]
                count = math.ceil(_SPARE * done * min(max(1, *errors) ** 2 - 1, len(left)))
    if done == skipped:
        raise UsageError("every held-out prompt is longer than the bundle's cache: give shorter ones")
    closeness = {one: Closeness([], [], own) for one, own in likelihoods.items()}
    scores = [ModelScore.of(one, close, closeness[name]) for one, close in closeness.items()]
    return asdict(Evaluation(scores, done - skipped, skipped))


def _print_to_file() -> None:
    """Redirect LiteRT-LM's output in this process to a separate file, for `_result`."""
    file, _ = tempfile.mkstemp(prefix=_PRINTED[:7], suffix=_PRINTED[8:])
    for stream in (1, 2):
        os.dup2(file, stream)


def _result(bundle: str, asked: Future[Said]) -> Said:
    try:
        return asked.result()
    except Exception as error:
        printed = [file.read_text(errors="replace") for file in Path(tempfile.gettempdir()).glob(_PRINTED)]
        print(*printed, sep="\n", flush=True)  # noqa: T201  to the stage's log
        complaints = "".join(f" ({text})" for text in _COMPLAINT.findall("\n".join(printed))[-1:])
        raise StageFailedError(f"{Path(bundle).name} did not run: {error}{complaints}") from error


def _say(path: str, part: Part) -> Said:
    """Score one prompt in a pool process, which keeps the last bundle loaded."""
    return _runtime(path).say(part)


class Runtime:
    """A bundle in LiteRT-LM's NPU executor on CPU kernels, with SOFTMAX in float, see `float_softmax`."""

    def __init__(self, path: str) -> None:
        lm = importlib.import_module("litert_lm")
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder, Path(path).name)
            float_softmax(path, copy)
            self._engine: Any = lm.Engine(str(copy), backend=lm.Backend.NPU(litert_dispatch_lib_dir=""))
        self._room: int = lm.ModelInfo(path).max_context_tokens

    def say(self, part: Part) -> Said:
        """Score the second part after the first; return an empty result if they do not fit into the cache."""
        # `tokenize` omits the BOS token.
        before, scored = (list(self._engine.tokenize(text)) for text in part)
        if 1 + len(before) + len(scored) >= self._room:
            return Said()
        begin = [] if self._engine.bos_token_id is None else [self._engine.bos_token_id]
        with self._engine.create_session(apply_prompt_template=False) as session:
            session.run_prefill([part[0]])
            return Said([*begin, *before], scored, [*session.run_text_scoring([part[1]]).token_scores[0]])


_runtime = lru_cache(maxsize=1)(Runtime)


def float_softmax(bundle: AnyPath, output: AnyPath) -> None:
    """Write a copy of a bundle in which each SOFTMAX is DEQUANTIZE, SOFTMAX and QUANTIZE.

    LiteRT's int16 SOFTMAX gives each masked key 1/32768, about 3 % of the attention in SmolLM2-135M with a cache of
    1280; Qualcomm's emulator gives 0, see docs/research/faults.md.
    """
    opened = Opened(bundle)
    part = opened.main()
    for graph in part.model.subgraphs:
        operators: list[Operator] = []
        for operator in [*graph]:
            operators.append(operator)
            if operator.name == "SOFTMAX" and operator.input(0).dtype is not DType.FLOAT32:
                logits, result = operator.input(0), operator.output
                given, made = (
                    graph.add_tensor(Tensor(f"{tensor.name}/float", tensor.shape, DType.FLOAT32))
                    for tensor in (logits, result)
                )
                new = part.model.new_operator
                beta = operator.option("beta")
                graph.remove(operator)
                operators[-1:] = [
                    new("DEQUANTIZE", [logits], [given]),
                    new("SOFTMAX", [given], [made], beta=beta),
                    new("QUANTIZE", [made], [result]),
                ]
                part.changed = True
        graph.arrange(operators)
    opened.save(output)


class Checkpoint:
    """A Hugging Face checkpoint in float32."""

    def __init__(self, folder: str) -> None:
        self._torch: Any = importlib.import_module("torch")
        transformers = importlib.import_module("transformers")
        self._tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
        loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=self._torch.float32)
        self._model: Any = loaded.eval()

    def say(self, part: Part, bundles: Mapping[str, Said]) -> list[float]:
        """The log-likelihood of each token that the bundles scored.

        Raises:
            UsageError: a bundle tokenizes the prompt differently.
        """
        before, scored = (self._tokenizer(text, add_special_tokens=False)["input_ids"] for text in part)
        for name, said in bundles.items():
            begin = said.before[: len(said.before) - len(before)]  # BOS
            if ([*begin, *before], scored) != (said.before, said.scored):
                raise UsageError(
                    f"the checkpoint's vocabulary differs from bundle {name}'s: a held-out prompt's two parts have "
                    f"{len(before)} and {len(scored)} tokens, in the bundle {len(said.before)} and "
                    f"{len(said.scored)}; give the checkpoint that the bundle was made from"
                )
        rows = self.logits(next(iter(bundles.values())).before, scored).log_softmax(-1)
        return [float(row[token]) for row, token in zip(rows, scored, strict=True)]

    def logits(self, before: Sequence[int], tokens: Sequence[int]) -> Any:
        """Float logits `[len(tokens), vocabulary]` that predict each of the tokens."""
        ids = self._torch.tensor([[*before, *tokens]])
        with self._torch.no_grad():
            logits = self._model(input_ids=ids, logits_to_keep=len(tokens) + 1).logits
        return logits[0, :-1].float()

    def text(self, text: str, count: int) -> Text:
        """The first half of a text's tokens, at most 120, and the next `count` tokens."""
        ids = self._tokenizer(text)["input_ids"]
        at = min(len(ids) // 2, _MOST_READ)
        return Text(tuple(ids[:at]), tuple(ids[at : at + count]))


def emulate(job: Job, progress: Progress) -> dict[str, Any]:
    """Score `tokens` tokens of each of `texts`, on CPU kernels and in the NPU's emulator."""
    (name, folder), *bundles = job.inputs.items()
    compiler, checkpoint = Compiler(**job.options["compiler"]), Checkpoint(folder)
    texts = [checkpoint.text(text, job.options["tokens"]) for text in job.options["texts"]]
    expected = np.concatenate([checkpoint.logits(text.before, text.scored).numpy() for text in texts])
    del checkpoint
    tokens = [token for text in texts for token in text.scored]
    itself = Closeness.of(expected, expected, tokens)
    scores = [ModelScore.of(name, itself, itself)]
    for bundle, path in bundles:
        with tempfile.TemporaryDirectory() as place:
            copy = Path(place, Path(path).name)
            float_softmax(path, copy)
            cpu = np.concatenate(read(copy, texts))
        if cpu.shape != expected.shape:
            raise UsageError(
                f"{bundle} has a vocabulary of {cpu.shape[1]} tokens, and the checkpoint one of {expected.shape[1]}: "
                f"give the checkpoint that the bundle was made from"
            )
        npu = np.concatenate(read(path, texts, compiler, partial(progress, job.stage)))
        for found, on_npu in ((cpu, False), (npu, True)):
            scores.append(ModelScore.of(bundle, Closeness.of(expected, found, tokens), itself, on_npu=on_npu))
    return asdict(Evaluation(scores, len(texts)))
