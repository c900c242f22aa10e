"""The time that a step will take, from what it multiplies, launches and copies in a run on shapes.

The shares of a card's data sheet that work reaches were fitted to the steps of `docs/step_times.json`, which ran on an
H200: they meet each of them within 9 %, and Wan's, of many short kernels, within 14. Steps on other cards take the same
shares of those cards' data sheets. So a prediction ranks settings, and says how long a step takes only roughly.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass
from typing import Final, NamedTuple

from flame_train.engine.shape_run import Gpu, ShapeRun

_PRODUCTS, _CONVOLUTIONS, _ATTENTION, _MEMORY = 0.70, 0.43, 0.41, 0.87
"""The shares of the data sheet's rates that products, convolutions, attention and kernels of ours reach."""

_LAUNCH_S: Final = 5.8e-6
"""From the end of one kernel to the work of the next, its first and last blocks included, in a captured step."""


class _Sheet(NamedTuple):
    """A card's data sheet, for one multiprocessor: TFLOP/s in 16 bits added up in fp32, GB/s; and GB/s to the host.

    `narrow` is the rate of products in 8 bits by that in 16. GeForce cards add up 16 bits in fp32 at half their rate.
    """

    tflops: float
    memory: float
    host: float
    narrow: float = 2


_SHEETS: Final = {
    75: _Sheet(65 / 40, 320 / 40, 12),  # T4
    80: _Sheet(312 / 108, 2039 / 108, 25),  # A100
    86: _Sheet(71 / 82, 936 / 82, 25, 4),  # RTX 3090
    89: _Sheet(165 / 128, 1008 / 128, 25, 4),  # RTX 4090
    90: _Sheet(989 / 132, 4800 / 132, 50),  # H200
    100: _Sheet(2250 / 148, 8000 / 148, 50),  # B200
    120: _Sheet(209.5 / 170, 1792 / 170, 50, 4),  # RTX 5090
}
"""By compute capability; one that is not here has the sheet of the one below it."""


@dataclass(frozen=True, slots=True)
class StepWork:
    """What was done: operations of products by kind, those in 8 bits, launches, bytes of operands and to the host.

    Of the last, `beside` come while other work runs.
    """

    flops: Counter[str]
    narrow: int
    launches: int
    operands: int
    copied: int
    beside: int = 0

    @classmethod
    def of(cls, run: ShapeRun) -> StepWork:
        """Returns all that a run on shapes has done so far."""
        t = run.traffic
        return cls(
            run.flops.once + run.flops.again, t.narrow, t.launches, t.operands, t.copied, run.backend.copied_beside
        )

    def since(self, before: StepWork) -> StepWork:
        """Returns what was done after `before`."""
        return StepWork(
            self.flops - before.flops,
            self.narrow - before.narrow,
            self.launches - before.launches,
            self.operands - before.operands,
            self.copied - before.copied,
            self.beside - before.beside,
        )

    def plus(self, more: StepWork, times: int) -> StepWork:
        """Adds `more`, so many times."""
        flops = Counter({kind: self.flops[kind] + times * more.flops[kind] for kind in self.flops})
        return StepWork(
            flops,
            self.narrow + times * more.narrow,
            self.launches + times * more.launches,
            self.operands + times * more.operands,
            self.copied + times * more.copied,
            self.beside + times * more.beside,
        )

    def seconds(self, gpu: Gpu) -> float:
        """Returns how long it takes on a card. Streamed weights are waited for where they take longer than the rest."""
        return max(self.parts(gpu))

    def parts(self, gpu: Gpu) -> tuple[float, float]:
        """Returns how long all but what is streamed takes, and all that is copied. The two go on at the same time.

        Copies that are not streamed wait for the rest.
        """
        known = sorted(_SHEETS)
        sheet = _SHEETS[known[max(bisect_right(known, int(gpu.capability)) - 1, 0)]]
        peak, moved = sheet.tflops * gpu.multiprocessors * 1e12, sheet.memory * gpu.multiprocessors * 1e9
        attention, convolutions = self.flops["attention"], self.flops["convolution"]
        products = self.flops.total() - attention - convolutions - self.narrow * (1 - 1 / sheet.narrow)
        computed = (
            products / (_PRODUCTS * peak)
            + convolutions / (_CONVOLUTIONS * peak)
            + attention / (_ATTENTION * peak)
            + self.operands / (_MEMORY * moved)
            + self.launches * _LAUNCH_S
        )
        link = sheet.host * 1e9
        return computed + (self.copied - self.beside) / link, self.copied / link
