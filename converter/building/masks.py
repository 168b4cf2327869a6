"""Widens the masks of attention where an empty slot of the cache could outweigh all allowed keys.

litert-torch's masks subtract 100. Scores may lie far below: in the first layer of Qwen2.5-Coder-1.5B, whose keys have a
bias of up to 354, a row's largest allowed score is between -2,072 and 12,728. Where it is below -100, a head looks at
empty slots: four of the layer's twelve heads, for 2 to 18 % of the tokens.

    mask in steps of m -- MUL by c --> c m --> ADD --> logits --> SOFTMAX
                          scores in steps of s --^

The multiplication keeps the mask's codes and gives them larger steps. Each layer gets its own: Qualcomm's ADD errs by a
third of the larger operand's step. A sum that is too small for the logits becomes their smallest code, as it should.
"""

from collections.abc import Container, Iterator
from dataclasses import replace

import numpy as np

from edge_opt.base.words import many
from edge_opt.ir import Buffer, DType, Model, Operator, Quantization, Tensor
from edge_opt.ir.operators import KINDS, Effect, operators_that
from edge_opt.ir.walk import walked
from edge_opt.schema import Data

_MARGIN = 20.0
"""How far a masked key's score is below every allowed one at least: it weighs 2e-9 of that one."""
_CODES = 32767  # of int16, on each side of 0
_HALF = 2**14  # an int16 code by which a multiplication shifts exactly
_MOVING = operators_that(Effect.REARRANGING, Effect.REPEATING)
_REPEATING = _MOVING | operators_that(Effect.JOINING)  # an operator may join a tensor with itself

_Made = dict[tuple[Tensor, float], Tensor]


def widen_masks(model: Model) -> str:
    """Widen the masks that a quantized model adds to scores that are too far apart for them, in place.

    Returns:
        A note for the user, empty if all masks are wide enough.
    """
    masks: set[Tensor] = set()
    for _, inputs in model.inputs():
        masks.update(tensor for name, tensor in inputs.items() if "mask" in name)
    widened = 0
    for graph in model.subgraphs:
        made: _Made = {}
        for addition in graph.operators:
            place = _mask_operand(addition, masks)
            if place is None:
                continue
            mask = addition.input(place)
            largest_score = _end(addition.input(1 - place))
            logits_end = largest_score + _MARGIN
            if logits_end <= _end(mask):
                continue
            # A masked key may have the largest score, and an allowed one the smallest.
            factor = (2 * largest_score + _MARGIN) / _end(mask)
            graph.set_input(addition, place, _times(model, mask, factor, addition, made))
            for tensor in _moved(addition.output):
                if _end(tensor) < logits_end:
                    tensor.quantization = Quantization.affine(logits_end / _CODES)
            widened += 1
    if not widened:
        return ""
    return f"Widened {many(widened, 'mask')}, which subtracted less than scores may be apart"


def _mask_operand(addition: Operator, masks: Container[Tensor]) -> int | None:
    """The place of a mask that is added to int16 scores before a SOFTMAX, which alone reads the sum."""
    graph = addition.subgraph
    if graph is None or addition.name != "ADD" or not all(map(_is_int16, addition.tensors)):
        return None
    logits = _moved(addition.output)
    if not all(map(_is_int16, logits)) or any(map(graph.is_output, logits)):
        return None
    readers = {reader.name for tensor in logits for reader in tensor.consumers}
    if "SOFTMAX" not in readers or not readers <= _MOVING | {"SOFTMAX"}:
        return None
    are_masks = [_source(operand) in masks for operand in addition.given]
    return are_masks.index(True) if are_masks.count(True) == 1 else None


def _is_int16(tensor: Tensor) -> bool:
    """True for int16 with one scale above 0 and the zero point 0."""
    parameters = tensor.quantization
    if tensor.dtype is not DType.INT16 or parameters is None:
        return False
    is_usable = len(parameters.scale) == 1 and parameters.scale[0] > 0
    return is_usable and not parameters.zero_point.any()


def _end(tensor: Tensor) -> float:
    """The largest number that a tensor can hold, of either sign."""
    assert tensor.quantization is not None
    return _CODES * float(tensor.quantization.scale[0])


def _source(tensor: Tensor) -> Tensor | None:
    """The tensor of which one is a rearrangement or a repetition; None if it is joined of several, or not int16."""
    sources = {tensor}
    while len(sources) == 1:
        (source,) = sources
        if not _is_int16(source):
            return None
        maker = source.producer
        if maker is None or maker.name not in _REPEATING or len(maker.outputs) > 1:
            return source
        sources = {*KINDS[maker.name].data_operands(maker.inputs)}
    return None


def _moved(tensor: Tensor) -> list[Tensor]:
    """A tensor, and all that operators rearrange or repeat from it."""

    def below(one: Tensor) -> Iterator[Tensor]:
        for reader in one.consumers:
            if reader.name in _MOVING:
                yield from reader.outputs

    return [*walked([tensor], below)]


def _times(model: Model, tensor: Tensor, factor: float, before: Operator, made: _Made) -> Tensor:
    """A mask, made again from the given one times a factor, in front of an operator; `made` holds earlier results."""
    known = made.get((tensor, factor))
    if known is not None:
        return known
    graph = before.subgraph
    assert graph is not None
    name = f"{tensor.name}/times_{factor:.9g}"
    step = _end(tensor) / _CODES
    parameters = Quantization.affine(factor * step)
    wide = graph.add_tensor(replace(tensor, name=name, quantization=parameters))
    maker = tensor.producer
    if maker is None:
        constant = graph.add_tensor(_constant(f"{name}/constant", factor))
        operator = model.new_operator("MUL", [tensor, constant], [wide])
    else:
        operands = KINDS[maker.name].data_operands(maker.inputs)
        widened = {one: _times(model, one, factor, before, made) for one in operands}
        inputs = [one if one is None else widened.get(one, one) for one in maker.inputs]
        operator = Operator(maker.code, inputs, [wide], maker.options)
    graph.put(operator, before)
    made[tensor, factor] = wide
    return wide


def _constant(name: str, value: float) -> Tensor:
    content = Buffer(Data(np.int16(_HALF).tobytes()))
    parameters = Quantization.affine(value / _HALF)
    return Tensor(name, (), DType.INT16, quantization=parameters, buffer=content)
