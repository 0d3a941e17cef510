"""W&B in a process of its own, so that nothing of it can stop, slow or signal a trainer.

Started by `WandbSink`. The first line of standard input says what the run is, as JSON; then a byte
comes whenever metrics.jsonl or samples.jsonl has grown; the end of input is the end of the run.
`wandb/sent.json` says how far W&B has the files on its own disk. There the next process goes on,
of this start of the run or of a later one: every number of every step is sent once, steps rising.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from megatron_dapo.config.whole_files import whole_file
from megatron_dapo.observability.logs import quiet_logs
from megatron_dapo.observability.run_files import (
    METRICS_FILE,
    SAMPLES_FILE,
    read_new_lines,
)

if TYPE_CHECKING:
    import wandb

logger = logging.getLogger("megatron_dapo.observability.wandb_process")  # not of __main__

WANDB_FOLDER = "wandb"
SENT_FILE = "sent.json"
START_SECONDS = 80.0
"""For both ways to start, each."""
SEND_SECONDS = 60.0
TABLE_SECONDS = 5.0
CLOSE_SECONDS = 10.0
"""For W&B's own process to end, after the time for uploads."""
SETTLED_SECONDS = 0.5
"""After which a record lies in the run's .wandb file."""
PR_SET_PDEATHSIG = 1


@dataclass
class Sent:
    """What W&B has of a run."""

    metrics: int = 0
    """Bytes of metrics.jsonl that were read."""
    samples: int = 0
    """Bytes of samples.jsonl."""
    step: int = -1
    """Highest step whose metrics were sent."""
    names: list[str] = field(default_factory=list)
    """Of its metrics, those that were."""
    samples_step: int = -1
    no_samples: bool = False
    """The service let W&B wait with them; the next process tries again."""
    folder: str = ""
    """Where W&B writes, in run_dir/wandb."""

    @classmethod
    def read(cls, run_dir: Path) -> Sent:
        """As noted last; a note that cannot be read means that nothing was sent."""
        try:
            return cls(**json.loads((run_dir / WANDB_FOLDER / SENT_FILE).read_text()))
        except FileNotFoundError:
            return cls()
        except (ValueError, TypeError) as error:
            logger.warning("%s is damaged, all steps are sent anew: %s", SENT_FILE, error)
            return cls()

    def write(self, run_dir: Path) -> None:
        """Note it, in one rename."""
        with whole_file(run_dir / WANDB_FOLDER / SENT_FILE) as draft:
            draft.write_text(json.dumps(asdict(self)) + "\n")

    def take(self, record: Mapping[str, object]) -> dict[str, object]:
        """The metrics of `record` that W&B lacks; counted as sent from here on.

        A resumed run repeats steps, to the last bit where its schedule is repeatable. W&B cannot
        replace what it has, so the first record of a number stays.
        """
        step = record["step"]
        assert isinstance(step, int), f"step {step!r} is no whole number"
        if step < self.step:
            return {}
        if step > self.step:
            self.step, self.names = step, []
        new = {name: value for name, value in record.items() if name not in ("step", *self.names)}
        self.names += new
        return {name: float("nan") if value is None else value for name, value in new.items()}


