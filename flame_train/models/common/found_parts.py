"""A network that no setting names, found among the files of other programs by its tensors and its digest."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from flame_train.errors import ConfigError, ModelFileError, counted, shown
from flame_train.families import FAMILY_TITLES, family_data
from flame_train.io.model_search import Found, Search, sha256_of
from flame_train.networks.files.part import Part

_KEPT_IN: Final = {"vae": ("vae",), "text encoder": ("text_encoders", "text_encoder", "clip")}
"""What ComfyUI and Forge call the folders of a kind of network."""


def find_part(search: Search, wanted: str, component: str, family: str, alone: Callable[[Path], Part]) -> Part:
    """Returns the network in the one file that fits, of those that a search sees, and notes why it was this one.

    A file fits if `alone` opens it: its names and shapes are the network's. Of those that fit, a published file of the
    family is taken before others, and the largest of several, which is the most exact. A VAE that is published for
    other families is none: those of one width differ in values alone. Among files that nobody published none is chosen.

    Args:
        search: the folders.
        wanted: the setting that names no file.
        component: what the family calls the network.
        family: its name.
        alone: opens the network in a file that holds nothing else.

    Raises:
        ConfigError: no file fits, or several do that differ.
    """
    files = search.files(*_KEPT_IN["vae" if component == "vae" else "text encoder"])
    fitting = dict[Path, Part]()
    for file in files:
        try:
            fitting[file] = alone(file)
        except ModelFileError:
            continue
    ours, others = published_parts(family)
    sums = {file: sha256_of(file) for file in fitting}
    usable = [file for file in fitting if component != "vae" or sums[file] not in others]
    known = [file for file in usable if sums[file] in ours]
    if not usable:
        raise ConfigError(
            f"{wanted}: the checkpoint holds no such network, and {_none_of(files, fitting)} of model.search is one "
            f"for it ({', '.join(shown(folder) for folder in search.folders)}); name its file"
        )
    contents = {sums[file] for file in usable}
    if not known and len(contents) > 1:
        names = ", ".join(f"{shown(file)} (SHA-256 {sums[file][:12]})" for file in usable)
        raise ConfigError(f"{wanted}: {len(usable)} files fit by names and shapes, and differ: {names}; name the one")
    taken = max(known or usable, key=lambda file: (file.stat().st_size, -usable.index(file)))
    left = [file for file in usable if sums[file] != sums[taken]]
    why = f"the published {ours[sums[taken]]}" if known else "the only one that fits by names and shapes, unpublished"
    more = f"; passed over {', '.join(map(shown, left))}" if left else ""
    search.note(Found(wanted, taken, f"{why} (SHA-256 {sums[taken][:12]}){more}"))
    return fitting[taken]


def published_parts(family: str) -> tuple[Mapping[str, str], frozenset[str]]:
    """Returns the published files of a family's networks, name by SHA-256, and the hashes of those of others alone."""
    by_family = {name: family_data(name).get("published_parts", {}) for name in FAMILY_TITLES}
    ours: Mapping[str, str] = {sha256: name for name, sha256 in by_family.get(family, {}).items()}
    return ours, frozenset(sha256 for rows in by_family.values() for sha256 in rows.values()) - frozenset(ours)


def _none_of(files: list[Path], fitting: Mapping[Path, Part]) -> str:
    if fitting:
        return f"of {counted(len(files), 'file')} the one that fits by shapes is another family's, and none"
    return f"none of {counted(len(files), 'file')}"
