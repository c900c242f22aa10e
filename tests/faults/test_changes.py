"""What may have changed between two runs, and what another program may be doing meanwhile."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from flame_train.data.cache import DiskCache
from flame_train.io.safetensors import SafetensorsFile, save_file
from tests.recipes.bases import rewrite_state


def counts(job, **changes) -> tuple[int, int]:
    """How much is encoded, and how much was there."""
    ended = job.fill_cache(**changes)
    assert ended.code == 0, ended.stderr
    found = json.loads(ended.stdout)
    return found["encoded"], found["kept"]


def repaint(path: Path) -> None:
    pixels = np.array(Image.open(path))
    Image.fromarray(pixels[::-1]).save(path)


def rewrite(path: Path, name: str) -> None:
    """Changes one tensor of a checkpoint."""
    with SafetensorsFile(path) as file:
        tensors = {key: np.array(file.read(key)) for key in file.names}
    tensors[name] = tensors[name] + tensors[name].dtype.type(0.25)
    save_file(path, tensors)


def test_only_what_changed_is_encoded_again(own):
    """Six drawings, their six captions and the empty one: 13 entries. Whatever is changed back is still there."""
    drawings, base = own.folder / "drawings", own.folder / "base.safetensors"
    assert counts(own) == (0, 13)
    os.utime(drawings / "0.png", (1, 1))
    assert counts(own) == (0, 13)
    (drawings / "0.txt").write_text("something else")
    assert counts(own) == (1, 12)
    repaint(drawings / "1.png")
    repaint(drawings / "2.png")
    assert counts(own) == (2, 11)
    assert counts(own, data__resolution=48) == (6, 7)
    assert counts(own, data__max_tokens=150) == (7, 6)
    assert counts(own, train__precision="bf16") == (7, 6)
    assert counts(own, model__vae_precision="bf16") == (6, 7)
    rewrite(base, "first_stage_model.encoder.conv_in.bias")
    assert counts(own) == (6, 7)
    rewrite(base, "conditioner.embedders.0.transformer.text_model.embeddings.position_embedding.weight")
    assert counts(own) == (7, 6)
    rewrite(base, "model.diffusion_model.out.2.bias")
    assert counts(own) == (0, 13)


def test_training_says_how_much_it_encodes(own):
    (own.folder / "drawings" / "3.txt").write_text("something else")
    assert "cache: 0 of 6 images and 1 of 7 captions to encode" in own.train(failpoint="train.in_step").stderr


def test_an_edited_caption_is_what_is_trained_on(own, whole):
    """Had the old entry been read, the losses would be the same as before."""
    (own.folder / "drawings" / "0.txt").write_text("something else entirely")
    assert [a["loss"] != b["loss"] for a, b in zip(own.finish().log, whole.log, strict=True)].count(True) >= 4


CHANGES = {
    "caption": lambda folder: (folder / "0.txt").write_text("something else"),
    "image": lambda folder: repaint(folder / "0.png"),
    "removed": lambda folder: ((folder / "5.png").unlink(), (folder / "5.txt").unlink()),
    "added": lambda folder: (shutil.copy(folder / "1.png", folder / "6.png"), (folder / "6.txt").write_text("x")),
    "renamed": lambda folder: [(folder / f"5{end}").rename(folder / f"_5{end}") for end in (".png", ".txt")],
}
WHICH = {
    "caption": "(0.png is with another caption)",
    "image": "(0.png is changed)",
    "removed": "(5.png is not there)",
    "added": "(6.png is new)",
    "renamed": "(5.png is not there, _5.png is new)",
}


def test_a_run_is_not_continued_on_other_data(own, begin_killed):
    begin_killed(own)
    drawings, kept = own.folder / "drawings", own.folder / "kept"
    entries = len(list(own.cache.rglob("*.safetensors")))
    for change, make in CHANGES.items():
        shutil.copytree(drawings, kept)
        make(drawings)
        ended = own.train()
        assert ended.code == 6, change
        assert "other images or captions" in ended.complaint
        assert WHICH[change] in ended.complaint
        assert "output.dir" in ended.complaint
        assert len(list(own.cache.rglob("*.safetensors"))) == entries  # refused before anything was encoded
        assert own.steps() == [2]
        shutil.rmtree(drawings)
        kept.rename(drawings)
    own.finish()


NETWORKS = {
    "model.diffusion_model.out.2.bias": "on another base model",
    "model.diffusion_model.output_blocks.1.0.in_layers.2.weight": "on another base model",
    "first_stage_model.encoder.conv_in.bias": "with another VAE",
    "conditioner.embedders.0.transformer.text_model.embeddings.position_embedding.weight": "with other text encoders",
}


def test_a_run_is_not_continued_with_another_network(own, whole, begin_killed):
    base, kept = own.folder / "base.safetensors", own.folder / "kept"
    begin_killed(own)
    for name, told in NETWORKS.items():
        left = files_and_status(own.out)
        shutil.copy(base, kept)
        rewrite(base, name)
        ended = own.train()
        assert ended.code == 6, name
        assert told in ended.complaint
        assert "output.dir" in ended.complaint
        assert files_and_status(own.out) == left
        kept.rename(base)
    assert own.finish() == whole


def write_state(job, text: str) -> None:
    """Replaces what the checkpoint of step 2 says of itself."""
    rewrite_state(job.out / "checkpoints" / "step-000002", text)


WRONG = (
    {"earlier_updates": "x"},
    {"micro_batches": -1},
    {"validation": {"loss": "x", "step": 1, "since": 0}},
    {"code": [1]},
)


def test_a_checkpoint_whose_state_was_edited_is_refused_by_name(job, begin_killed):
    begin_killed(job)
    ours = json.loads((job.out / "checkpoints" / "step-000002" / "state.json").read_text())
    for text in (
        "[]",
        "{",
        "3",
        '{"format": 1}',
        '{"format": 1, "version": "0.1.0", "step": 1}',
        *(json.dumps(ours | wrong) for wrong in WRONG),
    ):
        write_state(job, text)
        for ended in (job.plan(), job.train()):
            assert ended.code == 6, text
            assert "step-000002: its state.json is not what flame-train wrote for step 2" in ended.complaint


def test_a_checkpoint_that_does_not_know_its_base_is_continued_where_that_lies(job, whole, world, begin_killed):
    """One of an older version: its files are told by their places, which may be written in another way."""
    begin_killed(job)
    state = json.loads((job.out / "checkpoints" / "step-000002" / "state.json").read_text())
    write_state(job, json.dumps({name: state[name] for name in ("format", "step", "dataset", "version")}))
    shutil.copy(world / "base.safetensors", job.folder / "copy.safetensors")
    ended = job.train(model__checkpoint=str(job.folder / "copy.safetensors"))
    assert ended.code == 6
    assert "model.checkpoint" in ended.complaint

    assert job.finish(model__checkpoint=f"{world}/./drawings/../base.safetensors").log == whole.log


def test_a_project_that_was_moved_is_continued(own, whole, begin_killed):
    """Images and weights are told by what is in them."""
    begin_killed(own)
    moved = own.folder / "moved"
    moved.mkdir()
    for name in ("drawings", "base.safetensors", "out"):
        (own.folder / name).rename(moved / name)
    places = {"data__path": "drawings", "model__checkpoint": "base.safetensors", "output__dir": "out"}
    ended = own.train(**{key: str(moved / name) for key, name in places.items()})
    assert ended.code == 0, ended.stderr
    assert "continuing after step 2" in ended.stderr
    (moved / "out").rename(own.out)
    assert own.result().log == whole.log


LOST = {"config.toml": "config.toml is gone", "checkpoints": "checkpoints are gone"}


@pytest.mark.parametrize("before", ["killed_run", "undisturbed"])
def test_a_run_that_lost_a_part_is_not_begun_anew(job, before, request):
    """Neither one that was stopped nor one that is done; of what it left, only a status "running" is corrected."""
    left_behind = request.getfixturevalue(before)
    shutil.copytree(getattr(left_behind, "out", left_behind), job.out)
    for name, told in LOST.items():
        (job.out / name).rename(job.folder / name)
        left = files_and_status(job.out)
        ended = job.train(optimizer__lr=0.5)
        assert ended.code == 6
        assert told in ended.complaint or "other settings" in ended.complaint
        ended = job.train()
        assert ended.code == 6
        assert told in ended.complaint
        assert "output.dir" in ended.complaint
        assert files_and_status(job.out) == left
        (job.folder / name).rename(job.out / name)


def files_and_status(out):
    """Every file's bytes but the status's; and the status, of which a killed run's "running" reads "interrupted"."""
    status = json.loads((out / "status.json").read_text())
    state = "interrupted" if status["state"] == "running" else status["state"]
    files = {path: path.read_bytes() for path in out.rglob("*") if path.is_file() and path.name != "status.json"}
    return files, {**status, "state": state}


