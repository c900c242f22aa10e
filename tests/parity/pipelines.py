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
