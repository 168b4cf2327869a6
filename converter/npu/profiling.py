"""Compile each entry point of a model alone and return the compiler's figures."""

import math
import os
import re
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, as_completed
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from edge_opt.base.atomic import AnyPath
from edge_opt.base.record import Record
from edge_opt.base.words import Progress
from edge_opt.ir import Model, save
from edge_opt.ir.opening import Opened
from edge_opt.npu.hexagon import Compiler, Figures, compiling_threads, cut_entry_point
from edge_opt.npu.sdk import CompilerFailedError, find_sdk
from edge_opt.targets.chips import CHIPS

_VERSION = re.compile(r"Qnn library version ([\d.]+) is used")


@dataclass(frozen=True, slots=True)
class Measured(Record):
    """The compiler's figures for an entry point, or why there are none."""

    signature: str
    figures: Figures | None = None
    failure: str = ""

    _or_null = ("failure",)

    @property
    def rank(self) -> tuple[float, ...]:
        """Sort key: smaller is better, failures come last."""
        return (math.inf,) if self.figures is None else tuple(self.figures.ranking().values())


@dataclass(frozen=True, slots=True)
class Profile(Record):
    """The compiler's figures for every entry point of a model, with the settings and versions used.

    `notes` say which chip the estimated time is for, or why there is none.
    """

    model: str
    chip: str
    flags: tuple[str, ...]
    versions: Mapping[str, str]
    seconds: float
    signatures: tuple[Figures, ...]
    notes: tuple[str, ...] = ()


def profile(path: AnyPath, compiler: Compiler = Compiler()) -> Profile:
    """Compile a model for a Hexagon NPU, and report figures for every entry point. The file is not changed.

    Args:
        path: a .tflite model, or a bundle (its prefill/decode model is used).
        compiler: settings of the NPU's compiler.

    Raises:
        UsageError: the compiler does not know the chip.
        CompilerMissingError: the compiler, or a library that it needs, is not installed.
        CompilerFailedError: the compiler ended without a result.
        ModelFormatError: the file is not a model.
    """
    started = time.perf_counter()
    find_sdk(compiler.sdk)
    model = Opened(path).main().model
    measured = [measure(model, name, compiler) for name, _ in model.entry_points()]
    failed = next((one for one in measured if one.failure), None)
    if failed is not None:
        where = f"{os.fspath(path)}, {failed.signature}"
        raise CompilerFailedError(f"{where}: {failed.failure}; try other compiler flags or another form")
    figures = tuple(one.figures for one in measured if one.figures is not None)
    return Profile(
        model=os.fspath(path),
        chip=compiler.chip,
        flags=compiler.flags,
        versions=versions(figures),
        seconds=round(time.perf_counter() - started, 2),
        signatures=figures,
        notes=tuple(dict.fromkeys(entry.note for entry in figures if entry.note)),
    )


def versions(figures: Sequence[Figures]) -> dict[str, str]:
    """Versions of the packages that produced the figures."""
    qnn = next((entry.qnn for entry in figures if entry.qnn), "")
    return {"ai-edge-litert": version("ai-edge-litert"), **({"qnn": qnn} if qnn else {})}


def gathered(waiting: Mapping[str, Future[Measured]], stage: str, tell: Progress) -> dict[str, Measured]:
    """Wait for measurements, and report how many are done."""
    if waiting:
        tell(stage, 0, len(waiting))
    for done, _ in enumerate(as_completed(waiting.values()), 1):
        tell(stage, done, len(waiting))
    return {name: future.result() for name, future in waiting.items()}


def measure(model: Model, signature: str, compiler: Compiler) -> Measured:
    """Compile one entry point of a model alone; also for the nearest chip, if this one has no time estimate.

    A compiler that gives no result is a failure; a rejected operator or a missing estimate is not.
    """
    judge = compiler.judge()
    try:
        with tempfile.TemporaryDirectory(prefix="edge-opt-") as folder, compiling_threads(2) as threads:
            file = Path(folder) / "model.tflite"
            save(cut_entry_point(model, signature), file)
            judging = threads.submit(judge.run, file) if judge.chip != compiler.chip else None
            outcome = compiler.run(file)
            if outcome.code:
                raise CompilerFailedError(
                    f"the Hexagon compiler ended with code {outcome.code}: {outcome.reason}"
                )
            sums = outcome.figures()
            judged = outcome if judging is None else judging.result()
    except CompilerFailedError as error:
        return Measured(signature, failure=str(error))
    estimate, why_not = judged.time(judge.chip)
    note = CHIPS[compiler.chip].note if compiler.chip in CHIPS else ""
    note = f"no estimate of time: {why_not}" if why_not else note
    qnn = named[1] if (named := _VERSION.search(outcome.errors)) else outcome.interface
    return Measured(signature, Figures(signature, **sums, time=estimate, note=note, qnn=qnn))
