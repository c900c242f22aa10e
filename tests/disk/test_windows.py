"""What Windows does otherwise, by a stand-in for it: names, paths, line ends, consoles, files that others have open."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path, PureWindowsPath
from typing import Any

import pytest

from flame_train.config.load import load_located
from flame_train.data.caption_formats import read_captions, read_metadata
from flame_train.disk import folder_handle, preflight
from flame_train.disk.folder_handle import PathHandle
from flame_train.disk.system import is_device_name
from flame_train.errors import ConfigError
from flame_train.io.addresses import is_address, is_hub_name
from flame_train.run.check import check_run
from flame_train.tools.lora_files import file_and_strength

NAMES = ("con", "NUL.safetensors", "aux", "Com1", "lpt9.tar.gz", "console", "fox", "com", "nul1", "my.con")


@pytest.mark.parametrize("name", NAMES)
def test_the_names_of_devices_are_those_of_python(name: str) -> None:
    assert is_device_name(name) == PureWindowsPath(name).is_reserved()


class OpenElsewhere:
    """`os.replace`, refused so many times as if another program had the file open."""

    def __init__(self, times: int) -> None:
        self.left, self._replace = times, os.replace

    def __call__(self, source: Any, target: Any) -> None:
        if self.left:
            self.left -= 1
            raise PermissionError(errno.EACCES, "Access is denied", source)
        self._replace(source, target)


@pytest.fixture
def renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """renamed(times): renames `new` to `old`, which somebody else has open for so many attempts."""
    (tmp_path / "old").write_text("old")
    (tmp_path / "new").write_text("new")
    pauses: list[float] = []
    monkeypatch.setattr(folder_handle.time, "sleep", pauses.append)

    def rename(times: int) -> str:
        monkeypatch.setattr(os, "replace", OpenElsewhere(times))
        PathHandle(tmp_path).rename("new", "old")
        assert len(pauses) == times
        return (tmp_path / "old").read_text()

    return rename


def test_a_file_that_is_open_for_a_moment_is_waited_for(renamed: Any) -> None:
    assert renamed(3) == "new"


def test_a_file_that_stays_open_is_left_and_told(renamed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PermissionError) as refused:
        renamed(99)
    assert (tmp_path / "old").read_text() == "old"
    monkeypatch.setattr(preflight, "FOLDER", None)
    message = preflight.disk_message(tmp_path / "old", None, refused.value)
    assert "Access is denied" in message
    assert "close the program that has it open" in message


def config(tmp_path: Path, **output: str) -> Any:
    sections = {"data": {"path": str(tmp_path / "images")}, "output": {"dir": str(tmp_path / "run")} | output}
    return load_located({"model": {"checkpoint": "a.safetensors"}} | sections, []).config


def test_a_run_whose_files_would_have_too_long_paths_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 150) / ("y" * 150)
    check_run._check_places(config(tmp_path, dir=str(long)))
    monkeypatch.setattr(check_run, "path_limit", lambda: 259)
    check_run._check_places(config(tmp_path, dir=str(tmp_path / "run")))
    with pytest.raises(ConfigError, match=r"output.dir: expected at most \d+ characters, got \d+: .*enable long"):
        check_run._check_places(config(tmp_path, dir=str(long)))


@pytest.mark.parametrize("name", ["con", "Nul.v2"])
def test_a_result_with_the_name_of_a_device_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"output.name: expected another name: .* is a device on Windows"):
        check_run._check_name(name)


def test_a_drive_letter_is_part_of_a_path() -> None:
    for path in (r"C:\my models\fox.safetensors", "d:/fox.safetensors"):
        assert file_and_strength(path) == (Path(path), 1.0)
        assert file_and_strength(f"{path}:0.5") == (Path(path), 0.5)
        assert not is_address(path)
        assert not is_hub_name(path)


def both(tmp_path: Path, name: str, text: str) -> tuple[Path, Path]:
    """A text with the line ends of POSIX, and with those of Windows."""
    here, there = tmp_path / "posix", tmp_path / "windows"
    for folder, ends in ((here, "\n"), (there, "\r\n")):
        folder.mkdir(exist_ok=True)
        (folder / name).write_bytes(text.replace("\n", ends).encode())
    return here / name, there / name


def test_line_ends_of_windows_change_nothing(tmp_path: Path) -> None:
    here, there = both(tmp_path, "a.txt", "a fox,\nin snow\n\n")
    assert read_captions(here) == read_captions(there)
    assert read_captions(here, lines=True) == read_captions(there, lines=True) == ("a fox,", "in snow")
    for name, text in (
        ("metadata.jsonl", '{"file_name": "a.png", "text": "a fox"}\n{"file_name": "b.png", "text": "a hare"}\n'),
        ("metadata.csv", "file_name,text\na.png,a fox\nb.png,a hare\n"),
    ):
        here, there = both(tmp_path, name, text)
        assert read_metadata(here) == read_metadata(there), name
    sections = ("[model]", 'checkpoint = "a.safetensors"', "[data]", 'path = "i"', "[output]", 'dir = "o"')
    here, there = both(tmp_path, "my.toml", "\n".join([*sections, "[sample]", 'prompts = ["""a', 'b"""]']))
    assert load_located(str(here), []).config == load_located(str(there), []).config


def test_a_console_of_another_encoding_gets_every_line(tmp_path: Path) -> None:
    folder = tmp_path / "\u732b\u306e\u7d75"
    folder.mkdir()
    own = {"PYTHONUTF8": "0", "PYTHONIOENCODING": "cp1252"}
    command = [sys.executable, "-m", "flame_train", "dataset", str(folder)]
    done = subprocess.run(command, capture_output=True, env=os.environ | own, check=False)
    said = (done.stdout + done.stderr).decode("cp1252")
    assert done.returncode == 2, said
    assert "Traceback" not in said
    assert "\\u732b" in said
