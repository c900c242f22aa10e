"""FLUX.3 klein and diffusers': the base alone and with two control images, and the distilled one, a flow map."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from flame_train.engine import tensor
from flame_train.models.flux3.names import base_modules, transformer_to_diffusers
from flame_train.models.flux3.transformer import Flux3, Flux3Arch
from tests.parity.twins.twin import ALL, Twin, always_fp64, fp64, given, sinusoids, torch

diffusers = pytest.importorskip("diffusers")

ARCH = Flux3Arch(
    width=64, depth=2, single_depth=2, head_dim=16, mlp=192, channels=16, control_channels=12, context_dim=24
)
FLOW_MAP = replace(ARCH, flow_map=True)
LENGTHS = (5, 9)  # of 9 rows


def reference(arch):
    return diffusers.Flux3Transformer2DModel(
        in_channels=arch.channels,
        cond_in_channels=arch.control_channels,
        num_layers=arch.depth,
        num_single_layers=arch.single_depth,
        attention_head_dim=arch.head_dim,
        num_attention_heads=arch.width // arch.head_dim,
        joint_attention_dim=arch.context_dim,
        mlp_ratio=arch.mlp / arch.width,
        axes_dims_rope=arch.axes,
        flow_map=arch.flow_map,
    )


def patch(twin, arch):
    twin.time_proj.forward = sinusoids(256)


def inputs(arch, dtype, variant):
    """`edited` has control images, `stepped` is the same in steps of a flow map."""
    rng = np.random.default_rng(1)
    batch = {
        "latents": rng.standard_normal((2, 4, 3, 16)).astype(dtype),
        "times": np.array([0.03, 0.875], np.float32),
        "context": rng.standard_normal((2, 9, 24)).astype(dtype),
        "rows": np.array(LENGTHS, np.int32),
        "weight": rng.standard_normal((2, 4, 3, 16)).astype(dtype),
    }
    rng = np.random.default_rng(2)
    controls = [rng.standard_normal((2, *size, 12)).astype(dtype) for size in ((3, 5), (4, 2))]
    batch |= {"controls": controls} if variant != "alone" else {}
    return batch | ({"target": np.array([0.01, 0.75], np.float32)} if variant == "stepped" else {})


def ours(model, batch, latents=None):
    controls = [tensor(each) for each in batch.get("controls", ())]
    target = tensor(batch["target"]) if "target" in batch else None
    return model(*given(batch, latents, "times", "context", "rows"), controls, target)


def theirs(twin, batch, weights=None, latents=None):
    """Each caption alone with its own rows, as the pipeline asks. Positions are the pipeline's."""
    from diffusers.modular_pipelines.flux3 import before_denoise as own

    images = fp64(batch["latents"]) if latents is None else latents
    made = []
    for i, length in enumerate(batch["rows"]):
        x = images[i : i + 1]
        context = fp64(batch["context"])[i : i + 1, :length]
        call = {
            "hidden_states": x.flatten(1, 2),
            "timestep": fp64(batch["times"])[i : i + 1],
            "encoder_hidden_states": context,
            "img_ids": own._prepare_image_ids(*x.shape[1:3], 0.5),
            "txt_ids": own.Flux3TextRoPEInputsStep._prepare_text_ids(context),
            "return_dict": False,
        }
        beside = [fp64(each)[i : i + 1] for each in batch.get("controls", ())]
        if beside:
            call["image_cond_hidden_states"] = torch.cat([each.flatten(1, 2) for each in beside], dim=1)
            ids = [own._prepare_image_ids(*each.shape[1:3], 0.5, -(1 + k)) for k, each in enumerate(beside)]
            call["image_cond_ids"] = torch.cat(ids)
        if "target" in batch:
            call["target_timestep"] = fp64(batch["target"])[i : i + 1]
        made.append(torch.func.functional_call(twin, weights or {}, kwargs=call)[0].reshape(x.shape))
    return torch.cat(made)


def layers(model, variant):
    """Without control images their layers have no part in it: two blocks, and three layers outside of blocks."""
    modules = base_modules(ARCH.depth, ARCH.single_depth)
    return [name for name in modules if variant != "alone" or ".image_cond" not in name]


TWIN = Twin(
    Flux3,
    {"base": ARCH},
    transformer_to_diffusers(),
    reference,
    patch,
    inputs,
    ours,
    theirs,
    {"alone": (46, ALL), "edited": (61, ALL)},
    exact=always_fp64,
    layers=layers,
    padded=("context", 7),
)
