"""A run with a copy in moto's S3, and that store as fsspec has it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.faults.remote import servers as store_servers


@pytest.fixture(scope="session")
def servers() -> ModuleType:
    """The module with the servers of stores."""
    return store_servers


@pytest.fixture(scope="session")
def s3(servers: ModuleType) -> Iterator[Any]:
    with servers.moto() as made:
        yield made


@pytest.fixture
def bucket(s3: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The store as fsspec has it here."""
    import fsspec

    for name, value in s3.environment().items():
        monkeypatch.setenv(name, value)
    return fsspec.filesystem("s3", skip_instance_cache=True, use_listings_cache=False)


@dataclass(frozen=True)
class Remote:
    """A job whose folder is copied to `place`, bucket and all."""

    job: Any
    s3: Any
    place: str

    def train(self, failpoint: str = "", port: int | None = None, wait: int = 60, **changes: Any) -> Any:
        """Trains; `port` is that of a proxy, `wait` in seconds."""
        changes = {"output__remote": f"s3://{self.place}", **changes}
        arguments = [*self.job.arguments("sdxl-lora", **changes), "--remote-wait", str(wait)]
        return self.job.program(*arguments, env=self.s3.environment(port), failpoint=failpoint)

    def whole(self, bucket: Any) -> list[int]:
        """The steps of the checkpoints there that have a manifest; each of their files must have its size."""
        found = []
        for path in bucket.glob(f"{self.place}/checkpoints/step-*/MANIFEST.json"):
            folder = path.removesuffix("/MANIFEST.json")
            entries = json.loads(bucket.cat(path))["files"]
            for name, entry in entries.items():
                assert bucket.info(f"{folder}/{name}")["size"] == entry["size"]
            found.append(int(folder[-6:]))
        return sorted(found)


@pytest.fixture
def remote(job: Any, s3: Any, tmp_path: Path) -> Remote:
    return Remote(job, s3, f"runs/{tmp_path.name}")
