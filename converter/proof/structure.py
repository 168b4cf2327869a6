"""What a region computes without its numbers: regions that are alike need not all be run."""

from __future__ import annotations

from collections.abc import Hashable
from copy import deepcopy
from dataclasses import dataclass
from hashlib import sha256

from edge_opt.ir import Model, Quantization, to_tables
from edge_opt.ir.operators import Effect, operators_that
from edge_opt.schema.writer import model_bytes

Number = Hashable
"""The quantization parameters of one tensor, or the bytes of one constant that is real or stands for reals."""

# A composite computes what its decomposition does, which is a subgraph of the model with operators of its own.
_MOVES = {*operators_that(Effect.REARRANGING, Effect.CUTTING, Effect.JOINING), "STABLEHLO_COMPOSITE"}


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

        Equal numbers of `before` are replaced by equal ones: numbers that are equal here and differ there may have been
        mixed up here unseen. Each number of `after` must be one of `before`, replaced as there. So a scale of another
        layer, or one that is a unit in the last place off, makes a structure of its own; and so does what the new
        version computes by itself, where a mistake may show with the other numbers only.
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
    (one, old), (other, new) = map(_without_numbers, (before, after))
    return Structure(sha256(one + other).digest(), old, new, _computing(after) <= _computing(before))


def _without_numbers(model: Model) -> tuple[bytes, tuple[Number, ...]]:
    """The digest of a model without its numbers, and these."""
    model, numbers, places = deepcopy(model), list[Number](), list[Number]()
    for tensor in (tensor for graph in model.subgraphs for tensor in graph.tensors):
        if tensor.is_constant:
            assert tensor.buffer is not None
            assert tensor.buffer.data is not None
            content = tensor.dtype.name, sha256(tensor.buffer.data.view().data).digest()
            # Plain integers say where to cut or how to turn, which is structure.
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
