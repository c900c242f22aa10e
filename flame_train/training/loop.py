"""The training loop: straight down, one screen. Every family runs through here."""

from __future__ import annotations

import logging
import signal
import time
import tomllib
import traceback
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from flame_train.config.training_sections import GradientSection, TrainSection
from flame_train.disk.failpoint import fail_point, inject_nan
from flame_train.engine import capture
from flame_train.engine.backend import get_backend
from flame_train.engine.mode import capturing
from flame_train.engine.optim import METRICS
from flame_train.errors import ConfigError, HostRead, NonFiniteError, Stopped, counted

from .batch import Batch, HostBatch, Signature
from .gradient_norms import GradientNorms, block_names
from .log import REMEMBERED, Console, Meter
from .run import Run, save, write_best, write_result
from .step import micro, reduce, update
from .trackers import TensorBoard, Tracker, Trackers, WeightsAndBiases

_LOG = logging.getLogger(__name__)
_PACKAGE: Final = str(Path(__file__).parents[1])
_AGAIN = "run the same command to continue"
_SAMPLE, _SAVE = 1 << 12, 1 << 13
"""What `flame-train ask` wants: bits above the numbers of signals, with which processes tell each other of it."""


@dataclass(frozen=True, slots=True)
class _Pending:
    """A step whose figures are on their way: from `begin` to `end`, with norms by block and each image's losses."""

    step: int
    figures: Callable[[], np.ndarray[Any, Any]]
    files: tuple[str, ...]
    images: int
    wait_ms: float
    begin: float
    end: float | None
    gradients: Mapping[str, float]
    image_losses: tuple[tuple[tuple[str, ...], Callable[[], np.ndarray[Any, Any]]], ...]


def train(run: Run) -> dict[str, Any]:
    """Runs the steps that are left, saves, and returns the last step's figures; none if no step was left.

    Raises `NonFiniteError` before a non-finite number reaches the weights. Raises `Interrupted` after a signal, with
    a checkpoint saved, unless the run is done; and what a callback raised, saved likewise.
    """
    stop = run.session.stop
    try:
        figures = _train(run)
    except Stopped:
        if stop.error is None:
            raise
    if stop.error is not None:
        raise stop.error
    return figures


def _train(run: Run) -> dict[str, Any]:
    steps = run.train.steps
    step_once = _Stepper(run)
    with (
        Trackers(_trackers(run) if run.leads else {}) as trackers,
        Console(
            steps,
            run.first,
            run.epoch(steps),
            run.session.quiet or not run.leads,
            _meter(run),
            run.slow_steps,
            run.weighted,
        ) as console,
    ):
        figures = _Figures(run, console, trackers)
        _catch_up(run, figures)
        for step in range(run.first + 1, (run.first if run.validation.over else steps) + 1):
            figures.push(step_once(step))
            fail_point("train.after_step")
            asked = figures.asked()
            stopping = figures.stopping  # read once: a signal may come between any two lines
            measured = run.validation.is_due(step, run.epoch)
            if measured:
                figures.flush(run.validation.at)
            saved = stopping or run.is_last(step) or run.checkpoint.is_due(step, run.epoch)
            saved = saved or (measured and run.validation.is_best(step)) or bool(asked & _SAVE)
            sampling = not stopping and (run.sample.is_due(step, run.epoch) or bool(asked & _SAMPLE))
            if saved or sampling:
                figures.flush()
            if saved:
                save(run, step)
            if sampling:
                _sample_images(run, step, trackers)  # ends early when a signal comes
                figures.listen()
            if sampling and not saved and figures.stopping:
                save(run, step)
                saved = True
            if saved and run.leads:
                run.report()
            if saved:
                _stop_if_requested(run, figures, step, f"after step {step}, saved; {_AGAIN}")
            if run.validation.over:
                break
    if run.validation.over and run.leads:
        _LOG.info("%s", run.validation.early_stop_message)
    return figures.last


