"""Each kind of preservation on small SDXL and Flux: loss and gradients of a micro-batch by its formula in PyTorch."""

from __future__ import annotations

import numpy as np
import pytest

from flame_train.adapters.attach import attach
from flame_train.config.load import from_options
from flame_train.diffusion.preservation import PRESERVATIONS
from flame_train.engine import Tensor
from flame_train.engine.backend import get_backend
from flame_train.run.train.step_state import build_optimizer
from flame_train.training.batch import Batch, HostBatch
from flame_train.training.step import Noised, State, micro
from tests.parity.models.test_t5 import norms_in_fp64
from tests.parity.models.test_twin_runs import one_thread
from tests.parity.twins import flux

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")
pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
twins = pytest.importorskip("tests.parity.models.text_twins")
pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore")]
exact = norms_in_fp64, one_thread
positions_in_fp64 = pytest.fixture(autouse=True)(flux.exact)

FAMILIES = ("sdxl", "flux")
WEIGHT, GUIDANCE, SEED = 0.7, 3.0, 9
KEYS = {"class": {"class_word": "dog"}, "slider": {"positive": "old", "negative": "young", "guidance": GUIDANCE}}


@pytest.fixture
def pair(fill, scrambled):
    """pair(family): the twins, with LoRAs that do something and take another strength."""

    def put(networks, names):
        made = attach(networks, names, rank=twins.RANK, alpha=twins.ALPHA, seed=5, per_sample_sign=True)
        rng = np.random.default_rng(6)
        for adapter in made.adapters.values():
            up = adapter.parameters()["lora_up.weight"]
            up.data[...] = 0.06 * rng.standard_normal(up.shape)
        return made

    return lambda family: twins.Twins(family, fill, scrambled, put)


@pytest.fixture
def run(pair):
    """run(family, kind, arrays, step): a micro-batch here, with what it was noised with."""

    def once(family, kind, further, taught=None, step=0):
        both = pair(family)
        rng = np.random.default_rng(3)
        shape = (2, 8, 8, twins.CHANNELS[family])
        own = both.arrays(1)
        arrays = {"mean": rng.standard_normal(shape).astype(np.float32), "logvar": np.full(shape, -2, np.float32)} | own
        texts = {name: both.arrays(seed) for name, seed in further.items()}
        for name, made in texts.items():
            arrays |= {f"{name}/{n}": a[::-1].copy() for n, a in made.items() if n != "time_ids"}
        if taught is not None:
            arrays["taught"] = np.array(taught, np.float32).reshape(2, 1, 1, 1)
        config = from_options(train={"precision": "fp32"}, schedule={"name": "constant"})
        backend = get_backend("cpu")
        optimizer = build_optimizer(
            both.attached.parameters(), config.train, config.optimizer, config.schedule, config.gradient, backend
        )
        state = State(
            denoiser=both.denoiser,
            objective=both.denoiser.model.objective(config.model, config.loss, "cpu"),
            optimizer=optimizer,
            dtype=np.dtype(np.float32),
            seed=SEED,
            loss=Tensor(np.zeros((), np.float32)),
            figures=np.zeros(1 + len(optimizer.metric_names)),
            drops=both.attached.drops,
            off=both.attached.off,
            preservation=PRESERVATIONS[kind](**KEYS.get(kind, {})),
            preservation_weight=WEIGHT,
        )
        host = HostBatch(arrays, step, np.arange(2), ())
        batch = Batch(host, backend, "fp32")
        batch.fill(host)
        optimizer.zero_grad()
        micro(state, batch)
        noised = Noised.of(both.denoiser, state.objective, state.dtype, SEED, batch)
        own_target = torch.from_numpy(
            state.objective.target(noised.latents, noised.noise, noised.t).numpy().astype(np.float64)
        )
        inputs = {"": own} | {
            name: own | {n: a[::-1].copy() for n, a in made.items() if n != "time_ids"} for name, made in texts.items()
        }
        return both, state, Reference(both, noised, inputs), own_target

    return once


class Reference:
    """PyTorch's predictions for the same noised latents."""

    def __init__(self, both, noised, inputs):
        self.both, self.inputs = both, inputs
        self.x, self.t = noised.x.numpy(), noised.t.numpy().astype(np.float32)
        modules = [part for twin in (both.twin, *both.encoders.values()) for part in twin.modules()]
        self.layers = [part for part in modules if isinstance(part, peft.tuners.tuners_utils.BaseTunerLayer)]

    def trained(self, text="", strength=1.0):
        for layer in self.layers:
            layer.scaling["default"] = strength * twins.ALPHA / twins.RANK
        return self.both.theirs(self.x, self.t, self.inputs[text])

    def base(self, text=""):
        for layer in self.layers:
            layer.enable_adapters(False)
        with torch.no_grad():
            made = self.both.theirs(self.x, self.t, self.inputs[text])
        for layer in self.layers:
            layer.enable_adapters(True)
        return made


def compare(off, both, state, expected):
    """The step's loss, and the gradient of every trained matrix, those of the text encoders among them."""
    expected.backward()
    assert float(state.loss.numpy()) == pytest.approx(expected.item(), rel=2e-5)
    for p, q in both.pairs:
        assert off(p.grad, q.grad) < 5e-4, p.name


mse = torch.nn.functional.mse_loss


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["class", "blank"])
def test_a_further_caption_is_kept_as_the_base_has_it(family, kind, run, off):
    both, state, there, target = run(family, kind, {kind: 2})
    own = mse(there.trained(), target)
    compare(off, both, state, own + WEIGHT * mse(there.trained(kind), there.base(kind)))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_base_model_teaches_its_samples_and_images_the_others(family, run, off):
    both, state, there, target = run(family, "off", {}, taught=(1, 0))
    target[0] = there.base()[0]
    compare(off, both, state, mse(there.trained(), target))


ENDS = [(family, strength) for family in FAMILIES for strength in (-1.0, 1.0)]
LONG = pytest.param("sdxl", -1.0, marks=pytest.mark.proof)  # many steps are drawn until one has this strength


@pytest.mark.parametrize(("family", "strength"), [LONG if each == ("sdxl", -1.0) else each for each in ENDS])
def test_a_slider_moves_its_target_to_both_ends(family, strength, run, off):
    texts = {"target": 2, "positive": 3, "negative": 4}
    for step in range(20):  # until one has this strength
        both, state, there, _ = run(family, "slider", texts, step=step)
        wanted = there.base("target") + strength * GUIDANCE * (there.base("positive") - there.base("negative"))
        loss = WEIGHT * mse(there.trained("target", strength), wanted)
        if float(state.loss.numpy()) == pytest.approx(loss.item(), rel=2e-5):
            break
    compare(off, both, state, loss)


@pytest.mark.parametrize("family", FAMILIES)
def test_without_adapters_the_captured_network_is_the_base_to_the_bit(family, pair):
    both = pair(family)
    rng = np.random.default_rng(3)
    latents, t = rng.standard_normal((2, 8, 8, twins.CHANNELS[family])).astype(np.float32), np.float32([0.25, 0.5])
    with both.attached.off():
        off = both.ours(latents, t, both.arrays()).numpy()
    adapted = both.ours(latents, t, both.arrays()).numpy()
    both.attached.detach()
    np.testing.assert_array_equal(both.ours(latents, t, both.arrays()).numpy(), off)
    assert np.abs(adapted - off).max() > 1e-3
