"""The gallery of samples: a table of small images, which the page's script lets arrow keys walk, and enlarges."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flame_train.errors import counted

from .grids import Box, Grid
from .run_reader import RunView
from .svg import Element, element

GridImage = Callable[[Grid, int], str]
"""From a grid and the number of a prompt to where the page finds that image: a path, or a data URI."""


@dataclass(frozen=True, slots=True)
class Row:
    """A row: what it is called, and a cell for each column. `before`: the others are compared with it."""

    name: str
    cells: Sequence[Element]
    step: int | None = None
    before: bool = False

    def element(self) -> Element:
        """Returns the row, which the address of its step leads to."""
        return element(
            "tr",
            element("th", self.name, scope="row"),
            *self.cells,
            data_step=self.step,
            data_before=self.before,
        )


def samples(
    view: RunView,
    small: GridImage,
    large: GridImage | None = None,
    grids: Sequence[Grid] | None = None,
    control: Callable[[int], str] | None = None,
) -> Element:
    """Returns the section of a run's samples: a row for each step, the newest first, a column for each prompt.

    Args:
        view: the run.
        small: where the table's images are.
        large: where those are that it enlarges; None: they are the same.
        grids: those shown; None: all.
        control: where the control images of a prompt are, which stand above its samples; None: nowhere.
    """
    chosen = view.grids if grids is None else grids
    prompts = [prompt.text or "(empty prompt)" for prompt in view.prompts]
    columns = max((len(grid.boxes) for grid in chosen), default=0)
    heads = [prompts[i] if i < len(prompts) else "whole grid" for i in range(columns)]
    rows = []
    if view.controls is not None and control is not None:
        rows.append(Row("control", _controls(view, view.controls, control)))
    first = next((grid for grid in chosen if not grid.of_base), None)
    for grid in reversed(chosen):
        texts = prompts if len(grid.boxes) == len(prompts) else ["whole grid"]
        cells = [
            cell(small(grid, i), large and large(grid, i), f"{grid.label}: {texts[i]}", box)
            for i, box in enumerate(grid.boxes)
        ]
        rows.append(Row(grid.label, cells, grid.step, grid is first and len(chosen) > 1))
    some = f"{len(chosen)} of {len(view.grids)} grids are shown here; the run folder has all."
    notes = [some] if len(chosen) < len(view.grids) else []
    if view.unshown:
        grids_are = counted(view.unshown, "grid is", "grids are")
        notes.append(f"{grids_are} too large to be shown here, or damaged; see the run folder's samples.")
    return gallery("Samples", heads, rows, "samples by step and prompt", " ".join(notes))


def gallery(title: str, heads: Sequence[str], rows: Sequence[Row], label: str, note: str = "") -> Element:
    """Returns the section of a table of images.

    Args:
        title: its heading.
        heads: what each column is of.
        rows: the rows; none: the section says so.
        label: the table in words.
        note: a sentence below the heading.
    """
    told = element("p", note, class_="note") if note else None
    if not rows:
        none = None if note else element("p", "No sample images were drawn.", class_="note")
        return element("section", element("h2", title), none, told, id="samples")
    head = element("tr", element("td"), *[element("th", element("span", text), scope="col") for text in heads])
    table = element(
        "table", element("thead", head), element("tbody", *[row.element() for row in rows]), aria_label=label
    )
    return element(
        "section",
        element("h2", title),
        told,
        element("div", element("div", class_="stage", hidden=True), element("div", table, class_="grid")),
        id="samples",
    )


def cell(small: str, large: str | None, label: str, box: Box) -> Element:
    """Returns a cell, with a button that enlarges its image.

    Args:
        small: where the image is.
        large: where it is larger; None: nowhere.
        label: the image in words.
        box: left, top, right and bottom in its grid, for its shape.
    """
    shape = {"width": box[2] - box[0], "height": box[3] - box[1]}
    image = element("img", src=small, data_large=large, alt=label, loading="lazy" if large else None, **shape)
    return element("td", element("button", image, type="button", class_="zoom"))


def _controls(view: RunView, grid: Grid, control: Callable[[int], str]) -> list[Element]:
    """Returns the control images: what the samples of each prompt were made from."""
    return [
        element(
            "td", element("img", src=control(i), alt=f"control: {prompt.text}", width=right - left, height=bottom - top)
        )
        if prompt.has_control
        else element("td")
        for i, (prompt, (left, top, right, bottom)) in enumerate(zip(view.prompts, grid.boxes, strict=True))
    ]
