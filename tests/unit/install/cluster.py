"""A cluster of stubs: srun, scontrol and a trainer that does as told, for run.sh."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

from megatron_dapo.config import load_config
from megatron_dapo.config.model_shape import read_hf_config
from megatron_dapo.planning.job import job_facts
from tests.conftest import REPOSITORY
from tests.unit.config.runs import write_run

SCRIPT = REPOSITORY / "examples" / "qwen32b" / "run.sh"
NODES, RANKS_PER_NODE = 2, 2
SECRET = "hunter2canary"

SRUN = """
    import os, pathlib, signal, subprocess, sys
    options = {}
    arguments = sys.argv[1:]
    while arguments and arguments[0].startswith("--"):
        name, _, value = arguments.pop(0).partition("=")
        options[name] = value
    record = pathlib.Path(os.environ["RECORD"])
    with (record / "srun.log").open("a") as log:
        log.write(" ".join(sys.argv[1:]) + "\\n")
    tasks, per_node = int(options["--ntasks"]), int(options.get("--ntasks-per-node", 1))
    unseen = os.environ.get("UNSEEN_NODE")
    children = []
    def forward(number, frame):  # like slurmstepd: to every process of the task
        for child in children:
            os.killpg(child.pid, number)
    signal.signal(signal.SIGUSR1, forward)
    for task in range(tasks):
        place = {"SLURM_PROCID": str(task), "SLURM_NODEID": str(task // per_node)}
        if place["SLURM_NODEID"] == unseen:
            continue
        out = options.get("--output", "").replace("%t", str(task)).replace("%n", str(task))
        stream = open(out, "wb") if out else None
        children.append(subprocess.Popen(
            arguments, env=os.environ | place, stdout=stream, stderr=stream,
            start_new_session=True))
    sys.exit(max([child.wait() % 256 for child in children], default=0))
"""
SCONTROL = """
    import os, pathlib, sys
    if sys.argv[1] == "show":
        if sys.argv[2] == "job":
            print("JobId=1000123 JobState=" + os.environ.get("JOB_STATE", "RUNNING"))
        elif sys.argv[2] == "hostnames":
            nodes = int(os.environ["SLURM_JOB_NUM_NODES"])
            print("\\n".join(f"gpu{n:03d}" for n in range(3, 3 + nodes)))
        else:
            print("NodeName=" + sys.argv[3], "NodeAddr=" + sys.argv[3], "Port=6818")
    else:
        with (pathlib.Path(os.environ["RECORD"]) / "requeued").open("a") as file:
            file.write(" ".join(sys.argv[2:]) + "\\n")
"""
TRAINER = """
    import os, pathlib, signal, sys, time
    rank = int(os.environ["SLURM_PROCID"])
    record = pathlib.Path(os.environ["RECORD"])
    names = ("MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")
    place = " ".join(os.environ[name] for name in names)
    code = os.environ["TRAINER_CODES"].split()[rank]
    awaited = os.environ.get("AWAITED")
    while awaited and not pathlib.Path(awaited).exists():
        time.sleep(0.02)
    print("rank", rank, "says hello", flush=True)
    if code == "wait":
        def save(number, frame):
            sys.exit(75)
        signal.signal(signal.SIGUSR1, save)
        (record / f"rank{rank}").write_text(place)
        time.sleep(600)
        sys.exit(1)
    (record / f"rank{rank}").write_text(place + " " + " ".join(sys.argv[1:]))
    sys.exit(int(code))
"""
ENGINE = """
    import os, pathlib, sys, time
    (told,) = (word for word in sys.argv if word.startswith("rollout.token_file="))
    token = pathlib.Path(told.partition("=")[2])
    mode = oct(token.stat().st_mode & 0o777)[2:]
    record = pathlib.Path(os.environ["RECORD"])
    draft = record / f"token.{os.environ['SLURM_PROCID']}"
    draft.write_text(f"{mode} {token.read_text()}")
    draft.rename(record / "token")
    while token.exists():
        time.sleep(0.05)
"""
PYTHON = """#!/bin/bash
case "$2 ${{QUICK:-}}" in
  "megatron_dapo.train "*) exec {python} {folder}/trainer.py "${{@:3}}" ;;
  "megatron_dapo.rollout.serve "*) exec {python} {folder}/engine.py "${{@:3}}" ;;
  "megatron_dapo.cli.main 1") exit 0 ;;
  "megatron_dapo.planning.job 1") exec cat {folder}/facts ;;
