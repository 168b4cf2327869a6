"""A mask that is added to joined logits -> its columns, each added to its part of the logits before they are joined."""

from collections.abc import Iterable
from functools import partial
from itertools import accumulate

import numpy as np

from edge_opt.base.words import name_below
from edge_opt.ir import DType, Operator, Tensor
from edge_opt.passes.contract import Context, Pass, Site
from edge_opt.passes.rewrite import Rewrite


class MaskBeforeJoin(Pass):
    """In front of a SOFTMAX: `CONCAT(old, new) + mask` -> `CONCAT(old + mask[.., :S], new + mask[.., S:])`.

    Off unless the target asks for it (`mask_before_join`). The addition is elementwise, and the parts must have the
    quantization of the joined logits, the mask their shape: one that is broadcast over heads takes longer in parts. One
    part, the cache, must have more columns than all others together. The join must clip nothing, and mask and sum have
    one scale each. The columns of a mask are cut once for all heads and layers.
    """

    name = "mask_before_join"
    summary = "adds the mask to the logits of the cache and of the new keys before they are joined"

    def sites(self, context: Context) -> Iterable[Site]:
        """One for each such mask, if the target asks for it."""
        if not context.target.mask_before_join:
            return
        for addition in context.subgraph.operators:
            join = _join_above(context, addition)
            if join is not None:
                yield Site(addition, partial(_build, context, join, addition))


def _join_above(context: Context, addition: Operator) -> Operator | None:
    """The CONCATENATION of logits along their columns that only this ADD reads, in front of a SOFTMAX; else None."""
    if addition.name != "ADD" or [reader.name for reader in addition.outputs[0].consumers] != ["SOFTMAX"]:
        return None
    for joined, mask in (addition.inputs, addition.inputs[::-1]):
        join = None if joined is None else joined.producer
        if joined is None or mask in (None, joined) or join is None or join.name != "CONCATENATION":
            continue
        at_columns = join.option("axis") in (-1, len(joined.shape) - 1)
        alone = len(joined.consumers) == 1 and not context.subgraph.is_output(joined)
        parts = [part for part in join.inputs if part is not None]
        products = all(part.producer and part.producer.name == "BATCH_MATMUL" for part in parts)
        same_numbers = all(_numbers(part) == _numbers(joined) for part in parts)
        # Clipped logits are to be clipped before the mask is added; one scale a column would have to be cut, too.
        plain = not join.option("fused_activation_function") and not any(
            tensor.quantization and tensor.quantization.is_per_axis for tensor in (mask, *addition.outputs)
        )
        whole = (1,) * (len(joined.shape) - len(mask.shape)) + mask.shape == joined.shape
        if at_columns and alone and products and same_numbers and plain and whole:
            # It pays where the cache holds more keys than are new; elsewhere a prefill takes longer: docs/npu-forms.md.
            *shorter, longest = sorted(part.shape[-1] for part in parts)
            return join if longest > sum(shorter) else None
    return None


def _numbers(tensor: Tensor) -> object:
    return tensor.dtype, None if tensor.quantization is None else tensor.quantization.key()


def _build(context: Context, join: Operator, addition: Operator) -> Rewrite:
    joined, result = join.outputs[0], addition.outputs[0]
    mask = next(tensor for tensor in addition.inputs if tensor is not None and tensor is not joined)
    widths = [part.shape[-1] for part in join.inputs if part is not None]
    cuts, additions = [], []
    for part, width, end in zip(join.inputs, widths, accumulate(widths), strict=True):
        assert part is not None
        shape, name = (*mask.shape[:-1], width), name_below(mask.name, "columns")
        columns = Tensor(name, shape, mask.dtype, quantization=mask.quantization)
        begin = [0] * (len(mask.shape) - 1) + [end - width]
        steering = [
            context.constants.make(name, np.array(values, np.int32), DType.INT32)
            for name, values in (("mask/begin", begin), ("mask/size", columns.shape))
        ]
        cuts.append(context.model.new_operator("SLICE", (mask, *steering), [columns]))
        shape, name = (*result.shape[:-1], width), name_below(part.name, "masked")
        masked = Tensor(name, shape, result.dtype, quantization=result.quantization)
        operands = [columns if operand is mask else part for operand in addition.inputs]
        additions.append(Operator(addition.code, operands, [masked], addition.options, addition.table))
    masked_parts = [operator.outputs[0] for operator in additions]
    last = Operator(join.code, masked_parts, [result], join.options, join.table)
    return Rewrite(context.model, context.subgraph, (join, addition), (*cuts, *additions, last))
