"""`verify`'s table of diffusers against its loaders: a whole LoRA of a family, in both formats and in native names."""

from __future__ import annotations

import numpy as np
import pytest

from flame_train.adapters.factors import LoraFactors
from flame_train.adapters.formats import to_diffusers, to_kohya
from flame_train.io.safetensors import save_file
from flame_train.models.registry import FAMILIES, NOTHING_NAMED
from flame_train.tools.verify import verify

diffusers = pytest.importorskip("diffusers")
torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore")]

CASES = {
    "zimage": ("ZImagePipeline", "zimage-tiny"),
    "flux2": ("Flux2KleinPipeline", "flux2-tiny"),
    "flux3": ("Flux3ModularPipeline", "flux3-tiny"),
    "krea2": ("Krea2Pipeline", "krea2-tiny"),
    "chroma": ("ChromaPipeline", "chroma"),  # whose reader of kohya's names knows this width alone
    "anima": ("AnimaModularPipeline", "anima-tiny"),
    "qwenimage": ("QwenImage21Pipeline", "qwen-image-tiny"),
    "qwenimage1": ("QwenImagePipeline", "qwen-image-1-tiny"),
    "wan": ("WanPipeline", "wan-tiny"),
}
"""Family -> its pipeline, and a model of it, small or so large that its first blocks are enough."""
INSIDE = (
    *("layers.", "double_blocks.", "single_blocks.", "blocks.", "transformer_blocks."),
    *("content_mode_blocks.", "txt_mode_blocks."),
)
UNREAD = {
    *(("zimage", "native"), ("krea2", "kohya"), ("chroma", "native"), ("anima", "kohya"), ("flux3", "kohya")),
    *(("qwenimage", "kohya"), ("qwenimage", "native")),  # whose gate and value are one matrix
}
"""What the loader of a family knows nothing of."""
WHOLE_ALONE = {("wan", "kohya")}
"""What it takes of a LoRA on every layer alone, so that the table, which is of single layers, says no."""


@pytest.fixture(params=CASES)
def case(request):
    """The pipeline, a LoRA of every layer of the blocks, and how files name them."""
    family, (pipeline, name) = FAMILIES[request.param], CASES[request.param]
    model = family.declared(family.published[name](), NOTHING_NAMED)
    inside = tuple(f"{blocks}0." for blocks in INSIDE) if name == "chroma" else INSIDE
    shapes = {n: s for n, s in model.network.shapes().items() if n.endswith(".weight") and n.startswith(inside)}
    rng = np.random.default_rng(0)
    made = {
        n.removesuffix(".weight"): LoraFactors(rng.standard_normal((2, s[1])), rng.standard_normal((s[0], 2)), 1.0)
        for n, s in shapes.items()
        if len(s) == 2
    }
    return getattr(diffusers, pipeline), {family.denoiser: made}, model.lora_names


@pytest.mark.parametrize("form", ["kohya", "diffusers", "native"])
def test_what_the_loader_takes_is_what_the_table_says(case, form, tmp_path):
    """A yes, if the loader gives PEFT a pair for every path in diffusers."""
    pipeline, state, names = case
    if form == "diffusers":
        tensors = to_diffusers(state, names)[0]
    elif form == "kohya":
        tensors = to_kohya(state, names)
    else:
        pairs = {"lora_A": "down", "lora_B": "up"}
        tensors = {
            f"diffusion_model.{module}.{end}.weight": getattr(factors, of)
            for module, factors in state["transformer"].items()
            for end, of in pairs.items()
        }
    file = tmp_path / "lora.safetensors"
    save_file(file, {n: np.asarray(a, np.float32) for n, a in tensors.items()})
    (reader,) = (r for r in verify(file) if r.program == "diffusers")
    given = {n: torch.from_numpy(np.array(a, np.float32)) for n, a in tensors.items()}
    component = names.components[0]
    wanted = {
        f"transformer.{path}.lora_{end}.weight"
        for m in state["transformer"]
        for path in component.modules[m]
        for end in "AB"
    }
    whole = set(pipeline.lora_state_dict(given)) == wanted
    assert (whole and (names.name, form) not in WHOLE_ALONE) == (reader.verdict == "yes"), reader.left
    assert whole == ((names.name, form) not in UNREAD)


@pytest.mark.parametrize("form", ["kohya", "diffusers"])
@pytest.mark.parametrize("family", ["sd15", "sdxl"])
def test_its_clips_get_every_layer_of_a_lora(family, form, tmp_path):
    """MLPs and the projection too: its loader puts each pair that `verify` counts into transformers' CLIP."""
    transformers, pipeline = pytest.importorskip("transformers"), diffusers.StableDiffusionXLPipeline
    pytest.importorskip("peft")
    names = FAMILIES[family].lora_names()
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
    encoders, state = {}, {}
    for component in [c for c in names.components if c.name.startswith("text_encoder")]:
        layers = len({m.split(".")[3] for m in component.modules if ".layers." in m})
        config = transformers.CLIPTextConfig(**sizes, num_hidden_layers=layers, projection_dim=16)
        kind = "CLIPTextModelWithProjection" if "text_projection" in component.modules else "CLIPTextModel"
        network = encoders[component.name] = getattr(transformers, kind)(config)
        weights = {f"text_model.{n.removeprefix('text_model.')}": w for n, w in network.named_parameters()}
        weights["text_model.text_projection.weight"] = torch.zeros(16, 16)
        state[component.name] = made = {}
        for module in component.modules:
            rows, columns = weights[f"text_model.{module.removeprefix('text_model.')}.weight"].shape
            made[module] = LoraFactors(np.ones((2, columns)), np.ones((rows, 2)), 2.0)
    tensors = to_kohya(state, names) if form == "kohya" else to_diffusers(state, names)[0]
    arrays = {n: np.asarray(a, np.float32) for n, a in tensors.items()}
    save_file(tmp_path / "lora.safetensors", arrays)
    (reader,) = (r for r in verify(tmp_path / "lora.safetensors") if r.program == "diffusers")
    own = pipeline if family == "sdxl" else diffusers.StableDiffusionPipeline
    loaded, alphas = own.lora_state_dict({n: torch.from_numpy(a) for n, a in arrays.items()})[:2]
    for name, network in encoders.items():
        own.load_lora_into_text_encoder(loaded, alphas, network, prefix=name)
        given = {n for n, w in network.named_parameters() if ".lora_B." in n and w.abs().sum() > 0}
        assert len(given) == len(state[name])
    assert reader.verdict == "yes", reader.left
