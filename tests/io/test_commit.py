"""The commit protocol: order of its system calls, damage, a full disk, and what stays."""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from flame_train.disk import failpoint
from flame_train.disk.atomic_write import write_atomically
from flame_train.disk.open_folder import FolderEntry
from flame_train.errors import OutputError
from flame_train.io import commit as commit_module
from flame_train.io.commit import commit, newest, remove_stale

FILES = {"lora.safetensors": b"lora" * 1000, "state.json": b"{}"}


def steps(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_a_commit_is_found_with_its_files_and_the_oldest_go(tmp_path: Path) -> None:
    for step in (1, 2, 3, 1_000_000):
        commit(tmp_path, step, FILES, keep=2)
    assert steps(tmp_path) == ["step-000003", "step-1000000"]
    found = newest(tmp_path)
    assert found is not None
    assert (found.step, found.skipped) == (1_000_000, ())
    assert (found.path / "lora.safetensors").read_bytes() == FILES["lora.safetensors"]
    assert newest(tmp_path / "absent") is None


def test_spared_checkpoints_stay_beside_the_newest_and_do_not_count(tmp_path: Path) -> None:
    for step in range(1, 7):
        commit(tmp_path, step, FILES, keep=2, spare={2})
    assert steps(tmp_path) == ["step-000002", "step-000005", "step-000006"]
    commit(tmp_path, 7, FILES, keep=1, spare={6})
    assert steps(tmp_path) == ["step-000006", "step-000007"]
    commit(tmp_path, 8, FILES, keep=1, spare={8})
    assert steps(tmp_path) == ["step-000008"]
    commit(tmp_path, 4, FILES, keep=3, spare={8})  # a later one goes all the same: the run did not continue from it
    assert steps(tmp_path) == ["step-000004"]


def test_without_an_end_each_lora_stays_and_three_states(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    for step in (10, 20, 30, 40, 50):
        commit(tmp_path, step, {"fox.safetensors": b"%d" % step}, keep=0, lora_of=lambda _: "fox.safetensors")
    assert steps(tmp_path)[2:] == ["step-000030", "step-000040", "step-000050"]
    for step in (10, 20):
        assert (tmp_path / f"fox-{step:06d}.safetensors").read_bytes() == b"%d" % step
        assert f"removed {tmp_path}/step-{step:06d}: checkpoint.keep = 0, which keeps its LoRA" in caplog.text
    commit(tmp_path, 60, FILES, keep=1)
    assert f"removed {tmp_path}/step-000050: checkpoint.keep = 1\n" in caplog.text
    assert (tmp_path / "fox-000010.safetensors").exists()


def test_everything_is_synced_before_the_rename_and_pruning_comes_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(tmp_path, 1, FILES, keep=1)
    calls: list[tuple[str, str]] = []
    fsync, rename, rmtree = os.fsync, os.rename, shutil.rmtree

    def name(descriptor: int) -> str:
        return Path(os.readlink(f"/proc/self/fd/{descriptor}")).name

    def noted(what: str, path: object) -> None:
        calls.append((what, re.sub(r"-[0-9a-f]{16}$", "-random", Path(str(path)).name)))

    monkeypatch.setattr(os, "fsync", lambda fd: (noted("fsync", name(fd)), fsync(fd))[1])
    monkeypatch.setattr(os, "rename", lambda a, b, **at: (noted("rename", b), rename(a, b, **at))[1])
    monkeypatch.setattr(shutil, "rmtree", lambda p, **at: (noted("remove", p), rmtree(p, **at))[1])
    commit(tmp_path, 2, FILES, keep=1)
    assert calls == [
        ("fsync", "lora.safetensors"),
        ("fsync", "state.json"),
        ("fsync", "MANIFEST.json"),
        ("fsync", ".tmp-2-random"),
        ("rename", "step-000002"),
        ("fsync", tmp_path.name),
        ("rename", ".del-1-random"),
        ("remove", ".del-1-random"),
    ]


@pytest.mark.parametrize("name", [*FILES, "MANIFEST.json"])
@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "remove", "folder"])
def test_a_damaged_newest_falls_back_with_the_reason(tmp_path: Path, name: str, damage: str) -> None:
    commit(tmp_path, 1, FILES, keep=3)
    path = commit(tmp_path, 2, FILES, keep=3) / name
    raw = path.read_bytes()
    path.unlink()
    if damage == "folder":
        path.mkdir()
    elif damage != "remove":
        flipped = bytes([raw[0] ^ 1]) + raw[1:]
        path.write_bytes({"flip": flipped, "cut": raw[:-1], "empty": b""}[damage])
    found = newest(tmp_path)
    if damage == "cut" and name == "MANIFEST.json":  # only its newline is gone: still whole
        assert found is not None
        assert found.step == 2
        return
    assert found is not None
    assert found.step == 1
    assert len(found.skipped) == 1
    assert name in found.skipped[0]


