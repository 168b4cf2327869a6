"""Stores weights of a quantized bundle in 4 bits: those of the logits, and those of layers that were rounded before.

The exporter quantizes every row of a rounded checkpoint again, to 8 bits by its largest value. A row of 4-bit codes c
with the scale s and the largest code m becomes `round(127 c / m)`, which does not determine m. So the stage `round`
keeps codes and scales, and a constant is recognized by its signs, which 8 bits preserve: `127 / m` is more than 15.
"""

from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from edge_opt.base.errors import EdgeOptError
from edge_opt.base.words import Progress, many
from edge_opt.building.biases import replace_weights, restore_clipped, weights_of
from edge_opt.building.gptq import Codes, Floats, Grid
from edge_opt.building.logits import KEPT_ROWS, four_bits, moments_of, narrow_logits
from edge_opt.building.rounding import read_rounded
from edge_opt.building.stages import Job
from edge_opt.ir import Buffer, Model, Tensor
from edge_opt.ir.cleanup import parts_in_use, remove_unused
from edge_opt.ir.opening import Opened

_HALF_A_STEP = 0.501


def narrow(job: Job, progress: Progress) -> dict[str, Any]:
    """Run the stage: weights of the logits, and of the layers if the checkpoint was rounded, become 4 bits wide."""
    notes = [f"Weights of the logits are in 4 bits, those of the first {KEPT_ROWS} tokens in 8"]
    rounded = None
    if "rounded" in job.inputs:
        rounded = read_rounded(Path(job.inputs["rounded"]))
        notes.append(
            f"Weights of {many(len(rounded.grids), 'product')} in the layers are in 4 bits"
        )
        moments = rounded.moments
    else:
        checkpoint = Path(job.inputs["checkpoint"])
        prompts = Path(job.inputs["prompts"])
        moments = moments_of(checkpoint, prompts, progress, rotated=job.options["rotated"])
    opened = Opened(job.inputs["model"])
    part = opened.main()
    usage = parts_in_use(part.model)
    if rounded is not None:
        narrow_layers(part.model, rounded.grids, rounded.biases)
        exported = Opened(job.inputs["exported"]).main().model
        notes += filter(None, [restore_clipped(part.model, exported)])
    narrow_logits(part.model, moments, progress)
    remove_unused(part.model, usage)
    part.changed = True
    opened.save(job.model)
    return {"notes": notes}


def narrow_layers(model: Model, grids: Mapping[str, Grid], biases: Mapping[str, Floats]) -> None:
    """Replace the int8 weights that rounded ones were exported as by their 4-bit codes, in place.

    `grids`: the rounded weights `[rows, columns]`, by the name of their product; `biases` `[rows]`: those that products
    add. The quantizer stores a bias in steps of the product of both operands' scales, clipped where a row's weights are
    small, so its new codes are made from `biases`.

    Raises:
        EdgeOptError: no constant has a product's weights to half an 8-bit step, or a bias does not fit its type.
    """
    wanted: dict[bytes, list[str]] = {}
    for name, grid in grids.items():
        wanted.setdefault(_signs(grid.codes), []).append(name)
    names_of: dict[int, list[str]] = {}
    found: set[str] = set()
    narrowed: dict[str, Buffer] = {}
    for graph, weights in weights_of(model):
        # Entry points share the bytes of weights, and of the narrow ones too.
        content = id(weights.buffer)
        if content not in names_of:
            signs = _signs(np.asarray(weights.array(), np.int8))
            names_of[content] = [
                name for name in wanted.get(signs, ()) if _is_near(weights, grids[name])
            ]
        names = names_of[content]
        if not names:
            continue
        found.update(names)  # several only if their values are the same
        tensor = four_bits(weights.name, grids[names[0]])
        tensor.buffer = narrowed.setdefault(names[0], tensor.buffer or Buffer())
        bias = biases.get(names[0])
        readers = {} if bias is None else dict.fromkeys(weights.consumers, bias)
        replace_weights(graph, weights, tensor, readers)
    missing = sorted(set(grids) - found)
    if missing:
        raise EdgeOptError(
            f"the quantized bundle has no weights of {missing[0]} as they were rounded, the first of {len(missing)}: "
            f"use weights='4-logits', and report it with the checkpoint's family"
        )


def _signs(codes: Codes) -> bytes:
    """A digest of the shape and of each code's sign."""
    return sha256(repr(codes.shape).encode() + np.sign(codes).tobytes()).digest()


def _is_near(weights: Tensor, grid: Grid) -> bool:
    """True if 8-bit weights are the rounded ones, to half an 8-bit step."""
    assert weights.quantization is not None
    step = np.asarray(weights.quantization.scale, np.float64).reshape(-1, 1)
    values = np.asarray(weights.array(), np.float64) * step
    return bool((np.abs(values - grid.values()) <= _HALF_A_STEP * step).all())
