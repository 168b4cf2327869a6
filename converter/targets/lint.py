"""Find what a target refuses in a model or is known to get wrong; rewrites may fix some of it."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from edge_opt.attention.block import element_bytes
from edge_opt.base.record import Record
from edge_opt.base.words import many
from edge_opt.ir import DType, Model, Subgraph, Tensor
from edge_opt.ir.cleanup import external_weights, new_codes
from edge_opt.ir.composites import COMPOSITE, composite_name
from edge_opt.runtime.description import describe
from edge_opt.runtime.tensors import SignatureInfo, caches_of, known_length
from edge_opt.targets.target import Target

DECISIVE = ("open-length", "operators", "chip")
"""Rules that decide if the model runs at all, or as what; they are printed first."""
_HALF_LOWEST = -65504.0
_RUINS_A_SCALE = -1e6
# Between a CONCATENATION and an ADD, these do not avoid the joined-rows fault if they keep rows and type.
_ROWS_STAY = frozenset({"RESHAPE", "QUANTIZE", "MUL", "TANH"})
_MASK_OPERATORS = frozenset({"ADD", "SELECT", "SELECT_V2", "MUL"})
_NAMED = 3
_MOST_ELEMENTS = 1 << 20


@dataclass(frozen=True, slots=True)
class Finding(Record):
    """One problem that the target has with a model; `severity` is "error" (refused, or silently wrong) or "warning"."""

    severity: str
    rule: str
    message: str
    signature: str | None = None

    def __str__(self) -> str:
        return f"{self.signature}: {self.message}" if self.signature else self.message


_Faults: TypeAlias = Iterator[tuple[str, str]]
"""Pairs of rule and message."""


def lint(model: Model, target: Target, converted: Mapping[str, int] | None = None) -> list[Finding]:
    """Everything in the model that the target refuses or gets wrong, signature by signature.

    `converted`: how many operators a conversion would leave in each signature, if that is known.
    """
    findings = [
        Finding("warning" if look is _constants else "error", rule, message, name)
        for name, graph in model.entry_points()
        for look in (_refused, _tensors, _joined_rows, _constants)
        for rule, message in look(graph, target)
    ]
    findings += _of_chips(model, target)
    for name, graph in model.entry_points():
        count = len(graph.operators)
        after = (converted or {}).get(name, count)
        if max(count, after) > (target.most_operators or math.inf):
            more = "" if after == count else f", {after:,} after a conversion"
            limit = f"the compiler fails on more than about {target.most_operators:,}"
            message = f"{count:,} operators{more}: {limit}{_source(target, 'most_operators')}"
            findings.append(Finding("error", "operators", message, name))
    if target.signatures is False and len(model.signatures) > 1:
        names = ", ".join(signature.key for signature in model.signatures)
        message = f"only subgraph 0 is read (signatures: {names}): export each to its own file"
        findings.append(Finding("warning", "signatures", message))
    if target.external_weights is False and (outside := external_weights(model)):
        weights = many(len(outside), "weight")
        message = f"{weights} after the flatbuffer are not read: convert writes them inside"
        findings.append(Finding("error", "external-weights", message))
    if target.new_operator_codes is False and (codes := new_codes(model)):
        names = ", ".join(code.name for code in codes)
        message = f"{names}: the kind is read from deprecated_builtin_code, which is not set: convert sets it"
        findings.append(Finding("error", "operator-codes", message))
    return findings


def _source(target: Target, fact: str) -> str:
    source = target.sources.get(fact)
    return f" ({source})" if source else ""


def _of_chips(model: Model, target: Target) -> Iterator[Finding]:
    """Faults of single chips in language models, which have caches."""
    signatures = [one for one in describe(model).values() if caches_of(one)]
    able = target.language_model_chips
    if signatures and able and target.chip not in able:
        text = f"language models are known to run on {', '.join(able)} only"
        yield Finding("error", "chip", text + _source(target, "language_model_chips"))
    faulty = target.transposed_caches
    for signature in signatures:
        if target.chip in (None, *faulty) and faulty and _has_positions_first(signature):
            text = f"on {', '.join(faulty)}, the compiler crashes on caches that are not transposed"
            yield Finding(
                "error", "chip", text + _source(target, "transposed_caches"), signature.name
            )


def _has_positions_first(signature: SignatureInfo) -> bool:
    """True if a cache is `[B,S,K,H]`, with the positions before the heads."""
    length = known_length(signature)
    return any(one.shape[1:2] == (length,) for one in caches_of(signature).values())


def _refused(graph: Subgraph, target: Target) -> _Faults:
    refused = [operator for operator in graph.operators if target.refuses(operator)]
    counts = Counter(operator.name for operator in refused if operator.name != COMPOSITE)
    for name, count in sorted(counts.items()):
        yield "operator", f"{name} is refused ({many(count, 'time')})"
    composites = Counter(
        composite_name(operator) for operator in refused if operator.name == COMPOSITE
    )
    names = ", ".join(f"{name} {many(count, 'time')}" for name, count in sorted(composites.items()))
    if names:
        remedy = "a target file with inline_composites = true opens them"
        yield "composite", f"composites are not opened: {names}; {remedy}"


def refused_tensors(target: Target) -> list[tuple[str, str, Callable[[Tensor], bool]]]:
    """The kinds of tensors that the target refuses: rule, sentence, and what belongs to it."""
    open_lengths = "dimensions known only at run time are refused"
    rules: dict[str, tuple[bool | None, str, Callable[[Tensor], bool]]] = {
        "int64": (target.int64, "64-bit integers are refused", lambda t: t.dtype is DType.INT64),
        "float": (
            target.floats,
            "floats are refused, quantize the model",
            lambda t: t.dtype.is_float,
        ),
        "dynamic": (target.dynamic_shapes, open_lengths, _is_open),
    }
    return [
        (rule, text, fits) for rule, (accepted, text, fits) in rules.items() if accepted is False
    ]


def _is_open(tensor: Tensor) -> bool:
    return tensor.is_dynamic or not tensor.has_rank


def _tensors(graph: Subgraph, target: Target) -> _Faults:
    rules = refused_tensors(target)
    defined = [
        *graph.inputs,
        *(tensor for operator in graph.operators for tensor in operator.outputs),
    ]
    if target.open_length is not None:
        text = f"open lengths are compiled as {target.open_length}, give --shape NAME=SIZES"
        rules.append(("open-length", text, _is_open))
    for rule, text, fits in rules:
        found = [tensor for tensor in defined if fits(tensor)]
        if found:
            named = ", ".join(
                f"'{tensor.name[-60:]}' {list(tensor.shape_signature or tensor.shape)}"
                for tensor in found[:_NAMED]
            )
            more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
            yield rule, f"{text}: {named}{more}"


def _joined_rows(graph: Subgraph, target: Target) -> _Faults:
    """Large rows that a CONCATENATION joins for an ADD: the mask, repeated for the heads of a group.

    Operands that the ADD broadcasts and parts joined on another axis do not count.
    """
    limit = target.largest_joined_rows_bytes or math.inf
    counts = Counter[int]()
    for operator in graph.operators if limit < math.inf else ():
        operands = [t for t in operator.inputs if t is not None and operator.name == "ADD"]
        whole = [
            t for t in operands if t.elements == operator.output.elements and _has_joined_rows(t)
        ]
        sizes = [tensor.elements * element_bytes(tensor) for tensor in whole]
        counts.update([size for size in sizes if size > limit][:1])
    source = _source(target, "largest_joined_rows_bytes")
    remedy = f"split the heads, so that no mask is repeated{source}"
    for size, count in counts.items():
        text = (
            f"an ADD reads rows that a CONCATENATION joins ({many(count, 'time')}), {size:,} bytes"
        )
        yield "joined-rows", f"{text}, over the limit of {limit:,}: {remedy}"


def _has_joined_rows(tensor: Tensor) -> bool:
    """True if a CONCATENATION on the second-to-last axis made it, or the tensor that it is computed from."""
    operator = tensor.producer
    while operator is not None and operator.name in _ROWS_STAY:
        varying = [
            operand
            for operand in operator.inputs
            if operand is not None and not operand.is_constant
        ]
        kinds = {(operand.shape[-2:], operand.dtype) for operand in varying}
        if len(varying) != 1 or kinds != {(tensor.shape[-2:], tensor.dtype)}:
            return False
        operator = varying[0].producer
    if operator is None or operator.name != "CONCATENATION":
        return False
    rank = len(operator.outputs[0].shape)
    return rank > 1 and int(operator.option("axis")) % rank == rank - 2


def _constants(graph: Subgraph, _: Target) -> _Faults:
    """Mask constants that overflow in half precision, or leave no precision after quantization."""
    readers = {
        t: op.name for op in graph.operators if op.name in _MASK_OPERATORS for t in op.inputs if t
    }
    for tensor, name in readers.items():
        known = (
            tensor.has_numbers
            and tensor.dtype is DType.FLOAT32
            and 0 < tensor.elements <= _MOST_ELEMENTS
        )
        value = float(np.min(tensor.array())) if known else 0.0
        if value < _HALF_LOWEST:
            text = f"the mask constant {value:g} of {name} overflows in half precision"
            if value < _RUINS_A_SCALE:
                text += ", and a tensor quantized with it has no precision left"
            yield (
                "mask-constant",
                f"{text}: mask_to_add raises it for a target with a mask_constant",
            )
