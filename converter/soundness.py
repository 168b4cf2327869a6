"""Find broken quantization from a model's scales, without running it.

A tensor's range is compared with those of its operands, not with a fixed scale: if it is far too narrow or too wide for
them, it cannot come from calibration on real inputs. The scale of a cache is compared with that in other signatures.
The *end* of a tensor is the largest absolute number of its range. The checks are independent of targets and change
nothing.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, islice
from typing import Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from edge_opt.attention.around import MASKING
from edge_opt.attention.axes import contracted_axis, data_of
from edge_opt.attention.labels import DEEPEST
from edge_opt.attention.rules import ELEMENTWISE, is_product
from edge_opt.base.record import Record
from edge_opt.base.words import shortened
from edge_opt.ir import DType, Model, Operator, Subgraph, Tensor
from edge_opt.ir.operators import Effect, operators_that
from edge_opt.ir.walk import walked
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
    lines: list[str] = []
    for (where, _), (first, *others) in groups.items():
        more = f" (and {len(others)} more like it)" if others else ""
        lines.append(f"{where}: '{shortened(first.tensor)}' {first.message}{more}: {first.remedy}")
    return lines


_RETYPED = frozenset({"QUANTIZE", "DEQUANTIZE"})
_REARRANGING = operators_that(Effect.REARRANGING, Effect.REPEATING, Effect.CUTTING) | _RETYPED
_MOVING = _REARRANGING | operators_that(Effect.JOINING)
_SCALED = _MOVING | ELEMENTWISE
_AGAIN = (
    "calibrate again on inputs that fill it: for a cache, on prompts much longer than one prefill"
)
_UNMASKED = "quantize again with a mask of -100, which hides as much"
_ENDS: Final = {
    DType.INT4: (-8, 7), DType.INT8: (-128, 127), DType.UINT8: (0, 255), DType.INT16: (-32768, 32767)
}  # fmt: skip


class _Range(NamedTuple):
    """The real size of an integer's step (the largest, if there are several), its largest number and its lowest.

    All are NaN, neither more nor less than any number, for a tensor that does not hold integers with scales.
    """

    step: float = math.nan
    largest: float = math.nan
    """Of either sign."""
    lowest: float = math.nan


class _Problem(NamedTuple):
    """What is wrong with a tensor, as in `Unsound`."""

    rule: str
    message: str
    remedy: str


_Labels: TypeAlias = Mapping[Tensor, str]  # the signatures' names of tensors


def broken_ranges(model: Model, model_type: str = "") -> Iterator[Unsound]:
    """Products that are always 0 or clipped, values that are always clipped, logits that the mask makes too coarse.

    Also scales that are not normal numbers above 0.
    """
    entries = defaultdict[Subgraph, list[str]](list)
    for name, graph in model.entry_points():
        entries[graph].append(name)
    labels: dict[Tensor, str] = {}
    for signature in model.signatures:
        named = chain(signature.outputs.items(), signature.inputs.items())
        labels |= {tensor: label for label, tensor in named}
    for graph in model.subgraphs:
        problems = [*_scales(graph), *_ranges(graph, labels), *_biases(graph)]
        for where in entries[graph] or [graph.name]:
            for tensor, problem in problems:
                yield Unsound(
                    problem.rule, where, tensor.name, problem.message, problem.remedy, model_type
                )


def _ranges(graph: Subgraph, labels: _Labels) -> Iterator[tuple[Tensor, _Problem]]:
    """The first problem of each operator's result."""
    for operator in graph.operators:
        check = _CHECKS.get(operator.name)
        if check is None or not operator.outputs:
            continue
        problem = check(operator, labels)
        if problem is not None:
            yield operator.outputs[0], problem


_FILLED = "calibrate again on inputs that give it values"
_ROW_OF_ZEROS = (
    "quantize again with a scale above 0 for rows or blocks of zeros, or in larger blocks"
)


