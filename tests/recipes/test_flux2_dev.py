"""FLUX.2 dev from a config to a LoRA, on a small base with random weights, from files of every published kind."""

from __future__ import annotations

import json
from base64 import b64encode
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from flame_train import cli
from flame_train.engine.shape_run import H100, shape_run
from flame_train.io.safetensors import SafetensorsFile, save_file
from flame_train.models.flux2.names import lora_family
from flame_train.models.registry import FAMILIES
from flame_train.text_encoders.mistral.tokenizer import WORD
from flame_train.tools.bench.models import find
from tests.recipes.bases import (
    Array,
    Train,
    check_continuation,
    check_separate_files,
    short,
    trainer,
    with_a_longer_caption,
)
from tests.run_files import arrays_of

TEXT = "text_encoders.mistral3_24b.transformer."


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("flux2-dev")
    FAMILIES["flux2"].write_random_base("flux2-dev-tiny", folder, 3)
    return folder / "base.safetensors"


def texts_in(file: Path) -> list[Array]:
    """The states of a caption in a file of the cache, if it is of one."""
    return [array for name, array in arrays_of(file).items() if name == "mistral"]


@pytest.fixture
def train(base: Path, drawn: Path, tmp_path: Path) -> Train:
    return trainer(base, with_a_longer_caption(drawn), tmp_path, "mistral_tokens = 512", bucket_step=16)


def test_captions_reach_the_model_whatever_rows_they_take(
    train: Train, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A batch has captions of several lengths, none is cut, and without them the loss is another."""
    with_captions = short(train, tmp_path / "with")
    assert "the rest is not seen" not in capsys.readouterr().err
    rows = {array.shape[0] for file in base.parent.glob("encoded/**/*.safetensors") for array in texts_in(file)}
    assert len(rows) > 1
    assert short(train, tmp_path / "without", "data.caption_dropout=1.0") != with_captions


def test_a_run_and_its_continuation_give_the_same_bytes(train: Train, tmp_path: Path) -> None:
    """And both formats of its file are the same LoRA, which says whose it is."""
    check_continuation(train, tmp_path / "run", lora_family(), 2 * 8 + 2 * 2)
    with SafetensorsFile(tmp_path / "run" / "lora.safetensors") as file:
        assert file.metadata["modelspec.architecture"] == "Flux.2-dev/lora"


def test_separate_files_and_scaled_fp8_are_the_checkpoint(train: Train, base: Path, tmp_path: Path) -> None:
    check_separate_files(train, base, tmp_path, TEXT, (".img_mlp.", ".linear2."), "mistral")


def test_a_base_in_comfyuis_eight_bits_trains_as_its_numbers_do(train: Train, base: Path, tmp_path: Path) -> None:
    """Some layers in scaled fp8, the others as they were; the text encoder, too. And quantised again as it is read."""
    stored, plain = {}, {}
    for name, array in arrays_of(base).items():
        stored[name] = plain[name] = array
        if any(part in name for part in (".linear1.", ".img_mlp.0.", "layers.3.mlp.", "layers.29.self_attn.q_proj.")):
            layer, scale = name.removesuffix(".weight"), np.float32(np.abs(array).max() / 448)
            stored[name] = (array.astype(np.float32) / scale).astype(ml_dtypes.float8_e4m3fn)
            plain[name] = stored[name].astype(np.float32) * scale
            text = json.dumps({"format": "float8_e4m3fn"}).encode()
            stored |= {f"{layer}.weight_scale": np.array(scale), f"{layer}.comfy_quant": np.frombuffer(text, np.uint8)}
            stored[f"{layer}.input_scale"] = np.array(1, np.float32)
    bytes_alone = [{"rank": i, "token_bytes": b64encode(bytes([i])).decode()} for i in range(256)]
    config = {"pattern": WORD, "default_vocab_size": 1256, "default_num_special_tokens": 1000}
    vocabulary = json.dumps({"config": config, "vocab": bytes_alone}).encode()
    stored["text_encoders.tekken_model"] = np.frombuffer(vocabulary, np.uint8)
    save_file(base.with_name("flux2_dev_fp8mixed.safetensors"), stored)
    save_file(base.with_name("plain.safetensors"), plain)
    mixed, same, int8 = (
        short(train, tmp_path / f"run{i}", f"model.checkpoint={base.with_name(file)}", f"model.quantize={kept}")
        for i, (file, kept) in enumerate(
            (
                ("flux2_dev_fp8mixed.safetensors", "off"),
                ("plain.safetensors", "off"),
                ("flux2_dev_fp8mixed.safetensors", "int8"),
            )
        )
    )
    assert mixed == same != int8
    np.testing.assert_allclose(mixed, int8, rtol=0.1)


def test_an_encoder_that_is_read_in_turn_runs_in_no_step(train: Train, capsys: pytest.CaptureFixture[str]) -> None:
    assert train("--set", "text_encoders.cache=off") == 2
    assert "read layer by layer" in capsys.readouterr().err


def test_what_encoding_takes_of_a_card() -> None:
    """Of Mistral at full size no more than the embedding and two layers lie there; none of it waits on the host."""
    (encoder,), gib = find("flux2-dev")[1].text, 1 << 30
    with shape_run(H100) as run:
        network = encoder.load(device="cuda", dtype="bf16", precision="auto")
        assert run.live_bytes < 1.3 * gib
        for layer in network.layers:
            layer.weight_policy.ready(layer)
        assert run.peak_bytes < 1.3 * gib + 2 * 1.1 * gib
        assert run.host_bytes == 0


def test_a_lora_of_kleins_size_is_told_by_what_does_not_fit(
    train: Train, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It has blocks that this small dev has not; the file is named among several, and leaving them out is no advice."""
    layers, width = [f"lora_unet_single_blocks_{i}_linear1" for i in (0, 23)], 4096
    lora = {f"{layer}.lora_down.weight": np.zeros((2, width), np.float16) for layer in layers}
    lora |= {f"{layer}.lora_up.weight": np.zeros((9 * width, 2), np.float16) for layer in layers}
    save_file(tmp_path / "klein.safetensors", lora)
    drawn = ["--steps", "1", "--width", "64", "--height", "64", "--device", "cpu", "-o", str(tmp_path / "a.png")]
    command = ["sample", "-m", str(base), "-p", "x", "--lora", str(tmp_path / "klein.safetensors"), *drawn]
    assert cli.run(command) == 3
    said = capsys.readouterr().err
    assert "klein.safetensors: the LoRA does not fit the model: 2 of its 2 modules" in said
    assert train("--set", f"lora.from={tmp_path / 'klein.safetensors'}") == 2
    said += capsys.readouterr().err
    assert "adapts 1 layer that the model lacks, such as single_blocks.23.linear1: another base" in said
    assert "--skip-unknown" not in said