def main() -> None:
    """Follow the files of run_dir, the only argument, until the end of input."""
    run_dir = Path(sys.argv[1])
    _die_with_parent()
    signal.signal(signal.SIGALRM, _out_of_time)
    _speak_for_ourselves()
    first = _first_line()
    ended = False
    try:
        run = _start(run_dir, first["run"], first["answer_seconds"], first["upload_seconds"])
        sent = Sent.read(run_dir)
        sent.no_samples = False
        sent.folder = Path(run.settings.sync_dir).name
        while True:
            with _limited(SEND_SECONDS, "taking a step"):
                _send(run, run_dir, sent)
            sent.write(run_dir)
            if ended:
                break
            ended = not os.read(0, 1 << 16)
        _finish(run, run_dir)
    finally:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(int(CLOSE_SECONDS))  # for what W&B does as this process ends
        for pid in descendants(os.getpid()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _start(
    run_dir: Path, asked: Mapping[str, object], answer_seconds: float, upload_seconds: float
) -> wandb.Run:
    """The run, new or continued; recorded on disk where the service does not answer or refuses."""
    import wandb

    options: dict[str, Any] = {**asked, "dir": run_dir, "resume": "allow"}
    settings = wandb.Settings(
        silent=True,
        console="off",
        login_timeout=answer_seconds,
        init_timeout=answer_seconds,
        finish_timeout=upload_seconds,
        finish_timeout_raises=True,
        disable_git=True,  # a remote's URL may hold a token
        disable_code=True,
        disable_job_creation=True,
        x_stats_pid=os.getppid(),
        x_transaction_log_flush_interval=SETTLED_SECONDS / 4,
    )
    try:
        with _limited(START_SECONDS, "starting"):
            run = wandb.init(**options, settings=settings)
    except (wandb.Error, TimeoutError) as error:
        reason = str(error).strip().splitlines()[0]
        logger.warning("W&B: %s. Training goes on; the run is recorded on disk.", reason)
        with _limited(START_SECONDS, "starting offline"):
            wandb.teardown()
            run = wandb.init(**{**options, "mode": "offline"}, settings=settings)
    run.define_metric("step")
    run.define_metric("*", step_metric="step")
    if not run.offline:
        logger.info("W&B: %s", run.url)
    return run


def _send(run: wandb.Run, run_dir: Path, sent: Sent) -> None:
    """What the files have gained; on return its metrics lie on W&B's disk.

    Raises:
        OSError, wandb.Error and others of W&B: its own process has ended.
    """
    records, sent.metrics = read_new_lines(run_dir / METRICS_FILE, sent.metrics)
    rows, sent.samples = read_new_lines(run_dir / SAMPLES_FILE, sent.samples)
    samples = {step: [*found] for step, found in groupby(rows, key=itemgetter("step"))}
    for record in records:
        step = record["step"]
        if new := sent.take(record):
            run.log({"step": step, **new})
        _send_samples(run, samples.pop(step, []), sent)
    for found in samples.values():  # their metrics went before
        _send_samples(run, found, sent)
    time.sleep(SETTLED_SECONDS)
    run.status()


def _send_samples(run: wandb.Run, rows: list[dict[str, object]], sent: Sent) -> None:
    """The samples of one step as a table, unless W&B has it. Tried once.

    W&B asks its service about every table before it takes the next record.
    """
    import wandb

    step = rows[0]["step"] if rows else -1
    assert isinstance(step, int), f"step {step!r} is no whole number"
    if step <= sent.samples_step or sent.no_samples:
        return
    sent.samples_step = step
    cells = [[str(row.get(name)) for name in rows[0]] for row in rows]
    started = time.monotonic()
    try:
        with _limited(TABLE_SECONDS, "taking samples"):
            run.log({"step": step, "samples": wandb.Table(columns=list(rows[0]), data=cells)})
    except (wandb.Error, TimeoutError) as error:
        logger.warning("W&B: %s", error)
        sent.no_samples = True
    sent.no_samples |= time.monotonic() - started >= TABLE_SECONDS  # W&B may have caught ours
    if sent.no_samples:
        logger.warning("W&B is slow: samples after step %d are in samples.jsonl only.", step)


def _finish(run: wandb.Run, run_dir: Path) -> None:
    import wandb

    try:
        with _limited(run.settings.finish_timeout + CLOSE_SECONDS, "ending"):
            run.finish()
            wandb.teardown()
    except TimeoutError:
        if not run.offline:
            folder = Path(run.settings.sync_dir)
            logger.warning("W&B did not take everything in time. %s", how_to_send(folder))
    if run.offline:
        folders = run_dir / WANDB_FOLDER / f"offline-run-*-{run.id}"
        logger.info("W&B ran offline; send it with: wandb sync %s", folders)


def how_to_send(folder: Path) -> str:
    """What to type for a run that W&B has on disk and not, or not in full, at its service."""
    return f"Send the rest with: wandb sync --include-online {folder}"


def descendants(pid: int) -> list[int]:
    """Processes that `pid` has started, and theirs; not those whose parent has ended."""
    found: list[int] = []
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, children.read_text().split()):
                found += [child, *descendants(child)]
    return found


@contextlib.contextmanager
def _limited(seconds: float, what: str) -> Iterator[None]:
    """Raise TimeoutError in the block once it has taken `seconds`; what limits it waits so long."""
    outer, _ = signal.setitimer(signal.ITIMER_REAL, seconds, seconds)  # W&B may catch the first
    try:
        yield
    except TimeoutError as error:
        raise TimeoutError(f"{what} took longer than {seconds:g} s") from error
    finally:
        signal.setitimer(signal.ITIMER_REAL, outer, outer)


def _out_of_time(_number: int, _frame: FrameType | None) -> None:
    raise TimeoutError("out of time")


def _die_with_parent() -> None:
    parent = os.getppid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit(1)


def _speak_for_ourselves() -> None:
    """Our messages go where the trainer's go; what W&B writes goes to the log, standard output."""
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1)
    quiet_logs()
    os.dup2(1, 2)
    sys.stderr = sys.__stderr__


def _first_line() -> dict[str, Any]:
    """What the run is, and how long its service may take to answer and to take what is left.

    Bytes behind it only say that there is something to send.
    """
    text = b""
    while b"\n" not in text:
        more = os.read(0, 1 << 16)
        if not more:
            break
        text += more
    first: dict[str, Any] = json.loads(text.partition(b"\n")[0])
    return first


if __name__ == "__main__":
    main()