def _trackers(run: Run) -> dict[type[Tracker], Callable[[], Tracker]]:
    """Lists the programs that the config wants to show the run, each with what opens it."""
    openers: dict[type[Tracker], Callable[[], Tracker]] = {}
    if run.output.tensorboard:
        openers[TensorBoard] = lambda: TensorBoard(run.folder.owned("tensorboard"), run.first, run.folder.config())
    if run.output.wandb:
        openers[WeightsAndBiases] = lambda: WeightsAndBiases(
            run.folder.owned("wandb").parent,
            run.output.wandb,
            tomllib.loads(run.folder.config()),
            run.output.name or run.folder.folder.name,
        )
    return openers


def _meter(run: Run) -> Meter:
    """Makes the means of the run, which go on from the steps of earlier processes."""
    return Meter(run.folder.losses(REMEMBERED) if run.leads and run.first else ())


def _stop_if_requested(run: Run, figures: _Figures, step: int, where: str) -> None:
    """Stops after a signal if work is left: steps, or the grid of the last."""
    if run.state.exchanged and not figures.stopping:  # the others do not know of it yet
        return
    if not run.is_last(step) or run.state.group.broadcast(_lacks_grid(run, step)):
        run.session.stop.check(where)


def _catch_up(run: Run, figures: _Figures) -> None:
    """Does the work before the next step: the sample grid of this one, and the unfinished work of the last run."""
    anew = run.first == 0 and run.sample.first and run.sample.repeats
    if run.state.group.broadcast(anew or _lacks_grid(run, run.first)):
        _sample_images(run, run.first, figures.trackers)
    if run.first and run.leads:
        write_best(run)  # a kill may have come between its checkpoint and it
    if run.is_last(run.first):
        with run.state.group.barrier():
            if run.leads:
                write_result(run, run.first)
                run.report()
    figures.listen()
    _stop_if_requested(run, figures, run.first, f"before the next step; {_AGAIN}")


def _lacks_grid(run: Run, step: int) -> bool:
    """Tells whether a sample grid belongs to the step and is not there."""
    due = step > 0 and run.sample.is_due(step, run.epoch)
    return bool(run.sample.prompts) and due and not run.folder.has_sample(step)


class _Figures:
    """Takes each step's figures to log, console and trackers, one step late: meanwhile the device has work."""

    def __init__(self, run: Run, console: Console, trackers: Trackers) -> None:
        self.last: dict[str, Any] = {}
        self.trackers = trackers
        self._run, self._console = run, console
        self._pending: _Pending | None = None
        self._ended = 0.0
        self._signal = self._asked = 0

    @property
    def stopping(self) -> bool:
        """Whether a signal asks the run to stop: of several processes one that all know of, as of the last figures."""
        return self._signal != 0 if self._run.state.exchanged else self._run.session.stop.requested

    def asked(self) -> int:
        """Takes what is to be done after this step; of several processes what all of them know of."""
        asked, self._asked = _take_requests(self._run) if self._run.state.exchanged is None else self._asked, 0
        return asked

    def push(self, launched: _Pending) -> None:
        """Flushes the step before the one just launched."""
        self.flush()
        self._pending = launched

    def flush(self, validated: Callable[[int], Mapping[str, Any]] | None = None) -> None:
        """Waits for the figures in flight. Raises NonFiniteError. `validated` measures after the step, for its line."""
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        with self._run.state.group.meeting():  # they have sums over all processes
            values = pending.figures()
        figures = dict(zip(self._run.state.figure_names, values.tolist(), strict=True))
        before, self._ended = self._ended, time.monotonic() if pending.end is None else pending.end
        if not figures["healthy"]:
            raise NonFiniteError(_diagnosis(self._run, pending, figures))
        seconds = self._ended - max(before, pending.begin)
        if self._run.state.exchanged is not None:
            self.merge_signals(map(int, _of_each(self._run, figures, "signal")))
        self.last = _record(self._run, pending, figures, seconds)
        self.last |= self._of_images(pending)
        if validated is not None:
            self.last |= {"validation": validated(pending.step)}
        self._console.show(self.last, seconds)
        if self._run.leads:
            self._run.folder.log(self.last, {"steps": self._run.train.steps, **self._console.meter.figures()})
        self.trackers.write(self.last)
        if self._run.leads:
            self._run.session.callbacks.step(self.last)

    def _of_images(self, pending: _Pending) -> dict[str, Any]:
        """Takes the losses of a step's images, and now and then says which stand out."""
        images, every = self._run.images, self._run.log.images_every
        if images is None:
            return {}
        for files, losses in pending.image_losses:
            images.add(files, losses())
        return {} if pending.step % every else {"images": images.summary()}

    def listen(self) -> None:
        """Asks between steps which signal each process got."""
        self.merge_signals(map(int, self._run.state.group.all_gather(str(self._run.session.stop.signal_number))))

    def merge_signals(self, signals: Iterable[int]) -> None:
        """Takes a signal that any of the processes got as its own; `signals` has their numbers, 0 for none."""
        told = [divmod(number, _SAMPLE) for number in signals]
        self._signal = max(signal for _, signal in told)
        self._asked |= max(asked for asked, _ in told) * _SAMPLE  # the leading process alone asks
        self._run.session.stop.signal_number = self._run.session.stop.signal_number or self._signal


