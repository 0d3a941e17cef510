"""A real SLURM of four nodes on this machine: munged, slurmctld and a slurmd for each node.

Everything is in one folder and ends with it. Nodes differ by port and by address (127.0.0.1 to
127.0.0.4), so that no name has to resolve. Needs root, since slurmd starts jobs as their owner.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

NODES = 4
GPUS = 8
"""Null devices: they are counted and handed out as real ones are."""
PROGRAMS = ("munged", "mungekey", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue")
SEARCH = f"{os.environ['PATH']}:/usr/sbin"
PATIENCE_SECONDS = 60.0
CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=10
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=0
SlurmdParameters=config_overrides
ReturnToService=2
JobRequeue=1
KillWait=30
MinJobAge=3600
InactiveLimit=0
Waittime=0
GresTypes=gpu
"""


def missing() -> str:
    """Why no cluster can be started here; "" when one can."""
    absent = [name for name in PROGRAMS if shutil.which(name, path=SEARCH) is None]
    if absent:
        return f"SLURM is not installed: {', '.join(absent)} (packages slurm-wlm and munge)"
    return "" if os.geteuid() == 0 else "slurmd must run as root to start jobs as their owner"


@dataclass
class Slurm:
    """A running cluster, and how to ask it."""

    folder: Path
    daemons: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def environment(self) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "SBATCH_"))}
        return kept | {"SLURM_CONF": str(self.folder / "slurm.conf"), "PATH": SEARCH}

    def ask(self, *command: str, extra: Mapping[str, str] | None = None) -> str:
        """Standard output of a client command, which must succeed."""
        done = subprocess.run(
            command,
            env=self.environment | dict(extra or {}),
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
            check=False,
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def job(self, number: str) -> dict[str, str]:
        """What scontrol says of a job, by name: JobState, Restarts, ExitCode, ..."""
        words = self.ask("scontrol", "show", "job", number, "--oneliner").split()
        pairs = [word.partition("=") for word in words]
        return {name: value for name, _, value in pairs}

    def start(self) -> None:
        for name in ("state", "log", "dev", *(f"spool.node{n}" for n in range(NODES))):
            (self.folder / name).mkdir()
        self._configure()
        key = self.folder / "munge.key"
        subprocess.run(
            ["mungekey", "--create", f"--keyfile={key}"], env=self.environment, check=True
        )
        key.chmod(0o600)
        self._daemon(
            "munged",
            *("--foreground", "--force", f"--socket={self.folder}/munge.sock"),
            *(f"--key-file={key}", f"--pid-file={self.folder}/munge.pid"),
            *(f"--log-file={self.folder}/log/munged.log", f"--seed-file={self.folder}/seed"),
        )
        self._until("munged answers", (self.folder / "munge.sock").exists)
        configuration = str(self.folder / "slurm.conf")
        self._daemon("slurmctld", "-D", "-c", "-f", configuration)
        for node in range(NODES):
            self._daemon("slurmd", "-D", "-c", "-N", f"node{node}", "-f", configuration)
        self._until("every node is up", lambda: self._idle() == NODES)

    def stop(self) -> None:
        """End the jobs, then only what was started here, and the steps that it left."""
        if self.daemons:
            subprocess.run(["scancel", "--user=root"], env=self.environment, check=False)
            self._until("the jobs have ended", lambda: not self._running(), fails=False)
        for daemon in reversed(self.daemons):
            daemon.send_signal(signal.SIGTERM)
        for daemon in self.daemons:
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
        for process in self._left():
            process.kill()

    def _configure(self) -> None:
        port, *ports = free_ports(NODES + 1)
        host = socket.gethostname()
        lines = CONFIGURATION.format(host=host, port=port, folder=self.folder)
        for node, own in enumerate(ports):
            lines += (
                f"NodeName=node{node} NodeHostname={host} NodeAddr=127.0.0.{node + 1} Port={own} "
                f"CPUs={GPUS} RealMemory=4096 Gres=gpu:{GPUS} State=UNKNOWN\n"
            )
        lines += "PartitionName=batch Nodes=ALL Default=YES MaxTime=INFINITE State=UP\n"
        (self.folder / "slurm.conf").write_text(lines)
        for gpu in range(GPUS):
            os.mknod(self.folder / "dev" / f"nvidia{gpu}", 0o020666, os.makedev(1, 3))
        devices = f"{self.folder}/dev/nvidia[0-{GPUS - 1}]"
        gres = f"NodeName=node[0-{NODES - 1}] Name=gpu File={devices}\n"
        (self.folder / "gres.conf").write_text(gres)

    def _daemon(self, *command: str) -> None:
        with (self.folder / "log" / f"{len(self.daemons)}_{command[0]}.out").open("wb") as log:
            self.daemons.append(
                subprocess.Popen(
                    command,
                    env=self.environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )

    def _idle(self) -> int:
        done = subprocess.run(
            ["sinfo", "-h", "-N", "-o", "%t"],
            env=self.environment,
            capture_output=True,
            check=False,
        )
        return done.stdout.split().count(b"idle")

    def _running(self) -> str:
        done = subprocess.run(
            ["squeue", "-h", "-t", "R,CG,S", "-o", "%A"],
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
        )
        return done.stdout.strip()

    def _until(self, what: str, done: object, *, fails: bool = True) -> None:
        assert callable(done)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not done():
            ended = [daemon.args for daemon in self.daemons if daemon.poll() is not None]
            if ended or time.monotonic() > deadline:
                assert not fails, f"waited in vain until {what}; ended: {ended}\n{self.logs()}"
                return
            time.sleep(0.1)

    def logs(self) -> str:
        """The last lines of every daemon."""
        files = sorted((self.folder / "log").iterdir())
        return "\n".join(
            f"== {f.name}\n" + "\n".join(f.read_text().splitlines()[-5:]) for f in files
        )

    def _left(self) -> list[psutil.Process]:
        """slurmstepd and what it started: daemons of their own, known by our configuration."""
        found = []
        for process in psutil.process_iter():
            try:
                ours = process.environ().get("SLURM_CONF") == self.environment["SLURM_CONF"]
            except psutil.Error:
                continue
            if ours and process.pid != os.getpid():
                found.append(process)
        return found


@contextmanager
def running_slurm(folder: Path) -> Iterator[Slurm]:
    """A cluster in `folder`, for as long as the context."""
    slurm = Slurm(folder)
    try:
        slurm.start()
        yield slurm
    finally:
        slurm.stop()


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens at now."""
    held = [socket.socket() for _ in range(count)]
    for each in held:
        each.bind(("", 0))
    ports = [each.getsockname()[1] for each in held]
    for each in held:
        each.close()
    return ports
