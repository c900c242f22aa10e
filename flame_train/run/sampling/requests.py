"""What a config wants drawn: for the grids of a run, and for `flame-train sample`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from flame_train.config.prompts import Prompt, read_prompt_file
from flame_train.config.repeated import SampleSection
from flame_train.config.schema import LossSection, ModelSection
from flame_train.data.buckets import Size
from flame_train.data.clip_files import MAX_WEBP_SIDE
from flame_train.data.companion_files import Control
from flame_train.data.grid import grid_size
from flame_train.data.images import probe
from flame_train.data.views import View, ViewedImage
from flame_train.diffusion.noise_schedule import Spacing
from flame_train.diffusion.samplers import SAMPLERS
from flame_train.disk.roots import may_look
from flame_train.errors import ConfigError, DataError, counted, shown
from flame_train.io.addresses import local_place
from flame_train.models.common.model import Model

NO_FILES: Final[Mapping[str, Control]] = MappingProxyType({})


def with_prompts_of_file(sample: SampleSection) -> SampleSection:
    """Gives the section with the prompts of its file after its own. Raises ConfigError with each line that is wrong."""
    if not sample.prompt_file:
        return sample
    prompts = (*sample.prompts, *read_prompt_file(sample.prompt_file))
    return sample.model_copy(update={"prompts": prompts, "prompt_file": ""})


def with_defaults(sample: SampleSection, model: Model) -> SampleSection:
    """Returns the section with the model's own steps and guidance where it names none."""
    usual = model.sampling_defaults
    filled = {
        "steps": sample.steps or usual.steps,
        "guidance_scale": sample.guidance_scale or usual.guidance_scale,
        "fps": sample.fps or model.fps,
    }
    return sample.model_copy(update=filled)


@dataclass(frozen=True, slots=True)
class Request:
    """One image: a prompt with everything that it leaves to the section filled in. `number` counts from 1."""

    number: int
    prompt: Prompt
    text: str
    negative: str
    seed: int
    size: Size
    steps: int
    guidance_scale: float
    sampler: str
    strength: float
    spacing: Spacing | None = None
    """Of its timesteps; None: the model's own."""
    frames: int = 1
    """How many it has: more than one make a clip."""
    fps: int = 0
    """Frames a second of a clip."""
    control: tuple[str, ...] = ()
    """The files of its control images."""
    images: tuple[ViewedImage, ...] = ()
    """Its control images, scaled and cropped as the model has it; none before their files are read."""


