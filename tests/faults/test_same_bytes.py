"""Equal seeds give equal bytes, wherever and under whichever settings of the machine a run happens."""

from __future__ import annotations

import shutil

import pytest

from flame_train.io.safetensors import SafetensorsFile

pytestmark = pytest.mark.bytes


@pytest.mark.parametrize(
    "env",
    [
        {"PYTHONHASHSEED": "1", "TZ": "Pacific/Kiritimati", "LANG": "C", "LC_ALL": "C"},
        {"PYTHONHASHSEED": "2", "TZ": "America/St_Johns", "COLUMNS": "20", "TERM": "dumb", "HOME": "/nonexistent"},
    ],
    ids=["first", "second"],
)
def test_neither_hash_seed_nor_clock_nor_folder_matters(job, program, whole, tmp_path, env):
    elsewhere = tmp_path / "else where"
    elsewhere.mkdir()
    ended = program.cold(*job.arguments("sdxl-lora"), env=env, cwd=elsewhere)
    assert ended.code == 0, ended.stderr
    assert job.result() == whole


def test_the_order_in_which_files_were_made_does_not_matter(job, whole, world, tmp_path):
    """Folders list their files in an order of their own; the copy is made backwards."""
    copy = tmp_path / "elsewhere" / "drawings"
    copy.mkdir(parents=True)
    for path in sorted((world / "drawings").iterdir(), reverse=True):
        if path.is_file():
            shutil.copy(path, copy / path.name)
    copied = job.finish(data__path=str(copy))
    assert (copied.lora, copied.log) == (whole.lora, whole.log)


def test_two_threads_give_what_two_threads_gave(another, program):
    """The promise holds for one number of BLAS threads: another number may round sums differently."""
    results = []
    for name in ("one", "two"):
        job = another(name)
        env = {"OPENBLAS_NUM_THREADS": "2", "OMP_NUM_THREADS": "2"}
        ended = program.cold(*job.arguments("sdxl-lora"), env=env)
        assert ended.code == 0, ended.stderr
        results.append(job.result())
    assert results[0] == results[1]


def test_another_seed_gives_another_result(job, whole):
    other = job.finish(train__seed=7)
    assert other.lora != whole.lora
    assert other.log[0]["loss"] != whole.log[0]["loss"]


def test_grids_checkpoints_and_their_number_do_not_change_the_result(job, whole):
    """What may be changed in the middle of a run does not reach the weights."""
    changed = job.finish(
        sample__every=2, sample__prompts=["a drawing"], sample__steps=2, checkpoint__every=3, checkpoint__keep=1
    )
    assert changed == whole


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_a_continued_run_is_not_a_cold_start(another, optimizer):
    """Uninterrupted equals continued; weights without moments, step and schedule do not: the state matters."""
    momentum = {"optimizer__momentum": 0.9} if optimizer == "sgd" else {}
    changes = {"optimizer__name": optimizer, **momentum}
    whole = another("whole").finish(**changes)

    continued = another("continued")
    continued.train(failpoint="train.after_step:3", **changes)
    bare = another("bare")
    shutil.copytree(continued.out, bare.out)
    assert continued.finish(**changes) == whole

    forget_moments(bare)
    assert bare.finish(**changes).lora != whole.lora


def test_a_moving_average_is_continued_and_handed_out(another, whole):
    """The LoRA holds the average, the checkpoint beside it the weights, which are trained as without one."""
    changes = {"train__ema_decay": 0.9}
    averaged = another("averaged").finish(**changes)
    continued = another("continued")
    continued.train(failpoint="train.after_step:3", **changes)
    assert continued.finish(**changes) == averaged
    assert averaged.log == whole.log
    assert averaged.lora != whole.lora


def forget_moments(job) -> None:
    """Puts the state of a first step beside the weights of the newest checkpoint, and seals it again."""
    import hashlib
    import json

    from flame_train.io.safetensors import save_file

    newest = max((job.out / "checkpoints").glob("step-*"))
    path = newest / "optimizer.safetensors"
    with SafetensorsFile(path) as file:
        entries = {name: file.read(name).copy() for name in file.names}
    assert any(name.startswith("optimizer.") and array.ndim and array.any() for name, array in entries.items())
    for name, array in entries.items():
        if name.startswith("optimizer.") and array.ndim:
            array[...] = 0.0
    save_file(path, entries)
    manifest = json.loads((newest / "MANIFEST.json").read_text())
    manifest["files"][path.name]["sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
    (newest / "MANIFEST.json").write_text(json.dumps(manifest))
