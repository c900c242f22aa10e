"""Stage 3, encode: images and captions to cached arrays. Only missing entries are encoded."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np

from flame_train.data.cache import DiskCache, Shapes
from flame_train.data.companion_files import latent_mask, loss_weights, refuse_black
from flame_train.data.images import Facts, remember
from flame_train.data.order import FIRST, Choice
from flame_train.data.samples import EncoderInput, Sample
from flame_train.data.views import ViewedImage, clip_readers
from flame_train.disk.failpoint import fail_point
from flame_train.disk.preflight import make_folder, preflight, size, user_cache
from flame_train.distributed.group import ProcessGroup
from flame_train.distributed.local_memory import keeping_once
from flame_train.engine import no_grad
from flame_train.engine.backend import get_backend
from flame_train.engine.dtype import is_float
from flame_train.errors import DataError, NonFiniteError, shown
from flame_train.io.digests import Digests
from flame_train.models.common.control import by_name
from flame_train.models.common.model import Example, encoder_outputs
from flame_train.networks.fixed_batch import HostArrays
from flame_train.progress import progress
from flame_train.run.encode.encoders import Pipeline, load_encoders, pixels_ahead
from flame_train.run.plan.encoding import Encoding, Keys, named_for_cache
from flame_train.run.plan.plan import Plan
from flame_train.text_encoders.running import tokens_of
from flame_train.training.batch import LOSS_WEIGHT
from flame_train.training.session import Session, StopRequest

_LOG = logging.getLogger(__name__)
_T = TypeVar("_T")
_MUCH = 8 << 30  # bytes of captions, from which on a choice of texts is spoken of
_Place = tuple[int, int]  # a sample and one of its views, by number
_ControlPlace = tuple[int, int, int]  # and one of its control images


@dataclass(frozen=True, slots=True, eq=False)
class Encoded:
    """A dataset whose arrays are all in the cache."""

    plan: Plan
    keys: Keys
    cache: DiskCache
    outputs: Mapping[str, tuple[str, ...]]
    """Of each text encoder whose arrays are cached, by its key: their names."""

    @property
    def encoding(self) -> Encoding:
        """By what the arrays were made."""
        return self.plan.encoding

    def example(self, index: int, choice: Choice = FIRST) -> Example:
        """Returns all arrays of one sample; with its caption dropped, those of the empty caption in its place.

        The arrays of dropped text encoders are zeros. Raises `DataError` if they are not in the cache any more.
        """
        row = self.plan.everything.rows[index]
        text, beside = "" if choice.drop_caption else row.text(choice.text), row.controls_beside(choice.view)
        caption = self._cached(text, beside) | tokens_of(self.encoding.running, text, choice.dropped)
        zeros = {
            n: np.zeros_like(caption[n]) for encoder in sorted(choice.dropped) for n in self.outputs.get(encoder, ())
        }
        shapes = self.encoding.image_shapes(row.placement)
        return {
            **self._read(self.keys.images[index][choice.view], shapes, shown(row.item.path)),
            **caption,
            **zeros,
            **self.plan.model.size_conditioning(row.views[choice.view].seen),
            **self._loss_weight(index, choice.view),
            **(self._beside(beside, self.keys.controls[index][choice.view]) if row.controls else {}),
        }

    def shown(self, images: Sequence[ViewedImage]) -> Example:
        """Returns the arrays of a prompt's control images, which were among those to encode."""
        return self._beside(images, [self.keys.shown[image] for image in images])

    def _beside(self, images: Sequence[ViewedImage], keys: Sequence[str]) -> Example:
        """Returns the arrays of control images, whose logarithms of variances nobody needs."""
        read = (
            self._read(key, self.encoding.image_shapes(image.view.placement), shown(image.path))
            for image, key in zip(images, keys, strict=True)
        )
        return by_name(self.encoding.vae.seen(arrays["mean"]) for arrays in read)

    def _loss_weight(self, index: int, view: int) -> Example:
        """Returns the weights of a sample's errors, if any sample has some: its set's, times its mask's."""
        row = self.plan.everything.rows[index]
        shape = self.plan.everything.loss_weight_shape(self.encoding.vae.latent_shape(row.placement.bucket))
        if shape is None:
            return {}
        weights = np.full(shape, row.set.loss_weight, np.float32)
        if row.item.mask is not None:
            name = f"the mask of {shown(row.item.path)}"
            mask = self._read(self.keys.masks[index][view], self.encoding.mask_shapes(row.placement), name)["mask"]
            weights = weights * loss_weights(mask, row.set.mask_weight, row.set.mask_normalize)
        return {LOSS_WEIGHT: weights}

    def caption(self, text: str, images: Sequence[ViewedImage] = ()) -> Example:
        """Returns the arrays of a caption or prompt that was among those to encode, and the token ids of encoders that
        run.

        `images` are the control images that are shown with it.
        """
        return self._cached(text, images) | tokens_of(self.encoding.running, text)

    def further(self, text: str, images: Sequence[ViewedImage] = ()) -> Example:
        """Returns the arrays of a further caption of a sample, for which no encoder is dropped."""
        return self._cached(text, images) | tokens_of(self.encoding.running, text, frozenset())

    def _cached(self, text: str, images: Sequence[ViewedImage]) -> Example:
        """Returns what the cache has of a text, if anything of texts is cached."""
        if not self.encoding.text:
            return {}
        key = self.keys.captions[self.encoding.reading(text, images)]
        return self._read(key, self.encoding.caption_shapes, _name_of_caption(text))

    def _read(self, key: str, shapes: Shapes, what: str) -> Example:
        arrays = self.cache.get(key, shapes)
        if arrays is None:
            raise DataError(
                f"{self.cache.path(key)}: the cache entry of {what} vanished or was damaged since the run began; "
                "start again to encode it once more and continue from the last checkpoint"
            )
        return arrays


