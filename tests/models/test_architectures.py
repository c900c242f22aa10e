"""Every network's names and shapes against the published lists, and architectures read back from shapes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flame_train.errors import ModelFileError
from flame_train.models.sdxl.unet import UNet, UNetArch
from flame_train.networks.vae.vae import Vae, VaeArch
from flame_train.text_encoders.clip.network import ClipArch, ClipTextEncoder

BASE = "sdxl_base_single_file"
PUBLISHED = {
    "unet": (lambda: UNet(UNetArch.sdxl()), (BASE, "model.diffusion_model."), 1680, 2_567_463_684),
    "vae": (lambda: Vae(VaeArch.sdxl()), (BASE, "first_stage_model."), 248, 83_653_863),
    "clip_l": (
        lambda: ClipTextEncoder(ClipArch.clip_l()),
        ("sdxl_diffusers_text_encoder",),
        196,
        123_060_480,
    ),
    "bigg": (lambda: ClipTextEncoder(ClipArch.bigg()), ("sdxl_diffusers_text_encoder_2",), 517, 694_659_840),
}


@pytest.mark.parametrize("which", PUBLISHED)
def test_names_and_shapes_are_the_published_ones(which, published):
    make, where, tensors, parameters = PUBLISHED[which]
    model = make()
    assert model.shapes() == published(*where)
    assert len(model.shapes()) == tensors
    assert model.num_weights() == parameters


UNETS = [
    UNetArch.sdxl(),
    UNetArch.tiny(),
    UNetArch.tiny(model_channels=64, context_dim=40, pooled_dim=16),
    replace(UNetArch.tiny(), in_channels=16, out_channels=16),
    replace(UNetArch.tiny(), channel_mult=(1, 2), transformer_depth=(0, 3), num_res_blocks=1),
    replace(UNetArch.tiny(), channel_mult=(1, 1, 3, 4), transformer_depth=(1, 0, 2, 1), num_res_blocks=3),
    UNetArch.sd1(),
    UNetArch.sd2(),
    UNetArch.tiny_sd1(),
]


@pytest.mark.parametrize("arch", UNETS)
def test_unet_arch_is_read_back(arch):
    assert UNetArch.from_shapes(UNet(arch).shapes()) == arch


@pytest.mark.parametrize("arch", [VaeArch.sdxl(), VaeArch.tiny(), replace(VaeArch.sdxl(), latent_channels=16)])
def test_vae_arch_is_read_back(arch):
    assert VaeArch.from_shapes(Vae(arch).shapes(), arch) == arch


@pytest.mark.parametrize(
    "arch",
    [
        ClipArch.clip_l(),
        ClipArch.vit_h(),
        ClipArch.bigg(),
        ClipArch.tiny("gelu", 16),
        ClipArch.tiny("quick_gelu", width=128),
    ],
)
def test_clip_arch_is_read_back(arch):
    assert ClipArch.from_shapes(ClipTextEncoder(arch).shapes(), arch.activation) == arch


@pytest.mark.parametrize(
    ("read", "missing"),
    [
        (UNetArch.from_shapes, "input_blocks.0.0.weight"),
        (VaeArch.from_shapes, "encoder.conv_in.weight"),
        (lambda shapes: ClipArch.from_shapes(shapes, "gelu"), "token_embedding"),
    ],
)
def test_foreign_names_are_refused_with_the_name_looked_for(read, missing):
    with pytest.raises(ModelFileError, match=missing):
        read({"double_blocks.0.img_attn.qkv.weight": (9216, 3072)})


@pytest.mark.parametrize("arch", [UNetArch.tiny(), UNetArch.tiny_sd1()])
@pytest.mark.parametrize(("channels", "kind"), [(8, r"InstructPix2Pix \(edit\)"), (9, "inpainting")])
def test_relatives_that_see_a_second_image_are_refused(arch, channels, kind):
    shapes = UNet(arch).shapes() | {"input_blocks.0.0.weight": (320, channels, 3, 3)}
    with pytest.raises(ModelFileError, match=f"found {channels} and 4: this is an {kind} model"):
        UNetArch.from_shapes(shapes)


def test_tiny_networks_fit_together():
    clip_l, bigg, unet = ClipArch.tiny("quick_gelu"), ClipArch.tiny("gelu", 32), UNetArch.tiny()
    assert clip_l.width + bigg.width == unet.context_dim
    assert bigg.projection + 6 * 256 == unet.adm_in_channels
    assert VaeArch.tiny().latent_channels == unet.in_channels
