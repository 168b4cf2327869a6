"""Whole graphs: values folded along the way, subgraphs entered, names kept, and what a file lies about."""

from typing import Any

import numpy as np
import pytest
from flatbuffers import flexbuffers
from shapes_referee import Graph, Shape, T, compare_all, const, model_bytes
from text_parser import parse

from edge_opt import ir
from edge_opt.schema.table import new_table
from edge_opt.shapes import ShapeReport, derive, infer_shapes


def shape_chain(signature: Shape | None, shape: Shape, recorded: Shape) -> bytes:
    """SHAPE -> STRIDED_SLICE -> PACK -> RESHAPE: the first axis stays, the others are merged."""
    graph = Graph()
    x = graph.tensor(T(shape, signature=signature), is_input=True)
    sizes = graph.tensor(T((3,), "INT32"))
    graph.operator("SHAPE", [x], [sizes], {"outType": 2})
    bounds = [graph.tensor(const([number])) for number in (0, 1, 1)]
    first = graph.tensor(T((), "INT32"))
    graph.operator("STRIDED_SLICE", [sizes, *bounds], [first], {"shrinkAxisMask": 1})
    target = graph.tensor(T((2,), "INT32"))
    rest = graph.tensor(const(32))
    graph.operator("PACK", [first, rest], [target], {"valuesCount": 2})
    result = graph.tensor(T(recorded, signature=signature and (-1, 32)), is_output=True)
    graph.operator("RESHAPE", [x, target], [result], {})
    return model_bytes([graph])


def output_shape(report: ShapeReport, model: ir.Model) -> Any:
    return report.shapes[model.subgraphs[0].outputs[0]]


def test_a_chain_of_shapes_is_folded() -> None:
    model = ir.load(shape_chain(None, (5, 4, 8), (5, 32)))
    report = derive(model)
    assert output_shape(report, model) == (5, 32)
    assert report.disagreements == ()


def test_a_dynamic_dimension_stays_one_through_a_chain_of_shapes() -> None:
    model = ir.load(shape_chain((-1, 4, 8), (1, 4, 8), (1, 32)))
    report = derive(model)
    assert output_shape(report, model) == (-1, 32)
    assert report.disagreements == ()


def test_resized_inputs_replace_dynamic_dimensions() -> None:
    model = ir.load(shape_chain((-1, 4, 8), (1, 4, 8), (1, 32)))
    report = derive(model, resize={model.subgraphs[0].inputs[0]: (7, 4, 8)})
    assert output_shape(report, model) == (7, 32)
    assert report.disagreements == ()


def chain(*recorded: Shape) -> bytes:
    """A row of RELUs with the recorded shapes; the input is `[2, 3]`."""
    graph = Graph()
    last = graph.tensor(T((2, 3)), is_input=True)
    for shape in recorded:
        following = graph.tensor(T(shape))
        graph.operator("RELU", [last], [following])
        last = following
    graph.outputs.append(last)
    return model_bytes([graph])


def test_a_recorded_shape_that_is_a_lie_is_found() -> None:
    (found,) = infer_shapes(ir.load(chain((2, 3), (2, 4), (2, 3))))
    assert str(found) == (
        "subgraph 'main', operator 1 (RELU): tensor 't2' is recorded as [2,4], derived as [2,3]: "
        "axis 1 is 3, recorded as 4"
    )
    assert found.to_dict() == {
        "subgraph": "main",
        "tensor": "t2",
        "operator": "1 (RELU)",
        "recorded": [2, 4],
        "derived": [2, 3],
        "reason": "axis 1 is 3, recorded as 4",
    }


def test_what_follows_from_a_lie_says_so() -> None:
    graph = Graph()
    x = graph.tensor(T((2, 3)), is_input=True)
    lie = graph.tensor(T((2, 4)))
    graph.operator("RELU", [x], [lie])
    result = graph.tensor(T((2, 4)), is_output=True)
    graph.operator("RELU", [lie], [result])
    found = infer_shapes(ir.load(model_bytes([graph])))
    assert [d.tensor for d in found] == ["t1", "t2"]
    assert found[1].reason == "axis 1 is 3, recorded as 4; it follows from tensor 't1'"


