"""A composite -> the operators of its body, so that they can be rewritten (or read by a compiler)."""

from collections.abc import Iterable
from functools import partial

from edge_opt.attention.pairs import products_among
from edge_opt.ir import Model, Operator, Subgraph
from edge_opt.ir.composites import COMPOSITE, body_of, checked_body
from edge_opt.ir.refusal import Reason, RefusedError, Why
from edge_opt.ir.walk import copy_operator, with_called
from edge_opt.passes.contract import Context, Pass, Site
from edge_opt.schema.reader import MAX_OBJECTS
from edge_opt.verification.check import Within
from edge_opt.verification.rewrite import Rewrite


class InlineComposites(Pass):
    """A composite stands for its decomposition, but a runtime may have its own kernel for it.

    Both are run, and must agree within 1e-6. Only composites that multiply activations, as attention does, are opened,
    unless the target asks for all. A body's operators are not changed; composites among them are opened in turn.
    """

    name = "inline_composites"
    summary = "replaces attention composites by their bodies, which can then be split"
    check = Within(1e-6)
    repeats = True

    def sites(self, context: Context) -> Iterable[Site]:
        """One site for each composite to open."""
        sizes: dict[Subgraph, int] = {}
        has_products: dict[Subgraph, bool] = {}
        total = 0
        for operator in context.subgraph.operators:
            if operator.name != COMPOSITE:
                continue
            body = body_of(context.model, operator)
            if body not in has_products:
                inside = with_called(body.operators, context.model.subgraphs)
                has_products[body] = any(products_among(inside))
            if not context.target.inline_composites and not has_products[body]:
                continue
            total += _opened(context.model, body, sizes)
            if total > MAX_OBJECTS:
                text = f"opening the composites up to here gives {total:,} operators"
                yield Site(operator, reason=Reason(Why.LIMIT, text))
            else:
                yield Site(operator, partial(_build, context, operator))


def _opened(model: Model, body: Subgraph, sizes: dict[Subgraph, int]) -> int:
    """The number of operators in a body once all composites in it are opened; each nesting level may double it."""
    if body not in sizes:
        total = len(body)
        for operator in body:
            if operator.name == COMPOSITE:
                total += _opened(model, body_of(model, operator), sizes)
        sizes[body] = total
    return sizes[body]


def _build(context: Context, composite: Operator) -> Rewrite:
    body = checked_body(context.model, composite)
    arguments = zip(body.inputs, composite.inputs, strict=True)
    known = {own: tensor for own, tensor in arguments if tensor is not None}
    for result, tensor in zip(body.outputs, composite.outputs, strict=True):
        if result in known:
            raise RefusedError(
                Why.INVALID_MODEL,
                "a result of the body is an argument, or another result",
                composite,
                tensor,
            )
        known[result] = tensor
    prefix = composite.label
    moved = [
        copy_operator(op, known, lambda tensor: f"{prefix}/{tensor.name}") for op in body.operators
    ]
    return context.rewrite([composite], moved)
