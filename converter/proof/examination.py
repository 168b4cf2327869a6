"""Runs one region on a worker and decides whether the demand is met, with the wording for the report.

A large region is also run at a fraction of its lengths: every size of 64 or more, in shapes and in constants such as
axes and sizes, is divided by 8, so both versions still cut, join and transpose as before. A constant keeps one element
of each block of 8 along its long axes. Blocks of a whole constant are those of its parts, whether these are the heads
of an axis `(N)(H)` or the segments of an axis `S + T`. Otherwise both may differ at a fraction although they are equal.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_opt.base.errors import ModelFormatError
from edge_opt.base.words import many
from edge_opt.ir import Buffer, DType, Model, Tensor, to_tables
from edge_opt.ir.refusal import RefusedError
from edge_opt.passes.contract import Proof, Ran
from edge_opt.passes.rewrite import Demand
from edge_opt.runtime.extremes import KINDS
from edge_opt.runtime.metrics import Difference
from edge_opt.runtime.pair import DRAWS, VERSIONS, Outcome, ProofRequest
from edge_opt.runtime.protocol import RuntimeCrashed, RuntimeFailed, RuntimeRefused, RuntimeTimedOut
from edge_opt.runtime.runner import Worker
from edge_opt.schema.data import Data
from edge_opt.schema.writer import model_bytes
from edge_opt.shapes.inference import check_operators

FACTOR = 8
_LONG = 64
_ELEMENT = 8  # multiply-adds that take as long as computing and comparing one element
_IN_FULL = 1 << 26  # regions of at most this many multiply-adds are run in full
_LEAST_SECONDS = 60.0
_SLOWEST = 2e7  # multiply-adds per second: a hundredth of the slowest kernel's, to allow for a busy machine
_ROUNDING = 1e-6  # relative, for floats whose rounding in optimized kernels depends on shape
_STEPS = {DType.INT16: 128}  # by how much such a rounding may change codes, by type; otherwise one


@dataclass(frozen=True)
class Question:
    """Both versions of a region cut out as models, the inputs to run them on, and the demand.

    `name` identifies the region in messages; its lengths were divided by `divided`.
    """

    before: Model
    after: Model
    name: str
    demand: Demand
    request: ProofRequest
    divided: int = 1

    @cached_property
    def cost(self) -> int:
        """Multiply-adds of one run of both versions."""
        return multiply_adds(self.before) + multiply_adds(self.after)

    @cached_property
    def rounds_by_shape(self) -> str:
        """The operator whose optimized kernel rounds by shape, if bits must be equal; empty if there is none."""
        graphs = [*self.before.subgraphs, *self.after.subgraphs] if self.demand.kind == "bitwise" else []
        for operator in (operator for graph in graphs for operator in graph):
            if operator.name == "ADD" and operator.output.dtype is DType.INT16:
                return "int16 ADD"  # AVX2 for operands of one shape, another kernel where one broadcasts
            is_float_softmax = operator.name == "SOFTMAX" and operator.output.dtype.is_float
            if is_float_softmax and operator.option("beta") != 1.0:
                return "SOFTMAX with beta"  # XNNPACK declines it; the fallback rounds by the number of rows
        return ""


def unproved(demand: Demand, reason: str, *, is_open: bool = True) -> Proof:
    """A failed verification, or, if `is_open`, one without a result either way."""
    return Proof(demand, holds=False, bitwise=False, max_abs=math.inf, reason=reason, open=is_open)


def examine(worker: Worker, question: Question) -> Proof:
    """Verify that the demand is met; open without a result, or if no inputs distinguish right from wrong.

    A small region is run in full, on both kernel sets. A large one is run at a fraction of its lengths on both, extreme
    inputs included; then in full, on XNNPACK's kernels if these must give the same bits, else on the reference kernels.
    Only a difference in full is a verdict: a large region that does not run at a fraction of its lengths, or differs
    there alone, is treated like a small one.
    """
    is_open = True
    try:
        return _at_size(worker, question) or _ask(worker, question)[0]
    except RuntimeTimedOut as error:
        reason = f"verification timed out: {error}, or skip verification (--verify none)"
    except ModelFormatError as error:
        reason, is_open = f"the region alone is not a valid model: {error}", False
    except RuntimeRefused as error:
        alone = error.reason.startswith(VERSIONS[0])
        what = "cannot run the region alone" if alone else "refuses the new region"
        reason, is_open = f"the runtime {what}: {error.reason.split(': ', 1)[-1]}", False
    except RuntimeFailed as error:
        reason = f"the verification could not be run: {error}"
    return unproved(question.demand, reason, is_open=is_open)


def _at_size(worker: Worker, question: Question) -> Proof | None:
    """The answer for a large region; None if it is small, or must be run like a small one."""
    request = question.request
    # Clipping, and demands other than bitwise, may depend on particular elements, which a fraction could miss.
    if question.cost <= _IN_FULL or request.limits or question.demand.kind != "bitwise":
        return None
    try:
        part = replace(question, before=shrunk(question.before), after=shrunk(question.after), divided=FACTOR)
        in_part, scale = _ask(worker, replace(part, request=replace(request, parts=None)))
    except (RefusedError, RuntimeRefused, RuntimeCrashed, ModelFormatError):
        return None
    if in_part.open:
        return None
    # The fastest kernels that run the region and must give the same bits.
    supported = [kernels for kernels in request.kernels if Ran(kernels, FACTOR) in in_part.ran]
    only = supported[-1 if question.rounds_by_shape else 0]
    # The deviation of a sum grows with the square root of the number of products.
    request = replace(request, extremes=(), scales=(scale / FACTOR**0.25,), kernels=(only,))
    in_full, _ = _ask(worker, replace(question, request=request))
    if not in_full.holds:
        return in_full
    if not in_part.holds:
        return None
    # Both meet the same demand, and the full run shows no difference.
    return replace(in_part, ran=(*in_full.ran, *(each for each in in_part.ran if each.kernels != only)))


def _ask(worker: Worker, question: Question) -> tuple[Proof, float]:
    """Run the region; the verdict, and the scale of operands at which results are most sensitive."""
    request = question.request
    runs = len(request.kernels) * (len(request.scales) + DRAWS * len(request.extremes))
    limit = _LEAST_SECONDS + question.cost * runs / _SLOWEST
    before, after = (model_bytes(to_tables(model)) for model in (question.before, question.after))
    prove = partial(worker.prove, before, after, request, seconds=limit, where=question.name)
    try:
        outcome = prove()
    except RuntimeCrashed:  # it may have been killed between requests: not the region's fault
        outcome = prove()
    return judge(outcome, question), outcome.scale


def judge(outcome: Outcome, question: Question) -> Proof:
    """The verdict on the figures; open if both versions agree, but many wrong ones would, too."""
    demand, violated = question.demand, ""
    for kind, found in outcome.found.items():
        if not violated and not _holds(found, question):
            where = f" on {KINDS[kind]}" if kind else ""
            violated = f"the new region differs{where}: {_figures(found)}, but must be {demand.words}"
    if not violated and outcome.untold:
        reason = f"cannot be verified: {outcome.untold}, so a wrong rewrite would give the same result"
        return unproved(demand, reason)
    ran = outcome.found[""]
    differences = [difference for found in ran.values() for difference in found]
    exact = not question.request.limits and not question.rounds_by_shape
    steps = max((each.steps for each in differences if each.steps is not None), default=None)
    return Proof(
        demand,
        holds=not violated,
        bitwise=exact and all(difference.bitwise for difference in differences),
        max_abs=max(difference.max_abs for difference in differences),
        steps=steps,
        reason=violated,
        note="; ".join(_notes(question, ran, differences, steps)),
        ran=tuple(Ran(kernels, question.divided) for kernels in ran),
        extremes=len(outcome.found) > 1,
    )


def _holds(found: Mapping[str, Sequence[Difference]], question: Question) -> bool:
    """True if the demand is met; optimized kernels that round by shape need only stay within a bound."""
    demand = question.demand

    def met(tensor: Tensor, difference: Difference, kernels: str) -> bool:
        steps = math.inf if difference.steps is None else difference.steps
        figures = {"relative": difference.max_rel, "absolute": difference.max_abs, "steps": steps}
        if demand.kind in figures:
            return figures[demand.kind] <= demand.tolerance
        if not question.rounds_by_shape or kernels == "reference" or "reference" not in found:
            return False
        return difference.max_rel <= _ROUNDING or steps <= _STEPS.get(tensor.dtype, 1)

    outputs = question.before.subgraphs[0].outputs
    return all(
        difference.bitwise or met(tensor, difference, kernels)
        for kernels, differences in found.items()
        for tensor, difference in zip(outputs, differences, strict=True)
    )


def _notes(
    question: Question, ran: Collection[str], differences: Sequence[Difference], steps: int | None
) -> Iterator[str]:
    """Remarks on kernels that were left out and on optimized kernels that are held to a bound."""
    if len(ran) < len(question.request.kernels):
        yield f"on {', '.join(ran)} kernels only: the others cannot run the region on its own"
    if not question.rounds_by_shape:
        return
    note = f"optimized kernels round {question.rounds_by_shape} differently for some shapes"
    if "reference" not in ran:
        yield f"{note}, and the reference kernels cannot run it"
    elif steps is not None:
        most = max(_STEPS.get(tensor.dtype, 1) for tensor in question.before.subgraphs[0].outputs)
        yield f"{note}: results may differ by up to {many(most, 'step')} (here by {steps})"
    else:
        worst = max(difference.max_rel for difference in differences)
        yield f"{note}: results may differ by up to {_ROUNDING:g} of their range (here by {worst:.1e})"


def _figures(found: Mapping[str, Sequence[Difference]]) -> str:
    worst = {kernels: max(each, key=lambda difference: difference.max_abs) for kernels, each in found.items()}
    return "; ".join(
        f"{most.differing} of {most.elements} elements, by up to {most.max_abs:.3g}"
        f"{f' ({most.steps} steps)' if most.steps else ''} on {kernels}"
        for kernels, most in worst.items()
    )


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


def shrunk(model: Model) -> Model:
    """A copy of the model at a fraction of its lengths; RefusedError if its sizes do not divide, or then do not fit."""
    model = deepcopy(model)
    for tensor in (tensor for graph in model.subgraphs for tensor in graph.tensors):
        shape = tuple(map(_shorter, tensor.shape))
        if tensor.is_constant:
            tensor.buffer = _part(tensor, shape)
        tensor.shape = shape
    for operator in (operator for graph in model.subgraphs for operator in graph):
        if operator.options is not None and operator.options.fields.get("new_shape") is not None:
            sizes = [_shorter(int(size)) for size in operator.options.get("new_shape")]
            operator.options = operator.options.copy()
            operator.options.set("new_shape", np.array(sizes, np.int32))
    # XNNPACK does not check that a RESHAPE of a constant stays within its bytes.
    check_operators((operator for graph in model.subgraphs for operator in graph), model.subgraphs)
    return model


def _part(tensor: Tensor, shape: tuple[int, ...]) -> Buffer:
    """One element of each block of 8 along long axes; unquantized integers are sizes and places, which are divided."""
    scales = tensor.quantization
    is_cut = scales is not None and scales.is_per_axis and shape[scales.dimension] < len(scales.scale)
    if is_cut or not tensor.has_numbers:
        raise RefusedError("a constant has no such part")
    array = tensor.array()
    part = _one_of_each_block(array, shape)
    if array.dtype.kind in "iu" and not tensor.is_quantized:
        if shape == tensor.shape:
            part = np.array([_shorter(int(value)) for value in array.ravel()], array.dtype).reshape(shape)
        elif array.max() >= _LONG - 1:  # a table of places along a long axis
            part = part // FACTOR
    return Buffer(Data(part.tobytes()))


def _one_of_each_block(array: NDArray[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    """The first element of each block that differs from the one at its beginning, so a single wrong one is kept."""
    steps = [FACTOR if part < whole else 1 for whole, part in zip(array.shape, shape, strict=True)]
    both = [size for pair in zip(shape, steps, strict=True) for size in pair]
    order = [*range(0, len(both), 2), *range(1, len(both), 2)]
    blocks = array.reshape(both).transpose(order).reshape(*shape, math.prod(steps))
    place = (blocks != blocks[..., :1]).argmax(-1)
    return np.take_along_axis(blocks, place[..., None], -1)[..., 0]


def _shorter(size: int) -> int:
    if size >= _LONG and size % FACTOR:
        raise RefusedError(f"{size} is not a multiple of {FACTOR}")
    return size // FACTOR if size >= _LONG else size
