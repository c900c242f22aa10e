"""The synthetic images of the small SDXL: coloured shapes on backgrounds, with captions.

`scenes` chooses shapes at random (NumPy, by seed). `render` draws whole batches on the CPU or a GPU, from signed
distances, so that edges are smooth. `write_images` makes a dataset of them. New things for a LoRA are here too:
`tiles` in a separate style, a star, stripes. The model has seen neither them nor their names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from flame_train.data.grid import write_png
from flame_train.disk.atomic_write import write_atomically

Array = Any

COLOURS: Final = {
    "red": (206, 42, 42),
    "orange": (240, 140, 40),
    "yellow": (246, 214, 66),
    "green": (52, 152, 72),
    "blue": (44, 84, 196),
    "purple": (128, 60, 168),
    "pink": (244, 152, 190),
    "black": (24, 24, 28),
    "gray": (140, 142, 146),
    "white": (244, 244, 240),
}
SHAPES: Final = ("circle", "square", "triangle", "diamond", "cross", "ring")
TEXTURES: Final = ("plain", "dotted", "checkered")
RADII: Final = {"small": (0.15, 0.19), "": (0.23, 0.27), "large": (0.32, 0.37)}  # radius, in shares of the shorter side
PLACES: Final = {
    "": (0, 0),
    "in the middle": (0, 0),
    "on the left": (-1, 0),
    "on the right": (1, 0),
    "at the top": (0, -1),
    "at the bottom": (0, 1),
    "at the top left": (-1, -1),
    "at the top right": (1, -1),
    "at the bottom left": (-1, 1),
    "at the bottom right": (1, 1),
}

SIZES: Final = ((96, 96), (64, 128), (128, 64))  # height, width: those that the small SDXL was trained on

_KINDS: Final = (*SHAPES, "star")
_GROUNDS: Final = (*TEXTURES, "striped")
_NAMES: Final = tuple(COLOURS)


class Shape(NamedTuple):
    """One thing that is drawn."""

    kind: str
    colour: str
    radius: float
    """In pixels."""
    centre: tuple[float, float]
    """(x, y) in pixels."""


class Scene(NamedTuple):
    """One image."""

    ground: str
    """The background's colour."""
    texture: str
    shapes: tuple[Shape, ...]
    """One or two."""
    caption: str


Maker = Callable[[int, tuple[int, int], int], Sequence[Scene]]
"""Makes up so many scenes for images of a size (height, width), by seed."""


def scenes(
    count: int,
    size: tuple[int, int],
    seed: int,
    kinds: Sequence[str] = SHAPES,
    textures: Sequence[str] = TEXTURES,
    alone: bool = False,
) -> list[Scene]:
    """Returns `count` scenes made at random; equal arguments give equal scenes.

    Args:
        count: the number of scenes.
        size: (height, width) of an image, in pixels.
        kinds: the shapes to choose from.
        textures: the textures of backgrounds to choose from.
        alone: whether each scene has one shape only.
    """
    rng = np.random.default_rng((seed, *size))
    return [_scene(rng, size, kinds, textures, alone) for _ in range(count)]


def tiles(count: int, size: tuple[int, int], seed: int) -> list[Scene]:
    """Makes `count` Delft tiles: a blue shape on white checks, whose colours the caption leaves unsaid."""
    rng = np.random.default_rng((seed, *size))
    figures = [_one(rng, size, SHAPES, "blue", "") for _ in range(count)]
    return [Scene("white", "checkered", shapes, f"a delft tile with {words}") for shapes, words in figures]


def _scene(
    rng: np.random.Generator, size: tuple[int, int], kinds: Sequence[str], textures: Sequence[str], alone: bool
) -> Scene:
    ground, *colours = (_NAMES[i] for i in rng.permutation(len(_NAMES))[:3])
    texture = textures[0] if rng.random() < 0.6 else _any(rng, textures[1:] or textures)
    if alone or rng.random() < 0.8:
        shapes, words = _one(rng, size, kinds, colours[0], colours[0])
    else:
        shapes, words = _pair(rng, size, kinds, colours)
    if alone or rng.random() < 0.85:
        words += f" on {_a(f'{texture} {ground}' if texture != 'plain' else ground)} background"
    return Scene(ground, texture, shapes, words)


