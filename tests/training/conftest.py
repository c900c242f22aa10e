"""A training of a network of one layer, on numbered samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from flame_train.adapters.attach import attach
from flame_train.diffusion.noise_schedule import NoiseSchedule
from flame_train.diffusion.objectives import Objective
from flame_train.engine import Tensor
from flame_train.engine.backend import get_backend
from flame_train.engine.dtype import as_dtype
from flame_train.io.runfolder import RunFolder
from flame_train.run.train.step_state import build_optimizer
from flame_train.training import loop
from flame_train.training.result import LoraWriter, Sources, restore
from flame_train.training.session import SILENT, Callbacks, Session, StopRequest
from flame_train.training.step import State
from tests.run_files import log_of
from tests.training.toy import NAMES, Feed, Toy, ToyDenoiser, sections


@pytest.fixture
def trained(tmp_path):
    """trained(feed, **sections): runs, or continues, a training in a folder; returns the run and its log."""

    def train(
        feed: Feed,
        *,
        sample_images: Callable[[int], None] = lambda step: None,
        stop: StopRequest | None = None,
        name: str = "run",
        callbacks: Callbacks = SILENT,
        before: Callable[[RunFolder], None] = lambda folder: None,
        **changes: dict[str, Any],
    ) -> tuple[loop.Run, list[dict[str, Any]]]:
        config = sections(**changes)
        model = Toy()
        model.init(np.random.default_rng(3))
        attached = attach(model, ["proj"], rank=config.lora.rank, alpha=config.lora.alpha, seed=1)
        backend = get_backend("cpu")
        optimizer = build_optimizer(
            attached.parameters(), config.train, config.optimizer, config.schedule, config.gradient, backend
        )
        state = State(
            ToyDenoiser(model),
            Objective(NoiseSchedule.scaled_linear()),
            optimizer,
            as_dtype("fp32"),
            5,
            Tensor(np.zeros((), np.float32)),
            np.zeros(1 + len(optimizer.metric_names)),
        )
        with RunFolder(tmp_path / name, "", lambda old, found: None) as folder:
            found = folder.resume()
            first = restore(found, state.optimizer) if found else 0
            feed.next = first * feed.accumulation
            before(folder)
            run = loop.Run(
                config.train,
                config.gradient,
                config.checkpoint,
                config.log,
                config.sample,
                config.output,
                Session("cpu", stop=stop or StopRequest(), callbacks=callbacks),
                folder,
                state,
                feed,
                Sources("", "", "", "data"),
                LoraWriter(attached, lambda layer: ("unet", layer), NAMES, "toy", {}, {}),
                first,
                sample_images,
            )
            loop.train(run)
        return run, log_of(tmp_path / name)

    return train
