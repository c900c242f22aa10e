"""Wan 2.2's name tables on every name and shape of TI2V-5B, against diffusers' and transformers' classes."""

from __future__ import annotations

import pytest

from flame_train.models.wan.names import PUBLISHED_VAE, WAN_FILES, base_modules, lora_family, transformer_to_diffusers
from flame_train.models.wan.transformer import Wan, WanArch
from flame_train.networks.files.identify import identify
from flame_train.networks.vae.vae import Vae
from flame_train.text_encoders.t5.network import T5Arch, T5Encoder
from tests.parity import key_tables as check
from tests.parity.models.test_vae_qwenimage import wan_names
from tests.parity.models.test_vae_wan import twin_of

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")
transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore")]

OURS = Wan(WanArch.ti2v_5b()).shapes()
CONFIG = {"num_attention_heads": 24, "in_channels": 48, "out_channels": 48, "ffn_dim": 14336, "num_layers": 30}


@pytest.fixture(scope="module")
def theirs():
    return check.on_meta(diffusers.WanTransformer3DModel, **CONFIG)


def test_the_table_is_total_and_bijective(theirs):
    assert len(OURS) == 825
    check.check_bijective(transformer_to_diffusers(), OURS, theirs)
    assert WanArch.from_shapes(OURS) == WanArch.ti2v_5b()


def test_values_are_those_of_diffusers_converter():
    from diffusers.loaders.single_file_utils import convert_wan_transformer_to_diffusers as convert

    thin = {n: (shape[0], *[1] * (len(shape) - 1)) for n, shape in OURS.items() if ".1" not in n and ".2" not in n[:9]}
    check.check_values(thin, convert, transformer_to_diffusers())


def test_whole_checkpoints_of_both_layouts_are_sorted(theirs):
    """Every name of a full checkpoint and of a folder goes to its component; ComfyUI's vocabulary plays no part."""
    config = transformers.UMT5Config(
        vocab_size=256384,
        d_model=4096,
        d_kv=64,
        d_ff=10240,
        num_layers=24,
        num_heads=64,
        feed_forward_proj="gated-gelu",
    )
    text = T5Encoder(T5Arch.umt5_xxl()).shapes()
    with torch.device("meta"):
        folder_text = check.shapes_of(transformers.UMT5EncoderModel(config))
        folder_vae = check.shapes_of(twin_of(PUBLISHED_VAE))
    assert {name: s for name, s in folder_text.items() if "embed_tokens" not in name} == text
    single_vae = dict(zip(wan_names(folder_vae, 2), folder_vae.values(), strict=True))
    folder = check.below({"transformer/": theirs, "text_encoder/": folder_text, "vae/": folder_vae})
    encoder, prefix = "text_encoders.umt5xxl.transformer.", "model.diffusion_model."
    single = check.below({prefix: OURS, encoder: text, "first_stage_model.": single_vae, "text_encoders.": _SPIECE})
    networks = {"transformer": OURS, "text_encoder": text, "vae": Vae(PUBLISHED_VAE).shapes()}
    for names in (folder, single):
        check.check_checkpoint(WAN_FILES.resolve, names, "wan", networks)
    check.check_denoiser("wan", OURS, theirs)
    for alone in (text, folder_text, text | _SPIECE):
        assert identify(alone).family == "umt5-xxl"


_SPIECE = {"spiece_model": (4_500_000,)}


@pytest.mark.parametrize(
    ("changes", "family"),
    [
        ({"in_channels": 16, "out_channels": 16, "num_attention_heads": 40, "ffn_dim": 13824}, "wan-a14b"),
        ({"in_channels": 36, "out_channels": 16, "num_attention_heads": 40, "ffn_dim": 13824}, "wan-inputs"),
        ({"in_channels": 36, "out_channels": 16, "image_dim": 1280, "added_kv_proj_dim": 5120}, "wan-inputs"),
    ],
)
def test_other_wans_are_told_by_name(changes, family):
    names = check.on_meta(diffusers.WanTransformer3DModel, **(CONFIG | changes | {"num_layers": 2}))
    check.check_told(names, "transformer", family)


@pytest.mark.parametrize(("prefix", "spell"), [check.NATIVE, check.KOHYA, check.DIFFUSERS])
def test_every_linear_layer_has_a_name_in_lora_files(theirs, prefix, spell):
    assert set(base_modules()) == check.linear_layers(OURS)
    check.check_lora(check.spelled_loras(lora_family(), OURS, theirs, prefix, spell), lora_family())


def test_loras_of_other_wans_are_told():
    """Their layers have the names of TI2V-5B's, and other widths."""
    wide = {name: tuple({3072: 5120, 14336: 13824}.get(n, n) for n in shape) for name, shape in OURS.items()}
    names = check.lora_names([path for path in base_modules() if path.startswith("blocks.")], wide, "lora_unet_")
    assert identify(check.lora_names(["blocks.0.ffn.2"], wide, "diffusion_model.")).family == "wan-a14b"
    assert identify(names).family == "wan-a14b"


def test_a_lora_of_attention_alone_is_not_animas():
    """Whose layers have the same names in diffusers' layout, where every dot is an underscore; of any width."""
    arch = WanArch.tiny()
    shapes = Wan(arch).shapes()
    paths = [path for path in base_modules(arch.depth) if "attn." in path]
    table = {
        name: source.made_shape(shapes) for name, source in transformer_to_diffusers().pull(shapes).sources.items()
    }
    known = lora_family().components[0].modules
    names = check.lora_names({there for path in paths for there in known[path]}, table, "transformer.")
    check.check_lora(names, lora_family())