def test_each_bit_of_a_manifest_is_guarded(tmp_path: Path) -> None:
    """A flipped bit is either seen, or in white space: never is another manifest believed."""
    commit(tmp_path, 1, {"a": b"x"}, keep=3)
    path = commit(tmp_path, 2, {"a": b"y"}, keep=3) / "MANIFEST.json"
    raw = path.read_bytes()
    for position in range(len(raw)):
        for bit in range(8):
            path.write_bytes(raw[:position] + bytes([raw[position] ^ (1 << bit)]) + raw[position + 1 :])
            with suppress(OutputError):  # a flip can turn format 1 into format 3, 5 or 9
                found = newest(tmp_path)
                assert found is not None
                assert found.step == 1 or json.loads(path.read_bytes()) == json.loads(raw)


def test_all_bad_is_a_refusal_that_lists_each(tmp_path: Path) -> None:
    for step in (1, 2):
        (commit(tmp_path, step, FILES, keep=3) / "state.json").write_bytes(b"[]")
    with pytest.raises(OutputError) as caught:
        newest(tmp_path)
    assert caught.value.exit_code == 6
    for step in ("step-000001", "step-000002"):
        assert f"{step}: state.json does not match its SHA-256" in str(caught.value)


def test_a_newer_format_is_refused_not_skipped(tmp_path: Path) -> None:
    commit(tmp_path, 1, FILES, keep=3)
    path = commit(tmp_path, 2, FILES, keep=3) / "MANIFEST.json"
    path.write_text(path.read_text().replace('"format": 1', '"format": 2'))
    with pytest.raises(OutputError, match=r"newer flame-train \(checkpoint format 2"):
        newest(tmp_path)


@pytest.mark.parametrize(
    "name", ["../state.json", "/etc/hostname", "sub/state.json", "", "..", "a\0b", "a\ud800b", "x" * 5000, "a\nb"]
)
def test_a_manifest_cannot_name_a_file_elsewhere(tmp_path: Path, name: str) -> None:
    path = commit(tmp_path, 1, FILES, keep=3) / "MANIFEST.json"
    manifest = json.loads(path.read_text())
    manifest["files"] = {name: manifest["files"]["state.json"]}
    path.write_text(json.dumps(manifest))
    with pytest.raises(OutputError, match="is not a file of this folder"):
        newest(tmp_path)


def test_a_bad_later_checkpoint_never_outlives_the_good_ones(tmp_path: Path) -> None:
    """Continue from step 2 because step 9 is bad; pruning must drop 9, not what was just written."""
    for step in (1, 2, 9):
        commit(tmp_path, step, FILES, keep=9)
    (tmp_path / "step-000009" / "state.json").unlink()
    commit(tmp_path, 3, FILES, keep=2)
    assert steps(tmp_path) == ["step-000002", "step-000003"]


