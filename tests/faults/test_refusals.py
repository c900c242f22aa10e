"""What the command refuses: the right exit code, one message that names the file, no traceback, nothing lost."""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from flame_train.io.safetensors import save_file
from tests.run_files import arrays_of


class Trap:
    """What a pickle would run when loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def cut(base: Path, path: Path) -> None:
    path.write_bytes(base.read_bytes()[:100_000])


def lying_header(base: Path, path: Path) -> None:
    path.write_bytes(struct.pack("<Q", 10**12) + base.read_bytes()[8:])


def overlapping(base: Path, path: Path) -> None:
    header = (
        b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}}'
    )
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(12))


def pointer(base: Path, path: Path) -> None:
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 6938078334\n")


def web_page(base: Path, path: Path) -> None:
    path.write_text("<!DOCTYPE html><html><title>Sign in</title></html>")


def no_weights(base: Path, path: Path) -> None:
    path.write_bytes(b"")


def another_family(base: Path, path: Path) -> None:
    names = {"model.diffusion_model.joint_blocks.0.x_block.attn.qkv.weight": (4608, 1536)}
    save_file(path, {name: np.zeros(shape, np.float16) for name, shape in names.items()})


def a_lora(base: Path, path: Path) -> None:
    module = "lora_unet_input_blocks_4_1_transformer_blocks_0_attn1_to_q"
    shapes = {"lora_down.weight": (2, 640), "lora_up.weight": (640, 2), "alpha": ()}
    save_file(path, {f"{module}.{name}": np.zeros(shape, np.float32) for name, shape in shapes.items()})


def missing_keys(base: Path, path: Path) -> None:
    save_file(path, {k: v for k, v in arrays_of(base).items() if ".out_layers." not in k})


def misshaped(base: Path, path: Path) -> None:
    tensors = arrays_of(base)
    name = "model.diffusion_model.out.2.bias"
    save_file(path, tensors | {name: np.zeros(7, np.float16)})


def not_finite(base: Path, path: Path) -> None:
    tensors = arrays_of(base)
    tensors["model.diffusion_model.time_embed.0.bias"][3] = np.nan
    save_file(path, tensors)


MODELS = {
    cut: "incomplete",
    lying_header: "header length",
    overlapping: "overlap|offset",
    pointer: "Git LFS|Git-LFS|pointer",
    web_page: "HTML|web page",
    no_weights: "empty|zero",
    another_family: "expected SDXL, found",
    a_lora: "LoRA",
    missing_keys: "missing",
    misshaped: "out.2.bias",
    not_finite: "time_embed.0.bias",
}


@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_a_base_model_that_is_none(job, world, make):
    path = job.folder / "model.safetensors"
    make(world / "base.safetensors", path)
    before = path.read_bytes()
    ended = job.train(model__checkpoint=str(path))
    assert ended.code == 3
    assert str(path) in ended.complaint
    assert any(word in ended.complaint for word in MODELS[make].split("|")), ended.complaint
    assert path.read_bytes() == before
    assert job.steps() == []


@pytest.mark.parametrize("ending", ["ckpt", "pt", "bin", "pth"])
def test_a_pickle_is_refused_and_never_read(job, ending):
    path, touched = job.folder / f"model.{ending}", job.folder / "ran"
    path.write_bytes(pickle.dumps(Trap(touched)))
    ended = job.train(model__checkpoint=str(path))
    assert ended.code == 3
    assert str(path) in ended.complaint
    assert "pickle" in ended.complaint
    assert not touched.exists()


def test_a_base_model_that_is_not_there(job):
    ended = job.train(model__checkpoint=str(job.folder / "nowhere.safetensors"))
    assert ended.code == 3
    assert "nowhere.safetensors" in ended.complaint


def png(width: int, height: int, body: bytes) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(body)) + chunk(b"IEND", b"")


IMAGES = {
    "empty": lambda whole: b"",
    "text": lambda whole: b"not an image",
    "half": lambda whole: whole[: len(whole) // 2],
    "cut tail": lambda whole: whole[:-20],
    "bad checksum": lambda whole: whole[:60] + bytes([whole[60] ^ 1]) + whole[61:],
    "bomb": lambda whole: png(50_000, 50_000, b""),
}


@pytest.fixture
def own(job, world):
    """A run with drawings of its own."""
    shutil.copytree(world / "drawings", job.folder / "drawings")
    job.settings["data.path"] = str(job.folder / "drawings")
    return job


def test_every_bad_image_is_named_at_once_before_anything_is_trained(own):
    folder = own.folder / "drawings"
    whole = (folder / "0.png").read_bytes()
    for name, spoil in IMAGES.items():
        (folder / f"{name}.png").write_bytes(spoil(whole))
        (folder / f"{name}.txt").write_text("a caption")
    (folder / "unreadable.png").write_bytes(whole)
    (folder / "unreadable.txt").write_bytes(b"caf\xe9")
    (folder / "lonely.png").write_bytes(whole)
    ended = own.train()
    assert ended.code == 3
    assert "8 problems" in ended.complaint
    for name in (*IMAGES, "unreadable", "lonely"):
        assert f"{name}." in ended.complaint
    assert not own.out.exists()


def test_bad_images_can_be_left_out_with_a_warning(own):
    (own.folder / "drawings" / "5.png").write_bytes(b"not an image")
    ended = own.train(data__on_bad_image="skip", train__steps=1, schedule__warmup_steps=0)
    assert ended.code == 0, ended.stderr
    assert "left out: 5.png" in ended.stderr


def saved(image: Image.Image, path: Path, **options) -> None:
    image.save(path, **options)


def test_images_of_every_kind_look_the_same_to_the_model(own):
    """16 bit, palette, grey with alpha, rotated by EXIF: the cache holds what the plain image gives."""
    folder = own.folder / "drawings"
    for path in folder.iterdir():
        path.unlink()
    grey = (np.add.outer(np.arange(64), np.arange(64)) * 2).clip(0, 255).astype(np.uint8)
    plain = Image.fromarray(np.stack([grey] * 3, -1))
    saved(plain, folder / "plain.png")
    saved(Image.fromarray(grey.astype(np.uint16) * 257), folder / "deep.png")
    saved(Image.fromarray(grey).convert("P"), folder / "palette.png")
    saved(Image.fromarray(np.stack([grey, np.full_like(grey, 255)], -1), "LA"), folder / "alpha.png")
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    saved(plain.transpose(Image.Transpose.ROTATE_90), folder / "turned.png", exif=exif)
    for path in list(folder.glob("*.png")):
        path.with_suffix(".txt").write_text("grey")
    shutil.rmtree(own.cache)
    ended = own.fill_cache()
    assert ended.code == 0, ended.stderr
    entries = []
    for path in own.cache.rglob("*.safetensors"):
        tensors = arrays_of(path)
        if "mean" in tensors:
            entries.append(tensors)
    assert len(entries) == 5
    for entry in entries[1:]:
        np.testing.assert_array_equal(entry["mean"], entries[0]["mean"])


CONFIGS = {
    "a key that is misspelt": ("optimizer.learning_rate = 1e-4\n", ["optimizer.learning_rate", "lr"]),
    "a key that is nearly right": ("lora.rnak = 4\n", ["lora.rnak", "rank"]),
    "a wrong type": ('train.steps = "many"\n', ["train.steps", "many"]),
    "an impossible value": ("data.caption_dropout = 2.0\n", ["data.caption_dropout", "2"]),
    "a conflict": ("schedule.min_lr = 0.5\n", ["schedule.min_lr", "optimizer.lr"]),
    "no TOML": ("train.steps = = 3\n", ["config.toml"]),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_that_is_wrong(job, name):
    text, words = CONFIGS[name]
    arguments = job.arguments("sdxl-lora")
    config = job.folder / "config.toml"
    kept = [line for line in config.read_text().splitlines() if line.split(" = ")[0] not in text]
    config.write_text("\n".join([*kept, text]))
    ended = job.program(*arguments)
    assert ended.code == 2
    assert str(config) in ended.complaint
    for word in words:
        assert word in ended.complaint
    assert not job.out.exists()


def test_all_that_is_wrong_with_a_config_is_told_at_once(job):
    ended = job.train(lora__rnak=4, train__steps="many", data__caption_dropout=2.0)
    assert ended.code == 2
    for word in ("lora.rnak", "train.steps", "data.caption_dropout"):
        assert word in ended.complaint


def test_all_that_does_not_fit_the_model_is_told_at_once_with_its_line(job):
    """What only the family and the model's headers tell, as what the schema tells."""
    wrong = {
        "loss.shift": 3.0,
        "text_encoders.t5_dropout": 0.5,
        "data.bucket_step": 8,
        "sample.every": 1,
        "sample.prompts": ["x"],
        "sample.width": 40,
        "lora.targets": ["nothing"],
        "output.dir": f"{job.settings['data.path']}/out",
    }
    job.settings.update(wrong)
    job.settings.pop("loss.snr_gamma", None)  # goes with another weighting, which the schema already refuses
    line = job.arguments("sdxl-lora")
    ended = job.program(*line, "--set", "loss.weighting=cosmap")
    assert ended.code == 2
    number = {key: i for i, key in enumerate(job.settings, 1)}
    told = [text for text in ended.complaint.removeprefix("error: ").splitlines() if not text.startswith(("  ", "Use"))]
    expected = {f"{line[2]}:{number[key]}: {key}" for key in wrong if key not in ("sample.every", "sample.prompts")}
    assert {": ".join(text.split(": ")[:2]) for text in told} == expected | {"--set: loss.weighting"}


