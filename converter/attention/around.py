"""The products, the mask and the tail around a SOFTMAX, found by dataflow. Knows no heads.

    Q x K^T --> + mask, * scale --> SOFTMAX --> probabilities P --> P x V --> tail --> projection
    products_above            find_mask        follow_probabilities          tail_of

Another operator may compute the weights of the values instead of the SOFTMAX. Where the heads are in these
tensors: docs/head-axis.md.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from edge_opt.attention.axes import Axes, axes_behind, contracted_axis, data_of
from edge_opt.attention.labels import DEEPEST, ValueProducts
from edge_opt.attention.rules import ELEMENTWISE, MOVEMENT, is_product
from edge_opt.ir import Operator, Tensor
from edge_opt.ir.operators import UNARY, Effect, operators_that
from edge_opt.ir.walk import producers, walked

MASKING = frozenset({"ADD", "MINIMUM", "SELECT", "SELECT_V2", "SUB"})
SOFTMAXES = frozenset({"SOFTMAX", "LOG_SOFTMAX"})
CUTTING = operators_that(Effect.CUTTING)
_FOLLOWED_UP = (
    ELEMENTWISE
    | MOVEMENT
    | CUTTING
    | operators_that(
        Effect.JOINING, Effect.REPEATING, Effect.PADDING, Effect.REDUCTION, Effect.ALONG_ROWS
    )
) - SOFTMAXES
_FOLLOWED_DOWN = UNARY | MOVEMENT | CUTTING | {"PACK"}
_REARRANGED = UNARY | MOVEMENT | {"PACK", "UNPACK"}
_OPAQUE = operators_that(Effect.CALLING, Effect.UNKNOWN)


def products_around(softmax: Operator) -> set[Operator]:
    """The products of queries and keys and the value products around an operator that makes probabilities."""
    return {*follow_probabilities(softmax).value_products, *products_above(softmax)}


# Up


def followed_up(operator: Operator) -> list[Operator]:
    """The operators above one that a search for products looks through."""
    return producers(operator) if operator.name in _FOLLOWED_UP else []


def ends_above(starts: Iterable[Operator]) -> list[Operator]:
    """The operators at which paths up from these end, products or others; the starts may be ends, too."""
    above = walked(starts, followed_up, DEEPEST)
    return [operator for operator in above if operator.name not in _FOLLOWED_UP]


def products_above(softmax: Operator) -> list[Operator]:
    """The nearest products above a SOFTMAX."""
    return list(filter(is_product, ends_above(producers(softmax))))


def find_mask(softmax: Operator) -> Tensor | None:
    """Find the mask: a tensor that is added to the scores, limits or selects from them, and is made of no product."""
    for operator in walked(producers(softmax), followed_up, DEEPEST):
        if operator.name not in MASKING:
            continue
        for tensor in operator.given:
            makers = [] if tensor.producer is None else [tensor.producer]
            if tensor.elements > 1 and not any(map(is_product, ends_above(makers))):
                return tensor
    return None


# Down


def is_opaque(operator: Operator) -> bool:
    """True for an operator that may be a value product, since its code or its shapes are unknown."""
    return operator.name in _OPAQUE or bool(operator.shape_error)


@dataclass
class Below:
    """The value products behind a SOFTMAX, and the first operator that probabilities are not followed through."""

    value_products: ValueProducts = field(default_factory=dict)
    blocker: Operator | None = None


class _Probabilities(NamedTuple):
    """A tensor of probabilities, and the axes on which the keys lie; none if unknown."""

    tensor: Tensor
    keys: Axes


def follow_probabilities(softmax: Operator) -> Below:
    """The products of probabilities and values: `[.., T, S] x [.., S, H]`, which sum over the keys S.

    If the probabilities go on behind the nearest `DEEPEST` tensors, there are no products, and the farthest operator
    is the blocker.
    """
    found = Below()

    def behind(held: _Probabilities) -> Iterator[_Probabilities]:
        tensor, keys = held
        for reader in tensor.consumers:
            if is_product(reader) and len(reader.outputs[0].shape) > 1:
                operand = 0 if reader.inputs[0] is tensor else 1
                if _sums_over(keys, contracted_axis(reader, operand), tensor):
                    found.value_products.setdefault(reader, operand)
                    continue
            elif _keeps_probabilities(reader, tensor):
                for result in reader.outputs:
                    yield _Probabilities(result, axes_behind(reader, tensor, keys))
                continue
            if found.blocker is None or is_opaque(reader):
                found.blocker = reader

    result = softmax.outputs[0]
    has_keys = softmax.code.name in SOFTMAXES and bool(result.shape)
    keys = frozenset({len(result.shape) - 1} if has_keys else ())
    met = list(walked([_Probabilities(result, keys)], behind, DEEPEST + 1))
    if len(met) > DEEPEST:
        return Below(blocker=met[-1].tensor.producer)
    return found


def _sums_over(keys: Axes, contracted: int, tensor: Tensor) -> bool:
    """True if a product that sums over an axis sums over the keys; a single key may lie on any axis of size 1."""
    if not keys or contracted in keys:
        return True
    axes = (*keys, contracted)
    # The shape may be unknown, or a wrong one.
    return max(axes) < len(tensor.shape) and all(tensor.shape[axis] == 1 for axis in axes)


def _keeps_probabilities(operator: Operator, tensor: Tensor) -> bool:
    """True if each element of the results belongs to one of the tensor: a mask, a guard against NaN, a clip, a part."""
    if operator.name in ELEMENTWISE and operator.outputs[0].elements == tensor.elements:
        return True
    return _depends_only_on(operator, tensor, _FOLLOWED_DOWN)


def _depends_only_on(operator: Operator, tensor: Tensor, allowed: frozenset[str]) -> bool:
    """True if the operator's results depend only on this tensor and on scalars."""
    if operator.name == "PACK" and len(operator.inputs) > 1:
        return False
    if operator.name in allowed:
        return tensor in data_of(operator)[:1]
    if operator.name not in ELEMENTWISE:
        return False
    return all(other is tensor or other.elements == 1 for other in operator.given)


def tail_of(products: ValueProducts) -> list[Tensor]:
    """The tensors after the value products that are made of all of them and nothing else, nearest first."""
    parts = {product.outputs[0]: frozenset({product}) for product in products}
    reached = list(parts)
    for tensor in islice(reached, DEEPEST):  # the list grows during the loop
        for reader in tensor.consumers:
            result = reader.outputs[0]
            if result in parts:
                continue
            held = [parts[operand] for operand in reader.inputs if operand in parts]
            maps = _depends_only_on(reader, tensor, _REARRANGED) and len(reader.outputs) == 1
            # All inputs are made of products: the ADD of two segments of keys, or a gate.
            combines = reader.name in ELEMENTWISE and len(held) == len(reader.inputs)
            if maps or combines:
                parts[result] = frozenset().union(*held)
                reached.append(result)
    return [tensor for tensor in reached[:DEEPEST] if len(parts[tensor]) == len(products)]
