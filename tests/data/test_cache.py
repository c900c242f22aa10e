"""The cache gives back what was put in, computes only what changed, and trusts no damaged entry."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from flame_train.data import cache as module
from flame_train.data.cache import DiskCache, cache_key
from flame_train.errors import OutputError
from flame_train.io.digests import Digests

SETTINGS = {"size": [64, 64], "crop": [0, 3], "dtype": "float32", "upscale": False}


def arrays(seed: int = 0) -> dict[str, np.ndarray[Any, Any]]:
    rng = np.random.default_rng(seed)
    return {
        "latents": rng.standard_normal((4, 8, 8)).astype(np.float32),
        "half": rng.standard_normal((3, 5)).astype(ml_dtypes.bfloat16),
        "turned": np.asarray(rng.standard_normal((4, 6))).T,
        "count": np.array(7, np.int32),
    }


def same(a: dict[str, np.ndarray[Any, Any]], b: dict[str, np.ndarray[Any, Any]]) -> bool:
    return a.keys() == b.keys() and all(
        a[k].dtype == b[k].dtype and a[k].shape == b[k].shape and a[k].tobytes() == b[k].tobytes() for k in a
    )


def get_or_make(cache: DiskCache, key: str, make: Callable[[], dict[str, np.ndarray[Any, Any]]]) -> Any:
    """As encoding does: an entry that is missing or damaged is made and kept."""
    if (entry := cache.get(key)) is not None:
        return entry
    new = dict(make())
    cache.put(key, new)
    return new


class Maker:
    """Counts how often it was asked."""

    def __init__(self, seed: int = 0) -> None:
        self.seed, self.calls = seed, 0

    def __call__(self) -> dict[str, np.ndarray[Any, Any]]:
        self.calls += 1
        return arrays(self.seed)


def test_made_once_then_read(tmp_path: Path) -> None:
    make, key = Maker(), cache_key("latents", "image", "vae", SETTINGS)
    first = DiskCache(tmp_path / "new" / "cache")
    assert same(get_or_make(first, key, make), arrays())
    assert (first.hits, first.misses, first.damaged) == (0, 1, 0)
    second = DiskCache(tmp_path / "new" / "cache")
    assert same(get_or_make(second, key, make), arrays())
    assert (second.hits, second.misses, make.calls) == (1, 0, 1)
    assert load_file(first.path(key))["latents"].tobytes() == arrays()["latents"].tobytes()


def test_what_is_read_belongs_to_the_caller(tmp_path: Path) -> None:
    cache, key = DiskCache(tmp_path), cache_key("latents", "image", "vae", SETTINGS)
    cache.put(key, arrays())
    found = cache.get(key)
    assert found is not None
    found["latents"][:] = 0
    again = cache.get(key)
    assert again is not None
    assert same(again, arrays())


def test_key_changes_with_each_part_and_no_other_way() -> None:
    base: dict[str, Any] = {"kind": "latents", "content": "i", "model": "m", "settings": SETTINGS}
    keys = {cache_key(**base)}
    for part in ("kind", "content", "model"):
        keys.add(cache_key(**{**base, part: "other"}))
    for name, value in {"size": [64, 128], "crop": [0, 4], "dtype": "bfloat16", "upscale": True}.items():
        keys.add(cache_key(**{**base, "settings": {**SETTINGS, name: value}}))
    keys.add(cache_key(**{**base, "settings": {}}))
    keys.add(cache_key("latents", "im", "", SETTINGS))  # parts are not just joined
    assert len(keys) == 10
    assert cache_key(**{**base, "settings": dict(reversed(SETTINGS.items()))}) == cache_key(**base)


def test_settings_that_are_not_json_are_refused() -> None:
    with pytest.raises(ValueError, match="JSON"):
        cache_key("latents", "i", "m", {"scale": float("nan")})
    with pytest.raises(TypeError):
        cache_key("latents", "i", "m", {"path": Path("x")})


def flip(data: bytes) -> bytes:
    middle = len(data) - 40
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "cut": lambda data: data[:-1],
    "half": lambda data: data[: len(data) // 2],
    "longer": lambda data: data + b"\0",
    "flipped bit": flip,
    "other shape": lambda data: data.replace(b"[4,8,8]", b"[8,4,8]"),
    "other name": lambda data: data.replace(b"latents", b"Latents"),
    "other version": lambda data: data.replace(b'"cache_format":"1"', b'"cache_format":"0"'),
    "text": lambda data: b"not an entry",
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_entry_is_made_again(tmp_path: Path, damage: str) -> None:
    cache, key, make = DiskCache(tmp_path), cache_key("latents", "i", "m", SETTINGS), Maker()
    cache.put(key, arrays())
    whole = cache.path(key).read_bytes()
    broken = DAMAGE[damage](whole)
    assert broken != whole
    cache.path(key).write_bytes(broken)
    assert same(get_or_make(cache, key, make), arrays())
    assert (make.calls, cache.damaged, cache.misses) == (1, 1, 1)
    assert cache.path(key).read_bytes() == whole
    assert cache.get(key) is not None


@given(at=st.integers(0), change=st.integers(1, 255))
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_changed_byte_changes_what_is_read(tmp_path: Path, at: int, change: int) -> None:
    cache, key = DiskCache(tmp_path), cache_key("latents", "i", "m", SETTINGS)
    cache.put(key, arrays())
    data = bytearray(cache.path(key).read_bytes())
    data[at % len(data)] ^= change
    cache.path(key).write_bytes(data)
    found = cache.get(key)
    assert found is None or same(found, arrays())


def test_entry_under_a_wrong_name_is_not_believed(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path)
    one, two = (cache_key("latents", name, "m", SETTINGS) for name in ("one", "two"))
    cache.put(one, arrays(1))
    cache.path(two).parent.mkdir(parents=True, exist_ok=True)
    cache.path(two).write_bytes(cache.path(one).read_bytes())
    assert same(get_or_make(cache, two, Maker(2)), arrays(2))


def test_a_folder_in_an_entrys_place_is_told_before_anything_is_made(tmp_path: Path) -> None:
    cache, key, make = DiskCache(tmp_path), cache_key("latents", "i", "m", SETTINGS), Maker()
    cache.path(key).mkdir(parents=True)
    with pytest.raises(
        OutputError, match=r"\.safetensors: is a folder where a cache entry belongs; remove it, or set "
    ):
        get_or_make(cache, key, make)
    assert make.calls == 0
    cache.path(key).rmdir()
    assert same(get_or_make(cache, key, make), arrays())


def test_a_maker_that_fails_leaves_nothing(tmp_path: Path) -> None:
    cache, key = DiskCache(tmp_path), cache_key("latents", "i", "m", SETTINGS)

    def fail() -> dict[str, np.ndarray[Any, Any]]:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        get_or_make(cache, key, fail)
    assert cache.get(key) is None
    assert cache.damaged == 0


@pytest.mark.parametrize("moment", ["os.fsync", "os.rename"])
def test_killed_while_writing(tmp_path: Path, moment: str) -> None:
    key = cache_key("latents", "i", "m", SETTINGS)
    code = f"""
