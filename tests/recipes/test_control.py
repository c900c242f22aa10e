"""Runs with control images, on small bases: the same bytes again, what the report shows, and what is refused."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps

from flame_train import cli
from flame_train.config.load import load_located
from flame_train.data.buckets import BucketRule, placed_beside
from flame_train.data.views import View, ViewRule
from flame_train.engine.backend.cpu import CpuBackend
from flame_train.engine.shape_run import H100
from flame_train.io.safetensors import SafetensorsFile, save_file
from flame_train.run.check.check_run import check
from flame_train.run.encode.encoders import load_encoders
from flame_train.run.memory.prediction import predicted_memory
from flame_train.run.plan.plan import Plan, make_plan
from flame_train.text_encoders.qwen3.vision_encoder import Qwen3VLEncoder
from flame_train.training.session import StopRequest
from tests.recipes.bases import FP8, below, small_base
from tests.run_files import arrays_of, lora_of, losses_of

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Small bases; Flux's says by its name that it is Kontext, and Qwen-Image 1's that it is Edit 2511."""
    families = "flux2", "flux3", "flux", "qwenimage", "qwenimage1", "krea2"
    made = {family: small_base(tmp_path_factory, family) for family in families}
    for family, name in (("flux", "flux1-kontext"), ("qwenimage1", "qwen_image_edit_2511_bf16")):
        made[family] = made[family].rename(made[family].with_name(f"{name}.safetensors"))
    return made


@pytest.fixture
def edits(drawn: Path, tmp_path: Path) -> Path:
    """Beside the drawings a folder of them in negative, and one of references of other shapes, in which some differ."""
    for name in ("before", "style"):
        (tmp_path / name).mkdir()
    for number, path in enumerate(sorted(drawn.glob("*.png"))):
        with Image.open(path) as image:
            ImageOps.invert(image.convert("RGB")).save(tmp_path / "before" / f"{path.stem}.jpg")
            size = (80, 48) if number % 2 else (48, 80)
            image.resize(size).save(tmp_path / "style" / path.name)
    return tmp_path


@pytest.fixture
def config(bases: dict[str, Path], edits: Path) -> Callable[..., Path]:
    """A config of four steps with control images, for klein or Kontext; `more` are lines of `[data]`."""

    def made(family: str = "flux2", control: str = '["before", "style"]', more: str = "") -> Path:
        folders = re.sub(r"\b(before|style)\b", lambda found: str(edits / found[0]), control)
        tokens = {"flux": "t5_tokens = 77", "krea2": "qwen3_tokens = 256", "qwenimage1": "qwen3_tokens = 1024"}.get(
            family, "qwen3_tokens = 128"
        )
        step = 32 if family == "qwenimage" else 16
        path = edits / "config.toml"
        path.write_text(
            f'[model]\ncheckpoint = "{bases[family]}"\n[text_encoders]\n{tokens}\n'
            f'[data]\npath = "{edits / "images"}"\nresolution = 64\nbucket_step = {step}\nmin_bucket = 32\n'
            "batch_size = 2\n"
            f'control = {folders}\n{more}\n[lora]\nrank = 2\nalpha = 2.0\n[train]\nsteps = 4\nprecision = "fp32"\n'
            f'[checkpoint]\nevery = 2\n[output]\ndir = "{edits / "run"}"\n'
        )
        return path

    return made


def trained(path: Path, *settings: str) -> int:
    return cli.run(["train", str(path), "--device", "cpu", *(x for each in settings for x in ("--set", each))])


def planned(path: Path, *settings: str) -> Plan:
    return make_plan(check(load_located(str(path), settings)), StopRequest())