def test_operands_that_cannot_go_together_are_found_and_reported_once() -> None:
    graph = Graph()
    q, k = graph.tensor(T((1, 4, 16, 256)), is_input=True), graph.tensor(T((1, 4, 64, 128)), is_input=True)
    scores = graph.tensor(T((1, 4, 16, 64)))
    graph.operator("BATCH_MATMUL", [q, k], [scores], {"adjY": True})
    result = graph.tensor(T((1, 4, 16, 64)), is_output=True)
    graph.operator("SOFTMAX", [scores], [result], {"beta": 1.0})
    model = ir.load(model_bytes([graph]))
    (found,) = infer_shapes(model)
    assert str(found) == (
        "subgraph 'main', operator 0 (BATCH_MATMUL): inner dimensions differ: 256 in tensor 't0' (axis 3), "
        "128 in tensor 't1' (axis 3)"
    )
    report = derive(model)
    assert (report.tensors, report.derived, report.unknown) == (4, 3, 1)
    assert found.to_dict()["derived"] is None


def test_a_recorded_size_where_a_dynamic_one_is_derived_is_no_disagreement() -> None:
    graph = Graph()
    mask = graph.tensor(T((2, 3), "BOOL"), is_input=True)
    places = graph.tensor(T((5, 2), "INT64"), is_output=True)
    graph.operator("WHERE", [mask], [places])
    model = ir.load(model_bytes([graph]))
    report = derive(model)
    assert report.disagreements == ()
    assert report.shapes[model.subgraphs[0].outputs[0]] == (-1, 2)


def test_custom_operators_are_unknown_and_their_readers_use_what_is_recorded() -> None:
    graph = Graph()
    x, y, z = (
        graph.tensor(T((2,)), is_input=True),
        graph.tensor(T((7,))),
        graph.tensor(T((7,)), is_output=True),
    )
    graph.operator("CUSTOM", [x], [y])
    graph.operator("RELU", [y], [z])
    report = derive(ir.load(model_bytes([graph])))
    assert (report.tensors, report.derived, report.unknown) == (3, 2, 1)
    assert report.disagreements == ()
    assert report.to_dict() == {"tensors": 3, "derived": 2, "unknown": 1, "disagreements": []}


def test_an_unranked_tensor_is_not_a_scalar() -> None:
    """`[]` with no stated rank is unranked in a model that states ranks, and a scalar in an older one."""
    model = ir.load(chain((2, 3), (2, 3)))
    source, middle = model.subgraphs[0].inputs[0], model.subgraphs[0].operators[0].output
    source.shape = ()
    assert len(infer_shapes(model)) == 2
    assert middle.table is not None
    middle.table.set("has_rank", True)
    assert infer_shapes(model) == []
    assert derive(model).unknown == 1


def test_a_constant_whose_bytes_do_not_fill_its_shape_is_found() -> None:
    """The reader refuses such a file; a rewrite may still make one."""
    graph = Graph()
    graph.outputs.append(graph.tensor(T((5,), "INT32", np.zeros(5, np.int32))))
    model = ir.load(model_bytes([graph]))
    model.subgraphs[0].outputs[0].shape = (2, 3)
    (found,) = infer_shapes(model)
    assert (
        str(found)
        == "subgraph 'main', no operator: tensor 't0': INT32[2, 3] needs 24 bytes, its buffer holds 20"
    )


# Subgraphs.


def branch(name: str, shape: Shape, *operators: str, result: Shape | None = None) -> Graph:
    """A subgraph with one input that goes through unary operators."""
    graph = Graph(name)
    last = graph.tensor(T(shape), is_input=True)
    for operator in operators:
        following = graph.tensor(T(result or shape))
        graph.operator(operator, [last], [following])
        last = following
    graph.outputs.append(last)
    return graph


