"""examples/qwen32b/run.sh on a real scheduler: 2 nodes of trainers, 2 of engines."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from megatron_dapo.observability.run_files import METRICS_FILE, read_metrics
from megatron_dapo.planning.ports import FIRST_ENGINE_PORT, LAST_ENGINE_PORT
from tests.conftest import REPOSITORY
from tests.e2e.rewards import GRADED_FILE
from tests.e2e.runs import Start, depends_on_training, make_start, same_number
from tests.slurm.cluster import Slurm

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(2400)]
PATIENCE_SECONDS = 900.0
SECRET = "hunter2canary"
STEPS = 6
SMOKE = "examples/qwen32b/cpu_smoke.yaml"
SCRIPT = "examples/qwen32b/run.sh"


@dataclass
class Job:
    """One submitted job and its run directory."""

    slurm: Slurm
    number: str
    run_dir: Path
    output: Path

    def state(self) -> str:
        return self.slurm.job(self.number)["JobState"]

    def wait_for(self, what: str, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not done():
            assert time.monotonic() < deadline, f"waited in vain for {what}: {self.story()}"
            time.sleep(0.2)

    def wait_for_step(self, step: int) -> None:
        """Until the run trains `step`."""
        self.wait_for(f"step {step}", lambda: step - 1 in self.metrics() or self.ended())
        assert not self.ended(), self.story()

    def finish(self) -> str:
        """Wait for the end; the state of the job then."""
        self.wait_for("its end", self.ended)
        return self.state()

    def ended(self) -> bool:
        return self.state() in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")

    def metrics(self) -> dict[int, dict[str, float]]:
        file = self.run_dir / METRICS_FILE
        return read_metrics(file) if file.exists() else {}

    def story(self) -> str:
        """Everything that a person would read."""
        logs = sorted(self.run_dir.glob("logs/attempt_*/*.log"))
        files = [self.output, *logs]
        return "\n".join(f"== {f}\n{f.read_text()[-3000:]}" for f in files if f.exists())


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Start:
    pytest.importorskip("vllm")
    return make_start(tmp_path_factory.mktemp("start"), "qwen3")


def submit(slurm: Slurm, start: Start, name: str, *overrides: str) -> Job:
    run_dir, output = start.folder / name, start.folder / f"{name}.out"
    environment = {
        "VENV": str(Path(sys.executable).parent.parent),
        "PYTHONPATH": str(REPOSITORY),
        "MODEL": str(start.model),
        "TOKENIZER": str(start.folder / "tokenizer"),
        "TRAIN_DATA": str(start.folder / "train.jsonl"),
        "HELDOUT_DATA": str(start.folder / "train.jsonl"),
        "WANDB_API_KEY": SECRET,
        GRADED_FILE: str(start.folder / f"{name}.graded"),
        "OMP_NUM_THREADS": "1",
    }
    answer = slurm.ask(
        *("sbatch", "--parsable", "--nodes=4", "--ntasks-per-node=1", "--gpus-per-node=8"),
        *("--exclusive", "--time=60", f"--output={output}", f"--chdir={REPOSITORY}"),
        *(SCRIPT, SMOKE, f"run_dir={run_dir}", f"training.steps={STEPS}"),
        *("reward.plugin=tests.e2e.rewards:even_ending", "optimizer.lr=1e-3"),
        *(f"reward.plugin_environment=[{GRADED_FILE}]", *overrides),
        extra=environment,
    )
    return Job(slurm, answer.strip(), run_dir, output)


def test_a_preempted_job_is_queued_again_and_ends_as_one_that_never_was(
    slurm: Slurm, start: Start
) -> None:
    """`scancel -s USR1` signals every process of all its steps, those of the engines too."""
    job = submit(slurm, start, "preempted")
    job.wait_for_step(3)
    assert listening(job) == {"127.0.0.3", "127.0.0.4"}, "engines listen at their nodes alone"
    slurm.ask("scancel", "--signal=USR1", job.number)
    job.wait_for("its second life", lambda: slurm.job(job.number)["Restarts"] == "1")
    saved = max(job.metrics())
    job.wait_for("its second trainers", lambda: bool(logs_of(job, 1)))
    assert job.finish() == "COMPLETED", job.story()
    straight = submit(slurm, start, "straight")
    assert straight.finish() == "COMPLETED", straight.story()
    assert slurm.job(straight.number)["Restarts"] == "0"
    assert 2 <= saved < STEPS
    same, resumed = straight.metrics(), job.metrics()
    assert list(same) == list(resumed) == list(range(STEPS + 1))
    for step, record in same.items():
        for name in sorted(filter(depends_on_training, record.keys() | resumed[step].keys())):
            assert same_number(record[name], resumed[step][name]), f"step {step}: {name}"
    assert (job.run_dir / "hf" / "config.json").exists()
    keep(job.output)
    assert_clean(job)


def test_a_cancelled_job_saves_and_stays_cancelled(slurm: Slurm, start: Start) -> None:
    job = submit(slurm, start, "cancelled")
    job.wait_for_step(2)
    slurm.ask("scancel", job.number)
    assert job.finish() == "CANCELLED"
    job.wait_for("the end of its steps", lambda: not processes_of(job))
    assert slurm.job(job.number)["Restarts"] == "0"
    assert list(job.run_dir.glob("checkpoints/step_*"))
    assert_clean(job)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("parallel.nodes=3", "the job has 4 nodes, parallel.nodes is 3 and rollout.engine_nodes"),
        ("rollout.remote_engines=false", "rollout.remote_engines=false"),
    ],
)
def test_what_cannot_work_is_refused_before_a_step_starts(
    slurm: Slurm, start: Start, override: str, message: str
) -> None:
    more = ("parallel.data=3", "parallel.tensor=1") if "nodes=3" in override else ()
    job = submit(slurm, start, f"refused_{override[:12]}", override, *more)
    assert job.finish() == "FAILED"
    assert slurm.job(job.number)["ExitCode"] == "78:0"
    assert message in job.output.read_text()
    assert not logs_of(job, 0)


def logs_of(job: Job, attempt: int) -> list[Path]:
    return list(job.run_dir.glob(f"logs/attempt_{attempt}/trainer_*.log"))


def processes_of(job: Job) -> list[psutil.Process]:
    """Processes that name the run directory, on their command line or in their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            words = [*process.cmdline(), *process.environ().values()]
        except psutil.Error:
            continue
        if any(str(job.run_dir) in word for word in words):
            found.append(process)
    return found


def listening(job: Job) -> set[str]:
    """Addresses at which servers of the job listen for other machines."""
    return {
        entry.laddr.ip
        for process in processes_of(job)
        for entry in process.net_connections("tcp")
        if entry.status == psutil.CONN_LISTEN
        and FIRST_ENGINE_PORT <= entry.laddr.port <= LAST_ENGINE_PORT
    }


def assert_clean(job: Job) -> None:
    """No process, no token, and no secret in what was written or shown."""
    job.wait_for("the end of its processes", lambda: not processes_of(job))
    assert not list(job.run_dir.rglob("engine_token"))
    for file in (job.output, *job.run_dir.rglob("*")):
        if file.is_file() and file.suffix in (".log", ".out", ".yaml", ".json", ".jsonl", ".txt"):
            assert SECRET not in file.read_text(errors="replace"), file


def keep(log: Path) -> None:
    """The job's log, for a person, where SLURM_JOB_LOG says."""
    wanted = os.environ.get("MEGATRON_DAPO_KEEP_JOB_LOG")
    if wanted:
        shutil.copy(log, wanted)
