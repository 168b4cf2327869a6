"""A softmax masked by SELECT -> by ADD, with one additive mask that all heads share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from edge_opt.attention.assembly import Assembly
from edge_opt.attention.rules import MOVEMENT
from edge_opt.base.words import name_below
from edge_opt.ir import DType, Operator, Quantization, Tensor
from edge_opt.ir.refusal import RefusedError, Why
from edge_opt.ir.walk import look_through, only_reader
from edge_opt.passes.codes import code_limits, real_range, step_of
from edge_opt.passes.contract import Context, Pass, Site
from edge_opt.passes.magnitude import ORDINARY, Magnitudes
from edge_opt.passes.quantized_mask import two_values
from edge_opt.verification.check import Exact, Within
from edge_opt.verification.rewrite import MaskInput, Rewrite

UNDERFLOW = 104.0
"""exp(-104) = 6.8e-46 rounds to 0 in float32, whose smallest denormal is 1.4e-45."""

LOWEST_ROW_MAXIMUM = -ORDINARY
"""Logits of trained models stay far above it; a row whose largest logit is lower is not masked exactly."""

_HIDDEN = LOWEST_ROW_MAXIMUM - UNDERFLOW
"""A masked logit that is not above it has probability 0 in every row."""

ABSORBING = -(2.0**100)
"""Float32 numbers up to 3.7e22 vanish in the sum with it: `x + ABSORBING == ABSORBING`, like SELECT."""

_QUANTIZED = frozenset({DType.INT8, DType.INT16})
_OPPOSITE = {"NOT_EQUAL": "EQUAL", "EQUAL": "NOT_EQUAL"}


class MaskToAdd(Pass):
    """`softmax(select(m, x, k)) = softmax(x + c*(1-m))`, bit for bit where `x + c == c` for every logit.

    In a row with an unmasked entry, masked ones have probability 0 with `k` and with `c`: `exp` underflows below -104.
    With `k`, that needs an unmasked entry above `k + 104`: if the type holds lower logits, the site's note gives that
    bound. In a row that is masked everywhere, all entries are `c`, and softmax gives the uniform distribution, as with
    `k`.

    Such a row changes in two cases, which the site's note names. With an infinite `k` it was NaN, and becomes uniform:
    `-inf * 0` is NaN, and reference kernels clip a sum to finite numbers. If a target needs a constant that float16 can
    hold, logits do not vanish in the sum, and the row gets the unmasked distribution.

    NaN or infinity in a masked logit, which SELECT hides, spreads to its row. In floats, the site's note says so.

    Quantized logits get a mask whose masked entries lie below zero by the whole range of the logits, so that the sum is
    always clipped to the lowest code. Adding 0 keeps every code, because the mask's step is twice the logits' step.

    If another mask may already hide some of the logits, the SELECT is skipped: rows that only both masks together hide
    would change, and no run of this region shows that. It may, unless the logits are the product of two activations,
    moved, cut, joined, converted, scaled by constants or soft-capped, with constants or other such logits added. All
    constants are read, and nothing may get beyond 1024 times the product.
    """

    name = "mask_to_add"
    summary = "turns attention masks applied by SELECT into one additive mask that all heads share"

    def sites(self, context: Context) -> Iterable[Site]:
        """One site for each SELECT whose result is normalized by a SOFTMAX."""
        magnitudes = Magnitudes()
        for softmax in context.subgraph.operators:
            if softmax.name != "SOFTMAX":
                continue
            masked, path = look_through(softmax.input(0), MOVEMENT)
            if masked.producer is not None and masked.producer.name in ("SELECT", "SELECT_V2"):
                yield Site(
                    softmax,
                    partial(_build, context, magnitudes, masked.producer, softmax, path[::-1]),
                )


@dataclass(frozen=True, slots=True)
class MaskedSoftmax:
    """A SELECT before a SOFTMAX: `logits` where not masked, `constant` where masked.

    `masked_when`: the value of `condition` that masks an entry; `path`: the rearrangements between the two operators.
    """

    select: Operator
    softmax: Operator
    path: list[Operator]
    condition: Tensor
    logits: Tensor
    constant: float
    masked_when: bool


def _build(
    context: Context,
    magnitudes: Magnitudes,
    select: Operator,
    softmax: Operator,
    path: list[Operator],
) -> Rewrite:
    for operator in (select, *path):
        if only_reader(context.subgraph, operator.outputs[0]) is None:
            raise RefusedError(
                Why.SHARED_RESULT,
                "another operator reads the masked logits too",
                select,
                select.outputs[0],
            )
    site = _masked_softmax(select, softmax, path)
    magnitude = magnitudes.of(site.logits)
    if magnitude.most > -LOWEST_ROW_MAXIMUM:
        text = "another mask may hide some of these logits: rows that only both masks together hide would change"
        raise RefusedError(Why.MASK, text, select, magnitude.source)
    make = Assembly(context.model, context.constants)
    if select.outputs[0].dtype is DType.FLOAT32:
        return _in_floats(context, site, make)
    return _in_codes(context, site, make)


def _masked_softmax(select: Operator, softmax: Operator, path: list[Operator]) -> MaskedSoftmax:
    """The operands of a SELECT by their meaning; raises RefusedError if an ADD cannot mask as it does."""
    condition = select.input(0)
    result = select.outputs[0]
    parameters = result.quantization if result.dtype in _QUANTIZED else None
    has_one_scale = parameters is not None and len(parameters.scale) == 1
    if result.dtype is not DType.FLOAT32 and not has_one_scale:
        raise RefusedError(
            Why.QUANTIZATION, "logits are neither float32 nor quantized", select, result
        )
    if select.name == "SELECT" and condition.shape not in ((), result.shape):
        raise RefusedError(Why.MASK, "SELECT's condition chooses whole rows", select, condition)
    masked_when = _uniform(select.input(1), parameters) is not None
    masked = select.input(1 if masked_when else 2)
    logits = select.input(2 if masked_when else 1)
    constant = _uniform(masked, parameters)
    if constant is None:
        raise RefusedError(
            Why.MASK, "no operand of the SELECT is a uniform constant", select, masked
        )
    if logits.shape != result.shape:
        raise RefusedError(
            Why.MASK, "the SELECT broadcasts its logits", select, logits, result.shape, logits.shape
        )
    if not constant <= _HIDDEN:
        text = "the mask constant is too close to the logits for an ADD to hide them"
        raise RefusedError(Why.MASK, text, select, masked, f"at most {_HIDDEN:g}", f"{constant:g}")
    if softmax.option("beta") != 1:
        raise RefusedError(Why.MASK, "the SOFTMAX scales its logits (beta is not 1)", softmax)
    return MaskedSoftmax(select, softmax, path, condition, logits, constant, masked_when)


def _uniform(tensor: Tensor, parameters: Quantization | None) -> float | None:
    """The value of a uniform constant by the result's parameters, because SELECT copies stored numbers; else None."""
    values = tensor.array().ravel() if tensor.has_numbers and tensor.elements else None
    if values is None or not (values == values[0]).all():
        return None
    return float(values[0]) if parameters is None else parameters.real(float(values[0]))


