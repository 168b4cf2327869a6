"""Which axes of an attention hold its heads, by where its queries come from: for heads that nothing merges afterwards.

Heads come from where queries have them beside the head size: `[.., N*H]`, or `[.., T, N, H]`.
"""

import math
from collections.abc import Iterable

from edge_opt.attention import factors as fx
from edge_opt.attention.factors import Axis, Factor, Factored
from edge_opt.attention.labelling import DEEPEST, Labelling, OperandFactors, Weighings
from edge_opt.attention.rules import MOVEMENT, UNARY, is_turned
from edge_opt.ir import Operator, Shape, Tensor


def labelling_by_origin(
    output: Tensor, values: Weighings, logits: list[Operator], operands: OperandFactors
) -> tuple[Labelling, Factored, int] | None:
    """How heads lie in `output`, the (sum of the) value product(s), and how many there are; None if nothing tells."""
    products = [*values, *logits]
    summed = [] if output.producer is None else [output.producer]
    if any(map(operands.distrusted, products + summed)) or not all(map(_contracted, products)):
        return None
    rows = len(output.shape) + next(iter(values.values())).rows
    for heads in sorted(_head_counts(logits), reverse=True):
        factored = _placement(output.shape, rows, heads)
        if factored is None:
            continue
        labelling = Labelling(values, operands)
        labelling.core(output, factored)
        found = labelling.logits
        everywhere = found and all(fx.piece_count(own) == heads for own in found.values())
        sequence = any(not factor.stride for factor in factored[rows])
        if everywhere and _told(labelling, operands, heads, merged=not sequence):
            return labelling, factored, heads
    return None


def _head_counts(logits: Iterable[Operator]) -> set[int]:
    """Numbers of heads that some tensor above the queries or keys may have, going by its shape."""
    counts: set[int] = set()
    for product in logits:
        for index in (0, 1):
            size = _contracted(product)
            tensor: Tensor | None = product.input(index)
            for _ in range(DEEPEST):
                if tensor is None:
                    break
                shape = tensor.shape
                if shape and shape[-1] > size and shape[-1] % size == 0:
                    counts.add(shape[-1] // size)
                elif len(shape) > 2 and shape[-1] == size and shape[-2] > 1:
                    counts.add(shape[-2])
                tensor = _above(tensor)
    return counts


def _contracted(product: Operator) -> int:
    shape = product.input(0).shape
    return shape[-2 if is_turned(product, 0) else -1]


def _above(tensor: Tensor) -> Tensor | None:
    """What a tensor is a rearrangement or scaling of."""
    operator = tensor.producer
    if operator is None:
        return None
    if operator.name in UNARY | MOVEMENT | {"PACK", "UNPACK"}:
        return operator.inputs[0]
    varying = [t for t in operator.inputs if t is not None and not t.is_constant]
    return varying[0] if operator.name in ("MUL", "DIV") and len(varying) == 1 else None


def _placement(shape: Shape, rows: int, heads: int) -> Factored | None:
    """Where that many heads may lie in a product: in its batch axes behind the first, and outermost in its rows.

    In three axes `[B*N, T, H]` they are the inner part of the first.
    """
    batch = len(shape) - 2
    lanes = math.prod(shape[1:batch]) if batch > 1 else math.gcd(math.prod(shape[:batch]), heads)
    groups, left = divmod(heads, lanes)
    if left or shape[rows] % groups:
        return None
    axes: list[Axis] = list(fx.plain(shape))
    axes[rows] = tuple(fx.merge_neighbours([Factor(groups, 1), Factor(shape[rows] // groups)]))
    if batch == 1:
        axes[0] = tuple(fx.merge_neighbours([Factor(shape[0] // lanes), Factor(lanes, groups)]))
    stride = groups
    for axis in range(batch - 1, 0, -1):
        axes[axis] = tuple(fx.merge_neighbours([Factor(shape[axis], stride)]))
        stride *= shape[axis]
    return tuple(axes)


def _told(labelling: Labelling, operands: OperandFactors, heads: int, *, merged: bool) -> bool:
    """True where the label comes from heads beside the head size.

    `merged`: in one axis with it, nothing less will do. Without a sequence, `[1, N, H]` may be `[1, T, H]` as well.
    """
    for product, factored in labelling.logits.items():
        size = _contracted(product)
        for index, own in operands.known(product, factored).items():
            tensor, labelled = product.input(index), _with_size(product, index, own, size)
            for _ in range(DEEPEST):
                if _beside(labelled, size, heads, merged=merged):
                    return True
                operator, above = tensor.producer, operands.of(tensor, labelled)
                source = _above(tensor)
                if source is None or operator is None or not isinstance(above, dict):
                    break
                tensor, labelled = source, above[operator.inputs.index(source)]
    return False


def _with_size(product: Operator, index: int, own: Factored, size: int) -> Factored:
    """The factors of an operand, with the head size labelled too: as the innermost digit of `head * H + h`."""
    turned = is_turned(product, index)
    contracted = len(own) - (1 if turned == (index == 1) else 2)
    return tuple(
        (Factor(size, 1),)
        if axis == contracted
        else tuple(Factor(factor.size, factor.stride * size) for factor in factors)
        for axis, factors in enumerate(own)
    )


def _beside(factored: Factored, size: int, heads: int, *, merged: bool) -> bool:
    last = factored[-1]
    if last and last[-1] == Factor(heads * size, 1):
        return True
    apart = len(factored) > 2 and last == (Factor(size, 1),) and factored[-2] == (Factor(heads, size),)
    return apart and not merged
