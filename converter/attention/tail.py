"""What is behind a SOFTMAX: the value products, and what becomes of them until something else than a rearrangement."""

from edge_opt.attention.labelling import DEEPEST, Weighing, Weighings
from edge_opt.attention.refusal import Refusal
from edge_opt.attention.rules import CUTTING, ELEMENTWISE, MOVEMENT, UNARY, data_input, is_product
from edge_opt.ir import Operator, Tensor

_PROBABILITY_PATH = UNARY | MOVEMENT | CUTTING | {"UNPACK", "PACK"}
_REARRANGED = UNARY | MOVEMENT | {"PACK", "UNPACK"}
OPAQUE = frozenset({"STABLEHLO_COMPOSITE", "CUSTOM", "CALL", "IF", "WHILE"})
"""Operators that may do anything, a value product for instance."""


def value_products(softmax: Operator) -> Weighings | Refusal:
    """The products of the probabilities with the values."""
    found: Weighings = {}
    blocked: Operator | None = None
    seen: set[int] = set()
    frontier = [softmax.outputs[0]]
    while frontier:
        tensor = frontier.pop()
        for operator in tensor.consumers:
            if id(operator) in seen:
                continue
            seen.add(id(operator))
            if is_product(operator):
                operand = 0 if operator.inputs[0] is tensor else 1
                shape = operator.outputs[0].shape
                if len(shape) < 2:
                    return Refusal("a value product must be a matrix", operator)
                found[operator] = Weighing(operand, shape[-1 - operand])
            elif _maps(operator, tensor, _PROBABILITY_PATH) or _per_element(operator, tensor):
                frontier.extend(operator.outputs)
            elif blocked is None or operator.name in OPAQUE:
                blocked = operator
    if found:
        return found
    if blocked is not None and blocked.name in OPAQUE:
        return Refusal("the probabilities go into an operator that nothing is known of", blocked)
    return Refusal("no value product behind this SOFTMAX: not attention", blocked)


def _per_element(operator: Operator, tensor: Tensor) -> bool:
    """True where each element of the result belongs to one of the tensor: a mask, a guard against NaN, a clip."""
    return operator.name in ELEMENTWISE and operator.outputs[0].elements == tensor.elements


def _maps(operator: Operator, tensor: Tensor, allowed: frozenset[str]) -> bool:
    """True where nothing but this tensor and single numbers is in the operator's results."""
    if operator.name == "PACK" and len(operator.inputs) > 1:
        return False
    if operator.name in allowed:
        return data_input(operator) is tensor
    others = [t for t in operator.inputs if t is not tensor and t is not None]
    return operator.name in ELEMENTWISE and all(t.elements == 1 for t in others)


class Tail:
    """The tensors behind the value products that hold all of them, nearest first; `ends` read them and do more."""

    def __init__(self, products: Weighings) -> None:
        self.tensors: list[Tensor] = []
        self.ends: list[Operator] = []
        self._products = products
        self._parts = {id(product.outputs[0]): frozenset({product}) for product in products}
        self._walk()

    def _walk(self) -> None:
        frontier = [product.outputs[0] for product in self._products]
        for position in range(DEEPEST):
            if position == len(frontier):
                return
            tensor = frontier[position]
            whole = len(self._parts[id(tensor)]) == len(self._products)
            if whole:
                self.tensors.append(tensor)
            for operator in tensor.consumers:
                maps = _maps(operator, tensor, _REARRANGED) and len(operator.outputs) == 1
                if maps or self._combines(operator):
                    self._enter(operator, frontier)
                elif whole:
                    self.ends.append(operator)

    def _held(self, operator: Operator) -> list[frozenset[Operator]]:
        return [self._parts[id(t)] for t in operator.inputs if t is not None and id(t) in self._parts]

    def _combines(self, operator: Operator) -> bool:
        """True where nothing else goes into an elementwise operator: the ADD of two segments of keys, or a gate."""
        return operator.name in ELEMENTWISE and len(self._held(operator)) == len(operator.inputs)

    def _enter(self, operator: Operator, frontier: list[Tensor]) -> None:
        result = operator.outputs[0]
        if id(result) not in self._parts:
            self._parts[id(result)] = frozenset().union(*self._held(operator))
            frontier.append(result)
