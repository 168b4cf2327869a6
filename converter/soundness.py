"""Find broken quantization from a model's scales, without running it.

Each check compares a tensor's range with its operands', not with a fixed scale: a range that is too narrow or too wide
cannot come from calibration on real inputs, and each cache in one signature with the same cache in others. The checks
are independent of targets and change nothing.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

import numpy as np

from edge_opt.attention.find import MASKING, products_above
from edge_opt.base.record import Record
from edge_opt.base.words import shortened
from edge_opt.ir import DType, Model, Operator, Tensor
from edge_opt.ir.operators import KINDS, Effect, operators_that
from edge_opt.runtime.description import tensor_info
from edge_opt.runtime.tensors import cache_of


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


# Share of the product of the operands' maxima. One step of an int16 softmax is 2**-15, an empty cache gives 1e-9.
_SMALLEST_SHARE: Final = 2.0**-20
# Logits of plus and minus this size give weights of which one is four times the other.
_MATTERS: Final = math.log(2)
_REARRANGING = operators_that(Effect.REARRANGING, Effect.REPEATING, Effect.CUTTING) | {"QUANTIZE"}
_AGAIN = "calibrate again on inputs that fill it: for a cache, on prompts much longer than one prefill"
_UNMASKED = "quantize again with a mask of -100, which hides as much"
_ALIGNED = "quantize again with one range for each cache, as litert-torch's align_kv_cache_params sets"
_WIDER = "quantize again with a range of this tensor that is 1 % wider"
_ENDS: Final = {
    DType.INT4: (-8, 7), DType.INT8: (-128, 127), DType.UINT8: (0, 255), DType.INT16: (-32768, 32767)
}  # fmt: skip


class _Range(NamedTuple):
    """The real size of an integer's step (the largest, if there are several), and its largest number.

    Both are NaN, neither more nor less than any number, for a tensor that does not hold integers with scales.
    """

    step: float = math.nan
    largest: float = math.nan


_Problem: TypeAlias = tuple[str, str, str]  # rule, message and remedy, as in `Unsound`


def broken_ranges(model: Model, model_type: str = "") -> Iterator[Unsound]:
    """Products that are always 0 or clipped, values that are always clipped, logits that depend only on the mask."""
    entries = {graph: name for name, graph in reversed(model.entry_points())}
    named = [each.outputs for each in model.signatures] + [each.inputs for each in model.signatures]
    labels = {tensor: label for arguments in named for label, tensor in arguments.items()}
    for graph in model.subgraphs:
        for operator in graph.operators:
            look = _LOOKS.get(operator.name)
            found = next(look(operator, labels), None) if look is not None and operator.outputs else None
            if found is not None:
                rule, message, remedy = found
                where = entries.get(graph, graph.name), operator.outputs[0].name
                yield Unsound(rule, *where, message, remedy, model_type)


def _product(operator: Operator, labels: Mapping[Tensor, str]) -> Iterator[_Problem]:
    """A product's range ends far below |a b| of the operands' maxima, or its step exceeds a sum of n of these."""
    left, right, result = map(_range, (*operator.inputs[:2], operator.outputs[0]))
    if result.largest < _SMALLEST_SHARE * left.largest * right.largest:
        numbers = f"numbers up to {left.largest:.2g} and {right.largest:.2g}"
        text = f"ends at {result.largest:.2g}, but is a product of {numbers}"
        yield ("range-too-narrow", f"{text}: {_named(operator.inputs[1], labels)} has no effect", _AGAIN)
    most = left.largest * right.largest * max(operator.input(0).shape[-2:], default=0)
    if 0 < most < result.step / 2 and not any(operator.inputs[2:]):  # a bias adds to it
        text = f"has steps of {result.step:.2g}, but its operands give at most {most:.2g}: it is always 0"
        yield ("range-too-wide", text, _UNMASKED)


def _taken(operator: Operator, labels: Mapping[Tensor, str]) -> Iterator[_Problem]:
    """The smallest step of every operand exceeds the result's range; or an int16 ADD cannot broadcast."""
    result, steps = _range(operator.outputs[0]), [_range(tensor).step for tensor in operator.inputs]
    if steps and all(step > result.largest for step in steps):
        comes = f"{_named(operator.inputs[0], labels)} has steps of {min(steps):.2g}"
        text = f"ends at {result.largest:.2g}, but {comes}: all values but 0 are clipped"
        yield ("values-cut-off", text, _AGAIN)
    tensors = [tensor for tensor in (*operator.inputs, *operator.outputs) if tensor is not None]
    is_int16 = operator.name == "ADD" and all(tensor.dtype is DType.INT16 for tensor in tensors)
    shifts = is_int16 and all(step > 0 and power_of_two(step) for step in (*steps, result.step))
    if shifts and len({tensor.shape for tensor in tensors[:2]}) > 1:
        text = "broadcasts, and its three scales are powers of two (within a thousandth)"
        yield ("sum-cannot-broadcast", f"{text}: LiteRT's int16 kernel aborts the process", _WIDER)


def power_of_two(scale: float) -> bool:
    """True if LiteRT treats a scale as a power of two (`CheckedLog2` of tensorflow/lite/kernels/kernel_util.cc)."""
    exponent = math.log2(scale)
    return abs(exponent - round(exponent)) < 1e-3


