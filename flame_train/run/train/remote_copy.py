"""A run whose folder has a copy elsewhere: brought before the run begins, kept up while it goes on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from flame_train.config.compatibility import differences
from flame_train.errors import Interrupted, RemoteError
from flame_train.io.commit import newest
from flame_train.run.plan.plan import Plan
from flame_train.training.result import standing_of
from flame_train.training.session import Callbacks, Session
from flame_train.training.validation import EarlyStopping

_LOG = logging.getLogger(__name__)

AT_THE_END: Final = 600.0
"""Seconds for which a run that is done waits for its upload, where `--remote-wait` says nothing."""
AFTER_A_SIGNAL: Final = 25.0
"""The same after a signal: the shortest notice of a machine that is taken away is 30 s."""


@contextmanager
def with_remote_copy(plan: Plan, session: Session, wait: float | None) -> Iterator[Session]:
    """Brings the run that `output.remote` has, and copies the run folder there until the end of the block.

    Args:
        session: of its processes the leading one has the run folder, the lease and the copy. The others wait for it
            before and after, and end as it does.
        wait: seconds to wait at the end for what is not there yet; None: as usual.

    Returns:
        The session, whose callbacks tell the copy too.

    Raises:
        RemoteError: the store refuses, has another run, or lacks something after the wait at the end.
    """
    if not plan.config.output.remote:
        yield session
        return
    group = session.group
    with ExitStack() as opened:
        with group.barrier():
            if group.leads:
                session = replace(session, callbacks=opened.enter_context(_copying(plan, session, wait)))
        try:
            yield session
        except Exception as error:
            if group.is_shared(error):  # the others end too: a launcher would end the upload with the first of them
                with group.barrier():
                    opened.__exit__(type(error), error, error.__traceback__)
            raise
        with group.barrier():
            opened.close()


@contextmanager
def _copying(plan: Plan, session: Session, wait: float | None) -> Iterator[Callbacks]:
    from flame_train.remote.lease import Lease
    from flame_train.remote.mirror import Mirror
    from flame_train.remote.restore import Copy
    from flame_train.remote.store import Store

    c = plan.config
    folder, store = Path(c.output.dir), Store(c.output.remote)
    with Lease(store, folder) as lease:
        copy = Copy(
            store,
            folder,
            lambda old: differences(old, c, moved=True),
            lambda: session.stop.check("while the run was brought from its store"),
        )
        if copy.restore():
            _bring_best(copy.bring_too, folder)
        with Mirror(store, folder, c.checkpoint.keep, lease) as mirror:
            mirror.notice()

            def finish(seconds: float) -> None:
                try:
                    mirror.finish(seconds)
                except RemoteError:
                    lease.abandon()  # another request would take longer than was asked for
                    raise

            try:
                yield _also(session.callbacks, mirror)
            except Interrupted as error:
                _finish_interrupted(finish, error, AFTER_A_SIGNAL if wait is None else wait)
                raise
            except Exception:
                _try_to_finish(finish, AFTER_A_SIGNAL if wait is None else wait)
                raise
            finish(AT_THE_END if wait is None else wait)


def _bring_best(bring: Callable[[int], None], folder: Path) -> None:
    """Brings the checkpoint of the best validation, which stays beside the newest."""
    checkpoint = newest(folder / "checkpoints")
    best = EarlyStopping.read(standing_of(checkpoint)) if checkpoint is not None else EarlyStopping()
    if checkpoint is not None and best.step and best.step != checkpoint.step:
        bring(best.step)


def _also(callbacks: Callbacks, mirror: Any) -> Callbacks:
    """Returns the caller's callbacks, and the copy's after them. The run ends where another machine goes on with it."""

    def step(record: Any) -> None:
        callbacks.step(record)
        mirror.check()

    def checkpoint(number: int, path: Path) -> None:
        callbacks.checkpoint(number, path)
        mirror.checkpoint(number)

    def sample(number: int, path: Path) -> None:
        callbacks.sample(number, path)
        mirror.notice()

    return Callbacks(step, checkpoint, sample)


def _finish_interrupted(finish: Callable[[float], None], error: Interrupted, seconds: float) -> None:
    """Sees that a run that was stopped has its last checkpoint in the store, or ends with that error."""
    try:
        finish(seconds)
    except RemoteError as missing:
        raise RemoteError(f"{error}; {missing}") from None


def _try_to_finish(finish: Callable[[float], None], seconds: float) -> None:
    """Sends what a run that failed still has; what the store lacks costs a warning."""
    try:
        finish(seconds)
    except RemoteError as missing:
        _LOG.warning("%s", missing)
