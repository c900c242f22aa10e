"""Room for large workspaces: one at a time, and where graphs work it stays."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import pytest

from flame_train.engine.backend.cuda.workspace import _LARGE as LARGE
from flame_train.engine.backend.cuda.workspace import Scratch
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
def scratch(made: list[Any]) -> Scratch:
    def empty(size: int, dtype: str) -> Room:
        room = Room(size, dtype)
        made.append(weakref.ref(room))
        return room

    return Scratch(SimpleNamespace(empty=empty))


def held(made: list[Any]) -> list[int]:
    return [room().nbytes for room in made if room()]


def test_large_ones_share_the_largest(scratch: Scratch, made: list[Any]) -> None:
    assert scratch.of(3 * LARGE) is scratch.of(2 * LARGE)
    assert held(made) == [3 * LARGE]


def test_a_larger_one_takes_the_place_of_a_smaller(scratch: Scratch, made: list[Any]) -> None:
    scratch.of(LARGE)
    scratch.of(2 * LARGE)
    assert held(made) == [2 * LARGE]


@pytest.mark.parametrize("size", [0, 1, LARGE - 1])
def test_small_ones_come_and_go(scratch: Scratch, made: list[Any], size: int) -> None:
    assert scratch.of(size).nbytes == max(1, size)
    assert held(made) == []


def test_small_ones_lie_in_the_room_that_is_there(scratch: Scratch, made: list[Any]) -> None:
    """As the second part of an attention's heads after the first, which needs a little more."""
    room = scratch.of(LARGE)
    assert scratch.of(LARGE - 1) is room
    with capturing():
        assert scratch.of(1) is room
    del room
    assert held(made) == [LARGE]


def test_a_graph_keeps_its_room_when_a_larger_is_asked_for(scratch: Scratch, made: list[Any]) -> None:
    scratch.of(LARGE)
    with capturing():
        first = scratch.settle()
        assert scratch.of(LARGE) is first
    scratch.of(2 * LARGE)
    assert held(made) == [LARGE, 2 * LARGE]
    with capturing():
        assert scratch.settle() is scratch.of(LARGE)
    del first
    scratch.release()
    assert held(made) == []


def test_a_capture_begins_with_room_for_what_was_asked_before(scratch: Scratch, made: list[Any]) -> None:
    with capturing():
        assert scratch.settle() is None
    scratch.of(2 * LARGE)
    scratch.release()
    with capturing():
        assert scratch.settle().nbytes == 2 * LARGE
