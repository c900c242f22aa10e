"""Dropout of adapters: which parts of an update a training step leaves out, by random numbers of (seed, step, sample).

The numbers depend on position alone, so they are the same when a block is recomputed, and after a resume. Outside a
step nothing is left out. Which parts there are, each kind of adapter knows.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from flame_train.engine import Tensor
from flame_train.engine import functional as F
from flame_train.engine.random import Rng

_FIRST: Final = 64  # streams below are those of objectives and latents


@dataclass(frozen=True, slots=True)
class Chances:
    """Probabilities of being left out: a number of LoRA's inner activations (`dropout`), a rank, a layer's update.

    As sd-scripts has them. Beside them stands T-LoRA's rule (arXiv 2507.05964), which leaves nothing to chance: of
    `rank` ranks the first floor((1 - s)^rank_exponent * (rank - min_rank)) + min_rank act at the noise level s.
    A `min_rank` of 0: all act at every level.
    """

    dropout: float = 0.0
    rank: float = 0.0
    module: float = 0.0
    min_rank: int = 0
    rank_exponent: float = 1.0

    @property
    def any(self) -> bool:
        """Whether anything is ever left out."""
        return max(self.dropout, self.rank, self.module, self.min_rank) > 0.0


@dataclass(slots=True)
class Drops:
    """The random numbers of the step that is running, for all adapters of a network; None outside.

    `strength` (1,) is a factor on all updates; None: 1. `levels` (B,) are the noise levels of the samples.
    """

    rng: Rng | None = None
    strength: Tensor | None = None
    levels: Tensor | None = None

    @contextmanager
    def during(self, rng: Rng, strength: Tensor | None = None, levels: Tensor | None = None) -> Iterator[None]:
        """Inside, parts are left out as `rng` and `levels` say, and updates act `strength` times as strong."""
        self.rng, self.strength, self.levels = rng, strength, levels
        try:
            yield
        finally:
            self.rng = self.strength = self.levels = None


@dataclass(frozen=True, slots=True)
class Drop:
    """What one layer leaves out in one step."""

    chances: Chances
    rng: Rng
    name: str
    strength: Tensor | None = None
    levels: Tensor | None = None

    def hidden(self, low: Tensor) -> Tensor:
        """LoRA's inner activations (B, ..., rank) with numbers and ranks zeroed, the rest made larger for it."""
        own = self._for_rows(low.shape[0])
        if self.chances.dropout:
            low = F.dropout(low, self.chances.dropout, rng=own.rng, stream=self._stream("dropout"))
        if self.chances.rank:
            kept = own._kept("rank", (low.shape[-1],), self.chances.rank) / (1.0 - self.chances.rank)
            low = low * kept.reshape(len(kept), *(1 for _ in low.shape[2:]), low.shape[-1]).to(low.dtype)
        if self.chances.min_rank and self.levels is not None:
            acting = self._acting(self.levels, low.shape[0], low.shape[-1])
            low = low * acting.reshape(low.shape[0], *(1 for _ in low.shape[2:]), low.shape[-1]).to(low.dtype)
        return low

    def _acting(self, levels: Tensor, rows: int, rank: int) -> Tensor:
        """Returns fp32 (rows, rank): 1 for the ranks that act at a row's noise level, 0 for the others."""
        xp, least = self.rng.xp, min(self.chances.min_rank, rank)
        share = (np.float32(1.0) - levels.data).astype(np.float32) ** np.float32(self.chances.rank_exponent)
        count = xp.floor(share * np.float32(rank - least)) + np.float32(least)
        each_B = xp.repeat(count, rows // count.shape[0])
        return Tensor((xp.arange(rank, dtype=np.float32) < each_B.reshape(-1, 1)).astype(np.float32))

    def rows(self, size: int) -> Tensor | None:
        """(size,): 0 for rows of the update that are left out, 1 for others, as LyCORIS has it; None: all stay."""
        return self._kept("rank", (size,), self.chances.rank)[0] if self.chances.rank else None

    def module(self) -> Tensor | None:
        """(1,): 0 where the whole update is left out, else its strength; None: it always stays, as strong as it is."""
        if not self.chances.module:
            return self.strength
        kept = self._kept("module", (), self.chances.module)[:1]
        return kept if self.strength is None else kept * self.strength

    def _for_rows(self, rows: int) -> Drop:
        """The drop of an input with several rows a sample, as a caption's windows are: each with numbers of its own."""
        xp, samples = self.rng.xp, self.rng.samples
        each = rows // samples.shape[0]
        if each == 1:
            return self
        numbers = (samples.reshape(-1, 1) * each + xp.arange(each, dtype=samples.dtype)).reshape(-1)
        return replace(self, rng=replace(self.rng, samples=numbers))

    def _kept(self, what: str, shape: tuple[int, ...], p: float) -> Tensor:
        """Returns fp32 (B, *shape) of zeros, with probability `p`, and ones."""
        return Tensor((self.rng.uniform(self._stream(what), shape) >= np.float32(p)).astype(np.float32))

    def _stream(self, what: str) -> int:
        return _FIRST + zlib.crc32(f"{self.name} {what}".encode()) % (2**32 - _FIRST)
