"""Two versions of a region on the same inputs: what is compared, and how it is counted. Only figures come back."""

import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np
import proof_models as models
import pytest
from proof_models import tensor
from tiny_models import Graph, Op, T, build, options

from edge_opt.base.record import from_dict
from edge_opt.runtime.errors import RuntimeRefused, RuntimeTimedOut
from edge_opt.runtime.inputs import InputHint
from edge_opt.runtime.pair import SCALES, Outcome, OutputProof, ProofRequest, prove
from edge_opt.runtime.runner import Worker
from edge_opt.runtime.tensors import SignatureInfo, TensorInfo

REFERENCE = ProofRequest(kernels=("reference",))


def subtraction(*, swapped: bool = False, names: str = "xyz") -> bytes:
    x, y, z = names
    tensors = [T(name, (2, 4)) for name in names]
    operands = [y, x] if swapped else [x, y]
    return build(Graph(tensors, [Op("SUB", operands, [z], options("SubOptions"))], [x, y], [z]))


def test_equal_regions_are_bitwise_equal_on_both_kernel_sets(worker: Worker) -> None:
    proof = worker.prove(subtraction(), subtraction())
    assert proof.bitwise
    assert set(proof.outputs) == {"xnnpack", "reference"}


def test_tensors_are_matched_by_position_not_by_name(worker: Worker) -> None:
    assert worker.prove(subtraction(), subtraction(names="yxz")).bitwise
    assert not worker.prove(subtraction(), subtraction(swapped=True)).bitwise


@pytest.mark.parametrize(
    ("after", "word"),
    [
        (models.requantized(scale=0.25), "quantization"),
        (models.requantized(dtype="int16"), "dtype"),
        (models.softmax(), "1 inputs before, 2 after"),
        (build(Graph([T("x", (1, 32), "int8", scale=0.5)], [], ["x"], ["x"])), "shape"),
    ],
)
def test_what_cannot_be_compared_is_a_value_with_a_reason(worker: Worker, after: bytes, word: str) -> None:
    proof = worker.prove(models.requantized(), after)
    assert word in (proof.mismatch or "")
    assert not proof.bitwise
    assert proof.worst(lambda d: d.max_abs) == float("inf")


def test_proofs_are_deterministic(worker: Worker) -> None:
    before, after = models.softmax(), models.softmax(scale=1.01)
    first, second = worker.prove(before, after), worker.prove(before, after)
    assert first == second
    assert worker.prove(before, after, ProofRequest(seed=1)) != first


def test_a_refusal_says_which_version_and_where(worker: Worker) -> None:
    good, bad = models.adder(), models.adder(other=(2, 3))
    with pytest.raises(RuntimeRefused, match="region 'layer_3'") as caught:
        worker.prove(bad, bad, where="'layer_3'")
    assert caught.value.reason.startswith("before: ")
    weird = build(
        Graph(
            [T("x", (2, 4)), T("y", (2, 4)), T("z", (2, 4))],
            [Op("CUSTOM", ["x", "y"], ["z"], None, "foo")],
            ["x", "y"],
            ["z"],
        )
    )
    with pytest.raises(RuntimeRefused, match="foo") as caught:
        worker.prove(good, weird)
    assert caught.value.reason.startswith("after: ")


def test_a_region_that_hangs_is_cut() -> None:
    with Worker(time_limit=60) as worker, pytest.raises(RuntimeTimedOut, match="within 1 s"):
        worker.prove(models.endless(), models.endless(), seconds=1)


def test_proof_inputs_are_not_guessed_from_names(worker: Worker) -> None:
    tensors = [T("mask", (4, 4)), T("z", (4, 4))]
    doubled = build(
        Graph(tensors, [Op("ADD", ["mask", "mask"], ["z"], options("AddOptions"))], ["mask"], ["z"])
    )
    (output,) = worker.prove(doubled, doubled, ProofRequest(kernels=("xnnpack",))).outputs["xnnpack"]
    assert 0 < output.open_rows.largest < 8
    assert np.isfinite(output.open_rows.largest)


# Versions that are plain functions in place of models

Version = Callable[..., Any]
X, Y, MASK, CODES = (
    tensor("x", 4, 3),
    tensor("y", 4, 3),
    tensor("mask", 2, 3),
    tensor("codes", 100, dtype="int8"),
)


def compared(
    before: Version,
    after: Version,
    inputs: tuple[TensorInfo, ...] = (X,),
    output: TensorInfo = Y,
    **request: Any,
) -> Outcome:
    """Each version gets the inputs in order, and gives the only output."""
    versions = {"before": before, "after": after}
    signature = SignatureInfo("region", inputs, (output,))
    told = ProofRequest(**{"kernels": ("xnnpack",), **request})
    return prove(
        (signature, signature),
        told,
        lambda name, _, given: [[versions[name](*each.values())] for each in given],
    )


def only(outcome: Outcome) -> OutputProof:
    (found,) = outcome.all()
    return found


def same(x: Any) -> Any:
    return x


