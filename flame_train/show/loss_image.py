"""`loss.png`: the loss of a run, of each step and smoothed, for who wants one image and no browser."""

from __future__ import annotations

import io
import math

from PIL import Image, ImageDraw, ImageFont

from flame_train.training.log import KEPT

from .curves import Curve
from .svg import Axis, axis

_WIDTH, _HEIGHT = 1920, 960
_LEFT, _TOP, _RIGHT, _BOTTOM = 160, 100, 40, 100
_INK, _RULE, _RAW, _SMOOTH, _VALIDATION = "#222222", "#dddddd", "#bcd4ea", "#0b62a8", "#c8501e"
_POINTS = 1600
_PEAKS = 0.99
_LONGEST = 50  # characters of a name that fit beside the names of the lines


def loss_png(name: str, loss: Curve, validation: Curve, weighted: bool = False) -> bytes:
    """Returns a PNG of 960 x 480 pixels. The validation loss, which has no weights, is drawn where there is one."""
    image = Image.new("RGB", (_WIDTH, _HEIGHT), "white")  # drawn larger, then reduced: Pillow's lines have steps
    canvas, font = ImageDraw.Draw(image), ImageFont.load_default(26)
    smooth = loss.smoothed(KEPT).every(_POINTS)
    across = axis(loss.steps, 8)
    usual = sorted(loss.values)[: math.ceil(_PEAKS * len(loss))]
    up = axis([*usual, *validation.values], 5, zero=True)
    for tick in up.ticks:
        (left, y), (right, _) = _place(across.low, tick, across, up), _place(across.high, tick, across, up)
        canvas.line((left, y, right, y), _RULE, 2)
        canvas.text((left - 16, y), up.label(tick), _INK, font, anchor="rm")
    for tick in across.ticks:
        x, bottom = _place(tick, up.low, across, up)
        canvas.text((x, bottom + 16), across.label(tick), _INK, font, anchor="mt")
    canvas.text((_WIDTH / 2, _HEIGHT - 24), "step", _INK, font, anchor="mb")
    each = "weighted loss of each step" if weighted else "loss of each step"
    names = [(each, _RAW, loss.thinned(_POINTS), 3), ("smoothed", _SMOOTH, smooth, 6)]
    held_out = "validation, not weighted" if weighted else "validation"
    if len(validation):
        names.append((held_out, _VALIDATION, validation, 4))
    left = float(_LEFT)
    canvas.text((left, 48), name[:_LONGEST], _INK, font, anchor="lm")
    left += canvas.textlength(name[:_LONGEST], font) + 48
    for label, colour, curve, width in names:
        points = [_place(x, y, across, up) for x, y in zip(curve.steps, curve.values, strict=True)]
        if len(points) > 1:
            canvas.line(points, colour, width, joint="curve")
        for x, y in points if label == held_out or len(points) == 1 else ():
            canvas.ellipse((x - 6, y - 6, x + 6, y + 6), colour)
        canvas.line((left, 48, left + 40, 48), colour, 8)
        canvas.text((left + 52, 48), label, _INK, font, anchor="lm")
        left += 92 + canvas.textlength(label, font)
    buffer = io.BytesIO()
    image.reduce(2).save(buffer, "PNG")
    return buffer.getvalue()


def _place(x: float, y: float, across: Axis, up: Axis) -> tuple[float, float]:
    return (
        _LEFT + (_WIDTH - _LEFT - _RIGHT) * across.share(x),
        _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * up.share(y),
    )