def dry(job, **changes):
    return job.program(*job.arguments("sdxl-lora", **changes), "--dry-run")


def test_a_dry_run_refuses_the_folder_that_a_run_would_and_writes_nothing(job, begin_killed):
    assert dry(job).code == 0
    assert not job.out.exists()
    begin_killed(job)
    left = {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in job.out.rglob("*")}
    assert dry(job).code == 0
    ended = job.program(*job.arguments("sdxl-lora"), "--dry-run", "--gpus", "3")
    assert (ended.code, "takes 2 micro-batches" in ended.complaint) == (6, True)
    ended = dry(job, optimizer__lr=0.5)
    assert (ended.code, "other settings" in ended.complaint) == (6, True)
    ended = dry(job, output__dir=str(job.folder / "config.toml"))
    assert (ended.code, "config.toml is a file" in ended.complaint) == (6, True)
    assert {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in job.out.rglob("*")} == left


def test_a_run_is_not_continued_with_other_settings(job, whole, begin_killed):
    begin_killed(job)
    before = (job.out / "config.toml").read_bytes()
    ended = job.train(optimizer__lr=0.5, lora__rank=3)
    assert ended.code == 6
    table = [line.split() for line in ended.complaint.splitlines() if line.startswith("  ")]
    assert table == [
        ["setting", "that", "run", "this", "config"],
        ["lora.rank", "2", "3"],
        ["optimizer.lr", "0.01", "0.5"],
    ]
    assert (job.out / "config.toml").read_bytes() == before

    assert job.finish() == whole