esac
exec {python} "$@"
"""


@dataclass(frozen=True)
class Cluster:
    """A folder with the stubs, a run for them, and what they recorded."""

    folder: Path
    config: Path

    @classmethod
    def build(cls, folder: Path) -> Cluster:
        """Write the stubs and a sound CPU run of 2 nodes x 2 ranks."""
        config = write_run(folder)
        layout = f"parallel: {{tensor: 2, data: 2, nodes: {NODES}}}\ndevice: cpu\n"
        config.write_text(config.read_text() + layout)
        cluster = cls(folder, config)
        (folder / "bin").mkdir()
        (folder / "venv" / "bin").mkdir(parents=True)
        cluster.record.mkdir()
        (folder / "trainer.py").write_text(textwrap.dedent(TRAINER))
        (folder / "engine.py").write_text(textwrap.dedent(ENGINE))
        for name, source in (("srun", SRUN), ("scontrol", SCONTROL)):
            stub = folder / "bin" / name
            stub.write_text(f"#!{sys.executable}\n{textwrap.dedent(source)}")
            stub.chmod(0o755)
        cluster.write_python()
        return cluster

    def write_python(self, engine_nodes: int = 0) -> None:
        """A `python` whose trainer is the stub; with QUICK set, pre-flight answers at once."""
        where = [f"rollout.engine_nodes={engine_nodes}", f"rollout.engines={max(1, engine_nodes)}"]
        config = load_config(self.config, where)
        facts = job_facts(config, read_hf_config(config.model.path), 1000123)
        (self.folder / "facts").write_text("".join(f"{k}={v}\n" for k, v in facts.items()))
        python = self.folder / "venv" / "bin" / "python"
        python.write_text(PYTHON.format(python=sys.executable, folder=self.folder))
        python.chmod(0o755)

    @property
    def record(self) -> Path:
        return self.folder / "record"

    @property
    def run_dir(self) -> Path:
        return self.folder / "run"

    def environment(self, codes: str, **extra: str) -> dict[str, str]:
        """What sbatch gives the script; `codes` are the trainers' exit codes by rank."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "MASTER_"))}
        return kept | {
            "PATH": f"{self.folder / 'bin'}:{self.folder / 'venv' / 'bin'}:{os.environ['PATH']}",
            "QUICK": "1",
            "VENV": str(self.folder / "venv"),
            "CONFIG": str(self.config),
            "RECORD": str(self.record),
            "TRAINER_CODES": codes,
            "SLURM_JOB_ID": "1000123",
            "SLURM_JOB_NUM_NODES": str(NODES),
            "SLURM_JOB_NODELIST": "gpu[003-004]",
            "SLURM_SUBMIT_DIR": str(REPOSITORY),
            "CUDA_VISIBLE_DEVICES": "",
            "WANDB_API_KEY": SECRET,
            **extra,
        }

    def start(self, codes: str, *arguments: str, **extra: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["bash", str(SCRIPT), *arguments],
            env=self.environment(codes, **extra),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def run(self, codes: str, *arguments: str, **extra: str) -> tuple[int, str]:
        """Run the script to its end; its exit code and everything that it printed."""
        return self.finish(self.start(codes, *arguments, **extra))

    def finish(self, process: subprocess.Popen[str]) -> tuple[int, str]:
        """Wait for a started script; nothing of it outlives a time-out."""
        try:
            output, _ = process.communicate(timeout=300)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        return process.returncode, output

    def requeued(self) -> int:
        """How often `scontrol requeue` was called for this job."""
        file = self.record / "requeued"
        return file.read_text().splitlines().count("1000123") if file.exists() else 0
