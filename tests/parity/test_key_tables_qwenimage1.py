"""Qwen-Image 1's name tables on every name and shape of the published size, against diffusers' classes."""

from __future__ import annotations

import pytest

from flame_train.adapters.dialects import spellings
from flame_train.io.resolve import native_shapes
from flame_train.models.common.files.identify import could_be, identify, lora_could_be
from flame_train.models.common.text.qwen3 import Qwen3, Qwen3Arch
from flame_train.models.common.vae.vae import Vae, VaeArch
from flame_train.models.qwenimage1.keys import base_modules, lora_family, resolve
from flame_train.models.qwenimage1.transformer import QwenImage1, QwenImage1Arch
from tests.parity.key_tables import shapes_of

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")
transformers = pytest.importorskip("transformers")

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore")]

OURS = QwenImage1(QwenImage1Arch.base()).shapes()
LINEAR = {name.removesuffix(".weight") for name, shape in OURS.items() if len(shape) == 2}


@pytest.fixture(scope="module")
def theirs():
    """diffusers' names and shapes, whose default configuration is the published one."""
    with torch.device("meta"):
        return shapes_of(diffusers.QwenImageTransformer2DModel())


@pytest.fixture(scope="module")
def text():
    """The names and shapes of Qwen2.5-VL-7B as transformers has them, with the half for images and the head."""
    config = transformers.Qwen2_5_VLConfig(
        text_config={
            "vocab_size": 152064, "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28,
            "num_key_value_heads": 4, "intermediate_size": 18944,
        },
        vision_config={"depth": 1, "out_hidden_size": 3584},
    )  # fmt: skip
    with torch.device("meta"):
        return shapes_of(transformers.Qwen2_5_VLForConditionalGeneration(config))


def test_checkpoints_of_every_kind_are_sorted(theirs, text):
    """A folder, a whole file, and the encoder's names before transformers 4.52; what else Qwen2.5-VL has is left."""
    assert theirs == OURS
    with torch.device("meta"):
        vae = shapes_of(diffusers.AutoencoderKLQwenImage())
    folder = {f"transformer/{name}": shape for name, shape in theirs.items()}
    folder |= {f"vae/{name}": shape for name, shape in vae.items()}
    older = {name.replace("language_model.", ""): shape for name, shape in text.items()}
    native, autoencoder = Qwen3(Qwen3Arch.vl2_5_b7()).shapes(), Vae(VaeArch.qwen_image()).shapes()
    single = {f"model.diffusion_model.{name}": shape for name, shape in OURS.items()}
    single |= {f"text_encoders.qwen25_7b.transformer.model.{name}": shape for name, shape in native.items()}
    single |= {f"first_stage_model.{name}": shape for name, shape in autoencoder.items()}
    inside = [folder | {f"text_encoder/{name}": shape for name, shape in names.items()} for names in (text, older)]
    for names in (*inside, single):
        found = resolve(names)
        assert native_shapes(found.sources["transformer"], names) == OURS
        assert native_shapes(found.sources["text_encoder"], names) == native
        assert native_shapes(found.sources["vae"], names) == autoencoder
        assert all("visual." in name or "lm_head." in name for name in found.unknown)
        assert (identify(names).kind, identify(names).family) == ("checkpoint", "qwenimage1")


def test_files_of_single_networks_are_told_apart(theirs, text):
    assert (identify(theirs).kind, identify(theirs).family) == ("transformer", "qwenimage1")
    with torch.device("meta"):
        vae = identify(shapes_of(diffusers.AutoencoderKLQwenImage()))
    assert could_be(vae.family, "qwenimage1")
    comfy = {name.replace("model.language_model.", "model."): shape for name, shape in text.items()}
    for names in (text, comfy):
        assert (identify(names).kind, identify(names).family) == ("text_encoder", "qwen2.5-vl-7b")


@pytest.mark.parametrize(
    ("prefix", "spell"),
    [("diffusion_model.", str), ("transformer.", str), ("lora_unet_", lambda path: path.replace(".", "_"))],
)
def test_every_linear_layer_has_a_name_in_lora_files(prefix, spell):
    """A file of attention alone has Flux.1's names and width: then its metadata decides, and both read it."""
    assert set(base_modules()) == LINEAR
    assert len(LINEAR) == 846
    down, up = ("lora_down", "lora_up") if prefix == "lora_unet_" else ("lora_A", "lora_B")
    names = {}
    for path in LINEAR:
        rows, width = OURS[f"{path}.weight"]
        names |= {f"{prefix}{spell(path)}.{down}.weight": (4, width), f"{prefix}{spell(path)}.{up}.weight": (rows, 4)}
    found = identify(names)
    assert (found.kind, found.family) == ("lora", "qwenimage1")
    known = spellings(lora_family())
    assert all(name.rsplit(".", 2)[0] in known for name in names)
    alone = {name: shape for name, shape in names.items() if "attn" in name}
    assert lora_could_be(identify(alone).family, "qwenimage1")
    assert identify(alone, {"ss_base_model_version": "qwen_image"}).family == "qwenimage1"
