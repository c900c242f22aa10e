"""Small SD3 and Flux bases with random weights and the true structures, and a config that trains on them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from flame_train import cli
from flame_train.engine import nn
from flame_train.recipes import FAMILIES
from flame_train.recipes.small import write_small

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
