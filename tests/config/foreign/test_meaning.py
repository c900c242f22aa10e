"""Settings of one name and another meaning, by the program's source, and families that are trained here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flame_train.errors import ConfigError
from flame_train.tools.import_config import import_config


def job(train: str = "", model: str = "arch: flux", rest: str = "", dataset: str = "") -> str:
    """A job of ai-toolkit."""
    return f"""\
job: extension
config:
  name: fox
  process:
    - type: sd_trainer
      training_folder: out
      network: {{type: lora, linear: 8}}
      datasets:
        - {{folder_path: images, resolution: 512{dataset}}}
      train: {{steps: 2000, lr: 1e-4, optimizer: adamw8bit{train}}}
      model: {{name_or_path: base.safetensors, {model}}}
{rest}"""


def pipe(own: str = "", model: str = "type = 'flux'", dataset: str = "resolutions = [512]", folder: str = "") -> dict:
    """diffusion-pipe's files."""
    return {
        "pipe.toml": f"output_dir = 'o'\ndataset = 'd.toml'\nepochs = 3\n{own}\n[model]\n{model}\ndtype = 'bfloat16'\n"
        "[adapter]\ntype = 'lora'\nrank = 8\n[optimizer]\ntype = 'adamw'\nlr = 2e-5\n",
        "d.toml": f"enable_ar_bucket = true\n{dataset}\n[[directory]]\npath = 'images'\n{folder}\n",
    }


def tuner(sets: Any = None, **settings: Any) -> dict[str, str]:
    """SimpleTuner's files."""
    given = {"model_family": "flux", "model_type": "lora", "data_backend_config": "b.json", "learning_rate": 1e-4}
    folder = {"id": "a", "type": "local", "instance_data_dir": "images"}
    return {
        "simple.json": json.dumps(given | {"optimizer": "adamw_bf16", "max_train_steps": 100} | settings),
        "b.json": json.dumps([folder | one for one in sets or [{}]]),
    }


def trainer(**settings: Any) -> dict[str, str]:
    """A config of OneTrainer."""
    given = {"training_method": "LORA", "model_type": "FLUX_DEV_1", "base_model_name": "b.safetensors"}
    return {"one.json": json.dumps(given | {"learning_rate": 1e-4, "output_model_destination": "o/fox"} | settings)}


def imported(folder: Path, files: dict[str, str], **given: Any) -> dict[str, Any]:
    """The result for the first of `files`, with the values by key."""
    for name, text in files.items():
        (folder / name).write_text(text)
    result = import_config(str(folder / next(iter(files))), None, **given)
    result["values"] = {key: each["value"] for key, each in result["carried"].items()}
    return result


