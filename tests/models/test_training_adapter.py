"""Training adapters in the layouts in which they are published, of every family that has one, and of every kind."""

from __future__ import annotations

import threading
import tomllib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from flame_train import cli
from flame_train.adapters.attach import layers_of
from flame_train.adapters.formats import to_diffusers, to_kohya
from flame_train.adapters.kinds import ADAPTERS
from flame_train.config.schema import ModelSection
from flame_train.engine import tensor
from flame_train.errors import ConfigError, ModelFileError
from flame_train.families import training_adapters
from flame_train.io.safetensors import save_file
from flame_train.io.weights import open_weights
from flame_train.models.common.training_adapter import with_adapter
from flame_train.models.registry import FAMILIES
from flame_train.networks.files.part import Unchanged

ADAPTED = ("flux", "zimage", "krea2", "qwenimage", "flux3")


@pytest.fixture(scope="module", params=ADAPTED)
def part(request, tmp_path_factory):
    family = FAMILIES[request.param]
    folder = tmp_path_factory.mktemp(family.name)
    family.write_small_base(folder, 3)
    return family, family.files.parts(folder / "base.safetensors", [family.denoiser])[family.denoiser]


def factors_of(part, kind="lora", count=3):
    """Adapters of some linear layers, every matrix away from zero."""
    rng, made = np.random.default_rng(1), {}
    names = [name for name in layers_of(part.network) if "block" in name or "layers" in name][:count]
    assert len(names) == count
    for name in names:
        shape = part.shapes[f"{name}.weight"]
        taken = ADAPTERS[kind]().initial(SimpleNamespace(weight=tensor(np.ones(shape, np.float32))), 2, 2.0, rng)
        for array in taken.arrays.values():
            array[...] = 0.1 * rng.standard_normal(array.shape) + (kind == "dora" and array.ndim < 2)
        made[name] = taken
    return made


def sums(part, adapted):
    """What each network's weights are read as."""
    read = []
    for each in (part, adapted):
        with open_weights(part.path) as weights:
            source = each.source(weights, lambda _: None)
            read.append({name: source.read(name).astype(np.float32) for name in part.shapes})
    return read


