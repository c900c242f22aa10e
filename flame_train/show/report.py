"""`report.html`: a run in one file that can be sent, and `loss.png`; written at each checkpoint and at the end.

The file holds all that it shows: charts as SVG, images small, one style and one script of ours. It says no folder of
this machine. It is made from the run folder alone, and changes nothing in a run: not a bit, nor whether it goes on.
"""

from __future__ import annotations

import base64
import io
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from PIL import Image, ImageDraw, ImageFont

from flame_train.io.runfolder import RunFolder
from flame_train.training.log import KEPT
from flame_train.version import __version__

from . import sections
from .charts import Chart, Drawing, charts_of, line
from .curves import Curve
from .frame import document, header, page_file
from .gallery import samples
from .grids import Grid, cropped, media_type
from .run_reader import RunReader, RunView, without_folders
from .svg import Axis, axis, element, values_axis
from .trained_images import TrainedImage, sheet_of_some

_WIDTH, _HEIGHT = 1920, 960
_LEFT, _TOP, _RIGHT, _BOTTOM = 160, 100, 40, 100
_INK, _RULE, _RAW, _SMOOTH, _VALIDATION = "#222222", "#dddddd", "#bcd4ea", "#0b62a8", "#c8501e"
_CURVE_POINTS = 1600
_LONGEST = 50  # characters of a name that fit beside the names of the lines


def loss_png(name: str, loss: Curve, validation: Curve, weighted: bool = False) -> bytes:
    """Returns a PNG of 960 x 480 pixels. The validation loss, which has no weights, is drawn where there is one."""
    image = Image.new("RGB", (_WIDTH, _HEIGHT), "white")  # drawn larger, then reduced: Pillow's lines have steps
    canvas, font = ImageDraw.Draw(image), ImageFont.load_default(26)
    smooth = loss.smoothed(KEPT).every(_CURVE_POINTS)
    shown = (line("each step", loss, faint=True), line("smoothed", smooth), line("validation", validation, marks=True))
    across, up = axis(loss.steps, 8), values_axis(Chart("loss", name, shown), "fitted")
    for tick in up.ticks:
        (left, y), (right, _) = _place(across.low, tick, across, up), _place(across.high, tick, across, up)
        canvas.line((left, y, right, y), _RULE, 2)
        canvas.text((left - 16, y), up.label(tick), _INK, font, anchor="rm")
    for tick in across.ticks:
        x, bottom = _place(tick, up.low, across, up)
        canvas.text((x, bottom + 16), across.label(tick), _INK, font, anchor="mt")
    canvas.text((_WIDTH / 2, _HEIGHT - 24), "step", _INK, font, anchor="mb")
    each = "weighted loss of each step" if weighted else "loss of each step"
    names = [(each, _RAW, loss.thinned(_CURVE_POINTS), 3), ("smoothed", _SMOOTH, smooth, 6)]
    held_out = "validation, not weighted" if weighted else "validation"
    if len(validation):
        names.append((held_out, _VALIDATION, validation, 4))
    left = float(_LEFT)
    canvas.text((left, 48), name[:_LONGEST], _INK, font, anchor="lm")
    left += canvas.textlength(name[:_LONGEST], font) + 48
    for label, colour, curve, width in names:
        points = [_place(x, y, across, up) for x, y in zip(curve.steps, curve.values, strict=True)]
        if len(points) > 1:
            canvas.line(points, colour, width, joint="curve")
        for x, y in points if label == held_out or len(points) == 1 else ():
            canvas.ellipse((x - 6, y - 6, x + 6, y + 6), colour)
        canvas.line((left, 48, left + 40, 48), colour, 8)
        canvas.text((left + 52, 48), label, _INK, font, anchor="lm")
        left += 92 + canvas.textlength(label, font)
    buffer = io.BytesIO()
    image.reduce(2).save(buffer, "PNG")
    return buffer.getvalue()


def _place(x: float, y: float, across: Axis, up: Axis) -> tuple[float, float]:
    return (
        _LEFT + (_WIDTH - _LEFT - _RIGHT) * across.share(x),
        _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * up.share(y),
    )


