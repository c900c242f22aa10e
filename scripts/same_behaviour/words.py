"""What the program says: help, templates, other trainers' configs made its own, and refusals."""

from __future__ import annotations

import json
import shutil
import struct
import tomllib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

from foreign import imports
from runs import settings, toml
from world import FAMILIES, KINDS, World, program

from flame_train import cli

TASKS: Final = (
    "help",
    "init",
    "import",
    "keys",
    "lacks",
    "files",
    "commands",
    *(f"family/{name}" for name in FAMILIES),
)
_PRESETS: Final = ("character", "style", "concept", "edit")
_WRONG: Final[tuple[Any, ...]] = ("no such value", -1, 1e30, 0.5, True, [], ["no such value"], [-1])
_ALWAYS_WRONG: Final = ("--set", "lora.rnak=4")
"""So that nothing is trained, whatever else is taken."""

Cases = dict[str, Callable[[], Any]]


def cases(world: World, task: str) -> Cases:
    about, _, family = task.partition("/")
    made = _ABOUT[about](world, family) if family else _ABOUT[about](world)
    return {f"{task}/{name}": case for name, case in made}


Made = Iterator[tuple[str, Callable[[], Any]]]


def _help(world: World) -> Made:
    """Of every command."""
    waiting: list[tuple[tuple[str, ...], Any]] = [((), cli.command())]
    while waiting:
        names, command = waiting.pop()
        yield " ".join(names) or "flame-train", partial(program, world, *names, "--help")
        waiting += [((*names, name), inner) for name, inner in getattr(command, "commands", {}).items()]


def _init(world: World) -> Made:
    """The schema: every key with its default, its bounds and what it does."""
    for family in FAMILIES:
        yield family, partial(program, world, "init", family)
        for preset in _PRESETS:
            yield f"{family} {preset}", partial(program, world, "init", family, "--preset", preset)
        for gib in (8, 12, 24, 80):
            yield f"{family} {gib} GB", partial(program, world, "init", family, "--card", str(gib))
            again = ("init", family, "--card", str(gib), "--preset", "style", "--full", "--json")
            yield f"{family} {gib} GB style", partial(program, world, *again)


def train(world: World, family: str, values: Mapping[str, Any], *more: str, command: str = "train") -> Any:
    """What training answers with a config that has these values."""
    file = world.own / "config.toml"
    file.write_text(toml({**settings(world, family, "lora"), **values}))
    found = program(world, command, str(file), "--device", "cpu", *more)
    shutil.rmtree(world.own / "run", ignore_errors=True)
    return found


def keys_of(text: str) -> dict[str, Any]:
    """The keys of `init`'s text with their defaults; those of one choice alone are comments in it."""
    lines = [line.removeprefix("# ") if line.startswith("# ") and " = " in line else line for line in text.splitlines()]
    found: dict[str, Any] = {}
    section = ""
    for line in lines:
        if line.startswith("["):
            section = line.strip("[]")
        try:
            read = tomllib.loads(line)
        except tomllib.TOMLDecodeError:
            continue
        found |= {f"{section}.{key}": value for key, value in read.items() if section and not isinstance(value, dict)}
    return found


def keys_by_family(world: World) -> dict[str, dict[str, Any]]:
    return {family: keys_of(program(world, "init", family)["stdout"]) for family in FAMILIES}


def _keys(world: World) -> Made:
    """Each key with each wrong value; and all that is wrong told at once."""
    families = keys_by_family(world)
    for path in {path: None for keys in families.values() for path in keys}:
        for value in _WRONG:
            given = f"{path}={json.dumps(value)}"
            yield given, partial(train, world, "sdxl", {}, "--set", given, *_ALWAYS_WRONG)
    for value in _WRONG:
        every = dict.fromkeys(families["sdxl"], value)
        yield f"all {value}", partial(train, world, "sdxl", every, *_ALWAYS_WRONG)
    texts = {"no TOML": "train.steps = = 3\n", "no text": "\0", "twice": "train.steps = 3\ntrain.steps = 4\n", "": ""}
    for name, text in {**texts, "a list": "train = [1]\n", "unknown": "[trian]\nsteps = 3\nlr = 1\n"}.items():
        yield f"text: {name}", partial(_text, world, text)
    for path in ("optimizer.learning_rate", "lora.dim", "network_dim", "train.max_steps", "lora", "a.b.c"):
        yield f"unknown {path}", partial(train, world, "sdxl", {}, "--set", f"{path}=1")


def _lacks(world: World) -> Made:
    """Each key of another family."""
    families = keys_by_family(world)
    every = {path: value for keys in families.values() for path, value in keys.items()}
    for family, keys in families.items():
        for path, value in every.items():
            if path not in keys:
                given = ("--set", f"{path}={json.dumps(value)}", "--dry-run")
                yield f"{family} {path}", partial(train, world, family, {}, *given)


