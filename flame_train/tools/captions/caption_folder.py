"""`flame-train caption`: writes a caption beside each image of a folder that has none.

Each caption is a file that is written whole as it comes. So a killed command goes on where it was.
"""

from __future__ import annotations

import asyncio
import os
import signal
import tomllib
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

from flame_train.data.caption_files import CaptionFiles, CaptionRule
from flame_train.data.caption_formats import MAX_CAPTION_BYTES, METADATA_NAMES, one_line
from flame_train.data.companion_files import mask_names
from flame_train.data.image_formats import CLIP_ENDINGS, IMAGE_ENDINGS
from flame_train.data.images import quiet_decoders
from flame_train.data.walk import list_files
from flame_train.disk.atomic_write import write_atomically
from flame_train.errors import ConfigError, DataError, Interrupted, RemoteError, counted, shown
from flame_train.progress import progress
from flame_train.tools.captions.captioner import Answer, Captioner

TRIGGER: Final = "[trigger]"
_IN_A_ROW: Final = 10  # images that a server refuses before the rest are not asked for
_NAMED: Final = 20  # images of one kind that a summary names


def questions() -> Mapping[str, str]:
    """Returns the questions that a server is asked, by their names."""
    text = files("flame_train.tools.captions").joinpath("questions.toml").read_text(encoding="utf-8")
    return {name: str(question).strip() for name, question in tomllib.loads(text).items()}


def question(name: str, own: str = "", trigger: str = "") -> str:
    """Returns a question with the trigger word in its place: one of `questions`, or the user's own.

    Raises ConfigError for a trigger without a place, or a place without a trigger.
    """
    text = own or questions()[name]
    if (TRIGGER in text) != bool(trigger):
        what = "the question" if own else f"the question {name!r}"
        raise ConfigError(
            f"--trigger: {what} says nothing of {TRIGGER}; leave --trigger out, as training puts captions.trigger in "
            "front, or ask --ask scene"
            if trigger
            else f"--trigger: expected the word that {what} calls the subject by; add --trigger WORD"
        )
    return text.replace(TRIGGER, trigger)


@dataclass(slots=True)
class Summary:
    """What became of a folder's images, by their relative paths.

    `errors` has why images got no caption; `status` is the exit status that they call for. `words` counts the words of
    each caption, new or kept.
    """

    folder: Path
    written: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    cut: list[str] = field(default_factory=list)
    errors: dict[str, str] = field(default_factory=dict)
    words: dict[str, int] = field(default_factory=dict)
    status: int = 0

    def fail(self, key: str, error: DataError | RemoteError) -> None:
        """Notes why an image got no caption."""
        self.errors[key] = str(error)
        self.status = max(self.status, error.exit_code)

    def as_dict(self) -> dict[str, Any]:
        """Returns it for a reader or a program."""
        longest = max(self.words, key=lambda key: self.words[key], default=None)
        return {
            "folder": str(self.folder),
            "captions_written": len(self.written),
            "captions_kept": len(self.kept),
            "without_caption": len(self.errors),
            "longest": longest and f"{longest} ({counted(self.words[longest], 'word')})",
            "empty": _some([key for key, words in self.words.items() if not words]),
            "cut_as_too_long": _some(self.cut),
            "errors": _some(list(self.errors.values())),
        }


def caption_folder(
    folder: Path, captioner: Captioner, *, extension: str = ".txt", overwrite: bool = False, jobs: int = 1
) -> Summary:
    """Writes captions for the images and clips below a folder that training would read; says what became of each.

    Args:
        folder: the folder.
        captioner: gives the captions.
        extension: the ending of caption files, as data.caption_extension.
        overwrite: whether captions that are there are written anew.
        jobs: how many images are captioned at once.

    Raises:
        DataError: `folder` is no folder, or holds no image.
        Interrupted: Ctrl-C was pressed. What was written stays.
        RemoteError: no server answers.
    """
    if not extension.startswith(".") or os.path.basename(extension) != extension or extension == ".":
        raise ConfigError(f"--extension: expected an ending such as .txt, got {shown(extension)}")
    summary = Summary(folder)
    todo = _without_caption(summary, extension, overwrite)
    try:
        if todo:
            asyncio.run(_Work(summary, captioner, extension).run(todo, jobs))
    except KeyboardInterrupt:
        written = counted(len(summary.written), "caption is", "captions are")
        left = len(todo) - len(summary.written)
        raise Interrupted(
            signal.SIGINT, f"interrupted: {written} written, {left} to go; the same command goes on"
        ) from None
    return summary


