"""`bench step --against torch`: the baseline is the same network, as fast as PyTorch makes it, or says it is not."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import torch_lora_step
from benchmarks.torch_baseline import TorchBaseline, torch_baseline
from flame_train import cli
from flame_train.adapters.targets import resolve
from flame_train.engine import Tensor, nn, no_grad, tensor
from flame_train.engine.shape_run import shape_run
from flame_train.errors import EnvironmentFault
from flame_train.models.common.model import Denoiser, Model
from flame_train.models.flux3.transformer import Flux3
from flame_train.models.qwenimage.transformer import QwenImage
from flame_train.models.registry import FAMILIES, NOTHING_NAMED, Family
from flame_train.models.sd3.mmdit import MMDiT
from flame_train.models.zimage.transformer import ZImage, ZImageArch
from flame_train.networks.vae.vae import Vae, VaeArch
from flame_train.text_encoders.qwen3.network import Qwen3, Qwen3Arch
from flame_train.tools import bench
from flame_train.tools.bench import lora_step
from flame_train.tools.bench.models import find
from flame_train.training.batch import Batch

SMALL = [
    *("sdxl-tiny", "sd3-tiny", "flux-tiny", "flux2-tiny", "flux3-tiny", "zimage-tiny", "chroma-tiny", "anima-tiny"),
    *("qwen-image-tiny", "qwen-image-1-tiny", "flux2-dev-tiny", "wan-tiny"),
]


def small(name: str) -> tuple[Family, Model]:
    """The model of that name; of Z-Image one of the proportions that diffusers' class has."""
    if name != "zimage-tiny":
        return find(name)
    arch = replace(ZImageArch.tiny(), width=96, head_dim=32, hidden=256, time_dim=96, time_hidden=1024)
    networks = {"transformer": ZImage(arch), "vae": Vae(VaeArch.flux()), "text_encoder": Qwen3(Qwen3Arch.tiny())}
    return FAMILIES["zimage"], FAMILIES["zimage"].declared(networks, NOTHING_NAMED)


@pytest.fixture
def nothing_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    def begun(*arguments: object) -> None:
        raise AssertionError("work was begun")

    monkeypatch.setattr(lora_step, "prepare", begun)
    monkeypatch.setattr(torch_lora_step, "build", begun)


@pytest.mark.usefixtures("nothing_begins")
def test_against_torch_says_what_is_missing_before_anything_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_lora_step, "_NEEDED", ("no_such_package",))
    with pytest.raises(EnvironmentFault, match="no_such_package not installed; leave the option out"):
        bench.step(bench.BenchCase("sdxl-tiny", 64, rank=2, precision="fp32", device="cpu"), "torch")


@pytest.mark.usefixtures("nothing_begins")
@pytest.mark.parametrize("line", ["step --model sdxl-tiny --resolution 64 --against torch", "ops silu"])
def test_an_installed_package_says_that_comparisons_need_a_checkout(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(lora_step, "__file__", str(tmp_path / "flame_train" / "tools" / "bench" / "lora_step.py"))
    assert cli.run(["bench", *line.split(), "--device", "cpu"]) == EnvironmentFault.exit_code
    assert "expected a checkout of the repository" in capsys.readouterr().err


@pytest.mark.parity
@pytest.mark.filterwarnings("ignore:.*FluxPosEmbed:FutureWarning")
@pytest.mark.parametrize(
    ("name", "controls", "clip"),
    [*((name, 0, ()) for name in SMALL), ("qwen-image-edit-tiny", 2, ()), ("wan-tiny", 0, (9, 96))],
    ids=lambda given: str(given),
)
def test_the_baseline_is_the_same_network_and_counts_the_same_arithmetic(
    name: str, controls: int, clip: tuple[int, ...]
) -> None:
    """A clip has so many frames and a height of its own."""
    pytest.importorskip("diffusers")
    torch = pytest.importorskip("torch")
    from torch.utils.flop_counter import FlopCounterMode

    (_, declared), resolution = small(name), 64
    ours = declared.network
    model = torch_baseline(declared)
    model = model.with_controls(controls) if controls and model.with_controls else model
    model = model.with_frames(*clip) if clip and model.with_frames else model
    plain = model.build()
    assert sum(p.numel() for p in plain.parameters()) + _positions(ours) == ours.num_weights()

    loss = model.loss(torch, 1, resolution, {"device": "cpu", "dtype": torch.float32})
    written_out = torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)  # the fused one is not counted
    with FlopCounterMode(display=False) as counter, torch.no_grad(), written_out:
        loss(torch, plain)
    dropped = _at_text(ours)
    if controls:  # the last layer's outputs for 16 tokens of each
        dropped += 2 * 16 * controls * math.prod(ours.shapes()["proj_out.weight"])
    assert forward_flops(declared, resolution, controls, *clip) + dropped == counter.get_total_flops()


