"""GPTQ: rounds the weights of a product to 4 bits so that its results change little on typical inputs.

Columns are rounded one by one, and later columns compensate for each column's error, based on the second moments of the
product's inputs (Frantar et al. 2022, https://arxiv.org/abs/2210.17323). Rows are independent of each other.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Codes = NDArray[np.int8]

TOP = 7
"""The largest code; the smallest is -7, so that both signs have the same range."""
ROWS_AT_ONCE = 8192
"""Rows of weights that fit a core's cache together with their block of columns."""
_COLUMNS = 128
_SCALES = np.linspace(0.4, 1, 16, dtype=np.float32)
_DAMPING = 0.01
_TRIANGLE = 256  # size up to which a triangular matrix is inverted in one piece


@dataclass(frozen=True, slots=True)
class Grid:
    """Weights `[rows, columns]` as codes from -7 to 7 and one scale for each row."""

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


class Rounder:
    """Rounds weights that read the same inputs.

    Args:
        moments: `[columns, columns]`, the sum of `x x'` over inputs x that are typical of real use.
    """

    def __init__(self, moments: Floats) -> None:
        size = np.diag(moments)
        self._order = np.argsort(-size, kind="stable")
        hessian = moments[np.ix_(self._order, self._order)].astype(np.float32)
        damping = _DAMPING * float(size.mean())
        hessian[np.diag_indices_from(hessian)] += np.float32(damping or 1)
        self._upper = _compensation(hessian)

    def rounded(self, weights: Floats) -> Grid:
        """The nearest codes of each column, after compensation; each row gets the best of 16 scales without it."""
        scales = _least_error(weights)
        left = weights[:, self._order]
        codes = np.empty(weights.shape, np.int8)
        codes[:, self._order] = _column_by_column(left, scales, self._upper)
        return Grid(codes, scales)


def _compensation(hessian: Floats) -> Floats:
    """U with `U' U` the inverse of the Hessian: row k tells how later columns compensate for an error in column k.

    With rows and columns in reverse order, the Hessian's Cholesky factor is upper triangular: `H = R R'`, so U is the
    inverse of R.
    """
    reversed_factor = np.linalg.cholesky(hessian[::-1, ::-1])
    return _inverse_of_upper(reversed_factor[::-1, ::-1])


def _inverse_of_upper(upper: Floats) -> Floats:
    """The inverse of an upper triangular matrix, from those of its halves."""
    if len(upper) <= _TRIANGLE:
        small: Floats = np.linalg.inv(upper)
        return small
    half = len(upper) // 2
    first = _inverse_of_upper(upper[:half, :half])
    second = _inverse_of_upper(upper[half:, half:])
    whole = np.zeros_like(upper)
    whole[:half, :half] = first
    whole[half:, half:] = second
    whole[:half, half:] = -first @ upper[:half, half:] @ second
    return whole


def _nearest(weights: Floats, scales: Floats) -> Floats:
    codes: Floats = np.clip(np.rint(weights / scales), -TOP, TOP)
    return codes


def _least_error(weights: Floats) -> Floats:
    """The candidate scale of each row with the least squared error; 1 for a row of zeros."""
    largest = np.abs(weights).max(axis=1)
    largest = np.where(largest > 0, largest, np.float32(1)) / np.float32(TOP)
    best = largest * TOP  # that of a row of zeros, whose every error is the same
    least = np.square(weights).sum(axis=1)
    for part in _SCALES:
        scales = largest * part
        rounded = _nearest(weights, scales[:, None]) * scales[:, None]
        error = np.square(rounded - weights).sum(axis=1)
        best = np.where(error < least, scales, best)
        least = np.minimum(error, least)
    return np.asarray(best, np.float32)


def _column_by_column(left: Floats, scales: Floats, upper: Floats) -> Floats:
    """The codes of all columns; overwrites `left`."""
    codes = np.empty_like(left)
    for start in range(0, left.shape[1], _COLUMNS):
        block = np.ascontiguousarray(left[:, start : start + _COLUMNS])
        stop = start + block.shape[1]
        errors = np.empty_like(block)
        for column in range(block.shape[1]):
            at = start + column
            now = block[:, column]
            codes[:, at] = _nearest(now, scales)
            errors[:, column] = (now - codes[:, at] * scales) / upper[at, at]
            block[:, column + 1 :] -= errors[:, column, None] * upper[at, at + 1 : stop]
        left[:, stop:] -= errors @ upper[start:stop, stop:]
    return codes
