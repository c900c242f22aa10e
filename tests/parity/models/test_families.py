"""Every family's network against the reference's: predictions, and the gradients of each LoRA matrix and the latents.

The table is `tests/parity/twins/`: a file a family with the network, its twin and the inputs.
"""

from __future__ import annotations

from importlib import import_module

import numpy as np
import pytest

from flame_train.models.registry import FAMILIES
from tests.parity.twins.twin import latents_gradient_error, lora_gradient_errors, merged_in_torch

# a FutureWarning is of diffusers' own attributes
pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore::FutureWarning")]

TWINS = {family: import_module(f"tests.parity.twins.{family}").TWIN for family in FAMILIES}
CASES = {
    "-".join(filter(None, (family, arch, variant, dtype))): (twin, arch, variant, dtype)
    for family, twin in TWINS.items()
    for arch in twin.archs
    for variant in twin.variants
    for dtype in twin.dtypes
}
PADDED = {name: case for name, case in CASES.items() if case[0].padded}
CHECKPOINTED = [
    pytest.param(name, how, id=f"{name}-{how}")
    for name, (twin, _, variant, _) in CASES.items()
    for how in twin.variants[variant][1]
]


class Case:
    """A row of the table: its networks with the same weights, and its batch."""

    def __init__(self, name, fill, scrambled, monkeypatch):
        self.twin, arch, self.variant, self.dtype = CASES[name]
        self.twin.exact(monkeypatch)
        self.pair = self.twin.pair(self.twin.archs[arch], self.dtype, fill, scrambled)
        self.batch = self.twin.inputs(self.twin.archs[arch], self.dtype, self.variant)

    def ours(self, **changes):
        return self.twin.ours(self.pair[0], self.batch | changes)


@pytest.fixture
def case(name, fill, scrambled, monkeypatch):
    return Case(name, fill, scrambled, monkeypatch)


@pytest.fixture
def dtype(name):
    return CASES[name][-1]


@pytest.mark.parametrize("name", CASES)
def test_prediction(case, bound, off):
    assert off(case.ours(), case.twin.theirs(case.pair[1], case.batch)) < bound


@pytest.mark.parametrize("name", PADDED)
def test_rows_behind_a_captions_own_do_not_matter(case, bound, off):
    """What stands there, and how many of them there are."""
    array, more = case.twin.padded
    states = case.batch[array]
    behind = np.arange(states.shape[1])[None, :, None] >= case.batch["rows"][:, None, None]
    noise = np.random.default_rng(9).standard_normal(states.shape) * behind
    longer = np.pad(states + noise, ((0, 0), (0, more), (0, 0))).astype(states.dtype)
    assert off(case.ours(**{array: longer}), case.ours().numpy()) < bound


@pytest.mark.parametrize(("name", "checkpointing"), CHECKPOINTED)
def test_every_lora_gradient(case, bound, off, with_lora, checkpointing):
    model, twin = case.pair
    layers, _ = case.twin.variants[case.variant]
    attached = with_lora(model, case.twin.layers(model, case.variant))
    model.checkpointing = checkpointing
    leaves, weights = merged_in_torch(twin, attached, case.twin.table)
    out, expected = case.ours(), case.twin.theirs(twin, case.batch, weights)
    assert off(out, expected.detach()) < bound

    errors = lora_gradient_errors(attached, leaves, out, expected, case.batch["weight"], off)
    assert len(errors) == 2 * layers if layers else len(errors) > 60
    assert {name: e for name, e in errors.items() if not e < bound} == {}


@pytest.mark.parametrize("name", CASES)
def test_gradient_of_the_latents(case, bound, off):
    assert latents_gradient_error(case.pair, case.batch, case.twin.ours, case.twin.theirs, off) < bound
