"""Kernels that add their gradient to one that is already there, and layers joined in one product."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import flame_train.engine as flame
from flame_train.adapters.attach import attach
from flame_train.adapters.targets import UNET_PRESETS, resolve
from flame_train.engine import Tensor
from flame_train.engine import functional as F
from flame_train.engine.backend import get_backend
from flame_train.engine.dtype import bfloat16, float32
from flame_train.engine.mode import op_hooks
from flame_train.engine.optim import FlatParameters
from flame_train.models.flux import family as flux
from flame_train.models.flux.transformer import Flux, FluxArch
from flame_train.models.sd3 import family as sd3
from flame_train.models.sd3.mmdit import MMDiT, MMDiTArch
from flame_train.models.sdxl.unet import UNet, UNetArch

pytestmark = pytest.mark.gpu

Leaves = dict[str, Tensor]
SHAPES = {
    "x": (2, 24, 64),
    "w": (64, 64),
    "b": (64,),
    "down": (8, 64),
    "up": (64, 8),
    **{f"w{i}": (64, 64) for i in range(3)},
    **{f"down{i}": (8, 64) for i in range(3)},
    **{f"up{i}": (64, 8) for i in range(3)},
}


def three(t: Leaves, name: str) -> list[Tensor]:
    return [t[f"{name}{i}"] for i in range(3)]


def with_input(op: Callable[[Leaves, Tensor], Tensor]) -> Callable[[Leaves], Tensor]:
    """op(h) + h, so that h's gradient is there before op's arrives."""

    def case(t: Leaves) -> Tensor:
        h = t["x"] * 3
        return op(t, h) + h

    return case


CASES: dict[str, Callable[[Leaves], Tensor]] = {
    "layer_norm": with_input(lambda t, h: F.layer_norm(h, (64,), t["b"], t["b"])),
    "group_norm": with_input(lambda t, h: F.group_norm(h, 8, t["b"], t["b"], layout="NHWC")),
    "group_norm_silu": with_input(lambda t, h: F.group_norm_silu(h, 8, t["b"], t["b"], layout="NHWC")),
    "group_norm_silu, weight and bias apart": with_input(
        lambda t, h: F.group_norm_silu(h, 8, t["b"], t["b"] * 2, layout="NHWC")
    ),
    "linear": with_input(lambda t, h: F.linear(h, t["w"], t["b"])),
    "linear_add": with_input(lambda t, h: F.linear_add(h, t["w"], t["b"], F.silu(t["x"]))),
    "linear_add of itself": with_input(lambda t, h: F.linear_add(h, t["w"], None, h)),
    "lora_linear": with_input(lambda t, h: F.lora_linear(h, t["w"], t["b"], t["down"], t["up"], 0.5)),
    "lora_linear of itself": with_input(lambda t, h: F.lora_linear(h, t["w"], None, t["down"], t["up"], 0.5, h)),
    "lora_linears": with_input(
        lambda t, h: F.cat(F.lora_linears(h, three(t, "w"), three(t, "down"), three(t, "up"), 0.5), -1)[..., 5:69]
    ),
}


def gradients(case: str, device: str, packed: bool) -> dict[str, np.ndarray]:
    """What two backward passes leave in every leaf."""
    rng = np.random.default_rng(7)
    leaves = {
        n: flame.tensor(rng.standard_normal(s) * s[-1] ** -0.5, "float32", device, requires_grad=True)
        for n, s in SHAPES.items()
    }
    if packed:
        FlatParameters(leaves)
    for _ in range(2):
        CASES[case](leaves).square().sum().backward()
    return {n: t.grad.numpy() for n, t in leaves.items() if t.grad is not None}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_sums_equal_those_of_the_cpu(case: str, packed: bool) -> None:
    truth, got = gradients(case, "cpu", packed), gradients(case, "cuda", packed)
    assert truth.keys() == got.keys()
    for name, g in got.items():
        np.testing.assert_allclose(g, truth[name], rtol=1e-4, atol=2e-5 * np.abs(truth[name]).max(), err_msg=name)


@pytest.mark.parametrize("held", [False, True], ids=["assigned", "added"])
@pytest.mark.parametrize("size", [(136, 72), (3080, 2600)], ids=["few tiles", "many"])
@pytest.mark.parametrize(("rank", "layers", "rows"), [(16, 1, 600), (16, 3, 1024), (48, 1, 4111), (32, 2, 512)])
def test_the_factors_gradients_are_those_of_fp64(
    rank: int, layers: int, rows: int, size: tuple[int, int], held: bool
) -> None:
    width, out = size
    rng = np.random.default_rng(3)

    def drawn(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(bfloat16)

    x, weights = drawn(1, rows, width), [drawn(out, width) for _ in range(layers)]
    downs, ups = ([drawn(*s).astype(np.float32) * 0.1 for _ in range(layers)] for s in ((rank, width), (out, rank)))
    g = [drawn(1, rows, out) for _ in range(layers)]
    found = []
    for _ in range(2):
        leaves = {
            f"{n}{i}": flame.Parameter(get_backend("cuda").to_device(v), f"{n}{i}")
            for n, vs in (("down", downs), ("up", ups))
            for i, v in enumerate(vs)
        }
        arena = FlatParameters(leaves, compute_dtype=bfloat16)
        if held:
            arena.grads[...] = 3.0
        else:
            for p in leaves.values():
                p.grad = None
        made = F.lora_linears(
            flame.tensor(x, device="cuda"),
            [flame.tensor(w, device="cuda") for w in weights],
            [leaves[f"down{i}"].compute_copy for i in range(layers)],
            [leaves[f"up{i}"].compute_copy for i in range(layers)],
            0.5,
        )
        flame.backward(made, [flame.tensor(v, device="cuda") for v in g])
        arena.collect_grads()
        found.append(arena.split(arena.grads))
    x64 = x[0].astype(np.float64)
    for i in range(layers):
        d, u, g64 = (a.astype(bfloat16).astype(np.float64) for a in (downs[i], ups[i], g[i][0]))
        truth = {f"down{i}": 0.5 * (g64 @ u).T @ x64, f"up{i}": g64.T @ (0.5 * x64 @ d.T)}
        for name, want in truth.items():
            got = found[0][name] - (3.0 if held else 0.0)
            assert np.linalg.norm(got - want) <= 2**-7 * np.linalg.norm(want), name
            np.testing.assert_array_equal(found[1][name], found[0][name])


class Seen:
    """Counts ops."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    def before(self, op: str, phase: str, arrays: list[object]) -> None:
        self.counts[f"{op} {phase}"] = self.counts.get(f"{op} {phase}", 0) + 1

    def after(self, op: str, phase: str, arrays: list[object]) -> None:
        pass