def _text(world: World, text: str) -> Any:
    (world.own / "config.toml").write_text(text)
    return program(world, "train", str(world.own / "config.toml"), "--device", "cpu")


_CONFLICTS: Final[Mapping[str, Mapping[str, Any]]] = {
    "schedule.min_lr": {"schedule.min_lr": 0.5},
    "several": {
        **{"loss.shift": 3.0, "text_encoders.t5_dropout": 0.5, "data.bucket_step": 8, "sample.width": 40},
        **{"lora.targets": ["nothing"], "loss.weighting": "cosmap"},
    },
    "width": {"sample.width": 40},
    "height": {"sample.height": 8},
    "steps": {"sample.steps": 1001},
    "sampler": {"sample.sampler": "ddim"},
    "negative": {"sample.negative": "blue", "sample.guidance_scale": 1.0},
    "targets": {"lora.targets": ["nothing"]},
    "arithmetic": {"model.quantize": "fp8", "model.arithmetic": "fp8"},
    "arithmetic alone": {"model.arithmetic": "int8"},
    "offload": {"model.offload": 0.5},
    "blocks": {"gradient.checkpointing": "full", "gradient.checkpoint_blocks": ["nothing"]},
    "prediction": {"model.prediction": "v"},
    "kontext": {"model.kontext": True},
    "edit": {"model.qwen_edit": "2511"},
    "control": {"data.control": "nowhere"},
    "masks": {"data.masks": "files", "data.mask_folder": "nowhere"},
    "class": {"preservation.kind": "class"},
    "slider": {"preservation.kind": "slider", "text_encoders.train": ["clip_l"]},
    "from": {"lora.from": "nowhere.safetensors"},
    "adapter": {"model.training_adapter": "nowhere.safetensors"},
    "continue": {"train.continue_from": "nowhere"},
    "second": {"sample.model": "nowhere.safetensors"},
    "vae": {"model.vae": "nowhere.safetensors"},
    "hub": {"model.checkpoint": "hf:nobody"},
    "t5": {"text_encoders.t5_vocabulary": "nowhere.json"},
    "encoders": {"text_encoders.train": ["clip_g", "t5", "qwen3"]},
    "quantized text": {"text_encoders.train": ["clip_l"], "text_encoders.precision": "fp8"},
    "remote": {"output.remote": "nothing://bucket"},
    "budget": {"memory.budget": "1 MiB"},
    "prompts": {"sample.prompts": ["a --w 40 --s x"]},
    "resume": {"lora.from": "a", "train.continue_from": "b"},
}


def _family(world: World, family: str) -> Made:
    """What only the family and the model's headers tell."""
    for name, values in _CONFLICTS.items():
        yield name, partial(train, world, family, values, "--dry-run")
    for kind in KINDS:
        both = {"lora.kind": kind, "output.format": "both"}
        yield f"both of {kind}", partial(train, world, family, both, "--dry-run")
        yield f"conv of {kind}", partial(train, world, family, {"lora.kind": kind, "lora.factor": 3}, "--dry-run")
    for other in FAMILIES:
        command = f"{other}-lora"
        yield f"by {command}", partial(train, world, family, {}, "--dry-run", command=command)
        yield f"LoRA of {other}", partial(_of_another, world, family, other)


def _of_another(world: World, family: str, other: str) -> Any:
    """Its base where a LoRA and a VAE are asked for."""
    base = str(world.base(other))
    named = {"lora.from": base, "model.vae": base}
    return {path: train(world, family, {path: value}, "--dry-run") for path, value in named.items()}


