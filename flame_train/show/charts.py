"""The charts of a page, as data: `svg.py` and Plotly draw the same lines."""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from flame_train.training.log import KEPT

from .curves import Curve
from .run_reader import RunView
from .trained_images import Band

_GIB: Final = 2**30
_BAND: Final = re.compile(r"([0-9]{1,6})-([0-9]{1,6})")
_COARSE: Final = 4  # bands of the log that are one line: 20 of them would be too many
_SHOWN: Final = frozenset(("loss", "lr", "grad_norm", "images_per_s", "memory"))
_NOT_DRAWN: Final = frozenset(("step", "epoch", "skipped", "data_wait_ms", "loss_scale"))


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a chart. `faint` is drawn behind the others; `marks` shows each point."""

    label: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    faint: bool = False
    marks: bool = False


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart: a heading, what the axes show, and lines. `log` asks for a logarithmic axis of values."""

    name: str
    title: str
    lines: tuple[Line, ...]
    x_title: str = "step"
    note: str = ""
    log: bool = False

    def to_json(self) -> dict[str, Any]:
        """Returns the chart as JSON has it."""
        return asdict(self)


def charts_of(view: RunView, most: int, smoothing: float = KEPT) -> tuple[Chart, ...]:
    """Returns the charts of one run, with at most about `most` points a line. Charts without a point are left out."""
    curves = view.curves
    loss = curves.get("loss", Curve())
    charts = [
        Chart("loss", "Loss", _raw_and_smoothed(loss, most, smoothing), note="of each step, and smoothed"),
        Chart("bands", "Loss by noise band", tuple(_bands(curves, most)), note="running means, levels in thousandths"),
        Chart("levels", "Loss against noise level", _levels(view.bands), "noise level, thousandths"),
        Chart("validation", "Validation loss", tuple(_validation(curves, most)), note="whole, and by noise band"),
        Chart("lr", "Learning rate", _one("lr", curves.get("lr"), most)),
        Chart("grad_norm", "Gradient norm", _raw_and_smoothed(curves.get("grad_norm", Curve()), most, smoothing)),
        Chart("images_per_s", "Images a second", _one("images/s", curves.get("images_per_s"), most, peaks=True)),
        Chart("memory", "Peak memory, GiB", _one("GiB", _scaled(curves.get("memory"), 1 / _GIB), most)),
    ]
    charts += [
        Chart(f"optimizer-{name}", f"{name}, of the optimizer", _one(name, curve, most))
        for name, curve in curves.items()
        if "/" not in name and name not in _SHOWN | _NOT_DRAWN
    ]
    return tuple(chart for chart in charts if any(line.x for line in chart.lines))


def charts_of_runs(views: Sequence[RunView], most: int, smoothing: float = KEPT) -> tuple[Chart, ...]:
    """Returns the charts of several runs over each other: the losses smoothed."""
    charts = []
    for name, title, key, weight in (
        ("loss", "Loss, smoothed", "loss", smoothing),
        ("validation", "Validation loss", "validation/loss", 0.0),
        ("lr", "Learning rate", "lr", 0.0),
        ("grad_norm", "Gradient norm, smoothed", "grad_norm", smoothing),
        ("images_per_s", "Images a second", "images_per_s", smoothing),
        ("memory", "Peak memory, GiB", "memory", 0.0),
    ):
        scale = 1 / _GIB if key == "memory" else 1.0
        lines = []
        for view in views:
            curve = _scaled(view.curves.get(key), scale) or Curve()
            lines.append(_line(view.name, curve.smoothed(weight).every(most), marks=key.startswith("validation")))
        charts.append(Chart(name, title, tuple(lines)))
    return tuple(chart for chart in charts if any(line.x for line in chart.lines))


def _line(label: str, curve: Curve, *, faint: bool = False, marks: bool = False) -> Line:
    return Line(label, tuple(curve.steps), tuple(curve.values), faint, marks or len(curve) == 1)


def _one(label: str, curve: Curve | None, most: int, *, peaks: bool = False) -> tuple[Line, ...]:
    if curve is None:
        return ()
    return (_line(label, curve.thinned(most) if peaks else curve.every(most)),)


def _scaled(curve: Curve | None, factor: float) -> Curve | None:
    if curve is None or factor == 1.0:
        return curve
    return Curve(curve.steps, array("d", [value * factor for value in curve.values]))


def _raw_and_smoothed(curve: Curve, most: int, smoothing: float) -> tuple[Line, ...]:
    if len(curve) == 0:
        return ()
    return (
        _line("each step", curve.thinned(most), faint=True),
        _line("smoothed", curve.smoothed(smoothing).every(most)),
    )


def _bands(curves: Mapping[str, Curve], most: int) -> Iterator[Line]:
    """Yields the running means of the log's bands, neighbours joined into wide bands."""
    named = [(bounds, curve) for name, curve in curves.items() if (bounds := _bounds(name, "bands/"))]
    named.sort(key=lambda pair: pair[0])
    for first in range(0, len(named), _COARSE):
        some = named[first : first + _COARSE]
        by_step: dict[float, list[float]] = {}
        for _, curve in some:
            for step, value in zip(curve.steps, curve.values, strict=True):
                by_step.setdefault(step, []).append(value)
        joined = Curve()
        for step, values in sorted(by_step.items()):
            joined.add(step, sum(values) / len(values))
        yield _line(f"{some[0][0][0]}-{some[-1][0][1]}", joined.every(most), marks=len(joined) < 40)


def _validation(curves: Mapping[str, Curve], most: int) -> Iterator[Line]:
    if "validation/loss" in curves:
        yield _line("loss", curves["validation/loss"].every(most), marks=True)
    for name, curve in curves.items():
        if _bounds(name, "validation/"):
            yield _line(name.removeprefix("validation/"), curve.every(most), faint=True)


def _bounds(name: str, prefix: str) -> tuple[int, int] | None:
    """Returns the noise levels of a band's curve: "bands/0-50" -> (0, 50)."""
    match = _BAND.fullmatch(name.removeprefix(prefix)) if name.startswith(prefix) else None
    return (int(match[1]), int(match[2])) if match else None


def _levels(bands: Sequence[Band]) -> tuple[Line, ...]:
    """Returns the running mean of each band at the last checkpoint, in the band's middle."""
    curve = Curve()
    for band in bands:
        if bounds := _bounds(band.levels, ""):
            curve.add(sum(bounds) / 2, band.loss)
    return (_line("running mean", curve, marks=True),) if len(curve) else ()
