"""MaskedSoftmax by SELECT -> by ADD: the mask becomes a tensor that is added, made once and shared by all heads."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from edge_opt.attention.refusal import Refusal
from edge_opt.attention.rules import MOVEMENT
from edge_opt.ir import DType, Operator, Tensor
from edge_opt.ir.region import still_needed
from edge_opt.ir.versions import operator_version
from edge_opt.passes.contract import Context, Demand, Pass, Site, SkippedSite
from edge_opt.passes.rewrite import MaskInput, Rewrite
from edge_opt.schema.table import Table, new_table

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from edge_opt.ir import Subgraph

UNDERFLOW = 104.0
"""exp(-104) = 6.8e-46 rounds to 0 in float32, whose smallest denormal is 1.4e-45."""

LOWEST_ROW_MAXIMUM = -1024.0
"""Logits of trained models stay far above it; a row whose largest logit were lower would not be masked exactly."""

_SELECTS = frozenset({"SELECT", "SELECT_V2"})
_COMPLEMENT = {"NOT_EQUAL": "EQUAL", "EQUAL": "NOT_EQUAL"}


@dataclass(frozen=True, slots=True)
class MaskedSoftmax:
    """A SELECT in front of a SOFTMAX: `logits` where open, `constant` where masked.

    `masked_when` is the value of `condition` at which an entry is masked; `path` are the rearrangements between the
    two, `chain` the operators that make the condition (from its source on).
    """

    select: Operator
    softmax: Operator
    path: tuple[Operator, ...]
    condition: Tensor
    logits: Tensor
    constant: float
    masked_when: bool


class MaskToAdd(Pass):
    """`softmax(select(m, x, c)) = softmax(x + c*(1-m))` where `exp(c - max(x))` underflows.

    An entry with `c + x - max(x) < -104` has probability 0 in float32 either way. On a row that is masked everywhere
    SELECT gives the uniform distribution and ADD the unmasked one; that is measured and reported.
    """

    name: ClassVar[str] = "mask_to_add"
    summary: ClassVar[str] = "turns attention masks by SELECT into one additive mask that all heads share"
    demand: ClassVar[Demand] = Demand("relative", 1e-6)

    def sites(self, context: Context) -> Iterable[Site | SkippedSite]:
        """One for each SELECT whose result is normalized by a SOFTMAX."""
        for softmax in context.subgraph.operators:
            if softmax.name != "SOFTMAX":
                continue
            found = match_masked_softmax(context.subgraph, softmax)
            if isinstance(found, MaskedSoftmax):
                yield Site(found.select, partial(_build, context, found))
            elif found is not None:
                yield SkippedSite(softmax, str(found))


def match_masked_softmax(subgraph: Subgraph, softmax: Operator) -> MaskedSoftmax | Refusal | None:
    """The SELECT that masks a SOFTMAX's operand, why it cannot be an ADD, or None where there is none."""
    path: list[Operator] = []
    tensor = softmax.input(0)
    while tensor.producer is not None and tensor.producer.name in MOVEMENT:
        path.append(tensor.producer)
        tensor = tensor.producer.input(0)
    select = tensor.producer
    if select is None or select.name not in _SELECTS:
        return None
    between = [select, *path]
    if any(len(op.outputs[0].consumers) > 1 or subgraph.is_output(op.outputs[0]) for op in between):
        return Refusal("the masked logits are read elsewhere too", select, select.outputs[0])
    return _match_operands(select, softmax, tuple(reversed(path)))


