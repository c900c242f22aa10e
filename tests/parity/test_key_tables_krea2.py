"""Krea 2's name tables on every name and shape of the published size, against diffusers' classes and converters."""

from __future__ import annotations

import pytest

from flame_train.adapters.dialects import spellings
from flame_train.io.resolve import native_shapes
from flame_train.models.common.files.identify import could_be, identify
from flame_train.models.common.files.stated import NOTHING
from flame_train.models.common.text.qwen3 import Qwen3, Qwen3Arch
from flame_train.models.krea2.arch import Krea2Arch
from flame_train.models.krea2.files import KREA2_FILES
from flame_train.models.krea2.keys import base_modules, lora_family, resolve, transformer_to_diffusers
from flame_train.models.krea2.transformer import Krea2
from tests.parity.key_tables import check_bijective, check_values, lora_shapes, qwen3_vl_shapes, shapes_of

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")
pytest.importorskip("transformers")

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore")]

OURS = Krea2(Krea2Arch.base()).shapes()
LINEAR = {name.removesuffix(".weight") for name, shape in OURS.items() if len(shape) == 2 and name.endswith("weight")}


@pytest.fixture(scope="module")
def theirs():
    """diffusers' names and shapes, whose default configuration is the published one."""
    with torch.device("meta"):
        return shapes_of(diffusers.Krea2Transformer2DModel())


@pytest.fixture(scope="module")
def text():
    """The names and shapes of Qwen3-VL-4B as transformers has them, with the half for images."""
    return qwen3_vl_shapes("Qwen3VLModel", 2560, 9728)


def test_the_table_is_total_and_bijective(theirs):
    check_bijective(transformer_to_diffusers(), OURS, theirs)


def test_values_are_those_of_diffusers_converter():
    from diffusers.loaders.single_file_utils import convert_krea2_transformer_checkpoint_to_diffusers as convert

    check_values(Krea2(Krea2Arch.tiny()), convert, transformer_to_diffusers())


def test_whole_checkpoints_of_both_layouts_are_sorted(theirs, text):
    """Every name of a full checkpoint and of a folder goes to its component; what Qwen3-VL has for images is left."""
    with torch.device("meta"):
        vae = shapes_of(diffusers.AutoencoderKLQwenImage())
    folder = {f"transformer/{name}": shape for name, shape in theirs.items()}
    folder |= {f"text_encoder/{name}": shape for name, shape in text.items()}
    folder |= {f"vae/{name}": shape for name, shape in vae.items()}
    native = Qwen3(Qwen3Arch.vl_b4()).shapes()
    networks = KREA2_FILES.build("vae", native_shapes(resolve(folder).sources["vae"], folder), NOTHING).shapes()
    single = {f"model.diffusion_model.{name}": shape for name, shape in OURS.items()}
    single |= {f"text_encoders.qwen3vl_4b.transformer.model.{name}": shape for name, shape in native.items()}
    single |= {f"first_stage_model.{name}": shape for name, shape in networks.items()}
    for names in (folder, single):
        found = resolve(names)
        assert native_shapes(found.sources["transformer"], names) == OURS
        assert native_shapes(found.sources["text_encoder"], names) == native
        assert native_shapes(found.sources["vae"], names) == networks
        assert all(name.startswith("text_encoder/visual.") for name in found.unknown)
        assert (identify(names).kind, identify(names).family) == ("checkpoint", "krea2")


def test_files_of_single_networks_are_told_apart(theirs, text):
    for names in (OURS, {f"diffusion_model.{name}": shape for name, shape in OURS.items()}, theirs):
        found = identify(names)
        assert (found.kind, found.family) == ("transformer", "krea2")
    plain = {f"model.{name}": shape for name, shape in Qwen3(Qwen3Arch.b4()).shapes().items()}
    comfy = plain | {f"visual.{name}": (1,) for name in ("deepstack_merger_list.0.norm.weight", "patch_embed.bias")}
    for names, family in ((plain, "qwen3-4b"), (comfy, "qwen3-vl-4b"), (text, "qwen3-vl-4b")):
        assert (identify(names).kind, identify(names).family) == ("text_encoder", family)
    with torch.device("meta"):
        vae = identify(shapes_of(diffusers.AutoencoderKLQwenImage()))
    assert vae.kind == "vae"
    assert could_be(vae.family, "krea2")
    assert not could_be(vae.family, "zimage")


def file_names(theirs, prefix, spell):
    """The names and shapes of a LoRA on every linear layer, in one of the spellings."""
    return lora_shapes(lora_family(), LINEAR, OURS, theirs, prefix, spell)


@pytest.mark.parametrize(
    ("prefix", "spell"),
    [
        ("diffusion_model.", lambda path: path),
        ("lora_unet_", lambda path: path.replace(".", "_")),
        ("base_model.model.", lambda path: path),
        ("transformer.", None),
    ],
)
def test_every_linear_layer_has_a_name_in_lora_files(theirs, prefix, spell):
    assert set(base_modules()) == LINEAR
    assert len(LINEAR) == 264
    names = file_names(theirs, prefix, spell)
    found = identify(names)
    assert (found.kind, found.family) == ("lora", "krea2")
    known = spellings(lora_family())
    assert all(name.rsplit(".", 2)[0] in known for name in names)


def test_a_file_of_any_one_layer_of_the_blocks_is_told(theirs):
    """In native names each layer tells the family; in diffusers' all but queries and what leads out."""
    for prefix, spell, silent in (
        ("diffusion_model.", lambda path: path, ()),
        ("transformer.", None, ("attn.to_q", "attn.to_out.0")),
    ):
        names = file_names(theirs, prefix, spell)
        for down in [name for name in names if "blocks." in name and name.endswith("lora_A.weight")]:
            stem = down.removesuffix(".lora_A.weight")
            if stem.endswith(silent) and "text_fusion" not in stem:
                continue
            part = {name: shape for name, shape in names.items() if name.startswith(f"{stem}.")}
            assert identify(part).family == "krea2", stem


def test_diffusers_reads_native_names_of_every_layer(theirs):
    from diffusers.loaders.lora_conversion_utils import _convert_non_diffusers_krea2_lora_to_diffusers as convert

    names = file_names(theirs, "diffusion_model.", lambda path: path)
    made = convert({name: torch.empty(shape, device="meta") for name, shape in names.items()})
    assert {name: tuple(t.shape) for name, t in made.items()} == file_names(theirs, "transformer.", None)
