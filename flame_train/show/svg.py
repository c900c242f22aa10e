"""Elements of HTML and SVG, and charts of them: no script, no library; colours are of the page's style."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final
from xml.etree import ElementTree

from flame_train.errors import lines_shown

from .charts import Chart, Line

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


_WIDTH, _HEIGHT = 420, 240
_LEFT, _TOP, _RIGHT, _BOTTOM = 56, 10, 10, 40
_COLOURS = 8
_PEAKS = 0.99  # share of the values that the axis holds where peaks are cut


def svg(chart: Chart) -> Element:
    """Returns a chart with its heading and the names of its lines."""
    values = [y for line in chart.lines for y in line.y]
    across = axis([x for line in chart.lines for x in line.x], 5)
    up = axis(values, 4, zero=True, share=_PEAKS)
    drawn = element(
        "svg",
        element("title", _as_words(chart)),
        *_rules(across, up, chart.x_title),
        *[each for i, line in enumerate(chart.lines) for each in _line(line, _colour(chart, i), across, up)],
        viewBox=f"0 0 {_WIDTH} {_HEIGHT}",
        role="img",
        class_="chart",
    )
    return element("figure", element("figcaption", chart.title, _note(chart)), drawn, *_legend(chart), class_="plot")


def _colour(chart: Chart, number: int) -> int:
    """Returns the number of a line's colour; a faint line before the line that smooths it has its colour."""
    return number % _COLOURS if chart.lines[0].faint is False else max(number - 1, 0) % _COLOURS


def _note(chart: Chart) -> Element | None:
    return element("small", f" {chart.note}") if chart.note else None


def _as_words(chart: Chart) -> str:
    """Puts the chart in words, for who cannot see it: the last value of each line."""
    ends = [f"{line.label} {line.y[-1]:.4g}" for line in chart.lines if line.y]
    return f"{chart.title}; last: {', '.join(ends)}"


def _place(x: float, y: float, across: Axis, up: Axis) -> tuple[float, float]:
    return (
        _LEFT + (_WIDTH - _LEFT - _RIGHT) * across.share(x),
        _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * up.share(y),
    )


def _rules(across: Axis, up: Axis, title: str) -> list[Element]:
    """Draws lines at the ticks of the values, numbers at both axes."""
    parts = []
    for tick in up.ticks:
        left, y = _place(across.low, tick, across, up)
        parts.append(element("line", x1=left, x2=_WIDTH - _RIGHT, y1=y, y2=y, class_="rule"))
        parts.append(element("text", up.label(tick), x=left - 6, y=y + 4, text_anchor="end"))
    for tick in across.ticks:
        x, bottom = _place(tick, up.low, across, up)
        parts.append(element("text", across.label(tick), x=x, y=bottom + 16, text_anchor="middle"))
    parts.append(element("text", title, x=(_LEFT + _WIDTH - _RIGHT) / 2, y=_HEIGHT - 6, text_anchor="middle"))
    return parts


def _line(line: Line, colour: int, across: Axis, up: Axis) -> list[Element]:
    points = [_place(x, y, across, up) for x, y in zip(line.x, line.y, strict=True)]
    kind = f"c{colour}" + (" faint" if line.faint else "")
    parts = [element("polyline", points=" ".join(f"{x:.1f},{y:.1f}" for x, y in points), class_=kind)]
    if line.marks:
        parts += [element("circle", cx=round(x, 1), cy=round(y, 1), r=2.5, class_=kind) for x, y in points]
    return parts


def _legend(chart: Chart) -> list[Element]:
    if len(chart.lines) < 2:
        return []
    names = [
        element("span", element("i", class_=f"c{_colour(chart, i)}" + (" faint" if line.faint else "")), line.label)
        for i, line in enumerate(chart.lines)
    ]
    return [element("div", *names, class_="legend")]


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis from `low` to `high`, with ticks at round numbers."""

    low: float
    high: float
    ticks: tuple[float, ...]

    def share(self, value: float) -> float:
        """Returns where a value lies: 0 at the low end, 1 at the high end, and no further."""
        return min(max((value - self.low) / (self.high - self.low), 0.0), 1.0)

    def label(self, tick: float) -> str:
        """Returns a tick as text, with as many digits as tell it from the next."""
        if tick == 0.0:
            return "0"
        largest = max(abs(self.low), abs(self.high))
        if largest >= 1e5 or largest < 1e-3:
            mantissa, _, exponent = f"{tick:.3e}".partition("e")
            return f"{float(mantissa):g}e{int(exponent)}"
        return f"{tick:.6g}"


_LEAST: Final = 1e-300  # a shorter axis counts as none: its ticks would be no normal numbers


def axis(values: Iterable[float], count: int = 5, *, zero: bool = False, share: float = 1.0) -> Axis:
    """Returns an axis for values, with about `count` ticks, of some length even if all values are one.

    Args:
        values: finite numbers.
        count: how many ticks it should have.
        zero: whether it begins at 0, if no value is below.
        share: the share of the values, the lowest, that must fit: a few peaks would flatten the rest.
    """
    ordered = sorted(values) or [0.0, 1.0]
    low, high = ordered[0], ordered[max(math.ceil(share * len(ordered)) - 1, 0)]
    if zero and low > 0.0:
        low = 0.0
    if high - low < _LEAST:
        high = low + (abs(low) if abs(low) > _LEAST else 1.0)
    unit = _round_up((high - low) / count)
    first, last = math.floor(low / unit + 1e-9), math.ceil(high / unit - 1e-9)
    return Axis(first * unit, last * unit, tuple(i * unit for i in range(first, last + 1)))


def _round_up(value: float) -> float:
    """Rounds up to 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(n * power for n in (1, 2, 5, 10) if n * power >= value * (1 - 1e-9))
