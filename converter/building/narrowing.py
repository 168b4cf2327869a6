"""Stores weights of a quantized bundle in 4 bits: those of the logits, and those of layers that were rounded before.

The exporter quantizes every row of a rounded checkpoint again, to 8 bits by its largest value. A row of 4-bit codes c
with the scale s and the largest code m becomes `round(127 c / m)`, which does not determine m. So the stage `round`
keeps codes and scales, and a constant is recognized by its signs, which 8 bits preserve: `127 / m` is more than 15.
"""

from collections import defaultdict
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path

import numpy as np

from edge_opt.base.errors import EdgeOptError
from edge_opt.base.words import Progress, many
from edge_opt.building.biases import (
    known_bias,
    replace_all,
    restore_clipped,
    shared_weights,
    stored_biases,
    with_room,
)
from edge_opt.building.codes import read_rounded
from edge_opt.building.gptq import LEAST_ROW, Codes, Floats, Grid
from edge_opt.building.logits import four_bits, moments_of, narrow_logits, row_scales
from edge_opt.building.stages import Job, Values
from edge_opt.ir import Model, Operator, Tensor
from edge_opt.ir.cleanup import parts_in_use, remove_unused
from edge_opt.ir.opening import Opened

_HALF_A_STEP = 0.501


def narrow(job: Job, progress: Progress) -> Values:
    """Run the stage: weights of the logits, and of the layers if the checkpoint was rounded, become 4 bits wide."""
    opened = Opened(job.inputs["model"])
    part = opened.main()
    usage = parts_in_use(part.model)
    notes = []
    if "rounded" in job.inputs:
        rounded = read_rounded(Path(job.inputs["rounded"]))
        moments = rounded.moments
        narrow_layers(part.model, rounded.grids, rounded.biases)
        exported = Opened(job.inputs["exported"]).main().model
        notes = [
            f"Weights of {many(len(rounded.grids), 'product')} in the layers are in 4 bits",
            restore_clipped(part.model, exported),
        ]
    else:
        checkpoint = Path(job.inputs["checkpoint"])
        prompts = Path(job.inputs["prompts"])
        moments = moments_of(checkpoint, prompts, progress, rotated=job.options["rotated"])
    notes.append(narrow_logits(part.model, moments, progress))
    remove_unused(part.model, usage)
    part.changed = True
    opened.save(job.model)
    return {"notes": notes}


def narrow_layers(model: Model, grids: Mapping[str, Grid], biases: Mapping[str, Floats]) -> None:
    """Replace the int8 weights that rounded ones were exported as by their 4-bit codes, in place.

    `grids`: the rounded weights `[rows, columns]`, by the name of their product; `biases` `[rows]`: those that products
    add. The quantizer stores a bias in steps of the product of both operands' scales, clipped where a row's weights are
    small, so its new codes are made from `biases`. Of products with the same weights, each keeps its own bias.

    Raises:
        EdgeOptError: no constant has a product's weights to half an 8-bit step, or a bias is not that of one product.
    """
    places = _places(model, grids)
    missing = sorted(set(grids).difference(*places))
    if missing:
        raise EdgeOptError(
            f"the quantized bundle has no weights of {missing[0]} as they were rounded, the first of {len(missing)}: "
            f"use weights='4-logits', and report it with the checkpoint's family"
        )
    for names, copies in places.items():
        known = [biases[name] for name in names if name in biases]
        by_reader: dict[Operator, Floats] = {}
        for reader, stored in stored_biases(copies).items():
            by_reader[reader] = known_bias(stored, known)
        grid = grids[names[0]]
        if by_reader:
            # As coarse as 8-bit weights would have to be. Rows of zeros take the finest steps.
            fine = np.where(grid.codes.any(axis=1), grid.scales, LEAST_ROW / 127)
            grid = with_room(Grid(grid.codes, fine.astype(np.float32)), by_reader)
        replace_all(copies, four_bits(names[0], grid), by_reader)


def _places(model: Model, grids: Mapping[str, Grid]) -> dict[tuple[str, ...], list[Tensor]]:
    """The constants that hold the weights of products, by their names: several only if their weights are the same."""
    wanted: defaultdict[bytes, list[str]] = defaultdict(list)
    for name, grid in grids.items():
        wanted[_signs(grid.codes)].append(name)
    places: defaultdict[tuple[str, ...], list[Tensor]] = defaultdict(list)
    for copies in shared_weights(model):
        weights = copies[0]
        same_signs = wanted.get(_signs(np.asarray(weights.array(), np.int8)), ())
        names = tuple(name for name in same_signs if _is_near(weights, grids[name]))
        if names:
            places[names] += copies
    return places


def _signs(codes: Codes) -> bytes:
    """A digest of the shape and of each code's sign."""
    return sha256(repr(codes.shape).encode() + np.sign(codes).tobytes()).digest()


def _is_near(weights: Tensor, grid: Grid) -> bool:
    """True if 8-bit weights are the rounded ones, to half an 8-bit step."""
    step = row_scales(weights).astype(np.float64)[:, None]
    values = np.asarray(weights.array(), np.float64) * step
    return bool((np.abs(values - grid.values()) <= _HALF_A_STEP * step).all())
