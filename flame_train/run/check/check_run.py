"""Stage 1, check: a config file to settings and an opened model, or one report of everything wrong.

This stage alone opens model files, for their headers; later stages hold the result.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from flame_train.adapters.kinds import Factors
from flame_train.adapters.targets import LayerSettings
from flame_train.config.located import ConfigWithSource, ErrorCollector
from flame_train.config.repeated import SampleSection
from flame_train.config.schema import Config, DataSection, LossSection
from flame_train.data.caption_variants import CaptionKeys
from flame_train.data.sets import SetKeys, image_sets
from flame_train.diffusion.samplers import SAMPLERS
from flame_train.diffusion.timestep_sampling import TIMESTEP_SAMPLINGS
from flame_train.diffusion.weightings import WEIGHTINGS
from flame_train.disk.system import is_device_name, path_limit
from flame_train.engine import nn
from flame_train.errors import ConfigError, OutputError
from flame_train.io.addresses import is_hub_name
from flame_train.io.commit import count
from flame_train.io.hub import resolve_checkpoint
from flame_train.io.model_search import Found, current_search, searching
from flame_train.models.common.model import Model
from flame_train.models.registry import Family, Opening, family_of
from flame_train.run.check.adapted_layers import adapted_layers, blocks_named, blocks_streamed, initial_lora, text_share
from flame_train.run.sampling.requests import check_sampling, requests, with_defaults, with_prompts_of_file
from flame_train.text_encoders.encoder import TextEncoder

_FILE_NAME: Final = re.compile(r'(?![. ])(?!.*\.safetensors$)[^\x00-\x1f/\\:*?"<>|]*[^\x00-\x1f/\\:*?"<>|. ]')
_LONGEST_NAME: Final = 200
_INSIDE: Final = 90
"""Characters that a path in a run folder has beside the folder's and the LoRA's name, temporary ones included."""


@dataclass(frozen=True, slots=True, eq=False)
class Checked:
    """Settings that fit their model.

    Attributes:
        config: the settings, with what they leave to the model filled in.
        base: the checkpoint's path.
        model: the opened model.
        targets: the names of the layers to adapt.
        checkpointed: the names of the blocks whose activations are recomputed.
        layer_settings: what rules say of each adapted layer.
        initial_lora: the finished adapter that a fresh run begins with, by layer.
        streamed: the names of the blocks whose weights wait in host memory.
        other_sample_model: the model that samples images; None: the base.
        sample_of_base: how the base is drawn at step 0 beside another model; None: it is not.
        streamed_text: the share of the text encoders' blocks that waits in host memory while they encode.
    """

    config: Config
    base: Path
    model: Model
    targets: tuple[str, ...]
    checkpointed: frozenset[str]
    layer_settings: Mapping[str, LayerSettings] = field(default_factory=dict)
    initial_lora: Mapping[str, Factors] = field(default_factory=dict)
    streamed: frozenset[str] = frozenset()
    other_sample_model: Model | None = None
    sample_of_base: SampleSection | None = None
    streamed_text: float = 0.0
    found: tuple[Found, ...] = ()

    @property
    def sample_model(self) -> Model:
        """The model that samples images."""
        return self.other_sample_model or self.model

    @property
    def networks(self) -> nn.Module:
        """The networks that get adapters, weights declared."""
        return self.model.networks(self.config.text_encoders.train)

    @property
    def running(self) -> tuple[TextEncoder, ...]:
        """The text encoders that run in each step: those that are trained, or all if no captions are cached."""
        text = self.config.text_encoders
        return self.model.text if text.cache == "off" else self.model.encoders(text.train)


def _shows(config: Config) -> bool:
    """Tells whether any image or prompt has control images."""
    prompts = (config.sample.control, *(prompt.control or () for prompt in config.sample.prompts))
    return any(image_set.control for image_set in image_sets(config.data)) or any(prompts)


def _with_vision_encoders(model: Model, config: Config) -> Model:
    """Returns the model whose text encoders read control images, if they can.

    Raises ConfigError where they run in each step, ModelFileError where their weights lack.
    """
    with_images = model.with_images()
    if config.text_encoders.cache == "off" and any(encoder.takes_images for encoder in with_images.text):
        raise ConfigError(
            f'text_encoders.cache: expected "on" for {model.title} with control images, which its text encoder reads; '
            'got "off"'
        )
    return with_images


def _check_running(checked: Checked) -> None:
    """Refuses encoders in the step whose layers are read from their file one by one. Raises ConfigError."""
    if reading := [encoder for encoder in checked.running if encoder.in_turn]:
        raise ConfigError(
            f'text_encoders.cache: expected "on" for {checked.model.title}: {reading[0].part.component} is read layer '
            'by layer, once for all captions; got "off"'
        )


def check(config_source: Config | ConfigWithSource, family: Family | None = None) -> Checked:
    """Opens the model and checks everything that needs no image.

    `family` is the one that the user named, None: whichever the checkpoint is of. Raises ConfigError with all that does
    not fit, each where it was written, ModelFileError for files that cannot be used.
    """
    located = config_source if isinstance(config_source, ConfigWithSource) else ConfigWithSource(config_source)
    wrong = ErrorCollector(located)
    with contextlib.ExitStack() as stack:
        search = current_search()
        with wrong:
            search = stack.enter_context(searching(located.config.model.search))
        return replace(_checked(located, family, wrong), found=tuple(search.found))


def _checked(located: ConfigWithSource, family: Family | None, wrong: ErrorCollector) -> Checked:
    """Does as `check`, in the folders of `model.search`."""
    config = located.config
    with wrong:
        _check_places(config)
    with wrong:
        _check_weights(config.data)
    with wrong:
        _check_name(config.output.name)
    model, base, family = None, Path(), family
    with wrong:
        base = resolve_checkpoint(config.model.checkpoint)
        family = family or family_of(base)
    if family is not None:
        with wrong:
            family.refuse_unsupported(config)
        with wrong:
            family.refuse_distilled(base, config.model)
        with wrong:
            model = family.open(Opening(base, config.model, config.text_encoders, config.data.max_tokens))
            for encoder in model.text:
                _ = encoder.vocabulary  # raises if a vocabulary is missing or damaged
    if model is None:
        wrong.raise_all()
    assert model is not None
    assert family is not None
    config = _with_files(config, current_search().found)
    with wrong:
        config = config.model_copy(update={"sample": with_prompts_of_file(config.sample)})
    with wrong:
        model = _with_vision_encoders(model, config) if _shows(config) else model
    sampling_model = model
    with wrong:
        sampling_model = opened_for_samples(config, family, model, base)
    sample_as_given = config.sample
    config = config.model_copy(update={"sample": with_defaults(config.sample, sampling_model)})
    with wrong:
        _check_loss(config.loss, model, family.unsupported_keys())
    with wrong:
        _check_grid(config.data.bucket_step, model)
    with wrong:
        if problem := sampling_model.sampler_problem(SAMPLERS.chosen(config.sample).name):
            raise ConfigError(f"sample.sampler: {problem}")
        if config.sample.repeats:
            images = requests(config.sample, config.data.resolution, sampling_model)
            check_sampling(images, config.model, config.loss, sampling_model)
    with wrong:
        _check_control_sets(config.data, model)
    with wrong:
        _check_frames(config.data, model)
        config = config.model_copy(
            update={"data": config.data.model_copy(update={"fps": config.data.fps or model.fps})}
        )
    layers: dict[str, LayerSettings] = {}
    initial: dict[str, Factors] = {}
    with wrong:
        layers = adapted_layers(config.lora, config.text_encoders, model)
        if not _has_begun(config):  # or nothing of it is used
            initial = initial_lora(config.lora, model, layers, config.text_encoders.train)
    with wrong:
        cached = config.text_encoders.cache != "off" and set(config.text_encoders.train) != set(family.encoders)
        for image_set in image_sets(config.data, config.captions):
            _check_captions(image_set.captions, cached)
    blocks = streamed = frozenset[str]()
    offload = config.model.offload
    recomputes = config.gradient.checkpointing
    with wrong:
        blocks = blocks_named(model.network, recomputes, config.gradient.checkpoint_blocks)
        if offload == "auto" and config.memory.budget:  # which chooses a share later
            offload = "off"
        streamed = blocks_streamed(model.network, offload, recomputes, blocks)
    wrong.raise_all()
    adapted = MappingProxyType(layers), MappingProxyType(initial)
    beside = config.sample.first and config.sample.model and not config.model.training_adapter
    of_base = with_defaults(sample_as_given, model) if beside else None
    drawn = sampling_model, of_base
    checked = Checked(config, base, model, tuple(layers), blocks, *adapted, streamed, *drawn, text_share(offload))
    with wrong:
        _check_running(checked)
    wrong.raise_all()
    return checked


def _has_begun(config: Config) -> bool:
    """Tells whether the run folder has a checkpoint."""
    with contextlib.suppress(OutputError):  # told where the folder is opened
        return count(Path(config.output.dir) / "checkpoints") > 0
    return False


def _with_files(config: Config, found: Iterable[Found]) -> Config:
    """Returns the config with the files that were found for keys that named none, as if they had."""
    for one in found:
        if not is_hub_name(one.wanted):
            name, key = one.wanted.split(".")
            section = getattr(config, name).model_copy(update={key: one.path.as_posix()})
            config = config.model_copy(update={name: section})
    return config


def storage_of(quantize: str, arithmetic: str) -> nn.Storage | None:
    """Returns how the engine stores a base: as `model.quantize` says, with products as `model.arithmetic` says."""
    return None if quantize == "off" else nn.Storage(quantize, dynamic=quantize.startswith(arithmetic))


def encoding_formats(config: Config) -> dict[str, str]:
    """Returns the number formats in which images and captions are encoded, by the keys that ask for them."""
    text = config.text_encoders.precision
    of_text = (
        {"train.precision": config.train.precision}
        if text in ("auto", *nn.FORMATS)
        else {"text_encoders.precision": text}
    )
    return of_text | {"model.vae_precision": config.model.vae_precision}


def _check_loss(loss: LossSection, model: Model, refused: Collection[str]) -> None:
    """Raises ConfigError for settings that do not fit the model, but for keys that its family `refused` already."""
    problems = model.loss_problems(loss, type(WEIGHTINGS.chosen(loss)), type(TIMESTEP_SAMPLINGS.chosen(loss)))
    lines = [f"{key}: {problem}" for key, problem in problems.items() if key not in refused]
    if lines:
        raise ConfigError("\n".join(lines))


def _check_grid(step: int, model: Model) -> None:
    grid = model.side_multiple
    if step % grid:
        raise ConfigError(f"data.bucket_step: expected a multiple of {grid} for this model, got {step}")


def _check_places(config: Config) -> None:
    """Refuses a run inside its own folder of images: it would read its grids. Hidden folders are never read.

    Raises ConfigError too where the system has no such long paths as the run's files would have.
    """
    out = Path(config.output.dir).resolve()
    limit = path_limit()
    longest = None if limit is None else limit - _INSIDE - len(config.output.name)
    if longest is not None and len(str(out)) > longest:
        raise ConfigError(
            f"output.dir: expected at most {longest} characters, got {len(str(out))}: {out}; paths of Windows have "
            f"{limit}, those of files in the run folder included; choose a shorter one, or enable long paths of "
            "Windows (LongPathsEnabled)"
        )
    for images in (image_set.folder.resolve() for image_set in image_sets(config.data)):
        if out.is_relative_to(images) and not any(p.startswith(".") for p in out.relative_to(images).parts):
            raise ConfigError(
                f"output.dir: {out} lies inside {'data.sets' if config.data.sets else 'data.path'}, where its sample "
                "grids would be taken for images to train on; name a folder elsewhere"
            )


def _check_weights(data: DataSection) -> None:
    trained = [image_set for image_set in data.sets if not image_set.validation]
    if trained and not any(image_set.weight for image_set in trained):
        raise ConfigError("data.sets: expected a weight above 0 in a table, got weights that sum to 0")


def _check_name(name: str) -> None:
    """Refuses a name of the LoRA's file that is none on some system, or has no room for a step and an ending."""
    if is_device_name(name):
        raise ConfigError(f"output.name: expected another name: {name!r} is a device on Windows, and no file there")
    if name and (not _FILE_NAME.fullmatch(name) or len(name.encode()) > _LONGEST_NAME):
        raise ConfigError(
            f"output.name: expected a file name without folder and ending, of at most {_LONGEST_NAME} bytes and with "
            f'none of / \\ : * ? " < > |, got {name!r}'
        )


