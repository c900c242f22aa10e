"""Chroma's name tables on every name and shape of the published size, against diffusers' class and converter."""

from __future__ import annotations

import pytest

from flame_train.models.chroma.names import CHROMA_FILES, base_modules, lora_family, transformer_to_diffusers
from flame_train.models.chroma.transformer import Chroma, ChromaArch
from flame_train.networks.files.identify import identify, lora_could_be
from flame_train.networks.vae.vae import Vae, VaeArch
from flame_train.text_encoders.t5.network import T5Arch, T5Encoder
from tests.parity import key_tables as check

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")
pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore")]

OURS = Chroma(ChromaArch.base()).shapes()


@pytest.fixture(scope="module")
def theirs():
    """diffusers' names and shapes, whose default configuration is the published one."""
    return check.on_meta(diffusers.ChromaTransformer2DModel)


def test_the_table_is_total_and_bijective(theirs):
    check.check_bijective(transformer_to_diffusers(), OURS, theirs)
    assert ChromaArch.from_shapes(OURS) == ChromaArch.base()


def test_values_are_those_of_diffusers_converter():
    from diffusers.loaders.single_file_utils import convert_chroma_transformer_checkpoint_to_diffusers as convert

    model = Chroma(ChromaArch(width=3072, depth=1, single_depth=1, context_dim=8, hidden=8, layers=1))
    thin = {name: (shape[0], *[1] * (len(shape) - 1)) for name, shape in model.shapes().items()}  # rows alone matter
    check.check_values(thin, convert, transformer_to_diffusers(), prefix="")


def test_whole_checkpoints_of_both_layouts_are_sorted(theirs):
    """Every name of a full checkpoint and of a folder goes to its component, and no name is left."""
    text, vae = T5Encoder(T5Arch.xxl()).shapes(), Vae(VaeArch.flux()).shapes()
    folder = check.below({"transformer/": theirs, "text_encoder/": text, "vae/": vae})
    single = check.below(
        {"model.diffusion_model.": OURS, "text_encoders.t5xxl.transformer.": text, "first_stage_model.": vae}
    )
    for names in (folder, single):
        networks = {"transformer": OURS, "text_encoder": text, "vae": vae}
        check.check_checkpoint(CHROMA_FILES.resolve, names, "chroma", networks)
    check.check_denoiser("chroma", OURS, theirs)


@pytest.mark.parametrize(("prefix", "spell"), [check.NATIVE, check.KOHYA, check.DIFFUSERS])
def test_every_linear_layer_has_a_name_in_lora_files(theirs, prefix, spell):
    assert set(base_modules()["transformer"]) == check.linear_layers(OURS)
    names = check.spelled_loras(lora_family(), OURS, theirs, prefix, spell)
    check.check_lora(names, lora_family())
    blocks = {name: shape for name, shape in names.items() if "distilled" not in name}
    assert identify(blocks).family == "flux"  # whose names they are
    assert identify(blocks, {"modelspec.architecture": "chroma/lora"}).family == "chroma"
    assert lora_could_be("flux", "chroma")
    assert not lora_could_be("chroma", "flux")