_LOG = logging.getLogger(__name__)

REPORT: Final = "report.html"
LOSS: Final = "loss.png"
_SAMPLES: Final = 48  # images of samples in a report
_SIDE: Final = 256  # pixels: their longer side
_ROWS: Final = 100  # images of the dataset in a report
_POINTS: Final = 500  # of a line


class Report:
    """The report of one run, which keeps what it has read and drawn for the next time."""

    def __init__(self, folder: Path) -> None:
        self._reader = RunReader(folder)
        self._drawn: dict[tuple[Grid, int], str] = {}  # small images as data URIs

    def make(self) -> dict[str, bytes]:
        """Returns the files by name, as the run folder is now. Raises OSError where it cannot be read."""
        view = self._reader.read()
        files = {REPORT: self._page(view).encode("utf-8", "replace")}
        loss = view.curves.get("loss")
        if loss is not None:
            files[LOSS] = loss_png(view.name, loss, view.curves.get("validation/loss", Curve()), view.weighted)
        return files

    def _page(self, view: RunView) -> str:
        grids = _spread(view.grids, max(_SAMPLES // max(len(view.prompts), 1), 2))
        drawn = {*grids, view.controls}
        self._drawn = {key: uri for key, uri in self._drawn.items() if key[0] in drawn}
        sheet, images = self._sheet(view.images[:_ROWS])
        omitted = len(view.images) - len(images)
        note = f"{omitted} more are in dataset.json and images.json of the run folder." if omitted else ""
        how = Drawing()
        body = [
            sections.summary(view),
            samples(view, self._image, grids=grids, control=lambda number: self._control(view, number)),
            sections.curves(charts_of(view, _POINTS, how), how, tools=False),
            sections.dataset(view, images, note=note),
            sections.config([without_folders(setting) for setting in view.settings]),
            sections.files(view, live=False),
            element("p", f"Made by flame-train {__version__} from the run folder.", class_="note"),
        ]
        top = header(sections.status(view, live=False), links=sections.SECTIONS, home=None)
        return document(view.name, top, body, page_file("page.css") + sheet, page_file("page.js"))

    def _image(self, grid: Grid, number: int) -> str:
        return self._part(grid, number, lambda: self._reader.grid(grid))

    def _control(self, view: RunView, number: int) -> str:
        assert view.controls is not None
        return self._part(view.controls, number, self._reader.controls)

    def _part(self, grid: Grid, number: int, read: Callable[[], bytes]) -> str:
        if (grid, number) not in self._drawn:
            try:
                parts = cropped(read(), grid.boxes, _SIDE, "JPEG")
            except OSError:  # it was replaced meanwhile, or is damaged
                parts = [b""] * len(grid.boxes)
            self._drawn |= {(grid, i): _uri(media_type(part), part) for i, part in enumerate(parts)}
        return self._drawn[grid, number]

    def _sheet(self, images: Sequence[TrainedImage]) -> tuple[str, Sequence[TrainedImage]]:
        """Returns the style that has the thumbnails of these images alone, if there are any, and the images with it."""
        try:
            raw, renumbered = sheet_of_some(self._reader.sheet(), images)
        except OSError:  # there is none
            return "", images
        return f".thumb {{ background-image: url({_uri('image/jpeg', raw)}); }}\n", renumbered


def reporter(folder: RunFolder) -> Callable[[], None]:
    """Makes a function that writes the files of the report into a run's folder. What fails costs a warning alone."""
    report = Report(folder.folder)

    def write() -> None:
        try:
            files = report.make()
        except Exception as error:
            _LOG.warning("no %s: %s: %s", REPORT, type(error).__name__, error)
            return
        for name, raw in files.items():
            folder.write_report(name, raw)

    return write


def _spread(grids: Sequence[Grid], most: int) -> Sequence[Grid]:
    """Returns at most `most` grids, the first and the last among them, evenly spread."""
    if len(grids) <= most:
        return grids
    return [grids[round(i * (len(grids) - 1) / (most - 1))] for i in range(most)]


def _uri(kind: str, raw: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(raw).decode()}"
