"""Uploads to the Hugging Face hub: all files in one commit, or none. Only what a user asked for by name comes here."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from flame_train.errors import ConfigError, FlameError, RemoteError
from flame_train.io.addresses import HUB
from flame_train.io.hub import token_sent, without_token

if TYPE_CHECKING:
    from huggingface_hub import HfApi

_LOG = logging.getLogger(__name__)
_NAME: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_THIS_MACHINE: Final = ("127.0.0.1", "localhost", "::1")
CARD: Final = "README.md"
WRITTEN_ANEW: Final = "<!-- Each flame-train publish writes this card anew, as long as this line is in it. -->"
"""The line of a model card that was not edited."""


def hub_name(text: str) -> str:
    """Returns owner/name of a repository, given so or as hf:owner/name. Raises ConfigError for another form."""
    name = text.removeprefix(HUB)
    if not _NAME.fullmatch(name):
        raise ConfigError(f"expected a repository on the Hugging Face hub, as owner/name, got {text!r}")
    return name


def check_login() -> None:
    """Raises RemoteError where an upload would have no token, or would send it to another place than the hub."""
    from huggingface_hub import constants, get_token

    if token_sent() is False and urlsplit(constants.ENDPOINT).hostname not in _THIS_MACHINE:
        raise RemoteError(
            f"HF_ENDPOINT is {constants.ENDPOINT}, and the token is sent to huggingface.co alone; unset it to publish"
        )
    if get_token() is None:
        raise RemoteError(
            "expected a token of the Hugging Face hub that may write, found none; log in with `hf auth login`, or set "
            "HF_TOKEN"
        )


def upload(name: str, files: Mapping[str, Path | bytes], public: bool, message: str) -> str:
    """Commits files, by their names there, and returns the repository's address. Nothing is there until all is.

    What came whole before is not sent again. A model card that somebody edited stays.

    Args:
        name: owner/name; a repository that is not there is made.
        files: a local file or the content of each.
        public: whether everybody may see the repository.
        message: of the commit.

    Raises:
        RemoteError: the hub refuses or is out of reach, or the repository is public and `public` is false.
    """
    check_login()
    from huggingface_hub import CommitOperationAdd, HfApi, constants

    api = HfApi(endpoint=constants.ENDPOINT)
    with _told(name):
        card = _card(api, name, public)
        kept = {CARD} if card is not None and WRITTEN_ANEW not in card else set()
        if kept:
            _LOG.info("%s: its %s was edited and stays", name, CARD)
        added = [CommitOperationAdd(place, what) for place, what in files.items() if place not in kept]
        api.create_commit(name, added, commit_message=message)
    return f"{constants.ENDPOINT}/{name}"


def _card(api: HfApi, name: str, public: bool) -> str | None:
    """Returns the card that a repository has, None: none. Makes the repository where there is none."""
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        found = api.model_info(name)
    except RepositoryNotFoundError:
        api.create_repo(name, private=not public, exist_ok=True)
        return None
    if not found.private and not public:
        raise RemoteError(
            f"{name}: is there already and public, so everybody would see what is uploaded; name another, or say "
            "--public (output.hub_public = true in a config)"
        )
    if CARD not in (each.rfilename for each in found.siblings or ()):
        return None
    return Path(api.hf_hub_download(name, CARD)).read_text(encoding="utf-8", errors="replace")


@contextlib.contextmanager
def _told(name: str) -> Iterator[None]:
    """Turns the errors of the hub's client into RemoteError, without what was sent."""
    try:
        yield
    except FlameError:
        raise
    except Exception as error:  # the client raises its own, the HTTP library's and OSError
        causes, each = list[str](), error.__cause__
        while each is not None and len(causes) < 2:
            causes.append(f"{type(each).__name__}: {each}")
            each = each.__cause__
        told = " ".join(without_token("; from ".join([f"{type(error).__name__}: {error}", *causes])).split())
        raise RemoteError(
            f"{name}: not published ({told}); nothing is lost here, and the same command goes on. Check the name, the "
            "network and whether the token may write"
        ) from None
