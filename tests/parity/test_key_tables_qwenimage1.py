"""Qwen-Image 1's name tables on every name and shape of the published size, against diffusers' classes."""

from __future__ import annotations

import pytest

from flame_train.models.qwenimage1.names import QWENIMAGE1_FILES, ZERO_COND, base_modules, lora_family
from flame_train.models.qwenimage1.transformer import QwenImage1, QwenImage1Arch
from flame_train.networks.files.identify import could_be, identify, lora_could_be
from flame_train.networks.vae.vae import Vae, VaeArch
from flame_train.text_encoders.qwen3.network import Qwen3, Qwen3Arch
from flame_train.text_encoders.qwen3.vision_2_5 import Vision25Arch, VisionTower25
from tests.parity import key_tables as check

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")
transformers = pytest.importorskip("transformers")

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore")]

OURS = QwenImage1(QwenImage1Arch.base()).shapes()


@pytest.fixture(scope="module")
def theirs():
    """diffusers' names and shapes, whose default configuration is the published one."""
    return check.on_meta(diffusers.QwenImageTransformer2DModel)


@pytest.fixture(scope="module")
def text():
    """The names and shapes of Qwen2.5-VL-7B as transformers has them, with the half for images and the head."""
    config = transformers.Qwen2_5_VLConfig(
        text_config={
            "vocab_size": 152064,
            "hidden_size": 3584,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "intermediate_size": 18944,
        },
        vision_config={"hidden_size": 1280},
    )
    return check.on_meta(transformers.Qwen2_5_VLForConditionalGeneration, config=config)


def test_checkpoints_of_every_kind_are_sorted(theirs, text):
    """A folder, a whole file, and the encoder's names before transformers 4.52, with the half for images."""
    assert theirs == OURS
    vae = check.on_meta(diffusers.AutoencoderKLQwenImage)
    older = {name.replace("language_model.", ""): shape for name, shape in text.items()}
    native, autoencoder = Qwen3(Qwen3Arch.vl2_5_b7()).shapes(), Vae(VaeArch.qwen_image()).shapes()
    encoder = "text_encoders.qwen25_7b.transformer.model."
    vision = VisionTower25(Vision25Arch.b7()).shapes()
    seen = encoder.replace("model.", "visual.")
    single = check.below(
        {"model.diffusion_model.": OURS, encoder: native, seen: vision, "first_stage_model.": autoencoder}
    )
    inside = [
        check.below({"transformer/": theirs, "vae/": vae, "text_encoder/": encoder_names})
        for encoder_names in (text, older)
    ]
    networks = {"transformer": OURS, "text_encoder": native, "vae": autoencoder, "vision": vision}
    for names in (*inside, single):
        check.check_checkpoint(QWENIMAGE1_FILES.resolve, names, "qwenimage1", networks, ("text_encoder/lm_head.",))
    marked = single | {f"model.diffusion_model.{ZERO_COND}": (0,)}
    check.check_checkpoint(QWENIMAGE1_FILES.resolve, marked, "qwenimage1", networks)
    assert "Qwen-Image 1 (Edit 2511), checkpoint" in identify(marked).detail


def test_files_of_single_networks_are_told_apart(theirs, text):
    check.check_denoiser("qwenimage1", OURS, theirs)
    vae = identify(check.on_meta(diffusers.AutoencoderKLQwenImage))
    assert could_be(vae.family, "qwenimage1")
    comfy = {name.replace("model.language_model.", "model."): shape for name, shape in text.items()}
    for names in (text, comfy):
        check.check_told(names, "text_encoder", "qwen2.5-vl-7b")


@pytest.mark.parametrize(("prefix", "spell"), [check.NATIVE, check.KOHYA, ("transformer.", str)])
def test_every_linear_layer_has_a_name_in_lora_files(prefix, spell):
    """A file of attention alone has Flux.1's names and width: then its metadata decides, and both read it."""
    assert set(base_modules()) == check.linear_layers(OURS)
    assert len(base_modules()) == 846
    names = check.spelled_loras(lora_family(), OURS, OURS, prefix, spell)
    check.check_lora(names, lora_family())
    alone = {name: shape for name, shape in names.items() if "attn" in name}
    assert lora_could_be(identify(alone).family, "qwenimage1")
    assert identify(alone, {"ss_base_model_version": "qwen_image"}).family == "qwenimage1"
