"""Which process this is, from variables as those who start processes set them."""

import dataclasses

import pytest

from jfsdp.launch.environment import Place, assigned_gpus, expand_counts, find_place, first_host, join_timeout
from tests.refusals import refuses

SRUN = {"SLURM_JOB_ID": "4242", "SLURM_PROCID": "9", "SLURM_LOCALID": "1", "SLURM_NODEID": "1", "SLURM_NTASKS": "32"}
SRUN |= {"SLURM_STEP_NUM_TASKS": "32", "SLURM_STEP_TASKS_PER_NODE": "8(x4)", "SLURM_STEP_NODELIST": "gpu[07-10]"}
SBATCH = {"SLURM_JOB_ID": "4242", "SLURM_NTASKS": "32", "SLURM_NODELIST": "gpu[07-10]", "SLURM_PROCID": "0"}
TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "node0"}
TORCHRUN |= {"MASTER_PORT": "29500"}
MPIRUN = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4"}
MPIRUN |= {"OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
INDEXED_JOB = {"JOB_COMPLETION_INDEX": "2", "WORLD_SIZE": "4", "MASTER_ADDR": "run-0.run", "MASTER_PORT": "1234"}
JAX = {"JAX_COORDINATOR_ADDRESS": "node0:99", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}
ON_SLURM = Place("Slurm", f"gpu07:{61440 + 4242 % 4096}", 32, 9, 8, 1)
BY_TORCHRUN = Place("RANK and WORLD_SIZE", "node0:29500", 8, 5, 4, 1)
ONE_TASK_PER_NODE = SRUN | {"SLURM_PROCID": "1", "SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": "2"}
ONE_TASK_PER_NODE |= {"SLURM_STEP_TASKS_PER_NODE": "1(x2)"}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        (SBATCH, None),  # the batch script itself is no task
        (SRUN, ON_SLURM),
        (SRUN | {"JAX_COORDINATOR_PORT": "7777"}, dataclasses.replace(ON_SLURM, address="gpu07:7777")),
        (SRUN | {"JAX_COORDINATOR_ADDRESS": "ib7:99"}, dataclasses.replace(ON_SLURM, address="ib7:99")),
        (TORCHRUN, BY_TORCHRUN),
        (TORCHRUN | {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}, None),
        (TORCHRUN | ONE_TASK_PER_NODE, BY_TORCHRUN),  # a launcher of four under each of two tasks
        (MPIRUN, Place("Open MPI", None, 4, 3, 2, 1)),
        (MPIRUN | {"MASTER_ADDR": "h", "MASTER_PORT": "1"}, Place("Open MPI", "h:1", 4, 3, 2, 1)),
        (INDEXED_JOB, Place("JOB_COMPLETION_INDEX and WORLD_SIZE", "run-0.run:1234", 4, 2)),
        ({"JOB_COMPLETION_INDEX": "0"}, None),
        (INDEXED_JOB | TORCHRUN, BY_TORCHRUN),  # a launcher of four in each of two pods
        (JAX, Place("JAX_NUM_PROCESSES and JAX_PROCESS_ID", "node0:99", 2, 1)),
    ],
)
def test_a_process_knows_its_place(environment, expected):
    assert find_place(environment) == expected


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        (TORCHRUN | {"WORLD_SIZE": ""}, "RANK is set, and WORLD_SIZE is empty"),
        (TORCHRUN | {"RANK": "8"}, "RANK=8 must be below WORLD_SIZE=8"),
        (TORCHRUN | {"LOCAL_RANK": "4"}, "LOCAL_RANK=4 must be below LOCAL_WORLD_SIZE=4"),
        (TORCHRUN | {"RANK": "one"}, "RANK='one' must be a whole number"),
        ({"RANK": "1", "WORLD_SIZE": "2"}, "RANK is set, and MASTER_ADDR is not set"),
        (TORCHRUN | {"JAX_NUM_PROCESSES": "2"}, "JAX_NUM_PROCESSES is set, and JAX_COORDINATOR_ADDRESS is not set"),
        (TORCHRUN | {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"} | SRUN, "process 0 of 1, and Slurm process"),
        (TORCHRUN | JAX, "process 1 of 2, and RANK and WORLD_SIZE process 5 of 8"),
        (SRUN | {"SLURM_STEP_NODELIST": ""}, "SLURM_STEP_NODELIST is empty"),
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "4(x4)"}, "contradicts SLURM_STEP_NUM_TASKS=32"),
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "many"}, "'many' is not a list of counts"),
        (SRUN | {"JAX_COORDINATOR_PORT": "99999"}, "JAX_COORDINATOR_PORT=99999 must be a port, 1 to 65535"),
        (SRUN | {"JAX_COORDINATOR_ADDRESS": "ib7"}, "JAX_COORDINATOR_ADDRESS='ib7' must be HOST:PORT"),
    ],
)
def test_variables_that_are_missing_or_contradict_are_named(environment, words):
    refuses(lambda: find_place(environment), words)


def test_absent_processes_and_the_time_to_wait_are_numbers():
    told = {"RANK": "0", "WORLD_SIZE": "8", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    place = find_place(told | {"JFSDP_ABSENT": "3 7"})
    assert place is not None and place.absent == (3, 7)
    for text in ("3,7", "-1", "none"):
        refuses(lambda text=text: find_place(told | {"JFSDP_ABSENT": text}), f"JFSDP_ABSENT='{text}'")
    assert [join_timeout({"JFSDP_JOIN_TIMEOUT": text}) for text in ("", "0.5")] == [300, 0.5]
    for text in ("5 min", "nan", "inf", "0", "-1"):
        refuses(lambda text=text: join_timeout({"JFSDP_JOIN_TIMEOUT": text}), f"JFSDP_JOIN_TIMEOUT='{text}'")


HOSTS = {
    "node001": "node001",
    "a,b": "a",
    "node[001-015],x": "node001",
    "n[7,9]": "n7",
    "rack[08,10-11]node[000-003,7],other[1-2]": "rack08node000",
    "gpu[07-10]-ib": "gpu07-ib",
    "n-1,n[2-3]": "n-1",
    "[10-12]": "10",
}


def test_lists_of_slurm_are_read_and_others_are_refused():
    assert {text: first_host(text) for text in HOSTS} == HOSTS
    assert expand_counts("2(x3),1") == [2, 2, 2, 1]
    for text in ("n[1-2", "n1-2]", "n[]", "n[x-y]", ",a", "n[1-2]],b"):
        refuses(lambda text=text: first_host(text), f"SLURM_STEP_NODELIST={text!r}")


def test_processes_of_a_host_share_its_gpus():
    cases = {(8, 3, 8): [3], (2, 1, 8): [4, 5, 6, 7], (1, 0, 8): None, (8, 3, 1): None, (8, 3, 0): None}
    for (num_local, local_id, visible), expected in cases.items():
        assert assigned_gpus(Place("", None, 64, 3, num_local, local_id), visible) == expected
    assert assigned_gpus(Place("", None, 64, 3, 0, None), 8) is None
    refuses(lambda: assigned_gpus(Place("torchrun", None, 3, 0, 3, 0), 8), "3 processes", "8 GPUs")