def _scales(graph: Subgraph) -> Iterator[tuple[Tensor, _Problem]]:
    """Integers whose scale is 0, denormal, negative, infinite or NaN."""
    used = (tensor for operator in graph for tensor in (*operator.given, *operator.outputs))
    for tensor in dict.fromkeys(used):
        if tensor.dtype.is_float:
            continue
        scales = _scales_of(tensor, graph).astype(np.float32)
        is_normal = (scales >= np.finfo(np.float32).tiny) & np.isfinite(scales)
        wrong = scales[~is_normal]
        if wrong.size:
            text = f"has a scale of {wrong[0]:.3g} ({wrong.size} of {scales.size} are not normal numbers above 0)"
            remedy = _ROW_OF_ZEROS if tensor.is_constant else _FILLED
            text += ": XNNPACK refuses the model or crashes"
            yield tensor, _Problem("unusable-scale", text, remedy)


LARGEST_BIAS: Final = 2**31 - 1
"""The largest code of a bias that kernels add exactly, whatever its type; the smallest is its negative."""
_BIAS_SLOTS: Final = {
    "FULLY_CONNECTED": 2, "CONV_2D": 2, "DEPTHWISE_CONV_2D": 2, "TRANSPOSE_CONV": 3
}  # fmt: skip
_LARGER_STEPS = "quantize again with larger scales for the weights of these rows, as `build` does"


def _biases(graph: Subgraph) -> Iterator[tuple[Tensor, _Problem]]:
    """Biases that the quantizer clipped to 32 bits."""
    biases = dict.fromkeys(map(bias_of, graph.operators))
    for bias in filter(None, biases):
        clipped = is_clipped(bias)
        if clipped.any():
            text = f"is a bias of which {clipped.sum()} of {clipped.size} numbers are clipped to 32 bits"
            yield bias, _Problem("clipped-bias", text, _LARGER_STEPS)


def bias_of(operator: Operator) -> Tensor | None:
    """An operator's bias, if it is a constant in codes."""
    slot = _BIAS_SLOTS.get(operator.name)
    if slot is None or slot >= len(operator.inputs):
        return None
    bias = operator.inputs[slot]
    if bias is None or not bias.is_quantized or not bias.has_numbers or bias.wrong_size:
        return None
    return bias


def is_clipped(bias: Tensor) -> NDArray[np.bool_]:
    """For each code of a bias, whether it is at an end of 32 bits."""
    codes = np.asarray(bias.array(), np.int64)
    return (codes >= LARGEST_BIAS) | (codes <= -LARGEST_BIAS)


def _scales_of(tensor: Tensor, graph: Subgraph) -> NDArray[np.generic]:
    """All scales of a tensor, those of blocks from the constant that holds them; empty without quantization."""
    parameters = tensor.quantization
    if parameters is None:
        return np.empty(0)
    if not parameters.is_blockwise:
        return parameters.scale
    place = parameters.table.get("details").get("scales")
    stored = graph.tensors[place] if 0 <= place < len(graph.tensors) else tensor
    is_readable = stored.dtype.is_float and stored.has_numbers and stored.wrong_size is None
    return stored.array() if is_readable else np.empty(0)


# Share of the product of the operands' maxima. One step of an int16 softmax is 2**-15, an empty cache gives 1e-9.
_SMALLEST_SHARE: Final = 2.0**-20
# ai-edge-quantizer gives this range to a tensor that is always 0.
_DEAD: Final = 1.01e-9
_NARROWER = "calibrate again: no product of these operands fills the range"


def _product(operator: Operator, labels: _Labels) -> _Problem | None:
    """A product's range ends far below |a b| of the operands' maxima, or its step exceeds a sum of n of these."""
    left, right = map(_range, operator.inputs[:2])
    result = _range(operator.outputs[0])
    if result.largest < _SMALLEST_SHARE * left.largest * right.largest:
        numbers = f"numbers up to {left.largest:.2g} and {right.largest:.2g}"
        text = f"ends at {result.largest:.2g}, but is a product of {numbers}"
        effect = f"{_named(operator.inputs[1], labels)} has no effect"
        return _Problem("range-too-narrow", f"{text}: {effect}", _AGAIN)
    if not _is_always_0(operator):
        return None
    steps = f"has steps of {result.step:.2g}"
    text = f"{steps}, but its operands give at most {_most(operator):.2g}: it is always 0"
    dead = next((tensor for tensor in operator.inputs[:2] if _range(tensor).largest <= _DEAD), None)
    if dead is None:
        return _Problem("range-too-wide", text, _UNMASKED if _is_masked(operator) else _NARROWER)
    if dead.is_constant:
        return None  # weights of 0 are right
    named = _named(dead, labels)
    return _Problem("range-too-wide", f"{text}, as {named} was during calibration", _AGAIN)


