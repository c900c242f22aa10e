"""Blocks whose weights wait on the host: no bit differs, copies are awaited, buffers are few, and some are refused."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flame_train.config.load import from_options
from flame_train.data.samples import EncoderInput
from flame_train.engine import nn, no_grad
from flame_train.engine.shape_run import H100, shape_run
from flame_train.errors import ConfigError, DeviceFault
from flame_train.models.registry import FAMILIES, NOTHING_NAMED
from flame_train.run.check.adapted_layers import block_sizes, blocks_named, blocks_of_share, blocks_streamed
from flame_train.run.check.check_run import storage_of
from flame_train.run.encode.encoders import load_encoders
from flame_train.run.plan.encoding import Encoding
from flame_train.run.train.sample_grids import load_preview
from flame_train.tools import bench
from flame_train.tools.bench.models import find, names
from flame_train.training.step import batch_losses
from tests.late_copies import late_copies

MODELS = tuple(name for name in names() if name.endswith("-tiny"))


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """How often each block was copied to the device. Its copies arrive late."""
    return late_copies(monkeypatch)


def prepared(model: str, *settings: str, **how: Any) -> bench.Prepared:
    given = {"precision": "fp32", "checkpointing": "full", "device": "cpu"} | how
    return bench.prepare(bench.BenchCase(model, 64, 2, 2, settings=settings, **given))


def trained(p: bench.Prepared) -> bytes:
    """The trained values after two steps, to the bit."""
    for _ in range(2):
        p.step()
    values: bytes = p.state.optimizer.arena.values.tobytes()
    return values


@pytest.mark.parametrize("offload", ["1.0", pytest.param("0.4", marks=pytest.mark.proof)])
@pytest.mark.parametrize("model", MODELS)
def test_streamed_blocks_train_to_the_bits_of_resident_ones(model: str, offload: str, copied: Counter[int]) -> None:
    """Whatever runs finds its weights arrived, and none is overwritten before it has run."""
    resident = trained(prepared(model))
    assert trained(prepared(model, f"model.offload={offload}")) == resident
    assert copied


@pytest.mark.parametrize(
    "how",
    [
        {"quantize": "fp8"},
        {"quantize": "int8"},
        {"quantize": "nf4"},
        {"settings": "lora.kind=dora"},
        pytest.param({"checkpointing": "offload"}, marks=pytest.mark.proof),
        pytest.param({"settings": "lora.kind=lokr"}, marks=pytest.mark.proof),
    ],
    ids=str,
)
def test_whatever_the_weights_are_stored_in_and_adapted_by(how: dict[str, Any], copied: Counter[int]) -> None:
    given = {name: value for name, value in how.items() if name != "settings"}
    settings = [how["settings"]] if "settings" in how else []
    resident = trained(prepared("flux-tiny", *settings, **given))
    assert trained(prepared("flux-tiny", *settings, "model.offload=1.0", **given)) == resident
    assert copied


@pytest.mark.parametrize("family", FAMILIES)
def test_captions_are_encoded_to_the_bits_of_resident_encoders(
    family: str, copied: Counter[int], tmp_path: Path
) -> None:
    FAMILIES[family].write_small_base(tmp_path, 3)
    model = FAMILIES[family].open(replace(NOTHING_NAMED, base=tmp_path / "base.safetensors"))
    found = []
    for share in (0.0, 1.0):
        encoding = Encoding(model.vae, model.text, "fp32", "fp32", "auto", Path(), streamed=share)
        with no_grad():
            found.append(load_encoders(encoding, "cpu").captions([EncoderInput("a red circle on a blue ground")])[0])
    assert copied
    for name, array in found[0].items():
        np.testing.assert_array_equal(found[1][name], array)


def test_a_streamed_network_is_gone_with_its_last_use() -> None:
    """Without the garbage collector: its memory is wanted by what comes next."""
    part = find("flux-tiny")[1].denoiser
    gc.disable()
    try:
        with shape_run(H100) as run:
            before = run.live_bytes
            network = part.load(device="cuda", dtype="bf16", storage=None, streamed=part.network.named_blocks())
            gone = weakref.ref(next(iter(network.named_blocks().values())).weight_policy)
            assert run.live_bytes > before
            del network
            assert gone() is None
            assert run.live_bytes == before
            assert run.host_bytes == 0
    finally:
        gc.enable()


def test_a_block_is_copied_once_forward_and_once_backward(copied: Counter[int]) -> None:
    """The last two are still there when their gradients are wanted, and one copy serves recomputation and gradient."""
    p = prepared("flux-tiny", "model.offload=1.0")
    copied.clear()
    s = p.state
    loss = batch_losses(s.denoiser, s.objective, s.dtype, s.seed, p.batch)[0].mean()
    assert sorted(copied.values()) == [1, 1, 1, 1]
    loss.backward()
    assert sorted(copied.values()) == [1, 1, 2, 2]


def test_weights_keep_shapes_strides_and_neighbours() -> None:
    """Those of a group stay next to each other, so that one product reads them all."""
    resident, streamed = (prepared("sdxl-tiny", *how).network for how in ((), ("model.offload=1.0",)))
    for (name, mine), (_, other) in zip(streamed.weights(), resident.weights(), strict=True):
        wide = [i for i, n in enumerate(other.shape) if n > 1]
        assert mine.shape == other.shape
        assert [mine.data.strides[i] for i in wide] == [other.data.strides[i] for i in wide], name
    with shape_run(H100):
        network = prepared("sdxl-tiny", "model.offload=1.0", device="cuda", precision="bf16").network
        for group in network.fusable_groups():
            begins = [layer.weight.data.data.ptr for layer in group]
            assert np.diff(begins).tolist() == [layer.weight.nbytes for layer in group[:-1]]


def test_a_network_is_loaded_block_by_block() -> None:
    """Of Flux at full size, in 8 bits: the whole is never on the GPU."""
    part = find("flux-dev")[1].denoiser
    with shape_run(H100) as run:
        network = part.load(
            device="cuda", dtype="bf16", storage=nn.Storage("fp8"), streamed=part.network.named_blocks()
        )
        sizes = [sum(w.nbytes for _, w in block.weights()) for block in network.named_blocks().values()]
        rest = sum(w.nbytes for _, w in network.weights()) - sum(sizes)
        assert sum(sizes) <= run.host_bytes < 1.001 * sum(sizes)
        assert run.live_bytes < 1.01 * (2 * max(sizes) + rest)
        assert run.peak_bytes < 4 * max(sizes) + rest


@pytest.mark.parametrize("quantize", ["off", "fp8"])
@pytest.mark.parametrize("model", ["klein-9b", "zimage", "sdxl"])
def test_a_second_network_takes_two_blocks_of_the_gpu(model: str, quantize: str) -> None:
    """Its other weights lie where the first network's do."""
    config = from_options(model={"quantize": quantize})
    with shape_run(H100) as run:
        first = find(model)[1].load_denoiser(device="cuda", dtype="bf16", storage=storage_of(quantize, "bf16"))
        before = run.live_bytes
        second, borrowed = load_preview(find(model)[1], config, first, "cuda")
        blocks = second.network.named_blocks().values()
        largest = max(sum(w.nbytes for _, w in block.weights()) for block in blocks)
        assert 0 < run.live_bytes - before <= 2 * 1.001 * largest + (1 << 20)
        run.backend.reset_peak()
        with borrowed.in_place():
            assert run.peak_bytes == run.live_bytes


