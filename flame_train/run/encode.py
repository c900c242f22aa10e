"""Stage 3, encode: images and captions to cached arrays. Only missing entries are encoded."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from flame_train.config.schema import DataSection
from flame_train.data.buckets import Placement, Size, resize_and_crop
from flame_train.data.cache import DiskCache, Shapes, cache_key
from flame_train.data.images import load_image
from flame_train.data.samples import Sample, Samples
from flame_train.data.seen import remember
from flame_train.data.sets import image_sets
from flame_train.disk.failpoint import hit
from flame_train.disk.files import could_make_folder, make_folder
from flame_train.distributed.group import ALONE, ProcessGroup
from flame_train.engine import nn, no_grad
from flame_train.engine.backend import get_backend
from flame_train.engine.dtype import DType, is_float
from flame_train.errors import DataError, NonFiniteError, OutputError, shown
from flame_train.io.digests import Digests
from flame_train.progress import progress
from flame_train.text_encoders import TextEncoder
from flame_train.training.fixed_batch import FixedBatches, HostArrays
from flame_train.training.model import Autoencoder, Example, encoder_outputs
from flame_train.training.stop import StopRequest
from flame_train.user_cache import user_cache

from .pipeline import Pipeline

_LOG = logging.getLogger(__name__)
CACHE_FOLDER = ".flame-cache"
_ROUNDING = 2  # raised where networks are run in another way, so that what they make differs in its last bits
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

    def keys(self, samples: Samples, prompts: Sequence[str]) -> Keys:
        """The keys of every array that training and sampling will read, over all that the array depends on."""
        with Digests(user_cache("digests")) as digests, ThreadPoolExecutor() as hashing:  # which leaves Python free
            image = hashing.submit(self.vae.part.digest, digests)
            networks = {"caption": self._text_digest(digests, hashing), "image": image.result()}
        vae = {"precision": self.vae_precision}
        text = {"precision": self.precision, "text_precision": self.text_precision, "rounding": _ROUNDING}
        images = tuple(
            cache_key("latents", row.item.sha256, networks["image"], {**vae, **_geometry(row.placement)})
            for row in samples.rows
        )
        wanted = dict.fromkeys(["", *(row.item.caption for row in samples.rows), *prompts])
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

    def _text_digest(self, digests: Digests, hashing: Executor) -> str:
        made = hashing.map(lambda e: e.part.digest(digests), self.text)
        parts = [
            part
            for e, digest in zip(self.text, made, strict=True)
            for part in (e.part.component, digest, e.vocabulary, *e.outputs)
        ]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    def encoders(self, device: str) -> CaptionEncoders:
        """The text encoders, loaded."""
        networks = {
            encoder.part.component: encoder.load(device=device, dtype=self.precision, precision=self.text_precision)
            for encoder in self.text
        }
        dtypes = {encoder.key: encoder.dtype(self.precision, self.text_precision) for encoder in self.text}
        return CaptionEncoders(self.text, networks, dtypes, device)


class CaptionEncoders:
    """Loaded text encoders; `networks` by the names that LoRA files have for them."""

    def __init__(
        self,
        encoders: Sequence[TextEncoder],
        networks: Mapping[str, nn.Module],
        dtypes: Mapping[str, DType],
        device: str,
    ) -> None:
        self.networks = networks
        self._encoders = tuple(encoders)
        self._batches = {e.key: _batches(e, networks[e.part.component], dtypes[e.key], device) for e in self._encoders}
        self._at_once = {e.key: e.at_once if get_backend(device).asynchronous else 1 for e in self._encoders}

    @property
    def at_once(self) -> int:
        """How many captions are worth starting on together."""
        return max(self._at_once.values(), default=1)

    def inputs(self, text: str) -> dict[str, HostArrays]:
        """What `start` takes of a caption: the inputs of each encoder, by its key."""
        return {encoder.key: encoder.inputs(text) for encoder in self._encoders}

    def start(self, captions: Sequence[Mapping[str, HostArrays]]) -> Callable[[], list[Example]]:
        """Starts on captions; calling the result waits for the conditioning arrays of each, in the encoders' dtype."""
        waits: list[list[Callable[[], list[Example]]]] = []
        for key, batches in self._batches.items():
            given = [caption[key] for caption in captions]
            waits.append([batches.start(part) for part in _cut(given, self._at_once[key])])

        def wait() -> list[Example]:
            made = [[example for part in parts for example in part()] for parts in waits]
            return [dict(pair for arrays in each for pair in arrays.items()) for each in zip(*made, strict=True)]

        return wait

    def captions(self, texts: Sequence[str]) -> list[Example]:
        """The conditioning arrays of captions."""
        return self.start([self.inputs(text) for text in texts])()

    def caption(self, text: str) -> Example:
        """The conditioning arrays of a caption."""
        return self.captions([text])[0]


