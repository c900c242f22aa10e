"""What a config names by addresses, brought into the cache before anything is checked."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from flame_train.config.keys import keys
from flame_train.config.schema import Config
from flame_train.errors import ConfigError
from flame_train.io.addresses import is_address
from flame_train.io.digests import Digests
from flame_train.user_cache import user_cache


def fetch_inputs(config: Config, asked: bool, check: Callable[[], None]) -> None:
    """Fetches every file and folder that an address names; with `asked` false it only looks whether all are there.

    `check` is called between parts. Raises RemoteError for what does not come, ConfigError for what is not there.
    """
    named = dict(_addresses(config))
    if not named:
        return
    from flame_train.remote.inputs import fetch, is_kept

    if not asked:
        missing = [f"{key}: {address} was not fetched yet" for address, key in named.items() if not is_kept(address)]
        if missing:
            raise ConfigError("\n".join(missing) + "\nonly a command that works with it fetches it: no --dry-run")
        return
    with Digests(user_cache("digests")) as digests:
        for address in named:
            fetch(address, digests, check)


def _addresses(config: Config) -> Iterator[tuple[str, str]]:
    """Each address that the run reads from, with its key."""
    for path, key in keys().items():
        value = getattr(getattr(config, key.section), key.name)
        for each in (value if isinstance(value, tuple) else [value]) if key.place else []:
            if isinstance(each, str) and is_address(each):
                yield each, path
    for number, one in enumerate(config.data.sets, 1):
        for each in filter(is_address, (one.path, *one.control)):
            yield each, f"data.sets {number}"
