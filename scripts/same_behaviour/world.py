"""What the cases share: small bases, empty ones of published size, images, and how the program is heard.

Here alone are names of the package that may move.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import logging
import os
import re
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import flame_train
from flame_train import cli
from flame_train.families import FAMILY_TITLES

ROOT: Final = Path(flame_train.__file__).parents[1]
FAMILIES: Final = tuple(FAMILY_TITLES)
KINDS: Final = ("lora", "locon", "dora", "loha", "lokr")
PUBLISHED: Final = {
    "sdxl": "sdxl",
    "sd3": "sd35-medium",
    "flux": "flux-dev",
    "zimage": "zimage",
    "flux2": "klein-4b",
    "flux3": "flux3-klein",
    "chroma": "chroma",
    "krea2": "krea2",
    "anima": "anima",
    "qwenimage1": "qwen-image-1",
    "qwenimage": "qwen-image",
}
"""Family -> its model in `scripts/random_checkpoint.py`; a newer family needs no line."""
_FAMILIES_AT: Final = ("flame_train.models.registry", "flame_train.recipes")
_TIMES: Final = re.compile(
    r"( in|,) (\d+(\.\d+)?(e-\d+)?) s\b|, of \d+\.\d+ that are free|\"free_host_memory_gib\": [\d.]+,?"
    r"|object at 0x[0-9a-f]+|flame-train-[\w-]+\.txt"
)
_PROGRESS: Final = re.compile(r"^.*\d:\d\d:\d\d.*\n?", re.MULTILINE)
"""Lines with a clock, which come as often as time allows."""


def families() -> Mapping[str, Any]:
    """The package's families by name, wherever this checkout has them."""
    for name in _FAMILIES_AT:
        with contextlib.suppress(ImportError, AttributeError):
            return importlib.import_module(name).FAMILIES
    raise ImportError(f"expected FAMILIES in one of {_FAMILIES_AT}; name its new place in {__file__}")


def digest(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()[:32]


@dataclass(frozen=True)
class World:
    """Where everything lies: `work` for good, `own` for one task."""

    work: Path
    own: Path

    def base(self, family: str) -> Path:
        return self.work / "bases" / family / "base.safetensors"

    def published(self, family: str) -> Path:
        return self.work / "published" / PUBLISHED[family] / "base.safetensors"

    @property
    def images(self) -> Path:
        return self.work / "images"

    def prepare(self, published: bool) -> None:
        """Makes what is missing; with `published` also checkpoints that take no room on a disk with sparse files."""
        os.environ |= {"HOME": str(self.work / "home"), "XDG_CACHE_HOME": str(self.work / "home" / "cache")}
        if not self.images.exists():
            self.images.mkdir(parents=True)
            _in_a_fork(lambda: draw(self.images))
        for name in FAMILIES:
            if not self.base(name).exists():
                self.base(name).parent.mkdir(parents=True, exist_ok=True)
                _in_a_fork(lambda name=name: families()[name].write_small_base(self.base(name).parent, 3))
            if published and name in PUBLISHED and not self.published(name).exists():
                script = [sys.executable, str(ROOT / "scripts" / "random_checkpoint.py")]
                arguments = [str(self.published(name).parent), "--model", PUBLISHED[name], "--empty", "--device", "cpu"]
                environment = os.environ | {"PYTHONPATH": str(ROOT)}
                subprocess.run([*script, *arguments], check=True, env=environment, stdout=subprocess.DEVNULL)

    def inputs(self) -> dict[str, Any]:
        """What the cases are made from, so that a comparison shows where that differs."""
        files = [*self.images.iterdir(), *(path for path in (self.work / "bases").rglob("*") if path.is_file())]
        return {str(path.relative_to(self.work)): digest(path.read_bytes()) for path in sorted(files)}

    def without_places(self, value: Any) -> Any:
        """The value, with names in the place of folders, and without times."""
        text = json.dumps(value, ensure_ascii=False)
        for path, name in ((self.own, "OWN"), (self.work, "WORK"), (ROOT, "ROOT")):
            text = text.replace(json.dumps(str(path))[1:-1], name)
        return json.loads(text)


def draw(folder: Path) -> None:
    """Three images with captions, one of them wide."""
    import numpy as np
    from PIL import Image

    for i, width in enumerate((64, 96, 64)):
        y, x = np.mgrid[0:64, 0:width]
        waves = [np.sin(x / (5 + i) + y / (9 - c) + i) for c in range(3)]
        Image.fromarray(np.rint(127.5 + 127.5 * np.stack(waves, -1)).astype(np.uint8)).save(folder / f"{i}.png")
        (folder / f"{i}.txt").write_text(f"a photo of a red circle, number {i}")


def _in_a_fork(work: Callable[[], object]) -> None:
    """Runs `work` in a child: this process keeps no threads and no NumPy, and can be forked."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    if os.waitpid(pid, 0)[1]:
        raise RuntimeError("an input could not be made")


def written(text: str) -> str:
    """What the program wrote, without times."""
    return _TIMES.sub("", _PROGRESS.sub("", text.replace("\r", "\n")))


@contextlib.contextmanager
def _redirected(folder: Path) -> Any:
    """Inside, what is written to the standard streams goes into files; yields their paths."""
    paths = [folder / ".stdout", folder / ".stderr"]
    kept = [os.dup(1), os.dup(2)]
    sys.stdout.flush()
    for number, path in enumerate(paths, 1):
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, number)
        os.close(file)
    try:
        yield paths
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, old in enumerate(kept, 1):
            os.dup2(old, number)
            os.close(old)


def heard(world: World, work: Callable[[], int]) -> dict[str, Any]:
    """What `work` returns, and what it writes with the package's log."""
    handler = logging.StreamHandler(sys.stderr)
    ours = logging.getLogger("flame_train")
    ours.addHandler(handler)
    ours.setLevel(logging.INFO)
    try:
        with _redirected(world.own) as (out, err):
            code = work()
    finally:
        ours.removeHandler(handler)
    return {"code": code, "stdout": written(out.read_text()), "stderr": written(err.read_text())}


def program(world: World, *arguments: str) -> dict[str, Any]:
    """What a command line answers."""
    return heard(world, lambda: cli.run(list(arguments)))
