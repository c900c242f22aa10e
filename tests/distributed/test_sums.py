"""Sums in bf16: each process gets the same bits, near to the exact sum; and a run that adds up its gradients so."""

from __future__ import annotations

import subprocess
import sys

import pytest

from .conftest import ENVIRON, MPIRUN, OPEN_MPI, Study
from .test_ranks import farthest

SUMS = """
import numpy as np
from mpi4py import MPI
from flame_train.distributed.join import MpiCollectives
from flame_train.engine.backend import get_backend
from flame_train.engine.dtype import bfloat16

world = MPI.COMM_WORLD
sums = MpiCollectives(get_backend("cpu"), MPI)
parts = np.random.default_rng(0).normal(size=(world.Get_size(), 70_001)).astype(bfloat16)
mine = parts[world.Get_rank()].copy()
sums.all_reduce(mine)
assert mine.dtype == bfloat16
assert len(set(sums.all_gather(mine.tobytes()))) == 1
exact = parts.astype(np.float64).sum(0)
bound = 2.0**-8 * (world.Get_size() - 1) * np.abs(parts.astype(np.float64)).sum(0)  # half a unit of 8 bits a sum
assert (np.abs(mine.astype(np.float64) - exact) <= bound).all()
whole = np.full(9, world.Get_rank() + 1, bfloat16)
sums.all_reduce(whole)
assert (whole.astype(int) == sum(range(1, world.Get_size() + 1))).all()
"""


def test_sums_in_bf16_are_rounded_alike_in_all_processes(study):
    command = [MPIRUN, *OPEN_MPI, "-n", "3", sys.executable, "-c", SUMS]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env=ENVIRON)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.proof
def test_gradients_added_up_in_bf16_train_nearly_the_same_and_twice_the_same_bytes(study):
    runs: Study = study("sdxl")
    settings = {"train__steps": 4, "gradient__noise_std": 0.0, "optimizer__name": "sgd"}
    exact = runs.finish("exact", 2, **settings)
    rounded, again = (runs.finish(name, 2, gradient__all_reduce="bf16", **settings) for name in ("bf16", "bf16-again"))
    assert 0 < farthest(exact, rounded) < 0.05
    assert all((rounded[name] == again[name]).all() for name in rounded)
