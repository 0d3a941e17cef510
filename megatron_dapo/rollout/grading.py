"""Responses to rewards, in threads beside the event loop; and when failing graders end a run."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

from megatron_dapo.config.errors import RunFailed
from megatron_dapo.reward.grade import NOT_GRADED, grading_errors
from megatron_dapo.types import Group, Prompt, Response, Reward

Grade = Callable[[Prompt, Response], Reward]
Decode = Callable[[Sequence[int]], str]
Grader = Callable[[Prompt, Response], Awaitable[tuple[Response, Reward]]]
"""A response without text to the same with text, and its reward. Called once for each response."""


class ThreadedGrader:
    """`Grader` that decodes and grades in threads, in the order of arrival.

    Args:
        grade: accuracy and score of one response; not called for aborted ones. From `threads`
            threads at once.
        decode: token ids to the text that `grade` reads.
        threads: how many.
    """

    def __init__(self, grade: Grade, decode: Decode, threads: int = 1) -> None:
        self._seconds = 0.0
        self._grade = grade
        self._decode = decode
        self._decoding = threading.Lock()
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="grader")

    async def __call__(self, prompt: Prompt, response: Response) -> tuple[Response, Reward]:
        loop = asyncio.get_running_loop()
        work = loop.run_in_executor(self._pool, self._work, prompt, response)
        response, reward, seconds = await work
        self._seconds += seconds
        return response, reward

    def take_seconds(self) -> float:
        """Time that the threads have worked since the last time, all together."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def close(self) -> None:
        """Wait for no call that has not begun."""
        self._pool.shutdown(cancel_futures=True)

    def _work(self, prompt: Prompt, response: Response) -> tuple[Response, Reward, float]:
        started = time.perf_counter()
        with self._decoding:  # not every tokenizer may be used from two threads
            response = dataclasses.replace(response, text=self._decode(response.token_ids))
        aborted = response.finish_reason == "abort"
        reward = NOT_GRADED if aborted else self._grade(prompt, response)
        return response, reward, time.perf_counter() - started


class TooManyGradingErrors(RunFailed):
    """So many graders failed that what is left says more of them than of the policy."""


def check_grading_errors(
    generated: Iterable[Group], most: float, failures: Sequence[str] = ()
) -> int:
    """Responses of a step whose grader failed.

    Args:
        generated: groups of the step.
        most: share of their responses that may have failed (reward.max_error_share).
        failures: what the first ones have said.

    Raises:
        TooManyGradingErrors: they are more than that.
    """
    groups = list(generated)
    errors = grading_errors(groups)
    responses = sum(r.finish_reason != "abort" for group in groups for r in group.responses)
    if errors > most * responses:
        told = "".join(f"\n- {failure}" for failure in failures)
        raise TooManyGradingErrors(
            f"the grader failed on {errors} of {responses} responses of this step, a share of "
            f"{errors / responses:.3f}: at most reward.max_error_share={most} is allowed. Mend the "
            "grader, or raise the share"
            + (f". The first failures:{told}" if told else "; the log tells the first failure")
        )
    return errors
