"""A run folder as a run leaves it, made without training, and a server and a browser to look at it."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from flame_train.config.load import load
from flame_train.config.render import resolved
from flame_train.data.grid import grid, png
from flame_train.disk.roots import Roots
from flame_train.io.runfolder import RunFolder
from flame_train.show.library import Library
from flame_train.show.report import REPORT, Report
from flame_train.show.serve import HOST, Guard, listening

PLANTED = "<script>window.planted = 1</script><img src=x onerror='window.planted = 1'> \" ' & </title></style>"
"""A text that a page must show as it is."""

PROMPTS = (f"a cat {PLANTED}", "a dog", "a house on a hill")
EVERY = 10


def record(step: int) -> dict[str, Any]:
    """A line of the log."""
    made: dict[str, Any] = {
        "step": step,
        "epoch": step / 12,
        "loss": 0.5 / step + 0.1 * (step % 3),
        "lr": 1e-4,
        "d": 1e-6 * step,
        "grad_norm": 1.0 / step,
        "loss_scale": 1.0,
        "skipped": 0,
        "images_per_s": 4.0,
        "data_wait_ms": 0.1,
        "memory": 3 << 30,
    }
    if step % EVERY == 0:
        made["validation"] = {"loss": 0.2 + 1 / step, "bands": {"0-500": 0.3, "500-1000": 0.1}, "seconds": 1.0}
        made["images"] = {"highest": {}, "lowest": {}, "bands": {"0-50": 0.4, "50-100": 0.3}, "host_ms": 1.0}
    return made


def colour(step: int, prompt: int) -> tuple[int, int, int]:
    """The colour of a sample image."""
    return (40 * prompt + 20, min(step * 2, 255), 90)


def row(name: str, caption: str, **more: Any) -> dict[str, Any]:
    """An image of `dataset.json`: 200 x 100 pixels, its right half cropped away."""
    sizes = {"original": "200x100", "resized": "128x64", "bucket": "64x64", "scale": 0.64}
    return {"file": name, **sizes, "crop": {"left": 0, "top": 0}, "kept": 0.5, "captions": [caption], **more}


class Made:
    """A run folder, and what can still happen to it."""

    def __init__(self, folder: Path, steps: int, total: int, lr: float) -> None:
        self.folder = folder
        asked = {
            "model": {"checkpoint": "/secret/home/base.safetensors"},
            "data": {"path": "/secret/home/photos"},
            "optimizer": {"lr": lr},
            "train": {"steps": total},
            "sample": {"prompts": list(PROMPTS), "every": EVERY},
            "output": {"dir": str(folder)},
        }
        with RunFolder(folder, resolved(load(asked)), lambda old, found: None) as run:
            run.resume()
            for step in range(steps + 1):
                if step:
                    run.log(record(step), {"steps": total, "steps_per_s": 2.0})
                if step % EVERY == 0:
                    run.write_sample(step, self.grid(step))
            run.checkpoint(steps, {"lora.safetensors": b"weights"}, keep=1)
        (folder / "lora.safetensors").write_bytes(b"the weights")
        rows = [row("a.png", f"a cat {PLANTED}", mask="a.mask.png"), row("b.png", "a dog", validation=True)]
        rows += [row(f"{i:03d}.png", f"image {i}") for i in range(210)]
        (folder / "dataset.json").write_text(json.dumps(rows))
        images = [
            {"file": "a.png", "relative_loss": 3.25, "seen": 7},
            {"file": "005.png", "relative_loss": 0.5, "seen": 3},
        ]
        bands = [{"levels": "0-50", "loss": 0.4, "samples": 9}, {"levels": "50-100", "loss": 0.2, "samples": 5}]
        (folder / "images.json").write_text(json.dumps({"step": steps, "images": images, "bands": bands}))
        Image.new("RGB", (1152, 960), (200, 30, 30)).save(folder / "dataset.jpg")

    def grid(self, step: int) -> bytes:
        """A grid of one flat colour a prompt."""
        return png(grid([np.full((64, 64, 3), colour(step, i), np.uint8) for i in range(len(PROMPTS))]))

    def append(self, step: int) -> None:
        """A further step, as the process of a run writes it."""
        with (self.folder / "log.jsonl").open("a") as file:
            file.write(json.dumps(record(step)) + "\n")

    def draw(self, step: int, base: bool = False) -> None:
        """A further grid; `base`: the dark one that the base draws beside another model."""
        name = f"step-{step:06d}{'-base' if base else ''}.png"
        dark = png(grid([np.full((64, 64, 3), 9, np.uint8) for _ in PROMPTS]))
        (self.folder / "samples" / name).write_bytes(dark if base else self.grid(step))

    def report(self) -> Path:
        """Writes the report into the folder. Returns its path."""
        for name, raw in Report(self.folder).make().items():
            (self.folder / name).write_bytes(raw)
        return self.folder / REPORT


@pytest.fixture
def made(tmp_path: Path) -> Callable[..., Made]:
    """made(name, steps=40, total=80, lr=1e-4): a run folder."""

    def make(name: str = "run", steps: int = 40, total: int = 80, lr: float = 1e-4) -> Made:
        return Made(tmp_path / name, steps, total, lr)

    return make


@pytest.fixture
def serve() -> Iterator[Callable[..., int]]:
    """serve(folder, ..., host, token, window, devices, command): the port of a server of folders until the test ends.

    With `window` they are the roots of `flame-train ui`, and its queue works if there is a `command` to start.
    """
    uvicorn = pytest.importorskip("uvicorn", reason="the extra `show` is not installed")
    from flame_train.show.app import Pages
    from flame_train.ui.app import Window

    running, works = [], ExitStack()

    def start(
        *folders: Path,
        host: str = HOST,
        token: str = "",
        window: bool = False,
        devices: Sequence[str] = (),
        command: Sequence[str] = (),
    ) -> int:
        listener = listening(0, host)
        port: int = listener.getsockname()[1]
        if window:
            shown = Window(Roots(folders), devices, command or ("false",))
            pages = shown.app()
            if command:
                works.enter_context(shown.queue.working())
        else:
            pages = Pages(Library(folders)).app()
        app = Guard(pages, port, host, token, changes=window)
        server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off", timeout_graceful_shutdown=1))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        running.append((server, thread))
        return port

    yield start
    for server, thread in running:
        server.should_exit = True
        thread.join(20)
    works.close()


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """A headless Chromium, driven by Playwright, whose event loop runs until it ends: none beside it can."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
    path = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    if path is None:
        pytest.skip("no Chromium here: apt-get install chromium")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def open_page(chromium: Any) -> Iterator[Callable[..., Any]]:
    """open_page(url, strict=True, script=True): a page 1280 pixels wide.

    The test fails for a request to anywhere but 127.0.0.1 and the file itself; with `strict` also for an error of a
    script, or in the console. `script` says whether scripts run at all.
    """
    wrong: list[str] = []
    pages = []

    def make(url: str, strict: bool = True, script: bool = True) -> Any:
        page = chromium.new_context(viewport={"width": 1280, "height": 900}, java_script_enabled=script).new_page()
        if strict:
            page.on("pageerror", lambda error: wrong.append(f"script: {error}"))
            page.on("console", lambda message: message.type == "error" and wrong.append(f"console: {message.text}"))
        page.on("request", lambda request: _is_here(request.url) or wrong.append(f"request: {request.url}"))
        page.goto(url)
        pages.append(page)
        return page

    yield make
    for page in pages:
        page.context.close()
    assert wrong == []


def _is_here(url: str) -> bool:
    return url.startswith(("http://127.0.0.1:", "file:///", "data:", "blob:"))


def until(true: Callable[[], bool], seconds: float = 30.0) -> None:
    """Waits until something holds. Fails if it does not in time."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not come true in time"
        threading.Event().wait(0.05)


def wait(page: Any, condition: str, seconds: float = 60.0) -> None:
    """Waits until JavaScript is true. Playwright's own waiting evaluates text in the page, which the page forbids.

    A page that goes to another has no body for a while.
    """
    until_seen(lambda: bool(page.evaluate(f"Boolean(document.body && ({condition}))")), seconds)


def until_seen(true: Callable[[], bool], seconds: float = 30.0) -> None:
    """Waits until something holds of a page, which may replace itself or its parts while it is looked at."""
    from playwright.sync_api import Error

    def holds() -> bool:
        try:
            return true()
        except Error as error:
            if "context was destroyed" in str(error) or "not attached to the DOM" in str(error):
                return False
            raise

    until(holds, seconds)
