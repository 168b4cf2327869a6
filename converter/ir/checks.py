"""What a graph must hold to be a model: the same checks for what is read and for what is written.

What is read is counted first, before it is built: shared vectors can make graphs far larger than their file.
"""

import math
from collections.abc import Iterable, Sequence
from graphlib import CycleError, TopologicalSorter
from typing import Final

import numpy as np

from edge_opt.base.errors import ModelFormatError
from edge_opt.ir.graph import Operator, Signature, Subgraph, Tensor, used_tensors
from edge_opt.ir.operators import KINDS, SUBGRAPH_FIELDS, subgraph_indices
from edge_opt.schema.reader import MAX_OBJECTS, objects_allowed, raise_the_bound
from edge_opt.schema.table import Table

_MAX_SIZE: Final = (1 << 31) - 1  # of the format, which stores a size as int32
_MAX_ELEMENTS: Final = 1 << 48
_MAX_RANK: Final = 32  # of a numpy array, in its older versions

# Tensors, operators and their indices and sizes; Gemma3-1B with prefill and decode has 50,000. The bound keeps what
# the reader lets through within a second.
MAX_EXTENT: Final = 1 << 18

# The runtime prepares nested subgraphs on its stack; exporters nest two or three deep.
DEEPEST: Final = 48


def check_model(subgraphs: Sequence[Subgraph], signatures: Sequence[Signature]) -> None:
    """Check every tensor and operator of a model's subgraphs, and its signatures.

    Raises:
        ModelFormatError: names subgraph, operator and tensor, or signature.
    """
    sound_scales: set[int] = set()
    for index, graph in enumerate(subgraphs):
        check_subgraph(graph, graph.operators, index, sound_scales)
    check_references(subgraphs)
    check_signatures(signatures, subgraphs)


def check_signatures(signatures: Sequence[Signature], subgraphs: Sequence[Subgraph]) -> None:
    """Check that no two signatures have the same key, and that their tensors are in their subgraphs and defined.

    Raises:
        ModelFormatError: names signature and tensor.
    """
    inputs = {graph: set(graph.inputs) for graph in subgraphs}
    keys: set[str] = set()
    for signature in signatures:
        where, graph = f"signature '{signature.key}'", signature.subgraph
        if signature.key in keys:
            raise ModelFormatError(f"{where} is there twice", table="Model", field="signature_defs")
        keys.add(signature.key)
        if graph not in inputs:
            raise ModelFormatError(f"{where}: its subgraph is not one of the model's")
        for name, tensor in (*signature.inputs.items(), *signature.outputs.items()):
            if not graph.lists(tensor) and tensor not in used_tensors(graph, graph.operators):
                raise ModelFormatError(f"{where}: its subgraph does not hold '{name}'")
        for name, tensor in signature.outputs.items():
            if tensor.producer is None and tensor not in inputs[graph] and not _stands_alone(tensor):
                raise ModelFormatError(f"{where}: nothing defines its output '{name}'")


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
    for position, tensor in enumerate(dict.fromkeys([*graph.tensors, *used_tensors(graph, operators)])):
        _check_tensor(tensor, f"{place}, tensor {position} '{tensor.name}'", sound_scales)
    defined = set(graph.inputs)
    scratch: list[tuple[str, Tensor]] = []
    for position, operator in enumerate(operators):
        where = f"{place}, operator {position} ({operator.code.name})"
        for operand in (t for t in operator.inputs if t is not None and t not in defined):
            if _stands_alone(operand):
                continue
            if operator.code.name != "CUSTOM":
                raise _too_early(where, operand)
            # What nobody defines later on either is scratch memory that a custom operator asks for.
            scratch.append((where, operand))
        for output in operator.outputs:
            if output in defined or output.is_constant:
                raise ModelFormatError(f"{where}: defines '{output.name}', which is already defined")
            defined.add(output)
        _check_operator(operator, where)
    if late := next((entry for entry in scratch if entry[1] in defined), None):
        raise _too_early(*late)
    undefined = [tensor for tensor in graph.outputs if tensor not in defined and not _stands_alone(tensor)]
    if undefined:
        raise ModelFormatError(f"{place}: nothing defines its output '{undefined[0].name}'")


