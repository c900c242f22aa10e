"""A network that drops, delays, cuts and corrupts: a run goes on, and its copy is right in the end."""

from __future__ import annotations

import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.run_files import log_of


@pytest.fixture
def proxy(servers: Any, s3: Any) -> Iterator[Any]:
    with servers.proxy(s3.port) as made:
        yield made


def same(remote: Any, bucket: Any) -> bool:
    """Whether the store has every file of the run folder, with its bytes."""
    out = remote.job.out
    here = [path for path in out.rglob("*") if path.is_file() and path.name != ".lock"]
    return all(bucket.cat(f"{remote.place}/{path.relative_to(out)}") == path.read_bytes() for path in here)


def test_what_is_cut_or_spoilt_on_its_way_is_sent_again(remote: Any, bucket: Any, undisturbed: Any, proxy: Any) -> None:
    proxy.cuts, proxy.corrupts = 2, 3
    ended = remote.train(port=proxy.port)
    assert ended.code == 0, ended.stderr
    assert (proxy.cuts, proxy.corrupts) == (0, 0)
    assert remote.job.result() == undisturbed.result
    assert same(remote, bucket)


def test_what_is_cut_or_spoilt_as_it_is_brought_is_brought_again(remote: Any, undisturbed: Any, proxy: Any) -> None:
    assert remote.train(failpoint="remote.after_manifest:2").code == -signal.SIGKILL
    shutil.rmtree(remote.job.out)
    proxy.spoils, proxy.cuts, proxy.corrupts = "got", 2, 1  # one object may meet all three, and has four tries
    ended = remote.train(port=proxy.port)
    assert ended.code == 0, ended.stderr
    assert (proxy.cuts, proxy.corrupts) == (0, 0)
    assert remote.job.result() == undisturbed.result


@pytest.mark.proof
def test_without_a_network_a_run_goes_on_and_ends_with_8_and_the_next_start_sends_the_rest(
    remote: Any, bucket: Any, undisturbed: Any, proxy: Any, servers: Any
) -> None:
    unable = remote.train(port=servers.free_port())
    assert unable.code == 8
    assert "the store does not answer" in unable.complaint
    assert not remote.job.out.exists()
    with dropped_from_the_first_step(proxy, remote.job):
        ended = remote.train(port=proxy.port, wait=1)
    assert ended.code == 8
    assert "nothing is lost here: start the same command again" in ended.complaint
    assert ended.stderr.count("the run goes on, and what is missing there is sent later") == 1
    assert remote.job.result() == undisturbed.result
    proxy.drops = False
    again = remote.train(port=proxy.port)
    assert again.code == 0, again.stderr
    assert remote.job.result() == undisturbed.result
    assert same(remote, bucket)


def test_a_slow_network_holds_up_no_step_and_a_word_says_how_far_it_is_behind(
    remote: Any, bucket: Any, proxy: Any
) -> None:
    proxy.delay = 0.03
    ended = remote.train(port=proxy.port, checkpoint__every=1, checkpoint__keep=1)
    assert ended.code == 0, ended.stderr
    assert "later ones are on this machine alone" in ended.stderr
    assert remote.whole(bucket) == remote.job.steps() == [5]
    waits = [row["step"] for row in log_of(remote.job.out)]
    assert waits == [1, 2, 3, 4, 5]


@contextmanager
def dropped_from_the_first_step(proxy: Any, job: Any) -> Iterator[None]:
    """Within, the proxy drops everything as soon as the run's log is there."""
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(0.002):
            if (job.out / "log.jsonl").exists():
                proxy.drops = True
                return

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
