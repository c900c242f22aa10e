"""Z-Image's name tables on every name and shape of the published size, against diffusers' classes and converter."""

from __future__ import annotations

import pytest

from flame_train.io.resolve import native_shapes
from flame_train.models.zimage.names import ZIMAGE_FILES, base_modules, lora_family, transformer_to_diffusers
from flame_train.models.zimage.transformer import ZImage, ZImageArch
from flame_train.networks.files.identify import identify
from flame_train.networks.files.stated import NOTHING
from flame_train.text_encoders.qwen3.network import Qwen3, Qwen3Arch
from tests.parity import key_tables as check

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")
transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore")]

OURS = ZImage(ZImageArch.base()).shapes()


@pytest.fixture(scope="module")
def theirs():
    """diffusers' names and shapes, whose default configuration is the published one."""
    return check.on_meta(diffusers.ZImageTransformer2DModel)


def test_the_table_is_total_and_bijective(theirs):
    check.check_bijective(transformer_to_diffusers(), OURS, theirs)


def test_values_are_those_of_diffusers_converter():
    from diffusers.loaders.single_file_utils import convert_z_image_transformer_checkpoint_to_diffusers as convert

    def with_unused(stored):
        return convert(stored | {"model.diffusion_model.norm_final.weight": torch.zeros(64)})

    check.check_values(ZImage(ZImageArch.tiny()).shapes(), with_unused, transformer_to_diffusers())


def test_whole_checkpoints_of_both_layouts_are_sorted(theirs):
    """Every name of a full checkpoint and of a folder goes to its component, and no name is left."""
    config = transformers.Qwen3Config(
        vocab_size=151936,
        hidden_size=2560,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        intermediate_size=9728,
        head_dim=128,
    )
    text = check.on_meta(transformers.Qwen3ForCausalLM, config=config)
    vae = check.on_meta(
        diffusers.AutoencoderKL,
        down_block_types=["DownEncoderBlock2D"] * 4,
        up_block_types=["UpDecoderBlock2D"] * 4,
        block_out_channels=[128, 256, 512, 512],
        layers_per_block=2,
        latent_channels=16,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )
    native = Qwen3(Qwen3Arch.b4()).shapes()
    folder = check.below({"transformer/": theirs, "text_encoder/": text, "vae/": vae})
    single = check.below({"model.diffusion_model.": OURS, "text_encoders.qwen3_4b.transformer.model.": native})
    networks = {"transformer": OURS, "text_encoder": native}
    check.check_checkpoint(ZIMAGE_FILES.resolve, folder, "zimage", networks, left=("text_encoder/lm_head.",))
    check.check_checkpoint(ZIMAGE_FILES.resolve, single, "zimage", networks)
    found = native_shapes(ZIMAGE_FILES.resolve(folder).sources["vae"], folder)
    assert found.keys() == ZIMAGE_FILES.build("vae", found, NOTHING).shapes().keys()


def test_files_of_single_networks_are_told_apart(theirs):
    check.check_denoiser("zimage", OURS, theirs)
    for arch, family in ((Qwen3Arch.b0_6(), "qwen3-0.6b"), (Qwen3Arch.b4(), "qwen3-4b"), (Qwen3Arch.b8(), "qwen3-8b")):
        check.check_told(check.below({"model.": Qwen3(arch).shapes()}), "text_encoder", family)
    lumina = {name: shape for name, shape in OURS.items() if not name.endswith("pad_token")}
    assert identify(lumina).family == "lumina2"


@pytest.mark.parametrize(
    ("prefix", "spell"),
    [check.NATIVE, check.KOHYA, check.DIFFUSERS, ("diffusion_model.", None)],  # ai-toolkit: below ComfyUI's prefix
)
def test_every_linear_layer_has_a_name_in_lora_files(theirs, prefix, spell):
    assert set(base_modules()) == check.linear_layers(OURS)
    check.check_lora(check.spelled_loras(lora_family(), OURS, theirs, prefix, spell), lora_family())
