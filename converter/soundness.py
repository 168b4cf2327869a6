"""Whether a model was ruined before it came here: what its own scales say, before anything is run.

Ranges that no calibration on real inputs gives are too narrow or too wide for what the operands can be. Each check
compares a tensor with its own operands, never with a fixed scale: what a healthy model computes is within them, however
small or large its numbers are. Rotary embeddings whose integers end before the cache does give every later token the
last position's angles. It knows no target and changes nothing.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from edge_opt.attention.positions import find_rotary
from edge_opt.attention.surroundings import MASKING, products_above
from edge_opt.base.record import Record
from edge_opt.base.words import shortened
from edge_opt.ir import Model, Operator, Subgraph, Tensor
from edge_opt.ir.operators import KINDS, Effect, operators_that
from edge_opt.ir.refusal import RefusedError


@dataclass(frozen=True, slots=True)
class Unsound(Record):
    """One tensor that cannot hold what it should: what that means is `message`, what to do about it `remedy`.

    `model` is the model's type in a bundle, empty for a model alone.
    """

    rule: str
    signature: str
    tensor: str
    message: str
    remedy: str
    model: str = ""


def sentences(findings: Iterable[Unsound]) -> list[str]:
    """One for each rule and signature: layers repeat, so only the first tensor is named."""
    groups: dict[tuple[str, str, str], list[Unsound]] = {}
    for finding in findings:
        groups.setdefault((finding.model, finding.signature, finding.rule), []).append(finding)
    texts = []
    for first, *others in groups.values():
        where = f"{first.model}/{first.signature}" if first.model else first.signature
        more = f" (and {len(others)} more like it)" if others else ""
        texts.append(f"{where}: '{shortened(first.tensor)}' {first.message}{more}: {first.remedy}")
    return texts


def stopped_positions(model: Model, positions: int | None) -> Iterator[Unsound]:
    """Cosines and sines that are the same from some position on, of so many that the cache holds (None: not known)."""
    if positions is None:
        return
    for name, graph in model.entry_points():
        for rotary in find_rotary(graph):
            with suppress(RefusedError):  # of an operator that is not understood nothing is said
                last = rotary.last_position(positions)
                if last is not None:
                    yield Unsound(
                        "positions-stop",
                        name,
                        rotary.result.name,
                        f"stops counting at position {last} of {positions}: all later tokens are taken for that one",
                        "run `edge-opt convert` on the bundle, which makes a table of all positions",
                    )


_SMALLEST_SHARE: Final = 2.0**-20
"""Of what the operands' largest numbers give. One step of an int16 softmax is 2**-15, an empty cache gives 1e-9."""

_MATTERS: Final = math.log(2)
"""Logits of this size, either way, make one weight four times another."""

_PRODUCTS = operators_that(Effect.PRODUCT)
_REARRANGING = operators_that(Effect.REARRANGING, Effect.REPEATING, Effect.CUTTING) | {"QUANTIZE"}
_AGAIN = "calibrate again on inputs that fill it, for a cache on prompts that go on well beyond one prefill"
_UNMASKED = "quantize again with the mask out of that range: one of -100 hides as much"
_ENDS: Final = {"INT4": (-8, 7), "INT8": (-128, 127), "UINT8": (0, 255), "INT16": (-32768, 32767)}

_Named = Callable[[Tensor | None], str]
_Problem = tuple[str, str] | None
"""What is wrong with an operator's result, and the remedy."""


def broken_ranges(model: Model) -> Iterator[Unsound]:
    """Products that can only be 0 or their ends, values that are cut to nothing, logits that only the mask decides."""
    entries = {graph: name for name, graph in reversed(model.entry_points())}
    for graph in model.subgraphs:
        named = _names(model, graph)
        for operator in (operator for operator in graph.operators if operator.outputs):
            for rule, check in _CHECKS.items():
                problem = check(operator, named)
                if problem is not None:
                    yield Unsound(rule, entries.get(graph, graph.name), operator.outputs[0].name, *problem)
                    break


def _too_narrow(operator: Operator, named: _Named) -> _Problem:
    """A product ends far below |a b| of its operands' largest numbers, of which one counts in a sum of n."""
    if operator.name not in _PRODUCTS:
        return None
    (left, right), largest = map(_largest, operator.inputs[:2]), _largest(operator.outputs[0])
    if left is None or right is None or largest is None or largest >= _SMALLEST_SHARE * left * right:
        return None
    return (
        f"ends at {largest:.2g}, and is the product of numbers up to {left:.2g} and {right:.2g}: what "
        f"{named(operator.inputs[1])} holds has no effect"
    ), _AGAIN


