"""GPTQ: rounds the weights of a product to 4 bits so that its results change little on typical inputs.

Columns are rounded one by one, and later columns compensate for each column's error, based on the second moments of the
product's inputs (Frantar et al. 2022, https://arxiv.org/abs/2210.17323). Rows are independent of each other.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Codes = NDArray[np.int8]

BOTTOM = -8
"""The smallest code of 4 bits."""
TOP = 7
"""The largest one.

Without -8, 4 bits in 95 % of Qwen2.5-Coder-0.5B's weights cost 0.0458 instead of 0.0433 nats on text of another kind.
"""
LEAST_ROW = np.float32(1e-9)
"""ai-edge-quantizer's floor for the largest weight of a row: smaller ones become zeros, also here."""
ROWS_AT_ONCE = 8192
"""Rows of weights that are read, rounded or written together."""
_ROWS_TOGETHER = 4096  # that fit a core's cache with a block of columns
_ROWS_IN_CACHE = 256  # that fit it with all columns
_COLUMNS = 128
_SCALES = np.linspace(0.4, 1, 16, dtype=np.float32)
_DAMPING = 0.05
"""Added to every input's second moment, as a share of their mean, so that rounding does not fit its texts too closely.

For moments of about ten times as many inputs as columns, see `damping_for`.
"""

_CORRECTED = np.float32(0.5)
"""How much of the weights' least-squares correction is made; a whole one fits the texts too closely.

SmolLM2-135M, all layers in 4 bits, nats on prompts to judge by and on other text: without it 0.104 and 0.099, with
a quarter 0.074 and 0.073, with half 0.063 and 0.069, with all 0.071 and 0.073.
"""


@dataclass(frozen=True, slots=True)
class Grid:
    """Weights `[rows, columns]` as codes, in 4 bits from -8 to 7, and one scale for each row."""

    codes: Codes
    scales: Floats

    @classmethod
    def joined(cls, blocks: Sequence["Grid"]) -> "Grid":
        """The rows of several grids, in their order."""
        codes = np.concatenate([one.codes for one in blocks])
        scales = np.concatenate([one.scales for one in blocks])
        return cls(codes, scales)

    def values(self) -> Floats:
        """The rounded weights."""
        return self.codes * self.scales[:, None]


class Moments:
    """The sum of `x x'` over inputs x of a product, `[columns, columns]`."""

    def __init__(self) -> None:
        # The diagonal and the part above it: a symmetric sum takes half the time.
        self._upper: Any = None

    def add(self, inputs: Floats) -> None:
        """Add inputs `[count, columns]`."""
        from scipy.linalg.blas import ssyrk

        if self._upper is None:
            self._upper = ssyrk(1.0, inputs.T)
        else:
            self._upper = ssyrk(1.0, inputs.T, beta=1.0, c=self._upper, overwrite_c=True)

    def whole(self) -> Floats:
        """The sum so far."""
        whole = self._upper + self._upper.T
        whole[np.diag_indices_from(whole)] /= 2
        return np.asarray(whole)


def damping_for(columns: int, inputs: int) -> float:
    """The damping for moments of so many inputs: the fewer there are for each column, the less they say of others.

    Half of the share of columns to inputs. Measured with it, and with 0.05 for all products, in Qwen2.5-Coder-0.5B by
    9,350 tokens: the harms of the `down` products alone sum to 0.027 and 0.065 nats on the prompts to judge by; with
    95 % of its weights in 4 bits, KL divergence on text of another kind is 0.0438 +- 0.0016 and 0.0466 +- 0.0019. In
    Qwen2.5-Coder-1.5B (8,960 columns), what rounding destroys of the results of `down` falls by 15 to 20 %.

    Not right for any inputs: where few directions hold most of them, less damping destroys less.
    """
    return columns / (2 * inputs)


