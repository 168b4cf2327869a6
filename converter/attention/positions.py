"""Finds rotary embeddings by dataflow: the operators that compute cosines and sines of positions, and a float form.

    position int32[1,T] -> CAST, MUL, ... -> angles (codes) -> COS -> RESHAPE, ... -> result [1,T,1,H/2]
                           leading                             anchor following

Names do not matter. All paths up from a COS or SIN end at one integer input of the graph. A label on the axis of the
positions, followed up like a head label (docs/head-axis.md), shows that each entry of the result depends on only one
position.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from edge_opt.attention.float_form import (
    ANGLES,
    RETYPED,
    Array,
    FloatForm,
    can_compute,
    in_float,
    is_code,
    real_constant,
)
from edge_opt.attention.labelled import along
from edge_opt.attention.labels import HeadLayouts
from edge_opt.ir import DType, Operator, Subgraph, Tensor
from edge_opt.ir.refusal import RefusedError, Why
from edge_opt.ir.walk import backward_slice, makers_of, only_reader, producers, reads, walked

_HALF_A_STEP = 0.501  # quantizers divide in float32
_MOST_STEPS = 64  # from the positions to a cosine, and behind it; real ones have under thirty


@dataclass(frozen=True)
class Rotary:
    """`operators`, in execution order, compute `result` from the graph input `position`, in part on integers.

    The T integers of `position` lie along an axis of size T of `result`. `exact` comes from `exact_constants`.
    """

    position: Tensor
    operators: tuple[Operator, ...]
    exact: Mapping[Tensor, Tensor] = field(default_factory=dict)

    @property
    def is_exact(self) -> bool:
        """True if the float model's constants replace all quantized ones."""
        if not self.exact:
            return False
        read = reads(self.operators)
        quantized = {tensor for tensor in read if tensor.is_constant and is_code(tensor)}
        return self.exact.keys() >= quantized

    @property
    def result(self) -> Tensor:
        """The tensor of cosines or sines that the graph reads."""
        return self.operators[-1].outputs[0]

    @cached_property
    def float_form(self) -> FloatForm:
        """The operators in float; raises RefusedError if one is not supported."""
        return in_float(self.position, self.operators, self.exact)

    @cached_property
    def axes(self) -> dict[Tensor, int]:
        """The axis of the positions in the result and, with several positions, in the tensors that lead to it.

        Raises:
            RefusedError: an entry depends on several positions, or they have no axis of their own.
        """
        _ = self.float_form  # raises if an operator is not supported
        count = self.position.elements
        shape = self.result.shape
        if count == 1 and 1 in shape:
            return {self.result: shape.index(1)}
        for axis, size in enumerate(shape):
            found = self._axes_above(axis) if size == count > 1 else {}
            if found:
                return found
        text = "its entries do not depend on one position each, in order along one axis"
        raise RefusedError(Why.POSITIONS, text, self.operators[-1], self.result)

    def _axes_above(self, axis: int) -> dict[Tensor, int]:
        """The axis of the positions in all tensors above the result, where it is `axis`; empty if it is another."""
        whole = along(self.result, axis)
        own = whole.factored[axis]
        layouts = HeadLayouts()
        places: dict[Tensor, int] = {}
        others: list[Tensor] = []
        for labelled in layouts.upwards([whole]):
            if own not in labelled.factored:
                others.append(labelled.tensor)
                continue
            if labelled.tensor is not self.position and layouts.is_end(labelled):
                return {}
            places[labelled.tensor] = labelled.factored.index(own)
        mixes = self.position in (*others, *backward_slice(others)[1])
        return {} if mixes else places

    def values(self, count: int) -> NDArray[np.float32]:
        """The result in float at positions 0 to `count` - 1, along its axis of positions."""
        axis = self.axes[self.result]
        sizes = list(self.result.shape)
        sizes[axis] = -1
        results = [run.arrays[self.float_form.result] for run in self.float_form.runs(count)]
        # `[.., T, .., R]`: the runs follow each other along the axis of the positions.
        parts = [np.moveaxis(result, -1, axis).reshape(sizes) for result in results]
        return np.concatenate(parts, axis).take(range(count), axis)

    def last_position(self, count: int) -> int | None:
        """The last position that the quantized angles can represent; None if that is `count` - 1 or more."""
        axes = self.axes
        has_axis = self.position.elements > 1
        beyond = count
        for run in self.float_form.runs(count):
            for tensor, stored in self.float_form.angles:
                *places, number = np.nonzero(_cannot_store(stored, run.arrays[tensor]))
                steps = places[axes[stored]] if has_axis and stored in axes else 0
                beyond = int((run.first[number] + steps).min(initial=beyond))
            if beyond < count:
                return beyond - 1
        return None