def _in_floats(context: Context, site: MaskedSoftmax, make: Assembly) -> Rewrite:
    """Add the mask CAST(masked) * number: the number for masked entries, 0 for open ones."""
    lowest = context.target.mask_constant
    added = ABSORBING if lowest is None or lowest <= ABSORBING else max(site.constant, lowest)
    if added > _HIDDEN:
        text = f"the mask constant of target '{context.target.name}' is too close to the logits for an ADD to hide them"
        raise RefusedError(
            Why.TARGET, text, site.select, None, f"at most {_HIDDEN:g}", f"{added:g}"
        )
    flag = _flag(make, site)
    shape = flag.mask.tensor.shape
    name = site.condition.name
    number = make.emit(
        "CAST",
        [flag.is_masked],
        Tensor(name_below(name, "number"), shape, DType.FLOAT32),
        in_data_type=int(DType.BOOL),
        out_data_type=int(DType.FLOAT32),
    )
    constant = make.constants.make("mask/constant", np.array(added, np.float32), DType.FLOAT32)
    additive = Tensor(name_below(name, "additive"), shape, DType.FLOAT32)
    mask = make.emit("MUL", [number, constant], additive)
    mask = make.reshaped(mask, site.condition.shape, name_below(mask.name, "reshaped"))
    # Rows that are masked everywhere do not change if every logit vanishes in the sum.
    is_exact = added == ABSORBING and site.constant != -np.inf
    return context.rewrite(
        [*flag.chain, site.select, *site.path, site.softmax],
        _softmax_of(make, site, mask),
        check=Exact(spared=("masks", "nan added")) if is_exact else Within(1e-6),
        note="; ".join(_notes(site.constant, added)),
        mask=flag.mask,
    )


def _notes(constant: float, added: float) -> Iterator[str]:
    """The conditions under which probabilities do not change, and what else there is to know."""
    if added != ABSORBING or constant == -np.inf:
        yield f"rows that are masked everywhere change{' from NaN to numbers' if constant == -np.inf else ''}"
    if added != constant:
        yield f"the mask constant {constant:g} becomes {added:g}"
        if added == ABSORBING:
            yield "for a compiler that computes in float16, choose its target, or one with a mask_constant"
        yield "in a model that is yet to be quantized, such a low constant takes most of the range of the masked logits"
    if added != ABSORBING:
        least = f"{-added - UNDERFLOW:g}"
        yield f"equal unless a masked logit is {least} or more above the largest unmasked one of its row"
    if constant > ABSORBING:
        yield _equal_above(constant)
    yield "NaN or infinity in a masked logit, as from an unwritten cache slot, now spreads to its row"


