"""Anima's name tables on every name and shape of the published sizes, against diffusers' classes and converters."""

from __future__ import annotations

import pytest

from flame_train.adapters.dialects import spellings
from flame_train.io.resolve import native_shapes
from flame_train.models.anima.files import ANIMA_FILES
from flame_train.models.anima.keys import adapter_modules, base_modules, lora_family, resolve, transformer_to_diffusers
from flame_train.models.anima.text import AdapterArch, LlmAdapter
from flame_train.models.anima.transformer import Anima, AnimaArch
from flame_train.models.common.files.identify import identify
from flame_train.models.common.text.qwen3 import Qwen3, Qwen3Arch

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")
transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore")]

ARCHS = {"2b": AnimaArch.base(), "2.9b": AnimaArch.deep()}
ADAPTER = LlmAdapter(AdapterArch()).shapes()
ROTARY = (1.0, 4.0, 4.0)


def on_meta(make):
    with torch.device("meta"):
        return {name: tuple(t.shape) for name, t in make().state_dict().items()}


@pytest.fixture(scope="module", params=ARCHS)
def arch(request):
    return ARCHS[request.param]


@pytest.fixture(scope="module")
def theirs(arch):
    return on_meta(
        lambda: diffusers.CosmosTransformer3DModel(
            num_attention_heads=16, num_layers=arch.depth, rope_scale=ROTARY, extra_pos_embed_type=None
        )
    )


@pytest.fixture(scope="module")
def ours(arch):
    return Anima(arch).shapes()


def test_the_table_is_total_and_bijective(arch, theirs, ours):
    table = transformer_to_diffusers()
    there, back = table.pull(ours), table.inverse.pull(theirs)
    assert there.unknown == back.unknown == ()
    assert native_shapes(there.sources, ours) == theirs
    assert native_shapes(back.sources, theirs) == ours
    assert AnimaArch.from_shapes(ours) == arch


def test_the_adapter_has_diffusers_names():
    assert on_meta(diffusers.AnimaTextConditioner) == ADAPTER
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
        vocab_size=151936, hidden_size=1024, num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8,
        intermediate_size=3072, head_dim=128,
    )  # fmt: skip
    native = Qwen3(Qwen3Arch.b0_6()).shapes()
    single = ours | {f"llm_adapter.{name}": shape for name, shape in ADAPTER.items()}
    counted = {"pos_embedder.seq": (240,), "accum_iteration": ()}
    for prefix in ("", "net.", "model.diffusion_model.", "diffusion_model."):
        names = {f"{prefix}{name}": shape for name, shape in (single | counted).items()}
        assert (identify(names).kind, identify(names).family) == ("transformer", "anima")
        found = resolve(names, only="transformer")
        assert native_shapes(found.sources["transformer"], names) == ours
        assert native_shapes(found.sources["text_conditioner"], names) == ADAPTER
        assert found.unknown == ()
        assert {name.removeprefix(prefix) for name in found.ignored} == set(counted)
    whole = {f"model.diffusion_model.{name}": shape for name, shape in single.items()}
    whole |= {f"text_encoders.qwen3_06b.transformer.model.{name}": shape for name, shape in native.items()}
    folder = {f"transformer/{name}": shape for name, shape in theirs.items()}
    folder |= {f"text_conditioner/{name}": shape for name, shape in ADAPTER.items()}
    folder |= {
        f"text_encoder/{name}": shape for name, shape in on_meta(lambda: transformers.Qwen3Model(config)).items()
    }
    folder |= {f"vae/{name}": shape for name, shape in on_meta(diffusers.AutoencoderKLQwenImage).items()}
    for names in (whole, folder):
        found = resolve(names)
        assert native_shapes(found.sources["transformer"], names) == ours
        assert native_shapes(found.sources["text_conditioner"], names) == ADAPTER
        assert native_shapes(found.sources["text_encoder"], names) == native
        assert found.unknown == ()
        assert (identify(names).kind, identify(names).family) == ("checkpoint", "anima")
    assert identify({f"net.{name}": shape for name, shape in ours.items()}).family == "cosmos2"
    assert ANIMA_FILES.alone[identify({f"model.{name}": shape for name, shape in native.items()}).family]


@pytest.mark.parametrize(
    ("prefix", "spell"),
    [
        ("diffusion_model.", lambda path: path),
        ("lora_unet_", lambda path: path.replace(".", "_")),
        ("transformer.", None),
    ],
)
def test_every_linear_layer_has_a_name_in_lora_files(theirs, ours, prefix, spell):
    linear = {name.removesuffix(".weight") for name, shape in ours.items() if len(shape) == 2}
    assert linear <= set(base_modules())
    component = lora_family().components[0]
    paths = linear if spell else {path for module in linear for path in component.modules[module]}
    shapes = ours if spell else theirs
    rest = {f"llm_adapter.{name}" if spell else name for name in adapter_modules()}
    down, up = ("lora_down", "lora_up") if prefix == "lora_unet_" else ("lora_A", "lora_B")
    names = {}
    for path in paths:
        rows, width = shapes[f"{path}.weight"]
        spelled = prefix + (spell(path) if spell else path)
        names |= {f"{spelled}.{down}.weight": (4, width), f"{spelled}.{up}.weight": (rows, 4)}
    for path in rest:
        rows, width = ADAPTER[f"{path.removeprefix('llm_adapter.')}.weight"]
        spelled = prefix + spell(path) if spell else f"text_conditioner.{path}"
        names |= {f"{spelled}.{down}.weight": (4, width), f"{spelled}.{up}.weight": (rows, 4)}
    assert {name for name, shape in ADAPTER.items() if len(shape) == 2} == {
        *(f"{name}.weight" for name in adapter_modules()), "embed.weight",
    }  # fmt: skip
    assert (identify(names).kind, identify(names).family) == ("lora", "anima")
    known = spellings(lora_family())
    assert all(name.rsplit(".", 2)[0] in known for name in names)


@pytest.mark.parametrize("part", ["attn1.to_q", "attn2.to_k", "norm3.linear_2", "ff.net.0.proj attn1.to_v"])
def test_loras_in_diffusers_names_of_few_layers_are_told_from_sd3(theirs, part):
    names = {}
    for name in part.split():
        rows, width = theirs[f"transformer_blocks.0.{name}.weight"]
        spelled = f"transformer.transformer_blocks.0.{name}"
        names |= {f"{spelled}.lora_A.weight": (4, width), f"{spelled}.lora_B.weight": (rows, 4)}
    assert identify(names).family == "anima"
