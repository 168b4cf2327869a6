"""A build's stages up to the quantized bundle, as data: which ones run, what each reads, and what it makes.

checkpoint --round--> checkpoint, rounded --export--> model, exported --calibrate--> ranges --quantize--> model
--narrow--> model
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from edge_opt.base.errors import UsageError, unknown
from edge_opt.base.work import MODEL
from edge_opt.building.rounding import CHECKPOINT
from edge_opt.building.source import Given, Kind
from edge_opt.building.stages import Input, Stages

WEIGHTS = ("8", "4-logits", "4")
"""Supported bits of weights: all at 8; those of the logits at 4 except for frequent tokens; and also as many of the
layers' weights as quality allows."""


class Stage(NamedTuple):
    """A stage, the roles of the files that it reads, and the places in its folder of those that it makes, by role."""

    name: str
    reads: tuple[str, ...]
    makes: Mapping[str, str]


_ROUND = Stage("round", ("checkpoint", "prompts"), {"checkpoint": CHECKPOINT, "rounded": "."})
_EXPORT = Stage("export", ("checkpoint",), {"model": MODEL, "exported": MODEL})
_CALIBRATE = Stage("calibrate", ("model", "prompts"), {"ranges": "."})
_QUANTIZE = Stage("quantize", ("model", "ranges"), {"model": MODEL})
_NARROW_LOGITS = Stage("narrow", ("model", "checkpoint", "prompts"), {"model": MODEL})
_NARROW_ROUNDED = Stage("narrow", ("model", "rounded"), {"model": MODEL})

RECIPES = {
    (Kind.CHECKPOINT, "8"): (_EXPORT, _CALIBRATE, _QUANTIZE),
    (Kind.CHECKPOINT, "4-logits"): (_EXPORT, _CALIBRATE, _QUANTIZE, _NARROW_LOGITS),
    (Kind.CHECKPOINT, "4"): (_ROUND, _EXPORT, _CALIBRATE, _QUANTIZE, _NARROW_ROUNDED),
    (Kind.FLOAT, "8"): (_CALIBRATE, _QUANTIZE),
    (Kind.QUANTIZED, "8"): (),
}
"""The stages for each kind of input and width of weights."""
_FIRST_ROLES = {
    Kind.CHECKPOINT: ("checkpoint",),
    Kind.FLOAT: ("model", "exported"),
    Kind.QUANTIZED: ("model",),
}


def recipe(given: Given, weights: str, *, narrow_weights: bool) -> tuple[Stage, ...]:
    """The stages for an input; UsageError if there are none for these weights, or not for this NPU."""
    if weights not in WEIGHTS:
        raise unknown("weights", weights, WEIGHTS)
    stages = RECIPES.get((given.kind, weights))
    if stages is None or (weights != "8" and not narrow_weights):
        raise UsageError(f"weights='{weights}' needs a checkpoint and a Qualcomm NPU: use weights='8'")
    return stages


def options_of(
    settings: Mapping[str, Any], window: int | None, rounding: Mapping[str, Any], stages: tuple[Stage, ...]
) -> dict[str, dict[str, Any]]:
    """The options of each stage; a checkpoint that is rounded first is rotated by then."""
    rotate = settings["export"]["rotate"]
    return {
        "round": {**rounding, "rotate": rotate},
        "export": {**settings["export"], "window": window, "rotate": rotate and _ROUND not in stages},
        "calibrate": settings["calibrate"],
        "quantize": settings["quantize"],
    }


def run_recipe(
    stages: tuple[Stage, ...],
    run: Stages,
    kind: Kind,
    origin: Input,
    prompts: Mapping[str, Input],
    options: Mapping[str, Mapping[str, Any]],
) -> dict[str, Input]:
    """Run the stages; return the quantized `model`, and the float one as `exported` if there is one."""
    files = {**prompts, **dict.fromkeys(_FIRST_ROLES[kind], origin)}
    values: Mapping[str, Any] = {}
    for name, reads, makes in stages:
        # `narrow` needs to know what the stage before the quantizer did with the checkpoint.
        report = run.run(name, options.get(name, values), **{role: files[role] for role in reads})
        files |= {role: Input(report.folder / Path(place), report.digest) for role, place in makes.items()}
        if name == _EXPORT.name:
            values = {"rotated": report.values["rotated"]}
    return {role: files[role] for role in ("model", "exported") if role in files}
