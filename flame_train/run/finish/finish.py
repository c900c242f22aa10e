"""Stage 5, finish: writes the LoRA files with their metadata, and reports all paths."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from flame_train.adapters.attach import Attached
from flame_train.config.keys import keys
from flame_train.config.own_code import used_code
from flame_train.config.prompts import Prompt
from flame_train.config.render import decisive, flat
from flame_train.config.schema import Config
from flame_train.data.samples import Samples
from flame_train.diffusion.samplers import SAMPLERS
from flame_train.diffusion.weightings import WEIGHTINGS
from flame_train.engine.dtype import as_dtype
from flame_train.families import family_data
from flame_train.io.runfolder import RunFolder
from flame_train.models.common.model import Model
from flame_train.run.finish.sd_scripts_metadata import as_sd_scripts
from flame_train.text_encoders.clip.encoder import ClipKeys
from flame_train.training.log import REMEMBERED, Meter
from flame_train.training.result import LoraWriter, formats, standing_of
from flame_train.training.validation import EarlyStopping
from flame_train.version import __version__

_FOLDERS: Final = {
    "ComfyUI": "ComfyUI/models/loras, and load it with a Load LoRA node",
    "Forge": "stable-diffusion-webui-forge/models/Lora",
}
_OF_MODEL: Final = ("prediction", "quantize", "arithmetic", "kontext", "qwen_edit")
_OF_TRAINING: Final = (".train", ".lr", ".rank", ".alpha", ".targets", ".cache", ".precision", "_dropout")
"""How those keys of `[text_encoders]` end that say nothing about a finished LoRA's image, or have another name."""


def lora_writer(config: Config, model: Model, attached: Attached, samples: Samples, batches: int) -> LoraWriter:
    """Returns the writer of the run's LoRA files. Equal runs give equal bytes: no time, no path."""
    names, side, out = model.lora_names, config.data.resolution, config.output
    described = {"resolution": f"{side}x{side}"}
    if names.several_predictions:
        described["prediction_type"] = config.model.prediction
    if (skipped := ClipKeys.of(config.text_encoders).clip_skip) != 1:  # by value: a run's own config has every key
        described["encoder_layer"] = str(skipped)
    trigger = out.trigger or config.captions.trigger
    described |= {k: v for k, v in (("author", out.author), ("trigger_phrase", trigger)) if v}
    title = out.title or out.name or Path(out.dir).name or "lora"
    settings = json.dumps(_without_places(config), sort_keys=True, default=list)
    return LoraWriter(
        attached,
        lambda layer: model.place(layer, config.text_encoders.train),
        names,
        title=title,
        described=described,
        metadata={
            **as_sd_scripts(config, samples, batches, title),
            "flame_train_version": __version__,
            "flame_train_config": settings,
            "flame_train_config_hash": hashlib.sha256(settings.encode()).hexdigest(),
            "flame_train_dataset_hash": dataset_hash(samples),
            **({"flame_train_code": json.dumps(code)} if (code := used_code(config)) else {}),
        },
        dtype=as_dtype(out.precision),
    )


