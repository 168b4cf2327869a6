"""Find broken quantization, and RoPE that stops counting, from a model's scales, without running it.

Each check compares a tensor's range with its operands', not with a fixed scale: a range that is too narrow or too wide
cannot come from calibration on real inputs. The checks are independent of targets and change nothing.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

from edge_opt.attention.find import MASKING, products_above
from edge_opt.attention.positions import find_rotary
from edge_opt.base.record import Record
from edge_opt.base.words import shortened
from edge_opt.ir import Model, Operator, Shape, Subgraph, Tensor
from edge_opt.ir.operators import KINDS, Effect, operators_that
from edge_opt.ir.refusal import RefusedError


@dataclass(frozen=True, slots=True)
class Unsound(Record):
    """A tensor that cannot hold its values, and the remedy; `model` is its model's type in a bundle, else empty."""

    rule: str
    signature: str
    tensor: str
    message: str
    remedy: str
    model: str = ""


def sentences(findings: Iterable[Unsound]) -> list[str]:
    """One line for each rule and signature; it names only the first tensor, because layers repeat."""
    groups: dict[tuple[str, str], list[Unsound]] = {}
    for found in findings:
        where = f"{found.model}/{found.signature}" if found.model else found.signature
        groups.setdefault((where, found.rule), []).append(found)
    return [
        f"{where}: '{shortened(first.tensor)}' {first.message}"
        f"{f' (and {len(others)} more like it)' if others else ''}: {first.remedy}"
        for (where, _), (first, *others) in groups.items()
    ]


def stopped_positions(model: Model, positions: int | None) -> Iterator[Unsound]:
    """Cosines and sines that stop changing before the last of the cache's `positions` (None: unknown)."""
    for name, graph in model.entry_points() if positions is not None else ():
        for rotary in find_rotary(graph):
            with suppress(RefusedError):  # an operator that cannot be evaluated is not a finding
                last = rotary.last_position(positions or 0)
                if last is not None:
                    text = f"stops counting at position {last} of {positions}: all later tokens get that position"
                    remedy = "run `edge-opt convert` on the bundle, which makes a table of all positions"
                    yield Unsound("positions-stop", name, rotary.result.name, text, remedy)


class UnreadCache(NamedTuple):
    """A cache that no operator of its signature reads, and the input of the same name that another signature reads."""

    signature: str
    name: str
    tensor: Tensor
    reader: str
    read: Tensor

    @property
    def difference(self) -> str:
        """Both types, and the signature that reads the cache, as text."""
        own, other = self.tensor.dtype.name, self.read.dtype.name
        scale = " with another scale" if own == other else ""
        return f"{own} and read by no operator, while '{self.reader}' reads it as {other}{scale}"


def unread_caches(model: Model) -> Iterator[UnreadCache]:
    """Unread caches whose type differs from that in a signature that reads them."""

    def kind(tensor: Tensor) -> object:
        return (
            tensor.dtype,
            tensor.quantization.key() if tensor.quantization and tensor.is_quantized else None,
        )

    inputs = [(each, name, tensor) for each in model.signatures for name, tensor in each.inputs.items()]
    read: dict[tuple[str, Shape], list[tuple[str, Tensor]]] = {}
    for signature, name, tensor in inputs:
        if "cache" in name and tensor.consumers:
            read.setdefault((name, tensor.shape), []).append((signature.key, tensor))
    for signature, name, tensor in inputs:
        others = read.get((name, tensor.shape), [])
        is_unread = not tensor.consumers and not signature.subgraph.is_output(tensor)
        if (
            is_unread
            and len({kind(other) for _, other in others}) == 1
            and kind(tensor) != kind(others[0][1])
        ):
            yield UnreadCache(signature.key, name, tensor, *others[0])


def mismatched_caches(model: Model) -> Iterator[Unsound]:
    """Caches that signatures cannot share in one buffer, as LiteRT-LM requires."""
    for found in unread_caches(model):
        text = f"is {found.difference}: LiteRT-LM, which has one buffer for both, may not start"
        remedy = "run `edge-opt convert` on the file, which gives both one type"
        yield Unsound("unread-cache", found.signature, found.name, text, remedy)


_SMALLEST_SHARE: Final = 2.0**-20
"""Share of the product of the operands' maxima. One step of an int16 softmax is 2**-15, an empty cache gives 1e-9."""

_MATTERS: Final = math.log(2)
"""Logits of plus and minus this size give weights of which one is four times the other."""

_REARRANGING = operators_that(Effect.REARRANGING, Effect.REPEATING, Effect.CUTTING) | {"QUANTIZE"}
_AGAIN = "calibrate again on inputs that fill it: for a cache, on prompts much longer than one prefill"
_UNMASKED = "quantize again with a mask of -100, which hides as much"
_WIDER = "quantize again with a range of this tensor that is 1 % wider"
_ENDS: Final = {"INT4": (-8, 7), "INT8": (-128, 127), "UINT8": (0, 255), "INT16": (-32768, 32767)}


class _Range(NamedTuple):
    """The real size of an integer's step (the largest, if there are several), and its largest number."""

    step: float
    largest: float


_Problem: TypeAlias = tuple[str, str, str]
"""Rule, message and remedy, as in `Unsound`."""

_Named: TypeAlias = Callable[[Tensor | None], str]


