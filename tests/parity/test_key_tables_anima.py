"""Anima's name tables on every name and shape of the published sizes, against diffusers' classes and converters."""

from __future__ import annotations

import pytest

from flame_train.io.resolve import native_shapes
from flame_train.models.anima.names import (
    ANIMA_FILES,
    adapter_modules,
    base_modules,
    lora_family,
    transformer_to_diffusers,
)
from flame_train.models.anima.transformer import Anima, AnimaArch
from flame_train.networks.files.identify import identify
from flame_train.text_encoders.anima.network import AdapterArch, LlmAdapter
from flame_train.text_encoders.qwen3.network import Qwen3, Qwen3Arch
from tests.parity import key_tables as check

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")
transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore")]

ARCHS = {"2b": AnimaArch.base(), "2.9b": AnimaArch.deep()}
ADAPTER = LlmAdapter(AdapterArch()).shapes()
ROTARY = (1.0, 4.0, 4.0)


@pytest.fixture(scope="module", params=ARCHS)
def arch(request):
    return ARCHS[request.param]


@pytest.fixture(scope="module")
def theirs(arch):
    return check.on_meta(
        diffusers.CosmosTransformer3DModel,
        num_attention_heads=16,
        num_layers=arch.depth,
        rope_scale=ROTARY,
        extra_pos_embed_type=None,
    )


@pytest.fixture(scope="module")
def ours(arch):
    return Anima(arch).shapes()


def test_the_table_is_total_and_bijective(arch, theirs, ours):
    check.check_bijective(transformer_to_diffusers(), ours, theirs)
    assert AnimaArch.from_shapes(ours) == arch


def test_the_adapter_has_diffusers_names():
    assert check.on_meta(diffusers.AnimaTextConditioner) == ADAPTER
    assert AdapterArch.from_shapes(ADAPTER) == AdapterArch()


def test_names_are_those_of_diffusers_converters(ours):
    from diffusers.loaders.lora_conversion_utils import _convert_non_diffusers_anima_lora_to_diffusers as convert_lora
    from diffusers.loaders.single_file_utils import convert_cosmos_transformer_checkpoint_to_diffusers as convert

    made = {
        name: there for there, source in transformer_to_diffusers().pull(ours).sources.items() for name in source.names
    }
    converted = convert({f"net.{name}": name for name in ours})
    assert converted == {there: name for name, there in made.items()}
    weights = [f"{path}.weight" for path in base_modules() if f"{path}.weight" in ours]
    adapter = [f"{path}.weight" for path in adapter_modules()]
    named = {f"diffusion_model.{name}": f"transformer.{made[name]}" for name in weights}
    named |= {f"diffusion_model.llm_adapter.{name}": f"text_conditioner.{name}" for name in adapter}
    assert convert_lora({name: name for name in named}) == {there: name for name, there in named.items()}


def test_every_file_is_sorted_and_told_apart(theirs, ours):
    """The native file bare and below each prefix, with and without the rest of the model, and the folder."""
    config = transformers.Qwen3Config(
        vocab_size=151936,
        hidden_size=1024,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        intermediate_size=3072,
        head_dim=128,
    )
    native = Qwen3(Qwen3Arch.b0_6()).shapes()
    single = ours | {f"llm_adapter.{name}": shape for name, shape in ADAPTER.items()}
    counted = {"pos_embedder.seq": (240,), "accum_iteration": ()}
    for prefix in ("", "net.", "model.diffusion_model.", "diffusion_model."):
        names = {f"{prefix}{name}": shape for name, shape in (single | counted).items()}
        check.check_told(names, "transformer", "anima")
        found = ANIMA_FILES.resolve(names, only="transformer")
        assert native_shapes(found.sources["transformer"], names) == ours
        assert native_shapes(found.sources["text_conditioner"], names) == ADAPTER
        assert found.unknown == ()
        assert {name.removeprefix(prefix) for name in found.ignored} == set(counted)
    whole = check.below({"model.diffusion_model.": single, "text_encoders.qwen3_06b.transformer.model.": native})
    text = check.on_meta(transformers.Qwen3Model, config=config)
    vae = check.on_meta(diffusers.AutoencoderKLQwenImage)
    folder = check.below({"transformer/": theirs, "text_conditioner/": ADAPTER, "text_encoder/": text, "vae/": vae})
    for names in (whole, folder):
        networks = {"transformer": ours, "text_conditioner": ADAPTER, "text_encoder": native}
        check.check_checkpoint(ANIMA_FILES.resolve, names, "anima", networks)
    assert identify({f"net.{name}": shape for name, shape in ours.items()}).family == "cosmos2"
    assert ANIMA_FILES.alone[identify({f"model.{name}": shape for name, shape in native.items()}).family]


@pytest.mark.parametrize(("prefix", "spell"), [check.NATIVE, check.KOHYA, check.DIFFUSERS])
def test_every_linear_layer_has_a_name_in_lora_files(theirs, ours, prefix, spell):
    assert check.linear_layers(ours) <= set(base_modules())
    assert check.linear_layers(ADAPTER) == {*adapter_modules(), "embed"}
    names = check.spelled_loras(lora_family(), ours, theirs, prefix, spell)
    rest = prefix + spell("llm_adapter.") if spell else "text_conditioner."
    names |= check.lora_names(adapter_modules(), ADAPTER, rest, spell)
    check.check_lora(names, lora_family())


@pytest.mark.parametrize("part", ["attn1.to_q", "attn2.to_k", "norm3.linear_2", "ff.net.0.proj attn1.to_v"])
def test_loras_in_diffusers_names_of_few_layers_are_told_from_sd3(theirs, part):
    paths = [f"transformer_blocks.0.{name}" for name in part.split()]
    assert identify(check.lora_names(paths, theirs, "transformer.")).family == "anima"