def _too_early(where: str, tensor: Tensor) -> ModelFormatError:
    why = "cyclic, out of order, or by nobody"
    return ModelFormatError(f"{where}: reads '{tensor.name}' before it is defined ({why})")


def _check_operator(operator: Operator, where: str) -> None:
    kind = KINDS.get(operator.code.name)
    if kind is None:
        return
    reason = kind.misfit(operator.inputs, operator.outputs) if kind.is_followed else None
    if reason is not None:
        raise ModelFormatError(f"{where}: {reason}")
    options, expected = operator.options, kind.options
    # The runtime would not look at options of another operator, or take them for its own.
    if options is not None and expected is not None and options.name != expected:
        raise ModelFormatError(f"{where}: has {options.name}, expected {expected}")
    if options is None and expected in SUBGRAPH_FIELDS:
        raise ModelFormatError(f"{where}: has no options, which say what subgraph to run")


def check_references(subgraphs: Sequence[Subgraph]) -> None:
    """Check that there is a subgraph, that every named one exists, and that none leads back to itself or goes too deep.

    The runtime would call itself until its stack ends.

    Raises:
        ModelFormatError: names subgraph and operator.
    """
    if not subgraphs:
        raise ModelFormatError("expected at least one subgraph, found none", table="Model", field="subgraphs")
    called = [_calls(graph, len(subgraphs)) for graph in subgraphs]
    try:
        order = list(TopologicalSorter(dict(enumerate(called))).static_order())
    except CycleError as error:
        circle = set(error.args[1])
        caller = max(circle)
        callee = min(circle.intersection(called[caller]))
        what = f"calls subgraph {callee}, which leads back here: it would never end"
        raise ModelFormatError(f"{called[caller][callee]}: {what}") from None
    depths: dict[int, int] = {}
    for index in order:
        depths[index] = 1 + max((depths[callee] for callee in called[index]), default=0)
        if depths[index] > DEEPEST:
            place = f"subgraph {index} '{subgraphs[index].name}'"
            raise ModelFormatError(
                f"{place}: calls go {depths[index]} subgraphs deep, expected at most {DEEPEST}"
            )


def _calls(graph: Subgraph, count: int) -> dict[int, str]:
    """Each subgraph that operators name, with the first that does."""
    calls: dict[int, str] = {}
    for position, operator in enumerate(graph.operators):
        for index in subgraph_indices(operator.options):
            place = calls.setdefault(index, f"subgraph '{graph.name}', operator {position} ({operator.name})")
            if not 0 <= index < count:
                raise ModelFormatError(f"{place}: subgraph {index} does not exist, there are {count}")
    return calls


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
    lowest = min(shape, default=1)
    elements = math.prod(shape if lowest > 0 else [max(size, 1) for size in shape])
    if lowest < least or elements > _MAX_ELEMENTS:
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


def check_extent(root: Table) -> None:
    """Refuse a model whose graphs hold more than `MAX_EXTENT` things, each counted as often as it is referred to.

    The bound grows with `objects_allowed`. A thousand subgraphs that share one vector of many tensors take
    little room in a file and very much in memory.

    Raises:
        ModelFormatError: there are too many.
    """
    sizes: dict[int, int] = {}

    def lengths(table: Table, *names: str) -> int:
        return sum(len(table.fields[name]) for name in names if name in table.fields)

    def listed(tables: list[Table] | None, *names: str) -> int:
        if id(tables) not in sizes:
            sizes[id(tables)] = sum(1 + lengths(table, *names) for table in tables or ())
        return sizes[id(tables)]

    total = lengths(root, "metadata_buffer")
    for table in (*(root.get("subgraphs") or ()), *(root.get("signature_defs") or ())):
        total += lengths(table, "inputs", "outputs")
    for graph in root.get("subgraphs") or ():
        total += listed(graph.get("tensors"), "shape", "shape_signature")
        total += listed(graph.get("operators"), "inputs", "outputs", "intermediates")
    allowed = MAX_EXTENT * objects_allowed() // MAX_OBJECTS
    if total > allowed:
        what = f"the graphs hold {total} tensors, operators and indices, expected at most {allowed}"
        raise ModelFormatError(f"{what}: {raise_the_bound()}", table="Model", field="subgraphs")