def _match_operands(
    select: Operator, softmax: Operator, path: tuple[Operator, ...]
) -> MaskedSoftmax | Refusal:
    condition, when_true, when_false = (select.input(i) for i in range(3))
    result = select.outputs[0]
    if result.dtype is not DType.FLOAT32 and result.dtype is not DType.FLOAT16:
        return Refusal(
            "only float masks are turned into ADD", select, result, "float32", result.dtype.name.lower()
        )
    constants = [_uniform(tensor) for tensor in (when_true, when_false)]
    if constants[0] is None and constants[1] is None:
        return Refusal("no operand of the SELECT is one constant", select, when_false)
    masked_when = constants[0] is not None
    constant = constants[0] if masked_when else constants[1]
    logits = when_false if masked_when else when_true
    assert constant is not None
    if logits.shape != result.shape:
        return Refusal("the SELECT broadcasts its logits", select, logits, str(list(result.shape)))
    if not constant <= LOWEST_ROW_MAXIMUM - UNDERFLOW:
        return Refusal(
            "the mask constant is too close to the logits for an ADD to hide them",
            select,
            when_true if masked_when else when_false,
            f"at most {LOWEST_ROW_MAXIMUM - UNDERFLOW:g}",
            f"{constant:g}",
        )
    return MaskedSoftmax(select, softmax, path, condition, logits, constant, masked_when)


def _uniform(tensor: Tensor) -> float | None:
    """The value that every element of a constant has; None where it is no such constant."""
    if not tensor.is_constant or tensor.dtype.numpy is None or not tensor.elements:
        return None
    values = tensor.array().ravel()
    first = values[0]
    return float(first) if (values == first).all() else None


def _build(context: Context, site: MaskedSoftmax) -> Rewrite | Refusal:
    builder = _MaskBuilder(context, site)
    source, chain = condition_source(site.condition)
    mask = builder.additive(source, chain)
    result = site.select.outputs[0]
    if len(mask.shape) > len(result.shape):
        return Refusal("the mask has more axes than the logits", site.select, mask)
    masked = Tensor(f"{result.name}/masked", result.shape, result.dtype)
    builder.emit("ADD", [site.logits, mask], masked, new_table("AddOptions"))
    tensor = masked
    for operator in site.path:
        copy = Tensor(f"{operator.outputs[0].name}/masked", operator.outputs[0].shape, result.dtype)
        builder.clone(operator, tensor, copy)
        tensor = copy
    builder.clone(site.softmax, tensor, site.softmax.outputs[0])
    old = (*chain, site.select, *site.path, site.softmax)
    kept = still_needed(context.subgraph, old, site.softmax)
    mask_input = MaskInput(source, *_values(source, chain, masked_when=site.masked_when))
    return Rewrite(context.subgraph, old, (*kept, *builder.operators), site.softmax, mask_input)


def condition_source(condition: Tensor) -> tuple[Tensor, tuple[Operator, ...]]:
    """Follow a condition up to the tensor it is made of: through one comparison or NOT, and the reshapes around it."""
    chain: list[Operator] = []
    tensor = _above_reshapes(condition, chain)
    comparison = tensor.producer
    if comparison is None or comparison.name not in {*_COMPLEMENT, "LOGICAL_NOT"}:
        return condition, ()
    data = _compared(comparison)
    if data is None:
        return condition, ()
    chain.append(comparison)
    source = _above_reshapes(data, chain)
    return source, tuple(reversed(chain))


def _above_reshapes(tensor: Tensor, passed: list[Operator]) -> Tensor:
    while tensor.producer is not None and tensor.producer.name == "RESHAPE":
        passed.append(tensor.producer)
        tensor = tensor.producer.input(0)
    return tensor


def _comparison(chain: Sequence[Operator]) -> Operator | None:
    """The comparison or NOT in a condition's chain."""
    return next((operator for operator in chain if operator.name != "RESHAPE"), None)


def _compared(comparison: Operator) -> Tensor | None:
    if comparison.name == "LOGICAL_NOT":
        return comparison.input(0)
    data = [t for t in comparison.inputs if t is not None and not t.is_constant]
    others = [t for t in comparison.inputs if t is not None and t.is_constant and t.elements == 1]
    return data[0] if len(data) == 1 and len(others) == 1 else None


