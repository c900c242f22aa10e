"""Encoders at their published widths: captured, in batches, and an item's bytes the same alone and in any company."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from flame_train.engine import Tensor, nn, no_grad, tensor
from flame_train.engine.backend import get_backend
from flame_train.engine.dtype import as_dtype
from flame_train.networks.fixed_batch import FixedBatches
from flame_train.networks.vae.autoencoder import LoadedVae
from flame_train.networks.vae.vae import Vae, VaeArch
from flame_train.text_encoders.clip.encoder import encode_windows_on, end_positions
from flame_train.text_encoders.clip.network import ClipArch, ClipTextEncoder
from flame_train.text_encoders.t5.network import T5Arch, T5Encoder
from flame_train.tools.bench import randomise

pytestmark = pytest.mark.gpu

DTYPES = pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])


def on_gpu(network: nn.Module, dtype: str) -> Any:
    randomise(network, as_dtype(dtype), get_backend("cuda"))
    return network


def check(batches: FixedBatches, items: list[dict[str, Any]]) -> None:
    """All items alone, twice, since the first call is not captured; then in other places and in other company."""
    with no_grad():
        for _ in range(2):
            alone = [batches.start([item])()[0] for item in items]
        assert all(np.isfinite(array.astype(np.float32)).all() for made in alone for array in made.values())
        assert len({array.tobytes() for made in alone for array in made.values()}) == len(items) * len(alone[0])
        size = batches._size(items[0])
        orders = [list(range(len(items))), [*reversed(range(len(items)))], [0] * 3 + [1], [*range(1, len(items)), 0]]
        for order in orders:
            given = [items[i] for i in order][:size]
            for index, made in zip(order, batches.start(given)(), strict=False):
                for name, array in made.items():
                    assert array.tobytes() == alone[index][name].tobytes(), (order, index, name)


@DTYPES
@pytest.mark.parametrize("windows", [1, 3])
@pytest.mark.parametrize("which", ["clip_l", "bigg"])
def test_clip(which: str, windows: int, dtype: str) -> None:
    arch = getattr(ClipArch, which)()
    arch = ClipArch(arch.width, 3, arch.heads, arch.hidden, arch.activation, arch.projection)
    network = on_gpu(ClipTextEncoder(arch), dtype)
    rng, kind = np.random.default_rng(0), as_dtype(dtype)
    count = max(1, 32 // windows)

    def encode(given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        states, pooled = encode_windows_on(network, given["ids"], given["ends"], unprojected=True)
        assert pooled is not None
        return {"states": states, "pooled": pooled}

    def caption() -> dict[str, Any]:
        ids = rng.integers(1000, 40000, (windows, 77)).astype(np.int32)
        ids[:, 0], ids[:, rng.integers(5, 77) :] = 49406, 49407
        return {"ids": ids, "ends": end_positions(ids)}

    results = {
        "states": ((75 * windows + 2, arch.width), kind),
        "pooled": ((arch.projection or arch.width,), kind),
    }
    check(FixedBatches(encode, lambda _: results, lambda _: count, "cuda"), [caption() for _ in range(count)])


@DTYPES
@pytest.mark.parametrize(("length", "count"), [(77, 53), (256, 16), (512, 8)])
def test_t5(length: int, count: int, dtype: str) -> None:
    network = on_gpu(T5Encoder(T5Arch(4096, 2, 64, 64, 10240, 32128, 32)), dtype)
    rng, kind = np.random.default_rng(0), as_dtype(dtype)
    batches = FixedBatches(
        lambda given: {"t5": network(given["ids"])}, lambda _: {"t5": ((length, 4096), kind)}, lambda _: count, "cuda"
    )
    check(batches, [{"ids": rng.integers(0, 32000, length).astype(np.int32)} for _ in range(min(count, 9))])


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("size", [(1024, 1024), (512, 512), (384, 640), (256, 320)], ids=str)
def test_vae(size: tuple[int, int], dtype: str) -> None:
    vae = LoadedVae(on_gpu(Vae(VaeArch.sdxl()), dtype), "cuda")
    rng = np.random.default_rng(0)
    images = [rng.integers(0, 256, (*size, 3), np.uint8) for _ in range(3)]
    check(vae.encoder(), [vae.inputs(image) for image in images])


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_an_image_gives_what_the_network_gives_by_itself(dtype: str) -> None:
    """One that is a batch of its own: captured or not, the bytes are those of the cache's earlier entries."""
    vae = LoadedVae(on_gpu(Vae(VaeArch.sdxl()), dtype), "cuda")
    pixels = np.random.default_rng(0).integers(0, 256, (1024, 768, 3), np.uint8)
    with no_grad():
        scaled = pixels.astype(np.float32)[None] / 127.5 - 1.0
        mean, logvar = vae.network.encode_moments(tensor(scaled, vae.network.dtype, "cuda"))
        encoder = vae.encoder()
        for _ in range(3):
            made = encoder.start([vae.inputs(pixels)])()[0]
            assert made["mean"].tobytes() == mean.float().numpy()[0].tobytes()
            assert made["logvar"].tobytes() == logvar.float().numpy()[0].tobytes()