@pytest.mark.bytes
@pytest.mark.parametrize(
    "family",
    [
        *("flux2", "qwenimage"),
        *(pytest.param(name, marks=pytest.mark.proof) for name in ("flux3", "krea2", "qwenimage1")),
    ],
)
def test_a_run_gives_the_same_bytes_again_and_after_it_was_cut_short(
    config: Callable[..., Path], edits: Path, family: str
) -> None:
    """With two control images of different buckets, mirrored too, checkpointing, validation and previews.

    Qwen-Image stretches those of previews to as many pixels as the resolution has.
    """
    path, run = config(family, more="flip = true"), edits / "run"
    control = f'control = ["{edits / "style" / "0.png"}"]'.replace(
        "0.png", sorted(p.name for p in (edits / "style").iterdir())[0]
    )
    path.write_text(
        f'{path.read_text()}[sample]\nevery = 2\nsteps = 2\n[[sample.prompts]]\ntext = "a red circle"\n{control}\n'
        '[validation]\nevery = 2\nfraction = 0.2\ntimesteps = 1\n[gradient]\ncheckpointing = "full"\n'
    )
    assert trained(path) == 0
    first = lora_of(run)
    image = (run / "samples" / "step-000004.png").read_bytes()
    with Image.open(run / "samples" / "step-000004.png") as grid:
        size = {(96, 64), (64, 96)} if family.startswith("qwenimage") else {(80, 48), (48, 80)}
        assert grid.size in size
    with Image.open(run / "controls.png") as shown, Image.open(json.loads(control.partition(" = ")[2])[0]) as looked_at:
        assert shown.size == looked_at.size
        assert shown.tobytes() == looked_at.convert("RGB").tobytes()
    assert "control: a red circle" in (run / "report.html").read_text()
    rows = json.loads((run / "dataset.json").read_text())
    assert {len(row["controls"]) for row in rows} == {2}
    assert rows[0]["controls"][0]["file"].startswith("before/")
    shapes = {(row["bucket"], *(own["bucket"] for own in row["controls"])) for row in rows}
    assert {len(shape) for shape in shapes} == {3}
    assert len(shapes) > len({row["bucket"] for row in rows})

    shutil.rmtree(run / "checkpoints" / "step-000004")
    (run / "lora.safetensors").unlink()
    assert trained(path, "model.offload=1.0") == 0
    assert lora_of(run) == first
    assert (run / "samples" / "step-000004.png").read_bytes() == image
    assert trained(path, f"output.dir={edits / 'again'}") == 0
    assert lora_of(edits / "again") == first


def test_a_text_encoder_that_reads_images_has_states_of_each_caption_beside_each_view(
    config: Callable[..., Path], edits: Path, bases: dict[str, Path]
) -> None:
    """So the cache is as the plan says, a slider's captions are read beside them too, and memory is predicted."""
    plain = planned(config("qwenimage", "[]"))
    assert all(not reading.images for reading in plain.cache_keys().captions)
    slider = '[preservation]\nkind = "slider"\npositive = "large"\nnegative = "small"\ntarget = "a shape"'
    path = config("qwenimage", '"before"', f"flip = true\n{slider}")
    plan = planned(path)
    seen = [image for row in plan.samples.rows for view in range(2) for image in row.controls_beside(view)]
    assert len(set(seen)) == 2 * len(plan.samples.rows)
    read = plan.cache_keys().captions
    assert {reading.images for reading in read if reading.text == "large"} == {(image,) for image in seen}
    texts = {text for row in plan.samples.rows for text in row.texts}
    assert texts < {reading.text for reading in read if reading.images}
    assert len(set(read.values())) == len(read)
    assert predicted_memory(plain, H100).training < predicted_memory(plan, H100).training
    assert trained(path, "train.steps=1", "checkpoint.every=1") == 0
    cached = sum(file.stat().st_size for file in (edits / "images" / ".flame-cache").rglob("*.safetensors"))
    assert plan.cache_bytes() < cached < 1.2 * plan.cache_bytes()


