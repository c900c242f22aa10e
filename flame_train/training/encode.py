"""Pictures and captions to cached arrays: what is not in the cache is encoded, and nothing else is."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from flame_train.config.schema import Config
from flame_train.data.buckets import resize_and_crop
from flame_train.data.cache import DiskCache, cache_key
from flame_train.data.files import shown
from flame_train.data.images import load_image
from flame_train.data.placed import Placed
from flame_train.engine import no_grad
from flame_train.engine.dtype import is_float
from flame_train.errors import DataError, NonFiniteError, OutputError
from flame_train.io.failpoint import hit
from flame_train.io.files import could_make_folder, make_folder

from .family import Encoders, Example, Family
from .stop import StopRequest

_LOG = logging.getLogger(__name__)
CACHE_FOLDER = ".flame-cache"
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Keys:
    """The cache keys of a dataset: one a picture, by item; one a caption, by text; and of what networks they are."""

    pictures: tuple[str, ...]
    captions: Mapping[str, str]
    networks: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Encoded:
    """A dataset whose arrays are all in the cache."""

    placed: Placed
    cache: DiskCache
    keys: Keys
    family: Family

    def example(self, index: int, drop_caption: bool, silent: Collection[str] = ()) -> Example:
        """All arrays of one item; with its caption dropped, those of the empty caption in its place.

        What `silent` text encoders make of it is zeros. Raises `DataError` if they are not in the cache any more.
        """
        item = self.placed.dataset.items[index]
        caption = self.caption("" if drop_caption else item.caption)
        zeros = {n: np.zeros_like(caption[n]) for encoder in silent for n in self.family.arrays_of[encoder]}
        return {
            **self._read(self.keys.pictures[index], shown(item.path)),
            **caption,
            **zeros,
            **self.family.placement(self.placed.placements[index]),
        }

    def caption(self, text: str) -> Example:
        """The arrays of a caption or prompt that was asked for when encoding."""
        return self._read(self.keys.captions[text], _quoted(text))

    def _read(self, key: str, what: str) -> Example:
        found = self.cache.get(key)
        if found is None:
            raise DataError(
                f"{self.cache.path(key)}: the cache entry of {what} vanished or was damaged since the run began; "
                "start again: it is made anew, and the run continues from its last checkpoint"
            )
        return found


def cache_folder(config: Config) -> Path:
    """Where the cache of a config lies."""
    return Path(config.data.cache) if config.data.cache else Path(config.data.path) / CACHE_FOLDER


def could_cache(config: Config) -> None:
    """Raises OutputError if there is no cache and none can be made. One that is there may hold all that is needed."""
    folder = cache_folder(config)
    if not os.path.isdir(folder):
        with _named_for_cache():
            could_make_folder(folder, "name another")


@contextmanager
def _named_for_cache() -> Iterator[None]:
    """A folder that cannot be written is told with the setting that names it."""
    try:
        yield
    except OutputError as error:
        raise OutputError(f"{error}\n  data.cache says where encoded pictures are kept") from None


def keys_of(placed: Placed, config: Config, family: Family, prompts: tuple[str, ...]) -> Keys:
    """The keys of every array that training and sampling will read. Any change of what they depend on changes them."""
    prints = family.fingerprints(config)
    vae = {"precision": config.model.vae_precision}
    text = {"precision": config.train.precision, "max_tokens": config.data.max_tokens}
    pictures = tuple(
        cache_key("latents", item.sha256, prints["picture"], {**vae, **_geometry(p)}) for item, p in placed
    )
    wanted = dict.fromkeys(["", *(item.caption for item in placed.dataset.items), *prompts])
    captions = {c: cache_key("text", hashlib.sha256(c.encode()).hexdigest(), prints["caption"], text) for c in wanted}
    return Keys(pictures, captions, prints)


def _geometry(placement: Any) -> dict[str, Any]:
    return {
        "resized": list(placement.resized),
        "crop": [placement.crop_top, placement.crop_left],
        "bucket": list(placement.bucket),
    }


def encode(
    placed: Placed, keys: Keys, config: Config, family: Family, device: str, stop: StopRequest
) -> Encoded:  # fmt: skip
    """Fills the cache. The networks are loaded only if something is missing, and unloaded again.

    Raises `DataError` for a picture that was changed since it was read for the plan, `OutputError` where the cache
    cannot be written, and `Interrupted` after a signal, with everything that was encoded in the cache.
    """
    cache = DiskCache(cache_folder(config))
    cache.sweep()
    encoded = Encoded(placed, cache, keys, family)
    captions = _missing(cache, {key: caption for caption, key in keys.captions.items()}, stop)
    pictures = _missing(cache, {key: i for i, key in enumerate(keys.pictures)}, stop)
    _LOG.info(
        "cache: %d of %d pictures and %d of %d captions to encode",
        len(pictures), len(set(keys.pictures)), len(captions), len(keys.captions),
    )  # fmt: skip
    if captions or pictures:
        with _named_for_cache():
            make_folder(cache.folder, "name another")
    for what, missing in (("caption", captions), ("picture", pictures)):
        if missing:
            with no_grad(), family.encoders(config, device, [what]) as networks:
                for key, name, example in _made(what, missing, encoded, networks):
                    _check_finite(name, example)
                    hit("encode.before_put")
                    cache.put(key, example)
                    stop.check("while encoding; what was encoded is kept")
    return encoded


def _missing(cache: DiskCache, entries: Mapping[str, _T], stop: StopRequest) -> dict[str, _T]:
    """Those of `entries`, by key, that the cache has not, or not whole."""
    missing = {}
    for key, entry in entries.items():
        if cache.get(key) is None:
            missing[key] = entry
        stop.check("while reading the cache")
    return missing


def _made(
    what: str, missing: Mapping[str, Any], e: Encoded, networks: Encoders
) -> Iterator[tuple[str, str, Example]]:  # fmt: skip
    """(key, name, arrays) of each missing entry: captions by their text, pictures by their place in the dataset."""
    for done, (key, entry) in enumerate(missing.items(), 1):
        if what == "caption":
            yield key, _quoted(entry), networks.caption(entry)
        else:
            yield key, shown(e.placed.dataset.items[entry].path), networks.picture(_pixels(e.placed, entry))
        if done % 50 == 0 or done == len(missing):
            _LOG.info("encoded %d of %d %ss", done, len(missing), what)


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
    """A picture scaled and cropped. Its key was made from what the plan read: anything else must not get that key."""
    item = placed.dataset.items[index]
    pixels, info = load_image(item.path)
    if info.sha256 != item.sha256:
        raise DataError(f"{shown(item.path)}: was changed while the dataset was being read; start again")
    return resize_and_crop(pixels, placed.placements[index])
