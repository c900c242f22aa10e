"""Notices about a plan: settings that fit and are hardly meant."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

from flame_train.config.schema import Config
from flame_train.config.training_sections import OptimizerSection
from flame_train.data.caption_formats import hidden
from flame_train.data.order import BatchSchedule
from flame_train.data.samples import EncoderInput, Samples
from flame_train.data.sets import DataSet
from flame_train.errors import ModelFileError, counted
from flame_train.io.weight_files import Kept, StoredNf4
from flame_train.io.weights import open_weights
from flame_train.models.common.model import Model
from flame_train.models.common.training_adapter import AdaptedPart
from flame_train.networks.files.build_parts import Native
from flame_train.networks.files.part import Part
from flame_train.optimizers import OPTIMIZERS
from flame_train.text_encoders.encoder import too_long

_LOG = logging.getLogger(__name__)
_PLACES: Final = ("[trigger]", "[name]")
_MATTERS: Final = 0.2  # of an epoch


def notice_rate(optimizer: OptimizerSection) -> None:
    """Warns of a rate of 1, a factor for Prodigy and far too high for the others."""
    chosen = OPTIMIZERS.chosen(optimizer)
    name, finds = chosen.name, chosen.lr_is_factor
    if optimizer.lr >= 1 and not finds:
        _LOG.warning(
            'optimizer.lr: %s is usual for "prodigy" and its kin alone; "%s" wants 1e-5 to 1e-3', optimizer.lr, name
        )
    if optimizer.lr < 0.1 and finds:
        _LOG.warning('optimizer.lr: "%s" finds its rate, of which %s is a factor; 1 is usual', name, optimizer.lr)


def notice_trigger(config: Config, samples: Samples) -> None:
    """Warns of a trigger that no caption holds, and of its place in captions, which is learned as it stands."""
    trigger, rows = config.output.trigger, samples.rows
    if trigger and not any(trigger.casefold() in text.casefold() for row in rows for text in row.texts):
        _LOG.warning(
            'output.trigger: 0 of %d images have "%s" in a caption, so it is not learned; captions.trigger = "%s" puts '
            "it into each",
            len(rows),
            trigger,
            trigger,
        )
    unfilled = [row for row in rows if any(place in text for text in row.texts for place in _PLACES)]
    if unfilled:
        _LOG.warning(
            "captions.trigger: %s a caption with %s, which only captions.trigger replaces; set it",
            counted(len(unfilled), "image has", "images have"),
            next(place for text in unfilled[0].texts for place in _PLACES if place in text),
        )


def notice_hidden(sets: Iterable[DataSet]) -> None:
    """Warns of words for captions with a character that nobody sees, so that the trained word is another."""
    for image_set in sets:
        words = {key: getattr(image_set.captions, key) for key in ("trigger", "prefix", "suffix")} | {
            "caption": image_set.caption
        }
        for key, text in words.items():
            if unseen := hidden(text):
                _LOG.warning(
                    "%s of %s holds a character that nobody sees: %s; remove it", key, image_set.folder.name, unseen
                )


def notice_batch_size(order: BatchSchedule) -> None:
    """Warns of a batch larger than every bucket, which repeats images in each step."""
    size, count = order.fullest
    if size > count:
        _LOG.warning(
            "data.batch_size: %d is more than the %s of the largest bucket, so each batch repeats images, up to %d "
            "times; %d does not",
            size,
            counted(count, "sample"),
            -(-size // count),
            count,
        )


def notice_packed(base: Part, quantize: str) -> None:
    """Warns of a base in fewer bits whose numbers are stored otherwise in training: unpacked, or rounded once more."""
    if isinstance(base, AdaptedPart):
        return  # its layers are sums
    stored = Counter[str]()
    # What is damaged is told where it is loaded; of a file on the hub there is a header alone.
    with contextlib.suppress(ModelFileError), open_weights(base.path) as weights:
        source = Native(weights, base.sources, base.shapes)
        stored.update(_format(kept) for name in base.sources if (kept := source.as_kept(name)) is not None)
    for kind, count in stored.most_common(1):
        if kind != quantize:
            _LOG.warning(
                'model.checkpoint: %s in %s; model.quantize = "%s" keeps them as they are, "%s" %s',
                counted(count, "layer is", "layers are"),
                kind,
                kind,
                quantize,
                "unpacks them" if quantize == "off" else "rounds them once more",
            )


def _format(kept: Kept) -> str:
    """Returns the value of `model.quantize` that keeps what a file has."""
    return "nf4" if isinstance(kept, StoredNf4) else "int8-convrot" if kept.rotated else "int8"


def notice_copies(order: BatchSchedule, sizes: Sequence[int]) -> None:
    """Tells of samples that fill batches, where they are so many that images are learned unevenly."""
    if order.filled_per_epoch >= _MATTERS * order.samples_per_epoch:
        _LOG.info(
            "%d of an epoch's %d samples repeat others, to fill batches of data.batch_size=%s",
            order.filled_per_epoch,
            order.samples_per_epoch,
            ", ".join(map(str, sizes)),
        )


def notice_long_texts(model: Model, what: str, read: Sequence[EncoderInput]) -> None:
    """Warns of texts whose end no encoder sees."""
    cut, encoder = too_long(model.text, read)
    if cut and encoder is not None:
        key, tokens = encoder.limit
        are = counted(cut, f"{what} is", f"{what}s are")
        _LOG.warning("%s longer than %s=%d; the rest is not seen", are, key, tokens)