def reshaping(name: str, shape: Shape, target: list[int], result: Shape) -> Graph:
    graph = Graph(name)
    x, to = graph.tensor(T(shape), is_input=True), graph.tensor(const(target))
    graph.operator("RESHAPE", [x, to], [graph.tensor(T(result), is_output=True)], {})
    return graph


def conditional(then: Graph, otherwise: Graph, result: Shape) -> bytes:
    graph = Graph()
    condition = graph.tensor(T((), "BOOL"), is_input=True)
    x = graph.tensor(T((2, 3)), is_input=True)
    y = graph.tensor(T(result), is_output=True)
    graph.operator("IF", [condition, x], [y], {"thenSubgraphIndex": 1, "elseSubgraphIndex": 2})
    return model_bytes([graph, then, otherwise])


def test_if_enters_both_branches() -> None:
    data = conditional(branch("then", (2, 3), "RELU"), branch("else", (2, 3), "TANH", "NEG"), (2, 3))
    count, wrong = compare_all(data)
    assert (count, wrong) == (8, [])
    assert infer_shapes(ir.load(data)) == []


def test_branches_that_differ_make_a_dynamic_size() -> None:
    data = conditional(
        reshaping("then", (2, 3), [2, 3], (2, 3)), reshaping("else", (2, 3), [3, 2], (3, 2)), (2, 3)
    )
    model = ir.load(data)
    report = derive(model)
    assert report.shapes[model.subgraphs[0].outputs[0]] == (-1, -1)
    assert report.disagreements == ()


def test_a_known_condition_chooses_the_branch() -> None:
    branches = [reshaping("then", (2, 3), [2, 3], (2, 3)), reshaping("else", (2, 3), [3, 2], (3, 2))]
    graph = Graph()
    condition = graph.tensor(T((), "BOOL", np.array(False)))
    x, y = graph.tensor(T((2, 3)), is_input=True), graph.tensor(T((3, 2)), is_output=True)
    graph.operator("IF", [condition, x], [y], {"thenSubgraphIndex": 1, "elseSubgraphIndex": 2})
    model = ir.load(model_bytes([graph, *branches]))
    assert output_shape(derive(model), model) == (3, 2)


def composite_of(index: int) -> dict[str, Any]:
    attributes = list(flexbuffers.Dumps({}))
    return {"name": "test", "decompositionSubgraphIndex": index, "compositeAttributes": attributes}


def composite(body: Graph, shape: Shape, result: Shape) -> bytes:
    graph = Graph()
    x, y = graph.tensor(T(shape), is_input=True), graph.tensor(T(result), is_output=True)
    graph.operator("STABLEHLO_COMPOSITE", [x], [y], composite_of(1))
    return model_bytes([graph, body])


def test_composites_are_entered() -> None:
    data = composite(reshaping("body", (2, 6), [3, -1], (3, 4)), (2, 6), (3, 4))
    assert compare_all(data) == (5, [])
    assert infer_shapes(ir.load(data)) == []


def test_a_composite_that_is_entered_with_another_shape_is_found() -> None:
    """The interpreter resizes the body silently; whoever reads the file without it sees the recorded shapes."""
    data = composite(branch("body", (2, 3), "RELU"), (2, 5), (2, 5))
    assert compare_all(data)[1] == []
    first, second = infer_shapes(ir.load(data))
    assert str(first) == (
        "subgraph 'body', no operator: tensor 't0' is recorded as [2,3], derived as [2,5]: "
        "operator 0 (STABLEHLO_COMPOSITE) of subgraph 'main' enters with [2,5]"
    )
    assert second.reason.endswith("it follows from tensor 't0'")


def test_a_composite_that_is_entered_with_an_unranked_tensor_uses_its_recorded_inputs() -> None:
    model = ir.load(composite(branch("body", (2, 3), "RELU"), (2, 3), (2, 3)))
    x, y = model.subgraphs[0].inputs[0], model.subgraphs[0].outputs[0]
    x.shape = ()
    assert y.table is not None
    y.table.set("has_rank", True)
    assert infer_shapes(model) == []
    assert derive(model).shapes[y] == (2, 3)


