"""A build's stages as data: which ones run for an input, what each reads, and what it makes.

base, adapter - merge -> checkpoint, base
checkpoint, base - round -> base, rounded     base - export -> model, exported     model - calibrate -> ranges
model - quantize -> model - narrow -> model - optimize -> model, converted - compile -> the bundle for the NPU

A new stage also needs its function in `stage_process`, its memory in `needs`, and a row in docs/build.md.
"""

from collections.abc import Mapping

from edge_opt.base.errors import UsageError, unknown
from edge_opt.base.work import CHECKPOINT, MODEL, QUANTIZE
from edge_opt.building.source import Kind
from edge_opt.building.stages import LIBRARIES, Input, Stage, Stages, Values

WEIGHTS = ("8", "4-logits", "4")
"""Supported bits of weights: all at 8; those of the logits at 4 except for frequent tokens; and also as many of the
layers' weights as quality allows."""
_NARROW_VENDOR = "qualcomm"  # whose compiler takes 4-bit weights as they are stored here
MERGE = Stage(
    "merge", ("source", "adapter"), dict.fromkeys(("source", "checkpoint", "base"), CHECKPOINT)
)
"""Merges a LoRA adapter with its base; the other stages read the result."""
CONFIGURE = Stage("configure", ("source", "prompts"))
ROUND = Stage("round", ("checkpoint", "prompts"), {"base": CHECKPOINT, "rounded": "."})
"""Rounds weights of the layers to 4 bits."""
_EXPORT = Stage("export", ("base",), {"model": MODEL, "exported": MODEL})
_CHECK = Stage("check", ("exported", "base", "prompts"))
"""Compares what the export predicts with what the exported checkpoint does."""
_CALIBRATE = Stage("calibrate", ("model", "prompts"), {"ranges": "."})
_QUANTIZE = Stage(QUANTIZE, ("model", "ranges"), {"model": MODEL})
_NARROW_LOGITS = Stage("narrow", ("model", "checkpoint", "prompts"), {"model": MODEL})
_NARROW_ROUNDED = Stage("narrow", ("model", "rounded", "exported"), {"model": MODEL})
OPTIMIZE = Stage("optimize", ("model", "exported", LIBRARIES), {"model": MODEL, "converted": MODEL})
EVALUATE = Stage("evaluate", ("checkpoint", "converted"))
"""Scores checkpoint and bundle, in LiteRT-LM on CPU kernels."""
EMULATE = Stage("emulate", ("checkpoint", "converted", LIBRARIES))
"""Scores checkpoint and bundle, in the NPU's emulator."""
COMPILE = Stage("compile", ("model", LIBRARIES))

SOURCES = {
    Kind.CHECKPOINT: ("source", "checkpoint", "base"),
    Kind.FLOAT: ("source", "model", "exported"),
    Kind.QUANTIZED: ("source", "model"),
}
"""The roles of the input."""


def check_weights(weights: str, kind: Kind, vendor: str) -> None:
    """Raise UsageError for unknown weights, or for 4 bits if the input or the vendor's compiler has none."""
    if weights not in WEIGHTS:
        raise unknown("weights", weights, WEIGHTS)
    if weights != "8" and (kind is not Kind.CHECKPOINT or vendor != _NARROW_VENDOR):
        raise UsageError(
            f"weights='{weights}' needs a checkpoint and a Qualcomm NPU: use weights='8'"
        )


def run_quantization(
    runner: Stages,
    kind: Kind,
    weights: str,
    settings: Mapping[str, Values],
    window: int | None,
    rounding: Values,
) -> Input:
    """Run the stages that make a quantized bundle, with the pipeline's settings, and return it."""
    rotate = settings["export"]["rotate"]
    rounds = weights == "4"
    if rounds:
        runner.run(ROUND, {**rounding, "rotate": rotate})
    rotated = False
    if kind is Kind.CHECKPOINT:
        # A checkpoint that is rounded is rotated by then.
        export = {**settings["export"], "window": window, "rotate": rotate and not rounds}
        rotated = runner.run(_EXPORT, export).values["rotated"]
        runner.run(_CHECK, {})
    if kind is not Kind.QUANTIZED:
        runner.run(_CALIBRATE, settings["calibrate"])
        # Rounded weights are recognized as they were exported; biases are restored after that.
        runner.run(_QUANTIZE, {**settings[QUANTIZE], "restore": not rounds})
    if rounds:
        runner.run(_NARROW_ROUNDED, {})
    elif weights == "4-logits":
        runner.run(_NARROW_LOGITS, {"rotated": rotated})
    return runner.files["model"]
