"""Stage 3, encode: images and captions to cached arrays. Only what the cache lacks is encoded."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from flame_train.config.schema import DataSection
from flame_train.data.buckets import Placement, resize_and_crop
from flame_train.data.cache import DiskCache, Shapes, cache_key
from flame_train.data.images import load_image
from flame_train.data.placed import Placed
from flame_train.data.seen import remember
from flame_train.engine import nn, no_grad
from flame_train.engine.backend import get_backend
from flame_train.engine.dtype import is_float
from flame_train.errors import DataError, NonFiniteError, OutputError, shown
from flame_train.io.digests import Digests
from flame_train.io.failpoint import hit
from flame_train.io.files import could_make_folder, make_folder
from flame_train.text_encoders import TextEncoder
from flame_train.training.model import Autoencoder, Example, encoder_outputs
from flame_train.training.stop import StopRequest
from flame_train.user_cache import user_cache

_LOG = logging.getLogger(__name__)
CACHE_FOLDER = ".flame-cache"
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Keys:
    """The cache keys of a dataset: one an image, by item; one a caption, by text; and of what networks they are."""

    images: tuple[str, ...]
    captions: Mapping[str, str]
    networks: Mapping[str, str]


@dataclass(frozen=True, eq=False)
class Encoding:
    """By which networks images and captions are encoded, and in which number formats.

    Attributes:
        vae: encodes images.
        text: encode captions.
        vae_precision: `model.vae_precision`.
        precision: `train.precision`, in which captions are encoded unless `text_precision` says otherwise.
        text_precision: `text_encoders.precision`.
        folder: where the cache lies.
    """

    vae: Autoencoder
    text: tuple[TextEncoder, ...]
    vae_precision: str
    precision: str
    text_precision: str
    folder: Path

    def keys(self, placed: Placed, prompts: Sequence[str]) -> Keys:
        """The keys of every array that training and sampling will read, over all that the array depends on."""
        with Digests(user_cache("digests")) as digests:
            networks = {"image": self.vae.part.digest(digests), "caption": self._text_digest(digests)}
        vae = {"precision": self.vae_precision}
        text = {"precision": self.precision, "text_precision": self.text_precision}
        images = tuple(
            cache_key("latents", item.sha256, networks["image"], {**vae, **_geometry(p)}) for item, p in placed
        )
        wanted = dict.fromkeys(["", *(item.caption for item in placed.dataset.items), *prompts])
        captions = {
            caption: cache_key("text", hashlib.sha256(caption.encode()).hexdigest(), networks["caption"], text)
            for caption in wanted
        }
        return Keys(images, captions, networks)

    def image_shapes(self, placement: Placement) -> Shapes:
        """The arrays of an image: their names and shapes."""
        shape = self.vae.latent_shape(placement.bucket)
        return {"mean": shape, "logvar": shape}

    @cached_property
    def caption_shapes(self) -> Shapes:
        """The arrays of any caption: their names and shapes."""
        return {name: shape for encoder in self.text for name, shape in encoder.outputs.items()}

    def _text_digest(self, digests: Digests) -> str:
        parts = [
            part for e in self.text for part in (e.part.component, e.part.digest(digests), e.vocabulary, *e.outputs)
        ]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    def encoders(self, device: str) -> CaptionEncoders:
        """The text encoders, loaded."""
        networks = {
            encoder.part.component: encoder.load(device=device, dtype=self.precision, precision=self.text_precision)
            for encoder in self.text
        }
        return CaptionEncoders(self.text, networks)


@dataclass(frozen=True, slots=True, eq=False)
class CaptionEncoders:
    """Loaded text encoders; `networks` by the names that LoRA files have for them."""

    encoders: tuple[TextEncoder, ...]
    networks: Mapping[str, nn.Module]

    def caption(self, text: str) -> Example:
        """The conditioning arrays of a caption, in the encoders' dtype."""
        made: Example = {}
        for encoder in self.encoders:
            tensors = encoder.encode(self.networks[encoder.part.component], encoder.ids(text)[None])
            made |= {name: tensor.numpy()[0] for name, tensor in tensors.items()}
        return made


@dataclass(frozen=True, slots=True, eq=False)
class Encoded:
    """A dataset whose arrays are all in the cache."""

    encoding: Encoding
    placed: Placed
    cache: DiskCache
    keys: Keys
    outputs: Mapping[str, tuple[str, ...]]
    """Of each text encoder, by its key: the names of the arrays that it makes."""
    size_conditioning: Callable[[Placement], Example]

    def example(self, index: int, drop_caption: bool, dropped: Collection[str] = ()) -> Example:
        """All arrays of one item; with its caption dropped, those of the empty caption in its place.

        The arrays of `dropped` text encoders are zeros. Raises `DataError` if they are not in the cache any more.
        """
        item, placement = self.placed.dataset.items[index], self.placed.placements[index]
        caption = self.caption("" if drop_caption else item.caption)
        zeros = {n: np.zeros_like(caption[n]) for encoder in dropped for n in self.outputs[encoder]}
        return {
            **self._read(self.keys.images[index], self.encoding.image_shapes(placement), shown(item.path)),
            **caption,
            **zeros,
            **self.size_conditioning(placement),
        }

    def caption(self, text: str) -> Example:
        """The arrays of a caption or prompt that was asked for when encoding."""
        return self._read(self.keys.captions[text], self.encoding.caption_shapes, _quoted(text))

    def _read(self, key: str, shapes: Shapes, what: str) -> Example:
        found = self.cache.get(key, shapes)
        if found is None:
            raise DataError(
                f"{self.cache.path(key)}: the cache entry of {what} vanished or was damaged since the run began; "
                "start again: it is made anew, and the run continues from its last checkpoint"
            )
        return found


