"""Every kind of adapter on a base in 8 or 4 bits trains as on a base that holds the same numbers in fp32."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flame_train.engine import Frozen
from flame_train.engine.dtype import float32
from flame_train.tools import bench
from flame_train.training.step import batch_losses

KINDS = ("dora", "loha", "lokr")


def prepared(kind: str, quantize: str, *settings: str, **how: Any) -> bench.Prepared:
    """A small Flux with an adapter on every linear layer of its blocks; its first step begins away from zero."""
    asked = (f"lora.kind={kind}", 'lora.targets=["full"]', *settings)
    given = {"precision": "fp32", "checkpointing": "off", "device": "cpu"} | how
    return bench.prepare(bench.BenchCase("flux-tiny", 64, 2, 2, settings=asked, quantize=quantize, **given))


def dense(p: bench.Prepared) -> bench.Prepared:
    """The same with each weight of few bits replaced by the numbers that it stands for, in fp32."""
    layers = [layer for layer in p.network.quantizable() if not isinstance(layer.weight, Frozen)]
    assert layers
    for layer in layers:
        layer.weight = Frozen(layer.weight.dequantize(float32).data)
    return p


def gradients(p: bench.Prepared) -> np.ndarray[Any, Any]:
    """Of the loss, by every trained value."""
    s = p.state
    batch_losses(s.denoiser, s.objective, s.dtype, s.seed, p.batch)[0].mean().backward()
    made: np.ndarray[Any, Any] = s.optimizer.arena.grads.copy()
    return made


def trained(p: bench.Prepared) -> np.ndarray[Any, Any]:
    """The change of the trained values by two steps."""
    begin = p.state.optimizer.arena.values.copy()
    for _ in range(2):
        p.step()
    made: np.ndarray[Any, Any] = p.state.optimizer.arena.values - begin
    return made


IN_CI = {("dora", "nf4"), ("loha", "nf4"), ("lokr", "int8"), ("dora", "int8")}
CASES = [
    (kind, stored) if (kind, stored) in IN_CI else pytest.param(kind, stored, marks=pytest.mark.proof)
    for kind in KINDS
    for stored in ("fp8", "int8", "nf4")
]


@pytest.mark.parametrize(("kind", "quantize"), CASES)
def test_a_step_trains_as_on_the_same_numbers(kind: str, quantize: str) -> None:
    """Gradients first: a step of AdamW shows little of their size."""
    stored, plain = prepared(kind, quantize), dense(prepared(kind, quantize))
    for measure in (gradients, trained):
        found, expected = measure(stored), measure(plain)
        assert np.abs(expected).max() > 0
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("kind", KINDS)
def test_recomputed_blocks_change_no_bit(kind: str) -> None:
    """A weight of 4 bits is decoded again for its gradient, in a checkpointed block too."""
    found = [trained(prepared(kind, "nf4", checkpointing=how)) for how in ("off", "full")]
    np.testing.assert_array_equal(*found)


@pytest.mark.parametrize("axis", ["true", "false"])
def test_the_norms_of_dora_begin_as_those_of_the_stored_weight(axis: str) -> None:
    """So that the first output is the base's."""
    p = prepared("dora", "nf4", f"lora.wd_on_output={axis}")
    names = {id(layer): name for name, layer in p.network.named_modules()}
    for layer in p.network.quantizable():
        if layer.adapter is None:
            continue
        numbers = layer.weight.dequantize(float32).numpy()
        norms = np.linalg.norm(numbers.astype(np.float64), axis=1 if axis == "true" else 0)
        kept = layer.adapter.magnitude.numpy().reshape(-1)
        np.testing.assert_allclose(kept, norms, rtol=1e-6, err_msg=names[id(layer)])