def _most(product: Operator) -> float:
    """No sum of a product is larger; NaN without ranges."""
    left, right = map(_range, product.inputs[:2])
    terms = max(product.input(0).shape[-2:], default=0)
    return left.largest * right.largest * terms


def _is_always_0(product: Operator) -> bool:
    """True if every sum of a product rounds to 0; a bias would add to it."""
    if any(product.inputs[2:]):
        return False
    return 0 < _most(product) < _range(product.outputs[0]).step / 2


def _is_masked(product: Operator) -> bool:
    """True if a product's results lead to a SOFTMAX, masked on the way."""

    def readers(operator: Operator) -> Iterator[Operator]:
        if operator is product or operator.name in _SCALED:
            for tensor in operator.outputs:
                yield from islice(tensor.consumers, DEEPEST)

    names = {operator.name for operator in walked([product], readers, DEEPEST)}
    return "SOFTMAX" in names and not names.isdisjoint(MASKING)


def _cut_off(operator: Operator, labels: _Labels) -> _Problem | None:
    """The smallest step of every operand exceeds the result's range."""
    result = _range(operator.outputs[0])
    steps = [_range(tensor).step for tensor in operator.inputs]
    if not steps or not all(step > result.largest for step in steps):
        return None
    comes = f"{_named(operator.inputs[0], labels)} has steps of {min(steps):.2g}"
    text = f"ends at {result.largest:.2g}, but {comes}: all values but 0 are clipped"
    return _Problem("values-cut-off", text, _AGAIN)


_WIDER = "quantize again with a range of this tensor that is 1 % wider"


def _added(addition: Operator, labels: _Labels) -> _Problem | None:
    """The same for a sum; or LiteRT's int16 kernel cannot broadcast it."""
    problem = _cut_off(addition, labels)
    if problem is not None or len({tensor.shape for tensor in addition.given}) < 2:
        return problem
    for tensor in (*addition.given, *addition.outputs):
        step = _range(tensor).step
        if tensor.dtype is not DType.INT16 or not step > 0 or not power_of_two(step):
            return None
    text = "broadcasts, and its three scales are powers of two (within a thousandth)"
    return _Problem(
        "sum-cannot-broadcast", f"{text}: LiteRT's int16 kernel aborts the process", _WIDER
    )


def power_of_two(scale: float) -> bool:
    """True if LiteRT treats a scale as a power of two (`CheckedLog2` of tensorflow/lite/kernels/kernel_util.cc)."""
    exponent = math.log2(scale)
    return abs(exponent - round(exponent)) < 1e-3


# Logits of plus and minus this size give weights of which one is four times the other.
_MATTERS: Final = math.log(2)
# Weights of attention keep less than 10 dB if the logits' step exceeds 2 log 2 and this share of their end.
_COARSE_SHARE: Final = 1 / 12


def _coarse(operator: Operator, labels: _Labels) -> _Problem | None:
    """The mask of a SOFTMAX leaves so few steps for the other logits that the weights depend mostly on the mask."""
    logits = operator.input(0)
    steps = [_range(tensor).step for tensor in _origins(logits)]
    step = max((step for step in steps if step > 0), default=0.0)
    scores = _scores(logits)
    end = scores.end
    if not scores.is_masked:
        return None
    if any(map(_is_always_0, scores.products)):
        return None  # this is named at the product
    if end <= _MATTERS or step <= 2 * _MATTERS + _COARSE_SHARE * end:
        return _small_mask(logits, labels)
    effect = "they become equal, and attention is uniform"
    if end >= step:
        count = 2 * int(end / step + 0.5) + 1
        effect = f"at most {count} of them differ, and attention is coarse"
    text = (
        f"has logits in steps of {step:.3g}, but without the mask they end at {end:.2g}: {effect}"
    )
    return _Problem("mask-in-range", text, _UNMASKED)


MASK_TOO_SMALL: Final = "mask-too-small"
"""The rule of masks that subtract less than scores are apart: some tokens suffer, not all."""
_WIDER_MASK = "give the mask larger steps there, as `build` does"


