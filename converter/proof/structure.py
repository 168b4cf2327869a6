"""What two regions have in common when only their numbers differ. Nothing is run."""

from __future__ import annotations

from hashlib import sha256
from typing import TYPE_CHECKING

from edge_opt.ir import to_bytes
from edge_opt.ir.extract import cut_out

if TYPE_CHECKING:
    from edge_opt.ir import Model, Tensor


def structure(before: Model, after: Model) -> bytes:
    """A digest of both versions of a region without their numbers, but with the pattern of which of them are equal.

    Numbers are quantization parameters and constants that are real or stand for reals. Each is replaced by the place
    where the version `before` has it first; one that `before` does not have stays what it is. So two regions with one
    structure differ by a renaming of numbers: in both, every number of the new version is a copy of the same one of the
    old version. A scale of another layer, or one that is off by a step, is a structure of its own.
    """
    places: dict[tuple[object, ...], int] = {}
    for tensor in _tensors(before):
        for number in _numbers(tensor):
            places.setdefault(number, len(places))
    digest = sha256()
    for model in (before, after):
        bare = _bare(model)
        digest.update(to_bytes(bare))
        listed = [[places.get(number, number) for number in _numbers(tensor)] for tensor in _tensors(model)]
        digest.update(repr(listed).encode())
    return digest.digest()


def _tensors(model: Model) -> list[Tensor]:
    return [tensor for graph in model.subgraphs for tensor in graph.tensors]


def _numbers(tensor: Tensor) -> list[tuple[object, ...]]:
    found: list[tuple[object, ...]] = []
    if tensor.quantization is not None and tensor.is_quantized:
        found.append(("quantization", *tensor.quantization.key()))
    if _is_number(tensor):
        assert tensor.buffer is not None
        assert tensor.buffer.data is not None
        found.append((tensor.dtype.name, sha256(tensor.buffer.data.view().data).digest()))
    return found


def _is_number(tensor: Tensor) -> bool:
    """True for a constant that computes; one that says where to cut or how to turn is structure."""
    return tensor.is_constant and (tensor.dtype.is_float or tensor.is_quantized)


def _bare(model: Model) -> Model:
    graph = model.subgraphs[0]
    bare = cut_out(model, list(graph.operators), graph.inputs, graph.outputs)
    for tensor in _tensors(bare):
        if _is_number(tensor):
            tensor.buffer = None
        if tensor.is_quantized:
            tensor.quantization = None
    return bare
