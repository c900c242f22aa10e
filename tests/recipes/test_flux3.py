"""FLUX.3 klein from a config to a LoRA, on a small base with random weights, from files of every published kind."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from flame_train.io.safetensors import SafetensorsFile, save_file
from flame_train.models.common.small import write_vocabulary
from flame_train.models.flux3.names import lora_family
from tests.recipes.bases import (
    Array,
    Train,
    below,
    check_continuation,
    check_separate_files,
    options,
    short,
    small_base,
    trainer,
    with_a_longer_caption,
)
from tests.run_files import arrays_of

Capture = pytest.CaptureFixture[str]
TEXT = "text_encoders.qwen3vl_4b.transformer."
DENOISER = "model.diffusion_model."


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_base(tmp_path_factory, "flux3")


@pytest.fixture(scope="module")
def distilled(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The base with other weights, and what tells a flow map where a step goes to."""
    folder, rng = tmp_path_factory.mktemp("distilled"), np.random.default_rng(5)
    arrays = {name: a * np.float16(1.25 if name.startswith(DENOISER) else 1) for name, a in arrays_of(base).items()}
    for layer, shape in (("in_layer", (64, 256)), ("out_layer", (64, 64))):
        array = 0.05 * rng.standard_normal(shape)
        arrays[f"{DENOISER}ref_time_in.{layer}.weight"] = array.astype(np.float16)
    save_file(folder / "distilled.safetensors", arrays)
    write_vocabulary(folder, qwen=True)
    return folder / "distilled.safetensors"


@pytest.fixture
def train(base: Path, drawn: Path, tmp_path: Path) -> Train:
    return trainer(base, with_a_longer_caption(drawn), tmp_path, "qwen3_tokens = 256", bucket_step=16)


def test_a_run_and_its_continuation_give_the_same_bytes(train: Train, tmp_path: Path) -> None:
    """And both formats of its file are the same LoRA."""
    check_continuation(train, tmp_path / "run", lora_family(), 6 * (1 + 1 + 2))  # six layers a block


def test_separate_files_and_scaled_fp8_are_the_checkpoint(train: Train, base: Path, tmp_path: Path) -> None:
    check_separate_files(train, base, tmp_path, TEXT, (".mlp_in.", ".attn_out."))


def test_captions_in_the_step_and_streamed_blocks_give_the_caches_losses(train: Train, tmp_path: Path) -> None:
    """Within the rounding of the cache's bf16; to the bit where blocks wait in host memory."""
    kept = short(train, tmp_path / "kept", "text_encoders.cache=on")
    np.testing.assert_allclose(short(train, tmp_path / "not", "text_encoders.cache=off"), kept, rtol=1e-3)
    assert short(train, tmp_path / "streamed", "model.offload=1.0", "gradient.checkpointing=full") == kept


def test_the_cache_keeps_whole_windows_in_bf16(train: Train, drawn: Path, tmp_path: Path) -> None:
    """Padding up to a multiple of 80 tokens is kept; its rows are equal."""
    short(train, tmp_path / "run", f"data.cache={tmp_path / 'cache'}")
    found: dict[int, Array] = {}
    for path in (tmp_path / "cache").rglob("*.safetensors"):
        with SafetensorsFile(path) as file:
            if "qwen3" in file.names:
                array = np.array(file.read("qwen3"))
                found[len(array)] = array
    assert set(found) == {80, 160}
    assert {array.dtype for array in found.values()} == {np.dtype(ml_dtypes.bfloat16)}
    np.testing.assert_array_equal(found[160][-1], found[160][-2])


def test_a_run_is_looked_at_with_the_distilled_one(train: Train, distilled: Path, tmp_path: Path) -> None:
    """In 16 steps without guidance, each of which it is told; what is trained is the same."""
    grids, states = [], []
    for name, model, steps in (("base", "", 2), ("few", distilled, 0)):
        run = tmp_path / name
        asked = f"output.dir={run}", "train.steps=2", "sample.every=2", f"sample.steps={steps}", "sample.first=false"
        asked = *asked, f"sample.model={model}"
        assert train(*options(*asked)) == 0
        grids.append((run / "samples" / "step-000002.png").read_bytes())
        states.append((run / "checkpoints" / "step-000002" / "optimizer.safetensors").read_bytes())
    assert grids[0] != grids[1]
    assert states[0] == states[1]


def test_the_distilled_one_is_trained_with_an_adapter_and_drawn_without(
    train: Train, distilled: Path, tmp_path: Path
) -> None:
    """It is trained as a flow, by steps of no length, and drawn as a flow map: at first as `sample.model` draws it."""
    layer, normal = "diffusion_model.single_blocks.0.q_proj", np.random.default_rng(0).standard_normal
    shapes = {f"{layer}.lora_A.weight": (2, 64), f"{layer}.lora_B.weight": (64, 2)}
    save_file(tmp_path / "lora.safetensors", {name: normal(s).astype(np.float32) for name, s in shapes.items()})
    drawn = "train.steps=1", "sample.every=2", "sample.steps=2"
    adapted = f"model.checkpoint={distilled}", f"model.training_adapter={tmp_path / 'lora.safetensors'}"
    for name, asked in (("base", (f"sample.model={distilled}",)), ("distilled", adapted)):
        assert train(*options(*drawn, *asked, f"output.dir={tmp_path / name}")) == 0
    grids = [(tmp_path / name / "samples/step-000000.png").read_bytes() for name in ("base", "distilled")]
    assert grids[0] == grids[1]


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("model.checkpoint=DISTILLED", "is a flow map, which is told where a step goes to (no loss of one is"),
        ("text_encoders.qwen3=qwen_3_4b.safetensors", "expected Qwen3-VL-4B for FLUX.3 klein, found Qwen3-4B"),
    ],
)
def test_what_does_not_fit_is_refused(
    setting: str,
    words: str,
    train: Train,
    distilled: Path,
    tmp_path: Path,
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Qwen3-4B has the shapes of Qwen3-VL-4B's text half, and other weights."""
    monkeypatch.chdir(tmp_path)
    shapes = {"model.embed_tokens.weight": (288, 2560), "model.layers.0.self_attn.q_norm.weight": (128,)}
    save_file(tmp_path / "qwen_3_4b.safetensors", {name: np.zeros(s, np.float16) for name, s in shapes.items()})
    assert train(*options(setting.replace("DISTILLED", str(distilled)))) != 0
    assert words in capsys.readouterr().err


def test_layers_of_control_images_stay_as_they_are_without_any(train: Train, tmp_path: Path) -> None:
    """Whoever names them gets a LoRA there, which nothing moves."""
    targets = '["content_mode_blocks.image_cond.*", "single_blocks.*"]'
    assert train(*options(f"lora.targets={targets}", "train.steps=2", "sample.every=0")) == 0
    with SafetensorsFile(tmp_path / "run" / "checkpoints" / "step-000002" / "lora.safetensors") as file:
        moved = {name: bool(np.any(file.read(name))) for name in file.names if name.endswith("lora_up.weight")}
    assert moved
    assert all(found == ("image_cond" not in name) for name, found in moved.items())


def test_a_transformer_alone_lacks_its_parts(train: Train, base: Path, tmp_path: Path, capsys: Capture) -> None:
    save_file(tmp_path / "alone.safetensors", below(DENOISER, arrays_of(base)))
    assert train(*options(f"model.checkpoint={tmp_path / 'alone.safetensors'}")) != 0
    told = capsys.readouterr().err
    assert "model.vae" in told
    assert "text_encoders.qwen3" in told
