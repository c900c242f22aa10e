"""Small SD3 and Flux bases with random weights and the true structures, and a config that trains on them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from flame_train import cli
from flame_train.engine import nn
from flame_train.models.common.small import write_small
from flame_train.models.registry import FAMILIES
from tests.recipes.bases import T5_TOKENS, settings
from tests.tiny_sdxl import write_tiny_sdxl

MODELS = ("sd3", "flux")


def small_networks(family: str) -> dict[str, nn.Module]:
    """The small networks of a family by the prefix that their tensors have in a checkpoint."""
    own = FAMILIES[family]
    made = own.published[own.small]()
    return {component.prefixes[0]: made[component.name] for component in own.files.components}


@pytest.fixture(params=MODELS)
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def networks(family: str) -> dict[str, nn.Module]:
    return small_networks(family)


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: write_small(small_networks(name), tmp_path_factory.mktemp(name), 3) for name in MODELS}


@pytest.fixture
def base(bases: dict[str, Path], family: str) -> Path:
    return bases[family]


@pytest.fixture
def config_file(base: Path, drawn: Path, tmp_path: Path) -> Path:
    path = tmp_path / "config.toml"
    path.write_text(f"""
[model]
checkpoint = "{base}"
[data]
path = "{drawn}"
resolution = 64
bucket_step = 32
batch_size = 2
[text_encoders]
t5_tokens = 77
[lora]
rank = 2
alpha = 2.0
targets = ["full"]
[train]
steps = 4
precision = "fp32"
[checkpoint]
every = 2
[sample]
every = 4
prompts = ["a red circle"]
steps = 3
[output]
dir = "{tmp_path / "run" / "it"}"
""")
    return path


@pytest.fixture
def train(config_file: Path, family: str) -> Callable[..., int]:
    return lambda *settings: cli.run([f"{family}-lora", "--config", str(config_file), "--device", "cpu", *settings])


@pytest.fixture
def trained_base() -> None:
    """Tests that ask for it train the small SDXL of the package, for what it learned or its sizes."""


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a family's small base, made once; by another name that of SDXL, `tiny`. Not to be written to."""

    @cache
    def made(name: str) -> Path:
        folder = tmp_path_factory.mktemp(name)
        if name == "tiny":
            write_tiny_sdxl(folder / "base.safetensors", 3)
        else:
            FAMILIES[name].write_small_base(folder, 3)
        return folder

    return made


@pytest.fixture
def train_small(
    drawn: Path, tmp_path: Path, request: pytest.FixtureRequest, small_model: Callable[[str], Path], encoded: Path
) -> Callable[..., int]:
    """Trains a small model of any family on drawn images, as the settings say."""

    def train(family: str, *settings: str) -> int:
        base = tmp_path / family
        if not base.exists():
            tiny = family == "sdxl" and "trained_base" not in request.fixturenames
            shutil.copytree(small_model("tiny" if tiny else family), base)
            (base / "config.toml").write_text(
                f'[model]\ncheckpoint = "{base / "base.safetensors"}"\n[data]\npath = "{drawn}"\nresolution = 64\n'
                f'cache = "{encoded}"\nbucket_step = 32\nbatch_size = 2\n[lora]\nrank = 2\nalpha = 2.0\n'
                '[train]\nsteps = 3\nprecision = "fp32"\n'
            )
        return cli.run([f"{family}-lora", "--config", str(base / "config.toml"), "--device", "cpu", *settings])

    return train


@pytest.fixture
def run(train_small: Callable[..., int], tmp_path: Path) -> Callable[..., Path]:
    """run(family, name, keys) trains into a folder of that name, and returns it."""

    def one(family: str, name: str, keys: dict[str, str], steps: int = 3) -> Path:
        place = {"output.dir": str(tmp_path / name), "train.steps": str(steps), "schedule.name": "constant"}
        assert train_small(family, *settings(T5_TOKENS[family] | keys | place)) == 0
        return tmp_path / name

    return one


@pytest.fixture
def refused(
    train_small: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Callable[[dict[str, str]], str]:
    """refused(keys) is the one line with which a run on the small SDXL is refused, before it has a folder."""

    def told(keys: dict[str, str]) -> str:
        assert train_small("sdxl", *settings(keys | {"output.dir": str(tmp_path / "never")})) == 2
        (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
        assert not (tmp_path / "never").exists()
        return line

    return told
