"""Several runs: a list of them, their last samples side by side, and the keys in which their configs differ."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from .elements import Element, element
from .run_reader import RunView
from .sections import GridImage, loss_of, sample_image, state_of, validation_of

MOST: Final = 8
"""Runs that are compared at once: as many as there are colours."""


def table(views: Sequence[RunView], link: Callable[[str], str], *, choose: bool = True) -> Element:
    """Returns a row for each run; with `choose` each has a box that puts it into a comparison."""
    names = ("", "run", "state", "step", "loss", "validation loss", "samples")[0 if choose else 1 :]
    head = element("tr", *[element("th", name, scope="col") for name in names])
    rows = []
    for view in views:
        box = element("input", type="checkbox", name="name", value=view.name, aria_label=f"compare {view.name}")
        total = f" of {view.steps}" if view.steps else ""
        cells = [
            element("td", element("a", view.name, href=link(view.name))),
            element("td", state_of(view)),
            element("td", f"{view.step}{total}"),
            element("td", loss_of(view)),
            element("td", validation_of(view)),
            element("td", f"{len(view.grids)} grids"),
        ]
        rows.append(element("tr", element("td", box) if choose else None, *cells))
    listed = element("table", element("thead", head), element("tbody", *rows), class_="runs")
    return element("section", element("div", listed, class_="scroll", tabindex=0), id="runs")


def samples(views: Sequence[RunView], image: Callable[[RunView, str], GridImage]) -> Element:
    """Returns the last grid of each run, by prompts that any of them has; runs are rows."""
    texts = list(dict.fromkeys(prompt.text for view in views for prompt in view.prompts))
    rows = []
    for number, view in enumerate(views):
        if not view.grids:
            continue
        grid = view.grids[-1]
        prompts = [prompt.text for prompt in view.prompts]
        small, large = image(view, "small"), image(view, "full")
        cells = []
        for column, text in enumerate(texts):
            i = prompts.index(text) if text in prompts and len(grid.boxes) == len(prompts) else None
            if i is None:
                cells.append(element("td", "no image"))
                continue
            label = f"{view.name}, step {grid.step}: {text}"
            cells.append(sample_image(small(grid.step, i), large(grid.step, i), number, column, label, grid.boxes[i]))
        rows.append(element("tr", element("th", f"{view.name}, step {grid.step}", scope="row"), *cells))
    head = element("tr", element("th", "run", scope="col"), *[element("th", text, scope="col") for text in texts])
    drawn = element("table", element("thead", head), element("tbody", *rows), class_="grid")
    return element(
        "section",
        element("h2", "Last samples"),
        element("div", drawn, class_="scroll", tabindex=0, role="region", aria_label="samples by run and prompt")
        if rows
        else element("p", "No sample images were drawn."),
        id="samples",
    )


def settings(views: Sequence[RunView]) -> Element:
    """Returns the keys whose values differ between the runs."""
    paths = dict.fromkeys(setting.path for view in views for setting in view.settings)
    rows = []
    for path in paths:
        values = [view.setting(path) for view in views]
        if len(set(values)) > 1:
            rows.append(element("tr", element("th", path, scope="row"), *[element("td", value) for value in values]))
    head = element("tr", element("th", "key", scope="col"), *[element("th", view.name, scope="col") for view in views])
    listed = element("table", element("thead", head), element("tbody", *rows), class_="config")
    return element(
        "section",
        element("h2", "Settings that differ"),
        element("div", listed, class_="scroll", tabindex=0) if rows else element("p", "None differs."),
        id="config",
    )
