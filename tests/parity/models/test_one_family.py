"""What one family's networks have that others' lack, against the reference's; what all have is in test_families.py."""

from __future__ import annotations

import numpy as np
import pytest

from flame_train.engine import functional as F
from flame_train.engine import tensor
from flame_train.engine.memory_report import saved_by_op
from flame_train.models.chroma.transformer import places
from flame_train.models.flux2.family import sampling_shift
from flame_train.models.sd3.mmdit import MMDiT, MMDiTArch
from flame_train.networks.vae.names import vae_from_diffusers
from flame_train.networks.vae.vae import Vae, VaeArch
from flame_train.text_encoders.anima.network import AdapterArch, LlmAdapter
from tests.keymaps import through, weights_of
from tests.parity.twins import chroma, flux3, sd3
from tests.parity.twins.twin import always_fp64, fp64

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")
pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore::FutureWarning")]  # of diffusers' own attributes

# ---- Chroma ---------------------------------------------------------------------------------------------


def test_what_stands_at_the_padding_does_not_matter(fill, scrambled, off):
    """To the bit: attention skips it. Of a caption's own rows each matters."""
    model, _ = chroma.TWIN.pair(chroma.ARCH, "float32", fill, scrambled)
    batch, places_of_text = chroma.inputs(chroma.ARCH, "float32", ""), np.arange(chroma.TEXT)[None, :, None]
    found = chroma.ours(model, batch).numpy()
    for changed, same in ((places_of_text >= batch["rows"][:, None, None], True), (places_of_text == 2, False)):
        other = chroma.ours(model, batch | {"context": np.where(changed, np.float32(100.0), batch["context"])})
        assert (off(other, found) == 0.0) if same else off(other, found) > 1e-3


def test_the_sinusoid_of_the_modulations_is_that_of_diffusers():
    """To a bit of each frequency, which libraries round differently."""
    table = chroma.reference(chroma.ARCH).time_text_embed.mod_proj.numpy()
    found = places(chroma.ARCH.modulations)
    assert found.dtype == table.dtype == np.float32
    assert np.abs(found - table).max() < 1000 * chroma.ARCH.modulations * 2**-23


# ---- FLUX.2 klein ---------------------------------------------------------------------------------------


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
    made = {name: torch.from_numpy(a.astype(np.float64)) for name, a in through(table, weights_of(model)).items()}
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


# ---- FLUX.3 klein ---------------------------------------------------------------------------------------


@pytest.fixture
def flow_map(fill, scrambled, monkeypatch):
    always_fp64(monkeypatch)
    return flux3.TWIN.pair(flux3.FLOW_MAP, "float32", fill, scrambled)


def test_prediction_of_the_distilled_one(flow_map, off):
    (model, twin), batch = flow_map, flux3.inputs(flux3.FLOW_MAP, "float32", "stepped")
    found = flux3.ours(model, batch)
    assert off(found, flux3.theirs(twin, batch)) < 1e-5
    elsewhere = batch | {"target": np.array([0.0, 0.5], np.float32)}
    assert off(flux3.ours(model, elsewhere), found.numpy()) > 1e-2


def test_a_target_is_for_a_flow_map_alone(flow_map, fill, scrambled):
    base = flux3.TWIN.pair(flux3.ARCH, "float32", fill, scrambled)
    for (model, _), variant in ((base, "stepped"), (flow_map, "alone")):
        with pytest.raises(ValueError, match="for a flow map, and for no other network"):
            flux3.ours(model, flux3.inputs(model.arch, "float32", variant))


# ---- Anima ----------------------------------------------------------------------------------------------

ADAPTER = AdapterArch(width=32, layers=2, head_dim=8, hidden=64, source_dim=24, target_dim=20, vocabulary=50, least=12)


def test_the_adapter(fill, scrambled, off):
    """Captions of several lengths, one of them empty for Qwen3, cut to what is their own."""
    model = scrambled(LlmAdapter(ADAPTER), "float32")
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
    states = rng.standard_normal((3, 6, 24)).astype(np.float32)
    ids = rng.integers(0, 50, (3, 9)).astype(np.int32)
    own_states, own_ids = (np.arange(n)[None] < np.array(k)[:, None] for n, k in ((6, (6, 2, 0)), (9, (4, 9, 1))))
    found = model(tensor(states), tensor(ids), tensor(own_states), tensor(own_ids))
    with torch.no_grad():
        expected = twin(fp64(states), *(torch.from_numpy(x) for x in (ids.astype(np.int64), own_ids, own_states)))
    assert expected.shape == (3, 12, 20)
    assert off(found, expected) < 1e-5
    assert not found.numpy()[~np.pad(own_ids, ((0, 0), (0, 3)))].any()


# ---- SD3 ------------------------------------------------------------------------------------------------


@pytest.fixture(params=sd3.ARCHS)
def arch(request):
    return sd3.ARCHS[request.param]


@pytest.fixture
def trained(arch, dtype, scrambled, with_lora):
    """SD3's transformer with a LoRA on each linear layer, its factors, and a batch."""
    model = scrambled(MMDiT(arch), dtype)
    return model, with_lora(model).parameters(), sd3.inputs(arch, dtype, "")


def test_architecture_is_read_from_shapes(arch):
    assert MMDiTArch.from_shapes(MMDiT(arch).shapes()) == arch


def test_checkpointing_changes_no_bit(trained):
    model, parameters, batch = trained
    found = {}
    for checkpointing in ("off", "mlp", "full", "offload"):
        model.checkpointing = checkpointing
        for p in parameters:
            p.grad = None
        (sd3.ours(model, batch) * tensor(batch["weight"])).sum().backward()
        found[checkpointing] = {p.name: p.grad.numpy() for p in parameters}
    for name, g in found["off"].items():
        np.testing.assert_array_equal(found["mlp"][name], g, err_msg=name)
        np.testing.assert_array_equal(found["full"][name], g, err_msg=name)
        np.testing.assert_array_equal(found["offload"][name], g, err_msg=name)


def test_what_is_recomputed_is_not_kept(trained):
    model, _, batch = trained
    kept = {}
    for checkpointing in ("off", "mlp", "full", "offload"):
        model.checkpointing = checkpointing
        kept[checkpointing] = sum(saved_by_op(sd3.ours(model, batch).sum()).values())
    assert kept["offload"] < kept["full"] < kept["mlp"] < kept["off"]


# ---- SDXL -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [256, 320])
def test_sinusoids_are_as_near_to_the_formula_as_diffusers(dim):
    t = np.arange(2048, dtype=np.float32)
    args = t[:, None] * np.exp(-np.log(10000.0) * np.arange(dim // 2) / (dim // 2))
    exact = np.concatenate([np.cos(args), np.sin(args)], axis=1)
    embed = diffusers.models.embeddings.get_timestep_embedding
    theirs = embed(torch.from_numpy(t), dim, flip_sin_to_cos=True, downscale_freq_shift=0).numpy()
    found = F.timestep_embedding(tensor(t), dim).numpy()
    assert np.abs(found - exact).max() <= 2 * np.abs(theirs - exact).max()
