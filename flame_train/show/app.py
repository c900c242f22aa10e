"""The live page of runs: a list, a page for each run, and several compared. The browser asks for what is new."""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final
from urllib.parse import urlencode

from jinja2 import DictLoader, Environment, StrictUndefined
from markupsafe import Markup
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from flame_train.disk.open_folder import folder_below
from flame_train.errors import shown

from . import sections
from .charts import charts_of, charts_of_runs
from .frame import header, mark, page_file
from .library import Library
from .run_reader import RunView
from .sections import SECTIONS, GridImage, loss_of, sample_image, state_of, validation_of
from .svg import Element, element, html
from .trained_images import TrainedImage

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


PAGES: Final = {"runs": "/"}
"""The pages that the head of each leads to, by name."""

_POINTS: Final = 2000  # of a line
_ROWS: Final = 100  # images of the dataset on a page
_LONGEST: Final = 200  # characters of what is looked for
_CHUNK: Final = 1 << 20
_KINDS: Final = {"css": "text/css", "js": "text/javascript"}
_TEMPLATES: Final = ("layout.html", "run.html", "runs.html", "compare.html", "curves.html")


class NotFound(Exception):
    """A request names a run or a file that is not there."""


class Pages:
    """Answers the requests. Each method takes one and returns the answer."""

    def __init__(self, library: Library, links: dict[str, str] = PAGES) -> None:
        """`links` are the pages that each head leads to, by name."""
        self._library, self._links = library, links
        loader = DictLoader({name: page_file(name) for name in _TEMPLATES})
        self._templates = Environment(loader=loader, autoescape=True, undefined=StrictUndefined)

    def app(self, *more: Route) -> Starlette:
        """Returns the application, without its guard. `more` pages come before those of runs."""
        paths: dict[str, Callable[[Request], Response]] = {
            "/": self.runs,
            "/run": self.run,
            "/run.json": self.run_data,
            "/compare": self.compare,
            "/compare.json": self.compare_data,
            "/dataset": self.dataset,
            "/sample": self.sample,
            "/control": self.control,
            "/sheet": self.sheet,
            "/file": self.file,
            "/assets/{name}": self.asset,
        }
        missing = {NotFound: lambda request, error: PlainTextResponse("this is not there\n", 404)}
        own = [Route(path, page) for path, page in paths.items()]
        return Starlette(routes=[*more, *own], exception_handlers=missing)

    def runs(self, request: Request) -> Response:
        """Returns the list of runs; the only run's page if there is one."""
        names = list(self._library.readers())
        if len(names) == 1:
            return RedirectResponse(_path("/run", name=names[0]))
        views = [view for name in names if (view := self._library.view(name))]
        rows = Markup(html(table(views, lambda name: _path("/run", name=name))))
        return self._page("runs.html", header(links=self._links, here="runs"), title="runs", table=rows)

    def run(self, request: Request) -> Response:
        """Returns a run's page, which fills itself from `run.json`."""
        view = self._view(request)
        return self._page("run.html", header(links=self._links | SECTIONS), title=view.name, name=view.name)

    def run_data(self, request: Request) -> Response:
        """Returns the charts and sections of a run, or that they are as the browser has them."""
        view = self._view(request)
        data: dict[str, Any] = {
            "running": view.status.get("state") == "running",
            "charts": [chart.to_json() for chart in charts_of(view, _POINTS, **_smoothing(request))],
            "sections": {
                "summary": html(sections.summary(view, live=True)),
                "samples": html(
                    sections.samples(view, _sample(view, "small"), _sample(view, "full"), control=_control(view))
                ),
                "config": html(sections.config(view.settings)),
                "files": html(sections.files(view, live=True, link=_file(view))),
            },
            "dataset": _digest(repr(view.images_written)),
        }
        return _unless_same(request, data)

    def compare(self, request: Request) -> Response:
        """Shows several runs side by side."""
        names = [view.name for view in self._views(request)]
        return self._page("compare.html", header(links=self._links), title="comparison of runs", names=names)

    def compare_data(self, request: Request) -> Response:
        """Returns the charts of several runs over each other, their samples and what differs in their configs."""
        views = self._views(request)
        data = {
            "running": any(view.status.get("state") == "running" for view in views),
            "charts": [chart.to_json() for chart in charts_of_runs(views, _POINTS, **_smoothing(request))],
            "sections": {
                "runs": html(table(views, lambda name: _path("/run", name=name), choose=False)),
                "samples": html(samples(views, lambda view, size: _sample(view, size))),
                "config": html(settings(views)),
            },
        }
        return _unless_same(request, data)

    def dataset(self, request: Request) -> Response:
        """Shows a page of the images of the dataset: those that have a text in file or caption, in an order."""
        view = self._view(request)
        searched = request.query_params.get("find", "")[:_LONGEST].lower()
        images = [image for image in view.images if _matches(image, searched)]
        order = request.query_params.get("order", "")
        if order == "lowest":
            images.reverse()
        elif order == "file":
            images.sort(key=lambda image: image.name)
        pages = max(math.ceil(len(images) / _ROWS), 1)
        page = min(_whole(request, "page", 0), pages - 1)
        section = sections.dataset(view, images[page * _ROWS : (page + 1) * _ROWS])
        return _json({"html": html(section), "found": len(images), "page": page, "pages": pages})

    def sample(self, request: Request) -> Response:
        """Returns an image of a sample grid."""
        view, full = self._view(request), request.query_params.get("size") == "full"
        try:
            step, prompt = _whole(request, "step", -1), _whole(request, "prompt", -1)
            raw = self._library.sample(view, step, prompt, full)
        except OSError:
            raise NotFound from None
        return _kept(raw, "image/png" if full else "image/jpeg")

    def control(self, request: Request) -> Response:
        """Returns the control images of a prompt."""
        try:
            raw = self._library.control(self._view(request), _whole(request, "prompt", -1))
        except OSError:
            raise NotFound from None
        return _kept(raw, "image/jpeg")

    def sheet(self, request: Request) -> Response:
        """Returns the sheet of thumbnails, as it lies in the run folder."""
        reader = self._library.readers().get(request.query_params.get("name", ""))
        try:
            raw = reader.sheet() if reader else b""
        except OSError:
            raise NotFound from None
        if not raw.startswith(b"\xff\xd8\xff"):
            raise NotFound
        return Response(raw, media_type="image/jpeg", headers={"Cache-Control": "no-cache"})

    def file(self, request: Request) -> Response:
        """Gives a file of the run folder, to be saved: one of those that the page lists, by its name as it is shown."""
        view, path_asked = self._view(request), request.query_params.get("path", "")
        path = next((entry.name for entry in view.files if not entry.folder and shown(entry.name) == path_asked), "")
        if not path:
            raise NotFound
        try:
            size, chunks = _opened(view, path)
        except OSError:
            raise NotFound from None
        name = path.rpartition("/")[2].encode("ascii", "replace").decode().replace('"', "'")
        headers = {"Content-Disposition": f'attachment; filename="{name}"', "Content-Length": str(size)}
        return StreamingResponse(chunks, media_type="application/octet-stream", headers=headers)

    def asset(self, request: Request) -> Response:
        """Returns the style and the scripts: ours, and Plotly's out of its package."""
        name = request.path_params["name"]
        if name == "plotly.js":
            return _kept(_plotly(), "text/javascript")
        if name == "mark.svg":
            return _kept(html(mark(xmlns="http://www.w3.org/2000/svg")).encode(), "image/svg+xml")
        if name not in ("page.css", "page.js", "live.js"):
            raise NotFound
        kind = _KINDS[name.rpartition(".")[2]]
        return Response(page_file(name), media_type=kind, headers={"Cache-Control": "no-cache"})

    def _page(self, template: str, top: Element, **values: Any) -> Response:
        """Renders a template below a head."""
        text = self._templates.get_template(template).render(values, header=Markup(html(top)))
        return Response(text, media_type="text/html", headers={"Cache-Control": "no-store"})

    def _view(self, request: Request) -> RunView:
        view = self._library.view(request.query_params.get("name", ""))
        if view is None:
            raise NotFound
        return view

    def _views(self, request: Request) -> list[RunView]:
        names = dict.fromkeys(request.query_params.getlist("name")[:MOST])
        views = [view for name in names if (view := self._library.view(name))]
        if not views:
            raise NotFound
        return views


