"""GPU tests run where a GPU is; elsewhere the whole tier is skipped, saying why."""

from __future__ import annotations

import pytest

from flame_train.engine import lazy
from flame_train.engine.backend import get_backend
from flame_train.errors import EnvironmentFault

lazy.load_ops()  # a test of every op lists the registry


@pytest.hookimpl(trylast=True)  # once `-k` and `-m` have chosen
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where no GPU is, one test is skipped for all of them: workers would report thousands one by one."""
    ours = [item for item in items if item.get_closest_marker("gpu")]
    if not ours:
        return
    try:
        get_backend("cuda")
    except EnvironmentFault as e:
        ours[0].add_marker(pytest.mark.skip(reason=f"no GPU for this test and {len(ours) - 1} others: {e}"))
        left_out = set(ours[1:])
        items[:] = [item for item in items if item not in left_out]