def _batches(encoder: TextEncoder, network: nn.Module, dtype: DType, device: str) -> FixedBatches:
    results = {name: (shape, dtype) for name, shape in encoder.outputs.items()}
    return FixedBatches(partial(encoder.encode, network), lambda _: results, lambda _: encoder.at_once, device)


@dataclass(frozen=True, slots=True, eq=False)
class Encoded:
    """A dataset whose arrays are all in the cache."""

    encoding: Encoding
    samples: Samples
    cache: DiskCache
    keys: Keys
    outputs: Mapping[str, tuple[str, ...]]
    """Of each text encoder, by its key: the names of the arrays that it makes."""
    size_conditioning: Callable[[Placement], Example]

    def example(self, index: int, drop_caption: bool, dropped: Collection[str] = ()) -> Example:
        """All arrays of one item; with its caption dropped, those of the empty caption in its place.

        The arrays of `dropped` text encoders are zeros. Raises `DataError` if they are not in the cache any more.
        """
        row = self.samples.rows[index]
        item, placement = row.item, row.placement
        caption = self.caption("" if drop_caption else item.caption)
        zeros = {n: np.zeros_like(caption[n]) for encoder in dropped for n in self.outputs[encoder]}
        return {
            **self._read(self.keys.images[index], self.encoding.image_shapes(placement), shown(item.path)),
            **caption,
            **zeros,
            **self.size_conditioning(placement),
        }

    def caption(self, text: str) -> Example:
        """The arrays of a caption or prompt that was among those to encode."""
        return self._read(self.keys.captions[text], self.encoding.caption_shapes, _quoted(text))

    def _read(self, key: str, shapes: Shapes, what: str) -> Example:
        found = self.cache.get(key, shapes)
        if found is None:
            raise DataError(
                f"{self.cache.path(key)}: the cache entry of {what} vanished or was damaged since the run began; "
                "start again to encode it once more and continue from the last checkpoint"
            )
        return found


def cache_folder(data: DataSection) -> Path:
    """Where the cache of a dataset lies."""
    return Path(data.cache) if data.cache else image_sets(data)[0].path / CACHE_FOLDER


def could_cache(folder: Path) -> None:
    """Raises OutputError if there is no cache and none can be made. One that is there may hold all that is needed."""
    if not os.path.isdir(folder):
        with _named_for_cache():
            could_make_folder(folder, "name another")


@contextmanager
def _named_for_cache() -> Iterator[None]:
    """An error about the folder names the setting that chose it."""
    try:
        yield
    except OutputError as error:
        raise OutputError(f"{error}\n  data.cache says where encoded images are kept") from None


def _geometry(placement: Placement) -> dict[str, Any]:
    return {
        "resized": list(placement.resized),
        "crop": [placement.crop_top, placement.crop_left],
        "bucket": list(placement.bucket),
    }


def encode(
    encoding: Encoding,
    samples: Samples,
    keys: Keys,
    size_conditioning: Callable[[Placement], Example],
    device: str,
    stop: StopRequest,
    group: ProcessGroup = ALONE,
) -> Encoded:
    """Fills the cache, each process of `group` with its share.

    Networks are loaded only if an entry is missing, and unloaded afterwards.

    Args:
        encoding: the text encoders, the autoencoder and the cache's folder.
        samples: the images, each with its bucket.
        keys: the keys of the cache entries.
        size_conditioning: the arrays that describe an image's size and crop.
        device: "cuda" or "cpu".
        stop: raises Interrupted after a signal.
        group: the processes that share the work, and the cache's folder.

    Returns:
        The encoded dataset, which reads from the cache.

    Raises:
        DataError: an image was changed since it was read for the plan.
        OutputError: the cache cannot be written.
        Interrupted: a signal came; the cache has everything that was encoded before.
    """
    with Digests(user_cache("digests")) as digests:
        cache = DiskCache(encoding.folder, digests)
        with group.together():
            if group.leads:
                cache.sweep()
        with group.together():
            _fill(encoding, samples, keys, cache, device, stop, group)
    if group.leads:
        remember(cache.folder, {row.item.sha256: row.item.size for row in samples.rows if row.item.plain})
    outputs = encoder_outputs(encoding.text)
    return Encoded(encoding, samples, cache, keys, outputs, size_conditioning)