def forward_flops(model: Model, resolution: int, controls: int = 0, frames: int = 1, height: int | None = None) -> int:
    """What the network multiplies for one image, without adapters, by a run on shapes."""
    with shape_run() as run, no_grad():
        nn.allocate(model.network, dtype="fp32", device="cuda")
        denoiser = Denoiser.of(model, model.network, "cuda", 1.0)
        case = bench.BenchCase(resolution=resolution, height=height)
        host = bench.random_batch(model, case, controls=controls, frames=frames)
        batch = Batch(host, run.backend, "fp32")
        mean, _ = batch.latents()
        made = run.multiplied(lambda: denoiser.denoise(mean, zeros(1).to("cuda"), batch.conditioning()))
        return sum(made.values())


def zeros(*shape: int) -> Tensor:
    return tensor(np.zeros(shape, np.float32))


def _positions(network: object) -> int:
    """SD3's table of positions, which diffusers keeps among its buffers."""
    return math.prod(network.shapes()["pos_embed"]) if isinstance(network, MMDiT) else 0


def _at_text(network: object) -> int:
    """What diffusers computes and drops, or computes again and again.

    Of Z-Image: 16 tokens that are embedded as padding, and the last layer's outputs for 512 of the text and these 16.
    Of Qwen-Image 2.1: the last layer's outputs for 512 tokens of the text, and the last norm's scale at time 0.
    Of FLUX.3: modulations of every token, where one row does for all of a kind; 512 of the text, 16 of the image.
    """
    if isinstance(network, Flux3):
        shapes = network.shapes()
        of_kind = sum(math.prod(shapes[f"{when}_stream_modulations.txt.lin.weight"]) for when in ("early", "single"))
        last = math.prod(shapes["final_layer.image.adaLN_modulation.1.weight"])
        return 2 * (of_kind * (512 - 1) + (of_kind + last) * (16 - 1))
    if isinstance(network, QwenImage):
        shapes = network.shapes()
        return 2 * (512 * math.prod(shapes["proj_out.weight"]) + math.prod(shapes["norm_out.linear.weight"]))
    return 2 * (16 + 528) * math.prod(network.shapes()["x_embedder.weight"]) if isinstance(network, ZImage) else 0


@pytest.mark.parity
@pytest.mark.filterwarnings("ignore:.*FluxPosEmbed:FutureWarning")
@pytest.mark.parametrize("name", SMALL)
def test_the_baseline_adapts_the_same_layers(name: str) -> None:
    pytest.importorskip("diffusers")
    torch = pytest.importorskip("torch")
    family, declared = small(name)
    ours = declared.network
    _, trained = torch_lora_step.build(torch, torch_baseline(declared), 4, "fp32", False, "cpu")
    layers = resolve(ours, (family.bench_targets,), declared.presets)
    reached = sum(int(np.prod(ours.shapes()[f"{n}.weight"])) for n in layers)
    pairs = zip(trained[::2], trained[1::2], strict=True)
    assert sum(a.shape[1] * b.shape[0] for a, b in pairs) == reached


