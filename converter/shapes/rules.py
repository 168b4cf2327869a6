"""The table of rules: which function derives the results of which operator. It contains no rule itself."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

from edge_opt.ir import Operator
from edge_opt.ir.operators import KINDS
from edge_opt.ir.refusal import RefusedError
from edge_opt.shapes.call import Call, Constant, Enter, Results
from edge_opt.shapes.dimension import Shape, ShapeError, as_shape

Rule: TypeAlias = Callable[[Call], Results]


class RuleEntry(NamedTuple):
    """A rule, and where it comes from."""

    rule: Rule
    source: str


RULES: dict[str, RuleEntry] = {}


def rule(names: str, source: str) -> Callable[[Rule], Rule]:
    """Enter a rule for the named operators (the schema's names, one after the other), and say where it comes from."""

    def enter(function: Rule) -> Rule:
        for name in names.split():
            assert name not in RULES, f"{name} has two rules"
            RULES[name] = RuleEntry(function, source)
        return function

    return enter


def apply(call: Call) -> Results:
    """Derive the shapes of the results by the operator's rule, None for each where too little is known.

    Raises:
        ShapeError: the inputs cannot go together; the sentence has no place yet.
    """
    outputs = call.op.outputs
    reason = KINDS[call.name].misfit(call.op.inputs, outputs)
    if reason is not None:
        raise ShapeError(f"it {reason}")
    try:
        results = RULES[call.name].rule(call)
    except RefusedError:
        return [None] * len(outputs)
    assert len(results) == len(outputs), f"{call.name}: {len(results)} results"
    return results


def infer_operator(
    op: Operator,
    input_shapes: Sequence[Shape | None],
    constant: Constant = lambda _: None,
    enter: Enter = lambda *_: None,
) -> Results:
    """Infer the shapes of an operator's results.

    Args:
        op: the operator; only its name, options and the names and dtypes of its tensors are read, recorded
            shapes are not.
        input_shapes: one for each input, -1 a dynamic dimension, None for an unranked tensor and
            for an optional input that is left out.
        constant: gives the value of input i where it is known (the shape operand of a RESHAPE), else None.
        enter: derives the outputs of a subgraph, for control flow and composites; without it those are None.

    Returns:
        One shape for each output, None where not even the rank is known (and for operators without a rule).

    Raises:
        ShapeError: the inputs cannot go together; names the operator, tensors, axes and sizes.
    """
    if op.name not in RULES:
        return [None] * len(op.outputs)
    try:
        if len(input_shapes) != len(op.inputs):
            raise ShapeError(f"{len(input_shapes)} input shapes for {len(op.inputs)} inputs")
        shapes = [as_shape(shape, f"input {index}") for index, shape in enumerate(input_shapes)]
        return apply(Call(op, shapes, constant, enter))
    except ShapeError as error:
        raise error.at(op.name) from None
