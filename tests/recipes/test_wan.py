"""Wan 2.2 from a config to a LoRA, on a small base with random weights, from files of every published kind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from flame_train.io.safetensors import save_file
from flame_train.models.registry import family_of
from flame_train.models.wan.names import lora_family
from tests.recipes.bases import (
    check_continuation,
    check_separate_files,
    short,
    small_base,
    trainer,
    with_a_longer_caption,
)
from tests.run_files import arrays_of

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_base(tmp_path_factory, "wan")


@pytest.fixture
def train(base: Path, drawn: Path, tmp_path: Path) -> Callable[..., int]:
    return trainer(base, with_a_longer_caption(drawn), tmp_path, "t5_tokens = 77")


def test_a_run_and_its_continuation_give_the_same_bytes(train: Callable[..., int], tmp_path: Path) -> None:
    """And both formats of its file are the same LoRA."""
    check_continuation(train, tmp_path / "run", lora_family(), 2 * 10)


def test_separate_files_and_scaled_fp8_are_the_checkpoint(
    train: Callable[..., int], base: Path, tmp_path: Path
) -> None:
    """ComfyUI's three files, of which the transformer has factors for its fp8 weights, give the same losses."""
    scaled = "ffn.0.weight", "self_attn.q.weight", "cross_attn.o.weight"
    check_separate_files(train, base, tmp_path, "text_encoders.umt5xxl.transformer.", scaled, key="t5")


def test_captions_encoded_in_the_step_give_the_same_loss(train: Callable[..., int], tmp_path: Path) -> None:
    """Of a base in fp8 too, whose UMT5 is as well."""
    quantized = "model.quantize=fp8", "text_encoders.precision=fp8"
    losses = [short(train, tmp_path / c, f"text_encoders.cache={c}", *quantized)[0] for c in ("auto", "off")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("text_encoders.t5_padding=zeros", "text_encoders.t5_padding: it has no effect on Wan 2.2"),
        ("loss.guidance_scale=3.5", "loss.guidance_scale: it has no effect on Wan 2.2"),
    ],
)
def test_what_has_no_effect_is_refused(train: Callable[..., int], capsys: Capture, setting: str, told: str) -> None:
    assert train("--set", setting) != 0
    assert told in capsys.readouterr().err


def test_another_wan_is_refused_by_name(train: Callable[..., int], base: Path, tmp_path: Path, capsys: Capture) -> None:
    arrays = arrays_of(base)
    name = "model.diffusion_model.patch_embedding.weight"
    save_file(tmp_path / "a14b.safetensors", arrays | {name: arrays[name][:, :16]})
    assert train("--set", f"model.checkpoint={tmp_path / 'a14b.safetensors'}") != 0
    assert "Wan 2.1 or Wan 2.2 A14B" in capsys.readouterr().err


def test_t5_is_no_umt5(
    train: Callable[..., int], tmp_path_factory: pytest.TempPathFactory, base: Path, capsys: Capture
) -> None:
    """Their states are as wide, so the tables of position biases tell: for Wan, and for a model that takes T5's."""
    chroma = small_base(tmp_path_factory, "chroma")
    assert train("--set", f"text_encoders.t5={chroma}") != 0
    assert "expected the encoder of UMT5 for Wan 2.2 TI2V-5B, found that of T5 v1.1" in capsys.readouterr().err
    assert train("--set", f"model.checkpoint={chroma}", "--set", f"text_encoders.t5={base}") != 0
    assert "expected the encoder of T5 v1.1 for Chroma, found that of UMT5" in capsys.readouterr().err


def test_the_base_is_recognised(base: Path) -> None:
    assert family_of(base).name == "wan"
