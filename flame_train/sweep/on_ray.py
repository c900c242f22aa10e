"""Runs of a sweep as Ray's tasks: one whose worker or node dies is tried again on another."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, cast

from flame_train.errors import DeviceFault, EnvironmentFault, exit_status, lines_shown

from .here import output_of, saying
from .sweep_file import Planned

TRIES: Final = 5
"""How often a run is begun again after its worker died; each time it goes on from its last checkpoint."""


def run_on_ray(
    config: str, runs: Sequence[Planned], device: str, folder: str, say: Callable[[str], None]
) -> dict[str, int]:
    """Trains all runs, each a task with a GPU, or on the CPU with a core; returns each run's exit code by its name.

    The cluster is that of RAY_ADDRESS; without it Ray starts one on this machine. Nodes see the same files, or the
    config has `output.remote` and addresses.

    Args:
        config: the config that they have in common.
        runs: the runs.
        folder: the folder in which paths of the config begin.
        say: gets a line for each run that ends.

    Raises:
        EnvironmentFault: Ray is not installed.
    """
    try:
        import ray
    except ImportError:
        raise EnvironmentFault("Ray is not installed; install it with: pip install 'flame-train[ray]'") from None
    started_here, library = not ray.is_initialized(), cast(Any, ray)
    if started_here:
        library.init(address=os.environ.get("RAY_ADDRESS"), log_to_driver=False, include_dashboard=False)
    try:
        wants = {"num_gpus": 1} if device.startswith("cuda") else {"num_cpus": 1}
        task = library.remote(max_retries=TRIES, max_calls=1, **wants)(_train)
        waiting = {
            task.remote(config, run.overrides, device, folder, str(output_of(run).absolute())): run for run in runs
        }
        codes = dict[str, int]()
        while waiting:
            (ended, *_), _ = library.wait(list(waiting), num_returns=1)
            run = waiting.pop(ended)
            codes[run.name] = _code(library, ended)
            say(f"{run.name}: {'done' if codes[run.name] == 0 else f'ended with {codes[run.name]}'}")
        return codes
    finally:
        if started_here:
            library.shutdown()


def _train(config: str, overrides: Sequence[str], device: str, folder: str, output: str) -> int:
    """Trains one run in a worker's own process, so that it ends with it."""
    os.chdir(folder)
    from flame_train.run.commands.stages import train

    try:
        train(config, overrides, device, False)
    except Exception as error:
        with saying(Path(output)) as file:
            file.write(f"error: {lines_shown(str(error))}\n".encode())
        return exit_status(error)
    return 0


def _code(library: Any, task: Any) -> int:
    """Returns a task's exit code; that of a device failure where its workers died too often."""
    try:
        return int(library.get(task))
    except library.exceptions.RayError:
        return DeviceFault.exit_code
