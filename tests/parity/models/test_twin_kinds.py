"""Fifty steps of a small SDXL with each kind of adapter here and with PEFT's or LyCORIS' modules in PyTorch.

The same first values, data and noise give the same losses and the same change of every trained matrix.
"""

from __future__ import annotations

import numpy as np
import pytest

from flame_train.adapters.attach import attach
from flame_train.adapters.kinds import ADAPTERS
from flame_train.adapters.targets import UNET_PRESETS, resolve
from flame_train.config.load import from_options
from flame_train.diffusion.noise_schedule import NoiseSchedule
from flame_train.diffusion.objectives import Objective
from flame_train.engine.backend import get_backend
from flame_train.models.sdxl.unet import UNet
from flame_train.run.train.step_state import build_optimizer
from tests.parity.models.test_twin_runs import STEPS, drawn, names_there, one_thread
from tests.parity.twins import sdxl

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")
peft = pytest.importorskip("peft")
lycoris = pytest.importorskip("lycoris.modules")
pytestmark = [pytest.mark.parity, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
alone = one_thread

RANK, ALPHA, CONV_RANK, CONV_ALPHA, RATE = 4, 3.0, 3, 2.0, 1e-3
KINDS = {
    "lora": ("attention", {}),
    "locon": ("full", {"conv_rank": CONV_RANK, "conv_alpha": CONV_ALPHA}),
    "loha": ("full", {}),
    "lokr": ("full", {}),
    "dora": ("full", {"wd_on_output": True}),
}


@pytest.mark.proof  # tests/parity/test_adapter_kinds.py has their formulas and gradients
@pytest.mark.parametrize("kind", KINDS)
def test_losses_and_weights_are_those_of_the_reference_modules(kind, fill, scrambled, alone):
    """The twin computes in fp64, so that what is measured is this program's fp32 rounding alone."""
    targets, keys = KINDS[kind]
    model = scrambled(UNet(sdxl.ARCH), "float32")
    twin = fill(model, sdxl.reference(sdxl.ARCH), sdxl.TO_DIFFUSERS)
    twin.requires_grad_(False)
    sdxl.patch(twin, sdxl.ARCH)
    layers = resolve(model, [targets], UNET_PRESETS)
    attached = attach(model, layers, rank=RANK, alpha=ALPHA, seed=5, kind=ADAPTERS[kind](**keys))
    there = reference(kind, twin, {n: key.removesuffix(".weight") for n, key in names_there(layers).items()})
    pairs = [(p, there[name][which]) for name, a in attached.adapters.items() for which, p in a.parameters().items()]
    assert sum(p.requires_grad for p in there_parameters(there)) == len(pairs)
    first = [p.numpy().copy() for p, _ in pairs]
    for p, q in pairs:
        q.data = torch.from_numpy(p.numpy().astype(np.float64).reshape(q.shape))

    config = from_options(
        train={"precision": "fp32", "steps": STEPS},
        optimizer={"name": "adamw", "lr": RATE},
        schedule={"name": "constant"},
        gradient={"clip_norm": 0.0},
    )
    optimizer = build_optimizer(
        attached.parameters(), config.train, config.optimizer, config.schedule, config.gradient, get_backend("cpu")
    )
    other = torch.optim.AdamW([q for _, q in pairs], RATE, weight_decay=config.optimizer.weight_decay)
    objective = Objective(NoiseSchedule.scaled_linear())
    for step in range(STEPS):
        batch, noise, latents, t = drawn(objective, step)
        optimizer.zero_grad()
        loss = objective.losses(sdxl.ours(model, batch), latents, noise, t).mean()
        loss.backward()
        optimizer.step()

        other.zero_grad()
        expected = torch.nn.functional.mse_loss(sdxl.theirs(twin, batch), sdxl.fp64(noise.numpy()))
        expected.backward()
        other.step()
        assert loss.item() == pytest.approx(expected.item(), rel=1e-4), f"step {step}"
    names = [f"{name} {which}" for name, a in attached.adapters.items() for which in a.parameters()]
    far, changed = [], []
    for name, (p, q), start in zip(names, pairs, first, strict=True):
        wanted = q.detach().numpy().reshape(start.shape)
        far.append(np.linalg.norm(p.numpy() - wanted))
        changed.append(np.linalg.norm(wanted - start))
        assert far[-1] < 1e-3 * np.linalg.norm(wanted), name
    assert np.linalg.norm(far) < 1e-3 * np.linalg.norm(changed)  # most values have changed less than they are large


def reference(kind, twin, paths):
    """Puts the reference's modules into the twin's layers: its parameters by our layers' and parameters' names."""
    layers = {name: twin.get_submodule(path) for name, path in paths.items()}
    if kind in ("lora", "dora"):
        config = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=list(paths.values()), use_dora=kind == "dora")
        peft.inject_adapter_in_model(config, twin)
        twin.double()
        return {name: of_peft(twin.get_submodule(path)) for name, path in paths.items()}
    made = {name: of_lycoris(kind, layer) for name, layer in layers.items()}
    return {name: dict(module.named_parameters()) for name, module in made.items()}


def of_peft(layer):
    found = {"lora_down.weight": layer.lora_A["default"].weight, "lora_up.weight": layer.lora_B["default"].weight}
    vectors = layer.lora_magnitude_vector
    return found | ({"dora_scale": vectors["default"].weight} if len(vectors) else {})


def of_lycoris(kind, layer):
    """LyCORIS' module in the layer's place."""
    sizes = {"lora_dim": RANK, "alpha": ALPHA}
    if kind == "locon" and isinstance(layer, torch.nn.Conv2d) and layer.kernel_size != (1, 1):
        sizes = {"lora_dim": CONV_RANK, "alpha": CONV_ALPHA}
    classes = {"locon": "LoConModule", "loha": "LohaModule", "lokr": "LokrModule"}
    module = getattr(getattr(lycoris, kind), classes[kind])("x", layer, **sizes).double()
    module.apply_to()
    return module


def there_parameters(there):
    return [q for named in there.values() for q in named.values()]
