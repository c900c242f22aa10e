"""Bad addresses, wrong rights, full stores: one line each, before anything is trained; and no secret anywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

ADDRESSES = [
    ("bucket/runs", 2, "expected an address such as s3://bucket/folder"),
    ("s3://", 2, "expected a place after ://"),
    ("s3://AKIA:hidden@bucket/x", 2, "expected an address without credentials (not repeated here)"),
    ("sftp://me:hidden@host/x", 2, "expected an address without credentials (not repeated here)"),
    ("https://host/x?signature=hidden", 2, "expected an address without ? and #"),
    ("s3://bucket/a/../b", 2, "without . and .. as parts"),
    ("what://bucket/x", 8, "fsspec knows no store of this kind"),
    ("s3://no-such-bucket/x", 8, "there is no such bucket or folder"),
    ("sftp://127.0.0.1:1/x", 8, "the store does not answer as it should"),
]


@pytest.mark.parametrize(("address", "code", "message"), ADDRESSES)
def test_bad_addresses(job: Any, s3: Any, address: str, code: int, message: str) -> None:
    ended = job.program(*job.arguments("sdxl-lora", output__remote=address), env=s3.environment())
    assert ended.code == code, ended.stderr
    assert message in ended.complaint
    assert "output.remote" in ended.complaint
    assert "hidden" not in ended.stderr + ended.stdout
    assert len(ended.complaint.strip().splitlines()) == 1
    assert not job.out.exists()


ANSWERS = [
    ("AccessDenied", 403, "the store refuses this user (AccessDenied)"),
    ("InvalidAccessKeyId", 403, "the store refuses this user (InvalidAccessKeyId)"),
    ("SignatureDoesNotMatch", 403, "the store refuses this user (SignatureDoesNotMatch)"),
    ("RequestTimeTooSkewed", 403, "set the clock"),
    ("QuotaExceeded", 403, "the store is full"),
    ("InternalError", 500, "the store does not answer as it should (InternalError)"),
]


@pytest.mark.parametrize(("code", "status", "message"), ANSWERS)
def test_a_store_that_says_no(job: Any, servers: Any, code: str, status: int, message: str) -> None:
    with servers.refusing(code, status) as s3:
        arguments = job.arguments("sdxl-lora", output__remote="s3://bucket/x")
        ended = job.program(*arguments, env=s3.environment())
    assert ended.code == 8, ended.stderr
    assert message in ended.complaint
    assert len(ended.complaint.strip().splitlines()) == 1
    assert servers.KEY not in ended.stderr
    assert not job.out.exists()


def test_places_that_a_run_writes_to_are_here(job: Any) -> None:
    ended = job.train(output__dir="s3://bucket/x")
    assert ended.code == 2
    assert "expected a folder of this machine, got an address; output.remote takes one" in ended.complaint


def test_planted_credentials_are_in_no_file_and_no_message(
    remote: Any, bucket: Any, servers: Any, tmp_path: Path
) -> None:
    cache = {"XDG_CACHE_HOME": str(tmp_path / "xdg")}
    arguments = remote.job.arguments("sdxl-lora", output__remote=f"s3://{remote.place}")
    said = []
    for env in (remote.s3.environment(), remote.s3.environment(servers.free_port())):
        ended = remote.job.program(*arguments, "--debug", "--remote-wait", "1", env=env | cache)
        said.append((ended.stdout + ended.stderr).encode())
    here = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    there = [bucket.cat(path) for path in bucket.find(remote.place)]
    assert len(here) > 10
    assert len(there) > 10
    for raw in (*said, *here, *there):
        assert servers.KEY.encode() not in raw
        assert servers.SECRET.encode() not in raw
