"""Use-def chains and execution order hold under every edit of a subgraph."""

from collections import Counter
from copy import deepcopy

import numpy as np
import pytest
from ai_edge_litert.interpreter import Interpreter
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_opt import ir
from edge_opt.ir import (
    DType,
    Operator,
    OperatorCode,
    Subgraph,
    Tensor,
    load,
    to_bytes,
    topological,
)
from edge_opt.ir.cleanup import parts_in_use, remove_unused
from edge_opt.ir.dtypes import Quantization
from edge_opt.ir.operators import BUILTIN_OPERATORS
from edge_opt.ir.parse import parse
from edge_opt.ir.refusal import RefusedError
from edge_opt.ir.text import to_text
from edge_opt.ir.walk import cut_signature, placements, producers, reads, still_needed, walked
from edge_opt.schema import Data, new_table
from edge_opt.verification.rewrite import remove_dead

ADD = OperatorCode(0)
# Row 0 has columns 0 and 5, row 1 column 7, row 2 none.
ROWS, COLUMNS, KEPT = [0, 2, 3, 3], [0, 5, 7], [2.0, 3.0, 5.0]


def tensor(name: str) -> Tensor:
    return Tensor(name, (2,), DType.FLOAT32)


def op(*inputs: Tensor | None, outputs: int = 1, name: str = "t") -> Operator:
    return Operator(ADD, inputs, [tensor(f"{name}{i}") for i in range(outputs)])


def names(graph: Subgraph) -> list[str]:
    return [operator.outputs[0].name for operator in graph.operators]


def check(graph: Subgraph, *tensors: Tensor) -> None:
    """Everything that the chains say, derived anew from the operators alone."""
    assert len(graph) == len(graph.operators)
    uses: dict[Tensor, dict[Operator, None]] = {known: {} for known in tensors}
    for operator in graph.operators:
        assert operator.subgraph is graph
        for read in operator.inputs:
            if read is not None:
                uses.setdefault(read, {})[operator] = None
        for output in operator.outputs:
            assert output.producer is operator
            uses.setdefault(output, {})
    for read, expected in uses.items():
        assert Counter(read.consumers) == Counter([*expected]), "each reader once"


def chain(count: int) -> tuple[Subgraph, list[Operator]]:
    """x -> t0 -> t1 -> ..."""
    graph, value, made = Subgraph(), tensor("x"), []
    for index in range(count):
        made.append(graph.append(Operator(ADD, [value], [tensor(f"t{index}")])))
        value = made[-1].output
    return graph, made


def test_an_operator_of_another_graph_and_a_second_definition_are_misuse() -> None:
    x, graph = tensor("x"), Subgraph()
    aside = op(x)
    assert (x.consumers, aside.output.producer, aside.subgraph) == ([], None, None)
    first = graph.append(op(x, x))
    for misuse in (
        lambda: Subgraph().append(first),
        lambda: Subgraph().remove(first),
        lambda: Subgraph().set_input(first, 0, None),
    ):
        with pytest.raises(AssertionError):
            misuse()
    with pytest.raises(AssertionError, match="defined twice"):
        graph.append(Operator(ADD, [], [first.output]))


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_chains_hold_under_any_sequence_of_edits(data: st.DataObject) -> None:
    inputs = [tensor("a"), tensor("b")]
    graph, live, removed = Subgraph(), [], []  # type: Subgraph, list[Operator], list[Operator]
    for step in range(data.draw(st.integers(1, 25))):
        pool = [*inputs, *(t for operator in live for t in operator.outputs), None]
        action = data.draw(st.sampled_from(["insert", "remove", "again", "set", "replace"]))
        if action == "insert":
            read = data.draw(st.lists(st.sampled_from(pool), max_size=3))
            live.append(op(*read, outputs=data.draw(st.integers(1, 2)), name=f"n{step}_"))
            order = [*graph.operators]
            order.insert(data.draw(st.integers(0, len(order))), live[-1])
            graph.arrange(order)
            assert list(graph.operators) == order
        elif action == "remove" and live:
            removed.append(live.pop(data.draw(st.integers(0, len(live) - 1))))
            graph.remove(removed[-1])
            assert removed[-1].subgraph is removed[-1].outputs[0].producer is None
        elif action == "again" and removed:
            live.append(graph.append(removed.pop()))
        elif action == "set" and live:
            operator = data.draw(st.sampled_from(live))
            if operator.inputs:
                index = data.draw(st.integers(0, len(operator.inputs) - 1))
                graph.set_input(operator, index, data.draw(st.sampled_from(pool)))
        elif action == "replace":
            old, new = (data.draw(st.sampled_from([t for t in pool if t])) for _ in range(2))
            graph.replace_uses(old, new)
            assert old is new or not old.consumers
        check(graph, *inputs, *(t for operator in removed for t in operator.outputs))


