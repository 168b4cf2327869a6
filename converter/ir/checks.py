"""Validity checks of a model, the same for reading and writing."""

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

import numpy as np

from edge_opt.base.errors import ModelFormatError
from edge_opt.ir.dtypes import Quantization
from edge_opt.ir.graph import Operator, Shape, Signature, Subgraph, Tensor, used_tensors
from edge_opt.ir.operators import KINDS, SUBGRAPH_FIELDS, subgraph_indices

_MAX_SIZE = (1 << 31) - 1  # of the format, which stores a size as int32
_MAX_ELEMENTS = 1 << 48
_MAX_RANK = 32  # of a numpy array, in its older versions

# The runtime prepares nested subgraphs on its stack; exporters nest two or three deep.
DEEPEST = 48


def check_model(subgraphs: Sequence[Subgraph], signatures: Sequence[Signature]) -> None:
    """Check a model's subgraphs, calls and signatures; ModelFormatError names the invalid part."""
    _check_calls(subgraphs)
    held: dict[Subgraph, dict[Tensor, bool]] = {}  # tensor -> is it defined at the end?
    for index, graph in enumerate(subgraphs):
        place = f"subgraph '{graph.name or f'#{index}'}'"
        tensors = dict.fromkeys([*graph.tensors, *used_tensors(graph)])
        for position, tensor in enumerate(tensors):
            reason = _wrong_tensor(tensor)
            if reason is not None:
                raise ModelFormatError(f"{place}, tensor {position} '{tensor.name}': {reason}")
        defined = _check_operators(graph, place)
        held[graph] = {tensor: _is_defined(tensor, defined) for tensor in tensors}
        _check_outputs(place, ((tensor.name, tensor) for tensor in graph.outputs), held[graph])
    _check_signatures(signatures, held)


def _check_signatures(
    signatures: Iterable[Signature], held: Mapping[Subgraph, Mapping[Tensor, bool]]
) -> None:
    """Check names and arguments; `held` has each subgraph's tensors, and if they are defined at its end."""
    keys: set[str] = set()
    for signature in signatures:
        where = f"signature '{signature.key}'"
        graph = signature.subgraph
        if signature.key in keys:
            raise ModelFormatError(
                f"{where} is defined twice", table="Model", field="signature_defs"
            )
        keys.add(signature.key)
        if graph not in held:
            raise ModelFormatError(f"{where}: its subgraph is not one of the model's")
        for name, tensor in (*signature.inputs.items(), *signature.outputs.items()):
            if tensor not in held[graph]:
                raise ModelFormatError(f"{where}: its subgraph does not hold '{name}'")
        _check_outputs(where, signature.outputs.items(), held[graph])


def _check_outputs(
    where: str, outputs: Iterable[tuple[str, Tensor]], held: Mapping[Tensor, bool]
) -> None:
    for name, tensor in outputs:
        if not held[tensor]:
            raise ModelFormatError(f"{where}: nothing defines its output '{name}'")


def _is_defined(tensor: Tensor, defined: set[Tensor]) -> bool:
    # TFLite, tools/verifier.cc, VerifySubGraphConsistency; a tensor without elements needs no bytes.
    if tensor in defined or tensor.is_constant or tensor.is_outside or tensor.is_variable:
        return True
    return not tensor.elements


def _check_operators(graph: Subgraph, place: str) -> set[Tensor]:
    """Check operators in execution order; return the graph's inputs and the operators' results."""
    defined = set(graph.inputs)
    for position, operator in enumerate(graph.operators):
        where = f"{place}, operator {position} ({operator.code.name})"
        for tensor in operator.given:
            # An input of a custom operator that is never defined is scratch memory.
            is_scratch = operator.code.name == "CUSTOM" and tensor.producer is None
            if not is_scratch and not _is_defined(tensor, defined):
                raise ModelFormatError(
                    f"{where}: reads '{tensor.name}' before it is defined (a cycle, wrong order, or no producer)"
                )
        for tensor in operator.outputs:
            if tensor in defined or tensor.is_constant:
                raise ModelFormatError(
                    f"{where}: defines '{tensor.name}', which is already defined"
                )
            defined.add(tensor)
        reason = _wrong_operator(operator)
        if reason is not None:
            raise ModelFormatError(f"{where}: {reason}")
    return defined