def encode(plan: Plan, keys: Keys, session: Session) -> Encoded:
    """Fills the cache with the entries of these keys, each process of the session's group with its share.

    Networks are loaded only if an entry is missing, and unloaded afterwards. Returns the encoded dataset, which reads
    from the cache. Raises DataError for an image that was changed since it was read for the plan, OutputError where
    the cache cannot be written. Raises Interrupted after a signal, with everything cached that was encoded before.
    """
    rows, group = plan.everything.rows, session.group
    with Digests(user_cache("digests")) as digests:
        cache = DiskCache(plan.encoding.folder, digests)
        with group.barrier():
            if group.leads:
                cache.remove_stale()
        with group.barrier():
            missing = _find_missing(plan, keys, cache, session)
        once = keeping_once(group, plan.encoding.streamed > 0, bool(missing.captions))
        with group.barrier(), no_grad():
            with once:
                if missing.captions:
                    _encode_captions(plan.encoding, cache, missing.captions, session)
                    get_backend(session.device).empty_cache()
            if missing.images:
                _encode_images(plan.encoding, cache, missing.images, session)
                get_backend(session.device).empty_cache()
    if group.leads:
        decoded: dict[str, Facts] = {c.sha256: c.size for row in rows for c in row.item.controls if c.plain}
        remember(cache.folder, decoded | {row.item.sha256: row.item.facts for row in rows if row.item.plain})
    return Encoded(plan, keys, cache, encoder_outputs(plan.encoding.text))


@dataclass(frozen=True, slots=True)
class _Missing:
    """What this process is to encode, by key."""

    captions: Mapping[str, EncoderInput]
    images: Mapping[str, ViewedImage]


def _find_missing(plan: Plan, keys: Keys, cache: DiskCache, session: Session) -> _Missing:
    """Finds what is missing of this process's share of the keys, makes room for it, and keeps the masks."""
    encoding, rows, group, stop = plan.encoding, plan.everything.rows, session.group, session.stop
    texts = _share({key: caption for caption, key in keys.captions.items()}, group)
    places, covers = _share(_places(keys.images), group), _share(_places(keys.masks), group)
    captions = _missing(cache, texts, lambda _: encoding.caption_shapes, stop)
    beside, prompts = _share(_control_places(keys), group), _share({key: i for i, key in keys.shown.items()}, group)
    lacking = _missing(cache, places, lambda place: encoding.image_shapes(rows[place[0]].placement), stop)
    images = {key: rows[index].seen(view) for key, (index, view) in lacking.items()}
    controls = _missing(cache, beside, lambda place: encoding.image_shapes(rows[place[0]].controls[place[2]]), stop)
    images |= {key: rows[index].control(view, number) for key, (index, view, number) in controls.items()}
    images |= _missing(cache, prompts, lambda image: encoding.image_shapes(image.view.placement), stop)
    masks = _missing(cache, covers, lambda place: encoding.mask_shapes(rows[place[0]].placement), stop)
    _LOG.info(
        "cache: %d of %d images and %d of %d captions to encode",
        len(images),
        len(places.keys() | beside.keys() | prompts.keys()),
        len(captions),
        len(texts),
    )
    if captions or images or masks:
        placements = [image.view.placement for image in images.values()]
        text, rest = encoding.captions_bytes(captions.values()), sum(map(encoding.image_bytes, placements))
        remedy = _room(cache.folder, text, rest, max((len(row.texts) for row in rows), default=1))
        with named_for_cache():
            preflight(cache.folder, text + rest, remedy)
            make_folder(cache.folder, "name another")
    _keep_masks(encoding, rows, cache, masks, stop)
    return _Missing(captions, images)


