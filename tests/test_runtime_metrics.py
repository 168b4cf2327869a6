"""What the figures mean, on numbers that a person can check."""

import json
import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from proof_models import tensor

from edge_opt.runtime import metrics
from edge_opt.runtime.metrics import Difference, Tolerance, are_logits
from edge_opt.runtime.tensors import TensorInfo


def f32(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def i8(*values: int) -> np.ndarray:
    return np.array(values, np.int8)


def plain(array: NDArray[Any]) -> TensorInfo:
    return tensor("x", *array.shape, dtype=array.dtype.name)


def measure(
    a: NDArray[Any], b: NDArray[Any], infos: tuple[TensorInfo, TensorInfo] | None = None, **how: Any
) -> Difference:
    """The difference of two arrays, whose elements stand for themselves unless `infos` tell otherwise."""
    return metrics.measure(a, b, infos or (plain(a), plain(b)), **how)


def test_a_nan_equals_any_nan_and_zero_does_not_equal_minus_zero() -> None:
    payload = np.array([0x7FC00001], np.uint32).view(np.float32)
    assert measure(f32(math.nan), payload).bitwise
    assert measure(f32(math.nan), -payload).equal
    assert measure(f32(math.nan, 1), f32(math.nan, 2)).max_abs == 1
    signs = measure(f32(0.0), f32(-0.0))
    assert (signs.bitwise, signs.equal, signs.differing) == (False, True, 1)


@pytest.mark.parametrize("other", [math.nan, math.inf, -math.inf])
def test_what_is_finite_on_one_side_only_differs_infinitely(other: float) -> None:
    found = measure(f32(1, 2), f32(1, other), tolerance=Tolerance(atol=1e9, rtol=1e9))
    assert (found.max_abs, found.outside, found.worst) == (math.inf, 1, (1,))
    back = measure(f32(1, other), f32(1, 2), tolerance=Tolerance(atol=1e9, rtol=1e9))
    assert (back.outside, back.finite) == (1, 1)
    assert measure(f32(1, other), f32(1, other)).bitwise
    for each in (found, back, measure(f32(0), f32(1)), measure(f32(other), f32(other))):
        assert json.loads(json.dumps(each.to_dict(), allow_nan=False))["elements"] == each.elements


def test_tolerances_are_absolute_plus_relative_to_a() -> None:
    for atol, rtol in ((0.25, 0), (0, 0.25), (0.01, 0.24)):
        assert measure(f32(1.0), f32(1.25), tolerance=Tolerance(atol=atol, rtol=rtol)).equal
    for rtol in (0, 0.2):
        assert not measure(f32(1.0), f32(1.25), tolerance=Tolerance(rtol=rtol)).equal


@pytest.mark.parametrize(
    ("a", "b", "figures"),
    [
        (np.array([2**60, 5]), np.array([2**60 + 1, 5]), (1, 1, 1, (0,))),
        (np.array([2**53, 5]), np.array([2**53, 7]), (1, 1, 2, (1,))),
    ],
    ids=["integers beyond 2**53", "an integer below them"],
)
def test_what_real_numbers_do_not_distinguish_differs(
    a: NDArray[Any], b: NDArray[Any], figures: tuple[int, int, float, tuple[int, ...]]
) -> None:
    found = measure(a, b)
    assert (found.differing, found.outside, found.max_abs, found.worst) == figures
    assert measure(a, a).bitwise


def quantized(dtype: str, scale: float, zero_point: int = 0) -> TensorInfo:
    return tensor("x", 2, dtype=dtype, scale=scale, zero=zero_point)


@pytest.mark.parametrize(
    ("a", "b", "infos", "steps", "max_abs"),
    [
        (i8(10, 14), i8(10, 11), (quantized("int8", 0.5, 10),) * 2, 3, 1.5),
        (
            f32(1, 2),
            np.array([4, 9], np.int16),
            (tensor("x", 2), quantized("int16", 0.25)),
            None,
            0.25,
        ),
        (i8(2), i8(4), (quantized("int8", 0.5), quantized("int8", 0.25)), None, 0),
        # With a scale for each channel codes are all there is.
        (
            i8(1, 1),
            i8(1, 4),
            (TensorInfo("x", "x", (2,), (2,), "int8", (1.0, 10.0), (0, 0)),) * 2,
            3,
            3,
        ),
    ],
)
def test_quantized_values_are_compared_as_codes_and_as_real_numbers(
    a: np.ndarray,
    b: np.ndarray,
    infos: tuple[TensorInfo, TensorInfo],
    steps: int | None,
    max_abs: float,
) -> None:
    found = measure(a, b, infos)
    assert (found.steps, found.max_abs, found.equal, found.bitwise) == (
        steps,
        max_abs,
        max_abs == 0,
        False,
    )


@pytest.mark.parametrize(
    ("tolerance", "permitted"),
    [
        (Tolerance(steps=24, relative=0.1), False),
        (Tolerance(rtol=1e-3), False),
        (Tolerance(atol=1), False),
        (Tolerance(atol=2), True),
    ],
)
def test_no_rounding_makes_one_token_another(tolerance: Tolerance, permitted: bool) -> None:
    tokens = tensor("token", 1, dtype="int32")
    a, b = np.array([151643], np.int32), np.array([151645], np.int32)
    found = measure(a, b, (tokens, tokens), tolerance=tolerance)
    assert tolerance.permits(found) is found.equal is permitted
    codes = quantized("int32", 0.5)
    found = measure(a, b, (codes, codes), tolerance=tolerance)
    assert tolerance.permits(found), "real numbers, two steps of 0.5 apart"


def test_nothing_to_compare_is_equal() -> None:
    empty = np.zeros((0, 4), np.float32)
    found = measure(empty, empty, logits=True)
    assert found == Difference(0)
    assert (found.snr_db, found.max_rel, found.equal) == (np.inf, 0, True)
    assert measure(f32(1000, 0)[None], f32(1000, 0)[None], logits=True).kl == 0, (
        "large logits do not overflow"
    )
    for codes in (empty.astype(np.int8), np.ones(3, np.int8)):
        assert measure(codes, codes).steps == 0


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("logits", (1, 5), True),
        ("y", (1, 1, 4096), True),
        ("kv_cache_k_0", (1, 4096), False),
        ("z", (1, 64), False),
    ],
)
def test_logits_are_known_by_name_or_width(
    name: str, shape: tuple[int, ...], expected: bool
) -> None:
    assert are_logits(TensorInfo(name, name, shape, shape, "float32")) is expected


