"""The command of `flame-train` that trains many runs. As in cli.py, it imports its modules when it runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from flame_train.commands.arguments import AsJson, Debug, device_name
from flame_train.commands.output import show

sweep_app = typer.Typer()


@sweep_app.command("sweep")
def sweep_command(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="TOML file with config, folder, and grid or runs.")],
    where: Annotated[
        Literal["here", "slurm", "ray"], typer.Option("--where", help="slurm: write an array's script and stop.")
    ] = "here",
    device: Annotated[
        list[str] | None,
        typer.Option(
            "--device",
            parser=device_name,
            metavar="cuda|cuda:N|cpu",
            help="One run at a time on each; repeatable. Here, default: every GPU.",
        ),
    ] = None,
    status: Annotated[bool, typer.Option("--status", help="Only show the table of runs.")] = False,
    only: Annotated[int | None, typer.Option("--only", help="Train one run in this process, by its number.")] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Train the runs of a sweep that are not done yet, and show all of them."""
    if only is not None:
        from flame_train.run.commands.stages import train
        from flame_train.sweep.command import one_of

        config, overrides = one_of(file, only)
        show(train(config, overrides, (device or ["cuda"])[0], False), as_json)
        return
    from flame_train.sweep.command import sweep

    devices = device or (["cuda"] if where != "here" or status else _every_gpu())
    result, code = sweep(file, where, devices, status)
    show(result, as_json)
    sys.stdout.flush()
    _end_with(code)


def _end_with(code: int) -> None:
    """Ends the command with an exit code. Raises typer.Exit."""
    raise typer.Exit(code)


def _every_gpu() -> list[str]:
    """Every GPU of this machine; without one the error of a device that is not there."""
    from flame_train.engine.backend.cuda import gpu_count

    return [f"cuda:{number}" for number in range(gpu_count())] or ["cuda"]