class Rounder:
    """Rounds weights that read the same inputs.

    Args:
        moments: `[columns, columns]`, the sum of `x x'` over inputs x that are typical of real use.
        damping: added to every input's second moment, as a share of their mean.
    """

    def __init__(self, moments: Floats, damping: float = _DAMPING) -> None:
        from scipy.linalg import cholesky

        size = np.diag(moments)
        # Columns are rounded from the last to the first.
        self._order = np.argsort(size, kind="stable")
        hessian = moments[np.ix_(self._order, self._order)].astype(np.float32)
        added = damping * float(size.mean())
        hessian[np.diag_indices_from(hessian)] += np.float32(added or 1)
        # L with `L L'` the Hessian, whose transpose is the same matrix, in the order that LAPACK overwrites.
        lower = cholesky(hessian.T, lower=True, overwrite_a=True, check_finite=False)
        self._lower = np.asarray(lower, np.float32)

    def rounded(self, weights: Floats, lost: Floats | None = None) -> Grid:
        """The nearest codes of each column, after compensation; each row gets the best of 16 scales without it.

        Args:
            weights: `[rows, columns]`.
            lost: `[rows, columns]`, the sum of `e x'` over inputs x, where e is what results of these weights lack of
                those that are wanted. The weights are moved towards them before they are rounded.
        """
        if lost is not None:
            weights = weights + _CORRECTED * self._solved(lost)
        codes = np.empty(weights.shape, np.int8)
        scales = np.empty(len(weights), np.float32)
        for first in range(0, len(weights), _ROWS_IN_CACHE):
            rows = slice(first, first + _ROWS_IN_CACHE)
            scales[rows] = _least_error(weights[rows])
        for first in range(0, len(weights), _ROWS_TOGETHER):
            rows = slice(first, first + _ROWS_TOGETHER)
            columns = weights[rows, self._order].T
            found = _column_by_column(columns.copy("C"), scales[rows], self._lower)
            codes[rows, self._order] = found.T
        return Grid(codes, scales)

    def _solved(self, products: Floats) -> Floats:
        """`P H^-1` for `[rows, columns]` P and the Hessian H."""
        from scipy.linalg import cho_solve

        solved = np.empty_like(products)
        columns = np.asfortranarray(products[:, self._order].T)
        found = cho_solve((self._lower, True), columns, overwrite_b=True, check_finite=False)
        solved[:, self._order] = found.T
        return solved


def _least_scales(weights: Floats) -> Floats:
    """The least scale of each row in which none of its weights `[rows, columns]` is clipped; 1 for a row of zeros."""
    is_row = np.abs(weights).max(axis=1) >= LEAST_ROW
    scales = np.maximum(
        weights.max(axis=1) / np.float32(TOP), weights.min(axis=1) / np.float32(BOTTOM)
    )
    return np.where(is_row, scales, np.float32(1))


def _nearest(weights: Floats, scales: Floats) -> Floats:
    codes: Floats = np.clip(np.rint(weights / scales), BOTTOM, TOP)
    return codes


def _least_error(weights: Floats) -> Floats:
    """The candidate scale of each row with the least squared error; 1 for a row of zeros."""
    largest = _least_scales(weights)
    best = np.ones_like(largest)  # that of a row of zeros, whose every error is the same
    least = np.square(weights).sum(axis=1)
    for part in _SCALES:
        scales = largest * part
        rounded = _nearest(weights, scales[:, None]) * scales[:, None]
        error = np.square(rounded - weights).sum(axis=1)
        best = np.where(error < least, scales, best)
        least = np.minimum(error, least)
    return best


def _column_by_column(weights: Floats, scales: Floats, lower: Floats) -> Floats:
    """The codes of weights `[columns, rows]`, one column of the product after the other, the last one first.

    With errors e and the factor L, the squared error is the sum of `(L' e)_i ^ 2` over columns i, and `(L' e)_i`
    depends on the errors of column i and of those behind it. So each column is rounded to where these make it least.
    """
    codes = np.empty_like(weights)
    errors = np.empty_like(weights)
    diagonal = np.diag(lower)[:, None]
    for stop in range(len(weights), 0, -_COLUMNS):
        start = max(stop - _COLUMNS, 0)
        wanted = lower[stop:, start:stop].T @ errors[stop:]
        wanted /= diagonal[start:stop]
        wanted += weights[start:stop]
        for column in range(stop - 1, start - 1, -1):
            codes[column] = _nearest(wanted[column - start], scales)
            errors[column] = weights[column] - codes[column] * scales
            shares = lower[column, start:column, None] / diagonal[start:column]
            wanted[: column - start] += shares * errors[column]
    return codes
