"""The sections of a run's page, the same on the live page and in `report.html`: all but the charts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final

from flame_train.disk.preflight import size
from flame_train.io.json_values import number, whole
from flame_train.training.log import KEPT
from flame_train.version import __version__

from .grids import Grid
from .run_reader import RunView, Setting
from .svg import Element, element
from .trained_images import TrainedImage

SECTIONS: Final = {name: f"#{name}" for name in ("summary", "curves", "samples", "dataset", "config", "files")}
"""Where the sections are, by name."""

GridImage = Callable[[int, int], str]
"""From a step and the number of a prompt to where the page finds that image: a path, or a data URI."""


def summary(view: RunView, *, live: bool) -> Element:
    """Returns what the run is and how far it got. Only the live page says whether it runs: a file may be old."""
    total = f" of {view.steps}" if view.steps else ""
    facts = [
        ("step", f"{view.step}{total}"),
        ("epoch", _number(view.last.get("epoch"), ".2f")),
        ("loss", loss_of(view)),
        ("validation loss", validation_of(view)),
        ("images a second", _number(view.last.get("images_per_s"), ".3g")),
        ("memory", _bytes_of(view.last.get("memory"))),
        ("time left", _clock(view.seconds_left) if live else ""),
        ("flame-train", str(view.status.get("version", __version__))),
    ]
    bar = element("progress", value=min(view.step, view.steps), max=view.steps, aria_label="steps done")
    return element(
        "section",
        element("h1", view.name, " ", state_of(view) if live else None),
        bar if view.steps else None,
        element("dl", *[element("div", element("dt", k), element("dd", v)) for k, v in facts if v], class_="facts"),
        id="summary",
    )


def state_of(view: RunView) -> Element:
    """Returns the state of a run in a word; "running" only while its lock is held."""
    state = str(view.status.get("state", "unknown"))
    return element("strong", state, class_=f"state {state}")


def loss_of(view: RunView) -> str:
    """Returns the smoothed loss."""
    loss = view.curves.get("loss")
    return f"{loss.smoothed(KEPT).values[-1]:.4g} smoothed" if loss else ""


def validation_of(view: RunView) -> str:
    """Returns the last validation loss."""
    curve = view.curves.get("validation/loss")
    return f"{curve.values[-1]:.4g} at step {curve.steps[-1]:.0f}" if curve else ""


def samples(
    view: RunView,
    image: GridImage,
    large: GridImage | None = None,
    steps: Sequence[int] | None = None,
    control: Callable[[int], str] | None = None,
) -> Element:
    """Returns a table of steps by prompts; the page's script adds the slider and the zoom.

    Args:
        image: where the table's images are.
        large: where those of slider and zoom are; None: they are the same.
        steps: those shown; None: all.
        control: where the control images of a prompt are, which stand above its samples; None: nowhere.
    """
    grids = [grid for grid in view.grids if steps is None or grid.step in steps]
    if not grids:
        return element("section", element("h2", "Samples"), element("p", "No sample images were drawn."), id="samples")
    names = [prompt.text or "(empty prompt)" for prompt in view.prompts]
    columns = max(len(grid.boxes) for grid in grids)
    heads = [names[i] if i < len(names) else "whole grid" for i in range(columns)]
    rows = [] if control is None or view.controls is None else [_controls(view, view.controls, control)]
    for grid in grids:
        texts = names if len(grid.boxes) == len(names) else ["whole grid"]
        cells = [
            sample_image(
                image(grid.step, i), large and large(grid.step, i), grid.step, i, f"step {grid.step}: {texts[i]}", box
            )
            for i, box in enumerate(grid.boxes)
        ]
        rows.append(element("tr", element("th", grid.step, scope="row"), *cells))
    left_out = len(view.grids) - len(grids)
    note = f"{left_out} of {len(view.grids)} grids are left out here; the run folder has all." if left_out else ""
    head = element("tr", element("th", "step", scope="col"), *[element("th", name, scope="col") for name in heads])
    table = element("table", element("thead", head), element("tbody", *rows), class_="grid")
    return element(
        "section",
        element("h2", "Samples"),
        element("div", class_="viewer", hidden=True),
        element("p", note) if note else None,
        element("div", table, class_="scroll", tabindex=0, role="region", aria_label="samples by step and prompt"),
        id="samples",
    )


def _controls(view: RunView, grid: Grid, control: Callable[[int], str]) -> Element:
    """Makes the row of the control images: what the samples of each prompt were made from."""
    cells = [
        element(
            "td", element("img", src=control(i), alt=f"control: {prompt.text}", width=right - left, height=bottom - top)
        )
        if prompt.has_control
        else element("td")
        for i, (prompt, (left, top, right, bottom)) in enumerate(zip(view.prompts, grid.boxes, strict=True))
    ]
    return element("tr", element("th", "control", scope="row"), *cells)


def sample_image(
    source: str, large: str | None, row: int, column: int, label: str, box: tuple[int, int, int, int]
) -> Element:
    """Returns a cell of a table of samples, with a button that opens its image.

    Args:
        source: where the image is.
        large: where it is larger; None: nowhere.
        row: the step, or the number of the run, by which arrows go up and down.
        column: the number of the prompt, by which arrows go left and right.
        label: the image in words.
        box: left, top, right and bottom in its grid, for its shape.
    """
    image = element(
        "img",
        src=source,
        data_large=large,
        alt=label,
        width=box[2] - box[0],
        height=box[3] - box[1],
        loading="lazy" if large else None,
        data_step=row,
        data_prompt=column,
    )
    return element("td", element("button", image, type="button", class_="zoom"))


def dataset(view: RunView, images: Sequence[TrainedImage], *, note: str = "") -> Element:
    """Gives the images of the dataset: `images` of all, each with its bucket, crop, mask, captions and running loss."""
    if not view.images:
        return element("section", element("h2", "Dataset"), element("p", "dataset.json is not there."), id="dataset")
    heads = ("image", "file", "size and bucket", "crop", "loss", "captions")
    head = element("tr", *[element("th", name, scope="col") for name in heads])
    about = (
        f"{len(view.images)} images. The loss is relative to that of all images at the same noise levels: one that "
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
        element("td", _crop(image), data_label="crop"),
        element(
            "td",
            loss,
            element("small", f" seen {image.seen} times") if image.seen is not None else None,
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
    return f"{text} px; {image.kept:.0%} kept" if text else "none"


def _thumbnail(image: TrainedImage) -> Element:
    """Draws a part of the sheet, as the background of an SVG, with what is cropped away in shade."""
    box = image.thumbnail
    if box is None:
        return element("span", "no thumbnail", class_="none")
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
            element("td", "unknown to this version" if setting.default is None else setting.default),
        )
        for setting in changed
    ]
    others = [
        element("tr", element("th", each.path, scope="row", title=each.doc), element("td", each.value)) for each in same
    ]
    return element(
        "section",
        element("h2", "Config"),
        element("p", f"{len(changed)} of {len(settings)} keys differ from their defaults."),
        element("table", element("thead", head), element("tbody", *rows), class_="config") if rows else None,
        element(
            "details",
            element("summary", f"{len(same)} keys with their defaults"),
            element("table", element("tbody", *others), class_="config"),
        ),
        id="config",
    )


def files(view: RunView, *, live: bool, link: Callable[[str], str] | None = None) -> Element:
    """Shows where the files are: the live page says the folder too, a report does not. `link` is to a file."""
    rows = [
        element(
            "tr",
            element("th", element("a", file.name, href=link(file.name)) if link and not file.folder else file.name),
            element("td", _bytes_of(file.size)),
        )
        for file in view.files
    ]
    return element(
        "section",
        element("h2", "Files"),
        element("p", "In ", element("code", str(view.folder.absolute())), ":") if live else None,
        element("table", element("tbody", *rows), class_="files"),
        id="files",
    )


def _clock(seconds: float | None) -> str:
    return "" if seconds is None else str(timedelta(seconds=round(seconds)))


def _number(value: Any, how: str) -> str:
    finite = number(value)
    return "" if finite is None else format(finite, how)


def _bytes_of(value: Any) -> str:
    count = whole(value)
    return "" if count is None else size(count)
