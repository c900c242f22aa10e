"""Brings a run's newest whole checkpoint, log and samples from a store into the run folder, before the run begins.

The checkpoint comes last, whole or not at all. So a start that is killed meanwhile is one that has not begun, and the
next one brings everything again.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from flame_train.disk.failpoint import fail_point
from flame_train.disk.open_folder import FolderEntry, OpenFolder
from flame_train.disk.preflight import make_folder, reading
from flame_train.disk.system import lock
from flame_train.errors import OutputError
from flame_train.io.commit import Checkpoint, NoIntactCheckpoint, commit, newest
from flame_train.io.json_values import json_tree, table, text, whole
from flame_train.io.run_files import is_sample, refuse_links
from flame_train.io.runlog import FORMAT, LOCK, STATUS, record_of, write_status
from flame_train.version import __version__

from .copy_layout import CHECKPOINTS, CONFIG, LARGEST, LOG, SAMPLES, Manifest, folder_of, manifest_in, steps_in
from .faults import Refused, Unreachable, with_retries
from .store import Store

_LOG = logging.getLogger(__name__)

_SPARE: Final = 1 << 20  # bytes of a log of another machine's
_ALL: Final = 1 << 30  # checkpoints to keep: a start prunes none
_OURS: Final = (CONFIG, CHECKPOINTS, LOG, "lora.safetensors")


@dataclass(frozen=True, slots=True)
class Copy:
    """A run as it lies in a store.

    Args:
        store: the files of the copy.
        folder: the run folder here.
        differences: gets the `config.toml` of the copy. It returns a table of the settings that forbid continuing its
            run, or None.
        check: called between parts; raises what ends the start, such as Interrupted.
    """

    store: Store
    folder: Path
    differences: Callable[[str], str | None]
    check: Callable[[], None]

    def restore(self) -> int:
        """Brings what the run folder lacks. Returns the step of the checkpoint that came; 0: none was newer.

        Raises:
            Refused: the store has another run, or one that went another way than the one here.
            OutputError: the run folder is in use or cannot be written.
            Unreachable: the store did not give what it lists.
        """
        with_retries(self._refuse_strangers, self.check)
        here = _newest_here(self.folder)
        manifest = with_retries(self._whole, self.check)
        there = manifest.step if manifest is not None else 0
        if manifest is not None and here is not None:
            self._refuse_other_way(here.step, there)
        if manifest is None or there <= (here.step if here is not None else 0):
            if here is not None and there < here.step:
                _LOG.info("%s is at step %d, the copy at %s at step %d", self.folder, here.step, self.store, there)
            return 0
        self._bring(manifest)
        return there

    def bring_too(self, step: int) -> None:
        """Brings one more checkpoint, if it is whole there and not here."""
        manifest = with_retries(lambda: manifest_in(self.store, step), self.check)
        if manifest is not None and not (self.folder / folder_of(step)).exists():
            with _locked_folder(self.folder) as held:
                self._bring_checkpoint(held, manifest)

    def _refuse_strangers(self) -> None:
        """Raises Refused for files that are no run, a run of another format, or one with other settings."""
        status = self.store.read(STATUS, LARGEST)
        if status is None:
            present = [name for name in self.store.names() if name in _OURS]
            if present:
                raise Refused(
                    f"{self.store}: expected nothing or the copy of a run, but found {present[0]} without {STATUS}; "
                    "set output.remote to another address"
                )
            return
        state = table(json_tree(status))
        form, version = whole(state.get("format")) or 0, text(state.get("version"))
        if form != FORMAT and state.get("version") is not None:
            raise Refused(
                f"{self.store}: expected a run of format {FORMAT}, got one of format {form}, which "
                f"flame-train {version} wrote; finish it with that version, or set output.remote to another "
                "address"
            )
        config = self.store.read(CONFIG, LARGEST)
        other = None if config is None else self.differences(config.decode(errors="replace"))
        if other is not None:
            raise Refused(
                f"{self.store}: has the copy of a run with other settings, which change its result:\n{other}\n"
                "set them back to continue that run, or set output.remote to another address for a new one"
            )

    def _whole(self) -> Manifest | None:
        """Returns the newest checkpoint in the store whose files all have the size that its manifest says."""
        for step in steps_in(self.store):
            manifest = manifest_in(self.store, step)
            if manifest is None:
                continue
            there = self.store.names(folder_of(step))
            sizes = {name: entry.size for name, entry in there.items() if entry is not None}
            if all(sizes.get(name) == size for name, (size, _) in manifest.files.items()):
                return manifest
            _LOG.warning("%s: the checkpoint of step %d lacks a file, and is passed over", self.store, step)
        return None

    def _refuse_other_way(self, here: int, there: int) -> None:
        """Raises Refused where the steps that both did have other figures: two machines trained on from one point."""
        log = self.folder / LOG
        try:
            with reading(log, FileNotFoundError):
                mine = log.read_bytes()
        except FileNotFoundError:
            return
        most = 2 * len(mine) + _SPARE  # the steps of both stand in its beginning
        theirs = with_retries(lambda: self.store.read(LOG, most), self.check)
        if theirs is None:
            return
        step = first_difference(mine, theirs, min(here, there))
        if step is not None:
            raise Refused(
                f"{self.store}, at step {there}, and {self.folder}, at step {here}, went different ways from step "
                f"{step} on; remove one of them, or set output.dir or output.remote to another place"
            )

    def _bring(self, manifest: Manifest) -> None:
        _LOG.info("bringing step %d from %s", manifest.step, self.store)
        make_folder(self.folder)
        with _locked_folder(self.folder) as held:
            refuse_links(held)
            self._begin(held)
            fail_point("remote.begun")
            self._bring_file(LOG, held / LOG)
            self._bring_file("images.json", held / "images.json")
            with held.folder(SAMPLES, make=True) as samples:
                mine = samples.names()
                for name in with_retries(lambda: self.store.names(SAMPLES), self.check):
                    if is_sample(name) and name not in mine:
                        self._bring_file(f"{SAMPLES}/{name}", samples / name)
            self._bring_checkpoint(held, manifest)

    def _begin(self, held: OpenFolder) -> None:
        """Marks the folder as a run's, one that is at its beginning until the checkpoint is here."""
        if held.lstat(STATUS) is None:
            state = {"state": "interrupted", "exit_code": None, "step": 0, "saved": 0}
            write_status(held, {**state, "version": __version__, "format": FORMAT})
        if held.lstat(CONFIG) is None:
            self._bring_file(CONFIG, held / CONFIG)

    def _bring_checkpoint(self, held: OpenFolder, manifest: Manifest) -> None:
        folder = folder_of(manifest.step)

        def content(name: str) -> Callable[[FolderEntry], None]:
            return lambda spot: self._bring_file(f"{folder}/{name}", spot, manifest.files[name][1])

        size = sum(size for size, _ in manifest.files.values())
        files = {name: content(name) for name in manifest.files}
        commit(held / CHECKPOINTS, manifest.step, files, _ALL, size)

    def _bring_file(self, name: str, place: FolderEntry, sha256: str = "") -> None:
        """Writes a file of the store to `place`. One that the store does not have is left out, if no hash is asked."""
        partial = f".{place.name}.part"

        def fetch() -> str:
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
            with os.fdopen(place.folder.file(partial, flags), "wb") as file:

                def write(chunk: bytes) -> None:
                    self.check()
                    with place.folder.errors(place.path):
                        file.write(chunk)

                digest = self.store.download(name, write)
                os.fsync(file.fileno())
            if sha256 and digest != sha256:
                raise Unreachable(f"{self.store}: {name} does not match the SHA-256 of its manifest")
            return digest

        try:
            with_retries(fetch, self.check)
            place.folder.rename(partial, place.name)
            fail_point("remote.brought")
        except FileNotFoundError:
            if sha256:
                raise Unreachable(f"{self.store}: {name} was there, and is gone") from None
        finally:
            place.folder.remove(partial, missing_ok=True)