def test_a_call_enters_its_subgraph() -> None:
    """The interpreter has no CALL; the schema has."""
    graph = Graph()
    x, y = graph.tensor(T((2, 6)), is_input=True), graph.tensor(T((3, 4)), is_output=True)
    graph.operator("CALL", [x], [y], {"subgraph": 1})
    model = ir.load(model_bytes([graph, reshaping("callee", (2, 6), [3, -1], (3, 4))]))
    report = derive(model)
    assert report.shapes[model.subgraphs[0].outputs[0]] == (3, 4)
    assert report.disagreements == ()


def loop(body: Graph, shape: Shape, result: Shape) -> bytes:
    """A WHILE over one tensor; the condition reads nothing of it."""
    graph, condition = Graph(), Graph("condition")
    x, y = graph.tensor(T(shape), is_input=True), graph.tensor(T(result), is_output=True)
    graph.operator("WHILE", [x], [y], {"condSubgraphIndex": 1, "bodySubgraphIndex": 2})
    condition.tensor(T(shape), is_input=True)
    flag = condition.tensor(T((), "BOOL"), is_output=True)
    a, b = condition.tensor(const(0)), condition.tensor(const(1))
    condition.operator("EQUAL", [a, b], [flag])
    return model_bytes([graph, condition, body])


def test_while_keeps_the_shape_that_its_body_keeps() -> None:
    data = loop(branch("body", (2, 3), "RELU", "TANH"), (2, 3), (2, 3))
    assert compare_all(data)[1] == []
    assert infer_shapes(ir.load(data)) == []


def test_a_size_that_the_body_of_a_while_changes_is_dynamic() -> None:
    body = Graph("body")
    x, more = body.tensor(T((1, 3)), is_input=True), body.tensor(const([[1.0, 2.0, 3.0]], "FLOAT32"))
    longer = body.tensor(T((2, 3)), is_output=True)
    body.operator("CONCATENATION", [x, more], [longer], {"axis": 0})
    model = ir.load(loop(body, (1, 3), (1, 3)))
    report = derive(model)
    assert report.shapes[model.subgraphs[0].outputs[0]] == (-1, 3)
    assert report.disagreements == ()


def test_call_once_and_variables() -> None:
    main, once = Graph(), Graph("once")
    main.operator("CALL_ONCE", [], [], {"initSubgraphIndex": 1})
    handle, value = main.tensor(T((), "RESOURCE")), main.tensor(T((2, 3)), is_output=True)
    main.operator("VAR_HANDLE", [], [handle], {"sharedName": "v"})
    main.operator("READ_VARIABLE", [handle], [value], {})
    target, start = once.tensor(T((), "RESOURCE")), once.tensor(const(np.zeros((2, 4)), "FLOAT32"))
    once.operator("VAR_HANDLE", [], [target], {"sharedName": "v"})
    once.operator("ASSIGN_VARIABLE", [target, start], [], {})
    wrong = once.tensor(T((7,)))
    once.operator("RELU", [start], [wrong])
    (found,) = infer_shapes(ir.load(model_bytes([main, once])))
    assert (found.subgraph, found.recorded, found.derived) == ("once", (7,), (2, 4))


def test_values_go_into_and_come_out_of_composites() -> None:
    """The body computes a shape from a constant of the caller; the caller reshapes by it."""
    main, body = Graph(), Graph("body")
    x, size = main.tensor(T((2, 6)), is_input=True), main.tensor(const([2, 2]))
    target, result = main.tensor(T((2,), "INT32")), main.tensor(T((4, 3)), is_output=True)
    main.operator("STABLEHLO_COMPOSITE", [size], [target], composite_of(1))
    main.operator("RESHAPE", [x, target], [result], {})
    given, more = body.tensor(T((2,), "INT32"), is_input=True), body.tensor(const([2, 1]))
    body.operator("ADD", [given, more], [body.tensor(T((2,), "INT32"), is_output=True)], {})
    model = ir.load(model_bytes([main, body]))
    assert derive(model).shapes[model.subgraphs[0].outputs[0]] == (4, 3)
    assert infer_shapes(model) == []


