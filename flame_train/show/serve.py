"""Serves the pages of `show` and `ui` until Ctrl-C, to this machine's browser or to whoever has a token.

As a rule the socket is bound to 127.0.0.1, so other machines do not reach it. A page of another site could: its name
may resolve to 127.0.0.1 (DNS rebinding). Its requests carry its name in the Host header, and are refused.

Where others reach the socket, each request needs a token, as Jupyter's do. The address that the command prints has it.
The answer to that address keeps it as a cookie, which no other site's page can send, and leads on without it.

`ui` changes things, so it always needs the token. A change must come from its own pages: browsers say which page asks.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import ipaddress
import os
import secrets
import socket
import webbrowser
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qsl, quote, urlencode

from flame_train.errors import ConfigError, EnvironmentFault

from .library import Library

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

HOST: Final = "127.0.0.1"
TOKEN: Final = "token"
_TOKEN_VARIABLE: Final = "FLAME_TRAIN_TOKEN"
_SHORTEST: Final = 16  # characters
_LARGEST: Final = 2 << 20  # bytes of what a page sends

_HEADERS: Final[Mapping[str, str]] = {
    # thumbnails set styles; no script runs but the files of this server, whatever a caption holds
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
        "connect-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}


class Guard:
    """Refuses what is not asked for this server's own address, or may not change something. Adds headers to answers.

    Args:
        app: what answers.
        port: where it listens.
        host: the address that it listens on. Any name may stand for one that other machines reach.
        token: what each request must show; empty: nothing. Other machines need one.
        changes: whether its own pages may change something; then it needs a token.

    Raises:
        ValueError: other machines reach the address, or it changes things, and there is no token.
    """

    def __init__(self, app: App, port: int, host: str = HOST, token: str = "", changes: bool = False) -> None:
        if not (token or (is_own(host) and not changes)):
            raise ValueError(f"expected a token for {host}, which other machines reach")
        self._app, self._token, self._changes = app, token, changes
        self._cookie = f"flame-train-{port}"  # a browser keeps cookies by host, for all of its ports
        names = (f"[{host}]" if ":" in host else host, "localhost")
        self._hosts = {f"{name}:{port}".encode() for name in names} if is_own(host) else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return
        hosts = [value for name, value in scope["headers"] if name == b"host"]
        if len(hosts) != 1 or (self._hosts is not None and hosts[0].lower() not in self._hosts):
            await _say(send, 421, "this server answers for its own address alone")
        elif scope["method"] not in ("GET", "HEAD", *(("POST",) if self._changes else ())):
            await _say(send, 405, "this server only shows")
        elif self._changes and (refused := _refused(scope)):
            await _say(send, *refused)
        elif not self._token or self._is(_cookies(scope).get(self._cookie, "")):
            await self._app(scope, receive, _with_headers(send))
        elif self._is(dict(query := parse_qsl(scope["query_string"].decode("latin-1"))).get(TOKEN, "")):
            await self._lead_on(scope["path"], query, send)
        else:
            await _say(send, 403, "this page needs a token: open the whole address that flame-train printed")

    def _is(self, token: str) -> bool:
        return hmac.compare_digest(token.encode(), self._token.encode())

    async def _lead_on(self, path: str, query: list[tuple[str, str]], send: Send) -> None:
        """Redirects to the same page, without the token in its address; the browser shows that from now on."""
        rest = urlencode([(name, value) for name, value in query if name != TOKEN])
        place = f"/{quote(path.strip('/'))}" + (f"?{rest}" if rest else "")
        cookie = f"{self._cookie}={self._token}; Path=/; HttpOnly; SameSite=Lax"
        await _say(send, 303, "this way", {"Location": place, "Set-Cookie": cookie, "Cache-Control": "no-store"})


def is_own(host: str) -> bool:
    """Tells whether an address is one that this machine alone reaches."""
    return ipaddress.ip_address(host).is_loopback


def _refused(scope: Scope) -> tuple[int, str] | None:
    """Returns why a request may not come: from another site's page, or as a change that no page of ours sends."""
    headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
    navigates = scope["method"] == "GET" and headers.get(b"sec-fetch-mode") == "navigate"
    if headers.get(b"sec-fetch-site", "none") not in ("same-origin", "none") and not navigates:
        return 403, "this answers its own pages alone"
    if scope["method"] != "POST":
        return None
    size = headers.get(b"content-length", "")
    if headers.get(b"origin") != f"http://{headers[b'host']}":
        return 403, "a change must come from a page of this server"
    if headers.get(b"content-type", "").partition(";")[0].strip() != "application/json":
        return 415, "expected JSON"
    if not (size.isascii() and size.isdecimal() and len(size) < 12):
        return 411, "expected the length of what is sent"
    return (413, f"expected at most {_LARGEST:,} bytes") if int(size) > _LARGEST else None