def _check_frames(data: DataSection, model: Model) -> None:
    """Raises ConfigError for clips of a model without time, keys of clips where there are none, and wrong numbers."""
    clip_keys = ("frames", "fps", "frame_extraction")
    said = [(number, each.model_fields_set.intersection(clip_keys)) for number, each in enumerate(data.sets, 1)]
    for number, names in said if not model.vae.frame_stride else ():
        for name in sorted(names):
            raise ConfigError(f"data.sets: {name} of table {number}: it has no effect on a model of images; remove it")
    merged = image_sets(data)
    usual = [] if any(image_set.frames for image_set in merged) else [("data.{}", data)]
    tables = [(f"data.sets: {{}} of table {number}", each) for number, each in enumerate(data.sets, 1)]
    # the latter rate stands in a run's own config.toml
    idle: dict[str, tuple[Any, ...]] = {"fps": (SetKeys.model_fields["fps"].default, model.fps)}
    idle["frame_extraction"] = (SetKeys.model_fields["frame_extraction"].default,)
    for what, section in (*usual, *(own for own, each in zip(tables, merged, strict=False) if not each.frames)):
        for name, values in idle.items():
            if getattr(section, name) not in values:
                raise ConfigError(f"{what.format(name)}: it has no effect without data.frames; set both, or remove it")
    for number, image_set in enumerate(merged, 1):
        for problem in filter(None, map(model.vae.frames_problem, image_set.frames)):
            raise ConfigError(
                f"data.sets: frames of table {number}: {problem}" if data.sets else f"data.frames: {problem}"
            )