def nested(depth: int) -> ir.Model:
    """Composites in composites, made after reading: the reader checks what operators enter."""
    model = ir.load(model_bytes([branch(f"g{index}", (2,), "RELU") for index in range(depth)]))
    for index in range(depth - 1):
        enter(model, index, index + 1)
    return model


def enter(model: ir.Model, subgraph: int, callee: int) -> None:
    op = model.subgraphs[subgraph].operators[0]
    op.code = model.operator_code("STABLEHLO_COMPOSITE")
    op.options = new_table("StableHLOCompositeOptions", decomposition_subgraph_index=callee)


@pytest.mark.parametrize(
    ("callee", "reason"),
    [(7, "it enters subgraph 7: the model has 2"), (0, "it enters subgraph 'g0', which is entered already")],
)
def test_subgraphs_that_are_not_there_or_enter_themselves_are_refused(callee: int, reason: str) -> None:
    model = nested(2)
    enter(model, 0, callee)
    (found,) = infer_shapes(model)
    assert found.reason.startswith(reason)


def test_subgraphs_nested_too_deep_for_the_stack_are_refused() -> None:
    assert infer_shapes(nested(40)) == []
    assert any("nested too deep" in found.reason for found in infer_shapes(nested(200)))


def test_options_of_another_operator_are_refused() -> None:
    model = ir.load(chain((2, 3)))
    op = model.subgraphs[0].operators[0]
    op.code = model.operator_code("SOFTMAX")
    op.options = new_table("AddOptions")
    assert infer_shapes(model) == []
    op.code = model.operator_code("SQUEEZE")
    (found,) = infer_shapes(model)
    assert found.reason == "its options are those of another operator: they have no squeeze_dims"


def test_operands_of_one_shape_tell_each_other_their_sizes() -> None:
    graph = Graph()
    sizes = ((-1, 3, -1), (2, -1, -1))
    inputs = [graph.tensor(T((2, 3, 1), signature=size), is_input=True) for size in sizes]
    graph.operator("ATAN2", inputs, [graph.tensor(T((2, 3, 1), signature=(-1, -1, -1)), is_output=True)])
    model = ir.load(model_bytes([graph]))
    assert output_shape(derive(model), model) == (2, 3, -1)


def test_a_loop_that_swaps_two_open_lengths_does_not_take_one_for_the_other() -> None:
    model = parse("""
    subgraph main (%a: float32[?], %b: float32[?]) {
      %c: float32[?], %d: float32[?] = WHILE(%a, %b) {cond_subgraph_index: 1, body_subgraph_index: 2}
      return %c, %d
    }
    subgraph again (%a: float32[?], %b: float32[?]) {
      %t: bool[] = LOGICAL_NOT(bool(0))
      return %t
    }
    subgraph swap (%a: float32[?], %b: float32[?]) {
      %s: int32[1] = SHAPE(%a) {out_type: 2}
      %t: int32[1] = SHAPE(%b) {out_type: 2}
      %n: int32[1] = SUB(%s, %t)
      %z: float32[?] = FILL(%n, float32(0.0))
      return %b, %a
    }
    """)
    (difference,) = (op.output for op in model.subgraphs[2].operators if op.name == "FILL")
    assert derive(model).shapes[difference] == (-1,)


def test_a_subgraph_that_is_entered_with_several_shapes_has_what_they_share() -> None:
    model = parse("""
    subgraph main (%a: float32[2,4], %b: float32[3,4]) {
      %c: float32[2,4] = CALL(%a) {subgraph: 1}
      %d: float32[3,4] = CALL(%b) {subgraph: 1}
      return %c, %d
    }
    subgraph body (%x: float32[?,4]) {
      %y: float32[?,4] = NEG(%x)
      return %y
    }
    """)
    report = derive(model)
    assert [report.shapes[tensor] for tensor in model.subgraphs[1].tensors] == [(-1, 4)] * 2
    assert [report.shapes[tensor] for tensor in model.subgraphs[0].outputs] == [(2, 4), (3, 4)]