def cache_folder(data: DataSection) -> Path:
    """Where the cache of a dataset lies."""
    return Path(data.cache) if data.cache else Path(data.path) / CACHE_FOLDER


def could_cache(folder: Path) -> None:
    """Raises OutputError if there is no cache and none can be made. One that is there may hold all that is needed."""
    if not os.path.isdir(folder):
        with _named_for_cache():
            could_make_folder(folder, "name another")


@contextmanager
def _named_for_cache() -> Iterator[None]:
    """A folder that cannot be written is told with the setting that names it."""
    try:
        yield
    except OutputError as error:
        raise OutputError(f"{error}\n  data.cache says where encoded images are kept") from None


def _geometry(placement: Any) -> dict[str, Any]:
    return {
        "resized": list(placement.resized),
        "crop": [placement.crop_top, placement.crop_left],
        "bucket": list(placement.bucket),
    }


def encode(
    encoding: Encoding,
    placed: Placed,
    keys: Keys,
    size_conditioning: Callable[[Placement], Example],
    device: str,
    stop: StopRequest,
) -> Encoded:
    """Fills the cache. Networks are loaded only if something is missing, and unloaded again.

    Raises `DataError` for an image that was changed since it was read for the plan, `OutputError` where the cache
    cannot be written, and `Interrupted` after a signal, with everything that was encoded in the cache.
    """
    cache = DiskCache(encoding.folder)
    cache.sweep()
    outputs = encoder_outputs(encoding.text)
    encoded = Encoded(encoding, placed, cache, keys, outputs, size_conditioning)
    captions = _missing(
        cache, {key: caption for caption, key in keys.captions.items()}, lambda _: encoding.caption_shapes, stop
    )
    images = _missing(
        cache,
        {key: i for i, key in enumerate(keys.images)},
        lambda i: encoding.image_shapes(placed.placements[i]),
        stop,
    )
    _LOG.info(
        "cache: %d of %d images and %d of %d captions to encode",
        len(images),
        len(set(keys.images)),
        len(captions),
        len(keys.captions),
    )
    if captions or images:
        with _named_for_cache():
            make_folder(cache.folder, "name another")
    with no_grad():
        if captions:
            encoders = encoding.encoders(device)
            _fill(cache, "caption", captions, _quoted, encoders.caption, stop)
            del encoders
            get_backend(device).empty_cache()
        if images:
            vae = encoding.vae.load(encoding.vae_precision, device)
            items = placed.dataset.items
            _fill(
                cache, "image", images, lambda i: shown(items[i].path), lambda i: vae.encode(_pixels(placed, i)), stop
            )
            get_backend(device).empty_cache()
    remember(cache.folder, {item.sha256: item.size for item in placed.dataset.items if item.plain})
    return encoded


def _fill(
    cache: DiskCache,
    what: str,
    missing: Mapping[str, _T],
    name_of: Callable[[_T], str],
    make: Callable[[_T], Example],
    stop: StopRequest,
) -> None:
    """Makes and keeps each missing entry, by key; `what` says of which kind they are."""
    for done, (key, entry) in enumerate(missing.items(), 1):
        example = make(entry)
        if done % 50 == 0 or done == len(missing):
            _LOG.info("encoded %d of %d %ss", done, len(missing), what)
        _check_finite(name_of(entry), example)
        hit("encode.before_put")
        cache.put(key, example)
        stop.check("while encoding; what was encoded is kept")


def _missing(
    cache: DiskCache, entries: Mapping[str, _T], shapes_of: Callable[[_T], Shapes], stop: StopRequest
) -> dict[str, _T]:
    """Those of `entries`, by key, that the cache has not, or not whole."""
    missing = {}
    for key, entry in entries.items():
        if not cache.has(key, shapes_of(entry)):
            missing[key] = entry
        stop.check("while reading the cache")
    return missing


def _check_finite(name: str, example: Example) -> None:
    bad = [part for part, array in example.items() if is_float(array.dtype) and not np.isfinite(array).all()]
    if bad:
        raise NonFiniteError(
            f"{name}: encoding it gave NaN or infinity ({', '.join(bad)}); if it does so for every one, the model "
            "overflows in this precision: try train.precision=bf16 or model.vae_precision=fp32"
        )


def _quoted(caption: str) -> str:
    """A caption in a message: its beginning, on one line."""
    return f"the caption {caption[:60]!r}"


def _pixels(placed: Placed, index: int) -> np.ndarray[Any, Any]:
    """An image scaled and cropped. Its key was made from what the plan read: anything else must not get that key."""
    item = placed.dataset.items[index]
    pixels, info = load_image(item.path)
    if info.sha256 != item.sha256:
        raise DataError(f"{shown(item.path)}: was changed while the dataset was being read; start again")
    return resize_and_crop(pixels, placed.placements[index])
