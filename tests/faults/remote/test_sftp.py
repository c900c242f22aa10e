"""OpenSSH's SFTP server as a store."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def sftp(servers: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    if servers.SSHD is None:
        pytest.skip("OpenSSH's server is not installed")
    with servers.sshd(tmp_path_factory.mktemp("sshd")) as made:
        yield made


def test_over_sftp_a_run_ends_with_the_same_bytes(job: Any, sftp: Any, undisturbed: Any, tmp_path: Path) -> None:
    there = tmp_path / "there"
    arguments = job.arguments("sdxl-lora", output__remote=sftp.address(there))
    killed = job.program(*arguments, env=sftp.environment(), failpoint="remote.after_manifest:2")
    assert killed.code == -signal.SIGKILL
    shutil.rmtree(job.out)
    ended = job.program(*arguments, env=sftp.environment())
    assert ended.code == 0, ended.stderr
    assert "bringing step" in ended.stderr
    assert job.result() == undisturbed.result
    here = [path.relative_to(job.out) for path in job.out.rglob("*") if path.is_file() and path.name != ".lock"]
    assert all((there / path).read_bytes() == (job.out / path).read_bytes() for path in here)
    assert not list(there.rglob("*.part"))


def test_inputs_over_sftp(job: Any, sftp: Any, undisturbed: Any, world: Path, tmp_path: Path) -> None:
    env = sftp.environment() | {"XDG_CACHE_HOME": str(tmp_path / "xdg")}
    arguments = job.arguments("sdxl-lora", data__path=sftp.address(world / "drawings"))
    ended = job.program(*arguments, env=env)
    assert ended.code == 0, ended.stderr
    assert job.result().lora == undisturbed.result.lora


def test_a_host_that_is_not_known_or_takes_no_key_is_refused(job: Any, sftp: Any, tmp_path: Path) -> None:
    stranger = tmp_path / "stranger"
    shutil.copytree(sftp.home / ".ssh", stranger / ".ssh")
    (stranger / ".ssh" / "known_hosts").write_text("")
    arguments = job.arguments("sdxl-lora", output__remote=sftp.address(tmp_path / "there"))
    ended = job.program(*arguments, env={"HOME": str(stranger)})
    assert ended.code == 8
    assert "the host's key is not in ~/.ssh/known_hosts" in ended.complaint
    shutil.copy(sftp.home / ".ssh" / "known_hosts", stranger / ".ssh" / "known_hosts")
    for path in (stranger / ".ssh").glob("id_*"):
        path.unlink()
    ended = job.program(*arguments, env={"HOME": str(stranger), "SSH_AUTH_SOCK": ""})
    assert ended.code == 8
    assert "no credentials that the store takes" in ended.complaint


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_a_folder_without_rights_is_refused(job: Any, sftp: Any) -> None:
    ended = job.program(*job.arguments("sdxl-lora", output__remote=sftp.address(Path("/x"))), env=sftp.environment())
    assert ended.code == 8
    assert "refuses this user" in ended.complaint
