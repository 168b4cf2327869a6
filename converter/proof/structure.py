"""Which regions are alike but for their numbers: of those, only one has to be run."""

from collections.abc import Hashable
from copy import deepcopy
from hashlib import sha256

from edge_opt.ir import Model, Quantization, to_tables
from edge_opt.ir.operators import Effect, operators_that
from edge_opt.schema.writer import model_bytes

# The operators of a composite's decomposition are counted in its own subgraph.
_MOVES = {*operators_that(Effect.REARRANGING, Effect.CUTTING, Effect.JOINING), "STABLEHLO_COMPOSITE"}


def structures(before: Model, after: Model) -> tuple[Hashable, Hashable]:
    """A region with its numbers, and without; given both versions as `cut_out` makes them.

    Regions that are equal with their numbers compute the same; names and calibrated ranges are ignored. Without
    numbers, a verification of one region holds for all equal ones, because

    - the new version computes only with operators that the old one has, and otherwise moves data: with operators of its
      own, a mistake may show only with other numbers;
    - each of its numbers is one of the old version. A scale of another layer, or one that is off in the last place, is
      thus another structure;
    - all have equal numbers in the same places: a rewrite could mix up numbers that are equal in one region and
      different in another.

    Both are the same where the new version has operators or numbers of its own.
    """
    (one, old), (other, new) = map(_without_numbers, (before, after))
    rest = one + other
    if set(new) <= set(old) and _computing(after) <= _computing(before):
        return (rest, old, new), (rest, tuple(map(old.index, (*old, *new))))
    return (rest, old, new), (rest, old, new)


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
