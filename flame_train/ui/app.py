"""What the window's pages ask: each question is a model of its fields, and a function of this package answers it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from importlib.resources import files as resources
from pathlib import Path
from typing import Any, Final, TypeVar

from jinja2 import DictLoader, Environment, StrictUndefined
from markupsafe import Markup
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from flame_train.disk.roots import Roots, within
from flame_train.errors import FlameError, lines_shown
from flame_train.quickstart.first_run import usable_device
from flame_train.show.app import PAGES, Pages
from flame_train.show.frame import header, page_file
from flame_train.show.library import Library
from flame_train.show.serve import serve
from flame_train.show.svg import html

from . import draft, pictures, places

_PAGES: Final = resources("flame_train.ui") / "pages"
_SCRIPTS: Final = ("ask.js", "form.js", "images.js", "new.js")
_LINKS: Final = {"new run": "/new"} | PAGES


class Question(BaseModel):
    """What a page sends. Unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", strict=True)


class Text(Question):
    """A config's text."""

    toml: str


class Change(Text):
    """One value of a text: as `--set` takes it, or none for the default."""

    key: str
    value: str | bool | list[str] | None


class Begin(Question):
    """The choices that a config begins with, and the text so far with what that was made from."""

    family: str
    purpose: str | None
    card: float | None = Field(gt=0, le=10_000)
    given: dict[str, str]
    before: str
    template: str


class Dropped(Question):
    """A file that was dropped onto the page."""

    name: str
    text: str
    family: str
    partial: bool


class PlanOf(Text):
    """A text to plan, the device, the page that asks, which wants its newest answer alone, and names it may look up."""

    device: str = Field(pattern="^(cuda|cpu)$")
    page: str = Field(max_length=64)
    confirmed: list[str]


class File(Text):
    """A file to write."""

    path: str
    device: str = Field(pattern="^(cuda|cpu)$")
    force: bool


class ImagesOf(Text):
    """A page of the images of a set."""

    set: int
    page: int
    lacking: bool


class Caption(Text):
    """An image's caption: what it was, and what it shall be."""

    set: int
    file: str
    before: str
    caption: str


class Place(Question):
    """A path."""

    path: str


class Base(Place):
    """A base model, and whether the user chose it, so that the hub may be asked."""

    confirmed: bool


Q = TypeVar("Q", bound=Question)


