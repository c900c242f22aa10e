"""`bench`: what it counts, what it refuses. What it times is this machine's and is not asserted."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import ops, sizes, torch_ops
from benchmarks.flops import op_flops
from benchmarks.ready import ready, wanted_of
from flame_train import cli
from flame_train.engine import get_float32_matmul_precision
from flame_train.engine.backend import get_backend
from flame_train.engine.dtype import float32, float64
from flame_train.engine.gradcheck import generator
from flame_train.engine.op import REGISTRY, Sample, sample
from flame_train.engine.op_samples import Values, integers, materialise, stored_in_4_bits
from flame_train.errors import ConfigError
from flame_train.models.sdxl.unet import UNet, UNetArch
from flame_train.tools import bench
from flame_train.tools.bench import lora_step, timing
from flame_train.tools.bench import step_memory as memory
from flame_train.tools.bench import timing as ceilings_module
from flame_train.tools.bench.models import find
from flame_train.tools.bench.timing import Ceilings, ceilings
from flame_train.training.step import micro


@pytest.mark.parametrize(
    ("model", "adapted"), [("sdxl-tiny", 8 * 17), ("sd3-tiny", 2 * 2 + 2 + 1 + 2), ("flux-tiny", 20)]
)
def test_step_reports_a_finite_whole_step(model: str, adapted: int, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["bench", "step", "--model", model, "--resolution", "64", "--precision", "fp32"]
    argv += ["--rank", "2", "--device", "cpu", "--json"]
    assert cli.run(argv) == 0
    result = json.loads(capsys.readouterr().out)
    assert math.isfinite(result["figures"]["loss"])
    assert result["figures"]["grad_norm"] > 0
    assert result["figures"]["healthy"] == 1
    assert result["adapted_layers"] == adapted
    weights = 4 * find(model)[1].network.num_weights()
    assert result["weights_gib"] == pytest.approx(weights / 2**30, abs=0.005)
    assert result["before_step_gib"] > result["weights_gib"]
    assert "captured_ms" not in result


def test_a_step_trains_text_encoders_too() -> None:
    """Their adapters join, the token ids take the place of their arrays, and every one of them gets a gradient."""
    plain = bench.BenchCase("sdxl-tiny", 64, precision="fp32", device="cpu")
    both = replace(plain, settings=('text_encoders.train=["clip_l", "clip_g"]', "text_encoders.rank=2"))
    alone, joined = bench.prepare(plain), bench.prepare(both)
    clips = find("sdxl-tiny")[1].encoders(("clip_l", "clip_g"))
    layers = sum(".self_attn." in name for clip in clips for name in clip.adaptable())
    assert joined.adapted == alone.adapted + layers
    micro(joined.state, joined.batch)
    arena = joined.state.optimizer.arena
    encoders = [segment for segment in arena.segments if segment.name.startswith(("clip_l.", "clip_g."))]
    assert len(encoders) == 2 * layers
    assert all(np.any(arena.grads[segment.start : segment.stop]) for segment in encoders)
    assert joined.state.optimizer.arena.count > alone.state.optimizer.arena.count


@pytest.mark.parametrize("model", ["sdxl-tiny", "sd3-tiny", "flux-tiny"])
def test_a_batch_of_another_bucket_has_other_latents_alone(model: str) -> None:
    case, (_, declared) = bench.BenchCase(model, 64, batch=2, device="cpu"), find(model)
    square, wide = (bench.random_batch(declared, case, bucket).arrays for bucket in (None, (48, 96)))
    channels = {"sdxl-tiny": 4}.get(model, 16)
    assert {n: wide[n].shape for n in wide if wide[n].shape != square[n].shape} == {
        "mean": (2, 6, 12, channels),
        "logvar": (2, 6, 12, channels),
    }
    assert square["mean"].shape == (2, 8, 8, channels)


def test_step_refuses_an_unknown_model() -> None:
    with pytest.raises(ConfigError, match="expected a model among sdxl"):
        bench.prepare(bench.BenchCase("sd1", device="cpu"))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("step --resolution 100", "--resolution: expected an integer from 8 to 8192, a multiple of 8, got 100"),
        ("step --resolution 72", "--resolution: expected a multiple of 32 for sdxl-tiny, got 72"),
        ("step --resolution 64 --height 72", "--height: expected a multiple of 32 for sdxl-tiny, got 72"),
        ("memory --resolution 72", "--resolution: expected a multiple of 32 for sdxl-tiny, got 72"),
        ("step --rank 5000", "--rank: expected an integer from 1 to 4096, got 5000"),
    ],
)
def test_what_cannot_be_measured_is_told_before_anything_is(
    line: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def begun(*arguments: object) -> None:
        raise AssertionError("work was begun")

    monkeypatch.setattr(lora_step, "randomise", begun)
    command, *options = line.split()
    assert cli.run(["bench", command, "--model", "sdxl-tiny", "--device", "cpu", *options]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("line", ["bench step", "bench memory", "sample -m base -p x -o x.png"])
def test_memory_that_runs_out_is_told_in_the_words_of_the_command(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*arguments: object) -> None:
        raise MemoryError("all of it is taken")

    monkeypatch.chdir(tmp_path)
    for place in ("tools.bench.lora_step.get_backend", "tools.sample.check_formats"):
        monkeypatch.setattr(f"flame_train.{place}", full)
    assert cli.run([*line.split(), "--device", "cpu"]) == 5
    told = capsys.readouterr().err
    assert "all of it is taken; try --" in told or "all of it is taken; try one --" in told
    assert "data.batch_size" not in told
    options = {word.strip(",;") for word in told.split() if word.startswith("--")}
    monkeypatch.setenv("COLUMNS", "200")
    assert cli.run([*line.split()[: 2 if "bench" in line else 1], "--help"]) == 0
    known = capsys.readouterr().out
    assert all(option in known for option in options)


def test_ops_names_the_choice_and_why_others_declined(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = {"softmin": [_small(s) for s in sizes.MORE["softmin"]]}
    monkeypatch.setattr(timing, "_TARGET_S", 0.0)
    monkeypatch.setattr(sizes, "MORE", small)
    monkeypatch.setattr(ops, "ceilings", lambda *_: Ceilings(1e12, 1e12, lambda _: 1e12))
    assert cli.run(["bench", "ops", "softmin", "--precision", "fp32", "--device", "cpu", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["ops"]
    assert {r["op"] for r in rows} == {"softmin"}
    assert all(r["implementation"] == "body" and r["us"] > 0 and r["unit"] == "TB/s" for r in rows)


def test_ops_that_memory_bounds_are_held_against_a_copy_of_their_own_size(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[int] = []

    def copy(moved: int) -> float:
        measured.append(moved)
        return 1e9

    limits = Ceilings(1e12, 2e9, copy)
    monkeypatch.setattr(timing, "_TARGET_S", 0.0)
    softmax, linear = (
        [*ops.timed(ready(REGISTRY[name], s, get_backend("cpu"), float64), "fp32", get_backend("cpu"), limits, None)]
        for name, s in (("softmax", sample((6, 5), -1)), ("linear", sample((2, 3), (4, 3))))
    )
    assert measured == [2 * 8 * 30, 3 * 8 * 30]  # input and output; g, output and gradient
    assert all(r.copy_share == pytest.approx(2 * r.share, abs=1e-3) for r in softmax)
    assert all(r.copy_share is None for r in linear)
    result = {
        "device": "cpu",
        "precision": "fp32",
        "deterministic": True,
        "ceiling TFLOP/s": 1.0,
        "ceiling TB/s": 0.002,
        "failed": {},
    }
    lines = ops.table(result | {"ops": [asdict(r) | {"ratio": r.ratio} for r in (*softmax, *linear)]}).split("\n")
    assert [("of copy" in line) for line in lines[1:]] == [True, True, False, False]
    assert all("% of ceiling" in line for line in lines[1:])


def test_a_copy_is_measured_once_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    timed: list[int] = []
    monkeypatch.setattr(ceilings_module, "seconds", lambda calls, _: timed.append(len(calls)) or 0.5)
    limits = ceilings(get_backend("cpu"), float32)
    assert limits.bandwidth == 2 * (1 << 27)
    before = len(timed)
    assert [limits.copy(n) for n in (1000, 4000, 1000, 1 << 27)] == [2000, 8000, 2000, 2 << 27]
    assert len(timed) - before == 2 * 3  # two sizes, each the least of three times


def test_the_ceiling_of_copies_is_that_of_the_best_size_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a larger one is slower, for its memory is asked of the system."""
    read = {}
    monkeypatch.setattr(ceilings_module.F, "neg", lambda source: read.update(bytes=source.data.nbytes))
    monkeypatch.setattr(ceilings_module.F, "matmul", lambda a, b: read.update(bytes=1))

    def seconds(calls: Any, _: object) -> float:
        calls[0]()
        return read["bytes"] * (1e-9 if read["bytes"] < 1 << 24 else 1e-8)

    monkeypatch.setattr(ceilings_module, "seconds", seconds)
    assert ceilings(get_backend("cpu"), float32).bandwidth == pytest.approx(2e9)


