"""An optimizer step: unscale, check, chain, schedule, and one select that takes the step or leaves it.

Everything is device buffers over the arena's flat buffers. No value is read back, and every buffer that outlives
the step is written in place, so that a captured step can be replayed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from ...errors import ModelFileError, kind_of
from ..autograd.backprop import Passes
from ..backend import several_gpus
from ..counterparts import OPTIMIZER, absent
from ..dtype import Array
from ..tensors.tensor import Tensor, host_array
from .flat_parameters import FlatParameters
from .schedule import Schedule
from .step_control import EMA, METRICS, LossScaler, StepControl
from .transform import EvaluatedRule, State, Transform, check, shown_by
from .update import UpdateBuffers, make_update


class Optimizer:
    """Updates an arena's values with a chain of transforms whose last transform gives the direction.

    The gradients are divided by `accumulation` and by the loss scale, with which
    the loss must have been multiplied: `optimizer.backward(loss)`, or `(loss * optimizer.loss_scale).backward()`, is
    called `accumulation` times.

    A step whose gradient norm or loss is not finite is skipped and counted: values, moments and schedule stay
    as they were. With a `scaler` (fp16) it lowers the loss scale. Without one, or once that is exhausted,
    `healthy` is false until a step is finite again. With `halt` it stays false and no later step is taken. So a
    caller who reads the metrics late still finds the last good values.

    Args:
        arena: the flat parameters.
        transforms: the chain; each has a name of its own.
        lr: the peak learning rate.
        schedule: the learning rate's factor by step; None: 1.
        accumulation: backward passes in one step.
        scaler: the loss scale of fp16, or None.
        average: the moving average of the values, or None.
        halt: whether no step follows one that was not finite.

    Raises:
        TypeError: no arena, or no list of transforms.
        ValueError: there is no transform, two have one name, or a number is out of bounds.
    """

    def __init__(
        self,
        arena: FlatParameters,
        transforms: Sequence[Transform],
        *,
        lr: float,
        schedule: Schedule | None = None,
        accumulation: int = 1,
        scaler: LossScaler | None = None,
        average: EMA | None = None,
        halt: bool = False,
    ) -> None:
        if not isinstance(arena, FlatParameters):
            raise TypeError(
                f"optimizer: expected FlatParameters, got {kind_of(arena)}; make them by optim.FlatParameters(...)"
            )
        if not isinstance(transforms, Sequence):
            raise TypeError(f"optimizer: expected transforms in a list, got {kind_of(transforms)}")
        names = [t.name for t in transforms]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"optimizer: expected links with different names, got {names}")
        check("optimizer", lr=lr)
        check("optimizer", least=1, accumulation=accumulation)
        xp = arena.backend.xp
        self.arena, self.transforms = arena, tuple(transforms)
        self.schedule, self.scaler, self.accumulation = schedule or Schedule(), scaler, accumulation
        self.average, self.halt, self._peak = average, halt, lr
        self._scaled = self._scaled_by_hand = False
        self._passes = Passes.count  # when the last step was taken
        control = StepControl(self.schedule, scaler, average, accumulation, halt)
        self._scalars = control.state(xp, lr)
        self._mean: State = average.init(arena) if average else {}
        self._transforms: list[State] = [t.init(arena) for t in self.transforms]
        self._metrics: Array = xp.zeros(len(self.metric_names), np.float64)
        self._buffers = UpdateBuffers(
            arena, self.transforms, self._transforms, control, self._mean, self._scalars, self._metrics
        )
        self._update = make_update(self._buffers)

    def __repr__(self) -> str:
        """Says what it trains, with which rate, and what it was made of."""
        arena = self.arena
        count = sum(p.size for p in arena.parameters.values())
        lines = [f"{len(arena.parameters)} tensors, {count:,} values, {arena.backend.name}", f"lr={self._peak:g}"]
        lines += [f"{self.schedule}"] if self.schedule != Schedule() else []
        lines += [f"accumulation={self.accumulation}"] if self.accumulation > 1 else []
        lines += [f"{part}" for part in (*self.transforms, self.scaler, self.average) if part is not None]
        return f"{type(self).__name__}(\n  " + "\n  ".join(lines) + "\n)"

    def __getattr__(self, name: str) -> Any:
        raise absent(type(self).__name__, name, OPTIMIZER)

    @property
    def loss_scale(self) -> Tensor:
        """The factor by which to multiply the loss before backward: 0-d fp32, always the same buffer."""
        self._scaled_by_hand = True
        return Tensor(self._scalars["scale"])

    @property
    def metric_names(self) -> tuple[str, ...]:
        """The names of `metrics`: `METRICS`, and what the rule shows of its state."""
        return (*METRICS, *shown_by(self.transforms[-1]))

    @property
    def count(self) -> Array:
        """The number of updates done: 0-d int64, always the same buffer."""
        return self._scalars["count"]

    def metrics(self) -> dict[str, Tensor]:
        """Returns the last step's figures by name: 0-d fp64 tensors on the device, always of the same buffer.

        `count` and `skipped` are as after the step, `lr` and `loss_scale` as used in it. `grad_norm` is the
        unscaled norm before any clipping, `finite` and `healthy` are 0 or 1.
        """
        return {name: Tensor(self._metrics[i : i + 1].reshape(())) for i, name in enumerate(self.metric_names)}

    @property
    def metric_values(self) -> Array:
        """What `metrics` shows as one array, in the order of `metric_names`: to be read in one go."""
        return self._metrics

    def backward(self, loss: Tensor) -> None:
        """Scales the loss, which must be a scalar, by `loss_scale` and carries gradients to the parameters.

        The way to train in fp16, right without a scaler too. Raises what `Tensor.backward` does.
        """
        if not isinstance(loss, Tensor):
            raise TypeError(f"optimizer: expected the loss, a Tensor, got {kind_of(loss)}")
        self._scaled = True
        (loss if self.scaler is None else loss * Tensor(self._scalars["scale"])).backward()

    def zero_grad(self) -> None:
        """Clears every gradient."""
        self.arena.zero_grad()

    def step(self, loss: Tensor | None = None) -> None:
        """Makes one update from the accumulated gradients. `loss`, of any shape, is only checked for finiteness.

        Raises `RuntimeError` if it lies on another device than the parameters, and with a scaler if the loss was not
        scaled. Raises `TypeError` if it is no Tensor.
        """
        if self.scaler is not None and Passes.count > self._passes and not (self._scaled or self._scaled_by_hand):
            raise RuntimeError(
                "optimizer: with a LossScaler gradients are divided by a scale by which no loss was multiplied: "
                "call optimizer.backward(loss) instead of loss.backward()"
            )
        self._scaled, self._passes = False, Passes.count
        if loss is not None and not isinstance(loss, Tensor):
            raise TypeError(f"optimizer: expected the loss, a Tensor, or nothing, got {kind_of(loss)}")
        if loss is not None and loss.device != self.arena.backend.name:
            raise RuntimeError(
                f"optimizer: the loss is on {loss.device}, the parameters are on {self.arena.backend.name}; "
                "move it with .to(device)"
            )
        # Overflow is expected here and handled, so NumPy need not warn of it.
        if several_gpus():
            self.arena.backend.enter_thread()
        with np.errstate(all="ignore"):
            self.arena.collect_grads()
            self._update.step(None if loss is None else loss.data)
        self.arena.mark_written()

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Has the values be those for sampling or saving: the moving average, the rule's, or as they are."""
        arena, rule = self.arena, self.transforms[-1]
        if self.average is None and not isinstance(rule, EvaluatedRule):
            yield
            return
        trained = arena.values.copy()
        if isinstance(rule, EvaluatedRule):
            arena.values[...] = rule.evaluated(trained, self._transforms[-1])
        else:
            arena.values[...] = self._mean["values"]
        arena.sync_copies()
        try:
            yield
        finally:
            arena.values[...] = trained
            arena.sync_copies()

    # ---- saving ------------------------------------------------------------------------------------

    def set(self, name: str, value: float) -> None:
        """Writes a number of the state by its saved name: `set("lr", 1e-5)`, `set("clip_norm.max_norm", 2)`.

        Raises `KeyError` naming the numbers that can be set.
        """
        found = {n: a for n, a in self._entries() if a.ndim == 0}
        if name not in found:
            raise KeyError(f"optimizer: nothing named {name!r} to set; has {', '.join(sorted(found))}")
        found[name][...] = value
        self._peak = value if name == "lr" else self._peak

    def state_dict(self) -> dict[str, np.ndarray[Any, Any]]:
        """Returns everything the next step depends on besides the arena's values, on the host, by name; copies.

        Flat entries are split by parameter, "adamw.exp_avg.<parameter>", so that they do not depend on the layout.
        Arrays of another size, such as the scales of 8-bit moments, are saved whole. All keep their dtype.
        """
        result: dict[str, np.ndarray[Any, Any]] = {}
        for name, array in self._entries():
            if self._is_flat(array):
                result |= {f"{name}.{p}": part for p, part in self.arena.split(array).items()}
            else:
                result[name] = np.array(self.arena.backend.to_host(array), copy=True)
        return result

    def load_state_dict(self, entries: Mapping[str, Tensor | np.ndarray[Any, Any]]) -> None:
        """Restores what `state_dict` returned; the next step is then bit-identical to the uninterrupted one.

        `entries` may be what `flame.load` read. Raises `ModelFileError` naming what is missing, unexpected or
        mis-shaped, TypeError for what is no tensor.
        """
        if not isinstance(entries, Mapping):
            raise TypeError(f"load_state_dict: expected what state_dict() returned, got {kind_of(entries)}")
        left = {name: host_array("load_state_dict", name, value) for name, value in entries.items()}
        for name, array in self._entries():
            if array.ndim and not self._is_flat(array):
                found = left.pop(name, None)
                if found is None or (found.shape, found.dtype) != (array.shape, array.dtype):
                    raise ModelFileError(
                        f"optimizer state {name}: expected {array.dtype} {array.shape}, got "
                        f"{'nothing' if found is None else f'{found.dtype} {found.shape}'}; another optimizer saved it"
                    )
                array[...] = self.arena.backend.to_device(found)
            elif array.ndim:
                parts = [k for k in left if k.startswith(f"{name}.")]
                self.arena.join(array, {k[len(name) + 1 :]: left.pop(k) for k in parts}, f"optimizer state {name}")
            elif name in left and left[name].size == 1:
                array[...] = self.arena.backend.to_device(left.pop(name).astype(array.dtype).reshape(()))
            else:
                raise ModelFileError(f"optimizer state: expected one number named {name!r}; it is not there")
        if left:
            raise ModelFileError(
                f"optimizer state: unexpected {sorted(left)[0]!r}; another optimizer or precision saved it"
            )
        self._scalars["healthy"][...] = True

    def _is_flat(self, array: Array) -> bool:
        """Tells whether it has an entry for each trained value."""
        return array.ndim == 1 and int(array.size) == self.arena.size

    def _entries(self) -> list[tuple[str, Array]]:
        """Returns every buffer of the state with its saved name."""
        found = [(n, self._scalars[n]) for n in ("lr", "count", "skipped")]
        found += [(f"loss_scaler.{n}", self._scalars[n]) for n in ("scale", "clean") if self.scaler]
        found += [(f"average.{n}", a) for n, a in self._mean.items()]
        for transform, state in zip(self.transforms, self._transforms, strict=True):
            found += [(f"{transform.name}.{n}", a) for n, a in state.items()]
        return found
