"""What stores and their libraries raise, as one line without a secret.

A library's own words may repeat what was sent, such as a key's name or a signed address. So a message has an error's
code or class, and never its text.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeVar

from flame_train.errors import EnvironmentFault, FlameError, RemoteError

_LOG = logging.getLogger(__name__)
Result = TypeVar("Result")

_TRIES: Final = 4
_PAUSE: Final = 1.0  # seconds before another try
_PATIENCE: Final = 45.0  # seconds after which there is none
_MISSING: Final = ("NoSuchBucket", "NoSuchKey", "404", "InvalidBucketName")
_DENIED: Final = (
    "AccessDenied",
    "InvalidAccessKeyId",
    "SignatureDoesNotMatch",
    "ExpiredToken",
    "InvalidToken",
    "AllAccessDisabled",
    "AccountProblem",
    "403",
    "401",
)
_CLOCK: Final = ("RequestTimeTooSkewed", "RequestExpired")
_FULL: Final = ("QuotaExceeded", "XMinioStorageFull", "InsufficientStorage", "507", "EntityTooLarge")
_NO_ROOM: Final = ("SFTPNoSpaceOnFilesystem", "SFTPQuotaExceeded")  # of a version of SFTP that few servers speak
_LOGIN: Final = ("NoCredentialsError", "PartialCredentialsError", "PermissionDenied", "KeyImportError")
_HOST_KEY: Final = ("HostKeyNotVerifiable",)


class Unreachable(RemoteError):
    """The network or the store does not answer: later it may."""


class Refused(RemoteError):
    """The store answers and says no: waiting does not help by itself."""


class Full(Refused):
    """The store has no room for what is sent."""


@contextmanager
def store_errors(address: str, *passed: type[Exception]) -> Iterator[None]:
    """Turns what a store's library raises in the body into Unreachable, Refused or EnvironmentFault.

    Errors that are `passed` are an answer that the caller asked for, and stay.
    """
    try:
        yield
    except FlameError:
        raise
    except passed:
        raise
    except ImportError as error:
        raise EnvironmentFault(
            f"{address}: a library for it is missing ({error.name or 'see fsspec'}); "
            "install it with: pip install 'flame-train[remote]'"
        ) from None
    except Exception as error:
        raise explained(address, error) from None


def with_retries(attempt: Callable[[], Result], check: Callable[[], None]) -> Result:
    """Calls `attempt`, and again some times where the store is unreachable. `check` may raise in between.

    A store that takes requests and answers none is given up after a minute.
    """
    begin = time.monotonic()
    for tries_left in reversed(range(_TRIES)):
        check()
        try:
            return attempt()
        except Unreachable as error:
            if not tries_left or time.monotonic() - begin > _PATIENCE:
                raise
            _LOG.warning("%s; trying again", error)
            time.sleep(_PAUSE)
    raise AssertionError


def explained(address: str, error: BaseException) -> RemoteError:
    """Returns the error of this project for one of a library."""
    names, codes = _chain(error)
    if any(code in _CLOCK for code in codes):
        return Refused(f"{address}: the store refuses requests of this machine's clock; set the clock, and start again")
    if _has_no_room(error, names, codes):
        return Full(f"{address}: the store is full ({_reason(error, codes)}); free some space there")
    if any(name in _HOST_KEY for name in names):
        return Refused(
            f"{address}: the host's key is not in ~/.ssh/known_hosts; log in once with ssh and compare it, and start "
            "again"
        )
    if any(name in _LOGIN for name in names):
        return Refused(
            f"{address}: no credentials that the store takes ({names[-1]}); give them where its own programs look: "
            "AWS_ACCESS_KEY_ID or ~/.aws/credentials for S3, ~/.ssh for SFTP"
        )
    if any(code in _DENIED for code in codes) or isinstance(error, PermissionError):
        return Refused(f"{address}: the store refuses this user ({_reason(error, codes)}); ask for the right to it")
    if any(code in _MISSING for code in codes) or isinstance(error, FileNotFoundError):
        return Refused(f"{address}: there is no such bucket or folder; make it, or correct the address")
    if isinstance(error, ValueError) and "rotocol not known" in str(error):
        return Refused(f"{address}: fsspec knows no store of this kind; s3:// and sftp:// are tested")
    if "SFTPFailure" in names:
        return Unreachable(f"{address}: the server says that it failed, and not why; a quota there may be used up")
    return Unreachable(f"{address}: the store does not answer as it should ({_reason(error, codes)})")


def _chain(error: BaseException) -> tuple[list[str], list[str]]:
    """Returns the classes of an error and its causes, and the codes that a store gave with them."""
    names, codes = list[str](), list[str]()
    each: BaseException | None = error
    while each is not None and len(names) < 10:
        names += [kind.__name__ for kind in type(each).__mro__[:2]]
        response: Any = getattr(each, "response", None)
        if isinstance(response, dict):
            codes.append(str(response.get("Error", {}).get("Code", "")))
        each = each.__cause__ or each.__context__
    return names, codes


def _has_no_room(error: BaseException, names: list[str], codes: list[str]) -> bool:
    """Tells whether a store, or a server's disk, is full. SFTP has no code for it; some servers send the text."""
    texts = [os.strerror(number) for number in (errno.ENOSPC, errno.EDQUOT)]
    if getattr(error, "reason", None) in texts or _errno(error) in (errno.ENOSPC, errno.EDQUOT):
        return True
    return any(code in _FULL for code in codes) or any(name in _NO_ROOM for name in names)


def _errno(error: BaseException) -> int | None:
    return error.errno if isinstance(error, OSError) else None


def _reason(error: BaseException, codes: list[str]) -> str:
    if codes and codes[0]:
        return codes[0]
    number = _errno(error)
    return type(error).__name__ if number is None or number not in errno.errorcode else os.strerror(number)