def test_ops_refuses_an_unknown_op_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"did you mean .*softmax"):
        ops.run(["sofmax"], "cpu", "fp32", None)


@pytest.mark.parametrize(
    ("name", "s", "forward", "backward"),
    [
        ("linear", sample((2, 5, 7), (3, 7), (3,)), 2 * 5 * 7 * 3, 2 * 5 * 7 * 3),
        ("matmul", sample((4, 5, 6), (4, 6, 7)), 4 * 5 * 6 * 7, 2 * 4 * 5 * 6 * 7),
        ("conv2d", sample((2, 8, 8, 3), (4, 3, 3, 3), None, 1, 1, layout="NHWC"), 4608 * 3, 4608 * 3),
        (
            "lora_linear",
            sample((2, 5, 7), (3, 7), None, (2, 7), (3, 2), 1.0),
            10 * 7 * 3 + 10 * 2 * (7 + 3),
            10 * 7 * 3 + 2 * 10 * 2 * (7 + 3),
        ),
        (
            "scaled_dot_product_attention",
            sample((2, 3, 5, 4), (2, 3, 6, 4), (2, 3, 6, 8)),
            6 * 5 * 6 * (4 + 8),
            6 * 5 * 6 * (3 * 4 + 2 * 8),
        ),
        ("silu", sample((2, 5)), 0, 0),
    ],
)
def test_arithmetic_is_counted_as_two_for_each_multiply_add(name: str, s: object, forward: int, backward: int) -> None:
    op = REGISTRY[name]
    assert op_flops(op, s, float32, wanted_of(op)) == (2 * forward, 2 * backward)


