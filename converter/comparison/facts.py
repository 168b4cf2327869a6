"""Facts about a model's inputs and outputs that only the graph has, not the runtime."""

from edge_opt.ir import DType, Model, Subgraph, Tensor
from edge_opt.runtime.tensors import SignatureInfo


def arguments(model: Model, signature: SignatureInfo) -> tuple[Subgraph, list[Tensor], list[Tensor]]:
    """Return the graph of a signature, and its inputs and outputs in the runtime's order."""
    graph, inputs, outputs = model.arguments(signature.name)
    if signature.positional:
        return graph, [*inputs.values()], [*outputs.values()]
    return (
        graph,
        [inputs[one.name] for one in signature.inputs],
        [outputs[one.name] for one in signature.outputs],
    )


def runs_of(*models: Model) -> int:
    """Number of runs to compare: two if a model keeps state, because the second run reads what the first stored."""
    tensors = (tensor for model in models for graph in model.subgraphs for tensor in graph.tensors)
    return 1 + any(tensor.is_variable or tensor.dtype is DType.RESOURCE for tensor in tensors)
