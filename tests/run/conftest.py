"""Runs here train a tiny SDXL with random weights, but where a test uses `trained_base`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flame_train.models.common.small import SMALL_SDXL
from tests.tiny_sdxl import write_tiny_sdxl


@pytest.fixture(scope="session")
def tiny_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny") / "base.safetensors"
    write_tiny_sdxl(path)
    return path


@pytest.fixture(scope="session")
def trained_base() -> Path:
    """The small SDXL of the package, for what depends on what it learned or on its sizes."""
    return SMALL_SDXL


@pytest.fixture
def small_base(request: pytest.FixtureRequest, tiny_base: Path) -> Path:
    """Not to be written to."""
    return SMALL_SDXL if "trained_base" in request.fixturenames else tiny_base


@pytest.fixture
def small_config(small_config: Callable[..., Any], encoded: Path) -> Callable[..., Any]:
    """The usual one, with a cache that all runs here share."""
    return lambda **sections: small_config(**sections | {"data": {"cache": str(encoded)} | sections.get("data", {})})