def _header(names: Mapping[str, list[int]]) -> bytes:
    """A safetensors file of zeros."""
    end, told = 0, dict[str, Any]()
    for name, shape in names.items():
        size = 4
        for side in shape:
            size *= side
        told[name] = {"dtype": "F32", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(told).encode()
    return struct.pack("<Q", len(text)) + text + bytes(end)


def _files(world: World) -> Made:
    """Base models that are none, and images that are none."""
    whole = world.base("sdxl").read_bytes()
    module = "lora_unet_input_blocks_4_1_transformer_blocks_0_attn1_to_q"
    lora = {f"{module}.lora_down.weight": [2, 640], f"{module}.lora_up.weight": [640, 2], f"{module}.alpha": []}
    overlapping = (
        b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}}'
    )
    models = {
        "cut": whole[:100_000],
        "lying header": struct.pack("<Q", 10**12) + whole[8:],
        "overlapping": struct.pack("<Q", len(overlapping)) + overlapping + bytes(12),
        "pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 6938078334\n",
        "web page": b"<!DOCTYPE html><html><title>Sign in</title></html>",
        "empty": b"",
        "a LoRA": _header(lora),
        "nothing known": _header({"a.weight": [2, 2]}),
        "SD3's": _header({"model.diffusion_model.joint_blocks.0.x_block.attn.qkv.weight": [4608, 1536]}),
        "without a layer": whole.replace(b"out.2.bias", b"out.9.bias"),
    }
    for name, raw in models.items():
        for command in ("train", "sdxl-lora", "zimage-lora"):
            yield f"{command} {name}", partial(_model, world, raw, "model.safetensors", command)
        for command in ("inspect", "verify"):
            yield f"{command} {name}", partial(_given, world, raw, "some.safetensors", command)
    for ending in ("ckpt", "pt", "bin", "pth", "gguf", "png"):
        yield f"a pickle.{ending}", partial(_model, world, b"\x80\x04}.", f"model.{ending}", "train")
    yield "no file", partial(train, world, "sdxl", {"model.checkpoint": "nowhere.safetensors"})
    yield "images", partial(_images, world, "error")
    yield "images left out", partial(_images, world, "skip")
    for path, value in (("data.path", "nowhere"), ("data.path", str(world.work / "home")), ("output.dir", "/proc/x")):
        yield f"{path} {Path(value).name}", partial(train, world, "sdxl", {path: value})
    yield "among images", partial(train, world, "sdxl", {"output.dir": str(world.images / "run")})


def _given(world: World, raw: bytes, name: str, *command: str) -> Any:
    (world.own / name).write_bytes(raw)
    return program(world, *command, str(world.own / name))


def _model(world: World, raw: bytes, name: str, command: str) -> Any:
    (world.own / name).write_bytes(raw)
    return train(world, "sdxl", {"model.checkpoint": str(world.own / name)}, command=command)


def _images(world: World, on_bad_image: str) -> Any:
    folder = world.own / "images"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(world.images, folder)
    whole = (folder / "0.png").read_bytes()
    spoilt = {
        "empty": b"",
        "text": b"not an image",
        "half": whole[: len(whole) // 2],
        "cut": whole[:-20],
        "checksum": whole[:60] + bytes([whole[60] ^ 1]) + whole[61:],
        "lonely": whole,
        "unreadable": whole,
    }
    for name, raw in spoilt.items():
        (folder / f"{name}.png").write_bytes(raw)
        (folder / f"{name}.txt").write_text("a caption")
    (folder / "unreadable.txt").write_bytes(b"caf\xe9")
    (folder / "lonely.txt").unlink()
    given = {"data.path": str(folder), "data.on_bad_image": on_bad_image}
    return train(world, "sdxl", given, *(("--dry-run",) if on_bad_image == "skip" else ()))


def _commands(world: World) -> Made:
    """Command lines that are wrong, and what a machine without a GPU is told."""
    base = str(world.base("sdxl"))
    lines = (
        "",
        "nothing",
        "train",
        "train nowhere.toml",
        "train --steps many",
        "train nowhere.toml --config other.toml",
        "init nothing",
        "init sdxl --preset nothing",
        "init sdxl --card many",
        "quickstart --family nothing",
        "import nowhere.toml -o mine.toml",
        "sample",
        f"sample -m {base}",
        f"sample -m {base} -p x --lora nowhere.safetensors --device cpu",
        f"sample -m {base} -p x --width 40 --device cpu",
        f"sample -m {base} -p x --strength 1 --device cpu",
        f"sample -m {base} -p x",
        f"convert {base} out.safetensors --to kohya",
        f"merge {base} {base} out.safetensors",
        f"merge {base}",
        f"resize {base} --rank 2 -o out.safetensors",
        f"resize {base} -o out.safetensors",
        f"extract {base} {world.base('flux')} --rank 2 -o out.safetensors",
        f"extract {base} {base} --rank 2 -o out.safetensors",
        f"verify {base}",
        "show nowhere",
        "sweep nowhere.toml --device cpu",
        "gradcheck nothing --device cpu",
        "bench step --model nothing --device cpu",
        "reproduce nowhere.safetensors --config nowhere.toml",
        "cache nowhere.toml",
        "dataset nowhere.toml",
    )
    for line in lines:
        yield line.replace(str(world.work), "WORK"), partial(program, world, *line.split())
    for command in ("train", "sdxl-lora", "cache"):
        yield f"{command} without a GPU", partial(_without_gpu, world, command)


def _without_gpu(world: World, command: str) -> Any:
    file = world.own / "config.toml"
    file.write_text(toml(settings(world, "sdxl", "lora")))
    return program(world, command, str(file))


_ABOUT: Final[Mapping[str, Callable[..., Made]]] = {
    "help": _help,
    "init": _init,
    "import": imports,
    "keys": _keys,
    "lacks": _lacks,
    "files": _files,
    "commands": _commands,
    "family": _family,
}
