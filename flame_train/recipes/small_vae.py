"""Weights for a small autoencoder that are set by hand, so that it works without having been trained.

The network is SDXL's, narrow; what the weights make of it is plain image processing. Encoding averages each 8x8
block of pixels and writes its colour as four latent channels; decoding reads the colour back and enlarges it
smoothly. So decode(encode(x)) is x at an eighth of its resolution, enlarged again.

How a colour travels: every residual branch adds zero. Channels stand in groups, one a colour, and a group's first
four hold (s, -s, K, -K): the signal both ways, so that the group's mean is 0, and a large constant both ways, so that
its variance is nearly constant. A group norm then is a division by a known number, and SiLU loses nothing:
silu(s) - silu(-s) = s.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from flame_train.models.vae import VaeArch

Array = np.ndarray[Any, Any]
Weights = dict[str, Array]

_CONSTANT = 32.0  # K: the signal is at most 1, which changes a group's variance by a thousandth at most
_LOG_VARIANCE = -12.0
_COLOURS = 3

# corners of a tetrahedron: four directions that carry three colours evenly; decoding averages over them
_CORNERS = np.array([(1, 1, 1), (1, -1, -1), (-1, 1, -1), (-1, -1, 1)]) / np.sqrt(3.0)
_LATENT_STD = 0.55  # of a colour in pictures of [-1, 1]; with it the latents that are diffused have a std of about 1


def weights(arch: VaeArch, shapes: dict[str, tuple[int, ...]]) -> Weights:
    """Every weight by its native name (fp32), for an architecture with four groups."""
    if arch.groups != 4 or arch.latent_channels != 4:
        raise ValueError(f"these weights are for 4 groups and 4 latent channels, got {arch}")
    made = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    for name in made:
        if ".norm" in name and name.endswith("weight"):
            made[name][:] = 1.0
        elif name.endswith(("nin_shortcut.weight", "downsample.conv.weight", "upsample.conv.weight")):
            _carry(made[name], name)
    _encoder_ends(made, arch)
    _decoder_ends(made, arch)
    return made


def _slots(width: int) -> Array:
    """(3, 4): the channels (s, -s, K, -K) of each colour among `width` channels in four groups."""
    return np.arange(_COLOURS)[:, None] * (width // 4) + np.arange(4)


def _carry(kernel: Array, name: str) -> None:
    """A convolution that hands each slot on: as it is, averaged over 2x2 pixels, or smoothed after enlarging."""
    into, out = (_slots(width) for width in (kernel.shape[1], kernel.shape[0]))
    size = kernel.shape[-1]
    still = np.zeros((size, size))
    still[size // 2, size // 2] = 1.0
    moving = still
    if "downsample" in name:
        moving = np.zeros((3, 3))
        moving[:2, :2] = 0.25  # the window of output pixel i begins at input pixel 2 i
    elif "upsample" in name:
        moving = np.outer((1, 2, 1), (1, 2, 1)) / 16.0
    for colour in range(_COLOURS):
        for slot in range(4):
            kernel[out[colour, slot], into[colour, slot]] = moving if slot < 2 else still


def _encoder_ends(made: Weights, arch: VaeArch) -> None:
    slots = _slots(arch.channels)
    for colour in range(_COLOURS):
        made["encoder.conv_in.weight"][slots[colour, :2], colour, 1, 1] = (1.0, -1.0)
        made["encoder.conv_in.bias"][slots[colour, 2:]] = (_CONSTANT, -_CONSTANT)
    _undo_norm(made, "encoder.norm_out", arch.channels * arch.channel_mult[-1])
    to_latents = _CORNERS / (_LATENT_STD * arch.scaling_factor)
    last = _slots(arch.channels * arch.channel_mult[-1])
    for colour in range(_COLOURS):
        made["encoder.conv_out.weight"][:4, last[colour, 0], 1, 1] = to_latents[:, colour]
        made["encoder.conv_out.weight"][:4, last[colour, 1], 1, 1] = -to_latents[:, colour]
    made["quant_conv.weight"][:4, :4, 0, 0] = np.eye(4)
    made["quant_conv.bias"][4:] = _LOG_VARIANCE


def _decoder_ends(made: Weights, arch: VaeArch) -> None:
    made["post_quant_conv.weight"][:, :, 0, 0] = np.eye(4)
    from_latents = _CORNERS.T * (3.0 / 4.0) * (_LATENT_STD * arch.scaling_factor)
    first, last = _slots(arch.channels * arch.channel_mult[-1]), _slots(arch.channels)
    for colour in range(_COLOURS):
        made["decoder.conv_in.weight"][first[colour, 0], :, 1, 1] = from_latents[colour]
        made["decoder.conv_in.weight"][first[colour, 1], :, 1, 1] = -from_latents[colour]
        made["decoder.conv_in.bias"][first[colour, 2:]] = (_CONSTANT, -_CONSTANT)
        made["decoder.conv_out.weight"][colour, last[colour, :2], 1, 1] = (1.0, -1.0)
    _undo_norm(made, "decoder.norm_out", arch.channels)


def _undo_norm(made: Weights, name: str, width: int) -> None:
    """A group norm that gives back what it was given."""
    spread = _CONSTANT * np.sqrt(2.0 / (width // 4))  # the standard deviation of a group with two constants
    made[f"{name}.weight"][:] = spread
