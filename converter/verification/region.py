"""Both versions of a rewritten region, cut out as small models, and its structure: what it is without its numbers."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from itertools import chain
from typing import NamedTuple

from edge_opt.attention.factors import all_factors
from edge_opt.ir import DType, Model, Operator, OperatorCode, Quantization, Subgraph, Tensor
from edge_opt.ir.operators import BUILTIN_OPERATORS, Effect, operators_that
from edge_opt.ir.walk import cut_out, has_effects, needed_for, walked
from edge_opt.runtime.inputs import InputHint, Side
from edge_opt.schema.table import key_of
from edge_opt.verification.check import Check, Exact, Reference, Table, rounded_by_shape
from edge_opt.verification.rewrite import Rewrite
from edge_opt.verification.trial import Parts, Trial

_PRODUCTS = operators_that(Effect.PRODUCT)
_OPERANDS: tuple[Side, ...] = ("left", "right", "added")
_QUANTIZED = Quantization.affine(1.0, 0)
_DEQUANTIZE = OperatorCode(BUILTIN_OPERATORS["DEQUANTIZE"], 3)
# The operators of a composite's decomposition are counted in its own subgraph.
_MOVES = {
    *operators_that(Effect.REARRANGING, Effect.CUTTING, Effect.JOINING),
    "STABLEHLO_COMPOSITE",
}
_ELEMENT = 8  # multiply-adds that take as long as computing and comparing one element


@dataclass(frozen=True)
class Region:
    """Both versions of a region as models, its check, and the inputs to run them on.

    `name` identifies the region in messages; its lengths were divided by `divided`.
    """

    before: Model
    after: Model
    name: str
    check: Check
    trial: Trial
    divided: int = 1

    @property
    def outputs(self) -> list[Tensor]:
        """The results that are compared."""
        return self.before.subgraphs[0].outputs

    @cached_property
    def cost(self) -> int:
        """Multiply-adds of one run of both versions."""
        return multiply_adds(self.before) + multiply_adds(self.after)

    @cached_property
    def rounded(self) -> str:
        """The operator that optimized kernels round by shape, if bits must be equal; empty if there is none."""
        if not isinstance(self.check, Exact):
            return ""
        return rounded_by_shape(chain(self.before.operators(), self.after.operators()))


def multiply_adds(model: Model) -> int:
    """The multiply-adds of matrix products, plus the equivalent cost of other operators."""
    total = 0
    for operator in model.subgraphs[0]:
        each = _ELEMENT
        if operator.name == "BATCH_MATMUL":
            each = operator.input(0).shape[-2 if operator.option("adj_x") else -1]
        elif operator.name == "FULLY_CONNECTED":
            each = operator.input(1).shape[-1]
        total += each * sum(tensor.elements for tensor in operator.outputs)
    return total


def region_of(rewrite: Rewrite, check: Check, name: str, seed: int) -> Region:
    """Cut out both versions of a rewritten region; for a `Table`, its reference takes the old version's place."""
    if isinstance(check, Table) and check.reference is not None:
        before, after = _with_reference(rewrite, check.reference)
        trial = check.trial((), None)
    else:
        outputs, before, after = _versions(rewrite)
        trial = check.trial(_hints(rewrite, before.subgraphs[0]), _parts(rewrite, outputs))
    trial = replace(trial, seed=seed, tolerance=check.tolerance)
    return Region(before, after, name, check, trial)


def _versions(rewrite: Rewrite) -> tuple[Sequence[Tensor], Model, Model]:
    """The outputs to compare, and both versions; without side effects, only the parts that differ."""
    outputs = rewrite.outputs()
    old: Sequence[Operator] = rewrite.old
    new: Sequence[Operator] = rewrite.new
    if not has_effects((*old, *new), rewrite.model.subgraphs):
        outputs = rewrite.changed()
        old = needed_for(outputs, old)
        new = needed_for(outputs, new)
    inputs = rewrite.inputs()
    before = cut_out(rewrite.model, old, inputs, outputs)
    return outputs, before, cut_out(rewrite.model, new, inputs, outputs)


def _hints(rewrite: Rewrite, before: Subgraph) -> list[InputHint]:
    """What each input of the region is, by position."""
    sides = _sides(before)
    hints = [InputHint(side=sides.get(tensor, "other")) for tensor in before.inputs]
    mask = rewrite.mask
    if mask is not None and not mask.tensor.is_constant:
        place = rewrite.inputs().index(mask.tensor)
        hints[place] = InputHint("mask", mask.masked, mask.opened)
    return hints


def _parts(rewrite: Rewrite, outputs: Sequence[Tensor]) -> Parts | None:
    """Where the heads or tiles are in one of the outputs, if the rewrite says so."""
    if rewrite.parts is None or rewrite.parts[0] not in outputs:
        return None
    output, factored = rewrite.parts
    factors = list(all_factors(factored))
    sizes = tuple(factor.size for factor in factors)
    labelled = tuple(place for place, factor in enumerate(factors) if factor.stride)
    return Parts(outputs.index(output), sizes, labelled)


