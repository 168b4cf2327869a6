"""Sizes for lengths that are known only at run time: which axes get one size, and which sizes."""

import pytest

from edge_opt.ir import Model
from edge_opt.ir.text import parse
from edge_opt.shapes.lengths import choose_lengths, open_sizes


def graph(given: str, *lines: str) -> Model:
    """A model of these operators, which returns what the last one gives."""
    last = lines[-1].partition(":")[0]
    return parse(f"subgraph main ({given}) {{ {' '.join(lines)} return {last} }}")


def sizes(given: str, *lines: str) -> list[list[tuple[int, ...]]]:
    """The shapes of the inputs, in each choice."""
    model = graph(given, *lines)
    return [[c.shapes[tensor] for tensor in model.subgraphs[0].inputs] for c in choose_lengths(model)]


def test_each_open_axis_has_a_prime_of_its_own_in_each_choice_and_1_in_the_last() -> None:
    found = sizes("%x: float32[?,?,4]", "%y: float32[?,?,4] = ABS(%x)")
    assert found == [[(11, 13, 4)], [(17, 19, 4)], [(1, 1, 4)]]


def test_axes_that_an_operator_puts_together_have_one_size() -> None:
    found = sizes("%x: float32[?,4], %other: float32[?,4]", "%y: float32[?,4] = ADD(%x, %other)")
    assert [len(set(shapes)) for shapes in found] == [1, 1, 1]


def test_pasts_that_grow_by_the_same_have_one_length() -> None:
    found = sizes(
        "%keys: float32[?,4], %values: float32[?,4], %new: float32[?,4]",
        "%k: float32[?,4] = CONCATENATION(%keys, %new) {axis: 0}",
        "%v: float32[?,4] = CONCATENATION(%values, %new) {axis: 0}",
        "%o: float32[?,4] = ADD(%k, %v)",
    )
    assert [keys == values != new for keys, values, new in found] == [True, True, False]


def test_an_update_is_no_longer_than_what_it_goes_into() -> None:
    update = "%y: float32[?,4] = DYNAMIC_UPDATE_SLICE(%cache, %slice, int32{0, 0})"
    found = sizes("%cache: float32[?,4], %slice: float32[?,4]", update)
    assert [cache[0] > part[0] for cache, part in found] == [True, True, False]


def test_there_are_no_more_sizes_than_lengths_that_differ() -> None:
    found = sizes(
        "%a: float32[?,4], %b: float32[?,4], %c: float32[?,4], %d: float32[?,5]",
        "%x: float32[?,4] = ADD(%a, %b)",
        "%y: float32[?,4] = ADD(%x, %c)",
        "%z: float32[?,5] = ABS(%d)",
    )
    assert [shape[0] for shape in found[0]] == [11, 11, 11, 13]
    assert [shape[0] for shape in found[1]] == [17, 17, 17, 19]


def test_a_size_that_the_model_has_is_none_of_a_length() -> None:
    found = sizes("%x: float32[?,11,26]", "%y: float32[?,11,26] = ABS(%x)")
    assert [shapes[0][0] for shapes in found] == [17, 19, 1]


def test_a_signatures_input_has_the_length_of_the_others_input_of_its_name() -> None:
    model = parse("""
        signature one = #0 (cache=%a) -> (out=%y)
        signature two = #1 (cache=%b) -> (out=%z)
        subgraph first (%a: float32[?,4]) {
          %y: float32[?,4] = ABS(%a)
          return %y
        }
        subgraph second (%b: float32[?,4]) {
          %z: float32[?,4] = NEG(%b)
          return %z
        }
        """)
    first, *_ = choose_lengths(model)
    assert [first.shapes[graph.inputs[0]] for graph in model.subgraphs] == [(11, 4), (11, 4)]


def test_open_sizes_are_those_that_another_choice_has_otherwise() -> None:
    model = graph("%x: float32[?,4]", "%y: float32[?] = RESHAPE(%x, int32{-1})")
    assert open_sizes(choose_lengths(model)) == {11, 44}


@pytest.mark.parametrize(
    ("given", "line"),
    [
        pytest.param("%x: float32[3,4]", "%y: float32[3,4] = ABS(%x)", id="none is open"),
        pytest.param("%x: float32[?,4]", "%y: float32[3,8] = RESHAPE(%x, int32{3, 8})", id="none fits"),
        pytest.param(
            ", ".join(f"%x{i}: float32[?]" for i in range(400)),
            "%y: float32[?] = ABS(%x0)",
            id="there are too many",
        ),
    ],
)
def test_there_is_no_choice_where(given: str, line: str) -> None:
    assert choose_lengths(graph(given, line)) == ()


def test_a_recorded_signature_counts_also_where_the_shape_has_fewer_axes() -> None:
    model = graph("%x: float32[6,4]", "%y: float32[6,4] = ABS(%x)")
    (x,) = model.subgraphs[0].inputs
    x.shape_signature = (2, 4, -1)
    assert [choice.shapes[x] for choice in choose_lengths(model)] == [(2, 4, 11), (2, 4, 13), (2, 4, 1)]
