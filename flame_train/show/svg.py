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
_LEFT, _TOP, _RIGHT, _BOTTOM = 52, 14, 18, 38
_COLOURS = 8
_LEAST: Final = 1e-300  # a shorter axis counts as none: its ticks would be no normal numbers
_BEYOND = 1e5  # lengths of an axis: so far a peak that is cut off keeps its value for the script
_DECADES = 1e-6  # of the largest value: what is smaller, as a learning rate at its end, is below a logarithmic axis
_EDGE = 5  # pixels around the axes in which lines and marks are drawn
_PEAKS = 0.99  # share of the values that an axis from 0 holds: a few peaks would flatten the rest
_USUAL = (0.05, 0.95)  # of a faint line a fitted axis holds these shares, from the lowest up: what it scatters over


def svg(chart: Chart, axes: str = "fitted", *, named: bool = True) -> Element:
    """Returns a chart with its heading; `axes` is one of `charts.AXES`, `named` adds the names of its lines.

    What the page's script needs to tell values from points stands in `data-box`, `data-x`, `data-y` and `data-log`.
    """
    across = axis([x for line in chart.lines for x in line.x], 5)
    up = values_axis(chart, axes)
    drawn = element(
        "svg",
        *_rules(across, up, chart.x_title),
        _cut(each for i, line in enumerate(chart.lines) for each in _line(line, _colour(chart, i), across, up)),
        *_best(chart, across, up),
        viewBox=f"0 0 {_WIDTH} {_HEIGHT}",
        role="img",
        aria_label=_as_words(chart),
        data_box=f"{_LEFT} {_WIDTH - _RIGHT} {_TOP} {_HEIGHT - _BOTTOM}",
        data_x=f"{across.low!r} {across.high!r}",
        data_y=f"{up.low!r} {up.high!r}",
        data_log=up.log,
        class_="chart",
    )
    note = element("small", f" {chart.note}") if chart.note else None
    heading = element("figcaption", element("h3", chart.title), note)
    kind = {"id": f"chart-{chart.name}", "class_": "plot card", "data_x_title": chart.x_title}
    return element("figure", heading, legend(chart) if named and len(chart.lines) > 1 else None, drawn, **kind)


def legend(chart: Chart) -> Element:
    """Returns the names of a chart's lines with their colours."""
    names = [
        element("span", element("i", class_=f"c{_colour(chart, i)}" + (" faint" if line.faint else "")), line.label)
        for i, line in enumerate(chart.lines)
    ]
    return element("div", *names, class_="legend")


def values_axis(chart: Chart, axes: str) -> Axis:
    """Returns the axis of a chart's values: one that is fitted to a chart with far lines is logarithmic."""
    whole = [y for line in chart.lines if not line.faint for y in line.y]
    if axes == "log" or (axes == "fitted" and chart.apart):
        least = max(max(whole, default=0.0) * _DECADES, 0.0)
        above = [y for y in whole if y > least]
        if above:
            return log_axis(above)
    if axes == "zero":
        return axis([y for line in chart.lines for y in line.y], 4, zero=True, share=_PEAKS)
    for line in chart.lines:
        if line.faint:
            ordered = sorted(line.y)
            whole += [ordered[round(share * (len(ordered) - 1))] for share in _USUAL if ordered]
    return axis(whole, 4)


def _colour(chart: Chart, number: int) -> int:
    """Returns the number of a line's colour; a faint line before the line that smooths it has its colour."""
    return number % _COLOURS if chart.lines[0].faint is False else max(number - 1, 0) % _COLOURS


def _as_words(chart: Chart) -> str:
    """Puts the chart in words, for who cannot see it: the last value of each line, and the best."""
    ends = [f"{line.label} {line.y[-1]:.4g}" for line in chart.lines if line.y]
    best = f"; best: {chart.best[1]:.4g} at step {chart.best[0]:.0f}" if chart.best else ""
    return f"{chart.title}; last: {', '.join(ends)}{best}"


def _place(x: float, y: float, across: Axis, up: Axis) -> tuple[float, float]:
    return (
        _LEFT + (_WIDTH - _LEFT - _RIGHT) * across.share(x),
        _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * up.share(y, _BEYOND),
    )


def _cut(parts: Iterable[Element]) -> Element:
    """Cuts off what lies beyond the axes, which an inner SVG does."""
    left, top = _LEFT - _EDGE, _TOP - _EDGE
    width, height = _WIDTH - _LEFT - _RIGHT + 2 * _EDGE, _HEIGHT - _TOP - _BOTTOM + 2 * _EDGE
    place: dict[str, float | str] = {
        "x": left,
        "y": top,
        "width": width,
        "height": height,
        "viewBox": f"{left} {top} {width} {height}",
    }
    return element("svg", parts, **place)


