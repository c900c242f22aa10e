"""Dropout, by random numbers that depend on position alone: the same on every device, and when recomputed."""

from __future__ import annotations

import numpy as np

from ....errors import ShapeError
from ...dtype import Array
from ...namespace import NUMPY, Namespace
from ...op import ErrorSample, primitive, sample
from ...random import DROPOUT, Rng, bits, check_rng, uniform_of
from ..common.dims import Shape


@primitive(torch="nn.functional.dropout")
def dropout(
    xp: Namespace, input: Array, p: float = 0.5, training: bool = True, *, rng: Rng | None = None, stream: int = DROPOUT
) -> Array:
    """input with each element zeroed with probability p and the others divided by 1 - p (arXiv 1207.0580)

    Which ones is said by `rng`, whose samples are input's first dim, and `stream`; give every place of a network a
    stream of its own. Without training, or with p = 0, input itself.

    Args:
        xp: the array namespace.
        input: the input.
        p: the probability of a zero, in [0, 1].
        training: whether anything is dropped.
        rng: the random numbers of a step.
        stream: the random numbers' stream.

    Returns:
        In input's shape.

    Raises:
        ValueError: a probability outside.
    """
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"dropout: expected a probability p in [0, 1], got {p}")
    scale = _scale(xp, input.shape, p, training, rng, stream)
    return input if scale is None else input * scale.astype(input.dtype)


def _scale(xp: Namespace, shape: Shape, p: float, training: bool, rng: Rng | None, stream: int) -> Array | None:
    """The factor of each element: 0 or 1 / (1 - p).

    Args:
        xp: the array namespace.
        shape: the input's shape.
        p, training, rng: as in `dropout`.
        stream: the random numbers' stream.

    Returns:
        fp32 in that shape; None where nothing is dropped.

    Raises:
        ShapeError: random numbers for another number of samples.
    """
    if not training or p == 0.0:
        return None
    rng = check_rng(rng, "dropout: training")
    count = int(np.prod(shape[1:]))
    words = bits(xp, rng.seed, stream, rng.step, xp.asarray(rng.samples), count)
    if not shape or words.shape[0] != shape[0]:
        raise ShapeError(f"dropout: rng has {words.shape[0]} samples, input {shape} another first dim")
    kept = uniform_of(words).reshape(shape) >= np.float32(p)
    return kept * (0.0 if p == 1.0 else 1.0 / (1.0 - p))


@dropout.vjp("input")
def _(xp: Namespace, g: Array, input_shape: Shape, p: float, training: bool, rng: Rng | None, stream: int) -> Array:
    scale = _scale(xp, input_shape, p, training, rng, stream)
    return g if scale is None else g * scale.astype(g.dtype)


def _rng(samples: int) -> Rng:
    return Rng(NUMPY, 7, 3, np.arange(samples))


dropout.samples(
    sample((3, 4), 0.4, rng=_rng(3)),
    sample((2, 3, 4), 0.5, rng=_rng(2), stream=21),
    sample((3, 4), 0.4, False),
    sample((3, 4), 1.0, rng=_rng(3)),
)
dropout.errors(
    ErrorSample(sample((3, 4)), ValueError, "training needs rng"),
    ErrorSample(sample((3, 4), 1.5), ValueError, r"in \[0, 1\], got 1.5"),
    ErrorSample(sample((3, 4), rng=_rng(2)), ShapeError, "rng has 2 samples"),
)
