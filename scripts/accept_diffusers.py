"""One image from a diffusers folder by diffusers' own pipeline, from the noise that `flame-train sample` begins with.

    python scripts/accept_diffusers.py FOLDER OUTPUT.png --prompt "a cat" --steps 8 --guidance 5 [--lora FILE]

Prints, as JSON, which pipeline drew it, and how many layers took the LoRA. `scripts/accept.py` runs it in a process of
its own, so that two programs never share a card. No network is asked: FOLDER is on this machine.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from flame_train.config.schema import ModelSection
from flame_train.engine.random import Rng
from flame_train.families import family_data
from flame_train.models.registry import NOTHING_NAMED, family_of
from flame_train.models.sdxl.names_unet import stated_prediction
from flame_train.run.sampling.draw import SAMPLE_NOISE

NEEDED = ("torch", "diffusers", "transformers", "peft")
INDICES = ("model_index.json", "modular_model_index.json")
"""What a diffusers folder has one of; the latter where a pipeline is made of blocks."""


NEEDS_FILMS = ("QwenImageEditPipeline", "QwenImageEditPlusPipeline")
"""Pipelines whose processor reads films too, for which it needs torchvision."""


def only_edits(folder: Path) -> bool:
    """Says whether the folder's pipeline is Qwen-Image-Edit's, which draws nothing without control images."""
    return pipeline_named(folder).startswith("QwenImageEdit")


def pipeline_named(folder: Path) -> str:
    """Returns the pipeline that a folder names; empty if it names none."""
    file = folder / INDICES[0]
    return str(json.loads(file.read_text()).get("_class_name", "")) if file.is_file() else ""


def missing(family: str, folder: Path) -> list[str]:
    """The libraries that are not installed, of those that the family's pipeline needs, or that of this folder."""
    films = family_data(family)["diffusers"].get("needs_torchvision") or pipeline_named(folder) in NEEDS_FILMS
    needed = (*NEEDED, *(("torchvision",) if films else ()))
    return [name for name in needed if importlib.util.find_spec(name) is None]


def noise(folder: Path, size: int, seed: int) -> tuple[str, int, np.ndarray[Any, Any]]:
    """The family, the tokens of its T5 (0: it has none), and the first noise (1, C, h, w), or (1, C, 1, h, w)."""
    family = family_of(folder)
    predicts = ModelSection.model_validate({"prediction": stated_prediction(folder) or "epsilon"})
    model = family.open(replace(NOTHING_NAMED, base=folder, model=predicts))
    drawn = Rng(np, seed, 0, np.zeros(1, np.int64)).normal(SAMPLE_NOISE, model.vae.latent_shape((size, size)))
    tokens = {name: shape[0] for name, shape in model.caption_shapes().items()}.get("t5", 0)
    return family.name, tokens, np.ascontiguousarray(np.moveaxis(np.asarray(drawn, np.float32), -1, 1))


