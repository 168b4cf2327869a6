"""What a graph must hold to be a model: the same checks for what is read and for what is written."""

import math
from collections.abc import Iterable, Sequence

import numpy as np

from edge_opt.ir.checks import check_references
from edge_opt.ir.graph import Operator, Subgraph, Tensor, used_tensors
from edge_opt.ir.operators import KINDS
from edge_opt.ir.options import SUBGRAPH_FIELDS, options_table
from edge_opt.output.errors import ModelFormatError

_MAX_SIZE = (1 << 31) - 1  # of the format, which stores a size as int32
_MAX_ELEMENTS = 1 << 48
_MAX_RANK = 32  # of a numpy array, in its older versions


def check_subgraphs(subgraphs: Sequence[Subgraph]) -> None:
    """Check every tensor and operator of a model's subgraphs.

    Raises:
        ModelFormatError: names subgraph, operator and tensor.
    """
    sound_scales: set[int] = set()
    for index, graph in enumerate(subgraphs):
        check_subgraph(graph, graph.operators, index, sound_scales)
    check_references(subgraphs)


def check_subgraph(
    graph: Subgraph, operators: Iterable[Operator], index: int, sound_scales: set[int]
) -> None:
    """Check a subgraph's tensors, and its operators (not in it yet while it is read) in the order in which they run.

    A long vector of scales that many tensors share is looked through once: `sound_scales` are those already seen.

    Raises:
        ModelFormatError: names subgraph, operator and tensor.
    """
    place = f"subgraph '{graph.name or f'#{index}'}'"
    operators = list(operators)
    for position, tensor in enumerate(tensors_of(graph, operators)):
        _check_tensor(tensor, f"{place}, tensor {position} '{tensor.name}'", sound_scales)
    defined = {id(tensor) for tensor in graph.inputs}
    scratch: list[tuple[str, Tensor]] = []
    for position, operator in enumerate(operators):
        name = operator.code.name  # also where the recorded shapes are wrong
        where = f"{place}, operator {position} ({name})"
        for operand in operator.inputs:
            if operand is None or id(operand) in defined or _stands_alone(operand):
                continue
            if name != "CUSTOM":
                raise _too_early(where, operand)
            # What nobody defines later on either is scratch memory that a custom operator asks for.
            scratch.append((where, operand))
        for output in operator.outputs:
            if id(output) in defined or output.is_constant:
                raise ModelFormatError(f"{where}: defines '{output.name}', which is already defined")
            defined.add(id(output))
        _check_operator(operator, name, where)
    for where, tensor in scratch:
        if id(tensor) in defined:
            raise _too_early(where, tensor)


def _too_early(where: str, tensor: Tensor) -> ModelFormatError:
    why = "cyclic, out of order, or by nobody"
    return ModelFormatError(f"{where}: reads '{tensor.name}' before it is defined ({why})")


def _check_operator(operator: Operator, name: str, where: str) -> None:
    kind = KINDS.get(name)
    reason = kind.misfit(operator.inputs, operator.outputs) if kind and kind.is_followed else None
    if reason is not None:
        raise ModelFormatError(f"{where}: {reason}")
    options, expected = operator.options, options_table(name)
    # The runtime would not look at options of another operator, or take them for its own.
    if options is not None and expected is not None and options.name != expected:
        raise ModelFormatError(f"{where}: has {options.name}, expected {expected}")
    if options is None and expected in SUBGRAPH_FIELDS:
        raise ModelFormatError(f"{where}: has no options, which say what subgraph to run")


def tensors_of(graph: Subgraph, operators: Iterable[Operator]) -> list[Tensor]:
    """The tensors that a subgraph lists, then those that it and its operators use besides."""
    return list(dict.fromkeys([*graph.tensors, *used_tensors(graph, operators)]))


def _check_tensor(tensor: Tensor, where: str, sound_scales: set[int]) -> None:
    """Check shape, bytes and quantization of a tensor."""
    _check_shape(tensor.shape, where, 0)
    _check_shape(tensor.shape_signature or (), where, -1)
    if tensor.wrong_size is not None:
        raise ModelFormatError(f"{where}: {tensor.wrong_size}")
    parameters = tensor.quantization
    if parameters is None or not parameters.is_affine:
        return
    scale, points = parameters.scale, parameters.zero_point
    if id(scale) not in sound_scales:
        if not np.isfinite(scale).all() or (scale < 0).any():
            raise ModelFormatError(f"{where}: quantization scales must be finite and not negative")
        sound_scales.add(id(scale))
    if len(points) not in (1, len(scale)):
        raise ModelFormatError(f"{where}: {len(scale)} scales but {len(points)} zero points")
    axis, shape = parameters.dimension, tensor.shape
    if parameters.is_per_axis and shape and not (0 <= axis < len(shape) and shape[axis] == len(scale)):
        raise ModelFormatError(f"{where}: {len(scale)} scales do not fit axis {axis} of {list(shape)}")


def _check_shape(shape: Sequence[int], where: str, least: int) -> None:
    if len(shape) > _MAX_RANK:
        raise ModelFormatError(f"{where}: {len(shape)} dimensions, expected at most {_MAX_RANK}")
    if any(size < least for size in shape) or math.prod(max(size, 1) for size in shape) > _MAX_ELEMENTS:
        raise ModelFormatError(f"{where}: shape {list(shape)} is not one that memory can hold")
    if max(shape, default=0) > _MAX_SIZE:
        raise ModelFormatError(
            f"{where}: shape {list(shape)} has a size over {_MAX_SIZE}, the format's largest"
        )


def _stands_alone(tensor: Tensor) -> bool:
    """Whether there is something to read without an operator that defines it.

    Source: TFLite, tools/verifier.cc, VerifySubGraphConsistency; a tensor without elements needs no bytes.
    """
    external = tensor.table is not None and bool(tensor.table.get("external_buffer"))
    return tensor.is_constant or external or tensor.is_variable or not tensor.elements
