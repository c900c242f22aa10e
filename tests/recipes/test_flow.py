"""`sd3-lora` and `flux-lora` from a config to a LoRA, on small bases with random weights and the true structures."""

from __future__ import annotations

import json
import re
import shutil
import tomllib
from collections.abc import Callable
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flame_train.adapters.formats import from_file
from flame_train.config.schema import Config, DataSection, ModelSection, SampleSection, TextEncodersSection
from flame_train.config.training_sections import OutputSection, TrainSection
from flame_train.data.order import Choice
from flame_train.data.samples import EncoderInput
from flame_train.engine import functional as F
from flame_train.engine import nn, tensor
from flame_train.engine.mode import mode
from flame_train.io.weights import open_weights
from flame_train.models.common.model import Denoiser, Model
from flame_train.models.common.small import write_small
from flame_train.models.flux.family import FluxModel
from flame_train.models.flux.transformer import Flux, FluxArch
from flame_train.models.registry import FAMILIES, NOTHING_NAMED
from flame_train.models.sd3.family import Sd3Model
from flame_train.models.sd3.mmdit import MMDiT, MMDiTArch
from flame_train.networks.block_network import BlockNetwork
from flame_train.run.check.check_run import check
from flame_train.run.encode.encode import encode
from flame_train.run.encode.encoders import load_encoders
from flame_train.run.plan.plan import Plan, make_plan
from flame_train.run.sampling.requests import with_defaults
from flame_train.run.train.step_state import load_denoiser
from flame_train.training.session import Session, StopRequest
from tests.recipes.conftest import MODELS
from tests.run_files import log_of

Train = Callable[..., int]


def opened(family: str, base: Path) -> Model:
    """The model in a checkpoint that holds all its networks."""
    return FAMILIES[family].open(replace(NOTHING_NAMED, base=base))


def planned(family: str, config: Config) -> Plan:
    """The plan of a run that nothing interrupts."""
    return make_plan(check(config, FAMILIES[family]), StopRequest())


def test_a_run_and_its_continuation_give_the_same_bytes(train: Train, tmp_path: Path) -> None:
    assert train() == 0
    run = tmp_path / "run" / "it"
    log = log_of(run)
    assert [row["step"] for row in log] == [1, 2, 3, 4]
    assert all(np.isfinite(row["loss"]) and row["grad_norm"] > 0 for row in log)
    assert (run / "samples" / "step-000004.png").exists()
    whole = {p.name: p.read_bytes() for p in (run / "checkpoints" / "step-000004").iterdir()}
    shutil.rmtree(run / "checkpoints" / "step-000004")
    (run / "lora.safetensors").unlink()
    assert train() == 0
    for name in ("lora.safetensors", "optimizer.safetensors"):
        assert (run / "checkpoints" / "step-000004" / name).read_bytes() == whole[name]
    assert (run / "lora.safetensors").exists()


@pytest.mark.parametrize(("stored", "near"), [("fp8", 0.1), ("int8", 0.1), ("nf4", 0.4)])
def test_captions_encoded_by_a_t5_in_fewer_bits_are_others(
    stored: str, near: float, base: Path, family: str, drawn: Path
) -> None:
    """They are kept apart in the cache, and near the exact ones."""
    made = {}
    for precision in ("auto", stored):
        config = Config(
            model=ModelSection(checkpoint=str(base)),
            text_encoders=TextEncodersSection(precision=precision),
            data=DataSection(path=str(drawn), resolution=64, bucket_step=32),
            train=TrainSection(precision="fp32"),
            output=OutputSection(dir=f"{drawn}-run"),
        )
        plan = planned(family, config)
        found = load_encoders(plan.encoding, "cpu").captions([EncoderInput("a red circle")])[0].values()
        key = plan.encoding.keys(plan.samples, [EncoderInput("a red circle")]).captions[EncoderInput("a red circle")]
        made[key] = np.concatenate([np.ravel(a) for a in found]).astype(np.float64)
    exact, rounded = made.values()
    assert 0 < np.linalg.norm(rounded - exact) < near * np.linalg.norm(exact)


IN_FEWER_BITS = [("fp8", "bf16"), ("fp8", "fp8"), ("int8", "bf16"), ("int8", "int8"), ("nf4", "bf16")]
OTHERS = {"sd3": ("fp8-bf16", "int8-bf16", "nf4-bf16"), "flux": ("fp8-fp8", "int8-int8")}
"""Each way on one of two families here, on both where proofs are asked for."""