def _room(folder: Path, text: int, rest: int, texts: int) -> str:
    """Says what the cache will take, and returns what to do where that is too much."""
    _LOG.info("cache: %s go into %s, captions are %s of it", size(text + rest), folder, size(text))
    remedy = "set data.cache to another disk"
    if texts == 1 or text < rest:
        return remedy
    fewer = f"captions.variants: an image has up to {texts} texts, and captions take {size(text)}"
    if text > _MUCH:
        _LOG.warning("cache: fewer texts take less; see %s", fewer)
    return f"{remedy}, or lower {fewer}"


def _share(entries: Mapping[str, _T], group: ProcessGroup) -> dict[str, _T]:
    """Returns the entries that this process sees to. What others have encoded meanwhile does not change it."""
    keys = list(entries)
    return {keys[i]: entries[keys[i]] for i in group.share(len(keys))}


def _encode_captions(
    encoding: Encoding, cache: DiskCache, captions: Mapping[str, EncoderInput], session: Session
) -> None:
    encoders = load_encoders(encoding, session.device)
    pipeline = Pipeline[str, Mapping[str, HostArrays]](
        lambda key: encoders.inputs(captions[key]),
        encoders.start,
        lambda key, example: _keep(cache, key, _name_of_caption(captions[key].text), encoding.kept(example)),
        get_backend(session.device).asynchronous,
    )
    with progress("encoding captions", len(captions)) as advance:
        pipeline.run(encoders.batches(captions), _advance(advance, session.stop))


def _encode_images(encoding: Encoding, cache: DiskCache, images: Mapping[str, ViewedImage], session: Session) -> None:
    vae = encoding.vae.load(encoding.vae_precision, session.device, encoding.vae_tile)
    overlapped, buckets = get_backend(session.device).asynchronous, dict[tuple[int, ...], list[str]]()
    for key, image in images.items():
        buckets.setdefault(image.view.placement.shape, []).append(key)
    keys = [key for each in buckets.values() for key in each]  # of one shape in a row, which is captured
    readers = dict(zip(keys, clip_readers(images[key] for key in keys), strict=True))
    pipeline = Pipeline[str, HostArrays](
        lambda key: vae.inputs(images[key].pixels(readers[key])),
        vae.encoder().start,
        lambda key, example: _keep(cache, key, shown(images[key].path), example),
        overlapped,
    )
    ahead = pixels_ahead(max(image.view.placement.pixels for image in images.values()))
    with progress("encoding images", len(images)) as advance:
        pipeline.run([[key] for key in keys], _advance(advance, session.stop), ahead)


def _places(keys: Sequence[Sequence[str]]) -> dict[str, _Place]:
    return {key: (index, view) for index, views in enumerate(keys) for view, key in enumerate(views)}


def _control_places(keys: Keys) -> dict[str, _ControlPlace]:
    return {
        key: (index, view, number)
        for index, views in enumerate(keys.controls)
        for view, beside in enumerate(views)
        for number, key in enumerate(beside)
    }


def _keep_masks(
    encoding: Encoding, rows: Sequence[Sample], cache: DiskCache, masks: Mapping[str, _Place], stop: StopRequest
) -> None:
    """Caches masks at the size of latents."""
    black = []
    with progress("reading masks", len(masks)) as advance:
        for key, (index, view) in masks.items():
            row = rows[index]
            assert row.item.mask is not None
            values = row.item.mask.read()
            if not values.any() and not row.set.mask_weight:
                black.append(row.item.mask.path)
            else:
                cache.put(key, {"mask": latent_mask(row.views[view].cut(values), encoding.vae.downscale)})
            advance(1)
            stop.check("while reading masks")
    refuse_black(black)


def _keep(cache: DiskCache, key: str, name: str, example: Example) -> None:
    """Writes what was made of the input called `name`."""
    _check_finite(name, example)
    fail_point("encode.before_put")
    cache.put(key, example)


def _advance(advance: Callable[[float], None], stop: StopRequest) -> Callable[[int], None]:
    """Tells the bar how many entries are done, and ends if that was asked for."""
    reported = 0

    def after(done: int) -> None:
        nonlocal reported
        advance(done - reported)
        reported = done
        stop.check("while encoding; what is done is kept; run the same command to continue")

    return after


def _missing(
    cache: DiskCache, entries: Mapping[str, _T], shapes_of: Callable[[_T], Shapes], stop: StopRequest
) -> dict[str, _T]:
    """Returns those of `entries`, by key, that the cache has not, or not whole."""
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


def _name_of_caption(caption: str) -> str:
    """Returns a caption in a message: its beginning, on one line."""
    return f"the caption {caption[:60]!r}"
