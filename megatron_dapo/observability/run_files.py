"""Files that tell a run's story: JSON lines that only grow, and `run.json`."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from megatron_dapo.config.whole_files import replace_durably

logger = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"
SAMPLES_FILE = "samples.jsonl"
RUN_FILE = "run.json"
LAST_STEP, LARGEST_NUMBER = 10**12, 1e100
"""What lies beyond, a damaged file says."""


def append_line(path: Path, record: Mapping[str, object]) -> None:
    """Append `record` as one line of JSON, in one write; numbers that are not finite become null.

    What a crash or a full disk left half written stays a line of its own.

    Raises:
        OSError: the file cannot be written, or not in full.
    """
    clean = {name: _finite(value) for name, value in record.items()}
    text = json.dumps(clean, ensure_ascii=False, allow_nan=False)
    line = text.encode("utf-8", errors="replace") + b"\n"
    with path.open("a+b", buffering=0) as file:
        if file.seek(0, os.SEEK_END) > 0:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                line = b"\n" + line
        written = file.write(line)
    if written != len(line):
        raise OSError(f"only {written} of {len(line)} bytes reached {path}")


def read_lines(path: Path) -> list[dict[str, object]]:
    """Records of a file of JSON lines, in order; what is no record of a step is left out with a
    warning: a half-written line, or what someone else wrote."""
    with path.open("rb") as file:
        return list(_records(path, file))


def read_new_lines(path: Path, start: int) -> tuple[list[dict[str, object]], int]:
    """Records of whole lines from byte `start` on, and the byte behind them.

    A file that is not there is empty; one that is shorter than `start` is read from its beginning.
    """
    if not path.exists():
        return [], 0
    with path.open("rb") as file:
        start = start if start <= file.seek(0, os.SEEK_END) else 0
        file.seek(start)
        text = file.read()
    whole = text[: text.rfind(b"\n") + 1]
    return list(_records(path, whole.split(b"\n"))), start + len(whole)


def _records(path: Path, lines: Iterable[bytes]) -> Iterator[dict[str, object]]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            logger.warning("%s: line %d is half written and left out", path, number)
            continue
        if isinstance(record, dict) and _is_step(record.get("step")):
            yield record
        else:
            logger.warning("%s: line %d has no step and is left out", path, number)


def read_metrics(path: Path) -> dict[int, dict[str, float]]:
    """Metrics by step, steps rising; null reads as NaN, and so does what is no number of a run.

    A run that resumed from a checkpoint repeats the steps after it. The later line counts: it
    replaces the names it holds, and the steps after it that came before it in the file are gone.
    """
    steps: dict[int, dict[str, float]] = {}
    for record in read_lines(path):
        step = record.pop("step")
        assert isinstance(step, int), f"{path}: step {step!r} is no whole number"
        if steps and step < next(reversed(steps)):
            steps = {known: values for known, values in steps.items() if known <= step}
        numbers = {name: _number(value) for name, value in record.items()}
        steps[step] = steps.get(step, {}) | numbers
    return steps


def read_samples(path: Path) -> list[dict[str, object]]:
    """Sampled responses in order of their steps; as for metrics, a repeated step replaces."""
    kept: list[dict[str, object]] = []
    previous: object = None
    for record in read_lines(path):
        step = record["step"]
        if step != previous:
            kept = [known for known in kept if _before(known["step"], step)]
        kept.append(record)
        previous = step
    return kept


def read_run_record(run_dir: Path) -> dict[str, str]:
    """What run.json remembers of earlier starts of this run, such as its W&B id.

    One that cannot be read counts as empty: checkpoints hold what a run needs of it.
    """
    path = run_dir / RUN_FILE
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        logger.warning("%s is damaged and left out: %s", path, error)
        return {}
    if not isinstance(record, dict):
        logger.warning("%s is damaged and left out: it holds %.40r", path, record)
        return {}
    return {str(key): str(value) for key, value in record.items()}


def write_run_record(run_dir: Path, record: Mapping[str, str]) -> None:
    """Replace run.json: a crash leaves the old or the new one, also the machine's."""
    replace_durably(run_dir / RUN_FILE, json.dumps(dict(record), indent=1) + "\n")


def _finite(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _is_step(value: object) -> bool:
    return type(value) is int and 0 <= value <= LAST_STEP


def _number(value: object) -> float:
    if not isinstance(value, int | float) or abs(value) > LARGEST_NUMBER:
        return math.nan
    return float(value)


def _before(step: object, other: object) -> bool:
    assert isinstance(step, int) and isinstance(other, int), f"steps {step!r}, {other!r}"
    return step < other
