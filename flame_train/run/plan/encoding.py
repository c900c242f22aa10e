"""Encoding: by which networks images and captions become arrays, under which keys these are cached, and where."""

from __future__ import annotations

import functools
import hashlib
import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final

import numpy as np

from flame_train.config.schema import DataSection
from flame_train.data.buckets import Placement
from flame_train.data.cache import Shapes, cache_key, cache_keys
from flame_train.data.samples import EncoderInput, Sample, Samples, encoder_inputs
from flame_train.data.sets import image_sets
from flame_train.data.views import View, ViewedImage
from flame_train.disk.preflight import could_make_folder, user_cache
from flame_train.errors import OutputError
from flame_train.io.digests import Digests
from flame_train.models.common.model import Example
from flame_train.networks.vae.autoencoder import Autoencoder
from flame_train.run.check.check_run import Checked
from flame_train.text_encoders.encoder import TextEncoder
from flame_train.text_encoders.running import tokens_of

CACHE_FOLDER = ".flame-cache"

ENCODED: Final = (
    *("model.", "text_encoders.", "data.", "captions.", "sample.", "validation.", "preservation.", "memory."),
    "train.precision",
)
"""How the paths of settings begin on which cached arrays may depend: runs that agree in these share all entries."""

_ROUNDING = 2  # raised where networks are run in another way, so that what they make differs in its last bits


@dataclass(frozen=True, slots=True)
class Keys:
    """The cache keys of a run's samples, and of what networks they are.

    Attributes:
        images: of each sample, one a view.
        masks: of each sample, one a view; none where it has no mask.
        controls: of each sample, for each view one a control image.
        shown: of the control images of prompts.
        captions: by what is read.
        networks: the digests of the networks that encode.
    """

    images: tuple[tuple[str, ...], ...]
    masks: tuple[tuple[str, ...], ...]
    captions: Mapping[EncoderInput, str]
    networks: Mapping[str, str]
    controls: tuple[tuple[tuple[str, ...], ...], ...]
    shown: Mapping[ViewedImage, str]

    def of_sample(self, index: int) -> Iterator[str]:
        """Yields those of a sample's image, masks and control images."""
        yield from self.images[index]
        yield from self.masks[index]
        for beside in self.controls[index]:
            yield from beside