def _small_mask(logits: Tensor, labels: _Labels) -> _Problem | None:
    """A mask that the model is given subtracts less than a score may be below 0, which an empty slot has."""
    *_, result = _origins(logits, _MOVING)
    addition = result.producer
    if addition is None or addition.name != "ADD":
        return None
    for scores, mask in (addition.inputs, addition.inputs[::-1]):
        origins = [*_origins(mask, _MOVING)]
        least = _range(scores).lowest
        most = np.fmax.reduce([_range(one).lowest for one in origins])
        if "mask" in labels.get(origins[-1], "") and least < most:
            text = f"has a mask of {most:.0f}, and scores down to {least:.0f}: masked keys may outweigh all others"
            return _Problem(MASK_TOO_SMALL, text, _WIDER_MASK)
    return None


class _Scores(NamedTuple):
    """The products that logits are made of, about where these end if added and scaled, and whether they are masked."""

    products: list[Operator]
    end: float
    is_masked: bool


class _Path(NamedTuple):
    """A tensor that logits are made from: it is scaled by `factor`, and the ranges on the way end at `limit`."""

    tensor: Tensor
    factor: float
    limit: float

    def above(self) -> Iterator["_Path"]:
        """The paths to the operands of this tensor's operator, up to a product."""
        maker = self.tensor.producer
        if maker is not None and maker.name in _SCALED:
            factor = self.factor * _constant_factor(maker)
            for operand in data_of(maker)[:DEEPEST]:
                # Without a range (NaN), an operand does not limit the logits.
                limit = np.fmin(self.limit, factor * _range(operand).largest)
                yield _Path(operand, factor, float(limit))


def _scores(logits: Tensor) -> _Scores:
    """The scores in logits, and their mask.

    A tensor on the way may have taken the range of the mask, so each end is the smallest of the ranges on its way and
    of what the product's operands give typically.
    """
    products: list[Operator] = []
    end = 0.0
    is_masked = False
    start = _Path(logits, 1.0, _known_end(logits))
    for path in walked([start], _Path.above, DEEPEST):
        maker = path.tensor.producer
        if maker is None:
            continue
        is_masked |= maker.name in MASKING
        if is_product(maker):
            products.append(maker)
            end = max(end, min(path.limit, path.factor * _usual_end(maker)))
    return _Scores(products, end, is_masked)


# Of the product of the operands' maxima and the root of n, with n normal numbers in each sum.
_USUAL_SHARE: Final = 1 / 6


def _usual_end(product: Operator) -> float:
    """About the largest result of a product whose operands are normal numbers with these maxima."""
    left, right = map(_known_end, product.inputs[:2])
    shape = product.input(0).shape
    count = shape[contracted_axis(product, 0)] if len(shape) > 1 else 1
    return _USUAL_SHARE * left * right * math.sqrt(max(count, 1))


def _known_end(tensor: Tensor | None) -> float:
    """The least end of a tensor and of those that it is made from, as far as these have ranges; else infinity."""
    ends = [_range(origin).largest for origin in _origins(tensor)]
    return min((end for end in ends if end > 0), default=math.inf)


def _constant_factor(operator: Operator) -> float:
    """The size of the scalar that a MUL multiplies by."""
    for tensor in operator.given if operator.name == "MUL" else ():
        if tensor.elements == 1 and tensor.has_numbers and tensor.wrong_size is None:
            return abs(tensor.real())
    return 1.0


_CHECKS: Final[dict[str, Callable[[Operator, _Labels], _Problem | None]]] = {
    **dict.fromkeys(operators_that(Effect.PRODUCT), _product),
    **dict.fromkeys(("QUANTIZE", "SUB", "CONCATENATION"), _cut_off),
    "ADD": _added,
    "SOFTMAX": _coarse,
}


def _range(tensor: Tensor | None) -> _Range:
    if tensor is None or tensor.is_blockwise or tensor.dtype not in _ENDS:
        return _Range()
    parameters = tensor.quantization
    if parameters is None or not parameters.is_affine:
        return _Range()
    step = float(parameters.scale.max())
    if not math.isfinite(step) or step <= 0:
        return _Range()
    centre = int(parameters.zero_point[0])
    low, high = (step * (end - centre) for end in _ENDS[tensor.dtype])
    return _Range(step, max(abs(low), abs(high)), low)


