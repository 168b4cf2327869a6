"""Transpositions that a matrix product can do itself. Rewrites a list of detached operators, no graph."""

from collections import Counter
from collections.abc import Container, Sequence

from edge_opt.ir import Operator, Tensor
from edge_opt.schema.table import Table, new_table
from edge_opt.shapes.call import constants_of


def cancel_transposes(operators: Sequence[Operator], wanted: Container[int]) -> list[Operator]:
    """The same computation with fewer TRANSPOSEs; `wanted` are the tensors (by id) that others read.

    `(A B)^T = B^T A^T`: a product whose only reader exchanges its last two axes gets its operands and flags exchanged,
    `BMM(V^T, P, adj_y) -> [.., H, T] -> TRANSPOSE` becomes `BMM(P, V^T, adj_y) -> [.., T, H]`. And a TRANSPOSE of the
    last two axes under an adjoint flag cancels it: `BMM(P, TRANSPOSE(V), adj_y)` becomes `BMM(P, V)`. The same numbers
    are multiplied and summed in the same order.
    """
    return _drop_adjoint_operands(_flip_products(operators, wanted))


def _flip_products(operators: Sequence[Operator], wanted: Container[int]) -> list[Operator]:
    producer = {id(tensor): operator for operator in operators for tensor in operator.outputs}
    readers = Counter(
        id(tensor) for operator in operators for tensor in operator.inputs if tensor is not None
    )
    flipped: dict[Operator, Operator] = {}
    gone: set[Operator] = set()
    for operator in operators:
        if not exchanges_last_two(operator):
            continue
        source = operator.input(0)
        product = producer.get(id(source))
        if (
            product is None
            or product.name != "BATCH_MATMUL"
            or readers[id(source)] != 1
            or id(source) in wanted
        ):
            continue
        left, right = product.input(0), product.input(1)
        if left.dtype is right.dtype:
            turned = (not product.option("adj_y"), not product.option("adj_x"))
            flipped[product] = _product(product, (right, left), turned, operator.outputs[0])
            gone.add(operator)
    return [flipped.get(operator, operator) for operator in operators if operator not in gone]


def _drop_adjoint_operands(operators: Sequence[Operator]) -> list[Operator]:
    producer = {id(tensor): operator for operator in operators for tensor in operator.outputs}
    result: list[Operator] = []
    for operator in operators:
        if operator.name != "BATCH_MATMUL":
            result.append(operator)
            continue
        sides = [operator.input(0), operator.input(1)]
        flags = [bool(operator.option("adj_x")), bool(operator.option("adj_y"))]
        for side in (0, 1):
            source = producer.get(id(sides[side]))
            if flags[side] and source is not None and exchanges_last_two(source):
                sides[side], flags[side] = source.input(0), False
        if flags == [bool(operator.option("adj_x")), bool(operator.option("adj_y"))]:
            result.append(operator)
        else:
            result.append(_product(operator, (sides[0], sides[1]), (flags[0], flags[1]), operator.outputs[0]))
    return result


def exchanges_last_two(operator: Operator) -> bool:
    """True for a TRANSPOSE that exchanges rows and columns and nothing else."""
    if operator.name != "TRANSPOSE":
        return False
    order = constants_of(operator)(1)
    rank = len(operator.outputs[0].shape)
    return rank >= 2 and order is not None and [*order] == [*range(rank - 2), rank - 1, rank - 2]


def _product(
    like: Operator, sides: tuple[Tensor, Tensor], turned: tuple[bool, bool], output: Tensor
) -> Operator:
    options = new_table("BatchMatMulOptions") if like.options is None else like.options
    table = Table(options.spec, dict(options.fields))
    for name, value in zip(("adj_x", "adj_y"), turned, strict=True):
        # "Absent" and "false" say the same; keep the shorter.
        if value or name in table.fields:
            table.set(name, value)
    return Operator(like.code, sides, [output], table, like.table)
