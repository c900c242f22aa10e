"""Small pipelines of diffusers, saved as folders: their parts, and checks of what a family makes of them."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from flame_train.config.schema import LossSection, ModelSection
from flame_train.engine import no_grad, tensor
from flame_train.engine.random import Rng
from flame_train.errors import ModelFileError
from flame_train.families import family_data
from flame_train.models.registry import FAMILIES, NOTHING_NAMED
from flame_train.run.sampling.draw import SAMPLE_NOISE
from flame_train.text_encoders.qwen3.tokenizer import bytes_alone
from flame_train.tools.sample import sample
from tests.scripts.accepting import SCRIPTS, accept
from tests.tools.test_sample import PLAIN

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")
transformers = pytest.importorskip("transformers")

PROMPT = "a red circle"


def random(module, seed, scale=0.05):
    """Fills a module of torch with random weights; `scale` is the deviation of matrices."""
    torch.manual_seed(seed)
    for p in module.parameters():
        p.data = torch.randn_like(p) * (scale if p.ndim > 1 else 0.2) + (1.0 if p.ndim == 1 else 0.0)
    return module.eval()


def qwen_tokenizer(folder, template):
    """A tokenizer of bytes with a chat template, read from a file in `folder`."""
    (folder / "tokenizer.json").write_text(bytes_alone())
    return transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), pad_token="<|endoftext|>", chat_template=template
    )


def flux_vae(scale=0.05):
    """A small autoencoder of Flux.1's kind with random weights, whose matrices have the deviation `scale`."""
    vae = diffusers.AutoencoderKL(
        down_block_types=["DownEncoderBlock2D"] * 4,
        up_block_types=["UpDecoderBlock2D"] * 4,
        block_out_channels=[8, 16, 16, 16],
        layers_per_block=1,
        latent_channels=16,
        norm_num_groups=4,
        scaling_factor=0.3611,
        shift_factor=0.1159,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )
    return random(vae, 0, scale)


def flux2_vae():
    """A small autoencoder of FLUX.2's kind with random weights and statistics."""
    vae = diffusers.AutoencoderKLFlux2(
        down_block_types=["DownEncoderBlock2D"] * 4,
        up_block_types=["UpDecoderBlock2D"] * 4,
        block_out_channels=[8, 16, 16, 16],
        layers_per_block=1,
        norm_num_groups=4,
    )
    vae.bn.running_mean = 0.3 * torch.randn(128, generator=torch.Generator().manual_seed(4))
    vae.bn.running_var = 0.5 + torch.rand(128, generator=torch.Generator().manual_seed(5))
    return random(vae, 0, 0.1)


