"""Room for large workspaces: one at a time, and where graphs work it stays."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import pytest

from flame_train.engine.backend.cuda.workspace import _LARGE as LARGE
from flame_train.engine.backend.cuda.workspace import Workspace
from flame_train.engine.mode import capturing


class Room:
    """Memory of so many bytes."""

    def __init__(self, size: int, dtype: str) -> None:
        self.nbytes = size


@pytest.fixture
def made() -> list[Any]:
    """What is taken, in order, as long as it is held."""
    return []


@pytest.fixture
def workspace(made: list[Any]) -> Workspace:
    def empty(size: int, dtype: str) -> Room:
        room = Room(size, dtype)
        made.append(weakref.ref(room))
        return room

    return Workspace(SimpleNamespace(empty=empty))


def held(made: list[Any]) -> list[int]:
    return [room().nbytes for room in made if room()]


def test_large_ones_share_the_largest(workspace: Workspace, made: list[Any]) -> None:
    assert workspace.get(3 * LARGE) is workspace.get(2 * LARGE)
    assert held(made) == [3 * LARGE]


def test_a_larger_one_takes_the_place_of_a_smaller(workspace: Workspace, made: list[Any]) -> None:
    workspace.get(LARGE)
    workspace.get(2 * LARGE)
    assert held(made) == [2 * LARGE]


@pytest.mark.parametrize("size", [0, 1, LARGE - 1])
def test_small_ones_come_and_go(workspace: Workspace, made: list[Any], size: int) -> None:
    assert workspace.get(size).nbytes == max(1, size)
    assert held(made) == []


def test_small_ones_lie_in_the_room_that_is_there(workspace: Workspace, made: list[Any]) -> None:
    """As the second part of an attention's heads after the first, which needs a little more."""
    room = workspace.get(LARGE)
    assert workspace.get(LARGE - 1) is room
    with capturing():
        assert workspace.get(1) is room
    del room
    assert held(made) == [LARGE]


def test_a_graph_keeps_its_room_when_a_larger_is_asked_for(workspace: Workspace, made: list[Any]) -> None:
    workspace.get(LARGE)
    with capturing():
        first = workspace.reserve()
        assert workspace.get(LARGE) is first
    workspace.get(2 * LARGE)
    assert held(made) == [LARGE, 2 * LARGE]
    with capturing():
        assert workspace.reserve() is workspace.get(LARGE)
    del first
    workspace.release()
    assert held(made) == []


def test_a_capture_begins_with_room_for_what_was_asked_before(workspace: Workspace, made: list[Any]) -> None:
    with capturing():
        assert workspace.reserve() is None
    workspace.get(2 * LARGE)
    workspace.release()
    with capturing():
        assert workspace.reserve().nbytes == 2 * LARGE


def test_other_work_begins_without_it(workspace: Workspace, made: list[Any]) -> None:
    workspace.get(2 * LARGE)
    workspace.forget()
    assert held(made) == []
    with capturing():
        assert workspace.reserve() is None