def lora_gradients(device: str, dtype: object, checkpointing: str) -> tuple[dict[str, np.ndarray], Seen]:
    unet = UNet(UNetArch.tiny(64))
    unet.init(np.random.default_rng(0), dtype, device)
    if device == "cuda":
        unet.pack_contiguous()
    unet.checkpointing = checkpointing
    attached = attach(unet, resolve(unet, ("attention",), UNET_PRESETS), rank=8, alpha=8.0, seed=0)
    rng = np.random.default_rng(1)
    for adapter in attached.adapters.values():
        adapter.up.data[...] = get_backend(device).to_device(
            rng.standard_normal(adapter.up.shape).astype(np.float32) * 0.1
        )
    arena = FlatParameters(attached.parameters(), compute_dtype=dtype)
    a = unet.arch
    x, context, vector = (
        flame.tensor(rng.standard_normal(s), dtype, device)
        for s in ((2, 16, 16, 4), (2, 77, a.context_dim), (2, a.adm_in_channels))
    )
    seen = Seen()
    with op_hooks(seen):
        unet(x, flame.tensor(np.array([3, 700]), device=device), context, vector).float().square().mean().backward()
    return arena.split(arena.grads), seen


def test_a_unets_adapters_get_the_gradients_of_the_cpu() -> None:
    truth, _ = lora_gradients("cpu", float32, "off")
    got, seen = lora_gradients("cuda", float32, "off")
    blocks = sum(UNetArch.tiny(64).transformer_depth[1:]) * 5 + UNetArch.tiny(64).transformer_depth[-1]
    assert seen.counts["lora_linears forward"] == blocks + 2, "an image's projections a block, the text's a width"
    for name, g in got.items():
        assert np.linalg.norm(g - truth[name]) <= 1e-4 * np.linalg.norm(truth[name]), name


@pytest.mark.parametrize("checkpointing", ["full", "offload", "mlp"])
@pytest.mark.parametrize("dtype", [float32, bfloat16], ids=lambda d: d.name)
def test_recomputation_changes_no_bit(dtype: object, checkpointing: str) -> None:
    plain, _ = lora_gradients("cuda", dtype, "off")
    again, _ = lora_gradients("cuda", dtype, checkpointing)
    for name, g in plain.items():
        np.testing.assert_array_equal(again[name], g, err_msg=name)