def _cookies(scope: Scope) -> dict[str, str]:
    sent = [value.decode("latin-1") for name, value in scope["headers"] if name == b"cookie"]
    pairs = (part.strip().partition("=") for part in ";".join(sent).split(";"))
    return {name: value for name, _, value in pairs}


def _with_headers(send: Send) -> Send:
    async def sent(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message["headers"], *_encoded(_HEADERS)]
        await send(message)

    return sent


async def _say(send: Send, status: int, why: str, more: Mapping[str, str] | None = None) -> None:
    headers = _encoded({"Content-Type": "text/plain; charset=utf-8", **_HEADERS, **(more or {})})
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": f"{why}\n".encode()})


def _encoded(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.lower().encode(), value.encode()) for name, value in headers.items()]


def show(
    folders: Sequence[Path],
    port: int,
    browser: bool,
    say: Callable[[str], None],
    host: str = HOST,
    token: bool = False,
) -> None:
    """Serves the runs in some folders.

    Args:
        folders: runs, or folders with runs in them.
        port: where to listen; 0: any that is free.
        browser: whether to open the page, where it needs no token.
        say: gets the page's address, with the token where one is needed.
        host: the address to listen on. Where other machines reach it, each request needs a token.
        token: whether one is needed on an address of this machine alone, too. It is `FLAME_TRAIN_TOKEN`, else made.

    Raises:
        ConfigError: no run is there, the port is taken, the address is none of this machine, or the token is short.
        EnvironmentFault: the extra is not installed.
    """
    library = Library(folders)
    with needing_the_extra():
        from .app import Pages
    serve(Pages(library).app(), port, browser, say, host, token)


@contextlib.contextmanager
def needing_the_extra() -> Iterator[None]:
    """Raises EnvironmentFault where the body cannot import what the extra `show` has."""
    try:
        yield
    except ImportError as error:
        raise EnvironmentFault(
            f"the page needs the extra `show`, and {error.name} is missing: pip install 'flame-train[show]'; "
            "report.html in the run folder needs nothing"
        ) from error


def serve(
    pages: App,
    port: int,
    browser: bool,
    say: Callable[[str], None],
    host: str = HOST,
    token: bool = False,
    changes: bool = False,
) -> None:
    """Serves some pages until Ctrl-C.

    Args:
        pages: what answers, without its guard.
        port, browser, say, host, token: as `show` takes them.
        changes: whether the pages change something.

    Raises:
        ConfigError: the port is taken, the address is none of this machine, or the token is short.
        EnvironmentFault: the extra is not installed.
    """
    with needing_the_extra():
        import uvicorn
    with listening(port, host) as listener:
        port = listener.getsockname()[1]
        given = _given_token()
        secret = given or secrets.token_urlsafe(32) if token or given or not is_own(host) else ""
        written = f"${_TOKEN_VARIABLE}" if given else secret  # who gave it knows it, and logs are read by others
        address = f"http://{_name(host)}:{port}/" + (f"?{TOKEN}={written}" if secret else "")
        app = Guard(pages, port, host, secret, changes)
        config = uvicorn.Config(
            app, log_level="warning", access_log=False, server_header=False, lifespan="off", timeout_graceful_shutdown=1
        )
        say(address)
        if browser and not secret:  # whose address other users would see among this machine's processes
            webbrowser.open(address)
        with contextlib.suppress(KeyboardInterrupt):
            uvicorn.Server(config).run(sockets=[listener])


def _given_token() -> str:
    """Returns the token of the environment, for a server that starts by itself; empty: none. Raises ConfigError."""
    given = os.environ.get(_TOKEN_VARIABLE, "")
    if given and (len(given) < _SHORTEST or quote(given, safe="") != given):
        raise ConfigError(
            f"{_TOKEN_VARIABLE}: expected {_SHORTEST} letters, digits, - or _, or more; "
            "`openssl rand -hex 24` makes such a token"
        )
    return given


def listening(port: int, host: str = HOST) -> socket.socket:
    """Returns a socket at an address of this machine. Raises ConfigError where it is none, or the port is taken."""
    try:
        version = ipaddress.ip_address(host).version
    except ValueError:
        raise ConfigError(
            f"--host: expected an address such as {HOST}, or 0.0.0.0 for all of this machine, got {host}"
        ) from None
    listener = socket.socket(socket.AF_INET6 if version == 6 else socket.AF_INET, socket.SOCK_STREAM)
    if os.name == "posix":  # a server that was killed leaves connections, which keep its port for a minute
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
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
    """Returns what stands for an address in a URL: of all addresses of this machine its name."""
    if ipaddress.ip_address(host).is_unspecified:
        return socket.gethostname()
    return f"[{host}]" if ":" in host else host
