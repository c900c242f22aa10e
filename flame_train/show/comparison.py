"""Several runs: the list of them, and the sections that compare some."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from datetime import UTC, datetime

from flame_train.io.json_values import whole

from . import sections
from .gallery import GridImage, Row, cell, gallery
from .run_reader import RunView
from .svg import Element, element

_KEYS = {"lr": "optimizer.lr", "rank": "lora.rank"}
"""The settings in the list, by what it calls them."""


def runs(
    views: Sequence[RunView],
    link: Callable[[RunView], str],
    image: Callable[[RunView], str] | None = None,
    *,
    choose: bool = True,
) -> Element:
    """Returns a row for each run.

    Args:
        views: the runs.
        link: where the page of each is.
        image: where its newest sample is; None: the runs have the colours of their lines instead.
        choose: whether each has a box that puts it into a comparison.
    """
    names = ["run", "state", "step", "loss, smoothed", "best validation", *_KEYS, "peak memory", "changed"]
    head = [element("th", name, scope="col") for name in names]
    rows = []
    for number, view in enumerate(views):
        box = element("input", type="checkbox", name="name", value=view.name, aria_label=f"compare {view.name}")
        if image is None:
            shown = element("i", class_=f"swatch c{number % 8}")
        else:
            shown = element("img", src=image(view), alt="", loading="lazy") if view.grids else element("span")
        values = [
            sections.state_of(view),
            sections.steps_of(view),
            sections.loss_of(view),
            sections.best_of(view),
            *[view.setting(path) for path in _KEYS.values()],
            sections.memory_of(view),
            _time(view),
        ]
        sorts = {"peak memory": whole(view.last.get("memory")), "changed": round(view.changed)}
        cells = [
            element("td", value, data_label=name, data_sort=sorts.get(name))
            for name, value in zip(names[1:], values, strict=True)
        ]
        name = element("th", shown, element("a", view.name, href=link(view)), scope="row", class_="run")
        rows.append(element("tr", element("td", box, class_="choice") if choose else None, name, *cells))
    first = element("td") if choose else None
    table = element(
        "table", element("thead", element("tr", first, *head)), element("tbody", *rows), class_="runs cards"
    )
    scroll = element("div", table, class_="scroll", tabindex=0, role="region", aria_label="runs")
    return element("section", element("div", scroll, class_="card"), id="runs")


def samples(
    views: Sequence[RunView], small: Callable[[RunView], GridImage], large: Callable[[RunView], GridImage]
) -> Element:
    """Returns the newest grid of each run, by the prompts that several of them have; runs are rows."""
    cut = [view for view in views if view.grids and len(view.grids[-1].boxes) == len(view.prompts)]
    counts = Counter(text for view in cut for text in {prompt.text for prompt in view.prompts})
    texts = [text for text, count in counts.items() if count > 1]
    texts.sort(key=[prompt.text for view in cut for prompt in view.prompts].index)
    rows: list[Row] = []
    for view in cut:
        prompts, grid = [prompt.text for prompt in view.prompts], view.grids[-1]
        if not set(prompts) & set(texts):
            continue
        cells = []
        for text in texts:
            i = prompts.index(text) if text in prompts else None
            label = f"{view.name}, {grid.label}: {text}"
            cells.append(
                element("td") if i is None else cell(small(view)(grid, i), large(view)(grid, i), label, grid.boxes[i])
            )
        rows.append(Row(f"{view.name}, {grid.label}", cells, before=not rows))
    alone = len(counts) - len(texts)
    note = "" if not alone else f"{alone} of {len(counts)} prompts are of one run alone: the page of that run has them."
    return gallery("Last samples", texts, rows, "samples by run and prompt", note)


def settings(views: Sequence[RunView]) -> Element:
    """Returns the keys whose values differ between the runs."""
    rows = []
    for path in dict.fromkeys(setting.path for view in views for setting in view.settings):
        values = [view.setting(path) for view in views]
        if len(set(values)) > 1:
            cells = [element("td", value, data_label=view.name) for view, value in zip(views, values, strict=True)]
            rows.append(element("tr", element("th", path, scope="row"), *cells))
    head = element("tr", element("th", "key", scope="col"), *[element("th", view.name, scope="col") for view in views])
    table = element("table", element("thead", head), element("tbody", *rows), class_="config cards")
    scroll = element("div", table, class_="scroll", tabindex=0, role="region", aria_label="settings that differ")
    listed = element("div", scroll, class_="card") if rows else element("p", "None differs.", class_="note")
    return element("section", element("h2", "Settings that differ"), listed, id="config")


def _time(view: RunView) -> Element | None:
    """Returns when a run wrote last, in this machine's time."""
    if not view.changed:
        return None
    time = datetime.fromtimestamp(view.changed, UTC).astimezone()
    return element("time", f"{time:%Y-%m-%d %H:%M}", datetime=time.isoformat(timespec="seconds"))
