"""Score text with a bundle in the NPU's emulator, in prefill and decode steps with caches and masks, as on a phone.

Embedder and auxiliary model run on the CPU, as with LiteRT-LM's NPU executor. The result is the logits of each next
token, compared with a reference's.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from edge_opt.base.atomic import AnyPath
from edge_opt.base.errors import UsageError
from edge_opt.comparison.findings import name_of
from edge_opt.comparison.generate import find_parts, plan_loop
from edge_opt.ir import load
from edge_opt.npu.emulator import check_emulator, emulating
from edge_opt.npu.hexagon import Compiler
from edge_opt.npu.layers import cut_entry_point
from edge_opt.npu.sdk import CompilerFailedError
from edge_opt.runtime import loop as steps
from edge_opt.runtime.loop import Call, Loop
from edge_opt.runtime.metrics import log_softmax
from edge_opt.runtime.protocol import Array, Arrays
from edge_opt.runtime.runner import Worker
from edge_opt.runtime.tensors import MAIN, cache_length


@dataclass(frozen=True, slots=True)
class Text:
    """Tokens of the prompt, and the tokens after it, which are scored."""

    before: tuple[int, ...]
    scored: tuple[int, ...]


@contextmanager
def _opened(bundle: AnyPath, texts: Sequence[Text]) -> Iterator[tuple[Worker, dict[str, Path], list[Loop]]]:
    """Yield a worker, the files of the bundle's models, and for each text the calls that read it.

    Raises:
        UsageError: the bundle cannot read text, or its cache is too short.
        ModelFormatError: the bundle cannot be read.
        RuntimeFailed: a model cannot be loaded.
    """
    name = name_of(bundle, "bundle")
    with ExitStack() as stack:
        worker = stack.enter_context(Worker())
        files = {role: stack.enter_context(part.file()) for role, part in find_parts(bundle).items()}
        described = {role: worker.describe(file) for role, file in files.items()}
        loops = []
        for text in texts:
            loop = plan_loop(name, described, len(text.scored), 0, (text.before,))
            room = min(cache_length(call.signature) for call in loop.decode if call.model == MAIN)
            tokens = len(text.before) + len(text.scored)
            if tokens > room:
                raise UsageError(
                    f"{name}: {tokens} tokens do not fit into its cache of {room}: give shorter prompts"
                )
            loops.append(replace(loop, follow=text.scored))
        yield worker, files, loops


def read_on_cpu(bundle: AnyPath, texts: Sequence[Text]) -> list[Array]:
    """Return the logits `[scored, vocabulary]` of each text, as real numbers, from LiteRT's CPU kernels.

    Raises:
        UsageError, ModelFormatError, RuntimeFailed: as `read_on_npu`.
    """
    with _opened(bundle, texts) as (worker, files, loops):
        return [loop.logits.reals(worker.generate(files, loop)[1][:, 0]) for loop in loops]


def read_on_npu(
    bundle: AnyPath,
    texts: Sequence[Text],
    compiler: Compiler,
    progress: Callable[[int, int], None] = lambda *_: None,
) -> list[Array]:
    """Like `read_on_cpu`, with prefill and decode compiled once for an NPU and run in the emulator.

    Args:
        bundle: an uncompiled bundle, or a model with its embedder and auxiliary model beside it.
        texts: tokens of the texts.
        compiler: must have a probe; its `seconds` limit all runs of one entry point.
        progress: called with (runs done, total).

    Raises:
        UsageError: the bundle cannot read text, or its cache is too short.
        ModelFormatError: the bundle cannot be read.
        CompilerMissingError: the compiler, its libraries or a C compiler is missing.
        CompilerFailedError: an entry point does not compile, or does not run.
        RuntimeFailed: the embedder or auxiliary model does not run.
    """
    check_emulator(compiler)
    with _opened(bundle, texts) as (worker, files, loops), ExitStack() as stack:
        runs = sum(-(-(len(loop.prompt[0]) - 1) // loop.rows) + loop.count for loop in loops)
        prefilled = [loop for loop in loops if len(loop.prompt[0]) > 1]
        calls = [call for loop in prefilled for call in loop.prefill] + [*loops[0].decode]
        model = load(files[MAIN])
        emulators = {
            name: stack.enter_context(emulating(cut_entry_point(model, name), compiler))
            for name in dict.fromkeys(call.signature.name for call in calls if call.model == MAIN)
        }
        done = 0

        def invoke(call: Call, inputs: Arrays) -> Arrays:
            nonlocal done
            name = call.signature.name
            if call.model != MAIN:
                return worker.run(files[call.model], name, inputs)
            try:
                outputs = emulators[name].run(inputs)
            except CompilerFailedError as error:
                raise CompilerFailedError(f"{name_of(bundle, 'bundle')}, {name}: {error}") from error
            done += 1
            progress(done, runs)
            return outputs

        progress(0, runs)
        return [loop.logits.reals(steps.run(loop, invoke)[1][:, 0]) for loop in loops]


@dataclass(frozen=True, slots=True)
class Closeness:
    """Distance between predictions and a reference's, position by position.

    `kl` is the Kullback-Leibler divergence from the reference in nats, `agrees` is true if the most likely token is the
    same, `likelihoods` are the log probabilities of the actual next tokens.
    """

    kl: list[float]
    agrees: list[bool]
    likelihoods: list[float]

    @classmethod
    def of(cls, reference: Array, logits: Array, tokens: Sequence[int]) -> "Closeness":
        """Compare rows of logits, one row for each token."""
        theirs, own = log_softmax(reference.astype(np.float64)), log_softmax(logits.astype(np.float64))
        return cls(
            (np.exp(theirs) * (theirs - own)).sum(axis=1).tolist(),
            (theirs.argmax(axis=1) == own.argmax(axis=1)).tolist(),
            own[np.arange(len(tokens)), list(tokens)].tolist(),
        )