def _take_requests(run: Run) -> int:
    """Takes what was asked of the run. Returns what is to be done after this step; a stop is a signal's."""
    kinds = run.folder.requests() if run.leads else set()
    for kind in sorted(kinds):
        _LOG.info("asked to %s", kind)
    if "stop" in kinds:
        run.session.stop.signal_number = run.session.stop.signal_number or signal.SIGINT
    grids = bool(run.sample.prompts) and run.sample.repeats
    return (_SAMPLE if "sample" in kinds and grids else 0) | (_SAVE if "save" in kinds else 0)


def _of_each(run: Run, figures: Mapping[str, float], name: str) -> list[float]:
    """Lists what each process told in a step, by rank; nothing in a process by itself."""
    if run.state.exchanged is None:
        return []
    return [figures[f"{name}_{rank}"] for rank in range(run.state.group.world)]


def _device_work(fn: Callable[[], None], run: Run) -> Callable[[], None]:
    """Returns `fn`, where a script's code has a part in it, so that reading a value back is an error on the CPU too.

    On a GPU the second step is captured, and refuses it itself.
    """
    if not run.sources.code:
        return fn

    def work() -> None:
        try:
            with nullcontext() if get_backend(run.session.device).asynchronous else capturing():
                fn()
        except HostRead as error:
            raise ConfigError(
                f"{_line_of(error)}: a step is captured, and reads no value back to the host: no float(), item(), "
                "numpy() or branch on a tensor's value; compute with tensors, such as F.where"
            ) from error

    return work


def _line_of(error: BaseException) -> str:
    """Returns the innermost line outside of the package through which an error came, as "file.py:12"."""
    frames = [one for one in traceback.extract_tb(error.__traceback__) if not one.filename.startswith(_PACKAGE)]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "a script's code"


