"""What the model sees of T5 behind a caption's end, and what the cache keeps of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from flame_train.config.schema import Config, DataSection, ModelSection, SampleSection, TextEncodersSection
from flame_train.config.training_sections import OutputSection, TrainSection
from flame_train.data.padding import collate
from flame_train.engine import Tensor
from flame_train.models.registry import FAMILIES
from flame_train.run.check.check_run import check
from flame_train.run.encode.encode import Encoded, encode
from flame_train.run.plan.plan import Plan, make_plan
from flame_train.training.session import Session, StopRequest

LENGTH = 77
Encode = Callable[..., tuple[Plan, Encoded]]


@pytest.fixture
def run(base: Path, family: str, drawn: Path, encoded: Path) -> Encode:
    def run(padding: str, tokens: int = LENGTH) -> tuple[Plan, Encoded]:
        config = Config(
            model=ModelSection(checkpoint=str(base)),
            text_encoders=TextEncodersSection(t5_tokens=tokens, t5_padding=padding),
            data=DataSection(path=str(drawn), resolution=64, bucket_step=32, cache=str(encoded)),
            sample=SampleSection(every=0),
            train=TrainSection(precision="fp32"),
            output=OutputSection(dir=f"{drawn}-run"),
        )
        plan = make_plan(check(config, FAMILIES[family]), StopRequest())
        keys = plan.encoding.keys(plan.samples, ())
        made = encode(plan, keys, Session("cpu"))
        return plan, made

    return run


def tokens(plan: Plan, text: str) -> int:
    """With the end token."""
    t5 = plan.model.text[-1]
    return len(t5.tokenizer.encode(text)) + 1


def test_states_of_padding_are_a_captions_own_and_are_kept(run: Encode) -> None:
    """Which is why they cannot be left out where the model sees them."""
    plan, encoded = run("seen")
    one, other = (encoded.caption(row.texts[0])["t5"] for row in plan.samples.rows[:2])
    assert one.shape == other.shape == (LENGTH, one.shape[1])
    assert not np.allclose(one[-1], other[-1], rtol=1e-3)
    assert not np.allclose(one[-1], one[-2], rtol=1e-3)


@pytest.mark.bytes
def test_zeros_keep_a_captions_own_rows_bit_for_bit(run: Encode) -> None:
    plan, seen = run("seen")
    _, zeros = run("zeros")
    for row in plan.samples.rows[:4]:
        text = row.texts[0]
        whole, own, count = seen.caption(text)["t5"], zeros.caption(text)["t5"], tokens(plan, text)
        assert count < LENGTH
        np.testing.assert_array_equal(own, whole[:count])


def test_masked_rows_do_not_depend_on_how_much_padding_stands_behind(run: Encode) -> None:
    plan, short = run("masked")
    _, long = run("masked", 154)
    _, unmasked = run("zeros")
    for row in plan.samples.rows[:4]:
        own = short.caption(row.texts[0])["t5"]
        assert len(own) == tokens(plan, row.texts[0])
        np.testing.assert_allclose(own, long.caption(row.texts[0])["t5"], rtol=1e-5, atol=1e-6)
        assert not np.allclose(own, unmasked.caption(row.texts[0])["t5"], rtol=1e-3)


@pytest.mark.bytes
@pytest.mark.parametrize("padding", ["zeros", "masked"])
def test_a_batch_is_filled_up_with_zeros_and_the_network_takes_it(run: Encode, padding: str) -> None:
    plan, encoded = run(padding)
    alike = [i for i, row in enumerate(plan.samples.rows) if row.placement == plan.samples.rows[0].placement][:2]
    examples = [encoded.example(i) for i in alike]
    batch = collate(examples, plan.model.paddings)
    assert batch["t5"].shape[:2] == (len(alike), LENGTH)
    for i, example in enumerate(examples):
        rows = len(example["t5"])
        np.testing.assert_array_equal(batch["t5"][i, :rows], example["t5"])
        assert not batch["t5"][i, rows:].any()
    denoiser = plan.model.load_denoiser(device="cpu", dtype="fp32")
    x = Tensor(np.ones_like(batch["mean"]))
    out = denoiser.denoise(x, Tensor(np.full(len(alike), 0.5, np.float32)), {n: Tensor(a) for n, a in batch.items()})
    assert out.shape == x.shape


@pytest.mark.bytes
@pytest.mark.parametrize("padding", ["zeros", "masked"])
def test_an_encoder_that_runs_in_the_step_gives_what_the_cache_is_filled_up_to(run: Encode, padding: str) -> None:
    plan, encoded = run(padding)
    t5, text = plan.model.text[-1], plan.samples.rows[0].texts[0]
    network = t5.load(device="cpu", dtype="fp32", precision="auto")
    inputs = {name: Tensor(array[None]) for name, array in t5.inputs(text).items()}
    made = t5.encode(network, inputs)["t5"].numpy()
    np.testing.assert_array_equal(made, collate([encoded.caption(text)], plan.model.paddings)["t5"])


def test_the_plan_says_what_the_cache_will_take(run: Encode, drawn: Path) -> None:
    """Entries without their headers, counted on the disk."""
    sizes = {}
    for padding in ("seen", "zeros"):
        plan, encoded = run(padding)
        paths = {encoded.cache.path(key) for key in encoded.keys.captions.values()}
        paths |= {encoded.cache.path(key) for keys in encoded.keys.images for key in keys}
        headers = sum(8 + int.from_bytes(path.read_bytes()[:8], "little") for path in paths)
        sizes[padding] = plan.encoding.bytes_of(plan.samples, ())
        assert sum(path.stat().st_size for path in paths) - headers == sizes[padding]
    assert sizes["zeros"] < sizes["seen"]


@pytest.mark.bytes
def test_a_run_with_text_of_several_lengths_has_the_same_bytes_after_it_was_stopped(
    train_small: Callable[..., int], family: str, tmp_path: Path
) -> None:
    own = ["text_encoders.t5_tokens=77", "text_encoders.t5_padding=zeros", "schedule.name=constant"]
    own += ["sample.every=2", 'sample.prompts=["a very red circle on white"]', "sample.steps=2"]

    def run(name: str, *more: str) -> int:
        return train_small(family, *(a for o in (*own, f"output.dir={tmp_path / name}", *more) for a in ("--set", o)))

    assert run("whole") == 0
    assert run("again", "train.steps=1") == 0
    assert run("again") == 0
    files = [(tmp_path / name / "lora.safetensors").read_bytes() for name in ("whole", "again")]
    whole, again = (raw[8 + int.from_bytes(raw[:8], "little") :] for raw in files)  # headers name the folder
    assert whole == again