@pytest.mark.parametrize("piece", [13, 1 << 19])
@pytest.mark.parametrize("seed", range(4))
def test_every_figure_is_what_plain_arithmetic_gives(
    seed: int, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Element by element, with Python's own numbers, and in pieces of any size."""
    monkeypatch.setattr(metrics, "_PIECE", piece)
    values = np.random.default_rng(seed)
    a = values.normal(size=(9, 40)).astype(np.float32)
    b = (a + values.normal(size=a.shape) * 10.0 ** values.integers(-8, 0, size=a.shape)).astype(
        np.float32
    )
    found = measure(a, b, logits=True)
    pairs = [(float(x), float(y)) for x, y in zip(a.ravel(), b.ravel(), strict=True)]
    signal, noise = math.fsum(x * x for x, _ in pairs), math.fsum((x - y) ** 2 for x, y in pairs)
    assert found.snr_db == pytest.approx(10 * math.log10(signal / noise))
    assert (
        found.max_abs
        == max(abs(x - y) for x, y in pairs)
        == abs(float(a[found.worst]) - float(b[found.worst]))
    )
    assert found.max_rel == found.max_abs / max(abs(x) for x, _ in pairs)
    assert found.differing == sum(x != y for x, y in pairs)
    rows = [_row(one, other) for one, other in zip(a.tolist(), b.tolist(), strict=True)]
    assert found.kl == pytest.approx(math.fsum(row[0] for row in rows) / len(rows))
    assert found.top1 == pytest.approx(sum(row[1] for row in rows) / len(rows))


def _row(a: list[float], b: list[float]) -> tuple[float, bool]:
    """KL divergence of two softmaxes, and whether the highest is the same."""
    weights = [[math.exp(value) for value in row] for row in (a, b)]
    p, q = ([weight / math.fsum(row) for weight in row] for row in weights)
    divergence = math.fsum(x * math.log(x / y) for x, y in zip(p, q, strict=True))
    return divergence, a.index(max(a)) == b.index(max(b))
