"""How many blocks "auto" streams, and how much memory the host says that it has."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest

import flame_train.engine as flame
from flame_train.config.checks import broken
from flame_train.config.load import from_options
from flame_train.config.schema import Config
from flame_train.data.samples import Samples
from flame_train.engine import functional as F
from flame_train.engine.backend import get_backend
from flame_train.engine.backend.host_memory import available
from flame_train.engine.mode import deterministic
from flame_train.engine.shape_run import H100, Gpu, KernelRequests, shape_run
from flame_train.errors import OutOfMemory
from flame_train.run.check.adapted_layers import block_sizes
from flame_train.run.check.check_run import Checked
from flame_train.run.memory import card
from flame_train.run.memory.prediction import PredictedMemory
from flame_train.run.memory.step_time import StepWork
from flame_train.run.plan.plan import Plan
from flame_train.tools import bench
from flame_train.tools.bench.models import find

FIXED = 1_000_000_000  # bytes that a run takes beside its blocks


def plan(offload: str = "auto", only: int = 1000) -> Plan:
    """A plan for Flux dev of which the first `only` blocks are recomputed."""
    model = find("flux-dev")[1]
    config = from_options(model={"offload": offload}, gradient={"checkpointing": "full"})
    return Plan(
        Checked(config, Path(), model, (), frozenset(list(model.network.named_blocks())[:only])), Samples((), ())
    )


@pytest.fixture
def sizes() -> dict[str, int]:
    return block_sizes(find("flux-dev")[1].network)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, sizes: dict[str, int]) -> list[int]:
    """The predictions that were asked for: what is fixed, the resident blocks, and two buffers."""
    found: list[int] = []

    def predict(planned: Plan, *_: Any) -> PredictedMemory:
        streamed = planned.checked.streamed
        resident = sum(size for name, size in sizes.items() if name not in streamed)
        found.append(FIXED + 2 * resident + (4 * max(sizes.values()) if streamed else 0))
        return PredictedMemory(0, found[-1], KernelRequests((), (), ()), 1.0)

    monkeypatch.setattr(card, "predicted_memory", predict)
    return found


def of(memory: int) -> Gpu:
    return H100._replace(memory=memory)


@pytest.mark.parametrize("gib", [8, 12, 16, 20, 24])
def test_as_few_blocks_are_streamed_as_fit(sizes: dict[str, int], asked: list[int], gib: int) -> None:
    memory = gib << 30
    streamed = card.resolve_offload(plan(), of(memory)).checked.streamed
    if not streamed:
        assert asked[0] <= memory - card._LEFT
        return
    assert asked[-1] <= memory - card._LEFT
    assert len(asked) < 8
    spare = memory - card._LEFT - asked[-1]
    assert spare < 2 * (card._STEP * sum(sizes.values()) + 2 * max(sizes.values())), "no more than needed"


def test_where_not_even_all_is_enough_all_are_streamed(sizes: dict[str, int], asked: list[int]) -> None:
    assert card.resolve_offload(plan(), of(1 << 30)).checked.streamed == frozenset(sizes)


def test_what_is_not_recomputed_stays(sizes: dict[str, int], asked: list[int]) -> None:
    assert card.resolve_offload(plan(only=7), of(1 << 30)).checked.streamed == frozenset(list(sizes)[:7])


@pytest.mark.parametrize(
    ("offload", "others", "message"),
    [
        (0.5, {}, 'expected gradient.checkpointing = "full" or "offload" with it, got "off"'),
        (("single_blocks.*",), {"gradient": {"checkpointing": "mlp"}}, 'with it, got "mlp"'),
        (
            "auto",
            {"gradient": {"checkpointing": "mlp"}},
            'with it, got "mlp"',
        ),
        ("auto", {"memory": {"budget": "12 GiB"}}, ""),
        (0.5, {"gradient": {"checkpointing": "offload"}, "memory": {"budget": "12 GiB"}}, ""),
        ("off", {}, ""),
    ],
)
def test_a_config_says_what_streaming_needs(offload: Any, others: dict[str, Any], message: str) -> None:
    config = Config.model_validate({"model": {"offload": offload}, **others})
    told = dict(broken(config)).get("model.offload", "")
    assert message in told
    assert bool(message) == bool(told)


@pytest.mark.parametrize("gib", [4, 40])
def test_text_encoders_are_streamed_where_they_find_no_room(monkeypatch: pytest.MonkeyPatch, gib: int) -> None:
    taken = PredictedMemory(10 << 30, 1 << 30, KernelRequests((), (), ()), 1.0)
    monkeypatch.setattr(card, "predicted_memory", lambda *_: taken)
    decided = card.resolve_offload(plan(), of(gib << 30)).checked
    assert (decided.streamed_text, decided.streamed) == (float(gib < 11), frozenset())


def test_on_the_cpu_and_without_auto_nothing_is_decided(asked: list[int]) -> None:
    for given, gpu in ((plan(), None), (plan("off"), H100)):
        assert card.resolve_offload(given, gpu) is given
    assert not asked


@pytest.mark.parametrize(
    ("budget", "quantize", "advice"),
    [
        ("", "off", 'lower model.offload, or store them in fewer bits by model.quantize = "fp8" or "nf4"'),
        ("24 GiB", "int8", 'raise memory.budget, or store them in fewer bits by model.quantize = "nf4"'),
        ("24 GiB", "nf4", "raise memory.budget"),
    ],
)
def test_the_host_needs_room_for_as_many_copies_as_its_processes_keep(
    monkeypatch: pytest.MonkeyPatch, budget: str, quantize: str, advice: str
) -> None:
    """Mebibytes: one waits, three are free. What is advised is not there yet, nor chosen by the budget."""
    model = object()
    checked = SimpleNamespace(sample_model=model, streamed={"a"}, streamed_text=0.0)
    config = SimpleNamespace(memory=SimpleNamespace(budget=budget), model=SimpleNamespace(quantize=quantize))
    fake: Any = SimpleNamespace(model=model, checked=checked, encoding=SimpleNamespace(text=()), config=config)

    def load(*_: object) -> object:
        backend = get_backend("cuda")
        return backend.offload(backend.to_device(np.empty(1 << 20, np.uint8)), keep=True)

    monkeypatch.setattr(card, "load_denoiser", load)
    monkeypatch.setattr(card, "available", lambda: 3 << 20)
    card.refuse_small_host(fake, 3)
    with pytest.raises(OutOfMemory, match=f"of weights are to wait in host memory, .* free; {advice}$"):
        card.refuse_small_host(fake, 4)


def test_a_control_group_bounds_the_memory_and_its_file_cache_is_given_back(tmp_path: Path) -> None:
    free = psutil.virtual_memory().total
    assert 0 < available(tmp_path / "none") <= free
    (tmp_path / "memory.max").write_text("5000\n")
    (tmp_path / "memory.current").write_text("4000\n")
    (tmp_path / "memory.stat").write_text("anon 100\ninactive_file 700\n")
    assert available(tmp_path) == 1700
    (tmp_path / "memory.max").write_text("max\n")
    assert available(tmp_path) > 5000


def test_streamed_bytes_are_waited_for_only_where_they_take_longer_than_the_rest() -> None:
    def seconds(copied: int, beside: int) -> float:
        return StepWork(Counter(), 0, 0, 10**9, copied, beside).seconds(H100)

    alone, link = seconds(0, 0), seconds(10**9, 0) - seconds(0, 0)
    assert seconds(10**3, 10**3) == alone
    assert seconds(10**12, 10**12) == pytest.approx(1000 * link)
    assert seconds(2 * 10**9, 10**3) == pytest.approx(alone + 2 * link, rel=1e-3)


@pytest.mark.parametrize(("capability", "faster"), [("90", 2), ("86", 4)])
@pytest.mark.parametrize("rows", [8, 4096])
def test_products_of_int8_take_a_half_or_a_quarter_of_those_in_16_bits(capability: str, faster: int, rows: int) -> None:
    """On data sheets of Hopper cards and of GeForce ones; by cuBLASLt, and for many rows by a kernel of Hopper's."""
    gpu = H100._replace(capability=capability)
    with shape_run(gpu) as run, deterministic(True):
        x = flame.tensor(np.zeros((rows, 1024), np.float32), "bfloat16", "cuda")
        stored = F.int8_quantize(flame.tensor(np.zeros((1024, 1024), np.float32), device="cuda"))
        before = StepWork.of(run)
        F.scaled_linear(x, *stored, dynamic=True)
        found = StepWork.of(run).since(before)
    assert found.narrow == found.flops.total() == 2 * rows * 1024 * 1024
    wide, narrow = (StepWork(found.flops, n, 0, 0, 0).seconds(gpu) for n in (0, found.narrow))
    assert wide == pytest.approx(faster * narrow)


def test_a_step_counts_each_block_twice_but_for_what_is_still_there() -> None:
    case = bench.BenchCase("flux-tiny", 64, checkpointing="full", settings=("model.offload=1.0",))
    with shape_run(H100) as run:
        p = bench.prepare(case)
        before = StepWork.of(run)
        p.step()
        beside = StepWork.of(run).since(before).beside
    with shape_run(H100) as run:
        kept = bench.prepare(
            bench.BenchCase("flux-tiny", 64, checkpointing="full", settings=("model.offload=['single*']",))
        )
        last = run.host_bytes  # of the two single blocks, which are the last
    with shape_run(H100) as run:
        kept = bench.prepare(case)
        assert beside == 2 * run.host_bytes - last
    assert kept.adapted
