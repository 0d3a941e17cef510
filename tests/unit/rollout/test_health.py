"""Is an engine alive? Answers that are prompt, slow, missing, or say that something broke."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from benchmarks.simulated_loop import simulate
from megatron_dapo.rollout.health import CORE, SERVER, Heartbeat, falls_silent

Answer = Callable[[str, float], float | int | None]
"""By path and time: seconds that an answer takes (200 then), a status, or None: no connection."""


def watch(
    answer: Answer, *, until: float, updating: Callable[[float], bool] = lambda now: False
) -> tuple[str, float]:
    """What the heartbeat says, and when; ("", until) when it says nothing."""

    async def body() -> tuple[str, float]:
        loop = asyncio.get_running_loop()
        start = loop.time()

        async def ask(path: str) -> int | None:
            given = answer(path, loop.time() - start)
            if isinstance(given, float):
                await asyncio.sleep(given)
                return 200
            return given

        heartbeat = Heartbeat(
            ask,
            every_seconds=5.0,
            timeout_seconds=60.0,
            updating=lambda: updating(loop.time() - start),
            update_seconds=600.0,
        )
        try:
            async with asyncio.timeout(until):
                said = await heartbeat.until_lost()
        except TimeoutError:
            said = ""
        return said, loop.time() - start

    return simulate(body())


def stops_at(path: str, moment: float) -> Answer:
    return lambda asked, now: 1e6 if asked == path and now >= moment else 0.01


def test_an_engine_that_answers_is_alive() -> None:
    assert watch(lambda path, now: 0.01, until=10_000)[0] == ""


def test_a_slow_engine_is_alive() -> None:
    assert watch(lambda path, now: 55.0, until=10_000)[0] == ""


@pytest.mark.parametrize("path", [SERVER, CORE])
def test_silence_of_the_server_or_of_what_computes_is_noticed_in_time(path: str) -> None:
    said, when = watch(stops_at(path, 100.0), until=10_000)
    assert f"no answer to GET {path}" in said
    assert "rollout.heartbeat_timeout_seconds=60" in said
    assert 100.0 + 60.0 - 5.0 <= when <= 100.0 + 60.0 + 3 * 5.0


def test_a_connection_that_fails_for_long_is_silence_and_a_short_failure_is_not() -> None:
    said, when = watch(lambda path, now: None if now > 100.0 else 0.01, until=10_000)
    assert "no answer" in said
    assert 155.0 <= when <= 175.0
    assert watch(lambda path, now: None if 100.0 < now < 140.0 else 0.01, until=10_000)[0] == ""


def test_a_server_that_says_it_is_broken_is_lost_at_once() -> None:
    said, when = watch(lambda path, now: 503 if now > 100.0 else 0.01, until=10_000)
    assert said == f"it answers 503 to GET {SERVER}" or said == f"it answers 503 to GET {CORE}"
    assert when <= 100.0 + 5.0 + 1.0


def test_the_core_may_be_silent_while_weights_are_brought_in() -> None:
    update = range(100, 500)

    def answer(path: str, now: float) -> float:
        return max(500.0 - now, 0.01) if path == CORE and int(now) in update else 0.01

    assert watch(answer, until=5000, updating=lambda now: int(now) in update)[0] == ""
    assert "no answer to GET /is_paused" in watch(answer, until=5000)[0]


def test_a_core_that_hangs_in_an_update_is_noticed_after_what_an_update_may_take() -> None:
    said, when = watch(stops_at(CORE, 100.0), until=5000, updating=lambda now: now > 90.0)
    assert "no answer to GET /is_paused" in said
    assert 100.0 + 660.0 - 10.0 <= when <= 100.0 + 660.0 + 15.0


def test_a_server_that_stops_in_an_update_is_noticed_as_ever() -> None:
    said, when = watch(stops_at(SERVER, 100.0), until=5000, updating=lambda now: now > 90.0)
    assert "no answer to GET /health" in said
    assert when <= 175.0


@pytest.mark.parametrize(
    ("statuses", "silent"),
    [([200] * 20, False), ([200, 200, None], True), ([200, 503], True), ([None], True)],
)
def test_after_a_fault_it_counts_whether_the_server_goes_on(
    statuses: list[int | None], silent: bool
) -> None:
    left = list(statuses)

    async def ask(path: str) -> int | None:
        assert path == SERVER
        return left.pop(0)

    assert simulate(falls_silent(ask)) == silent
