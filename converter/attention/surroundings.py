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
from edge_opt.ir.refusal import Refusal
from edge_opt.ir.walk import moved_from, producers, readers, walked

JOINING = operators_that(Effect.JOINING)
MASKING = frozenset({"ADD", "SUB", "SELECT", "SELECT_V2"})
SOFTMAXES = frozenset({"SOFTMAX", "LOG_SOFTMAX"})
SUMS = frozenset({"SUM", "MEAN"})
PROJECTIONS = operators_that(Effect.PRODUCT) | {"CONV_2D"}
_REPEATING, _CUTTING = operators_that(Effect.REPEATING), operators_that(Effect.CUTTING)
_FOLLOWED = ELEMENTWISE | MOVEMENT | _REPEATING | _CUTTING | JOINING | operators_that(Effect.PADDING)
_PROBABILITY_PATH = UNARY | MOVEMENT | _CUTTING | {"PACK"}
_REARRANGED = UNARY | MOVEMENT | {"PACK", "UNPACK"}
_OPAQUE = operators_that(Effect.CALLING, Effect.UNKNOWN)


def near(starts: Iterable[Operator], beside: Callable[[Operator], Iterable[Operator]]) -> Iterator[Operator]:
    """These operators and those `beside` each, the nearest first; as many as real blocks have."""
    return walked(starts, beside, DEEPEST)


# In front of it


def _followed_up(operator: Operator) -> list[Operator]:
    return producers(operator) if operator.name in _FOLLOWED else []


def products_above(starts: Iterable[Operator]) -> tuple[list[Operator], list[Operator]]:
    """The nearest products on the way up from these operators, as they are met, and where other ways end."""
    met = list(near(starts, _followed_up))
    ends = [operator for operator in met if operator.name not in _FOLLOWED and not is_product(operator)]
    return [operator for operator in met if is_product(operator)], ends


def last_computation(tensor: Tensor) -> Operator | None:
    """The elementwise operator or product that a tensor is a rearrangement of; None where it is another one."""
    operator = moved_from(tensor, MOVEMENT | _REPEATING)[0].producer
    if operator is None or not (operator.name in ELEMENTWISE or multiplies_activations(operator)):
        return None
    return operator


def masking(softmax: Operator) -> tuple[Operator, Tensor] | None:
    """The operator that adds a mask to the scores, or selects from them by one; and the mask."""
    for operator in near(producers(softmax), _followed_up):
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
    behind = near([product], lambda one: readers(one) if one is product or one.name in MOVEMENT else ())
    added = [tensor for operator in behind if operator.name == "ADD" for tensor in operator.inputs]
    return any(tensor is not None and moved_from(tensor, MOVEMENT)[0] in own for tensor in added)


def between_products(softmax: Operator) -> bool:
    """True where a product of two activations leads to a SOFTMAX and another one reads it, whatever lies between.

    Where it holds more than one matrix of rows, one of the two will do, or both through a projection, which may mix
    heads. Other projections and SOFTMAXes end the search.
    """
    reached = [_meets_product(softmax, beside, 0) for beside in (producers, readers)]
    if not holds_several(softmax):
        return all(reached)
    return any(reached) or all(_meets_product(softmax, beside, 1) for beside in (producers, readers))


def _meets_product(
    softmax: Operator, beside: Callable[[Operator], Iterable[Operator]], projections: int
) -> bool:
    def around(node: tuple[Operator, int]) -> Iterator[tuple[Operator, int]]:
        for operator in beside(node[0]):
            left = node[1] - (operator.name in PROJECTIONS)
            if multiplies_activations(operator) or (operator.name not in SOFTMAXES and left >= 0):
                yield operator, left

    met = walked([(softmax, projections)], around, DEEPEST)
    return any(multiplies_activations(operator) for operator, _ in met)


def products_beside(core: Collection[Operator]) -> list[Operator]:
    """Products of several matrices that are added to the scores of a block, and that the label of its heads missed."""

    def above(operator: Operator) -> Iterable[Operator]:
        stops = operator.name in PROJECTIONS | SOFTMAXES
        return () if stops else [source for source in producers(operator) if source not in core]

    computed = [operator for operator in core if not is_product(operator)]
    starts = [source for operator in computed for source in producers(operator) if source not in core]
    return [one for one in near(starts, above) if is_product(one) and holds_several(one)]


# Behind it


def is_opaque(operator: Operator | None) -> bool:
    """True where nobody can say what an operator makes of what it reads: a value product, for instance."""
    return operator is not None and (operator.name in _OPAQUE or bool(operator.shape_error))


def value_products(softmax: Operator) -> Weighings | Refusal:
    """The products of the probabilities with the values.

    Where there is none, the operator that the probabilities are not followed through.
    """
    products: Weighings = {}
    blocked: Operator | None = None
    seen: set[Operator] = set()
    frontier = [softmax.outputs[0]]
    while frontier:
        tensor = frontier.pop()
        for operator in tensor.consumers:
            if operator in seen:
                continue
            seen.add(operator)
            if is_product(operator):
                operand = 0 if operator.inputs[0] is tensor else 1
                shape = operator.outputs[0].shape
                if len(shape) < 2:
                    return Refusal("a value product must be a matrix", operator)
                products[operator] = Weighing(operand, shape[-1 - operand])
                continue
            # Each element of the result belongs to one of the tensor: a mask, a guard against NaN, a clip.
            per_element = operator.name in ELEMENTWISE and operator.outputs[0].elements == tensor.elements
            if per_element or _maps(operator, tensor, _PROBABILITY_PATH):
                frontier.extend(operator.outputs)
            elif blocked is None or is_opaque(operator):
                blocked = operator
    if products:
        return products
    if is_opaque(blocked):
        return Refusal("the probabilities go into an operator that nothing is known of", blocked)
    return Refusal("no value product behind this SOFTMAX: not attention", blocked)


def weighing_sum(softmax: Operator) -> Operator | None:
    """The SUM or MEAN in which the rows of a SOFTMAX weigh other activations, as a product without a product operator.

    None where there is none, or where learned scores (a gate, a classifier) weigh them.
    """
    ends = products_above(producers(softmax))[1]
    if ends and all(end.name in PROJECTIONS for end in ends):
        return None

    def behind(operator: Operator) -> Iterable[Operator]:
        followed = operator is softmax or operator.name in _PROBABILITY_PATH | ELEMENTWISE | _REPEATING
        return readers(operator) if followed else ()

    met = list(near([softmax], behind))
    read = [operator.inputs for operator in met if operator.name == "MUL"]
    weighs = any(all(t is not None and not t.is_constant for t in tensors) for tensors in read)
    return next((operator for operator in met if weighs and operator.name in SUMS), None)


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
