"""FLUX.2's name tables on every name and shape of dev, klein 4B and 9B, against diffusers' classes and converter."""

from __future__ import annotations

import pytest

from flame_train.io.resolve import native_shapes
from flame_train.models.flux2.names import (
    FLUX2_FILES,
    base_modules,
    lora_family,
    lora_names_in,
    transformer_to_diffusers,
)
from flame_train.models.flux2.transformer import Flux2, Flux2Arch
from flame_train.networks.files.identify import could_be, identify
from flame_train.networks.vae.vae import Vae, VaeArch
from tests.parity import key_tables as check

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")
pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore")]

ARCHS = {"dev": Flux2Arch.dev(), "4b": Flux2Arch.klein_4b(), "9b": Flux2Arch.klein_9b()}


@pytest.fixture(scope="module", params=ARCHS)
def arch(request):
    return ARCHS[request.param]


@pytest.fixture(scope="module")
def theirs(arch):
    return check.on_meta(
        diffusers.Flux2Transformer2DModel,
        num_layers=arch.depth,
        num_single_layers=arch.single_depth,
        num_attention_heads=arch.width // 128,
        joint_attention_dim=arch.context_dim,
        guidance_embeds=arch.guidance,
    )


def test_the_table_is_total_and_bijective(arch, theirs):
    ours = Flux2(arch).shapes()
    check.check_bijective(transformer_to_diffusers(), ours, theirs)
    assert Flux2Arch.from_shapes(ours) == arch
    check.check_denoiser("flux2", ours, theirs)


def test_values_are_those_of_diffusers_converter():
    from diffusers.loaders.single_file_utils import convert_flux2_transformer_checkpoint_to_diffusers as convert

    check.check_values(Flux2(Flux2Arch.tiny()).shapes(), convert, transformer_to_diffusers(), prefix="")


def test_the_autoencoder_in_both_layouts():
    ours = Vae(VaeArch.flux2()).shapes()
    folder = check.on_meta(diffusers.AutoencoderKLFlux2)
    inside = {"quant_conv.": "encoder.quant_conv.", "post_quant_conv.": "decoder.post_quant_conv."}
    moved = {
        next((new + n[len(old) :] for old, new in inside.items() if n.startswith(old)), n): s for n, s in ours.items()
    }
    for names in (folder, ours, moved):
        found = FLUX2_FILES.resolve(names, only="vae")
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


@pytest.mark.parametrize(("prefix", "spell"), [check.NATIVE, ("", str), check.KOHYA, check.DIFFUSERS])
def test_every_linear_layer_has_a_name_in_lora_files(arch, theirs, prefix, spell):
    ours = Flux2(arch).shapes()
    assert set(base_modules(arch.depth, arch.single_depth, arch.guidance)) == check.linear_layers(ours)
    spelled = check.spelled_loras(lora_family(), ours, theirs, prefix, spell)
    check.check_lora(spelled, lora_family())
    assert lora_names_in(spelled).architecture.startswith("Flux.2-dev") == arch.guidance


@pytest.mark.parametrize(("block", "dev"), [(3, False), (23, False), (24, True), (47, True)])
def test_a_lora_whose_shapes_do_not_tell_is_kleins_unless_its_blocks_go_further(block, dev):
    shapes = {f"lora_unet_single_blocks_{block}_linear2.lokr_w1": (4, 4)}
    assert lora_names_in(shapes).architecture.startswith("Flux.2-dev") == dev