def test_a_run_that_ran_out_of_memory_is_continued_with_checkpointing(job, whole, begin_killed):
    """Which is what it is told to try; the bits are those of a run that never stopped."""
    begin_killed(job)
    assert job.finish(gradient__checkpointing="offload") == whole


def test_two_programs_in_one_folder(job, program, whole):
    """The second is refused while the first works, and told who that is; the first does not notice."""
    first = program.start_python("-m", "flame_train", *job.arguments("sdxl-lora"))
    log = job.out / "log.jsonl"
    while first.poll() is None and not (log.exists() and log.stat().st_size):
        os.sched_yield()
    first.send_signal(signal.SIGSTOP)  # else it may be done before the second has begun
    second = job.train()
    first.send_signal(signal.SIGCONT)
    _, errors = first.communicate()
    assert first.returncode == 0, errors

    assert second.code == 6
    assert f"process {first.pid} on {socket.gethostname()}" in second.complaint
    assert job.result() == whole


def test_two_programs_that_fill_one_cache(new_job, program, whole):
    arguments = new_job.arguments("cache")
    both = [program.start(*arguments) for _ in range(2)]
    for process in both:
        _, errors = process.communicate()
        assert process.returncode == 0, errors
    assert new_job.finish() == whole


DAMAGED = [
    ("MANIFEST.json", "bit"),
    ("MANIFEST.json", "gone"),
    ("lora.safetensors", "gone"),
    ("optimizer.safetensors", "bit"),
    ("optimizer.safetensors", "cut"),
    ("state.json", "bit"),
]


