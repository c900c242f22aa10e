"""The result of a run in Python: the dictionary that the command prints with `--json`, and how a notebook shows it."""

from __future__ import annotations

import base64
import html
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from .grids import cropped, media_type
from .report import LOSS
from .run_reader import RunReader

_SIDE: Final = 1024  # pixels of a grid's longer side


class RunResult(dict[str, Any]):
    """What `flame_train.train` returns. A notebook shows the run's state, its loss, its last samples and its LoRA."""

    def _repr_html_(self) -> str:
        """Returns the run as HTML that holds its images; a part whose file is gone is left out."""
        if "log" not in self:
            return f"<pre>{html.escape(repr(dict(self)))}</pre>"
        folder = Path(self["log"]).parent
        rows = {"LoRA": self.get("lora"), "loss": self.get("mean_loss"), **self._published()}
        lines = [f"<b>{name}</b> {html.escape(_text(value))}" for name, value in rows.items() if value is not None]
        try:
            return f"<div>{'<br>'.join([*_state(folder), *lines])}<br>{''.join(_images(folder))}</div>"
        except OSError:  # the folder is gone
            return f"<div>{'<br>'.join(lines)}</div>"

    def _published(self) -> dict[str, Any]:
        hub = self.get("hub") or {}
        return {"published": hub.get("url") or hub.get("error")}


def _text(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _state(folder: Path) -> Iterator[str]:
    view = RunReader(folder).read()
    steps = f"step {view.step} of {view.steps}" if view.steps else f"step {view.step}"
    yield f"<b>{html.escape(view.name)}</b> {html.escape(str(view.status.get('state', '')))}, {steps}"


def _images(folder: Path) -> Iterator[str]:
    loss = folder / LOSS
    if loss.is_file():
        yield _image("image/png", loss.read_bytes(), "loss by step")
    reader = RunReader(folder)
    for grid in reader.read().grids[-1:]:
        right, bottom = max(box[2] for box in grid.boxes), max(box[3] for box in grid.boxes)
        part = cropped(reader.grid(grid), [(0, 0, right, bottom)], _SIDE, "JPEG")[0]
        yield _image(media_type(part), part, f"samples of step {grid.step}")


def _image(kind: str, raw: bytes, what: str) -> str:
    data = base64.b64encode(raw).decode()
    style = "max-width: min(48em, 100%); display: block; margin: 0.5em 0"
    return f'<img src="data:{kind};base64,{data}" alt="{what}" title="{what}" style="{style}">'