def test_layers_that_lora_files_have_no_name_for_are_refused_before_training(job, world):
    """The names in LoRA files are those of SDXL's own layers; this model has more of them in one place."""
    tensors = arrays_of(world / "base.safetensors")
    first = {name: tensor for name, tensor in tensors.items() if ".transformer_blocks.0." in name}
    path = job.folder / "deep.safetensors"
    for depth in range(1, 4):
        tensors |= {name.replace("former_blocks.0.", f"former_blocks.{depth}."): t for name, t in first.items()}
    save_file(path, tensors)
    ended = job.train(model__checkpoint=str(path), lora__targets=["attention"])
    assert ended.code == 2
    assert "have no name in LoRA files" in ended.complaint
    assert not job.out.exists()


@pytest.mark.parametrize("inside", ["run", "."])
def test_a_run_folder_among_the_images_is_refused(own, inside):
    ended = own.train(output__dir=str(own.folder / "drawings" / inside))
    assert ended.code == 2
    assert "output.dir" in ended.complaint
    assert not (own.folder / "drawings" / "status.json").exists()


@pytest.mark.parametrize(("key", "value"), [("sample__width", 40), ("sample__height", 8), ("sample__steps", 1000)])
def test_sampling_that_cannot_work_is_refused_before_training(job, key, value):
    ended = job.train(sample__every=2, sample__prompts=["a drawing"], **{key: value})
    assert ended.code == 2
    assert key.replace("__", ".") in ended.complaint
    assert not job.out.exists()


