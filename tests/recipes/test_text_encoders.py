"""Text encoders trained along with the denoiser, as whole runs: files, resume, captions drawn anew, refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from flame_train.adapters.kinds import ADAPTERS
from flame_train.config.load import load_located
from flame_train.data.order import Choice
from flame_train.engine.shape_run import H100
from flame_train.io.safetensors import SafetensorsFile
from flame_train.run.check.check_run import check
from flame_train.run.encode.encode import encode
from flame_train.run.memory.prediction import predicted_memory
from flame_train.run.plan.plan import Plan, make_plan
from flame_train.training.session import Session, StopRequest
from tests.recipes.bases import lose_end, settings
from tests.run_files import lora_of, losses_of

ALL = {"sdxl": ("clip_l", "clip_g"), "sd3": ("clip_l", "clip_g", "t5"), "flux": ("clip_l", "t5")}
PREFIXES = {"clip_l": "lora_te1_", "clip_g": "lora_te2_", "t5": "lora_te3_"}

Run = Callable[..., Path]


def trained(*encoders: str) -> dict[str, str]:
    return {"text_encoders.train": json.dumps(encoders)}


@pytest.fixture
def plan_of(run: Run, tmp_path: Path) -> Callable[..., Plan]:
    """The plan of a config on the small SDXL."""

    def one(keys: dict[str, str]) -> Plan:
        run("sdxl", "first", {}, 1)
        source = str(tmp_path / "sdxl" / "config.toml")
        place = {"output.dir": str(tmp_path / "planned")}
        return make_plan(check(load_located(source, settings(keys | place)[1::2])), StopRequest())

    return one


@pytest.mark.bytes
@pytest.mark.parametrize("family", ALL)
def test_a_run_continues_to_the_bit_and_begins_as_one_with_cached_captions(
    family: str, run: Run, tmp_path: Path
) -> None:
    """In the first step no adapter changes anything yet, so that the loss tells the encoders' arrays apart."""
    keys = trained(*ALL[family])
    dropped = {"data.caption_dropout": "0.3", "text_encoders.clip_l_dropout": "0.3", "lora.dropout": "0.2"}
    varied = {"captions.shuffle": "true", "captions.tag_dropout": "0.3"}
    all_of_it = keys | dropped | varied | {"checkpoint.every": "2"}
    whole = lora_of(run(family, "parts", all_of_it))
    lose_end(tmp_path / "parts")
    assert lora_of(run(family, "parts", all_of_it)) == whole
    cached, plain = (
        losses_of(run(family, name, more, 1)) for name, more in (("cached", dropped), ("plain", keys | dropped))
    )
    assert plain == pytest.approx(cached, rel=1e-5)


@pytest.mark.parametrize("kind", ADAPTERS)
def test_every_kind_has_the_keys_that_web_interfaces_read(kind: str, run: Run) -> None:
    own = {
        "text_encoders.rank": "3",
        "text_encoders.alpha": "2.0",
        "lora.targets": '["full"]',
        "text_encoders.targets": '["full"]',
    }
    folder = run("sdxl", kind, trained("clip_l", "clip_g") | own | {"lora.kind": f'"{kind}"'})
    with SafetensorsFile(folder / "lora.safetensors") as file:
        names = [name for name in file.names if name.startswith("lora_te")]
        assert {name[:9] for name in names} == {"lora_te1_", "lora_te2_"}
        assert any(name.startswith("lora_te2_text_projection.") for name in names)
        alphas = [float(file.read(name)) for name in names if name.endswith(".alpha")]
        assert alphas
        assert all(np.isfinite(np.asarray(file.read(name), np.float32)).all() for name in names)
        assert 2.0 in alphas


