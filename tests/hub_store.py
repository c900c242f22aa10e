"""A hub on this machine, to stand for the Hugging Face hub: a folder's files, listed and sent in whole or in part."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants, hf_api

from flame_train.io import hub


class Store(BaseHTTPRequestHandler):
    """A hub with the files of a folder: its list, and each file, whole or the part that is asked for."""

    def do_GET(self) -> None:
        folder, heard = self.server.folder, self.server.heard  # type: ignore[attr-defined]
        self.server.asked.append(self.path)  # type: ignore[attr-defined]
        if self.path.startswith("/api/models/owner/small"):
            names = [str(path.relative_to(folder)) for path in sorted(folder.rglob("*")) if path.is_file()]
            model = {"id": "owner/small", "sha": "0" * 40, "siblings": [{"rfilename": name} for name in names]}
            tree = [{"type": "file", "path": name, "size": 1, "oid": name} for name in names]
            listed = json.dumps(tree if "/tree/" in self.path else model).encode()
            return self.answer(200, listed, {"Content-Type": "application/json"})
        path = folder / self.path.partition("/resolve/")[2].partition("/")[2].partition("?")[0]
        if not path.is_file():
            return self.answer(404, b"", {"X-Error-Code": "EntryNotFound"})
        content, part = path.read_bytes(), self.headers.get("Range")
        facts = {"ETag": f'"{path.name}"', "X-Repo-Commit": "0" * 40}
        if path.suffix == ".safetensors":
            facts |= {"X-Linked-Etag": f'"{hashlib.sha256(content).hexdigest()}"', "X-Linked-Size": str(len(content))}
        if part and self.server.in_parts:  # type: ignore[attr-defined]
            begin, end = map(int, part.removeprefix("bytes=").split("-"))
            content = content[begin : end + 1]
            return self.answer(206, content, facts | {"Content-Range": f"bytes {begin}-{end}/*"})
        if self.command == "GET":
            heard.append(path.name)
        return self.answer(200, content, facts)

    def answer(self, status: int, content: bytes, facts: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in facts.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "GET":
            with contextlib.suppress(ConnectionError):
                self.wfile.write(content)

    do_HEAD = do_GET  # noqa: N815

    def log_message(self, *arguments: object) -> None:
        pass


@contextlib.contextmanager
def hub_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """A hub on this machine, with the files of its `folder`, and an empty cache; `heard` is what it sent whole."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Store) as server:
        server.folder, server.asked, server.heard = tmp_path / "there", [], []  # type: ignore[attr-defined]
        server.in_parts = True  # type: ignore[attr-defined]
        threading.Thread(target=server.serve_forever, daemon=True).start()
        endpoint = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(hf_api.api, "endpoint", endpoint)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        hub._fetch_part.cache_clear()
        hub._headers.cache_clear()
        yield server
        server.shutdown()
