"""`flame-train sample`: images from a base model, with or without a LoRA."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from flame_train.adapters.attach import require_fit
from flame_train.adapters.factors import LoraState
from flame_train.adapters.together import attach_sum
from flame_train.config.load import from_options, with_option_names
from flame_train.config.prompts import unread
from flame_train.data.clip_files import ending_of, write_sample
from flame_train.data.grid import grid
from flame_train.data.samples import EncoderInput
from flame_train.data.views import ViewedImage
from flame_train.diffusion.samplers import SAMPLERS
from flame_train.disk.preflight import refuse_place
from flame_train.engine import nn, no_grad
from flame_train.engine.backend import check_formats
from flame_train.errors import ConfigError, ModelFileError, counted, out_of_memory
from flame_train.families import usual_keys
from flame_train.io.hub import fetching, path_of_setting, resolve_checkpoint
from flame_train.io.model_search import searching
from flame_train.models.common.model import Example, Model
from flame_train.models.registry import Opening, family_of
from flame_train.networks.files.identify import lora_could_be
from flame_train.run.check.adapted_layers import read_lora
from flame_train.run.check.check_run import storage_of
from flame_train.run.encode.encoders import load_encoders
from flame_train.run.plan.encoding import Encoding
from flame_train.run.sampling.draw import encoded, generate_image, sampler_spec
from flame_train.run.sampling.requests import (
    Request,
    check_sampling,
    read_requests,
    requests,
    texts_of,
    with_defaults,
    with_prompts_of_file,
)
from flame_train.text_encoders.clip.encoder import ClipKeys
from flame_train.text_encoders.encoder import too_long
from flame_train.tools.lora_files import refuse_non_finite, require_lora
from flame_train.training.session import StopRequest
from flame_train.version import __version__

_LOG = logging.getLogger(__name__)

_File = tuple[LoraState, float]
"""A LoRA by component, and its strength."""


@out_of_memory("try one --prompt at a time, a smaller --width and --height, or --quantize fp8")
@fetching()
def sample(
    checkpoint: str,
    prompts: Sequence[str | Mapping[str, Any]],
    output: Path,
    *,
    loras: Sequence[tuple[Path, float]] = (),
    negative: str,
    steps: int,
    guidance_scale: float,
    sampler: Any,
    spacing: Any = "auto",
    prediction: Any,
    precision: Any,
    seed: int,
    width: int,
    height: int,
    resolution: int = 0,
    frames: int = 1,
    fps: int = 0,
    device: str,
    force: bool = False,
    quantize: str = "off",
    arithmetic: str = "bf16",
    vae: str = "",
    models: Sequence[str] = (),
    text_encoders: Mapping[str, Any] | None = None,
    prompt_file: str = "",
    control: Sequence[str] = (),
    kontext: bool = False,
    qwen_edit: str = "auto",
    skip_unknown: bool = False,
) -> dict[str, Any]:
    """Samples an image for each prompt; several are written one by one, and side by side as `output`.

    Image i starts from noise number seed + i. So an image with a LoRA can be compared with one without it. Each single
    image says how it was made; see `parameters`.

    Args:
        checkpoint: the base model's file, folder or hub id.
        prompts: the prompts, in order, as strings or as tables of `[[sample.prompts]]`.
        output: the PNG of one prompt, or of all, of clips a WebP or MP4; the single ones of several are NAME-1.png and
            so on beside it.
        loras: the LoRAs' files, in any naming, for the text encoders too, each with the factor of its update.
        negative: the negative prompt.
        steps, guidance_scale: of the sampler; 0: the model's own.
        sampler, spacing: the name of the sampler, and of its timesteps' spacing.
        prediction: as `model.prediction` in a config; None: its default.
        precision: dtype of the networks.
        width, height: size of an image, in pixels; 0: that of the first control image, or the model's usual one.
        resolution: side of the square whose area control images have, and of an image without sizes; 0: the model's.
        frames: of a sample; more than one make a clip.
        fps: frames a second of a clip; 0: the model's own.
        quantize, arithmetic: as `model.quantize` and `model.arithmetic` in a config.
        vae: another autoencoder's file; "": the checkpoint's own.
        models: folders of models, as `model.search` in a config.
        text_encoders: keys of that section of a config.
        prompt_file: a file with further prompts; "": none.
        control: the files of control images of every prompt that names none of its own.
        kontext, qwen_edit: as these keys of `[model]` in a config.
        skip_unknown: whether parts of a LoRA of no module are left out.

    Returns:
        The prompts, the settings and the paths of the PNGs.

    Raises:
        ConfigError: impossible sizes, or settings that do not fit the model.
        ModelFileError: a model of an unknown family, or a LoRA of another one.
        NonFiniteError: the result holds NaN or infinity.
        OutputError: a PNG exists and `force` is false.
    """
    for path, strength in loras:
        if not math.isfinite(strength):
            raise ConfigError(f"strength must be a finite number, got {strength} for {path}")
    config = from_options(
        model={
            "checkpoint": checkpoint,
            **({"prediction": prediction} if prediction else {}),
            "quantize": quantize,
            "arithmetic": arithmetic,
            "vae": vae,
            "search": tuple(models),
            "kontext": kontext,
            "qwen_edit": qwen_edit,
        },
        text_encoders=dict(text_encoders or {}),
        train={"precision": precision},
        sample={
            "prompts": tuple(prompts),
            "prompt_file": prompt_file,
            "negative": negative,
            "steps": steps,
            "guidance_scale": guidance_scale,
            "sampler": sampler,
            "spacing": spacing,
            "seed": seed,
            "width": width,
            "height": height,
            "frames": frames,
            "fps": fps,
            "control": tuple(control),
        },
    )
    # a missing GPU, or one without the number format, is an error before any file is read
    check_formats(device, {"--precision": precision, "--text-precision": config.text_encoders.precision})
    if storage := storage_of(quantize, arithmetic):
        storage.check(device, precision)
    with with_option_names():
        section = with_prompts_of_file(config.sample)
    if not section.prompts:
        raise ConfigError("sample: expected at least one --prompt or --prompt-file, got none")
    singles = _single_files(output, len(section.prompts))
    ending = ending_of(output, any((prompt.frames or section.frames) > 1 for prompt in section.prompts))
    for file in (output, *singles):
        refuse_place(file, ending, force)
    with with_option_names(), searching(config.model.search) as search:
        base = resolve_checkpoint(checkpoint)
        family = family_of(base)
        family.refuse_unsupported(config)
        model = family.open(Opening(base, config.model, config.text_encoders, config.data.max_tokens))
        for encoder in model.text:
            _ = encoder.vocabulary  # which may be looked for in these folders too
        section = with_defaults(section, model)
        side = resolution or usual_keys(family.name).get("data.resolution", config.data.resolution)
        check_sampling(requests(section, side, model), config.model, config.loss, model)
        read_images = read_requests(section, side, model)
        check_sampling(read_images, config.model, config.loss, model)
    if drawn := unread(request.text for request in read_images):
        _LOG.warning("%s", drawn)
    files = [(_factors(path_of_setting(path), model, skip_unknown), strength) for path, strength in loras]
    model = model.with_images() if any(request.images for request in read_images) else model
    formats = config.model.vae_precision, precision, config.text_encoders.precision
    text = Encoding(model.vae, model.text, *formats, Path())
    with StopRequest() as stop:
        with with_option_names():
            examples = _conditioning(text, read_images, device, files, stop)
        denoiser = model.load_denoiser(device=device, dtype=precision, storage=storage)
        decoder = model.vae.load(config.model.vae_precision, device, config.model.vae_tile)
        images = []
        for request in read_images:
            how = sampler_spec(request, config.model, config.loss, model, device=device, dtype=precision)
            captions = partial(_of_prompt, examples[request.strength], text, request.images)
            with _adapted(denoiser.component, denoiser.network, files, request.strength):
                controls = encoded(request.images, model.vae, decoder)
                images.append(generate_image(request, how, captions, denoiser, decoder, stop, controls))
    skip = ClipKeys.of(config.text_encoders).clip_skip
    texts = [parameters_of(request, checkpoint, loras, skip) for request in read_images]
    for single, image, parameters in zip(singles, images, texts, strict=False):
        write_sample(single, image, section.fps, parameters)
    write_sample(output, grid(images), section.fps, texts[0] if len(images) == 1 else "")
    return {
        "image": str(output),
        "images": [str(single) for single in singles] or [str(output)],
        "prompts": [request.text for request in read_images],
        "checkpoint": checkpoint,
        "found": [one.as_dict() for one in search.found],
        "loras": [{"lora": str(path), "strength": strength} for path, strength in loras],
        **_settings(read_images[0]),
        "precision": precision,
        "quantize": quantize,
        "arithmetic": arithmetic,
        **({"clip_skip": skip} if skip != 1 else {}),
        "drawn": [
            {"image": str(file), "prompt": request.text, **_settings(request)}
            for file, request in zip(singles or [output], read_images, strict=True)
        ],
    }


def _settings(request: Request) -> dict[str, Any]:
    """Lists what an image was drawn with, a prompt's flags included."""
    return {
        "width": request.size[1],
        "height": request.size[0],
        "steps": request.steps,
        "guidance_scale": request.guidance_scale,
        "sampler": request.sampler,
        "seed": request.seed,
        **({"frames": request.frames, "fps": request.fps} if request.frames > 1 else {}),
        "strength": request.strength,
        **({"spacing": request.spacing} if request.spacing else {}),
        **({"negative": request.negative} if request.negative else {}),
    }