def test_captions_with_images_of_equal_sizes_are_encoded_together(
    config: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a GPU takes them: the arrays are those of captions that are encoded one by one."""
    plan, rows = planned(config("qwenimage", more="flip = true")), list[int]()
    captions = {caption: caption for caption in plan.cache_keys().captions}
    alone = dict(zip(captions, load_encoders(plan.encoding, "cpu").captions([*captions]), strict=True))

    def counted(self: Qwen3VLEncoder, network: Any, inputs: Mapping[str, Any]) -> Any:
        rows.append(inputs["ids"].shape[0])
        return encode(self, network, inputs)

    encode = Qwen3VLEncoder.encode
    monkeypatch.setattr(Qwen3VLEncoder, "encode", counted)
    monkeypatch.setattr("flame_train.text_encoders.qwen3.vision_encoder.TOKENS", 600)
    monkeypatch.setattr(CpuBackend, "asynchronous", True)
    encoders = load_encoders(plan.encoding, "cpu")
    parts = encoders.batches(captions)
    assert sorted(map(id, captions)) == sorted(id(caption) for part in parts for caption in part)
    assert {len({tuple(image.view.placement.bucket for image in c.images) for c in part}) for part in parts} == {1}
    for part in parts:
        for caption, together in zip(part, encoders.captions(part), strict=True):
            assert together.keys() == alone[caption].keys()
            for name, array in together.items():
                np.testing.assert_allclose(array, alone[caption][name], rtol=1e-4, atol=1e-5)
    assert min(rows) > 1
    assert len(rows) < len(captions)


def test_captions_that_control_images_leave_too_little_room_for_are_told(
    config: Callable[..., Path], edits: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A byte is a token here, so a hundred fit into 128 by themselves, and not beside an image's 64."""
    for path in (edits / "images").glob("*.txt"):
        path.write_text("a" * 100)
    path = config("krea2", '"before"')
    planned(path)
    planned(path, "text_encoders.qwen3_tokens=128", "data.control=[]")
    assert "longer than" not in caplog.text
    planned(path, "text_encoders.qwen3_tokens=128")
    assert "12 captions are longer than text_encoders.qwen3_tokens=128" in caplog.text


def test_control_images_that_leave_no_room_for_a_caption_are_refused(
    config: Callable[..., Path], bases: dict[str, Path], edits: Path, capsys: Capture
) -> None:
    """Krea 2 sees their states in the text, of which two small images have 128."""
    assert cli.run(["train", str(config("krea2")), "--dry-run", "--set", "text_encoders.qwen3_tokens=128"]) == 2
    assert re.search(r"qwen3_tokens: expected more than \d+, which 2 control images", capsys.readouterr().err)
    one = sorted((edits / "style").iterdir())[0]
    size = ["--width", "64", "--height", "64", "--qwen3-tokens", "128", "--device", "cpu", "-o", str(edits / "a.png")]
    assert cli.run(["sample", "-m", str(bases["krea2"]), "-p", "red", *["--control", str(one)] * 2, *size]) == 2
    assert re.search(r"--qwen3-tokens: expected more than \d+, which 2 control images and", capsys.readouterr().err)


def test_a_checkpoint_without_the_vision_tower_takes_no_control_images(
    config: Callable[..., Path], bases: dict[str, Path], tmp_path: Path, capsys: Capture
) -> None:
    path = config("qwenimage", '"before"')
    assert cli.run(["train", str(path), "--dry-run", "--set", "text_encoders.cache=off"]) == 2
    assert 'text_encoders.cache: expected "on" for Qwen-Image 2.1 with control images' in capsys.readouterr().err
    with SafetensorsFile(bases["qwenimage"]) as file:
        kept = {name: file.read(name) for name in file.names if ".visual." not in name}
    save_file(tmp_path / "less.safetensors", kept)
    shutil.copy(bases["qwenimage"].with_name("tokenizer.json"), tmp_path)
    path.write_text(path.read_text().replace(str(bases["qwenimage"]), str(tmp_path / "less.safetensors")))
    assert cli.run(["train", str(path), "--dry-run"]) == 3
    said = capsys.readouterr().err
    assert "expected a Qwen3-VL vision tower" in said
    assert "Traceback" not in said
    assert cli.run(["train", str(path), "--dry-run", "--set", "data.control=[]"]) == 0


def test_what_is_learnt_depends_on_the_control_images(config: Callable[..., Path], edits: Path) -> None:
    path = config("flux", '"before"')
    assert trained(path, "train.steps=1", "checkpoint.every=1") == 0
    first = lora_of(edits / "run")
    assert trained(path, "train.steps=1", f"data.control={edits / 'images'}", f"output.dir={edits / 'other'}") == 0
    assert lora_of(edits / "other") != first


def test_a_run_is_not_continued_with_other_control_images(
    config: Callable[..., Path], edits: Path, capsys: Capture
) -> None:
    path = config("flux", '"before"')
    path.write_text(f'{path.read_text()}[schedule]\nname = "constant"\n')
    assert trained(path, "train.steps=1", "checkpoint.every=1") == 0
    changed = sorted((edits / "before").iterdir())[3]
    with Image.open(changed) as image:
        ImageOps.mirror(image).save(changed)
    capsys.readouterr()
    assert trained(path, "train.steps=2", "checkpoint.every=1") != 0
    assert f"{changed.stem}.png is with another control image" in capsys.readouterr().err


def test_the_plan_counts_longer_sequences_and_what_the_cache_takes(config: Callable[..., Path], edits: Path) -> None:
    plans = [
        planned(config(control=control), "train.precision=bf16")
        for control in ("[]", '["before"]', '["before", "style"]')
    ]
    taken = [predicted_memory(plan, H100).training for plan in plans]
    assert taken[0] < taken[1] < taken[2]
    sizes = [plan.cache_bytes() for plan in plans]
    of_images = sum(plans[0].encoding.image_bytes(row.placement) for row in plans[0].samples.rows)
    assert sizes[1] - sizes[0] == of_images
    assert sizes[2] > sizes[1]


@pytest.mark.bytes
def test_comfyuis_files_of_qwen_image_edit_train_with_one_image_beside_some_and_two_beside_others(
    config: Callable[..., Path], edits: Path, bases: dict[str, Path]
) -> None:
    """A tensor says 2511 in a file of another name; its weights are scaled fp8, and the encoder's file has the tower.

    So the losses are those of the whole file, whose name says it.
    """
    arrays = arrays_of(bases["qwenimage1"])
    transformer = below("model.diffusion_model.", arrays)
    linear = [name for name in transformer if name.endswith(("to_q.weight", "net.2.weight"))]
    stored = {name: (8 * transformer[name].astype(np.float32)).astype(FP8) for name in linear}
    factors = {name.replace(".weight", ".scale_weight"): np.array(0.125, np.float32) for name in linear}
    rounded = {f"model.diffusion_model.{n}": (a.astype(np.float32) / 8).astype(np.float16) for n, a in stored.items()}
    marks = {"__index_timestep_zero__": np.zeros(0, np.float16), "scaled_fp8": np.zeros(0, FP8)}
    save_file(edits / "mine.safetensors", transformer | stored | factors | marks)
    save_file(edits / "qwen_2.5_vl_7b.safetensors", below("text_encoders.qwen25_7b.transformer.", arrays))
    save_file(edits / "qwen-image-edit-2511.safetensors", arrays | rounded)
    shutil.copy(bases["qwenimage1"].with_name("tokenizer.json"), edits)
    kept = {path.stem for path in sorted((edits / "images").glob("*.png"))[:3]}
    for path in (each for folder in ("images", "before", "style") for each in (edits / folder).iterdir()):
        if path.stem not in kept:
            path.unlink()
    text = re.sub(r"\n(path|control) = .*", "", config("qwenimage1").read_text())
    sets = "".join(
        f'[[data.sets]]\npath = "{edits / "images"}"\ncontrol = {json.dumps([str(edits / f) for f in folders])}\n'
        for folders in (("before",), ("before", "style"))
    )
    path, losses = edits / "sets.toml", []
    path.write_text(text.replace("[lora]", f"{sets}[lora]"))
    apart = [f"model.vae={bases['qwenimage1']}", f"text_encoders.qwen3={edits / 'qwen_2.5_vl_7b.safetensors'}"]
    for file, more in (("mine", apart), ("qwen-image-edit-2511", [])):
        run = [f"model.checkpoint={edits / file}.safetensors", f"output.dir={edits / file}", "train.steps=3", *more]
        assert trained(path, *run, "checkpoint.every=3") == 0
        losses.append(losses_of(edits / file))
        rows = json.loads((edits / file / "dataset.json").read_text())
        assert {len(row["controls"]) for row in rows} == {1, 2}
    assert losses[0] == losses[1]


def test_a_prompt_of_a_file_names_control_images(config: Callable[..., Path], edits: Path) -> None:
    """As kohya's files have prompts; one without names shows those of `sample.control`, and an empty list none."""
    one, other = sorted((edits / "before").iterdir())[:2]
    (edits / "prompts.txt").write_text(f"a circle --ci {one}\na square\n")
    (edits / "prompts.toml").write_text(f'[[prompt.subset]]\nprompt = "a"\ncontrol = ["{one}", "{other}"]\n')
    path = config(control="[]")
    files = [f"sample.prompt_file={edits / name}" for name in ("prompts.txt", "prompts.toml")]
    found = [planned(path, file, f"sample.control={other}", "sample.steps=1").requests for file in files]
    assert [request.control for request in found[0]] == [(str(one),), (str(other),)]
    assert found[1][0].control == (str(one), str(other))
    none = planned(path, f"sample.control={other}", 'sample.prompts=[{text = "a", control = []}]')
    assert none.requests[0].control == none.shown == ()
    assert none.requests[0].size == (64, 64)


def test_control_images_may_lie_in_a_folder_below_the_images(config: Callable[..., Path], edits: Path) -> None:
    (edits / "before").rename(edits / "images" / "before")
    path = config("flux", "[]")
    found = planned(path, f"data.control={edits / 'images' / 'before'}")
    assert len(found.samples.rows) == 12
    assert {row.item.controls[0].path.parent.name for row in found.samples.rows} == {"before"}


def test_the_report_shows_control_images(config: Callable[..., Path], edits: Path, capsys: Capture) -> None:
    assert cli.run(["dataset", str(config()), "--output", str(edits / "report"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["sets"][0]["control_images"] == 24
    assert all(len(row["controls"]) == 2 for row in told["files"])
    alone = json.loads((edits / "report" / "report.json").read_text())
    assert alone["files"] == told["files"]
    assert cli.run(["dataset", str(config(control="[]")), "--output", str(edits / "plain"), "--json"]) == 0
    sheet = f"bucket-{told['buckets'][0]['bucket']}.png"
    with Image.open(edits / "report" / sheet) as shown, Image.open(edits / "plain" / sheet) as plain:
        assert shown.width > 2 * plain.width


@pytest.mark.parametrize("flipped", [False, True])
def test_a_control_image_goes_along_with_its_image(flipped: bool) -> None:
    """Of the same size it is cut at the same pixels; of half the size at the same places."""
    rule, pixels = BucketRule(64, 16, 32), np.random.default_rng(0).integers(0, 256, (100, 260, 3), np.uint8)
    placement = rule.assign((100, 260))
    view = ViewRule(flipped, random_crop=True, count=3).views(placement, "0" * 64)[-1]
    assert view.flipped == flipped
    along = view.along(placed_beside((100, 260), placement, rule))
    assert along == view
    np.testing.assert_array_equal(along.pixels(pixels), view.pixels(pixels))
    half = view.along(placed_beside((50, 130), placement, rule)).placement
    assert half.bucket == placement.bucket
    assert abs(half.crop_left - view.placement.crop_left) <= 1
    other = placed_beside((260, 100), placement, rule)
    assert other.bucket == rule.assign((260, 100)).bucket
    assert View(placement).along(other).placement == other


Spoil = Callable[[Path, Path], None]


def no_control(config: Path, edits: Path) -> None:
    sorted((edits / "before").iterdir())[2].unlink()


def two_controls(config: Path, edits: Path) -> None:
    first = sorted((edits / "before").iterdir())[0]
    shutil.copy(first, first.with_suffix(".png"))


def damaged_control(config: Path, edits: Path) -> None:
    path = sorted((edits / "before").iterdir())[2]
    path.write_bytes(path.read_bytes()[:300])


def no_folder(config: Path, edits: Path) -> None:
    shutil.rmtree(edits / "before")


def small_control(config: Path, edits: Path) -> None:
    Image.new("RGB", (9, 90)).save(sorted((edits / "before").iterdir())[2])


def some_sets(config: Path, edits: Path) -> None:
    text = re.sub(r"\npath = .*", "", config.read_text())
    table = f'[[data.sets]]\npath = "{edits / "images"}"\n'
    config.write_text(f"{text}{table}{table}control = []\n")


def no_prompt_image(config: Path, edits: Path) -> None:
    config.write_text(f'{config.read_text()}[[sample.prompts]]\ntext = "a"\ncontrol = "{edits / "none.png"}"\n')


REFUSED: dict[Spoil, str] = {
    no_control: r"expected a control image \S+ \(.*\) in .*before, got none",
    two_controls: "expected one control image in .*before, got .*jpg and .*png",
    damaged_control: r"control image \S*before/\S+jpg: ",
    no_folder: "before: .*data.control",
    small_control: r"its control image \S+jpg: 9x90 pixels is below",
    some_sets: "data.sets: expected control in every table or in none, got none in table 2",
    no_prompt_image: r"sample.prompts: control of prompt 1: \S*none.png: ",
}


@pytest.mark.parametrize("spoil", REFUSED, ids=lambda spoil: spoil.__name__)
def test_a_bad_control_image_is_one_line(
    config: Callable[..., Path], edits: Path, capsys: Capture, spoil: Spoil
) -> None:
    path = config("flux", '"before"')
    spoil(path, edits)
    assert cli.run(["train", str(path), "--dry-run"]) in (2, 3)
    said = capsys.readouterr().err
    assert len(re.findall(REFUSED[spoil], said)) == 1, said
    assert "Traceback" not in said
    assert len(said.strip().splitlines()) <= 2
    assert not (edits / "run").exists()


def test_models_that_take_none_say_why(
    config: Callable[..., Path], edits: Path, small_base: Path, tmp_path: Path, capsys: Capture, bases: dict[str, Path]
) -> None:
    control = sorted((edits / "before").iterdir())[0]
    text = config("flux", '"before"').read_text()
    dev = tmp_path / "flux1-dev.safetensors"
    shutil.copy(bases["flux"], dev)
    shutil.copy(bases["flux"].with_name("tokenizer.json"), tmp_path)
    path = tmp_path / "other.toml"
    path.write_text(text.replace(str(bases["flux"]), str(dev)))
    assert cli.run(["train", str(path), "--dry-run"]) == 2
    assert "data.control: nothing says that this checkpoint is FLUX.1 Kontext" in capsys.readouterr().err
    assert cli.run(["train", str(path), "--dry-run", "--set", "model.kontext=true"]) == 0
    capsys.readouterr()
    assert cli.run(["train", str(config("flux", '["before", "style"]')), "--dry-run"]) == 2
    assert "data.control: expected at most 1 control image for this model, got 2" in capsys.readouterr().err
    path.write_text(re.sub(r"t5_tokens = 77", "", text).replace(str(bases["flux"]), str(small_base)))
    assert cli.run(["train", str(path), "--dry-run", "--set", "data.bucket_step=32"]) == 2
    assert capsys.readouterr().err.count("data.control: SDXL looks at no control images here") == 1
    draw = ["sample", "-p", "a", "--control", str(control), "-o", str(tmp_path / "x.png"), "--device", "cpu"]
    assert cli.run([*draw, "-m", str(small_base)]) == 2
    assert "--control: SDXL looks at no control images here" in capsys.readouterr().err
    assert cli.run([*draw, "-m", str(bases["flux"]), "--control", str(tmp_path / "none.png")]) == 2
    assert re.search(r"--control: expected at most 1 control image", capsys.readouterr().err)
    assert cli.run([*draw[:4], str(tmp_path / "none.png"), *draw[5:], "-m", str(bases["flux"])]) == 2
    assert re.search(r"--control: \S*none.png: ", capsys.readouterr().err)