def requests(
    sample: SampleSection, resolution: int, model: Model, files: Mapping[str, Control] = NO_FILES
) -> tuple[Request, ...]:
    """Returns the images of a section, whose defaults are filled in; the default side is `resolution`, as the model
    takes it.

    Image i has the seed `sample.seed` + i, unless its prompt names one. Where nothing names a size, one with control
    images among `files` has the size of its first.
    """
    side = max(resolution // model.side_multiple, 1) * model.side_multiple

    def size_of(prompt: Prompt) -> Size:
        first = files.get(next(iter(_control_of(prompt, sample)), ""))
        usual = (side, side) if first is None else model.controls.placed(first.size, resolution).bucket
        size = prompt.height or sample.height, prompt.width or sample.width
        return usual if size == (0, 0) else (size[0] or side, size[1] or side)

    return tuple(
        Request(
            number=i + 1,
            prompt=p,
            text=p.text,
            negative=sample.negative if p.negative is None else p.negative,
            seed=sample.seed + i if p.seed is None else p.seed,
            size=size_of(p),
            steps=p.steps or sample.steps,
            guidance_scale=p.guidance_scale or sample.guidance_scale,
            sampler=p.sampler or SAMPLERS.chosen(sample).name,
            strength=1.0 if p.strength is None else p.strength,
            spacing=None if sample.spacing == "auto" else sample.spacing,
            frames=p.frames or sample.frames,
            fps=sample.fps,
            control=_control_of(p, sample),
            images=tuple(
                ViewedImage(file.path, file.sha256, View(model.controls.placed(file.size, resolution)))
                for file in map(files.get, _control_of(p, sample))
                if file is not None
            ),
        )
        for i, p in enumerate(sample.prompts)
    )


def read_requests(sample: SampleSection, resolution: int, model: Model) -> tuple[Request, ...]:
    """Reads the control images of prompts; returns a section's images with them. ConfigError for all bad files."""
    files = control_files(requests(sample, resolution, model), model, resolution)
    return requests(sample, resolution, model, files)


def control_files(images: Iterable[Request], model: Model, resolution: int) -> dict[str, Control]:
    """Decodes the control images that requests name, by path. ConfigError for all that cannot be used."""
    controls: dict[str, Control] = {}
    wrong: dict[str, None] = {}
    for request in images:
        of_prompt = request.prompt.control is not None
        key = f"sample.prompts: control of prompt {request.number}" if of_prompt else "sample.control"
        for path in request.control:
            try:
                if not may_look(local_place(path)):
                    raise DataError("expected a place below the folders of --root")
                info = probe(local_place(path))
                model.controls.placed(info.size, resolution)
            except DataError as error:
                wrong[f"{key}: {error if shown(path) in str(error) else f'{shown(path)}: {error}'}"] = None
            else:
                controls[path] = Control(local_place(path), info.sha256, info.size)
    if wrong:
        raise ConfigError("\n".join(wrong))
    return controls


def _control_of(prompt: Prompt, sample: SampleSection) -> tuple[str, ...]:
    return sample.control if prompt.control is None else prompt.control


def texts_of(images: Sequence[Request]) -> tuple[str, ...]:
    """Returns every text that sampling needs the arrays of."""
    return tuple(dict.fromkeys(text for request in images for text in (request.text, request.negative)))


def check_sampling(images: Sequence[Request], base: ModelSection, loss: LossSection, model: Model) -> None:
    """Checks that images can be sampled as a config says.

    Raises:
        ConfigError: settings allow no image, or have no effect on it.
    """
    wrong: dict[str, None] = {}
    for request in images:
        for key, problem in _problems(request, base, loss, model):
            of_prompt = getattr(request.prompt, key) is not None
            wrong[
                f"sample.prompts: {key} of prompt {request.number}: {problem}"
                if of_prompt
                else f"sample.{key}: {problem}"
            ] = None
    side = max(grid_size([request.size for request in images])) if any(each.frames > 1 for each in images) else 0
    if side > MAX_WEBP_SIDE:
        wrong[
            f"sample.prompts: a grid of {counted(len(images), 'clip')} has a side of {side:,} pixels, and a WebP or "
            f"MP4 has at most {MAX_WEBP_SIDE:,}: draw fewer or smaller ones"
        ] = None
    if wrong:
        raise ConfigError("\n".join(wrong))


def _problems(request: Request, base: ModelSection, loss: LossSection, model: Model) -> list[tuple[str, str]]:
    """Finds what is wrong with an image, by key."""
    multiple, sides = model.side_multiple, dict(zip(("height", "width"), request.size, strict=True))
    wrong = [
        (name, f"expected a multiple of {multiple} for this model, got {side}")
        for name, side in sides.items()
        if side % multiple
    ]
    wrong += [
        (name, f"expected at most {model.longest_side}, the longest side with positions here, got {side}")
        for name, side in sides.items()
        if 0 < model.longest_side < side
    ]
    if problem := model.vae.frames_problem(request.frames):
        wrong.append(("frames", problem))
    if request.negative and model.classifier_free_guidance(request.guidance_scale) == 1.0:
        negative_problem = (
            f"expected none, got {request.negative!r}: with a guidance of {request.guidance_scale} this model is run "
            "without classifier-free guidance, and never sees it; remove it"
        )
        wrong.append(("negative", negative_problem))
    if problem := model.controls.problem(len(request.control)):
        wrong.append(("control", problem))
    if problem := model.sampler_problem(request.sampler):
        wrong.append(("sampler", problem))
    try:
        model.path(base, loss, request.steps, request.size, request.spacing, request.frames)
    except ConfigError as error:
        wrong.append(("steps", str(error).removeprefix("sample.steps: ")))
    return wrong