def _single_files(output: Path, count: int) -> list[Path]:
    """Returns the files of the single images, if there are several."""
    return [output.with_stem(f"{output.stem}-{i}") for i in range(1, count + 1)] if count > 1 else []


def _factors(lora: Path, model: Model, skip_unknown: bool) -> LoraState:
    """Returns the LoRA's matrices by component. Raises ModelFileError for a file that is no LoRA of this model."""
    identity = require_lora(lora)
    if not lora_could_be(identity.family, model.name):
        raise ModelFileError(f"{lora}: expected a LoRA for {model.title}, but this is: {identity.detail}")
    state = read_lora(lora, model, skip_unknown)
    refuse_non_finite(lora, state)
    for part in (model.denoiser, *(encoder.part for encoder in model.text)):
        try:
            require_fit(part.network, state.get(part.component, {}))
        except ModelFileError as fault:
            raise ModelFileError(f"{lora}: {fault}") from fault
    return state


def _conditioning(
    encoding: Encoding,
    images: Sequence[Request],
    device: str,
    files: Sequence[_File],
    stop: StopRequest,
) -> dict[float, dict[EncoderInput, Example]]:
    """Encodes every prompt and negative prompt; unloads the text encoders afterwards."""
    examples = {}
    with no_grad():
        encoders = load_encoders(encoding, device)
        for strength in dict.fromkeys(request.strength for request in images):
            stop.check("while reading the prompts")
            of_strength = [request for request in images if request.strength == strength]
            read = dict.fromkeys(
                encoding.reading(text, request.images) for request in of_strength for text in texts_of([request])
            )
            with ExitStack() as adapted:
                for component, network in encoders.networks.items():
                    adapted.enter_context(_adapted(component, network, files, strength))
                examples[strength] = dict(zip(read, encoders.captions([*read]), strict=True))
    inputs = [encoding.reading(request.text, request.images) for request in images]
    cut, longest = too_long(encoding.text, inputs)
    if cut and longest is not None:
        are = counted(cut, "prompt is", "prompts are")
        _LOG.warning("%s longer than %d tokens; the rest is not seen", are, longest.limit[1])
    return examples


