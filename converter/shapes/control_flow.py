"""Rules of operators that run a subgraph: its results are derived with the caller's shapes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edge_opt.shapes.registry import rule

if TYPE_CHECKING:
    from edge_opt.shapes.call import Call, Results


@rule("STABLEHLO_COMPOSITE", inputs=(1, None), optional=tuple(range(64)), outputs=None)
def composite(call: Call) -> Results:
    """The results are those of the decomposition, entered with the inputs.

    Source: TFLite, stablehlo_composite.cc, Prepare.
    """
    index = int(call.option("decomposition_subgraph_index", 0))
    values = [call.known(position) for position in range(len(call.shapes))]
    return call.enter(index, call.shapes, values) or [None] * len(call.op.outputs)
