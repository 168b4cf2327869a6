"""Cuts an entry point, or some layers of it, out of a model: a model of its own with real shapes and weights.

Edits nothing.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from edge_opt.attention.block import Block, NotABlock, logits_bytes
from edge_opt.attention.find import find_blocks
from edge_opt.base.errors import UsageError, unknown
from edge_opt.ir import Model, Operator, Signature, Tensor
from edge_opt.ir.operators import Effect, operators_that
from edge_opt.ir.walk import backward_slice, cut_out, reads

_JOINING = operators_that(Effect.JOINING, Effect.REARRANGING) | {"QUANTIZE"}


@dataclass(frozen=True, slots=True)
class Layers:
    """Some layers as a model with one signature, and the first attention in them as it is in the whole model.

    `blocks` is None where the entry point is whole.
    """

    signature: str
    model: Model
    attention: Block
    blocks: int | None


def cut_layers(model: Model, signature: str | None = None, *, blocks: int | None = None) -> Layers:
    """`blocks` layers in a row, from the end of the attention before them to the projection behind their own.

    Of the entry point with the largest attention, or of the one that is named; from the middle of it, since the first
    and the last layers may miss something. None takes the entry point whole. UsageError where there is no such entry
    point, or no multi-head attention.
    """
    name, attention = largest_attention(model, signature)
    if blocks is None:
        return Layers(name, cut_entry_point(model, name), attention[0], None)
    sizes = [logits_bytes(block) for block in attention]
    largest = [place for place, size in enumerate(sizes) if size == max(sizes)]
    first = min(largest[len(largest) // 2], max(len(attention) - blocks, 0))
    part = attention[first : first + blocks]
    before = backward_slice([attention[first - 1].output])[0] if first else set()
    ends = [part[-1].output, *_projections(part[-1].output)]
    inside = backward_slice(ends)[0] - before
    return Layers(name, _cut(model, name, inside, ends), part[0], len(part))


def largest_attention(model: Model, signature: str | None = None) -> tuple[str, list[Block]]:
    """The entry point with the largest attention, or the named one, and its blocks; UsageError without any."""
    blocks = {
        name: [match for match in find_blocks(graph) if isinstance(match, Block) and match.heads > 1]
        for name, graph in model.entry_points()
    }
    if signature is not None and signature not in blocks:
        raise unknown("signature", signature, blocks)
    sizes = {name: max(map(logits_bytes, found), default=0) for name, found in blocks.items()}
    chosen = signature or max(sizes, key=lambda name: sizes[name])
    if not blocks[chosen]:
        place = "the model" if signature is None else f"signature '{signature}'"
        raise UsageError(f"{place} holds no multi-head attention to tune for: see `edge-opt inspect`")
    return chosen, blocks[chosen]


def cut_entry_point(model: Model, signature: str, ends: Collection[str] = ()) -> Model:
    """One entry point; with names of tensors `ends`, only what these need. Names of its inputs and outputs stay."""
    graph = dict(model.entry_points())[signature]
    if not ends:
        return _cut(model, signature, set(graph.operators), ())
    tensors = {tensor.name: tensor for operator in graph.operators for tensor in operator.outputs}
    missing = [name for name in ends if name not in tensors]
    if missing:
        raise UsageError(
            f"signature '{signature}' has no tensor '{missing[0]}', where the other model's layers end"
        )
    chosen = [tensors[name] for name in ends]
    return _cut(model, signature, backward_slice(chosen)[0], chosen)


def layer_ends(model: Model, signature: str, layers: int) -> tuple[str, ...]:
    """Names of the tensors where the first layers end: what the projections behind their last attention make."""
    graph = dict(model.entry_points())[signature]
    blocks = [match for match in find_blocks(graph) if not isinstance(match, NotABlock)]
    if not blocks:
        raise UsageError(f"signature '{signature}' holds no attention: there are no layers to count")
    # The heads of one layer that was split share the tensor that joins them.
    outputs = list(dict.fromkeys(_joined(block.output) for block in blocks))
    last = outputs[min(layers, len(outputs)) - 1]
    return tuple(tensor.name for tensor in _projections(last) or [last])


def _projections(output: Tensor) -> list[Tensor]:
    return [reader.outputs[0] for reader in output.consumers if reader.name == "FULLY_CONNECTED"]


def _joined(output: Tensor) -> Tensor:
    while len(output.consumers) == 1 and output.consumers[0].name in _JOINING:
        output = output.consumers[0].outputs[0]
    return output


def _cut(model: Model, name: str, inside: set[Operator], ends: Sequence[Tensor]) -> Model:
    """The operators `inside` of an entry point; the graph's own outputs among theirs go out, and the `ends`."""
    graph = dict(model.entry_points())[name]
    operators = [operator for operator in graph.operators if operator in inside]
    inputs = [tensor for tensor in reads(operators) if not tensor.is_constant]
    ending = {id(tensor) for tensor in ends}
    outputs = [
        tensor
        for operator in operators
        for tensor in operator.outputs
        if graph.is_output(tensor) or id(tensor) in ending
    ]
    cut = cut_out(model, operators, inputs, outputs)
    part, unnamed = cut.subgraphs[0], Signature(name, graph, {}, {})
    whole = next((entry for entry in model.signatures if entry.subgraph is graph), unnamed)
    given, taken = _names(whole.inputs, inputs, "input"), _names(whole.outputs, outputs, "output")
    sides = (dict(zip(given, part.inputs, strict=True)), dict(zip(taken, part.outputs, strict=True)))
    cut.signatures.append(Signature(name, part, *sides))
    return cut


def _names(keys: dict[str, Tensor], tensors: Sequence[Tensor], kind: str) -> list[str]:
    """A signature's own names, where it has one, else numbers."""
    names = {id(tensor): key for key, tensor in keys.items()}
    return [names.get(id(tensor), f"{kind}_{place}") for place, tensor in enumerate(tensors)]
