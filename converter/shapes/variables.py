"""Which shapes are assigned to the variables of a model; it follows handles, not data."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edge_opt.shapes.control_flow import common_shape

if TYPE_CHECKING:
    from edge_opt.ir import Model, Operator, Tensor
    from edge_opt.shapes.dimension import Shape


class Variables:
    """The shape that each variable has after any of the model's assignments to it."""

    def __init__(self, model: Model) -> None:
        self._shapes: dict[object, Shape | None] = {}
        for subgraph in model.subgraphs:
            for op in subgraph.operators:
                if op.name == "ASSIGN_VARIABLE":
                    self._assign(op)

    def _assign(self, op: Operator) -> None:
        if len(op.inputs) != 2 or op.inputs[1] is None:
            return
        name, shape = _name_of(op.inputs[0]), op.inputs[1].shape
        if name is not None:
            self._shapes[name] = common_shape(self._shapes.get(name, shape), shape)

    def shape(self, handle: Tensor | None) -> Shape | None:
        """What a read of the handle gives; None where the handle is not made in the same subgraph."""
        return self._shapes.get(_name_of(handle))


def _name_of(handle: Tensor | None) -> object:
    """The variable behind a handle: its container and shared name."""
    producer = None if handle is None else handle.producer
    if producer is None or producer.name != "VAR_HANDLE" or producer.options is None:
        return None
    fields = producer.options.fields
    return (fields.get("container") or "", fields.get("shared_name") or "")