class Window:
    """The pages of a window on some folders, and the answers to what they ask."""

    def __init__(self, roots: Roots) -> None:
        self._roots, self._planner, self._device = roots, draft.Planner(roots), usable_device(None)
        names = ("new.html",)
        loader = DictLoader({name: _file(name) for name in names} | {"layout.html": page_file("layout.html")})
        self._templates = Environment(loader=loader, autoescape=True, undefined=StrictUndefined)

    def app(self) -> Starlette:
        """Returns the application, without its guard: these pages, and those of the runs below the folders."""
        roots = self._roots
        answers = [
            self._answers("/ask/state", Text, lambda q: draft.state(q.toml, roots)),
            self._answers("/ask/change", Change, lambda q: draft.changed(q.toml, q.key, q.value, roots)),
            self._answers("/ask/begin", Begin, self._begin),
            self._answers("/ask/import", Dropped, lambda q: draft.imported(q.name, q.text, q.family, q.partial)),
            self._answers("/ask/plan", PlanOf, lambda q: self._planner.plan(q.toml, q.device, q.page, q.confirmed)),
            self._answers("/ask/write", File, lambda q: draft.written(q.toml, q.path, q.device, q.force, roots)),
            self._answers("/ask/images", ImagesOf, lambda q: self._pictures(q).page(q.page, q.lacking)),
            self._answers("/ask/caption", Caption, lambda q: self._pictures(q).write(q.file, q.before, q.caption)),
            self._answers("/ask/folders", Place, lambda q: places.folders(q.path, roots)),
            self._answers("/ask/models", Question, lambda q: places.models(roots)),
            self._answers("/ask/family", Base, lambda q: {"family": places.family_told(q.path, q.confirmed, roots)}),
            self._answers("/ask/example", Place, lambda q: places.example(q.path, roots)),
        ]
        own = [Route("/new", self._new), Route("/picture", self._picture), Route("/ui/{name}", self._asset)]
        library = Library(roots.folders, empty=True)
        pages = Pages(library, _LINKS)

        def first(request: Request) -> Response:
            return pages.runs(request) if library.readers() else RedirectResponse("/new")

        own.append(Route("/", first))
        return pages.app(*answers, *own, Route("/form.json", self._form))

    def _answers(self, path: str, kind: type[Q], answer: Callable[[Q], dict[str, Any]]) -> Route:
        """Returns the route of a question. A user's mistake is an answer with `error`, and 409 for a changed file."""

        def answered(raw: bytes) -> Response:
            try:
                question = kind.model_validate(json.loads(raw))
            except (ValueError, RecursionError) as error:  # a ValidationError is one
                what = error.errors()[0]["loc"] if isinstance(error, ValidationError) else "JSON"
                return _json({"error": f"expected another question: {what}"}, 400)
            try:
                with within(self._roots):
                    return _json(answer(question))
            except pictures.Changed as error:
                return _json({"error": str(error), "now": error.now}, 409)
            except FlameError as error:
                return _json({"error": lines_shown(str(error))}, 400)

        async def respond(request: Request) -> Response:
            return await run_in_threadpool(answered, await request.body())

        return Route(path, respond, methods=["POST"])

    def _begin(self, question: Begin) -> dict[str, Any]:
        asked = question.model_dump()
        return draft.begun(**asked)

    def _pictures(self, question: ImagesOf | Caption) -> pictures.Pictures:
        located, _ = draft.look(question.toml, self._roots)
        return pictures.Pictures(located.config, draft.set_of(located.config, question.set), self._roots)

    def _new(self, request: Request) -> Response:
        """Returns the page on which a run is set up."""
        text = self._templates.get_template("new.html").render(
            title="new run", header=Markup(html(header(links=_LINKS, here="new run")))
        )
        return Response(text, media_type="text/html", headers={"Cache-Control": "no-store"})

    def _form(self, request: Request) -> Response:
        """Returns the schema as a form, with the families."""
        here = {"roots": list(map(str, self._roots.folders)), "device": self._device}
        return _json(draft.form() | {"families": draft.families()} | here)

    def _picture(self, request: Request) -> Response:
        """Returns an image below the roots."""
        asked = request.query_params
        side = asked.get("side", "")
        try:
            raw = pictures.picture(
                asked.get("path", ""),
                int(side) if side.isascii() and side.isdecimal() and len(side) < 6 else 320,
                asked.get("mask") == "yes",
                self._roots,
            )
        except FlameError as error:
            return _json({"error": lines_shown(str(error))}, 404)
        return Response(raw, media_type="image/jpeg", headers={"Cache-Control": "private, max-age=86400"})

    def _asset(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in (*_SCRIPTS, "ui.css"):
            return _json({"error": "this is not there"}, 404)
        kind = "text/css" if name.endswith(".css") else "text/javascript"
        return Response(_file(name), media_type=kind, headers={"Cache-Control": "no-cache"})


def _file(name: str) -> str:
    return (_PAGES / name).read_text(encoding="utf-8")


def _json(value: dict[str, Any], status: int = 200) -> Response:
    """Returns JSON in ASCII: names of files may hold halves of characters, which UTF-8 has not."""
    raw = json.dumps(value, separators=(",", ":"))
    return Response(raw, status, media_type="application/json", headers={"Cache-Control": "no-store"})


def ui(folders: Sequence[Path], port: int, say: Callable[[str], None]) -> None:
    """Serves the window on some folders until Ctrl-C, on this machine's own address, always with a token.

    Raises what `serve` raises, and ConfigError where one is no folder.
    """
    roots = Roots(folders)
    serve(Window(roots).app(), port, False, say, token=True, changes=True)
