"""Charts as SVG: no script, no library; colours are of the page's style, so it follows light and dark."""

from __future__ import annotations

from .axes import Axis, axis
from .charts import Chart, Line
from .elements import Element, element

_WIDTH, _HEIGHT = 420, 240
_LEFT, _TOP, _RIGHT, _BOTTOM = 56, 10, 10, 40
_COLOURS = 8
_PEAKS = 0.99  # share of the values that the axis holds where peaks are cut


def svg(chart: Chart) -> Element:
    """A chart with its heading and the names of its lines."""
    values = [y for line in chart.lines for y in line.y]
    across = axis([x for line in chart.lines for x in line.x], 5)
    up = axis(values, 4, zero=True, share=_PEAKS)
    drawn = element(
        "svg",
        element("title", _told(chart)),
        *_rules(across, up, chart.x_title),
        *[each for i, line in enumerate(chart.lines) for each in _line(line, _colour(chart, i), across, up)],
        viewBox=f"0 0 {_WIDTH} {_HEIGHT}",
        role="img",
        class_="chart",
    )
    return element("figure", element("figcaption", chart.title, _note(chart)), drawn, *_legend(chart), class_="plot")


def _colour(chart: Chart, number: int) -> int:
    """The number of a line's colour; a faint line before the line that smooths it has its colour."""
    return number % _COLOURS if chart.lines[0].faint is False else max(number - 1, 0) % _COLOURS


def _note(chart: Chart) -> Element | None:
    return element("small", f" {chart.note}") if chart.note else None


def _told(chart: Chart) -> str:
    """The chart in words, for who cannot see it: the last value of each line."""
    ends = [f"{line.label} {line.y[-1]:.4g}" for line in chart.lines if line.y]
    return f"{chart.title}; last: {', '.join(ends)}"


def _place(x: float, y: float, across: Axis, up: Axis) -> tuple[float, float]:
    return (
        _LEFT + (_WIDTH - _LEFT - _RIGHT) * across.share(x),
        _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * up.share(y),
    )


def _rules(across: Axis, up: Axis, title: str) -> list[Element]:
    """Lines at the ticks of the values, numbers at both axes."""
    made = []
    for tick in up.ticks:
        left, y = _place(across.low, tick, across, up)
        made.append(element("line", x1=left, x2=_WIDTH - _RIGHT, y1=y, y2=y, class_="rule"))
        made.append(element("text", up.label(tick), x=left - 6, y=y + 4, text_anchor="end"))
    for tick in across.ticks:
        x, bottom = _place(tick, up.low, across, up)
        made.append(element("text", across.label(tick), x=x, y=bottom + 16, text_anchor="middle"))
    made.append(element("text", title, x=(_LEFT + _WIDTH - _RIGHT) / 2, y=_HEIGHT - 6, text_anchor="middle"))
    return made


def _line(line: Line, colour: int, across: Axis, up: Axis) -> list[Element]:
    points = [_place(x, y, across, up) for x, y in zip(line.x, line.y, strict=True)]
    kind = f"c{colour}" + (" faint" if line.faint else "")
    made = [element("polyline", points=" ".join(f"{x:.1f},{y:.1f}" for x, y in points), class_=kind)]
    if line.marks:
        made += [element("circle", cx=round(x, 1), cy=round(y, 1), r=2.5, class_=kind) for x, y in points]
    return made


def _legend(chart: Chart) -> list[Element]:
    if len(chart.lines) < 2:
        return []
    names = [
        element("span", element("i", class_=f"c{_colour(chart, i)}" + (" faint" if line.faint else "")), line.label)
        for i, line in enumerate(chart.lines)
    ]
    return [element("div", *names, class_="legend")]
