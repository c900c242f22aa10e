"""Preservation in whole runs: resume, caches, what is asked of the base model, and refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from flame_train import cli
from flame_train.config.load import load_located
from flame_train.data.order import FIRST
from flame_train.data.samples import EncoderInput
from flame_train.engine.shape_run import H100
from flame_train.run.check.check_run import check
from flame_train.run.memory.prediction import predicted_memory
from flame_train.run.plan.plan import make_plan
from flame_train.training.session import Session, StopRequest
from tests.recipes.bases import settings
from tests.recipes.test_text_encoders import trained
from tests.run_files import lora_of, losses_of

CLASS = {"preservation.kind": '"class"', "preservation.class_word": '"shape"', "captions.trigger": '"sks"'}
SLIDER = {
    "preservation.kind": '"slider"',
    "preservation.positive": '"a large circle"',
    "preservation.negative": '"a small circle"',
    "preservation.target": '"a circle"',
}
BLANK = {"preservation.kind": '"blank"'}
KINDS = {"class": CLASS, "blank": BLANK, "slider": SLIDER}

Run = Callable[..., Path]


def sets(folder: Path, **keys: object) -> dict[str, str]:
    """The folder as a set that is learnt, and as one whose model is kept."""
    kept = {"path": str(folder), "regularization": True, **keys}
    tables = [{"path": str(folder)}, kept]
    rows = ["{" + ", ".join(f"{k} = {json.dumps(v)}" for k, v in table.items()) + "}" for table in tables]
    return {"data.path": '""', "data.sets": f"[{', '.join(rows)}]"}


@pytest.mark.parametrize(("family", "kind"), [("sdxl", "class"), ("sd3", "slider"), ("flux", "blank")])
def test_a_run_with_trained_text_encoders_continues_to_the_bit(family: str, kind: str, run: Run) -> None:
    keys = KINDS[kind] | trained("clip_l") | {"lora.dropout": "0.1", "data.caption_dropout": "0.3"}
    whole = run(family, "whole", keys)
    run(family, "parts", keys, 2)
    assert lora_of(run(family, "parts", keys)) == lora_of(whole)
    assert np.isfinite(losses_of(whole)).all()


def test_the_first_step_pays_nothing_for_what_is_kept(run: Run) -> None:
    """An adapter that changes nothing yet is the base model: its loss is that of the run without preservation."""
    fast = {"captions.trigger": '"sks"', "optimizer.lr": "1e-2"}
    plain, kept = losses_of(run("sdxl", "plain", fast)), losses_of(run("sdxl", "kept", CLASS | fast))
    assert kept[0] == plain[0]
    assert kept[1:] != plain[1:]


def test_the_base_model_teaches_the_images_of_a_set(run: Run, drawn: Path) -> None:
    """Where it teaches all images, the first loss is 0, and nothing is learnt."""
    of_all = sets(drawn, regularization_target="base")
    of_all["data.sets"] = of_all["data.sets"].replace(f'{{path = "{drawn}"}}, ', "")
    folder = run("sdxl", "all", of_all)
    assert losses_of(folder) == [0.0] * 3
    mixed = run("sdxl", "mixed", sets(drawn, regularization_target="base"), 6)
    assert min(losses_of(mixed)) < max(losses_of(mixed))


def test_the_base_model_is_asked_for_its_samples_alone(run: Run, drawn: Path, tmp_path: Path) -> None:
    """Batches without such a sample have another signature, and no teacher's forward pass."""
    from flame_train.run.encode.encode import encode
    from flame_train.run.train.step_state import load_networks
    from flame_train.run.train.train_run import _loader
    from flame_train.training.batch import BASE_IS_TARGET

    run("sdxl", "first", {}, 1)
    keys = sets(drawn, regularization_target="base") | {"data.batch_size": "1", "output.dir": str(tmp_path / "x")}
    source = str(tmp_path / "sdxl" / "config.toml")
    plan = make_plan(check(load_located(source, settings(keys)[1::2])), StopRequest())
    found = plan.encoding.keys(plan.everything, plan.prompts)
    encoded = encode(plan, found, Session("cpu"))
    _, _, state = load_networks(plan, Session("cpu"))
    taught = []
    with _loader(plan, encoded, 0, state, "cpu") as loader:
        for number in range(plan.order.batches_per_epoch):
            index = plan.order.batch_at(number).indices[0]
            taught.append((BASE_IS_TARGET in loader.take().arrays, plan.samples.rows[index].set.base_is_target))
    assert all(found == wanted for found, wanted in taught)
    assert {wanted for _, wanted in taught} == {False, True}


