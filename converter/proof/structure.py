"""The structure of a region without its numbers: of similar regions, only one has to be run."""

from __future__ import annotations

from collections.abc import Hashable
from copy import deepcopy
from dataclasses import dataclass
from hashlib import sha256

from edge_opt.ir import Model, Quantization, to_tables
from edge_opt.ir.operators import Effect, operators_that
from edge_opt.schema.writer import model_bytes

Number = Hashable
"""The quantization parameters of one tensor, or a digest of one float or quantized constant."""

# The operators of a composite's decomposition are counted in its own subgraph.
_MOVES = {*operators_that(Effect.REARRANGING, Effect.CUTTING, Effect.JOINING), "STABLEHLO_COMPOSITE"}


@dataclass(frozen=True, slots=True)
class Structure:
    """Both versions of a region: a digest of all but their numbers, and the numbers of each, in order.

    Regions of equal structures compute the same; names and calibrated ranges are ignored. `moves_only`: the new version
    computes only with operators that the old one has, and otherwise just moves data.
    """

    digest: bytes
    before: tuple[Number, ...]
    after: tuple[Number, ...]
    moves_only: bool

    def covers(self, other: Structure) -> bool:
        """True if a verification of this region also holds for the other, which differs only in its numbers.

        Equal numbers of `before` must be replaced by equal ones: a rewrite could mix up numbers that are equal here but
        differ there unnoticed. Each number of `after` must be one of `before`, replaced the same way. A scale of
        another layer, or one that is off in the last place, is thus not covered; nor is a new version with computing
        operators of its own, where a mistake may only show with the other numbers.
        """
        if self.digest != other.digest or not self.moves_only:
            return False
        replaced: dict[Number, Number] = {}
        for here, there in zip(self.before, other.before, strict=True):
            if replaced.setdefault(here, there) != there:
                return False
        return all(replaced.get(here) == there for here, there in zip(self.after, other.after, strict=True))


def structure(before: Model, after: Model) -> Structure:
    """The structure of a region, given both versions as `cut_out` makes them."""
    (one, old), (other, new) = map(_without_numbers, (before, after))
    return Structure(sha256(one + other).digest(), old, new, _computing(after) <= _computing(before))


def _without_numbers(model: Model) -> tuple[bytes, tuple[Number, ...]]:
    """The digest of a model without its numbers, and the numbers."""
    model, numbers, places = deepcopy(model), list[Number](), list[Number]()
    for tensor in (tensor for graph in model.subgraphs for tensor in graph.tensors):
        if tensor.is_constant:
            assert tensor.buffer is not None
            assert tensor.buffer.data is not None
            content = tensor.dtype.name, sha256(tensor.buffer.data.view().data).digest()
            # Plain integers are axes, sizes and orders, which are structure.
            (numbers if tensor.dtype.is_float or tensor.is_quantized else places).append(content)
            tensor.buffer = None
        if tensor.quantization is not None and tensor.is_quantized:
            numbers.append(tensor.quantization.key())
            tensor.quantization = Quantization.affine(1.0, 0)
    return sha256(model_bytes(to_tables(model)) + repr(places).encode()).digest(), tuple(numbers)


def _computing(model: Model) -> set[Hashable]:
    """The operators that do more than move data, with their options."""
    return {
        (operator.code, options and options.key())
        for graph in model.subgraphs
        for operator, options in ((operator, operator.options) for operator in graph)
        if operator.name not in _MOVES or (options and options.fields.get("fused_activation_function"))
    }
