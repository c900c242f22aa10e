"""What several folders of tests share: the small base model of quickstart, drawn images, and a config for both."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# Before NumPy and PyTorch load: test workers share the cores, and threads that wait for one another spin.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

# What programs under test find out is kept apart from the user's own. It stays: kernels are slow to compile.
os.environ.setdefault("XDG_CACHE_HOME", str(Path(tempfile.gettempdir()).resolve() / "flame-train-tests"))

# Every worker and each of the many interpreters that tests start would otherwise compile the package anew.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


def pytest_configure(config: pytest.Config) -> None:
    """No test fails for being slow: other work may take the processor. A test that hangs meets pytest's own limit."""
    if config.pluginmanager.hasplugin("hypothesispytest"):  # the tests on a GPU do without it
        from hypothesis import settings

        settings.register_profile("without a deadline", deadline=None)
        settings.load_profile("without a deadline")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Says what was skipped and why: where no GPU is, thousands of tests are, and a passing run does not show it."""
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = Counter(str(report.longrepr[2]).removeprefix("Skipped: ") for report in skipped)
    if reasons:
        terminalreporter.write_line("skipped, by reason:")
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"  {count}: {reason}")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """`tests/parity` and `tests/gpu` are not even imported where `-m` leaves their mark out: PyTorch takes seconds."""
    left_out = f"not {collection_path.name}" in config.option.markexpr
    return True if left_out and collection_path.parent == Path(__file__).parent else None


@pytest.fixture(autouse=True)
def own_mode() -> Iterator[None]:
    """A test that sets a seed, a default device or a default dtype sets it for itself."""
    from flame_train.engine import mode

    token = mode._MODE.set(mode._DEFAULT)
    yield
    mode._MODE.reset(token)


@pytest.fixture(scope="session")
def forked() -> Iterator[list[str]]:
    """To stand for `sys.executable` before `-m flame_train` and `-c`: a process that begins with its imports made."""
    if sys.platform != "linux":
        yield [sys.executable]
        return
    program = str(Path(__file__).with_name("forked.py"))
    with tempfile.TemporaryDirectory(prefix="fork-") as folder:
        place, environment = f"{folder}/socket", os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
        command = [sys.executable, program, place]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as server:
            assert server.stdout is not None
            assert server.stdout.readline() == b"ready\n"
            yield [sys.executable, "-I", "-S", program, place]
            server.communicate()


@pytest.fixture(scope="session")
def small_base() -> Path:
    """The checkpoint of the small SDXL that comes with the package. Not to be written to."""
    from flame_train.models.common.small import SMALL_SDXL

    return SMALL_SDXL


@pytest.fixture(scope="session")
def drawings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve drawings and their captions, half of them square. Not to be written to."""
    from flame_train.quickstart.drawings import write_images

    folder = tmp_path_factory.mktemp("drawings")
    write_images(folder, 12, 1)
    return folder


@pytest.fixture
def drawn(drawings: Path, tmp_path: Path) -> Path:
    """A folder of its own with the drawings."""
    shutil.copytree(drawings, tmp_path / "images")
    return tmp_path / "images"


@pytest.fixture(scope="session")
def encoded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache for runs on the same drawings: what one has encoded, others of the same model find."""
    return tmp_path_factory.mktemp("encoded")


@pytest.fixture
def small_config(small_base: Path, drawn: Path, tmp_path: Path) -> Callable[..., Any]:
    """A `Config` for the small base and the drawings; each keyword replaces a section's keys: `data={...}`."""
    from flame_train.config import schema

    def make(**sections: dict[str, Any]) -> schema.Config:
        given = {
            "model": {"checkpoint": str(small_base)},
            "data": {"path": str(drawn), "resolution": 96, "bucket_step": 32},
            "lora": {"rank": 2, "alpha": 2.0},
            "train": {"precision": "fp32", "steps": 2},
            "output": {"dir": str(tmp_path / "run")},
        }
        merged = {name: given.get(name, {}) | sections.get(name, {}) for name in {**given, **sections}}
        return schema.Config(**{n: schema.Config.model_fields[n].annotation(**keys) for n, keys in merged.items()})

    return make