def test_what_is_parked_on_the_host_comes_back_in_a_captured_step() -> None:
    x = flame.tensor(np.ones((40, 64)), "float32", "cuda", requires_grad=True)
    found = flame.tensor(np.zeros((40, 64)), "float32", "cuda")

    def step(offload: bool) -> None:
        y = x
        for _ in range(3):
            y = flame.checkpoint(lambda h: F.silu(h) * h, y * 1.5, offload=offload)
        y.square().sum().backward()
        found.data[...] = x.grad.data
        x.grad = None

    replay = flame.capture(lambda: step(True), "cuda")
    for seed in range(4):
        x.data[...] = get_backend("cuda").to_device(np.random.default_rng(seed).standard_normal((40, 64), np.float32))
        replay()
        away = found.numpy().copy()
        step(False)
        np.testing.assert_array_equal(away, found.numpy())


FLOW: dict[str, tuple[Callable[[], Any], str]] = {
    "flux": (lambda: Flux(FluxArch.tiny()), "attention+mlp"),
    "sd3": (lambda: MMDiT(MMDiTArch.tiny(dual=(0, 1))), "attention"),
}


def flow_gradients(name: str, device: str, drawn: Any, dtype: Any, checkpointing: str = "off") -> dict[str, Any]:
    """The adapters' gradients in a network with joint attention; values are drawn in one dtype, used in another."""
    network, targets = FLOW[name][0](), FLOW[name][1]
    network.init(np.random.default_rng(0), drawn)
    for _, module, attr, _ in network.named_specs():
        setattr(module, attr, flame.Frozen(get_backend(device).to_device(getattr(module, attr).numpy().astype(dtype))))
    network.checkpointing = checkpointing
    attached = attach(
        network,
        resolve(network, (targets,), {"flux": flux.PRESETS, "sd3": sd3.PRESETS}[name]),
        rank=16,
        alpha=16.0,
        seed=0,
    )
    rng = np.random.default_rng(1)
    for adapter in attached.adapters.values():
        for p in (adapter.down, adapter.up):
            p.data[...] = get_backend(device).to_device(
                (rng.standard_normal(p.shape) * 0.1).astype(drawn).astype(np.float32)
            )
    arena = FlatParameters(attached.parameters(), compute_dtype=None if dtype == np.float64 else dtype)
    arch = network.arch
    shapes = [(2, 16, 16, 16), (2, 7, arch.context_dim), (2, arch.pooled_dim)]
    x, context, pooled = (
        flame.tensor(rng.standard_normal(s).astype(drawn).astype(dtype), device=device) for s in shapes
    )
    times = flame.tensor(np.array([3.0, 700.0], np.float32), device=device)
    guidance = (flame.tensor(np.array([3.5, 1.0], np.float32), device=device),) if name == "flux" else ()
    y = network(x, times, context, pooled, *guidance)
    flame.backward([y], [flame.tensor(rng.standard_normal(y.shape).astype(drawn).astype(dtype), device=device)])
    arena.collect_grads()
    return arena.split(arena.grads)


@pytest.mark.parametrize("dtype", [float32, bfloat16], ids=lambda d: d.name)
@pytest.mark.parametrize("name", FLOW)
def test_a_joint_attentions_adapters_get_the_gradients_of_fp64(name: str, dtype: Any) -> None:
    truth = flow_gradients(name, "cpu", dtype, np.dtype(np.float64))
    plain, got = (flow_gradients(name, device, dtype, dtype) for device in ("cpu", "cuda"))
    for n, want in truth.items():
        near, far = (np.linalg.norm(g[n].astype(np.float64) - want) for g in (got, plain))
        assert near <= 2.0 * far + float(ml_dtypes.finfo(dtype).eps) * np.linalg.norm(want), n


@pytest.mark.parametrize("checkpointing", ["full", "mlp"])
@pytest.mark.parametrize("name", FLOW)
def test_recomputing_a_joint_attention_changes_no_bit(name: str, checkpointing: str) -> None:
    plain, again = (flow_gradients(name, "cuda", bfloat16, bfloat16, how) for how in ("off", checkpointing))
    for n, g in plain.items():
        np.testing.assert_array_equal(again[n], g, err_msg=n)
