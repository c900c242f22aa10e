"""`bench step` of several processes, and PyTorch's DistributedDataParallel beside it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from .conftest import ENVIRON, MPIRUN, OPEN_MPI

STEP = ["--model", "sdxl-tiny", "--resolution", "64", "--precision", "fp32", "--rank", "2", "--device", "cpu"]


@pytest.mark.proof
@pytest.mark.skipif(MPIRUN is None, reason="needs mpirun: pip install 'flame-train[multi]'")
def test_the_step_of_two_processes_is_timed_beside_that_of_each_alone():
    command = [sys.executable, "-m", "flame_train", "bench", "step", *STEP, "--gpus", "2", "--json"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env=ENVIRON)
    assert ended.returncode == 0, ended.stderr
    row = json.loads(ended.stdout)  # of the leading process alone
    assert row["processes"] == 2
    assert row["share"] == pytest.approx(row["one_ms"] / row["ms"], abs=1e-4)
    assert row["images_per_s"] == pytest.approx(2 * row["batch"] / row["ms"] * 1e3, abs=1e-3)
    assert len(row["peak_gib"]) == 2


PARALLEL = """
import json
import torch
from flame_train.distributed.join import join
from benchmarks.torch_lora_step import compile_blocks, in_parallel
group, device = join("cpu")
torch.manual_seed(0)
layer = torch.nn.Linear(3, 2)
x = torch.arange(3.0) + group.rank
alone = torch.autograd.grad(layer(x).square().sum(), layer.weight)[0]
network = torch.nn.Sequential(layer)
compile_blocks(torch, network, ["Linear"], "eager")
parallel = in_parallel(torch, network, device, group)
for _ in range(3):
    layer.weight.grad = None
    parallel(x).square().sum().backward()
every = [torch.tensor(json.loads(text)) for text in group.all_gather(json.dumps(alone.tolist()))]
assert not torch.equal(every[0], every[1])
torch.testing.assert_close(layer.weight.grad, sum(every) / group.world)
torch.distributed.destroy_process_group()
"""


@pytest.mark.proof
@pytest.mark.parity
@pytest.mark.skipif(MPIRUN is None, reason="needs mpirun: pip install 'flame-train[multi]'")
@pytest.mark.parametrize("by_torchrun", [False, True])
def test_pytorch_s_processes_get_the_mean_of_their_gradients(by_torchrun: bool):
    """Processes that torchrun started meet too: its agent tells PyTorch that a store is there already, elsewhere."""
    pytest.importorskip("torch")
    command = [MPIRUN, *OPEN_MPI, "-n", "2", sys.executable, "-c", PARALLEL]
    env = {**ENVIRON, **({"TORCHELASTIC_USE_AGENT_STORE": "True"} if by_torchrun else {})}
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env=env, timeout=180)
    assert ended.returncode == 0, ended.stderr
