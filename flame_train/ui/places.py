"""What lies below the roots: folders to choose from, base models, and an example to begin with."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from flame_train.data.image_formats import PICTURE_ENDINGS
from flame_train.disk.roots import Roots
from flame_train.errors import FlameError, shown
from flame_train.io.addresses import is_address, is_hub_name
from flame_train.io.hub import fetching, resolve_checkpoint
from flame_train.io.model_search import MODEL_ENDINGS
from flame_train.models.registry import FAMILIES, family_of
from flame_train.quickstart.first_run import lay, usable_device

_MOST: Final = 300  # models, and folders of a list
_FILES: Final = (".safetensors", ".gguf", ".txt", ".json", ".model")  # that a key may name
_ENTRIES: Final = 200_000  # that are looked at in search of models
_NOT_ALL: Final = "not all folders were searched for models; name the file, or start the window for a smaller folder"
EXAMPLE: Final = "example"


def folders(path: str, roots: Roots) -> dict[str, Any]:
    """Returns a folder below the roots with what is in it; "" stands above several roots. Raises ConfigError."""
    alone = len(roots.folders) == 1
    if not path and not alone:
        listed = [_folder(root, str(root)) for root in roots.folders]
        return {"path": "", "above": None, "images": 0, "folders": listed, "files": []}
    place = roots.place(path or str(roots.folders[0]))
    inside = sorted((e for e in _entries(place) if not e.name.startswith(".") and e.is_dir()), key=lambda e: e.name)
    listed = [_folder(Path(entry.path), entry.name) for entry in inside if roots.holds(entry.path)]
    above = (None if alone else "") if place in roots.folders else str(place.parent)
    names = sorted(entry.name for entry in _entries(place) if entry.name.lower().endswith(_FILES))
    files = [{"path": str(place / name), "name": shown(name)} for name in names]
    found = {"folders": listed[:_MOST], "files": files[:_MOST]}
    return {"path": str(place), "above": above, "images": _images(place)} | found


def _folder(path: Path, name: str) -> dict[str, Any]:
    return {"path": str(path), "name": shown(name), "images": _images(path)}


def _images(folder: Path) -> int:
    return sum(os.path.splitext(entry.name)[1].lower() in PICTURE_ENDINGS for entry in _entries(folder))


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError:
        return []


def models(roots: Roots) -> dict[str, Any]:
    """Returns the base models below the roots, with the family of each one's header, and a note where not all are."""
    found: list[dict[str, str]] = []
    seen = 0
    for place, entries in _candidates(roots):
        seen += entries
        if len(found) == _MOST or seen > _ENTRIES:
            return {"models": found, "note": _NOT_ALL}
        if place is None:
            continue
        try:
            roots.refuse_links_out(place)
            family = family_of(place)
        except FlameError:  # a LoRA, a VAE, a damaged file: no base
            continue
        found.append({"path": str(place), "name": shown(place.name), "family": family.name, "title": family.title})
    return {"models": found, "note": ""}


def _candidates(roots: Roots) -> Iterator[tuple[Path | None, int]]:
    """Yields folders in diffusers' layout and single files, none in such a folder, and how many entries were passed."""
    for root in roots.folders:
        for folder, inside, names in os.walk(root):
            inside[:] = sorted(name for name in inside if not name.startswith("."))
            yield None, len(inside) + len(names)
            if "model_index.json" in names:
                inside.clear()
                yield Path(folder), 0
                continue
            files = (Path(folder, name) for name in sorted(names) if name.lower().endswith(MODEL_ENDINGS))
            yield from ((file, 0) for file in files if roots.holds(file))


def family_told(base: str, confirmed: bool, roots: Roots) -> str:
    """Returns the family of a base model by its file, or what is kept of it; the hub tells it once it is `confirmed`.

    Raises FlameError.
    """
    if not is_hub_name(base) and not is_address(base):
        roots.refuse_links_out(roots.place(base))
    with fetching("headers" if confirmed else "nothing"):
        return family_of(resolve_checkpoint(base)).name


def example(folder: str, roots: Roots) -> dict[str, str]:
    """Makes quickstart's images and its small base below a folder. Returns the text of its config."""
    place = roots.place(os.path.join(folder, EXAMPLE))
    config = lay(place, usable_device(None), FAMILIES["sdxl"])
    return {"toml": config.read_text(encoding="utf-8"), "folder": str(place)}
