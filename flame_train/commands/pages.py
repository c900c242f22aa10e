"""The commands of `flame-train` that serve pages to a browser. As in cli.py, each imports when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flame_train.commands.parameters import Debug, device_name

pages_app = typer.Typer()


@pages_app.command("show")
def show_runs(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folder of a run, or one with runs in it.")],
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0: any that is free.")] = 0,
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Whether to open the page.")] = True,
    host: Annotated[
        str,
        typer.Option("--host", help="Address to listen on. Others than 127.0.0.1 need the token that is printed."),
    ] = "127.0.0.1",
    token: Annotated[
        bool, typer.Option("--token", help="Require a token on 127.0.0.1 too, where others use this machine.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Open a local page of runs, live or finished: curves, samples, dataset and config."""
    from flame_train.show.serve import show as serve

    serve(runs, port, browser, lambda address: typer.echo(f"{address}  (Ctrl-C ends it)"), host, token)


@pages_app.command("ui", epilog="Example: flame-train ui --root ~/loras --root ~/ComfyUI/models")
def window(
    root: Annotated[
        list[Path] | None,
        typer.Option("--root", metavar="DIR", help="Folder that it may read and write; repeatable. Default: this one."),
    ] = None,
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0: any that is free.")] = 0,
    device: Annotated[
        list[str] | None,
        typer.Option(
            "--device",
            parser=device_name,
            metavar="cuda:N",
            help="GPU that has one run of the queue at a time; repeatable. Default: every GPU.",
        ),
    ] = None,
    debug: Debug = False,
) -> None:
    """Open a local window that sets up, starts and queues runs, and shows those below its folders."""
    from flame_train.show.serve import needing_the_extra

    with needing_the_extra():
        from flame_train.ui.app import ui
    devices = device if device is not None else _gpus()
    ui(root or [Path()], port, lambda address: typer.echo(f"{address}  (Ctrl-C ends it; runs go on)"), devices)


def _gpus() -> list[str]:
    """Returns every GPU of this machine; none where none is usable."""
    from flame_train.engine.backend.cuda import gpu_count
    from flame_train.errors import EnvironmentFault

    try:
        return [f"cuda:{number}" for number in range(gpu_count())]
    except EnvironmentFault:
        return []
