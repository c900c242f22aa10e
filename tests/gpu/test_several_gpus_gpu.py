"""A second GPU of one machine: tensors, gradients across both, a captured step, training on the second alone."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import flame_train.engine as flame
from flame_train.engine import functional as F
from flame_train.engine import nn, optim
from flame_train.engine.backend import get_backend
from flame_train.errors import EnvironmentFault
from flame_train.io.safetensors import SafetensorsFile
from tests.engine.backend.test_cuda_kernel import SOURCE

pytestmark = pytest.mark.gpu


@pytest.fixture
def second() -> str:
    try:
        get_backend("cuda:1")
    except EnvironmentFault as e:
        pytest.skip(f"needs two GPUs: {e}")
    return "cuda:1"


def test_the_first_has_two_names() -> None:
    x = flame.tensor([1.0], device="cuda:0")
    assert x.device == "cuda"
    assert x.to("cuda") is x


def test_one_that_is_not_there_is_named() -> None:
    with pytest.raises(EnvironmentFault, match=r"cuda:99 is not there; this machine has cuda:0 \("):
        flame.tensor([1.0], device="cuda:99")


def test_gradients_cross_from_one_to_the_other(second: str) -> None:
    a = np.random.default_rng(0).normal(size=(65, 33)).astype(np.float32)
    x = flame.tensor(a, device="cuda", requires_grad=True)
    w = flame.tensor(a.T.copy(), device=second, requires_grad=True)
    y = F.gelu(x * 2.0).to(second) @ w
    assert y.device == second
    loss = (y.softmax(-1).to("cuda") * x.detach()[:, :1]).sum()
    flame.backward(loss)
    assert (x.grad.device, w.grad.device) == ("cuda", second)
    host, hw = (flame.tensor(v, requires_grad=True) for v in (a, a.T.copy()))
    flame.backward(((F.gelu(host * 2.0) @ hw).softmax(-1) * host.detach()[:, :1]).sum())
    np.testing.assert_allclose(x.grad.numpy(), host.grad.numpy(), rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(w.grad.numpy(), hw.grad.numpy(), rtol=1e-3, atol=1e-4)


def test_tensors_on_two_gpus_do_not_meet(second: str) -> None:
    with pytest.raises(RuntimeError, match="input on cuda, other on cuda:1"):
        flame.tensor([1.0], device="cuda") + flame.tensor([1.0], device=second)


def test_a_step_on_the_second_equals_one_on_the_first(second: str) -> None:
    rng = np.random.default_rng(1)
    images = rng.normal(size=(8, 8, 8, 3)).astype(np.float32)
    losses = {}
    for device in ("cuda", second):
        model = nn.Conv2d(3, 16, 3, padding=1)
        model.init(np.random.default_rng(0), device=device)
        model.requires_grad_()
        optimizer = optim.AdamW(model.named_parameters(), lr=1e-2)
        x = flame.tensor(images, device=device)
        out = flame.tensor(np.zeros((), np.float32), device=device)

        def step(model=model, optimizer=optimizer, x=x, out=out) -> None:
            optimizer.zero_grad()
            loss = F.silu(model(x)).square().mean()
            loss.backward()
            optimizer.step()
            out.copy_(loss.detach())

        captured, losses[device] = flame.capture(step, device), []
        for _ in range(5):
            captured()
            losses[device].append(out.item())
    assert losses[second] == losses["cuda"]
    assert losses["cuda"][-1] < losses["cuda"][0]


def test_tensors_go_to_and_fro(second: str) -> None:
    """Whole ones, views and every kind of number; what is made there stays there, whichever is current."""
    a = np.random.default_rng(2).normal(size=(7, 5)).astype(np.float32)
    x = flame.tensor(a, device="cuda")
    for view, want in ((x, a), (x.T, a.T), (x[1::2], a[1::2])):
        there = view.to(second)
        assert there.device == second
        np.testing.assert_array_equal(there.numpy(), want)
        np.testing.assert_array_equal(there.to("cuda").numpy(), want)
    for dtype in ("bfloat16", "float16", "float64", "int64", "bool"):
        there = x.to(dtype).to(second)
        np.testing.assert_array_equal(there.numpy(), x.to(dtype).numpy())
    assert x.to(second, "float16").device == second
    there = x.to(second)
    assert there.to(second) is there
    made = [flame.zeros(3, device=second), flame.randn(3, device=second), flame.arange(3, device=second)]
    for t in made:
        assert (t.device, (t + 1).device, (t * t).sum().device) == (second,) * 3
    flame.manual_seed(5)
    first = flame.randn(1000, device="cuda").numpy()
    flame.manual_seed(5)
    np.testing.assert_array_equal(flame.randn(1000, device=second).numpy(), first)
    flame.set_default_device(second)
    assert flame.ones(2).device == second


def test_kernels_of_every_kind_run_on_each_by_turns(second: str) -> None:
    """Generated ones, products, plans of cuDNN, files, rows and an own one: compiled, tuned and kept for each GPU."""
    rng = np.random.default_rng(3)
    scale = flame.cuda_kernel(SOURCE, "scale")
    shifted = flame.elementwise(lambda x: F.silu(x + 1))
    image, weight = rng.normal(size=(2, 8, 16, 16)), rng.normal(size=(16, 8, 3, 3)) / 8
    query = rng.normal(size=(1, 4, 128, 64))

    def results(device: str) -> list[np.ndarray]:
        x, w, q = (flame.tensor(a.astype(np.float32), "bfloat16", device) for a in (image, weight, query))
        x.requires_grad_()
        h = F.group_norm(shifted(F.conv2d(x, w, padding=1)), 4)
        flame.backward(h.float().square().sum())
        scaled, n = flame.zeros(h.numel(), device=device), h.numel()
        scale(-(-n // 128), 128, h.detach().float().reshape(n).contiguous(), scaled, 2.0, n)
        attended = F.scaled_dot_product_attention(q, q, q)
        found = [h.detach(), x.grad, attended, F.softmax(q, -1), scaled, F.max_pool2d(h.detach(), 2)]
        assert {t.device for t in found} == {device}
        return [t.float().numpy() for t in found]

    turns = [results(device) for device in ("cuda", second, "cuda", second)]
    for turn in turns[1:]:
        for got, want in zip(turn, turns[0], strict=True):
            np.testing.assert_array_equal(got, want)


def test_each_has_its_own_stream_and_memory(second: str) -> None:
    first, other = get_backend("cuda"), get_backend(second)
    assert first.stream.ptr != other.stream.ptr
    before = first.memory().live
    big = flame.zeros(1 << 20, device=second)
    assert first.memory().live == before
    assert other.memory().live >= big.data.nbytes

    def on(device: str, found: dict[str, np.ndarray]) -> None:
        x = flame.tensor(np.ones((256, 256), np.float32), device=device)
        for _ in range(50):
            x = (x @ x) / 256
        found[device] = x.numpy()

    found: dict[str, np.ndarray] = {}
    threads = [threading.Thread(target=on, args=(device, found)) for device in ("cuda", second)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for device in ("cuda", second):
        np.testing.assert_array_equal(found[device], np.ones((256, 256), np.float32))


def test_captured_steps_of_both_are_replayed_by_turns(second: str) -> None:
    steps, outs = {}, {}
    for device in ("cuda", second):
        x, outs[device] = flame.ones(64, 64, device=device), flame.zeros(64, 64, device=device)

        def step(x=x, out=outs[device]) -> None:
            out.copy_(out + F.softmax(x @ x, -1))

        steps[device] = flame.capture(step, device)
    for _ in range(6):
        for step in steps.values():
            step()
    for out in outs.values():
        np.testing.assert_allclose(out.numpy(), np.full((64, 64), 6 / 64), rtol=1e-5)


def test_a_run_on_the_second_writes_the_bytes_of_one_on_the_first(
    second: str, small_base: Path, drawn: Path, tmp_path: Path
) -> None:
    """By the command, with samples and a checkpoint, all on the GPU that `--device` names."""

    def run(device: str) -> dict[str, bytes]:
        folder = tmp_path / device.replace(":", "-")
        keys = {
            "model.checkpoint": small_base,
            "data.path": drawn,
            "data.resolution": 96,
            "data.bucket_step": 32,
            "lora.rank": 4,
            "lora.alpha": 4.0,
            "train.steps": 6,
            "checkpoint.every": 3,
            "sample.every": 6,
            "sample.steps": 2,
            "output.dir": folder,
        }
        (tmp_path / "config.toml").write_text("")
        settings = [word for key, value in keys.items() for word in ("--set", f"{key}={value}")]
        command = [sys.executable, "-m", "flame_train", "sdxl-lora", "--config", str(tmp_path / "config.toml")]
        done = subprocess.run([*command, *settings, "--device", device], capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        with SafetensorsFile(folder / "lora.safetensors") as file:
            return {name: np.asarray(file.read(name)).tobytes() for name in file.names}

    assert run("cuda") == run(second)
