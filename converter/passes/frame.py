"""The frame rule: what a rewrite must leave alone, checked on the graph; nothing is run here and nothing changed."""

from collections.abc import Hashable, Iterable

from edge_opt.ir import Model, Operator, Subgraph, Tensor
from edge_opt.ir.region import is_pure, reads
from edge_opt.passes.rewrite import Rewrite


def frame_violation(rewrite: Rewrite) -> str | None:
    """Why the new region could touch anything outside itself; None where it cannot.

    It reads only tensors that the old region read (or new constants), and defines exactly those that the old one
    defined for others, at the place where they were defined. Only pure operators move past others.
    """
    return (
        _place_violation(rewrite)
        or _moving_violation(rewrite)
        or _reading_violation(rewrite)
        or _definition_violation(rewrite)
        or _order_violation(rewrite)
    )


def _place_violation(rewrite: Rewrite) -> str | None:
    """The new operators take the anchor's place, so it must be the last of the old ones."""
    old = set(rewrite.old)
    if rewrite.anchor not in old:
        return f"the new region is to stand at '{rewrite.anchor.name}', which is not part of the old one"
    for operator in (*rewrite.old, *rewrite.added()):
        inside = operator.subgraph is rewrite.subgraph
        if inside != (operator in old):
            where = "belongs to the graph already" if inside else "is not in the graph any more"
            return f"{_named(operator)} {where}"
    missing = len(old) - 1
    earlier = rewrite.subgraph.before(rewrite.anchor)
    while missing and earlier is not None:
        missing -= earlier in old
        earlier = rewrite.subgraph.before(earlier)
    if missing:
        return (
            f"the old region goes on behind '{rewrite.anchor.outputs[0].name}', where the new one is to stand"
        )
    return None


def _moving_violation(rewrite: Rewrite) -> str | None:
    """The new region runs where the old one ended, so what stands between its operators runs before it now.

    The proof cannot see that: it runs the region alone.
    """
    old = set(rewrite.old)
    earlier: Operator | None = rewrite.anchor
    while earlier is not None and earlier in old:
        old.remove(earlier)
        earlier = rewrite.subgraph.before(earlier)
    if not old:
        return None
    subgraphs = rewrite.calls.subgraphs if rewrite.calls is not None else ()
    staying = set(rewrite.new)
    moved = [operator for operator in rewrite.old if operator not in staying]
    for operator in (*moved, *rewrite.added()):
        if not is_pure(operator, subgraphs):
            return f"{operator.name} of the region would run after operators that it stood before"
    return None


def _reading_violation(rewrite: Rewrite) -> str | None:
    allowed = {id(tensor) for tensor in reads(rewrite.old)}
    for tensor in reads(rewrite.new):
        if id(tensor) not in allowed and not tensor.is_constant:
            return f"the new region reads '{tensor.name}', which the old one did not"
    blocks = next((tensor for tensor in reads((*rewrite.old, *rewrite.new)) if tensor.is_blockwise), None)
    if blocks is not None:
        return f"'{blocks.name}' is quantized by blocks: its scales are named by a place in its own subgraph"
    return None


def _definition_violation(rewrite: Rewrite) -> str | None:
    old_outputs = {id(tensor) for operator in rewrite.old for tensor in operator.outputs}
    defined: dict[int, Operator] = {}
    for operator in rewrite.new:
        for tensor in operator.outputs:
            if id(tensor) in defined:
                return f"the new region defines '{tensor.name}' twice"
            if rewrite.subgraph.lists(tensor) and id(tensor) not in old_outputs:
                return f"the new region defines '{tensor.name}', which is not the old one's"
            if tensor.is_constant:
                return f"the new region defines the constant '{tensor.name}'"
            defined[id(tensor)] = operator
    for tensor in rewrite.outputs():
        if id(tensor) not in defined:
            return f"the new region leaves '{tensor.name}' undefined"
    if rewrite.late_readers() is None:
        return "what others read of the old region comes back into it, or cannot wait for the new one"
    return None


