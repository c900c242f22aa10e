"""An optimizer step: unscale, check, chain, schedule, and one select that takes the step or leaves it.

Everything is device work over the arena's flat buffers: no value is read back, and every buffer that outlives
the step is written in place, so that a captured step can be replayed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from ...errors import ModelFileError
from ..dtype import Array, float32
from ..tensor import Tensor
from .arena import Arena
from .average import MovingAverage
from .bounds import check
from .scaler import LossScaler
from .schedule import Schedule
from .transform import State, Transform
from .update import make_update, select

METRICS = ("count", "lr", "grad_norm", "loss_scale", "finite", "healthy", "skipped")
"""What `Optimizer.metrics` holds, in order."""


class Optimizer:
    """Updates an arena's values with a chain of transforms whose last link gives the direction.

    `lr` is the schedule's peak. The gradients are divided by `accumulation` and by the loss scale, with which
    the loss must have been multiplied: `(loss * optimizer.loss_scale).backward()`, `accumulation` times.

    A step whose gradient norm or loss is not finite is skipped and counted: values, moments and schedule stay
    as they were. With a `scaler` (fp16) it lowers the loss scale. Without one, or once that is exhausted,
    `healthy` is false, until a step is sound again. With `halt` it stays so, and no later step is taken: for who
    reads the figures late and is to find the last good values then.
    """

    def __init__(
        self, arena: Arena, transforms: Sequence[Transform], *, lr: float, schedule: Schedule | None = None,
        accumulation: int = 1, scaler: LossScaler | None = None, average: MovingAverage | None = None,
        halt: bool = False,
    ) -> None:  # fmt: skip
        names = [t.name for t in transforms]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"optimizer: expected links with different names, got {names}")
        check("optimizer", lr=lr)
        check("optimizer", least=1, accumulation=accumulation)
        xp = arena.backend.xp
        self.arena, self.transforms = arena, tuple(transforms)
        self.schedule, self.scaler, self.accumulation = schedule or Schedule(), scaler, accumulation
        self.average, self.halt = average, halt
        self._own: State = {
            "lr": xp.full((), lr, np.float64),
            "count": xp.zeros((), np.int64),
            "skipped": xp.zeros((), np.int64),
        }
        self._scaling: State = scaler.state(xp) if scaler else {"scale": xp.ones((), float32)}
        self._mean: State = average.init(arena) if average else {}
        self._links: list[State] = [t.init(arena) for t in self.transforms]
        self._update = make_update(arena, self.transforms, self._links)
        self._healthy: Array = xp.ones((), np.bool_)
        self._metrics: Array = xp.zeros(len(METRICS), np.float64)

    @property
    def loss_scale(self) -> Tensor:
        """What the loss is multiplied by before its backward pass: 0-d fp32, always the same buffer."""
        return Tensor(self._scaling["scale"])

    @property
    def count(self) -> Array:
        """The number of updates done: 0-d int64, always the same buffer."""
        return self._own["count"]

    def metrics(self) -> Array:
        """The last step's figures in the order of `METRICS`: fp64, on the device, always the same buffer.

        `count` and `skipped` are as after the step, `lr` and `loss_scale` as used in it, `grad_norm` is the
        unscaled norm before any clipping, `finite` and `healthy` are 0 or 1.
        """
        return self._metrics

    def zero_grad(self) -> None:
        """Clears every gradient."""
        self.arena.zero_grad()

    def step(self, loss: Tensor | None = None) -> None:
        """One update from the accumulated gradients. `loss`, of any shape, is only checked for finiteness."""
        # Overflow is an expected event here, and is dealt with: NumPy need not warn of it.
        with np.errstate(all="ignore"):
            self.arena.gather()
            if not self.halt:
                self._healthy[...] = True
            self._step(loss)

    def _step(self, loss: Tensor | None) -> None:
        xp = self.arena.backend.xp
        norm = self._update.norm(self._divisor())
        finite = xp.isfinite(norm)
        if loss is not None:
            finite = finite & xp.isfinite(loss.data).all()
        take = finite & self._healthy
        lr = self.schedule.rate(xp, self.count, self._own["lr"])
        used = self._scaling["scale"].copy()
        self._update.apply(take, norm, lr, self.count)
        if self.average is not None:
            self.average.update(self.arena, self._mean, take, self.count)
        self._advance(xp, finite, take)
        self._report(lr, norm, used, finite)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """The moving average in the values' place, for who shows or saves them; without one, the values themselves."""
        if self.average is None:
            yield
            return
        arena = self.arena
        trained = arena.values.copy()
        arena.values[...] = self._mean["values"]
        arena.refresh()
        try:
            yield
        finally:
            arena.values[...] = trained
            arena.refresh()

    def _divisor(self) -> Array | None:
        """What the accumulated gradients are divided by; None for 1."""
        if self.scaler is None and self.accumulation == 1:
            return None
        return self._scaling["scale"] * np.float32(self.accumulation)

    def _advance(self, xp: Any, finite: Array, take: Array) -> None:
        """The counters, the scaler and the flag, after the values."""
        self._own["count"] += take
        self._own["skipped"] += ~take
        failed = ~finite
        if self.scaler is not None:
            scaling, failed = self.scaler.update(xp, self._scaling, finite)
            for name, new in scaling.items():
                select(xp, self._healthy, self._scaling[name], new)
        self._healthy &= ~failed

    def _report(self, lr: Array, norm: Array, scale: Array, finite: Array) -> None:
        figures = [self.count, lr, norm, scale, finite, self._healthy, self._own["skipped"]]
        for i, figure in enumerate(figures):
            self._metrics[i] = figure

    # ---- saving ------------------------------------------------------------------------------------

    def set(self, name: str, value: float) -> None:
        """Writes a number of the state by its saved name: `set("lr", 1e-5)`, `set("clip_norm.max_norm", 2)`.

        Raises `KeyError` naming what there is.
        """
        found = {n: a for n, a in self._entries() if a.ndim == 0}
        if name not in found:
            raise KeyError(f"optimizer: nothing named {name!r} to set; has {', '.join(sorted(found))}")
        found[name][...] = value

    def state_dict(self) -> dict[str, np.ndarray[Any, Any]]:
        """Everything the next step depends on beside the arena's values, on the host, by name; copies.

        Flat entries come by parameter, "adamw.exp_avg.<parameter>", so that they do not depend on the layout.
        """
        result: dict[str, np.ndarray[Any, Any]] = {}
        for name, array in self._entries():
            if array.ndim:
                result |= {f"{name}.{p}": part for p, part in self.arena.split(array).items()}
            else:
                result[name] = np.array(self.arena.backend.get(array), copy=True)
        return result

    def load_state_dict(self, entries: Mapping[str, np.ndarray[Any, Any]]) -> None:
        """Restores what `state_dict` returned; the next step is then bit-identical to the uninterrupted one.

        Raises `ModelFileError` naming what is missing, unexpected or mis-shaped.
        """
        left = dict(entries)
        for name, array in self._entries():
            if array.ndim:
                own = [k for k in left if k.startswith(f"{name}.")]
                self.arena.join(array, {k[len(name) + 1 :]: left.pop(k) for k in own}, f"optimizer state {name}")
            elif name in left and left[name].size == 1:
                array[...] = self.arena.backend.put(left.pop(name).astype(array.dtype).reshape(()))
            else:
                raise ModelFileError(f"optimizer state: expected one number named {name!r}; it is not there")
        if left:
            raise ModelFileError(
                f"optimizer state: unexpected {sorted(left)[0]!r}; another optimizer or precision saved it"
            )
        self._healthy[...] = True

    def _entries(self) -> list[tuple[str, Array]]:
        """Every buffer of the state with its saved name."""
        found = [*self._own.items()]
        found += [(f"loss_scaler.{n}", a) for n, a in self._scaling.items() if self.scaler]
        found += [(f"average.{n}", a) for n, a in self._mean.items()]
        for link, state in zip(self.transforms, self._links, strict=True):
            found += [(f"{link.name}.{n}", a) for n, a in state.items()]
        return found
