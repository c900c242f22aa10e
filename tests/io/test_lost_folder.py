"""A run folder that is moved, removed or replaced while a run writes; and links where its own files belong."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from flame_train.disk.atomic_write import write_atomically
from flame_train.disk.open_folder import FolderEntry, FolderLost
from flame_train.errors import OutputError
from flame_train.io.runfolder import RunFolder

FILES = {"lora.safetensors": b"lora", "state.json": b"{}"}


def run_folder(path: Path) -> RunFolder:
    return RunFolder(path, "a = 1\n", lambda old, found: None)


def contents(path: Path) -> dict[str, bytes | str]:
    found: dict[str, bytes | str] = {}
    for file in sorted(path.rglob("*")):
        name = str(file.relative_to(path))
        found[name] = os.readlink(file) if file.is_symlink() else file.read_bytes() if file.is_file() else "folder"
    return found


def rename(path: Path) -> None:
    path.rename(path.with_name("moved"))


def remove(path: Path) -> None:
    shutil.rmtree(path)


def replace(path: Path) -> None:
    """As a second run that was started in the meantime leaves it."""
    rename(path)
    with run_folder(path) as second:
        second.resume()
        second.log({"step": 1, "of": "the second run"})
        second.checkpoint(1, FILES, keep=1)


def link(path: Path) -> None:
    """A link to the folder of another run."""
    replace(path)
    path.rename(path.with_name("second"))
    path.symlink_to("second")


WAYS = [rename, remove, replace, link]

Write = Callable[[RunFolder], object]
WRITES: dict[str, Write] = {
    "a line": lambda run: run.log({"step": 301}),
    "a checkpoint": lambda run: run.checkpoint(300, FILES, keep=1),
    "a grid": lambda run: run.write_sample(300, b"png"),
    "the status": lambda run: run.write_status("running"),
    "the result": lambda run: write_atomically(run.place(run.lora), [b"lora"], 4),
    "events": lambda run: run.owned("tensorboard"),
}


@pytest.fixture
def begun(tmp_path: Path) -> Iterator[RunFolder]:
    with run_folder(tmp_path / "run") as run:
        run.resume()
        run.log({"step": 200})
        run.checkpoint(200, FILES, keep=3)
        run.write_sample(200, b"grid")
        yield run


def carry_on(path: Path, go_on: Write) -> None:
    """A run that has saved step 200 goes on in some way."""
    with run_folder(path) as run:
        run.resume()
        run.checkpoint(200, FILES, keep=3)
        go_on(run)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("what", WRITES)
def test_a_run_stops_before_it_writes_to_a_folder_that_is_not_its_own(
    tmp_path: Path, way: Callable[[Path], None], what: str
) -> None:
    path = tmp_path / "run"
    there: dict[str, bytes | str] = {}

    def go_on(run: RunFolder) -> None:
        run.log({"step": 200})
        way(path)
        there.update(contents(path))
        WRITES[what](run)

    with pytest.raises(FolderLost, match="was moved, removed or replaced") as caught:
        carry_on(path, go_on)
    assert caught.value.exit_code == 6
    where = "are gone" if way is remove else f"is in {tmp_path / 'moved'}: to continue from there"
    assert where in str(caught.value)
    assert contents(path) == there
    if way is not remove:
        status = json.loads((tmp_path / "moved" / "status.json").read_text())
        assert (status["state"], status["exit_code"], status["step"]) == ("failed", 6, 200)
        with run_folder(tmp_path / "moved") as again:
            found = again.resume()
            assert found is not None
            assert found.step == 200


@pytest.mark.parametrize("way", WAYS)
def test_it_stops_while_a_checkpoint_is_being_written(tmp_path: Path, way: Callable[[Path], None]) -> None:
    path = tmp_path / "run"
    there: dict[str, bytes | str] = {}

    def content(place: FolderEntry) -> None:
        way(path)
        there.update(contents(path))
        write_atomically(place, [b"optimizer"], 9)

    files = {**FILES, "optimizer.safetensors": content, "more": b"x"}
    with pytest.raises(FolderLost):
        carry_on(path, lambda run: run.checkpoint(300, files, keep=1))
    assert contents(path) == there
    if way is not remove:
        assert os.listdir(tmp_path / "moved" / "checkpoints") == ["step-000200"]


@pytest.mark.parametrize("way", WAYS)
def test_it_stops_between_the_files_of_a_checkpoint_and_its_place(tmp_path: Path, way: Callable[[Path], None]) -> None:
    path = tmp_path / "run"
    there: dict[str, bytes | str] = {}

    def content(place: FolderEntry) -> None:
        write_atomically(place, [b"optimizer"], 9)
        way(path)
        there.update(contents(path))

    with pytest.raises(FolderLost):
        carry_on(path, lambda run: run.checkpoint(300, {**FILES, "optimizer.safetensors": content}, keep=1))
    assert contents(path) == there


@pytest.mark.parametrize("way", WAYS)
def test_a_run_whose_last_word_is_its_status_fails_too(tmp_path: Path, way: Callable[[Path], None]) -> None:
    with pytest.raises(FolderLost):
        carry_on(tmp_path / "run", lambda run: way(tmp_path / "run"))


def test_a_folder_that_a_link_still_leads_to_is_still_the_runs(tmp_path: Path, begun: RunFolder) -> None:
    """As when a run is moved to a larger disk and a link left in its place, or when the folder was a link from the
    beginning."""
    rename(tmp_path / "run")
    (tmp_path / "run").symlink_to("moved")
    begun.log({"step": 201})
    begun.checkpoint(201, FILES, keep=1)
    assert os.listdir(tmp_path / "moved" / "checkpoints") == ["step-000201"]


@pytest.mark.parametrize("name", ["checkpoints", "samples"])
def test_a_link_that_is_put_in_place_of_an_own_folder_is_not_followed(
    tmp_path: Path, begun: RunFolder, name: str
) -> None:
    other = tmp_path / "other"
    with run_folder(other) as second:
        second.resume()
        second.checkpoint(1, FILES, keep=1)
        second.write_sample(1, b"grid")
    before = contents(other)
    (tmp_path / "run" / name).rename(tmp_path / "run" / "aside")
    (tmp_path / "run" / name).symlink_to(other / name)
    if name == "checkpoints":
        with pytest.raises(OutputError, match="step-000300: cannot be written"):
            begun.checkpoint(300, FILES, keep=1)
    else:
        begun.write_sample(300, b"png")
        assert begun.has_sample(300)
        kept = begun.checkpoint(300, FILES, keep=1)
        assert (kept / "step-000300.png").read_bytes() == b"png"
    assert contents(other) == before


OTHER_FORMAT = "lora.diffusers.safetensors"
OWN = [
    ".lock",
    "config.toml",
    "status.json",
    "dataset.json",
    "dataset.jpg",
    "controls.png",
    "report.html",
    "loss.png",
    "log.jsonl",
    "lora.safetensors",
    "lora.diffusers.safetensors",
    "checkpoints",
    "samples",
    "tensorboard",
    "checkpoints/step-000200",
    "checkpoints/step-000200/state.json",
    "samples/step-000200.png",
    ".ranks",
    ".ranks/0.json",
]


@pytest.fixture
def left(tmp_path: Path) -> Path:
    """A run that is over, with everything that it may own."""
    path = tmp_path / "run"
    with run_folder(path) as run:
        run.resume()
        run.log({"step": 200})
        run.checkpoint(200, FILES, keep=3)
        run.write_sample(200, b"grid")
        reports = ("dataset.json", "dataset.jpg", "controls.png", "report.html", "loss.png")
        for name in (*reports, "lora.safetensors", OTHER_FORMAT):
            (path / name).write_bytes(b"its own")
        run.owned("tensorboard").mkdir()
        (path / ".ranks").mkdir()
        (path / ".ranks" / "0.json").write_text("{}")
    return path


@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize("kind", ["link", "broken link", "pipe"])
def test_whatever_a_run_owns_is_a_plain_file_or_folder(tmp_path: Path, left: Path, name: str, kind: str) -> None:
    if kind == "pipe" and name.endswith("state.json"):
        pytest.skip("damage of that checkpoint, which its own tests show")
    elsewhere = tmp_path / "elsewhere"
    (left / name).rename(elsewhere)
    if kind == "pipe":
        os.mkfifo(left / name)
    else:
        (left / name).symlink_to(elsewhere if kind == "link" else tmp_path / "nowhere")
    before, outside = contents(left), elsewhere.read_bytes() if elsewhere.is_file() else contents(elsewhere)
    for attempt in (run_folder(left).inspect, run_folder(left).__enter__):
        with pytest.raises(OutputError, match=f"{name}: expected a (plain file|folder) of this run, found") as caught:
            attempt()
        assert caught.value.exit_code == 6
    assert contents(left) == before
    assert (elsewhere.read_bytes() if elsewhere.is_file() else contents(elsewhere)) == outside


def test_the_run_folder_itself_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "large disk").mkdir()
    (tmp_path / "run").symlink_to("large disk")
    for _ in range(2):
        assert run_folder(tmp_path / "run").inspect() is None
        with run_folder(tmp_path / "run") as run:
            run.resume()
            run.log({"step": 1})
    assert (tmp_path / "large disk" / "log.jsonl").exists()
