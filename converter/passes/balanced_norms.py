"""Residual sums of norms that round down -> some sums subtract the negated norm, so that the errors cancel."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from edge_opt.attention.assembly import Assembly
from edge_opt.base.words import name_below
from edge_opt.ir import DType, Operator, Subgraph, Tensor
from edge_opt.ir.composites import body_of, composite_name
from edge_opt.ir.refusal import Reason, Why
from edge_opt.ir.walk import read_outside
from edge_opt.passes.codes import step_of
from edge_opt.passes.contract import Context, Pass, Site
from edge_opt.verification.check import Steps
from edge_opt.verification.rewrite import Rewrite

NORM = "odml.rms_norm"
_LINEAR = ("MUL", "RESHAPE", "BROADCAST_TO", "QUANTIZE", "DEQUANTIZE")


class BalancedNorms(Pass):
    """`x + norm(h) * w` -> `x - norm(h) * -w` in some layers: the same real numbers.

    Off unless the target asks for it (`norms_round_down`). A kernel that truncates makes each norm half a step too
    small on average, and these errors add up in the residual stream: after 18 layers of Gemma 3 270M, to 70 steps of
    the first layer's norm. Subtracting a negated norm makes the result half a step too large. Layer by layer, a norm is
    negated if the sum of the errors so far, in real numbers, is below zero. CPU kernels round to nearest, so there
    results may differ only for numbers midway between two codes. Its weights are constants, or a sum of constants, as
    litert-torch's second converter writes Gemma's `1 + w`.
    """

    name = "balanced_norms"
    summary = "negates some norms before residual sums, so that the NPU's rounding errors cancel"
    repairs = True
    check = Steps(2)

    def sites(self, context: Context) -> Iterable[Site]:
        """One site for each norm to negate, if the target asks for it."""
        if not context.target.norms_round_down:
            return
        error = 0.0
        for addition, norm in residual_sums(context.subgraph):
            is_negated = addition.name == "SUB"
            if not is_negated and error < 0:
                text = _why_not(context, norm)
                if text:
                    yield Site(addition, reason=Reason(Why.QUANTIZATION, text))
                else:
                    yield Site(addition, partial(_build, context, addition, norm))
                    is_negated = True
            half_a_step = step_of(norm.outputs[0]) / 2
            error += half_a_step if is_negated else -half_a_step


def _why_not(context: Context, norm: Operator) -> str:
    """Why a norm cannot be negated; empty if it can."""
    if not _is_linear(body_of(context.model, norm)):
        return "the norm's body does more with its weights than multiply by them"
    if not _has_negative(norm.input(1)):
        return "the norm's weights are not symmetric int16 constants that have a negative"
    return ""


def residual_sums(graph: Subgraph) -> Iterator[tuple[Operator, Operator]]:
    """Int16 sums that are the only readers of an integer norm's result, in execution order, each with its norm."""
    for addition in graph.operators:
        if addition.name not in ("ADD", "SUB") or not _has_step(addition.output):
            continue
        one = addition.input(0)
        other = addition.input(1)
        if one is other or one.shape != other.shape:
            continue
        # The norm of a SUB is the second operand.
        operands = (other, one) if addition.name == "ADD" else (other,)
        for normed in operands:
            norm = normed.producer
            alone = not read_outside(graph, normed, [addition])
            if alone and norm is not None and _is_int16_norm(norm):
                yield addition, norm
                break


def _is_int16_norm(operator: Operator) -> bool:
    if composite_name(operator) != NORM or len(operator.inputs) != 2 or len(operator.outputs) != 1:
        return False
    return _has_step(operator.outputs[0]) and _is_symmetric(operator.outputs[0])


def _has_step(tensor: Tensor) -> bool:
    return tensor.dtype is DType.INT16 and tensor.is_quantized and step_of(tensor) > 0


def _is_linear(body: Subgraph) -> bool:
    """True if a norm's body only multiplies by its weights, so that negated ones negate its result."""
    if len(body.inputs) != 2 or len(body.outputs) != 1:
        return False
    tensor = body.inputs[1]
    while tensor is not body.outputs[0]:
        if len(tensor.consumers) != 1:
            return False
        (reader,) = tensor.consumers
        if reader.name not in _LINEAR:
            return False
        if reader.name == "MUL":
            is_square = reader.input(0) is reader.input(1)
            if is_square or reader.has_activation:
                return False
        tensor = reader.output
    return True


def _has_negative(weight: Tensor) -> bool:
    """True if it is a constant whose type can hold its negative, or a sum of such constants."""
    total = weight.producer
    parts: Sequence[Tensor | None] = [weight]
    if total is not None:
        if total.name != "ADD" or total.has_activation:
            return False
        parts = total.inputs
    return _is_symmetric(weight) and all(map(_is_negatable, parts))


def _is_negatable(part: Tensor | None) -> bool:
    if part is None or not part.has_numbers or not _is_symmetric(part):
        return False
    return int(part.array().min()) > np.iinfo(np.int16).min


def _is_symmetric(tensor: Tensor) -> bool:
    parameters = tensor.quantization
    if tensor.dtype is not DType.INT16 or parameters is None:
        return False
    return parameters.is_affine and not parameters.zero_point.any()


def _build(context: Context, addition: Operator, norm: Operator) -> Rewrite:
    make = Assembly(context.model, context.constants)
    weight = norm.input(1)
    normed = norm.outputs[0]
    old = [norm, addition]
    if weight.producer is None:
        negated = _negative(context, weight)
    else:
        total = weight.producer
        old = [total, *old]
        parts = [_negative(context, part) for part in total.given]
        negated = make.copy(total, parts, _named_negated(weight))
    result = make.copy(norm, [norm.input(0), negated], _named_negated(normed))
    make.emit(
        "SUB",
        [addition.input(1 if addition.input(0) is normed else 0), result],
        addition.output,
        fused_activation_function=addition.option("fused_activation_function"),
        pot_scale_int16=addition.option("pot_scale_int16"),
    )
    # A step of the norm may be several steps of the sum, and the sum rounds once more.
    steps = 1 + math.ceil(step_of(normed) / step_of(addition.output))
    new = make.finished(addition.output)
    return context.rewrite(old, new, check=Steps(max(2, steps)))


def _named_negated(like: Tensor) -> Tensor:
    return replace(like, name=name_below(like.name, "negated"))


def _negative(context: Context, constant: Tensor) -> Tensor:
    numbers = np.negative(constant.array())
    name = name_below(constant.name, "negated")
    return context.constants.make(name, numbers, DType.INT16, constant.quantization)