MEANT = {
    "SimpleTuner counts text encoders, and calls PyTorch's optimizers by its name": (
        tuner(text_encoder_1_precision="no_change", text_encoder_2_precision="int8-quanto", optimizer="torch-adamw"),
        {"text_encoders.precision": "int8", "optimizer.name": "adamw"},
    ),
    "a step of ai-toolkit is a batch": (
        {"j.yaml": job(", gradient_accumulation_steps: 4", rest="      save: {save_every: 400}\n")},
        {"train.steps": 500, "gradient.accumulation": 4, "checkpoint.every": 100, "sample.every": 25},
    ),
    "its other accumulation is as here": (
        {"j.yaml": job(", gradient_accumulation: 4")},
        {"train.steps": 2000, "gradient.accumulation": 4},
    ),
    "its warm-up counts batches": (
        {
            "j.yaml": job(
                ", gradient_accumulation_steps: 4, lr_scheduler: constant_with_warmup,"
                " lr_scheduler_params: {num_warmup_steps: 80}"
            )
        },
        {"schedule.name": "constant", "schedule.warmup_steps": 20},
    ),
    "its linear schedule rises": ({"j.yaml": job(", lr_scheduler: linear")}, {"schedule.name": "constant"}),
    "its places in a list of levels begin with noise": (
        {"j.yaml": job(", timestep_type: linear, min_denoising_steps: 200, max_denoising_steps: 899")},
        {"loss.max_timestep": 800, "loss.min_timestep": 100},
    ),
    "its Prodigy gets a rate of 1": (
        {"j.yaml": job().replace("adamw8bit", "prodigy")},
        {"optimizer.name": "prodigy", "optimizer.lr": 1.0},
    ),
    "its weighted levels are even": (
        {"j.yaml": job(", timestep_type: weighted")},
        {"loss.timestep_sampling": "uniform", "loss.shift": 1.0},
    ),
    "its adapter is on the hub": (
        {"j.yaml": job(model="arch: 'zimage:turbo', assistant_lora_path: own/adapter/v2.safetensors")},
        {"model.training_adapter": "hf:own/adapter/v2.safetensors"},
    ),
    "its guidance loss": (
        {"j.yaml": job(", do_guidance_loss: true, guidance_loss_target: [3, 4.5], guidance_loss_schedule: sigma")},
        {"loss.contrastive_scale": [3.0, 4.5], "loss.contrastive_schedule": "sigma"},
    ),
    "it draws first, as is usual here, unless it is told not to": (
        {"j.yaml": job(", skip_first_sample: true")},
        {"sample.first": False},
    ),
    "pairs of diffusion-pipe are areas": (
        pipe(dataset="resolutions = [[832, 1216], [1280, 720]]"),
        {"data.resolutions": [960, 1008]},
    ),
    "a pair and a side": (pipe(dataset="resolutions = [512, [1280, 720]]"), {"data.resolutions": [512, 960]}),
    "its batch of images": (
        pipe("micro_batch_size_per_gpu = 1\nimage_micro_batch_size_per_gpu = 4"),
        {"data.batch_size": 4},
    ),
    "its batch of images in one size": (pipe("micro_batch_size_per_gpu = [[512, 2]]"), {"data.batch_size": 2}),
    "its interval in images": (
        pipe("micro_batch_size_per_gpu = 2\ngradient_accumulation_steps = 5\nsave_every_n_examples = 100"),
        {"checkpoint.every": 10},
    ),
    "its AdamW of optimi has values of its own": (
        {"pipe.toml": pipe()["pipe.toml"].replace("'adamw'", "'adamw_optimi'\nbetas = [0.9, 0.95]")},
        {"optimizer.name": "adamw", "optimizer.betas": [0.9, 0.95], "optimizer.eps": 1e-6},
    ),
    "its project of Weights & Biases": (
        pipe("monitoring = {enable_wandb = true, wandb_tracker_name = 'foxes'}"),
        {"output.wandb": "foxes"},
    ),
    "ai-toolkit's project of Weights & Biases": (
        {"j.yaml": job(rest="      logging: {use_wandb: true}\n")},
        {"output.wandb": "ai-toolkit"},
    ),
    "SimpleTuner shows a run at both": (
        tuner(report_to="all", tracker_project_name="foxes"),
        {"output.tensorboard": True, "output.wandb": "foxes"},
    ),
    "its timesteps of SDXL begin at pure noise": (tuner(model_family="sdxl"), {"sample.spacing": "trailing"}),
    "unless they are spaced otherwise": (
        tuner(model_family="sdxl", inference_scheduler_timestep_spacing="leading"),
        {"sample.spacing": "leading"},
    ),
    "its Flux has no timesteps": (tuner(), {"sample.spacing": None}),
    "its AdamW has an eps of its own": (tuner(optimizer="bnb-adamw8bit"), {"optimizer.eps": 1e-6}),
    "its Prodigy has decays of its own": (tuner(optimizer="prodigy"), {"optimizer.betas": [0.9, 0.99]}),
    "Flux's shift follows the size of an image": (
        pipe(model="type = 'chroma'\nflux_shift = true"),
        {"loss.shift": 1.8776, "lora.targets": ["full"]},
    ),
    "an adapter of its Qwen-Image is in the blocks": (
        pipe(model="type = 'qwen_image'"),
        {"lora.targets": ["transformer_blocks.*"], "loss.shift": 1.0},
    ),
    "one of its Krea 2 is over the text too": (
        pipe(model="type = 'krea2'\nflux_shift = true", dataset="resolutions = [1024]"),
        {"lora.targets": ["blocks.*", "txtfusion.*", "txtmlp.*"], "loss.shift": 3.1582},
    ),
    "an adapter of ai-toolkit's Z-Image is in its layers": (
        {"j.yaml": job(model="arch: zimage")},
        {"lora.targets": ["layers.*"]},
    ),
    "its shift wins": (pipe(model="type = 'flux'\nshift = 3\nflux_shift = true"), {"loss.shift": 3.0}),
    "its cosine ends above 0": (pipe("lr_scheduler = 'cosine'"), {"schedule.name": "cosine", "schedule.min_lr": 1e-6}),
    "its captions are dropped": (pipe("uncond_fraction = 0.1"), {"data.caption_dropout": 0.1}),
    "texts of SimpleTuner are switches": (tuner(use_ema="false"), {"train.ema_decay": None}),
    "its cosine with restarts has a period": (
        tuner(lr_scheduler="cosine_with_restarts", lr_warmup_steps=25),
        {"schedule.name": "cosine_restarts", "schedule.cycles": 4, "schedule.warmup_steps": None},
    ),
    "its steps win over epochs": (tuner(num_train_epochs=9), {"train.steps": 100, "train.epochs": None}),
    "what OneTrainer averages each five steps": (
        trainer(ema="GPU", ema_decay=0.99),
        {"train.ema_decay": pytest.approx(0.99**0.2, abs=1e-6)},
    ),
    "its REX": (trainer(learning_rate_scheduler="REX"), {"schedule.name": "rex", "schedule.rex_d": 0.9}),
    "a resolution of one folder": (
        trainer(concepts=[{"path": "i", "image": {"enable_resolution_override": True, "resolution_override": "768"}}]),
        {"data.resolution": 768},
    ),
    "it draws first unless it is told to wait": (
        trainer(sample_after=2, sample_after_unit="EPOCH", sample_skip_first=1),
        {"sample.first": False, "sample.every_epochs": 2},
    ),
    "tags that are dropped one by one": (
        trainer(
            concepts=[
                {
                    "path": "i",
                    "text": {
                        "tag_dropout_enable": True,
                        "tag_dropout_mode": "RANDOM",
                        "tag_dropout_probability": 0.1,
                    },
                }
            ]
        ),
        {"captions.tag_dropout": 0.1, "data.caption_dropout": None},
    ),
    "tags that are not dropped": (
        trainer(concepts=[{"path": "i", "text": {"tag_dropout_enable": False, "tag_dropout_probability": 0.1}}]),
        {"captions.tag_dropout": None},
    ),
}


