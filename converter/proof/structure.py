"""What two regions have in common when only their numbers differ. Nothing is run."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from hashlib import sha256

from edge_opt.ir import Buffer, Model, Tensor, to_tables
from edge_opt.ir.extract import cut_out
from edge_opt.passes.contract import Demand
from edge_opt.schema.data import Data
from edge_opt.schema.writer import model_bytes


@dataclass(frozen=True, slots=True)
class Structure:
    """Both versions of a region without their numbers (`bare`, a digest), and where each number comes from.

    Numbers are quantization parameters and constants that are real or stand for reals. `origins` has for every tensor
    the place where the version `before` has its numbers first; one that `before` does not have stays what it is.
    """

    bare: bytes
    demand: Demand
    origins: tuple[tuple[Hashable, ...], ...]

    def covers(self, other: Structure) -> bool:
        """Whether the other is this one with other numbers, of which more may be equal, and the demand is the same.

        Then every number of its new version is a copy of the number of its old version that it is here. So what is
        right here is right there. Numbers that are equal here and differ there may have been mixed up unseen, though,
        and a scale of another layer, or one that is off by a step, is in no place here: such a region is not covered.
        """
        if (self.bare, self.demand) != (other.bare, other.demand):
            return False
        stands_for: dict[Hashable, Hashable] = {}
        for own, others in zip(self.origins, other.origins, strict=True):
            if len(own) != len(others):
                return False
            for number, found in zip(own, others, strict=True):
                fixed = None if isinstance(number, int) else number
                if stands_for.setdefault(number, fixed or found) != found:
                    return False
        return True


def structure(before: Model, after: Model, demand: Demand) -> Structure:
    """The structure of a region of which these are the two versions."""
    places: dict[Hashable, int] = {}
    for tensor in _tensors(before):
        for number in _numbers(tensor):
            places.setdefault(number, len(places))
    digest = sha256()
    for model in (before, after):
        digest.update(model_bytes(to_tables(_bare(model))))
    numbers = [_numbers(tensor) for model in (before, after) for tensor in _tensors(model)]
    origins = (tuple(places.get(number, number) for number in own) for own in numbers)
    return Structure(digest.digest(), demand, tuple(origins))


def _tensors(model: Model) -> list[Tensor]:
    return [tensor for graph in model.subgraphs for tensor in graph.tensors]


def _numbers(tensor: Tensor) -> list[Hashable]:
    found: list[Hashable] = []
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
        elif tensor.buffer is not None and tensor.buffer.data is not None:
            # In memory: bytes of a file are written as aligned as they were there, which is no part of the structure.
            tensor.buffer = Buffer(Data(tensor.buffer.data.view()))
        if tensor.is_quantized:
            tensor.quantization = None
    return bare
