"""A softmax masked by SELECT -> by ADD: the mask becomes a tensor that is added, made once and shared by all heads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from edge_opt.attention.assembly import Assembly
from edge_opt.attention.rules import MOVEMENT
from edge_opt.base.words import name_below, shortened
from edge_opt.ir import DType, Operator, Quantization, Tensor
from edge_opt.ir.refusal import RefusedError
from edge_opt.ir.walk import moved_from, still_needed, walked
from edge_opt.passes.codes import code_limits, is_integer, real_range
from edge_opt.passes.contract import Context, Pass, Site
from edge_opt.passes.quantized_mask import two_values
from edge_opt.passes.rewrite import Demand, MaskInput, Rewrite

UNDERFLOW = 104.0
"""exp(-104) = 6.8e-46 rounds to 0 in float32, whose smallest denormal is 1.4e-45."""

LOWEST_ROW_MAXIMUM = -1024.0
"""Logits of trained models stay far above it; a row whose largest logit were lower would not be masked exactly."""

_HIDDEN = LOWEST_ROW_MAXIMUM - UNDERFLOW

ABSORBING = -(2.0**100)
"""Float32 numbers up to 3.7e22 vanish in the sum with it: `x + ABSORBING == ABSORBING`, as SELECT would have it.

It vanishes in turn in the sum with the lowest float32, so no sum of two masks overflows.
"""

_SMALL_CONSTANT = 1 << 20
_MASKING = MOVEMENT | {"ADD", "SUB", "MUL", "SELECT", "SELECT_V2", "BROADCAST_TO", "CONCATENATION"}
_QUANTIZED = frozenset({DType.INT8, DType.INT16})
_OPPOSITE = {"NOT_EQUAL": "EQUAL", "EQUAL": "NOT_EQUAL"}


class MaskToAdd(Pass):
    """`softmax(select(m, x, k)) = softmax(x + c*(1-m))`, bit for bit where `x + c == c` for every logit.

    In a row with an open entry, a masked one has probability 0 with `k` and with `c`: `exp` underflows below -104. With
    `k` that takes an open entry above `k + 104`: where the type holds lower logits, the site's note has that bound.
    In a row that is masked everywhere all entries are `c`, and softmax gives the uniform distribution, as with `k`.

    Such a row changes in two cases, which are measured and reported. With an infinite `k` it was NaN, and becomes
    uniform: `-inf * 0` is NaN, and reference kernels clip a sum to finite numbers. And where a target wants a constant
    that float16 holds, logits do not vanish in the sum, and the row gets the unmasked distribution.

    Quantized logits get a mask whose masked entries lie below zero by the whole range of the logits, so that the sum is
    always clipped to the lowest code. Adding 0 keeps every code, because the mask's step is twice the logits' step.

    Logits must be finite: SELECT hides a masked infinity, ADD does not. Where another mask (a constant, or a float
    input that is added) has closed some of them already, rows that both close together change too. No proof of this
    region alone can see that, so the note says it.
    """

    name = "mask_to_add"
    summary = "turns attention masks by SELECT into one additive mask that all heads share"

    def sites(self, context: Context) -> Iterable[Site]:
        """One for each SELECT whose result is normalized by a SOFTMAX."""
        for softmax in context.subgraph.operators:
            if softmax.name != "SOFTMAX":
                continue
            masked, path = moved_from(softmax.input(0), MOVEMENT)
            if masked.producer is not None and masked.producer.name in ("SELECT", "SELECT_V2"):
                yield Site(softmax, partial(_build, context, masked.producer, softmax, path[::-1]))


def _build(context: Context, select: Operator, softmax: Operator, path: list[Operator]) -> Rewrite:
    """Raises RefusedError where the SELECT cannot be an ADD."""
    for tensor in (operator.outputs[0] for operator in (select, *path)):
        if len(tensor.consumers) > 1 or context.subgraph.is_output(tensor):
            raise RefusedError("the masked logits are read elsewhere too", select, select.outputs[0])
    masked = _match(select, softmax, path)
    make = Assembly(context.model, context.constants)
    build = _in_codes if masked.logits.dtype in _QUANTIZED else _in_floats
    return build(context, masked, make)


@dataclass(frozen=True, slots=True)
class MaskedSoftmax:
    """A SELECT in front of a SOFTMAX: `logits` where open, `constant` where masked.

    `masked_when` is the value of `condition` at which an entry is masked; `path` are the rearrangements between the
    two. `other` names another mask that may have closed some of the logits: its lowest number, or the input that it is.
    """

    select: Operator
    softmax: Operator
    path: list[Operator]
    condition: Tensor
    logits: Tensor
    constant: float
    masked_when: bool
    other: str


def _match(select: Operator, softmax: Operator, path: list[Operator]) -> MaskedSoftmax:
    condition, *operands = (select.input(i) for i in range(3))
    result = select.outputs[0]
    if result.dtype is not DType.FLOAT32 and not (result.dtype in _QUANTIZED and is_integer(result)):
        raise RefusedError("logits are neither float32 nor quantized", select, result)
    if select.name == "SELECT" and condition.shape not in ((), result.shape):
        raise RefusedError("SELECT's condition chooses whole rows", select, condition)
    constants = [_uniform(tensor, result) for tensor in operands]
    masked_when = constants[0] is not None
    masked, logits = operands if masked_when else operands[::-1]
    constant = constants[0 if masked_when else 1]
    if constant is None:
        raise RefusedError("no operand of the SELECT is one constant", select, masked)
    if logits.shape != result.shape:
        raise RefusedError("the SELECT broadcasts its logits", select, logits, result.shape, logits.shape)
    if not constant <= _HIDDEN:
        text = "the mask constant is too close to the logits for an ADD to hide them"
        raise RefusedError(text, select, masked, f"at most {_HIDDEN:g}", f"{constant:g}")
    lowest, given = _added_before(logits)
    if lowest == -np.inf:
        text = "another mask has put -inf into the logits, which SELECT hides and ADD does not"
        raise RefusedError(text, select, logits)
    other = f"input '{shortened(given.name)}'" if given else ""
    if lowest < LOWEST_ROW_MAXIMUM:
        other = f"{lowest:g}"
    return MaskedSoftmax(select, softmax, path, condition, logits, constant, masked_when, other)


def _added_before(logits: Tensor) -> tuple[float, Tensor | None]:
    """What another mask may have put into the logits: the lowest constant (or 0), and a float input that is added."""

    def above(node: tuple[Tensor, bool]) -> Iterator[tuple[Tensor, bool]]:
        maker, added = node[0].producer, node[1]
        if maker is not None and maker.name in _MASKING:
            yield from ((t, added or maker.name in ("ADD", "SUB")) for t in maker.inputs if t is not None)

    nodes = [(tensor, added) for tensor, added in walked([(logits, False)], above) if tensor.dtype.is_float]
    small = [t for t, _ in nodes if t.has_numbers and 0 < t.elements <= _SMALL_CONSTANT]
    given = [t for t, added in nodes if added and t.producer is None and not t.is_constant]
    lowest = min((float(np.min(tensor.array())) for tensor in small), default=0.0)
    return min(lowest, 0.0), min(given, key=lambda tensor: tensor.elements, default=None)


def _uniform(tensor: Tensor, result: Tensor) -> float | None:
    """The value that every element of a constant has; None where it is no such constant.

    SELECT copies stored numbers, so they mean what the result's parameters say.
    """
    values = tensor.array().ravel() if tensor.has_numbers and tensor.elements else None
    if values is None or not (values == values[0]).all():
        return None
    first = float(values[0])
    if result.dtype not in _QUANTIZED or result.quantization is None:
        return first
    return result.quantization.real(first)


def _in_floats(context: Context, site: MaskedSoftmax, make: Assembly) -> Rewrite:
    """The mask is CAST(masked) * number: the number is added where masked, 0 where open."""
    lowest = context.target.mask_constant
    added = ABSORBING if lowest is None or lowest <= ABSORBING else max(site.constant, lowest)
    if added > _HIDDEN:
        text = f"target '{context.target.name}' wants a mask constant too close to the logits for an ADD to hide them"
        raise RefusedError(text, site.select, None, f"at most {_HIDDEN:g}", f"{added:g}")
    source, chain, flag, values = _flag(make, site)
    name = site.condition.name
    number = Tensor(name_below(name, "number"), source.shape, DType.FLOAT32)
    make.emit("CAST", [flag], number, in_data_type=int(DType.BOOL), out_data_type=int(DType.FLOAT32))
    constant = make.constants.make("mask/constant", np.array(added, np.float32), DType.FLOAT32)
    mask = Tensor(name_below(name, "additive"), source.shape, DType.FLOAT32)
    make.emit("MUL", [number, constant], mask)
    if source.shape != site.condition.shape:
        reshaped = Tensor(name_below(mask.name, "reshaped"), site.condition.shape, DType.FLOAT32)
        mask = make.reshape_to(mask, reshaped)
    old = (*chain, site.select, *site.path, site.softmax)
    kept = still_needed(context.subgraph, old, site.softmax)
    exact = _is_exact(site, added)
    return Rewrite(
        context.model,
        context.subgraph,
        old,
        (*kept, *_softmax_of(make, site, mask)),
        demand=Demand(spared=("masks", "nan added")) if exact else Demand("relative", 1e-6),
        note="; ".join(_notes(site, added)),
        mask=MaskInput(source, *values, exact=exact),
    )


def _notes(site: MaskedSoftmax, added: float) -> Iterator[str]:
    """On what it depends that probabilities stay what they were."""
    if site.other:
        yield f"rows that only this mask and another one ({site.other}) close together change"
    elif not _is_exact(site, added):
        yield f"rows that are masked everywhere change{' from NaN to numbers' if site.constant == -np.inf else ''}"
    if added != site.constant:
        yield f"the mask constant {site.constant:g} becomes {added:g}"
        if added == ABSORBING:
            yield "for a compiler that computes in float16 choose its target, or one with a mask_constant"
        yield "in a model that is yet to be quantized, a constant that low takes most of the range of the masked logits"
    if added != ABSORBING:
        least = f"{-added - UNDERFLOW:g}"
        yield f"equal where no masked logit is {least} or more above the largest open one of its row"
    if site.constant > ABSORBING:
        yield _equal_above(site)


def _is_exact(site: MaskedSoftmax, added: float) -> bool:
    """Whether rows that are masked everywhere stay as they are: every logit vanishes in what is added."""
    return added == ABSORBING and site.constant != -np.inf and not site.other


def _equal_above(site: MaskedSoftmax) -> str:
    """The condition where SELECT lifts masked entries above logits that lie below its constant."""
    return f"equal where the largest open logit of a row is above {site.constant + UNDERFLOW:g}"


def _in_codes(context: Context, site: MaskedSoftmax, make: Assembly) -> Rewrite:
    """The mask is one SELECT_V2 between 0 and a number as far below it as the lowest code is below the highest."""
    like = site.select.outputs[0]
    assert like.quantization is not None
    step, (least, _) = float(like.quantization.scale[0]), code_limits(like)
    # Masked: 2 * -least steps of the logits, one more than there are between two codes.
    parameters = Quantization.affine(2 * step, 0)
    mask = make.tensor(name_below(site.condition.name, "additive"), site.condition.shape, like, parameters)
    codes = (least, 0) if site.masked_when else (0, least)
    make.emit("SELECT_V2", [site.condition, *two_values(context, mask, codes)], mask)
    is_above = site.constant > real_range(site.logits)[0]
    return Rewrite(
        context.model,
        context.subgraph,
        (site.select, *site.path, site.softmax),
        tuple(_softmax_of(make, site, mask)),
        demand=Demand(spared=("masks", "high", "low") if is_above else ()),
        note=_equal_above(site) if is_above else "",
        mask=MaskInput(site.condition, float(site.masked_when), float(not site.masked_when), exact=True),
        chosen=frozenset({mask}),
    )


def _softmax_of(make: Assembly, site: MaskedSoftmax, mask: Tensor) -> list[Operator]:
    """All operators: those of the mask, the sum, what lay between SELECT and SOFTMAX, the SOFTMAX."""

    def masked(like: Tensor) -> Tensor:
        return make.tensor(name_below(like.name, "masked"), like.shape, like)

    result = site.select.outputs[0]
    # Scales that are powers of two had a kernel of their own up to version 2 of ADD.
    options = {"pot_scale_int16": False} if result.dtype is DType.INT16 else {}
    tensor = make.emit("ADD", [site.logits, mask], masked(result), **options)
    for operator in site.path:
        tensor = make.copy(operator, [tensor, *operator.inputs[1:]], masked(operator.outputs[0]))
    return make.finished(make.copy(site.softmax, [tensor], site.softmax.outputs[0]))


class _Flag(NamedTuple):
    """A boolean `tensor`, true where masked, made of `source` instead of by the operators of `chain`.

    `values`: what the source holds where masked, and where open.
    """

    source: Tensor
    chain: list[Operator]
    tensor: Tensor
    values: tuple[float, float]


def _flag(make: Assembly, site: MaskedSoftmax) -> _Flag:
    """RESHAPEs around one comparison with a number, or around one NOT, are followed up; else nothing is.

    So the mask has as few axes as its source, and is reshaped once it is made.
    """
    tensor, below = moved_from(site.condition, ("RESHAPE",))
    comparison = tensor.producer
    read = [] if comparison is None else [t for t in comparison.inputs if t is not None]
    numbers = [tensor for tensor in read if tensor.has_numbers and tensor.elements == 1]
    compares = comparison is not None and comparison.name in _OPPOSITE and len(numbers) == 1
    if comparison is None or not (compares or comparison.name == "LOGICAL_NOT"):
        return _negated(make, site, site.condition, [], not site.masked_when)
    source, above = moved_from(next(t for t in read if t not in numbers or not compares), ("RESHAPE",))
    chain = [*above[::-1], comparison, *below[::-1]]
    if not compares:
        return _negated(make, site, source, chain, site.masked_when)
    (number,), kind = numbers, comparison.name if site.masked_when else _OPPOSITE[comparison.name]
    # With more axes than the source, the number compared with would add axes to the mask.
    array = number.array().reshape(())
    scalar = make.constants.make("mask/compared", array, number.dtype, number.quantization)
    flag = Tensor(name_below(site.condition.name, "masked"), source.shape, DType.BOOL)
    make.emit(kind, [scalar if tensor is number else source for tensor in comparison.inputs], flag)
    equal, other = number.real(), 0.0 if number.real() else 1.0
    return _Flag(source, chain, flag, (equal, other) if kind == "EQUAL" else (other, equal))


def _negated(
    make: Assembly, site: MaskedSoftmax, source: Tensor, chain: list[Operator], negate: bool
) -> _Flag:
    """A boolean source as it is, or negated where it is true for open entries."""
    if not negate:
        return _Flag(source, chain, source, (1.0, 0.0))
    flag = Tensor(name_below(site.condition.name, "masked"), source.shape, DType.BOOL)
    return _Flag(source, chain, make.emit("LOGICAL_NOT", [source], flag), (0.0, 1.0))
