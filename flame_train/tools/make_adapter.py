"""`flame-train adapter`: makes a training adapter for a distilled model, of images that the model draws itself.

The model draws captions at its own steps and guidance. Its latents go into the cache as they are. A LoRA on all linear
layers learns these with the ordinary loss, until the loss of held-out images stops falling. So the LoRA is what makes
the model predict as before its distillation, without teaching it an image (as ostris and SimpleTuner made theirs).
"""

from __future__ import annotations

import json
import logging
import math
import shutil
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np

from flame_train.config.load import load_located
from flame_train.config.schema import Config
from flame_train.data.buckets import BucketRule, Size
from flame_train.data.cache import DiskCache
from flame_train.data.grid import Pixels, write_png
from flame_train.data.samples import Samples
from flame_train.data.sets import image_sets
from flame_train.disk.atomic_write import write_atomically
from flame_train.disk.preflight import make_folder, refuse_place, user_cache
from flame_train.engine import Tensor
from flame_train.engine.mode import deterministic
from flame_train.engine.shape_run import gpu_of
from flame_train.errors import ConfigError, OutputError
from flame_train.io.digests import Digests
from flame_train.io.hub import fetching
from flame_train.io.safetensors import SafetensorsFile, save_file
from flame_train.io.weights import sampled_digest
from flame_train.networks.vae.autoencoder import LoadedVae
from flame_train.networks.vae.vae import unscaled_latents
from flame_train.progress import progress
from flame_train.run.check.check_run import Checked, check, storage_of
from flame_train.run.commands.stages import train
from flame_train.run.encode.encode import encode
from flame_train.run.memory.prediction import predicted_memory, seconds_of_a_grid
from flame_train.run.plan.plan import Plan, make_plan, plan_run
from flame_train.run.sampling.draw import generate_image, sampler_spec
from flame_train.run.sampling.requests import Request, requests
from flame_train.training.session import Session, StopRequest

_LOG = logging.getLogger(__name__)

_RATIOS: Final = ((1, 1), (4, 3), (3, 4), (1, 1), (3, 2), (2, 3))
_CERTAIN: Final = -30.0  # the log variance of latents that were drawn: they are what they are
PURPOSE: Final = "a training adapter: add it to {base} while a LoRA is trained on that, and leave it out afterwards"