import os, pathlib, signal
import numpy as np
from flame_train.data.cache import DiskCache
{moment} = lambda *_, **at: os.kill(os.getpid(), signal.SIGKILL)
DiskCache(pathlib.Path({str(tmp_path)!r})).put({key!r}, {{"latents": np.zeros((4, 8, 8), np.float32)}})
"""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    killed = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True)
    assert killed.returncode == -signal.SIGKILL
    cache, make = DiskCache(tmp_path), Maker()
    assert same(get_or_make(cache, key, make), arrays())
    assert (make.calls, cache.damaged) == (1, 0)


def test_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    cache = DiskCache(tmp_path / "file" / "cache")
    with pytest.raises(OutputError):
        get_or_make(cache, cache_key("latents", "i", "m", {}), Maker())


class Starts:
    """New starts that ask whether an entry is there, long after it was written; `read` are the entries they read."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tmp_path, self.read = tmp_path, list[Path]()
        usual = module._read_verified

        def watched(path: Path, *rest: Any) -> Any:
            self.read.append(path)
            return usual(path, *rest)

        monkeypatch.setattr(module, "_read_verified", watched)

    def cache(self) -> tuple[DiskCache, Digests]:
        digests = Digests(self.tmp_path / "kept", lambda: time.time_ns() + 10_000_000_000)
        return DiskCache(self.tmp_path / "cache", digests), digests

    def has(self, key: str, shapes: Any = None) -> bool:
        cache, digests = self.cache()
        with digests:
            return cache.has(key, shapes)


@pytest.fixture
def starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Starts:
    return Starts(tmp_path, monkeypatch)


def test_an_entry_that_was_whole_and_was_not_touched_is_not_read_again(starts: Starts) -> None:
    key, shapes = cache_key("latents", "image", "vae", SETTINGS), {k: a.shape for k, a in arrays().items()}
    starts.cache()[0].put(key, arrays())
    assert [starts.has(key, shapes) for _ in range(3)] == [True] * 3
    assert len(starts.read) == 1
    assert not starts.has(key, {"latents": (1,)})  # another question
    assert len([*(starts.tmp_path / "kept").iterdir()]) == 1  # one file for all of a cache's folders


@pytest.mark.parametrize("change", ["a bit, at its old modification time", "cut", "another file", "gone"])
def test_an_entry_that_was_changed_since_is_noticed(starts: Starts, change: str) -> None:
    key = cache_key("latents", "image", "vae", SETTINGS)
    cache, _ = starts.cache()
    cache.put(key, arrays())
    assert starts.has(key)
    path, before = cache.path(key), cache.path(key).stat()
    if change == "gone":
        path.unlink()
    elif change == "another file":
        cache.put(key, {"other": np.zeros(3, np.float32)})
        assert starts.has(key)  # whole, and read again
        assert len(starts.read) == 2
        return
    else:
        with path.open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            last = file.read(1)[0]
            file.seek(-1, os.SEEK_END)
            file.write(bytes([last ^ 1])) if change != "cut" else file.truncate()
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert not starts.has(key)


def test_what_reading_finds_damaged_is_read_by_the_next_start_whatever_its_times_say(
    starts: Starts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that lost a bit leaves all times of the file as they were."""
    key = cache_key("latents", "image", "vae", SETTINGS)
    cache, _ = starts.cache()
    cache.put(key, arrays())
    assert starts.has(key)
    states = {cache.path(key): cache.path(key).stat()}
    usual = os.stat
    monkeypatch.setattr(os, "stat", lambda path, *a, **k: states.get(path) or usual(path, *a, **k))
    content = bytearray(cache.path(key).read_bytes())
    content[-1] ^= 1
    cache.path(key).write_bytes(content)
    assert starts.has(key)  # nothing tells
    assert starts.cache()[0].get(key) is None
    assert not starts.has(key)
