"""What stands around a SOFTMAX: the products of queries and keys that lead to it, the mask, and the value products.

Follows operators, and knows no heads.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import islice

from edge_opt.attention.labels import DEEPEST, Weighing, Weighings
from edge_opt.attention.rules import ELEMENTWISE, MOVEMENT, data_input, is_product, multiplies_activations
from edge_opt.ir import Operator, Tensor
from edge_opt.ir.operators import UNARY, Effect, operators_that
from edge_opt.ir.walk import moved_from, producers, readers, walked

JOINING = operators_that(Effect.JOINING)
MASKING = frozenset({"ADD", "SUB", "SELECT", "SELECT_V2"})
SOFTMAXES = frozenset({"SOFTMAX", "LOG_SOFTMAX"})
PROJECTIONS = operators_that(Effect.PRODUCT) | {"CONV_2D"}
_REPEATING, _CUTTING = operators_that(Effect.REPEATING), operators_that(Effect.CUTTING)
_FOLLOWED = ELEMENTWISE | MOVEMENT | _REPEATING | _CUTTING | JOINING | operators_that(Effect.PADDING)
_PROBABILITY_PATH = UNARY | MOVEMENT | _CUTTING | {"PACK"}
_REARRANGED = UNARY | MOVEMENT | {"PACK", "UNPACK"}
_OPAQUE = operators_that(Effect.CALLING, Effect.UNKNOWN)


# In front of it


def _followed_up(operator: Operator) -> list[Operator]:
    return producers(operator) if operator.name in _FOLLOWED else []


def products_above(starts: Iterable[Operator]) -> tuple[list[Operator], list[Operator]]:
    """The nearest products on the way up from these operators, as they are met, and where other ways end."""
    met = list(walked(starts, _followed_up, DEEPEST))
    ends = [operator for operator in met if operator.name not in _FOLLOWED and not is_product(operator)]
    return [operator for operator in met if is_product(operator)], ends


def last_computation(tensor: Tensor) -> Operator | None:
    """The elementwise operator or product that a tensor is a rearrangement of; None where it is another one."""
    operator = moved_from(tensor, MOVEMENT | _REPEATING)[0].producer
    is_known = operator is not None and (operator.name in ELEMENTWISE or multiplies_activations(operator))
    return operator if is_known else None


def masking(softmax: Operator) -> tuple[Operator, Tensor] | None:
    """The operator that adds a mask to the scores, or selects from them by one; and the mask."""
    for operator in walked(producers(softmax), _followed_up, DEEPEST):
        for tensor in operator.inputs if operator.name in MASKING else ():
            if tensor is not None and tensor.elements > 1:
                maker = [tensor.producer] if tensor.producer is not None else []
                if not products_above(maker)[0]:
                    return operator, tensor
    return None


def holds_several(operator: Operator) -> bool:
    """True where the result is more than one matrix."""
    return math.prod(operator.outputs[0].shape[:-2]) > 1


def is_residual(product: Operator) -> bool:
    """True where a product is added to what it was made of, `x + x A`: a step of a residual stream, no scores."""
    own = {moved_from(tensor, MOVEMENT)[0] for tensor in product.inputs[:2] if tensor is not None}

    def behind(one: Operator) -> list[Operator]:
        return readers(one) if one is product or one.name in MOVEMENT else []

    added = [t for one in walked([product], behind, DEEPEST) if one.name == "ADD" for t in one.inputs]
    return any(tensor is not None and moved_from(tensor, MOVEMENT)[0] in own for tensor in added)


def is_attention(softmax: Operator) -> bool:
    """True where something that scores leads to a SOFTMAX and something that weighs reads it, whatever lies between.

    Projections and SOFTMAXes end the search; but where rows of several matrices may be mixed, one projection does not.
    """
    return all(_meets_weighing(softmax, beside) for beside in (producers, readers))


def _meets_weighing(softmax: Operator, beside: Callable[[Operator], Iterable[Operator]]) -> bool:
    def around(node: tuple[Operator, int]) -> Iterator[tuple[Operator, int]]:
        for operator in beside(node[0]):
            left = node[1] - (operator.name in PROJECTIONS)
            if _weighs(operator) or (operator.name not in SOFTMAXES and left >= 0):
                yield operator, left

    met = walked([(softmax, int(holds_several(softmax)))], around, DEEPEST)
    return any(_weighs(operator) for operator, _ in met)


def _weighs(operator: Operator) -> bool:
    """True for a product of two activations, the same by MUL and a sum, and what nobody can look into."""
    if operator.name in ("SUM", "MEAN"):
        maker = moved_from(operator.input(0), MOVEMENT)[0].producer
        factors = {None} if maker is None or maker.name != "MUL" else set(maker.inputs)
        return len(factors) == 2 and not any(t is None or t.is_constant for t in factors)
    return multiplies_activations(operator) or is_opaque(operator)


def products_beside(core: Collection[Operator]) -> list[Operator]:
    """Products of several matrices that are added to the scores of a block, and that the label of its heads missed."""

    def above(operator: Operator) -> Iterable[Operator]:
        stops = operator.name in PROJECTIONS | SOFTMAXES
        return () if stops else [source for source in producers(operator) if source not in core]

    computed = [operator for operator in core if not is_product(operator)]
    starts = [source for operator in computed for source in producers(operator) if source not in core]
    return [one for one in walked(starts, above, DEEPEST) if is_product(one) and holds_several(one)]


# Behind it


def is_opaque(operator: Operator) -> bool:
    """True where nobody can say what an operator makes of what it reads: a value product, for instance."""
    return operator.name in _OPAQUE or bool(operator.shape_error)


def value_products(softmax: Operator) -> tuple[Weighings, Operator | None]:
    """The products of the probabilities with the values; and the first operator that these are not followed through."""
    products: Weighings = {}
    blocked: Operator | None = None
    path = {softmax.outputs[0]: None}

    def behind(tensor: Tensor) -> Iterator[Tensor]:
        nonlocal blocked
        for operator in tensor.consumers:
            # Each element of the result belongs to one of the tensor: a mask, a guard against NaN, a clip.
            per_element = operator.name in ELEMENTWISE and operator.outputs[0].elements == tensor.elements
            if is_product(operator) and len(operator.outputs[0].shape) > 1:
                operand = 0 if operator.inputs[0] is tensor else 1
                products.setdefault(operator, Weighing(operand, operator.outputs[0].shape[-1 - operand]))
            elif per_element or _maps(operator, tensor, _PROBABILITY_PATH):
                yield from operator.outputs
            elif blocked is None or is_opaque(operator):
                blocked = operator

    for _ in walked(path, behind):
        pass
    return products, blocked


def _maps(operator: Operator, tensor: Tensor, allowed: frozenset[str]) -> bool:
    """True where nothing but this tensor and single numbers is in the operator's results."""
    if operator.name == "PACK" and len(operator.inputs) > 1:
        return False
    if operator.name in allowed:
        return data_input(operator) is tensor
    others = [t for t in operator.inputs if t is not tensor and t is not None]
    return operator.name in ELEMENTWISE and all(t.elements == 1 for t in others)


def tail_of(products: Weighings) -> list[Tensor]:
    """The tensors behind the value products that hold all of them and nothing else, nearest first."""
    parts = {product.outputs[0]: frozenset({product}) for product in products}
    reached = [product.outputs[0] for product in products]
    # More tensors are reached while these are looked at.
    for tensor in islice(reached, DEEPEST):
        for operator in tensor.consumers:
            held = [parts[t] for t in operator.inputs if t in parts]
            maps = _maps(operator, tensor, _REARRANGED) and len(operator.outputs) == 1
            # Nothing else goes in: the ADD of two segments of keys, or a gate.
            combines = operator.name in ELEMENTWISE and len(held) == len(operator.inputs)
            if (maps or combines) and operator.outputs[0] not in parts:
                parts[operator.outputs[0]] = frozenset().union(*held)
                reached.append(operator.outputs[0])
    return [tensor for tensor in reached[:DEEPEST] if len(parts[tensor]) == len(products)]