def _cut_off(operator: Operator, named: _Named) -> _Problem:
    """The smallest step of every operand is beyond the result's end: it is 0 or an end."""
    if operator.name not in ("QUANTIZE", "ADD", "SUB", "CONCATENATION"):
        return None
    largest, steps = _largest(operator.outputs[0]), [_step(tensor) or 0 for tensor in operator.inputs]
    if largest is None or not steps or min(steps) <= largest:
        return None
    return (
        f"ends at {largest:.2g}, and {named(operator.inputs[0])} comes in steps of {min(steps):.2g}: whatever is "
        f"not 0 becomes one of its ends"
    ), _AGAIN


def _too_wide(operator: Operator, _: _Named) -> _Problem:
    """A product without bias stays below half a step of its result, with the sum of n terms at their largest."""
    if operator.name not in _PRODUCTS or any(tensor is not None for tensor in operator.inputs[2:]):
        return None
    (left, right), step = map(_largest, operator.inputs[:2]), _step(operator.outputs[0])
    if step is None or left is None or right is None or not operator.input(0).shape:
        return None
    most = left * right * max(operator.input(0).shape[-2:])
    if not 0 < most < step / 2:
        return None
    return f"has steps of {step:.2g}, and its operands give {most:.2g} at most: it is always 0", _UNMASKED


def _only_the_mask(operator: Operator, _: _Named) -> _Problem:
    """The logits of a SOFTMAX, without the mask, are within one step: the weights say what is masked, and no more."""
    if operator.name != "SOFTMAX":
        return None
    logits = list(_origins(operator.inputs[0]))
    step, masking = max((_step(tensor) or 0 for tensor in logits), default=0), logits[-1].producer
    if masking is None or masking.name not in MASKING:
        return None
    for tensor in masking.inputs:
        largest = _largest(tensor)
        is_score = tensor is not None and tensor.producer is not None and products_above([tensor.producer])[0]
        if is_score and largest is not None and _MATTERS < largest < step:
            return (
                f"takes logits in steps of {step:.3g}, and without the mask they end at {largest:.2g}: they become "
                f"equal, and attention is uniform"
            ), _UNMASKED
    return None


def power_of_two(scale: float) -> bool:
    """Whether LiteRT takes a scale for a power of two (`CheckedLog2` of tensorflow/lite/kernels/kernel_util.cc)."""
    exponent = math.log2(scale)
    return abs(exponent - round(exponent)) < 1e-3


def _cannot_broadcast(operator: Operator, _: _Named) -> _Problem:
    """An int16 ADD of operands of two shapes, all scales powers of two: that kernel aborts, for it cannot broadcast."""
    tensors = [tensor for tensor in (*operator.inputs, *operator.outputs) if tensor is not None]
    if operator.name != "ADD" or len({tensor.shape for tensor in tensors[:2]}) < 2:
        return None
    scales = [_step(tensor) for tensor in tensors if tensor.dtype.name == "INT16"]
    if len(scales) < 3 or not all(scale is not None and power_of_two(scale) for scale in scales):
        return None
    return (
        "broadcasts, and its three scales are powers of two to a thousandth: LiteRT's kernel for int16 ends the process"
    ), "quantize again with a range of this tensor that is 1 % wider"


_CHECKS: Final[dict[str, Callable[[Operator, _Named], _Problem]]] = {
    "range-too-narrow": _too_narrow,
    "values-cut-off": _cut_off,
    "range-too-wide": _too_wide,
    "mask-in-range": _only_the_mask,
    "sum-cannot-broadcast": _cannot_broadcast,
}


def _step(tensor: Tensor | None) -> float | None:
    """What one step of an integer stands for, the largest where there are several; None for others."""
    parameters = None if tensor is None or tensor.is_blockwise else tensor.quantization
    if tensor is None or parameters is None or not parameters.is_affine or tensor.dtype.name not in _ENDS:
        return None
    step = float(parameters.scale.max())
    return step if math.isfinite(step) and step > 0 else None


def _largest(tensor: Tensor | None) -> float | None:
    """The largest number that an integer tensor can stand for, either way; None for others."""
    step = _step(tensor)
    if tensor is None or tensor.quantization is None or step is None:
        return None
    centre = int(tensor.quantization.zero_point[0])
    return step * max(abs(end - centre) for end in _ENDS[tensor.dtype.name])


def _names(model: Model, graph: Subgraph) -> _Named:
    """What callers call a tensor, or the one that it is a rearrangement of."""
    labels: dict[Tensor, str] = {}
    for signature in model.signatures:
        if signature.subgraph is graph:
            for arguments in (signature.outputs, signature.inputs):
                labels |= {tensor: label for label, tensor in arguments.items()}
    return lambda tensor: next((f"'{labels[t]}'" for t in _origins(tensor) if t in labels), "its operand")


def _origins(tensor: Tensor | None) -> Iterator[Tensor]:
    """A tensor, and those that it is a rearrangement or a part of, the nearest first."""
    while tensor is not None:
        yield tensor
        maker = tensor.producer
        if maker is None or maker.name not in _REARRANGING:
            return
        tensor = next(iter(KINDS[maker.name].data_operands(maker.inputs)), None)
