"""What a graph must hold to be a model: the same checks for what is read and for what is written."""

import math
from collections.abc import Iterator, Sequence

import numpy as np

from edge_opt.ir.graph import Operator, Subgraph, Tensor
from edge_opt.ir.operators import KINDS
from edge_opt.ir.options import options_table
from edge_opt.ir.references import SUBGRAPH_FIELDS, check_references
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
        checks = SubgraphChecks(graph, index, sound_scales)
        for position, tensor in enumerate(tensors_of(graph)):
            checks.check_tensor(tensor, position)
        checks.define(graph.inputs)
        for position, operator in enumerate(graph.operators):
            checks.check_operator(operator, position)
        checks.check_scratch()
    check_references(subgraphs)


def tensors_of(graph: Subgraph) -> list[Tensor]:
    """The tensors that a subgraph lists, then those that it uses besides."""
    return list({id(tensor): tensor for tensor in _used(graph) if tensor is not None}.values())


def _used(graph: Subgraph) -> Iterator[Tensor | None]:
    yield from graph.tensors
    for operator in graph.operators:
        yield from (*operator.inputs, *operator.outputs, *operator.intermediates)
    yield from (*graph.inputs, *graph.outputs)


class SubgraphChecks:
    """Checks one subgraph: its tensors first, then its operators in the order in which they run."""

    def __init__(self, graph: Subgraph, index: int, sound_scales: set[int]) -> None:
        self.place = f"subgraph '{graph.name or f'#{index}'}'"
        self._sound_scales = sound_scales
        self._defined: set[int] = set()
        self._scratch: list[tuple[str, Tensor]] = []

    def fail(self, message: str) -> ModelFormatError:
        """An error that names the subgraph."""
        return ModelFormatError(f"{self.place}, {message}")

    def define(self, tensors: Sequence[Tensor]) -> None:
        """Note tensors that have values from here on."""
        self._defined.update(id(tensor) for tensor in tensors)

    def check_tensor(self, tensor: Tensor, index: int) -> None:
        """Check shape, bytes and quantization of a tensor."""
        where = f"tensor {index} '{tensor.name}'"
        self._check_shape(tensor.shape, where, 0)
        self._check_shape(tensor.shape_signature or (), where, -1)
        if tensor.wrong_size is not None:
            raise self.fail(f"{where}: {tensor.wrong_size}")
        self._check_quantization(tensor, where)

    def _check_shape(self, shape: Sequence[int], where: str, least: int) -> None:
        if len(shape) > _MAX_RANK:
            raise self.fail(f"{where}: {len(shape)} dimensions, expected at most {_MAX_RANK}")
        if any(size < least for size in shape) or math.prod(max(size, 1) for size in shape) > _MAX_ELEMENTS:
            raise self.fail(f"{where}: shape {list(shape)} is not one that memory can hold")
        if max(shape, default=0) > _MAX_SIZE:
            raise self.fail(f"{where}: shape {list(shape)} has a size over {_MAX_SIZE}, the format's largest")

    def _check_quantization(self, tensor: Tensor, where: str) -> None:
        parameters = tensor.quantization
        if parameters is None or not parameters.is_affine:
            return
        scale = parameters.scale
        if id(scale) not in self._sound_scales:
            if not np.isfinite(scale).all() or (scale < 0).any():
                raise self.fail(f"{where}: quantization scales must be finite and not negative")
            # A long vector that many tensors share is looked through once.
            self._sound_scales.add(id(scale))
        if len(parameters.zero_point) not in (1, len(scale)):
            raise self.fail(f"{where}: {len(scale)} scales but {len(parameters.zero_point)} zero points")
        if not parameters.is_per_axis or not tensor.shape:
            return
        axis = parameters.dimension
        if not 0 <= axis < len(tensor.shape) or tensor.shape[axis] != len(scale):
            raise self.fail(f"{where}: {len(scale)} scales do not fit axis {axis} of {list(tensor.shape)}")

    def check_operator(self, operator: Operator, position: int) -> None:
        """Check an operator's inputs, outputs and options; its outputs have values from here on."""
        name = operator.code.name  # `operator.name` says more where the recorded shapes are wrong
        where = f"operator {position} ({name})"
        for tensor in operator.inputs:
            if tensor is None or id(tensor) in self._defined or _stands_alone(tensor):
                continue
            if name != "CUSTOM":
                raise self._too_early(where, tensor)
            # What nobody defines later on either is scratch memory that a custom operator asks for.
            self._scratch.append((where, tensor))
        for output in operator.outputs:
            if id(output) in self._defined or output.is_constant:
                raise self.fail(f"{where}: defines '{output.name}', which is already defined")
            self._defined.add(id(output))
        kind = KINDS.get(name)
        reason = kind.misfit(operator.inputs, operator.outputs) if kind and kind.is_followed else None
        if reason is not None:
            raise self.fail(f"{where}: {reason}")
        options, expected = operator.options, options_table(name)
        # The runtime would not look at options of another operator, or take them for its own.
        if options is not None and expected is not None and options.name != expected:
            raise self.fail(f"{where}: has {options.name}, expected {expected}")
        if options is None and expected in SUBGRAPH_FIELDS:
            raise self.fail(f"{where}: has no options, which say what subgraph to run")

    def check_scratch(self) -> None:
        """Check at the end that no operator defines what a custom operator took for scratch memory."""
        for where, tensor in self._scratch:
            if id(tensor) in self._defined:
                raise self._too_early(where, tensor)

    def _too_early(self, where: str, tensor: Tensor) -> ModelFormatError:
        why = "cyclic, out of order, or by nobody"
        return self.fail(f"{where}: reads '{tensor.name}' before it is defined ({why})")


def _stands_alone(tensor: Tensor) -> bool:
    """Whether there is something to read without an operator that defines it.

    Source: TFLite, tools/verifier.cc, VerifySubGraphConsistency; a tensor without elements needs no bytes.
    """
    external = tensor.table is not None and bool(tensor.table.get("external_buffer"))
    return tensor.is_constant or external or tensor.is_variable or not tensor.elements