def _with_reference(rewrite: Rewrite, reference: Reference) -> tuple[Model, Model]:
    """The reference, and the new region with its result in real numbers."""
    (result,) = rewrite.changed()
    (position,) = rewrite.inputs()
    new = needed_for([result], rewrite.new)
    real = result
    if not result.dtype.is_float:
        real = Tensor("real", result.shape, DType.FLOAT32)
        new.append(Operator(_DEQUANTIZE, [result], [real]))
    before = cut_out(Model(), reference.operators, [position], [reference.result])
    return before, cut_out(Model(), new, [position], [real])


def _sides(graph: Subgraph) -> dict[Tensor, Side]:
    """The side of every tensor that leads to a SOFTMAX: added to the logits, or left or right of a product."""

    def above(reached: tuple[Tensor, Side]) -> Iterator[tuple[Tensor, Side]]:
        tensor, side = reached
        if tensor.producer is None:
            return
        inputs = tensor.producer.inputs
        is_product = side == "added" and tensor.producer.name in _PRODUCTS
        sides = _OPERANDS if is_product else (side,) * len(inputs)
        for operand, its_side in zip(inputs, sides, strict=False):
            if operand is not None and not operand.is_constant:
                yield operand, its_side

    softmaxes = (operator for operator in graph if operator.name == "SOFTMAX")
    starts: list[tuple[Tensor, Side]] = [(one.input(0), "added") for one in softmaxes]
    return dict(walked(starts, above))


class Structure(NamedTuple):
    """A region: both versions without their numbers, and the numbers of each, in order.

    Regions that are equal compute the same; names and calibrated ranges are ignored. `moves_only`: the new version
    computes only with operators that the old one has, and otherwise moves data.
    """

    form: Hashable
    old: tuple[Hashable, ...]
    new: tuple[Hashable, ...]
    moves_only: bool

    def covers(self, other: Structure) -> bool:
        """True if a verification of this region also holds for another one of the same form.

        - The new version has no operators of its own: with those, a mistake may show only with other numbers.
        - Each of its numbers is one of the old version. A scale of another layer, or one that is off in the last place,
          is thus another structure.
        - Numbers that are equal here are equal there: a rewrite could mix them up here without any difference.
        """
        if not self.moves_only:
            return False
        counterpart: dict[Hashable, Hashable] = {}
        for ours, theirs in zip(self.old, other.old, strict=True):
            if counterpart.setdefault(ours, theirs) != theirs:
                return False  # equal in this region, different in the other
        return all(
            counterpart.get(ours) == theirs
            for ours, theirs in zip(self.new, other.new, strict=True)
        )


def structure(before: Model, after: Model) -> Structure:
    """The structure of a region, given both versions as `cut_out` makes them."""
    old_form, old = _without_numbers(before)
    new_form, new = _without_numbers(after)
    return Structure((old_form, new_form), old, new, _computing(after) <= _computing(before))


def _without_numbers(model: Model) -> tuple[Hashable, tuple[Hashable, ...]]:
    """A model without its numbers; the quantization parameters, and digests of constants, in order."""
    kept: list[Hashable] = []
    numbers: list[Hashable] = []
    for graph in model.subgraphs:
        places = {tensor: place for place, tensor in enumerate(graph.tensors)}
        for tensor in graph.tensors:
            if tensor.data is not None:
                content = (tensor.dtype, sha256(tensor.data.view().data).digest())
                # Plain integers are axes, sizes and orders, which are structure.
                is_number = tensor.dtype.is_float or tensor.is_quantized
                listed = numbers if is_number else kept
                listed.append(content)
            plain = tensor
            if tensor.quantization is not None and tensor.is_quantized:
                numbers.append(tensor.quantization.key())
                plain = replace(tensor, quantization=_QUANTIZED)
            kept.append((tensor.data is None, plain.kind, tensor.is_variable))
        for operator in graph:
            kept.append((operator.code, key_of(operator.options), key_of(operator.table)))
            kept.append(_places(operator.inputs, places))
            kept.append(_places(operator.outputs, places))
            kept.append(_places(operator.intermediates, places))
        kept.append(_places(graph.inputs, places))
        kept.append(_places(graph.outputs, places))
    return tuple(kept), tuple(numbers)


def _places(tensors: Iterable[Tensor | None], places: Mapping[Tensor, int]) -> Hashable:
    return tuple(tensor and places[tensor] for tensor in tensors)


def _computing(model: Model) -> set[Hashable]:
    """The operators that do more than move data, with their options."""
    found: set[Hashable] = set()
    for operator in model.operators():
        if operator.name not in _MOVES or operator.has_activation:
            found.add((operator.code, key_of(operator.options)))
    return found
