"""Rank and meeting point from torchrun's and SLURM's environment."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path

import pytest

from megatron_dapo.parallel.launch_env import (
    LaunchEnv,
    expand_nodelist,
    init_process_group,
    read_launch_env,
)

CASES = json.loads((Path(__file__).parents[1] / "handed_cases.json").read_text())["cases"]
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS": "8",
    "SLURM_JOB_NODELIST": "a[1-2],b7",
}


@pytest.mark.parametrize(
    "case", [c for c in CASES if c["op"] == "launch_env"], ids=lambda c: c["id"]
)
def test_handed_case(case: dict) -> None:
    env = read_launch_env(case["input"]["env"])
    for name, expected in case["expect"].items():
        assert getattr(env, name) == expected, name


def test_torchrun_names_everything() -> None:
    environ = {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "node1",
        "MASTER_PORT": "29500",
    }
    assert read_launch_env(environ) == LaunchEnv(3, 4, 1, "node1", 29500)
    assert read_launch_env(environ | SLURM).rank == 3, "torchrun inside a SLURM job wins"


def test_a_step_of_a_job_meets_on_the_steps_first_node() -> None:
    step = {"SLURM_STEP_NODELIST": "b7", "SLURM_STEP_NUM_TASKS": "6", "MASTER_PORT": "20000"}
    assert read_launch_env(SLURM | step) == LaunchEnv(5, 6, 1, "b7", 20000)
    assert read_launch_env(SLURM).master_host == "a1"


def test_no_launcher_means_one_process() -> None:
    assert read_launch_env({}) == LaunchEnv(0, 1, 0, "127.0.0.1", None)


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"RANK": "0"}, "WORLD_SIZE is missing"),
        ({"RANK": "4", "WORLD_SIZE": "4"}, "rank 4 of a world of 4"),
        ({"RANK": "x", "WORLD_SIZE": "4"}, "RANK='x'"),
        ({"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "2"}, "NODELIST is missing"),
    ],
)
def test_a_broken_environment_is_refused(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_launch_env(environ)


@pytest.mark.parametrize(
    ("nodelist", "hosts"),
    [
        ("gpu[003-004]", ["gpu003", "gpu004"]),
        ("login1", ["login1"]),
        ("a[9-11]", ["a9", "a10", "a11"]),
        ("a[1,3-4],b07", ["a1", "a3", "a4", "b07"]),
        ("r[1-2]n[08-09]-ib", ["r1n08-ib", "r1n09-ib", "r2n08-ib", "r2n09-ib"]),
    ],
)
def test_node_lists_expand_in_order(nodelist: str, hosts: list[str]) -> None:
    assert expand_nodelist(nodelist) == hosts


@pytest.mark.parametrize("nodelist", ["", "a[1-2", "a]1", "a[2-1]", "a[1-]", "a[x]"])
def test_a_broken_node_list_is_refused(nodelist: str) -> None:
    with pytest.raises(ValueError, match="SLURM node"):
        expand_nodelist(nodelist)


def test_several_ranks_need_somewhere_to_meet() -> None:
    with pytest.raises(ValueError, match="MASTER_PORT"):
        init_process_group(
            LaunchEnv(0, 2, 0, "gpu003", None), timeout=timedelta(seconds=1), backend="gloo"
        )
