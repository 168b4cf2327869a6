"""Chooses the compiler for a target, runs it on a model, and gives back the figures."""

import os
import re
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from edge_opt.base.atomic import AnyPath
from edge_opt.base.errors import UsageError
from edge_opt.comparison.models import AUXILIARY, EMBEDDER, MAIN, find_parts
from edge_opt.ir import Model, load, save
from edge_opt.ir.opening import Part
from edge_opt.npu import ethos, hexagon
from edge_opt.npu.figures import RUNS, Compilation, Figures, PartFigures, Profile, SpillFigures, StepFigures
from edge_opt.npu.layers import cut_entry_point
from edge_opt.npu.sdk import CompilerFailedError, find_sdk
from edge_opt.targets import Target, TargetLike, load_target

COMPILERS = {"qualcomm-htp": hexagon.DEFAULT_CHIP, "ethos-u85": ethos.DEFAULT_CHIP}
"""Targets whose compiler can be run here, and the chip that is taken where none is named."""

_INFIX = re.compile(r"_(?:per_layer_)?(embedder|rope|mask|cache_update)(?=_\d|$)")
_PARTS = {"embedder": "embedder", "rope": "rope", "mask": "masks", "cache_update": "cache update"}


def compiled_target(target: TargetLike) -> Target:
    """The target; UsageError where it has no compiler that can be run here."""
    facts = load_target(target)
    if facts.name not in COMPILERS:
        raise UsageError(
            f"target '{facts.name}' has no compiler that can be run here; there are: {', '.join(COMPILERS)}"
        )
    return facts


def profile(
    path: AnyPath,
    target: TargetLike = "qualcomm-htp",
    *,
    sdk: AnyPath | None = None,
    chip: str | None = None,
    flags: Sequence[str] = (),
    seconds: float | None = None,
    parts: bool = True,
) -> Profile:
    """Compile a model for a target, and say what became of every entry point. The file is only read.

    Args:
        path: a .tflite model, or a bundle: then its prefill/decode model.
        target: qualcomm-htp or ethos-u85, or a target (or its file) of one of these names.
        sdk: folder with Qualcomm's libraries; None takes it from EDGE_OPT_QNN or QNN_SDK_ROOT.
        chip: the compiler's word for the chip, as `SM8750` or `ethos-u85-256`; None SM8750 or ethos-u85-512.
        flags: for the compiler, as `--qualcomm_optimization_level=O2`.
        seconds: after so long the compiler is stopped; None never.
        parts: for a Hexagon NPU, compile the embedder and the auxiliary model of a bundle, too: `steps` has them.

    Raises:
        UsageError: there is no compiler for the target.
        CompilerMissingError: the compiler, or a library that it needs, is not installed.
        CompilerFailedError: it ended without a result, or was not done in time.
        ModelFormatError: the file is not a model.
    """
    facts = compiled_target(target)
    started = time.perf_counter()
    chip = chip or COMPILERS[facts.name]
    found, steps = find_parts(path), tuple[StepFigures, ...]()
    with found[MAIN].file(f"{Path(path).stem}.tflite") as file:
        model = load(file)
        if facts.name == "ethos-u85":
            compiled = ethos.compile_model(file, model, chip=chip, flags=flags, seconds=seconds)
        else:
            compiler = hexagon.Compiler(find_sdk(sdk), chip, flags, seconds)
            compiled = hexagon.compile_model(file, model, compiler)
            if parts and found[MAIN].kind:
                compile_part = partial(hexagon.compile_model, compiler=compiler.judging())
                steps = _steps(found, compiled.figures, compile_part)
    return Profile(
        model=os.fspath(path),
        target=facts.name,
        chip=chip,
        flags=tuple(flags),
        versions=compiled.versions,
        seconds=round(time.perf_counter() - started, 2),
        signatures=compiled.figures,
        notes=compiled.notes,
        steps=steps,
    )


def _steps(
    found: Mapping[str, Part], decoders: Sequence[Figures], compile_part: Callable[[Path, Model], Compilation]
) -> tuple[StepFigures, ...]:
    """A step for each entry point of the decoder that others serve, with everything around the decoder.

    Each entry point of embedder and auxiliary model is compiled alone, for one that the compiler refuses must not cost
    the others.
    """
    steps = {
        figures.signature: [PartFigures("decoder", figures.signature, figures)]
        for figures in decoders
        if isinstance(figures, SpillFigures)
    }
    for model in (found[role].model for role in (EMBEDDER, AUXILIARY) if role in found):
        for name, _ in model.entry_points():
            infix = _INFIX.search(name)
            step = _INFIX.sub("", name)
            if infix is not None and step in steps:
                steps[step].append(_compiled_part(_PARTS[infix[1]], name, model, compile_part))
    order = [*RUNS].index
    return tuple(
        StepFigures(name, tuple(sorted(parts, key=lambda part: order(part.name))))
        for name, parts in steps.items()
        if len(parts) > 1
    )


def _compiled_part(
    name: str, signature: str, model: Model, compile_part: Callable[[Path, Model], Compilation]
) -> PartFigures:
    with tempfile.TemporaryDirectory(prefix="edge-opt-") as folder:
        file = Path(folder) / f"{signature}.tflite"
        alone = cut_entry_point(model, signature)
        save(alone, file)
        try:
            (figures,) = compile_part(file, alone).figures
        except CompilerFailedError as error:
            reason = str(error).partition(": ")[2].partition("; try")[0]
            return PartFigures(name, signature, failure=reason)
    assert isinstance(figures, SpillFigures)
    return PartFigures(name, signature, figures)
