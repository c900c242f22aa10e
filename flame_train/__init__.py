"""flame-train: LoRA training for diffusion models without PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flame_train.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from os import PathLike
    from pathlib import Path

__all__ = ["__version__", "train"]


def train(
    config: str | PathLike[str] | Mapping[str, Any],
    *,
    overrides: Sequence[str] = (),
    device: str = "cuda",
    on_step: Callable[[Mapping[str, Any]], object] | None = None,
    on_checkpoint: Callable[[int, Path], object] | None = None,
    on_sample: Callable[[int, Path], object] | None = None,
) -> dict[str, Any]:
    """Trains a LoRA, or continues its run, as `flame-train train` does, with the same bytes.

        flame_train.train("my.toml", on_step=lambda record: print(record["step"], record["loss"]))

    Args:
        config: the config's file, or its sections as a mapping: `{"model": {"checkpoint": ...}, ...}`.
        overrides: `section.key=value`, on top of it.
        device: "cuda", "cuda:1" and so on, or "cpu".
        on_step: `on_step(record)` gets each line of the run's log, a read-only mapping, one step late.
        on_checkpoint: `on_checkpoint(step, folder)` gets a step and the folder of its checkpoint, a Path.
        on_sample: `on_sample(step, file)` gets a step and the file of its sample grid, a Path.

    Returns:
        The result that the command prints with `--json`: the run folder, the LoRA's file, the last step's metrics.

    Raises:
        TypeError: no config, or a callback that does not take these arguments.
        flame_train.errors.FlameError: whatever a user can meet; `exit_code` says which kind.
    """
    import os
    from collections.abc import Mapping

    from flame_train.errors import kind_of
    from flame_train.run.commands.stages import train as run
    from flame_train.training.session import Callbacks

    value: object = config
    if not isinstance(value, (str, os.PathLike, Mapping)):
        expected = "the config's file, or its sections as a mapping"
        raise TypeError(f"flame_train.train: expected {expected}, got {kind_of(value)}")
    source = os.fspath(config) if isinstance(config, (str, os.PathLike)) else config
    return run(source, overrides, device, False, callbacks=Callbacks(on_step, on_checkpoint, on_sample))