@pytest.mark.parametrize("what", MEANT)
def test_what_it_means_is_carried_over(tmp_path: Path, what: str) -> None:
    files, expected = MEANT[what]
    values = imported(tmp_path, files)["values"]
    for key, value in expected.items():
        assert values.get(key) == value, key


def test_half_a_repeat_is_a_weight(tmp_path: Path) -> None:
    result = imported(tmp_path, pipe(folder="num_repeats = 0.5"))
    assert result["sets"][0]["weight"] == 0.5
    assert not any("data" in line for line in result["missing"])


TOLD = {
    "a chance of SimpleTuner": (tuner([{}, {"id": "b", "probability": 0.2}]), "0.2 of the draws"),
    "its crop, a text": (tuner([{"crop": "False"}]), "cut to shape (square)"),
    "levels of ai-toolkit": ({"j.yaml": job(", content_or_style: style")}, "as loss.timestep_sampling says instead"),
    "its weights of levels": ({"j.yaml": job(", timestep_type: weighted")}, "all weigh the same here"),
    "its rise": ({"j.yaml": job(", lr_scheduler: linear")}, "constant is used instead"),
    "its captions unread": ({"j.yaml": job(", unload_text_encoder: true")}, "captions are read"),
    "squares of diffusion-pipe": (
        {k: v.replace("enable_ar_bucket = true", "") for k, v in pipe().items()},
        "cut to squares",
    ),
    "samples of OneTrainer": (
        trainer(concepts=[{"path": "i", "balancing": 40.0, "balancing_strategy": "SAMPLES"}]),
        "40 images of the folder in an epoch",
    ),
    "its wait of several intervals": (
        trainer(sample_after=2, sample_after_unit="EPOCH", sample_skip_first=6),
        "grids between the first step and the end of that time",
    ),
    "steps of it without masks": (trainer(masked_training=True, unmasked_probability=0.1), "in 90% of them"),
}


@pytest.mark.parametrize("what", TOLD)
def test_what_cannot_be_carried_is_told_with_what_is_used(tmp_path: Path, what: str) -> None:
    files, said = TOLD[what]
    listed = imported(tmp_path, files)["listed"]
    assert any(said in line for line in listed), listed


