"""Compile each entry point of a model alone and return the compiler's figures."""

import math
import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, as_completed
from dataclasses import dataclass

from edge_opt.base.atomic import AnyPath
from edge_opt.base.packages import RUNTIME, version_of
from edge_opt.base.record import Record
from edge_opt.base.words import Progress
from edge_opt.ir import Model, save
from edge_opt.ir.opening import Opened
from edge_opt.npu.compiler import (
    Compiler,
    CompilerFailedError,
    Figures,
    cut_entry_point,
    scratch_folder,
)
from edge_opt.npu.vendors import backend_of


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
    """Compile a model for an NPU, and report figures for every entry point. The file is not changed.

    A vendor's compiler without estimates gives only the operators that it takes.

    Args:
        path: a .tflite model, or a bundle (its prefill/decode model is used).
        compiler: settings of the NPU's compiler.

    Raises:
        UsageError: the compiler does not know the chip, or edge-opt cannot run the compiler for it.
        CompilerMissingError: the compiler, or a library that it needs, is not installed.
        CompilerFailedError: the compiler ended without a result.
        ModelFormatError: the file is not a model.
    """
    started = time.perf_counter()
    backend_of(compiler.chip).check_installed(compiler)
    model = Opened(path).main().model
    figures: list[Figures] = []
    for name, _ in model.entry_points():
        measured = measure(model, name, compiler)
        if measured.figures is None:
            where = f"{os.fspath(path)}, {name}"
            raise CompilerFailedError(
                f"{where}: {measured.failure}; try other compiler flags or another form"
            )
        figures.append(measured.figures)
    return Profile(
        model=os.fspath(path),
        chip=compiler.chip,
        flags=compiler.flags,
        versions=versions(figures),
        seconds=round(time.perf_counter() - started, 2),
        signatures=tuple(figures),
        notes=tuple(dict.fromkeys(one.note for one in figures if one.note)),
    )


def versions(figures: Sequence[Figures]) -> dict[str, str]:
    """Versions of the packages that produced the figures."""
    found = {"ai-edge-litert": version_of(RUNTIME) or "unknown"}
    for one in figures:
        if one.qnn:
            found.setdefault("qnn", one.qnn)
    return found


def gathered(
    waiting: Mapping[str, Future[Measured]], stage: str, tell: Progress
) -> dict[str, Measured]:
    """Wait for measurements, and report how many are done."""
    if waiting:
        tell(stage, 0, len(waiting))
    for done, _ in enumerate(as_completed(waiting.values()), 1):
        tell(stage, done, len(waiting))
    return {name: future.result() for name, future in waiting.items()}


def measure(model: Model, signature: str, compiler: Compiler) -> Measured:
    """Compile one entry point of a model alone.

    A compiler that gives no result is a failure; a rejected operator or a missing estimate is not.
    """
    with scratch_folder() as scratch:
        file = scratch / "model.tflite"
        save(cut_entry_point(model, signature), file)
        try:
            figures = backend_of(compiler.chip).measure(file, signature, compiler)
        except CompilerFailedError as error:
            return Measured(signature, failure=str(error))
    return Measured(signature, figures)