@dataclass(frozen=True, eq=False)
class Encoding:
    """By which networks images and captions are encoded, and in which number formats.

    Attributes:
        vae: encodes images.
        text: the text encoders whose arrays are cached.
        vae_precision: `model.vae_precision`.
        precision: `train.precision`, in which captions are encoded unless `text_precision` says otherwise.
        text_precision: `text_encoders.precision`.
        folder: where the cache lies.
        running: the text encoders that run in each step; nothing of theirs is cached.
        streamed: the share of the blocks of `text` that waits in host memory.
        vae_tile: `model.vae_tile`.
    """

    vae: Autoencoder
    text: tuple[TextEncoder, ...]
    vae_precision: str
    precision: str
    text_precision: str
    folder: Path
    running: tuple[TextEncoder, ...] = ()
    streamed: float = 0.0
    vae_tile: int = 0

    @classmethod
    def of(cls, checked: Checked) -> Encoding:
        """Takes what checked settings say of encoding."""
        c, running = checked.config, checked.running
        return cls(
            checked.model.vae,
            tuple(encoder for encoder in checked.model.text if encoder not in running),
            c.model.vae_precision,
            c.train.precision,
            c.text_encoders.precision,
            cache_folder(c.data),
            running,
            checked.streamed_text,
            c.model.vae_tile,
        )

    @property
    def takes_images(self) -> bool:
        """Whether a text encoder reads control images beside a text."""
        return any(encoder.takes_images for encoder in self.text)

    def reading(self, text: str, images: Sequence[ViewedImage]) -> EncoderInput:
        """Returns what is read of a text beside these control images."""
        return EncoderInput(text, tuple(images) if self.takes_images else ())

    def encoder_inputs(self, samples: Samples) -> dict[EncoderInput, None]:
        """Returns what is read of the captions of samples, and of the empty one, each once."""
        rows = (each for row in samples.rows for each in encoder_inputs(row, ("", *row.texts), self.takes_images))
        return dict.fromkeys([EncoderInput(""), *rows])

    def keys(self, samples: Samples, prompts: Sequence[EncoderInput], shown: Sequence[ViewedImage] = ()) -> Keys:
        """Returns the keys of every array that training and sampling will read, over all that the array depends on."""
        with Digests(user_cache("digests")) as digests, ThreadPoolExecutor() as hashing:  # which leaves Python free
            image = hashing.submit(self.vae.part.digest, digests)
            cached = _text_digest(self.text, digests, hashing)
            every = _text_digest((*self.text, *self.running), digests, hashing) if self.running else cached
            networks = {"caption": every, "image": image.result()}
        vae = {"precision": self.vae_precision} | ({"tile": self.vae_tile} if self.vae_tile else {})
        text = {"precision": self.precision, "text_precision": self.text_precision, "rounding": _ROUNDING}

        @functools.cache  # large datasets have few views, but for their hashes
        def of_view(view: View) -> Callable[[str], str]:
            return cache_keys("latents", networks["image"], {**vae, **view.settings})

        def of_image(image: ViewedImage) -> str:
            return of_view(image.view)(image.sha256)

        images = tuple(tuple(of_view(view)(row.item.sha256) for view in row.views) for row in samples.rows)
        controls = tuple(
            tuple(tuple(map(of_image, row.controls_beside(view))) for view in range(len(row.views)))
            if row.controls
            else ()
            for row in samples.rows
        )
        masks = tuple(
            tuple(self._mask_key(row, view) for view in row.views) if row.item.mask else () for row in samples.rows
        )
        texts = self.encoder_inputs(samples) | dict.fromkeys(prompts)
        of_text = cache_keys("text", cached, text)

        def of_reading(reading: EncoderInput) -> str:
            parts = (reading.text, *map(of_image, reading.images))
            return of_text(hashlib.sha256("\0".join(parts).encode()).hexdigest())

        captions = {reading: of_reading(reading) for reading in (texts if self.text else ())}
        return Keys(images, masks, captions, networks, controls, {image: of_image(image) for image in shown})

    def _mask_key(self, row: Sample, view: View) -> str:
        mask = row.item.mask
        assert mask is not None
        settings = {**view.settings, "alpha": mask.alpha, "downscale": self.vae.downscale, "transparent": "black"}
        return cache_key("mask", mask.sha256, "", {name: s for name, s in settings.items() if name != "colours"})

    def mask_shapes(self, placement: Placement) -> Mapping[str, tuple[int, ...]]:
        """Returns the array of a mask, which is one for all frames."""
        return {"mask": (*self.vae.latent_shape(placement.bucket)[-3:-1], 1)}

    def image_shapes(self, placement: Placement) -> Mapping[str, tuple[int, ...]]:
        """Returns the arrays of an image or clip: their names and shapes."""
        shape = self.vae.latent_shape(placement.bucket, placement.frames)
        return {"mean": shape, "logvar": shape}

    @cached_property
    def caption_shapes(self) -> Shapes:
        """The arrays of any caption, as the cache keeps them: their names and shapes."""
        return {name: shape for encoder in self.text for name, shape in encoder.kept.items()}

    def bytes_of(self, samples: Samples, prompts: Sequence[EncoderInput], shown: Sequence[ViewedImage] = ()) -> int:
        """Returns what the cache takes on disk with everything encoded, but for the headers of its files."""
        images: dict[tuple[str, str], int] = {}
        for row in samples.rows:
            latents = self.image_bytes(row.placement)
            mask = 4 * math.prod(self.mask_shapes(row.placement)["mask"]) if row.item.mask else 0
            images |= {(row.item.sha256, repr(view.settings)): latents + mask for view in row.views}
            views = range(len(row.views)) if row.controls else ()
            for image in (each for view in views for each in row.controls_beside(view)):
                images.setdefault((image.sha256, repr(image.view.settings)), self.image_bytes(image.view.placement))
        images |= {(each.sha256, repr(each.view.settings)): self.image_bytes(each.view.placement) for each in shown}
        return sum(images.values()) + self.captions_bytes({*self.encoder_inputs(samples), *prompts})

    def image_bytes(self, placement: Placement) -> int:
        """Returns what the arrays of an image take: fp32."""
        return 4 * sum(map(math.prod, self.image_shapes(placement).values()))

    def captions_bytes(self, read: Collection[EncoderInput]) -> int:
        """Gives what the arrays of captions take, of those kept without padding the rows of their own tokens alone."""
        total = 0
        for encoder in self.text:
            itemsize = encoder.kept_dtype(self.precision, self.text_precision).itemsize
            whole = [shape for name, shape in encoder.outputs.items() if name not in encoder.paddings]
            row = sum(math.prod(encoder.outputs[name][1:]) for name in encoder.paddings)
            rows = sum(map(encoder.rows_of, read)) if row else 0
            total += itemsize * (len(read) * sum(map(math.prod, whole)) + rows * row)
        return total

    def kept(self, caption: Example) -> Example:
        """Returns the arrays of a caption in the number formats in which the cache keeps them."""
        arrays = dict(caption)
        for encoder in self.text:
            dtype = encoder.kept_dtype(self.precision, self.text_precision)
            arrays |= {name: arrays[name].astype(dtype, copy=False) for name in encoder.outputs}
        return arrays

    def longest(self, read: Collection[EncoderInput]) -> dict[str, int]:
        """Returns the rows of the longest text, by the array that is kept without padding."""
        return {name: max(map(encoder.rows_of, read)) for encoder in self.text for name in encoder.paddings}

    def caption_blank(self, rows: Mapping[str, int]) -> Example:
        """Returns the arrays of a caption, all zeros but for token ids: of what shapes a step's are.

        `rows` says how many rows arrays have, as `longest` does; those it does not name have all that they can have.
        """
        shapes = {name: shape for encoder in self.text for name, shape in encoder.outputs.items()}
        blank = {name: np.zeros((rows.get(name, most), *rest), np.float32) for name, (most, *rest) in shapes.items()}
        return blank | tokens_of(self.running, "")


def _text_digest(encoders: Sequence[TextEncoder], digests: Digests, hashing: Executor) -> str:
    digests_of = hashing.map(lambda e: [part.digest(digests) for part in e.parts], encoders)
    parts = [
        part
        for e, parts_of in zip(encoders, digests_of, strict=True)
        for part in (e.part.component, *parts_of, e.vocabulary, *e.outputs)
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def cache_folder(data: DataSection) -> Path:
    """Returns where the cache of a dataset lies."""
    return Path(data.cache) if data.cache else image_sets(data)[0].folder / CACHE_FOLDER


def could_cache(folder: Path) -> None:
    """Raises OutputError if there is no cache and none can be made. One that is there may hold all that is needed."""
    if not os.path.isdir(folder):
        with named_for_cache():
            could_make_folder(folder, "name another")


@contextmanager
def named_for_cache() -> Iterator[None]:
    """Adds the setting that chose the cache folder to an error about it."""
    try:
        yield
    except OutputError as error:
        raise OutputError(f"{error}\n  data.cache says where encoded images are kept") from None