def _any(rng: np.random.Generator, words: Sequence[str]) -> str:
    return words[int(rng.random() * len(words))]


def _a(words: str) -> str:
    return f"{'an' if words[0] in 'aeiou' else 'a'} {words}"


def _one(
    rng: np.random.Generator, size: tuple[int, int], kinds: Sequence[str], colour: str, named: str
) -> tuple[tuple[Shape, ...], str]:
    """Makes one shape at random."""
    kind, how, place = _any(rng, kinds), _any(rng, tuple(RADII)), _any(rng, tuple(PLACES))
    if rng.random() < 0.3:
        place = ""
    radius = rng.uniform(*RADII[how]) * min(size)
    middle = []
    for side, towards in zip(reversed(size), PLACES[place], strict=True):
        reach = side / 2 - radius - 3
        off = towards * rng.uniform(0.75, 1.0) * reach if towards else rng.uniform(-0.12, 0.12) * min(size)
        middle.append(side / 2 + float(np.clip(off, -reach, reach)))
    word = how if rng.random() < 0.85 else ""
    words = " ".join(w for w in (word, named, kind, place) if w)
    return (Shape(kind, colour, radius, (middle[0], middle[1])),), _a(words)


def _pair(
    rng: np.random.Generator, size: tuple[int, int], kinds: Sequence[str], colours: Sequence[str]
) -> tuple[tuple[Shape, ...], str]:
    """Makes two shapes, one left of or above the other."""
    short = min(size)
    above = bool(rng.random() < 0.5) if size[0] == size[1] else size[0] > size[1]
    shapes = []
    for sign, colour in zip((-1, 1), colours, strict=True):
        radius = rng.uniform(0.15, 0.2) * short
        along = sign * rng.uniform(0.22, 0.27) * (size[0] if above else size[1])
        across = rng.uniform(-0.1, 0.1) * short
        dx, dy = (across, along) if above else (along, across)
        shapes.append(Shape(_any(rng, kinds), colour, radius, (size[1] / 2 + dx, size[0] / 2 + dy)))
    first, other = (_a(f"{s.colour} {s.kind}") for s in shapes)
    return tuple(shapes), f"{first} {'above' if above else 'left of'} {other}"


