"""Training against the clock: the whole step is one device program, the learning rate follows the time that is left."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from flame_train.engine import Frozen, Parameter, Tensor, capture, nn
from flame_train.engine.backend import get_backend
from flame_train.engine.dtype import as_dtype
from flame_train.engine.optim import AdamWRule, ClipNorm, FlatParameters, Optimizer

Array = Any
_WARM_UP = 0.03  # share of the time in which the learning rate rises
_LOOK = 50  # steps between two looks at the clock
_TELL = 10.0  # seconds between two lines of the log


class Training:
    """AdamW over the weights of modules, with an average of the weights (EMA) beside them.

    While it lasts the modules compute in `precision`, from copies of the weights, which themselves stay fp32. Weights
    whose name begins with one of `idle` are left alone: those that the forward pass never reads.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        device: str,
        lr: float,
        precision: str,
        *,
        decay: float = 0.999,
        idle: tuple[str, ...] = (),
    ) -> None:
        self.backend, self.lr, self.decay, self.dtype = get_backend(device), lr, decay, as_dtype(precision)
        self._slots = [
            (part, attr, Parameter(getattr(part, attr).data, f"{network}.{name}"))
            for network, module in modules.items()
            for name, part, attr, _ in module.named_specs()
            if not f"{network}.{name}".startswith(idle or ("-",))
        ]
        named = {p.name: p for _, _, p in self._slots}
        words = {name: 0.0 for name in named if "embedding" in name}  # unused words must not shrink
        self.arena = FlatParameters(named, self.backend, compute_dtype=self.dtype, decay_scale=words)
        self.arena.sync_copies()
        self.optimizer = Optimizer(self.arena, [ClipNorm(1.0), AdamWRule((0.9, 0.99), 1e-8, 0.01)], lr=0.0)
        self.average: Array = self.arena.values.copy()
        self.loss: Array = self.backend.xp.zeros((), np.float32)
        for part, attr, parameter in self._slots:
            setattr(part, attr, parameter)

    @property
    def step_number(self) -> Array:
        """The number of steps done, on the device: names each step's random numbers."""
        return self.optimizer.count

    def captured(self, loss: Callable[[], Tensor]) -> Callable[[], None]:
        """A whole step that minimises `loss()`, captured: called again and again, it draws its own data."""

        def step() -> None:
            value = loss()
            value.backward()
            self.loss[...] = 0.98 * self.loss + 0.02 * value.data
            self.optimizer.step(value)
            self.optimizer.zero_grad()
            age = self.step_number.astype(np.float32)
            keep = self.backend.xp.minimum(np.float32(self.decay), (1.0 + age) / (10.0 + age))
            self.average[...] = self.arena.values + keep * (self.average - self.arena.values)

        return capture(step, self.backend.name)

    def run(self, steps: Sequence[Callable[[], None]], seconds: float, report: Callable[[str], None]) -> int:
        """Calls the steps in turn until the time is up, that of compiling included; returns how many were done."""
        begin = time.monotonic()
        for step in [*steps, *steps]:  # compiling and recording, at a learning rate of 0
            step()
        self.backend.synchronize()
        report(f"first {2 * len(steps)} steps: {time.monotonic() - begin:.1f} s")
        seconds = max(seconds - (time.monotonic() - begin), 1.0)
        begin, done, said = time.monotonic(), 0, 0.0
        while (share := (time.monotonic() - begin) / seconds) < 1.0:
            self.optimizer.set("lr", self.lr * min(1.0, share / _WARM_UP + 0.02) * _cosine(share))
            for _ in range(_LOOK if self.backend.name == "cuda" else len(steps)):
                steps[done % len(steps)]()
                done += 1
            self.backend.synchronize()
            if time.monotonic() - begin > said:
                said += _TELL
                found, loss = (self.backend.to_host(x) for x in (self.optimizer.metric_values, self.loss))
                figures = dict(zip(("count", "lr", "norm"), found, strict=False))
                report(
                    f"{time.monotonic() - begin:6.1f} s  step {done}  loss {float(loss):.4f}  "
                    f"lr {figures['lr']:.2e}  norm {figures['norm']:.3f}"
                )
        report(
            f"{done} steps in {time.monotonic() - begin:.1f} s, {1e3 * (time.monotonic() - begin) / done:.2f} ms each"
        )
        return done

    def finish(self) -> None:
        """The modules get the averaged weights, fp32 and frozen."""
        self.arena.values[...] = self.average
        for part, attr, parameter in self._slots:
            setattr(part, attr, Frozen(parameter.data))


def _cosine(share: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * min(share, 1.0)))