def test_topological_order_puts_producers_first_and_is_stable_where_there_is_a_choice() -> None:
    _, made = chain(5000)
    assert topological(made) == topological(made[::-1]) == made
    independent = [op(name=f"i{i}_") for i in range(3)]
    assert topological(independent) == independent
    x = op(tensor("in"), name="x")
    left, right = op(x.output, name="l"), op(x.output, name="r")
    join = op(left.output, right.output, name="j")
    assert topological([join, right, left, x]) == [x, left, right, join]
    a, b = tensor("a"), tensor("b")
    with pytest.raises(RefusedError, match="part of a cycle"):
        topological([Operator(ADD, [b], [a]), Operator(ADD, [a], [b])])


def test_a_region_reads_what_it_does_not_define_each_once_in_order_of_first_use() -> None:
    x, y = tensor("x"), tensor("y")
    first = op(y, x, name="f")
    second = op(first.output, x, None, name="s")
    assert reads([first, second]) == (y, x)
    assert reads([second]) == (first.output, x)


def test_still_needed_is_what_somebody_outside_reads_and_what_that_needs() -> None:
    graph, made = chain(4)
    new = [Operator(ADD, made[0].inputs, made[3].outputs)]
    outside = graph.append(op(made[1].output, name="out"))
    graph.outputs = [outside.output, made[3].output]
    assert still_needed(graph, made, new) == made[:2]
    graph.remove(outside)
    assert still_needed(graph, made, new) == []
    graph.outputs = [made[2].output]
    assert still_needed(graph, made, new) == made[:3]
    graph.outputs = []
    assert still_needed(graph, made, [op(made[0].output), *new]) == made[:1]
    graph.outputs = [made[3].output]
    assert still_needed(graph, made, [Operator(ADD, made[0].inputs, made[2].outputs)]) == made[3:]


def test_tensors_keep_their_places_where_weights_name_their_scales_by_index() -> None:
    text = """
        subgraph main (%x: float32[4]) {
          %dead: float32[4] = ABS(%x)
          %y: float32[4] = ADD(%x, float32{1.0, 2.0, 3.0, 4.0})
          return %y
        }
        """
    for scales, left in ((None, 3), (2, 4)):
        model = parse(text)
        (graph,) = model.subgraphs
        usage = parts_in_use(model)
        dead, add = graph.operators
        if scales is not None:
            blocks = new_table("BlockwiseQuantization", scales=scales, block_size=32)
            table = new_table("QuantizationParameters")
            table.set("details", blocks)
            add.input(1).quantization = Quantization(table)
        graph.remove(dead)
        remove_unused(model, usage)
        assert len(graph.tensors) == left


def test_what_a_signature_names_is_an_output_whenever_it_is_added() -> None:
    model = parse("signature main = #0 (x=%x) -> (y=%y)\n" + CHAIN)
    graph, twin = model.subgraphs[0], deepcopy(model)
    for current in (model, twin):
        side = current.subgraphs[0].operators[0].output
        assert not current.subgraphs[0].is_output(side)
        current.signatures["main"].outputs["side"] = side
        assert current.subgraphs[0].is_output(side)
    assert twin.subgraphs[0].signatures == list(twin.signatures) != list(model.signatures)
    remove_dead(graph, graph.operators)
    assert names(graph) == ["side", "y"]


CHAIN = """subgraph main (%x: float32[2]) {
  %side: float32[2] = EXP(%x)
  %y: float32[2] = ABS(%x)
  return %y
}"""


def test_new_operators_stand_where_the_last_old_one_did_or_before_their_first_reader() -> None:
    graph, made = chain(3)
    side = op(made[0].output, name="side")
    reader, free = op(side.output, name="reader"), op(made[0].output, name="free")
    graph.arrange([made[0], side, reader, free, *made[1:]])
    check(graph)
    old = [side, made[1]]
    new = [Operator(ADD, [made[0].output], [operator.output]) for operator in old]
    placed = placements(graph, old, new)
    assert placed == {new[0]: reader, new[1]: reader}
    assert made[1].output.producer is made[1], "nothing happens until the graph replaces them"
    graph.replace(old, placed)
    assert list(graph) == [made[0], *new, reader, free, made[2]]
    check(graph)
    assert [operator.subgraph for operator in old] == [None, None]