def test_a_bad_checkpoint_of_the_same_step_is_replaced_and_a_whole_one_kept(tmp_path: Path) -> None:
    path = commit(tmp_path, 1, FILES, keep=1)
    commit(tmp_path, 1, {"other": b"x"}, keep=1)
    assert (path / "state.json").exists()
    (path / "state.json").unlink()
    commit(tmp_path, 1, {"other": b"x"}, keep=1)
    assert sorted(file.name for file in path.iterdir()) == ["MANIFEST.json", "other"]
    assert steps(tmp_path) == ["step-000001"]


def test_a_link_to_a_checkpoint_kept_elsewhere_goes_and_what_lies_there_stays(tmp_path: Path) -> None:
    elsewhere, root = tmp_path / "elsewhere", tmp_path / "checkpoints"
    commit(root, 1, FILES, keep=1).rename(elsewhere)
    (root / "step-000001").symlink_to(elsewhere)
    (root / f".del-0-{'0' * 16}").symlink_to(elsewhere)
    commit(root, 2, FILES, keep=1)
    remove_stale(root)
    assert steps(root) == ["step-000002"]
    assert (elsewhere / "state.json").read_bytes() == FILES["state.json"]


def test_an_old_checkpoint_that_is_in_use_does_not_stop_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As on NFS, where a folder with a file that someone has open cannot be removed."""
    commit(tmp_path, 1, FILES, keep=1)

    def refuse(*arguments: object, **named: object) -> None:
        raise OSError(errno.ENOTEMPTY, "Directory not empty")

    with monkeypatch.context() as patched:
        patched.setattr("os.rmdir", refuse)
        commit(tmp_path, 2, FILES, keep=1)
    assert "step-000001: an old checkpoint that cannot be removed: Directory not empty" in caplog.text
    found = newest(tmp_path)
    assert found is not None
    assert found.step == 2
    remove_stale(tmp_path)
    assert steps(tmp_path) == ["step-000002"]


def test_a_manifest_that_names_no_file_describes_nothing(tmp_path: Path) -> None:
    path = commit(tmp_path, 1, FILES, keep=3) / "MANIFEST.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"files": {}}))
    with pytest.raises(OutputError, match=r"MANIFEST\.json does not describe this folder"):
        newest(tmp_path)


def test_sweep_removes_leftovers_and_nothing_else(tmp_path: Path) -> None:
    commit(tmp_path, 1, FILES, keep=1)
    for name in (".tmp-2-0123456789abcdef", ".del-0-0123456789abcdef"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "half").write_bytes(b"x")
    mine = [".del-1", ".tmp-2-99", ".tmp-notes", ".tmp-x-0123456789abcdef", "notes"]
    for name in mine:
        (tmp_path / name).mkdir()
    remove_stale(tmp_path)
    remove_stale(tmp_path / "absent")
    assert steps(tmp_path) == [*mine, "step-000001"]


@contextmanager
def file_size_limit(limit: int) -> Iterator[None]:
    """Files of this process may not grow beyond `limit`. Python ignores SIGXFSZ, so writes give EFBIG."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_file_size_limit_keeps_the_old_checkpoint_and_leaves_no_trace(tmp_path: Path) -> None:
    commit(tmp_path, 1, FILES, keep=1)
    with (
        file_size_limit(1024),
        pytest.raises(OutputError, match="larger than this system or its limits") as caught,
    ):
        commit(tmp_path, 2, FILES, keep=1)
    assert caught.value.exit_code == 6
    assert steps(tmp_path) == ["step-000001"]
    assert newest(tmp_path) is not None


POINTS = (
    "checkpoint.begin",
    "checkpoint.mid_file",
    "checkpoint.after_file",
    "checkpoint.before_manifest",
    "checkpoint.after_manifest",
    "checkpoint.before_rename",
)


@pytest.fixture
def disarmed() -> Iterator[None]:
    yield
    failpoint.arm("")