def _fill(
    encoding: Encoding,
    samples: Samples,
    keys: Keys,
    cache: DiskCache,
    device: str,
    stop: StopRequest,
    group: ProcessGroup,
) -> None:
    """Encodes what is missing of this process's share of the keys; see `encode`."""
    texts = _share({key: caption for caption, key in keys.captions.items()}, group)
    numbers = _share({key: i for i, key in enumerate(keys.images)}, group)
    captions = _missing(cache, texts, lambda _: encoding.caption_shapes, stop)
    images = _missing(cache, numbers, lambda i: encoding.image_shapes(samples.rows[i].placement), stop)
    _LOG.info(
        "cache: %d of %d images and %d of %d captions to encode",
        len(images),
        len(numbers),
        len(captions),
        len(texts),
    )
    if captions or images:
        with _named_for_cache():
            make_folder(cache.folder, "name another")
    with no_grad():
        if captions:
            _encode_captions(encoding, cache, captions, device, stop)
            get_backend(device).empty_cache()
        if images:
            _encode_images(encoding, samples, cache, images, device, stop)
            get_backend(device).empty_cache()


def _share(entries: Mapping[str, _T], group: ProcessGroup) -> dict[str, _T]:
    """The entries that this process sees to. What others have encoded meanwhile does not change it."""
    keys = list(entries)
    return {keys[i]: entries[keys[i]] for i in group.share(len(keys))}


def _encode_captions(
    encoding: Encoding, cache: DiskCache, captions: Mapping[str, str], device: str, stop: StopRequest
) -> None:
    encoders = encoding.encoders(device)
    keys = list(captions)
    pipeline = Pipeline[str, Mapping[str, HostArrays]](
        lambda key: encoders.inputs(captions[key]),
        encoders.start,
        lambda key, example: _keep(cache, key, _quoted(captions[key]), example),
        get_backend(device).asynchronous,
    )
    with progress("encoding captions", len(keys)) as advance:
        pipeline.run(_cut(keys, encoders.at_once), _told(advance, stop))


def _encode_images(
    encoding: Encoding,
    samples: Samples,
    cache: DiskCache,
    images: Mapping[str, int],
    device: str,
    stop: StopRequest,
) -> None:
    vae, rows = encoding.vae.load(encoding.vae_precision, device), samples.rows
    overlapped, buckets = get_backend(device).asynchronous, dict[Size, list[str]]()
    for key, index in images.items():
        buckets.setdefault(rows[index].placement.bucket, []).append(key)
    batches = [[key] for keys in buckets.values() for key in keys]  # of one shape in a row, which is captured
    pipeline = Pipeline[str, HostArrays](
        lambda key: vae.inputs(_pixels(rows[images[key]])),
        vae.encoder().start,
        lambda key, example: _keep(cache, key, shown(rows[images[key]].item.path), example),
        overlapped,
    )
    with progress("encoding images", len(images)) as advance:
        pipeline.run(batches, _told(advance, stop))


def _cut(keys: Sequence[_T], size: int) -> list[Sequence[_T]]:
    return [keys[i : i + size] for i in range(0, len(keys), size)]


def _keep(cache: DiskCache, key: str, name: str, example: Example) -> None:
    """Writes what was made of the input called `name`."""
    _check_finite(name, example)
    hit("encode.before_put")
    cache.put(key, example)


def _told(advance: Callable[[float], None], stop: StopRequest) -> Callable[[int], None]:
    """Tells the bar how many entries are done, and ends if that was asked for."""
    said = 0

    def after(done: int) -> None:
        nonlocal said
        advance(done - said)
        said = done
        stop.check("while encoding; what is done is kept; run the same command to continue")

    return after


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


def _pixels(row: Sample) -> np.ndarray[Any, Any]:
    """An image scaled and cropped. Its key comes from the bytes that the plan read. No other bytes may get that key."""
    item = row.item
    pixels, info = load_image(item.path)
    if info.sha256 != item.sha256:
        raise DataError(f"{shown(item.path)}: was changed while the dataset was being read; start again")
    return resize_and_crop(pixels, row.placement)