def write_images(folder: Path, count: int, seed: int, make: Maker = scenes) -> int:
    """Writes `count` images, half of them square, as PNGs with caption files. Raises OutputError.

    `make(count, size, seed)` is `scenes` or `tiles`. The same bytes every time; another `seed` gives
    others. Returns `count`.
    """
    for size, share in zip(SIZES, (count - 2 * (count // 4), count // 4, count // 4), strict=True):
        drawings = make(share, size, seed)
        for i, (scene, pixels) in enumerate(zip(drawings, render(np, drawings, size), strict=True)):
            name, caption = folder / f"{size[0]}x{size[1]}-{i + 1:02}", scene.caption.encode()
            write_png(name.with_suffix(".png"), pixels)
            write_atomically(name.with_suffix(".txt"), [caption], len(caption))
    return count


def render(xp: Any, what: Sequence[Scene], size: tuple[int, int]) -> Array:
    """Draws uint8 RGB images (N, H, W, 3) of scenes, on the device of `xp` (NumPy or CuPy)."""
    y, x = (xp.asarray(axis, np.float32) for axis in np.mgrid[: size[0], : size[1]] + 0.5)
    image = _grounds(xp, what, x, y)
    for i in range(2):
        rows = [j for j, scene in enumerate(what) if len(scene.shapes) > i]
        if rows:
            shapes = [what[j].shapes[i] for j in rows]
            cover = xp.clip(0.5 - _distances(xp, shapes, x, y), 0.0, 1.0)[..., None]
            colour = _columns(xp, [COLOURS[s.colour] for s in shapes])
            at = xp.asarray(rows)
            image[at] = image[at] * (1.0 - cover) + colour * cover
    return xp.rint(image).astype(np.uint8)


def _columns(xp: Any, values: Any) -> Array:
    """Reshapes numbers (N,) or colours (N, 3) of scenes to (N, 1, 1) or (N, 1, 1, 3)."""
    host = np.asarray(values, np.float32)
    return xp.asarray(host.reshape(host.shape[0], 1, 1, *host.shape[1:]))


def _grounds(xp: Any, what: Sequence[Scene], x: Array, y: Array) -> Array:
    """Draws backgrounds (N, H, W, 3): a pattern is drawn in the background's colour, mixed with white or black."""
    base = np.array([COLOURS[s.ground] for s in what], np.float32)
    light = base.mean(-1, keepdims=True) < 110
    shade = base + (np.where(light, 255.0, 0.0) - base) * 0.35
    fx, fy = x % 24 - 12, y % 24 - 12
    patterns = {
        "plain": xp.zeros_like(x),
        "dotted": xp.clip(7.5 - xp.sqrt(fx * fx + fy * fy), 0.0, 1.0),
        "checkered": ((x // 16 + y // 16) % 2).astype(np.float32),
        "striped": (y // 8 % 2).astype(np.float32),
    }
    cover = xp.stack([patterns[n] for n in _GROUNDS])[xp.asarray([_GROUNDS.index(s.texture) for s in what])]
    return _columns(xp, base) + cover[..., None] * _columns(xp, shade - base)


def _distances(xp: Any, shapes: Sequence[Shape], x: Array, y: Array) -> Array:
    """Computes signed distances (N, H, W) in pixels from each shape's edge, negative inside."""
    centre, radius = np.array([s.centre for s in shapes]), _columns(xp, [s.radius for s in shapes])
    dx, dy = x - _columns(xp, centre[:, 0]), y - _columns(xp, centre[:, 1])
    kind = _columns(xp, [_KINDS.index(s.kind) for s in shapes])
    far = xp.sqrt(dx * dx + dy * dy)
    distances = {
        "circle": lambda: far - radius,
        "square": lambda: xp.maximum(xp.abs(dx), xp.abs(dy)) - radius * 0.88,
        "triangle": lambda: xp.maximum(dy - radius * 0.7, 0.87 * xp.abs(dx) - 0.5 * dy - radius * 0.55),
        "diamond": lambda: (xp.abs(dx) + xp.abs(dy) - radius * 1.2) * 0.7071,
        "cross": lambda: xp.minimum(_box(xp, dx, dy, radius, 0.36), _box(xp, dy, dx, radius, 0.36)),
        "ring": lambda: xp.abs(far - radius * 0.76) - radius * 0.24,
        "star": lambda: _star(xp, dx, dy, far, radius * 1.1),
    }
    result = xp.zeros_like(far)
    for number, name in enumerate(_KINDS):
        if any(s.kind == name for s in shapes):
            result = xp.where(kind == number, distances[name](), result)
    return result


def _box(xp: Any, dx: Array, dy: Array, radius: Array, ratio: float) -> Array:
    return xp.maximum(xp.abs(dx) - radius, xp.abs(dy) - radius * ratio)


def _star(xp: Any, dx: Array, dy: Array, far: Array, radius: Array, points: int = 5, inner: float = 0.42) -> Array:
    """Computes the distance from a star with one point up: half a point, folded, has one line as its edge."""
    half = np.pi / points
    angle = xp.abs((xp.arctan2(dx, -dy) + half) % (2 * half) - half)
    u, v = far * xp.cos(angle), far * xp.sin(angle)
    edge = (inner * np.cos(half) - 1.0, inner * np.sin(half))  # from the tip to the notch, in radii
    length = float(np.hypot(*edge))
    return ((u - radius) * edge[1] - v * edge[0]) / length
