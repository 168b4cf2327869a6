"""What a graph must hold to be a model: the same checks for what is read and for what is written.

What is read is counted first, before it is built: shared vectors can make graphs far larger than their file.
"""

import math
from collections.abc import Callable, Iterator, Sequence
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


def check_model(
    subgraphs: Sequence[Subgraph],
    signatures: Sequence[Signature],
    bodies: Sequence[Sequence[Operator]] | None = None,
) -> None:
    """Check every tensor and operator of a model's subgraphs, what they call, and the signatures.

    `bodies` are the subgraphs' operators in execution order while they are not in them yet.

    Raises:
        ModelFormatError: names subgraph, operator and tensor, or signature.
    """
    bodies = [graph.operators for graph in subgraphs] if bodies is None else bodies
    _check_calls(subgraphs, bodies)
    defined: dict[Subgraph, Callable[[Tensor], bool]] = {}
    held: dict[Subgraph, set[Tensor]] = {}
    sound_scales: set[int] = set()
    for index, (graph, operators) in enumerate(zip(subgraphs, bodies, strict=True)):
        place = f"subgraph '{graph.name or f'#{index}'}'"
        tensors = dict.fromkeys([*graph.tensors, *used_tensors(graph, operators)])
        for position, tensor in enumerate(tensors):
            _check_tensor(tensor, f"{place}, tensor {position} '{tensor.name}'", sound_scales)
        held[graph], defined[graph] = set(tensors), _check_operators(graph, operators, place)
        _check_defined(place, {tensor.name: tensor for tensor in graph.outputs}, defined[graph])
    keys: set[str] = set()
    for signature in signatures:
        where, graph = f"signature '{signature.key}'", signature.subgraph
        if signature.key in keys:
            raise ModelFormatError(f"{where} is there twice", table="Model", field="signature_defs")
        keys.add(signature.key)
        if graph not in held:
            raise ModelFormatError(f"{where}: its subgraph is not one of the model's")
        for name, tensor in (*signature.inputs.items(), *signature.outputs.items()):
            if tensor not in held[graph]:
                raise ModelFormatError(f"{where}: its subgraph does not hold '{name}'")
        _check_defined(where, signature.outputs, defined[graph])


def _check_defined(where: str, outputs: dict[str, Tensor], is_defined: Callable[[Tensor], bool]) -> None:
    for name, tensor in outputs.items():
        if not is_defined(tensor):
            raise ModelFormatError(f"{where}: nothing defines its output '{name}'")


def _check_operators(graph: Subgraph, operators: Sequence[Operator], place: str) -> Callable[[Tensor], bool]:
    """Check operators in the order in which they run; whether a tensor is defined at the end."""
    defined = set(graph.inputs)
    made = {tensor for operator in operators for tensor in operator.outputs}

    def is_defined(tensor: Tensor) -> bool:
        return tensor in defined or _stands_alone(tensor)

    for position, operator in enumerate(operators):
        where = f"{place}, operator {position} ({operator.code.name})"
        for tensor in operator.inputs:
            # What nobody defines later on either is scratch memory that a custom operator asks for.
            is_scratch = operator.code.name == "CUSTOM" and tensor not in made
            if not (tensor is None or is_scratch or is_defined(tensor)):
                why = "cyclic, out of order, or by nobody"
                raise ModelFormatError(f"{where}: reads '{tensor.name}' before it is defined ({why})")
        for tensor in operator.outputs:
            if tensor in defined or tensor.is_constant:
                raise ModelFormatError(f"{where}: defines '{tensor.name}', which is already defined")
            defined.add(tensor)
        _check_operator(operator, where)
    return is_defined


def _check_operator(operator: Operator, where: str) -> None:
    kind = KINDS.get(operator.code.name)
    if kind is None:
        return
    reason = kind.misfit(operator.inputs, operator.outputs) if kind.is_followed else None
    options, expected = operator.options, kind.options
    if reason is None and options is None and expected in SUBGRAPH_FIELDS:
        reason = "has no options, which say what subgraph to run"
    # The runtime would not look at options of another operator, or take them for its own.
    if reason is None and options is not None and expected not in (None, options.name):
        reason = f"has {options.name}, expected {expected}"
    if reason is not None:
        raise ModelFormatError(f"{where}: {reason}")


def _check_calls(subgraphs: Sequence[Subgraph], bodies: Sequence[Sequence[Operator]]) -> None:
    """Check that there is a subgraph, that every named one exists, and that calls end before the runtime's stack."""
    if not subgraphs:
        raise ModelFormatError("expected at least one subgraph, found none", table="Model", field="subgraphs")
    called: list[set[int]] = []
    for graph, operators in zip(subgraphs, bodies, strict=True):
        called.append(set())
        for position, operator in enumerate(operators):
            for index in subgraph_indices(operator.options):
                if not 0 <= index < len(subgraphs):
                    place = f"subgraph '{graph.name}', operator {position} ({operator.name})"
                    what = f"subgraph {index} does not exist, there are {len(subgraphs)}"
                    raise ModelFormatError(f"{place}: {what}")
                called[-1].add(index)
    shallow: set[int] = set()
    for _ in range(DEEPEST):
        shallow |= {index for index, callees in enumerate(called) if callees <= shallow}
    deep = next((index for index in range(len(called)) if index not in shallow), None)
    if deep is not None:
        place = f"subgraph {deep} '{subgraphs[deep].name}'"
        raise ModelFormatError(f"{place}: its calls lead in a circle, or over {DEEPEST} subgraphs deep")


def _check_tensor(tensor: Tensor, where: str, sound_scales: set[int]) -> None:
    """Check shape, bytes and quantization; a long vector of scales that many tensors share is looked through once."""
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
    elements = math.prod(max(size, 1) for size in shape)
    if min(shape, default=0) < least or max(shape, default=0) > _MAX_SIZE or elements > _MAX_ELEMENTS:
        raise ModelFormatError(f"{where}: shape {list(shape)} is not one that files and memory can hold")


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
    allowed = MAX_EXTENT * objects_allowed() // MAX_OBJECTS
    total = 0
    for count in _extents(root):
        total += count
        if total > allowed:
            what = f"the graphs hold over {allowed} tensors, operators and indices"
            raise ModelFormatError(f"{what}: {raise_the_bound()}", table="Model", field="subgraphs")


def _extents(root: Table) -> Iterator[int]:
    """A number for each table that becomes a part of a graph: itself, and what its vectors refer to."""

    def extent(table: Table, *names: str) -> int:
        return 1 + sum(len(table.fields[name]) for name in names if name in table.fields)

    yield extent(root, "metadata_buffer")
    for signature in root.get("signature_defs") or ():
        yield extent(signature, "inputs", "outputs")
    for graph in root.get("subgraphs") or ():
        yield extent(graph, "inputs", "outputs")
        for tensor in graph.get("tensors") or ():
            yield extent(tensor, "shape", "shape_signature")
        for operator in graph.get("operators") or ():
            yield extent(operator, "inputs", "outputs", "intermediates")
