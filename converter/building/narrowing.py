"""Stores weights of a quantized bundle in 4 bits: those of the logits, and those of layers that were rounded before.

The exporter quantizes every row of a rounded checkpoint again, to 8 bits by its largest value. A row of 4-bit codes c
with the scale s and the largest code m becomes `round(127 c / m)`, which does not determine m. So the stage `round`
keeps codes and scales, and a constant is recognized by its signs, which 8 bits preserve: `127 / m` is at least 18.
"""

from collections.abc import Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from edge_opt.base.errors import EdgeOptError
from edge_opt.base.words import Progress, many
from edge_opt.building.gptq import Codes, Floats, Grid
from edge_opt.building.logits import KEPT_ROWS, by_row, four_bits, moments_of, narrow_logits
from edge_opt.building.rounding import read_rounded
from edge_opt.building.stages import Job
from edge_opt.ir import Buffer, DType, Model, Operator, Subgraph, Tensor
from edge_opt.ir.cleanup import parts_in_use, remove_unused
from edge_opt.ir.opening import Opened
from edge_opt.schema import Data

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
    for graph, weights in _weights_of(model):
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
        _replace(graph, weights, tensor, biases.get(names[0]))
    missing = sorted(set(grids) - found)
    if missing:
        raise EdgeOptError(
            f"the quantized bundle has no weights of {missing[0]} as they were rounded, the first of {len(missing)}: "
            f"use weights='4-logits', and report it with the checkpoint's family"
        )


def _weights_of(model: Model) -> Iterator[tuple[Subgraph, Tensor]]:
    """Matrices of int8 constants that only FULLY_CONNECTED operators read, as weights, each once."""
    for graph in model.subgraphs:
        for weights in dict.fromkeys(op.inputs[1] for op in graph if op.name == "FULLY_CONNECTED"):
            if weights is None or not weights.has_numbers or weights.dtype is not DType.INT8:
                continue
            if all(_is_weights(reader, weights) for reader in weights.consumers):
                yield graph, weights


def _is_weights(reader: Operator, weights: Tensor) -> bool:
    return (
        reader.name == "FULLY_CONNECTED"
        and reader.inputs[1] is weights
        and reader.inputs.count(weights) == 1
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


def _replace(graph: Subgraph, weights: Tensor, narrowed: Tensor, bias: Floats | None) -> None:
    """Make all readers read the narrowed weights, and biases in steps that follow from their scales."""
    graph.add_tensor(narrowed)
    for reader in weights.consumers:
        stored = reader.inputs[2] if len(reader.inputs) > 2 else None
        if stored is not None and stored.is_quantized:
            graph.set_input(
                reader,
                2,
                graph.add_tensor(_bias_codes(stored, bias, reader.input(0), narrowed)),
            )
    graph.replace_uses(weights, narrowed)


def _bias_codes(stored: Tensor, bias: Floats | None, operand: Tensor, weights: Tensor) -> Tensor:
    """The bias in steps of the product of the operand's scale and the weights' scales, in its stored type."""
    assert operand.quantization is not None
    assert weights.quantization is not None
    if bias is None or bias.shape != stored.shape:
        raise EdgeOptError(
            f"the quantized bundle has a bias '{stored.name}' that the checkpoint does not have"
        )
    scales = operand.quantization.scale[0] * weights.quantization.scale
    codes = np.rint(bias.astype(np.float64) / scales)
    limits = np.iinfo(
        np.int32
    )  # of either type: kernels add it to sums of 32 bits, or clip it to them
    if codes.min(initial=0) < limits.min or codes.max(initial=0) > limits.max:
        raise EdgeOptError(
            f"the bias '{stored.name}' does not fit the scales of its 4-bit weights: use weights='8'"
        )
    data = Data(codes.astype(stored.dtype.numpy).tobytes())
    return Tensor(
        f"{stored.name}/4_bits",
        stored.shape,
        stored.dtype,
        quantization=by_row(scales),
        buffer=Buffer(data),
    )