def dataset_hash(samples: Samples) -> str:
    """Hashes every image's bytes and its caption, in their order; not where they lie."""
    digest = hashlib.sha256()
    for item in (row.item for row in samples.rows):
        digest.update(item.sha256.encode())
        for caption in item.captions:
            digest.update(f" {len(caption)} ".encode() + caption.encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def _without_places(config: Config) -> dict[str, Any]:
    """Gives the settings the weights depend on, files and folders by their last name alone."""
    return {
        path: keys()[path].with_places(value, lambda place: Path(place).name)
        for path, value in decisive(config).items()
    }


def report(
    folder: RunFolder, config: Config, family: str, last: Mapping[str, Any], device: str, stopped: bool = False
) -> dict[str, Any]:
    """Returns where everything is and what to do next: paths, figures and sentences.

    Args:
        last: the figures of the last step.
        stopped: whether the run ended before its last step: the LoRA is that of its newest checkpoint.
    """
    lora = folder.lora
    if stopped:
        lora = folder.checkpoints / f"step-{folder.step:06d}" / folder.lora_of(folder.step)
    beside = () if stopped else formats(config.output.format)[1:]
    return {
        "lora": str(lora),
        **{f"lora_{form}": str(folder.lora_beside(form)) for form in beside},
        **({"stopped": True} if stopped else {}),
        "steps": folder.step,
        "mean_loss": Meter(folder.losses(REMEMBERED)).loss,
        "last_step_loss": last.get("loss"),
        "loss_weighting": WEIGHTINGS.chosen(config.loss).name,
        "log": str(folder.folder / "log.jsonl"),
        "samples": str(folder.samples) if any(folder.samples.glob("step-*")) else None,
        "checkpoints": str(folder.checkpoints),
        **_best(folder),
        "next": _next(config, family, lora, device),
    }


def for_reader(result: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the report of a finished run with figures of four digits, each loss with what it is of."""
    rows = dict(result)
    weighting = rows.pop("loss_weighting", "none")
    weighted = "" if weighting == "none" else f", weighted by {weighting}: it compares with no other loss"
    for name, what in {"mean_loss": " over about the last twenty steps", "last_step_loss": ""}.items():
        if rows.get(name) is not None:
            rows[name] = f"{rows[name]:.4g}{what}{weighted}"
    if best := rows.get("best"):
        rows["best"] = f"step {best['step']}, validation loss {best['validation_loss']:.4g}: {best['lora']}"
    return rows


def _next(config: Config, family: str, lora: Path, device: str) -> list[str]:
    """Lists what somebody does with a new LoRA, in the programs that load it."""
    model, sample = config.model, config.sample
    first, side = (sample.prompts or (Prompt(),))[0], config.data.resolution
    negative = sample.negative if first.negative is None else first.negative
    control = sample.control if first.control is None else first.control
    sampler, values = first.sampler or SAMPLERS.chosen(sample).name, flat(config)
    options: dict[str, object] = {
        "-m": model.checkpoint,
        "--lora": lora,
        "--models": model.search[0] if len(model.search) == 1 else "",
        **{o: value for o, p in sample_options().items() if (value := values.get(p)) != keys()[p].default},
        "--resolution": side if control else 0,  # the first control image gives the size, and all are seen at its area
        "--width": first.width or sample.width or (0 if control else side),
        "--height": first.height or sample.height or (0 if control else side),
        **({"--frames": frames, "--fps": sample.fps} if (frames := first.frames or sample.frames) > 1 else {}),
        "--steps": first.steps or sample.steps,
        "--guidance-scale": first.guidance_scale or sample.guidance_scale,
        "--sampler": "" if sampler == "euler" else sampler,
        "--seed": str(sample.seed if first.seed is None else first.seed),
        "--negative": negative,
        "--control": control,
        "--device": "" if device == "cuda" else device,
        "-p": first.text or config.output.trigger or config.captions.trigger or "a prompt",
    }
    words = [word for name, value in options.items() if value for word in _words(name, value)]
    programs = family_data(family).get("loaded_by", ("ComfyUI",))
    return [
        *(f"{program}: copy {lora.name} into {_FOLDERS[program]}" for program in programs),
        f"draw with it: {shlex.join(['flame-train', 'sample', *words])}",
    ]


def _words(option: str, value: object) -> list[str]:
    """Writes an option once for each of several values, and alone if it is a switch."""
    several = value if isinstance(value, tuple) else (value,)
    return [option] if value is True else [word for one in several for word in (option, str(one))]


def sample_options() -> dict[str, str]:
    """Returns the options of `sample` that have the meaning and the default of a key, with that key's path."""
    own = [name for name in keys() if name.startswith("text_encoders.") and not name.endswith(_OF_TRAINING)]
    same = ("model.vae", *own, *(f"model.{name}" for name in _OF_MODEL), "sample.spacing")
    options = {f"--{path.partition('.')[2].replace('_', '-')}": path for path in same}
    return options | {"--precision": "train.precision", "--text-precision": "text_encoders.precision"}


def _best(folder: RunFolder) -> dict[str, Any]:
    """Gives the step of the lowest validation loss, and the LoRA of that step; nothing of a run without validations."""
    checkpoint = folder.inspect(leader=True)
    standing = EarlyStopping.read(standing_of(checkpoint) if checkpoint is not None else None)
    if standing.loss is None:
        return {}
    return {"best": {"step": standing.step, "validation_loss": standing.loss, "lora": str(folder.best)}}
