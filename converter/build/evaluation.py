"""Evaluates bundles against the checkpoint that they were made from: what both say of text that no calibration saw.

Here are the text and the figures. Models run in the process of a stage, see `edge_opt.build.scoring`.
"""

import math
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from edge_opt.base.atomic import AnyPath
from edge_opt.base.errors import UsageError
from edge_opt.base.record import Record, from_dict
from edge_opt.base.words import Progress
from edge_opt.build.prompts import read_prompts, text_of
from edge_opt.build.source import Kind, look_at
from edge_opt.build.stages import Job, Processes
from edge_opt.npu.emulator import check_emulator
from edge_opt.npu.hexagon import Compiler
from edge_opt.npu.scoring import Closeness
from edge_opt.targets.chips import DEFAULT_CHIP

Part = tuple[str, str]
"""A prompt in two parts: what is read, and what is scored."""

CPU, NPU = "evaluate", "emulate"
"""The stages that score a checkpoint and its bundles: in LiteRT-LM on CPU kernels, and in the NPU's emulator."""
TOKENS = 20
"""Tokens that are scored in the emulator, where nobody says otherwise: each takes many seconds."""
_PROMPTS = 5
_LONG, _JOINT = 2.25, "\n\n"
"""Characters for each position of a cache that a long prompt has: over half as many tokens, in most texts."""
_MOST_SCORED = 512
"""Characters of a prompt that are scored: each token of them is one decode step."""
_FEWEST, _SHARE = 10, 5
"""Prompts to hold one in so many out."""


@dataclass(frozen=True, slots=True)
class ModelScore:
    """One model: over how many held-out tokens its perplexity is.

    `ratio` is its perplexity over the reference's on the same tokens, and `ratio_error` the standard error of that.
    `top1_agreement` is the share of tokens where it finds the same token most likely as the reference, `kl` its mean
    divergence from the reference in nats; LiteRT-LM gives neither, so they are None on the CPU alone. `on_npu` says
    where the model ran.
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
        """The figures of one model beside those of the reference."""
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
    """The reference, then the bundles in the order in which they were given.

    `prompts` is how many were scored, `skipped` how many were longer than the cache.
    """

    models: list[ModelScore]
    prompts: int
    skipped: int = 0

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "Evaluation":
        """From the answer of a stage."""
        found = [(one, from_dict(Closeness, one["close"])) for one in values["models"]]
        reference = found[0][1]
        scores = [
            ModelScore.of(one["source"], close, reference, on_npu=one["on_npu"]) for one, close in found
        ]
        return cls(scores, values["prompts"], values["skipped"])

    def within(self, limit: float) -> bool:
        """Whether every bundle's perplexity is at most `limit` times the reference's; a model of NaN is not."""
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
    """Whether bundles are still the model that they were made from: perplexity on held-out text.

    On the CPU, bundles run in LiteRT-LM's executor for NPUs, as they are before the vendor's compiler. Of each prompt
    the second half, at most 512 characters, is scored: the prefill reads what stands before it, decode the rest.
    Prompts are scored, long and short ones in turn, until the standard error of the perplexity's ratio is 1 %. Where
    none fills half the cache, a long one is joined from them.

    On the NPU, a bundle's prefill and decode step are compiled once, and read the beginnings of up to five prompts in
    the compiler's emulator, at most 200 tokens each; then the next tokens of each are scored. On CPU kernels the bundle
    reads the same text, for comparison.

    Args:
        reference: the checkpoint, a Hugging Face folder.
        bundles: .litertlm bundles for NPUs, not compiled.
        prompts: JSON lines, as `edge_opt.build.build` has them, that no bundle was calibrated on.
        on: "npu" for the NPU's own arithmetic.
        tokens: on the NPU, how many to score in all, at least one of each prompt.
        sdk: folder with Qualcomm's libraries; None takes it from EDGE_OPT_QNN or QNN_SDK_ROOT.
        chip: the compiler's word for the chip; None is SM8750.
        flags: for the compiler.
        progress: called with (what, done, total).
        toolchain: what runs the models; a process where None.

    Raises:
        UsageError: something given cannot be evaluated, or a package is missing.
        CompilerMissingError: the compiler, its libraries or a C compiler are not on this machine.
        ModelFormatError: a bundle cannot be read.
        StageFailedError: a model did not run.
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
        return Evaluation.of(
            tools.carry_out(job, Path(name) / "log", scratch, progress or (lambda *_: None)).values
        )


def _check_models(reference: Path, *bundles: Path) -> None:
    """UsageError where a model is not what it has to be, as far as files tell."""
    if not bundles:
        raise UsageError("there is nothing to evaluate: give a bundle beside the checkpoint")
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


def in_turn(parts: Sequence[Part], bundles: Sequence[Path]) -> list[Part]:
    """The longest prompt, the shortest, the longest that is left, and so on: also the first few are of every length.

    Where none fills about half the bundles' longest cache, one that is joined from them comes first.
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
    """Options of the stage that scores in the emulator: up to five of the prompts, and how many tokens of each."""
    texts = ["".join(part) for part in text.parts[:: -(-len(text.parts) // _PROMPTS)]]
    sdk = None if compiler.sdk is None else os.fspath(compiler.sdk)
    return {
        "texts": texts,
        "tokens": -(-tokens // len(texts)),
        "compiler": {"chip": compiler.chip, "flags": [*compiler.flags], "sdk": sdk},
    }
