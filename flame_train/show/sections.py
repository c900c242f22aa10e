"""The sections of a run's page, the same on the live page and in `report.html`: all but the charts."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final

from flame_train.disk.preflight import size
from flame_train.errors import counted
from flame_train.io.json_values import number, whole
from flame_train.training.log import KEPT
from flame_train.version import __version__

from .charts import AXES, Chart, Drawing
from .run_reader import KeptFile, RunView, Setting
from .svg import Element, element, legend, svg
from .trained_images import TrainedImage

_OF_STEP: Final = re.compile(r"^checkpoints/.*-([0-9]{6,12})(?:\.safetensors)?$")

SECTIONS: Final = {name: f"#{name}" for name in ("samples", "curves", "dataset", "config", "files")}
"""Where the sections are, by name."""


def status(view: RunView, *, live: bool) -> Element:
    """Returns the run's name, and how far it got. Only the live page says whether it runs: a file may be old."""
    left, running = _clock(view.seconds_left), live and view.status.get("state") == "running"
    bar = element("progress", value=min(view.step, view.steps), max=view.steps, aria_label="steps done")
    return element(
        "div",
        element("h1", view.name, title=view.name),
        state_of(view) if live else None,
        element(
            "span",
            bar if running and view.steps else None,
            element("small", "step "),
            steps_of(view),
            element("strong", f" · {left} left") if running and left else None,
            class_="left",
        ),
        id="status",
        class_="status",
    )


def summary(view: RunView, link: Callable[[str], str] | None = None) -> Element:
    """Returns the figures of a run. `link` is to a file; None: the list of files is led to."""
    best = next((file for file in view.files if file.name.endswith(".best.safetensors")), None)
    facts: dict[str, Any] = {
        "loss, smoothed": loss_of(view),
        "validation loss": validation_of(view) if validation_of(view) != best_of(view) else "",
        "best validation loss": best_of(view),
        "best LoRA": element("a", best.name, href=link(best.name) if link else "#files") if best and view.best else "",
        "epoch": _number(view.last.get("epoch"), ".2f"),
        "images a second": _number(view.last.get("images_per_s"), ".3g"),
        "peak memory": memory_of(view),
        "flame-train": str(view.status.get("version", __version__)),
    }
    shown = [element("div", element("dt", k), element("dd", v)) for k, v in facts.items() if v != ""]
    return element("section", element("dl", *shown, class_="facts"), id="summary", aria_label="figures")


def state_of(view: RunView) -> Element:
    """Returns the state of a run in a word; "running" only while its lock is held."""
    state = str(view.status.get("state", "unknown"))
    return element("strong", state, class_=f"state {state}")


def steps_of(view: RunView) -> str:
    """Returns the steps done, of all where they are known."""
    return f"{view.step} of {view.steps}" if view.steps else str(view.step)


def loss_of(view: RunView) -> str:
    """Returns the smoothed loss."""
    loss = view.curves.get("loss")
    return f"{loss.smoothed(KEPT).values[-1]:.4g}" if loss else ""


def validation_of(view: RunView) -> str:
    """Returns the last validation loss."""
    curve = view.curves.get("validation/loss")
    return f"{curve.values[-1]:.4g} at step {curve.steps[-1]:.0f}" if curve else ""


def best_of(view: RunView) -> str:
    """Returns the best validation loss."""
    return f"{view.best[1]:.4g} at step {view.best[0]:.0f}" if view.best else ""


def memory_of(view: RunView) -> str:
    """Returns the peak memory so far."""
    return _bytes_of(view.last.get("memory"))


def curves(charts: Sequence[Chart], how: Drawing, *, tools: bool, shared: bool = False) -> Element:
    """Returns the section of the curves.

    Args:
        charts: those that are drawn.
        how: what the reader chose.
        tools: whether the reader can choose.
        shared: whether all charts have the same lines, which are then named once.
    """
    return element(
        "section", element("h2", "Curves"), _tools(how) if tools else None, plots(charts, how, shared), id="curves"
    )


def plots(charts: Sequence[Chart], how: Drawing, shared: bool = False) -> Element:
    """Returns the charts; those of less interest are folded away."""
    drawn = [(chart.minor, svg(chart, how.axis, named=not shared)) for chart in charts]
    minor = [each for is_minor, each in drawn if is_minor]
    more = element("summary", f"{counted(len(minor), 'more chart')}")
    return element(
        "div",
        legend(charts[0]) if shared and charts else None,
        element("div", *[each for is_minor, each in drawn if not is_minor], class_="plots"),
        element("details", more, element("div", *minor, class_="plots")) if minor else None,
        id="plots",
    )


def _tools(how: Drawing) -> Element:
    smoothing = element("input", type="range", id="smoothing", min=0, max=999, value=round(how.smoothing * 1000))
    options = [element("option", text, value=name, selected=name == how.axis) for name, text in AXES.items()]
    first = element("input", type="number", id="first", min=0, value=how.first, inputmode="numeric")
    return element(
        "div",
        element("label", "smoothing ", smoothing),
        element("label", "values ", element("select", *options, id="axis")),
        element("label", "from step ", first),
        class_="tools",
    )


def dataset(view: RunView, images: Sequence[TrainedImage], *, note: str = "") -> Element:
    """Gives the images of the dataset: `images` of all, each with its bucket, crop, mask, captions and running loss."""
    if not view.images:
        return element("section", element("h2", "Dataset"), element("p", "dataset.json is not there."), id="dataset")
    heads = ("image", "file", "size and bucket", "crop", "loss", "captions")
    head = element("tr", *[element("th", name, scope="col") for name in heads])
    about = (
        f"{len(view.images)} images. The loss is relative to that of all images at the same timesteps: one that "
        "stays far above 1 is not learned, or its caption does not fit."
    )
    table = element("table", element("thead", head), element("tbody", *map(_row, images)), class_="images cards")
    return element(
        "section",
        element("h2", "Dataset"),
        element("p", about),
        element("div", class_="finder", hidden=True),
        table,
        element("p", note) if note else None,
        id="dataset",
    )


