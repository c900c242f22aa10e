"""GPU tests run where a GPU is; elsewhere the whole tier is skipped, saying why."""

from __future__ import annotations

import pytest

from flame_train.engine.backend import get_backend
from flame_train.errors import EnvironmentFault


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    try:
        get_backend("cuda")
    except EnvironmentFault as e:
        skip = pytest.mark.skip(reason=f"no GPU: {e}")
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(skip)