def _rules(across: Axis, up: Axis, title: str) -> list[Element]:
    """Draws lines at the ticks of the values, numbers at both axes."""
    parts = []
    for tick in up.ticks:
        left, y = _place(across.low, tick, across, up)
        parts.append(element("line", x1=left, x2=_WIDTH - _RIGHT, y1=y, y2=y, class_="rule"))
        parts.append(element("text", up.label(tick), x=left - 6, y=y + 4, text_anchor="end"))
    for tick in across.ticks:
        x, bottom = _place(tick, up.low, across, up)
        parts.append(element("text", across.label(tick), x=x, y=bottom + 15, text_anchor="middle"))
    parts.append(element("text", title, x=(_LEFT + _WIDTH - _RIGHT) / 2, y=_HEIGHT - 6, text_anchor="middle"))
    return parts


def _line(line: Line, colour: int, across: Axis, up: Axis) -> list[Element]:
    points = [_place(x, y, across, up) for x, y in zip(line.x, line.y, strict=True)]
    kind = f"c{colour}" + (" faint" if line.faint else "")
    written = " ".join(f"{x:.2f},{y:.2f}" for x, y in points)
    parts = [element("polyline", points=written, class_=kind, data_label=line.label)]
    if line.marks:
        parts += [element("circle", cx=round(x, 1), cy=round(y, 1), r=2.5, class_=kind) for x, y in points]
    return parts


def _best(chart: Chart, across: Axis, up: Axis) -> list[Element]:
    """Marks the best point with a ring and its value, if it is within the steps that are shown."""
    if chart.best is None or not across.low <= chart.best[0] <= across.high:
        return []
    x, y = _place(*chart.best, across, up)
    share = across.share(chart.best[0])
    anchor = "start" if share < 0.3 else "end" if share > 0.7 else "middle"
    text = f"best {chart.best[1]:.4g} at step {chart.best[0]:.0f}"
    above = y - 12 if y - 12 > _TOP + 10 else y + 20
    ring = element("circle", cx=round(x, 1), cy=round(y, 1), r=6, class_="best")
    return [ring, element("text", text, x=round(x, 1), y=round(above, 1), text_anchor=anchor, class_="best")]


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis from `low` to `high`, with ticks at round numbers; logarithmic with `log`."""

    low: float
    high: float
    ticks: tuple[float, ...]
    log: bool = False

    def share(self, value: float, beyond: float = 0.0) -> float:
        """Returns where a value lies: 0 at the low end, 1 at the high end, and no further than `beyond` these."""
        low, high = self.low, self.high
        if self.log:
            low, high, value = math.log(low), math.log(high), math.log(max(value, _LEAST))
        return min(max((value - low) / (high - low), -beyond), 1.0 + beyond)

    def label(self, tick: float) -> str:
        """Returns a tick as text, with as many digits as tell it from the next."""
        if tick == 0.0:
            return "0"
        largest = abs(tick) if self.log else max(abs(self.low), abs(self.high))
        if largest >= 1e5 or largest < 1e-3:
            mantissa, _, exponent = f"{tick:.3e}".partition("e")
            return f"{float(mantissa):g}e{int(exponent)}"
        return f"{tick:.6g}"


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


def log_axis(values: Iterable[float]) -> Axis:
    """Returns a logarithmic axis for positive values; its ticks are powers of ten, or 1, 2 and 5 of few powers."""
    ordered = sorted(max(value, _LEAST) for value in values)
    first, last = (math.floor(math.log10(value)) for value in (ordered[0], ordered[-1]))
    every = max((last - first) // 6, 1)
    digits = (1, 2, 5) if last - first < 3 else (1,)
    numbers = [float(f"{n}e{power}") for power in range(first, last + 2, every) for n in digits]
    ticks = [tick for tick in numbers if math.isfinite(tick)]
    low = max((tick for tick in ticks if tick <= ordered[0]), default=ordered[0])
    high = min((tick for tick in ticks if tick >= ordered[-1]), default=ordered[-1])
    if high <= low:
        low = high / 10.0
    return Axis(low, high, tuple(tick for tick in ticks if low <= tick <= high), log=True)


def _round_up(value: float) -> float:
    """Rounds up to 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(n * power for n in (1, 2, 5, 10) if n * power >= value * (1 - 1e-9))