@functools.cache
def _plotly() -> bytes:
    from plotly.offline import get_plotlyjs

    return get_plotlyjs().encode()


def _path(page: str, **query: str | int) -> str:
    return f"{page}?{urlencode(query)}"


def _file(view: RunView) -> Callable[[str], str]:
    return lambda path: _path("/file", name=view.name, path=shown(path))


def _sample(view: RunView, size: str) -> sections.GridImage:
    """Returns where the images of a run's grids are; the time of a grid in it lets the browser keep them."""
    written = {grid.step: grid.written for grid in view.grids}
    return lambda step, prompt: _path(
        "/sample", name=view.name, step=step, prompt=prompt, size=size, written=written[step]
    )


def _control(view: RunView) -> Callable[[int], str]:
    """Returns where the control images of a run's prompts are."""
    written = view.controls.written if view.controls else 0
    return lambda prompt: _path("/control", name=view.name, prompt=prompt, written=written)


def _matches(image: TrainedImage, searched: str) -> bool:
    return not searched or any(searched in text.lower() for text in (image.name, image.mask, *image.captions))


def _whole(request: Request, name: str, otherwise: int) -> int:
    text = request.query_params.get(name, "")
    return int(text) if text.isdecimal() and text.isascii() and len(text) < 12 else otherwise


def _smoothing(request: Request) -> dict[str, float]:
    percent = _whole(request, "smoothing", -1)
    return {"smoothing": percent / 1000} if 0 <= percent < 1000 else {}


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def _unless_same(request: Request, data: Mapping[str, Any]) -> Response:
    digest = _digest(data)
    if request.query_params.get("have") == digest:
        return _json({"same": True, "running": data["running"]})
    return _json({**data, "digest": digest})


def _json(value: Mapping[str, Any]) -> Response:
    """Returns a JSON answer in ASCII: texts of a run's files may hold halves of characters, which UTF-8 has not."""
    return Response(json.dumps(value, allow_nan=False, separators=(",", ":")), media_type="application/json")


def _kept(raw: bytes, kind: str) -> Response:
    return Response(raw, media_type=kind, headers={"Cache-Control": "private, max-age=86400"})


def _opened(view: RunView, path: str) -> tuple[int, Iterator[bytes]]:
    """Yields the size and the bytes of a plain file below the run folder; links are refused. Raises OSError."""
    *folders, name = path.split("/")
    with folder_below(view.folder, *folders) as inside:
        file = inside.reading(name)
    size = os.fstat(file.fileno()).st_size

    def chunks() -> Iterator[bytes]:
        remaining = size
        with file:
            while remaining > 0 and (chunk := file.read(min(_CHUNK, remaining))):
                remaining -= len(chunk)
                yield chunk

    return size, chunks()
