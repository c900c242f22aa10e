"""A memory budget: what is chosen for it, held to every combination, and what is refused.

On the small SDXL, rehearsed on shapes: a GPU that is described, with pools of the budget's size.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from flame_train.config.schema import Config
from flame_train.config.training_sections import bytes_of
from flame_train.engine.backend import get_backend
from flame_train.engine.shape_run import H100, RTX_3090, shape_run
from flame_train.errors import ConfigError, OutOfMemory
from flame_train.run.check.check_run import check
from flame_train.run.commands.stages import train_plan
from flame_train.run.memory import card
from flame_train.run.memory.budget import OUTSIDE, SPARE, Candidates, Cards, fit_budget
from flame_train.run.memory.card import CONTEXT, RESERVE, Card, chosen_before, limit_pools, log_budget, within_budget
from flame_train.run.memory.options import MEMORY_OPTIONS, allowed, given, value_of, with_settings
from flame_train.run.memory.prediction import predicted_memory, steps_alone
from flame_train.run.plan.plan import Plan, make_plan
from flame_train.run.plan.start import checkpoint_here, run_folder
from flame_train.training.session import Session, StopRequest

MIB = 2**20
Configs = Callable[..., Config]


def plan_of(small_config: Configs, **sections: dict[str, Any]) -> Plan:
    """Sixteen-bit training of the small model in batches of four; a keyword replaces a section's keys.

    Open are checkpointing and the base's format: the more is, the longer it takes to measure.
    """
    usual: dict[str, dict[str, Any]] = {
        "train": {"precision": "bf16", "steps": 2},
        "data": {"batch_size": 4},
        "gradient": {"accumulation": 1},
        "text_encoders": {"precision": "auto"},
        "model": {"vae_precision": "fp32", "vae_tile": 0, "offload": "off"},
    }
    merged = {name: usual.get(name, {}) | sections.get(name, {}) for name in {**usual, **sections}}
    return make_plan(check(small_config(**merged)), StopRequest())


def open_plan(small_config: Configs) -> Plan:
    """The same with everything open, and with a grid."""
    sections: dict[str, Any] = {"train": {"precision": "bf16"}, "data": {"batch_size": 4}}
    return make_plan(check(small_config(**sections, sample={"prompts": ("a circle",), "steps": 2})), StopRequest())


def peak_of(plan: Plan) -> int:
    """Bytes of pools as large as the card."""
    return predicted_memory(plan, H100, limit=1 << 60).peak


def budget_for(pools: int) -> int:
    """The budget that leaves pools of so many bytes."""
    return int(pools / (1 - SPARE)) + OUTSIDE + MIB


def test_a_budget_that_is_large_enough_changes_nothing(small_config: Configs) -> None:
    plan = plan_of(small_config)
    found = fit_budget(plan, Cards(H100), 1 << 33)
    assert not found.settings
    assert found.plan.config == plan.config
    assert found.memory.seconds > 0


def test_the_choice_is_the_fastest_of_all_that_fit(small_config: Configs) -> None:
    """Every combination is rehearsed as a whole; the ladder measures one setting at a time."""
    plan = plan_of(small_config)
    options = [option for option in MEMORY_OPTIONS if option.is_open(plan.config)]
    assert [option.keys[0] for option in options] == ["gradient.checkpointing", "model.quantize"]
    every = {}
    for each in itertools.product(*(option.values(plan.config) for option in options)):
        settings = {path: value for one in each for path, value in one.items()}
        memory = predicted_memory(with_settings(plan, settings), H100, limit=1 << 60)
        every[tuple(settings.items())] = memory.peak, memory.seconds
    peaks = sorted({peak for peak, _ in every.values()})
    for pools in (peaks[len(peaks) // 2], peaks[0]):
        budget = budget_for(pools + MIB)
        found = fit_budget(plan, Cards(H100), budget)
        assert found.peak <= budget
        allowed = (budget - OUTSIDE) * (1 - SPARE)
        fastest = min(seconds for peak, seconds in every.values() if peak <= allowed)
        assert found.memory.seconds == pytest.approx(fastest, rel=0.05)


@pytest.mark.usefixtures("trained_base")
def test_what_the_config_says_is_not_chosen(small_config: Configs) -> None:
    """A default that is written counts as said."""
    keys = {"gradient": {"checkpointing": "off", "accumulation": 1}, "model": {"quantize": "off"}}
    plan = plan_of(small_config, **keys)
    free = fit_budget(plan_of(small_config), Cards(H100), budget_for(peak_of(plan) - 2 * MIB))
    assert free.settings
    with pytest.raises(
        ConfigError, match=r"or remove gradient\.accumulation, gradient\.checkpointing, model\.quantize"
    ):
        fit_budget(plan, Cards(H100), OUTSIDE + 8 * MIB)
    assert all(given(plan.config, f"{section}.{key}") for section, own in keys.items() for key in own)


def test_a_refusal_names_the_least_that_would_do(small_config: Configs) -> None:
    plan = open_plan(small_config)
    with pytest.raises(ConfigError, match=r"no settings keep this run within 1\.0[0-9] GiB") as error:
        fit_budget(plan, Cards(H100), OUTSIDE + 8 * MIB)
    said = str(error.value)
    assert "gradient.checkpointing = " in said
    assert "sample.width" in said
    least = float(re.findall(r"the least is ([0-9.]+) GiB", said)[0])
    assert fit_budget(plan, Cards(H100), int((least + 0.01) * 2**30)).peak < (least + 0.01) * 2**30


def test_less_than_the_cuda_context_is_refused(small_config: Configs) -> None:
    with pytest.raises(ConfigError, match=r"more than the 1\.00 GiB that the CUDA context alone takes, got 0\.50 GiB"):
        fit_budget(plan_of(small_config), Cards(H100), 1 << 29)


def test_micro_batches_keep_the_images_of_an_update(small_config: Configs) -> None:
    plan = open_plan(small_config)
    parts = [(4, 1), (2, 2), (1, 4)]
    assert [tuple(values.values()) for values in MEMORY_OPTIONS[0].values(plan.config)] == parts
    peaks = []
    for size, accumulation in parts:
        changed = with_settings(plan, {"data.batch_size": size, "gradient.accumulation": accumulation})
        assert {row.set.batch_size for row in changed.samples.rows} == {size}
        assert changed.order.samples_per_epoch >= plan.order.samples_per_epoch - plan.order.filled_per_epoch
        peaks.append(predicted_memory(changed, H100).training)
    assert peaks == sorted(peaks, reverse=True)
    assert not MEMORY_OPTIONS[0].is_open(plan_of(small_config).config)


# ---- a run keeps to it ----------------------------------------------------------------------------------


def test_a_rehearsed_run_never_takes_more_than_its_limit(small_config: Configs) -> None:
    plan = plan_of(small_config)
    peak = peak_of(plan)
    with pytest.raises(MemoryError, match="limit set to"):
        predicted_memory(plan, H100, limit=peak // 2)
    assert predicted_memory(plan, H100, limit=peak + peak // 20).peak <= peak + peak // 20


def test_pools_share_one_limit() -> None:
    with shape_run(H100) as run:
        backend = run.backend
        before = backend._pools.total_bytes()
        backend.limit_memory(before + 4 * MIB)
        kept = [backend.malloc(MIB), backend._graph_malloc(2 * MIB)]
        with pytest.raises(MemoryError, match="limit set to"):
            backend.malloc(2 * MIB)
        assert backend._pools.total_bytes() == before + 3 * MIB
        kept.append(backend._graph_malloc(MIB))
        kept.clear()
        kept.append(backend.malloc(4 * MIB))  # what the other pool keeps unused is given back for it
        backend.limit_memory(0)
        kept.append(backend.malloc(64 * MIB))


def test_an_uploads_memory_counts_until_its_uploader_is_gone() -> None:
    with shape_run(H100) as run:
        pools = run.backend._pools
        before = len(pools._made)
        uploader = run.backend.uploader()
        assert len(pools._made) == before + 1
        del uploader
        assert len(pools._made) == before


def test_the_limit_holds_inside_and_what_reaches_it_is_told(small_config: Configs) -> None:
    with shape_run(H100) as run:
        found = fit_budget(plan_of(small_config), Cards(H100), 2 << 30)
        full = replace(found, plan=with_settings(found.plan, {"gradient.checkpointing": "full"}))
        limits = []

        def work() -> None:
            with limit_pools("cuda", found):
                limits.append(run.backend._pools.limit)
                run.backend.malloc(2 << 30)

        with pytest.raises(OutOfMemory, match=r"reached its memory\.budget of 2\.00 GiB, of which 1\.0[0-9] were pred"):
            work()
        with pytest.raises(OutOfMemory, match=r"raise it$"), limit_pools("cuda", full):
            run.backend.malloc(2 << 30)
        assert limits == [(2 << 30) - OUTSIDE]
        assert run.backend._pools.limit == 0
        with limit_pools("cuda", None):
            assert run.backend._pools.limit == 0


def test_the_cpu_takes_no_limit() -> None:
    get_backend("cpu").limit_memory(0)
    with pytest.raises(ValueError, match="expected a GPU, got the CPU"):
        get_backend("cpu").limit_memory(1)


# ---- continued ------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("trained_base")
def test_a_continued_run_keeps_what_was_chosen(small_config: Configs) -> None:
    """Trained here on the CPU; planned for a GPU. Of the first start and of one with more memory."""
    first = plan_of(small_config, memory={"budget": "1 GiB"})
    assert chosen_before(first) is None
    pools = peak_of(first) - 2 * MIB
    chosen = fit_budget(first, Cards(H100), budget_for(pools))
    assert chosen.settings
    with StopRequest() as stop:
        train_plan(chosen.plan, Session("cpu", stop=stop))
    again = within_budget(plan_of(small_config, memory={"budget": "40 GiB"}), Session("cuda"))
    assert again is not None
    assert again.settings == chosen.settings
    assert again.budget == 40 << 30
    kept = checkpoint_here(again.plan, run_folder(again.plan))
    assert kept is not None
    assert kept.step == 2


def test_a_continued_run_that_fits_no_more_is_refused(small_config: Configs) -> None:
    plan = plan_of(small_config, memory={"budget": "1 GiB"})
    with StopRequest() as stop:
        train_plan(plan, Session("cpu", stop=stop))
    small = plan_of(small_config, memory={"budget": "1034 MiB"})
    with pytest.raises(ConfigError, match=r"was begun with .*, and these decide its result\. With them") as error:
        within_budget(small, Session("cuda"))
    needed = re.findall(r'Set memory\.budget to "([0-9]+ MiB)" or more', str(error.value))[0]
    assert within_budget(plan_of(small_config, memory={"budget": needed}), Session("cuda")) is not None


def test_a_run_without_a_budget_leaves_the_choice_open(small_config: Configs) -> None:
    plan = plan_of(small_config)
    with StopRequest() as stop:
        train_plan(plan, Session("cpu", stop=stop))
    assert chosen_before(plan_of(small_config, memory={"budget": "2 GiB"})) is None


# ---- cards ----------------------------------------------------------------------------------------------


def test_no_budget_is_no_choice_and_the_cpu_only_plans_for_one(small_config: Configs) -> None:
    assert within_budget(plan_of(small_config), Session("cuda")) is None
    asked = plan_of(small_config, memory={"budget": "2 GiB"})
    planned, on_a_card = (within_budget(asked, Session(device), planning=True) for device in ("cpu", "cuda"))
    assert planned is not None
    assert on_a_card is not None
    assert (planned.budget, planned.settings, planned.peak) == (2 << 30, on_a_card.settings, on_a_card.peak)
    with pytest.raises(ConfigError, match=r"memory\.budget: it limits a GPU's memory, and --device is cpu; remove it"):
        within_budget(plan_of(small_config, memory={"budget": "auto"}), Session("cpu"))


def test_auto_takes_what_is_free_and_says_that_others_have_some(caplog: pytest.LogCaptureFixture) -> None:
    alone = Card(RTX_3090, RTX_3090.memory - CONTEXT)
    assert alone.budget("auto") == RTX_3090.memory - RESERVE
    assert not caplog.records
    shared = Card(RTX_3090, 9 << 30)
    assert shared.budget("auto") == (9 << 30) + CONTEXT - RESERVE
    assert "other processes have 14.4 of the card's 24.0 GiB; this run takes at most 9.1" in caplog.text


def test_more_than_the_card_has_or_than_is_free_is_refused() -> None:
    with pytest.raises(ConfigError, match=r'at most the 24\.00 GiB of the card, got 32 GiB; "auto" takes what is free'):
        Card(RTX_3090, RTX_3090.memory - CONTEXT).budget("32 GiB")
    with pytest.raises(ConfigError, match=r"12 GiB are not free: other processes have 14\.38 of the card's 24\.00 GiB"):
        Card(RTX_3090, 9 << 30).budget("12 GiB")
    assert Card(RTX_3090, 9 << 30).budget("9 GiB") == bytes_of("9 GiB")


@pytest.mark.usefixtures("trained_base")
def test_what_was_chosen_is_told_with_the_lines_that_fix_it(
    small_config: Configs, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of(small_config, memory={"budget": "700 MiB"})
    pools = peak_of(plan) - 2 * MIB
    monkeypatch.setattr(card, "bytes_of", lambda size: budget_for(pools))
    found = within_budget(plan, Session("cuda"))
    assert found is not None
    with caplog.at_level("INFO"):
        log_budget(found)
    for path, value in found.settings.items():
        assert value_of(found.plan.config, path) == value
        assert f"{path} = " in caplog.text
    assert "the CUDA context included" in caplog.text


def test_blocks_wait_on_the_host_where_the_config_leaves_it_open(small_config: Configs) -> None:
    """Each share holds less of the GPU than the one before. The last is measured with the checkpointing it needs."""
    plan = open_plan(small_config)
    option = next(option for option in MEMORY_OPTIONS if option.keys == ("model.offload",))
    assert option.is_open(plan.config)
    assert not option.is_open(plan_of(small_config).config)
    assert not allowed(plan, {"model.offload": 1.0})
    off, *_, half, _, last = option.values(plan.config)
    shares = [with_settings(plan, {**option.needs, **settings}) for settings in (off, half, last)]
    held = [steps_alone([each], H100)[0].held for each in shares]
    assert held == sorted(set(held), reverse=True)
    assert predicted_memory(shares[-1], H100).host > 0


def test_the_least_that_a_rehearsal_needed_is_enough(small_config: Configs) -> None:
    """A limit that was raised as far as needed is one under which the run goes through."""
    plan = open_plan(small_config)
    raised = predicted_memory(plan, H100, limit=4 * MIB, grows=True)
    assert raised.pools > 4 * MIB
    assert predicted_memory(plan, H100, limit=raised.pools).pools == raised.pools
    with pytest.raises(MemoryError):
        predicted_memory(plan, H100, limit=raised.pools // 2)


def test_auto_lets_the_budget_choose_the_share(small_config: Configs) -> None:
    """Though nothing says what is recomputed; without a budget "auto" asks for that."""
    keys = {"model": {"offload": "auto", "quantize": "off"}, "memory": {"budget": "1 GiB"}}
    plan = plan_of(small_config, **keys)
    option = next(option for option in MEMORY_OPTIONS if option.keys == ("model.offload",))
    assert option.is_open(plan.config)
    free = fit_budget(plan, Cards(H100), 1 << 33)
    assert free.lines == ['model.offload = "off"']
    candidates = [
        {path: v for own in each for path, v in own.items()} for each in Candidates(plan, Cards(H100)).ordered
    ]
    assert {each["model.offload"] for each in candidates} >= {"off", 0.5, 1.0}
    recomputed = {each["gradient.checkpointing"] for each in candidates if each["model.offload"] != "off"}
    assert recomputed == {"full", "offload"}


def test_a_run_begun_with_auto_keeps_its_share(small_config: Configs) -> None:
    keys = {"model": {"offload": "auto", "quantize": "off"}, "gradient": {"checkpointing": "full"}}
    first = plan_of(small_config, **keys, memory={"budget": "1 GiB"})
    with StopRequest() as stop:
        train_plan(with_settings(first, {"model.offload": 0.5}), Session("cpu", stop=stop))
    assert chosen_before(plan_of(small_config, **keys, memory={"budget": "2 GiB"})) == {"model.offload": 0.5}


@pytest.mark.usefixtures("trained_base")
def test_tiles_are_chosen_where_large_sample_images_find_no_room(small_config: Configs) -> None:
    """Both ways to decode are rehearsed here; the budget lies between them."""
    keys = {
        "sample": {"prompts": ("a circle",), "steps": 2, "width": 1024, "height": 1024},
        "gradient": {"checkpointing": "off", "accumulation": 1},
        "model": {"quantize": "off", "offload": "off", "vae_precision": "fp32"},
    }
    sections: dict[str, Any] = {"train": {"precision": "bf16"}, "text_encoders": {"precision": "auto"}, **keys}
    plan = make_plan(check(small_config(**sections)), StopRequest())
    whole, tiled = (peak_of(with_settings(plan, {"model.vae_tile": side})) for side in (0, 512))
    assert tiled < 0.7 * whole
    assert fit_budget(plan, Cards(H100), budget_for((whole + tiled) // 2)).settings == {"model.vae_tile": 512}


def test_what_runs_beside_captured_steps_drops_their_graphs_where_it_finds_no_room() -> None:
    """A sample image after a captured step: under the limit only one of both fits; later both share one memory."""
    with shape_run(H100) as run:
        backend, ran = run.backend, []

        def work(mib: int) -> Callable[[], None]:
            return lambda: ran.append(backend.empty((mib * MIB,), np.dtype(np.uint8)).nbytes)

        step, image = backend.capture(work(20)), work(40)
        backend.limit_memory(backend._pools.total_bytes() + 48 * MIB)
        for _ in range(2):
            step()
        assert len(backend.graphs) == 1
        backend.run_once(image)
        assert not backend.graphs
        step()
        assert len(backend.graphs) == 1
        kept = backend.graph_pool.total_bytes()
        backend.run_once(image)
        assert len(backend.graphs) == 1
        assert backend.graph_pool.total_bytes() == kept < 41 * MIB
        assert ran.count(40 * MIB) == 2
