"""Which process this is, read from what Open MPI, MPICH, Slurm and torchrun set, by their manuals."""

from __future__ import annotations

import pytest

from flame_train.distributed.join import RankInfo, first_host, own_gpu, read_rank_info
from flame_train.errors import ConfigError

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
}
MPICH = {"PMI_RANK": "3", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1"}
TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}
SLURM = {
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "8",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NODELIST": "gpu[07-10]",
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "2",
}


def test_a_process_by_itself():
    assert read_rank_info({"PATH": "/bin", "SLURM_PROCID": "0", "SLURM_NTASKS": "8"}) == RankInfo()  # a batch script
    assert read_rank_info(OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"}) == RankInfo()


@pytest.mark.parametrize("variables", [OPEN_MPI, MPICH], ids=["open mpi", "mpich"])
def test_mpirun_s_variables(variables):
    assert read_rank_info(variables) == RankInfo(3, 8, 1, "mpi", "")


def test_torchrun_s_variables_and_a_port_beside_its_agent_s():
    assert read_rank_info(TORCHRUN) == RankInfo(3, 8, 1, "torchrun", "10.0.0.1:29501")


def test_srun_s_variables_give_each_job_its_port_on_the_first_host():
    place = read_rank_info(SLURM)
    assert (place.rank, place.world, place.local_rank, place.launcher) == (3, 8, 1, "slurm")
    host, port = place.address.split(":")
    assert host == "gpu07"
    assert 20_000 <= int(port) < 40_000
    assert read_rank_info(SLURM | {"SLURM_JOB_ID": "4712"}).address != place.address


def test_srun_with_mpi_uses_mpi():
    assert read_rank_info(SLURM | {"PMIX_RANK": "3"}).launcher == "mpi"


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("gpu[07-10]", "gpu07"),
        ("a1,a2", "a1"),
        ("rack2-n[3,5-6],x", "rack2-n3"),
        ("login", "login"),
        ("n[1-2].x", "n1.x"),
    ],
)
def test_the_first_host_of_slurm_s_list(hosts, first):
    assert first_host(hosts) == first


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        (TORCHRUN | {"RANK": "8"}, "RANK=8 is not below WORLD_SIZE=8"),
        (TORCHRUN | {"WORLD_SIZE": "many"}, "WORLD_SIZE, got 'many'"),
        ({k: v for k, v in TORCHRUN.items() if k != "MASTER_ADDR"}, "MASTER_ADDR is not"),
        ({k: v for k, v in SLURM.items() if k != "SLURM_STEP_NODELIST"}, "SLURM_STEP_NODELIST"),
        ({k: v for k, v in OPEN_MPI.items() if k != "OMPI_COMM_WORLD_SIZE"}, "OMPI_COMM_WORLD_SIZE, got ''"),
    ],
)
def test_variables_that_make_no_sense_are_refused(variables, said):
    with pytest.raises(ConfigError, match=said):
        read_rank_info(variables)


def test_each_process_takes_the_gpu_of_its_number_or_the_one_it_is_shown():
    second = read_rank_info(OPEN_MPI)
    assert own_gpu(second, visible=2, shared=False) == "cuda:1"
    assert own_gpu(second, visible=1, shared=False) == "cuda"  # Slurm shows each task its own
    assert own_gpu(RankInfo(5, 8, 5, "mpi"), visible=4, shared=True) == "cuda:1"
    with pytest.raises(ConfigError, match="at most 4 processes there"):
        own_gpu(RankInfo(5, 8, 5, "mpi"), visible=4, shared=False)
