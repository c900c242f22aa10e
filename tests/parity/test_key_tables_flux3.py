"""FLUX.3's name tables on every name and shape of the published size, against diffusers' classes and converters."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flame_train.adapters.dialects import spellings
from flame_train.io.resolve import native_shapes
from flame_train.models.common.files.identify import identify, lora_could_be
from flame_train.models.common.text.qwen3 import Qwen3, Qwen3Arch
from flame_train.models.common.vae.vae import Vae, VaeArch
from flame_train.models.flux3.keys import base_modules, lora_family, resolve, transformer_to_diffusers
from flame_train.models.flux3.transformer import Flux3, Flux3Arch
from tests.parity.key_tables import check_bijective, check_values, lora_shapes, qwen3_vl_shapes, shapes_of

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")
pytest.importorskip("transformers")

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore")]

DISTILLED = replace(Flux3Arch.klein(), flow_map=True)
OURS = Flux3(Flux3Arch.klein()).shapes()
LINEAR = {name.removesuffix(".weight") for name, shape in OURS.items() if len(shape) == 2}


@pytest.fixture(scope="module")
def theirs():
    """diffusers' names and shapes, whose default configuration is the published one."""
    with torch.device("meta"):
        return shapes_of(diffusers.Flux3Transformer2DModel())


def test_the_table_is_total_and_bijective(theirs):
    check_bijective(transformer_to_diffusers(), OURS, theirs)
    assert Flux3Arch.from_shapes(OURS) == Flux3Arch.klein()


def test_and_so_it_is_of_the_distilled_one(theirs):
    with torch.device("meta"):
        more = shapes_of(diffusers.Flux3Transformer2DModel(flow_map=True))
    ours = Flux3(DISTILLED).shapes()
    assert len(more) == len(theirs) + 2
    check_bijective(transformer_to_diffusers(), ours, more)
    assert [Flux3Arch.from_shapes(shapes).flow_map for shapes in (ours, OURS)] == [True, False]
    for names in (ours, more):
        assert (identify(names).kind, identify(names).family) == ("transformer", "flux3")
        assert "distilled to few steps" in identify(names).detail


def test_values_are_those_of_diffusers_converter():
    from diffusers.loaders.single_file_utils import convert_flux3_transformer_checkpoint_to_diffusers as convert

    def without_prefix(arrays):
        return convert({name.removeprefix("model.diffusion_model."): a for name, a in arrays.items()})

    check_values(Flux3(replace(Flux3Arch.tiny(), flow_map=True)), without_prefix, transformer_to_diffusers())


def test_whole_checkpoints_of_both_layouts_are_sorted(theirs):
    """What Qwen3-VL has for images is left; so are projections that training alone had."""
    with torch.device("meta"):
        vae = shapes_of(diffusers.AutoencoderKLFlux2())
    folder = {f"transformer/{name}": shape for name, shape in theirs.items()}
    text = qwen3_vl_shapes("Qwen3VLForConditionalGeneration", 2560, 9728)
    folder |= {f"text_encoder/{name}": shape for name, shape in text.items()}
    folder |= {f"vae/{name}": shape for name, shape in vae.items()}
    native, autoencoder = Qwen3(Qwen3Arch.vl_b4()).shapes(), Vae(VaeArch.flux2()).shapes()
    single = {f"model.diffusion_model.{name}": shape for name, shape in OURS.items()}
    single |= {"model.diffusion_model.repa_projectors.0.weight": (8, 3072)}
    single |= {f"text_encoders.qwen3vl_4b.transformer.model.{name}": shape for name, shape in native.items()}
    single |= {f"first_stage_model.{name}": shape for name, shape in autoencoder.items()}
    for names in (folder, single):
        found = resolve(names)
        assert native_shapes(found.sources["transformer"], names) == OURS
        assert native_shapes(found.sources["text_encoder"], names) == native
        assert native_shapes(found.sources["vae"], names) == autoencoder
        assert all(name.startswith(("text_encoder/model.visual.", "text_encoder/lm_head.")) for name in found.unknown)
        assert (identify(names).kind, identify(names).family) == ("checkpoint", "flux3")


def test_a_file_of_the_transformer_alone_is_told(theirs):
    for names in (OURS, {f"diffusion_model.{name}": shape for name, shape in OURS.items()}, theirs):
        assert (identify(names).kind, identify(names).family) == ("transformer", "flux3")
        assert "distilled" not in identify(names).detail


def file_names(theirs, prefix, spell):
    """The names and shapes of a LoRA on every linear layer, in one of the spellings."""
    return lora_shapes(lora_family(), LINEAR, OURS, theirs, prefix, spell)


SPELLINGS = [
    ("diffusion_model.", lambda path: path),
    ("", lambda path: path),
    ("lora_unet_", lambda path: path.replace(".", "_")),
    ("transformer.", None),
]


@pytest.mark.parametrize(("prefix", "spell"), SPELLINGS)
def test_every_linear_layer_has_a_name_in_lora_files(theirs, prefix, spell):
    assert set(base_modules()) == LINEAR
    assert len(LINEAR) == 271
    names = file_names(theirs, prefix, spell)
    assert (identify(names).kind, identify(names).family) == ("lora", "flux3")
    known = spellings(lora_family())
    assert all(name.rsplit(".", 2)[0] in known for name in names)


@pytest.mark.parametrize(("prefix", "spell"), SPELLINGS)
def test_a_file_of_any_one_layer_of_the_blocks_is_told(theirs, prefix, spell):
    """But for queries, keys and values of the joint blocks in diffusers' names, which may be Flux.1's."""
    names = file_names(theirs, prefix, spell)
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

    names = file_names(theirs, "diffusion_model.", lambda path: path)
    made = convert({name: torch.empty(shape, device="meta") for name, shape in names.items()})
    expected = file_names(theirs, "transformer.", None)
    for name, t in made.items():
        assert (expected.get(name) == tuple(t.shape)) == ("blocks." in name), name
