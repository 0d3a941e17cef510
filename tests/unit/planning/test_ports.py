"""Ports of a job come from its id alone."""

from __future__ import annotations

from dataclasses import astuple

import pytest

from megatron_dapo.planning import ports
from tests.unit.handed import Case, handed_cases


@pytest.mark.parametrize("case", handed_cases("n", "job_ports"))
def test_jobs_get_fixed_ports_that_differ_from_their_neighbours(case: Case) -> None:
    expect = case["expect"]
    found = [astuple(ports.job_ports(job)) for job in case["input"]["job_ids"]]
    again = [astuple(ports.job_ports(job)) for job in case["input"]["job_ids"]]
    assert found == again
    every = [port for job in found for port in job]
    assert len(set(every)) == len(every)
    assert all(expect["low"] <= port <= expect["high"] for port in every)


def test_six_thousand_jobs_in_a_row_never_share_a_port() -> None:
    every = [port for job in range(777, 6777) for port in astuple(ports.job_ports(job))]
    assert len(set(every)) == len(every)
    assert (min(every), max(every)) == (ports.FIRST_PORT, ports.LAST_PORT)


def test_a_negative_job_id_is_refused() -> None:
    with pytest.raises(ValueError, match="job id -1"):
        ports.job_ports(-1)
