"""The optimizer that a config asks for, watched by what it does to two numbers."""

from __future__ import annotations

import math

import numpy as np
import pytest

from flame_train.config.training_sections import GradientSection, OptimizerSection, ScheduleSection, TrainSection
from flame_train.engine import Parameter
from flame_train.engine.backend import get_backend
from flame_train.run.train.step_state import build_optimizer


def built(parameters, optimizer=None, gradient=None, schedule=None, train=None):
    return build_optimizer(
        parameters,
        TrainSection(**{"steps": 10, "precision": "fp32", **(train or {})}),
        OptimizerSection(**{"name": "sgd", "lr": 1.0, "weight_decay": 0.0, **(optimizer or {})}),
        ScheduleSection(**{"name": "constant", **(schedule or {})}),
        GradientSection(**{"clip_norm": 0.0, **(gradient or {})}),
        get_backend("cpu"),
    )


def moves(gradients, **sections):
    """The change of the values in each step, given the gradient of each."""
    parameter = Parameter(np.zeros(len(gradients[0]), np.float32), "w")
    optimizer = built([parameter], **sections)
    changes = []
    for gradient in gradients:
        before = parameter.numpy().copy()
        parameter.grad.data[...] = np.asarray(gradient, np.float32) * optimizer.loss_scale.numpy()
        optimizer.step()
        optimizer.zero_grad()
        changes.append(parameter.numpy() - before)
    return np.array(changes)


def test_plain_descent():
    np.testing.assert_allclose(moves([[3.0, -4.0]]), [[-3.0, 4.0]])


def test_clipping_by_norm_keeps_the_direction():
    np.testing.assert_allclose(moves([[3.0, -4.0]], gradient={"clip_norm": 1.0}), [[-0.6, 0.8]], rtol=1e-5)


def test_normalized_gradients_all_have_the_norm_that_others_are_clipped_to():
    longer_and_shorter = moves([[3.0, -4.0], [0.003, -0.004]], gradient={"clip_norm": 2.0, "normalize": True})
    np.testing.assert_allclose(longer_and_shorter, [[-1.2, 1.6]] * 2, rtol=1e-3)  # torch's 1e-6 beside 0.005


def test_a_fixed_loss_scale_stays_and_an_overflow_under_it_fails():
    fp16 = {"precision": "fp16", "loss_scale": 128.0}
    np.testing.assert_allclose(moves([[1.0, 2.0]] * 3, train=fp16), [[-1.0, -2.0]] * 3, rtol=1e-6)
    parameter = Parameter(np.zeros(2, np.float32), "w")
    optimizer = built([parameter], train=fp16)
    parameter.grad.data[...] = np.inf
    optimizer.step()
    figures = dict(zip(optimizer.metric_names, optimizer.metric_values, strict=True))
    assert (figures["healthy"], figures["loss_scale"]) == (0, 128.0)
    assert not parameter.numpy().any()


def test_a_dynamic_loss_scale_begins_and_grows_as_the_config_says():
    fp16 = {"precision": "fp16", "loss_scale_init": 8.0, "loss_scale_interval": 2}
    optimizer = built([Parameter(np.zeros(2, np.float32), "w")], train=fp16)
    seen = []
    for _ in range(5):
        seen.append(float(optimizer.loss_scale.numpy()))
        optimizer.step()
    assert seen == [8.0, 8.0, 16.0, 16.0, 32.0]


def test_values_are_clipped_before_the_norm():
    """By value first: (3, -40) becomes (3, -4), whose norm is 5. The other way round it would be (0.075, -1)."""
    clipped = moves([[3.0, -40.0]], gradient={"clip_norm": 1.0, "clip_value": 4.0})
    np.testing.assert_allclose(clipped, [[-0.6, 0.8]], rtol=1e-5)


def test_noise_comes_after_clipping_fades_and_follows_the_seed():
    loud = {"clip_norm": 1e-6, "noise_std": 1.0}
    gradients = [np.ones(4000)] * 2
    first, again = (moves(gradients, gradient=loud, train={"seed": 3}) for _ in range(2))
    other = moves(gradients, gradient=loud, train={"seed": 4})
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)
    assert first[0].std() == pytest.approx(1.0, rel=0.05)
    assert first[1].std() == pytest.approx(math.sqrt(2.0**-0.55), rel=0.05)


def test_accumulated_gradients_are_averaged():
    np.testing.assert_allclose(moves([[8.0, 4.0]], gradient={"accumulation": 4}), [[-2.0, -1.0]])


def test_adamw_first_step_is_the_rate_and_decay_is_decoupled():
    """Adam's first step is lr * sign(g), whatever the gradient's size (arXiv 1412.6980, section 2)."""
    step = moves([[1e-3, -50.0]], optimizer={"name": "adamw", "lr": 0.1})
    np.testing.assert_allclose(step, [[-0.1, 0.1]], rtol=1e-4)


def test_the_schedule_spans_the_runs_steps():
    rates = -moves([[1.0]] * 10, schedule={"name": "linear", "warmup_steps": 2})[:, 0]
    np.testing.assert_allclose(rates, [0.0, 0.5, 1.0, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8], rtol=1e-6)


def test_a_warm_up_may_be_a_share_of_the_run():
    rates = -moves([[1.0]] * 10, schedule={"warmup": 0.3})[:, 0]
    np.testing.assert_allclose(rates, [0.0, 1 / 3, 2 / 3, *[1.0] * 7], rtol=1e-6)
    nearly = -moves([[1.0]] * 10, schedule={"warmup": 0.99})[:, 0]
    np.testing.assert_allclose(nearly, np.arange(10) / 9, rtol=1e-6, err_msg="one step is left")


def test_only_fp16_scales_its_loss():
    parameter = Parameter(np.zeros(2, np.float32), "w")
    scales = {
        precision: float(built([parameter], train={"precision": precision}).loss_scale.numpy())
        for precision in ("fp32", "bf16", "fp16")
    }
    assert scales["fp32"] == scales["bf16"] == 1.0
    assert scales["fp16"] >= 2.0**8
    np.testing.assert_allclose(moves([[3.0, -4.0]], train={"precision": "fp16"}), [[-3.0, 4.0]])
