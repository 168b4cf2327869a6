"""The rule for composites: the label passes through the operators of the body, and each head gets a smaller body."""

from dataclasses import replace

from edge_opt.attention import factors as fx
from edge_opt.attention.assembly import Assembly
from edge_opt.attention.factors import Factored
from edge_opt.attention.labelled import Factors, Labelled, OneHead, Operands, Rule
from edge_opt.attention.labels import OperandFactors
from edge_opt.base.words import name_below
from edge_opt.ir import Constants, Model, Subgraph, Tensor, topological
from edge_opt.ir.composites import BODY, body_of, checked_body
from edge_opt.ir.refusal import RefusedError
from edge_opt.ir.walk import backward_slice, repeated


class Composite(Rule):
    """STABLEHLO_COMPOSITE, derived from its body: `rms_norm([1,N,T,H])` -> N x `rms_norm([1,1,T,H])`.

    The label must lead to the body's inputs and lie in each tensor in one way: a mean over H does not affect a label on
    N, but a mean over N needs that axis whole. Constants must be the same for all heads, so that composites are equal.
    Each keeps its axes (the heads' at size 1), since attributes may count them, and has its own body: LiteRT's compiler
    plugins count one body per composite, and if composites share a body they compile as many other subgraphs by mistake
    (litert/compiler/plugin/compiler_plugin.cc, PartitionModel).
    """

    def __init__(self, model: Model) -> None:
        self._model = model
        self._inner = OperandFactors()

    def operands(self, of: Labelled) -> Factors:
        body = checked_body(self._model, of.operator)
        if len(body.outputs) != 1:
            raise RefusedError("the composite has several results", of.operator)
        labels: dict[Tensor, Factored] = {}
        for inner in self._inner.upwards([Labelled(body.outputs[0], of.factored)]):
            ends = self._inner.is_end(inner)
            tensor, own = inner.tensor, inner.factored
            if labels.setdefault(tensor, fx.canonical(own)) != fx.canonical(own):
                raise RefusedError("the body of a composite mixes heads", tensor.producer, tensor)
            if fx.piece_count(own) == 1:
                continue
            if tensor.is_constant or (tensor.quantization is not None and tensor.quantization.is_per_axis):
                text = "the body of a composite is not the same for all heads"
                raise RefusedError(text, tensor.producer, tensor)
            if ends and tensor not in body.inputs:
                missing = RefusedError("no rule for an operator in the body of a composite", tensor.producer)
                raise self._inner.refusal(inner) or missing
        cut = {tensor for tensor, own in labels.items() if fx.piece_count(own) > 1}
        if cut.intersection(backward_slice(labels.keys() - cut)[1]):
            raise RefusedError("the body of a composite mixes heads", of.operator)
        return {i: labels.get(tensor, fx.plain(tensor.shape)) for i, tensor in enumerate(body.inputs)}

    def made(self, one: OneHead) -> Tensor:
        place = len(self._model.subgraphs)
        self._model.subgraphs.append(self._for_one_head(one.of, one.operands, f"head_{one.head}"))
        read = {index: one.piece(index) for index in one.operands}
        return one.clone(read, one.of.full_shape, **{BODY: place})

    def _for_one_head(self, composite: Labelled, operands: Operands, name: str) -> Subgraph:
        """The body for one head; `name` is added to its names."""
        body = body_of(self._model, composite.operator)
        assembly = Assembly(self._model, Constants(self._model))
        pieces = {
            whole: assembly.tensor(name_below(whole.name, name), operand.full_shape, whole)
            for whole, operand in zip(body.inputs, operands.values(), strict=True)
            if operand.pieces > 1
        }

        def piece(of: Labelled) -> Tensor:
            if of.pieces == 1:
                return of.tensor
            if of.tensor not in pieces:
                pieces[of.tensor] = self._inner.made(of, 0, assembly, piece, name)
            return pieces[of.tensor]

        made = piece(Labelled(body.outputs[0], composite.factored))
        arguments = [pieces.get(tensor, tensor) for tensor in body.inputs]
        if any(made is argument for argument in arguments):
            made = assembly.reshape_to(made, assembly.tensor(name_below(made.name, "same"), made.shape, made))
        new = assembly.finished(made)
        shared = backward_slice(tensor for operator in new for tensor in operator.inputs if tensor)[0]
        graph = Subgraph(f"{body.name}/{name}")
        own_tensors = {tensor: replace(tensor, is_variable=False) for tensor in arguments}
        graph.inputs = list(own_tensors.values())
        for operator in topological([*(op for op in body.operators if op in shared), *new]):
            graph.append(repeated(operator, own_tensors, lambda tensor: tensor.name))
        graph.outputs = [own_tensors[made]]
        for tensor in own_tensors.values():
            graph.add_tensor(tensor)
        return graph
