"""`flame-train show`: serves the pages of runs until Ctrl-C, to this machine's browser or to whoever has a token."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import secrets
import socket
import webbrowser
from collections.abc import Callable, Sequence
from pathlib import Path

from flame_train.errors import ConfigError, EnvironmentFault

from .guard import HOST, TOKEN, Guard, is_own
from .library import Library


def show(
    folders: Sequence[Path],
    port: int,
    browser: bool,
    told: Callable[[str], None],
    host: str = HOST,
    token: bool = False,
) -> None:
    """Serves the runs in some folders.

    Args:
        folders: runs, or folders with runs in them.
        port: where to listen; 0: any that is free.
        browser: whether to open the page, where it needs no token.
        told: gets the page's address, with the token where one is needed.
        host: the address to listen on. Where other machines reach it, each request needs a token.
        token: whether one is needed on an address of this machine alone, too.

    Raises:
        ConfigError: no run is there, the port is taken, or the address is none of this machine.
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
    with listening(port, host) as listener:
        port = listener.getsockname()[1]
        secret = secrets.token_urlsafe(32) if token or not is_own(host) else ""
        address = f"http://{_name(host)}:{port}/" + (f"?{TOKEN}={secret}" if secret else "")
        app = Guard(Pages(library).app(), port, host, secret)
        config = uvicorn.Config(
            app, log_level="warning", access_log=False, server_header=False, lifespan="off", timeout_graceful_shutdown=1
        )
        told(address)
        if browser and not secret:  # whose address other users would see among this machine's processes
            webbrowser.open(address)
        with contextlib.suppress(KeyboardInterrupt):
            uvicorn.Server(config).run(sockets=[listener])


def listening(port: int, host: str = HOST) -> socket.socket:
    """A socket at an address of this machine. Raises ConfigError where it is none, or the port is taken."""
    try:
        version = ipaddress.ip_address(host).version
    except ValueError:
        raise ConfigError(
            f"--host: expected an address such as {HOST}, or 0.0.0.0 for all of this machine, got {host}"
        ) from None
    listener = socket.socket(socket.AF_INET6 if version == 6 else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.bind(socket.getaddrinfo(host, port, listener.family, listener.type)[0][4])
        listener.listen()
    except OSError as error:
        listener.close()
        if error.errno not in (errno.EADDRINUSE, errno.EACCES):
            raise ConfigError(f"--host {host}: this machine has no such address; 0.0.0.0 is all that it has") from None
        raise ConfigError(f"--port {port}: {error.strerror}; choose another, or leave it out for any") from None
    return listener


def _name(host: str) -> str:
    """What stands for an address in a URL: of all addresses of this machine its name."""
    if ipaddress.ip_address(host).is_unspecified:
        return socket.gethostname()
    return f"[{host}]" if ":" in host else host
