"""Drops from a cache what no config in a folder uses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from flame_train.config.load import load_located
from flame_train.data.cache import DiskCache
from flame_train.errors import ConfigError, FlameError
from flame_train.io.hub import fetching
from flame_train.run.check.check_run import check
from flame_train.run.plan.plan import Plan, make_plan
from flame_train.training.session import StopRequest

from ..memory.options import encodings

_ENDINGS = (".toml", ".yaml", ".yml")


def prune_cache(source: str, overrides: Sequence[str], configs: Path, dry_run: bool) -> dict[str, Any]:
    """Removes the entries of a config's cache that neither it nor any config in a folder uses.

    A config that cannot be planned might use anything, so one such ends it with nothing removed.

    Args:
        configs: the folder of configs, of which folders in it are not read.
        dry_run: whether nothing is removed.

    Returns:
        How many entries are kept and removed, and the bytes of the latter.

    Raises:
        ConfigError: the folder has no configs, or one of them is wrong.
    """
    with StopRequest() as stop, fetching("nothing"):
        plan = make_plan(check(load_located(source, overrides)), stop)
        used = set(_entries(plan))
        for path in _files(configs):
            try:
                used.update(_entries(make_plan(check(load_located(str(path))), stop)))
            except FlameError as error:
                raise ConfigError(
                    f"{path}: what this config uses is not known, so nothing was removed; mend it or move it away:\n"
                    f"{error}"
                ) from error
        cache = DiskCache(plan.encoding.folder)
        staying, removed, size = 0, 0, 0
        for key, nbytes in list(cache.entries()):
            if key in used:
                staying += 1
                continue
            removed, size = removed + 1, size + nbytes
            if not dry_run:
                cache.remove(key)
            stop.check("while removing entries")
        return {"kept": staying, "removed": removed, "bytes": size, "cache": str(cache.folder)}


def _files(folder: Path) -> list[Path]:
    files = sorted(path for path in folder.glob("*") if path.suffix.lower() in _ENDINGS and path.is_file())
    if not files:
        raise ConfigError(f"{folder}: expected a folder of configs ({', '.join(_ENDINGS)}), got none there")
    return files


def _entries(plan: Plan) -> Iterator[str]:
    """Yields the keys that a config's runs read, whatever their memory budget chooses."""
    for way in encodings(plan):
        keys = way.cache_keys()
        yield from keys.captions.values()
        yield from keys.shown.values()
        for index in range(len(keys.images)):
            yield from keys.of_sample(index)
