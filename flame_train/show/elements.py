"""HTML and SVG as trees: whatever text goes in comes out escaped, because no text is ever pasted into markup."""

from __future__ import annotations

from collections.abc import Iterable
from xml.etree import ElementTree

from flame_train.errors import lines_shown

Element = ElementTree.Element
Inside = Element | str | int | None | Iterable[Element]


def element(tag: str, *inside: Inside, **attributes: str | float | bool | None) -> Element:
    """Returns an element with texts and elements in it.

    A trailing underscore of an attribute is dropped, others become hyphens. None and False leave an attribute out,
    True gives it without a value. Control characters are shown escaped.
    """
    tree = Element(tag)
    for name, value in attributes.items():
        if value is not None and value is not False:
            tree.set(name.rstrip("_").replace("_", "-"), "" if value is True else lines_shown(_text(value)))
    for part in inside:
        _append(tree, part)
    return tree


def _append(to: Element, part: Inside) -> None:
    if isinstance(part, Element):
        to.append(part)
    elif isinstance(part, str | int):
        text = lines_shown(str(part))
        if len(to):
            to[-1].tail = (to[-1].tail or "") + text
        else:
            to.text = (to.text or "") + text
    elif part is not None:
        to.extend(part)


def _text(value: str | float) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def html(*parts: Element) -> str:
    """Writes elements as HTML. What `script` and `style` hold is written as it is: it must be ours."""
    return "".join(ElementTree.tostring(part, encoding="unicode", method="html") for part in parts)
