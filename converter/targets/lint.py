"""Find what a target refuses in a model or is known to get wrong; rewrites may fix some of it."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from edge_opt.attention.block import element_bytes
from edge_opt.base.record import Record
from edge_opt.base.words import listed, many
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
_MOST_READ = 1 << 20  # elements of a constant; masks of one number are small


@dataclass(frozen=True, slots=True)
class Finding(Record):
    """One problem that the target has with a model; `severity` is "error" (refused, or silently wrong) or "warning"."""

    severity: str
    rule: str
    message: str
    signature: str | None = None

    def __str__(self) -> str:
        return f"{self.signature}: {self.message}" if self.signature else self.message


_Faults = Iterator[tuple[str, str]]
"""Pairs of rule and message."""


def lint(model: Model, target: Target, converted: Mapping[str, int] | None = None) -> list[Finding]:
    """Everything in the model that the target refuses or gets wrong, signature by signature.

    `converted`: how many operators a conversion would leave in each signature, if that is known.
    """
    findings: list[Finding] = []
    rules = {_refused: "error", _tensors: "error", _joined_rows: "error", _constants: "warning"}
    for name, graph in model.entry_points():
        for look, severity in rules.items():
            findings += [Finding(severity, *fault, name) for fault in look(graph, target)]
    findings += _of_chips(model, target)
    findings += _too_many_operators(model, target, converted or {})
    findings += _of_file(model, target)
    return findings


def _too_many_operators(
    model: Model, target: Target, converted: Mapping[str, int]
) -> Iterator[Finding]:
    """Signatures with more operators than the compiler can take, now or after a conversion."""
    most = target.most_operators or math.inf
    limit = f"the compiler fails on more than about {most:,}{_source(target, 'most_operators')}"
    for name, graph in model.entry_points():
        count = len(graph)
        after = converted.get(name, count)
        if max(count, after) > most:
            more = "" if after == count else f", {after:,} after a conversion"
            yield Finding("error", "operators", f"{count:,} operators{more}: {limit}", name)


def _of_file(model: Model, target: Target) -> Iterator[Finding]:
    """What the compiler does not read in a file."""
    if target.signatures is False and len(model.signatures) > 1:
        names = ", ".join(signature.key for signature in model.signatures)
        message = f"only subgraph 0 is read (signatures: {names}): export each to its own file"
        yield Finding("warning", "signatures", message)
    outside = external_weights(model)
    if target.external_weights is False and outside:
        weights = many(len(outside), "weight")
        message = f"{weights} after the flatbuffer are not read: convert writes them inside"
        yield Finding("error", "external-weights", message)
    codes = new_codes(model)
    if target.new_operator_codes is False and codes:
        names = ", ".join(code.name for code in codes)
        message = f"{names}: the kind is read from deprecated_builtin_code, which is not set: convert sets it"
        yield Finding("error", "operator-codes", message)


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
    if not faulty or target.chip not in (None, *faulty):
        return
    text = f"on {', '.join(faulty)}, the compiler crashes on caches that are not transposed"
    text += _source(target, "transposed_caches")
    for signature in filter(_has_positions_first, signatures):
        yield Finding("error", "chip", text, signature.name)


def _has_positions_first(signature: SignatureInfo) -> bool:
    """True if a cache is `[B,S,K,H]`, with the positions before the heads."""
    length = known_length(signature)
    return any(one.shape[1:2] == (length,) for one in caches_of(signature).values())


def _refused(graph: Subgraph, target: Target) -> _Faults:
    refused = filter(target.refuses, graph)
    counts = Counter((operator.name, composite_name(operator)) for operator in refused)
    composites: list[str] = []
    for (name, composite), count in sorted(counts.items()):
        times = many(count, "time")
        if name == COMPOSITE:
            composites.append(f"{composite} {times}")
        else:
            yield "operator", f"{name} is refused ({times})"
    if composites:
        remedy = "a target file with inline_composites = true opens them"
        yield "composite", f"composites are not opened: {', '.join(composites)}; {remedy}"


class TensorKind(NamedTuple):
    """A kind of tensors that a target refuses: the rule, a sentence about it, and a test for its tensors."""

    rule: str
    text: str
    includes: Callable[[Tensor], bool]


def _is_int64(tensor: Tensor) -> bool:
    return tensor.dtype is DType.INT64


def _is_float(tensor: Tensor) -> bool:
    return tensor.dtype.is_float


def _is_open(tensor: Tensor) -> bool:
    return tensor.is_dynamic or not tensor.has_rank


_KINDS = {
    "int64": TensorKind("int64", "64-bit integers are refused", _is_int64),
    "floats": TensorKind("float", "floats are refused, quantize the model", _is_float),
    "dynamic_shapes": TensorKind(
        "dynamic", "dimensions known only at run time are refused", _is_open
    ),
}
"""Kinds of tensors by the target's fact that is False if it refuses them."""


