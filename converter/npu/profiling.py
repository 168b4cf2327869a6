"""Chooses the compiler for a target, runs it on a model, and gives back the figures."""

import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from edge_opt.comparison.models import Models, find_models
from edge_opt.ir import Model, load, save
from edge_opt.npu import ethos, hexagon
from edge_opt.npu.figures import Profile, Step
from edge_opt.npu.sdk import find_sdk
from edge_opt.npu.steps import steps_of
from edge_opt.output.errors import UsageError
from edge_opt.targets import Target, load_target

COMPILERS = {"qualcomm-htp": hexagon.DEFAULT_CHIP, "ethos-u85": ethos.DEFAULT_CHIP}
"""Targets whose compiler can be run here, and the chip that is taken where none is named."""


def profile(
    path: str | os.PathLike[str],
    target: str | Target = "qualcomm-htp",
    *,
    sdk: str | os.PathLike[str] | None = None,
    chip: str | None = None,
    flags: Sequence[str] | None = None,
    seconds: float | None = None,
    parts: bool = True,
) -> Profile:
    """Compile a model for a target, and say what became of every entry point. The file is only read.

    Args:
        path: a .tflite model, or a bundle: then its prefill/decode model.
        target: qualcomm-htp or ethos-u85, or a target (or its file) of one of these names.
        sdk: folder with Qualcomm's libraries; None takes it from EDGE_OPT_QNN or QNN_SDK_ROOT.
        chip: the compiler's word for the chip, as `SM8750` or `ethos-u85-256`; None SM8750 or ethos-u85-512.
        flags: for the compiler, as `--qualcomm_optimization_level=O2`; None takes those of the target.
        seconds: after so long the compiler is stopped; None never.
        parts: for a Hexagon NPU, compile the embedder and the auxiliary model of a bundle, too: `steps` has them.

    Raises:
        UsageError: there is no compiler for the target.
        CompilerMissingError: the compiler, or a library that it needs, is not installed.
        CompilerFailedError: it ended without a result, or was not done in time.
        ModelFormatError: the file is not a model.
    """
    facts = load_target(target)
    if facts.name not in COMPILERS:
        raise UsageError(
            f"target '{facts.name}' has no compiler that can be run here; there are: {', '.join(COMPILERS)}"
        )
    started = time.perf_counter()
    chip = chip or COMPILERS[facts.name]
    chosen = facts.flags() if flags is None else list(flags)
    models, steps = find_models(path), tuple[Step, ...]()
    with model_file(path, models) as file:
        model = load(file)
        if facts.name == "ethos-u85":
            made = ethos.compile_model(file, model, chip=chip, flags=chosen, seconds=seconds)
        else:
            compiler = hexagon.Compiler(find_sdk(sdk), chip, chosen, seconds)
            made = hexagon.compile_model(file, model, compiler)
            if parts and isinstance(models.main, Model):
                judge, flags = hexagon.judged_by(chip, chosen)
                judging = partial(hexagon.compile_model, compiler=replace(compiler, chip=judge, flags=flags))
                steps = steps_of(models, made.figures, judging)
    spent = time.perf_counter() - started
    name = os.fspath(path)
    return Profile(
        name, facts.name, chip, tuple(chosen), made.versions, spent, made.figures, made.notes, steps
    )


@contextmanager
def model_file(path: str | os.PathLike[str], models: Models | None = None) -> Iterator[Path]:
    """The model as a file for a compiler: itself, or the prefill/decode model of a bundle, written apart meanwhile."""
    main = (models or find_models(path)).main
    if not isinstance(main, Model):
        yield Path(path)
        return
    with tempfile.TemporaryDirectory(prefix="edge-opt-") as folder:
        file = Path(folder) / f"{Path(path).stem}.tflite"
        save(main, file)
        yield file
