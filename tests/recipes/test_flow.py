"""`sd3-lora` and `flux-lora` from a config to a LoRA, on small bases with random weights and the true structures."""

from __future__ import annotations

import json
import math
import re
import shutil
import tomllib
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from flame_train import cli
from flame_train.adapters.formats import from_file
from flame_train.config.load import load
from flame_train.config.schema import Config, DataSection, LossSection, ModelSection, SampleSection, TrainSection
from flame_train.engine import functional as F
from flame_train.engine import nn, no_grad, tensor
from flame_train.engine.report import memory_report
from flame_train.errors import ConfigError
from flame_train.io.safetensors import save_file
from flame_train.io.weights import open_weights
from flame_train.models.flux import Flux, FluxArch
from flame_train.models.mmdit_sd3 import Mmdit, MmditArch
from flame_train.models.t5 import T5Arch, T5Encoder
from flame_train.models.vae import Vae, VaeArch
from flame_train.recipes import RECIPES
from flame_train.recipes.pictures import as_usual
from flame_train.recipes.plan import make_plan
from flame_train.recipes.small_flow import small_flux, small_sd3, write_small
from flame_train.training.encode import encode, keys_of
from flame_train.training.stop import StopRequest

MODELS = {"sd3": small_sd3, "flux": small_flux}


@pytest.fixture(params=MODELS)
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: write_small(make(), tmp_path_factory.mktemp(name), 3) for name, make in MODELS.items()}


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


Train = Callable[..., int]


def test_a_run_and_its_continuation_give_the_same_bytes(train: Train, tmp_path: Path) -> None:
    assert train() == 0
    run = tmp_path / "run" / "it"
    log = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
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


def test_captions_encoded_by_a_t5_in_8_bits_are_others(base: Path, family: str, drawn: Path) -> None:
    """They are kept apart in the cache, and near the exact ones."""
    made = {}
    for fp8 in (False, True):
        model = ModelSection(checkpoint=str(base), t5_fp8=fp8)
        config = Config(model=model, data=DataSection(path=str(drawn)), train=TrainSection(precision="fp32"))
        with RECIPES[family].encoders(config, "cpu", ["caption"]) as encoders:
            found = encoders.caption("a red circle").values()
        key = RECIPES[family].fingerprints(config)["caption"]
        made[key] = np.concatenate([np.ravel(a) for a in found]).astype(np.float64)
    exact, rounded = made.values()
    assert 0 < np.linalg.norm(rounded - exact) < 0.1 * np.linalg.norm(exact)