def _cannot_store(stored: Tensor, values: Array) -> Array:
    """Where real numbers are beyond the codes of a tensor; up to half a step beyond the limits they round to one."""
    assert stored.quantization is not None
    assert stored.dtype.numpy is not None
    limits = np.iinfo(stored.dtype.numpy.name)
    low = stored.quantization.real(limits.min - 0.5)
    high = stored.quantization.real(limits.max + 0.5)
    return (values < low) | (values > high)


# The constants before quantization


def exact_constants(graph: Subgraph, exported: Subgraph) -> dict[Tensor, Tensor]:
    """Map constants of a quantized graph to the float constants that they were rounded from.

    `exported` is the graph before quantization: the same operators in the same order, except QUANTIZE and DEQUANTIZE.
    Empty if operators differ; constants whose numbers do not round to the codes are left out.
    """
    stored = [operator for operator in graph.operators if operator.name not in RETYPED]
    real = [operator for operator in exported.operators if operator.name not in RETYPED]
    if [operator.name for operator in stored] != [operator.name for operator in real]:
        return {}
    exact: dict[Tensor, Tensor] = {}
    for operator, original in zip(stored, real, strict=True):
        pairs = zip(operator.inputs, original.inputs, strict=False)
        exact.update((old, new) for old, new in pairs if old and new and _rounds_to(new, old))
    return exact


def _rounds_to(real: Tensor, stored: Tensor) -> bool:
    """True if a float constant rounds to the codes of a quantized one: it is at most half a step away."""
    parameters = stored.quantization
    if parameters is None or len(parameters.scale) != 1 or not is_code(stored):
        return False
    if real.dtype is not DType.FLOAT32 or real.shape != stored.shape:
        return False
    if not real.has_numbers or not stored.has_numbers:
        return False
    apart = np.abs(
        real.array().astype(np.float64) - real_constant(stored).array().astype(np.float64)
    )
    return bool((apart <= _HALF_A_STEP * float(parameters.scale[0])).all())


# The search


def find_rotary(graph: Subgraph, exact: Mapping[Tensor, Tensor] | None = None) -> Iterator[Rotary]:
    """Find every cosine and sine of an integer input of the graph that is computed through quantized angles."""
    for operator in graph.operators:
        if operator.name not in ANGLES:
            continue
        leading = list(walked([operator], producers, _MOST_STEPS + 1))
        if len(leading) > _MOST_STEPS:
            continue
        sources = [tensor for tensor in reads(leading) if not tensor.is_constant]
        if (
            len(sources) == 1
            and _is_position(sources[0], graph)
            and any(map(is_code, makers_of(leading)))
        ):
            leading.sort(key=graph.place)
            following = islice(_following(graph, operator), _MOST_STEPS)
            yield Rotary(sources[0], (*leading, *following), exact or {})


def _is_position(tensor: Tensor, graph: Subgraph) -> bool:
    """True for an input of the graph that may hold positions: whole numbers."""
    is_integer = tensor.dtype in (DType.INT32, DType.INT64) and not tensor.is_quantized
    return is_integer and tensor in graph.inputs


def _following(graph: Subgraph, operator: Operator) -> Iterator[Operator]:
    """The chain of operators after this one, as long as each is the only reader and reads nothing else computed."""
    while True:
        result = operator.output
        reader = only_reader(graph, result)
        if reader is None or not can_compute(reader):
            return
        if any(other is not result for other in reader.computed):
            return
        operator = reader
        yield operator
