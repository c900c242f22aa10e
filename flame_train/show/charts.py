"""The charts of a page, as data; `svg.py` draws them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from flame_train.training.log import KEPT

from .curves import Curve
from .run_reader import RunView
from .trained_images import Band

_BAND: Final = re.compile(r"([0-9]{1,6})-([0-9]{1,6})")
_COARSE: Final = 4  # bands of the log that are one line: 20 of them would be too many
_SHOWN: Final = frozenset(("loss", "lr", "grad_norm", "images_per_s", "memory"))
_NOT_DRAWN: Final = frozenset(("step", "epoch", "skipped", "data_wait_ms", "loss_scale"))
_APART: Final = 20.0  # times: lines that lie so far from each other would be flat on a linear axis

AXES: Final = {"fitted": "fitted", "zero": "from 0", "log": "logarithmic"}
"""How the values' axis may be: by its name in an address, in words. A fitted one is logarithmic for lines far apart."""


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
    """A chart: a heading, what the axes show, and lines.

    `best` is the point that is marked as the best. `minor` charts are folded away.
    """

    name: str
    title: str
    lines: tuple[Line, ...]
    x_title: str = "step"
    note: str = ""
    best: tuple[float, float] | None = None
    minor: bool = False

    @property
    def apart(self) -> bool:
        """Whether the lines lie so far from each other that a linear axis would show the lower ones as flat."""
        middles = [sorted(line.y)[len(line.y) // 2] for line in self.lines if line.y and not line.faint]
        negative = any(y < 0.0 for line in self.lines for y in line.y)
        return not negative and max(middles) > _APART * min(middles) > 0.0


@dataclass(frozen=True, slots=True)
class Drawing:
    """How the reader wants charts: how smooth, which axis of values (of `AXES`), from which step on."""

    smoothing: float = KEPT
    axis: str = "fitted"
    first: int = 0


def charts_of(view: RunView, most: int, how: Drawing) -> tuple[Chart, ...]:
    """Returns the charts of one run, with at most about `most` points a line. Charts without a point are left out."""
    curves = {name: curve.since(how.first) for name, curve in view.curves.items()}
    validation = curves.get("validation/loss", Curve())
    noted = "weighted, " if view.weighted else ""
    charts = [
        Chart("loss", "Loss", _smoothed(view.curves.get("loss"), most, how), note=f"{noted}of each step and smoothed"),
        Chart(
            "validation",
            "Validation loss",
            (line("validation", validation.every(most), marks=True),),
            note="without weights" if view.weighted else "",
            best=view.best,
        ),
        Chart("timesteps", "Loss by timestep", _at_timesteps(view.bands), "timestep", "running means"),
        Chart("validation-timesteps", "Validation loss by timestep", tuple(_validation(curves, most)), minor=True),
        Chart("bands", "Loss by timestep, over steps", tuple(_bands(curves, most)), note="running means", minor=True),
        Chart("lr", "Learning rate", _one("lr", curves.get("lr"), most), minor=True),
        Chart("grad_norm", "Gradient norm", _smoothed(view.curves.get("grad_norm"), most, how), minor=True),
        Chart("images_per_s", "Images a second", _smoothed(view.curves.get("images_per_s"), most, how), minor=True),
    ]
    charts += [
        Chart(f"optimizer-{name}", f"{name}, of the optimizer", _one(name, curve, most), minor=True)
        for name, curve in curves.items()
        if "/" not in name and name not in _SHOWN | _NOT_DRAWN
    ]
    return tuple(chart for chart in charts if any(line.x for line in chart.lines))


def charts_of_runs(views: Sequence[RunView], most: int, how: Drawing) -> tuple[Chart, ...]:
    """Returns the charts of several runs over each other: the losses smoothed. The n-th line is of the n-th run."""
    charts = []
    for name, title, key, smoothed in (
        ("loss", "Loss, smoothed", "loss", True),
        ("validation", "Validation loss", "validation/loss", False),
        ("lr", "Learning rate", "lr", False),
        ("grad_norm", "Gradient norm, smoothed", "grad_norm", True),
        ("images_per_s", "Images a second", "images_per_s", True),
    ):
        lines = []
        for view in views:
            curve = view.curves.get(key, Curve())
            drawn = (curve.smoothed(how.smoothing) if smoothed else curve).since(how.first)
            lines.append(line(view.name, drawn.every(most), marks=key.startswith("validation")))
        charts.append(Chart(name, title, tuple(lines), minor=name not in ("loss", "validation", "lr")))
    return tuple(chart for chart in charts if any(line.x for line in chart.lines))


def line(label: str, curve: Curve, *, faint: bool = False, marks: bool = False) -> Line:
    """Makes a line of a curve."""
    return Line(label, tuple(curve.steps), tuple(curve.values), faint, marks or len(curve) == 1)


def _one(label: str, curve: Curve | None, most: int) -> tuple[Line, ...]:
    return () if curve is None else (line(label, curve.every(most)),)


def _smoothed(curve: Curve | None, most: int, how: Drawing) -> tuple[Line, ...]:
    if not curve:
        return ()
    return (
        line("each step", curve.since(how.first).thinned(most), faint=True),
        line("smoothed", curve.smoothed(how.smoothing).since(how.first).every(most)),
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
        yield line(f"{some[0][0][0]}-{some[-1][0][1]}", joined.every(most), marks=len(joined) < 40)


def _validation(curves: Mapping[str, Curve], most: int) -> Iterator[Line]:
    for name, curve in curves.items():
        if _bounds(name, "validation/"):
            yield line(name.removeprefix("validation/"), curve.every(most), marks=len(curve) < 40)


def _bounds(name: str, prefix: str) -> tuple[int, int] | None:
    """Returns the timesteps of a band's curve: "bands/0-50" -> (0, 50)."""
    match = _BAND.fullmatch(name.removeprefix(prefix)) if name.startswith(prefix) else None
    return (int(match[1]), int(match[2])) if match else None


def _at_timesteps(bands: Sequence[Band]) -> tuple[Line, ...]:
    """Returns the running mean of each band at the last checkpoint, in the band's middle."""
    curve = Curve()
    for band in bands:
        if bounds := _bounds(band.levels, ""):
            curve.add(sum(bounds) / 2, band.loss)
    return (line("running mean", curve, marks=True),) if len(curve) else ()
