"""Rules of operators that run a subgraph with the caller's shapes, or keep a variable."""

from collections.abc import Sequence

from edge_opt.ir.refusal import RefusedError
from edge_opt.shapes.dimension import DYNAMIC, Shape, ShapeError, product
from edge_opt.shapes.rules import Call, Fact, Results, recorded_shape, rule

_MOST_WIDENINGS = 64


def common_shape(left: Shape | None, right: Shape | None) -> Shape | None:
    """The most specific shape that both shapes fit: -1 where they differ, None where the ranks do."""
    if left is None or right is None or len(left) != len(right):
        return None
    return tuple(a if a == b else DYNAMIC for a, b in zip(left, right, strict=True))


def _run(call: Call, index: int, inputs: Sequence[Fact]) -> Sequence[Fact]:
    facts = call.enter(index, inputs)
    if facts is None:
        raise RefusedError("the subgraph is not derived", call.op)
    if len(facts) != len(call.op.outputs):
        raise ShapeError(f"subgraph {index} has {len(facts)} outputs: expected {len(call.op.outputs)}")
    return facts


def _inputs(call: Call, first: int = 0) -> list[Fact]:
    """What is known of the inputs from `first` on."""
    return [Fact(shape, call.value(index)) for index, shape in enumerate(call.shapes) if index >= first]


def composite_facts(call: Call) -> Sequence[Fact]:
    """Shapes and values of a composite's (or call's) results, from its subgraph."""
    name = "decomposition_subgraph_index" if call.name == "STABLEHLO_COMPOSITE" else "subgraph"
    return _run(call, call.number(name), _inputs(call))


@rule("STABLEHLO_COMPOSITE CALL", "TFLite, stablehlo_composite.cc, Prepare (CALL has no kernel)")
def composite(call: Call) -> Results:
    """The results are those of the subgraph (a composite's decomposition), entered with the inputs."""
    return [fact.shape for fact in composite_facts(call)]


@rule("IF", "TFLite, if.cc, Prepare")
def if_(call: Call) -> Results:
    """Both branches are entered with the inputs behind the condition; where they differ, -1 or None."""
    call.require_single(0)
    indices = [call.number(f"{name}_subgraph_index") for name in ("then", "else")]
    results = [[fact.shape for fact in _run(call, index, _inputs(call, 1))] for index in indices]
    if call.is_known(0):
        return results[0 if call.numbers(0).all() else 1]
    return list(map(common_shape, *results))


@rule("WHILE", "TFLite, while.cc, Prepare_impl")
def while_(call: Call) -> Results:
    """The results have the shapes that the loop keeps: a size that the body changes is -1.

    Body and condition are entered with the inputs' shapes, then, where the body changes one, with that one
    widened, until nothing changes.
    """
    condition, body = (call.number(f"{name}_subgraph_index") for name in ("cond", "body"))
    if len(call.op.outputs) != len(call.shapes):
        text = f"it has {len(call.op.outputs)} outputs: expected {len(call.shapes)}, one for each input"
        raise ShapeError(text)
    shapes = list(call.shapes)
    call.enter(condition, list(map(Fact, shapes)))
    for _ in range(_MOST_WIDENINGS):
        facts = _run(call, body, list(map(Fact, shapes)))
        widened = [common_shape(shape, fact.shape) for shape, fact in zip(shapes, facts, strict=True)]
        if widened == shapes:
            return shapes
        shapes = widened
    raise RefusedError("the shapes of the loop do not settle", call.op)


@rule("CALL_ONCE", "TFLite, call_once.cc, Prepare")
def call_once(call: Call) -> Results:
    """The subgraph is entered; neither it nor the operator has inputs or results."""
    _run(call, call.number("init_subgraph_index"), [])
    return []


@rule("VAR_HANDLE", "TFLite, var_handle.cc, Prepare")
def var_handle(call: Call) -> Results:
    """One handle; its recorded shape stays where it holds one element."""
    recorded = recorded_shape(call.op.outputs[0])
    return [recorded if recorded is not None and product(*recorded) == 1 else ()]


@rule("READ_VARIABLE", "TFLite, read_variable.cc, Prepare (it trusts the recorded shape too)")
def read_variable(call: Call) -> Results:
    """The recorded shape: what was assigned last is known at run time only."""
    call.require_single(0)
    return [recorded_shape(call.op.outputs[0])]


@rule("ASSIGN_VARIABLE", "TFLite, assign_variable.cc, Prepare")
def assign_variable(call: Call) -> Results:
    """No result."""
    call.require_single(0)
    return []
