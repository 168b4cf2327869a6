"""How far above an attention its heads can be told apart: upwards, operator by operator, through what only it reads."""

from edge_opt.attention import factors as fx
from edge_opt.attention.factors import Factored
from edge_opt.attention.found import Block
from edge_opt.attention.labelling import OperandFactors, output_index
from edge_opt.ir import Operator, Subgraph, Tensor


def above_the_core(subgraph: Subgraph, block: Block, operands: OperandFactors) -> set[int]:
    """Tensors (by identity) above the block's core that every head can have for itself.

    Heads differ in such a tensor, and whatever reads it is done per head: nothing is computed twice. What the graph's
    caller or operators outside read is cut where it is.
    """
    reach = _Reach(subgraph, operands, {*block.core})
    reach.climb(reach.edges(block))
    return reach.found


class _Reach:
    def __init__(self, subgraph: Subgraph, operands: OperandFactors, replaced: set[Operator]) -> None:
        self.found: set[int] = set()
        self._subgraph = subgraph
        self._operands = operands
        self._replaced = replaced
        self._labels: dict[int, Factored | None] = {}

    def edges(self, block: Block) -> list[Tensor]:
        """What the core reads of heads from outside."""
        found: list[Tensor] = []
        top = [(block.output, block.factored)]
        for tensor, factored, ends in self._operands.upwards(
            top, lambda tensor, _: tensor.producer in block.core
        ):
            if ends:
                self._demand(tensor, factored)
                found.append(tensor)
        return found

    def climb(self, pending: list[Tensor]) -> None:
        """Take in whatever makes one of these tensors and can be done per head, and then what that reads."""
        while pending:
            operator = pending.pop().producer
            if operator is None or operator in self._replaced:
                continue
            read = self._read_per_head(operator)
            if read is None:
                continue
            self._replaced.add(operator)
            self.found.update(id(output) for output in operator.outputs)
            for source, own in read:
                self._demand(source, own)
            # A tensor that is read several times gets its turn with the last of its readers.
            pending.extend(source for source, _ in read)

    def _demand(self, tensor: Tensor, factored: Factored) -> None:
        own = fx.canonical(factored)
        if self._labels.setdefault(id(tensor), own) != own:
            self._labels[id(tensor)] = None

    def _read_per_head(self, operator: Operator) -> list[tuple[Tensor, Factored]] | None:
        """What one head's operator reads; None where it cannot be done per head, or is needed whole as well."""
        read: list[tuple[Tensor, Factored]] = []
        for tensor in operator.outputs:
            if not tensor.consumers and not self._subgraph.is_output(tensor):
                continue
            factored = self._labels.get(id(tensor))
            if factored is None or fx.piece_count(factored) == 1 or self._needed_whole(tensor):
                return None
            operands = self._operands(operator, factored, output_index(tensor))
            if not isinstance(operands, dict):
                return None
            read.extend((operator.input(index), own) for index, own in operands.items())
        return read

    def _needed_whole(self, tensor: Tensor) -> bool:
        per_axis = tensor.quantization is not None and tensor.quantization.is_per_axis
        others = any(reader not in self._replaced for reader in tensor.consumers)
        return per_axis or others or self._subgraph.is_output(tensor)
