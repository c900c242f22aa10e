"""FLUX.3 klein against diffusers': predictions, and every LoRA gradient, of the base and of the distilled one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from flame_train.engine import functional as F
from flame_train.engine import tensor
from flame_train.models.flux3.names import base_modules, transformer_to_diffusers
from flame_train.models.flux3.transformer import Flux3, Flux3Arch
from tests.parity.models.lora_gradients import fp64, latents_gradient_error, lora_gradient_errors, merged_in_torch

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")
pytestmark = pytest.mark.parity

TO_DIFFUSERS = transformer_to_diffusers()
ARCH = Flux3Arch(
    width=64, depth=2, single_depth=2, head_dim=16, mlp=192, channels=16, control_channels=12, context_dim=24
)
LENGTHS = (5, 9)  # of 9 rows


@pytest.fixture
def dtype():
    """fp32 alone: diffusers normalises queries and keys in it, so no smaller difference can be measured."""
    return "float32"


@pytest.fixture(autouse=True)
def in_fp64(monkeypatch):
    """diffusers normalises and turns in fp32 whatever is given, which would hide what is measured here."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


def diffusers_flux3(arch):
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


@pytest.fixture
def batch(dtype):
    rng = np.random.default_rng(1)
    return {
        "latents": rng.standard_normal((2, 4, 3, 16)).astype(dtype),
        "times": np.array([0.03, 0.875], np.float32),
        "context": rng.standard_normal((2, 9, 24)).astype(dtype),
        "rows": np.array(LENGTHS, np.int32),
        "weight": rng.standard_normal((2, 4, 3, 16)).astype(dtype),
    }


@pytest.fixture
def edited(batch, dtype):
    """The batch with two control images of other sizes."""
    rng = np.random.default_rng(2)
    controls = [rng.standard_normal((2, *size, 12)).astype(dtype) for size in ((3, 5), (4, 2))]
    return batch | {"controls": controls}


@pytest.fixture
def stepped(edited):
    """The same in steps of a flow map."""
    return edited | {"target": np.array([0.01, 0.75], np.float32)}


def ours(model, batch, latents=None):
    x = tensor(batch["latents"]) if latents is None else latents
    controls = [tensor(each) for each in batch.get("controls", ())]
    target = tensor(batch["target"]) if "target" in batch else None
    return model(x, *(tensor(batch[name]) for name in ("times", "context", "rows")), controls, target)


def theirs(twin, batch, weights=None, latents=None):
    """Each caption alone with its own rows, as the pipeline asks. Positions are the pipeline's."""
    from diffusers.modular_pipelines.flux3 import before_denoise as own

    given = fp64(batch["latents"]) if latents is None else latents
    made = []
    for i, length in enumerate(batch["rows"]):
        x = given[i : i + 1]
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


def as_twins(arch, dtype, fill, scrambled):
    model = scrambled(Flux3(arch), dtype)
    twin = fill(model, diffusers_flux3(arch), TO_DIFFUSERS)
    twin.requires_grad_(False)
    # our sinusoids: both make them in fp32, where a bit of a frequency is 1e-4 at t = 1000; tested with the UNet
    twin.time_proj.forward = lambda t: fp64(F.timestep_embedding(tensor(t.numpy().astype(np.float32)), 256).numpy())
    return model, twin


@pytest.fixture
def pair(dtype, fill, scrambled):
    return as_twins(ARCH, dtype, fill, scrambled)


@pytest.fixture
def flow_map(dtype, fill, scrambled):
    return as_twins(replace(ARCH, flow_map=True), dtype, fill, scrambled)


@pytest.mark.parametrize("given", ["batch", "edited"])
def test_prediction(pair, given, request, bound, off):
    model, twin = pair
    batch = request.getfixturevalue(given)
    assert off(ours(model, batch), theirs(twin, batch)) < bound


def test_prediction_of_the_distilled_one(flow_map, stepped, bound, off):
    model, twin = flow_map
    found = ours(model, stepped)
    assert off(found, theirs(twin, stepped)) < bound
    elsewhere = stepped | {"target": np.array([0.0, 0.5], np.float32)}
    assert off(ours(model, elsewhere), found.numpy()) > 1e-2


def test_a_target_is_for_a_flow_map_alone(pair, flow_map, batch, stepped):
    for (model, _), given in ((pair, stepped), (flow_map, batch)):
        with pytest.raises(ValueError, match="for a flow map, and for no other network"):
            ours(model, given)


def test_rows_behind_a_captions_own_do_not_matter(pair, batch, bound, off):
    """What stands there, and how many of them there are."""
    model, _ = pair
    found = ours(model, batch)
    behind = np.arange(9)[None, :, None] >= np.array(LENGTHS)[:, None, None]
    noise = np.random.default_rng(9).standard_normal(batch["context"].shape) * behind
    longer = np.pad(batch["context"] + noise, ((0, 0), (0, 7), (0, 0))).astype(batch["context"].dtype)
    assert off(ours(model, batch | {"context": longer}), found.numpy()) < bound


@pytest.mark.parametrize("checkpointing", ["off", "mlp", "full"])
@pytest.mark.parametrize("given", ["batch", "edited"])
def test_every_lora_gradient(pair, given, request, bound, off, with_lora, checkpointing):
    """Without control images their layers have no part in it: two blocks, and three layers outside of blocks."""
    model, twin = pair
    batch = request.getfixturevalue(given)
    modules = base_modules(ARCH.depth, ARCH.single_depth)
    names = [name for name in modules if given == "edited" or ".image_cond" not in name]
    attached = with_lora(model, names)
    model.checkpointing = checkpointing
    leaves, weights = merged_in_torch(twin, attached, TO_DIFFUSERS)
    out, expected = ours(model, batch), theirs(twin, batch, weights)
    assert off(out, expected.detach()) < bound

    errors = lora_gradient_errors(attached, leaves, out, expected, batch["weight"], off)
    assert len(errors) == 2 * {"batch": 46, "edited": 61}[given]
    assert {name: e for name, e in errors.items() if not e < bound} == {}


def test_gradient_of_the_latents(pair, batch, bound, off):
    assert latents_gradient_error(pair, batch, ours, theirs, off) < bound
