"""FLUX.2's name tables on every name and shape of klein 4B and 9B, against diffusers' classes and converter."""

from __future__ import annotations

import numpy as np
import pytest

from flame_train.adapters.dialects import spellings
from flame_train.io.resolve import native_shapes
from flame_train.models.common.files.identify import could_be, identify
from flame_train.models.common.vae.vae import Vae, VaeArch
from flame_train.models.flux2.keys import base_modules, lora_family, resolve, transformer_to_diffusers
from flame_train.models.flux2.transformer import Flux2, Flux2Arch

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")
pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore")]

ARCHS = {"4b": Flux2Arch.klein_4b(), "9b": Flux2Arch.klein_9b()}


@pytest.fixture(scope="module", params=ARCHS)
def arch(request):
    return ARCHS[request.param]


@pytest.fixture(scope="module")
def theirs(arch):
    with torch.device("meta"):
        twin = diffusers.Flux2Transformer2DModel(
            num_layers=arch.depth,
            num_single_layers=arch.single_depth,
            num_attention_heads=arch.width // 128,
            joint_attention_dim=arch.context_dim,
            guidance_embeds=False,
        )
    return {name: tuple(t.shape) for name, t in twin.state_dict().items()}


def test_the_table_is_total_and_bijective(arch, theirs):
    ours, table = Flux2(arch).shapes(), transformer_to_diffusers()
    there, back = table.pull(ours), table.inverse.pull(theirs)
    assert there.unknown == back.unknown == ()
    assert native_shapes(there.sources, ours) == theirs
    assert native_shapes(back.sources, theirs) == ours
    assert Flux2Arch.from_shapes(ours) == arch
    for names in (ours, {f"diffusion_model.{name}": shape for name, shape in ours.items()}, theirs):
        assert (identify(names).kind, identify(names).family) == ("transformer", "flux2")


def test_values_are_those_of_diffusers_converter():
    from diffusers.loaders.single_file_utils import convert_flux2_transformer_checkpoint_to_diffusers as convert

    model = Flux2(Flux2Arch.tiny())
    model.init(np.random.default_rng(0), "float32")
    own = {name: t.numpy() for name, t in model.weights()}
    converted = convert({n: torch.from_numpy(np.array(a)) for n, a in own.items()})

    class Arrays:
        def read(self, name):
            return own[name]

    made = {name: source.read(Arrays()) for name, source in transformer_to_diffusers().pull(own).sources.items()}
    assert made.keys() == converted.keys()
    for name, array in made.items():
        np.testing.assert_array_equal(array, converted[name].numpy(), err_msg=name)


def test_the_autoencoder_in_both_layouts():
    ours = Vae(VaeArch.flux2()).shapes()
    with torch.device("meta"):
        twin = diffusers.AutoencoderKLFlux2().state_dict()
    folder = {name: tuple(t.shape) for name, t in twin.items()}
    inside = {"quant_conv.": "encoder.quant_conv.", "post_quant_conv.": "decoder.post_quant_conv."}
    moved = {
        next((new + n[len(old) :] for old, new in inside.items() if n.startswith(old)), n): s for n, s in ours.items()
    }
    for names in (folder, ours, moved):
        found = resolve(names, only="vae")
        made = native_shapes(found.sources["vae"], names)
        assert made.keys() == ours.keys()
        assert found.unknown == ()
        assert VaeArch.from_shapes(made, VaeArch.flux2()) == VaeArch.flux2()
        assert identify(names).kind == "vae"
        assert [could_be(identify(names).family, family) for family in ("flux2", "flux3", "krea2")] == [
            True,
            True,
            False,
        ]


@pytest.mark.parametrize(
    ("prefix", "spell"),
    [
        ("diffusion_model.", lambda path: path),
        ("", lambda path: path),
        ("lora_unet_", lambda path: path.replace(".", "_")),
        ("transformer.", None),
    ],
)
def test_every_linear_layer_has_a_name_in_lora_files(arch, theirs, prefix, spell):
    ours = Flux2(arch).shapes()
    linear = {name.removesuffix(".weight") for name, shape in ours.items() if len(shape) == 2}
    assert set(base_modules(arch.depth, arch.single_depth)) == linear
    (component,) = lora_family().components
    assert linear <= set(component.modules)
    paths = linear if spell else {name.removesuffix(".weight") for name, shape in theirs.items() if len(shape) == 2}
    names = {}
    for path in paths:
        rows, width = (ours if spell else theirs)[f"{path}.weight"]
        down, up = ("lora_down", "lora_up") if prefix == "lora_unet_" else ("lora_A", "lora_B")
        spelled = prefix + (spell(path) if spell else path)
        names |= {f"{spelled}.{down}.weight": (4, width), f"{spelled}.{up}.weight": (rows, 4)}
    assert (identify(names).kind, identify(names).family) == ("lora", "flux2")
    known = spellings(lora_family())
    assert all(name.rsplit(".", 2)[0] in known for name in names)