def test_a_damaged_newest_checkpoint_is_passed_over(job, whole):
    """With a warning that names it; the one before it leads to the same bytes."""
    job.train(failpoint="train.before_update:5")
    assert job.steps() == [2, 4]
    stopped = shutil.copytree(job.out, job.folder / "stopped")
    for name, damage in DAMAGED:
        shutil.rmtree(job.out)
        shutil.copytree(stopped, job.out)
        path = job.out / "checkpoints" / "step-000004" / name
        raw = bytearray(path.read_bytes())
        if damage == "gone":
            path.unlink()
        elif damage == "cut":
            path.write_bytes(raw[: len(raw) // 2])
        else:
            raw[len(raw) // 2] ^= 16
            path.write_bytes(raw)
        ended = job.train()
        assert ended.code == 0, ended.stderr
        assert "passed over" in ended.stderr, (name, damage)
        assert str(path.parent) in ended.stderr
        assert "continuing after step 2" in ended.stderr
        assert job.result() == whole, (name, damage)


def test_no_whole_checkpoint_is_a_refusal_and_not_a_new_run(job):
    job.train(failpoint="train.before_update:5")
    for path in (job.out / "checkpoints").rglob("optimizer.safetensors"):
        path.write_bytes(b"")
    log = (job.out / "log.jsonl").read_bytes()
    ended = job.train()
    assert ended.code == 6
    assert ended.complaint.count("optimizer.safetensors has 0 bytes") == 2
    assert (job.out / "log.jsonl").read_bytes() == log


@pytest.mark.parametrize("fault", ["gone", "bit"])
def test_a_cache_entry_that_goes_bad_while_training(job, whole, fault, begin_killed):
    """It cannot be guessed: the run ends, naming image and entry, and the next one makes it anew."""
    begin_killed(job)
    script = (
        "import sys\n"
        "from pathlib import Path\n"
        "from flame_train import cli\n"
        "from flame_train.training import loop\n"
        "usual = loop._catch_up\n"
        "def spoil(run, figures):\n"
        "    usual(run, figures)\n"
        f"    for path in Path({str(job.cache)!r}).rglob('*.safetensors'):\n"
        f"        path.unlink() if {fault == 'gone'} else path.write_bytes(path.read_bytes()[:-1] + b'!')\n"
        "loop._catch_up = spoil\n"
        "sys.argv[0] = 'flame-train'\n"
        "cli.main()\n"
    )
    process = job.program.start_python("-c", script, *job.arguments("sdxl-lora"))
    _, errors = process.communicate()
    assert process.returncode == 3, errors
    assert "Traceback" not in errors
    assert "vanished or was damaged" in errors
    assert ".png" in errors or "the caption" in errors
    assert job.steps()[-1] >= 2

    assert job.finish() == whole


def test_a_cache_entry_of_another_key_is_not_believed(job, whole):
    """A file put under the wrong name by hand, whole in itself."""
    entries = sorted(job.cache.rglob("*.safetensors"))
    cache = DiskCache(job.cache)
    images = [path for path in entries if "mean" in cache.get(path.stem)]
    shutil.copy(images[0], images[1])
    assert job.finish() == whole


def test_copies_that_fill_batches_are_told(job):
    """Of two shapes there are four drawings and two: batches of three have to be filled."""
    ended = job.train(data__batch_size=3, train__steps=3)
    assert "3 of an epoch's 9 samples repeat others, to fill batches of data.batch_size=3" in ended.stderr
    assert (
        "9 samples an epoch, of which 3 repeat others to fill batches"
        in dry(job, data__batch_size=3, train__steps=3).stdout
    )