def _values(source: Tensor, chain: Sequence[Operator], *, masked_when: bool) -> tuple[float, float]:
    """(value of a masked entry, value of an open one) in the tensor that the mask is made of."""
    comparison = _comparison(chain)
    if comparison is None or comparison.name == "LOGICAL_NOT":
        masked = masked_when is (comparison is None)
        return float(masked), float(not masked)
    constant = next(t for t in comparison.inputs if t is not None and t.is_constant)
    value = float(constant.array().ravel()[0])
    other = 1.0 if value == 0 else 0.0
    equal_is_masked = masked_when is (comparison.name == "EQUAL")
    return (value, other) if equal_is_masked else (other, value)


class _MaskBuilder:
    """Emits the operators that make an additive mask of a condition's source."""

    def __init__(self, context: Context, site: MaskedSoftmax) -> None:
        self._context = context
        self._site = site
        self._like = site.select.outputs[0]
        self.operators: list[Operator] = []

    def emit(self, name: str, inputs: Sequence[Tensor], output: Tensor, options: Table | None) -> Tensor:
        code = self._context.model.operator_code(
            name, operator_version(name, inputs[0].dtype, len(inputs[0].shape), result=output.dtype)
        )
        self.operators.append(Operator(code, inputs, [output], options))
        return output

    def clone(self, operator: Operator, source: Tensor, output: Tensor) -> None:
        inputs = (source, *operator.inputs[1:])
        self.operators.append(Operator(operator.code, inputs, [output], operator.options, operator.table))

    def additive(self, source: Tensor, chain: Sequence[Operator]) -> Tensor:
        """`c` where masked, 0 where open; shaped like the source until the end, then like the condition."""
        masked = self._masked(source, chain)
        name = self._site.condition.name
        shape, dtype = masked.shape, self._like.dtype
        number = Tensor(f"{name}/number", shape, dtype)
        options = new_table("CastOptions", in_data_type=int(DType.BOOL), out_data_type=int(dtype))
        self.emit("CAST", [masked], number, options)
        assert dtype.numpy is not None
        clamped = max(self._site.constant, self._context.target.mask_constant)
        constant = self._context.constants.make("mask/constant", np.array(clamped, dtype.numpy), dtype)
        mask = Tensor(f"{name}/additive", shape, dtype)
        self.emit("MUL", [number, constant], mask, new_table("MulOptions"))
        target = self._site.condition.shape
        if shape == target:
            return mask
        steering = self._context.constants.make("mask/shape", np.array(target, np.int32), DType.INT32)
        reshaped = Tensor(f"{name}/additive/reshaped", target, dtype)
        return self.emit(
            "RESHAPE", [mask, steering], reshaped, new_table("ReshapeOptions", new_shape=list(target))
        )

    def _masked(self, source: Tensor, chain: Sequence[Operator]) -> Tensor:
        """True where masked: the complement of the condition where that one says what is open."""
        comparison = _comparison(chain)
        name = self._site.condition.name
        negate = not self._site.masked_when
        if comparison is None:
            if not negate:
                return source
            flipped = Tensor(f"{name}/masked", source.shape, DType.BOOL)
            return self.emit("LOGICAL_NOT", [source], flipped, new_table("LogicalNotOptions"))
        if comparison.name == "LOGICAL_NOT":
            if negate:
                return source
            return self._compare("LOGICAL_NOT", [source], source)
        kind = _COMPLEMENT[comparison.name] if negate else comparison.name
        read = [source if t is not None and not t.is_constant else t for t in comparison.inputs]
        return self._compare(kind, [t for t in read if t is not None], source)

    def _compare(self, name: str, inputs: Sequence[Tensor], source: Tensor) -> Tensor:
        masked = Tensor(f"{self._site.condition.name}/masked", source.shape, DType.BOOL)
        table = {"LOGICAL_NOT": "LogicalNotOptions", "EQUAL": "EqualOptions", "NOT_EQUAL": "NotEqualOptions"}[
            name
        ]
        return self.emit(name, inputs, masked, new_table(table))