@pytest.mark.parametrize(
    ("family", "quantize", "arithmetic"),
    [
        pytest.param(family, *way, marks=[pytest.mark.proof] * ("-".join(way) in OTHERS[family]))
        for family in MODELS
        for way in IN_FEWER_BITS
    ],
)
def test_a_base_in_fewer_bits_trains_and_continues_to_the_byte(
    train: Train, tmp_path: Path, quantize: str, arithmetic: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = (
        "--set",
        f"model.quantize={quantize}",
        "--set",
        f"model.arithmetic={arithmetic}",
        "--set",
        "sample.every=0",
    )
    assert train(*asked) == 0
    run = tmp_path / "run" / "it"
    whole = (run / "checkpoints" / "step-000004" / "lora.safetensors").read_bytes()
    shutil.rmtree(run / "checkpoints" / "step-000004")
    assert train(*asked) == 0
    assert (run / "checkpoints" / "step-000004" / "lora.safetensors").read_bytes() == whole
    assert train("--set", "sample.every=0") != 0
    told = capsys.readouterr().err
    assert re.search(rf'model\.quantize +"{quantize}" +"off"', told), "another base is no continuation"
    exact = tmp_path / "exact"
    assert train("--set", "sample.every=0", "--set", f"output.dir={exact}") == 0
    losses = [json.loads((place / "log.jsonl").read_text().splitlines()[0])["loss"] for place in (run, exact)]
    assert 0 < abs(losses[0] - losses[1]) < 0.1 * losses[1]


def test_both_formats_are_the_same_lora(
    train: Train, tmp_path: Path, family: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """One file for programs that read kohya's names, one for diffusers, which reads no others for SD3."""
    assert train("--set", "output.format=both", "--set", "train.steps=1", "--set", "sample.every=0", "--json") == 0
    run = tmp_path / "run" / "it"
    said = json.loads(capsys.readouterr().out)
    assert (said["lora"], said["lora_diffusers"]) == (f"{run}/lora.safetensors", f"{run}/lora.diffusers.safetensors")
    model = opened(family, Path(tomllib.loads((run / "config.toml").read_text())["model"]["checkpoint"]))
    kohya, diffusers = (
        from_file(run / name, model.lora_names) for name in ("lora.safetensors", "lora.diffusers.safetensors")
    )
    assert (kohya.dialects, diffusers.dialects) == (("kohya",), ("peft",))
    for name, factors in kohya.state["transformer"].items():
        np.testing.assert_allclose(diffusers.state["transformer"][name].delta(), factors.delta(), rtol=1e-5, atol=1e-9)


def test_a_dropped_encoders_arrays_are_zeros(base: Path, family: str, drawn: Path) -> None:
    config = Config(
        model=ModelSection(checkpoint=str(base)),
        text_encoders=TextEncodersSection(t5_tokens=77),
        data=DataSection(path=str(drawn), resolution=64, bucket_step=32),
        sample=SampleSection(every=0),
        train=TrainSection(precision="fp32"),
        output=OutputSection(dir=f"{drawn}-run"),
    )
    plan = planned(family, config)
    keys = plan.encoding.keys(plan.samples, ())
    encoded = encode(plan, keys, Session("cpu"))
    whole = encoded.example(0)
    assert list(encoded.outputs) == {"sd3": ["clip_l", "clip_g", "t5"], "flux": ["clip_l", "t5"]}[family]
    for encoder, arrays in encoded.outputs.items():
        without = encoded.example(0, Choice(dropped=frozenset({encoder})))
        assert {n for n in whole if not np.array_equal(whole[n], without[n])} == set(arrays)
        assert not any(without[n].any() for n in arrays)


def test_only_the_denoisers_adapters_are_in_the_file_and_by_kohyas_names(
    train: Train, family: str, tmp_path: Path
) -> None:
    assert train("--set", "sample.every=0", "--set", "train.steps=1") == 0
    with open_weights(tmp_path / "run" / "it" / "lora.safetensors") as weights:
        modules = {name.split(".")[0] for name in weights.names}
    wanted = {
        # ten layers a block, two of its second attention, in the last block three less
        "sd3": (10 + 2 + 10 - 3, "lora_unet_joint_blocks_0_x_block_attn2_qkv"),
        "flux": (2 * 10 + 2 * 3, "lora_unet_single_blocks_1_modulation_lin"),
    }
    count, one = wanted[family]
    assert len(modules) == count
    assert one in modules


CHOSEN = {"sd3": ("joint_blocks.1", "1 of 2"), "flux": ("*.1", "2 of 4")}


def test_the_blocks_that_a_config_chooses_are_checkpointed(
    train: Train, family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan says how many, the network is loaded so, no bit of what is learnt differs, and a run may go on so."""
    glob, count = CHOSEN[family]
    chosen = ("--set", "gradient.checkpointing=full", "--set", f"gradient.checkpoint_blocks={glob}")
    loaded: list[BlockNetwork] = []

    def watched(plan: Plan, device: str) -> Denoiser:
        denoiser = load_denoiser(plan, device)
        loaded.append(denoiser.network)
        return denoiser

    monkeypatch.setattr("flame_train.run.train.step_state.load_denoiser", watched)
    learnt = tmp_path / "run" / "it" / "checkpoints" / "step-000004" / "optimizer.safetensors"
    assert train("--dry-run") == 0
    assert "  0 of " in capsys.readouterr().out
    assert train("--dry-run", *chosen) == 0
    assert f"  {count} recomputed" in capsys.readouterr().out
    assert train("--set", "sample.every=0") == 0
    plain = learnt.read_bytes()
    shutil.rmtree(tmp_path / "run")
    assert train("--set", "sample.every=0", *chosen) == 0
    blocks = loaded[-1].named_blocks()
    assert {n for n, b in blocks.items() if b.checkpointing == "full"} == {n for n in blocks if fnmatch(n, glob)}
    assert learnt.read_bytes() == plain
    assert train("--set", "sample.every=0", *chosen[:3], "gradient.checkpoint_blocks=*.0") == 0
    assert learnt.read_bytes() == plain


@pytest.mark.parametrize(
    ("family", "transformer", "steps", "guidance", "classifier_free"),
    [
        ("sd3", lambda: MMDiT(MMDiTArch.tiny(qk_norm=False, dual=())), 28, 7.0, 7.0),
        ("sd3", lambda: MMDiT(MMDiTArch.tiny(dual=())), 28, 3.5, 3.5),
        ("sd3", lambda: MMDiT(MMDiTArch.tiny()), 28, 4.5, 4.5),
        ("flux", lambda: Flux(FluxArch.tiny()), 28, 3.5, 1.0),
        ("flux", lambda: Flux(FluxArch.tiny(guidance=False)), 4, 1.0, 1.0),
    ],
    ids=["sd3-medium", "sd35-large", "sd35-medium", "flux-dev", "flux-schnell"],
)
def test_images_are_drawn_as_each_model_was_published(
    family: str,
    networks: dict[str, nn.Module],
    transformer: Callable[[], nn.Module],
    steps: int,
    guidance: float,
    classifier_free: float,
    tmp_path: Path,
) -> None:
    """Steps and guidance of the model cards, where a config names none; what it names stays."""
    networks["model.diffusion_model."] = transformer()
    model = opened(family, write_small(networks, tmp_path, 0))
    usual = with_defaults(SampleSection(), model)
    assert (usual.steps, usual.guidance_scale) == (steps, guidance)
    assert model.classifier_free_guidance(usual.guidance_scale) == classifier_free
    own = SampleSection(steps=7, guidance_scale=2.0)
    assert with_defaults(own, model) == own


def test_what_the_transformer_is_told(base: Path, family: str) -> None:
    """Times are a thousand noise levels; Flux hears one guidance in training and another when it draws."""
    model, rng = opened(family, base), np.random.default_rng(0)
    denoiser = model.load_denoiser(device="cpu", dtype="fp32")
    network = denoiser.network
    shapes = {
        "x": (2, 8, 8, 16),
        "t5": (2, 5, 64),
        "clip_l": (2, 77, 32),
        "clip_g": (2, 77, 32),
        "pooled_l": (2, 32),
        "pooled_g": (2, 32),
        "pooled": (2, 32),
    }
    cond = {n: tensor(rng.standard_normal(s).astype(np.float32)) for n, s in shapes.items()}
    x, t5 = cond["x"], cond["t5"]
    t = np.array([0.25, 0.5], np.float32)

    def direct(guidance: float) -> np.ndarray:
        times = tensor(1000.0 * t)
        if family == "sd3":
            clips, pooled = (F.cat([cond[f"{n}_l"], cond[f"{n}_g"]], -1) for n in ("clip", "pooled"))
            return network(x, times, F.cat([clips, t5], 1), pooled).numpy()
        return network(x, times, t5, cond["pooled"], tensor(np.full(2, guidance, np.float32))).numpy()

    np.testing.assert_array_equal(denoiser.denoise(x, tensor(t), cond).numpy(), direct(1.0))
    other = Denoiser.of(model, network, "cpu", 3.5)
    np.testing.assert_array_equal(other.denoise(x, tensor(t), cond).numpy(), direct(3.5))
    assert model.classifier_free_guidance(3.5) == {"sd3": 3.5, "flux": 1.0}[family]


def test_training_is_told_one_guidance_and_sampling_another(
    train: Train, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: dict[str, set[float]] = {"training": set(), "sampling": set()}
    kind = {"sd3": Sd3Model, "flux": FluxModel}[family]
    predict = kind.predict

    def watched(self: Any, network: Any, x: Any, t: Any, cond: Any, guidance: Any) -> Any:
        told["training" if mode().grad else "sampling"].add(float(guidance.numpy()[0]))
        return predict(self, network, x, t, cond, guidance)

    monkeypatch.setattr(kind, "predict", watched)
    trained = 1.0 if family == "sd3" else 2.0
    asked = ("train.steps=1", "sample.every=1", "sample.guidance_scale=3.5", f"loss.guidance_scale={trained}")
    assert train(*(word for setting in asked for word in ("--set", setting))) == 0
    assert told == {"training": {trained}, "sampling": {3.5}}