@pytest.mark.usefixtures("trained_base")
def test_both_formats_go_there_and_back(run: Run) -> None:
    from flame_train import cli

    folder = run("sdxl", "both", trained("clip_l", "clip_g") | {"output.format": "both", "output.precision": "fp32"})
    there, back = folder / "lora.diffusers.safetensors", folder / "back.safetensors"
    with SafetensorsFile(there) as file:
        names = set(file.names)
    assert "text_encoder.text_model.encoder.layers.0.self_attn.q_proj.lora_A.weight" in names
    assert "text_encoder_2.text_model.encoder.layers.2.self_attn.out_proj.lora_B.weight" in names
    assert cli.run(["convert", str(there), str(back), "--to", "kohya"]) == 0
    with SafetensorsFile(back) as one, SafetensorsFile(folder / "lora.safetensors") as other:
        assert set(one.names) == set(other.names)
        for name in one.names:
            np.testing.assert_allclose(one.read(name), other.read(name), rtol=1e-6)


def test_rates_and_rules_reach_single_encoders(run: Run) -> None:
    """An encoder whose rate is a thousandth moves so much less; one that a rule turns off has no keys."""
    slow = run("sdxl", "slow", trained("clip_l", "clip_g") | {"text_encoders.lr": "1e-7"})
    rules = '[{match = ["clip_g.*"], lr = 1e-7}, {match = ["clip_l.*"], lr = 1e-4}]'
    ruled = run("sdxl", "ruled", trained("clip_l", "clip_g") | {"text_encoders.lr": "1e-5", "lora.rules": rules})
    off = run("sdxl", "off", trained("clip_l", "clip_g") | {"lora.rules": '[{match = ["clip_l.*"], off = true}]'})

    def moved(folder: Path, prefix: str) -> float:
        with SafetensorsFile(folder / "lora.safetensors") as file:
            ups = [np.asarray(file.read(n), np.float32) for n in file.names if n.startswith(prefix) and "_up." in n]
        return max(float(np.abs(up).max()) for up in ups) if ups else 0.0

    assert 0 < moved(slow, "lora_te1_") < 4e-7
    assert moved(slow, "lora_unet_") > 1e-4
    assert 0 < moved(ruled, "lora_te2_") < 4e-7
    assert moved(ruled, "lora_te1_") > 1e-4
    assert moved(off, "lora_te1_") == 0
    assert moved(off, "lora_te2_") > 1e-4


def test_a_finished_lora_begins_a_run_with_its_encoders(run: Run, train_small: Callable[..., int]) -> None:
    keys = trained("clip_l", "clip_g") | {"output.precision": "fp32"}
    first = run("sdxl", "first", keys)
    still = keys | {"lora.from": str(first / "lora.safetensors"), "optimizer.lr": "1e-12"}
    again = run("sdxl", "again", still, 1)
    with SafetensorsFile(again / "lora.safetensors") as one, SafetensorsFile(first / "lora.safetensors") as other:
        assert set(one.names) == set(other.names)
        for name in one.names:
            np.testing.assert_allclose(one.read(name), other.read(name), atol=1e-8)
    without = {"lora.from": str(first / "lora.safetensors"), "output.dir": str(first) + "x"}
    assert train_small("sdxl", *settings(without)) == 2


def test_only_the_others_texts_are_cached(plan_of: Callable[..., Plan]) -> None:
    """With CLIP-L alone in the step, CLIP-G's arrays are cached under keys that have nothing to do with CLIP-L."""
    for keys, cached, ids in (
        (trained("clip_l"), {"clip_g", "pooled"}, {"clip_l.ids", "clip_l.ends"}),
        (trained("clip_l", "clip_g"), set(), {f"{e}.{n}" for e in ("clip_l", "clip_g") for n in ("ids", "ends")}),
        ({"text_encoders.cache": '"off"'}, set(), {f"{e}.{n}" for e in ("clip_l", "clip_g") for n in ("ids", "ends")}),
    ):
        plan = plan_of(keys)
        assert set(plan.encoding.caption_shapes) == cached
        found = plan.encoding.keys(plan.everything, plan.prompts)
        assert bool(found.captions) == bool(cached)
        encoded = encode(plan, found, Session("cpu"))
        example = encoded.example(0)
        assert set(example) == {"mean", "logvar", "time_ids"} | cached | ids


