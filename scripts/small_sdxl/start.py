"""The autoencoder before training: it works already, but what it gives back is blurred.

The quickstart's hand-set weights (`flame_train.recipes.small_vae`) encode each 8 x 8 block of pixels as its mean
colour and decode that smoothly. The encoder stays so. In the decoder, the branches that those weights leave at zero
are opened here, so that training can teach them what edges and textures look like.

A colour travels in channels s, -s, K, -K of a group, K being large and constant; the other channels are free.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from flame_train.models.vae import Vae
from flame_train.recipes.small_vae import weights

Array = np.ndarray[Any, Any]
_GROUPS, _CONSTANT = 4, 32.0


def hand_set(vae: Vae, seed: int) -> None:
    """Fills a VAE of 16 channels with the weights described above."""
    rng = np.random.default_rng(seed)
    made = weights(vae.arch, vae.shapes())
    for name, array in made.items():
        if name.startswith("decoder."):
            _open(name, array, rng)
    for name, part, attr, _ in vae.named_slots():
        getattr(part, attr).data[...] = made[name]


def _open(name: str, array: Array, rng: np.random.Generator) -> None:
    """Gives a branch of the decoder something to see and to learn with; its last convolution stays at zero."""
    if name.endswith(("norm1.weight", "attn_1.norm.weight")):
        array[:] = _CONSTANT * np.sqrt(
            2.0 * _GROUPS / len(array)
        )  # undoes the norm, which sees the constants above all
        array[_constants(len(array))] = 0.3
    elif name.endswith(("conv1.weight", ".q.weight", ".k.weight", ".v.weight")):
        array[:] = _random(rng, array)
    elif name.endswith(("upsample.conv.weight", "nin_shortcut.weight", "decoder.conv_in.weight")):
        free = np.setdiff1d(np.arange(len(array)), _taken(len(array)))
        scale = 0.13 if name == "decoder.conv_in.weight" else 1.0  # latents come unscaled
        array[free] = _random(rng, array)[free] * scale
        if array.shape[1] > _GROUPS:
            array[np.ix_(free, _constants(array.shape[1]))] = 0.0


def _random(rng: np.random.Generator, array: Array) -> Array:
    return rng.standard_normal(array.shape) / np.sqrt(array[0].size)


def _taken(width: int) -> Array:
    """The channels that colours travel in: the first four of three groups."""
    return (np.arange(3)[:, None] * (width // _GROUPS) + np.arange(4)).reshape(-1)


def _constants(width: int) -> Array:
    return (np.arange(3)[:, None] * (width // _GROUPS) + np.arange(2, 4)).reshape(-1)
