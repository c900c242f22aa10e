"""Qwen-Image 1 from a config to a LoRA, on a small base with random weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from flame_train import cli
from flame_train.adapters.formats import from_file
from flame_train.io.safetensors import save_file
from flame_train.models.qwenimage1.keys import lora_family
from flame_train.recipes.small import write_vocabulary
from tests.recipes.bases import arrays_of, small_base

Train = Callable[..., int]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_base(tmp_path_factory, "qwenimage1")


@pytest.fixture
def train(base: Path, drawn: Path, tmp_path: Path) -> Train:
    config = tmp_path / "config.toml"
    config.write_text(
        f'[model]\ncheckpoint = "{base}"\n[data]\npath = "{drawn}"\nresolution = 64\nbucket_step = 32\n'
        'batch_size = 2\n[lora]\nrank = 2\nalpha = 2.0\ntargets = ["full"]\n[train]\nsteps = 2\nprecision = "fp32"\n'
        '[checkpoint]\nevery = 1\n[sample]\nevery = 2\nprompts = ["a red circle"]\nsteps = 2\n[output]\n'
        f'format = "both"\ndir = "{tmp_path / "run"}"\n[text_encoders]\nqwen3_tokens = 128\n'
    )
    return lambda *settings: cli.run(["train", str(config), "--device", "cpu", *settings])


def test_a_run_and_its_continuation_give_the_same_bytes(train: Train, tmp_path: Path) -> None:
    """And both formats of its file are the same LoRA."""
    assert train() == 0
    run = tmp_path / "run"
    log = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    assert [row["step"] for row in log] == [1, 2]
    assert all(np.isfinite(row["loss"]) and row["grad_norm"] > 0 for row in log)
    assert (run / "samples" / "step-000002.png").exists()
    whole = (run / "checkpoints" / "step-000002" / "lora.safetensors").read_bytes()
    files = [from_file(path, lora_family()).state["transformer"] for path in sorted(run.glob("lora*.safetensors"))]
    assert len(files) == 2
    assert files[0].keys() == files[1].keys()
    assert len(files[0]) == 6 + 2 * 14  # what stands once, and fourteen layers a block
    shutil.rmtree(run / "checkpoints" / "step-000002")
    for path in run.glob("lora*.safetensors"):
        path.unlink()
    assert train() == 0
    assert (run / "checkpoints" / "step-000002" / "lora.safetensors").read_bytes() == whole


def test_separate_files_are_the_checkpoint(train: Train, base: Path, tmp_path: Path) -> None:
    """ComfyUI's three files give the same losses, with blocks that wait in host memory."""
    arrays, prefix = arrays_of(base), "text_encoders.qwen25_7b.transformer."
    parts = {"q.safetensors": "model.diffusion_model.", "qwen_2.5_vl_7b.safetensors": prefix}
    for file, start in parts.items():
        named = {name.removeprefix(start): array for name, array in arrays.items() if name.startswith(start)}
        save_file(tmp_path / file, named)
    write_vocabulary(tmp_path, qwen=True)
    separate = [f"model.checkpoint={tmp_path / 'q.safetensors'}", f"model.vae={base}"]
    separate += [f"text_encoders.qwen3={tmp_path / 'qwen_2.5_vl_7b.safetensors'}"]
    separate += ["model.offload=1.0", "gradient.checkpointing=full"]
    losses = []
    for name, settings in (("whole", []), ("apart", separate)):
        given = [f"output.dir={tmp_path / name}", "sample.every=0", *settings]
        assert train(*(word for setting in given for word in ("--set", setting))) == 0
        log = (tmp_path / name / "log.jsonl").read_text().splitlines()
        losses.append([json.loads(line)["loss"] for line in log])
    assert losses[0] == losses[1]


def test_another_qwens_states_are_refused(train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shapes = {"model.embed_tokens.weight": (288, 4096), "model.layers.0.self_attn.q_norm.weight": (128,)}
    save_file(tmp_path / "qwen_3_8b.safetensors", {name: np.zeros(s, np.float16) for name, s in shapes.items()})
    assert train("--set", f"text_encoders.qwen3={tmp_path / 'qwen_3_8b.safetensors'}") != 0
    assert "expected Qwen2.5-VL-7B for Qwen-Image 1, found Qwen3-8B" in capsys.readouterr().err
