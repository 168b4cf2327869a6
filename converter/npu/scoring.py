"""Score text with a bundle in the NPU's emulator, in prefill and decode steps with caches and masks, as on a phone.

Embedder and auxiliary model run on the CPU, as with LiteRT-LM's NPU executor. The result is the logits of each next
token.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import chain, count
from typing import NamedTuple

from edge_opt.base.atomic import AnyPath
from edge_opt.comparison.findings import name_of
from edge_opt.comparison.generate import find_parts, open_parts, plan_loop, window_of
from edge_opt.ir import load
from edge_opt.npu.compiler import Compiler, CompilerFailedError, Emulation
from edge_opt.npu.vendors import backend_of
from edge_opt.runtime import loop as steps
from edge_opt.runtime.loop import Call, Loop
from edge_opt.runtime.protocol import Array, Arrays
from edge_opt.runtime.runner import Worker
from edge_opt.runtime.tensors import MAIN


class Text(NamedTuple):
    """Tokens of the prompt, and the tokens after it, which are scored."""

    before: tuple[int, ...]
    scored: tuple[int, ...]


def read(
    bundle: AnyPath,
    texts: Sequence[Text],
    compiler: Compiler | None = None,
    progress: Callable[[int, int], None] = lambda *_: None,
) -> list[Array]:
    """Return the logits `[scored, vocabulary]` of each text, as real numbers.

    Args:
        bundle: an uncompiled bundle, or a model with its embedder and auxiliary model beside it.
        texts: tokens of the texts.
        compiler: to compile prefill and decode once and run them in the emulator; None for LiteRT's CPU kernels.
        progress: called with (runs in the emulator, total).

    Raises:
        UsageError: the bundle cannot read text, or its cache is too short.
        ModelFormatError: the bundle cannot be read.
        CompilerFailedError: an entry point does not compile, or does not run.
        RuntimeFailed: a model does not run on the CPU.
    """
    title = name_of(bundle, "bundle")
    with ExitStack() as stack:
        worker = stack.enter_context(Worker())
        files, described = stack.enter_context(open_parts(find_parts(bundle)))
        window = window_of(bundle)
        loops: list[Loop] = []
        for text in texts:
            loop = plan_loop(title, described, len(text.scored), 0, (text.before,))
            loops.append(replace(loop, follow=text.scored, window=window))
        if compiler is None:
            return [loop.logits.reals(worker.generate(files, loop)[:, 0]) for loop in loops]
        emulating = backend_of(compiler.chip).emulating
        model = load(files[MAIN])
        emulators: dict[str, Emulation] = {}
        for call in chain.from_iterable(map(_calls, loops)):
            name = call.signature.name
            if call.model == MAIN and name not in emulators:
                emulators[name] = stack.enter_context(emulating(model, name, compiler))
        total = sum(map(_runs, loops))
        done = count(1)

        def invoke(call: Call, inputs: Arrays) -> Arrays:
            name = call.signature.name
            if call.model != MAIN:
                return worker.run(files[call.model], name, inputs)
            try:
                outputs = emulators[name].run(inputs)
            except CompilerFailedError as error:
                raise CompilerFailedError(f"{title}, {name}: {error}") from error
            progress(next(done), total)
            return outputs

        progress(0, total)
        return [loop.logits.reals(steps.run(loop, invoke)[:, 0]) for loop in loops]


def _calls(loop: Loop) -> Sequence[Call]:
    """The calls that reading a text makes, all of them: an emulator must run what it compiles."""
    has_prefills = len(loop.prompt[0]) > 1
    return loop.decode + loop.prefill if has_prefills else loop.decode


def _runs(loop: Loop) -> int:
    """Runs of the prefill/decode model that reading a text takes: the prompt's last token is read by decode."""
    prefills = math.ceil((len(loop.prompt[0]) - 1) / loop.rows)
    return prefills + loop.count
