"""Krea 2 and diffusers': captions of several lengths, without and with control images."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import numpy as np
import pytest

from flame_train.engine import tensor
from flame_train.models.krea2.arch import Krea2Arch
from flame_train.models.krea2.names import transformer_to_diffusers
from flame_train.models.krea2.transformer import Krea2
from tests.parity.twins.twin import ALL, Twin, always_fp64, fp64, given, sinusoids, torch

diffusers = pytest.importorskip("diffusers")

ARCH = Krea2Arch(
    width=64,
    depth=2,
    heads=4,
    kv_heads=2,
    hidden=80,
    channels=4,
    frequencies=32,
    text_dim=24,
    text_layers=3,
    text_heads=4,
    text_kv_heads=2,
    text_hidden=40,
    layerwise=1,
    refiners=1,
    axes=(4, 6, 6),
)
SIZE = (8, 6)
LENGTHS = (5, 9)  # of 9 rows
SHOWN = {"alone": [], "one image": [(4, 6)], "two images": [(6, 2), (2, 4)]}
"""Rows and columns of control images' latents."""
LINEAR = 8 + 8 * 4  # what stands once, and eight layers a block


def reference(arch):
    return diffusers.Krea2Transformer2DModel(
        in_channels=4 * arch.channels,
        num_layers=arch.depth,
        attention_head_dim=arch.width // arch.heads,
        num_attention_heads=arch.heads,
        num_key_value_heads=arch.kv_heads,
        intermediate_size=arch.hidden,
        timestep_embed_dim=arch.frequencies,
        text_hidden_dim=arch.text_dim,
        num_text_layers=arch.text_layers,
        text_num_attention_heads=arch.text_heads,
        text_num_key_value_heads=arch.text_kv_heads,
        text_intermediate_size=arch.text_hidden,
        num_layerwise_text_blocks=arch.layerwise,
        num_refiner_text_blocks=arch.refiners,
        axes_dims_rope=arch.axes,
        rope_theta=arch.theta,
        norm_eps=arch.eps,
    )


def patch(twin, arch):
    embed = sinusoids(arch.frequencies, 1000.0)

    def embedded(times, dtype):
        made = twin.time_embed.linear_1(embed(times)[:, None])
        return twin.time_embed.linear_2(torch.nn.functional.gelu(made, approximate="tanh"))

    twin.time_embed.forward = embedded


def inputs(arch, dtype, variant):
    rng = np.random.default_rng(1)
    mask = np.arange(9)[None] < np.array(LENGTHS)[:, None]
    return {
        "latents": rng.standard_normal((2, *SIZE, 4)).astype(dtype),
        "times": np.array([0.03, 0.875], np.float32),
        "states": (rng.standard_normal((2, 9, 3 * 24)) * mask[..., None]).astype(dtype),
        "rows": np.array(LENGTHS, np.int32),
        "weight": rng.standard_normal((2, *SIZE, 4)).astype(dtype),
        "shown": [rng.standard_normal((2, *size, 4)).astype(dtype) for size in SHOWN[variant]],
    }


def ours(model, batch, latents=None):
    return model(*given(batch, latents, "times", "states", "rows"), [*map(tensor, batch["shown"])])


def packed(x):
    """The pipeline packs squares of latents with the channels first."""
    B, height, width, C = x.shape
    x = x.permute(0, 3, 1, 2).reshape(B, C, height // 2, 2, width // 2, 2).permute(0, 2, 4, 1, 3, 5)
    return x.reshape(B, height * width // 4, 4 * C)


def unpacked(x, size):
    """Latents of this height and width from their squares, of four channels."""
    x = x.reshape(len(x), size[0] // 2, size[1] // 2, 4, 2, 2).permute(0, 1, 4, 2, 5, 3)
    return x.reshape(len(x), *size, 4)


def placed(T, batch):
    """The pipeline's places of text and image, and behind these ai-toolkit's of control images."""
    found = [diffusers.Krea2Pipeline.prepare_position_ids(T, SIZE[0] // 2, SIZE[1] // 2, "cpu")]
    for number, own in enumerate(batch["shown"], 1):
        rows, columns = own.shape[1] // 2, own.shape[2] // 2
        axes = torch.meshgrid(torch.tensor([number]), torch.arange(rows), torch.arange(columns), indexing="ij")
        found.append(torch.stack(axes, dim=-1).reshape(-1, 3).to(found[0].dtype))
    return torch.cat(found)


def timed_apart(twin, own, clean):
    """A hook by which the last `clean` tokens are modulated as at time 0, the first `own` at theirs."""

    def hook(module, given, output):
        B = output.shape[0]
        vector = torch.nn.functional.gelu(twin.time_embed(torch.zeros(B), dtype=output.dtype), approximate="tanh")
        at_zero = torch.nn.functional.linear(vector, module.weight, module.bias)
        return torch.cat([output.expand(B, own, -1), at_zero.expand(B, clean, -1)], dim=1)

    return twin.time_mod_proj.register_forward_hook(hook)


def theirs(twin, batch, weights=None, latents=None):
    """Control images, which diffusers has not, are further tokens to its network."""
    B, T, _ = batch["states"].shape
    x = packed(fp64(batch["latents"]) if latents is None else latents)
    shown = [packed(fp64(own)) for own in batch["shown"]]
    call = {
        "hidden_states": torch.cat([x, *shown], dim=1),
        "encoder_hidden_states": fp64(batch["states"]).reshape(B, T, 3, 24),
        "timestep": fp64(batch["times"]),
        "position_ids": placed(T, batch),
        "encoder_attention_mask": torch.arange(T)[None] < torch.from_numpy(batch["rows"])[:, None],
        "return_dict": False,
    }
    apart = timed_apart(twin, T + x.shape[1], sum(own.shape[1] for own in shown))
    with contextlib.closing(SimpleNamespace(close=apart.remove)):
        made = torch.func.functional_call(twin, weights or {}, kwargs=call)[0][:, : x.shape[1]]
    return unpacked(made, SIZE)


TWIN = Twin(
    Krea2,
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
