"""A mask that is added to joined logits -> its columns, each added to its part of the logits before they are joined."""

from collections.abc import Iterable
from functools import partial

from edge_opt.attention.assembly import Assembly
from edge_opt.base.words import name_below
from edge_opt.ir import Operator, Tensor
from edge_opt.ir.dtypes import same_quantization
from edge_opt.ir.walk import only_reader
from edge_opt.passes.contract import Context, Pass, Site
from edge_opt.verification.rewrite import Rewrite


class MaskBeforeJoin(Pass):
    """Before a SOFTMAX: `CONCAT(old, new) + mask` -> `CONCAT(old + mask[.., :S], new + mask[.., S:])`.

    Off unless the target asks for it (`mask_before_join`). The addition is elementwise, and the parts must have the
    quantization of the joined logits, the mask their shape: one that is broadcast over heads takes longer in parts. One
    part, the cache, must have more columns than all others together. The join must clip nothing, and mask and sum must
    have one scale each. The columns of a mask are cut once for all heads and layers.
    """

    name = "mask_before_join"
    summary = "adds the mask to the logits of the cache and of the new keys before they are joined"

    def sites(self, context: Context) -> Iterable[Site]:
        """One site for each such mask, if the target asks for it."""
        if not context.target.mask_before_join:
            return
        for addition in context.subgraph.operators:
            join = _join_above(context, addition)
            if join is not None:
                yield Site(addition, partial(_build, context, join, addition))


def _join_above(context: Context, addition: Operator) -> Operator | None:
    """The CONCATENATION of logits along their columns that only this ADD reads, before a SOFTMAX; else None."""
    if addition.name != "ADD":
        return None
    readers = addition.outputs[0].consumers
    if len(readers) != 1 or readers[0].name != "SOFTMAX":
        return None
    for joined, mask in (addition.inputs, addition.inputs[::-1]):
        if joined is None or mask is None or joined.producer is None:
            continue
        join = joined.producer
        if _joins_logits(join) and _can_be_cut(context, joined, mask, addition.outputs[0]):
            # Faster only if the cache has more keys than are new, else a prefill takes longer: docs/research/forms.md.
            *shorter, longest = sorted(part.shape[-1] for part in join.given)
            return join if longest > sum(shorter) else None
    return None


def _joins_logits(join: Operator) -> bool:
    """True if an operator joins products along their columns, in one quantization, and clips nothing."""
    # Logits must be clipped before the mask is added.
    if join.name != "CONCATENATION" or join.has_activation:
        return False
    joined = join.outputs[0]
    if join.option("axis") not in (-1, len(joined.shape) - 1):
        return False
    for part in join.given:
        if part.producer is None or part.producer.name != "BATCH_MATMUL":
            return False
        same_quantized = same_quantization(part.quantization, joined.quantization)
        if part.dtype is not joined.dtype or not same_quantized:
            return False
    return True


def _can_be_cut(context: Context, joined: Tensor, mask: Tensor, result: Tensor) -> bool:
    """True if the mask and its sum with the logits can be cut into columns, and nothing else reads the logits."""
    if mask is joined or only_reader(context.subgraph, joined) is None:
        return False
    for tensor in (mask, result):
        if tensor.quantization is not None and tensor.quantization.is_per_axis:
            return False  # the scales of the columns would have to be cut, too
    return (1,) * (len(joined.shape) - len(mask.shape)) + mask.shape == joined.shape


def _build(context: Context, join: Operator, addition: Operator) -> Rewrite:
    joined = join.outputs[0]
    result = addition.outputs[0]
    make = Assembly(context.model, context.constants)
    mask = addition.input(1 if addition.input(0) is joined else 0)
    parts = join.given
    cuts: list[Tensor] = []
    begin = 0
    for part in parts:
        cuts.append(_columns(make, mask, begin, part.shape[-1]))
        begin += part.shape[-1]
    sums: list[Tensor] = []
    for part, columns in zip(parts, cuts, strict=True):
        shape = (*result.shape[:-1], part.shape[-1])
        masked = make.tensor(name_below(part.name, "masked"), shape, result)
        operands = [columns if operand is mask else part for operand in addition.inputs]
        sums.append(make.copy(addition, operands, masked))
    make.copy(join, sums, result)
    return context.rewrite([join, addition], make.finished(result))


def _columns(make: Assembly, mask: Tensor, begin: int, count: int) -> Tensor:
    """So many columns of the mask, cut by a SLICE."""
    lead = mask.shape[:-1]
    columns = make.tensor(name_below(mask.name, "columns"), (*lead, count), mask)
    first = make.integers("mask/begin", [0] * len(lead) + [begin])
    size = make.integers("mask/size", columns.shape)
    return make.emit("SLICE", [mask, first, size], columns)
