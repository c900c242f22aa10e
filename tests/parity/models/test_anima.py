"""Anima against diffusers': predictions, the gradient of every LoRA matrix, and the adapter of its text."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from flame_train.engine import Tensor, tensor
from flame_train.engine import functional as F
from flame_train.models.anima.names import transformer_to_diffusers
from flame_train.models.anima.transformer import Anima, AnimaArch
from flame_train.text_encoders.anima.network import AdapterArch, LlmAdapter

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")
pytestmark = pytest.mark.parity

HERE = pytest.importorskip("diffusers.models.transformers.transformer_cosmos")
CONDITIONER = pytest.importorskip("diffusers.models.condition_embedders.condition_embedder_anima")
TO_DIFFUSERS = transformer_to_diffusers()
ARCH = AnimaArch(width=48, depth=2, head_dim=24, hidden=96, channels=4, context_dim=20, rank=8)
ADAPTER = AdapterArch(width=32, layers=2, head_dim=8, hidden=64, source_dim=24, target_dim=20, vocabulary=50, least=12)


@pytest.fixture
def dtype():
    """fp32 alone: diffusers' positions are computed in it, so no smaller difference can be measured."""
    return "float32"


def diffusers_anima(arch):
    return diffusers.CosmosTransformer3DModel(
        in_channels=arch.channels,
        out_channels=arch.channels,
        num_attention_heads=arch.width // arch.head_dim,
        attention_head_dim=arch.head_dim,
        num_layers=arch.depth,
        mlp_ratio=arch.hidden / arch.width,
        text_embed_dim=arch.context_dim,
        adaln_lora_dim=arch.rank,
        rope_scale=arch.stretch,
        concat_padding_mask=True,
        extra_pos_embed_type=None,
    )


@pytest.fixture(autouse=True)
def without_torchvision(monkeypatch):
    """Its one function that the class calls, which makes a mask of zeros smaller."""
    functional = SimpleNamespace(resize=lambda x, size, interpolation: torch.nn.functional.interpolate(x, size))
    made = SimpleNamespace(functional=functional, InterpolationMode=SimpleNamespace(NEAREST="nearest"))
    monkeypatch.setattr(HERE, "transforms", made, raising=False)


@pytest.fixture
def batch(dtype):
    rng = np.random.default_rng(1)
    return {
        "latents": rng.standard_normal((2, 6, 4, 4)).astype(dtype),
        "times": np.array([0.003, 0.875], np.float32),
        "context": rng.standard_normal((2, 7, 20)).astype(dtype),
        "weight": rng.standard_normal((2, 6, 4, 4)).astype(dtype),
    }


def fp64(array):
    return torch.from_numpy(array.astype(np.float64))


def ours(model, batch, latents=None):
    x = tensor(batch["latents"]) if latents is None else latents
    return model(x, tensor(batch["times"]), tensor(batch["context"]))


def theirs(twin, batch, weights=None, latents=None):
    x = fp64(batch["latents"]) if latents is None else latents
    H, W = x.shape[1:3]
    call = {
        "hidden_states": x.permute(0, 3, 1, 2).unsqueeze(2),
        "timestep": fp64(batch["times"]),
        "encoder_hidden_states": fp64(batch["context"]),
        "padding_mask": torch.zeros(1, 1, 8 * H, 8 * W, dtype=torch.float64),
        "return_dict": False,
    }
    out = torch.func.functional_call(twin, weights or {}, kwargs=call)[0]
    return out.squeeze(2).permute(0, 2, 3, 1)


@pytest.fixture
def pair(dtype, fill, scrambled):
    model = scrambled(Anima(ARCH), dtype)
    twin = fill(model, diffusers_anima(ARCH), TO_DIFFUSERS)
    twin.requires_grad_(False)
    # our sinusoids: both make them in fp32; tested with the UNet
    twin.time_embed.time_proj.forward = lambda t: fp64(
        F.timestep_embedding(tensor(t.numpy().astype(np.float32)), ARCH.width).numpy()
    )
    return model, twin


def test_prediction(pair, batch, bound, off):
    model, twin = pair
    assert off(ours(model, batch), theirs(twin, batch)) < bound


def merged_in_torch(twin, attached):
    """torch leaves for every LoRA matrix, and the twin's weights with the updates they make."""
    leaves, weights, there = {}, {}, dict(twin.named_parameters())
    for name, adapter in attached.adapters.items():
        down, up = (fp64(p.numpy()).requires_grad_() for p in (adapter.down, adapter.up))
        leaves[name] = (down, up)
        (their_name,) = TO_DIFFUSERS.pull([f"{name}.weight"]).sources
        weights[their_name] = there[their_name] + (adapter.alpha / adapter.rank) * (up @ down)
    return leaves, weights


@pytest.mark.parametrize("checkpointing", ["off", "mlp", "full"])
def test_every_lora_gradient(pair, batch, bound, off, with_lora, checkpointing):
    model, twin = pair
    attached = with_lora(model)
    model.checkpointing = checkpointing
    leaves, weights = merged_in_torch(twin, attached)
    out, expected = ours(model, batch), theirs(twin, batch, weights)
    assert off(out, expected.detach()) < bound

    (out * tensor(batch["weight"])).sum().backward()
    (expected * fp64(batch["weight"])).sum().backward()
    errors = {}
    for name, (down, up) in leaves.items():
        errors[f"{name} down"] = off(attached.adapters[name].down.grad, down.grad)
        errors[f"{name} up"] = off(attached.adapters[name].up.grad, up.grad)
    assert len(errors) == 2 * len(attached.adapters) == 2 * 38
    assert {name: e for name, e in errors.items() if not e < bound} == {}


def test_gradient_of_the_latents(pair, batch, bound, off):
    model, twin = pair
    here, there = Tensor(batch["latents"], requires_grad=True), fp64(batch["latents"]).requires_grad_()
    (ours(model, batch, here) * tensor(batch["weight"])).sum().backward()
    (theirs(twin, batch, latents=there) * fp64(batch["weight"])).sum().backward()
    assert off(here.grad, there.grad) < bound


def test_the_adapter(fill, scrambled, dtype, bound, off):
    """Captions of several lengths, one of them empty for Qwen3, cut to what is their own."""
    model = scrambled(LlmAdapter(ADAPTER), dtype)
    twin = diffusers.AnimaTextConditioner(
        source_dim=24,
        target_dim=20,
        model_dim=32,
        num_layers=2,
        num_attention_heads=4,
        mlp_ratio=2.0,
        target_vocab_size=50,
        min_sequence_length=12,
    )
    fill(model, twin)
    rng = np.random.default_rng(2)
    states = rng.standard_normal((3, 6, 24)).astype(dtype)
    ids = rng.integers(0, 50, (3, 9)).astype(np.int32)
    own_states, own_ids = (np.arange(n)[None] < np.array(k)[:, None] for n, k in ((6, (6, 2, 0)), (9, (4, 9, 1))))
    found = model(tensor(states), tensor(ids), tensor(own_states), tensor(own_ids))
    with torch.no_grad():
        expected = twin(fp64(states), *(torch.from_numpy(x) for x in (ids.astype(np.int64), own_ids, own_states)))
    assert expected.shape == (3, 12, 20)
    assert off(found, expected) < bound
    assert not found.numpy()[~np.pad(own_ids, ((0, 0), (0, 3)))].any()
