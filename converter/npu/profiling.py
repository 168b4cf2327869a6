"""Compile each entry point of a model alone and return the compiler's figures."""

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, as_completed
from dataclasses import dataclass, replace
from functools import partial
from threading import Condition

from edge_opt.base.atomic import AnyPath, scratch_folder
from edge_opt.base.packages import RUNTIME, version_of
from edge_opt.base.record import Record
from edge_opt.base.words import Progress
from edge_opt.comparison.pairing import Shapes
from edge_opt.conversion.models import close_inputs
from edge_opt.ir import Model, save
from edge_opt.ir.opening import Opened, Part
from edge_opt.npu.compiler import (
    Compiler,
    CompilerFailedError,
    CompilerKilledError,
    Figures,
    cut_entry_point,
)
from edge_opt.npu.vendors import backend_of
from edge_opt.passes.contract import shape_options
from edge_opt.targets.placement import Placement, on_the_cpu


@dataclass(frozen=True, slots=True)
class Measured(Record):
    """The compiler's figures for an entry point, or why there are none."""

    signature: str
    figures: Figures | None = None
    failure: str = ""

    _or_null = ("failure",)

    @property
    def placement(self) -> Placement:
        """What runs where, or why the compiler does not say."""
        if self.figures is None:
            return Placement(self.signature, None, failure=self.failure)
        return self.figures.placement

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


def profile(
    path: AnyPath,
    compiler: Compiler = Compiler(),
    *,
    shapes: Mapping[str, Sequence[int]] | None = None,
) -> Profile:
    """Compile a model for an NPU, and report figures for every entry point. The file is not changed.

    A vendor's compiler without estimates gives only the operators that it takes.

    Args:
        path: a .tflite model, or a bundle (its prefill/decode model is used).
        compiler: settings of the NPU's compiler.
        shapes: static shapes for inputs of open lengths, as for `convert`.

    Raises:
        UsageError: a shape does not fit, the compiler does not know the chip, or edge-opt cannot run it.
        CompilerMissingError: the compiler, or a library that it needs, is not installed.
        CompilerFailedError: the compiler ended without a result.
        ModelFormatError: the file is not a model.
    """
    started = time.perf_counter()
    measured, note = measure_all(path, compiler, shapes)
    figures: list[Figures] = []
    for one in measured:
        if one.figures is None:
            where = f"{os.fspath(path)}, {one.signature}"
            raise CompilerFailedError(
                f"{where}: {one.failure}; try other compiler flags or another form"
            )
        figures.append(one.figures)
    notes = [note, *(one.note for one in figures)]
    return Profile(
        model=os.fspath(path),
        chip=compiler.chip,
        flags=compiler.flags,
        versions=versions(figures),
        seconds=round(time.perf_counter() - started, 2),
        signatures=tuple(figures),
        notes=tuple(dict.fromkeys(filter(None, notes))),
    )


def measure_all(
    path: AnyPath, compiler: Compiler, shapes: Shapes | None = None
) -> tuple[list[Measured], str]:
    """Every entry point as the compiler takes it, and a note if lengths are still open; arguments as for `profile`.

    Raises:
        UsageError, CompilerMissingError, ModelFormatError: as for `profile`.
    """
    backend_of(compiler.chip).check_installed(compiler)
    part = Opened(path).main()
    options = still_open(part, shapes)
    note = f"open lengths were compiled as 1: {options} gives others" if options else ""
    return [measure(part.model, name, compiler) for name, _ in part.model.entry_points()], note


def still_open(part: Part, shapes: Shapes | None) -> str:
    """Give a model's open inputs these shapes; the options for those that are still open, empty if there are none."""
    close_inputs([part], shapes or {})
    options: dict[str, None] = {}
    for _, inputs in part.model.inputs():
        options |= dict.fromkeys(shape_options(inputs))
    return " ".join(options)


def versions(figures: Sequence[Figures]) -> dict[str, str]:
    """Versions of the packages that produced the figures."""
    found = {"ai-edge-litert": version_of(RUNTIME) or "unknown"}
    for one in reversed(figures):  # the first one wins
        found |= one.versions
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


class _Turns:
    """Compilers of this process that run side by side; one that is killed then runs once more, alone."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._running = 0

    def take(self, compiles: Callable[[], Figures]) -> Figures:
        """Run a compiler, which raises CompilerKilledError if it is killed."""
        with self._changed:
            self._running += 1
            has_others = self._running > 1
        try:
            return compiles()
        except CompilerKilledError:
            if not has_others and self._running == 1:
                raise
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()
        # Others that come meanwhile wait for the lock.
        with self._changed:
            self._changed.wait_for(lambda: not self._running)
            return compiles()


_TURNS = _Turns()


def measure(model: Model, signature: str, compiler: Compiler) -> Measured:
    """Compile one entry point of a model alone.

    A compiler that gives no result is a failure; a rejected operator or a missing estimate is not. One that is killed
    while others run, maybe because memory ran out, gets another turn without them.
    """
    with scratch_folder() as scratch:
        file = scratch / "model.tflite"
        alone = cut_entry_point(model, signature)
        save(alone, file)
        try:
            backend = backend_of(compiler.chip)
            figures = _TURNS.take(partial(backend.measure, file, signature, compiler))
        except CompilerFailedError as error:
            return Measured(signature, failure=str(error))
    operators = model.arguments(signature).graph.operators
    named = [on_the_cpu(one.index, operators[one.index], one.reason) for one in figures.on_cpu]
    figures = replace(figures, on_cpu=tuple(named), least_read=_least_read(alone))
    return Measured(signature, figures)


def _least_read(model: Model) -> int:
    """The bytes of all weights and inputs of a model with one entry point."""
    inputs = [tensor.dtype.byte_size(tensor.elements) for tensor in model.subgraphs[0].inputs]
    return sum(model.weight_bytes().values()) + sum(filter(None, inputs))
