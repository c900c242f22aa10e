"""`bench step --sweep batch`: throughput and memory against batch size, as a table and as an image."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from flame_train.data.grid import write_png
from flame_train.disk.preflight import make_folder, refuse_place
from flame_train.errors import FlameError, OutputError, is_out_of_memory

from .lora_step import BenchCase, step

_LARGEST = 64
_SIZE, _MARGIN = (880, 420), 70
_INK, _GRID, _SPEED, _MEMORY = "#222222", "#dddddd", "#1f6fb4", "#c8501e"


def run(case: BenchCase, path: Path) -> tuple[dict[str, Any], BaseException | None]:
    """Doubles the batch from 1 until memory runs out, or to 64; plots the measurements into `path`, a PNG.

    Another error on the way, Ctrl-C included, ends the sweep. It is returned with the measurements so far, and raised
    after they are shown. Before it measures, it raises ConfigError for another ending of `path`, OutputError if it
    cannot be written, and errors of the first step.
    """
    refuse_place(path, ".png", force=True)
    make_folder(path.parent, "give another --plot")
    rows, stopped, failed = _measure(case)
    plot: str | None = str(path)
    try:
        draw(rows, _title(case), path)
    except OutputError as e:
        plot, failed = None, failed or e
    what = {name: value for name, value in asdict(case).items() if name != "batch"}
    return what | {"stopped at": stopped, "plot": plot, "sweep": rows}, failed


def _title(case: BenchCase) -> str:
    """Returns all that was the same at every batch."""
    parts = [
        case.model,
        f"{case.resolution} px",
        f"rank {case.rank}",
        case.precision,
        f"quantize {case.quantize}, arithmetic {case.arithmetic}",
    ]
    again = "deterministic" if case.deterministic else "not deterministic"
    blocks = f"checkpointing {case.checkpointing}" + "".join(f" {glob}" for glob in case.checkpoint_blocks)
    return ", ".join([*parts, blocks, again, case.device])


def _measure(case: BenchCase) -> tuple[list[dict[str, Any]], str, BaseException | None]:
    """Returns (rows, why there are no more, the error if that was one)."""
    rows: list[dict[str, Any]] = []
    batch = 1
    while batch <= _LARGEST:
        try:
            found = step(replace(case, batch=batch))
        except (Exception, KeyboardInterrupt) as e:
            if not rows:
                raise
            if is_out_of_memory(e):
                return rows, f"out of memory at batch {batch}", None
            return rows, f"batch {batch}: {_reason(e)}", e
        ms = found.get("captured_ms", found["eager_ms"])
        rows.append(
            {
                "batch": batch,
                "ms": ms,
                "images_per_s": round(1e3 * batch / ms, 3),
                "peak_gib": found.get("captured_gib", found["peak_gib"]),
            }
        )
        batch *= 2
    return rows, f"batch {_LARGEST}", None


def _reason(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    return str(error) if isinstance(error, FlameError) else f"{type(error).__name__}: {error}"


def draw(rows: Sequence[dict[str, Any]], title: str, path: Path) -> None:
    """Images a second and peak memory against batch size, side by side."""
    image = Image.new("RGB", _SIZE, "white")
    canvas = ImageDraw.Draw(image)
    canvas.text((_MARGIN, 12), title, _INK)
    half = _SIZE[0] // 2
    for left, key, name, colour in ((0, "images_per_s", "images / s", _SPEED), (half, "peak_gib", "peak GiB", _MEMORY)):
        if any(r[key] is None for r in rows):
            canvas.text((left + _MARGIN, 60), f"{name}: unknown on this machine", _INK)
            continue
        box = (left + _MARGIN, 60, left + half - 20, _SIZE[1] - 50)
        top = _round_up(max(r[key] for r in rows))
        _axes(canvas, box, rows, top, name)
        points = [_place(box, i, len(rows), r[key], top) for i, r in enumerate(rows)]
        canvas.line(points, colour, 3)
        for (x, y), r in zip(points, rows, strict=True):
            canvas.ellipse((x - 4, y - 4, x + 4, y + 4), colour)
            canvas.text((x - 12, y - 20), f"{r[key]:.3g}", colour)
    write_png(path, np.asarray(image))


def _round_up(top: float) -> float:
    """Returns the next four times a round number, for the four lines of an axis."""
    quarter = max(top, 1e-9) / 4
    unit = 10.0 ** math.floor(math.log10(quarter))
    return 4 * next(n * unit for n in (1, 2, 2.5, 5, 10) if n * unit >= quarter)


def _axes(
    canvas: ImageDraw.ImageDraw, box: tuple[int, int, int, int], rows: Sequence[dict[str, Any]], top: float, name: str
) -> None:
    for quarter in range(5):
        y = box[3] - (box[3] - box[1]) * quarter / 4
        canvas.line((box[0], y, box[2], y), _GRID)
        canvas.text((box[0] - 45, y - 6), f"{top * quarter / 4:.3g}", _INK)
    for i, r in enumerate(rows):
        x, _ = _place(box, i, len(rows), 0.0, 1.0)
        canvas.text((x - 4, box[3] + 8), str(r["batch"]), _INK)
    canvas.text((box[0], box[1] - 22), name, _INK)
    canvas.text(((box[0] + box[2]) // 2 - 15, box[3] + 26), "batch", _INK)


def _place(box: tuple[int, int, int, int], i: int, count: int, value: float, top: float) -> tuple[float, float]:
    """Returns where a point of the plot stands; points are evenly spaced, as the batch doubles."""
    along = (i + 0.5) / count
    return box[0] + (box[2] - box[0]) * along, box[3] - (box[3] - box[1]) * (value / top if top else 0.0)