@pytest.mark.parametrize("fp8", ["weights", "dynamic"])
def test_a_base_in_8_bits_trains_and_continues_to_the_byte(
    train: Train, tmp_path: Path, fp8: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ("--set", f"model.fp8={fp8}", "--set", "sample.every=0")
    assert train(*asked) == 0
    run = tmp_path / "run" / "it"
    whole = (run / "checkpoints" / "step-000004" / "lora.safetensors").read_bytes()
    shutil.rmtree(run / "checkpoints" / "step-000004")
    assert train(*asked) == 0
    assert (run / "checkpoints" / "step-000004" / "lora.safetensors").read_bytes() == whole
    assert train("--set", "sample.every=0") != 0
    told = capsys.readouterr().err
    assert re.search(rf'model\.fp8 +"{fp8}" +"off"', told), "another base is no continuation"
    exact = tmp_path / "exact"
    assert train("--set", "sample.every=0", "--set", f"output.dir={exact}") == 0
    losses = [json.loads((place / "log.jsonl").read_text().splitlines()[0])["loss"] for place in (run, exact)]
    assert 0 < abs(losses[0] - losses[1]) < 0.1 * losses[1]


def test_the_predicted_memory_of_a_base_in_8_bits_is_what_it_takes(base: Path, family: str, drawn: Path) -> None:
    def plan(fp8: Any) -> Any:
        model = ModelSection(checkpoint=str(base), fp8=fp8)
        config = Config(model=model, data=DataSection(path=str(drawn), resolution=64, bucket_step=32))
        return make_plan(RECIPES[family], config, StopRequest())

    exact, packed = plan("off"), plan("weights")
    network = RECIPES[family].denoiser(packed.config, "cpu").model
    taken = sum(w.nbytes for _, w in network.weights())
    largest = max(math.prod(w.shape) for _, w in network.weights() if isinstance(w, nn.Fp8Weight))
    saved = exact.training_memory() - packed.training_memory()
    assert saved == 2 * network.num_weights() - taken - 2 * largest > 0


def test_both_formats_are_the_same_lora(train: Train, tmp_path: Path, family: str) -> None:
    """One file for programs that read kohya's names, one for diffusers, which reads no others for SD3."""
    assert train("--set", "output.format=both", "--set", "train.steps=1", "--set", "sample.every=0") == 0
    run = tmp_path / "run" / "it"
    config = Config(
        model=ModelSection(checkpoint=tomllib.loads((run / "config.toml").read_text())["model"]["checkpoint"])
    )
    kohya, diffusers = (
        from_file(run / name, RECIPES[family].lora_names(config))
        for name in ("lora.safetensors", "lora.diffusers.safetensors")
    )
    assert (kohya.dialects, diffusers.dialects) == (("kohya",), ("peft",))
    for name, factors in kohya.state["transformer"].items():
        np.testing.assert_allclose(diffusers.state["transformer"][name].delta(), factors.delta(), rtol=1e-5, atol=1e-9)


def test_a_silent_encoders_arrays_are_zeros(base: Path, family: str, drawn: Path) -> None:
    config = Config(
        model=ModelSection(checkpoint=str(base)), train=TrainSection(precision="fp32"),
        data=DataSection(path=str(drawn), resolution=64, bucket_step=32, t5_tokens=77), sample=SampleSection(every=0),
    )  # fmt: skip
    stop = StopRequest()
    plan = make_plan(RECIPES[family], config, stop)
    encoded = encode(plan.placed, keys_of(plan.placed, config, plan.family, ()), config, plan.family, "cpu", stop)
    whole = encoded.example(0, False)
    for encoder, arrays in plan.family.arrays_of.items():
        without = encoded.example(0, False, {encoder})
        assert {n for n in whole if not np.array_equal(whole[n], without[n])} == set(arrays)
        assert not any(without[n].any() for n in arrays)


def vae_in(base: Path) -> Vae:
    with open_weights(base) as weights:
        names = [n for n in weights.names if n.startswith("first_stage_model.")]
        return Vae(VaeArch.from_shapes({n.removeprefix("first_stage_model."): weights.info(n).shape for n in names}))


def test_the_predicted_memory_has_the_decoder_where_grids_are_drawn(base: Path, family: str, drawn: Path) -> None:
    """Its weights, and what it makes at once, counted while it decodes a picture of that size."""

    def predicted(*prompts: str) -> int:
        config = Config(
            model=ModelSection(checkpoint=str(base), vae_precision="bf16"), sample=SampleSection(prompts=prompts),
            data=DataSection(path=str(drawn), resolution=64, bucket_step=32),
        )  # fmt: skip
        return make_plan(RECIPES[family], config, StopRequest()).training_memory()

    vae = vae_in(base)
    vae.init(np.random.default_rng(0))
    with no_grad(), memory_report() as report:
        vae.decode(tensor(np.zeros((1, 64 // vae.arch.downscale, 64 // vae.arch.downscale, 16), np.float32)))
    more = predicted("a disc") - predicted() - 2 * vae.num_weights()
    assert more == pytest.approx(report.peak / 2, rel=0.1)


def test_the_predicted_memory_is_that_of_the_text_encoders_where_they_are_the_largest(
    family: str, drawn: Path, tmp_path: Path
) -> None:
    """All of them are loaded while captions are encoded; here T5 outweighs what training takes, as in SD3 medium."""
    networks = MODELS[family]()
    wide = T5Encoder(T5Arch(width=64, layers=2, heads=4, head_dim=16, hidden=60_000, vocabulary=32128, buckets=32))
    networks["text_encoders.t5xxl.transformer."] = wide
    base = write_small(networks, tmp_path, 0)
    config = Config(
        model=ModelSection(checkpoint=str(base)), sample=SampleSection(every=0),
        data=DataSection(path=str(drawn), resolution=64, bucket_step=32), train=TrainSection(precision="bf16"),
    )  # fmt: skip
    plan = make_plan(RECIPES[family], config, StopRequest())
    with open_weights(base) as weights:
        text = sum(math.prod(weights.info(n).shape) for n in weights.names if n.startswith("text_encoders."))
    assert plan.predicted_memory() == 2 * text > plan.training_memory()
    packed = config.model_copy(update={"model": ModelSection(checkpoint=str(base), t5_fp8=True)})
    less = make_plan(RECIPES[family], packed, StopRequest()).encoding_memory()
    stored = 2 * (3 * 60_000 * 64 + 4 * 64 * 64)  # numbers of two layers, a byte less each, but for the rows' factors
    assert 2 * text - less == stored - 4 * 2 * (2 * 60_000 + 5 * 64) - 2 * 60_000 * 64, "and the largest given back"


def test_decoding_and_attention_work_in_one_room(base: Path, family: str, drawn: Path) -> None:
    """Of attention's scores only that counts in which decoding, in fp32, does not work already."""

    def predicted(drawing: bool, exact: bool) -> int:
        config = Config(
            model=ModelSection(checkpoint=str(base)), sample=SampleSection(prompts=("a disc",) if drawing else ()),
            data=DataSection(path=str(drawn), resolution=64, bucket_step=32), train=TrainSection(deterministic=exact),
        )  # fmt: skip
        return make_plan(RECIPES[family], config, StopRequest()).training_memory()

    scores = predicted(drawing=False, exact=True) - predicted(drawing=False, exact=False)
    shared = 4 * 64 * 64 * vae_in(base).workspace()
    assert min(scores, shared) > 0
    assert predicted(drawing=True, exact=True) - predicted(drawing=True, exact=False) == max(0, scores - shared)


def test_what_decoding_in_fp32_works_in_is_what_cudnn_asked_for_on_an_h200() -> None:
    assert 4 * 1024 * 1024 * Vae(VaeArch.sd3()).workspace() == pytest.approx(2.002 * 2**30, rel=0.01)


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


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("loss.snr_gamma=5.0", "loss.snr_gamma: it means nothing for "),
        ("model.t5=missing.safetensors", "missing.safetensors"),
        ("data.bucket_step=8", "data.bucket_step: expected a multiple of 16"),
        ("sample.steps=1001", "sample.steps: expected"),
    ],
)
def test_what_makes_no_sense_is_refused(
    train: Train, setting: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("--set", setting, "--dry-run") in (2, 3)
    assert message in capsys.readouterr().err


CHOSEN = {"sd3": ("joint_blocks.1", "1 of 2"), "flux": ("*.1", "2 of 4")}


def test_the_blocks_that_a_config_chooses_are_recomputed(
    train: Train, family: str, base: Path, config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The plan says how many, the network is loaded so, no bit of what is learnt differs, and a run may go on so."""
    glob, count = CHOSEN[family]
    chosen = ("--set", "gradient.checkpointing=true", "--set", f"gradient.recompute_only={glob}")
    learnt = tmp_path / "run" / "it" / "checkpoints" / "step-000004" / "optimizer.safetensors"
    assert train("--dry-run") == 0
    assert "recomputed blocks: 0 of " in capsys.readouterr().out
    assert train("--dry-run", *chosen) == 0
    assert f"recomputed blocks: {count}\n" in capsys.readouterr().out
    sets = [word for word in chosen if word != "--set"]
    blocks = RECIPES[family].denoiser(load(str(config_file), sets), "cpu").model.blocks()
    assert {n for n, b in blocks.items() if b.recompute == "blocks"} == {n for n in blocks if fnmatch(n, glob)}
    assert train("--set", "sample.every=0") == 0
    plain = learnt.read_bytes()
    shutil.rmtree(tmp_path / "run")
    assert train("--set", "sample.every=0", *chosen) == 0
    assert learnt.read_bytes() == plain
    assert train("--set", "sample.every=0", *chosen[:3], "gradient.recompute_only=*.0") == 0
    assert learnt.read_bytes() == plain


def test_a_choice_of_blocks_that_are_not_there_is_refused_at_its_place(
    train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ("gradient.checkpointing=true", 'gradient.recompute_only=["*", "up_blocks.*"]')
    assert train("--dry-run", *(word for setting in asked for word in ("--set", setting))) == 2
    told = capsys.readouterr().err
    assert '--set: gradient.recompute_only: no block of the model that "blocks" recomputes is named by\n' in told
    assert "  'up_blocks.*'" in told
    assert "_blocks.0'" in told


def test_a_model_that_is_told_no_guidance_refuses_one(drawn: Path, tmp_path: Path) -> None:
    networks = {**small_flux(), "model.diffusion_model.": Flux(FluxArch.tiny(guidance=False, context_dim=64))}
    schnell = Config(
        model=ModelSection(checkpoint=str(write_small(networks, tmp_path, 0))), loss=LossSection(guidance=3.5)
    )
    with pytest.raises(ConfigError, match=r"loss.guidance: this model is told none, got 3.5; remove it"):
        RECIPES["flux"].check(schnell)


@pytest.mark.parametrize(
    ("family", "transformer", "steps", "guidance", "classifier_free"),
    [
        ("sd3", lambda: Mmdit(MmditArch(width=64, depth=2, head_dim=32, positions=12)), 28, 7.0, 7.0),
        ("sd3", lambda: Mmdit(MmditArch(width=64, depth=2, head_dim=32, positions=12, qk_norm=True)), 28, 3.5, 3.5),
        ("sd3", lambda: Mmdit(MmditArch.tiny()), 28, 4.5, 4.5),
        ("flux", lambda: Flux(FluxArch.tiny()), 28, 3.5, 1.0),
        ("flux", lambda: Flux(FluxArch.tiny(guidance=False)), 4, 1.0, 1.0),
    ],
    ids=["sd3-medium", "sd35-large", "sd35-medium", "flux-dev", "flux-schnell"],
)
def test_pictures_are_drawn_as_each_model_was_published(
    family: str, transformer: Callable[[], Any], steps: int, guidance: float, classifier_free: float, tmp_path: Path
) -> None:
    """Steps and guidance of the model cards, where a config names none; what it names stays."""
    networks = {**MODELS[family](), "model.diffusion_model.": transformer()}
    model, recipe = ModelSection(checkpoint=str(write_small(networks, tmp_path, 0))), RECIPES[family]
    usual = as_usual(Config(model=model), recipe)
    assert (usual.sample.steps, usual.sample.guidance) == (steps, guidance)
    assert recipe.guidance(usual) == classifier_free
    own = Config(model=model, sample=SampleSection(steps=7, guidance=2.0))
    assert as_usual(own, recipe) == own


def test_a_negative_prompt_that_would_not_be_seen_is_refused(
    train: Train, family: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Flux dev hears its guidance; SD3 sees the prompt unless its guidance is off. What is drawn with is recorded."""
    seen = family == "sd3"
    assert train("--set", "sample.negative=blurred", "--dry-run") == (0 if seen else 2)
    assert seen or "sample.negative: expected none, got 'blurred'" in capsys.readouterr().err
    assert train("--set", "sample.negative=blurred", "--set", "sample.guidance=1.0", "--dry-run") == 2
    assert train("--set", "train.steps=1", "--set", "sample.steps=0") == 0
    written = tomllib.loads((tmp_path / "run" / "it" / "config.toml").read_text())["sample"]
    assert (written["steps"], written["guidance"]) == (28, {"sd3": 4.5, "flux": 3.5}[family])


def test_a_caption_that_is_too_long_is_told_with_the_key_that_lengthens_it(
    base: Path, family: str, drawn: Path, small_config: Callable[..., Config], caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:  # fmt: skip
    shutil.copytree(drawn, tmp_path / "long")
    next((tmp_path / "long").glob("*.txt")).write_text("a red circle " * 300)
    config = Config(
        model=ModelSection(checkpoint=str(base)), sample=SampleSection(prompts=("a red disc " * 99, "a disc")),
        data=DataSection(path=str(tmp_path / "long"), resolution=64, bucket_step=32, t5_tokens=154),
    )  # fmt: skip
    make_plan(RECIPES[family], config, StopRequest())
    make_plan(RECIPES["sdxl"], small_config(data={"path": str(tmp_path / "long")}), StopRequest())
    told = [record.message for record in caplog.records if "longer than" in record.message]
    assert told == [
        f"1 {what}(s) are longer than {limit}; the rest is not seen"
        for what, limit in (
            ("caption", "data.t5_tokens=154"),
            ("prompt", "data.t5_tokens=154"),
            ("caption", "data.max_tokens=75"),
        )
    ]


def test_sides_that_sd3_has_no_positions_for_are_refused_by_the_plan(
    bases: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """16 positions of 16 pixels: a bucket 512 wide would be met when all is encoded."""
    (tmp_path / "wide").mkdir()
    Image.new("RGB", (512, 128)).save(tmp_path / "wide" / "a.png")
    (tmp_path / "wide" / "a.txt").write_text("a bar")
    own = [f"model.checkpoint={bases['sd3']}", f"data.path={tmp_path / 'wide'}", f"output.dir={tmp_path / 'run'}"]
    own += ["data.bucket_step=32", "sample.prompts=['a disc']"]
    (tmp_path / "config.toml").write_text("")

    def plan(*settings: str) -> int:
        sets = [word for setting in (*own, *settings) for word in ("--set", setting)]
        return cli.run(["sd3-lora", "--config", str(tmp_path / "config.toml"), "--device", "cpu", "--dry-run", *sets])

    assert plan("data.resolution=256") == 2
    assert "a side of 512, and this model has positions for 256; set data.max_bucket = 256" in capsys.readouterr().err
    assert plan("data.resolution=256", "data.max_bucket=256") == 0
    assert plan("data.resolution=256", "data.max_bucket=256", "sample.width=288") == 2
    assert "sample.width: expected at most 256" in capsys.readouterr().err


def test_sdxl_refuses_what_is_of_the_flow_families(small_config, capsys: pytest.CaptureFixture[str]) -> None:
    config = small_config(loss={"shift": 3.0})
    with pytest.raises(ConfigError, match=r"loss.shift: it means nothing for SDXL, got 3.0; remove it"):
        make_plan(RECIPES["sdxl"], config, StopRequest())


def test_a_checkpoint_without_text_encoders_needs_their_files(
    base: Path, train: Train, family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def part(name: str, wanted: str, prefix: str) -> Path:
        with open_weights(base) as weights:
            chosen = {n.removeprefix(prefix): np.array(weights.read(n)) for n in weights.names if wanted in n}
        save_file(tmp_path / name, chosen)
        return tmp_path / name

    with open_weights(base) as weights:
        rest = {n: np.array(weights.read(n)) for n in weights.names if not n.startswith("text_encoders.")}
    save_file(tmp_path / "alone.safetensors", rest)
    alone = ["--set", f"model.checkpoint={tmp_path / 'alone.safetensors'}"]
    assert train(*alone, "--dry-run") == 2
    assert "model.clip_l: " in capsys.readouterr().err
    shutil.copy(base.parent / "tokenizer.json", tmp_path)
    options = {"clip_l": "clip_l", "clip_g": "clip_g", "t5": "t5xxl"}
    for option, name in options.items():
        if family == "flux" and option == "clip_g":
            continue
        file = part(f"{name}.safetensors", f".{name}.", f"text_encoders.{name}.transformer.")
        alone += ["--set", f"model.{option}={file}"]
    assert train(*alone, "--dry-run") == 0, capsys.readouterr().err


def test_a_checkpoint_without_a_vae_needs_its_file(
    base: Path, train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As flux1-dev.safetensors is published: the message names the key that takes ae.safetensors."""
    with open_weights(base) as weights:
        tensors = {n: np.array(weights.read(n)) for n in weights.names}
    prefix = "first_stage_model."
    save_file(tmp_path / "alone.safetensors", {n: a for n, a in tensors.items() if not n.startswith(prefix)})
    save_file(
        tmp_path / "ae.safetensors", {n.removeprefix(prefix): a for n, a in tensors.items() if n.startswith(prefix)}
    )
    shutil.copy(base.parent / "tokenizer.json", tmp_path)
    alone = ["--set", f"model.checkpoint={tmp_path / 'alone.safetensors'}"]
    assert train(*alone, "--dry-run") == 2
    assert "model.vae: " in capsys.readouterr().err
    assert train(*alone, "--set", f"model.vae={tmp_path / 'ae.safetensors'}", "--dry-run") == 0, capsys.readouterr().err


def test_what_the_transformer_is_told(base: Path, family: str) -> None:
    """Times are a thousand noise levels; Flux hears one guidance in training and another when it draws."""
    config = Config(
        model=ModelSection(checkpoint=str(base)), train=TrainSection(precision="fp32"),
        sample=SampleSection(guidance=3.5),
    )  # fmt: skip
    denoiser, rng = RECIPES[family].denoiser(config, "cpu"), np.random.default_rng(0)
    shapes = {
        "x": (2, 8, 8, 16), "t5": (2, 5, 64), "clip_l": (2, 77, 32), "clip_g": (2, 77, 32), "pooled_l": (2, 32),
        "pooled_g": (2, 32), "pooled": (2, 32),
    }  # fmt: skip
    cond = {n: tensor(rng.standard_normal(s).astype(np.float32)) for n, s in shapes.items()}
    x, t5 = cond["x"], cond["t5"]
    t = np.array([0.25, 0.5], np.float32)

    def direct(guidance: float) -> np.ndarray:
        times = tensor(1000.0 * t)
        if family == "sd3":
            clips, pooled = (F.cat([cond[f"{n}_l"], cond[f"{n}_g"]], -1) for n in ("clip", "pooled"))
            return denoiser.model(x, times, F.cat([clips, t5], 1), pooled).numpy()
        return denoiser.model(x, times, t5, cond["pooled"], tensor(np.full(2, guidance, np.float32))).numpy()

    np.testing.assert_array_equal(denoiser.denoise(x, tensor(t), cond).numpy(), direct(1.0))
    np.testing.assert_array_equal(denoiser.drawing(x, tensor(t), cond).numpy(), direct(3.5))
    assert RECIPES[family].guidance(config) == {"sd3": 3.5, "flux": 1.0}[family]
