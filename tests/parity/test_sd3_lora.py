"""An SD3.5 LoRA of the engine in diffusers' hands: no key left over, and the same predictions as here and merged."""

from __future__ import annotations

import numpy as np
import pytest
import safetensors.numpy

from flame_train.adapters.formats import to_diffusers, to_kohya
from flame_train.adapters.metadata import model_spec, network_metadata, with_hashes
from flame_train.engine import no_grad, tensor
from flame_train.io.safetensors import save_file
from flame_train.models.sd3.family import PRESETS
from flame_train.models.sd3.mmdit import MMDiT, MMDiTArch
from flame_train.models.sd3.names import lora_family, mmdit_to_diffusers
from flame_train.tools.lora_files import convert
from flame_train.tools.merge import merge
from tests.keymaps import fill
from tests.parity.twins import sd3

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")
pytest.importorskip("peft")
pytestmark = [
    pytest.mark.parity,
    pytest.mark.filterwarnings("ignore"),  # the libraries' own deprecations
]

OUTSIDE = ("final_layer.*", "context_embedder", "t_embedder.*", "x_embedder.proj", "y_embedder.*")
# diffusers reads no kohya file of SD3: such a file goes through `convert`
WRITTEN = [
    ("sd35-medium", "diffusers", ("full", *OUTSIDE)),
    ("sd35-medium", "kohya", ("full", *OUTSIDE)),
    ("sd35-medium", "diffusers", ("attention",)),
    ("sd35-large", "kohya", ("attention+mlp",)),
    ("sd3-medium", "diffusers", ("full",)),
]


@pytest.fixture
def batch():
    rng = np.random.default_rng(1)
    arch = MMDiTArch.tiny()
    shapes = {"latents": (2, 12, 8, 16), "context": (2, 7, arch.context_dim), "pooled": (2, arch.pooled_dim)}
    found = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    return found | {"timesteps": np.array([125.0, 750.0], np.float32)}


def model_of(name):
    model = MMDiT(sd3.ARCHS[name])
    model.init(np.random.default_rng(0))
    return model


def as_diffusers(model):
    """A pipeline around diffusers' transformer with our weights in it."""
    twin = fill(sd3.reference(model.arch), model, mmdit_to_diffusers(model.arch.depth))
    parts = dict.fromkeys(f"{kind}{n}" for kind in ("text_encoder", "tokenizer") for n in ("", "_2", "_3"))
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    return diffusers.StableDiffusion3Pipeline(transformer=twin, scheduler=scheduler, vae=None, **parts)


def ours(model, batch):
    with no_grad():
        return model(*(tensor(batch[n]) for n in ("latents", "timesteps", "context", "pooled"))).numpy()


def theirs(pipeline, batch):
    x = {name: torch.from_numpy(array) for name, array in batch.items()}
    with torch.no_grad():
        out = pipeline.transformer(
            hidden_states=x["latents"].permute(0, 3, 1, 2),
            timestep=x["timesteps"],
            encoder_hidden_states=x["context"],
            pooled_projections=x["pooled"],
        ).sample
    return out.permute(0, 2, 3, 1).numpy()


def written(folder, factors, form, family):
    """The LoRA as a run writes it, and the file for diffusers."""
    state = {"transformer": factors}
    metadata = network_metadata(state, family) | model_spec(family, "x")
    file = folder / f"{form}.safetensors"
    if form == "kohya":
        tensors = to_kohya(state, family)
        save_file(file, tensors, with_hashes(tensors, metadata))
        convert(file, folder / "converted.safetensors", "diffusers")
        return file, folder / "converted.safetensors"
    tensors, record = to_diffusers(state, family)
    save_file(file, tensors, with_hashes(tensors, metadata | {"format": "pt", **record}))
    return file, file


@pytest.mark.parametrize(("name", "form", "targets"), WRITTEN, ids=lambda x: x if isinstance(x, str) else x[0])
def test_the_file_predicts_the_same_there_merged_and_here(tmp_path, batch, name, form, targets, adapted, loaded, off):
    model = model_of(name)
    pipeline = as_diffusers(model)
    plain = ours(model, batch)
    assert off(theirs(pipeline, batch), plain) < 1e-4
    save_file(tmp_path / "base.safetensors", {name: weight.numpy() for name, weight in model.weights()})

    family = lora_family(model.arch.depth, model.arch.dual)
    attached, factors = adapted(model, targets, PRESETS)
    file, for_diffusers = written(tmp_path, factors, form, family)
    layers = loaded(pipeline, for_diffusers, "transformer", "NoneType")
    names = family.components[0].modules
    assert layers == sum(len(names[module]) for module in factors) > 20

    expected = theirs(pipeline, batch)
    assert off(plain, expected) > 1e-2  # the LoRA does something
    assert off(ours(model, batch), expected) < 1e-4
    attached.detach()

    merge(tmp_path / "base.safetensors", file, tmp_path / "merged.safetensors")
    arrays = safetensors.numpy.load_file(tmp_path / "merged.safetensors")
    for name, module, attribute, _ in model.named_specs():
        object.__setattr__(module, attribute, tensor(np.array(arrays[name])))
    assert off(ours(model, batch), expected) < 1e-4
    assert off(theirs(as_diffusers(model), batch), expected) < 1e-4
