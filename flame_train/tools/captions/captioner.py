"""What gives an image its caption, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self


@dataclass(frozen=True, slots=True)
class Answer:
    """A caption on one line, maybe empty; `cut` where it ends because it became too long."""

    text: str
    cut: bool = False


class Captioner(Protocol):
    """Gives captions, several at once, while it is entered."""

    async def __aenter__(self) -> Self:
        """Makes it ready. Raises a FlameError if no image would get a caption."""

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends it."""

    async def caption(self, image: Path, name: str) -> Answer:
        """Returns the caption of the image in a file called `name`, or of the middle of a clip.

        Raises DataError for an image that cannot be read, RemoteError where a server gives no caption of it.
        """
