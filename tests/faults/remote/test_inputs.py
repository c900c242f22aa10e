"""Images, checkpoint and LoRA from a store: fetched once, checked, and fetched again where the store has others."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def env(s3: Any, tmp_path: Path) -> dict[str, str]:
    return s3.environment() | {"XDG_CACHE_HOME": str(tmp_path / "xdg")}


@pytest.fixture
def stored(bucket: Any, world: Path, tmp_path: Path) -> str:
    """A place in the bucket with the images and the base model."""
    place = f"runs/{tmp_path.name}-inputs"
    bucket.put(str(world / "base.safetensors"), f"{place}/base.safetensors")
    for file in (world / "drawings").iterdir():
        if not file.name.startswith("."):
            bucket.put(str(file), f"{place}/drawings/{file.name}")
    return place


def test_a_run_on_addresses_gives_the_same_bytes(
    job: Any, undisturbed: Any, stored: str, env: dict[str, str], tmp_path: Path, bucket: Any
) -> None:
    places = {"model__checkpoint": f"s3://{stored}/base.safetensors", "data__path": f"s3://{stored}/drawings"}
    arguments = job.arguments("sdxl-lora", **places)
    planned = job.program(*arguments, "--dry-run", env=env)
    assert planned.code == 2
    assert "was not fetched yet" in planned.complaint
    first = job.program(*arguments, env=env)
    assert first.code == 0, first.stderr
    assert first.stderr.count("fetching") == 2
    assert job.result().lora == undisturbed.result.lora
    assert f's3://{stored}/drawings"' in (job.out / "config.toml").read_text()
    shutil.rmtree(job.out)
    again = job.program(*arguments, env=env)
    assert again.code == 0, again.stderr
    assert "fetching" not in again.stderr
    (kept,) = (tmp_path / "xdg").rglob("base.safetensors")
    damaged = bytearray(kept.read_bytes())
    damaged[-1] ^= 1
    kept.write_bytes(damaged)
    bucket.pipe(f"{stored}/drawings/0.txt", b"another caption")
    bucket.rm([f"{stored}/drawings/5.png", f"{stored}/drawings/5.txt"])
    shutil.rmtree(job.out)
    changed = job.program(*arguments, env=env)
    assert changed.code == 0, changed.stderr
    assert changed.stderr.count("fetching 1 file,") == 2
    assert len(list((tmp_path / "xdg").rglob("*.png"))) == 5
    assert job.result().lora != undisturbed.result.lora


def test_a_lora_from_an_address_and_a_store_that_is_gone(
    job: Any, undisturbed: Any, env: dict[str, str], bucket: Any, tmp_path: Path, servers: Any
) -> None:
    address = f"s3://runs/{tmp_path.name}/begun.safetensors"
    bucket.put(str(undisturbed.out / "lora.safetensors"), address)
    arguments = job.arguments("sdxl-lora", lora__from=address)
    first = job.program(*arguments, env=env)
    assert first.code == 0, first.stderr
    result = job.result()
    shutil.rmtree(job.out)
    gone = env | {"AWS_ENDPOINT_URL_S3": f"http://127.0.0.1:{servers.free_port()}"}
    offline = job.program(*arguments, env=gone)
    assert offline.code == 0, offline.stderr
    assert "what was fetched of it before is used" in offline.stderr
    assert job.result() == result
    missing = job.program(*job.arguments("sdxl-lora", lora__from=f"{address}.not"), env=env)
    assert missing.code == 8
    assert "there is no file at this address" in missing.complaint
