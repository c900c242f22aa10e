"""Reading a stranger's files: no more memory than they have bytes."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest

from flame_train.data.file_reading import read_bytes
from flame_train.errors import DataError


def test_a_file_takes_the_memory_of_its_bytes_and_not_of_its_limit(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(b"x" * 1000)
    tracemalloc.start()
    try:
        assert read_bytes(path, limit=1 << 29) == b"x" * 1000
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(("said", "limit"), [(0, 1000), (0, 1001), (999, 1000), (1000, 1000)])
def test_a_file_that_grows_while_it_is_read_is_read_whole_up_to_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: int, limit: int
) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(b"x" * 1000)
    sized = type("Sized", (), {"st_size": said})
    monkeypatch.setattr("flame_train.data.file_reading.os.fstat", lambda handle: sized)
    assert read_bytes(path, limit=limit) == b"x" * 1000
    with pytest.raises(DataError, match="larger than the 900 bytes"):
        read_bytes(path, limit=900)