@pytest.mark.proof
def test_a_step_takes_less_memory_by_all_blocks_but_two() -> None:
    how = {"device": "cuda", "precision": "bf16", "quantize": "fp8"}
    peaks = []
    for settings in ((), ("model.offload=1.0",)):
        with shape_run(H100) as run:
            p = prepared("sd35-medium", *settings, **how)
            run.backend.reset_peak()
            p.captured()
            peaks.append(run.peak_bytes)
    sizes = [sum(w.nbytes for _, w in block.weights()) for block in p.network.named_blocks().values()]
    assert abs(peaks[0] - peaks[1] - (sum(sizes) - 2 * max(sizes))) < 0.01 * sum(sizes)


def test_a_block_that_is_not_recomputed_has_no_weights_for_its_gradient() -> None:
    p = prepared("flux-tiny", "model.offload=1.0")
    p.network.checkpointing = "off"
    with pytest.raises(RuntimeError, match="a streamed block must be recomputed"):
        p.step()


@pytest.mark.parametrize(("share", "names"), [(0.5, "ac"), (1.0, "abcd"), (0.01, "a")])
def test_a_share_is_spread_over_the_network(share: float, names: str) -> None:
    assert "".join(blocks_of_share(dict.fromkeys("abcd", 10), share)) == names


@pytest.mark.parametrize("model", ["sdxl", "sd35-large", "flux-dev", "zimage"])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_a_share_is_one_of_all_weights(model: str, share: float) -> None:
    sizes = block_sizes(find(model)[1].network)
    chosen = sum(sizes[name] for name in blocks_of_share(sizes, share))
    assert share <= chosen / sum(sizes.values()) < share + max(sizes.values()) / sum(sizes.values())


@pytest.mark.parametrize(
    ("offload", "checkpointing", "only", "message"),
    [
        (0.5, "off", (), 'expected gradient.checkpointing = "full" or "offload" with it, got "off"'),
        ("auto", "mlp", (), 'with it, got "mlp"'),
        (
            1.0,
            "full",
            ("single_blocks.*",),
            "got 2 that gradient.checkpoint_blocks leaves out, such as double_blocks.0",
        ),
        (("single_block.1",), "full", (), "'single_block.1'; near it: single_blocks.1"),
        ((), "full", (), "model.offload: no block of the model is named by"),
    ],
)
def test_what_cannot_be_streamed_is_refused(
    offload: Any, checkpointing: Any, only: tuple[str, ...], message: str
) -> None:
    network = find("flux-tiny")[1].network
    recomputed = blocks_named(network, checkpointing, only, "key")
    with pytest.raises(ConfigError) as refused:
        blocks_streamed(network, offload, checkpointing, recomputed)
    assert message in str(refused.value)


def test_pinned_memory_that_the_system_refuses_is_one_line() -> None:
    def refuse(size: int) -> Any:
        raise MemoryError("cudaErrorMemoryAllocation: out of memory")

    with shape_run(H100) as run:
        run.backend.xp.cuda.PinnedMemory = refuse
        with pytest.raises(DeviceFault, match=r"refused \d+ MiB of pinned host memory.*ulimit -l.*model\.offload"):
            prepared("flux-tiny", "model.offload=1.0", device="cuda", precision="bf16")
