"""The rule of composites: the label goes through the operators of the body, and every head gets a smaller body."""

from functools import partial

from edge_opt.attention import factors as fx
from edge_opt.attention.assembly import Assembly
from edge_opt.attention.factors import Factored
from edge_opt.attention.labels import OperandFactors
from edge_opt.attention.rule import Labelled, OneHead, Operands, Rule
from edge_opt.attention.rules import RULES
from edge_opt.base.words import name_below
from edge_opt.ir import Constants, Model, Operator, Subgraph, Tensor, topological
from edge_opt.ir.composites import BODY, COMPOSITE, body_of, checked_body
from edge_opt.ir.refusal import Refusal, RefusedError
from edge_opt.ir.walk import renamed, repeated


def with_composites(model: Model) -> OperandFactors:
    """Factors of operands, those of the model's composites too."""
    return OperandFactors({**RULES, COMPOSITE: Composite(model)})


class Composite(Rule):
    """STABLEHLO_COMPOSITE, read off its body: `rms_norm([1,N,T,H])` -> N x `rms_norm([1,1,T,H])`.

    Every tensor of the body must carry the label in one way: a mean over H leaves a label on N alone, a mean over N
    would need that axis whole. Every operator must have a rule, so no body may hold another, and no constant may differ
    between heads: they are to be the same composite. Each keeps its axes (the heads' at size 1), since attributes may
    count them, and has a body of its own: LiteRT's compiler plugins count one for each composite that they take, and
    where some share one they compile as many others by mistake (litert/compiler/plugin/compiler_plugin.cc,
    PartitionModel).
    """

    def __init__(self, model: Model) -> None:
        self._model = model
        self._inner = OperandFactors()

    def operands(self, of: Labelled) -> Operands:
        body = checked_body(self._model, of.operator)
        if len(body.outputs) != 1:
            raise RefusedError("the composite has several results", of.operator)
        labels = self._labels(body, of.factored)
        return {i: labels.get(tensor, fx.plain(tensor.shape)) for i, tensor in enumerate(body.inputs)}

    def made(self, one: OneHead) -> Tensor:
        body = body_of(self._model, one.of.operator)
        made = self._for_one_head(body, one.of.factored, f"head_{one.head}")
        self._model.subgraphs.append(made)
        read = {index: one.piece(index) for index in range(len(body.inputs))}
        place = len(self._model.subgraphs) - 1
        return one.clone(read, one.of.piece_shape(keep=True), **{BODY: place})

    def _labels(self, body: Subgraph, result: Factored) -> dict[Tensor, Factored]:
        """Factors of all that the result is made of."""
        labels = {body.outputs[0]: fx.canonical(result)}
        for operator in reversed(body.operators):
            for tensor in filter(labels.__contains__, operator.outputs):
                operands = self._inner(tensor, labels[tensor])
                if not isinstance(operands, dict):
                    missing = Refusal("no rule for an operator in the body of a composite", operator)
                    raise RefusedError(operands or missing)
                _agree(operator, operands, labels)
        return labels

    def _for_one_head(self, body: Subgraph, result: Factored, name: str) -> Subgraph:
        """The body without the heads' factors in its shapes; `name` is added to its names."""
        labels = self._labels(body, result)
        assembly = Assembly(self._model, Constants(self._model))
        pieces: dict[Tensor, Tensor] = {}
        shared: list[Operator] = []
        for tensor in body.inputs:
            own = labels.get(tensor, ())
            if fx.piece_count(own) > 1:
                shape = fx.piece_shape(own, keep=True)
                pieces[tensor] = assembly.tensor(name_below(tensor.name, name), shape, tensor)
        for operator in body.operators:
            for tensor in operator.outputs:
                of = Labelled(tensor, labels.get(tensor, ()))
                if fx.piece_count(of.factored) > 1:
                    one = OneHead(assembly, of, 0, partial(_piece, operator, pieces), name, keep_axes=True)
                    pieces[tensor] = self._inner.rules[operator.name].emit(one)
                elif tensor in labels:
                    shared.append(operator)
        arguments = [pieces.get(tensor, tensor) for tensor in body.inputs]
        made = pieces[body.outputs[0]]
        if any(made is argument for argument in arguments):
            made = assembly.reshape_to(made, assembly.tensor(name_below(made.name, "same"), made.shape, made))
        return _subgraph(f"{body.name}/{name}", arguments, [*shared, *assembly.finished(made)], made)


def _piece(operator: Operator, pieces: dict[Tensor, Tensor], index: int) -> Tensor:
    """One head's part of an operand; the operand itself, where all share it."""
    return pieces.get(operator.input(index), operator.input(index))


def _agree(operator: Operator, operands: Operands, labels: dict[Tensor, Factored]) -> None:
    """Note how an operator of a body wants what it reads, unless another wants it in another way."""
    for index, tensor in enumerate(operator.inputs):
        if tensor is None:
            continue
        if index not in operands:
            if not tensor.is_constant:
                text = "what steers an operator in the body of a composite is no constant"
                raise RefusedError(text, operator, tensor)
            continue
        own = fx.canonical(operands[index])
        if labels.setdefault(tensor, own) != own:
            raise RefusedError("the body of a composite mixes heads", operator, tensor)
        per_axis = tensor.quantization is not None and tensor.quantization.is_per_axis
        if fx.piece_count(own) > 1 and (tensor.is_constant or per_axis):
            text = "the body of a composite is not the same for all heads"
            raise RefusedError(text, operator, tensor)


def _subgraph(name: str, arguments: list[Tensor], operators: list[Operator], result: Tensor) -> Subgraph:
    """A subgraph that holds copies of these operators, of all that `result` needs among them."""
    graph = Subgraph(name)
    own = {tensor: renamed(tensor, tensor.name) for tensor in arguments}
    graph.inputs = list(own.values())
    for operator in topological(operators):
        graph.append(repeated(operator, own, lambda tensor: tensor.name))
    graph.outputs = [own[result]]
    for tensor in own.values():
        graph.add_tensor(tensor)
    return graph
