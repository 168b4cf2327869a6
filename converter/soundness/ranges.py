"""Ranges that no calibration on real inputs gives: too narrow or too wide for what the operands can be.

Each rule compares a tensor with its own operands, never with a fixed scale: what a healthy model computes is within
them, however small or large its numbers are.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from edge_opt.attention.rules import MOVEMENT, PRODUCTS, REPEATING
from edge_opt.attention.surroundings import MASKING, products_above
from edge_opt.ir import Model, Operator, Subgraph, Tensor
from edge_opt.soundness.findings import Unsound

_SMALLEST_SHARE: Final = 2.0**-20
"""Of what the operands' largest numbers give. One step of an int16 softmax is 2**-15, an empty cache gives 1e-9."""

_MATTERS: Final = math.log(2)
"""Logits of this size, either way, make one weight four times another."""

_CARRIED = MOVEMENT | REPEATING | {"QUANTIZE", "SLICE", "STRIDED_SLICE"}
_AGAIN = "calibrate again on inputs that fill it, for a cache on prompts that go on well beyond one prefill"
_UNMASKED = "quantize again with the mask out of that range: one of -100 hides as much"


def broken_ranges(model: Model) -> Iterator[Unsound]:
    """Products that can only be 0 or their ends, values that are cut to nothing, logits that only the mask decides."""
    entries = {id(graph): name for name, graph in reversed(model.entry_points())}
    for graph in model.subgraphs:
        signature = entries.get(id(graph), graph.name)
        name = _names(model, graph)
        for operator in (operator for operator in graph.operators if operator.outputs):
            for rule, check in _CHECKS:
                told = check(operator, name)
                if told is not None:
                    message, remedy = told
                    yield Unsound(rule, signature, operator.outputs[0].name, message, remedy)
                    break


_Namer = Callable[[Tensor | None], str]
_Told = tuple[str, str] | None


def _too_narrow(operator: Operator, name: _Namer) -> _Told:
    """A product far below its operands' own: |a b| of the largest numbers, the one that counts in a sum of n."""
    if operator.name not in PRODUCTS or len(operator.inputs) < 2:
        return None
    (left, right), reached = map(_reach, operator.inputs[:2]), _reach(operator.outputs[0])
    if left is None or right is None or reached is None or reached >= _SMALLEST_SHARE * left * right:
        return None
    return (
        f"ends at {reached:.2g}, and is the product of numbers up to {left:.2g} and {right:.2g}: what "
        f"{name(operator.inputs[1])} holds has no effect"
    ), _AGAIN


def _cut_off(operator: Operator, name: _Namer) -> _Told:
    """The smallest step of every operand is beyond the result's end: it is 0 or an end."""
    if operator.name not in ("QUANTIZE", "ADD", "SUB", "CONCATENATION"):
        return None
    reached, steps = _reach(operator.outputs[0]), [_step(tensor) for tensor in operator.inputs]
    if reached is None or not steps or any(step is None or step <= reached for step in steps):
        return None
    step = min(step for step in steps if step is not None)
    return (
        f"ends at {reached:.2g}, and {name(operator.inputs[0])} comes in steps of {step:.2g}: whatever is not 0 "
        f"becomes one of its ends"
    ), _AGAIN


def _too_wide(operator: Operator, _: _Namer) -> _Told:
    """A product without bias that is below half a step of its result, with the sum of n terms at their largest."""
    if (
        operator.name not in PRODUCTS
        or not operator.outputs
        or any(t is not None for t in operator.inputs[2:])
    ):
        return None
    pair = operator.inputs[:2]
    step, reaches = _step(operator.outputs[0]), [reach for reach in map(_reach, pair) if reach is not None]
    if step is None or len(pair) < 2 or len(reaches) < 2 or pair[0] is None or not pair[0].shape:
        return None
    most = math.prod(reaches) * max(pair[0].shape[-2:])
    if not 0 < most < step / 2:
        return None
    return f"has steps of {step:.2g}, and its operands give {most:.2g} at most: it is always 0", _UNMASKED


def _only_the_mask(operator: Operator, _: _Namer) -> _Told:
    """A SOFTMAX whose logits, without the mask, are within one step: the weights say what is masked, and no more."""
    if operator.name != "SOFTMAX" or not operator.inputs:
        return None
    logits = list(_carried(operator.inputs[0]))
    steps = [step for step in map(_step, logits) if step is not None]
    masking = logits[-1].producer if logits else None
    if masking is None or masking.name not in MASKING or not steps:
        return None
    for tensor in masking.inputs:
        reached = _reach(tensor)
        above = tensor is not None and tensor.producer is not None and products_above([tensor.producer])[0]
        if above and reached is not None and _MATTERS < reached < max(steps):
            return (
                f"takes logits in steps of {max(steps):.3g}, and without the mask they end at {reached:.2g}: they "
                f"become equal, and attention is uniform"
            ), _UNMASKED
    return None


def power_of_two(scale: float) -> bool:
    """Whether LiteRT takes a scale for a power of two (`CheckedLog2` of tensorflow/lite/kernels/kernel_util.cc)."""
    exponent = math.log2(scale)
    return abs(exponent - round(exponent)) < 1e-3


def _cannot_broadcast(operator: Operator, _: _Namer) -> _Told:
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


_CHECKS: Final[tuple[tuple[str, Callable[[Operator, _Namer], _Told]], ...]] = (
    ("range-too-narrow", _too_narrow),
    ("values-cut-off", _cut_off),
    ("range-too-wide", _too_wide),
    ("mask-in-range", _only_the_mask),
    ("sum-cannot-broadcast", _cannot_broadcast),
)


def _step(tensor: Tensor | None) -> float | None:
    """What one step of an integer stands for, the largest where there are several; None for others."""
    if (
        tensor is None
        or tensor.quantization is None
        or not tensor.quantization.is_affine
        or tensor.is_blockwise
    ):
        return None
    step = float(tensor.quantization.scale.max())
    return step if tensor.dtype.name in _ENDS and math.isfinite(step) and step > 0 else None


_ENDS: Final = {"INT4": (-8, 7), "INT8": (-128, 127), "UINT8": (0, 255), "INT16": (-32768, 32767)}


def _reach(tensor: Tensor | None) -> float | None:
    """The largest number that an integer tensor can stand for, either way; None for others."""
    step = _step(tensor)
    if tensor is None or step is None:
        return None
    assert tensor.quantization is not None
    centre = int(tensor.quantization.zero_point[0])
    return step * max(abs(end - centre) for end in _ENDS[tensor.dtype.name])


def _names(model: Model, graph: Subgraph) -> _Namer:
    """What callers call a tensor, or the one that it is a rearrangement of."""
    known: dict[int, str] = {}
    for signature in model.signatures:
        if signature.subgraph is graph:
            pairs: Iterable[tuple[str, Tensor]] = (*signature.outputs.items(), *signature.inputs.items())
            known |= {id(tensor): label for label, tensor in pairs}

    def name(tensor: Tensor | None) -> str:
        return next((f"'{known[id(one)]}'" for one in _carried(tensor) if id(one) in known), "its operand")

    return name


def _carried(tensor: Tensor | None) -> Iterator[Tensor]:
    """A tensor, and those that it is a rearrangement or a part of, the nearest first."""
    while tensor is not None:
        yield tensor
        maker = tensor.producer
        tensor = maker.inputs[0] if maker is not None and maker.name in _CARRIED and maker.inputs else None
