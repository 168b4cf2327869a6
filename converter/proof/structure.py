"""What a region computes without its numbers, so that regions are compared and not run. Nothing is run."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import numpy as np

from edge_opt.ir import Model, Operator, Subgraph, Tensor
from edge_opt.ir.operators import Effect, operators_that
from edge_opt.schema.data import Data
from edge_opt.schema.table import Table

Number = tuple[Hashable, ...]
"""The quantization parameters of one tensor, or the bytes of one constant that is real or stands for reals."""

_MOVES = operators_that(Effect.REARRANGING, Effect.CUTTING, Effect.JOINING)


@dataclass(frozen=True, slots=True)
class Structure:
    """Both versions of a region: a digest of all but their numbers, and the numbers of each, in order.

    Regions of equal structures compute the same; names and calibrated ranges are no part of it. `moves_only`: the new
    version computes with operators of the old one alone, and otherwise only moves data.
    """

    digest: bytes
    before: tuple[Number, ...]
    after: tuple[Number, ...]
    moves_only: bool

    def covers(self, other: Structure) -> bool:
        """Whether a verification of this region stands for the other, which is this one with other numbers.

        The numbers of `before` are replaced one by one: equal ones by equal ones, because numbers that are equal here
        and differ there may have been mixed up here unseen. Then each number of `after` must be one of `before`, and
        replaced as there. So a scale of another layer, or one that is a unit in the last place off, makes a structure
        of its own; and so does what the new version computes by itself, which may show at the other numbers only.
        """
        if self.digest != other.digest or not self.moves_only:
            return False
        replaced: dict[Number, Number] = {}
        for here, there in zip(self.before, other.before, strict=True):
            if replaced.setdefault(here, there) != there:
                return False
        return all(replaced.get(here) == there for here, there in zip(self.after, other.after, strict=True))


def structure(before: Model, after: Model) -> Structure:
    """The structure of a region of which these are the two versions, as `cut_out` makes them."""
    graphs = [list(map(_graph, model.subgraphs)) for model in (before, after)]
    moves_only = _computing(after) <= _computing(before)
    return Structure(
        sha256(repr(graphs).encode()).digest(), _all_numbers(before), _all_numbers(after), moves_only
    )


def _all_numbers(model: Model) -> tuple[Number, ...]:
    tensors = (tensor for graph in model.subgraphs for tensor in graph.tensors)
    return tuple(number for tensor in tensors for number in _numbers(tensor))


def _computing(model: Model) -> set[str]:
    """The operators that do more than move data, with their options."""
    operators = (operator for graph in model.subgraphs for operator in graph.operators)
    return {
        repr((operator.code.key(), _content(operator.options)))
        for operator in operators
        if _computes(operator)
    }


def _computes(operator: Operator) -> bool:
    activation = operator.options and operator.options.fields.get("fused_activation_function")
    return operator.name not in _MOVES or bool(activation)


def _graph(graph: Subgraph) -> Iterable[object]:
    """All that a subgraph computes with but its numbers; tensors by their place."""
    place = {tensor: index for index, tensor in enumerate(graph.tensors)}
    operators = [
        (
            operator.code.key(),
            _content(operator.options),
            _content(operator.table),
            [tensor and place[tensor] for tensor in operator.inputs],
            [place[tensor] for tensor in (*operator.outputs, *operator.intermediates)],
        )
        for operator in graph.operators
    ]
    ends = [[place[tensor] for tensor in tensors] for tensors in (graph.inputs, graph.outputs)]
    return [_tensor(tensor) for tensor in graph.tensors], operators, ends


def _tensor(tensor: Tensor) -> Iterable[object]:
    quantization = None if tensor.quantization is None else tensor.quantization.table
    if quantization is not None and tensor.is_quantized:
        quantization = quantization.get("details")
    data = None if tensor.buffer is None or _is_number(tensor) else tensor.buffer.data
    numbers = tensor.is_quantized, _is_number(tensor)
    kind = tensor.dtype.name, tensor.shape, tensor.is_variable
    return *kind, *numbers, _content(quantization), _content(data), _content(tensor.table)


def _numbers(tensor: Tensor) -> Iterator[Number]:
    if tensor.quantization is not None and tensor.is_quantized:
        yield tensor.quantization.key()
    if _is_number(tensor):
        assert tensor.buffer is not None
        yield tensor.dtype.name, _content(tensor.buffer.data)


def _is_number(tensor: Tensor) -> bool:
    """True for a constant that computes; one that says where to cut or how to turn is structure."""
    return tensor.is_constant and (tensor.dtype.is_float or tensor.is_quantized)


def _content(value: Any) -> Any:
    """The value of a table's field: the same for other objects that say the same."""
    if isinstance(value, Table):
        return value.name, sorted((name, _content(part)) for name, part in value.fields.items())
    if isinstance(value, list):
        return list(map(_content, value))
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.tobytes()
    return sha256(value.view().data).digest() if isinstance(value, Data) else value
