"""Two versions of a region on the same inputs: what is compared, and how it is counted. Only figures come back."""

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import proof_models as models
import pytest
from proof_models import tensor

from edge_opt.base.record import from_dict
from edge_opt.runtime.inputs import InputHint
from edge_opt.runtime.metrics import Difference
from edge_opt.runtime.protocol import DeclinedError, RuntimeRefused
from edge_opt.runtime.runner import Worker
from edge_opt.runtime.tensors import SignatureInfo, TensorInfo
from edge_opt.verification import trial
from edge_opt.verification.examine import run_versions
from edge_opt.verification.trial import DRAWS, SCALES, Outcome, Parts, Trial, shows_nothing

BOTH = Trial()


def bitwise(outcome: Outcome) -> list[tuple[str, bool]]:
    return [
        (name, all(each.bitwise for each in found)) for name, found in outcome.found[""].items()
    ]


def test_a_refusal_says_which_version_and_where(worker: Worker) -> None:
    good, bad = models.adder(), models.adder(other=(2, 3))
    text = "subgraph main (%x: float32[2,4], %y: float32[2,4]) { %z: float32[2,4] = CUSTOM 'foo' (%x, %y) return %z }"
    with pytest.raises(RuntimeRefused, match="region 'layer_3'") as caught:
        run_versions(worker, bad, bad, BOTH, where="region 'layer_3'")
    assert caught.value.reason.startswith("before model: ")
    with pytest.raises(RuntimeRefused, match="foo") as caught:
        run_versions(worker, good, models.written(text, key=""), BOTH)
    assert caught.value.reason.startswith("after model: ")


Version = Callable[..., Any]
X, Y, CODES = tensor("x", 4, 3), tensor("y", 4, 3), tensor("codes", 1000, dtype="int8", scale=0.1)


def compared(
    before: Version,
    after: Version,
    inputs: tuple[TensorInfo, ...] = (X,),
    output: Any = Y,
    **request: Any,
) -> Outcome:
    """Each version gets the inputs in order, and gives the only output."""
    versions = {"before": before, "after": after}
    declined = request.pop("declined", {})

    def run(version: str, kernels: str, arrays: list[Any]) -> list[Any]:
        if kernels in declined.get(version, ()):
            raise DeclinedError(f"{version}: not on {kernels}")
        return [versions[version](*arrays)]

    told = Trial(**{"kernels": ("xnnpack",), **request})
    return trial.run((SignatureInfo("region", inputs, (output,)), told), run)


def only(outcome: Outcome) -> Difference:
    ((found,),) = outcome.found[""].values()
    return found


def same(x: Any, *_: Any) -> Any:
    return x


def test_the_seed_decides_the_numbers_and_the_name_of_an_input_does_not() -> None:
    mask = tensor("mask", 4, 3)
    first, again, other = (compared(same, lambda x: x + 1, (mask,), seed=n) for n in (0, 0, 1))
    assert first == again != other
    assert 0 < only(first).largest < 8


@pytest.mark.parametrize(
    ("value", "other", "by"), [(60, 57, 3), (60, 61, 0), (-50, -46, 4), (-50, -51, 0), (59, 61, 1)]
)
def test_clipped_values_may_go_on_and_not_turn_back(value: int, other: int, by: int) -> None:
    one, two = (partial(np.full_like, fill_value=number) for number in (value, other))
    found = compared(one, two, (CODES,), CODES, clipped=(-50, 60))
    assert only(found).steps == by


def test_both_versions_get_the_same_numbers_of_every_kind_that_changes_an_input() -> None:
    kinds = ("closed", "high", "highest keys", "tiny")
    outcome = compared(same, same, kernels=("xnnpack", "reference"), extremes=kinds)
    assert bitwise(outcome) == [("xnnpack", True), ("reference", True)]
    assert [found.elements for (found,) in outcome.found[""].values()] == [12 * (1 + DRAWS)] * 2
    assert set(outcome.found) == {"", "high", "tiny"}
    wrong = compared(same, lambda x: np.minimum(x, 500), extremes=kinds)
    assert only(wrong).bitwise
    assert [found[0].bitwise for found in wrong.found["high"].values()] == [False]


def test_a_mask_can_be_closed_in_every_row() -> None:
    mask = tensor("mask", 2, 3)
    hints = (InputHint(), InputHint("mask", masked=-100.0, opened=0.0))
    added = lambda x, mask: x + (mask == -100).all()  # noqa: E731
    outcome = compared(same, added, (X, mask), hints=hints, extremes=("closed",))
    assert only(outcome).bitwise
    assert not outcome.found["closed"]["xnnpack"][0].bitwise


def test_a_kernel_set_that_does_not_take_the_first_version_is_left_out() -> None:
    kernels = ("xnnpack", "reference")
    for declined in kernels:
        (ran,) = compared(same, same, kernels=kernels, declined={"before": [declined]}).found[""]
        assert ran != declined
    with pytest.raises(DeclinedError, match="before: not on reference"):
        compared(same, same, kernels=kernels, declined={"before": kernels})
    with pytest.raises(DeclinedError, match="after: not on reference"):
        compared(same, same, kernels=kernels, declined={"after": ["reference"]})


