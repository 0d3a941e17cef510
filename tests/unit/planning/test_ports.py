"""The port of a job comes from its id alone."""

from __future__ import annotations

import pytest

from megatron_dapo.planning.ports import (
    ENGINES_A_NODE,
    FIRST_ENGINE_PORT,
    FIRST_PORT,
    LAST_ENGINE_PORT,
    LAST_PORT,
    engine_port,
    master_port,
)
from tests.unit.handed import Case, handed_cases


@pytest.mark.parametrize("case", handed_cases("n", "job_ports"))
def test_jobs_get_fixed_ports_that_differ_from_their_neighbours(case: Case) -> None:
    expect = case["expect"]
    found = [master_port(job) for job in case["input"]["job_ids"]]
    assert found == [master_port(job) for job in case["input"]["job_ids"]]
    assert len(set(found)) == len(found)
    assert all(expect["low"] <= port <= expect["high"] for port in found)


def test_twelve_thousand_jobs_in_a_row_never_share_a_port() -> None:
    every = [master_port(job) for job in range(777, 12777)]
    assert len(set(every)) == len(every)
    assert (min(every), max(every)) == (FIRST_PORT, LAST_PORT)


def test_a_negative_job_id_is_refused() -> None:
    with pytest.raises(ValueError, match="job id -1"):
        master_port(-1)


def test_engines_of_neighbouring_jobs_never_share_a_port() -> None:
    taken = [
        engine_port(job) + engine for job in range(5, 5 + 1250) for engine in range(ENGINES_A_NODE)
    ]
    assert len(set(taken)) == len(taken)
    assert (min(taken), max(taken)) == (FIRST_ENGINE_PORT, LAST_ENGINE_PORT)
    assert LAST_ENGINE_PORT < FIRST_PORT
    with pytest.raises(ValueError, match="job id -1"):
        engine_port(-1)
