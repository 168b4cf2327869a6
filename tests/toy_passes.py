"""A graph and a pass that are as small as can be, for the tests of what every pass must keep to."""

from collections.abc import Callable, Iterable

from text_parser import parse

from edge_opt.ir import DType, Model, Operator, Tensor
from edge_opt.ir.refusal import Reason, Why
from edge_opt.passes import Context, Pass, Rewrite, Site, Within

CHAIN = """\
subgraph main (%x: float32[4], %o: float32[4]) {
  %a: float32[4] = ABS(%x)
  %b: float32[4] = NEG(%a)
  %other: float32[4] = EXP(%o)
  %c: float32[4] = ABS(%b)
  %y: float32[4] = NEG(%c)
  return %y, %other
}
"""


def graph_of(text: str) -> tuple[Model, dict[str, Tensor], dict[str, Operator]]:
    """A model, its tensors by name, and its operators by the name of what they define."""
    model = parse(text)
    graph = model.subgraphs[0]
    tensors = {tensor.name: tensor for tensor in graph.tensors}
    return model, tensors, {operator.output.name: operator for operator in graph.operators}


def fresh(name: str) -> Tensor:
    """A tensor that no graph knows."""
    return Tensor(name, (4,), DType.FLOAT32)


def op(model: Model, name: str, inputs: Iterable[Tensor], output: Tensor) -> Operator:
    """An operator that is in no graph."""
    return Operator(model.operator_code(name), tuple(inputs), [output])


class Double(Pass):
    """Test pass: NEG(ABS(x)) becomes SQRT(SQUARE(x)) of another sign or whatever `make` says."""

    name = "double"
    summary = "for tests"
    check = Within(0.5)

    def __init__(
        self, make: Callable[[Context, Operator, Operator], Rewrite] | None = None
    ) -> None:
        self._make = make or self.replaced

    def sites(self, context: Context) -> Iterable[Site]:
        for last in context.subgraph.operators:
            first = None if last.inputs[0] is None else last.input(0).producer
            if last.name == "NEG" and first is not None and first.name == "ABS":
                yield Site(last, lambda first=first, last=last: self._make(context, first, last))  # type: ignore[misc]
            elif last.name == "EXP":
                yield Site(last, reason=Reason(Why.PATTERN, "not a NEG"))

    @staticmethod
    def replaced(context: Context, first: Operator, last: Operator) -> Rewrite:
        middle = fresh(f"{last.output.name}/square")
        square = op(context.model, "SQUARE", [first.input(0)], middle)
        new = (square, op(context.model, "SQRT", [middle], last.output))
        return Rewrite(context.model, context.subgraph, (first, last), new)


def replacing(model: Model, old: Iterable[Operator], *new: Operator) -> Rewrite:
    """A rewrite of these operators."""
    return Rewrite(model, model.subgraphs[0], tuple(old), new)
