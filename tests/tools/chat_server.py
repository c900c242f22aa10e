"""A server that speaks OpenAI's chat, for tests: what it is asked is kept, and what it answers is a function."""

from __future__ import annotations

import base64
import io
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from PIL import Image

Reply = tuple[int, Any] | tuple[int, Any, dict[str, str]]


@dataclass
class Asked:
    """One request for a caption."""

    image: Image.Image
    question: str
    body: dict[str, Any]
    headers: dict[str, str]


def says(text: str | None, finish: str = "stop") -> Reply:
    """The answer of a server that has a caption."""
    return 200, {"choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": finish}]}


@dataclass
class ChatServer:
    """The server, while it runs."""

    address: str
    reply: Callable[[Asked], Reply] = lambda asked: says("a shape")
    models: Reply = (200, {"data": [{"id": "seer"}]})
    asked: list[Asked] = field(default_factory=list)
    gets: list[str] = field(default_factory=list)
    most_at_once: int = 0


@contextmanager
def chat_server() -> Iterator[ChatServer]:
    """Runs one on a free port."""
    lock, inside = threading.Lock(), [0]

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            served.gets.append(self.path)
            self._send(served.models)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            text, image = body["messages"][0]["content"]
            kind, _, data = image["image_url"]["url"].partition(",")
            assert (self.path, kind) == ("/v1/chat/completions", "data:image/jpeg;base64")
            picture = Image.open(io.BytesIO(base64.b64decode(data, validate=True)))
            asked = Asked(picture, text["text"], body, dict(self.headers))
            with lock:
                inside[0] += 1
                served.most_at_once = max(served.most_at_once, inside[0])
                served.asked.append(asked)
            reply = served.reply(asked)
            with lock:
                inside[0] -= 1
            self._send(reply)

        def _send(self, reply: Reply) -> None:
            status, content, *headers = reply
            raw = content.encode() if isinstance(content, str) else json.dumps(content).encode()
            try:
                self.send_response(status)
                for name, value in {"Content-Length": str(len(raw)), **(headers[0] if headers else {})}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(raw)
            except OSError:
                return  # who asked is gone

        def log_message(self, *_: object) -> None:
            return

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        served = ChatServer(f"http://127.0.0.1:{server.server_address[1]}/v1")
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield served
        finally:
            server.shutdown()
            thread.join()
