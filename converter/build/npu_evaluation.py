"""Evaluates bundles on the NPU's own arithmetic: held-out text through the compiled graphs, in the emulator.

The checkpoint predicts each next token in a process of its own; what bundles predict is compared with that.
"""

import importlib
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from edge_opt.base.atomic import AnyPath
from edge_opt.base.errors import UsageError
from edge_opt.base.record import from_dict
from edge_opt.base.words import Progress
from edge_opt.build.evaluation import (
    Checkpoint,
    Evaluation,
    ModelScore,
    check_models,
    choose,
    perplexity_of,
    ratio_of,
)
from edge_opt.build.stages import Job, Processes
from edge_opt.npu.emulator import check_emulator
from edge_opt.npu.hexagon import Compiler
from edge_opt.npu.scoring import Closeness, Text, read_on_cpu, read_on_npu
from edge_opt.runtime.protocol import Array
from edge_opt.targets.chips import DEFAULT_CHIP

NEXT_LOGITS = "next-logits"
"""The stage that `next_logits` carries out."""
TOKENS = 20
"""Tokens that are scored, where nobody says otherwise: each takes many seconds."""
_PROMPTS, _MOST_READ = 5, 200
_LOGITS = "logits.npy"


def evaluate_on_npu(
    reference: AnyPath,
    bundles: AnyPath | Sequence[AnyPath],
    prompts: AnyPath,
    *,
    sdk: AnyPath | None = None,
    chip: str | None = None,
    flags: Sequence[str] = (),
    tokens: int = TOKENS,
    progress: Progress | None = None,
    toolchain: Processes | None = None,
) -> Evaluation:
    """Whether bundles are still the model on the NPU's own arithmetic: divergence, perplexity and agreement.

    A bundle's prefill and decode step are compiled once, and read the beginnings of up to five prompts in the
    compiler's emulator, at most 200 tokens each; then the next tokens of each are scored. On CPU kernels the bundle
    reads the same text, for comparison.

    Args:
        reference: the checkpoint, a Hugging Face folder.
        bundles: .litertlm bundles for NPUs, not compiled.
        prompts: JSON lines, as `edge_opt.build.build` has them, that no bundle was calibrated on.
        sdk: folder with Qualcomm's libraries; None takes it from EDGE_OPT_QNN or QNN_SDK_ROOT.
        chip: the compiler's word for the chip; None is SM8750.
        flags: for the compiler.
        tokens: how many to score in all, at least one of each prompt.
        progress: called with (what, done, total).
        toolchain: what runs the checkpoint; a process where None.

    Raises:
        UsageError: something given cannot be evaluated, or a package is missing.
        CompilerMissingError: the compiler, its libraries or a C compiler are not on this machine.
        CompilerFailedError: an entry point does not compile, or does not run in the emulator.
        ModelFormatError: a bundle cannot be read.
        StageFailedError: the checkpoint did not run.
    """
    given = [bundles] if isinstance(bundles, str | os.PathLike) else [*bundles]
    compiler = Compiler(chip or DEFAULT_CHIP, tuple(flags), sdk)
    tools, tell = toolchain or Processes(), progress or (lambda *_: None)
    check_emulator(compiler)
    check_models(Path(reference), [Path(path) for path in given])
    if not Path(reference).is_dir():
        raise UsageError(
            f"{os.fspath(reference)} is not a checkpoint: on the NPU the reference is the Hugging Face folder that the "
            "bundles were made from"
        )
    tools.check_runtimes(checkpoint=True, bundles=False)
    parts = choose(prompts, None).parts
    chosen = ["".join(part) for part in parts[:: -(-len(parts) // _PROMPTS)]]
    texts, expected = _expected(tools, Path(reference), chosen, -(-tokens // len(chosen)), tell)
    scores = [_score(os.fspath(reference), texts, expected, expected)]
    for path in given:
        name = os.fspath(path)
        cpu = read_on_cpu(name, texts)
        npu = read_on_npu(name, texts, compiler, partial(tell, f"{name} in the emulator"))
        scores.append(_score(name, texts, expected, cpu))
        scores.append(_score(name, texts, expected, npu, on_npu=True))
    return Evaluation(scores, len(texts))


def _expected(
    tools: Processes, reference: Path, texts: Sequence[str], tokens: int, tell: Progress
) -> tuple[list[Text], list[Array]]:
    """The texts in tokens, and of each the logits that the checkpoint has for those that are scored."""
    with tempfile.TemporaryDirectory(prefix="edge-opt-") as name:
        folder = Path(name)
        options = {"texts": [*texts], "tokens": tokens}
        job = Job(NEXT_LOGITS, str(folder), {"model": str(reference.resolve())}, options=options)
        (folder / "scratch").mkdir()
        done = tools.carry_out(
            job, folder / "log", folder / "scratch", lambda _, *step: tell(str(reference), *step)
        )
        found = from_dict(list[Text], done.values["texts"])
        ends = np.cumsum([len(text.scored) for text in found])
        return found, np.split(np.load(folder / _LOGITS), ends[:-1])


def next_logits(job: Job, progress: Callable[[str, int, int], None]) -> dict[str, Any]:
    """Carry out the stage: `texts` in tokens, of each at most so many before the `tokens` that are scored.

    The checkpoint's logits for these, `[scored, vocabulary]` one text after the other, go into a file.
    """
    model, texts = job.inputs["model"], job.options["texts"]
    tokenizer = importlib.import_module("transformers").AutoTokenizer.from_pretrained(model)
    checkpoint, found, rows = Checkpoint(model), [], []
    for done, text in enumerate(texts):
        progress(job.stage, done, len(texts))
        ids = tokenizer(text)["input_ids"]
        at = min(len(ids) // 2, _MOST_READ)
        found.append(Text(tuple(ids[:at]), tuple(ids[at : at + job.options["tokens"]])))
        rows.append(checkpoint.logits(found[-1].before, found[-1].scored).numpy())
    np.save(Path(job.output) / _LOGITS, np.concatenate(rows))
    return {"texts": [asdict(text) for text in found]}


def _score(
    source: str,
    texts: Sequence[Text],
    expected: Sequence[Array],
    found: Sequence[Array],
    *,
    on_npu: bool = False,
) -> ModelScore:
    """The figures of one model over all texts."""
    own, theirs = found[0].shape[1], expected[0].shape[1]
    if own != theirs:
        raise UsageError(
            f"{source} has a vocabulary of {own} tokens, and the reference one of {theirs}: give the checkpoint that "
            "the bundle was made from"
        )
    tokens = [token for text in texts for token in text.scored]
    rows, reference = np.concatenate(found), np.concatenate(expected)
    close, itself = (Closeness.of(reference, each, tokens) for each in (rows, reference))
    ratio, error = ratio_of(close.likelihoods, itself.likelihoods)
    return ModelScore(
        source,
        len(tokens),
        perplexity_of(close.likelihoods),
        top1_agreement=float(np.mean(close.agrees)),
        kl=float(np.mean(close.kl)),
        on_npu=on_npu,
        ratio=ratio,
        ratio_error=error,
    )
