"""One rewrite of one region: what it replaces, whether it keeps to its frame, and how it becomes part of the graph."""

from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from types import MappingProxyType

from edge_opt.attention import factors as fx
from edge_opt.attention.factors import Factor
from edge_opt.attention.labelling import OperandFactors
from edge_opt.ir import Model, Operator, Subgraph, Tensor
from edge_opt.ir.refusal import RefusedError
from edge_opt.ir.walk import is_pure, read_outside, reads, with_called
from edge_opt.shapes import ShapeError, infer_operator
from edge_opt.shapes.rules import Enter, Fact, constants_of, recorded_shape

_CANNOT_WAIT = "what others read of the old region comes back into it, or cannot wait for the new one"


@dataclass(frozen=True, slots=True)
class MaskInput:
    """Which of a region's inputs is a mask `[.., T, S]`, and what masked and open entries are in it.

    `exact`: also rows that are masked everywhere must be what they were; else they are measured only.
    """

    tensor: Tensor
    masked: float
    opened: float
    exact: bool = False


@dataclass(frozen=True, slots=True)
class Saturation:
    """An intermediate of the old region clips what the new one keeps: its result stops at these codes."""

    low: int
    high: int


@dataclass(frozen=True, slots=True)
class Reference:
    """What a new region is held to where the old one is wrong itself: `operators` make `result` (float32) of its input.

    The region has one input of integers and one result. The proof runs it on all of 0 to `count` - 1, and on some
    beyond: there it must give what the reference gives at the nearest of those.
    """

    operators: tuple[Operator, ...]
    result: Tensor
    count: int


@dataclass(frozen=True, slots=True)
class Rewrite:
    """`old` operators of `subgraph` are to be replaced by `new` ones, both in execution order.

    Operators in both lists stay (something outside needs their results). `anchor` is the last old operator: the new
    ones take its place. `mask` is given where the two may differ on rows that are masked everywhere, `saturation` where
    the old region clips values that the new one does not. `calls`: the model whose subgraphs the operators call. A
    proof runs once for each of `spreads`, which say how much of their usual range inputs fill (all of it where they are
    not named): with the first, not everything may be clipped. `moved`: new operators that another graph has just so,
    with the one that each is a copy of. `parts` counts the heads or tiles that the new region makes apart: results
    that do not tell them apart prove nothing. `chosen`: new tensors whose quantization parameters the pass chose.
    `reference` takes the old region's place in the proof.
    """

    subgraph: Subgraph
    old: tuple[Operator, ...]
    new: tuple[Operator, ...]
    anchor: Operator
    mask: MaskInput | None = None
    calls: Model | None = None
    saturation: Saturation | None = None
    spreads: tuple[Mapping[Tensor, float], ...] = (MappingProxyType({}),)
    moved: Mapping[Operator, Operator] = field(default_factory=dict)
    parts: int = 1
    chosen: frozenset[Tensor] = frozenset()
    reference: Reference | None = None

    def inputs(self) -> tuple[Tensor, ...]:
        """What the old region reads from outside, without constants; what is read first comes first."""
        return tuple(t for t in reads(self.old) if not t.is_constant)

    def outputs(self) -> tuple[Tensor, ...]:
        """What the old region defines for operators outside or the graph's caller."""
        inside = set(self.old)
        made = (tensor for operator in self.old for tensor in operator.outputs)
        return tuple(tensor for tensor in made if read_outside(self.subgraph, tensor, inside))

    def mask_axes(self) -> tuple[int | None, ...]:
        """For each output the axis where the mask's rows lie, index modulo their number; None where they are on none.

        `[T, S]` lies on axis -2 of `[B, N, T, S]` or `[B, K, G*T, S]`, a padding mask `[B, S]` on axis 0.
        """
        mask = None if self.mask is None else self.mask.tensor
        if mask is None or len(mask.shape) < 2 or mask.shape[-2] == 1:
            return (None,) * len(self.outputs())
        return tuple(_axis_of_rows(mask, output) for output in self.outputs())

    def span(self) -> list[Operator]:
        """Everything in the graph from the first of the old operators up to the anchor, in execution order."""
        span: list[Operator] = []
        missing = set(self.old)
        operator: Operator | None = self.anchor
        while missing and operator is not None:
            span.append(operator)
            missing.discard(operator)
            operator = self.subgraph.before(operator)
        return span[::-1]

    def late_readers(self) -> list[Operator]:
        """Operators in front of the anchor that read what will be defined at the anchor; in execution order.

        They belong to others, and have to go behind the new operators.

        Raises:
            RefusedError: the region needs what one of them gives, or one does more than compute.
        """
        old, new = set(self.old), set(self.new)
        late = {tensor for operator in self.added() for tensor in operator.outputs}
        late.difference_update(self.anchor.outputs)
        readers: list[Operator] = []
        of_readers: set[Tensor] = set()
        for operator in self.span():
            # What is replaced may read what is defined late: it does not run any more.
            forbidden = late if operator in new else of_readers
            if operator in old:
                if not forbidden.isdisjoint(operator.inputs):
                    raise RefusedError(_CANNOT_WAIT)
            elif not late.isdisjoint(operator.inputs):
                if not is_pure(operator):
                    raise RefusedError(_CANNOT_WAIT)
                readers.append(operator)
                late.update(operator.outputs)
                of_readers.update(operator.outputs)
        return readers

    def added(self) -> tuple[Operator, ...]:
        """The new operators that are not old ones."""
        kept = set(self.old)
        return tuple(operator for operator in self.new if operator not in kept)

    def removed(self) -> tuple[Operator, ...]:
        """The old operators that do not stay."""
        staying = set(self.new)
        return tuple(operator for operator in self.old if operator not in staying)

    def derivable(self) -> Iterator[Operator]:
        """The new operators without those that were moved and read and define what they did: their shapes stay true."""
        for operator in self.added():
            copied = self.moved.get(operator)
            if copied is None or _recorded(copied) != _recorded(operator):
                yield operator