@settings(deadline=None, max_examples=300)
@given(st.data())
def test_others_stay_in_order_whatever_is_replaced(data: st.DataObject) -> None:
    graph, pool = Subgraph(), [tensor("x")]
    for step in range(data.draw(st.integers(2, 9))):
        read = data.draw(st.lists(st.sampled_from(pool), min_size=1, max_size=2))
        pool.append(graph.append(op(*read, name=f"n{step}_")).output)
    before = list(graph)
    old = [one for one in before if data.draw(st.booleans())] or before[:1]
    outputs = [one.output for one in old if one is old[-1] or data.draw(st.booleans())]
    new = []
    for made in data.draw(st.permutations(outputs)):
        read = data.draw(
            st.lists(st.sampled_from([*reads(old), *(one.output for one in new)]), max_size=2)
        )
        new.append(Operator(ADD, read, [made]))
    try:
        placed = placements(graph, old, new)
    except RefusedError:
        return
    graph.replace(old, placed)
    assert [one for one in graph if one not in new] == [one for one in before if one not in old]
    order = list(graph)
    assert all(order.index(maker) < order.index(one) for one in order for maker in producers(one))


def test_an_operator_that_is_between_and_needed_is_not_moved() -> None:
    graph, made = chain(4)
    new = [Operator(ADD, [made[2].output], [made[0].output])]
    with pytest.raises(RefusedError, match="it would run after an operator that needs it"):
        placements(graph, [made[0], made[3]], new)


def random(name: str, *inputs: Tensor) -> Operator:
    return Operator(OperatorCode(BUILTIN_OPERATORS["RANDOM_UNIFORM"]), inputs, [tensor(name)])


def test_effects_keep_their_order() -> None:
    x = tensor("x")
    plain, first, second, third = op(x), random("r1", x), random("r2", x), op(x, name="late")
    graph = Subgraph()
    graph.arrange([first, plain, second, third])
    with pytest.raises(RefusedError, match="would change the order of side effects"):
        placements(graph, [first, third], [random("r3", x)])
    assert placements(graph, [first], [moved := random("r1'", x)]) == {moved: plain}


def test_walks_go_on_from_the_nearest() -> None:
    _, made = chain(6)
    assert list(walked([made[5]], producers)) == made[::-1]
    assert list(walked([made[5]], producers, most=2)) == [made[5], made[4]]
    stopped = walked([made[5]], lambda one: producers(one) if one is not made[3] else [])
    assert list(stopped) == made[:2:-1]


def test_a_region_that_reads_sparse_weights_computes_what_the_model_does() -> None:
    """A projection with weights [3,8], stored row by row."""
    weights = ", ".join(map(str, range(24)))
    model = parse(f"""
    subgraph main (%x: float32[1,4,8], %b: float32[3]) {{
      %r: float32[1,4,8] = RELU(%x)
      %out: float32[1,4,3] = FULLY_CONNECTED(%r, float32[3,8]{{{weights}}}, %b) {{keep_num_dims: true}}
      return %out
    }}""")
    tensor = model.subgraphs[0].operators[1].input(1)
    dense = new_table("DimensionMetadata", format=0, dense_size=3)
    vectors = [new_table("Int32Vector", values=values) for values in (ROWS, COLUMNS)]
    sparse = new_table(
        "DimensionMetadata", format=1, array_segments=vectors[0], array_indices=vectors[1]
    )
    sparsity = new_table("SparsityParameters", traversal_order=[0, 1], dim_metadata=[dense, sparse])
    tensor.table = new_table("Tensor", sparsity=sparsity)
    tensor.buffer = ir.Buffer(Data(np.array(KEPT, np.float32).tobytes()))
    model = load(to_bytes(model))
    assert "float32[3,8]{...}" in to_text(model)
    operator = model.subgraphs[0].operators[1]
    inputs = {"x": operator.input(0), "b": operator.input(2)}
    region = cut_signature(model, "run", [operator], inputs, {"y": operator.output})
    run = Interpreter(model_content=to_bytes(region)).get_signature_runner("run")
    heads, weights = np.arange(32, dtype=np.float32).reshape(1, 4, 8), np.zeros((3, 8), np.float32)
    weights[[0, 0, 1], COLUMNS] = KEPT
    output = run(x=heads, b=np.zeros(3, np.float32))["y"]
    np.testing.assert_array_equal(output, heads @ weights.T)