QUIET = {
    "layer_offloading_text_encoder_percent": job(
        model="arch: flux, layer_offloading: false, layer_offloading_text_encoder_percent: 0.5"
    ),
    "content_or_style": job(", content_or_style: balanced"),
    "differential_guidance_scale": job(", do_differential_guidance: false, differential_guidance_scale: 3"),
}


@pytest.mark.parametrize("name", QUIET)
def test_a_setting_of_a_choice_that_is_off_is_not_listed(tmp_path: Path, name: str) -> None:
    result = imported(tmp_path, {"j.yaml": QUIET[name]})
    assert not any(name in line for line in result["listed"])
    assert any(name in key for key in result["needless"])


PROMPTS = """\
      sample:
        prompts:
          - "a fox --ctrl_img before.png --m 0.8 --seed 7 --cfg 3 --steps 20"
          - "a hare --ref 0.4"
          - "a plain owl"
"""


def test_flags_of_prompts_are_keys_and_an_unknown_one_costs_itself(tmp_path: Path) -> None:
    result = imported(tmp_path, {"j.yaml": job(model="arch: flux_kontext", rest=PROMPTS)})
    fox = {"text": "a fox", "control": ["before.png"], "strength": 0.8, "seed": 7, "guidance_scale": 3, "steps": 20}
    assert result["values"]["sample.prompts"] == [fox, "a hare", "a plain owl"]
    assert any("--ref of the prompt 'a hare'" in line for line in result["listed"])


def test_a_prompt_that_cannot_be_read_costs_one(tmp_path: Path) -> None:
    samples = [{"prompt": "a cat --ar 2:3"}, {"prompt": "a dog"}]
    result = imported(tmp_path, trainer(samples=samples))
    assert result["values"]["sample.prompts"] == ["a dog"]
    assert any("unknown flag --ar" in line for line in result["listed"])


MUSUBI = """\
accelerate launch --num_cpu_threads_per_process 1 src/musubi_tuner/{script} \\
    --dit dit.safetensors --vae vae.safetensors --dataset_config set.toml --mixed_precision bf16 --fp8_base \\
    --timestep_sampling {levels} --weighting_scheme none --discrete_flow_shift 2.0 \\
    --optimizer_type adamw8bit --learning_rate 1e-4 --gradient_checkpointing \\
    --network_module {module} --network_dim 32 --network_alpha 16 --max_train_epochs 16 --save_every_n_epochs 1 \\
    --output_dir out --output_name fox
"""
MUSUBI_SET = """\
[general]
resolution = [960, 544]
caption_extension = ".txt"
batch_size = 2
enable_bucket = true
[[datasets]]
image_directory = "images"
cache_directory = "cache"
num_repeats = 3
"""


@pytest.mark.parametrize(
    ("script", "module", "levels", "family", "shift"),
    [
        ("zimage_train_network.py", "networks.lora_zimage", "shift", "zimage", 2.0),
        ("flux_2_train_network.py", "networks.lora_flux_2", "flux2_shift", "flux2", 2.2243),
        ("flux_kontext_train_network.py", "networks.lora_flux", "flux_shift", "flux", 0.0),
        ("qwen_image_train_network.py", "networks.lora_qwen_image", "sigmoid", "qwenimage1", 1.0),
        ("krea2_train_network.py", "networks.loha", "shift", "krea2", 2.0),
    ],
)
def test_commands_of_musubi_tuner(
    tmp_path: Path, script: str, module: str, levels: str, family: str, shift: float
) -> None:
    files = {"run.sh": MUSUBI.format(script=script, module=module, levels=levels), "set.toml": MUSUBI_SET}
    result = imported(tmp_path, files)
    assert (result["from"], result["family"]) == ("musubi-tuner", family)
    expected = {
        "model.checkpoint": "dit.safetensors",
        "model.quantize": "fp8",
        "lora.kind": "loha" if module.endswith("loha") else None,
        "lora.rank": 32,
        "lora.alpha": 16.0,
        "loss.timestep_sampling": "sigmoid",
        "loss.shift": shift,
        "train.epochs": 16,
        "checkpoint.keep": 0,
        "data.path": "images",
        "data.batch_size": 2,
        "data.repeats": 3,
        "data.resolution": 720,
        "optimizer.name": "adamw8bit",
    }
    assert {key: result["values"].get(key) for key in expected} == expected
    assert result["values"].get("model.kontext") == (True if family == "flux" else None)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            "--timestep_sampling sigma --weighting_scheme logit_normal --logit_mean 1 --discrete_flow_shift 3",
            (1.0, -1.0, None),
        ),
        ("--timestep_sampling logsnr --logit_mean -6 --logit_std 2", (1.0, 3.0, None)),
    ],
)
def test_normal_numbers_of_musubi_tuner(tmp_path: Path, options: str, expected: tuple[Any, ...]) -> None:
    """Noise levels as in trainer_base.py:617 and 730: counted from the noisiest, halved and turned, without a shift."""
    values = imported(tmp_path, {"run.sh": f"python zimage_train_network.py --dit a {options}\n"})["values"]
    assert values["loss.timestep_sampling"] == "logit_normal"
    found = (values["loss.shift"], values["loss.logit_mean"], values.get("loss.logit_std"))
    assert found == expected


