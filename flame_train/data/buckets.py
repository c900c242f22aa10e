"""Aspect-ratio buckets: the shape at which an image or clip is trained, its scale and crop, and a clip's frames.

A bucket's sides are multiples of `step` and its area is at most resolution squared. An image goes to the
bucket whose aspect ratio is nearest in log space, is scaled to cover it and cropped at the centre. Without
`upscale`, an image that would have to grow gets a smaller bucket of its own: its sides rounded down.
All sizes are (height, width) in pixels.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np

from flame_train.errors import ConfigError, DataError

Size = tuple[int, int]


def width_by_height(size: Size) -> str:
    """Returns a size (height, width) as people say it, WIDTHxHEIGHT."""
    height, width = size
    return f"{width}x{height}"


@dataclass(frozen=True, slots=True)
class Span:
    """Which frames of a clip are taken: `count` of those at `fps` frames a second, from number `first` on."""

    first: int
    count: int
    fps: int


@dataclass(frozen=True, slots=True)
class Placement:
    """How one image meets its bucket, or each frame of a clip."""

    original: Size
    bucket: Size
    resized: Size  # covers the bucket; both sides at least as long
    crop_top: int  # in the resized image
    crop_left: int
    span: Span | None = None  # of a clip; None: an image

    @property
    def frames(self) -> int:
        """How many frames there are: one of an image."""
        return 1 if self.span is None else self.span.count

    @property
    def shape(self) -> tuple[int, ...]:
        """The bucket's sides, and behind them its frames if there are several."""
        return (*self.bucket, self.frames) if self.frames > 1 else self.bucket

    @property
    def pixels(self) -> int:
        """The pixels of all frames in the bucket."""
        return math.prod(self.bucket) * self.frames

    @property
    def time_ids(self) -> tuple[int, int, int, int, int, int]:
        """SDXL's micro-conditioning (Podell et al. 2023, section 2.2): original size, crop, target size."""
        return (*self.original, self.crop_top, self.crop_left, *self.bucket)

    @property
    def scale(self) -> float:
        """Resized height over original height, of the longer side, where rounding weighs least."""
        side = int(self.original[1] > self.original[0])
        return self.resized[side] / self.original[side]

    def to_json(self) -> dict[str, Any]:
        """Sizes as "WIDTHxHEIGHT"; scale and kept rounded to four places."""
        return {
            "original": width_by_height(self.original),
            "bucket": width_by_height(self.bucket),
            "resized": width_by_height(self.resized),
            "crop": {"left": self.crop_left, "top": self.crop_top},
            "scale": round(self.scale, 4),
            "kept": round(self.kept, 4),
            **({} if self.span is None else {"span": asdict(self.span)}),
        }

    @property
    def kept(self) -> float:
        """Share of the image's area that is left after cropping, 0..1."""
        return (self.bucket[0] * self.bucket[1]) / (self.resized[0] * self.resized[1])


