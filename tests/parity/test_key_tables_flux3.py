"""FLUX.3's name tables on every name and shape of the published size, against diffusers' classes and converters."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flame_train.models.flux3.names import FLUX3_FILES, base_modules, lora_family, transformer_to_diffusers
from flame_train.models.flux3.transformer import Flux3, Flux3Arch
from flame_train.networks.files.identify import identify, lora_could_be
from flame_train.networks.vae.vae import Vae, VaeArch
from flame_train.text_encoders.qwen3.network import Qwen3, Qwen3Arch
from tests.parity import key_tables as check

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")
pytest.importorskip("transformers")

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore")]

DISTILLED = replace(Flux3Arch.klein(), flow_map=True)
OURS = Flux3(Flux3Arch.klein()).shapes()


@pytest.fixture(scope="module")
def theirs():
    """diffusers' names and shapes, whose default configuration is the published one."""
    return check.on_meta(diffusers.Flux3Transformer2DModel)


def test_the_table_is_total_and_bijective(theirs):
    check.check_bijective(transformer_to_diffusers(), OURS, theirs)
    assert Flux3Arch.from_shapes(OURS) == Flux3Arch.klein()


def test_and_so_it_is_of_the_distilled_one(theirs):
    more = check.on_meta(diffusers.Flux3Transformer2DModel, flow_map=True)
    ours = Flux3(DISTILLED).shapes()
    assert len(more) == len(theirs) + 2
    check.check_bijective(transformer_to_diffusers(), ours, more)
    assert [Flux3Arch.from_shapes(shapes).flow_map for shapes in (ours, OURS)] == [True, False]
    for names in (ours, more):
        check.check_told(names, "transformer", "flux3")
        assert "distilled to few steps" in identify(names).detail


def test_values_are_those_of_diffusers_converter():
    from diffusers.loaders.single_file_utils import convert_flux3_transformer_checkpoint_to_diffusers as convert

    model = Flux3(replace(Flux3Arch.tiny(), flow_map=True))
    check.check_values(model.shapes(), convert, transformer_to_diffusers(), prefix="")


def test_whole_checkpoints_of_both_layouts_are_sorted(theirs):
    """What Qwen3-VL has for images is left; so are projections that training alone had."""
    text = check.qwen3_vl_shapes("Qwen3VLForConditionalGeneration", 2560, 9728)
    vae = check.on_meta(diffusers.AutoencoderKLFlux2)
    folder = check.below({"transformer/": theirs, "text_encoder/": text, "vae/": vae})
    native, autoencoder = Qwen3(Qwen3Arch.vl_b4()).shapes(), Vae(VaeArch.flux2()).shapes()
    encoder = "text_encoders.qwen3vl_4b.transformer.model."
    single = check.below({"model.diffusion_model.": OURS, encoder: native, "first_stage_model.": autoencoder})
    single |= {"model.diffusion_model.repa_projectors.0.weight": (8, 3072)}
    networks = {"transformer": OURS, "text_encoder": native, "vae": autoencoder}
    for names in (folder, single):
        left = "text_encoder/model.visual.", "text_encoder/lm_head."
        check.check_checkpoint(FLUX3_FILES.resolve, names, "flux3", networks, left)


def test_a_file_of_the_transformer_alone_is_told(theirs):
    check.check_denoiser("flux3", OURS, theirs)
    for names in (OURS, theirs):
        assert "distilled" not in identify(names).detail


SPELLINGS = [check.NATIVE, ("", str), check.KOHYA, check.DIFFUSERS]


@pytest.mark.parametrize(("prefix", "spell"), SPELLINGS)
def test_every_linear_layer_has_a_name_in_lora_files(theirs, prefix, spell):
    assert set(base_modules()) == check.linear_layers(OURS)
    assert len(base_modules()) == 271
    check.check_lora(check.spelled_loras(lora_family(), OURS, theirs, prefix, spell), lora_family())


@pytest.mark.parametrize(("prefix", "spell"), SPELLINGS)
def test_a_file_of_any_one_layer_of_the_blocks_is_told(theirs, prefix, spell):
    """But for queries, keys and values of the joint blocks in diffusers' names, which may be Flux.1's."""
    names = check.spelled_loras(lora_family(), OURS, theirs, prefix, spell)
    of_blocks = [n for n in names if "blocks" in n and n.endswith(("lora_A.weight", "lora_down.weight"))]
    assert len(of_blocks) == 6 * (3 * 5 + 28)
    for name in of_blocks:
        stem = name.rsplit(".", 2)[0]
        found = identify({name: shape for name, shape in names.items() if name.startswith(f"{stem}.")})
        shared = "single_transformer_blocks" in stem and stem.endswith(("to_q", "to_k", "to_v"))
        assert found.family == ("flux" if shared else "flux3"), stem
        assert lora_could_be(found.family, "flux3")


def test_diffusers_reads_native_names_of_the_blocks(theirs):
    """Of all layers in blocks; it leaves those outside under their native names, which its network has not."""
    from diffusers.loaders.lora_conversion_utils import _convert_non_diffusers_flux3_lora_to_diffusers as convert

    names = check.spelled_loras(lora_family(), OURS, theirs, *check.NATIVE)
    made = convert({name: torch.empty(shape, device="meta") for name, shape in names.items()})
    expected = check.spelled_loras(lora_family(), OURS, theirs, *check.DIFFUSERS)
    for name, t in made.items():
        assert (expected.get(name) == tuple(t.shape)) == ("blocks." in name), name