@pytest.mark.usefixtures("disarmed")
@pytest.mark.parametrize("point", POINTS)
def test_a_full_disk_keeps_the_old_checkpoint_and_says_what_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    commit(tmp_path, 1, FILES, keep=1)
    failpoint.arm(f"{point}:enospc")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**6, 10**6 - 512, 512))
    with pytest.raises(OutputError, match=r"the disk is full: needs 3\.9 KiB, has 512 B"):
        commit(tmp_path, 2, FILES, keep=1)
    assert steps(tmp_path) == ["step-000001"]


def test_an_error_of_a_writer_passes_through_and_leaves_no_trace(tmp_path: Path) -> None:
    def broken(place: FolderEntry) -> None:
        write_atomically(place, [b"half"], 4)
        raise KeyError("a bug")

    with pytest.raises(KeyError):
        commit(tmp_path, 2, {"lora.safetensors": broken}, keep=1)
    assert steps(tmp_path) == []


def test_every_failpoint_of_the_protocol_is_in_the_kill_tests() -> None:
    source = Path(commit_module.__file__).read_text()
    named = {part.split('"')[0] for part in source.split('fail_point("')[1:]}
    assert named == {*POINTS, "checkpoint.after_rename", "checkpoint.before_prune", "checkpoint.mid_prune"}


def test_a_read_only_place_is_an_output_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, *args: object, **kwargs: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(OutputError, match="Read-only file system"):
        commit(tmp_path / "root", 1, FILES, keep=1)


def test_a_folder_that_may_not_be_read_is_an_output_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **named: object) -> int:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(os, "open", refuse)
    for look in (newest, remove_stale):
        with pytest.raises(OutputError, match="Permission denied"):
            look(tmp_path)


@pytest.mark.parametrize("number", [errno.EIO, errno.EMFILE, errno.EACCES, errno.ENOMEM])
@pytest.mark.parametrize("name", [*FILES, "MANIFEST.json", "step-000002"])
def test_what_cannot_be_read_just_now_is_not_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, number: int
) -> None:
    """An older checkpoint in its stead would have the newer one pruned, which is whole."""
    for step in (1, 2):
        commit(tmp_path, step, FILES, keep=3)
    usual = os.open

    def refuse(path: str, flags: int, *arguments: int, **named: int) -> int:
        if path == name:
            raise OSError(number, os.strerror(number), path)
        return usual(path, flags, *arguments, **named)

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", refuse)
        with pytest.raises(OutputError, match=f"step-000002: cannot be read just now .{os.strerror(number)}") as caught:
            newest(tmp_path)
    assert caught.value.exit_code == 6
    found = newest(tmp_path)
    assert found is not None
    assert (found.step, found.skipped) == (2, ())


def test_a_file_that_breaks_off_while_it_is_read_is_not_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(tmp_path, 1, FILES, keep=3)

    def refuse(*arguments: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr("hashlib.file_digest", refuse)
    with pytest.raises(OutputError, match=r"step-000001: cannot be read just now .Input/output error"):
        newest(tmp_path)


@pytest.mark.parametrize("name", [*FILES, "MANIFEST.json"])
@pytest.mark.parametrize("kind", ["pipe", "socket", "link"])
def test_what_is_no_file_is_damage_and_waited_for_by_nobody(tmp_path: Path, name: str, kind: str) -> None:
    commit(tmp_path, 1, FILES, keep=3)
    path = commit(tmp_path, 2, FILES, keep=3) / name
    if kind == "link":
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
    else:
        path.unlink()
        os.mknod(path, 0o600 | (stat.S_IFIFO if kind == "pipe" else stat.S_IFSOCK))
    found = newest(tmp_path)
    assert found is not None
    assert found.step == 1
    assert f"{name} is no plain file" in found.skipped[0]


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "9" * 10_000, "\ufeff{}", "{}" + " " * (1 << 21)])
def test_a_manifest_that_makes_no_sense_is_damage(tmp_path: Path, text: str) -> None:
    (commit(tmp_path, 1, FILES, keep=3) / "MANIFEST.json").write_text(text)
    with pytest.raises(OutputError, match="no checkpoint of this run is whole"):
        newest(tmp_path)
