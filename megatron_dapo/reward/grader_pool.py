"""Killable worker processes for graders that run code of others: reward plug-ins, math-verify.

A call that takes too long, too much memory or the whole worker down costs one sample, never the
run: the worker is replaced, and the caller learns why there is no value. JSON lines over a socket
pair go in and out, nothing is unpickled.
"""

from __future__ import annotations

import logging
import queue
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Self

from megatron_dapo.config.schema import RewardConfig
from megatron_dapo.reward.grader_process import GraderProcess, GraderReply, GraderStartError

logger = logging.getLogger(__name__)

SPARE = 1
"""Workers above `reward.workers`, so that a call does not wait for one that is being replaced."""
START_TRIES = 3
RETRY_SECONDS = 0.5
MOST_TOLD = 3


def needs_pool(config: RewardConfig) -> bool:
    """True where grading runs more than our own bounded text work."""
    return config.plugin is not None or config.math_verify


def check_graders(config: RewardConfig) -> None:
    """Start one worker and end it, to learn whether everything can be imported.

    Raises:
        ValueError: the plug-in, or math-verify, cannot be used.
        GraderStartError: the import ended the worker, or took too long.
    """
    if needs_pool(config):
        with tempfile.TemporaryDirectory(prefix="megatron_dapo_") as directory:
            process = GraderProcess(config, Path(directory), None)
            try:
                process.wait_ready()
            finally:
                process.end()


class GraderPool:
    """`reward.workers` workers and a spare one; any number of threads may call.

    A call waits for a free worker, so callers are the queue: no more work is held here than there
    are threads that call. Workers are started by one thread of the pool, which lives as long as
    the pool: the kernel ends a worker with the thread that made it.

    Args:
        config: what runs in the workers, and the limits of a call.
        directory: where they run; made when missing.
        log_file: gets what they print.
    """

    def __init__(self, config: RewardConfig, directory: Path, log_file: Path | None = None) -> None:
        self._config = config
        self._directory = directory
        self._log_file = log_file
        self._free: queue.SimpleQueue[GraderProcess | GraderStartError] = queue.SimpleQueue()
        self._all: set[GraderProcess] = set()
        self._lock = threading.Lock()
        self._closed = False
        self._starter = ThreadPoolExecutor(1, thread_name_prefix="grader starter")
        self._counts: Counter[str] = Counter()
        self.first_failures: list[str] = []
        """What the first calls that came to nothing have said, one line each."""
        self._warned_of_network = False

    @classmethod
    def of_run(cls, config: RewardConfig, run_dir: Path) -> Self | None:
        """Workers for graders that need them, not started; what they leave is in run_dir/logs."""
        logs = run_dir / "logs"
        return cls(config, logs / "graders", logs / "graders.log") if needs_pool(config) else None

    def start(self) -> None:
        """Start the workers; returns at once."""
        for _ in range(self._config.workers + SPARE):
            self._starter.submit(self._start_one)

    def call(self, job: Mapping[str, object]) -> GraderReply:
        """Run one job in a worker: exactly one reply, whatever happens to the worker.

        Raises:
            GraderStartError: the pool is closed, or no worker can be started any more.
        """
        process = self._take()
        reply = process.ask(job)
        if reply.failure in (None, "raised"):
            self._free.put(process)
        else:
            self._replace(process)
        if reply.failure is not None:
            self._note(reply)
        return reply

    def take_counts(self) -> dict[str, float]:
        """Metrics of the calls since the last time."""
        with self._lock:
            counts, self._counts = self._counts, Counter()
        limits = counts["time_limit"] + counts["memory_limit"]
        return {
            "reward/limit_overruns": float(limits),
            "reward/worker_restarts": float(counts["restarts"]),
        }

    def worker_pids(self) -> list[int]:
        """Process ids of the workers that are there now."""
        with self._lock:
            return [process.pid for process in self._all]

    def close(self) -> None:
        """End all workers, busy ones too; who still calls gets an error. May be called twice."""
        with self._lock:
            self._closed = True
            processes = list(self._all)
            self._all.clear()
        for process in processes:
            process.end()
        self._starter.shutdown(cancel_futures=True)
        self._free.put(GraderStartError("the grader pool is closed"))

    def _take(self) -> GraderProcess:
        while True:
            found = self._free.get()
            if isinstance(found, GraderStartError):
                self._free.put(found)  # for every other caller, too
                raise found
            if found.alive and not self._closed:
                return found
            self._replace(found)

    def _replace(self, process: GraderProcess) -> None:
        process.end()
        with self._lock:
            self._all.discard(process)
            self._counts["restarts"] += 1
            if not self._closed:
                self._starter.submit(self._start_one)

    def _start_one(self) -> None:
        """In the starter thread: one more free worker, or the reason why there is none."""
        problem = ""
        for attempt in range(START_TRIES):
            time.sleep(RETRY_SECONDS * attempt)
            started = time.monotonic()
            process = None
            try:
                self._directory.mkdir(parents=True, exist_ok=True)  # it may have been cleared away
                process = GraderProcess(self._config, self._directory, self._log_file)
                with self._lock:
                    if self._closed:
                        raise GraderStartError("the grader pool is closed")
                    self._all.add(process)
                isolated = process.wait_ready()
            except (OSError, ValueError, RuntimeError) as error:
                if process is not None:
                    process.end()
                with self._lock:
                    self._all.difference_update([process] if process else [])
                    if self._closed:
                        return
                problem = str(error)
                continue
            logger.debug("a grader is ready after %.2f s", time.monotonic() - started)
            self._warn_of_network(isolated)
            self._free.put(process)
            return
        self._free.put(GraderStartError(f"{START_TRIES} times no grader could start: {problem}"))

    def _warn_of_network(self, isolated: bool) -> None:
        if not isolated and not self._warned_of_network:
            self._warned_of_network = True
            logger.warning(
                "the kernel lets graders have no network namespace of their own "
                "(user.max_user_namespaces, or a container's rules): they can reach the network"
            )

    def _note(self, reply: GraderReply) -> None:
        """Count a failure; the first one is told whole, the others in a debug line."""
        with self._lock:
            self._counts[str(reply.failure)] += 1
            first = not self.first_failures
            if len(self.first_failures) < MOST_TOLD:
                self.first_failures.append(_printable(f"{reply.failure}: {reply.error}"))
        text = _printable(f"{reply.error}\n{reply.traceback}".strip())
        if first:
            logger.error(
                "a grader failed (%s); its sample is masked and counted in reward/errors, and "
                "further ones are not told here: %s",
                reply.failure,
                text,
            )
        else:
            logger.debug("a grader failed (%s): %s", reply.failure, text)


def _printable(text: str) -> str:
    """`text` as any log takes it: half surrogate pairs as escapes."""
    return text.encode(errors="backslashreplace").decode()
