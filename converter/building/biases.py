"""Biases of quantized products, and those that the quantizer clipped.

A bias is stored in steps of the product of both operands' scales, one for each row of weights:

    x [.., columns] in steps of s -> FULLY_CONNECTED, weights in steps of w [rows], bias in steps of s w [rows]

ai-edge-quantizer clips it to 32 bits, silently. In Qwen2.5-Coder-1.5B's first layer, the keys have small weights and a
bias of up to 354, of which decode kept 175 and prefill 183. So decode took the keys that prefill had written for other
ones, and the perplexity was 12.5 times the checkpoint's. A bias fits if the weights of its row have coarser steps.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from edge_opt.base.errors import EdgeOptError
from edge_opt.base.words import many
from edge_opt.building.gptq import Floats, Grid
from edge_opt.building.logits import constant, row_scales
from edge_opt.ir import DType, Model, Operator, Subgraph, Tensor
from edge_opt.ir.cleanup import parts_in_use, remove_unused
from edge_opt.passes.codes import step_of
from edge_opt.soundness import LARGEST_BIAS, bias_of, is_clipped

_ABOVE = 1 + 1e-6  # so that a bias fits after its scale is rounded to float32


def shared_weights(model: Model) -> list[list[Tensor]]:
    """Matrices of int8 constants that only FULLY_CONNECTED operators read, as weights; groups share their bytes."""
    shared: defaultdict[int, list[Tensor]] = defaultdict(list)
    for graph in model.subgraphs:
        for weights in dict.fromkeys(op.inputs[1] for op in graph if op.name == "FULLY_CONNECTED"):
            if weights is None or not weights.has_numbers or weights.dtype is not DType.INT8:
                continue
            if all(_reads_as_weights(reader, weights) for reader in weights.consumers):
                shared[id(weights.buffer)].append(weights)
    return [*shared.values()]


def _reads_as_weights(reader: Operator, tensor: Tensor) -> bool:
    places = [place for place, operand in enumerate(reader.inputs) if operand is tensor]
    return reader.name == "FULLY_CONNECTED" and places == [1]


def known_bias(stored: Tensor, known: Iterable[Floats]) -> Floats:
    """The one of known biases that is stored; EdgeOptError if it is none of them, or several that differ may be."""
    found = [bias for bias in known if _is_stored(bias, stored)]
    if len({bias.tobytes() for bias in found}) != 1:
        raise EdgeOptError(
            f"the quantized bundle has a bias '{stored.name}' that fits {many(len(found), 'product')} of the "
            f"checkpoint, not one: use weights='4-logits'"
        )
    return found[0]


def stored_biases(copies: Iterable[Tensor]) -> dict[Operator, Tensor]:
    """The bias of each product that reads one of these weights, without products that have none."""
    found: dict[Operator, Tensor] = {}
    for weights in copies:
        for reader in weights.consumers:
            bias = bias_of(reader)
            if bias is not None:
                found[reader] = bias
    return found


def replace_all(copies: Iterable[Tensor], made: Tensor, biases: Mapping[Operator, Floats]) -> None:
    """Make all readers of weights read new ones, and `biases` in steps that follow from the new scales; they must fit.

    Copies in several entry points share the bytes of the new weights, too.
    """
    for weights in copies:
        graph = weights.consumers[0].subgraph
        assert graph is not None
        new = graph.add_tensor(replace(made, name=weights.name))
        for reader, stored in stored_biases([weights]).items():
            scales = step_of(reader.input(0)) * row_scales(new)
            codes = np.rint(biases[reader].astype(np.float64) / scales)
            # Of either type: kernels add it to sums of 32 bits, or clip it to them.
            assert np.abs(codes).max(initial=0) <= LARGEST_BIAS
            narrow = codes.astype(stored.dtype.numpy)
            bias = graph.add_tensor(constant(f"{stored.name}/in_steps", narrow, scales))
            graph.set_input(reader, 2, bias)
        graph.replace_uses(weights, new)


def restore_clipped(model: Model, exported: Model) -> str:
    """Restore biases that were clipped to 32 bits from the model before quantization, in place.

    Weights of such rows get coarser steps, the same for all entry points. A bias that `exported` does not have, under
    its name and with the numbers that are not clipped, stays as it is.

    Returns:
        A note for the user, empty if nothing changed.
    """
    usage = parts_in_use(model)
    graphs = dict(exported.entry_points())
    before: dict[Subgraph | None, Subgraph] = {}
    for name, graph in model.entry_points():
        if name in graphs:
            before[graph] = graphs[name]
    changed = 0
    for copies in shared_weights(model):
        biases = _to_restore(copies, before)
        if biases:
            changed += _widen(copies, biases)
    if not changed:
        return ""
    remove_unused(model, usage)
    return f"Restored {many(changed, 'number')} of biases that the quantizer clipped to 32 bits"


def _to_restore(
    copies: Sequence[Tensor], before: Mapping[Subgraph | None, Subgraph]
) -> dict[Operator, Floats]:
    """The biases before quantization of all readers of shared weights; empty if none is clipped, or one is unknown.

    `before` has the exported graph of each quantized one.
    """
    stored = stored_biases(copies)
    if not any(is_clipped(bias).any() for bias in stored.values()):
        return {}
    found: dict[Operator, Floats] = {}
    for reader, bias in stored.items():
        real = _exported_bias(bias, before.get(reader.subgraph))
        if real is None:
            return {}
        found[reader] = real
    return found


def _exported_bias(bias: Tensor, graph: Subgraph | None) -> Floats | None:
    """The bias before quantization; None if the exported graph has none of that name that agrees."""
    named = [] if graph is None else [one for one in graph.tensors if one.name == bias.name]
    if len(named) != 1 or named[0].dtype is not DType.FLOAT32 or not named[0].has_numbers:
        return None
    real = np.asarray(named[0].array(), np.float32)
    return real if _is_stored(real, bias) else None


def _is_stored(real: Floats, bias: Tensor) -> bool:
    """True if a stored bias is this one, to one of its steps, where it is not clipped."""
    if real.shape != bias.shape or len(bias.shape) != 1:
        return False
    steps = row_scales(bias).astype(np.float64)
    stored = np.asarray(bias.array()) * steps
    clipped = is_clipped(bias)
    is_near = np.abs(stored - real) <= steps + 1e-6 * np.abs(real)
    # Of either sign: in float32 the end of 32 bits rounds to 2^31, and its cast becomes the other end.
    is_beyond = np.abs(real) >= np.abs(stored) * (1 - 1e-6)
    return bool(np.where(clipped, is_beyond, is_near).all())


def with_room(grid: Grid, biases: Mapping[Operator, Floats]) -> Grid:
    """Weights in the least steps, no less than their own, in which all biases of their readers fit 32 bits."""
    wide = grid.scales
    for reader, bias in biases.items():
        operand = reader.input(0).quantization
        assert operand is not None
        needed = np.abs(bias.astype(np.float64)) / (operand.scale[0] * float(LARGEST_BIAS))
        wide = np.maximum(wide, (_ABOVE * needed).astype(np.float32))
    codes = np.rint(grid.codes * (grid.scales / wide)[:, None])
    return Grid(codes.astype(np.int8), wide)


def _widen(copies: Sequence[Tensor], biases: Mapping[Operator, Floats]) -> int:
    """Give weights, which the copies share, the least steps in which all biases fit; the number of rows that change."""
    first = copies[0]
    fine = Grid(np.asarray(first.array(), np.int8), row_scales(first))
    wide = with_room(fine, biases)
    replace_all(copies, constant(first.name, wide.codes, wide.scales), biases)
    return int((wide.scales > fine.scales).sum())