def _without_caption(summary: Summary, extension: str, overwrite: bool) -> list[str]:
    """Returns the images that are to get a caption; of the others the summary says why not."""
    listing = list_files(summary.folder, "FOLDER")
    masks = frozenset(mask_names(listing.files).values())
    stills = {_parts(key)[0] for key in listing.files if _parts(key)[1].lower() in IMAGE_ENDINGS}
    images = [
        key
        for key in listing.files
        if key not in masks
        and (
            _parts(key)[1].lower() in IMAGE_ENDINGS
            or (_parts(key)[1].lower() in CLIP_ENDINGS and _parts(key)[0] not in stills)
        )
    ]  # a film beside a still of its name shares its caption
    if not images:
        raise DataError(f"{shown(summary.folder)}: expected a folder of images, found none; name another folder")
    captions = CaptionFiles(summary.folder, listing.files, frozenset(images), CaptionRule((extension,)))
    names = Counter(_parts(key)[0] for key in images)
    todo = []
    for key in images:
        try:
            found = captions.written(key)
            if found and not overwrite:
                summary.kept.append(key)
                summary.words[key] = max(len(text.split()) for texts in found.values() for text in texts)
                continue
            _refuse_double(key, names, found)
        except DataError as error:
            summary.fail(key, error)
        else:
            todo.append(key)
    return todo


def _refuse_double(key: str, names: Mapping[str, int], found: Mapping[str, Sequence[str]]) -> None:
    """Raises DataError for an image whose caption file would be another's too, or would differ from what is there."""
    if names[_parts(key)[0]] > 1:
        raise DataError(f"{shown(key)}: another image has the same name but for its ending: rename one of them")
    if metadata := next((name for name in found if os.path.basename(name) in METADATA_NAMES), None):
        raise DataError(f"{shown(key)}: {shown(metadata)} has its caption: remove that line to have a new one")


class _Work:
    """Captions on their way from a captioner to files."""

    def __init__(self, summary: Summary, captioner: Captioner, extension: str) -> None:
        self._summary, self._captioner, self._extension = summary, captioner, extension
        self._in_a_row = 0

    async def run(self, todo: Sequence[str], jobs: int) -> None:
        """Captions the images, `jobs` at a time. Raises what ends all of it: a server that is gone, a full disk."""
        async with self._captioner:
            keys = iter(todo)
            with quiet_decoders(), progress("captioning", len(todo)) as advance:
                workers = [asyncio.create_task(self._each(keys, advance)) for _ in range(min(jobs, len(todo)))]
                try:
                    await asyncio.gather(*workers)
                finally:
                    for worker in workers:
                        worker.cancel()
                    await asyncio.gather(*workers, return_exceptions=True)

    async def _each(self, keys: Iterator[str], advance: Callable[[float], None]) -> None:
        for key in keys:
            try:
                answer = await self._captioner.caption(self._summary.folder / key, shown(key))
                self._write(key, answer)
                self._in_a_row = 0
            except DataError as error:
                self._summary.fail(key, error)
            except RemoteError as error:
                self._refused(key, error)
            advance(1)

    def _refused(self, key: str, error: RemoteError) -> None:
        """Notes an image that the server gave no caption of. Raises RemoteError if it gives none any more."""
        self._summary.fail(key, RemoteError(f"{shown(key)}: {error}"))
        self._in_a_row += 1
        if self._in_a_row == _IN_A_ROW:
            written = counted(len(self._summary.written), "caption is", "captions are")
            raise RemoteError(
                f"{self._in_a_row} images in a row got no caption, so the rest were not asked for; {written} written, "
                f"and the same command goes on. The last error: {error}"
            )

    def _write(self, key: str, answer: Answer) -> None:
        """Writes a caption. Raises DataError for one that no file should have."""
        text = _readable(answer.text)
        if not text:
            self._summary.words[key] = 0
            raise DataError(f"{shown(key)}: the answer is empty: ask again, or write a caption")
        raw = f"{text}\n".encode()
        if len(raw) > MAX_CAPTION_BYTES:
            raise DataError(f"{shown(key)}: the answer has more than {MAX_CAPTION_BYTES:,} bytes: ask another question")
        write_atomically(self._summary.folder / f"{_parts(key)[0]}{self._extension}", [raw], len(raw))
        self._summary.written.append(key)
        self._summary.words[key] = len(text.split())
        if answer.cut:
            self._summary.cut.append(key)


def _readable(text: str) -> str:
    """Returns an answer on one line, without control characters and halves of surrogate pairs."""
    lines = text.replace("\r\n", "\n").replace("\r", "\n")
    return one_line("".join(c for c in lines if c in "\t\n" or unicodedata.category(c) not in ("Cc", "Cs")))


def _parts(key: str) -> tuple[str, str]:
    return os.path.splitext(key)


def _some(names: Sequence[str]) -> list[str]:
    more = [f"and {len(names) - _NAMED:,} more"] if len(names) > _NAMED else []
    return [*map(shown, names[:_NAMED]), *more]
