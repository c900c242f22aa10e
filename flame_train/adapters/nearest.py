"""The low-rank product nearest to an update, by singular values (Eckart and Young 1936), and its distance.

The rank of the best product of a given error, or the error of a given rank, follows from the singular values alone.
The squared distance is the sum of the squares of those left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .factors import Array, LoraFactors

_Values = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True, slots=True)
class Truncation:
    """How much of an update is kept: at most `rank` singular values, or as few as leave a relative `error`.

    Exactly one of the two is not zero. The error is |update - kept| / |update| in the Frobenius norm.
    """

    rank: int = 0
    error: float = 0.0

    def of(self, left_out: _Values) -> int:
        """Returns the rank for singular values of which all but the first r have the norm `left_out[r]`."""
        most = len(left_out) - 1
        if self.rank:
            return min(self.rank, most)
        return max(1, int(np.argmax(left_out <= self.error * left_out[0])))


@dataclass(frozen=True, slots=True)
class Truncated:
    """A module's nearest LoRA, and the norms of what it leaves out and of the whole update."""

    factors: LoraFactors
    left_out: float
    norm: float


def truncate(factors: LoraFactors, want: Truncation) -> Truncated:
    """Returns the LoRA nearest to another one, with its alpha / rank; one of no higher rank than wanted stays."""
    left, s, right = _of_product(factors)
    left_out = _norms_left_out(s) * abs(factors.scale)
    rank = want.of(left_out)
    if rank >= factors.rank:
        return Truncated(factors, 0.0, float(left_out[0]))
    up, down = left[:, :rank] * np.sqrt(s[:rank]), np.sqrt(s[:rank])[:, None] * right[:rank]
    lora = LoraFactors(
        down.astype(factors.down.dtype).reshape(rank, *factors.down.shape[1:]),
        up.astype(factors.up.dtype).reshape(len(up), rank, *factors.up.shape[2:]),
        factors.scale * rank,
    )
    return Truncated(lora, float(left_out[rank]), float(left_out[0]))


def nearest_to(update: Array, want: Truncation) -> Truncated:
    """Returns the LoRA nearest to an update in the shape of its weight, fp32, with alpha equal to its rank.

    The singular values are roots of the eigenvalues of the smaller Gram matrix, in fp64: exact to 1e-8 of the largest.
    """
    out, *taps = update.shape
    matrix = update.reshape(out, -1).astype(np.float64)
    wide = matrix.shape[0] <= matrix.shape[1]
    values, vectors = np.linalg.eigh(matrix @ matrix.T if wide else matrix.T @ matrix)
    left_out = _norms_left_out(np.sqrt(np.maximum(values[::-1], 0.0)))
    rank = want.of(left_out)
    basis = vectors[:, ::-1][:, :rank]
    up, down = (basis, basis.T @ matrix) if wide else (matrix @ basis, basis.T)
    norms = np.linalg.norm(down, axis=1) if wide else np.linalg.norm(up, axis=0)
    balance = np.sqrt(np.where(norms > 0, norms, 1.0))
    up, down = (up * balance, down / balance[:, None]) if wide else (up / balance, down * balance[:, None])
    factors = LoraFactors(
        down.astype(np.float32).reshape(rank, *taps),
        up.astype(np.float32).reshape(out, rank, *(1 for _ in taps[1:])),
        float(rank),
    )
    return Truncated(factors, float(left_out[rank]), float(left_out[0]))


def largest(factors: LoraFactors, rank: int) -> tuple[Array, Array]:
    """down (rank, in) and up (out, rank) with the `rank` largest singular values of the update, alpha / rank in up."""
    left, s, right = _of_product(factors)
    root = np.sqrt(s[:rank] * abs(factors.scale))
    up = left[:, :rank] * root * np.sign(factors.scale)
    return (root[:, None] * right[:rank]).astype(np.float32), up.astype(np.float32)


def _of_product(factors: LoraFactors) -> tuple[_Values, _Values, _Values]:
    """Returns the SVD of up @ down, by that of a matrix of the rank's size."""
    down = factors.down.astype(np.float64).reshape(factors.rank, -1)
    up = factors.up.astype(np.float64).reshape(-1, factors.rank)
    left, r_left = np.linalg.qr(up)
    right, r_right = np.linalg.qr(down.T)
    u, s, vt = np.linalg.svd(r_left @ r_right.T, full_matrices=False)
    return left @ u, s, vt @ right.T


def _norms_left_out(s: _Values) -> _Values:
    """Returns norm of all singular values but the first r, for each r from 0 to their number."""
    return np.append(np.sqrt(np.cumsum(s[::-1] ** 2)[::-1]), 0.0)