def broken_ranges(model: Model) -> Iterator[Unsound]:
    """Products that are always 0 or clipped, values that are always clipped, logits that depend only on the mask."""
    entries = {graph: name for name, graph in reversed(model.entry_points())}
    for graph in model.subgraphs:
        named = _names(model, graph)
        for operator in graph.operators:
            look = _LOOKS.get(operator.name)
            found = next(look(operator, named), None) if look is not None and operator.outputs else None
            if found is not None:
                rule, message, remedy = found
                where = entries.get(graph, graph.name), operator.outputs[0].name
                yield Unsound(rule, *where, message, remedy)


def _product(operator: Operator, named: _Named) -> Iterator[_Problem]:
    """A product's range ends far below |a b| of the operands' maxima, or its step exceeds a sum of n of these."""
    left, right, result = map(_range, (*operator.inputs[:2], operator.outputs[0]))
    if left is None or right is None or result is None:
        return
    if result.largest < _SMALLEST_SHARE * left.largest * right.largest:
        numbers = f"numbers up to {left.largest:.2g} and {right.largest:.2g}"
        text = f"ends at {result.largest:.2g}, but is a product of {numbers}"
        yield ("range-too-narrow", f"{text}: {named(operator.inputs[1])} has no effect", _AGAIN)
    most = left.largest * right.largest * max(operator.input(0).shape[-2:], default=0)
    if 0 < most < result.step / 2 and not any(operator.inputs[2:]):  # a bias adds to it
        text = f"has steps of {result.step:.2g}, but its operands give at most {most:.2g}: it is always 0"
        yield ("range-too-wide", text, _UNMASKED)


def _taken(operator: Operator, named: _Named) -> Iterator[_Problem]:
    """The smallest step of every operand exceeds the result's range; or an int16 ADD cannot broadcast."""
    result, ranges = _range(operator.outputs[0]), list(map(_range, operator.inputs))
    least = min((0 if one is None else one.step for one in ranges), default=0)
    if result is not None and least > result.largest:
        comes = f"{named(operator.inputs[0])} has steps of {least:.2g}"
        text = f"ends at {result.largest:.2g}, but {comes}: all values but 0 are clipped"
        yield ("values-cut-off", text, _AGAIN)
    tensors = [tensor for tensor in (*operator.inputs, *operator.outputs) if tensor is not None]
    is_int16 = operator.name == "ADD" and all(tensor.dtype.name == "INT16" for tensor in tensors)
    shifts = is_int16 and all(one is not None and power_of_two(one.step) for one in (*ranges, result))
    if shifts and len({tensor.shape for tensor in tensors[:2]}) > 1:
        text = "broadcasts, and its three scales are powers of two to a thousandth: LiteRT's kernel for int16"
        yield ("sum-cannot-broadcast", f"{text} ends the process", _WIDER)


def power_of_two(scale: float) -> bool:
    """True if LiteRT treats a scale as a power of two (`CheckedLog2` of tensorflow/lite/kernels/kernel_util.cc)."""
    exponent = math.log2(scale)
    return abs(exponent - round(exponent)) < 1e-3


def _only_the_mask(operator: Operator, _: _Named) -> Iterator[_Problem]:
    """The unmasked logits of a SOFTMAX are within one step, so that the weights depend only on the mask."""
    logits = list(_origins(operator.inputs[0]))
    step = max((one.step for one in map(_range, logits) if one is not None), default=0.0)
    masking = logits[-1].producer
    for tensor in masking.inputs if masking is not None and masking.name in MASKING else ():
        score = _range(tensor)
        is_score = tensor is not None and tensor.producer is not None and products_above([tensor.producer])[0]
        if is_score and score is not None and _MATTERS < score.largest < step:
            ends = f"without the mask they end at {score.largest:.2g}: they become equal, and attention is uniform"
            yield ("mask-in-range", f"takes logits in steps of {step:.3g}, but {ends}", _UNMASKED)


_LOOKS: Final[dict[str, Callable[[Operator, _Named], Iterator[_Problem]]]] = {
    **dict.fromkeys(operators_that(Effect.PRODUCT), _product),
    **dict.fromkeys(("QUANTIZE", "ADD", "SUB", "CONCATENATION"), _taken),
    "SOFTMAX": _only_the_mask,
}


def _range(tensor: Tensor | None) -> _Range | None:
    """The range of an integer tensor with scales; None for other tensors."""
    parameters = None if tensor is None or tensor.is_blockwise else tensor.quantization
    if tensor is None or parameters is None or not parameters.is_affine or tensor.dtype.name not in _ENDS:
        return None
    step, centre = float(parameters.scale.max()), int(parameters.zero_point[0])
    largest = step * max(abs(end - centre) for end in _ENDS[tensor.dtype.name])
    return _Range(step, largest) if math.isfinite(step) and step > 0 else None


def _names(model: Model, graph: Subgraph) -> _Named:
    """A function that gives the signature's name of a tensor, or of the one that it rearranges."""
    signatures = [signature for signature in model.signatures if signature.subgraph is graph]
    named = [each.outputs for each in signatures] + [each.inputs for each in signatures]
    labels = {tensor: label for arguments in named for label, tensor in arguments.items()}
    return lambda tensor: next((f"'{labels[t]}'" for t in _origins(tensor) if t in labels), "its operand")


def _origins(tensor: Tensor | None) -> Iterator[Tensor]:
    """A tensor, then the tensors that it is a rearrangement or part of, nearest first."""
    while tensor is not None:
        yield tensor
        maker = tensor.producer
        if maker is None or maker.name not in _REARRANGING:
            return
        tensor = next(iter(KINDS[maker.name].data_operands(maker.inputs)), None)
