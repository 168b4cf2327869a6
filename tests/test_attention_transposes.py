"""Transpositions that a matrix product does itself go; the others stay."""

import pytest
from text_parser import parse

from edge_opt.attention.assembly import cancel_transposes
from edge_opt.ir.text import operator_text
from edge_opt.ir.walk import needed_for

INPUTS = "%a: float32[2,3,5], %b: float32[2,5,4], %c: float32[2,4,5], %d: int8[2,5,4]"


PRODUCT = "%p: float32[2,3,4] = BATCH_MATMUL(%a, %b)"
TRANSPOSED = "%t: float32[2,4,3] = TRANSPOSE(%p, int32{0, 2, 1})"


def rewritten(lines: str, wanted: str) -> list[str]:
    """What is left of some operators, the tensors named in `wanted` being read by others."""
    graph = parse(f"subgraph main ({INPUTS}) {{ {lines} return {wanted} }}").subgraphs[0]
    read = graph.outputs
    return [operator_text(op) for op in needed_for(read, cancel_transposes(list(graph.operators), read))]


def test_a_product_that_is_transposed_behind_exchanges_its_operands_and_flags() -> None:
    assert rewritten(f"{PRODUCT} {TRANSPOSED}", "%t") == [
        "%t: float32[2,4,3] = BATCH_MATMUL(%b, %a) {adj_x: true, adj_y: true}"
    ]
    turned = "%p: float32[2,3,4] = BATCH_MATMUL(%a, %c) {adj_y: true}"
    assert rewritten(f"{turned} {TRANSPOSED}", "%t") == [
        "%t: float32[2,4,3] = BATCH_MATMUL(%c, %a) {adj_y: true}"
    ]


@pytest.mark.parametrize("flag", ["adj_x", "adj_y"])
def test_a_transposition_under_a_flag_cancels_it(flag: str) -> None:
    swapped = "float32[2,4,5]" if flag == "adj_y" else "float32[2,5,3]"
    source = "%b" if flag == "adj_y" else "%a"
    operands = "%a, %t" if flag == "adj_y" else "%t, %b"
    kept = rewritten(
        f"%t: {swapped} = TRANSPOSE({source}, int32{{0, 2, 1}}) "
        f"%p: float32[2,3,4] = BATCH_MATMUL({operands}) {{{flag}: true}}",
        "%p",
    )
    assert kept[-1] == "%p: float32[2,3,4] = BATCH_MATMUL(%a, %b)"


@pytest.mark.parametrize(
    ("lines", "wanted"),
    [
        # Somebody else reads the product, or it is given to the caller.
        (f"{PRODUCT} {TRANSPOSED} %n: float32[2,3,4] = NEG(%p)", "%t, %n"),
        (f"{PRODUCT} {TRANSPOSED}", "%t, %p"),
        # It moves more than rows and columns.
        (f"{PRODUCT} %t: float32[4,3,2] = TRANSPOSE(%p, int32{{2, 1, 0}})", "%t"),
        # Without a flag there is nothing to cancel: the reference page's heads keep the TRANSPOSE of their keys.
        (
            "%t: float32[2,5,4] = TRANSPOSE(%c, int32{0, 2, 1}) %p: float32[2,3,4] = BATCH_MATMUL(%a, %t)",
            "%p",
        ),
        # Operands of two types are not alike: only the right one may be narrow.
        (f"%p: float32[2,3,4] = BATCH_MATMUL(%a, %d) {TRANSPOSED}", "%t"),
    ],
)
def test_other_transpositions_stay(lines: str, wanted: str) -> None:
    graph = parse(f"subgraph main ({INPUTS}) {{ {lines} return {wanted} }}").subgraphs[0]
    assert rewritten(lines, wanted) == [operator_text(operator) for operator in graph.operators]
