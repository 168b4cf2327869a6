"""Cut an entry point, or its first layers, out of a model into a new model with real shapes and weights.

The original model is not changed.
"""

from collections.abc import Collection

from edge_opt.attention.block import Block, NotABlock, logits_bytes
from edge_opt.attention.find import find_blocks
from edge_opt.base.errors import UsageError, unknown
from edge_opt.ir import Model, Signature
from edge_opt.ir.operators import Effect, operators_that
from edge_opt.ir.walk import backward_slice, cut_out, reads

_JOINING = operators_that(Effect.JOINING, Effect.REARRANGING) | {"QUANTIZE"}


def largest_attention(model: Model, signature: str | None = None) -> tuple[str, Block]:
    """Return an entry point's name and its largest multi-head attention block; default: the largest of all.

    Raises:
        UsageError: the entry point does not exist, or has no multi-head attention.
    """
    found = {
        name: [match for match in find_blocks(graph) if isinstance(match, Block) and match.heads > 1]
        for name, graph in model.entry_points()
    }
    if signature is not None and signature not in found:
        raise unknown("signature", signature, found)
    sizes = {name: max(map(logits_bytes, blocks), default=0) for name, blocks in found.items()}
    chosen = signature or max(sizes, key=lambda name: sizes[name])
    if not found[chosen]:
        place = "the model" if signature is None else f"signature '{signature}'"
        raise UsageError(f"{place} holds no multi-head attention to tune for: see `edge-opt inspect`")
    return chosen, max(found[chosen], key=logits_bytes)


def layer_ends(model: Model, signature: str, layers: int | None) -> tuple[str, ...]:
    """Names of the tensors where the first layers end: outputs of the projections after their last attention.

    Empty if `layers` is None (all layers).
    """
    if layers is None:
        return ()
    graph = dict(model.entry_points()).get(signature, model.subgraphs[0])
    outputs = []
    for block in find_blocks(graph):
        if isinstance(block, NotABlock):
            continue
        output = block.output
        while len(output.consumers) == 1 and output.consumers[0].name in _JOINING:
            output = output.consumers[0].outputs[0]
        outputs.append(output)
    if not outputs:
        raise UsageError(f"signature '{signature}' holds no attention: there are no layers to count")
    # Heads of a split layer share the tensor that joins them.
    outputs = list(dict.fromkeys(outputs))
    last = outputs[min(layers, len(outputs)) - 1]
    ends = [reader.outputs[0] for reader in last.consumers if reader.name == "FULLY_CONNECTED"]
    return tuple(tensor.name for tensor in ends or [last])


def cut_entry_point(model: Model, signature: str, ends: Collection[str] = ()) -> Model:
    """Cut out one entry point, up to the tensors named in `ends` if given; keeps names of inputs and outputs."""
    graph = dict(model.entry_points()).get(signature, model.subgraphs[0])
    tensors = {tensor.name: tensor for operator in graph.operators for tensor in operator.outputs}
    missing = [name for name in ends if name not in tensors]
    if missing:
        raise UsageError(
            f"signature '{signature}' has no tensor '{missing[0]}', where the other model's layers end"
        )
    chosen = [tensors[name] for name in ends]
    inside = backward_slice(chosen)[0] if ends else {*graph.operators}
    operators = [operator for operator in graph.operators if operator in inside]
    inputs = [tensor for tensor in reads(operators) if not tensor.is_constant]
    made = [tensor for operator in operators for tensor in operator.outputs]
    outputs = [tensor for tensor in made if graph.is_output(tensor) or tensor in chosen]
    cut = cut_out(model, operators, inputs, outputs)
    part = cut.subgraphs[0]
    # Without signatures, use the runtime's argument names.
    names = {id(tensor): tensor.name for tensor in (*graph.inputs, *graph.outputs)}
    for entry in (one for one in model.signatures if one.key == signature):
        names = {id(t): key for side in (entry.inputs, entry.outputs) for key, t in side.items()}
    given, taken = (
        {
            names.get(id(old), f"{kind}_{at}"): new
            for at, (old, new) in enumerate(zip(old_ones, new_ones, strict=True))
        }
        for kind, old_ones, new_ones in (("input", inputs, part.inputs), ("output", outputs, part.outputs))
    )
    cut.signatures.append(Signature(signature, part, given, taken))
    return cut
