"""Chroma's name tables on every name and shape of the published size, against diffusers' class and converter."""

from __future__ import annotations

import numpy as np
import pytest

from flame_train.adapters.dialects import spellings
from flame_train.io.resolve import native_shapes
from flame_train.models.chroma.keys import base_modules, lora_family, resolve, transformer_to_diffusers
from flame_train.models.chroma.transformer import Chroma, ChromaArch
from flame_train.models.common.files.identify import identify, lora_could_be
from flame_train.models.common.text.t5 import T5Arch, T5Encoder
from flame_train.models.common.vae.vae import Vae, VaeArch

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")
pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore")]

OURS = Chroma(ChromaArch.base()).shapes()


@pytest.fixture(scope="module")
def theirs():
    """diffusers' names and shapes, whose default configuration is the published one."""
    with torch.device("meta"):
        return {name: tuple(t.shape) for name, t in diffusers.ChromaTransformer2DModel().state_dict().items()}


def test_the_table_is_total_and_bijective(theirs):
    table = transformer_to_diffusers()
    there, back = table.pull(OURS), table.inverse.pull(theirs)
    assert there.unknown == back.unknown == ()
    assert native_shapes(there.sources, OURS) == theirs
    assert native_shapes(back.sources, theirs) == OURS
    assert ChromaArch.from_shapes(OURS) == ChromaArch.base()


def test_values_are_those_of_diffusers_converter():
    from diffusers.loaders.single_file_utils import convert_chroma_transformer_checkpoint_to_diffusers as convert

    model = Chroma(ChromaArch(width=3072, depth=1, single_depth=1, context_dim=8, hidden=8, layers=1))
    names = dict(model.shapes())
    rng = np.random.default_rng(0)
    own = {n: rng.integers(0, 9, (s[0], *[1] * (len(s) - 1))).astype(np.float32) for n, s in names.items()}  # rows
    converted = convert({n: torch.from_numpy(np.array(a)) for n, a in own.items()})

    class Arrays:
        def read(self, name):
            return own[name]

    made = {name: source.read(Arrays()) for name, source in transformer_to_diffusers().pull(own).sources.items()}
    assert made.keys() == converted.keys()
    for name, array in made.items():
        np.testing.assert_array_equal(array, converted[name].numpy(), err_msg=name)


def test_whole_checkpoints_of_both_layouts_are_sorted(theirs):
    """Every name of a full checkpoint and of a folder goes to its component, and no name is left."""
    text, vae = T5Encoder(T5Arch.xxl()).shapes(), Vae(VaeArch.flux()).shapes()
    folder = {f"transformer/{name}": shape for name, shape in theirs.items()}
    folder |= {f"text_encoder/{name}": shape for name, shape in text.items()}
    folder |= {f"vae/{name}": shape for name, shape in vae.items()}
    single = {f"model.diffusion_model.{name}": shape for name, shape in OURS.items()}
    single |= {f"text_encoders.t5xxl.transformer.{name}": shape for name, shape in text.items()}
    single |= {f"first_stage_model.{name}": shape for name, shape in vae.items()}
    for names in (folder, single):
        found = resolve(names)
        assert native_shapes(found.sources["transformer"], names) == OURS
        assert native_shapes(found.sources["text_encoder"], names) == text
        assert native_shapes(found.sources["vae"], names) == vae
        assert found.unknown == ()
        assert (identify(names).kind, identify(names).family) == ("checkpoint", "chroma")
    for names in (OURS, {f"diffusion_model.{name}": shape for name, shape in OURS.items()}, theirs):
        assert (identify(names).kind, identify(names).family) == ("transformer", "chroma")


@pytest.mark.parametrize(
    ("prefix", "spell"),
    [
        ("diffusion_model.", lambda path: path),
        ("lora_unet_", lambda path: path.replace(".", "_")),
        ("transformer.", None),
    ],
)
def test_every_linear_layer_has_a_name_in_lora_files(theirs, prefix, spell):
    linear = {n.removesuffix(".weight") for n, shape in OURS.items() if len(shape) == 2}
    assert set(base_modules()["transformer"]) == linear
    modules = lora_family().components[0].modules
    paths = linear if spell else {path for module in modules.values() for path in module}
    names = {}
    for path in paths:
        rows, width = (OURS if spell else theirs)[f"{path}.weight"]
        down, up = ("lora_down", "lora_up") if prefix == "lora_unet_" else ("lora_A", "lora_B")
        spelled = prefix + (spell(path) if spell else path)
        names |= {f"{spelled}.{down}.weight": (4, width), f"{spelled}.{up}.weight": (rows, 4)}
    known = spellings(lora_family())
    assert all(name.rsplit(".", 2)[0] in known for name in names)
    assert (identify(names).kind, identify(names).family) == ("lora", "chroma")
    blocks = {name: shape for name, shape in names.items() if "distilled" not in name}
    assert identify(blocks).family == "flux"  # whose names they are
    assert identify(blocks, {"modelspec.architecture": "chroma/lora"}).family == "chroma"
    assert lora_could_be("flux", "chroma")
    assert not lora_could_be("chroma", "flux")
