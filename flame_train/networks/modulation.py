"""Scales, shifts and gates of a transformer's tokens: a row for all of an image, or one for each run of tokens.

Shape letters: B batch, L tokens, D model width, N runs of R tokens, L = N R.
"""

from __future__ import annotations

from typing import Final

from flame_train.engine import Tensor, rematerialize
from flame_train.engine import functional as F

EPS: Final = 1e-6

# The inputs of linear layers are rematerialized: their own inputs have the same size and are saved anyway. In 16 bits
# this frees a fifth of the activations of Flux.1 dev, for two more passes over memory.


def modulated(x_BLD: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """Returns layer_norm(x) * (1 + scale) + shift, for rows (B, 1, D), or (B, N, 1, D) of runs of tokens."""
    if scale.ndim == x_BLD.ndim:
        return rematerialize(F.layer_norm_modulate, x_BLD, scale, shift, EPS)
    return rematerialize(_runs_modulated, x_BLD, scale, shift)


def gated(x_BLD: Tensor, gate: Tensor, found_BLD: Tensor) -> Tensor:
    """Returns x + gate * found, for rows as `modulated` takes them."""
    if gate.ndim == x_BLD.ndim:
        return F.gated_add(x_BLD, gate, found_BLD)
    return F.gated_add(_runs(x_BLD, gate), gate, _runs(found_BLD, gate)).reshape(x_BLD.shape)


def _runs_modulated(x_BLD: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return F.layer_norm_modulate(_runs(x_BLD, scale), scale, shift, EPS).reshape(x_BLD.shape)


def _runs(x_BLD: Tensor, rows_BN1D: Tensor) -> Tensor:
    B, N, _, D = rows_BN1D.shape
    return x_BLD.reshape(B, N, -1, D)