def _equal_above(constant: float) -> str:
    """The condition for results to be equal, if some logits may be below SELECT's constant."""
    return f"equal where the largest unmasked logit of a row is above {constant + UNDERFLOW:g}"


def _in_codes(context: Context, site: MaskedSoftmax, make: Assembly) -> Rewrite:
    """Make the mask with one SELECT_V2 between 0 and a number below it by the whole range of the logits."""
    like = site.select.outputs[0]
    least, _ = code_limits(like)
    # Masked: 2 * -least steps of the logits, one more than between the lowest and the highest code.
    parameters = Quantization.affine(2 * step_of(like), 0)
    mask = make.tensor(
        name_below(site.condition.name, "additive"), site.condition.shape, like, parameters
    )
    codes = (least, 0) if site.masked_when else (0, least)
    make.emit("SELECT_V2", [site.condition, *two_values(context, mask, codes)], mask)
    some_are_below = site.constant > real_range(site.logits)[0]
    return context.rewrite(
        [site.select, *site.path, site.softmax],
        _softmax_of(make, site, mask),
        check=Exact(spared=("masks", "high", "low") if some_are_below else ()),
        note=_equal_above(site.constant) if some_are_below else "",
        mask=MaskInput(site.condition, float(site.masked_when), float(not site.masked_when)),
        chosen=frozenset({mask}),
    )


def _softmax_of(make: Assembly, site: MaskedSoftmax, mask: Tensor) -> list[Operator]:
    """All new operators: the mask's, the ADD, copies of those between SELECT and SOFTMAX, the SOFTMAX."""

    def masked(like: Tensor) -> Tensor:
        return make.tensor(name_below(like.name, "masked"), like.shape, like)

    result = site.select.outputs[0]
    # Up to version 2, ADD had a separate kernel for scales that are powers of two.
    options = {"pot_scale_int16": False} if result.dtype is DType.INT16 else {}
    tensor = make.emit("ADD", [site.logits, mask], masked(result), **options)
    for operator in site.path:
        tensor = make.copy(operator, [tensor, *operator.inputs[1:]], masked(operator.outputs[0]))
    return make.finished(make.copy(site.softmax, [tensor], site.softmax.outputs[0]))


class _Flag(NamedTuple):
    """A boolean that is true for masked entries, made of the region's mask input; `chain` leads from that to SELECT."""

    is_masked: Tensor
    chain: list[Operator]
    mask: MaskInput


def _flag(make: Assembly, site: MaskedSoftmax) -> _Flag:
    """The flag of a masked softmax.

    Only RESHAPEs around one comparison with a number, or around one NOT, are followed up, so that the mask has as few
    axes as its source.
    """
    name = name_below(site.condition.name, "masked")
    compared, below = look_through(site.condition, ("RESHAPE",))
    maker = compared.producer
    number = None if maker is None else _number_compared(maker)
    if maker is None or (number is None and maker.name != "LOGICAL_NOT"):
        return _flag_of_boolean(make, name, site.condition, [], is_masked=site.masked_when)
    operand = next(one for one in maker.inputs if one is not None and one is not number)
    source, above = look_through(operand, ("RESHAPE",))
    chain = [*above[::-1], maker, *below[::-1]]
    if number is None:
        return _flag_of_boolean(make, name, source, chain, is_masked=not site.masked_when)
    kind = maker.name if site.masked_when else _OPPOSITE[maker.name]
    # If it had more axes than the source, the number compared with would add axes to the mask.
    array = number.array().reshape(())
    scalar = make.constants.make("mask/compared", array, number.dtype, number.quantization)
    operands = [scalar if one is number else source for one in maker.inputs]
    flag = make.emit(kind, operands, Tensor(name, source.shape, DType.BOOL))
    equal = number.real()
    other = 0.0 if equal else 1.0
    if kind == "EQUAL":
        return _Flag(flag, chain, MaskInput(source, masked=equal, opened=other))
    return _Flag(flag, chain, MaskInput(source, masked=other, opened=equal))


def _number_compared(operator: Operator) -> Tensor | None:
    """The only operand of a comparison that is a constant of one element, if there is one."""
    if operator.name not in _OPPOSITE:
        return None
    given = filter(None, operator.inputs)
    numbers = [tensor for tensor in given if tensor.has_numbers and tensor.elements == 1]
    return numbers[0] if len(numbers) == 1 else None


def _flag_of_boolean(
    make: Assembly, name: str, source: Tensor, chain: list[Operator], *, is_masked: bool
) -> _Flag:
    """The flag of a boolean source, whose masked entries are true or false."""
    if is_masked:
        return _Flag(source, chain, MaskInput(source, masked=1.0, opened=0.0))
    flag = make.emit("LOGICAL_NOT", [source], Tensor(name, source.shape, DType.BOOL))
    return _Flag(flag, chain, MaskInput(source, masked=0.0, opened=1.0))