@pytest.mark.parity
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # the compiler's own look at its tensors
def test_against_torch_measures_both_and_nothing_is_left_uncompiled(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("diffusers")
    compile_blocks = partial(torch_lora_step.compile_blocks, backend="eager")
    monkeypatch.setattr(torch_lora_step, "compile_blocks", compile_blocks)
    argv = ["bench", "step", "--model", "sdxl-tiny", "--resolution", "64", "--precision", "fp32", "--rank", "2"]
    assert cli.run([*argv, "--device", "cpu", "--against", "torch-compiled", "--json"]) == 0
    out, err = capsys.readouterr()
    result = json.loads(out)
    assert result["ratio"] == pytest.approx(result["eager_ms"] / result["torch"]["ms"], abs=1e-4)  # it has four digits
    assert result["torch"]["left_eager"] == 0
    assert "calls uncompiled" not in err


@pytest.mark.usefixtures("nothing_begins")
@pytest.mark.parametrize(
    "option",
    [
        *("--quantize fp8", "--checkpointing mlp", "--checkpointing offload", "--quantize fp8 --arithmetic fp8"),
        "--height 96",
    ],
)
def test_what_pytorch_would_not_do_likewise_is_refused(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["bench", "step", "--model", "sdxl-tiny", "--device", "cpu", "--against", "torch", *option.split()]
    assert cli.run(argv) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert f"PyTorch's step has no counterpart of {option.partition(' --')[0]}" in told
    assert "leave one out" in told


@pytest.mark.parity
def test_checkpointed_blocks_are_checkpointed_by_pytorch_too(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("diffusers")
    calls = []
    monkeypatch.setattr(torch.utils.checkpoint, "checkpoint", lambda fn, *args, **_: calls.append(fn) or fn(*args))
    bench.step(bench.BenchCase("sdxl-tiny", 64, rank=2, precision="fp32", checkpointing="full", device="cpu"), "torch")
    assert calls


def _torch_baseline(name: str) -> TorchBaseline:
    return torch_baseline(find(name)[1])


def _blocks(torch: Any, shapes: int) -> Any:
    """One class of module, each of its own shape, as residual blocks of a UNet are."""

    class Block(torch.nn.Linear):
        def forward(self, x: Any) -> Any:
            return super().forward(x).sin()

    return torch.nn.ModuleList(Block(n, n) for n in range(2, shapes + 2))


def _compile(torch: Any, shapes: int) -> tuple[int, int]:
    """(graphs compiled, calls given up) of that many shapes."""
    torch._dynamo.reset()
    compiled, given_up = [], torch_lora_step.calls_given_up(torch)

    def backend(graph: Any, _: object) -> Callable[..., Any]:
        compiled.append(graph)
        return graph.forward

    blocks = _blocks(torch, shapes)
    torch_lora_step.compile_blocks(torch, blocks, ["Block"], backend)
    for block in blocks:
        block(torch.ones(1, block.in_features))
    return len(compiled), torch_lora_step.calls_given_up(torch) - given_up


@pytest.mark.parity
def test_every_shape_of_a_block_is_compiled_for_itself() -> None:
    torch = pytest.importorskip("torch")
    assert _compile(torch, 12) == (12, 0)


@pytest.mark.parity
def test_more_shapes_than_the_compiler_takes_are_counted() -> None:
    torch = pytest.importorskip("torch")
    compiled, given_up = _compile(torch, 70)
    assert compiled < 70
    assert given_up > 0


@pytest.mark.parity
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # the compiler's own look at its tensors
def test_what_is_left_uncompiled_is_in_the_result_and_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("diffusers")
    monkeypatch.setattr(torch_lora_step, "_RECOMPILE_LIMIT", 1)
    compile_blocks = partial(torch_lora_step.compile_blocks, backend="eager")
    monkeypatch.setattr(torch_lora_step, "compile_blocks", compile_blocks)
    with caplog.at_level(logging.WARNING, "flame_train"):
        found = torch_lora_step.run(_torch_baseline("sdxl-tiny"), 64, 1, 2, "fp32", False, "cpu", True)
    assert found["left_eager"] > 0
    assert "calls uncompiled" in caplog.text


@pytest.mark.parity
def test_convolutions_are_given_channels_last() -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("diffusers")
    model = _torch_baseline("sdxl-tiny")
    network, _ = torch_lora_step.build(torch, model, 2, "fp32", False, "cpu")
    layers = [layer for layer in network.modules() if isinstance(layer, torch.nn.Conv2d)]
    given = [layer.weight for layer in layers]
    network.conv_in.register_forward_pre_hook(lambda _, inputs: given.append(inputs[0]))
    model.loss(torch, 2, 64, {"device": "cpu", "dtype": torch.float32})(torch, network)
    assert len(given) == len(layers) + 1
    assert all(t.is_contiguous(memory_format=torch.channels_last) for t in given)
