"""The frame of every page: the mark and the head, which stays in sight; and the document of a page in one file."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from importlib.resources import files as resources
from typing import Final

from .svg import Element, element, html

_PAGES: Final = resources("flame_train.show") / "pages"
_FLAME: Final = (
    "M12.6 1.5c.7 4.4 6.6 7 6.6 13a7.2 7.2 0 0 1-14.4 0c0-2.7 1.1-4.6 2.7-6 .2 1.8.9 2.9 1.9 3.3C9.2 8 10 4.3 12.6 1.5z"
)
_CORE: Final = "M12.2 13.2c.6 1.7 2.5 2.5 2.5 4.7a2.7 2.7 0 0 1-5.4 0c0-1.9 2.1-2.7 2.9-4.7z"


def page_file(name: str) -> str:
    """Returns a file of `pages/`."""
    return (_PAGES / name).read_text(encoding="utf-8")


def mark(**more: str) -> Element:
    """Draws the mark, a flame. Its colours serve on light and on dark."""
    outer, core = (element("path", d=d, fill=fill) for d, fill in ((_FLAME, "#e0561b"), (_CORE, "#ffd9a8")))
    return element("svg", outer, core, viewBox="0 0 24 24", aria_hidden="true", **more)


def header(*inside: Element, links: Mapping[str, str] | None = None, here: str = "", home: str | None = "/") -> Element:
    """Makes the head of a page.

    Args:
        inside: what stands beside the mark and the name.
        links: addresses by their names.
        here: the name of the link that is this page.
        home: where mark and name lead; None: nowhere.
    """
    name = [mark(), element("span", "flame-train")]
    brand = element("a", *name, href=home, class_="brand") if home else element("span", *name, class_="brand")
    anchors = [
        element("a", text, href=href, aria_current="page" if text == here else None)
        for text, href in (links or {}).items()
    ]
    return element(
        "header",
        element("div", brand, *inside, class_="bar"),
        element("nav", *anchors, aria_label="pages and sections") if anchors else None,
        class_="top",
    )


def document(title: str, top: Element, body: Sequence[Element], style: str, script: str) -> str:
    """Returns a page that holds all that it needs. It may load nothing, and run no other script.

    Args:
        title: the name of the page.
        top: its head.
        body: its sections.
        style: the rules of CSS.
        script: the one script.
    """
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    rules = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=rules),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("title", f"{title} · flame-train"),
        element("style", style),
    )
    page = element("html", head, element("body", top, element("main", *body), element("script", script)), lang="en")
    return f"<!DOCTYPE html>\n{html(page)}\n"