@pytest.mark.parametrize(("kind", "expected"), [("sigma", (100, 800)), ("shift", (200, 900))])
def test_spans_of_musubi_tuner(tmp_path: Path, kind: str, expected: tuple[int, int]) -> None:
    options = f"--timestep_sampling {kind} --min_timestep 200 --max_timestep 900 --weighting_scheme cosmap"
    values = imported(tmp_path, {"run.sh": f"python zimage_train_network.py --dit a {options}\n"})["values"]
    assert (values["loss.min_timestep"], values["loss.max_timestep"]) == expected
    assert values["loss.weighting"] == "cosmap"


def test_musubi_tuner_for_videos_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"wan_train_network\.py"):
        imported(tmp_path, {"run.sh": MUSUBI.format(script="wan_train_network.py", module="x", levels="shift")})
    arguments = 'dit = "wan.safetensors"\nnetwork_module = "networks.lora_wan"\n'
    with pytest.raises(ConfigError, match=r"networks\.lora_wan: its model is not trained here"):
        imported(tmp_path, {"run.toml": arguments}, family="wan")


FAMILIES = {
    "SimpleTuner's": [
        (tuner(model_family=theirs), ours)
        for theirs, ours in (
            *(("anima", "anima"), ("chroma", "chroma"), ("krea2", "krea2")),
            *(("z_image", "zimage"), ("flux2", "flux2"), ("qwen_image", "qwenimage1")),
        )
    ],
    "diffusion-pipe's": [
        (pipe(model=f"type = '{theirs}'\ntransformer_path = 't.safetensors'"), ours)
        for theirs, ours in (("qwen_image", "qwenimage1"), ("z_image", "zimage"), ("anima", "anima"))
    ],
    "OneTrainer's": [(trainer(model_type="QWEN"), "qwenimage1")],
}


@pytest.mark.parametrize("program", FAMILIES)
def test_families_that_are_trained_here_are_not_refused(tmp_path: Path, program: str) -> None:
    for files, family in FAMILIES[program]:
        assert imported(tmp_path, files)["family"] == family


def test_a_set_that_a_text_turns_off_is_told(tmp_path: Path) -> None:
    """Any text is true to SimpleTuner (factory.py:1110), "False" too."""
    result = imported(tmp_path, tuner([{"disabled": "False"}, {"id": "b", "disabled": False}]))
    assert any("set a: left out, as SimpleTuner takes the text 'False' for true" in line for line in result["listed"])
    assert result["values"]["data.path"] == "images"


def test_kontext_of_simpletuner_has_its_images(tmp_path: Path) -> None:
    sets = [
        {"conditioning_data": "before"},
        {"id": "before", "dataset_type": "conditioning", "instance_data_dir": "before"},
    ]
    values = imported(tmp_path, tuner(sets, model_flavour="kontext"))["values"]
    assert values["model.checkpoint"] == "hf:black-forest-labs/FLUX.1-Kontext-dev"
    assert values["model.kontext"] is True
    assert values["data.control"] == ["before"]


@pytest.mark.parametrize(
    ("options", "edit"),
    [
        ("--edit_plus", "2509"),
        ("--model_version edit-2509", "2509"),
        ("--model_version edit-2511", "2511"),
        ("--model_version original", None),
    ],
)
def test_musubi_tuner_says_which_qwen_image_edit_it_trains(tmp_path: Path, options: str, edit: str | None) -> None:
    named = {"script": "qwen_image_train_network.py", "module": "networks.lora_qwen_image", "levels": "qwen_shift"}
    command = MUSUBI.format(**named).replace("--fp8_base", f"--fp8_base {options}")
    pairs = MUSUBI_SET + 'control_directory = "before"\n'
    values = imported(tmp_path, {"run.sh": command, "set.toml": pairs})["values"]
    assert values.get("model.qwen_edit") == edit
    assert values["data.control"] == ["before"]


