"""The frame rule: what a rewrite must leave alone, checked on the graph; nothing is run here and nothing changed."""

from collections.abc import Hashable

from edge_opt.ir import Model, Operator, Subgraph, Tensor
from edge_opt.ir.refusal import RefusedError
from edge_opt.ir.walk import is_pure, reads
from edge_opt.passes.rewrite import Rewrite


def check_frame(rewrite: Rewrite) -> None:
    """Whether the new region leaves alone what is outside itself.

    It reads only tensors that the old region read (or new constants), and defines exactly those that the old one
    defined for others, at the place where they were defined. Only pure operators move past others.

    Raises:
        RefusedError: it may touch something else.
    """
    span = _check_place(rewrite)
    _check_moving(rewrite, span)
    _check_reading(rewrite)
    _check_definitions(rewrite)
    rewrite.late_readers()
    _check_order(rewrite)


def _check_place(rewrite: Rewrite) -> list[Operator]:
    """The new operators take the anchor's place, so it must be the last of the old ones; gives the region's span."""
    old = set(rewrite.old)
    if (anchor := rewrite.anchor) not in old:
        raise RefusedError(f"the new region is to stand at '{anchor.name}', which is not part of the old one")
    for operator in (*rewrite.old, *rewrite.added()):
        inside = operator.subgraph is rewrite.subgraph
        if inside != (operator in old):
            where = "belongs to the graph already" if inside else "is not in the graph any more"
            raise RefusedError(f"{_named(operator)} {where}")
    span = rewrite.span()
    if not old.issubset(span):
        name = rewrite.anchor.outputs[0].name
        raise RefusedError(f"the old region goes on behind '{name}', where the new one is to stand")
    return span


def _check_moving(rewrite: Rewrite, span: list[Operator]) -> None:
    """The new region runs where the old one ended, so what stands between its operators runs before it now.

    The proof cannot see that: it runs the region alone.
    """
    if set(rewrite.old).issuperset(span):
        return
    subgraphs = rewrite.calls.subgraphs if rewrite.calls is not None else ()
    for operator in (*rewrite.removed(), *rewrite.added()):
        if not is_pure(operator, subgraphs):
            raise RefusedError(
                f"{operator.name} of the region would run after operators that it stood before"
            )


def _check_reading(rewrite: Rewrite) -> None:
    allowed = set(reads(rewrite.old))
    for tensor in reads(rewrite.new):
        if tensor not in allowed and not tensor.is_constant:
            raise RefusedError(f"the new region reads '{tensor.name}', which the old one did not")
    for tensor in reads((*rewrite.old, *rewrite.new)):
        if tensor.is_blockwise:
            raise RefusedError(
                f"'{tensor.name}' is quantized by blocks: its scales are named by a place in its own subgraph"
            )


def _check_definitions(rewrite: Rewrite) -> None:
    old_outputs = {tensor for operator in rewrite.old for tensor in operator.outputs}
    defined: set[Tensor] = set()
    for operator in rewrite.new:
        for tensor in operator.outputs:
            if tensor in defined:
                raise RefusedError(f"the new region defines '{tensor.name}' twice")
            if rewrite.subgraph.lists(tensor) and tensor not in old_outputs:
                raise RefusedError(f"the new region defines '{tensor.name}', which is not the old one's")
            if tensor.is_constant:
                raise RefusedError(f"the new region defines the constant '{tensor.name}'")
            defined.add(tensor)
    for tensor in rewrite.outputs():
        if tensor not in defined:
            raise RefusedError(f"the new region leaves '{tensor.name}' undefined")


def _check_order(rewrite: Rewrite) -> None:
    """Old operators that stay keep their place, which is before the new ones."""
    kept = set(rewrite.old)
    ordered = [operator for operator in rewrite.new if operator in kept]
    ordered += rewrite.added()
    undefined = {tensor for operator in ordered for tensor in operator.outputs}
    for operator in ordered:
        for tensor in operator.inputs:
            if tensor in undefined:
                raise RefusedError(f"the new region reads '{tensor.name}' before defining it")
        undefined.difference_update(operator.outputs)


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
        self._removed.update(rewrite.removed())
        self._added.update(added)
        for operator in added:
            self._operators[operator] = _operator_facts(operator)

    def check(self) -> None:
        """Whether everything is as it was, but for the allowed rewrites.

        Raises:
            RefusedError: something else is different.
        """
        present = set(self._subgraph.operators)
        for operator, facts in self._operators.items():
            if operator not in present and operator not in self._removed:
                raise RefusedError(f"{_named(operator)} is gone")
            # Also of those that were replaced: the proof took them as they were when it ran.
            if facts != _operator_facts(operator):
                raise RefusedError(f"{_named(operator)} has other inputs, outputs or options")
        for operator in present - self._operators.keys():
            raise RefusedError(f"{_named(operator)} is new")
        for tensor, known in self._tensors.items():
            if known != _tensor_facts(tensor):
                raise RefusedError(
                    f"the tensor '{tensor.name}' has another name, type, shape, quantization or bytes"
                )
        if self._interface != _interface(self._model, self._subgraph):
            raise RefusedError("the graph's inputs, outputs or signatures are others")


def _named(operator: Operator) -> str:
    name = operator.outputs[0].name if operator.outputs else ""
    return f"the operator {operator.name} that defines '{name}'"


def _interface(model: Model, subgraph: Subgraph) -> Hashable:
    signatures = (
        (s.key, s.subgraph, tuple(s.inputs.items()), tuple(s.outputs.items())) for s in model.signatures
    )
    return (tuple(subgraph.inputs), tuple(subgraph.outputs), *signatures)


def _operator_facts(operator: Operator) -> Hashable:
    options = operator.options
    seen = None if options is None else (id(options), options.key())
    return (operator.code, tuple(operator.inputs), tuple(operator.outputs), seen)


def _tensor_facts(tensor: Tensor) -> Hashable:
    quantization = tensor.quantization
    # The scales of weights may be many; those arrays are the file's own and cannot be written to.
    small = quantization is not None and not quantization.is_per_axis
    numbers = quantization.key() if quantization is not None and small else None
    type_of_it = (tensor.dtype, tensor.shape, tensor.shape_signature, tensor.is_variable)
    return (tensor.name, type_of_it, id(tensor.buffer), id(quantization), numbers)
