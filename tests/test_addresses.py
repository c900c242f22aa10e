"""Addresses: what is wrong is told, and never repeated once it may be a secret."""

from __future__ import annotations

import pytest

from flame_train.io.addresses import is_address, problem_of


@pytest.mark.parametrize(
    "address",
    [
        "s3://KEY:SECRET/bucket",
        "s3://KEY:SECRET@bucket/x",
        "s3://SECRET@bucket/x",
        "simplecache::s3://K:SECRET@b/x",
        "filecache::sftp://SECRET@b/x",
        "zip://x.zip::s3://K:SECRET@b/x",
        "sftp://u%3ASECRET@host/x",
        "sftp://u;SECRET@host/x",
        "sftp://u:SECRET@host/x",
        "sftp://host:SECRET/x",
        "s3://bucket/x?sig=SECRET",
        "s3://[SECRET/x",
    ],
)
def test_a_secret_is_refused_and_not_repeated(address):
    assert is_address(address)
    told = problem_of(address)
    assert told is not None
    assert "SECRET" not in told


@pytest.mark.parametrize(
    "address", ["s3://bucket/x", "sftp://me@host:22/x", r"sftp://DOMAIN\me@host/x", "sftp://[::1]:22/x", "file:///x"]
)
def test_what_has_no_secret_is_taken(address):
    assert problem_of(address) is None
