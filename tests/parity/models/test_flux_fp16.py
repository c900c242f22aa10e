"""Flux in fp16 against diffusers' in fp16, where the text's stream and the joint one grow beyond 65504, as in dev."""

from __future__ import annotations

import numpy as np
import pytest

from flame_train.adapters.attach import attach
from flame_train.adapters.targets import resolve
from flame_train.engine import tensor
from flame_train.models.flux.family import PRESETS
from flame_train.models.flux.transformer import Flux, FluxArch
from tests.parity.twins import flux

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")
pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore:overflow encountered in cast")]

ARCH = FluxArch.tiny()


@pytest.fixture
def model(scrambled):
    """Four channels grow by 90000 in each of its double blocks, four others fall in the first single one."""
    made, width = scrambled(Flux(ARCH), "float16"), ARCH.width
    for block in made.double_blocks:
        block.txt_mod.lin.bias.data[5 * width : 5 * width + 4] = 300.0
        block.txt_mlp[2].bias.data[:4] = 300.0
    made.single_blocks[0].modulation.lin.bias.data[2 * width + 4 : 2 * width + 8] = -300.0
    made.single_blocks[0].linear2.bias.data[4:8] = 300.0
    return made


@pytest.fixture
def batch():
    rng = np.random.default_rng(1)
    shapes = {"latents": (1, 8, 6, 16), "context": (1, 5, ARCH.context_dim), "pooled": (1, ARCH.pooled_dim)}
    return {name: rng.standard_normal(shape).astype(np.float16) for name, shape in shapes.items()}


@pytest.fixture
def twin(model, fill):
    return fill(model, flux.reference(ARCH), flux.TO_DIFFUSERS).half()


def ours(model, batch):
    given = tensor(np.array([500.0], np.float32)), *(tensor(batch[n]) for n in ("context", "pooled"))
    return model(tensor(batch["latents"]), *given, tensor(np.array([3.5], np.float32)))


def theirs(twin, batch):
    x = {name: torch.from_numpy(array) for name, array in batch.items()}
    pipeline = diffusers.FluxPipeline
    with torch.no_grad():
        out = twin(
            hidden_states=pipeline._pack_latents(x["latents"].permute(0, 3, 1, 2), 1, 16, 8, 6),
            timestep=torch.tensor([0.5]),
            guidance=torch.tensor([3.5]),
            encoder_hidden_states=x["context"],
            pooled_projections=x["pooled"],
            txt_ids=torch.zeros(5, 3),
            img_ids=pipeline._prepare_latent_image_ids(1, 4, 3, "cpu", torch.float32),
        ).sample
    return pipeline._unpack_latents(out, 64, 48, 8).permute(0, 2, 3, 1).float()


@pytest.mark.parametrize("checkpointing", ["off", "mlp", "full"])
def test_what_grows_beyond_fp16_is_held_at_its_largest_number(model, twin, batch, off, checkpointing):
    expected = theirs(twin, batch)
    model.checkpointing = checkpointing
    attached = attach(model, resolve(model, ["full"], PRESETS), rank=2, alpha=2.0, seed=5)
    out = ours(model, batch).float()
    assert off(out, expected) < 5e-3
    out.sum().backward()
    assert all(np.isfinite(adapter.up.grad.numpy()).all() for adapter in attached.adapters.values())
