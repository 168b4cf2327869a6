"""Compiles one block in every form and with every level of the compiler, and ranks what comes out."""

from __future__ import annotations

import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from edge_opt.conversion import convert
from edge_opt.ir import load, save
from edge_opt.npu.candidates import Choice, choices
from edge_opt.npu.errors import CompilerFailedError
from edge_opt.npu.figures import SpillFigures
from edge_opt.npu.one_block import cut_block
from edge_opt.npu.profiling import LEVELS, profile
from edge_opt.schema.errors import UsageError
from edge_opt.targets import Target, load_target

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from edge_opt.npu.figures import Figures, Profile
    from edge_opt.npu.one_block import OneBlock

    Progress = Callable[[str, int, int], None]


class Compile(Protocol):
    """What `edge_opt.npu.profile` does."""

    def __call__(
        self,
        path: str | os.PathLike[str],
        target: Target,
        *,
        sdk: str | os.PathLike[str] | None,
        chip: str | None,
        flags: Sequence[str] | None,
        seconds: float | None,
    ) -> Profile:
        """Compile a model and say what became of every entry point."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One form, compiled in one way: the compiler's figures, or why there are none."""

    choice: Choice
    level: Mapping[str, str]
    seconds: float
    figures: Figures | None = None
    failure: str = ""

    def to_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "form": str(self.choice),
            "flags": [f"--{name}={value}" for name, value in self.level.items()],
            "seconds": round(self.seconds, 2),
            "failure": self.failure or None,
            "figures": None if self.figures is None else self.figures.to_dict(),
        }


@dataclass(frozen=True, slots=True)
class Tuning:
    """All trials, best first; those that failed come last. `long_context`: one head does not fit on the chip."""

    model: str
    signature: str
    blocks: int
    quantized: bool
    long_context: bool
    target: Target
    chip: str
    versions: Mapping[str, str]
    trials: tuple[Trial, ...]

    @property
    def winner(self) -> Trial | None:
        """The best one, if any did not fail."""
        return self.trials[0] if self.trials and self.trials[0].figures is not None else None

    def to_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "model": self.model,
            "signature": self.signature,
            "blocks": self.blocks,
            "target": self.target.name,
            "chip": self.chip,
            "versions": dict(self.versions),
            "long_context": self.long_context,
            "trials": [trial.to_dict() for trial in self.trials],
            "winner": None if self.winner is None else self.winner.to_dict(),
        }


def tune(
    path: str | os.PathLike[str],
    target: str | Target = "qualcomm-htp",
    *,
    signature: str | None = None,
    blocks: int = 1,
    sdk: str | os.PathLike[str] | None = None,
    chip: str | None = None,
    seconds: float | None = 300.0,
    progress: Progress | None = None,
    compiler: Compile = profile,
) -> Tuning:
    """Try every form and compiler level on one block of a model. The file is only read; nothing is proved here.

    Args:
        path: a .tflite model, as exported.
        target: a target that has a compiler here.
        signature: the entry point to take the block from; None the one with the largest attention.
        blocks: how many layers in a row; more predict the whole model better and take longer.
        sdk: folder with Qualcomm's libraries; None takes it from EDGE_OPT_QNN or QNN_SDK_ROOT.
        chip: the compiler's word for the chip.
        seconds: after so long a trial is given up; None never.
        progress: called with (stage, done, total).
        compiler: what compiles, `edge_opt.npu.profile`.

    Raises:
        UsageError: there is no compiler for the target, no such signature, or no attention in it.
        CompilerMissingError: the compiler, or a library that it needs, is not installed.
        ModelFormatError: the file is not a model.
    """
    facts = load_target(target) if isinstance(target, str) else target
    if facts.name not in LEVELS:
        raise UsageError(f"target '{facts.name}' has no compiler here; there are: {', '.join(LEVELS)}")
    model = load(Path(path))
    layer = cut_block(model, signature, blocks=blocks)
    tried = [(choice, level) for choice in choices(facts, layer.attention) for level in LEVELS[facts.name]]
    own = dict(flag[2:].split("=", 1) for flag in facts.flags(layer.model))
    trials: list[Trial] = []
    profiles: list[Profile] = []
    with tempfile.TemporaryDirectory(prefix="edge-opt-") as folder:
        exported = Path(folder) / "block.tflite"
        save(layer.model, exported)
        for done, (choice, level) in enumerate(tried):
            if progress is not None:
                progress("compiling", done, len(tried))
            converted = _converted(exported, choice, facts)
            flags = [f"--{name}={value}" for name, value in {**own, **level}.items()]
            started = time.perf_counter()
            try:
                told = compiler(converted, facts, sdk=sdk, chip=chip, flags=flags, seconds=seconds)
            except CompilerFailedError as error:
                spent = time.perf_counter() - started
                trials.append(Trial(choice, level, spent, failure=str(error).partition(": ")[2]))
            else:
                profiles.append(told)
                trials.append(Trial(choice, level, told.seconds, told.signatures[0]))
        if progress is not None:
            progress("compiling", len(tried), len(tried))
    return _tuning(path, layer, facts, trials, profiles)


def _converted(exported: Path, choice: Choice, facts: Target) -> Path:
    """The block in one form; made once, for all levels."""
    path = exported.with_name(f"{choice}.tflite")
    if choice.form is None:
        return exported
    if not path.exists():
        convert(exported, path, target=choice.applied(facts), verify="none")
    return path


def _tuning(
    path: str | os.PathLike[str],
    layer: OneBlock,
    facts: Target,
    trials: Iterable[Trial],
    profiles: Sequence[Profile],
) -> Tuning:
    return Tuning(
        model=os.fspath(path),
        signature=layer.signature,
        blocks=layer.blocks,
        quantized=not layer.attention.output.dtype.is_float,
        long_context=facts.overflows(layer.attention),
        target=facts,
        chip=profiles[0].chip if profiles else "",
        versions=profiles[0].versions if profiles else {},
        trials=tuple(sorted(trials, key=rank)),
    )


def rank(trial: Trial) -> tuple[float, ...]:
    """Smaller is better. What leaves the NPU counts first, then the bytes to and from memory (cycles, for Vela)."""
    figures = trial.figures
    if figures is None:
        return (float("inf"),)
    left = figures.operators - figures.taken
    if isinstance(figures, SpillFigures):
        return (left, figures.partitions, figures.ddr_read + figures.ddr_written, figures.run_list)
    return (left, figures.cycles, figures.sram_traffic + figures.dram_traffic)