@contextmanager
def _locked_folder(folder: Path) -> Iterator[OpenFolder]:
    """Holds and locks the run folder. Raises OutputError if a run has it."""
    with reading(folder):
        held = OpenFolder.open(folder)
    with held:
        descriptor = held.file(LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            lock(descriptor)
            yield held
        except BlockingIOError:
            raise OutputError(
                f"{folder}: another run is writing here; wait for it, or set output.dir elsewhere"
            ) from None
        finally:
            os.close(descriptor)


def _newest_here(folder: Path) -> Checkpoint | None:
    """Gives the newest whole checkpoint of the run folder; none too where all are damaged: the store's may be whole."""
    try:
        return newest(folder / CHECKPOINTS)
    except NoIntactCheckpoint:
        return None


_FIGURES: Final = ("loss", "lr", "grad_norm", "loss_scale")
"""What a step computes; its times and memory may differ."""


def first_difference(one: bytes, other: bytes, last: int) -> int | None:
    """Finds the first step up to `last` whose figures differ in two logs; None without. Lines may be missing."""
    theirs = _figures(other)
    return next((step for step, mine in _figures(one).items() if step <= last and theirs.get(step, mine) != mine), None)


def _figures(log: bytes) -> dict[int, tuple[Any, ...]]:
    figures = dict[int, tuple[Any, ...]]()
    for line in log.splitlines():
        if record := record_of(line):
            figures[record["step"]] = tuple(record.get(name) for name in _FIGURES)
    return figures
