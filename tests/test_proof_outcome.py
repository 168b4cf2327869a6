"""What is compared, and how it is counted: two versions that are plain functions in place of models."""

import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
from proof_models import tensor

from edge_opt.base.record import from_dict
from edge_opt.runtime.inputs import InputHint
from edge_opt.runtime.pair import Cut, Outcome, OutputProof, ProofRequest, prove, take
from edge_opt.runtime.tensors import SignatureInfo, TensorInfo

Version = Callable[..., Any]


X, Y = tensor("x", 4, 3), tensor("y", 4, 3)


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


CODES = tensor("codes", 100, dtype="int8")


def clipped(x: Any) -> Any:
    return np.clip(x, -50, 60)


def test_what_the_first_version_clipped_is_counted_apart_and_the_second_may_go_on() -> None:
    values = np.arange(-100, 100).astype(np.int8)[:100]

    def first(_: Any) -> Any:
        return clipped(values)

    found = only(compared(first, lambda _: values, (CODES,), CODES, limits=(-50, 60)))
    inside = int(np.count_nonzero((values > -50) & (values < 60)))
    assert (found.saturated, found.short, found.open_rows.elements) == (100 - inside, 0, inside)
    assert found.open_rows.bitwise
    assert found.masked_rows is None


@pytest.mark.parametrize(
    ("value", "other", "short"), [(60, 57, 3), (60, 61, 0), (-50, -46, 4), (-50, -51, 0)]
)
def test_what_turns_back_from_where_it_was_clipped_is_short_of_it(value: int, other: int, short: int) -> None:
    limits = (-50, 60)
    found = only(
        compared(
            lambda x: np.full_like(x, value), lambda x: np.full_like(x, other), (CODES,), CODES, limits=limits
        )
    )
    assert (found.saturated, found.short, found.open_rows.elements) == (100, short, 0)


MASK = tensor("mask", 2, 3)


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
def test_both_versions_get_the_same_numbers(at_once: bool) -> None:
    outcome = compared(same, same, at_once=at_once, kernels=("xnnpack", "reference"))
    assert outcome.bitwise
    assert set(outcome.outputs) == {"xnnpack", "reference"}
    assert [proof.open_rows.elements for proof in outcome.all()] == [12, 12]


def test_each_version_gets_its_part_of_the_same_whole() -> None:
    """The first reads two rows, the second one column of another version of it."""
    cut = Cut(((8, 5),), ((((1, 3), None),), (((1, 3), (2,)),)))
    seen: list[Any] = []

    def first(x: Any) -> Any:
        seen.append(x)
        return x

    def second(x: Any) -> Any:
        seen.append(x)
        return seen[0]

    outcome = compared(first, second, (tensor("x", 2, 5),), tensor("y", 2, 5), cut=cut)
    assert outcome.bitwise
    assert (seen[0].shape, seen[1].shape) == ((2, 5), (2, 1))
    assert np.array_equal(seen[0][:, [2]], seen[1])


def test_a_request_survives_the_way_to_the_worker() -> None:
    cut = Cut(((8, 5), (6,)), (((None, None), ((0, 4),)), ((None, (2,)), (None,))))
    request = ProofRequest((None, InputHint(spread=0.5)), (1, None), (-5, 5), parts=4, cut=cut)
    assert from_dict(ProofRequest, json.loads(json.dumps(asdict(request)))) == request
    assert take(np.arange(6).reshape(2, 3), (None, (2, 0))).tolist() == [[2, 0], [5, 3]]


def test_an_output_in_another_shape_cannot_be_compared() -> None:
    outcome = compared(same, lambda x: x[:2], limits=(-1, 1))
    assert outcome.mismatch == "output 0 ('y'): shape (4, 3) before, (2, 3) after"
    assert outcome.worst(lambda d: d.max_abs) == float("inf")
    assert not outcome.bitwise


def test_results_that_tell_nothing_are_told_of() -> None:
    assert compared(np.zeros_like, np.zeros_like).untold == "output 0 is the same value everywhere"
    assert compared(same, same).untold == ""
    rows = np.tile(np.arange(3, dtype=np.float32), (4, 1))
    told = compared(lambda _: rows, lambda _: rows, parts=4).untold
    assert told == "of the 4 parts of output 0 along axis 0 some are equal"


def test_bitwise_means_everywhere_with_closed_rows_and_nothing_clipped() -> None:
    fine = only(compared(same, same)).open_rows
    assert only(compared(same, same)) == OutputProof(0, fine, None, saturated=0, short=0)
    worse = only(compared(same, lambda x: x + 1)).open_rows
    assert Outcome({"xnnpack": (OutputProof(0, fine, fine),)}).bitwise
    for proof in (OutputProof(0, worse), OutputProof(0, fine, worse), OutputProof(0, fine, saturated=1)):
        outcome = Outcome({"reference": (OutputProof(0, fine),), "xnnpack": (OutputProof(0, fine), proof)})
        assert not outcome.bitwise
        assert outcome.bitwise_on("reference")
        assert not outcome.bitwise_on("xnnpack")
    assert not Outcome({}, mismatch="shapes").bitwise
    assert not Outcome({"xnnpack": (OutputProof(0, fine),)}, mismatch="shapes").bitwise_on("xnnpack")


def test_an_outcome_survives_the_way_from_the_worker() -> None:
    hints = (None, InputHint("mask", masked_rows=(1,)))
    for outcome in (
        compared(lambda x, _: x, lambda x, _: x + 1, (X, MASK), hints=hints, row_axes=(0,)),
        compared(same, lambda x: x[:2]),
        compared(np.zeros_like, np.zeros_like),
    ):
        assert from_dict(Outcome, json.loads(json.dumps(asdict(outcome)))) == outcome
