"""Z-Image against diffusers': predictions, and the gradient of every LoRA matrix, for captions of several lengths."""

from __future__ import annotations

import numpy as np
import pytest

from flame_train.engine import functional as F
from flame_train.engine import tensor
from flame_train.models.zimage.names import transformer_to_diffusers
from flame_train.models.zimage.transformer import ZImage, ZImageArch
from tests.parity.models.lora_gradients import fp64, latents_gradient_error, lora_gradient_errors, merged_in_torch

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")
pytestmark = pytest.mark.parity

HERE = pytest.importorskip("diffusers.models.transformers.transformer_z_image")
TO_DIFFUSERS = transformer_to_diffusers()
ARCH = ZImageArch(
    width=48,
    depth=2,
    refiners=1,
    head_dim=16,
    hidden=128,
    channels=4,
    context_dim=24,
    time_dim=48,
    time_hidden=1024,
    axes=(4, 6, 6),
)
LENGTHS = (5, 33)  # the second is filled up to 64 places


def diffusers_zimage(arch):
    return diffusers.ZImageTransformer2DModel(
        in_channels=arch.channels,
        dim=arch.width,
        n_layers=arch.depth,
        n_refiner_layers=arch.refiners,
        n_heads=arch.width // arch.head_dim,
        n_kv_heads=arch.width // arch.head_dim,
        cap_feat_dim=arch.context_dim,
        rope_theta=arch.theta,
        axes_dims=list(arch.axes),
        axes_lens=[128, 32, 32],
    )


@pytest.fixture
def dtype():
    """fp32 alone: diffusers' norms are computed in it, so no smaller difference can be measured."""
    return "float32"


@pytest.fixture(autouse=True)
def in_fp64(monkeypatch):
    """diffusers turns queries and keys in fp32 whatever they are, which would hide what is measured here."""

    def turns(dim, end, theta):
        each = [
            torch.outer(torch.arange(e).double(), theta ** (-torch.arange(0, d, 2).double() / d))
            for d, e in zip(dim, end, strict=True)
        ]
        return [torch.polar(torch.ones_like(x), x) for x in each]

    monkeypatch.setattr(
        HERE.RopeEmbedder, "precompute_freqs_cis", staticmethod(lambda dim, end, theta: turns(dim, end, theta))
    )
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


@pytest.fixture(params=[(8, 6), (8, 16)], ids=["filled", "whole"])
def batch(dtype, request):
    """Images of 12 tokens, which are filled up to 32, or of 32."""
    rng = np.random.default_rng(1)
    shape = (2, *request.param, 4)
    mask = np.arange(40)[None] < np.array(LENGTHS)[:, None]
    return {
        "latents": rng.standard_normal(shape).astype(dtype),
        "times": np.array([3.0, 875.0], np.float32),
        "context": (rng.standard_normal((2, 40, 24)) * mask[..., None]).astype(dtype),
        "rows": np.array(LENGTHS, np.int32),
        "weight": rng.standard_normal(shape).astype(dtype),
    }


def ours(model, batch, latents=None):
    x = tensor(batch["latents"]) if latents is None else latents
    return model(x, *(tensor(batch[name]) for name in ("times", "context", "rows")))


def theirs(twin, batch, weights=None, latents=None):
    x = fp64(batch["latents"]) if latents is None else latents
    images = [image.permute(2, 0, 1).unsqueeze(1) for image in x]
    captions = [fp64(text[:n]) for text, n in zip(batch["context"], LENGTHS, strict=True)]
    call = {"x": images, "t": fp64(batch["times"]) / 1000, "cap_feats": captions, "return_dict": False}
    made = torch.func.functional_call(twin, weights or {}, kwargs=call)[0]
    return torch.stack([image.squeeze(1).permute(1, 2, 0) for image in made])


@pytest.fixture
def pair(dtype, fill, scrambled):
    model = scrambled(ZImage(ARCH), dtype)
    twin = fill(model, diffusers_zimage(ARCH), TO_DIFFUSERS)
    twin.requires_grad_(False)
    # our sinusoids: both make them in fp32, where a bit of a frequency is 1e-4 at t = 1000; tested with the UNet
    twin.t_embedder.timestep_embedding = lambda t, dim: fp64(
        F.timestep_embedding(tensor(t.numpy().astype(np.float32)), dim).numpy()
    )
    return model, twin


def test_prediction(pair, batch, bound, off):
    model, twin = pair
    assert off(ours(model, batch), theirs(twin, batch)) < bound


def test_a_batch_of_any_padding_predicts_the_same(pair, batch, bound, off):
    """What stands at the padding, and how much of it there is, does not matter."""
    model, _ = pair
    found = ours(model, batch)
    padding = np.arange(40)[None, :, None] >= np.array(LENGTHS)[:, None, None]
    noise = np.random.default_rng(9).standard_normal(batch["context"].shape) * padding
    longer = np.pad(batch["context"] + noise, ((0, 0), (0, 60), (0, 0))).astype(batch["context"].dtype)
    assert off(ours(model, batch | {"context": longer}), found.numpy()) < bound


@pytest.mark.parametrize(
    ("batch", "checkpointing"), [((8, 6), "off"), ((8, 6), "mlp"), ((8, 16), "full")], indirect=["batch"]
)
def test_every_lora_gradient(pair, batch, bound, off, with_lora, checkpointing):
    model, twin = pair
    attached = with_lora(model)
    model.checkpointing = checkpointing
    leaves, weights = merged_in_torch(twin, attached, TO_DIFFUSERS)
    out, expected = ours(model, batch), theirs(twin, batch, weights)
    assert off(out, expected.detach()) < bound

    errors = lora_gradient_errors(attached, leaves, out, expected, batch["weight"], off)
    assert len(errors) == 2 * 29
    assert {name: e for name, e in errors.items() if not e < bound} == {}


def test_gradient_of_the_latents(pair, batch, bound, off):
    assert latents_gradient_error(pair, batch, ours, theirs, off) < bound
