"""FLUX.2 klein against diffusers': predictions, every LoRA gradient, and the autoencoder with its stored statistics."""

from __future__ import annotations

import numpy as np
import pytest

from flame_train.engine import functional as F
from flame_train.engine import tensor
from flame_train.models.flux2.family import sampling_shift
from flame_train.models.flux2.names import transformer_to_diffusers
from flame_train.models.flux2.transformer import Flux2, Flux2Arch
from flame_train.networks.vae.names import vae_from_diffusers
from flame_train.networks.vae.vae import Vae, VaeArch
from tests.parity.models.lora_gradients import fp64, latents_gradient_error, lora_gradient_errors, merged_in_torch

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")
pytestmark = pytest.mark.parity

HERE = pytest.importorskip("diffusers.models.transformers.transformer_flux2")
TO_DIFFUSERS = transformer_to_diffusers()
ARCH = Flux2Arch(width=64, depth=2, single_depth=2, head_dim=16, mlp=192, channels=16, context_dim=24)


@pytest.fixture
def dtype():
    return "float32"


def diffusers_flux2(arch):
    return diffusers.Flux2Transformer2DModel(
        in_channels=arch.channels,
        num_layers=arch.depth,
        num_single_layers=arch.single_depth,
        attention_head_dim=arch.head_dim,
        num_attention_heads=arch.width // arch.head_dim,
        joint_attention_dim=arch.context_dim,
        axes_dims_rope=arch.axes,
        guidance_embeds=False,
    )


@pytest.fixture
def batch(dtype):
    rng = np.random.default_rng(1)
    return {
        "latents": rng.standard_normal((2, 4, 3, 16)).astype(dtype),
        "timesteps": np.array([3.0, 875.0], np.float32),
        "context": rng.standard_normal((2, 5, 24)).astype(dtype),
        "weight": rng.standard_normal((2, 4, 3, 16)).astype(dtype),
    }


@pytest.fixture
def edited(batch, dtype):
    """The batch with two control images of other sizes."""
    rng = np.random.default_rng(2)
    controls = [rng.standard_normal((2, *size, 16)).astype(dtype) for size in ((3, 5), (4, 2))]
    return batch | {"controls": controls}


def ours(model, batch, latents=None):
    x = tensor(batch["latents"]) if latents is None else latents
    controls = [tensor(each) for each in batch.get("controls", ())]
    return model(x, tensor(batch["timesteps"]), tensor(batch["context"]), controls)


def theirs(twin, batch, weights=None, latents=None):
    """Packed by the pipeline's own functions."""
    x = (fp64(batch["latents"]) if latents is None else latents).permute(0, 3, 1, 2)
    pipeline = diffusers.Flux2KleinPipeline
    context = fp64(batch["context"])
    beside = [fp64(each).permute(0, 3, 1, 2) for each in batch.get("controls", ())]
    ids = [pipeline._prepare_latent_ids(x)]
    if beside:
        ids.append(pipeline._prepare_image_ids([each[:1] for each in beside]).expand(len(x), -1, -1))
    call = {
        "hidden_states": torch.cat([pipeline._pack_latents(each) for each in (x, *beside)], dim=1),
        "timestep": fp64(batch["timesteps"]) / 1000,
        "guidance": None,
        "encoder_hidden_states": context,
        "img_ids": torch.cat(ids, dim=1),
        "txt_ids": pipeline._prepare_text_ids(context),
    }
    out = torch.func.functional_call(twin, weights or {}, kwargs=call).sample
    return out[:, : x.shape[2] * x.shape[3]].reshape(batch["latents"].shape)


@pytest.fixture
def pair(dtype, fill, scrambled):
    model = scrambled(Flux2(ARCH), dtype)
    twin = fill(model, diffusers_flux2(ARCH), TO_DIFFUSERS)
    twin.requires_grad_(False)
    # our sinusoids: both make them in fp32, where a bit of a frequency is 1e-4 at t = 1000; tested with the UNet
    twin.time_guidance_embed.time_proj.forward = lambda t: fp64(
        F.timestep_embedding(tensor(t.numpy().astype(np.float32)), 256).numpy()
    )
    return model, twin


def test_prediction(pair, batch, bound, off):
    model, twin = pair
    assert off(ours(model, batch), theirs(twin, batch)) < bound


@pytest.mark.parametrize("checkpointing", ["off", "mlp", "full"])
@pytest.mark.parametrize("given", ["batch", "edited"])
def test_every_lora_gradient(pair, given, request, bound, off, with_lora, checkpointing):
    model, twin = pair
    batch = request.getfixturevalue(given)
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


@pytest.mark.parametrize("tokens", [256, 1024, 4096, 4301, 9216])
def test_the_shift_of_sampling(tokens):
    from diffusers.pipelines.flux2.pipeline_flux2_klein import compute_empirical_mu

    for steps in (4, 28, 50):
        assert sampling_shift(tokens, steps) == pytest.approx(float(np.exp(compute_empirical_mu(tokens, steps))))


def test_the_autoencoder_encodes_and_decodes_as_diffusers(dtype, fill, scrambled, bound, off):
    arch = VaeArch.tiny(latent_channels=32)
    model = scrambled(Vae(arch), dtype)
    model.bn.running_var.data[...] = np.random.default_rng(3).uniform(0.3, 2.0, 128)
    twin = diffusers.AutoencoderKLFlux2(
        down_block_types=["DownEncoderBlock2D"] * 4,
        up_block_types=["UpDecoderBlock2D"] * 4,
        block_out_channels=[arch.channels * m for m in arch.channel_mult],
        layers_per_block=arch.num_res_blocks,
        norm_num_groups=arch.groups,
    )
    state = twin.state_dict()
    table = vae_from_diffusers(4).inverse
    own = {name: t.numpy() for name, t in model.weights()}

    class Arrays:
        def read(self, name):
            return own[name]

    pulled = table.pull(own)
    assert pulled.unknown == ()
    made = {name: torch.from_numpy(np.array(s.read(Arrays()), np.float64)) for name, s in pulled.sources.items()}
    assert set(state) - set(made) == {"bn.num_batches_tracked"}
    twin.double().load_state_dict(made | {"bn.num_batches_tracked": torch.tensor(0)}, strict=True)
    twin.eval()
    rng = np.random.default_rng(4)
    pixels = rng.uniform(-1, 1, (2, 64, 32, 3)).astype(dtype)
    pipeline = diffusers.Flux2KleinPipeline
    with torch.no_grad():
        found = twin.encode(fp64(pixels).permute(0, 3, 1, 2)).latent_dist
        center, spread = (
            twin.bn.running_mean.view(1, -1, 1, 1),
            torch.sqrt(twin.bn.running_var + 1e-4).view(1, -1, 1, 1),
        )
        mean = (pipeline._patchify_latents(found.mean) - center) / spread
        std = pipeline._patchify_latents(found.std) / spread
        decoded = twin.decode(pipeline._unpatchify_latents(mean * spread + center)).sample
    ours_mean, ours_logvar = model.encode_moments(tensor(pixels))
    assert ours_mean.shape == (2, 4, 2, 128) == (2, 64 // arch.downscale, 32 // arch.downscale, arch.seen_channels)
    assert off(ours_mean, mean.permute(0, 2, 3, 1)) < bound
    assert off((ours_logvar * 0.5).exp(), std.permute(0, 2, 3, 1)) < bound
    latents = tensor(mean.permute(0, 2, 3, 1).numpy().astype(dtype))
    assert off(model.decode(latents), decoded.permute(0, 2, 3, 1)) < bound
