"""`flame-train sample`: pictures from a base model, with or without a LoRA."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flame_train.adapters.factors import LoraState
from flame_train.adapters.formats import from_file
from flame_train.adapters.lora import attach_factors
from flame_train.config.load import from_options, told_by_option
from flame_train.config.schema import Config
from flame_train.engine import nn, no_grad
from flame_train.engine.backend import get_backend
from flame_train.errors import ConfigError, ModelFileError, out_of_memory
from flame_train.io.files import refuse_place
from flame_train.io.hub import fetching
from flame_train.models.identify import FAMILY_NAMES, could_be
from flame_train.recipes import family_of
from flame_train.recipes.pictures import as_usual, check_sampling, drawing, picture_size, size_conditioning
from flame_train.tools.families import refuse_non_finite, require_lora
from flame_train.training.family import Encoders, Example, Family, refuse_foreign
from flame_train.training.preview import draw, grid, write_png
from flame_train.training.stop import StopRequest

_LOG = logging.getLogger(__name__)


@out_of_memory("try one --prompt at a time, a smaller --width and --height, or --fp8 weights")
@fetching()
def sample(
    checkpoint: str, prompts: Sequence[str], output: Path, *, lora: Path | None, strength: float, negative: str,
    steps: int, guidance: float, sampler: Any, prediction: Any, precision: Any, seed: int, width: int, height: int,
    device: str, force: bool = False, fp8: nn.Fp8 = "off", networks: Mapping[str, Any] | None = None,
    t5_tokens: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """Draws a picture for each prompt and writes them as one PNG. Returns what was drawn, from what, and where.

    Picture i starts from noise number seed + i, so a picture with a LoRA stands beside one without it. The LoRA may
    be in any dialect and may sit on the text encoders too. `networks` are further keys of a config's `model`: the files
    of what the checkpoint does not hold. Raises ConfigError for impossible sizes, ModelFileError
    for a model of an unknown family or a LoRA that is not one of it, NonFiniteError rather than draw NaN, OutputError
    where the PNG exists and `force` does not say to overwrite it, and what loading and writing raise.
    """
    refuse_place(output, ".png", force)
    if not math.isfinite(strength):
        raise ConfigError(f"strength must be a finite number, got {strength}")
    config = from_options(
        model={"checkpoint": checkpoint, "prediction": prediction, "fp8": fp8, **(networks or {})},
        data={"t5_tokens": t5_tokens},
        train={"precision": precision},
        sample={
            "prompts": tuple(prompts), "negative": negative, "steps": steps, "guidance": guidance, "sampler": sampler,
            "seed": seed, "width": width, "height": height,
        },
    )  # fmt: skip
    get_backend(device)  # a missing GPU is told before anything is read
    nn.check_fp8(fp8, device, precision)
    if not prompts:
        raise ConfigError("sample: expected at least one --prompt, got none")
    family = family_of(checkpoint)
    with told_by_option():
        refuse_foreign(family, config)
        facts, config = family.check(config), as_usual(config, family)
        check_sampling(config, family, facts)
    size = picture_size(config, facts)
    factors = _factors(lora, family, config) if lora is not None else {}
    with StopRequest() as stop:
        examples = _conditioning(config, family, size_conditioning(family, size), device, factors, strength, stop)
        denoiser = family.denoiser(config, device)
        if denoiser.component in factors:
            attach_factors(denoiser.model, factors[denoiser.component], strength)
        wanted = [examples[prompt] for prompt in prompts]
        how, decode = drawing(config, family, size, device), family.decoder(config, device)
        pictures = draw(how, denoiser, decode, wanted, examples[negative], stop)
    write_png(output, grid(pictures))
    return {
        "picture": str(output), "prompts": list(prompts), "checkpoint": checkpoint, "lora": str(lora) if lora else None,
        "strength": strength if lora else None, "width": width, "height": height,
        "steps": config.sample.steps, "guidance": config.sample.guidance, "seed": seed, "precision": precision,
        "fp8": fp8,
    }  # fmt: skip


def _factors(lora: Path, family: Family, config: Config) -> LoraState:
    """The LoRA's matrices by component. Raises ModelFileError for what is no LoRA of this family."""
    identity = require_lora(lora)
    if not could_be(identity.family, family.name):
        raise ModelFileError(f"{lora}: expected a LoRA for {FAMILY_NAMES[family.name]}, but this is: {identity.detail}")
    state = from_file(lora, family.lora_names(config)).state
    refuse_non_finite(lora, state)
    return state


def _conditioning(
    config: Config, family: Family, sizes: Example, device: str, factors: LoraState, strength: float, stop: StopRequest
) -> dict[str, Example]:
    """The arrays of every prompt and of the negative one; the text encoders are gone again afterwards."""
    with no_grad(), family.encoders(config, device, ["caption"]) as encoders:
        _adapt(encoders, factors, strength)
        texts = dict.fromkeys((*config.sample.prompts, config.sample.negative))
        examples: dict[str, Example] = {}
        for text in texts:
            stop.check("while reading the prompts")
            examples[text] = encoders.caption(text) | sizes
    cut = family.truncated(config, config.sample.prompts)
    if cut:
        _, tokens = family.caption_limit(config)
        _LOG.warning("%d prompt(s) are longer than %d tokens; the rest is not seen", cut, tokens)
    return examples


def _adapt(encoders: Encoders, factors: LoraState, strength: float) -> None:
    for component, network in encoders.networks.items():
        if component in factors:
            attach_factors(network, factors[component], strength)