def test_a_kernel_set_that_ran_once_is_not_left_out_later() -> None:
    declined: dict[str, list[str]] = {}
    with pytest.raises(DeclinedError, match="before: not on xnnpack"):
        compared(
            same,
            lambda x: declined.update(before=["xnnpack"]) or x,
            kernels=("xnnpack", "reference"),
            declined=declined,
            extremes=("high",),
        )


def test_an_input_takes_every_value_and_some_beyond_where_the_first_version_has_the_nearest() -> (
    None
):
    integer, seen = tensor("position", 2, dtype="int32"), {"before": [], "after": []}

    def version(name: str) -> Version:
        return lambda x: seen[name].extend(x.tolist()) or x

    compared(version("before"), version("after"), (integer,), integer, every_below=5)
    assert seen["before"] == [0, 0, 0, 1, 2, 3, 4, 4, 4, 4]
    assert seen["after"] == [-(2**31), -1, 0, 1, 2, 3, 4, 5, 2**31 - 1, 2**31 - 1]


@pytest.mark.parametrize("told", [0.125, 0.5])
def test_operands_are_run_at_every_scale_and_one_of_them_tells_most(told: float) -> None:
    """A result that follows its operand only where that fills so much of its range."""
    widths: list[float] = []

    def follows(x: Any) -> Any:
        widths.append(np.abs(x.astype(int)).max() / 128)
        return x if told * 0.7 < widths[-1] < told * 1.5 else np.zeros_like(x)

    outcome = compared(follows, same, (CODES,), CODES)
    assert widths[: 2 * len(SCALES) : 2] == [
        pytest.approx(scale, rel=0.3, abs=0.01) for scale in SCALES
    ]
    assert only(outcome).elements == len(SCALES) * CODES.elements
    assert outcome.scale == told
    assert compared(follows, same, (CODES,), CODES, scales=(1.0,)).scale == 1.0


def test_runs_with_other_integers_have_no_scale_of_their_own() -> None:
    """They come after the runs at each scale; here they alone show a change."""
    free = replace(tensor("count", 1, dtype="int32"), accepts=0)
    runs = count()

    def follows(x: Any, _: Any) -> Any:
        return x if next(runs) >= 2 * len(SCALES) else np.zeros_like(x)

    assert compared(follows, same, (CODES, free), CODES).scale == SCALES[0]


def test_requests_and_outcomes_survive_the_way_to_the_worker_and_back() -> None:
    hints = InputHint(), InputHint("mask", masked=-100.0, side="added")
    request = Trial(hints, clipped=(-5, 5), parts=Parts(0, (2, 3), (1,)), extremes=("high",))
    assert from_dict(Trial, json.loads(json.dumps(asdict(request)))) == request
    outcome = compared(np.zeros_like, lambda x: x + 1, extremes=("high",))
    assert from_dict(Outcome, json.loads(json.dumps(asdict(outcome)))) == outcome


def test_an_output_in_another_shape_is_a_refusal() -> None:
    with pytest.raises(DeclinedError, match=r"after: output 'y' has shape \(2, 3\), not \(4, 3\)"):
        compared(same, lambda x: x[:2])


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([0, 1, 2, 3], ""),
        ([1, 1, 1], "output 0 is the same value everywhere"),
        ([np.nan, np.nan], "output 0 has no finite number"),
        ([], "output 0 has no finite number"),
        ([np.nan, 1, 1], "output 0 is the same value everywhere"),
        ([np.nan, 1, np.inf], ""),
        ([1], ""),
        ([5, 9, -5], "output 0 is clipped everywhere in the old region"),
        ([5, 4, -5], ""),
    ],
)
def test_results_tell_where_they_hold_two_values(values: list[float], said: str) -> None:
    limits = (-5, 5) if 5 in values else None
    assert shows_nothing([np.array(values, np.float32)], None, limits) == said
    assert shows_nothing(
        [np.arange(4), np.array(values, np.float32)], None, limits
    ) == said.replace("0", "1")


def test_one_run_that_tells_is_enough() -> None:
    assert (
        compared(np.zeros_like, np.zeros_like).inconclusive
        == "output 0 is the same value everywhere"
    )
    assert compared(np.sign, np.sign, (CODES,), CODES).inconclusive == ""


def test_heads_tell_where_all_of_them_differ_along_their_own_axis() -> None:
    """Four heads of two numbers in `[2, 8]`; rows that are equal are no heads."""
    parts = Parts(0, (2, 4, 2), (1,))
    different = np.arange(8).reshape(1, 8).repeat(2, axis=0)
    assert shows_nothing([different], parts, None) == ""
    assert (
        shows_nothing([different % 6], parts, None)
        == "some of the 4 heads or tiles in output 0 are equal"
    )
    assert shows_nothing([different, different % 6], parts, None) == ""


@pytest.mark.parametrize("alike", [3, 1])
def test_heads_lie_along_several_axes(alike: int) -> None:
    """`[(K), T, (G)]` with heads n = 2k + g."""
    heads = np.arange(12).reshape(4, 3)
    heads[0] = heads[alike]
    results = [heads.reshape(2, 2, 3).transpose(0, 2, 1).reshape(6, 2)]
    told = shows_nothing(results, Parts(0, (2, 3, 2), (0, 2)), None)
    assert told == "some of the 4 heads or tiles in output 0 are equal"
