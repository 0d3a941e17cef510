"""Answer checks a second on one core, and what the killable workers cost beside them.

    python benchmarks/grading.py [--repeats 5]

The text is a response of about 10,000 characters, of which the checks read the end. The floor is
one search for "Answer:" in that, compared as an integer: no check can do less. The peer is the
package math-verify (extra `math`) on short answers, inside its worker. CPU seconds (the workers:
wall-clock), best of `--repeats`. Fails where a style makes fewer than 20,000 checks a second.
"""

from __future__ import annotations

import argparse
import re
import tempfile
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from megatron_dapo.config.schema import RewardConfig
from megatron_dapo.reward.grader_pool import GraderPool
from megatron_dapo.reward.grader_process import GraderProcess
from megatron_dapo.reward.math_answer import WINDOW, verify_answer

LEAST_CHECKS = 20_000
BODY = "We add the two cases, so $x = 3 + 4$ and {the sum} is 7.\n" * 170
ANSWERS = {
    "34": "Answer: 34",
    "35": "Answer: $36$",
    "1234": "**Answer:** 1,234",
    "12": "Answer: \\boxed{12}",
    "13": "I do not know.",
}
RESPONSES = [(BODY + answer, truth) for truth, answer in ANSWERS.items()]
LABEL = re.compile(r"Answer:\s*(-?[0-9]+)")
STYLES = ("answer_line", "boxed", "either", "dapo_reference")


def floor(response: str, truth: str) -> bool:
    found = LABEL.findall(response[-WINDOW:])
    return bool(found) and int(found[-1]) == int(truth)


def checks_per_second(check: Callable[[str, str], object], repeats: int) -> float:
    best, rounds = float("inf"), 400
    for _ in range(repeats):
        started = time.process_time()
        for _ in range(rounds):
            for response, truth in RESPONSES:
                check(response, truth)
        best = min(best, time.process_time() - started)
    return rounds * len(RESPONSES) / best


def pool_calls_per_second(folder: Path) -> tuple[float, float]:
    """(seconds until a worker is ready, math-verify calls a second of one worker and one caller)"""
    config = RewardConfig(math_verify=True, workers=1)
    started = time.perf_counter()
    process = GraderProcess(config, folder, None)
    process.wait_ready()
    ready = time.perf_counter() - started
    process.end()
    pool = GraderPool(config, folder)
    pool.start()
    try:
        pool.call({"truth": "7", "answer": "7"})
        started = time.perf_counter()
        for number in range(300):
            pool.call({"truth": str(number), "answer": f"\\sqrt{{{number}^2}}"})
        return ready, 300 / (time.perf_counter() - started)
    finally:
        pool.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    least = checks_per_second(floor, repeats)
    print(f"{'floor':<16}{least:>12,.0f} checks/s")
    rates = {}
    for style in STYLES:
        check = partial(verify_answer, style=style)
        rates[style] = checks_per_second(check, repeats)
        ratio = rates[style] / least
        print(f"{style:<16}{rates[style]:>12,.0f} checks/s   {ratio:.2f} x floor")
    if find_spec("math_verify"):
        with tempfile.TemporaryDirectory() as folder:
            ready, calls = pool_calls_per_second(Path(folder))
        ratio = rates["answer_line"] / calls
        print(f"{'math-verify':<16}{calls:>12,.0f} calls/s    answer_line is {ratio:.0f} x as fast")
        print(f"{'its worker':<16}{ready:>12.2f} s to start")
    if min(rates.values()) < LEAST_CHECKS:
        raise SystemExit(f"below {LEAST_CHECKS:,} checks/s")


if __name__ == "__main__":
    main()
