"""The rule for composites: the label passes through the operators of the body, and each head gets a smaller body."""

from edge_opt.attention import factors as fx
from edge_opt.attention.assembly import Assembly
from edge_opt.attention.factors import Factored
from edge_opt.attention.labels import OperandFactors
from edge_opt.attention.rules import RULES, Labelled, OneHead, Operands, Rule
from edge_opt.base.words import name_below
from edge_opt.ir import Constants, Model, Subgraph, Tensor, topological
from edge_opt.ir.composites import BODY, COMPOSITE, body_of, checked_body
from edge_opt.ir.refusal import Refusal, RefusedError
from edge_opt.ir.walk import backward_slice, renamed, repeated


def with_composites(model: Model) -> OperandFactors:
    """Factors of operands, including those of the model's composites."""
    return OperandFactors({**RULES, COMPOSITE: Composite(model)})


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

    def operands(self, of: Labelled) -> Operands:
        body = checked_body(self._model, of.operator)
        if len(body.outputs) != 1:
            raise RefusedError("the composite has several results", of.operator)
        labels: dict[Tensor, Factored] = {}
        for tensor, own, ends in self._inner.upwards([(body.outputs[0], of.factored)]):
            if labels.setdefault(tensor, fx.canonical(own)) != fx.canonical(own):
                raise RefusedError("the body of a composite mixes heads", tensor.producer, tensor)
            if fx.piece_count(own) == 1:
                continue
            if tensor.is_constant or (tensor.quantization is not None and tensor.quantization.is_per_axis):
                text = "the body of a composite is not the same for all heads"
                raise RefusedError(text, tensor.producer, tensor)
            if ends and tensor not in body.inputs:
                reason = self._inner(tensor, own)
                missing = Refusal("no rule for an operator in the body of a composite", tensor.producer)
                raise RefusedError(reason if isinstance(reason, Refusal) else missing)
        cut = {tensor for tensor, own in labels.items() if fx.piece_count(own) > 1}
        if cut.intersection(backward_slice(labels.keys() - cut)[1]):
            raise RefusedError("the body of a composite mixes heads", of.operator)
        return {i: labels.get(tensor, fx.plain(tensor.shape)) for i, tensor in enumerate(body.inputs)}

    def made(self, one: OneHead) -> Tensor:
        place, operands = len(self._model.subgraphs), self.operands(one.of)
        self._model.subgraphs.append(self._for_one_head(one.of, operands, f"head_{one.head}"))
        read = {index: one.piece(index) for index in operands}
        return one.clone(read, fx.piece_shape(one.of.factored, keep=True), **{BODY: place})

    def _for_one_head(self, composite: Labelled, operands: Operands, name: str) -> Subgraph:
        """The body for one head; `name` is added to its names."""
        body, assembly = (
            body_of(self._model, composite.operator),
            Assembly(self._model, Constants(self._model)),
        )
        pieces: dict[Tensor, Tensor] = {}
        for whole, own in zip(body.inputs, operands.values(), strict=True):
            if fx.piece_count(own) > 1:
                shape = fx.piece_shape(own, keep=True)
                pieces[whole] = assembly.tensor(name_below(whole.name, name), shape, whole)

        def piece(tensor: Tensor, own: Factored) -> Tensor:
            if fx.piece_count(own) == 1:
                return tensor
            if tensor not in pieces:
                of, read = Labelled(tensor, own), self._inner.known(tensor, own)

                def part(index: int) -> Tensor:
                    return piece(of.operator.input(index), read[index])

                rule = self._inner.rules[of.operator.name]
                pieces[tensor] = rule.emit(OneHead(assembly, of, 0, part, name))
            return pieces[tensor]

        made, arguments = piece(body.outputs[0], composite.factored), [pieces.get(t, t) for t in body.inputs]
        if any(made is argument for argument in arguments):
            made = assembly.reshape_to(made, assembly.tensor(name_below(made.name, "same"), made.shape, made))
        new = assembly.finished(made)
        shared = backward_slice(tensor for operator in new for tensor in operator.inputs if tensor)[0]
        graph = Subgraph(f"{body.name}/{name}")
        own_tensors = {tensor: renamed(tensor, tensor.name) for tensor in arguments}
        graph.inputs = list(own_tensors.values())
        for operator in topological([*(op for op in body.operators if op in shared), *new]):
            graph.append(repeated(operator, own_tensors, lambda tensor: tensor.name))
        graph.outputs = [own_tensors[made]]
        for tensor in own_tensors.values():
            graph.add_tensor(tensor)
        return graph
