"""Finds regions that differ only in numbers: of these, only one has to be run."""

from collections.abc import Hashable
from copy import deepcopy
from hashlib import sha256
from typing import NamedTuple

from edge_opt.ir import Model, Quantization, to_tables
from edge_opt.ir.operators import Effect, operators_that
from edge_opt.schema.writer import model_bytes

# The operators of a composite's decomposition are counted in its own subgraph.
_MOVES = {*operators_that(Effect.REARRANGING, Effect.CUTTING, Effect.JOINING), "STABLEHLO_COMPOSITE"}


class Structure(NamedTuple):
    """A region: a digest of both versions without their numbers, and the numbers of each, in order.

    Regions that are equal compute the same; names and calibrated ranges are ignored. `moves_only`: the new version
    computes only with operators that the old one has, and otherwise moves data.
    """

    digest: bytes
    old: tuple[Hashable, ...]
    new: tuple[Hashable, ...]
    moves_only: bool

    def covers(self, other: "Structure") -> bool:
        """True if a verification of this region also holds for another one of the same digest.

        - The new version has no operators of its own: with those, a mistake may show only with other numbers.
        - Each of its numbers is one of the old version. A scale of another layer, or one that is off in the last place,
          is thus another structure.
        - Numbers that are equal here are equal there: a rewrite could mix them up here without any difference.
        """
        there: dict[Hashable, Hashable] = {}
        kept = all(there.setdefault(one, two) == two for one, two in zip(self.old, other.old, strict=True))
        new = all(there.get(one) == two for one, two in zip(self.new, other.new, strict=True))
        return self.moves_only and kept and new


def structure(before: Model, after: Model) -> Structure:
    """The structure of a region, given both versions as `cut_out` makes them."""
    (one, old), (other, new) = map(_without_numbers, (before, after))
    return Structure(one + other, old, new, _computing(after) <= _computing(before))


def _without_numbers(model: Model) -> tuple[bytes, tuple[Hashable, ...]]:
    """The digest of a model without its numbers; the quantization parameters, and digests of constants, in order."""
    model, numbers, places = deepcopy(model), list[Hashable](), list[Hashable]()
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
