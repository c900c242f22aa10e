"""`flame-train show`: serves the pages of runs to this machine's browser until Ctrl-C."""

from __future__ import annotations

import contextlib
import errno
import socket
import webbrowser
from collections.abc import Callable, Sequence
from pathlib import Path

from flame_train.errors import ConfigError, EnvironmentFault

from .guard import HOST, Guard
from .library import Library


def show(folders: Sequence[Path], port: int, browser: bool, told: Callable[[str], None]) -> None:
    """Serves the runs in some folders.

    Args:
        folders: runs, or folders with runs in them.
        port: where to listen; 0: any that is free.
        browser: whether to open the page.
        told: gets the page's address.

    Raises:
        ConfigError: no run is there, or the port is taken.
        EnvironmentFault: the extra is not installed.
    """
    library = Library(folders)
    try:
        import uvicorn

        from .app import Pages
    except ImportError as error:
        raise EnvironmentFault(
            f"the page needs the extra `show`, and {error.name} is missing: pip install 'flame-train[show]'; "
            "report.html in the run folder needs nothing"
        ) from error
    with listening(port) as listener:
        address = f"http://{HOST}:{listener.getsockname()[1]}/"
        app = Guard(Pages(library).app(), listener.getsockname()[1])
        config = uvicorn.Config(
            app, log_level="warning", access_log=False, server_header=False, lifespan="off", timeout_graceful_shutdown=1
        )
        told(address)
        if browser:
            webbrowser.open(address)
        with contextlib.suppress(KeyboardInterrupt):
            uvicorn.Server(config).run(sockets=[listener])


def listening(port: int) -> socket.socket:
    """A socket that this machine alone reaches. Raises ConfigError where the port is taken or not allowed."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.bind((HOST, port))
        listener.listen()
    except OSError as error:
        listener.close()
        if error.errno not in (errno.EADDRINUSE, errno.EACCES):
            raise
        raise ConfigError(f"--port {port}: {error.strerror}; choose another, or leave it out for any") from None
    return listener
