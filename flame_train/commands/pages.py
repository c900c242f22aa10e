"""The commands of `flame-train` that serve pages to a browser. As in cli.py, each imports when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flame_train.commands.parameters import Debug

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
    debug: Debug = False,
) -> None:
    """Open a local window that sets up runs, and shows those below its folders."""
    from flame_train.show.serve import needing_the_extra

    with needing_the_extra():
        from flame_train.ui.app import ui
    ui(root or [Path()], port, lambda address: typer.echo(f"{address}  (Ctrl-C ends it)"))