def draw(args: argparse.Namespace) -> dict[str, Any]:
    """Writes the image; what is told of it."""
    import diffusers
    import torch

    name, tokens, first = noise(args.folder, args.size, args.seed)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[args.precision]
    modular = not (args.folder / INDICES[0]).is_file()
    if modular:
        pipeline = of_blocks(diffusers, args.folder, dtype)
    else:
        pipeline = diffusers.DiffusionPipeline.from_pretrained(args.folder, torch_dtype=dtype, local_files_only=True)
    pipeline.set_progress_bar_config(disable=True)
    told: dict[str, Any] = {"pipeline": type(pipeline).__name__, "diffusers": diffusers.__version__}
    if args.lora:
        pipeline.load_lora_weights(args.lora.parent, weight_name=args.lora.name)
        told["layers with the LoRA"] = adapted(pipeline)
    if args.device != "cpu" and modular:
        pipeline.to(args.device)
    elif args.device != "cpu":
        pipeline.enable_model_cpu_offload(device=args.device)
    if name == "chroma":
        mask_by_booleans(pipeline)
    if only_edits(args.folder):
        tell_images(pipeline)
    latents = torch.from_numpy(first).to(dtype)
    known = family_data(name)["diffusers"]
    if known.get("latents_as_tokens"):
        latents = pipeline._pack_latents(latents, *latents.shape)
    if name == "anima":  # whose latents are of films
        latents = latents.unsqueeze(2)
    more: dict[str, Any] = {"max_sequence_length": tokens} if tokens and not modular else {}
    if modular:
        if "guider" in pipeline.components:
            pipeline.update_components(guider=diffusers.ClassifierFreeGuidance(guidance_scale=args.guidance))
        more["output"] = "images"
    elif name.startswith("qwenimage"):  # which guides only with a negative prompt
        more |= {"true_cfg_scale": args.guidance} | ({"negative_prompt": ""} if args.guidance > 1.0 else {})
        if only_edits(args.folder):
            more["negative_prompt"] = " "
    else:
        more["guidance_scale"] = args.guidance + known.get("guidance_offset", 0.0)
    if film := name == "wan":
        more |= {"num_frames": 1, "output_type": "pil"}
    if args.control:
        more["image"] = [Image.open(file).convert("RGB") for file in args.control]
    made = pipeline(
        prompt=args.prompt,
        num_inference_steps=args.steps,
        height=args.size,
        width=args.size,
        latents=latents,
        **more,
    )
    (image,) = made if modular else made.frames[0] if film else made.images
    image.convert("RGB").save(args.output)  # Qwen-Image 2.1's have an alpha channel
    return told


def of_blocks(diffusers: Any, folder: Path, dtype: Any) -> Any:
    """A pipeline of the blocks that a folder names, with the folder's networks; prompts are read as they are."""
    named = json.loads((folder / INDICES[1]).read_text())["_blocks_class_name"]
    blocks = getattr(diffusers, named)()
    blocks.sub_blocks.pop("prompt_upsampler", None)
    pipeline = blocks.init_pipeline(str(folder))
    pipeline.load_components(pretrained_model_name_or_path=str(folder), torch_dtype=dtype, local_files_only=True)
    return pipeline


def mask_by_booleans(pipeline: Any) -> None:
    """Chroma's pipeline makes its mask of numbers, which attention adds: nothing is masked (diffusers issue 12116)."""
    usual = pipeline._get_t5_prompt_embeds

    def masked(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        states, mask = usual(*args, **kwargs)
        return states, mask.bool()

    pipeline._get_t5_prompt_embeds = masked


def tell_images(pipeline: Any) -> None:
    """Qwen-Image-Edit's pipelines do not say which tokens are of images, and places are then wrong (issue 14194)."""
    usual = pipeline.text_encoder.forward
    place = pipeline.tokenizer.convert_tokens_to_ids("<|image_pad|>")

    def told(input_ids: Any, **kwargs: Any) -> Any:
        return usual(input_ids=input_ids, **{"mm_token_type_ids": (input_ids == place).int(), **kwargs})

    pipeline.text_encoder.forward = told


def adapted(pipeline: Any) -> int:
    """The layers of all its networks that PEFT has put a LoRA into."""
    modules = (m for network in pipeline.components.values() if hasattr(network, "modules") for m in network.modules())
    return sum(hasattr(m, "lora_A") and len(m.lora_A) > 0 for m in modules)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--prompt", required=True)
    parser.add_argument("--size", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--guidance", type=float, required=True)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--precision", choices=("fp32", "bf16", "fp16"), default="bf16")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--lora", type=Path)
    parser.add_argument("--control", type=Path, action="append", default=[])
    args = parser.parse_args(argv)
    os.environ["HF_HUB_OFFLINE"] = "1"
    print(json.dumps(draw(args)))


if __name__ == "__main__":
    main()
