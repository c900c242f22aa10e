"""`--gpus N` is mpirun's command line."""

from __future__ import annotations

import sys

from flame_train.distributed.launch import command_of, without_gpus

ASKED = ["train", "--config", "my.toml", "--gpus", "4", "--set", "train.steps=3"]
LEFT = ["train", "--config", "my.toml", "--set", "train.steps=3"]


def test_the_processes_get_the_command_without_the_option():
    assert without_gpus(ASKED) == LEFT
    assert without_gpus(["train", "--gpus=4", "--config", "my.toml"]) == ["train", "--config", "my.toml"]


def test_open_mpi_is_told_not_to_bind_and_that_root_may():
    program = [sys.executable, "-m", "flame_train"]
    mine = command_of("/usr/bin/mpirun", 4, ASKED, open_mpi=True, as_root=True)
    assert mine[:3] == ["/usr/bin/mpirun", "-n", "4"]
    assert {"--bind-to", "--oversubscribe", "--allow-run-as-root"} <= set(mine)
    assert mine[-8:] == [*program, *LEFT]
    assert command_of("mpirun", 2, ASKED, open_mpi=False, as_root=True) == ["mpirun", "-n", "2", *program, *LEFT]
