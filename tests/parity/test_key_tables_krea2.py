"""Krea 2's name tables on every name and shape of the published size, against diffusers' classes and converters."""

from __future__ import annotations

import pytest

from flame_train.io.resolve import native_shapes
from flame_train.models.krea2.arch import Krea2Arch
from flame_train.models.krea2.names import KREA2_FILES, base_modules, lora_family, transformer_to_diffusers
from flame_train.models.krea2.transformer import Krea2
from flame_train.networks.files.identify import could_be, identify
from flame_train.networks.files.stated import NOTHING
from flame_train.text_encoders.qwen3.network import Qwen3, Qwen3Arch
from tests.parity import key_tables as check

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")
pytest.importorskip("transformers")

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore")]

OURS = Krea2(Krea2Arch.base()).shapes()


@pytest.fixture(scope="module")
def theirs():
    """diffusers' names and shapes, whose default configuration is the published one."""
    return check.on_meta(diffusers.Krea2Transformer2DModel)


@pytest.fixture(scope="module")
def text():
    """The names and shapes of Qwen3-VL-4B as transformers has them, with the half for images."""
    return check.qwen3_vl_shapes("Qwen3VLModel", 2560, 9728)


def test_the_table_is_total_and_bijective(theirs):
    check.check_bijective(transformer_to_diffusers(), OURS, theirs)


def test_values_are_those_of_diffusers_converter():
    from diffusers.loaders.single_file_utils import convert_krea2_transformer_checkpoint_to_diffusers as convert

    check.check_values(Krea2(Krea2Arch.tiny()).shapes(), convert, transformer_to_diffusers())


def test_whole_checkpoints_of_both_layouts_are_sorted(theirs, text):
    """Every name of a full checkpoint and of a folder goes to its component; what Qwen3-VL has for images is left."""
    vae = check.on_meta(diffusers.AutoencoderKLQwenImage)
    folder = check.below({"transformer/": theirs, "text_encoder/": text, "vae/": vae})
    native = Qwen3(Qwen3Arch.vl_b4()).shapes()
    native_vae = native_shapes(KREA2_FILES.resolve(folder).sources["vae"], folder)
    autoencoder = KREA2_FILES.build("vae", native_vae, NOTHING).shapes()
    encoder = "text_encoders.qwen3vl_4b.transformer.model."
    single = check.below({"model.diffusion_model.": OURS, encoder: native, "first_stage_model.": autoencoder})
    networks = {"transformer": OURS, "text_encoder": native, "vae": autoencoder}
    check.check_checkpoint(KREA2_FILES.resolve, folder, "krea2", networks, left=("text_encoder/visual.",))
    check.check_checkpoint(KREA2_FILES.resolve, single, "krea2", networks)


def test_files_of_single_networks_are_told_apart(theirs, text):
    check.check_denoiser("krea2", OURS, theirs)
    plain = check.below({"model.": Qwen3(Qwen3Arch.b4()).shapes()})
    comfy = plain | {f"visual.{name}": (1,) for name in ("deepstack_merger_list.0.norm.weight", "patch_embed.bias")}
    for names, family in ((plain, "qwen3-4b"), (comfy, "qwen3-vl-4b"), (text, "qwen3-vl-4b")):
        check.check_told(names, "text_encoder", family)
    vae = identify(check.on_meta(diffusers.AutoencoderKLQwenImage))
    assert vae.kind == "vae"
    assert could_be(vae.family, "krea2")
    assert not could_be(vae.family, "zimage")


@pytest.mark.parametrize(("prefix", "spell"), [check.NATIVE, check.KOHYA, check.DIFFUSERS, ("base_model.model.", str)])
def test_every_linear_layer_has_a_name_in_lora_files(theirs, prefix, spell):
    assert set(base_modules()) == check.linear_layers(OURS)
    assert len(base_modules()) == 264
    check.check_lora(check.spelled_loras(lora_family(), OURS, theirs, prefix, spell), lora_family())


def test_a_file_of_any_one_layer_of_the_blocks_is_told(theirs):
    """In native names each layer tells the family; in diffusers' all but queries and what leads out."""
    for spelling, silent in ((check.NATIVE, ()), (check.DIFFUSERS, ("attn.to_q", "attn.to_out.0"))):
        names = check.spelled_loras(lora_family(), OURS, theirs, *spelling)
        for down in [name for name in names if "blocks." in name and name.endswith("lora_A.weight")]:
            stem = down.removesuffix(".lora_A.weight")
            if stem.endswith(silent) and "text_fusion" not in stem:
                continue
            part = {name: shape for name, shape in names.items() if name.startswith(f"{stem}.")}
            assert identify(part).family == "krea2", stem


def test_diffusers_reads_native_names_of_every_layer(theirs):
    from diffusers.loaders.lora_conversion_utils import _convert_non_diffusers_krea2_lora_to_diffusers as convert

    names = check.spelled_loras(lora_family(), OURS, theirs, *check.NATIVE)
    made = convert({name: torch.empty(shape, device="meta") for name, shape in names.items()})
    in_diffusers = check.spelled_loras(lora_family(), OURS, theirs, *check.DIFFUSERS)
    assert {name: tuple(t.shape) for name, t in made.items()} == in_diffusers
