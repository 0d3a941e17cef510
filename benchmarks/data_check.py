"""How fast `megatron-dapo data check` reads a file in which every line is malformed.

    python benchmarks/data_check.py [--lines 10000] [--repeats 5]

One process, one thread, CPU seconds, best of `--repeats`. Lines are of every kind that the reader
tells apart, in random order; the counts by reason must be exact. Exit status 1: a count is wrong,
or fewer than 50,000 lines a second are read. For comparison the same is done with good lines, which
are also compared with each other (no bar).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

from megatron_dapo.config.schema import DataConfig
from megatron_dapo.data.selection import Selection, select_rows

BAR_LINES_PER_SECOND = 50_000
PROMPT = "Let $p$ and $q$ be primes with $p+q={0}$. How many pairs $(p, q)$ are there? " * 3


def malformed_line(kind: int, number: int) -> tuple[bytes, str]:
    """One line of a kind, and the reason that it must be counted under."""
    prompt, answer = PROMPT.format(number), str(number)
    good = json.dumps({"prompt": prompt, "answer": answer}).encode()
    kinds: list[tuple[bytes, str]] = [
        (good[:-1], "json"),
        (good[: len(good) // 2], "json"),
        (good.replace(b'", "', b'" "'), "json"),
        (good.replace(b"Let", b"L\x01t"), "json"),
        (b"prompt: " + good, "json"),
        (b"[" + good + b"]", "json"),
        (b"[" * 2_000, "json"),
        (b"null", "json"),
        (good.replace(b"Let", b"L\xfft"), "encoding"),
        (good[:7] + b"\xc3\x28" + good[7:], "encoding"),
        (json.dumps({"question": prompt, "answer": answer}).encode(), "prompt"),
        (json.dumps({"prompt": "  ", "answer": answer}).encode(), "prompt"),
        (json.dumps({"prompt": [{"role": "user"}], "answer": answer}).encode(), "prompt"),
        (json.dumps({"prompt": "\ud800", "answer": answer}).encode(), "prompt"),
        (json.dumps({"prompt": prompt}).encode(), "answer"),
        (json.dumps({"prompt": prompt, "answer": None}).encode(), "answer"),
        (json.dumps({"prompt": prompt, "answer": [answer]}).encode(), "answer"),
        (json.dumps({"prompt": prompt, "answer": " "}).encode(), "answer"),
    ]
    return kinds[kind % len(kinds)]


def write_files(folder: Path, count: int) -> tuple[Path, Path, Counter[str]]:
    """A malformed and a good file, and the counts by reason of the former."""
    order = random.Random(0)
    lines = [malformed_line(order.randrange(1_000_000), number) for number in range(count)]
    malformed, good = folder / "malformed.jsonl", folder / "good.jsonl"
    malformed.write_bytes(b"".join(line + b"\n" for line, _ in lines))
    good.write_text(
        "".join(
            json.dumps({"prompt": PROMPT.format(number), "answer": number}) + "\n"
            for number in range(count)
        )
    )
    return malformed, good, Counter(reason for _, reason in lines)


def best_of(repeats: int, file: Path) -> tuple[Selection, float]:
    """The last selection, and the least CPU seconds."""
    config = DataConfig(train=file, answer_column="answer", bad_rows="skip")
    least = float("inf")
    for _ in range(repeats):
        start = time.process_time()
        selection = select_rows(file, config)
        least = min(least, time.process_time() - start)
    return selection, least


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lines", type=int, default=10_000)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        malformed, good, expected = write_files(Path(folder), options.lines)
        selection, seconds = best_of(options.repeats, malformed)
        rate = options.lines / seconds
        exact = selection.report.bad_counts == dict(expected) and not selection.rows
        print(f"malformed: {rate:,.0f} lines/s; {selection.report.bad_counts}, exact: {exact}")
        selection, seconds = best_of(options.repeats, good)
        print(f"good: {options.lines / seconds:,.0f} lines/s; {selection.report.kept:,} kept")
    return 0 if exact and rate >= BAR_LINES_PER_SECOND else 1


if __name__ == "__main__":
    sys.exit(main())