def test_memory_adds_up_and_checkpointing_keeps_less() -> None:
    plain, some, less = (
        memory.run(bench.BenchCase("sdxl-tiny", 64, 1, 2, "fp32", checkpointing, "cpu"))
        for checkpointing in ("off", "mlp", "full")
    )
    assert plain["weights"] == 4 * UNet(UNetArch.tiny()).num_weights()
    assert sum(plain["kept by op"].values()) == plain["kept"]
    assert less["kept"] < some["kept"] < plain["kept"]
    assert less["kept"] < 0.6 * plain["kept"]
    for found in (plain, some, less):
        assert found["gradients"] == found["adapters"]
        assert found["kept"] + found["workspace"] == found["peak of what ops make"]
        assert found["workspace"] > 0
    assert plain["peak of what ops make"] == sum(r["at peak"] for r in plain["by op"])
    assert {r["phase"] for r in plain["by op"]} == {"forward", "backward"}
    assert "kept for the backward pass" in memory.table(plain)


SMALL = {
    "kron_add": sample((32, 32), (4, 4), (8, 8), 1.0),
    "hadamard_add": sample((32, 32), (32, 4), (4, 32), (32, 4), (4, 32), 1.0),
    "nf4_dequantize": sample(*stored_in_4_bits(32 * 32), (32, 32), float64),
    "narrow": sample((1, 16, 24), 2, 8, 8),
    "split": sample((1, 16, 24), 8, -1),
    "getitem": sample((1, 16, 24), (slice(None), slice(4, None))),
    "fold": sample((2, 18, 16), output_size=(4, 4), kernel_size=3, padding=1),
    "cat_rms_norm": sample([(1, 5, 2, 8), (1, 3, 2, 8)], [(8,), (8,)], (8, 1, 8), (8, 1, 8)),
    "cat_group_norm_silu": sample((2, 4, 4, 6), (2, 4, 4, 2), 4, (8,), (8,), (2, 8)),
    "one_hot": sample(integers(21, 2, 4, 4), 21),
}
"""Of ops whose numbers must fit their shapes."""


def _small(s: Sample) -> Sample:
    """The sample with no dim above 32, and whole numbers below that, which may be places."""

    def cut(value: Any) -> Any:
        if isinstance(value, Values):
            top = min(value.high, 21) if value.kind == "int" else value.high  # 21: a dim that is cut no further
            return replace(value, shape=cut(value.shape), high=top)
        if isinstance(value, list):
            return [cut(v) for v in value]
        return tuple(min(n, 32) for n in value) if isinstance(value, tuple) else value

    return Sample(tuple(map(cut, s.args)), s.kwargs)