def _order_violation(rewrite: Rewrite) -> str | None:
    """Old operators that stay keep their place, which is before the new ones."""
    kept = set(rewrite.new) & set(rewrite.old)
    ordered = [operator for operator in rewrite.new if operator in kept]
    ordered += rewrite.added()
    inside = {id(tensor) for operator in ordered for tensor in operator.outputs}
    ready: set[int] = set()
    for operator in ordered:
        for tensor in operator.inputs:
            if tensor is not None and id(tensor) in inside and id(tensor) not in ready:
                return f"the new region reads '{tensor.name}' before defining it"
        ready.update(id(tensor) for tensor in operator.outputs)
    return None


class Frame:
    """One subgraph as it was before a pass, to be compared with what is there after it.

    A rewrite is built aside; building it may not change anything that is already there, e.g. an options table that
    the new operators share with the old ones. The proof could not see that: it runs both regions as they then are.
    """

    def __init__(self, model: Model, subgraph: Subgraph) -> None:
        self._model = model
        self._subgraph = subgraph
        self._operators = {operator: _operator_facts(operator) for operator in subgraph.operators}
        self._tensors = {tensor: _tensor_facts(tensor) for tensor in subgraph.tensors}
        self._interface = _interface(model, subgraph)
        self._removed: set[Operator] = set()
        self._added: set[Operator] = set()

    def allow(self, rewrite: Rewrite) -> None:
        """A rewrite that becomes part of the graph."""
        added = rewrite.added()
        self._removed.update(operator for operator in rewrite.old if operator not in set(rewrite.new))
        self._added.update(added)
        for operator in added:
            self._operators[operator] = _operator_facts(operator)

    def violation(self) -> str | None:
        """What is different that no allowed rewrite accounts for; None where nothing is."""
        present = set(self._subgraph.operators)
        for operator, facts in self._operators.items():
            if operator not in present and operator not in self._removed:
                return f"{_named(operator)} is gone"
            # Also of those that were replaced: the proof took them as they were when it ran.
            if facts != _operator_facts(operator):
                return f"{_named(operator)} has other inputs, outputs or options"
        for operator in present - self._operators.keys():
            return f"{_named(operator)} is new"
        for tensor, known in self._tensors.items():
            if known != _tensor_facts(tensor):
                return f"the tensor '{tensor.name}' has another name, type, shape, quantization or bytes"
        if self._interface != _interface(self._model, self._subgraph):
            return "the graph's inputs, outputs or signatures are others"
        return None


def _named(operator: Operator) -> str:
    name = operator.outputs[0].name if operator.outputs else ""
    return f"the operator {operator.name} that defines '{name}'"


def _interface(model: Model, subgraph: Subgraph) -> Hashable:
    signatures = (
        (s.key, id(s.subgraph), *(tuple(named) + _ids(named.values()) for named in (s.inputs, s.outputs)))
        for s in model.signatures
    )
    return (_ids(subgraph.inputs), _ids(subgraph.outputs), *signatures)


def _ids(tensors: Iterable[Tensor | None]) -> tuple[int, ...]:
    return tuple(id(tensor) for tensor in tensors)


def _operator_facts(operator: Operator) -> Hashable:
    options = operator.options
    return (
        id(operator.code),
        _ids(operator.inputs),
        _ids(operator.outputs),
        None if options is None else (id(options), options.key()),
    )


def _tensor_facts(tensor: Tensor) -> Hashable:
    quantization = tensor.quantization
    # The scales of weights may be many; those arrays are the file's own and cannot be written to.
    small = quantization is not None and not quantization.is_per_axis
    numbers = quantization.key() if quantization is not None and small else None
    type_of_it = (tensor.dtype, tensor.shape, tensor.shape_signature, tensor.is_variable)
    return (tensor.name, type_of_it, id(tensor.buffer), id(quantization), numbers)