def _named(tensor: Tensor | None, labels: _Labels) -> str:
    """The signature's name of a tensor, or of the one that it rearranges."""
    for origin in _origins(tensor):
        if origin in labels:
            return f"'{labels[origin]}'"
    return "its operand"


def _origins(tensor: Tensor | None, through: frozenset[str] = _REARRANGING) -> Iterator[Tensor]:
    """A tensor, then the nearest tensors that it is a rearrangement or part of, nearest first."""
    for _ in range(DEEPEST):
        if tensor is None:
            return
        yield tensor
        maker = tensor.producer
        if maker is None or maker.name not in through:
            return
        tensor = next(iter(data_of(maker)), None)


class _Use(NamedTuple):
    """A signature of the model of this type reads a cache, or writes it or its new part."""

    model: str
    signature: str
    tensor: Tensor
    verb: str

    def __str__(self) -> str:
        where = f"{self.model}/{self.signature}" if self.model else self.signature
        return f"'{where}' {self.verb} {_numbers(self.tensor)}"


_ALIGNED = (
    "quantize again with one range for each cache, as litert-torch's align_kv_cache_params sets"
)


def unequal_caches(models: Iterable[tuple[str, Model]]) -> Iterator[Unsound]:
    """Caches whose bytes mean other numbers to one signature than to another; `models` share caches, by their names.

    Each use is compared with the first signature that writes the cache, or else with the first that reads it.
    """
    for uses in _caches(models).values():
        writers = [use for use in uses if use.verb == "writes"]
        if len(writers) == len(uses):
            continue
        first, *_ = writers or uses
        for use in uses:
            if not _is_apart(use.tensor, first.tensor):
                continue
            small, large = sorted([_range(use.tensor).step, _range(first.tensor).step])
            factor = f" (a factor of {large / small:.3g})" if small > 0 and large > 0 else ""
            text = f"is a cache that {use}, but {first}{factor}: its bytes are handed over and mean other numbers"
            yield Unsound(
                "unequal-caches", use.signature, use.tensor.name, text, _ALIGNED, use.model
            )


def _caches(models: Iterable[tuple[str, Model]]) -> dict[str, list[_Use]]:
    """All uses of each cache. An input that no operator reads, or an output that is an input, has no numbers."""
    found: defaultdict[str, list[_Use]] = defaultdict(list)
    for kind, model in models:
        for signature, _ in model.entry_points():
            _, inputs, outputs = model.arguments(signature)
            for verb, arguments in (("reads", inputs), ("writes", outputs)):
                for name, tensor in arguments.items():
                    cache = cache_of(tensor_info(tensor, name))
                    is_used = tensor.readers if verb == "reads" else tensor.producer
                    if cache and is_used:
                        found[cache].append(_Use(kind, signature, tensor, verb))
    return found


def _is_apart(one: Tensor, other: Tensor) -> bool:
    """True if the same bytes stand for numbers that are more than half a step apart."""
    ours = one.quantization
    theirs = other.quantization
    if one.dtype.byte_size(2) != other.dtype.byte_size(2):
        return False  # the runtime says that the buffers differ in size
    if one.dtype != other.dtype or one.is_quantized != other.is_quantized:
        return True
    if not one.is_quantized or ours is None or theirs is None or one.dtype not in _ENDS:
        return False
    if len(ours.scale) != len(theirs.scale):
        return True
    ends = np.reshape(_ENDS[one.dtype], (2, 1))
    our_ends = (ends - ours.zero_point) * ours.scale.astype(np.float64)
    their_ends = (ends - theirs.zero_point) * theirs.scale.astype(np.float64)
    half_step = np.maximum(ours.scale, theirs.scale) / 2
    return bool((np.abs(our_ends - their_ends) > half_step).any())


def _numbers(tensor: Tensor) -> str:
    """Its type and step."""
    parameters = tensor.quantization if tensor.is_quantized else None
    if parameters is None:
        return f"as {tensor.dtype.name}"
    zero = f" around {parameters.zero_point[0]}" if parameters.zero_point.any() else ""
    return f"as {tensor.dtype.name} in steps of {parameters.scale.max():.3g}{zero}"