def test_a_class_stands_in_the_triggers_place(run: Run, tmp_path: Path) -> None:
    run("sdxl", "first", {}, 1)
    source = str(tmp_path / "sdxl" / "config.toml")
    plan = make_plan(check(load_located(source, settings(CLASS | {"output.dir": "x"})[1::2])), StopRequest())
    row = plan.samples.rows[0]
    assert "sks" in row.text(0)
    asked: list[str] = []
    plan.preserved.arrays(row, FIRST, lambda text: asked.append(text) or {"clip_l": np.zeros(1)})
    assert asked == [row.text(0).replace("sks", "shape")]
    assert EncoderInput(asked[0]) in plan.prompts


@pytest.mark.usefixtures("trained_base")
def test_memory_counts_the_further_rows(run: Run, tmp_path: Path, drawn: Path) -> None:
    run("sdxl", "first", {}, 1)
    source = str(tmp_path / "sdxl" / "config.toml")

    def predicted(keys: dict[str, str]) -> int:
        plan = make_plan(check(load_located(source, settings(keys | {"output.dir": "x"})[1::2])), StopRequest())
        return predicted_memory(plan, H100).training

    plain = predicted({})
    for keys in (CLASS, BLANK, SLIDER, sets(drawn, regularization_target="base")):
        assert predicted(keys) > plain


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"preservation.kind": '"class"'}, "preservation.class_word: expected what the trigger is one of"),
        (
            {"preservation.kind": '"class"', "preservation.class_word": '"dog"'},
            "preservation.class_word: expected captions.trigger with it",
        ),
        ({"preservation.kind": '"slider"'}, "preservation.positive: expected another prompt than"),
        ({"preservation.class_word": '"dog"'}, 'preservation.class_word: expected preservation.kind = "class" with it'),
        ({"preservation.weight": "0.5"}, "preservation.weight: expected preservation.kind with it"),
        ({"preservation.kind": '"prior"'}, "preservation.kind: expected"),
        (
            {"data.path": '""', "data.sets": '[{path = "x", regularization_target = "base"}]'},
            'data.sets: expected regularization = true with regularization_target = "base" in table 1',
        ),
        (
            SLIDER | {"data.path": '""', "data.sets": '[{path = "x"}, {path = "x", regularization = true}]'},
            "preservation.positive: expected no set with regularization",
        ),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(
    keys: dict[str, str], said: str, refused: Callable[[dict[str, str]], str]
) -> None:
    assert said in refused(keys)


def test_a_slider_is_drawn_at_both_ends(run: Run, tmp_path: Path) -> None:
    """`sample --strength` goes below 0; the ends differ from each other and from the middle."""
    folder = run("sdxl", "slider", SLIDER | {"optimizer.lr": "1e-2"}, 6)
    base, drawings = str(tmp_path / "sdxl" / "base.safetensors"), []
    for strength in ("-1", "0", "1"):
        out = tmp_path / f"at{strength}.png"
        words = ["sample", "-m", base, "-p", "a circle", "-o", str(out), "--device", "cpu", "--precision", "fp32"]
        words += ["--lora", str(folder / "lora.safetensors"), "--strength", strength]
        assert cli.run([*words, "--width", "64", "--height", "64", "--steps", "2"]) == 0
        from PIL import Image

        drawings.append(np.asarray(Image.open(out)).tobytes())
    assert len(set(drawings)) == 3
