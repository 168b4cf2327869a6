"""What must hold for a rewrite besides its results."""

from collections import Counter
from collections.abc import Collection, Hashable

from edge_opt.ir import Tensor
from edge_opt.ir.refusal import RefusedError, Why
from edge_opt.ir.walk import makers_of, reads, with_called
from edge_opt.shapes.inference import check_operators
from edge_opt.targets import Target
from edge_opt.verification.rewrite import Rewrite


def check_before(rewrite: Rewrite, target: Target) -> None:
    """Check the parts of a rewrite that need no run: its frame, its shapes, and the target's operators.

    Raises:
        RefusedError: the rewrite must not be used.
    """
    check_frame(rewrite)
    check_shapes(rewrite)
    target.check(rewrite.added(), rewrite.old)


def check_frame(rewrite: Rewrite) -> None:
    """Check that the new region changes nothing outside itself.

    It may read only tensors that the old region read (or new constants), and must define exactly those that the old one
    defined for other operators. Only operators without side effects may be reordered.

    Raises:
        RefusedError: it may change something else.
    """
    old = set(rewrite.old)
    for operator in (*rewrite.old, *rewrite.added()):
        if (operator.subgraph is rewrite.subgraph) != (operator in old):
            where = "is no longer in the graph" if operator in old else "is already in the graph"
            raise RefusedError(
                Why.FRAME, f"the operator {operator.name} that defines '{operator.label}' {where}"
            )
    for tensor in reads((*rewrite.old, *rewrite.new)):
        if tensor.is_blockwise:
            raise RefusedError(
                Why.QUANTIZATION,
                f"'{tensor.name}' is quantized by blocks: its scales are named by a place in its own subgraph",
            )
    defined = _check_definitions(rewrite)
    if not rewrite.changed():
        raise RefusedError(
            Why.FRAME, "nothing reads the region's results, so they cannot be verified"
        )
    for tensor in rewrite.outputs():
        if tensor not in defined:
            raise RefusedError(Why.FRAME, f"the new region leaves '{tensor.name}' undefined")
    rewrite.order()


def _check_definitions(rewrite: Rewrite) -> Collection[Tensor]:
    """Tensors that the new region defines, each once, from constants and the old region's inputs."""
    known = set(reads(rewrite.old))
    own = makers_of(rewrite.old)
    for tensor in reads(rewrite.new):
        if tensor not in known and not tensor.is_constant:
            raise RefusedError(
                Why.FRAME, f"the new region reads '{tensor.name}', which the old one did not"
            )
    defined = Counter(tensor for operator in rewrite.new for tensor in operator.outputs)
    for tensor, count in defined.items():
        is_taken = tensor not in own and rewrite.subgraph.lists(tensor)
        if count > 1 or tensor.is_constant or is_taken:
            raise RefusedError(
                Why.FRAME,
                f"the new region must not define '{tensor.name}': another operator defines it too, or it is a constant",
            )
    return defined


def check_shapes(rewrite: Rewrite) -> None:
    """Check that the recorded shapes of new operators, and of those that they call, equal the inferred ones.

    Raises:
        RefusedError: an inferred shape differs from the recorded one.
    """
    subgraphs = rewrite.model.subgraphs
    check_operators(with_called(rewrite.added(), subgraphs), subgraphs)


def check_parameters(rewrite: Rewrite) -> None:
    """Check that the quantized results of new operators have only parameters that the old region has.

    A scale that is off by one unit in the last place changes one code in millions, which a run may not show.

    Raises:
        RefusedError: a tensor has new parameters.
    """
    known: set[Hashable] = set()
    for operator in with_called(rewrite.old, rewrite.model.subgraphs):
        known.update(map(_parameters, operator.tensors))
    for operator in rewrite.added():
        for tensor in operator.outputs:
            is_new = tensor not in rewrite.chosen and _parameters(tensor) not in known
            if tensor.is_quantized and is_new:
                where = f"{operator.name} '{tensor.name}'"
                raise RefusedError(
                    Why.QUANTIZATION, f"{where} has parameters that no tensor of the old region has"
                )


def _parameters(tensor: Tensor) -> Hashable:
    return None if tensor.quantization is None else (tensor.dtype, tensor.quantization.key())
