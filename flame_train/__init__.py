"""flame-train: LoRA training for diffusion models without PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flame_train.errors import STOP
from flame_train.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from os import PathLike
    from pathlib import Path

__all__ = ["STOP", "__version__", "register", "train"]


def register(
    *,
    optimizer: type | None = None,
    loss: type | None = None,
    weighting: type | None = None,
    timestep_sampling: type | None = None,
    noise: type | None = None,
    schedule: type | None = None,
    adapter: type | None = None,
    sampler: type | None = None,
    objective: type | None = None,
) -> None:
    """Adds classes of your own to the choices of a config; call it before `train`.

        flame_train.register(optimizer=Signum)
        flame_train.train("my.toml", overrides=["optimizer.name=signum"])

    Each class derives from that of its kind, has a `name`, and declares its keys by `flame_train.settings.field`.

    Args:
        optimizer: derives from `flame_train.optimizers.OptimizerKind`.
        loss: derives from `flame_train.diffusion.losses.LossKind`.
        weighting: derives from `flame_train.diffusion.weightings.Weighting`.
        timestep_sampling: derives from `flame_train.diffusion.timestep_sampling.TimestepSampling`.
        noise: derives from `flame_train.diffusion.noise.NoiseKind`.
        schedule: derives from `flame_train.schedules.ScheduleKind`.
        adapter: derives from `flame_train.adapters.kinds.AdapterKind`.
        sampler: derives from `flame_train.diffusion.samplers.Sampler`.
        objective: derives from `flame_train.diffusion.objective_kind.ObjectiveKind`.

    Raises:
        TypeError: nothing to register, another class, a method or key that does not fit.
        ValueError: the name or a key is taken.
    """
    given = {kind: entry for kind, entry in locals().items() if entry is not None}
    if not given:
        raise TypeError("flame_train.register: expected a class, such as loss=MyLoss, got none")
    from flame_train.config import own_code

    for kind, entry in given.items():
        own_code.register(kind, entry)


def train(
    config: str | PathLike[str] | Mapping[str, Any],
    *,
    overrides: Sequence[str] = (),
    device: str = "cuda",
    gpus: int = 1,
    on_step: Callable[[Mapping[str, Any]], object] | None = None,
    on_checkpoint: Callable[[int, Path], object] | None = None,
    on_sample: Callable[[int, Path], object] | None = None,
    quiet: bool = False,
    dry_run: bool = False,
    accept_changed_code: bool = False,
) -> dict[str, Any]:
    """Trains a LoRA, or continues its run, as `flame-train train` does, with the same bytes.

        flame_train.train("my.toml", on_step=lambda record: print(record["step"], record["loss"]))

    A callback that returns `flame_train.STOP` ends the run after the present step, saved. What a callback raises does
    so too, and is raised again. The same call continues the run.

    Args:
        config: the config's file, or its sections as a mapping: `{"model": {"checkpoint": ...}, ...}`.
        overrides: `section.key=value`, on top of it.
        device: "cuda", "cuda:1" and so on, or "cpu".
        gpus: processes that train together, one a GPU. With more than one the script is started anew in each, and what
            follows this call runs there alone. Only the leading process has callbacks and a result; others get {}.
        on_step: `on_step(record)` gets each line of the run's log, a read-only mapping, one step late.
        on_checkpoint: `on_checkpoint(step, folder)` gets a step and the folder of its checkpoint, a Path.
        on_sample: `on_sample(step, file)` gets a step and the file of its sample grid, a Path.
        quiet: whether nothing shows how far the run is; warnings go to Python's `logging` all the same.
        dry_run: whether the run is only checked and planned.
        accept_changed_code: whether a run goes on although what a script registered for it has changed.

    Returns:
        The result that the command prints with `--json`: the run folder, the LoRA's file, the last step's metrics. A
        notebook shows it with the loss and the last samples. Of a run that a callback stopped `stopped` is True, and
        the LoRA is that of its newest checkpoint.

    Raises:
        TypeError: no config, or a callback that does not take these arguments.
        flame_train.errors.FlameError: whatever a user can meet; `exit_code` says which kind.
    """
    import os
    from collections.abc import Mapping

    from flame_train.distributed.launch import start_again
    from flame_train.engine.mode import gpu_number
    from flame_train.errors import ConfigError, kind_of
    from flame_train.run.commands.stages import train as run
    from flame_train.show.run_result import RunResult
    from flame_train.training.session import Callbacks

    value: object = config
    if not isinstance(value, (str, os.PathLike, Mapping)):
        expected = "the config's file, or its sections as a mapping"
        raise TypeError(f"flame_train.train: expected {expected}, got {kind_of(value)}")
    for name, switch in {"quiet": quiet, "dry_run": dry_run, "accept_changed_code": accept_changed_code}.items():
        if not isinstance(switch, bool):
            raise TypeError(f"flame_train.train: {name}: expected True or False, got {kind_of(switch)}")
    try:
        gpu_number(device)
    except ValueError as error:
        raise ConfigError(f"flame_train.train: {error}") from None
    if not isinstance(gpus, int) or gpus < 1:
        raise TypeError(f"flame_train.train: gpus: expected a number of processes from 1 on, got {gpus!r}")
    if gpus > 1 and not dry_run:
        start_again(gpus)
    source = os.fspath(config) if isinstance(config, (str, os.PathLike)) else config
    result = run(
        source,
        overrides,
        device,
        dry_run,
        callbacks=Callbacks(on_step, on_checkpoint, on_sample),
        processes=gpus,
        accept_changed_code=accept_changed_code,
        quiet=quiet,
    )
    return result if dry_run else RunResult(result)
