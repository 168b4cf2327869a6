"""A mask that is added to joined logits -> its columns, each added to its part of the logits before they are joined."""

from collections.abc import Iterable
from functools import partial

from edge_opt.attention.assembly import Assembly
from edge_opt.base.words import name_below
from edge_opt.ir import Operator
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
    if addition.name != "ADD" or [reader.name for reader in addition.outputs[0].consumers] != [
        "SOFTMAX"
    ]:
        return None
    for joined, mask in (addition.inputs, addition.inputs[::-1]):
        join = None if joined is None else joined.producer
        if joined is None or mask in (None, joined) or join is None or join.name != "CONCATENATION":
            continue
        at_columns = join.option("axis") in (-1, len(joined.shape) - 1)
        alone = only_reader(context.subgraph, joined) is not None
        parts = [part for part in join.inputs if part is not None]
        products = all(part.producer and part.producer.name == "BATCH_MATMUL" for part in parts)
        same_numbers = all(
            part.dtype is joined.dtype and same_quantization(part.quantization, joined.quantization)
            for part in parts
        )
        # Logits must be clipped before the mask is added; per-column scales would have to be cut, too.
        plain = not join.option("fused_activation_function") and not any(
            tensor.quantization and tensor.quantization.is_per_axis
            for tensor in (mask, *addition.outputs)
        )
        whole = (1,) * (len(joined.shape) - len(mask.shape)) + mask.shape == joined.shape
        if at_columns and alone and products and same_numbers and plain and whole:
            # Faster only if the cache has more keys than are new, else a prefill takes longer: docs/research/forms.md.
            *shorter, longest = sorted(part.shape[-1] for part in parts)
            return join if longest > sum(shorter) else None
    return None


def _build(context: Context, join: Operator, addition: Operator) -> Rewrite:
    joined = join.outputs[0]
    result = addition.outputs[0]
    make = Assembly(context.model, context.constants)
    mask = next(tensor for tensor in addition.inputs if tensor is not None and tensor is not joined)
    parts = [part for part in join.inputs if part is not None]
    cuts = []
    end = 0
    for part in parts:
        begin = end
        end = end + part.shape[-1]
        columns = make.tensor(
            name_below(mask.name, "columns"), (*mask.shape[:-1], end - begin), mask
        )
        first = make.integers("mask/begin", [0] * (len(mask.shape) - 1) + [begin])
        cuts.append(
            make.emit("SLICE", [mask, first, make.integers("mask/size", columns.shape)], columns)
        )
    sums = []
    for part, columns in zip(parts, cuts, strict=True):
        masked = make.tensor(
            name_below(part.name, "masked"), (*result.shape[:-1], part.shape[-1]), result
        )
        operands = [columns if operand is mask else part for operand in addition.inputs]
        sums.append(make.copy(addition, operands, masked))
    return context.rewrite([join, addition], make.finished(make.copy(join, sums, result)))