def _listed(result: Any) -> list[Any]:
    return [*result] if isinstance(result, (tuple, list)) else [result]


ALL_OPS = sorted({*sizes.STEP, *sizes.MORE})


def test_every_op_has_sizes() -> None:
    assert sorted(REGISTRY) == ALL_OPS


@pytest.mark.proof
@pytest.mark.parity
@pytest.mark.parametrize("name", ALL_OPS)
def test_ops_are_timed_against_what_computes_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(timing, "_TARGET_S", 0.0)
    monkeypatch.setattr(torch_ops, "_REPEATS", 1)
    op, cpu, limits = REGISTRY[name], get_backend("cpu"), Ceilings(1e12, 1e12, lambda _: 1e12)
    theirs_there = torch_ops.function(torch, op)
    assert (theirs_there is None) == ("quantize" in name or name.startswith(("scaled_l", "scaled_f")))
    for s in [SMALL[name]] if name in SMALL else map(_small, sizes.MORE.get(name) or sizes.STEP[name]):
        call = ready(op, s, cpu, float64)
        rows = [*ops.timed(call, "fp32", cpu, limits, "torch")]
        assert all((r.torch_us is None) == (theirs_there is None) for r in rows)
        if theirs_there is None or "rng" in s.kwargs:  # which elements fall is each program's to say
            continue
        bound = materialise(op, s, generator(name, 0), float64)
        theirs = _listed(theirs_there(**torch_ops.arguments(torch, bound)))
        for mine, other in zip(_listed(op(**bound)), theirs, strict=name != "batch_norm_train"):
            other = other.movedim(1, -1) if bound.get("layout") == "NHWC" else other
            got, want = mine.numpy().astype(np.float64), other.to(torch.float64).numpy()
            limit = {"cast": 1e-6, "timestep_embedding": 1e-5}.get(name, 1e-10)  # these compute in fp32
            assert np.linalg.norm(got - want) <= limit * np.linalg.norm(want)


@pytest.mark.parity
@pytest.mark.parametrize(
    ("name", "precision"), [("conv2d", "fp32"), ("conv2d", "tf32"), ("matmul", "tf32"), ("linear", "fp32")]
)
def test_products_of_fp32_are_timed_in_the_precision_of_their_row(
    name: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(timing, "_TARGET_S", 0.0)
    monkeypatch.setattr(torch_ops, "_REPEATS", 1)
    small = [_small(s) for s in sizes.STEP[name]]
    monkeypatch.setattr(sizes, "STEP", {name: small})
    monkeypatch.setattr(sizes, "MORE", {})
    met: list[tuple[str, bool, bool]] = []
    usual = torch_ops._timed

    def noting(*arguments: Any) -> float:
        there = torch.backends
        met.append((get_float32_matmul_precision(), there.cudnn.allow_tf32, there.cuda.matmul.allow_tf32))
        return usual(*arguments)

    monkeypatch.setattr(torch_ops, "_timed", noting)
    monkeypatch.setattr(ops, "ceilings", lambda *_: Ceilings(1e12, 1e12, lambda _: 1e12))
    result = ops.run([name], "cpu", precision, "torch")
    assert {r["precision"] for r in result["ops"]} == {precision}
    assert {*met} == {("high", True, True) if precision == "tf32" else ("highest", False, False)}
    assert get_float32_matmul_precision() == "highest"


def test_results_that_are_views_are_not_timed() -> None:
    cpu, limits = get_backend("cpu"), Ceilings(1e12, 1e12, lambda _: 1e12)
    rows = {
        name: [r.phase for r in ops.timed(ready(REGISTRY[name], s, cpu, float64), "fp32", cpu, limits, None)]
        for name, s in (
            ("permute", sample((2, 3), (1, 0))),
            ("narrow", sample((4, 5), 1, 1, 3)),
            ("roll", sample((4,), 1, 0)),
        )
    }
    assert rows == {"permute": [], "narrow": ["backward"], "roll": ["forward", "backward"]}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--checkpointing", "full", "--checkpoint-blocks", "*up_block.*"], "no block of the model"),
        (["--checkpoint-blocks", "middle_block.*"], "--checkpoint-blocks: expected --checkpointing with it"),
        (["--checkpointing", "full", "--checkpoint-blocks", "*", "--against", "torch"], "leave one out"),
    ],
)
def test_a_choice_of_blocks_that_means_nothing_is_refused(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["bench", "step", "--model", "sdxl-tiny", "--device", "cpu", *options]) == 2
    assert message in capsys.readouterr().err