def refused_tensors(target: Target) -> list[TensorKind]:
    """The kinds of tensors that the target refuses."""
    return [kind for fact, kind in _KINDS.items() if getattr(target, fact) is False]


def _tensors(graph: Subgraph, target: Target) -> _Faults:
    kinds = refused_tensors(target)
    if target.open_length is not None:
        text = f"open lengths are compiled as {target.open_length}, give --shape NAME=SIZES"
        kinds.append(TensorKind("open-length", text, _is_open))
    defined = list(graph.inputs)
    for operator in graph:
        defined += operator.outputs
    for kind in kinds:
        found = [_titled(tensor) for tensor in defined if kind.includes(tensor)]
        if found:
            yield kind.rule, f"{kind.text}: {listed(found, _NAMED)}"


def _titled(tensor: Tensor) -> str:
    return f"'{tensor.name[-60:]}' {list(tensor.shape_signature or tensor.shape)}"


def _joined_rows(graph: Subgraph, target: Target) -> _Faults:
    """Large rows that a CONCATENATION joins for an ADD: the mask, repeated for the heads of a group.

    Operands that the ADD broadcasts and parts joined on another axis do not count.
    """
    limit = target.largest_joined_rows_bytes
    if not limit:
        return
    counts = Counter[int]()
    for addition in graph:
        if addition.name != "ADD":
            continue
        for tensor in addition.given:
            size = tensor.elements * element_bytes(tensor)
            is_whole = tensor.elements == addition.output.elements
            if size > limit and is_whole and _has_joined_rows(tensor):
                counts[size] += 1
                break  # each operator counts once
    source = _source(target, "largest_joined_rows_bytes")
    remedy = f"split the heads, so that no mask is repeated{source}"
    for size, count in counts.items():
        text = f"an ADD reads rows that a CONCATENATION joins ({many(count, 'time')})"
        yield "joined-rows", f"{text}, {size:,} bytes, over the limit of {limit:,}: {remedy}"


def _has_joined_rows(tensor: Tensor) -> bool:
    """True if a CONCATENATION on the second-to-last axis made it, or the tensor that it is computed from."""
    operator = tensor.producer
    while operator is not None and operator.name in _ROWS_STAY:
        varying = operator.computed
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
    readers: dict[Tensor, str] = {}
    for operator in graph:
        if operator.name in _MASK_OPERATORS:
            readers |= dict.fromkeys(operator.given, operator.name)
    for tensor, name in readers.items():
        is_float = tensor.has_numbers and tensor.dtype is DType.FLOAT32
        if not is_float or not 0 < tensor.elements <= _MOST_READ:
            continue
        value = float(np.min(tensor.array()))
        if value < _HALF_LOWEST:
            text = f"the mask constant {value:g} of {name} overflows in half precision"
            if value < _RUINS_A_SCALE:
                text += ", and a tensor quantized with it has no precision left"
            remedy = "mask_to_add raises it for a target with a mask_constant"
            yield "mask-constant", f"{text}: {remedy}"