def _wrong_operator(operator: Operator) -> str | None:
    """Why an operator's inputs, outputs or options are invalid; None if all are valid."""
    kind = KINDS[operator.code.name]
    if kind.is_followed:
        reason = kind.misfit(operator.inputs, operator.outputs)
        if reason is not None:
            return reason
    options = operator.options
    if options is None:
        calls = kind.options in SUBGRAPH_FIELDS
        return "has no options to name the subgraph to run" if calls else None
    # The runtime would ignore another operator's options, or misread them.
    if kind.options not in (None, options.name):
        return f"has {options.name}, expected {kind.options}"
    return None


def _check_calls(subgraphs: Sequence[Subgraph]) -> None:
    """Check that there is a subgraph, that called ones exist, and that calls do not overflow the runtime's stack."""
    if not subgraphs:
        raise ModelFormatError(
            "expected at least one subgraph, found none", table="Model", field="subgraphs"
        )
    called: list[set[int]] = [set() for _ in subgraphs]
    for graph, callees in zip(subgraphs, called, strict=True):
        for position, operator in enumerate(graph.operators):
            for index in subgraph_indices(operator.options):
                if not 0 <= index < len(subgraphs):
                    place = f"subgraph '{graph.name}', operator {position} ({operator.name})"
                    what = f"subgraph {index} does not exist, there are {len(subgraphs)}"
                    raise ModelFormatError(f"{place}: {what}")
                callees.add(index)
    # Those that call none, then those that call only these, and so on.
    shallow: set[int] = set()
    for _ in range(DEEPEST):
        shallow |= {index for index, callees in enumerate(called) if callees <= shallow}
    for index, graph in enumerate(subgraphs):
        if index not in shallow:
            raise ModelFormatError(
                f"subgraph {index} '{graph.name}': its calls are recursive, or nested over {DEEPEST} deep"
            )


def _wrong_tensor(tensor: Tensor) -> str | None:
    """Why a tensor's shape, bytes or quantization is invalid; None if all are valid."""
    reason = _wrong_sizes(tensor.shape, 0) or tensor.wrong_size
    if reason is None and tensor.shape_signature is not None:
        reason = _wrong_sizes(tensor.shape_signature, -1)
    if reason is None and tensor.quantization is not None:
        reason = _wrong_parameters(tensor.quantization, tensor.shape)
    return reason


@lru_cache(4096)
def _wrong_sizes(sizes: Shape, least: int) -> str | None:
    if len(sizes) > _MAX_RANK:
        return f"{len(sizes)} dimensions, expected at most {_MAX_RANK}"
    elements = math.prod(max(size, 1) for size in sizes)
    is_negative = min(sizes, default=0) < least
    is_large = max(sizes, default=0) > _MAX_SIZE or elements > _MAX_ELEMENTS
    if is_negative or is_large:
        return f"shape {list(sizes)} has a negative size or is too large"
    return None


def _wrong_parameters(parameters: Quantization, shape: Shape) -> str | None:
    scale = parameters.scale
    points = parameters.zero_point
    axis = parameters.dimension
    if not np.isfinite(scale).all() or (scale < 0).any():
        return "quantization scales must be finite and not negative"
    if parameters.is_affine and len(points) not in (1, len(scale)):
        return f"{len(scale)} scales but {len(points)} zero points"
    fits = 0 <= axis < len(shape) and shape[axis] == len(scale)
    if parameters.is_per_axis and shape and not fits:
        return f"{len(scale)} scales do not fit axis {axis} of {list(shape)}"
    return None
