"""Z-Image's name tables on every name and shape of the published size, against diffusers' classes and converter."""

from __future__ import annotations

import numpy as np
import pytest

from flame_train.adapters.dialects import spellings
from flame_train.io.resolve import native_shapes
from flame_train.models.common.files.identify import identify
from flame_train.models.common.files.stated import NOTHING
from flame_train.models.common.text.qwen3 import Qwen3, Qwen3Arch
from flame_train.models.zimage.files import ZIMAGE_FILES
from flame_train.models.zimage.keys import base_modules, lora_family, resolve, transformer_to_diffusers
from flame_train.models.zimage.transformer import ZImage, ZImageArch

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")
transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore")]

OURS = ZImage(ZImageArch.base()).shapes()


@pytest.fixture(scope="module")
def theirs():
    """diffusers' names and shapes, whose default configuration is the published one."""
    with torch.device("meta"):
        return {name: tuple(t.shape) for name, t in diffusers.ZImageTransformer2DModel().state_dict().items()}


def test_the_table_is_total_and_bijective(theirs):
    table = transformer_to_diffusers()
    there, back = table.pull(OURS), table.inverse.pull(theirs)
    assert there.unknown == back.unknown == ()
    assert native_shapes(there.sources, OURS) == theirs
    assert native_shapes(back.sources, theirs) == OURS


def test_values_are_those_of_diffusers_converter():
    from diffusers.loaders.single_file_utils import convert_z_image_transformer_checkpoint_to_diffusers as convert

    model = ZImage(ZImageArch.tiny())
    model.init(np.random.default_rng(0), "float32")
    own = {name: t.numpy() for name, t in model.weights()}
    stored = {f"model.diffusion_model.{name}": torch.from_numpy(np.array(a)) for name, a in own.items()}
    converted = convert(stored | {"model.diffusion_model.norm_final.weight": torch.zeros(64)})

    class Arrays:
        def read(self, name):
            return own[name]

    made = {name: source.read(Arrays()) for name, source in transformer_to_diffusers().pull(own).sources.items()}
    assert made.keys() == converted.keys()
    for name, array in made.items():
        np.testing.assert_array_equal(array, converted[name].numpy(), err_msg=name)


def test_whole_checkpoints_of_both_layouts_are_sorted(theirs):
    """Every name of a full checkpoint and of a folder goes to its component, and no name is left."""
    config = transformers.Qwen3Config(
        vocab_size=151936, hidden_size=2560, num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8,
        intermediate_size=9728, head_dim=128,
    )  # fmt: skip
    with torch.device("meta"):
        text = {name: tuple(t.shape) for name, t in transformers.Qwen3ForCausalLM(config).state_dict().items()}
        vae = diffusers.AutoencoderKL(
            down_block_types=["DownEncoderBlock2D"] * 4, up_block_types=["UpDecoderBlock2D"] * 4,
            block_out_channels=[128, 256, 512, 512], layers_per_block=2, latent_channels=16, use_quant_conv=False,
            use_post_quant_conv=False,
        ).state_dict()  # fmt: skip
    folder = {f"transformer/{name}": shape for name, shape in theirs.items()}
    folder |= {f"text_encoder/{name}": shape for name, shape in text.items()}
    folder |= {f"vae/{name}": tuple(t.shape) for name, t in vae.items()}
    native = Qwen3(Qwen3Arch.b4()).shapes()
    single = {f"model.diffusion_model.{name}": shape for name, shape in OURS.items()}
    single |= {f"text_encoders.qwen3_4b.transformer.model.{name}": shape for name, shape in native.items()}
    for names, left in ((folder, {"text_encoder/lm_head.weight"}), (single, set())):
        found = resolve(names)
        assert native_shapes(found.sources["transformer"], names) == OURS
        assert native_shapes(found.sources["text_encoder"], names) == native
        assert set(found.unknown) == left
        assert (identify(names).kind, identify(names).family) == ("checkpoint", "zimage")
    assert (
        native_shapes(resolve(folder).sources["vae"], folder).keys()
        == ZIMAGE_FILES.build("vae", native_shapes(resolve(folder).sources["vae"], folder), NOTHING).shapes().keys()
    )


def test_files_of_single_networks_are_told_apart(theirs):
    for names in (OURS, {f"diffusion_model.{name}": shape for name, shape in OURS.items()}, theirs):
        found = identify(names)
        assert (found.kind, found.family) == ("transformer", "zimage")
    for arch, family in ((Qwen3Arch.b0_6(), "qwen3-0.6b"), (Qwen3Arch.b4(), "qwen3-4b"), (Qwen3Arch.b8(), "qwen3-8b")):
        shapes = {f"model.{name}": shape for name, shape in Qwen3(arch).shapes().items()}
        assert (identify(shapes).kind, identify(shapes).family) == ("text_encoder", family)
    lumina = {name: shape for name, shape in OURS.items() if not name.endswith("pad_token")}
    assert identify(lumina).family == "lumina2"


@pytest.mark.parametrize(
    ("prefix", "spell"),
    [
        ("diffusion_model.", lambda path: path),
        ("lora_unet_", lambda path: path.replace(".", "_")),
        ("transformer.", None),
        ("diffusion_model.", None),  # ai-toolkit: diffusers' paths below ComfyUI's prefix
    ],
)
def test_every_linear_layer_has_a_name_in_lora_files(theirs, prefix, spell):
    linear = {
        name.removesuffix(".weight") for name, shape in OURS.items() if len(shape) == 2 and name.endswith("weight")
    }
    assert set(base_modules()) == linear
    (component,) = lora_family().components
    paths = linear if spell else {path for module in component.modules.values() for path in module}
    names = {}
    for path in paths:
        rows, width = (OURS if spell else theirs)[f"{path}.weight"]
        down, up = ("lora_down", "lora_up") if prefix == "lora_unet_" else ("lora_A", "lora_B")
        spelled = prefix + (spell(path) if spell else path)
        names |= {f"{spelled}.{down}.weight": (4, width), f"{spelled}.{up}.weight": (rows, 4)}
    found = identify(names)
    assert (found.kind, found.family) == ("lora", "zimage")
    known = spellings(lora_family())
    assert all(name.rsplit(".", 2)[0] in known for name in names)
