"""A running loss of every training image, relative to what its noise levels cost on average: who is not learned.

A loss follows its noise level more than its image. So each is compared with the running mean of its band of levels.
An image that stays far above 1 is not learned, or has a caption that does not fit it.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from flame_train.io.json_values import json_tree, table

_BANDS: Final = 20
_KEPT: Final = 0.9  # of an image's sums, each time that it is trained: some ten times count
_SLOWEST: Final = 0.01  # share of a new loss in the mean of its band
_LISTED: Final = 5


@dataclass(slots=True)
class _Image:
    """How often an image came, and the fading sums of its losses and of what these were expected to be."""

    seen: int = 0
    loss: float = 0.0
    expected: float = 0.0

    @property
    def relative(self) -> float:
        return self.loss / self.expected if self.expected > 0.0 else 1.0


@dataclass(slots=True)
class ImageLosses:
    """The running losses of all images, by name, and the running means of the bands of noise levels."""

    images: dict[str, _Image] = field(default_factory=dict)
    means: list[float] = field(default_factory=lambda: [0.0] * _BANDS)
    counts: list[int] = field(default_factory=lambda: [0] * _BANDS)
    seconds: float = 0.0
    """What `add` took on the host since the last `summary`."""

    def add(self, names: Sequence[str], losses: np.ndarray[Any, Any]) -> None:
        """Takes a micro-batch's losses and noise levels in (0, 1): (2, B). What is not finite is passed over."""
        begin = time.perf_counter()
        for name, loss, level in zip(names, *losses.tolist(), strict=True):
            if not math.isfinite(loss):
                continue
            band = min(max(int(level * _BANDS), 0), _BANDS - 1)
            expected = self.means[band] if self.counts[band] else loss
            image = self.images.setdefault(name, _Image())
            image.seen += 1
            image.loss = _KEPT * image.loss + loss
            image.expected = _KEPT * image.expected + expected
            self.counts[band] += 1
            self.means[band] += (loss - self.means[band]) * max(1.0 / self.counts[band], _SLOWEST)
        self.seconds += time.perf_counter() - begin

    def summary(self) -> Mapping[str, Any]:
        """Gives the log the images of the highest and lowest relative loss, the bands' means, and the host's time."""
        ranked = self._ranked()
        spent, self.seconds = self.seconds, 0.0
        return {
            "highest": {name: round(image.relative, 4) for name, image in ranked[:_LISTED]},
            "lowest": {name: round(image.relative, 4) for name, image in ranked[: -_LISTED - 1 : -1]},
            "bands": {_levels(i): self.means[i] for i in range(_BANDS) if self.counts[i]},
            "host_ms": round(spent * 1e3, 3),
        }

    def report(self, step: int) -> bytes:
        """Returns the JSON for the run folder: every image, the highest relative loss first, and the bands' means."""
        bands = [
            {"levels": _levels(i), "loss": mean, "samples": count}
            for i, (mean, count) in enumerate(zip(self.means, self.counts, strict=True))
        ]
        images = [{"file": n, "relative_loss": round(i.relative, 4), "seen": i.seen} for n, i in self._ranked()]
        whole = {"step": step, "images": images, "bands": bands}
        return (json.dumps(whole, indent=1, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")

    def state(self, parts: Sequence[ImageLosses] = ()) -> bytes:
        """Writes everything for a checkpoint: a run that continues has the same figures to the bit.

        `parts` are those of each process, where these are the losses of several.
        """
        more = {"parts": [part._tree() for part in parts]} if len(parts) > 1 else {}
        return json.dumps(self._tree() | more).encode()

    def _tree(self) -> dict[str, Any]:
        images = {name: [image.seen, image.loss, image.expected] for name, image in self.images.items()}
        return {"images": images, "means": self.means, "counts": self.counts}

    @classmethod
    def read(cls, raw: bytes, rank: int = 0, world: int = 1) -> ImageLosses:
        """Reads what `state` wrote, of process `rank` of `world`. Raises ValueError for anything else.

        Where another number of processes wrote it, the first goes on with the losses of all.
        """
        state = table(json_tree(raw))
        parts = state.get("parts", [])
        if isinstance(parts, list) and len(parts) == world > 1:
            return cls._of(table(parts[rank]))
        return cls() if rank else cls._of(state)

    @classmethod
    def _of(cls, state: Mapping[str, Any]) -> ImageLosses:
        try:
            images = {str(name): _Image(int(s), float(a), float(b)) for name, (s, a, b) in state["images"].items()}
            means, counts = [float(m) for m in state["means"]], [int(c) for c in state["counts"]]
        except (KeyError, TypeError, AttributeError, OverflowError) as error:
            raise ValueError(f"no running losses of images: {error}") from error
        if len(means) != _BANDS or len(counts) != _BANDS:
            raise ValueError(f"expected {_BANDS} bands of noise levels, got {len(means)}")
        return cls(images, means, counts)

    def _ranked(self) -> list[tuple[str, _Image]]:
        return sorted(self.images.items(), key=lambda item: (-item[1].relative, item[0]))


def _levels(band: int) -> str:
    return f"{1000 * band // _BANDS}-{1000 * (band + 1) // _BANDS}"


def merge_losses(parts: Iterable[ImageLosses]) -> ImageLosses:
    """Returns the losses that several processes have, each of its own samples, as one. The parts stay as they are."""
    whole = ImageLosses()
    for part in parts:
        for name, image in part.images.items():
            mine = whole.images.setdefault(name, _Image())
            mine.seen += image.seen
            mine.loss += image.loss
            mine.expected += image.expected
        for band in range(_BANDS):
            count = whole.counts[band] + part.counts[band]
            if count:
                share = part.counts[band] / count
                whole.means[band] += (part.means[band] - whole.means[band]) * share
            whole.counts[band] = count
    return whole
