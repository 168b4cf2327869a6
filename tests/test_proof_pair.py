"""Two versions of a region on the same inputs: only figures come back, and a failed proof is a value."""

import numpy as np
import proof_models as models
import pytest
from tiny_models import Graph, Op, T, build, options

from edge_opt.runtime.errors import RuntimeRefused, RuntimeTimedOut
from edge_opt.runtime.pair import ProofRequest
from edge_opt.runtime.runner import Worker

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


def test_a_difference_is_measured(worker: Worker) -> None:
    proof = worker.prove(models.softmax(), models.softmax(scale=1.001), REFERENCE)
    assert not proof.bitwise
    assert not proof.bitwise_on("reference")
    assert not proof.bitwise_on("xnnpack")
    assert 1e-6 < proof.worst(lambda d: d.max_rel) < 1e-2
    assert 0 < proof.seconds < 600


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