def _of_prompt(
    examples: Mapping[EncoderInput, Example], encoding: Encoding, images: Sequence[ViewedImage], text: str
) -> Example:
    return examples[encoding.reading(text, images)]


def _adapted(
    component: str, network: nn.Module, files: Sequence[_File], strength: float
) -> AbstractContextManager[None]:
    """Returns a context in which a network has its part of every LoRA, `strength` times as strong as asked for."""
    return attach_sum(
        network, [(state[component], file_strength * strength) for state, file_strength in files if component in state]
    )


def parameters_of(request: Request, checkpoint: str, loras: Sequence[tuple[Path, float]], clip_skip: int = 1) -> str:
    """Returns the prompt with each LoRA as `<lora:name:strength>`, the negative prompt, and a line of settings.

    `loras` are the files with their strengths.
    """
    tags = [f"<lora:{path.stem}:{strength * request.strength:g}>" for path, strength in loras]
    lines = [" ".join([request.text, *tags])]
    if request.negative:
        lines.append(f"Negative prompt: {request.negative}")
    height, width = request.size
    settings = {
        "Steps": str(request.steps),
        "Sampler": SAMPLERS[request.sampler].usual_name,
        "CFG scale": f"{request.guidance_scale:g}",
        "Seed": str(request.seed),
        "Size": f"{width}x{height}",
        "Model": _quoted(Path(checkpoint).stem),
        **({"Clip skip": str(clip_skip)} if clip_skip != 1 else {}),
        "Version": _quoted(f"flame-train {__version__}"),
    }
    lines.append(", ".join(f"{name}: {value}" for name, value in settings.items()))
    return "\n".join(lines)


def _quoted(value: str) -> str:
    """Quotes a value that holds what separates values."""
    return '"' + value.replace('"', '\\"') + '"' if any(c in value for c in ',:\n"') else value