def qwen3_vl(kind, layers, width=32, heads=4, **others):
    """A small Qwen3-VL of transformers' class `kind` with random weights; `others` are numbers of tokens."""
    text = {"vocab_size": 288, "hidden_size": width, "num_hidden_layers": layers, "intermediate_size": width * 3 // 2}
    text |= {"num_attention_heads": heads, "num_key_value_heads": heads // 2, "head_dim": 8}
    text |= {"rope_parameters": {"rope_type": "default", "rope_theta": 5e4, "mrope_section": [2, 1, 1]}}
    vision = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": width}
    vision |= {"deepstack_visual_indexes": [0], "num_position_embeddings": 16}
    return random(kind(transformers.Qwen3VLConfig(text_config=text, vision_config=vision, **others)), 1)


def places_of_pixels(tokenizer):
    """The numbers of the tokens in whose place the states of images and films stand."""
    return {f"{name}_token_id": tokenizer.convert_tokens_to_ids(f"<|{name}_pad|>") for name in ("image", "video")}


def opening(folder):
    return replace(NOTHING_NAMED, base=folder)


def read_alone(encoder, texts):
    """What the encoder makes of each text alone, in fp32, as a cache keeps it."""
    network, kept = encoder.load(device="cpu", dtype="fp32", precision="auto"), []
    for text in texts:
        row = encoder.inputs(text)
        with no_grad():
            made = encoder.encode(network, {name: tensor(a[None]) for name, a in row.items()})
        rows = [made[f"{name}_rows"].numpy().tolist() for name in encoder.paddings if f"{name}_rows" in made]
        assert all(own == [encoder.rows(row)] for own in rows)
        kept.append(encoder.without_padding(row, {name: made[name].numpy()[0] for name in encoder.paddings}))
    return kept


def training_loss(model, cond, latents, noise, levels, **how):
    """The loss of these latents at these levels of noise, in fp32; `how` the denoiser is loaded."""
    objective = model.objective(ModelSection(), LossSection(), "cpu")
    denoiser = model.load_denoiser(device="cpu", dtype="fp32", **how)
    x, n, t = tensor(latents), tensor(noise), tensor(levels)
    with no_grad():
        return objective.losses(denoiser.denoise(objective.noised(x, n, t), t, cond), x, n, t).mean().item()


def check_sample(folder, path, shape, drawn_by, guidance_scale=PLAIN["guidance_scale"], control=(), **settings):
    """From the same noise, guided, in fp32, `sample` generates the pipeline's image within rounding of 8 bits.

    `shape` is that of the latents, (H, W, C). `drawn_by` calls the pipeline. `control` are files of control images, and
    `settings` other arguments of `sample`.
    """
    chosen = PLAIN | settings
    noise = Rng(np, PLAIN["seed"], 0, np.zeros(1, np.int64)).normal(SAMPLE_NOISE, shape)
    images = drawn_by(
        prompt=PROMPT,
        num_inference_steps=PLAIN["steps"],
        guidance_scale=guidance_scale,
        height=chosen["height"],
        width=chosen["width"],
        latents=torch.from_numpy(np.array(noise, np.float32)).permute(0, 3, 1, 2),
        **({"image": [Image.open(file) for file in control]} if control else {}),
    ).images
    expected = np.asarray(images[0]).astype(float)
    sample(str(folder), [PROMPT], path, control=[str(file) for file in control], **chosen)
    with Image.open(path) as image:
        found = np.asarray(image).astype(float)
    assert expected.std() > 5
    assert np.abs(found - expected).max() <= 1
    return found


def control_images(folder, *sizes):
    """Files of noise, of these sizes (width, height)."""
    files = []
    for number, (width, height) in enumerate(sizes):
        pixels = np.random.default_rng(number).integers(0, 256, (height, width, 3), np.uint8)
        files.append(folder / f"control-{number}.png")
        Image.fromarray(pixels).save(files[-1])
    return files


def check_refused_config(family, folder, part, change, words):
    """A folder is refused where the `config.json` of a part, or the JSON file of this name, says something else."""
    path = folder / part if part.endswith(".json") else folder / part / "config.json"
    whole = path.read_text()
    path.write_text(json.dumps(json.loads(whole) | change))
    try:
        with pytest.raises(ModelFileError, match=words):
            FAMILIES[family].open(opening(folder))
    finally:
        path.write_text(whole)


def without_torchvision(family):
    """What is told of a family, but that its pipeline needs torchvision."""
    told = family_data(family)
    return {**told, "diffusers": {**told["diffusers"], "needs_torchvision": False}}


def check_accepted(patch, folder, out, layers, *settings):
    """`accept.py` passes a folder: its image, and that with the LoRA it trained, beside the pipeline's.

    `layers` of the pipeline take the LoRA. What needs torchvision plays no part in these small models.
    """
    patch.syspath_prepend(str(SCRIPTS))
    patch.setattr("accept_diffusers.family_data", without_torchvision)
    patch.setattr("accept_diffusers.NEEDS_FILMS", ())
    code, report = accept(patch, folder, out, *settings)
    assert code == 0, report
    assert {part["result"] for part in report["parts"].values()} == {"passed"}
    plain, with_lora = (part for name, part in report["parts"].items() if name.endswith("beside diffusers'"))
    assert max(plain["apart, of 255"], with_lora["apart, of 255"]) < 1
    assert with_lora["layers with the LoRA"] == layers
