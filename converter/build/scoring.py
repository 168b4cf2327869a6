"""Stages that score text with a checkpoint and with bundles of it; the process of the stage holds the checkpoint.

LiteRT-LM gives the likelihoods of a text's tokens, and not which token it finds most likely in place of each. A bundle
in the emulator gives all logits.
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
from typing import Any

import numpy as np

from edge_opt.base.errors import UsageError
from edge_opt.base.words import Progress
from edge_opt.build.evaluation import Part, ratio_of
from edge_opt.build.stages import Job, StageFailedError
from edge_opt.npu.hexagon import Compiler
from edge_opt.npu.scoring import Closeness, Text, read_on_cpu, read_on_npu
from edge_opt.runtime.protocol import Array

ERROR = 0.01
"""Standard error of a perplexity's ratio at which no more text is scored."""
_FIRST_CHARACTERS, _SPARE = 2560, 1.2
"""How much is scored at first, usually enough; how much more than is needed then."""
_MOST_READ = 200
_COMPLAINT = re.compile(r"^[EF]\d{4} .*?\] (.+)$", re.MULTILINE)
_PRINTED = "bundle-*.log"


@dataclass(frozen=True, slots=True)
class Said:
    """What a bundle says of one prompt: ids of the tokens `before` and `scored`, and the log-likelihood of the latter.

    All are empty for a prompt that does not fit into its cache.
    """

    before: list[int] = field(default_factory=list)
    scored: list[int] = field(default_factory=list)
    likelihoods: list[float] = field(default_factory=list)


def score(job: Job, progress: Progress) -> dict[str, Any]:
    """Score the prompts `parts` in LiteRT-LM, as many as the ratio needs; bundles run side by side.

    Raises:
        UsageError: the models make other tokens of a prompt, or all prompts are too long.
        StageFailedError: a bundle did not run.
    """
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
    models = [_model(one, Closeness([], [], own)) for one, own in likelihoods.items()]
    return {"models": models, "prompts": done - skipped, "skipped": skipped}


def _model(source: str, close: Closeness, *, on_npu: bool = False) -> dict[str, Any]:
    return {"source": source, "on_npu": on_npu, "close": asdict(close)}


def _print_to_file() -> None:
    """What LiteRT-LM prints in this process goes to a file of its own, for `_result`."""
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
    """In a process of the pool, which keeps the bundle of the last prompt."""
    return _runtime(path).say(part)


class Runtime:
    """A bundle in LiteRT-LM's executor for NPUs, which runs on CPU kernels where it is given no NPU."""

    def __init__(self, path: str) -> None:
        lm = importlib.import_module("litert_lm")
        self._engine: Any = lm.Engine(path, backend=lm.Backend.NPU(litert_dispatch_lib_dir=""))
        self._room: int = lm.ModelInfo(path).max_context_tokens

    def say(self, part: Part) -> Said:
        """Likelihoods of the second part after the first; nothing where they do not fit into the cache."""
        # Ids of a text are without the one that every prompt begins with.
        before, scored = (list(self._engine.tokenize(text)) for text in part)
        if 1 + len(before) + len(scored) >= self._room:
            return Said()
        begin = [] if self._engine.bos_token_id is None else [self._engine.bos_token_id]
        with self._engine.create_session(apply_prompt_template=False) as session:
            session.run_prefill([part[0]])
            return Said([*begin, *before], scored, [*session.run_text_scoring([part[1]]).token_scores[0]])


_runtime = lru_cache(maxsize=1)(Runtime)


class Checkpoint:
    """The checkpoint of a Hugging Face folder, in float32."""

    def __init__(self, folder: str) -> None:
        self._torch: Any = importlib.import_module("torch")
        transformers = importlib.import_module("transformers")
        self._tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
        loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=self._torch.float32)
        self._model: Any = loaded.eval()

    def say(self, part: Part, bundles: Mapping[str, Said]) -> list[float]:
        """The log-likelihood of each token that bundles scored.

        Raises:
            UsageError: a bundle made other tokens of the prompt.
        """
        before, scored = (self._tokenizer(text, add_special_tokens=False)["input_ids"] for text in part)
        for name, said in bundles.items():
            begin = said.before[: len(said.before) - len(before)]  # what every prompt begins with
            if ([*begin, *before], scored) != (said.before, said.scored):
                raise UsageError(
                    f"the checkpoint has another vocabulary than the bundle {name}: it makes {len(before)} and "
                    f"{len(scored)} tokens of a held-out prompt's two parts, the bundle {len(said.before)} and "
                    f"{len(said.scored)}; give the checkpoint that the bundle was made from"
                )
        rows = self.logits(next(iter(bundles.values())).before, scored).log_softmax(-1)
        return [float(row[token]) for row, token in zip(rows, scored, strict=True)]

    def logits(self, before: Sequence[int], tokens: Sequence[int]) -> Any:
        """Float logits `[len(tokens), vocabulary]`: what is expected in the place of each of the tokens."""
        ids = self._torch.tensor([[*before, *tokens]])
        with self._torch.no_grad():
            logits = self._model(input_ids=ids, logits_to_keep=len(tokens) + 1).logits
        return logits[0, :-1].float()

    def text(self, text: str, count: int) -> Text:
        """The first half of a text's tokens, at most so many, and the `count` tokens behind them."""
        ids = self._tokenizer(text)["input_ids"]
        at = min(len(ids) // 2, _MOST_READ)
        return Text(tuple(ids[:at]), tuple(ids[at : at + count]))


# In the emulator


def emulate(job: Job, progress: Progress) -> dict[str, Any]:
    """Score `tokens` tokens of each of the `texts`, on the CPU's kernels and in the NPU's emulator.

    Raises:
        UsageError: a bundle has another vocabulary than the checkpoint, or cannot read text.
        CompilerFailedError: an entry point does not compile, or does not run in the emulator.
    """
    (name, folder), *bundles = job.inputs.items()
    compiler, checkpoint = Compiler(**job.options["compiler"]), Checkpoint(folder)
    texts = [checkpoint.text(text, job.options["tokens"]) for text in job.options["texts"]]
    expected = np.concatenate([checkpoint.logits(text.before, text.scored).numpy() for text in texts])
    del checkpoint
    models = [_model(name, _closeness(name, texts, expected, expected))]
    for bundle, path in bundles:
        cpu = np.concatenate(read_on_cpu(path, texts))
        models.append(_model(bundle, _closeness(bundle, texts, expected, cpu)))
        npu = np.concatenate(read_on_npu(path, texts, compiler, partial(progress, job.stage)))
        models.append(_model(bundle, _closeness(bundle, texts, expected, npu), on_npu=True))
    return {"models": models, "prompts": len(texts), "skipped": 0}


def _closeness(source: str, texts: Sequence[Text], expected: Array, found: Array) -> Closeness:
    if found.shape[1] != expected.shape[1]:
        raise UsageError(
            f"{source} has a vocabulary of {found.shape[1]} tokens, and the checkpoint one of {expected.shape[1]}: "
            f"give the checkpoint that the bundle was made from"
        )
    return Closeness.of(expected, found, [token for text in texts for token in text.scored])