def _recorded(operator: Operator) -> list[object]:
    tensors = (*operator.inputs, *operator.outputs)
    return [tensor and (tensor.dtype, recorded_shape(tensor)) for tensor in tensors]


def _axis_of_rows(mask: Tensor, output: Tensor) -> int | None:
    """The axis of `output` whose index, modulo the mask's rows, says which of them (axis -2) is read there."""
    operands, rows = OperandFactors(), mask.shape[-2]
    for axis, size in enumerate(output.shape[:-1]):
        if size % rows:
            continue
        plain = fx.plain(output.shape)
        labelled = (*plain[:axis], (Factor(size, 1),), *plain[axis + 1 :])
        for tensor, factored, _ in operands.upwards([(output, labelled)], lambda *_: True):
            if tensor is mask and factored[-2] == (Factor(rows, 1),):
                return axis
    return None


def check_shapes(operators: Iterable[Operator], calls: Model | None = None) -> None:
    """Whether the recorded shapes are what the inputs give, dynamic dimensions included.

    `calls`: the model whose subgraphs the operators call; these must derive their results from what they are called
    with. Each is looked through once.

    Raises:
        RefusedError: a derived shape is not the recorded one.
    """

    @cache
    def refusal_in(index: int) -> str:
        assert calls is not None
        try:
            _check_shapes(calls.subgraphs[index].operators, enter)
        except RefusedError as refused:
            return str(refused)
        return ""

    def enter(index: int, inputs: Sequence[Fact]) -> list[Fact] | None:
        if calls is None:
            return None
        body = calls.subgraphs[index]
        shapes, recorded = [fact.shape for fact in inputs], [recorded_shape(tensor) for tensor in body.inputs]
        reason = refusal_in(index)
        if not reason and shapes != recorded:
            reason = f"the inputs are recorded as {recorded}, it is called with {shapes}"
        if reason:
            raise ShapeError(f"subgraph '{body.name}': {reason}")
        return [Fact(recorded_shape(tensor)) for tensor in body.outputs]

    _check_shapes(operators, enter)


def _check_shapes(operators: Iterable[Operator], enter: Enter) -> None:
    for operator in operators:
        shapes = [None if tensor is None else recorded_shape(tensor) for tensor in operator.inputs]
        try:
            derived = infer_operator(operator, shapes, constants_of(operator), enter)
        except ShapeError as error:
            raise RefusedError(str(error)) from error
        for shape, tensor in zip(derived, operator.outputs, strict=True):
            recorded = recorded_shape(tensor)
            if shape is None or shape != recorded:
                texts = ["unknown" if sizes is None else str(list(sizes)) for sizes in (shape, recorded)]
                where = f"{operator.name} '{tensor.name}'"
                raise RefusedError(f"{where}: derived shape {texts[0]}, recorded {texts[1]}")


