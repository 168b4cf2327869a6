"""Rules of the recurrent operators: LSTM, RNN and SVDF cells, single steps and sequences."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edge_opt.shapes.dimension import DYNAMIC, add_sizes, may_be_equal
from edge_opt.shapes.errors import ShapeError
from edge_opt.shapes.registry import rule

if TYPE_CHECKING:
    from edge_opt.shapes.call import Call, Results
    from edge_opt.shapes.dimension import Shape

_BASIC_KERNEL = 1
_BASIC_INPUTS, _BASIC_OUTPUTS = 5, 4
_RECURRENT_TO_OUTPUT = 8
_OPTIONAL_LSTM_INPUTS = (1, 5, 9, 10, 11, 12, 16, 17, 20, 21, 22, 23)


def _same_size(call: Call, first: tuple[int, int], second: tuple[int, int], what: str) -> None:
    """Refuse two axes, each given as (input, axis), that cannot have one size."""
    (left, left_axis), (right, right_axis) = first, second
    a, b = call.shapes[left], call.shapes[right]
    if a is None or b is None:
        return
    if left_axis >= len(a) or right_axis >= len(b) or not may_be_equal(a[left_axis], b[right_axis]):
        raise ShapeError(
            f"the {what} differs: axis {left_axis} of {call.described(left)}, axis {right_axis} of "
            f"{call.described(right)}"
        )


def _size(shape: Shape | None, axis: int) -> int:
    return DYNAMIC if shape is None else shape[axis]


@rule("LSTM", inputs=(5, 24), optional=_OPTIONAL_LSTM_INPUTS, outputs=None)
def lstm(call: Call) -> Results:
    """One step. Full kernel: `[batch, in]` gives `[batch, out]`, `out` from the recurrent-to-output weights.

    The basic kernel, of five inputs, also gives its state and two scratch results.

    Source: TFLite, lstm.cc, full::Prepare and basic::Prepare.
    """
    if int(call.option("kernel_type", 0)) == _BASIC_KERNEL or len(call.shapes) == _BASIC_INPUTS:
        return _basic_lstm(call)
    weights = _checked_lstm(call)
    shape = call.shapes[0]
    return [(_size(shape, 0), _size(weights, 1))]


def _checked_lstm(call: Call) -> Shape | None:
    if len(call.shapes) not in (20, 24) or len(call.op.outputs) != 1:
        raise ShapeError(
            f"it has {len(call.shapes)} inputs and {len(call.op.outputs)} outputs: expected 20 or 24, and 1"
        )
    shape = call.shapes[0]
    if shape is not None and len(shape) < 2:
        raise ShapeError(f"{call.described(0)} has rank {len(shape)}: expected rank 2 or more")
    weights = call.require_rank(_RECURRENT_TO_OUTPUT, 1, 2)
    _same_size(call, (4, 0), (_RECURRENT_TO_OUTPUT, 0), "number of cells")
    if shape is not None:
        _same_size(call, (0, len(shape) - 1), (4, 1), "input size")
    return weights


def _basic_lstm(call: Call) -> Results:
    if len(call.shapes) != _BASIC_INPUTS or len(call.op.outputs) != _BASIC_OUTPUTS:
        raise ShapeError(
            f"the basic kernel has {len(call.shapes)} inputs, {len(call.op.outputs)} outputs: expected 5, 4"
        )
    shape, activation, state = call.require_rank(0, 2), call.require_rank(1, 2), call.require_rank(4, 2)
    weights = call.require_rank(2, 2)
    call.require_rank(3, 1)
    _same_size(call, (0, 0), (1, 0), "batch")
    _same_size(call, (1, 1), (4, 1), "activation size")
    _same_size(call, (2, 0), (3, 0), "number of gates' cells")
    batch, depth = _size(activation, 0), _size(activation, 1)
    total = add_sizes((_size(shape, 1), depth))
    gates = DYNAMIC if depth < 0 else 4 * depth
    if weights is not None and not (may_be_equal(weights[0], gates) and may_be_equal(weights[1], total)):
        raise ShapeError(f"the weights {call.described(2)} must have the shape [{gates},{total}]")
    return [activation, state, (batch, total), (batch, gates)]


@rule("UNIDIRECTIONAL_SEQUENCE_LSTM", inputs=(20, 24), optional=_OPTIONAL_LSTM_INPUTS)
def sequence_lstm(call: Call) -> Results:
    """`[time, batch, in]` (or batch first) gives the same with `out`, from the recurrent-to-output weights.

    Source: TFLite, unidirectional_sequence_lstm.cc, Prepare.
    """
    weights, shape = _checked_lstm(call), call.shapes[0]
    if shape is None:
        return [None]
    return [(*shape[:-1], _size(weights, -1))]


@rule(
    "BIDIRECTIONAL_SEQUENCE_LSTM",
    inputs=48,
    optional=(1, 5, 9, 10, 11, 12, 16, 17, 18, 22, 26, 27, 28, 29, 33, 34, *range(39, 48)),
    outputs=None,
)
def bidirectional_lstm(call: Call) -> Results:
    """Two passes over `[time, batch, in]`: two results, or one with both outputs one after the other.

    Source: TFLite, bidirectional_sequence_lstm.cc, Prepare.
    """
    shape = call.require_rank(0, 3)
    forward, backward = call.require_rank(8, 2), call.require_rank(25, 2)
    return _merged(call, shape, _size(forward, 1), _size(backward, 1))


def _merged(call: Call, shape: Shape | None, forward: int, backward: int) -> Results:
    merge = call.flag("merge_outputs")
    if len(call.op.outputs) != (1 if merge else 2):
        raise ShapeError(
            f"it has {len(call.op.outputs)} outputs: expected {1 if merge else 2} by its merge_outputs"
        )
    lead = (DYNAMIC, DYNAMIC) if shape is None else shape[:2]
    if merge:
        return [(*lead, add_sizes((forward, backward)))]
    return [(*lead, forward), (*lead, backward)]


@rule("RNN", inputs=5)
def rnn(call: Call) -> Results:
    """One step: `[batch, in]` gives `[batch, units]`, `units` from the weights `[units, in]`.

    Source: TFLite, basic_rnn.cc, Prepare.
    """
    shape, weights = call.shapes[0], call.require_rank(1, 2)
    _same_size(call, (0, 1), (1, 1), "input size")
    _check_units(call, 1, 2, 3)
    return [(_size(shape, 0), _size(weights, 0))]


def _check_units(call: Call, weights: int, recurrent: int, bias: int) -> None:
    _same_size(call, (weights, 0), (bias, 0), "number of units")
    _same_size(call, (recurrent, 0), (bias, 0), "number of units")
    _same_size(call, (recurrent, 1), (bias, 0), "number of units")


@rule("UNIDIRECTIONAL_SEQUENCE_RNN", inputs=5)
def sequence_rnn(call: Call) -> Results:
    """`[time, batch, in]` (or batch first) gives the same with `units`, from the weights `[units, in]`.

    Source: TFLite, unidirectional_sequence_rnn.cc, Prepare.
    """
    shape, weights = call.require_rank(0, 3), call.require_rank(1, 2)
    _same_size(call, (0, 2), (1, 1), "input size")
    _check_units(call, 1, 2, 3)
    lead = (DYNAMIC, DYNAMIC) if shape is None else shape[:2]
    return [(*lead, _size(weights, 0))]


@rule("BIDIRECTIONAL_SEQUENCE_RNN", inputs=12, optional=(9, 10, 11), outputs=None)
def bidirectional_rnn(call: Call) -> Results:
    """Two passes over `[time, batch, in]`: two results, or one with both outputs one after the other.

    Source: TFLite, bidirectional_sequence_rnn.cc, Prepare.
    """
    shape = call.require_rank(0, 3)
    _same_size(call, (0, 2), (1, 1), "input size")
    _same_size(call, (0, 2), (5, 1), "input size")
    forward, backward = call.require_rank(1, 2), call.require_rank(5, 2)
    return _merged(call, shape, _size(forward, 0), _size(backward, 0))


@rule("SVDF", inputs=5, optional=(3,))
def svdf(call: Call) -> Results:
    """One step: `[batch, in]` gives `[batch, filters / rank]`, `filters` from the feature weights.

    Source: TFLite, svdf.cc, Prepare.
    """
    shape, features = call.shapes[0], call.require_rank(1, 2)
    rank = int(call.option("rank", 0))
    _same_size(call, (0, 1), (1, 1), "input size")
    _same_size(call, (1, 0), (2, 0), "number of filters")
    filters = _size(features, 0)
    if rank <= 0 or (filters >= 0 and filters % rank):
        raise ShapeError(f"its rank is {rank}: expected a divisor of the filters of {call.described(1)}")
    return [(_size(shape, 0), DYNAMIC if filters < 0 else filters // rank)]
