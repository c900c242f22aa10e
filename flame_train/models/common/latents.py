"""What a denoiser asks of latents, told in its own words: a layer deep inside would speak of its own shapes."""

from __future__ import annotations

from flame_train.engine import Tensor
from flame_train.errors import ShapeError


def check_latents(network: str, x_BHWC: Tensor, channels: int, multiple: int) -> None:
    """Raises ShapeError unless latents are (B, H, W, `channels`) with H and W multiples of `multiple`.

    Args:
        network: its name in the message, such as "UNet".
        x_BHWC: the latents.
        channels: the latents' channels.
        multiple: what both sides must be multiples of.
    """
    shape = x_BHWC.shape
    if len(shape) != 4 or shape[3] != channels:
        raise ShapeError(f"{network}: expected latents (B, H, W, {channels}), got {shape}")
    height, width = shape[1:3]
    if height % multiple or width % multiple or not height or not width:
        raise ShapeError(
            f"{network}: expected latents whose height and width are multiples of {multiple}, got {height} x {width}"
        )
