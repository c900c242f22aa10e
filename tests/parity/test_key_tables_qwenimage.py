"""Qwen-Image 2.1's name tables on every name and shape of the published size, against diffusers' classes."""

from __future__ import annotations

import pytest

from flame_train.models.qwenimage.arch import QwenImageArch
from flame_train.models.qwenimage.names import (
    PUBLISHED_VAE,
    QWENIMAGE_FILES,
    base_modules,
    lora_family,
    transformer_to_diffusers,
)
from flame_train.models.qwenimage.transformer import QwenImage
from flame_train.networks.files.identify import could_be, identify
from flame_train.networks.vae.vae import Vae
from flame_train.text_encoders.qwen3.network import Qwen3, Qwen3Arch
from tests.parity import key_tables as check

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")
pytest.importorskip("transformers")

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore")]

OURS = QwenImage(QwenImageArch.base()).shapes()


@pytest.fixture(scope="module")
def theirs():
    """diffusers' names and shapes, whose default configuration is the published one."""
    return check.on_meta(diffusers.QwenImage21Transformer2DModel)


@pytest.fixture(scope="module")
def text():
    """The names and shapes of Qwen3-VL-8B as transformers has them, with the half for images and the head."""
    return check.qwen3_vl_shapes("Qwen3VLForConditionalGeneration", 4096, 12288)


def test_the_table_is_total_and_bijective(theirs):
    check.check_bijective(transformer_to_diffusers(), OURS, theirs)


def test_values_are_those_of_diffusers_converter():
    from diffusers.loaders.single_file_utils import convert_qwen_image21_transformer_checkpoint_to_diffusers as convert

    check.check_values(QwenImage(QwenImageArch.tiny()).shapes(), convert, transformer_to_diffusers())


def test_whole_checkpoints_of_both_layouts_are_sorted(theirs, text):
    """Every name of a full checkpoint and of a folder goes to its component; what else Qwen3-VL has is left."""
    vae = check.on_meta(diffusers.AutoencoderKLQwenImage21)
    folder = check.below({"transformer/": theirs, "text_encoder/": text, "vae/": vae})
    native, autoencoder = Qwen3(Qwen3Arch.vl_b8()).shapes(), Vae(PUBLISHED_VAE).shapes()
    encoder = "text_encoders.qwen3vl_8b.transformer.model."
    single = check.below({"model.diffusion_model.": OURS, encoder: native, "first_stage_model.": autoencoder})
    networks = {"transformer": OURS, "text_encoder": native, "vae": autoencoder}
    left = "text_encoder/model.visual.", "text_encoder/lm_head."
    check.check_checkpoint(QWENIMAGE_FILES.resolve, folder, "qwenimage", networks, left)
    check.check_checkpoint(QWENIMAGE_FILES.resolve, single, "qwenimage", networks)


def test_files_of_single_networks_are_told_apart(theirs, text):
    """Version 1, too, which has other networks; of Qwen3-8B's files only those with the half for images fit."""
    check.check_denoiser("qwenimage", OURS, theirs)
    first = check.on_meta(diffusers.QwenImageTransformer2DModel, num_layers=1)
    check.check_told(first, "transformer", "qwenimage1")
    check.check_told(check.on_meta(diffusers.AutoencoderKLQwenImage21), "vae", "qwenimage")
    old = identify(check.on_meta(diffusers.AutoencoderKLQwenImage))
    assert not could_be(old.family, "qwenimage")
    plain = check.below({"model.": Qwen3(Qwen3Arch.b8()).shapes()})
    comfy = plain | {"visual.deepstack_merger_list.0.norm.weight": (1,)}
    for names, family in ((plain, "qwen3-8b"), (comfy, "qwen3-vl-8b"), (text, "qwen3-vl-8b")):
        check.check_told(names, "text_encoder", family)


@pytest.mark.parametrize(("prefix", "spell"), [check.NATIVE, check.KOHYA, check.DIFFUSERS])
def test_every_linear_layer_has_a_name_in_lora_files(theirs, prefix, spell):
    """And a file of any one layer of the blocks is told, by a name of its own or by its width."""
    assert set(base_modules()) == check.linear_layers(OURS)
    assert len(base_modules()) == 200
    names = check.spelled_loras(lora_family(), OURS, theirs, prefix, spell)
    check.check_lora(names, lora_family())
    for down in [name for name in names if "transformer_blocks" in name and name.endswith(("A.weight", "down.weight"))]:
        stem = down.rsplit(".", 2)[0]
        part = {name: shape for name, shape in names.items() if name.startswith(f"{stem}.")}
        assert identify(part).family == "qwenimage", stem


def test_a_lora_of_version_1_is_another_models():
    first = check.on_meta(diffusers.QwenImageTransformer2DModel, num_layers=1)
    inside = {path for path in check.linear_layers(first) if "transformer_blocks." in path}
    for prefix in ("transformer.", "diffusion_model."):
        assert identify(check.lora_names(inside, first, prefix)).family == "qwenimage1"
