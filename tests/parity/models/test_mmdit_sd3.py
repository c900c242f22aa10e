"""SD3's transformer against diffusers': predictions, and the gradient of every LoRA matrix."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from flame_train.engine import functional as F
from flame_train.engine import tensor
from flame_train.engine.memory_report import saved_by_op
from flame_train.models.sd3.mmdit import MMDiT, MMDiTArch
from flame_train.models.sd3.names import mmdit_to_diffusers

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")
pytestmark = pytest.mark.parity

ARCHS = {
    "sd3-medium": MMDiTArch.tiny(qk_norm=False, dual=()),
    "sd35-medium": MMDiTArch.tiny(),
    "sd35-large": MMDiTArch.tiny(dual=()),
}
TO_DIFFUSERS = mmdit_to_diffusers(3)


def diffusers_transformer(arch):
    return diffusers.SD3Transformer2DModel(
        sample_size=16,
        patch_size=2,
        in_channels=arch.channels,
        num_layers=arch.depth,
        attention_head_dim=arch.head_dim,
        num_attention_heads=arch.width // arch.head_dim,
        joint_attention_dim=arch.context_dim,
        caption_projection_dim=arch.width,
        pooled_projection_dim=arch.pooled_dim,
        out_channels=arch.channels,
        pos_embed_max_size=arch.positions,
        dual_attention_layers=arch.dual,
        qk_norm="rms_norm" if arch.qk_norm else None,
    )


def fp64(array):
    return torch.from_numpy(array.astype(np.float64))


@pytest.fixture(params=ARCHS)
def arch(request):
    return ARCHS[request.param]


@pytest.fixture
def batch(dtype, arch):
    rng = np.random.default_rng(1)
    return {
        "latents": rng.standard_normal((2, 12, 8, 16)).astype(dtype),
        "timesteps": np.array([3.0, 871.0], np.float32),
        "context": rng.standard_normal((2, 7, arch.context_dim)).astype(dtype),
        "pooled": rng.standard_normal((2, arch.pooled_dim)).astype(dtype),
        "weight": rng.standard_normal((2, 12, 8, 16)).astype(dtype),
    }


def ours(model, batch):
    names = ("latents", "timesteps", "context", "pooled")
    return model(*(tensor(batch[name]) for name in names))


def theirs(twin, batch, weights=None):
    call = {
        "hidden_states": fp64(batch["latents"]).permute(0, 3, 1, 2),
        "timestep": torch.from_numpy(batch["timesteps"]),
        "encoder_hidden_states": fp64(batch["context"]),
        "pooled_projections": fp64(batch["pooled"]),
    }
    return torch.func.functional_call(twin, weights or {}, kwargs=call).sample.permute(0, 2, 3, 1)


@pytest.fixture
def pair(dtype, arch, fill, scrambled):
    model = scrambled(MMDiT(arch), dtype)
    twin = fill(model, diffusers_transformer(arch), TO_DIFFUSERS)
    twin.requires_grad_(False)
    # both make the sinusoid in fp32, where a bit of a frequency is 1e-4 at t = 1000; it has a test of its own
    twin.time_text_embed.time_proj.forward = lambda t: fp64(F.timestep_embedding(tensor(t.numpy()), 256).numpy())
    for part in twin.modules():
        if isinstance(part, diffusers.models.normalization.RMSNorm):
            part.forward = partial(exact_rms_norm, part)
    return model, twin


def exact_rms_norm(part, x):
    """diffusers takes the mean of squares in fp32, whatever its input."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + part.eps) * part.weight


def test_architecture_is_read_from_shapes(arch):
    assert MMDiTArch.from_shapes(MMDiT(arch).shapes()) == arch


def test_prediction(pair, batch, bound, off):
    model, twin = pair
    assert off(ours(model, batch), theirs(twin, batch)) < bound


class Arrays(dict):
    def read(self, name):
        return self[name]


def test_gradients_of_every_lora_matrix(pair, batch, bound, off, with_lora):
    model, twin = pair
    attached = with_lora(model)
    (ours(model, batch) * tensor(batch["weight"])).sum().backward()
    leaves, native = {}, Arrays({name: fp64(t.numpy()) for name, t in model.weights()})
    for name, adapter in attached.adapters.items():
        down, up = (fp64(p.numpy()).requires_grad_() for p in (adapter.down, adapter.up))
        leaves[name] = down, up
        native[f"{name}.weight"] = native[f"{name}.weight"] + (adapter.alpha / adapter.rank) * up @ down
    weights = {name: in_torch(source, native) for name, source in TO_DIFFUSERS.pull(native).sources.items()}
    (theirs(twin, batch, weights) * fp64(batch["weight"])).sum().backward()
    for name, adapter in attached.adapters.items():
        for found, leaf in zip((adapter.down, adapter.up), leaves[name], strict=True):
            assert off(found.grad, leaf.grad) < bound, name


def in_torch(source, native):
    """A KeyMap's source applied to torch tensors, so that gradients flow through it."""
    x = native[source.names[0]]
    if source.op.name == "SWAP":
        return torch.cat([x[len(x) // 2 :], x[: len(x) // 2]])
    if source.op.name == "ROWS":
        unit = len(x) // source.parts
        return x[source.part * unit : (source.part + source.span) * unit]
    assert source.op.name == "COPY"
    return x


def test_checkpointing_changes_no_bit(pair, batch, with_lora):
    model, _ = pair
    attached = with_lora(model)
    found = {}
    for checkpointing in ("off", "mlp", "full", "offload"):
        model.checkpointing = checkpointing
        for p in attached.parameters():
            p.grad = None
        (ours(model, batch) * tensor(batch["weight"])).sum().backward()
        found[checkpointing] = {p.name: p.grad.numpy() for p in attached.parameters()}
    for name, g in found["off"].items():
        np.testing.assert_array_equal(found["mlp"][name], g, err_msg=name)
        np.testing.assert_array_equal(found["full"][name], g, err_msg=name)
        np.testing.assert_array_equal(found["offload"][name], g, err_msg=name)


def test_what_is_recomputed_is_not_kept(pair, batch, with_lora):
    model, _ = pair
    with_lora(model)
    kept = {}
    for checkpointing in ("off", "mlp", "full", "offload"):
        model.checkpointing = checkpointing
        kept[checkpointing] = sum(saved_by_op(ours(model, batch).sum()).values())
    assert kept["offload"] < kept["full"] < kept["mlp"] < kept["off"]
