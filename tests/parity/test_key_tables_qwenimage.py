"""Qwen-Image 2.1's name tables on every name and shape of the published size, against diffusers' classes."""

from __future__ import annotations

import pytest

from flame_train.adapters.dialects import spellings
from flame_train.io.resolve import native_shapes
from flame_train.models.common.files.identify import could_be, identify
from flame_train.models.common.text.qwen3 import Qwen3, Qwen3Arch
from flame_train.models.common.vae.vae import Vae
from flame_train.models.qwenimage.arch import QwenImageArch
from flame_train.models.qwenimage.keys import base_modules, lora_family, resolve, transformer_to_diffusers
from flame_train.models.qwenimage.transformer import QwenImage
from flame_train.models.qwenimage.vae import PUBLISHED
from tests.parity.key_tables import check_bijective, check_values, lora_shapes, qwen3_vl_shapes, shapes_of

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")
pytest.importorskip("transformers")

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore")]

OURS = QwenImage(QwenImageArch.base()).shapes()
LINEAR = {name.removesuffix(".weight") for name, shape in OURS.items() if len(shape) == 2}


@pytest.fixture(scope="module")
def theirs():
    """diffusers' names and shapes, whose default configuration is the published one."""
    with torch.device("meta"):
        return shapes_of(diffusers.QwenImage21Transformer2DModel())


@pytest.fixture(scope="module")
def text():
    """The names and shapes of Qwen3-VL-8B as transformers has them, with the half for images and the head."""
    return qwen3_vl_shapes("Qwen3VLForConditionalGeneration", 4096, 12288)


def test_the_table_is_total_and_bijective(theirs):
    check_bijective(transformer_to_diffusers(), OURS, theirs)


def test_values_are_those_of_diffusers_converter():
    from diffusers.loaders.single_file_utils import convert_qwen_image21_transformer_checkpoint_to_diffusers as convert

    check_values(QwenImage(QwenImageArch.tiny()), convert, transformer_to_diffusers())


def test_whole_checkpoints_of_both_layouts_are_sorted(theirs, text):
    """Every name of a full checkpoint and of a folder goes to its component; what else Qwen3-VL has is left."""
    with torch.device("meta"):
        vae = shapes_of(diffusers.AutoencoderKLQwenImage21())
    folder = {f"transformer/{name}": shape for name, shape in theirs.items()}
    folder |= {f"text_encoder/{name}": shape for name, shape in text.items()}
    folder |= {f"vae/{name}": shape for name, shape in vae.items()}
    native, autoencoder = Qwen3(Qwen3Arch.vl_b8()).shapes(), Vae(PUBLISHED).shapes()
    single = {f"model.diffusion_model.{name}": shape for name, shape in OURS.items()}
    single |= {f"text_encoders.qwen3vl_8b.transformer.model.{name}": shape for name, shape in native.items()}
    single |= {f"first_stage_model.{name}": shape for name, shape in autoencoder.items()}
    for names in (folder, single):
        found = resolve(names)
        assert native_shapes(found.sources["transformer"], names) == OURS
        assert native_shapes(found.sources["text_encoder"], names) == native
        assert native_shapes(found.sources["vae"], names) == autoencoder
        assert all(name.startswith(("text_encoder/model.visual.", "text_encoder/lm_head.")) for name in found.unknown)
        assert (identify(names).kind, identify(names).family) == ("checkpoint", "qwenimage")


def test_files_of_single_networks_are_told_apart(theirs, text):
    """Version 1, too, which has other networks; of Qwen3-8B's files only those with the half for images fit."""
    for names in (OURS, {f"diffusion_model.{name}": shape for name, shape in OURS.items()}, theirs):
        assert (identify(names).kind, identify(names).family) == ("transformer", "qwenimage")
    with torch.device("meta"):
        first = shapes_of(diffusers.QwenImageTransformer2DModel(num_layers=1))
        vae = identify(shapes_of(diffusers.AutoencoderKLQwenImage21()))
        old = identify(shapes_of(diffusers.AutoencoderKLQwenImage()))
    assert (identify(first).kind, identify(first).family) == ("transformer", "qwenimage1")
    assert (vae.kind, vae.family) == ("vae", "qwenimage")
    assert not could_be(old.family, "qwenimage")
    plain = {f"model.{name}": shape for name, shape in Qwen3(Qwen3Arch.b8()).shapes().items()}
    comfy = plain | {"visual.deepstack_merger_list.0.norm.weight": (1,)}
    for names, family in ((plain, "qwen3-8b"), (comfy, "qwen3-vl-8b"), (text, "qwen3-vl-8b")):
        assert (identify(names).kind, identify(names).family) == ("text_encoder", family)


def file_names(theirs, prefix, spell):
    """The names and shapes of a LoRA on every linear layer, in one of the spellings."""
    return lora_shapes(lora_family(), LINEAR, OURS, theirs, prefix, spell)


SPELLINGS = [
    ("diffusion_model.", lambda path: path),
    ("lora_unet_", lambda path: path.replace(".", "_")),
    ("transformer.", None),
]


@pytest.mark.parametrize(("prefix", "spell"), SPELLINGS)
def test_every_linear_layer_has_a_name_in_lora_files(theirs, prefix, spell):
    """And a file of any one layer of the blocks is told, by a name of its own or by its width."""
    assert set(base_modules()) == LINEAR
    assert len(LINEAR) == 200
    names = file_names(theirs, prefix, spell)
    found = identify(names)
    assert (found.kind, found.family) == ("lora", "qwenimage")
    known = spellings(lora_family())
    assert all(name.rsplit(".", 2)[0] in known for name in names)
    for down in [name for name in names if "transformer_blocks" in name and name.endswith(("A.weight", "down.weight"))]:
        stem = down.rsplit(".", 2)[0]
        part = {name: shape for name, shape in names.items() if name.startswith(f"{stem}.")}
        assert identify(part).family == "qwenimage", stem


def test_a_lora_of_version_1_is_another_models():
    with torch.device("meta"):
        first = shapes_of(diffusers.QwenImageTransformer2DModel(num_layers=1))
    for prefix in ("transformer.", "diffusion_model."):
        names = {}
        for name, shape in first.items():
            if "transformer_blocks." in name and len(shape) == 2:
                stem = prefix + name.removesuffix(".weight")
                names |= {f"{stem}.lora_A.weight": (4, shape[1]), f"{stem}.lora_B.weight": (shape[0], 4)}
        assert identify(names).family == "qwenimage1"