class _Stepper:
    """Runs one optimizer step: its micro-batches through the captured step of their shape, then the update."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._micro: dict[Signature, tuple[Batch, Callable[[], None]]] = {}
        self._update = capture(_device_work(lambda: update(run.state), run), run.session.device)
        reduced = partial(reduce, run.state)
        self._reduce = capture(reduced, run.session.device) if run.state.group.captured else reduced
        self._backend = get_backend(run.session.device)
        self._norms = GradientNorms(run.state.optimizer, block_names(run.state.denoiser.network))

    def __call__(self, step: int) -> _Pending:
        run, begin = self._run, time.monotonic()
        files: list[str] = []
        images, waited, image_losses = 0, 0.0, []
        for _ in range(run.gradient.accumulation):
            fail_point("train.in_step")
            host = run.loader.take()
            waited += run.loader.wait_ms
            batch, run_micro = self._for(host)
            batch.fill(host)
            run_micro()
            files += host.files
            if batch.per_image_loss is not None:
                image_losses.append((host.files, self._backend.get_async(batch.per_image_loss)))
            images += batch.size
        fail_point("train.before_update")
        inject_nan("train.gradient", run.state.optimizer.arena.grads)
        if run.state.exchanged is not None:
            asked = _take_requests(run)
            run.state.exchanged.put(run.session.stop.signal_number + asked, waited, self._backend.memory().peak or 0)
            self._reduce()
        every = run.log.gradients_every
        gradients = self._norms.read() if every and step % every == 0 else {}
        self._update()
        end = None if self._backend.asynchronous else time.monotonic()
        figures = self._backend.get_async(run.state.figures)
        return _Pending(step, figures, tuple(files), images, waited, begin, end, gradients, tuple(image_losses))

    def _for(self, host: HostBatch) -> tuple[Batch, Callable[[], None]]:
        signature = host.signature
        if signature not in self._micro:
            telling = self._run.images is not None
            batch = Batch(host, self._backend, self._run.state.dtype, telling=telling)
            work = _device_work(lambda: micro(self._run.state, batch), self._run)
            self._micro[signature] = batch, capture(work, self._run.session.device)
        return self._micro[signature]


def _record(run: Run, p: _Pending, figures: dict[str, float], seconds: float) -> dict[str, Any]:
    peak = max([get_backend(run.session.device).memory().peak or 0, *map(int, _of_each(run, figures, "memory"))])
    return {
        "step": p.step,
        "epoch": round(run.epoch(p.step), 4),
        "loss": figures["loss"],
        "lr": figures["lr"],
        **{name: figures[name] for name in run.state.optimizer.metric_names[len(METRICS) :]},
        "grad_norm": figures["grad_norm"],
        "loss_scale": figures["loss_scale"],
        "skipped": int(figures["skipped"]),
        "images_per_s": round(p.images * run.state.group.world / max(seconds, 1e-9), 4),
        "data_wait_ms": round(max([p.wait_ms, *_of_each(run, figures, "wait_ms")]), 3),
        "memory": peak or None,
        **({"gradients": p.gradients} if p.gradients else {}),
    }


def _diagnosis(run: Run, p: _Pending, figures: dict[str, float]) -> str:
    group = run.state.group
    if group.world > 1:
        spoilt = [rank for rank, loss in enumerate(_of_each(run, figures, "loss")) if not np.isfinite(loss)]
        if group.rank not in (spoilt or [0]):
            return f"rank {group.rank} stops: see what rank {spoilt[0] if spoilt else 0} says"
    where = "loss" if not np.isfinite(figures["loss"]) else "gradient"
    scale = ""
    if run.train.precision == "fp16":
        fixed = f" with train.loss_scale = {run.train.loss_scale}"
        scale = " at the smallest loss scale" if run.train.loss_scale == "dynamic" else fixed
    return (
        f"the {where} of step {p.step} is not finite{scale} (loss {figures['loss']}, gradient norm "
        f"{figures['grad_norm']}); the update was not made and nothing newer than the last checkpoint is kept.\n"
        f"  files in that step: {', '.join(p.files)}\n"
        f"  look at those files first; then try {_advice(run.gradient, run.train)}"
    )


def _advice(gradient: GradientSection, train: TrainSection) -> str:
    """Lists settings that may help against overflow and are not set already."""
    advice = ["a lower optimizer.lr"]
    if not 0 < gradient.clip_norm <= 1:
        advice.append("gradient.clip_norm=1")
    if train.loss_scale != "dynamic":
        advice.append('train.loss_scale="dynamic"')
    if train.precision == "fp16":
        advice.append("train.precision=bf16")
    return " or ".join(filter(None, (", ".join(advice[:-1]), advice[-1])))


def _sample_images(run: Run, step: int, trackers: Trackers) -> None:
    begin = time.monotonic()
    with run.state.optimizer.averaged():
        run.sample_images(step)
    if not run.leads:
        return
    if run.folder.sample(step).exists():
        images, seconds = counted(len(run.sample.prompts), "image"), time.monotonic() - begin
        _LOG.info("grid of step %d: %s in %.3g s: %s", step, images, seconds, run.folder.sample(step))
    trackers.show(step, run.folder.sample(step), [prompt.text for prompt in run.sample.prompts])
    run.session.callbacks.sample(step, run.folder.sample(step))
