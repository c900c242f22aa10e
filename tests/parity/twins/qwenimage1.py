"""Qwen-Image 1 and diffusers': two captions, without and with control images, as Qwen-Image-Edit 2509 and 2511 have."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from flame_train.engine import tensor
from flame_train.models.qwenimage1.names import base_modules, transformer_table
from flame_train.models.qwenimage1.transformer import QwenImage1, QwenImage1Arch
from tests.parity.twins.krea2 import packed, unpacked
from tests.parity.twins.twin import ALL, Twin, always_fp64, fp64, given, sinusoids, torch

diffusers = pytest.importorskip("diffusers")

ARCH = QwenImage1Arch(width=64, depth=2, head_dim=16, channels=4, text_dim=24, axes=(4, 6, 6))
EDIT = replace(ARCH, zero_cond=True)
SIZE = (8, 6)
SHOWN = {"": [], "one image": [(4, 10)], "three images": [(6, 2), (2, 4), (8, 6)]}
"""Rows and columns of control images' latents, some with an odd number of tokens a side."""
LENGTHS = (5, 9)  # of 9 rows
LINEAR = 6 + 14 * 2 - 4  # what stands once, and fourteen layers a block
# what the last block makes of the text goes nowhere
UNUSED = tuple(f"transformer_blocks.1.{n}" for n in ("attn.add_q_proj", "attn.to_add_out", "txt_mlp.net"))


def reference(arch):
    return diffusers.QwenImageTransformer2DModel(
        in_channels=4 * arch.channels,
        out_channels=arch.channels,
        num_layers=arch.depth,
        attention_head_dim=arch.head_dim,
        num_attention_heads=arch.width // arch.head_dim,
        joint_attention_dim=arch.text_dim,
        axes_dims_rope=arch.axes,
        zero_cond_t=bool(arch.zero_cond),
    )


def patch(twin, arch):
    embed = sinusoids(256, 1000.0)
    twin.time_text_embed.forward = lambda times, *_: twin.time_text_embed.timestep_embedder(embed(times))


def inputs(arch, dtype, variant):
    rng = np.random.default_rng(1)
    mask = np.arange(9)[None] < np.array(LENGTHS)[:, None]
    return {
        "latents": rng.standard_normal((2, *SIZE, 4)).astype(dtype),
        "times": np.array([0.03, 0.875], np.float32),
        "states": (rng.standard_normal((2, 9, 24)) * mask[..., None]).astype(dtype),
        "rows": np.array(LENGTHS, np.int32),
        "weight": rng.standard_normal((2, *SIZE, 4)).astype(dtype),
        "shown": [rng.standard_normal((2, *size, 4)).astype(dtype) for size in SHOWN[variant]],
    }


def ours(model, batch, latents=None):
    own = given(batch, latents, "times", "states", "rows")
    return model(*own, [*map(tensor, batch["shown"])], bool(model.arch.zero_cond))


def theirs(twin, batch, weights=None, latents=None):
    B, T, _ = batch["states"].shape
    x = packed(fp64(batch["latents"]) if latents is None else latents)
    shown = [packed(fp64(own)) for own in batch["shown"]]
    call = {
        "hidden_states": torch.cat([x, *shown], dim=1),
        "encoder_hidden_states": fp64(batch["states"]),
        "encoder_hidden_states_mask": torch.arange(T)[None] < torch.from_numpy(batch["rows"])[:, None],
        "timestep": fp64(batch["times"]),
        "img_shapes": [[(1, h // 2, w // 2) for h, w in (SIZE, *(own.shape[1:3] for own in batch["shown"]))]] * B,
        "return_dict": False,
    }
    made = torch.func.functional_call(twin, weights or {}, kwargs=call)[0][:, : x.shape[1]]
    return unpacked(made, SIZE)


TWIN = Twin(
    QwenImage1,
    {"": ARCH, "2511": EDIT},
    transformer_table(),
    reference,
    patch,
    inputs,
    ours,
    theirs,
    dict.fromkeys(SHOWN, (LINEAR, ALL)),
    exact=always_fp64,
    layers=lambda model, variant: [name for name in base_modules(2) if not name.startswith(UNUSED)],
    padded=("states", 7),
)
