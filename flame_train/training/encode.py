"""Pictures and captions to cached arrays: what is not in the cache is encoded, and nothing else is."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flame_train.config.schema import Config
from flame_train.data.buckets import resize_and_crop
from flame_train.data.cache import DiskCache, cache_key
from flame_train.data.images import read_image
from flame_train.data.placed import Placed
from flame_train.engine import no_grad
from flame_train.io.failpoint import hit

from .family import Encoders, Example, Family
from .stop import StopRequest

_LOG = logging.getLogger(__name__)
CACHE_FOLDER = ".flame-cache"


@dataclass(frozen=True, slots=True)
class Keys:
    """The cache keys of a dataset: one a picture, by item; one a caption, by text."""

    pictures: tuple[str, ...]
    captions: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Encoded:
    """A dataset whose arrays are all in the cache."""

    placed: Placed
    cache: DiskCache
    keys: Keys
    family: Family

    def example(self, index: int, drop_caption: bool) -> Example:
        """All arrays of one item; with its caption dropped, those of the empty caption in its place."""
        text = "" if drop_caption else self.placed.dataset.items[index].caption
        return {
            **self._read(self.keys.pictures[index]),
            **self._read(self.keys.captions[text]),
            **self.family.placement(self.placed.placements[index]),
        }

    def caption(self, text: str) -> Example:
        """The arrays of a caption or prompt that was asked for when encoding."""
        return self._read(self.keys.captions[text])

    def _read(self, key: str) -> Example:
        found = self.cache.get(key)
        if found is None:
            raise FileNotFoundError(f"{self.cache.path(key)}: a cache entry vanished while training; start again")
        return found


def cache_folder(config: Config) -> Path:
    """Where the cache of a config lies."""
    return Path(config.data.cache) if config.data.cache else Path(config.data.path) / CACHE_FOLDER


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
    return Keys(pictures, captions)


def _geometry(placement: Any) -> dict[str, Any]:
    return {
        "resized": list(placement.resized),
        "crop": [placement.crop_top, placement.crop_left],
        "bucket": list(placement.bucket),
    }


def encode(
    placed: Placed, config: Config, family: Family, device: str, prompts: tuple[str, ...], stop: StopRequest
) -> Encoded:
    """Fills the cache. The networks are loaded only if something is missing, and unloaded again."""
    cache = DiskCache(cache_folder(config))
    keys = keys_of(placed, config, family, prompts)
    encoded = Encoded(placed, cache, keys, family)
    pictures = [i for i, key in enumerate(keys.pictures) if cache.get(key) is None]
    captions = [c for c, key in keys.captions.items() if cache.get(key) is None]
    _LOG.info(
        "cache: %d of %d pictures and %d of %d captions to encode",
        len(pictures), len(keys.pictures), len(captions), len(keys.captions),
    )  # fmt: skip
    for what, missing in (("caption", captions), ("picture", pictures)):
        if missing:
            with no_grad(), family.encoders(config, device, [what]) as networks:
                for key, example in _made(what, missing, encoded, networks):
                    hit("encode.before_put")
                    cache.put(key, example)
                    stop.check("stopped while encoding; what was encoded is kept")
    return encoded


def _made(what: str, missing: list[Any], e: Encoded, networks: Encoders) -> Iterator[tuple[str, Example]]:
    for done, entry in enumerate(missing, 1):
        if what == "caption":
            yield e.keys.captions[entry], networks.caption(entry)
        else:
            item, placement = e.placed.dataset.items[entry], e.placed.placements[entry]
            pixels = resize_and_crop(read_image(item.path), placement)
            yield e.keys.pictures[entry], networks.picture(pixels)
        if done % 50 == 0 or done == len(missing):
            _LOG.info("encoded %d of %d %ss", done, len(missing), what)