def check_versions(rewrite: Rewrite) -> None:
    """Whether the versions of new operators are high enough for their types.

    The runtime does not look at them, other readers do. Copies of operators that were there keep what the file says.

    Raises:
        RefusedError: a version is too low.
    """
    old = rewrite.old if rewrite.calls is None else with_called(rewrite.old, rewrite.calls.subgraphs)
    known = {operator.code for operator in old}
    for operator in rewrite.added():
        needed = operator.least_version
        if operator.code.version < needed and operator.code not in known:
            name = operator.outputs[0].name
            raise RefusedError(
                f"{operator.name} '{name}': its types need version {needed}, it has {operator.code.version}"
            )


def check_parameters(rewrite: Rewrite) -> None:
    """Whether new operators give quantized tensors only parameters that the old region has.

    A scale that is off by one unit in the last place changes one code in millions, which no run may show.

    Raises:
        RefusedError: a tensor has parameters of its own.
    """
    before: Iterable[Operator] = rewrite.old
    if rewrite.calls is not None:
        before = with_called(before, rewrite.calls.subgraphs)
    known = {_parameters(tensor) for operator in before for tensor in _tensors(operator)}
    for operator in rewrite.added():
        for tensor in operator.outputs:
            if tensor.is_quantized and tensor not in rewrite.chosen and _parameters(tensor) not in known:
                raise RefusedError(
                    f"{operator.name} '{tensor.name}' has parameters that no tensor of the old region has"
                )


def _parameters(tensor: Tensor) -> Hashable:
    return None if tensor.quantization is None else (tensor.dtype, tensor.quantization.key())


def _tensors(operator: Operator) -> list[Tensor]:
    return [tensor for tensor in (*operator.inputs, *operator.outputs) if tensor is not None]


def commit(rewrite: Rewrite) -> list[Operator]:
    """Make the new region part of the graph; returns the old operators that stay for now.

    Those may be dead when the last rewrite that shares them is done.
    """
    graph = rewrite.subgraph
    late, removed = rewrite.late_readers(), rewrite.removed()
    position = graph.after(rewrite.anchor)
    for operator in (*late, *reversed(removed)):
        graph.remove(operator)
    for operator in rewrite.added():
        graph.insert_before(position, operator)
        for tensor in _tensors(operator):
            if not graph.lists(tensor):
                graph.add_tensor(tensor)
    for operator in late:
        graph.insert_before(position, operator)
    return [operator for operator in rewrite.old if operator.subgraph is graph]


def remove_dead(graph: Subgraph, candidates: Iterable[Operator], subgraphs: Sequence[Subgraph] = ()) -> None:
    """Remove those operators whose results nobody reads any more, and what only they needed.

    What does more than compute its results stays. `subgraphs` are the model's: without them, any call does.
    """
    pending = list(candidates)
    while pending:
        operator = pending.pop()
        is_read = any(tensor.consumers or graph.is_output(tensor) for tensor in operator.outputs)
        if operator.subgraph is not graph or is_read or not is_pure(operator, subgraphs):
            continue
        read = [tensor for tensor in operator.inputs if tensor is not None]
        graph.remove(operator)
        pending.extend(tensor.producer for tensor in read if tensor.producer is not None)


def share_equal(graph: Subgraph, added: Collection[Operator]) -> None:
    """Merge equal operators among the `added` ones.

    Equal: the same operator and options on the same inputs (constants by value), with results of the same type. Such
    operators compute the same bits, so readers of the later one can read the earlier one's result. No proof runs after
    this: so what reads state, draws random numbers or calls a subgraph is never equal to anything.
    """
    chosen = set(added)
    known: dict[Hashable, Operator] = {}
    for operator in graph.operators if chosen else ():
        if operator not in chosen or not is_pure(operator) or any(map(graph.is_output, operator.outputs)):
            continue
        first = known.setdefault(_key(operator), operator)
        if first is operator:
            continue
        for old, new in zip(operator.outputs, first.outputs, strict=True):
            graph.replace_uses(old, new)
        graph.remove(operator)


def _key(operator: Operator) -> Hashable:
    options = operator.options and operator.options.key()
    return (
        operator.code.key(),
        options,
        *map(_operand_key, operator.inputs),
        *map(_type_key, operator.outputs),
    )


def _operand_key(tensor: Tensor | None) -> Hashable:
    if tensor is None or not tensor.has_numbers or tensor.elements > 1 << 12:
        return id(tensor)
    return (tensor.array().tobytes(), _type_key(tensor))


def _type_key(tensor: Tensor) -> Hashable:
    quantization = tensor.quantization
    affine = quantization is not None and quantization.is_affine
    return (tensor.dtype, tensor.shape, quantization.key() if affine and quantization is not None else None)
