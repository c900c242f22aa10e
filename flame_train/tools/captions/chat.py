"""Captions by a server that speaks OpenAI's chat with images: Ollama, LM Studio, vLLM, llama.cpp and others.

Only the address that was given is asked: no redirect is followed, and neither proxies nor logins of the environment
are used. A key is sent as a header and stands in no message.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self
from urllib.parse import urlsplit

import httpx
from PIL import Image

from flame_train.data.clips import load_still
from flame_train.errors import ConfigError, RemoteError, shown
from flame_train.tools.captions.captioner import Answer
from flame_train.version import __version__

_WAITS: Final = (1.0, 4.0, 15.0)  # seconds before another try
_LATER: Final = (408, 429, 500, 502, 503, 504)  # statuses of a server that may answer a moment later
_TIMES: Final = httpx.Timeout(30.0, read=600.0)  # seconds: a large model on a CPU takes minutes for an image
_MOST: Final = 1 << 20  # bytes of an answer
_QUALITY: Final = 92  # of the JPEG that is sent
_WORDS: Final = 300  # characters of a server's error that a message repeats
_THOUGHTS: Final = re.compile(r"<think>.*?</think>", re.DOTALL)
_NO_END: Final = re.compile(r".*</think>|<think>.*", re.DOTALL)  # some servers leave out the first mark


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked of each image.

    Attributes:
        text: the question.
        side: the longest side of the image that is sent, in pixels.
        max_tokens: the tokens after which an answer is cut.
    """

    text: str
    side: int = 1024
    max_tokens: int = 512


class ChatServer:
    """A captioner that asks a server."""

    def __init__(self, address: str, model: str, question: Question, key: str = "") -> None:
        """Takes an address as the server's manual has it, with or without /v1. An empty `model` is the only one there.

        Raises ConfigError for what is no such address.
        """
        self.address, self.model, self._question, self._key = base_address(address), model, question, key
        self._models: list[str] = []

    async def __aenter__(self) -> Self:
        """Connects, and asks which models there are. Raises RemoteError if nobody answers."""
        headers = {"User-Agent": f"flame-train/{__version__}"}
        headers |= {"Authorization": f"Bearer {self._key}"} if self._key else {}
        self._client = httpx.AsyncClient(headers=headers, timeout=_TIMES, trust_env=False, follow_redirects=False)
        try:
            status, content = await self._asked("GET", "models")
            self._models = _names(content) if status == 200 else []
            if status in (401, 403):
                raise RemoteError(f"{self._refusal(status, content)}; --key-variable names the variable with its key")
            if not self.model:
                self.model = self._only_model()
        except BaseException:
            await self._client.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes its connections."""
        await self._client.aclose()

    async def caption(self, image: Path, name: str) -> Answer:
        """Returns what the server says of an image. Raises DataError or RemoteError."""
        url = await asyncio.to_thread(data_url, image, name, self._question.side)
        content = [{"type": "text", "text": self._question.text}, {"type": "image_url", "image_url": {"url": url}}]
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": content}],
            "max_tokens": self._question.max_tokens,
            "temperature": 0.2,
        }
        for wait in (*_WAITS, None):
            try:
                status, answer = await self._asked("POST", "chat/completions", body)
                if status == 200:
                    return answer_in(answer)
                refused = RemoteError(self._refusal(status, answer))
            except RemoteError as error:
                status, refused = 0, error
            if wait is None or status not in (0, *_LATER):
                raise refused
            await asyncio.sleep(wait)
        raise AssertionError

    async def _asked(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> tuple[int, Any]:
        """Returns the status of a request, and the JSON of the answer or its text. Raises RemoteError without one."""
        try:
            async with self._client.stream(method, f"{self.address}/{path}", json=body) as response:
                if response.is_redirect:
                    raise RemoteError(
                        f"{self.address}: the server sends requests on to {shown(response.headers.get('location', ''))}"
                        ", and no other address is asked than that of --server; give the one that answers"
                    )
                received = bytearray()
                async for chunk in response.aiter_bytes():
                    received += chunk
                    if len(received) > _MOST:
                        raise RemoteError(f"{self.address}: expected a caption, got more than {_MOST:,} bytes")
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            reason = self._secretless(str(error) or type(error).__name__)
            raise RemoteError(
                f"{self.address}: the server does not answer ({reason}); start it, or correct --server"
            ) from None
        text = received.decode("utf-8", "replace")
        try:
            return response.status_code, json.loads(text)
        except (ValueError, RecursionError):
            return response.status_code, text

    def _refusal(self, status: int, content: Any) -> str:
        """Returns a server's error, with the models that it has where the model may be what is wrong."""
        error = content.get("error", content) if isinstance(content, dict) else content
        words = error.get("message", error) if isinstance(error, dict) else error
        there = f"; its models are {', '.join(self._models)}" if self._models and self.model not in self._models else ""
        return f"{self.address}: the server answered {status} ({self._secretless(str(words))}){shown(there)}"

    def _secretless(self, text: str) -> str:
        text = " ".join(text.split())
        return shown((text.replace(self._key, "(key)") if self._key else text)[:_WORDS])

    def _only_model(self) -> str:
        if len(self._models) == 1:
            return self._models[0]
        there = f"one of {', '.join(self._models)}" if self._models else "a model, and the server lists none"
        raise ConfigError(f"--model: expected {shown(there)}; add --model NAME")


def base_address(address: str) -> str:
    """Returns the address below which a server has chat/completions. Raises ConfigError for what is none."""
    try:
        parts = urlsplit(address.strip())
        is_known = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        parts, is_known = urlsplit(""), False
    if not is_known or parts.query or parts.fragment:
        raise ConfigError(
            f"--server: expected an address such as http://localhost:11434/v1, got {shown(address.partition('?')[0])}"
        )
    if parts.username or parts.password:
        raise ConfigError("--server: expected an address without a login; --key-variable names a variable with a key")
    path = parts.path.rstrip("/").removesuffix("/chat/completions").rstrip("/")
    return f"{parts.scheme}://{parts.netloc}{path or '/v1'}"


def data_url(image: Path, name: str, side: int) -> str:
    """Returns an image, or the middle of a clip, as a JPEG in a data URL, as training sees it. Raises DataError."""
    picture = Image.fromarray(load_still(image, name=name, middle=True))
    picture.thumbnail((side, side), Image.Resampling.LANCZOS)
    file = io.BytesIO()
    picture.save(file, "JPEG", quality=_QUALITY)
    return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode('ascii')}"


def answer_in(content: Any) -> Answer:
    """Returns the caption in a chat's answer, without the model's thoughts. Raises RemoteError if it has no caption."""
    try:
        choice = content["choices"][0]
        text = choice["message"]["content"] or ""
        if isinstance(text, list):  # parts, of which those of text count
            text = "".join(part.get("text", "") for part in text)
        text = _NO_END.sub("", _THOUGHTS.sub("", text))
    except (KeyError, IndexError, TypeError, AttributeError):
        raise RemoteError(
            f"expected an answer with choices[0].message.content, got {shown(str(content)[:_WORDS])}; check that "
            "--server speaks OpenAI's chat"
        ) from None
    return Answer(text, cut=choice.get("finish_reason") == "length")


def _names(content: Any) -> list[str]:
    """Returns the names in a server's list of models; none where it is no such list."""
    listed = content.get("data") if isinstance(content, dict) else None
    entries = listed if isinstance(listed, list) else []
    return [str(entry["id"]) for entry in entries if isinstance(entry, dict) and entry.get("id")]