@pytest.mark.parametrize(
    ("value", "other", "short"), [(60, 57, 3), (60, 61, 0), (-50, -46, 4), (-50, -51, 0)]
)
def test_what_turns_back_from_where_it_was_clipped_is_short_of_it(value: int, other: int, short: int) -> None:
    found = only(
        compared(
            lambda x: np.full_like(x, value),
            lambda x: np.full_like(x, other),
            (CODES,),
            CODES,
            limits=(-50, 60),
        )
    )
    assert (found.saturated, found.short, found.open_rows.elements) == (100, short, 0)


def test_what_the_first_version_clipped_is_counted_apart_and_the_second_may_go_on() -> None:
    values = np.arange(-50, 50).astype(np.int8)
    found = only(
        compared(lambda _: values.clip(-40, 30), lambda _: values, (CODES,), CODES, limits=(-40, 30))
    )
    assert (found.saturated, found.short, found.open_rows.elements) == (31, 0, 69)
    assert found.open_rows.bitwise
    assert not found.bitwise


@pytest.mark.parametrize(("axis", "closed", "apart"), [(0, (1,), True), (None, (1,), False), (0, (), False)])
def test_rows_that_a_mask_closes_are_measured_apart_where_the_axis_is_known(
    axis: int | None, closed: tuple[int, ...], apart: bool
) -> None:
    """Four rows of an output are twice the mask's two, of which the second is closed."""
    hints = (None, InputHint("mask", masked=-100.0, opened=0.0, masked_rows=closed))

    def closed_rows_differ(x: Any, _: Any) -> Any:
        return x + np.array([[0], [1], [0], [1]], np.float32)

    found = only(compared(lambda x, _: x, closed_rows_differ, (X, MASK), hints=hints, row_axes=(axis,)))
    counted = [(part.elements, part.differing) for part in found.measured]
    assert counted == ([(6, 0), (6, 6)] if apart else [(12, 6)])


@pytest.mark.parametrize("at_once", [False, True])
def test_both_versions_get_the_same_numbers_of_every_kind(at_once: bool) -> None:
    outcome = compared(
        same, same, at_once=at_once, kernels=("xnnpack", "reference"), extremes=("high", "tiny")
    )
    assert outcome.bitwise
    assert set(outcome.outputs) == {"xnnpack", "reference"}
    assert [proof.open_rows.elements for proof in outcome.all()] == [12, 12]
    assert set(outcome.extremes) == {"high", "tiny"}


@pytest.mark.parametrize("told", [0.125, 0.5])
def test_operands_have_the_scale_at_which_results_tell_most(told: float) -> None:
    """A result that follows its operand only where that fills so much of its range."""
    codes = tensor("x", 1000, dtype="int8", scale=0.1)

    def follows(x: Any) -> Any:
        return x if told / 2 < np.abs(x.astype(int)).max() / 128 < told else np.sign(x)

    assert told in SCALES
    assert compared(follows, follows, (codes,), codes).scale == told
    assert compared(follows, follows, (codes,), codes, scale=1.0).scale == 1.0


def test_requests_and_outcomes_survive_the_way_to_the_worker_and_back() -> None:
    request = ProofRequest((None, InputHint(spread=0.5)), (1, None), (-5, 5), parts=4, extremes=("high",))
    assert from_dict(ProofRequest, json.loads(json.dumps(asdict(request)))) == request
    hints = (None, InputHint("mask", masked_rows=(1,)))
    for outcome in (
        compared(lambda x, _: x, lambda x, _: x + 1, (X, MASK), hints=hints, row_axes=(0,)),
        compared(same, lambda x: x[:2]),
        compared(np.zeros_like, np.zeros_like),
    ):
        assert from_dict(Outcome, json.loads(json.dumps(asdict(outcome)))) == outcome


def test_an_output_in_another_shape_cannot_be_compared() -> None:
    outcome = compared(same, lambda x: x[:2], limits=(-1, 1))
    assert outcome.mismatch == "output 0 ('y'): shape (4, 3) before, (2, 3) after"
    assert outcome.worst(lambda d: d.max_abs) == float("inf")
    assert not outcome.bitwise


def test_results_that_tell_nothing_are_told_of() -> None:
    assert compared(np.zeros_like, np.zeros_like).untold == "output 0 is the same value everywhere"
    assert compared(same, same).untold == ""


def test_bitwise_means_everywhere_with_closed_rows_and_nothing_clipped() -> None:
    fine, worse = only(compared(same, same)).open_rows, only(compared(same, lambda x: x + 1)).open_rows
    assert Outcome({"xnnpack": (OutputProof(0, fine, fine),)}).bitwise
    for proof in (OutputProof(0, worse), OutputProof(0, fine, worse), OutputProof(0, fine, saturated=1)):
        outcome = Outcome({"reference": (OutputProof(0, fine),), "xnnpack": (OutputProof(0, fine), proof)})
        assert not outcome.bitwise
        assert outcome.on("reference").bitwise
        assert not outcome.on("xnnpack").bitwise
    assert not Outcome({}, mismatch="shapes").bitwise
