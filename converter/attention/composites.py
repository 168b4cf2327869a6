"""The rule for composites: the label passes through the operators of the body, and each head gets a smaller body.

The head axis is explained in docs/head-axis.md.
"""

from dataclasses import replace
from typing import Any

from edge_opt.attention import factors as fx
from edge_opt.attention.assembly import Assembly
from edge_opt.attention.factors import Factored
from edge_opt.attention.labelled import Factors, Labelled, OneHead, Rule
from edge_opt.attention.labels import HeadLayouts
from edge_opt.base.words import name_below
from edge_opt.ir import Constants, Model, Subgraph, Tensor
from edge_opt.ir.composites import BODY, body_of, checked_body, composites
from edge_opt.ir.refusal import RefusedError, Why
from edge_opt.ir.walk import backward_slice, copy_operator, needed_for


class CompositeRule(Rule):
    """STABLEHLO_COMPOSITE, derived from its body: `rms_norm([1,N,T,H])` -> N x `rms_norm([1,1,T,H])`.

    The label must lead to the body's inputs and lie in each tensor in one way: a mean over H does not affect a label on
    N, but a mean over N needs that axis whole. Constants must be the same for all heads, so that composites are equal.
    Each keeps its axes (the heads' at size 1) and its attributes, which some compilers read instead of the body: none
    may be a count, such as the `num_heads` of `odml.qkv_norm_rope`. Each has its own body: LiteRT's compiler plugins
    count one body per composite, and if composites share a body they compile as many other subgraphs by mistake
    (litert/compiler/plugin/compiler_plugin.cc, PartitionModel).
    """

    def __init__(self, model: Model) -> None:
        self._model = model
        self._inner = HeadLayouts()

    def operands(self, result: Labelled) -> Factors:
        body = checked_body(self._model, result.operator)
        if len(body.outputs) != 1:
            raise RefusedError(Why.OPERATOR, "the composite has several results", result.operator)
        (found,) = composites([result.operator])
        if _may_count(found.attributes):
            text = "an attribute of the composite may count heads"
            raise RefusedError(Why.OPERATOR, text, result.operator)
        mixes = "the body of a composite mixes heads"
        labels: dict[Tensor, Factored] = {}
        for inner in self._inner.upwards([Labelled(body.outputs[0], result.factored)]):
            own = fx.canonical(inner.factored)
            if labels.setdefault(inner.tensor, own) != own:
                raise inner.refusal(mixes)
            self._check(inner, body)
        cut = {tensor for tensor, own in labels.items() if fx.piece_count(own) > 1}
        shared = labels.keys() - cut
        _, above_shared = backward_slice(shared)
        if not cut.isdisjoint(above_shared):
            raise RefusedError(Why.HEADS, mixes, result.operator)
        factors: Factors = {}
        for place, argument in enumerate(body.inputs):
            factors[place] = labels.get(argument, fx.plain(argument.shape))
        return factors

    def _check(self, inner: Labelled, body: Subgraph) -> None:
        """Raise RefusedError if heads would read different parts of a constant, or the label ends inside the body."""
        tensor = inner.tensor
        if inner.pieces == 1:
            return
        has_scales = tensor.quantization is not None and tensor.quantization.is_per_axis
        if tensor.is_constant or has_scales:
            raise inner.refusal("the body of a composite is not the same for all heads")
        if tensor not in body.inputs and self._inner.is_end(inner):
            missing = RefusedError(
                Why.OPERATOR, "no rule for an operator in the body of a composite", tensor.producer
            )
            raise self._inner.refusal(inner) or missing

    def made(self, one: OneHead) -> Tensor:
        place = len(self._model.subgraphs)
        self._model.subgraphs.append(self._body(one))
        read = {index: one.piece(index) for index in one.operands}
        return one.clone(read, one.result.full_shape, **{BODY: place})

    def _body(self, one: OneHead) -> Subgraph:
        """The body for one head.

            body       %x [1,N,T,H] -> MUL -> MEAN over H -> ... -> %y [1,N,T,H]
            one head   %x [1,1,T,H] -> MUL -> MEAN over H -> ... -> %y [1,1,T,H]

        Operators whose results have no label are copied as they are.
        """
        body = body_of(self._model, one.result.operator)
        make = Assembly(self._model, Constants(self._model))
        name = f"head_{one.head}"
        pieces = {tensor: tensor for tensor in body.inputs}
        for argument, operand in zip(body.inputs, one.operands.values(), strict=True):
            if operand.pieces > 1:
                own_name = name_below(argument.name, name)
                pieces[argument] = make.tensor(own_name, operand.full_shape, argument)

        def piece(result: Labelled) -> Tensor:
            if result.pieces == 1:
                return result.tensor
            if result.tensor not in pieces:
                operands = self._inner.above(result)
                one_inside = OneHead(make, result, operands, 0, piece, name)
                pieces[result.tensor] = self._inner.made(one_inside)
            return pieces[result.tensor]

        made = piece(Labelled(body.outputs[0], one.result.factored))
        arguments = [pieces[tensor] for tensor in body.inputs]
        if made in arguments:
            same = make.tensor(name_below(made.name, "same"), made.shape, made)
            made = make.reshape_to(made, same)
        operators = [*body.operators, *make.finished(made)]
        graph = Subgraph(f"{body.name}/{name}")
        copies = {tensor: replace(tensor, is_variable=False) for tensor in arguments}
        graph.inputs = list(copies.values())
        for operator in needed_for([made], operators):
            graph.append(copy_operator(operator, copies, lambda tensor: tensor.name))
        graph.outputs = [copies[made]]
        for tensor in copies.values():
            graph.add_tensor(tensor)
        return graph


def _may_count(attributes: Any) -> bool:
    """True if attributes hold a whole number of 2 or more, or if they cannot be read."""
    if isinstance(attributes, dict):
        return any(map(_may_count, attributes.values()))
    if isinstance(attributes, list):
        return any(map(_may_count, attributes))
    if isinstance(attributes, str):
        return attributes.startswith("<")
    return type(attributes) is int and attributes > 1
