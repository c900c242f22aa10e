"""Who may ask the server: this machine's browser for its own address, and nobody else.

The socket is bound to 127.0.0.1, so other machines do not reach it. A page of another site could: its name may resolve
to 127.0.0.1 (DNS rebinding). Its requests carry its name in the Host header, and are refused.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any, Final

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

HOST: Final = "127.0.0.1"

_HEADERS: Final[Mapping[str, str]] = {
    # Plotly sets styles; no script runs but the files of this server, whatever a caption holds
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
    """Refuses what is not asked for this server's own address, or would change something. Adds headers to answers."""

    def __init__(self, app: App, port: int) -> None:
        self._app = app
        self._hosts = {f"{name}:{port}".encode() for name in (HOST, "localhost")}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return
        hosts = [value for name, value in scope["headers"] if name == b"host"]
        if len(hosts) != 1 or hosts[0].lower() not in self._hosts:
            await _refuse(send, 421, "this server answers for its own address alone")
        elif scope["method"] not in ("GET", "HEAD"):
            await _refuse(send, 405, "this server only shows")
        else:
            await self._app(scope, receive, _with_headers(send))


def _with_headers(send: Send) -> Send:
    async def sent(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message["headers"], *_encoded(_HEADERS)]
        await send(message)

    return sent


async def _refuse(send: Send, status: int, why: str) -> None:
    headers = _encoded({"Content-Type": "text/plain; charset=utf-8", **_HEADERS})
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": f"{why}\n".encode()})


def _encoded(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.lower().encode(), value.encode()) for name, value in headers.items()]