@dataclass(frozen=True)
class BucketRule:
    """The possible buckets. Raises ConfigError for bounds that leave none.

    min_side 0 means a quarter of the resolution, at most 256; max_side 0 twice the resolution.
    """

    resolution: int
    step: int = 64
    min_side: int = 0
    max_side: int = 0
    upscale: bool = False

    def __post_init__(self) -> None:
        if self.step < 1 or self.resolution < self.step:
            raise ConfigError(
                f"buckets: the resolution {self.resolution} must be at least the step {self.step}: "
                f"raise data.resolution or lower data.bucket_step"
            )
        if not self.shortest <= self.resolution <= self.longest + self.step - 1:
            raise ConfigError(
                f"buckets: the sides {self.min_side}..{self.max_side} must include the resolution "
                f"{self.resolution}: change data.min_bucket or data.max_bucket"
            )

    @property
    def shortest(self) -> int:
        """The shortest side a bucket may have, a multiple of `step`."""
        shortest = self.min_side or min(256, self.resolution // 4)
        return max(self.step, -(-shortest // self.step) * self.step)

    @property
    def longest(self) -> int:
        """The longest side a bucket may have, a multiple of `step`."""
        return (self.max_side or 2 * self.resolution) // self.step * self.step

    @cached_property
    def buckets(self) -> tuple[Size, ...]:
        """For each height the widest bucket within the area, and the same turned: sorted, without doubles."""
        area, square = self.resolution**2, self.resolution // self.step * self.step
        sizes = {(square, square)} if self.shortest <= square <= self.longest else set()
        for side in range(self.shortest, self.longest + 1, self.step):
            other = min(area // side // self.step * self.step, self.longest)
            if other >= self.shortest:
                sizes |= {(side, other), (other, side)}
        return tuple(sorted(sizes))

    def assign(self, size: Size) -> Placement:
        """Returns the image's bucket, scale and crop, a pure function of its size. DataError if it is too small."""
        height, width = size
        if height < 1 or width < 1:
            raise ValueError(f"an image's sides must be positive, got {size}")
        bucket = min(self.buckets, key=lambda b: (_misfit(size, b), -b[0] * b[1], b))
        if not self.upscale and (bucket[0] > height or bucket[1] > width):
            bucket = self._rounded_down(size)
        return _cover(size, bucket)

    def _rounded_down(self, size: Size) -> Size:
        """Returns the bucket of an image that is too small for a regular one: no side of it has to grow."""
        height, width = size
        area = self.resolution**2  # the floor of side * resolution / sqrt(height * width), in whole numbers:
        within = (
            min(height, math.isqrt(area * height // width)),
            min(width, math.isqrt(area * width // height)),
        )
        rows, columns = (min(side // self.step * self.step, self.longest) for side in within)
        if min(rows, columns) < self.shortest:
            raise DataError(
                f"{width}x{height} pixels is below {self.shortest} px at data.resolution {self.resolution}, once "
                "scaled: remove it, lower the resolution, or set data.upscale"
            )
        return rows, columns


def _misfit(size: Size, bucket: Size) -> float:
    """Returns exp(|log of the two aspect ratios' quotient|): 1 for equal ratios. One rounding, so ties are ties."""
    a, b = size[0] * bucket[1], size[1] * bucket[0]
    return max(a, b) / min(a, b)


def _cover(size: Size, bucket: Size) -> Placement:
    """Scales so that the image just covers the bucket, and crops at the centre; whole numbers, the same everywhere."""
    (height, width), (rows, columns) = size, bucket
    if rows * width >= columns * height:
        resized = rows, max(columns, (2 * width * rows + height) // (2 * height))
    else:
        resized = max(rows, (2 * height * columns + width) // (2 * width)), columns
    return Placement(size, bucket, resized, (resized[0] - rows) // 2, (resized[1] - columns) // 2)


def placed_beside(size: Size, image: Placement, rule: BucketRule) -> Placement:
    """Returns the bucket, scale and crop of a control image beside an image.

    One of the image's aspect ratio, but for a hundredth, goes into the image's bucket, enlarged if need be. Any other
    gets the bucket that it would have as an image. Raises DataError as `BucketRule.assign` does.
    """
    if 100 * _misfit(size, image.original) <= 101:
        return _cover(size, image.bucket)
    return rule.assign(size)


def resize_and_crop(pixels: np.ndarray[Any, Any], placement: Placement) -> np.ndarray[Any, Any]:
    """Returns uint8 (H, W, 3) or (H, W) of the placement's original size -> uint8 of its bucket, by Lanczos."""
    from PIL import Image

    if pixels.shape[:2] != placement.original:
        raise ValueError(f"expected an image of {placement.original}, got {pixels.shape[:2]}")
    height, width = placement.resized
    resized = Image.fromarray(pixels)
    if placement.resized != placement.original:
        resized = resized.resize((width, height), Image.Resampling.LANCZOS)
    top, left, (rows, columns) = placement.crop_top, placement.crop_left, placement.bucket
    return np.array(resized)[top : top + rows, left : left + columns]