def test_texts_are_drawn_without_end_where_nothing_is_cached(plan_of: Callable[..., Plan]) -> None:
    keys = trained("clip_l", "clip_g") | {"captions.shuffle": "true", "data.caption": '"a, b, c, d, e, f, g"'}
    plan = plan_of(keys)
    row = plan.samples.rows[0]
    count = row.text_count(cached=False)
    assert count > 10**9
    assert row.text_count(cached=True) == len(row.texts) <= 8
    made = {row.text(number) for number in range(200)}
    assert all(sorted(text.split(", ")) == sorted(row.text(0).split(", ")) for text in made)
    encoded = encode(plan, plan.encoding.keys(plan.everything, ()), Session("cpu"))
    ids = [encoded.example(0, Choice(text=number))["clip_l.ids"] for number in (3, 3)]
    np.testing.assert_array_equal(*ids)
    empty = encoded.example(0, Choice(text=3, drop_caption=True))["clip_l.ids"]
    np.testing.assert_array_equal(empty, encoded.caption("")["clip_l.ids"])


def test_a_dropped_encoder_gives_zeros(plan_of: Callable[..., Plan]) -> None:
    from flame_train.engine import tensor
    from flame_train.engine.dtype import as_dtype
    from flame_train.run.train.step_state import load_denoiser

    plan = plan_of(trained("clip_l", "clip_g") | {"text_encoders.clip_g_dropout": "0.5"})
    keys = plan.encoding.keys(plan.everything, ())
    encoded = encode(plan, keys, Session("cpu"))
    denoiser = load_denoiser(plan, "cpu")
    rows = [encoded.example(0, Choice(dropped=dropped)) for dropped in (frozenset(), frozenset({"clip_g"}))]
    arrays = {name: tensor(np.stack([row[name] for row in rows])) for name in rows[0]}
    made = denoiser.conditioned(arrays, as_dtype("fp32"))
    for name in ("clip_g", "pooled"):
        assert np.abs(made[name].numpy()[0]).max() > 0
        assert np.abs(made[name].numpy()[1]).max() == 0
    own, beside = made["clip_l"].numpy()  # the same caption, whose last bits on a CPU depend on its row of a product
    np.testing.assert_allclose(beside, own, rtol=1e-5, atol=1e-6)


def test_memory_is_predicted_with_the_encoders_in_the_step(plan_of: Callable[..., Plan]) -> None:
    plain, with_text = plan_of({}), plan_of(trained("clip_l", "clip_g"))
    without, with_them = predicted_memory(plain, H100), predicted_memory(with_text, H100)
    weights = sum(encoder.part.network.num_weights() for encoder in with_text.model.text)
    assert with_them.training - without.training > 4 * weights


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (trained("clip_h"), "text_encoders.train: expected names among clip, clip_g, clip_l, mistral, qwen3, t5"),
        (trained("t5"), 'text_encoders.train: expected "clip_l" or "clip_g" for SDXL, got "t5"'),
        (trained("clip_l", "clip_l"), "text_encoders.train: expected each name once"),
        (trained("clip_l") | {"text_encoders.cache": '"on"'}, 'expected none with text_encoders.cache = "on"'),
        ({"text_encoders.lr": "1e-5"}, "text_encoders.lr: expected text_encoders.train with it"),
        ({"text_encoders.rank": "4"}, "text_encoders.rank: expected text_encoders.train with it"),
        (
            trained("clip_l", "clip_g") | {"captions.variants": "4"},
            "captions.variants: it says how many texts of an image are cached",
        ),
        (
            trained("clip_l", "clip_g") | {"text_encoders.targets": '["clip_g.*.q_proj"]'},
            'text_encoders.targets: they choose no layer of "clip_l"',
        ),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(
    keys: dict[str, str], said: str, refused: Callable[[dict[str, str]], str]
) -> None:
    assert said in refused(keys)