LAYOUTS = {
    "kohya": lambda state, names: to_kohya(state, names),
    "diffusers": lambda state, names: to_diffusers(state, names)[0],
    "below diffusion_model": lambda state, names: {
        "diffusion_model." + name.removeprefix("transformer."): a for name, a in to_diffusers(state, names)[0].items()
    },
    "as PEFT saves it": lambda state, names: {
        "base_model.model." + name.removeprefix("transformer."): a for name, a in to_diffusers(state, names)[0].items()
    },
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_published_layout_is_added(part, layout, tmp_path):
    family, network = part
    factors = factors_of(network)
    with_names = family.lora_names_in({})
    save_file(tmp_path / "a.safetensors", LAYOUTS[layout]({family.denoiser: factors}, with_names))
    adapted = with_adapter(network, tmp_path / "a.safetensors", with_names, 0.5)
    before, after = sums(network, adapted)
    for name, weight in before.items():
        module = factors.get(name.removesuffix(".weight"))
        delta = 0.0 if module is None else 0.5 * module.scale * (module.up @ module.down)
        np.testing.assert_allclose(after[name], weight + delta, rtol=1e-2, atol=1e-3, err_msg=name)
        assert module is None or np.abs(after[name] - weight).max() > 1e-3


@pytest.mark.parametrize("kind", [kind for kind in ADAPTERS if kind != "locon"])
def test_every_kind_serves(kind, tmp_path):
    family = FAMILIES["zimage"]
    family.write_small_base(tmp_path, 3)
    network = family.files.parts(tmp_path / "base.safetensors", [family.denoiser])[family.denoiser]
    factors = factors_of(network, kind)
    save_file(tmp_path / "a.safetensors", to_kohya({family.denoiser: factors}, family.lora_names_in({})))
    before, after = sums(network, with_adapter(network, tmp_path / "a.safetensors", family.lora_names_in({})))
    for name, own in factors.items():
        weight = before[f"{name}.weight"]
        np.testing.assert_allclose(after[f"{name}.weight"], weight + own.delta(weight), rtol=1e-2, atol=1e-3)


def test_a_damaged_adapter_is_named_and_not_its_base(part, tmp_path):
    family, network = part
    names, factors = family.lora_names_in({}), factors_of(network)
    next(iter(factors.values())).up[0, 0] = np.nan
    save_file(tmp_path / "a.safetensors", to_kohya({family.denoiser: factors}, names))
    with pytest.raises(ModelFileError, match=r"a\.safetensors: NaN or infinity in"):
        with_adapter(network, tmp_path / "a.safetensors", names).load(device="cpu", dtype="float32")


def test_an_adapter_that_was_merged_before_is_told(tmp_path, caplog):
    family = FAMILIES["zimage"]
    family.write_small_base(tmp_path, 3)
    base, merged = tmp_path / "base.safetensors", tmp_path / "merged.safetensors"
    network, names = family.files.parts(base, [family.denoiser])[family.denoiser], family.lora_names_in({})
    save_file(tmp_path / "a.safetensors", to_kohya({family.denoiser: factors_of(network)}, names))
    assert cli.run(["merge", str(base), str(tmp_path / "a.safetensors"), str(merged)]) == 0
    told = []
    for path in (base, merged):
        with_adapter(family.files.parts(path, [family.denoiser])[family.denoiser], tmp_path / "a.safetensors", names)
        told.append("a.safetensors was merged into it before" in caplog.text)
    assert told == [False, True]


def test_layers_of_a_text_encoder_are_not_left_out_without_a_word(tmp_path):
    family = FAMILIES["flux"]
    family.write_small_base(tmp_path, 3)
    network = family.files.parts(tmp_path / "base.safetensors", [family.denoiser])[family.denoiser]
    names, encoder = family.lora_names_in({}), "lora_te1_text_model_encoder_layers_0_mlp_fc1"
    tensors = to_kohya({family.denoiser: factors_of(network)}, names)
    tensors |= {f"{encoder}.lora_down.weight": np.ones((2, 8)), f"{encoder}.lora_up.weight": np.ones((8, 2))}
    save_file(tmp_path / "a.safetensors", {name: array.astype(np.float32) for name, array in tensors.items()})
    with pytest.raises(ModelFileError, match=r"has layers of the text_encoder beside those of the transformer"):
        with_adapter(network, tmp_path / "a.safetensors", names)


def test_no_thread_outlives_a_load_that_fails(part, tmp_path, monkeypatch):
    """Threads make sums ahead; the error keeps what they belong to."""
    family, network = part
    names = family.lora_names_in({})
    save_file(tmp_path / "a.safetensors", to_kohya({family.denoiser: (made := factors_of(network, count=12))}, names))
    adapted = with_adapter(network, tmp_path / "a.safetensors", names)
    last = [name for name, *_ in network.network.named_specs() if name.removesuffix(".weight") in made][-1]

    def failing(self, name):
        if name == last:
            raise ModelFileError("the disk is gone")
        return reading(self, name)

    reading = Unchanged.read
    monkeypatch.setattr(Unchanged, "read", failing)
    with pytest.raises(ModelFileError, match="the disk is gone"):
        adapted.load(device="cpu", dtype="float32")
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("adapter")] == []


@pytest.mark.parametrize("name", FAMILIES)
def test_a_distilled_base_is_refused_with_the_lines_to_add(name):
    """Its message ends with the published adapters of its family, or says how one is made."""

    class Distilled(type(FAMILIES[name])):
        def distilled(self, base):
            return "is called Turbo"

    with pytest.raises(ConfigError) as refused:
        Distilled().refuse_distilled(Path("turbo.safetensors"), ModelSection())
    told = str(refused.value)
    assert "flame-train adapter MODEL -o" in told
    lines = told.splitlines()
    files = [each["file"] for each in training_adapters(name)] or ["adapter.safetensors"]
    assert lines[0].endswith("Add below [model]:")
    assert [tomllib.loads(line)["training_adapter"] for line in lines[1:]] == files
    assert bool(training_adapters(name)) == (name in ADAPTED)
    documented = (Path(__file__).parents[2] / "docs/training.md").read_text(encoding="utf-8")
    assert all(f'"{each["file"]}"' in documented for each in training_adapters(name))
    for section in (ModelSection(training_adapter="a"), ModelSection(train_distilled=True)):
        Distilled().refuse_distilled(Path("turbo.safetensors"), section)