def test_old_names_of_control_settings_say_what_their_new_ones_say(tmp_path: Path) -> None:
    """musubi-tuner renames them (config_utils.py, `deprecated_key_map`). SimpleTuner draws over its dataset."""
    run = MUSUBI.format(script="qwen_image_train_network.py", module="networks.lora_qwen_image", levels="sigmoid")
    for old in ("qwen_image_edit_", "flux_kontext_"):
        keys = f"control_directory = 'c'\n{old}no_resize_control = true\nqwen_image_edit_control_resolution = [9, 9]\n"
        listed = imported(tmp_path, {"run.sh": run, "set.toml": MUSUBI_SET + keys})["listed"]
        assert sum("control images have the size that their model wants" in line for line in listed) == 2
    listed = imported(tmp_path, tuner(model_family="qwen_image", validation_using_datasets=True))["listed"]
    assert any("sample.control" in line for line in listed)


def test_other_trainers_say_which_qwen_image_edit_they_train(tmp_path: Path) -> None:
    for arch, name, edit in (
        ("qwen_image_edit_plus", "Qwen/Qwen-Image-Edit-2509", "2509"),
        ("qwen_image_edit_plus:2511", "/models/mine", "2511"),
        ("qwen_image_edit_plus", "Qwen/Qwen-Image-Edit-2511", "2511"),
        ("qwen_image", "Qwen/Qwen-Image", None),
    ):
        text = job(model=f'arch: "{arch}"').replace("base.safetensors", name)
        result = imported(tmp_path, {"j.yaml": text})
        assert (result["family"], result["values"].get("model.qwen_edit")) == ("qwenimage1", edit), arch
    for flavour, month in (("edit-v2", "2509"), ("edit-v3", "2511")):
        values = imported(tmp_path, tuner(model_family="qwen_image", model_flavour=flavour))["values"]
        assert values["model.qwen_edit"] == month
        assert values["model.checkpoint"] == f"hf:Qwen/Qwen-Image-Edit-{month}"


def test_the_checkpoint_says_which_family_it_is_of(tmp_path: Path, small_base: Path) -> None:
    text = 'network_module = "networks.lora"\nnetwork_dim = 8\nlearning_rate = 1e-4\nresolution = 512\n'
    files = {"a.toml": text + f"pretrained_model_name_or_path = {str(small_base)!r}\n"}
    assert imported(tmp_path, files)["family"] == "sdxl"


KOHYA = "pretrained_model_name_or_path = 'b.safetensors'\nnetwork_module = 'networks.lora'\ntrain_data_dir = 'i'\n"


@pytest.mark.parametrize(
    ("files", "public"),
    [
        ({"fox.yaml": job(rest="      save: {push_to_hub: true, hf_repo_id: me/fox}\n")}, None),
        ({"fox.yaml": job(rest="      save: {push_to_hub: true, hf_repo_id: me/fox, hf_private: false}\n")}, True),
        (tuner(push_to_hub=True, hub_model_id="me/fox"), None),
        (tuner(push_to_hub=True, hub_model_id="me/fox", model_card_private=False), True),
        ({"k.toml": f"{KOHYA}huggingface_repo_id = 'me/fox'\nhuggingface_token = 'hf_of_me'\n"}, None),
        ({"k.toml": f"{KOHYA}huggingface_repo_id = 'me/fox'\nhuggingface_repo_visibility = 'public'\n"}, True),
    ],
)
def test_an_upload_to_the_hub_is_carried_over_private_unless_said_and_no_token(
    tmp_path: Path, files: dict[str, str], public: bool | None
) -> None:
    family = {"family": "sdxl"} if "k.toml" in files else {}
    result = imported(tmp_path, files, partial=True, **family)
    assert (result["values"]["output.hub"], result["values"].get("output.hub_public")) == ("me/fox", public)
    assert "hf_of_me" not in json.dumps(result, default=str)
    assert any("hf auth login" in line for line in result["listed"]) == ("hf_of_me" in "".join(files.values()))