@dataclass(frozen=True, slots=True)
class AdapterOrder:
    """What is to be made.

    Attributes:
        checkpoint: the distilled model.
        output: the adapter's file; beside it lies the folder of the work, NAME.making.
        captions: a file with a caption a line; None: those that come along.
        images: how many are drawn.
        resolution: the side of the square whose area they have; of several shapes.
        real: folders of real images that are mixed in.
        rank, lr, steps, batch, seed: of the LoRA and its training; `steps` is where it ends at the latest.
        every: steps between measurements of the loss of held-out images.
        overrides: `section.key=value` on top of the run's config.
    """

    checkpoint: str
    output: Path
    captions: Path | None = None
    images: int = 2000
    resolution: int = 1024
    real: Sequence[Path] = ()
    rank: int = 64
    lr: float = 1e-4
    steps: int = 3000
    batch: int = 4
    seed: int = 42
    every: int = 250
    overrides: Sequence[str] = ()

    @property
    def folder(self) -> Path:
        """Where the images and the run are kept."""
        return self.output.with_name(f"{self.output.stem}.making")

    @property
    def drawn(self) -> Path:
        """The folder of the drawn images."""
        return self.folder / "images"

    def latents(self, image: Path) -> Path:
        """Returns where the latents of a drawn image wait for the cache."""
        return self.folder / "latents" / f"{image.stem}.safetensors"

    def config(self, images: Path, prompts: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
        """Returns the sections of the run on a folder of images; with `prompts` of one that only draws."""
        real = [{"path": str(folder)} for folder in self.real]
        folders: dict[str, Any] = {"sets": [{"path": str(images)}, *real]} if real else {"path": str(images)}
        return {
            "model": {"checkpoint": self.checkpoint, "train_distilled": True},
            "data": {
                **folders,
                "resolution": self.resolution,
                "batch_size": self.batch,
                "cache": str(self.folder / "cache"),
            },
            "lora": {"rank": self.rank, "alpha": float(self.rank), "targets": ["full"]},
            "optimizer": {"lr": self.lr},
            "train": {"steps": self.steps, "seed": self.seed},
            "checkpoint": {"every": self.every, "keep": 2},
            "validation": {"every": self.every, "fraction": 0.05, "patience": 3},
            "sample": {"every": 1 if prompts else 0, "prompts": list(prompts), "seed": self.seed},
            "output": {
                "dir": str(self.folder / "run"),
                "name": self.output.stem,
                "title": f"training adapter for {Path(self.checkpoint).name}",
            },
        }


def make_adapter(order: AdapterOrder, device: str, dry_run: bool = False, force: bool = False) -> dict[str, Any]:
    """Draws what is missing, trains or goes on, and writes the adapter. Returns its path and what was done.

    Raises ConfigError for settings that do not fit, OutputError where the adapter is there or cannot be written.
    Raises Interrupted after a signal: the same command goes on.
    """
    refuse_place(order.output, ".safetensors", force)
    if dry_run:
        with fetching("headers"):
            return _foreseen(order, device)
    with fetching(), StopRequest() as stop:
        _draw(order, device, stop)
        _fill_cache(order, stop)
    result = train(order.config(order.drawn), order.overrides, device, False)
    _write(order, Path(result["lora"]))
    return {"adapter": str(order.output), "images": order.images, "steps": result["steps"], "run": str(order.folder)}


def captions_of(order: AdapterOrder) -> Iterator[str]:
    """Yields a caption for each image. Raises ConfigError for a file without one."""
    if order.captions is not None:
        try:
            lines = order.captions.read_text(encoding="utf-8-sig").splitlines()
        except (OSError, ValueError) as error:
            raise ConfigError(f"--captions: expected a text file with a caption a line: {error}") from None
        given = [line.strip() for line in lines if line.strip()]
        if not given:
            raise ConfigError(f"--captions: expected a caption a line in {order.captions}, got none")
        yield from (given[i % len(given)] for i in range(order.images))
        return
    text = files("flame_train.tools").joinpath("adapter_captions.toml").read_text(encoding="utf-8")
    lists = list(tomllib.loads(text).values())
    rng = np.random.default_rng(order.seed)
    for _ in range(order.images):
        yield ", ".join(str(words[rng.integers(len(words))]) for words in lists)


def _sizes(config: Config) -> list[Size]:
    """Returns the sizes of images, by turns: buckets of several shapes, so that training crops none."""
    data = config.data
    rule = BucketRule(data.resolution, data.bucket_step, data.min_bucket, data.max_bucket)
    return [rule.assign((64 * data.resolution * h, 64 * data.resolution * w)).bucket for h, w in _RATIOS]


def _prompts(order: AdapterOrder, count: int) -> list[dict[str, Any]]:
    config = load_located(order.config(order.drawn), order.overrides).config
    sizes = _sizes(config)
    return [
        {"text": text, "height": sizes[i % len(sizes)][0], "width": sizes[i % len(sizes)][1]}
        for i, text in enumerate(islice(captions_of(order), count))
    ]


def _checked(order: AdapterOrder, count: int) -> tuple[Checked, tuple[Request, ...]]:
    """Opens the model, and returns it with the images to draw."""
    checked = check(load_located(order.config(order.drawn, _prompts(order, count)), order.overrides))
    given = {
        "model.training_adapter": checked.config.model.training_adapter,
        "sample.model": checked.config.sample.model,
    }
    for key, value in given.items():
        if value:
            raise ConfigError(f"{key}: expected none, since {order.checkpoint} itself draws; got {value!r}; remove it")
    if order.drawn.resolve() not in (one.folder.resolve() for one in image_sets(checked.config.data)):
        raise ConfigError("data: an adapter learns the images that the model draws; --real names folders beside them")
    return checked, requests(checked.config.sample, checked.config.data.resolution, checked.model)


def _require_same_images(order: AdapterOrder, checked: Checked, wanted: Sequence[Request]) -> None:
    """Writes down what the images are drawn of. Raises OutputError where those that are there are of something else."""
    with Digests(user_cache("digests")) as digests:
        record: dict[str, Any] = {"model": sampled_digest(checked.base, digests)}
    for name in ("text", "negative", "size", "seed", "steps", "guidance_scale", "sampler"):
        record[name] = [getattr(request, name) for request in wanted]
    record = json.loads(json.dumps(record))
    place = order.folder / "images.json"
    if place.exists():
        try:
            before = json.loads(place.read_text(encoding="utf-8"))
            begun, other = len(before["text"]), [n for n, was in before.items() if was != record[n][: len(was)]]
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            begun, other = 0, ["images.json"]
        reason = f"was begun with another {' and another '.join(other).replace('_', ' ')}" if other else ""
        if begun > len(wanted):
            reason = f"was begun for {begun} images, more than are asked for"
        if reason:
            raise OutputError(f"{order.folder}: {reason}; ask as you did, or remove the folder to begin anew")
    raw = json.dumps(record).encode()
    write_atomically(place, [raw], len(raw))


class _Keeping(LoadedVae):
    """A decoder that keeps the latents of its last image."""

    kept: np.ndarray[Any, Any]

    def decode(self, latents: Tensor) -> Pixels:
        object.__setattr__(self, "kept", latents.numpy()[0])
        return super().decode(latents)


def _draw(order: AdapterOrder, device: str, stop: StopRequest) -> None:
    """Draws the images that are not there yet, each with its caption, and keeps their latents."""
    make_folder(order.drawn)
    make_folder(order.folder / "latents")
    checked, wanted = _checked(order, order.images)
    _require_same_images(order, checked, wanted)
    places = [order.drawn / f"{request.number:05}.png" for request in wanted]
    missing = [(request, place) for request, place in zip(wanted, places, strict=True) if not place.exists()]
    if not missing:
        return
    c, model, session = checked.config, checked.model, Session(device)
    _LOG.info("%d of %d images to draw, each in %d steps", len(missing), len(wanted), missing[0][0].steps)
    texts = Plan(checked, Samples((), ()))
    reading = dict.fromkeys(texts.encoding.reading(t, ()) for r, _ in missing for t in (r.text, r.negative))
    plan = Plan(checked, Samples((), ()), prompts=tuple(reading))
    encoded = encode(plan, plan.cache_keys(), session)
    denoiser = model.load_denoiser(
        device=device,
        dtype=c.train.precision,
        storage=storage_of(c.model.quantize, c.model.arithmetic),
        guidance_scale=c.loss.guidance_scale,
        streamed=checked.streamed,
    )
    loaded = model.vae.load(c.model.vae_precision, device, c.model.vae_tile)
    vae = _Keeping(loaded.network, loaded.device, loaded.precision, loaded.tile)
    with deterministic(True), progress("drawing", len(missing)) as advance:
        for request, place in missing:
            stop.check("while images were drawn; run the same command to continue")
            how = sampler_spec(request, c.model, c.loss, model, device=device, dtype=c.train.precision)
            pixels = generate_image(request, how, encoded.caption, denoiser, vae, stop)
            mean = np.ascontiguousarray(unscaled_latents(model.vae.published, vae.kept), np.float32)
            save_file(order.latents(place), {"mean": mean})
            place.with_suffix(".txt").write_text(f"{request.text}\n", encoding="utf-8")
            write_png(place, pixels)
            advance(1)


def _fill_cache(order: AdapterOrder, stop: StopRequest) -> None:
    """Puts the latents of drawn images where the run looks for encoded ones: no autoencoder has to read them."""
    plan = plan_run(load_located(order.config(order.drawn), order.overrides), None, stop)
    keys, cache = plan.cache_keys(), DiskCache(plan.encoding.folder)
    for row, (key, *_) in zip(plan.everything.rows, keys.images, strict=True):
        latents = order.latents(row.item.path)
        if row.item.path.parent.resolve() != order.drawn.resolve() or not latents.exists():
            continue
        if row.placement.bucket != row.item.size:
            raise OutputError(f"{row.item.path}: it was drawn for other buckets; remove {order.folder} to begin anew")
        if not cache.has(key, plan.encoding.image_shapes(row.placement)):
            with SafetensorsFile(latents) as file:
                mean = np.array(file.read("mean"))
            cache.put(key, {"mean": mean, "logvar": np.full_like(mean, _CERTAIN)})
        latents.unlink()


def _write(order: AdapterOrder, lora: Path) -> None:
    """Writes the LoRA of the lowest loss as the adapter, with metadata that say what it is for."""
    best = lora.with_suffix(".best.safetensors")
    with SafetensorsFile(best if best.exists() else lora) as file:
        tensors = {name: np.array(file.read(name)) for name in file.names}
        purpose = PURPOSE.format(base=Path(order.checkpoint).name)
        save_file(order.output, tensors, {**file.metadata, "flame_train_purpose": purpose})


def _foreseen(order: AdapterOrder, device: str) -> dict[str, Any]:
    """Says what it will take: images, hours and disk. A few blank images stand for those to be drawn."""
    card, count = gpu_of(device), len(_RATIOS)
    with TemporaryDirectory() as place, StopRequest() as stop:
        folder, prompts = Path(place), _prompts(order, count)
        for i, prompt in enumerate(prompts):
            write_png(folder / f"{i}.png", np.full((prompt["height"], prompt["width"], 3), i, np.uint8))
            (folder / f"{i}.txt").write_text(f"{prompt['text']}\n", encoding="utf-8")
        sections = order.config(folder)
        sections["validation"]["fraction"] = 0.4
        plan = make_plan(check(load_located(sections, order.overrides)), stop)
        checked, wanted = _checked(order, count)
        memory = predicted_memory(plan, card)
        forward = seconds_of_a_grid(Plan(checked, plan.samples, requests=wanted), card) / count
        each = plan.cache_bytes() / count
    drawing, training = order.images * wanted[0].steps * forward, order.steps * memory.seconds
    pixels = sum(math.prod(request.size) for request in wanted) / count
    disk = order.images * (each + 3 * pixels) + 2 * plan.parameters * 4 * 4
    return {
        "images": order.images,
        "steps_of_an_image": wanted[0].steps,
        "hours_to_draw": round(drawing / 3600, 2),
        "steps": order.steps,
        "hours_to_train_at_most": round(training / 3600, 2),
        "hours_of": card.name or "an H200",
        "disk_gib": round(disk / 2**30, 2),
        "disk_free_gib": round(shutil.disk_usage(order.output.resolve().parent).free / 2**30, 2),
        "predicted_memory_gib": round(memory.peak / 2**30, 2),
        "trained_values": plan.parameters,
        "work": str(order.folder),
    }
