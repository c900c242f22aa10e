"""What the window's pages ask: each question is a model of its fields, and a function of this package answers it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Sequence
from functools import partial
from importlib.resources import files as resources
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

from jinja2 import DictLoader, Environment, StrictUndefined
from markupsafe import Markup
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from flame_train.disk.preflight import disk_errors
from flame_train.disk.roots import Roots, within
from flame_train.errors import ConfigError, FlameError, shown
from flame_train.io.requests import Kind
from flame_train.quickstart.first_run import usable_device
from flame_train.show.app import Pages
from flame_train.show.frame import header, page_file
from flame_train.show.library import Library
from flame_train.show.run_reader import RunView
from flame_train.show.serve import serve
from flame_train.show.svg import html

from . import draft, pictures, places, runs
from .lease import Lease, OtherWindow
from .queue import COMMAND, Queue
from .words import in_the_window

_PAGES: Final = resources("flame_train.ui") / "pages"
_SCRIPTS: Final = ("acting.js", "ask.js", "draft.js", "form.js", "images.js", "new.js", "plan.js", "queue.js")
_LINKS: Final = {"new run": "/new", "queue": "/queue", "runs": "/runs"}
_MODULES: Final = ("/ui/ui.css", "/ui/acting.js")
_WINDOW: Final = "x-flame-window"
"""The header by which a page says which window it is."""
_ACTS: Final = "x-flame-acts"
"""The header that says whether that window acts."""


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
    """A text to plan, for a device and a card; the page that asks, which wants its newest answer; names to look up."""

    device: str = Field(pattern="^(cuda|cpu)$")
    card: float | None = Field(gt=0, le=10_000)
    page: str = Field(max_length=64)
    confirmed: list[str]


class File(Text):
    """A file to write."""

    path: str
    device: str = Field(pattern="^(cuda|cpu)$")
    force: bool


class Again(Question):
    """A run to continue as it is, and where."""

    name: str
    device: str = Field(max_length=16)


class Act(Question):
    """What a run is to do: one that is shown, by its `name`, or one of the queue, by its id."""

    name: str = ""
    entry: str = ""
    what: Kind


class Copy(Question):
    """A run whose config a form begins with."""

    name: str
    how: Literal["clone", "continue"]


class Moved(Question):
    """A run of the queue, and what becomes of it."""

    entry: str
    what: Literal["up", "again", "remove"]


class Settle(Question):
    """What the queue does after a failure, or why it is paused; none: as before."""

    after_failure: Literal["go on", "wait"] | None = None
    paused: bool | None = None


class Named(Question):
    """A run that is shown, by its name."""

    name: str


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

    def __init__(self, roots: Roots, devices: Sequence[str] = (), command: Sequence[str] = COMMAND) -> None:
        """`devices` have one run of the queue each, beside the CPU; `command` starts the program."""
        self._roots, self._planner, self._device = roots, draft.Planner(roots), usable_device(None)
        self.queue, self._lease, self._library = (
            Queue(roots, devices, command),
            Lease(),
            Library(roots.folders, empty=True),
        )
        names = ("new.html", "queue.html")
        loader = DictLoader({name: _file(name) for name in names} | {"layout.html": page_file("layout.html")})
        self._templates = Environment(loader=loader, autoescape=True, undefined=StrictUndefined)

    def app(self) -> Starlette:
        """Returns the application, without its guard: these pages, and those of the runs below the folders."""
        roots, one, acts = self._roots, self._answers, partial(self._answers, acts=True)
        answers = [
            one("/ask/state", Text, lambda q: draft.state(q.toml, roots)),
            one("/ask/change", Change, lambda q: draft.changed(q.toml, q.key, q.value, roots)),
            one("/ask/begin", Begin, self._begin),
            one("/ask/import", Dropped, lambda q: draft.imported(q.name, q.text, q.family, q.partial)),
            one("/ask/plan", PlanOf, lambda q: self._planner.plan(q.toml, q.device, q.card, q.page, q.confirmed)),
            acts("/ask/write", File, lambda q: draft.written(q.toml, q.path, q.device, q.force, roots)),
            one("/ask/images", ImagesOf, lambda q: self._pictures(q).page(q.page, q.lacking)),
            acts("/ask/caption", Caption, lambda q: self._pictures(q).write(q.file, q.before, q.caption)),
            one("/ask/folders", Place, lambda q: places.folders(q.path, roots)),
            one("/ask/models", Question, lambda q: places.models(roots)),
            one("/ask/family", Base, lambda q: {"family": places.family_told(q.path, q.confirmed, roots)}),
            acts("/ask/example", Place, lambda q: places.example(q.path, roots)),
            one("/ask/lease", Question, lambda q: {}),
            one("/ask/queue", Question, lambda q: self._queue()),
            one("/ask/run", Named, self._run),
            one("/ask/copy", Copy, self._copy),
            acts("/ask/take", Question, lambda q: {}),
            acts("/ask/start", File, self._start),
            acts("/ask/again", Again, self._again),
            acts("/ask/act", Act, self._act),
            acts("/ask/move", Moved, self._move),
            acts("/ask/settle", Settle, self._settle),
        ]
        own = [Route("/new", self._new), Route("/picture", self._picture), Route("/ui/{name}", self._asset)]
        own.append(Route("/queue", lambda request: self._page("queue.html", "queue")))
        library, pages = self._library, Pages(self._library, _LINKS, _MODULES)

        def first(request: Request) -> Response:
            return pages.listed(request) if library.readers() else RedirectResponse("/new")

        own += [Route("/", first), Route("/runs", pages.listed)]
        return pages.app(*answers, *own, Route("/form.json", self._form))

    def _answers(self, path: str, kind: type[Q], answer: Callable[[Q], dict[str, Any]], acts: bool = False) -> Route:
        """Returns the route of a question; one that `acts` is answered to the window that acts alone.

        A user's mistake is an answer with `error`, 409 for a changed file, and 423 for a window that only looks.
        """

        def answered(raw: bytes, window: str) -> Response:
            try:
                question = kind.model_validate(json.loads(raw))
            except (ValueError, RecursionError) as error:  # a ValidationError is one
                what = error.errors()[0]["loc"] if isinstance(error, ValidationError) else "JSON"
                return _json({"error": f"expected another question: {what}"}, 400)
            try:
                if acts and path != "/ask/take":
                    self._lease.check(window)
                with within(self._roots):
                    return _json(answer(question))
            except OtherWindow as error:
                return _json({"error": str(error)}, 423)
            except pictures.Changed as error:
                return _json({"error": str(error), "now": error.now}, 409)
            except FlameError as error:
                return _json({"error": in_the_window(str(error))}, 400)

        async def respond(request: Request) -> Response:
            window = request.headers.get(_WINDOW, "")[:64]
            response = await run_in_threadpool(answered, await request.body(), window)
            response.headers[_ACTS] = "yes" if self._lease.holds(window, path == "/ask/take") else "no"
            return response

        return Route(path, respond, methods=["POST"])

    def _begin(self, question: Begin) -> dict[str, Any]:
        asked = question.model_dump()
        return draft.begun(**asked)

    def _pictures(self, question: ImagesOf | Caption) -> pictures.Pictures:
        located, _ = draft.look(question.toml, self._roots)
        return pictures.Pictures(located.config, draft.set_of(located.config, question.set), self._roots)

    def _new(self, request: Request) -> Response:
        """Returns the page on which a run is set up."""
        return self._page("new.html", "new run")

    def _page(self, template: str, title: str) -> Response:
        top = Markup(html(header(links=_LINKS, here=title)))
        text = self._templates.get_template(template).render(title=title, header=top, modules=_MODULES)
        return Response(text, media_type="text/html", headers={"Cache-Control": "no-store"})

    def _queue(self) -> dict[str, Any]:
        """Returns the queue; of each run its name on the pages, and what its process does."""
        names = {str(reader.folder): name for name, reader in self._library.readers().items()}
        told = self.queue.told()
        for run in told["runs"]:
            run |= {"name": names.get(run["folder"], ""), "now": "", "lines": []}
            if run["state"] in ("started", "failed"):
                with contextlib.suppress(FlameError, OSError), self._roots.folder(run["folder"]) as folder:
                    run |= runs.told(folder, self._roots)
        return told

    def _move(self, question: Moved) -> dict[str, Any]:
        self.queue.change(question.entry, question.what)
        return self._queue()

    def _start(self, question: File) -> dict[str, Any]:
        """Writes a config, and puts its run into the queue."""
        made = draft.written(question.toml, question.path, question.device, question.force, self._roots)
        config = draft.look(question.toml, self._roots)[0].config
        folder = self._roots.place(config.output.dir)
        return made | {"folder": str(folder), "entry": self.queue.add(Path(made["path"]), folder, question.device)}

    def _again(self, question: Again) -> dict[str, Any]:
        folder = self._view(question.name).folder
        return {"entry": self.queue.add(folder / "config.toml", folder, question.device)}

    def _act(self, question: Act) -> dict[str, Any]:
        path = Path(self.queue.entry(question.entry).folder) if question.entry else self._view(question.name).folder
        with disk_errors(path), self._roots.folder(str(path)) as folder:
            return {"done": runs.act(folder, question.what)}

    def _run(self, question: Named) -> dict[str, Any]:
        view = self._view(question.name)
        with disk_errors(view.folder), self._roots.folder(str(view.folder)) as folder:
            told = runs.told(folder, self._roots)
        return told | {
            "state": view.status.get("state", ""),
            "loras": runs.loras(view),
            "devices": list(self.queue.devices),
            "device": self._device,
        }

    def _copy(self, question: Copy) -> dict[str, Any]:
        taken = [run["folder"] for run in self.queue.told()["runs"]]
        return runs.copied(self._view(question.name), question.how, taken)

    def _settle(self, question: Settle) -> dict[str, Any]:
        paused = {None: None, True: "paused by you", False: ""}[question.paused]
        self.queue.settle(question.after_failure, paused)
        return self._queue()

    def _view(self, name: str) -> RunView:
        view = self._library.view(name)
        if view is None:
            raise ConfigError(f"{shown(name)}: this run is not there any more")
        return view

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
            return _json({"error": in_the_window(str(error))}, 404)
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


def ui(folders: Sequence[Path], port: int, say: Callable[[str], None], devices: Sequence[str]) -> None:
    """Serves the window on some folders until Ctrl-C, on this machine's own address, always with a token.

    Runs that it started go on. Each of the `devices` has one at a time. Raises what `serve` raises, and ConfigError
    where a folder is none.
    """
    window = Window(Roots(folders), devices)
    with window.queue.working():
        serve(window.app(), port, False, say, token=True, changes=True)