def test_no_gpu_is_an_error_that_names_the_way_out(job, program):
    arguments = job.arguments("sdxl-lora")
    arguments[arguments.index("cpu")] = "cuda"
    ended = program(*arguments, env={"CUDA_VISIBLE_DEVICES": ""})
    assert ended.code == 4
    assert "--device cpu" in ended.complaint
    assert "doctor" in ended.complaint
    assert not job.out.exists()


def test_filling_the_cache_without_a_gpu_is_the_same_error(job, program):
    arguments = job.arguments("cache")
    arguments[arguments.index("cpu")] = "cuda"
    assert program(*arguments, env={"CUDA_VISIBLE_DEVICES": ""}).code == 4


def test_a_reader_of_the_output_who_leaves_does_not_stop_the_run(job, whole):
    """As in `flame-train ... 2>&1 | head -1`, with the pipe closed from the beginning."""
    script = (
        "import os, sys\n"
        "read, write = os.pipe()\n"
        "os.close(read)\n"
        "os.dup2(write, 1)\n"
        "os.dup2(write, 2)\n"
        "os.execv(sys.executable, [sys.executable, '-m', 'flame_train', *sys.argv[1:]])\n"
    )
    process = job.program.start_python("-c", script, *job.arguments("sdxl-lora"))
    process.communicate()
    assert process.returncode == 0
    assert job.result() == whole


def test_no_standard_error_at_all(job, whole):
    script = (
        "import os, sys\nos.close(2)\nos.execv(sys.executable, [sys.executable, '-m', 'flame_train', *sys.argv[1:]])\n"
    )
    process = job.program.start_python("-c", script, *job.arguments("sdxl-lora"))
    process.communicate()
    assert process.returncode == 0
    assert job.result() == whole


@pytest.mark.parametrize(
    "closed", [(2,), (0, 1, 2), *(pytest.param(one, marks=pytest.mark.proof) for one in ((0,), (1,)))], ids=str
)
def test_standard_streams_that_are_closed_never_become_a_file_of_the_run(job, whole, closed):
    """The next file that is opened gets the lowest free number: as number 2 it would be written into by messages."""
    script = (
        "import os, sys\n"
        f"for number in {closed}: os.close(number)\n"
        "os.execv(sys.executable, [sys.executable, '-m', 'flame_train', *sys.argv[1:]])\n"
    )
    process = job.program.start_python("-c", script, *job.arguments("sdxl-lora"))
    taken = dict[int, set[str]]()
    while process.poll() is None:
        for number in closed:
            with contextlib.suppress(OSError):
                taken.setdefault(number, set()).add(os.readlink(f"/proc/{process.pid}/fd/{number}"))
    process.communicate()
    assert process.returncode == 0
    assert job.result() == whole
    assert (job.out / ".lock").read_bytes() == b""
    ours = {number: {name for name in names if str(job.folder) in name} for number, names in taken.items()}
    assert not any(ours.values()), ours
