"""What a graph is refused for, operator by operator: a table of forms, and of options that name subgraphs."""

import pytest

from edge_opt.attention.rules import RULES
from edge_opt.base.errors import ModelFormatError
from edge_opt.ir import DType, Model, Operator, OperatorCode, Subgraph, Tensor, load, to_bytes
from edge_opt.ir.checks import DEEPEST
from edge_opt.ir.operators import BUILTIN_OPERATORS, KINDS, SUBGRAPH_FIELDS
from edge_opt.schema import TABLES, new_table
from edge_opt.shapes.rules import RULES as SHAPE_RULES


def model_of(name: str, inputs: int, outputs: int, *, missing: int | None = None) -> bytes:
    """A model of one operator."""
    graph = Subgraph("main")
    model = Model()
    model.subgraphs.append(graph)
    read: list[Tensor | None] = [
        graph.add_tensor(Tensor(f"x{i}", (2,), DType.FLOAT32)) for i in range(inputs)
    ]
    made = [graph.add_tensor(Tensor(f"y{i}", (2,), DType.FLOAT32)) for i in range(outputs)]
    graph.inputs = [tensor for tensor in read if tensor is not None]
    if missing is not None:
        read[missing] = None
    graph.append(Operator(OperatorCode(BUILTIN_OPERATORS[name]), read, made))
    return to_bytes(model)


def test_every_operator_with_a_shape_rule_has_a_record() -> None:
    assert set(SHAPE_RULES) <= set(KINDS) <= set(BUILTIN_OPERATORS)


def test_every_operator_that_a_rewrite_may_follow_is_checked_when_it_is_read() -> None:
    assert all(KINDS[name].is_followed for name in RULES)


@pytest.mark.parametrize("name", ["SPLIT", "SELECT_V2", "PADV2", "CONCATENATION", "TOPK_V2"])
def test_a_record_says_which_inputs_the_results_are_made_of(name: str) -> None:
    tensors = [Tensor(f"x{index}", (2,), DType.FLOAT32) for index in range(3)]
    data = {"SPLIT": [1], "SELECT_V2": [1, 2], "PADV2": [0, 2], "CONCATENATION": [0, 1, 2], "TOPK_V2": [0]}[
        name
    ]
    results = 3 if name == "SPLIT" else 1
    assert KINDS[name].data_operands(tensors) == [tensors[place] for place in data]
    assert KINDS[name].data_results(tensors) == tensors[:results]


@pytest.mark.parametrize(
    ("name", "inputs", "outputs", "missing", "reason"),
    [
        ("SOFTMAX", 0, 1, None, r"operator 0 \(SOFTMAX\): has 0 inputs, expected 1$"),
        ("ADD", 3, 1, None, "has 3 inputs, expected 2$"),
        ("CONV_2D", 4, 1, None, "has 4 inputs, expected 2 or 3$"),
        ("PACK", 0, 1, None, "has 0 inputs, expected 1 or more$"),
        ("SOFTMAX", 1, 0, None, "has 0 outputs, expected 1$"),
        ("SPLIT", 2, 0, None, "has 0 outputs, expected 1 or more$"),
        ("ADD", 2, 1, 1, "leaves out an input that it needs$"),
        ("CONCATENATION", 3, 1, 2, "leaves out an input that it needs$"),
    ],
)
def test_an_operator_of_another_form_is_refused(
    name: str, inputs: int, outputs: int, missing: int | None, reason: str
) -> None:
    with pytest.raises(ModelFormatError, match=reason):
        load(model_of(name, inputs, outputs, missing=missing))


@pytest.mark.parametrize(
    ("name", "inputs", "outputs", "missing"),
    [("FULLY_CONNECTED", 3, 1, 2), ("SPLIT", 2, 3, None), ("CUSTOM", 0, 0, None)],
)
def test_inputs_that_may_be_left_out_and_operators_nobody_knows_pass(
    name: str, inputs: int, outputs: int, missing: int | None
) -> None:
    load(model_of(name, inputs, outputs, missing=missing))


def test_any_input_of_a_subgraph_that_is_run_may_be_left_out() -> None:
    assert KINDS["STABLEHLO_COMPOSITE"].misfit([None, None], []) is None
    assert KINDS["IF"].misfit([None], []) == "leaves out an input that it needs"


def test_every_option_that_names_a_subgraph_is_known() -> None:
    """By name: the schema says of no integer what it indexes."""
    named = {
        (table, field.name)
        for table, spec in TABLES.items()
        for field in spec.fields
        if "subgraph" in field.name or "computation" in field.name
    }
    others = {("Model", "subgraphs"), ("SignatureDef", "subgraph_index"), ("StablehloScatterOptions", "")}
    assert {(table, name) for table, names in SUBGRAPH_FIELDS.items() for name in names} == named - others


def chain(length: int, last: int) -> bytes:
    """Subgraph i calls i + 1; the last one calls `last`."""
    model = Model()
    code = OperatorCode(BUILTIN_OPERATORS["CALL_ONCE"])
    for index in range(length):
        graph = Subgraph(f"g{index}")
        following = index + 1 if index + 1 < length else last
        graph.append(Operator(code, [], [], new_table("CallOnceOptions", init_subgraph_index=following)))
        model.subgraphs.append(graph)
    model.subgraphs.append(Subgraph("end"))
    return to_bytes(model)


def test_subgraphs_may_call_others_but_not_too_deep() -> None:
    load(chain(DEEPEST - 1, DEEPEST - 1))
    with pytest.raises(ModelFormatError, match="calls go 49 subgraphs deep"):
        load(chain(DEEPEST, DEEPEST))
    with pytest.raises(ModelFormatError, match="subgraphs deep"):
        load(chain(1500, 1500))


@pytest.mark.parametrize("last", [0, 1, 2])
def test_subgraphs_that_lead_back_to_themselves_are_refused(last: int) -> None:
    with pytest.raises(ModelFormatError, match=f"calls subgraph {last}, which leads back here"):
        load(chain(3, last))


@pytest.mark.parametrize("index", [-1, 3, 2**31 - 1])
def test_a_subgraph_that_does_not_exist_is_refused(index: int) -> None:
    with pytest.raises(
        ModelFormatError, match=rf"'g1', operator 0 \(CALL_ONCE\): subgraph {index} does not exist"
    ):
        load(chain(2, index))
