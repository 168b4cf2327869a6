"""Verifies rewrites: cuts out both versions of a region as small models, which a worker runs on the same inputs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from hashlib import sha256
from typing import NamedTuple

from edge_opt.base.words import shortened
from edge_opt.ir import DType, Model, Operator, OperatorCode, Quantization, Subgraph, Tensor
from edge_opt.ir.operators import BUILTIN_OPERATORS, Effect, operators_that
from edge_opt.ir.walk import cut_out, is_pure, needed_for, walked
from edge_opt.passes.contract import Proof
from edge_opt.passes.rewrite import Demand, Rewrite
from edge_opt.proof.examination import Question, examine, unproved
from edge_opt.runtime.extremes import KINDS
from edge_opt.runtime.inputs import InputHint, Side
from edge_opt.runtime.pair import Parts, ProofRequest
from edge_opt.runtime.runner import Worker

_PRODUCTS = operators_that(Effect.PRODUCT)
_OPERANDS: tuple[Side, ...] = ("left", "right", "added")
_QUANTIZED = Quantization.affine(1.0, 0)
_DEQUANTIZE = OperatorCode(BUILTIN_OPERATORS["DEQUANTIZE"], 3)
# The operators of a composite's decomposition are counted in its own subgraph.
_MOVES = {*operators_that(Effect.REARRANGING, Effect.CUTTING, Effect.JOINING), "STABLEHLO_COMPOSITE"}


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
        return all(counterpart.get(ours) == theirs for ours, theirs in zip(self.new, other.new, strict=True))


class RegionProver(AbstractContextManager["RegionProver"]):
    """Runs regions in a child process; of several regions with the same structure (see `Structure`), only the first.

    Args:
        model: the model's name, for messages.
        seed: seed of the random inputs.

    A run may take a minute plus the time that its multiply-adds take on a very slow machine.
    """

    def __init__(self, *, model: str = "", seed: int = 0) -> None:
        self._worker, self._seed = Worker(), seed
        self._of_model = f" of model '{model}'" if model else ""
        self._answers = defaultdict[Hashable, list[tuple[Structure, Proof]]](list)

    def __exit__(self, *_: object) -> None:
        self._worker.close()

    def start(self) -> None:
        """Start the child now, so that loading the runtime overlaps with other work."""
        self._worker.start()

    def prove(self, rewrite: Rewrite, demand: Demand) -> Proof:
        """Verify that the new region matches the old one as demanded; a failure is returned with its reason.

        A region that only differs in its numbers from one that was verified gets the same answer, if there is one.

        Raises:
            RuntimeUnavailable: no worker can be started, so no region can be verified.
        """
        if not rewrite.changed():
            return unproved(demand, "nothing reads its results, so there is nothing to compare")
        anchor = f"'{rewrite.subgraph.name}' up to '{shortened(rewrite.old[-1].outputs[0].name)}'"
        before, after, request = _against_reference(rewrite) or _against_old(rewrite, demand)
        request = replace(request, seed=self._seed)
        own = structure(before, after)
        answers = self._answers[demand, request, own.form]
        for known, answer in answers:
            if known == own or (answer.holds and known.covers(own)):
                return answer
        question = Question(before, after, f"{anchor}{self._of_model}", demand, request)
        proof = examine(self._worker, question)
        if not proof.open:
            answers.append((own, replace(proof, like=anchor)))
        return proof


def _against_old(rewrite: Rewrite, demand: Demand) -> tuple[Model, Model, ProofRequest]:
    inputs, outputs, mask = rewrite.inputs(), rewrite.outputs(), rewrite.mask
    both: list[Sequence[Operator]] = [rewrite.old, rewrite.new]
    if all(is_pure(operator, rewrite.model.subgraphs) for operators in both for operator in operators):
        outputs = rewrite.changed()
        both = [needed_for(outputs, operators) for operators in both]
    before, after = (cut_out(rewrite.model, operators, inputs, outputs) for operators in both)
    sides = _sides(before.subgraphs[0])
    hints = [InputHint(side=sides.get(tensor, "other")) for tensor in before.subgraphs[0].inputs]
    if mask is not None and not mask.tensor.is_constant:
        hints[inputs.index(mask.tensor)] = InputHint("mask", mask.masked, mask.opened)
    parts = None
    if rewrite.parts is not None and rewrite.parts[0] in outputs:
        factors = [factor for axis in rewrite.parts[1] for factor in axis]
        labelled = tuple(place for place, factor in enumerate(factors) if factor.stride)
        parts = Parts(outputs.index(rewrite.parts[0]), tuple(f.size for f in factors), labelled)
    extremes = () if demand.kind == "relative" else tuple(kind for kind in KINDS if kind not in demand.spared)
    request = ProofRequest(tuple(hints), limits=rewrite.clipped, parts=parts, extremes=extremes)
    return before, after, request


def _against_reference(rewrite: Rewrite) -> tuple[Model, Model, ProofRequest] | None:
    """The reference, the new region and a request for every value of the input; None without a reference."""
    reference = rewrite.reference
    if reference is None:
        return None
    (result,), (position,) = rewrite.changed(), rewrite.inputs()
    new, real = needed_for([result], rewrite.new), result
    if not result.dtype.is_float:
        real = Tensor("real", result.shape, DType.FLOAT32)
        new.append(Operator(_DEQUANTIZE, [result], [real]))
    before = cut_out(Model(), reference.operators, [position], [reference.result])
    return before, cut_out(Model(), new, [position], [real]), ProofRequest(every=reference.count)


def _sides(graph: Subgraph) -> dict[Tensor, Side]:
    """The side of every tensor that leads to a SOFTMAX: added to the logits, or left or right of a product."""

    def above(reached: tuple[Tensor, Side]) -> Iterator[tuple[Tensor, Side]]:
        tensor, side = reached
        if tensor.producer is not None:
            inputs = tensor.producer.inputs
            is_product = side == "added" and tensor.producer.name in _PRODUCTS
            sides = _OPERANDS if is_product else (side,) * len(inputs)
            yield from ((t, s) for t, s in zip(inputs, sides, strict=False) if t and not t.is_constant)

    starts: list[tuple[Tensor, Side]] = [(op.input(0), "added") for op in graph if op.name == "SOFTMAX"]
    return dict(walked(starts, above))


def structure(before: Model, after: Model) -> Structure:
    """The structure of a region, given both versions as `cut_out` makes them."""
    (one, old), (other, new) = map(_without_numbers, (before, after))
    return Structure((one, other), old, new, _computing(after) <= _computing(before))


def _without_numbers(model: Model) -> tuple[Hashable, tuple[Hashable, ...]]:
    """A model without its numbers; the quantization parameters, and digests of constants, in order."""
    kept, numbers = list[Hashable](), list[Hashable]()
    for graph in model.subgraphs:
        places = {tensor: place for place, tensor in enumerate(graph.tensors)}
        for tensor in graph.tensors:
            content = None if tensor.buffer is None else tensor.buffer.data
            if content is not None:
                # Plain integers are axes, sizes and orders, which are structure.
                listed = numbers if tensor.dtype.is_float or tensor.is_quantized else kept
                listed.append((tensor.dtype, sha256(content.view().data).digest()))
            plain = tensor
            if tensor.quantization is not None and tensor.is_quantized:
                numbers.append(tensor.quantization.key())
                plain = replace(tensor, quantization=_QUANTIZED)
            kept.append((content is None, plain.kind, plain.is_variable))
        for operator in graph:
            tables = operator.options, operator.table
            ends = operator.inputs, operator.outputs, operator.intermediates
            kept.append(
                (
                    operator.code,
                    tuple(None if table is None else table.key() for table in tables),
                    tuple(tuple(tensor and places[tensor] for tensor in tensors) for tensors in ends),
                )
            )
        kept.append(tuple(tuple(map(places.get, tensors)) for tensors in (graph.inputs, graph.outputs)))
    return tuple(kept), tuple(numbers)


def _computing(model: Model) -> set[Hashable]:
    """The operators that do more than move data, with their options."""
    return {
        (operator.code, options and options.key())
        for graph in model.subgraphs
        for operator, options in ((operator, operator.options) for operator in graph)
        if operator.name not in _MOVES or (options and options.fields.get("fused_activation_function"))
    }
