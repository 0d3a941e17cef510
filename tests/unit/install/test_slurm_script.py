"""run.sh on a cluster of stubs: what starts, what is forwarded, what is queued again."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_dapo.planning.ports import engine_port, master_port
from tests.conftest import REPOSITORY
from tests.unit.install.cluster import SCRIPT, SECRET, Cluster

PATIENCE_SECONDS = 120.0


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster.build(tmp_path)


def test_every_rank_is_told_where_to_meet(cluster: Cluster) -> None:
    code, output = cluster.run("0 0 0 0", "optimizer.lr=1e-4", QUICK="")
    assert code == 0, output
    port = master_port(1000123)
    for rank in range(4):
        told = (cluster.record / f"rank{rank}").read_text()
        assert told == f"gpu003 {port} 1 --config {cluster.config} optimizer.lr=1e-4"
    log = cluster.run_dir / "logs" / "attempt_0" / "trainer_3.log"
    assert log.read_text() == "rank 3 says hello\n"
    assert cluster.requeued() == 0


@pytest.mark.parametrize(
    ("codes", "result", "requeued"),
    [
        ("75 75 75 75", 75, 1),
        ("75 143 143 75", 75, 1),
        ("143 143 75 143", 75, 1),
        ("0 0 78 143", 78, 0),
        ("78 1 1 143", 78, 0),
        ("143 1 143 143", 1, 0),
        ("143 143 143 143", 1, 0),
        ("75 1 143 143", 1, 0),
    ],
)
def test_the_ranks_codes_decide_what_becomes_of_the_job(
    cluster: Cluster, codes: str, result: int, requeued: int
) -> None:
    code, output = cluster.run(codes)
    assert (code, cluster.requeued()) == (result, requeued), output


def test_a_crash_shows_the_log_of_the_rank_that_failed(cluster: Cluster) -> None:
    _, output = cluster.run("143 143 1 143")
    assert "rank 2 failed with code 1" in output
    assert "rank 2 says hello" in output


def test_the_restart_budget_ends_a_chain_of_preemptions(cluster: Cluster) -> None:
    code, output = cluster.run("75 75 75 75", SLURM_RESTART_COUNT="5", MAX_RESTARTS="5")
    assert (code, cluster.requeued()) == (75, 0)
    assert "queued again 5 times already" in output
    assert (cluster.run_dir / "logs" / "attempt_5" / "trainer_0.log").exists()


def test_three_crashes_in_a_row_end_the_chain(cluster: Cluster) -> None:
    for attempt in range(3):
        cluster.run("1 143 143 143", SLURM_RESTART_COUNT=str(attempt), MAX_CRASHES="3")
    assert cluster.requeued() == 2
    cluster.run("75 75 75 75")
    cluster.run("1 143 143 143", MAX_CRASHES="3")
    assert cluster.requeued() == 4, "a saved run starts the count of crashes anew"


@pytest.mark.parametrize(
    ("extra", "arguments", "message"),
    [
        ({}, ("parallel.tensor=3",), "parallel.tensor=3: must divide"),
        ({}, ("loss.clip_hihg=1",), "Did you mean loss.clip_high?"),
        ({"SLURM_JOB_NUM_NODES": "3"}, (), "the job has 3 nodes, parallel.nodes is 2 and"),
        (
            {},
            (
                "rollout.engine_nodes=1",
                "rollout.remote_engines=true",
                "rollout.placement=disaggregated",
            ),
            "the job has 2 nodes, parallel.nodes is 2 and rollout.engine_nodes is 1",
        ),
        ({}, ("rollout.engine_nodes=1",), "rollout.remote_engines=false"),
        ({"UNSEEN_NODE": "1"}, (), "is shared with 1 of 2 nodes"),
        ({"VENV": "/nonexistent"}, (), "holds no Python"),
        ({"SLURM_SUBMIT_DIR": "/"}, (), "submit this script from the repository's root"),
        ({"MAX_RESTARTS": "many"}, (), "MAX_RESTARTS=many: must be a whole number"),
        ({"MAX_CRASHES": "08"}, (), "MAX_CRASHES=08: must be a whole number"),
    ],
)
def test_what_cannot_work_is_refused_before_a_trainer_starts(
    cluster: Cluster, extra: dict[str, str], arguments: tuple[str, ...], message: str
) -> None:
    code, output = cluster.run("0 0 0 0", *arguments, QUICK="", **extra)
    assert (code, cluster.requeued()) == (78, 0), output
    assert message in output
    assert not (cluster.record / "rank0").exists()


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_signals_reach_every_rank_and_the_job_is_queued_again(
    cluster: Cluster, number: signal.Signals
) -> None:
    process = cluster.start("wait wait wait wait")
    deadline = time.monotonic() + PATIENCE_SECONDS
    while len(list(cluster.record.glob("rank*"))) < 4:
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    process.send_signal(number)
    code, output = cluster.finish(process)
    assert (code, cluster.requeued()) == (75, 1), output
    assert f"received {number.name.removeprefix('SIG')}" in output


def test_engines_get_a_step_of_their_own(cluster: Cluster) -> None:
    command = "echo engine of node $SLURM_NODEID; touch $RECORD/engine"
    awaited = str(cluster.record / "engine")
    code, output = cluster.run("0 0 0 0", ENGINE_COMMAND=command, AWAITED=awaited)
    assert code == 0, output
    steps = (cluster.record / "srun.log").read_text().splitlines()
    assert any("echo engine" in step and "--nodelist=gpu003" in step for step in steps)
    log = cluster.run_dir / "logs" / "attempt_0" / "engines.log"
    assert log.read_text() == "engine of node 0\n"


def test_engines_get_nodes_of_their_own_and_the_trainers_their_addresses(cluster: Cluster) -> None:
    cluster.write_python(engine_nodes=2)
    four = {"SLURM_JOB_NUM_NODES": "4", "NODES": "4"}
    code, output = cluster.run("0 0 0 0", AWAITED=str(cluster.record / "token"), **four)
    assert code == 0, output
    steps = (cluster.record / "srun.log").read_text().splitlines()
    (engines,) = (step for step in steps if "megatron_dapo.rollout.serve" in step)
    (trainers,) = (step for step in steps if "rank.sh" in step)
    assert "--nodelist=gpu005,gpu006 --ntasks=2 --ntasks-per-node=1" in engines
    assert "--nodelist=gpu003,gpu004" in trainers
    first = engine_port(1000123)
    endpoints = f"rollout.endpoints=[http://gpu005:{first},http://gpu006:{first + 1}]"
    assert endpoints in trainers
    assert f"--hosts gpu005,gpu006 --first-port {first}" in engines
    (told,) = re.findall(r"rollout.token_file=(\S+)", trainers)
    token = (cluster.record / "token").read_text()
    assert re.fullmatch(r"600 [0-9a-f]{64}", token)
    assert token.split()[1] not in output + "".join(steps)
    assert not Path(told).exists(), "engines serve until it goes"


def test_a_cancelled_job_is_not_queued_again(cluster: Cluster) -> None:
    code, output = cluster.run("75 75 75 75", JOB_STATE="COMPLETING")
    assert (code, cluster.requeued()) == (75, 0)
    assert "SLURM is ending this job by itself: not queued again" in output


def test_the_configuration_may_be_the_first_argument(cluster: Cluster) -> None:
    code, output = cluster.run("0 0 0 0", str(cluster.config), "optimizer.lr=1e-4", CONFIG="none")
    assert code == 0, output
    told = (cluster.record / "rank0").read_text()
    assert told.endswith(f" --config {cluster.config} optimizer.lr=1e-4")


def test_a_container_gets_the_data_and_the_repository(cluster: Cluster) -> None:
    code, output = cluster.run("0 0 0 0", IMAGE="lab/dapo:1", MOUNTS="/data:/data")
    steps = (cluster.record / "srun.log").read_text()
    assert code == 0, output
    assert (
        f"--container-image=lab/dapo:1 --container-mounts={REPOSITORY}:{REPOSITORY},/data:/data"
        in steps
    )
    assert "--no-container-mount-home" in steps


def test_no_secret_reaches_a_log_or_a_command_line(cluster: Cluster) -> None:
    _, output = cluster.run("1 143 143 143")
    assert SECRET not in output
    for file in (*cluster.run_dir.rglob("*"), *cluster.record.rglob("*")):
        assert file.is_dir() or SECRET not in file.read_text(), file


def test_outside_a_job_it_says_how_to_start(cluster: Cluster) -> None:
    code, output = cluster.run("0 0 0 0", SLURM_JOB_ID="")
    assert code != 0
    assert "start this script with sbatch" in output


def test_it_asks_for_the_papers_cluster() -> None:
    text = SCRIPT.read_text()
    for header in ("--nodes=16", "--gpus-per-node=8", "--signal=B:USR1@600", "--requeue"):
        assert f"#SBATCH {header}" in text
    for word in ("printenv", "set -x", "pkill", "killall"):
        assert word not in text


def test_shellcheck_finds_nothing() -> None:
    shellcheck = Path(sys.executable).with_name("shellcheck")  # of the extra `dev`
    scripts = [*(REPOSITORY / "examples").rglob("*.sh"), REPOSITORY / ".ci" / "run"]
    found = subprocess.run([shellcheck, *scripts], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout
