"""Qwen-Image 2.1 and diffusers': two captions, without and with control images."""

from __future__ import annotations

import numpy as np
import pytest

from flame_train.engine import tensor
from flame_train.models.qwenimage.arch import QwenImageArch
from flame_train.models.qwenimage.names import transformer_to_diffusers
from flame_train.models.qwenimage.transformer import QwenImage
from tests.parity.twins.twin import ALL, Twin, always_fp64, fp64, given, sinusoids, torch

diffusers = pytest.importorskip("diffusers")

ARCH = QwenImageArch(width=64, depth=2, head_dim=16, hidden=192, channels=6, text_dim=24, axes=(4, 6, 6))
SIZE = (4, 6)
LENGTHS = (5, 9)  # of 9 rows
LINEAR = 8 + 6 * 2  # what stands once, and six layers a block
SHOWN = {"alone": [], "one image": [((2, 4), 3)], "two images": [((4, 2), 2), ((2, 2), 4)]}
"""Rows and columns of control images, and how many of the text's tokens stand before each."""


def reference(arch):
    return diffusers.QwenImage21Transformer2DModel(
        in_channels=arch.channels,
        out_channels=arch.channels,
        num_layers=arch.depth,
        attention_head_dim=arch.head_dim,
        num_attention_heads=arch.width // arch.head_dim,
        context_in_dim=arch.text_dim,
        mlp_ratio=arch.hidden // arch.width,
        axes_dims_rope=arch.axes,
        eps=arch.eps,
    )


def patch(twin, arch):
    embed = sinusoids(256, 1000.0)
    twin.time_text_embed.forward = lambda times, *_: twin.time_text_embed.timestep_embedder(embed(times))


def inputs(arch, dtype, variant):
    rng = np.random.default_rng(1)
    mask = np.arange(9)[None] < np.array(LENGTHS)[:, None]
    return {
        "latents": rng.standard_normal((2, *SIZE, 6)).astype(dtype),
        "times": np.array([0.03, 0.875], np.float32),
        "states": (rng.standard_normal((2, 9, 24)) * mask[..., None]).astype(dtype),
        "rows": np.array(LENGTHS, np.int32),
        "weight": rng.standard_normal((2, *SIZE, 6)).astype(dtype),
        "shown": [(rng.standard_normal((2, *size, 6)).astype(dtype), start) for size, start in SHOWN[variant]],
    }


def ours(model, batch, latents=None):
    controls, starts = [tensor(own) for own, _ in batch["shown"]], [start for _, start in batch["shown"]]
    return model(*given(batch, latents, "times", "states", "rows"), controls, starts)


def theirs(twin, batch, weights=None, latents=None):
    """Caption by caption: in a batch the image's places would depend on the longest one, padding included."""
    (height, width), latents = SIZE, fp64(batch["latents"]) if latents is None else latents
    made = []
    for i, rows in enumerate(batch["rows"]):
        # an image's places in the text are a quarter of its tokens, and its states there are not read
        slots, states, begun = [], [], 0
        for own, start in [*batch["shown"], (batch["latents"], rows)]:
            places = own.shape[1] * own.shape[2] // 4
            slots += [False] * (start - begun) + [True] * places
            states += [batch["states"][i, begun:start], np.full((places, 24), 7.0)]
            begun = start
        images = [fp64(own[i : i + 1]).reshape(1, -1, 6) for own, _ in batch["shown"]]
        call = {
            "hidden_states": torch.cat([*images, latents[i : i + 1].reshape(1, height * width, -1)], dim=1),
            "encoder_hidden_states": fp64(np.concatenate(states[:-1])[None]),
            "timestep": fp64(batch["times"][i : i + 1]),
            "img_shapes": [[(1, *own.shape[1:3]) for own, _ in batch["shown"]] + [(1, height, width)]],
            "img_mask": torch.tensor([slots]),
            "return_dict": False,
        }
        found = torch.func.functional_call(twin, weights or {}, kwargs=call)[0]
        made.append(found[:, -height * width :].reshape(1, height, width, -1))
    return torch.cat(made)


TWIN = Twin(
    QwenImage,
    {"": ARCH},
    transformer_to_diffusers(),
    reference,
    patch,
    inputs,
    ours,
    theirs,
    dict.fromkeys(SHOWN, (LINEAR, ALL)),
    exact=always_fp64,
    padded=("states", 7),
)
