"""Compiles every entry point of a model, or of the models of a bundle, and gives back the figures."""

import os
import re
import time
from collections.abc import Sequence
from importlib.metadata import version

from edge_opt.base.atomic import AnyPath
from edge_opt.ir.opening import AUXILIARY_SECTION, EMBEDDER_SECTION, Opened
from edge_opt.npu.figures import RUNS, Measured, Profile, Step
from edge_opt.npu.hexagon import Compiler, measure
from edge_opt.npu.sdk import CompilerFailedError, find_sdk
from edge_opt.targets.chips import DEFAULT_CHIP

_INFIX = re.compile(r"_(?:per_layer_)?(embedder|rope|mask|cache_update)(?=_\d|$)")
_PARTS = {"embedder": "embedder", "rope": "rope", "mask": "masks", "cache_update": "cache update"}


def profile(
    path: AnyPath,
    *,
    sdk: AnyPath | None = None,
    chip: str | None = None,
    flags: Sequence[str] = (),
    seconds: float | None = None,
) -> Profile:
    """Compile a model for a Hexagon NPU, and say what became of every entry point. The file is only read.

    Args:
        path: a .tflite model, or a bundle: then its prefill/decode model, and in `steps` the models beside it.
        sdk: folder with Qualcomm's libraries; None takes it from EDGE_OPT_QNN or QNN_SDK_ROOT.
        chip: the compiler's word for the chip; None is SM8750.
        flags: for the compiler, as `--qualcomm_optimization_level=O2`.
        seconds: after so long the compiler is stopped, for each entry point; None never.

    Raises:
        UsageError: the compiler does not know the chip, or a flag is none.
        CompilerMissingError: the compiler, or a library that it needs, is not installed.
        CompilerFailedError: it ended without a result, or was not done in time.
        ModelFormatError: the file is not a model.
    """
    started = time.perf_counter()
    compiler = Compiler(chip or DEFAULT_CHIP, tuple(flags), sdk, seconds)
    find_sdk(sdk)
    opened = Opened(path)
    model = opened.main().model
    measured = [measure(model, name, compiler) for name, _ in model.entry_points()]
    for entry in measured:
        if entry.failure:
            where = f"{os.fspath(path)}, {entry.signature}"
            raise CompilerFailedError(f"{where}: {entry.failure}; try other compiler flags or another form")
    figures = tuple(entry.figures for entry in measured if entry.figures is not None)
    qnn = next((entry.qnn for entry in figures if entry.qnn), "")
    return Profile(
        model=os.fspath(path),
        chip=compiler.chip,
        flags=compiler.flags,
        versions=versions(qnn),
        seconds=round(time.perf_counter() - started, 2),
        signatures=figures,
        notes=tuple(dict.fromkeys(entry.note for entry in figures if entry.note)),
        steps=steps_of(opened, measured, compiler),
    )


def versions(qnn: str) -> dict[str, str]:
    """The versions that figures were measured with."""
    return {"ai-edge-litert": version("ai-edge-litert"), **({"qnn": qnn} if qnn else {})}


def steps_of(opened: Opened, decoders: Sequence[Measured], compiler: Compiler) -> tuple[Step, ...]:
    """A step for each entry point of the decoder that other models of the bundle serve, with those.

    An entry point that the compiler refuses costs no other its figures. Times are of the chip that estimates some.
    """
    steps = {entry.signature: {"decoder": entry} for entry in decoders}
    for helper in filter(None, map(opened.find, (EMBEDDER_SECTION, AUXILIARY_SECTION))):
        for name, _ in helper.model.entry_points():
            infix, step = _INFIX.search(name), _INFIX.sub("", name)
            if infix is not None and step in steps:
                steps[step][_PARTS[infix[1]]] = measure(helper.model, name, compiler.judge())
    return tuple(
        Step(name, {part: parts[part] for part in RUNS if part in parts})
        for name, parts in steps.items()
        if len(parts) > 1
    )
