"""The training loop: straight down, one screen. Every family runs through here."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from flame_train.adapters.lora import Attached
from flame_train.config.schema import Config
from flame_train.engine import capture
from flame_train.engine.backend import get_backend
from flame_train.errors import FlameError, NonFiniteError
from flame_train.io.failpoint import hit
from flame_train.io.lora_names import LoraFamily
from flame_train.io.runfolder import RunFolder

from .batch import Batch, HostBatch, Signature
from .family import Denoiser
from .loader import Loader
from .log import Console, TensorBoard
from .result import checkpoint_files, write_lora
from .step import FIGURES, State, micro, update
from .stop import StopRequest

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Run:
    """Everything a run is made of, ready to start at `first`."""

    config: Config
    device: str
    folder: RunFolder
    denoiser: Denoiser
    attached: Attached
    names: LoraFamily
    state: State
    loader: Loader
    dataset: str
    first: int
    preview: Callable[[int], None]
    stop: StopRequest


@dataclass(frozen=True, slots=True)
class _Pending:
    """A step whose figures are on their way to the host."""

    step: int
    figures: Callable[[], np.ndarray[Any, Any]]
    files: tuple[str, ...]
    images: int
    wait_ms: float
    begin: float


def train(run: Run) -> dict[str, Any]:
    """Runs the steps that are left, saves, and returns the last step's figures.

    Raises `NonFiniteError` before a non-finite number reaches the weights, and `Interrupted` after a signal, with
    the checkpoint saved.
    """
    c, steps = run.config, run.config.train.steps
    board = TensorBoard(run.folder.tensorboard if c.output.tensorboard else None)
    step_once = _Stepper(run)
    last: dict[str, Any] = {}
    pending: _Pending | None = None
    try:
        with Console(steps, run.first) as console:

            def settle(p: _Pending | None) -> None:
                if p is not None:
                    last.update(_record(run, p))
                    run.folder.log(last)
                    console.show(last)
                    board.write(last)

            if run.first == 0 and c.sample.every:
                run.preview(0)
            for step in range(run.first + 1, steps + 1):
                launched = step_once(step)
                settle(pending)  # one step late: the device has work while the host reads
                pending = launched
                if step == steps or run.stop.requested or _due(step, c.checkpoint.every, c.sample.every):
                    settle(pending)
                    pending = None
                hit("train.after_step")
                if step == steps or run.stop.requested or _due(step, c.checkpoint.every):
                    _save(run, step)
                run.stop.check(f"stopped after step {step}, which is saved in {run.folder.checkpoints};")
                if _due(step, c.sample.every):
                    run.preview(step)
    finally:
        board.close()
    return last


def _due(step: int, *intervals: int) -> bool:
    return any(every and step % every == 0 for every in intervals)


class _Stepper:
    """Runs one optimizer step: its micro-batches through the captured step of their shape, then the update."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._micro: dict[Signature, tuple[Batch, Callable[[], None]]] = {}
        self._update = capture(lambda: update(run.state), run.device)
        self._backend = get_backend(run.device)

    def __call__(self, step: int) -> _Pending:
        run, begin = self._run, time.monotonic()
        files: list[str] = []
        images, waited = 0, 0.0
        for _ in range(run.config.gradient.accumulation):
            host = run.loader.take()
            waited += run.loader.wait_ms
            batch, run_micro = self._for(host)
            batch.fill(host)
            run_micro()
            files += host.files
            images += batch.size
        hit("train.before_update")
        self._update()
        return _Pending(step, self._backend.fetch(run.state.figures), tuple(files), images, waited, begin)

    def _for(self, host: HostBatch) -> tuple[Batch, Callable[[], None]]:
        signature = host.signature
        if signature not in self._micro:
            batch = Batch(host, self._backend, self._run.state.dtype)
            self._micro[signature] = batch, capture(lambda: micro(self._run.state, batch), self._run.device)
        return self._micro[signature]


def _record(run: Run, p: _Pending) -> dict[str, Any]:
    """The step's line in the log. Raises `NonFiniteError` if the step was not sound."""
    figures = dict(zip(FIGURES, p.figures().tolist(), strict=True))
    seconds = max(time.monotonic() - p.begin, 1e-9)
    per_update = run.config.gradient.accumulation
    record = {
        "step": p.step,
        "epoch": round(run.loader.epoch(p.step * per_update), 4),
        "loss": figures["loss"],
        "lr": figures["lr"],
        "grad_norm": figures["grad_norm"],
        "loss_scale": figures["loss_scale"],
        "skipped": int(figures["skipped"]),
        "images_per_s": round(p.images / seconds, 4),
        "data_wait_ms": round(p.wait_ms, 3),
        "memory": get_backend(run.device).memory().peak,
    }
    if not figures["healthy"]:
        raise NonFiniteError(_diagnosis(run, p, figures))
    return record


def _diagnosis(run: Run, p: _Pending, figures: dict[str, float]) -> str:
    where = "loss" if not np.isfinite(figures["loss"]) else "gradient"
    scale = " at the smallest loss scale" if run.config.train.precision == "fp16" else ""
    return (
        f"the {where} of step {p.step} is not finite{scale} (loss {figures['loss']}, gradient norm "
        f"{figures['grad_norm']}); the update was not made and nothing newer than the last checkpoint is kept.\n"
        f"  files in that step: {', '.join(p.files)}\n"
        "  look at those files first; then try a lower optimizer.lr, gradient.clip_norm=1, or train.precision=bf16"
    )


def _save(run: Run, step: int) -> None:
    """A checkpoint; at the end also the result."""

    def write(path: Any) -> None:
        write_lora(path, run.attached, run.denoiser.component, run.names, run.config, step)

    files = checkpoint_files(run.state.optimizer, step, run.dataset, write)
    run.folder.checkpoint(step, files, run.config.checkpoint.keep)
    if step == run.config.train.steps:
        hit("train.before_result")
        write(run.folder.lora)


def forgiving(preview: Callable[[int], None]) -> Callable[[int], None]:
    """A preview whose failure costs the picture, never the run. Being asked to stop is no failure."""

    def attempt(step: int) -> None:
        try:
            preview(step)
        except (FlameError, OSError, ValueError) as e:
            if isinstance(e, FlameError) and e.exit_code == 1:  # an interruption
                raise
            _LOG.warning("no sample grid at step %d: %s", step, e)

    return attempt