def _check_control_sets(data: DataSection, model: Model) -> None:
    """Raises ConfigError for control images beside the training images that the model does not take."""
    for number, image_set in enumerate(image_sets(data), 1):
        if problem := model.controls.problem(len(image_set.control)):
            raise ConfigError(
                f"data.sets: control of table {number}: {problem}" if data.sets else f"data.control: {problem}"
            )


def _check_captions(captions: CaptionKeys, cached: bool) -> None:
    """Refuses a pool of texts, which serves the cache, where there is none."""
    if not cached and captions.variants != CaptionKeys.model_fields["variants"].default:
        raise ConfigError(
            "captions.variants: it says how many texts of an image are cached, and here each step draws a new one; "
            "remove it"
        )


_SHOWN = 3  # tensors that a message names


def opened_for_samples(config: Config, family: Family, base: Model, base_place: Path) -> Model:
    """Returns the model that samples images: the base, with the denoiser of `sample.model`, or without the adapter.

    It has the base's autoencoder and text encoders, and what its own name and folder say of steps, guidance and shift.
    Where `model.training_adapter` is added to the base, this one has the base's own weights: a LoRA is used on these.

    Raises:
        ConfigError: a checkpoint of another family, or of other shapes.
        ModelFileError: a file that cannot be read, or lacks the denoiser.
    """
    if not config.sample.repeats or not (config.sample.model or config.model.training_adapter):
        return base
    place = resolve_checkpoint(config.sample.model) if config.sample.model else base_place
    other = family_of(place)
    if other is not family:
        raise ConfigError(
            f"sample.model: expected a checkpoint of {family.title}, as model.checkpoint is, got one of {other.title}: "
            f"{place}"
        )
    part = family.files.parts(place, [family.denoiser])[family.denoiser]
    _check_alike(place, part.shapes, part.network, base)
    parts = {base.vae.part.component: base.vae.part, family.denoiser: part}
    parts |= {encoder.part.component: encoder.part for encoder in base.text}
    section = config.model.model_copy(update={"checkpoint": str(place), "training_adapter": ""})
    return family.assemble(parts, Opening(place, section, config.text_encoders, config.data.max_tokens))


def _check_alike(place: Path, shapes: Mapping[str, tuple[int, ...]], network: Any, base: Model) -> None:
    """Raises ConfigError unless both have the same tensors and architecture, but for a distilled one's extra parts."""
    shapes, theirs = (
        {name: shape for name, shape in each.items() if not name.startswith(base.distilled_parts)}
        for each in (shapes, base.denoiser.shapes)
    )
    other = [name for name in dict.fromkeys((*theirs, *shapes)) if theirs.get(name) != shapes.get(name)]
    if other:
        lines = [f"{name} {shapes.get(name, 'missing')}, not {theirs.get(name, 'there')}" for name in other[:_SHOWN]]
        raise ConfigError(
            f"sample.model: expected the tensors of model.checkpoint in {place}, got {len(other)} others: "
            f"{'; '.join(lines)}"
        )
    if network.arch != base.network.arch:
        raise ConfigError(
            f"sample.model: expected the architecture of model.checkpoint in {place}, got another: {network.arch}, "
            f"not {base.network.arch}"
        )