def _only_the_mask(operator: Operator, _: Mapping[Tensor, str]) -> Iterator[_Problem]:
    """The unmasked logits of a SOFTMAX are within one step, so that the weights depend only on the mask."""
    logits = list(_origins(operator.inputs[0]))
    step = max((_range(tensor).step for tensor in logits if _range(tensor).step > 0), default=0.0)
    masking = logits[-1].producer
    for tensor in masking.inputs if masking is not None and masking.name in MASKING else ():
        score = _range(tensor)
        is_score = tensor is not None and tensor.producer is not None and products_above([tensor.producer])[0]
        if is_score and _MATTERS < score.largest < step:
            ends = f"without the mask they end at {score.largest:.2g}: they become equal, and attention is uniform"
            yield ("mask-in-range", f"has logits in steps of {step:.3g}, but {ends}", _UNMASKED)


_LOOKS: Final[dict[str, Callable[[Operator, Mapping[Tensor, str]], Iterator[_Problem]]]] = {
    **dict.fromkeys(operators_that(Effect.PRODUCT), _product),
    **dict.fromkeys(("QUANTIZE", "ADD", "SUB", "CONCATENATION"), _taken),
    "SOFTMAX": _only_the_mask,
}


def _range(tensor: Tensor | None) -> _Range:
    parameters = None if tensor is None or tensor.is_blockwise else tensor.quantization
    if tensor is None or parameters is None or not parameters.is_affine or tensor.dtype not in _ENDS:
        return _Range()
    step, centre = float(parameters.scale.max()), int(parameters.zero_point[0])
    largest = step * max(abs(end - centre) for end in _ENDS[tensor.dtype])
    return _Range(step, largest) if math.isfinite(step) and step > 0 else _Range()


def _named(tensor: Tensor | None, labels: Mapping[Tensor, str]) -> str:
    """The signature's name of a tensor, or of the one that it rearranges."""
    return next((f"'{labels[origin]}'" for origin in _origins(tensor) if origin in labels), "its operand")


def _origins(tensor: Tensor | None) -> Iterator[Tensor]:
    """A tensor, then the tensors that it is a rearrangement or part of, nearest first."""
    while tensor is not None:
        yield tensor
        maker = tensor.producer
        if maker is None or maker.name not in _REARRANGING:
            return
        tensor = next(iter(KINDS[maker.name].data_operands(maker.inputs)), None)


class _Use(NamedTuple):
    """A signature of the model of this type reads a cache, or writes it or its new part."""

    model: str
    signature: str
    tensor: Tensor
    verb: str

    def __str__(self) -> str:
        where = f"{self.model}/{self.signature}" if self.model else self.signature
        return f"'{where}' {self.verb} {_numbers(self.tensor)}"


def unequal_caches(models: Iterable[tuple[str, Model]]) -> Iterator[Unsound]:
    """Caches whose bytes mean other numbers to one signature than to another; `models` share caches, by their names.

    Each use is compared with the first signature that writes the cache, or else with the first that reads it.
    """
    for uses in _caches(models).values():
        first, *_ = sorted(uses, key=lambda use: use.verb == "reads")
        for use in uses if any(use.verb == "reads" for use in uses) else ():
            if _is_apart(use.tensor, first.tensor):
                step, other = _range(use.tensor).step, _range(first.tensor).step
                factor = (
                    f" (a factor of {max(step, other) / min(step, other):.3g})" if step > 0 < other else ""
                )
                text = f"is a cache that {use}, but {first}{factor}: its bytes are handed over and mean other numbers"
                yield Unsound("unequal-caches", use.signature, use.tensor.name, text, _ALIGNED, use.model)


def _caches(models: Iterable[tuple[str, Model]]) -> dict[str, list[_Use]]:
    """All uses of each cache. An input that no operator reads, or an output that is an input, has no numbers."""
    found: defaultdict[str, list[_Use]] = defaultdict(list)
    for kind, model in models:
        for signature, _ in model.entry_points():
            _, inputs, outputs = model.arguments(signature)
            read = [(name, tensor, "reads") for name, tensor in inputs.items() if tensor.consumers]
            written = [(name, tensor, "writes") for name, tensor in outputs.items() if tensor.producer]
            for name, tensor, verb in (*read, *written):
                if cache := cache_of(tensor_info(tensor, name)):
                    found[cache].append(_Use(kind, signature, tensor, verb))
    return found


def _is_apart(one: Tensor, other: Tensor) -> bool:
    """True if the same bytes stand for numbers that are more than half a step apart."""
    ours, theirs = one.quantization, other.quantization
    if one.dtype.byte_size(2) != other.dtype.byte_size(2):
        return False  # the runtime says that the buffers differ in size
    if one.dtype != other.dtype or one.is_quantized != other.is_quantized:
        return True
    if not one.is_quantized or ours is None or theirs is None or one.dtype not in _ENDS:
        return False
    if len(ours.scale) != len(theirs.scale):
        return True
    ends = np.reshape(_ENDS[one.dtype], (2, 1))
    numbers = [(ends - each.zero_point) * each.scale.astype(np.float64) for each in (ours, theirs)]
    return bool((np.abs(numbers[0] - numbers[1]) > np.maximum(ours.scale, theirs.scale) / 2).any())


def _numbers(tensor: Tensor) -> str:
    """Its type and step."""
    parameters = tensor.quantization if tensor.is_quantized else None
    if parameters is None:
        return f"as {tensor.dtype.name}"
    zero = f" around {parameters.zero_point[0]}" if parameters.zero_point.any() else ""
    return f"as {tensor.dtype.name} in steps of {parameters.scale.max():.3g}{zero}"