def _row(image: TrainedImage) -> Element:
    height, width = image.original
    rows, columns = image.bucket
    marks = " ".join(mark for mark in ("held out" if image.held_out else "", _mask(image)) if mark)
    loss = "not kept" if image.loss is None else f"{image.loss:.2f}"
    return element(
        "tr",
        element("td", _thumbnail(image), data_label="image"),
        element("td", image.name, element("small", f" {marks}") if marks else None, data_label="file"),
        element("td", f"{width}x{height} in {columns}x{rows}", data_label="size and bucket"),
        element("td", _crop(image), data_label="crop", class_=None if _crop(image) else "empty"),
        element(
            "td",
            loss,
            element("small", f" seen {'once' if image.seen == 1 else counted(image.seen, 'time')}")
            if image.seen is not None
            else None,
            data_label="loss",
            class_="high" if image.loss is not None and image.loss >= 2.0 else None,
        ),
        element("td", *_captions(image), data_label="captions"),
    )


def _mask(image: TrainedImage) -> str:
    if not image.mask:
        return ""
    return "mask: its alpha channel" if image.mask == "alpha" else f"mask: {image.mask}"


def _captions(image: TrainedImage) -> list[Element]:
    if not image.captions:
        return [element("span", "(empty)")]
    first, *others = image.captions
    parts = [element("span", first or "(empty)")]
    if others:
        rest = [element("li", text or "(empty)") for text in others]
        parts.append(element("details", element("summary", f"{len(others)} more"), element("ul", *rest)))
    return parts


def _crop(image: TrainedImage) -> str:
    (height, width), (rows, columns), (top, left) = image.resized, image.bucket, image.crop
    sides = {"top": top, "bottom": height - rows - top, "left": left, "right": width - columns - left}
    text = ", ".join(f"{side} {pixels}" for side, pixels in sides.items() if pixels > 0)
    return f"{text} px; {image.kept:.0%} kept" if text else ""


def _thumbnail(image: TrainedImage) -> Element:
    """Draws a part of the sheet, as the background of an SVG, with what is cropped away in shade."""
    box = image.thumbnail
    if box is None:
        return element("span")
    left, top, right, bottom = box
    width, height = right - left, bottom - top
    x, y, w, h = (share * side for share, side in zip(image.cropped, (width, height) * 2, strict=True))
    away = f"M0 0H{width}V{height}H0Z M{x:.1f} {y:.1f}v{h:.1f}h{w:.1f}v{-h:.1f}z"
    crop = element("svg", element("path", d=away, class_="away"), viewBox=f"0 0 {width} {height}", aria_hidden="true")
    place = f"width:{width}px;height:{height}px;background-position:-{left}px -{top}px"
    return element("span", crop, class_="thumb", style=place, role="img", aria_label=f"thumbnail of {image.name}")


def config(settings: Sequence[Setting]) -> Element:
    """Returns every key of the config; those that differ from the defaults first, the others folded away."""
    changed = [setting for setting in settings if setting.differs or setting.default is None]
    same = [setting for setting in settings if not setting.differs and setting.default is not None]
    head = element("tr", *[element("th", name, scope="col") for name in ("key", "value", "default")])
    rows = [
        element(
            "tr",
            element("th", setting.path, scope="row", title=setting.doc),
            element("td", setting.value),
            element(
                "td", "unknown to this version" if setting.default is None else setting.default, data_label="default"
            ),
        )
        for setting in changed
    ]
    others = [
        element("tr", element("th", each.path, scope="row", title=each.doc), element("td", each.value)) for each in same
    ]
    table = element("table", element("thead", head), element("tbody", *rows), class_="config cards")
    return element(
        "section",
        element("h2", "Config"),
        element("p", f"{len(changed)} of {len(settings)} keys differ from their defaults.", class_="note"),
        element("div", table, class_="card") if rows else None,
        element(
            "details",
            element("summary", f"{len(same)} keys with their defaults"),
            element("table", element("tbody", *others), class_="config cards"),
        ),
        id="config",
    )


def files(view: RunView, *, live: bool, link: Callable[[str], str] | None = None) -> Element:
    """Shows where the files are: the live page says the folder too, a report does not. `link` is to a file."""
    rows = [
        element(
            "li",
            element("a", file.name, href=link(file.name)) if link and not file.folder else file.name,
            element("small", f" {_bytes_of(file.size)}"),
            data_step=_step_of(view, file),
        )
        for file in view.files
    ]
    return element(
        "section",
        element("h2", "Files"),
        element("p", "In ", element("code", str(view.folder.absolute())), ":", class_="note") if live else None,
        element("ul", *rows, class_="files card"),
        id="files",
    )


def _step_of(view: RunView, file: KeptFile) -> int | None:
    """Returns the step that a checkpoint or a LoRA is of; None: it is none."""
    if file.name.endswith(".best.safetensors") and view.best:
        return round(view.best[0])
    match = _OF_STEP.search(file.name)
    return int(match[1]) if match else None


def _clock(seconds: float | None) -> str:
    return "" if seconds is None else str(timedelta(seconds=round(seconds)))


def _number(value: Any, how: str) -> str:
    finite = number(value)
    return "" if finite is None else format(finite, how)


def _bytes_of(value: Any) -> str:
    count = whole(value)
    return "" if count is None else size(count)
