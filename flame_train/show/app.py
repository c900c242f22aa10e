"""The live page of runs: a list, a page for each run, and several compared. The browser asks for what is new."""

from __future__ import annotations

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
from flame_train.errors import counted, shown
from flame_train.training.log import KEPT

from . import comparison, sections
from .charts import AXES, Drawing, charts_of, charts_of_runs
from .frame import header, mark, page_file
from .gallery import GridImage, samples
from .grids import media_type
from .library import Library
from .run_reader import RunView
from .svg import Element, element, html
from .trained_images import TrainedImage

MOST: Final = 8
"""Runs that are compared at once: as many as there are colours."""


PAGES: Final = {"runs": "/"}
"""The pages that the head of each leads to, by name."""

_POINTS: Final = 1000  # of a line
_ROWS: Final = 20  # images of the dataset on a page
_LONGEST: Final = 200  # characters of what is looked for
_CHUNK: Final = 1 << 20
_KINDS: Final = {"css": "text/css", "js": "text/javascript"}
_TEMPLATES: Final = ("layout.html", "live.html", "runs.html")


class NotFound(Exception):
    """A request names a run or a file that is not there."""


class Pages:
    """Answers the requests. Each method takes one and returns the answer."""

    def __init__(self, library: Library, links: dict[str, str] = PAGES, modules: Sequence[str] = ()) -> None:
        """`links` are the pages that each head leads to, by name; `modules` are further scripts of each page."""
        self._library, self._links, self._modules = library, links, modules
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
        return RedirectResponse(_path("/run", name=names[0])) if len(names) == 1 else self.listed(request)

    def listed(self, request: Request) -> Response:
        """Returns the list of runs, also of one."""
        views = [view for name in self._library.readers() if (view := self._library.view(name))]
        table = Markup(html(comparison.runs(views, _run, lambda view: _sample(view, "small")(view.grids[-1], 0))))
        return self._page(
            "runs.html", header(links=self._links, here="runs"), title="runs", table=table, some=bool(views)
        )

    def run(self, request: Request) -> Response:
        """Returns a run's page, which the browser then keeps new from `run.json`."""
        view, how = self._view(request), _drawing(request)
        parts = _parts(view)
        curves = sections.curves(charts_of(view, _POINTS, how), how, tools=True)
        images = sections.dataset(view, [])
        body = [parts["summary"], parts["samples"], curves, images, parts["config"], parts["files"]]
        top = header(parts["status"], links=self._links | sections.SECTIONS)
        return self._live("/run.json", top, body, title=view.name, names=[view.name])

    def run_data(self, request: Request) -> Response:
        """Returns the sections of a run, or that they are as the browser has them."""
        view, how = self._view(request), _drawing(request)
        parts = _parts(view) | {"plots": sections.plots(charts_of(view, _POINTS, how), how)}
        return _unless_same(request, [view], parts, {"dataset": _digest(repr(view.images_written))})

    def compare(self, request: Request) -> Response:
        """Shows several runs side by side: charts over each other, samples and what differs in their configs."""
        views, how = self._views(request), _drawing(request)
        parts = _compared(views)
        curves = sections.curves(charts_of_runs(views, _POINTS, how), how, tools=True, shared=True)
        top = header(element("h1", counted(len(views), "run")), links=self._links)
        body = [parts["runs"], parts["samples"], curves, parts["config"]]
        return self._live("/compare.json", top, body, title="comparison of runs", names=[view.name for view in views])

    def compare_data(self, request: Request) -> Response:
        """Returns the sections of a comparison, or that they are as the browser has them."""
        views, how = self._views(request), _drawing(request)
        plots = sections.plots(charts_of_runs(views, _POINTS, how), how, shared=True)
        return _unless_same(request, views, _compared(views) | {"plots": plots}, {})

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
            file, prompt = request.query_params.get("grid", ""), _whole(request, "prompt", -1)
            raw = self._library.sample(view, file, prompt, full)
        except OSError:
            raise NotFound from None
        return _kept(raw, media_type(raw))

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
        """Returns the style, the scripts and the mark."""
        name = request.path_params["name"]
        if name == "mark.svg":
            return _kept(html(mark(xmlns="http://www.w3.org/2000/svg")).encode(), "image/svg+xml")
        if name not in ("page.css", "page.js", "live.js"):
            raise NotFound
        kind = _KINDS[name.rpartition(".")[2]]
        return Response(page_file(name), media_type=kind, headers={"Cache-Control": "no-cache"})

    def _live(self, source: str, top: Element, body: Sequence[Element], **values: Any) -> Response:
        """Returns a page that its script keeps new."""
        return self._page("live.html", top, source=source, body=Markup(html(*body)), **values)

    def _page(self, template: str, top: Element, **values: Any) -> Response:
        """Renders a template below a head."""
        text = self._templates.get_template(template).render(values, header=Markup(html(top)), modules=self._modules)
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


def _parts(view: RunView) -> dict[str, Element]:
    """Returns the sections of a run's page that change as it goes on, but for the charts."""
    small, large = _sample(view, "small"), _sample(view, "full")
    return {
        "status": sections.status(view, live=True),
        "summary": sections.summary(view, _file(view)),
        "samples": samples(view, small, large, control=_control(view)),
        "config": sections.config(view.settings),
        "files": sections.files(view, live=True, link=_file(view)),
    }


def _compared(views: Sequence[RunView]) -> dict[str, Element]:
    """Returns the sections of a comparison, but for the charts."""
    small, large = (lambda view: _sample(view, "small")), (lambda view: _sample(view, "full"))
    return {
        "runs": comparison.runs(views, _run, choose=False),
        "samples": comparison.samples(views, small, large),
        "config": comparison.settings(views),
    }


def _path(page: str, **query: str | int) -> str:
    return f"{page}?{urlencode(query)}"


def _run(view: RunView) -> str:
    return _path("/run", name=view.name)


def _file(view: RunView) -> Callable[[str], str]:
    return lambda path: _path("/file", name=view.name, path=shown(path))


def _sample(view: RunView, size: str) -> GridImage:
    """Returns where the images of a run's grids are; the time of a grid in it lets the browser keep them."""
    return lambda grid, prompt: _path(
        "/sample", name=view.name, grid=grid.file, prompt=prompt, size=size, written=grid.written
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


def _drawing(request: Request) -> Drawing:
    """Returns how the charts are asked for."""
    percent, axis = _whole(request, "smoothing", -1), request.query_params.get("axis", "")
    smoothing = percent / 1000 if 0 <= percent < 1000 else KEPT
    return Drawing(smoothing, axis if axis in AXES else "fitted", _whole(request, "first", 0))


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def _unless_same(
    request: Request, views: Sequence[RunView], parts: Mapping[str, Element], more: Mapping[str, Any]
) -> Response:
    """Returns the sections as HTML, or that they are those whose digest the browser has."""
    running = any(view.status.get("state") == "running" for view in views)
    data = {**more, "running": running, "sections": {name: html(part) for name, part in parts.items()}}
    digest = _digest(data)
    if request.query_params.get("have") == digest:
        return _json({"same": True, "running": running})
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
