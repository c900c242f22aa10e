"""Vectors divided by their length, and each image's channels by their spread."""

from __future__ import annotations

from ...errors import ShapeError
from ..op import ErrorSample, composite, sample
from ..op_samples import positive
from ..ops.common.dims import Dims
from ..ops.norm.group_norm import group_norm
from ..ops.pointwise.comparison import clamp
from ..tensors.tensor import Tensor
from .batch_norm import batch_norm_inference, other_dims, running_statistics, track_statistics
from .reductions import norm


@composite(torch="nn.functional.instance_norm", mutates=("running_mean", "running_var"))
def instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
    layout: str = "NCHW",
) -> Tensor:
    """Each channel of each image normalised over itself: group_norm with a group a channel (arXiv 1607.08022)

    Running statistics, where given, move as in batch_norm towards the mean of the images' own.

    Args:
        input, running_mean, running_var, weight, bias, momentum, eps, layout: as in `batch_norm`.
        use_input_stats: whether the samples' own statistics are used.

    Returns:
        In input's shape.
    """
    if not use_input_stats:
        given = running_statistics("instance_norm", running_mean, running_var)
        return batch_norm_inference(input, *given, weight, bias, eps, layout)
    axes = tuple(a for a in other_dims(input.shape, layout) if a != 0)
    track_statistics("instance_norm", input, axes, layout, running_mean, running_var, momentum)
    channels = input.shape[-1 if layout == "NHWC" else 1]
    return group_norm(input, channels, weight, bias, eps, layout)


instance_norm.non_differentiable("running_mean", "running_var")

instance_norm.samples(
    sample((2, 3, 2, 3), None, None, (3,), (3,)),
    sample((2, 3, 4), (3,), positive(3), momentum=0.3),
    sample((2, 3, 4), (3,), positive(3), (3,), None, False),
    sample((2, 3, 2, 4), layout="NHWC"),
)

instance_norm.errors(
    ErrorSample(sample((2, 3, 1)), ShapeError, "instance_norm: expected more than one value per channel"),
    ErrorSample(sample((2, 3, 2), use_input_stats=False), ValueError, "expected running_mean and running_var"),
)


@composite(torch="nn.functional.normalize")
def normalize(input: Tensor, p: float = 2.0, dim: Dims = 1, eps: float = 1e-12) -> Tensor:
    """input / max(||input||_p, eps), the norm over dim"""
    length: Tensor = norm(input, p, dim, True)
    return input / clamp(length, eps)


normalize.samples(sample((2, 3)), sample((2, 3, 4), 3.0, -1), sample((3, 4), dim=0))

normalize.errors(ErrorSample(sample((2, 3), 2.0, 2), ShapeError, "dim 2 is outside a tensor of 2 dims"))
