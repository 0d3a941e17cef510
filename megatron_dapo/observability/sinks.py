"""Where metrics and samples go: JSON lines always, console, TensorBoard and W&B on request.

Global rank 0 is the only writer. A sink that fails (full disk, missing package, no network)
is named once in the log and counted; training goes on.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from megatron_dapo.config import RunConfig
from megatron_dapo.observability.console import ConsoleSink
from megatron_dapo.observability.evaluation_files import Sets, evaluation_file, write_samples
from megatron_dapo.observability.evaluation_files import write_report as write_evaluation_report
from megatron_dapo.observability.report import write_report
from megatron_dapo.observability.run_files import (
    METRICS_FILE,
    SAMPLES_FILE,
    append_line,
    read_metrics,
)
from megatron_dapo.observability.samples import sample_row, spread
from megatron_dapo.observability.wandb_sink import WandbSink
from megatron_dapo.types import Group

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

logger = logging.getLogger(__name__)

MOST_WAITING = 10_000
"""Records kept while metrics.jsonl cannot be written; then the oldest go."""
FAILURES = (OSError, ImportError)
"""What a sink may raise when the world around it is not as it should be."""


class Sink(Protocol):
    """One destination. Every method may raise one of `FAILURES`."""

    name: str

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of one rollout step."""

    def log_samples(self, step: int, rows: list[dict[str, object]]) -> None:
        """Record sampled responses, one flat row each."""

    def close(self, *, complete: bool) -> None:
        """Flush and let go. `complete`: all steps are done, the run does not go on later."""


class Sinks:
    """All destinations of a run behind one `log`. Build it on global rank 0 only."""

    def __init__(
        self, sinks: Sequence[Sink], *, run_dir: Path, samples_per_step: int, last_step: int = -1
    ) -> None:
        self._sinks = list(sinks)
        self._run_dir = run_dir
        self._samples_per_step = samples_per_step
        self._last_step = last_step
        self.failures: Counter[str] = Counter()
        """Writes that failed, by the sink's name."""

    @classmethod
    def open(cls, config: RunConfig) -> Sinks:
        """The sinks that `config.logging` asks for; a run that exists already is continued."""
        sinks = cls([], run_dir=config.run_dir, samples_per_step=config.logging.samples_per_step)
        sinks._guard("run_dir", lambda: config.run_dir.mkdir(parents=True, exist_ok=True))
        sinks._guard(METRICS_FILE, sinks._find_last_step)
        sinks._sinks.append(JsonLinesSink(config.run_dir))
        if config.logging.console:
            sinks._sinks.append(ConsoleSink(config.training.steps))
        if config.logging.tensorboard:
            folder = config.run_dir / "tensorboard"
            sinks._guard("tensorboard", lambda: sinks._sinks.append(TensorBoardSink(folder)))
        if config.logging.wandb and os.environ.get("WANDB_MODE") != "disabled":
            sinks._guard("wandb", lambda: sinks._sinks.append(WandbSink.open(config)))
        return sinks

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send the metrics of one step everywhere. A second call for a step adds to the first."""
        if step < self._last_step:
            logger.warning(
                "step %d is logged again after step %d: the run resumed from an older checkpoint. "
                "Readers take the later record.",
                step,
                self._last_step,
            )
        self._last_step = step
        numbers = {name: float(value) for name, value in metrics.items()}
        for sink in self._sinks:
            self._guard(sink.name, partial(sink.log, step, numbers))

    def log_samples(self, step: int, groups: Sequence[Group]) -> None:
        """Send `logging.samples_per_step` responses, spread evenly over `groups`, everywhere."""
        rows = [
            sample_row(step, group, group.responses[member], group.rewards[member])
            for group, member in spread(groups, self._samples_per_step)
        ]
        if rows:
            for sink in self._sinks:
                self._guard(sink.name, partial(sink.log_samples, step, rows))

    def log_evaluation(
        self, step: int, sets: Sets, report: Mapping[str, object], *, samples: bool = True
    ) -> None:
        """Write what was counted into the run directory, and every response unless told not to."""
        path = partial(evaluation_file, self._run_dir, step)
        self._guard("evaluation", lambda: write_evaluation_report(path(".json"), report))
        if samples:
            self._guard("evaluation", lambda: write_samples(path(".jsonl"), step, sets))

    def close(self, *, complete: bool = False) -> None:
        """Flush everything; closing again does nothing."""
        while self._sinks:
            sink = self._sinks.pop()
            self._guard(sink.name, partial(sink.close, complete=complete))
        if self.failures:
            lost = ", ".join(f"{name} {count}" for name, count in self.failures.items())
            logger.warning("writes that failed: %s", lost)
            self.failures.clear()

    def finish(self) -> None:
        """`close`, then draw the report: the end of a run that went well."""
        self.close(complete=True)
        self._guard("report", lambda: write_report(self._run_dir))

    def _find_last_step(self) -> None:
        path = self._run_dir / METRICS_FILE
        if path.exists():
            self._last_step = max(read_metrics(path), default=-1)

    def _guard(self, name: str, action: Callable[[], object]) -> None:
        """Run `action`; a failure is counted, and described the first time."""
        try:
            action()
        except FAILURES as error:
            self.failures[name] += 1
            if self.failures[name] == 1:
                logger.warning("%s: %s. Training goes on all the same.", name, error)


class JsonLinesSink:
    """metrics.jsonl and samples.jsonl in the run directory: the truth of a run.

    Records that find no room wait for the next ones, and are written before them.
    """

    name = "jsonl"

    def __init__(self, run_dir: Path) -> None:
        self._metrics = run_dir / METRICS_FILE
        self._samples = run_dir / SAMPLES_FILE
        self._waiting: deque[tuple[Path, Mapping[str, object]]] = deque(maxlen=MOST_WAITING)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._waiting.append((self._metrics, {"step": step, **metrics}))
        self._write()

    def log_samples(self, step: int, rows: list[dict[str, object]]) -> None:
        self._waiting.extend((self._samples, row) for row in rows)
        self._write()

    def close(self, *, complete: bool) -> None:
        self._write()

    def _write(self) -> None:
        while self._waiting:
            append_line(*self._waiting[0])
            self._waiting.popleft()


class TensorBoardSink:
    """Event files. After a resume the abandoned steps are purged.

    A writer never recovers from a full disk, and what it wrote half ends what can be read of its
    file: steps that it could not write go into the file of another one, with the next step.
    """

    name = "tensorboard"

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._folder = folder
        self._writer_type = SummaryWriter
        self._writer: SummaryWriter | None = None
        self._waiting: deque[tuple[int, Mapping[str, float]]] = deque(maxlen=MOST_WAITING)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._waiting.append((step, metrics))
        self._write()

    def log_samples(self, step: int, rows: list[dict[str, object]]) -> None:
        """Samples are in samples.jsonl."""

    def close(self, *, complete: bool) -> None:
        if self._waiting:
            self._write()
        if self._writer is not None:
            self._writer.close()

    def _write(self) -> None:
        try:
            if self._writer is None:
                first = self._waiting[0][0]
                self._writer = self._writer_type(str(self._folder), purge_step=first)
            for step, metrics in self._waiting:
                for name, value in metrics.items():
                    self._writer.add_scalar(name, value, step)
            self._writer.flush()
        except OSError:
            broken, self._writer = self._writer, None
            if broken is not None:
                with contextlib.suppress(OSError):
                    broken.close()
            raise
        self._waiting.clear()
