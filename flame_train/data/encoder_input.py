"""What a text encoder reads: a text, and the control images beside it, where the encoder looks at them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from flame_train.data.samples import Sample
from flame_train.data.views import ViewedImage


@dataclass(frozen=True, slots=True)
class EncoderInput:
    """A caption or prompt, and the control images that stand before it; none for an encoder of texts alone."""

    text: str
    images: tuple[ViewedImage, ...] = ()


def encoder_inputs(row: Sample, texts: Iterable[str], with_images: bool) -> Iterator[EncoderInput]:
    """Yields what is read of texts of a sample: each once, or where encoders look at images, once a view of these."""
    seen = [row.controls_beside(view) for view in range(len(row.views))] if with_images and row.controls else [()]
    return (EncoderInput(text, images) for text in texts for images in seen)
