"""Engines on other machines: only with consent and a token, and only where they can be reached."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron_dapo.config.endpoint_checks import endpoint_problems, missing_endpoints
from megatron_dapo.config.load import load_config
from tests.conftest import REPOSITORY
from tests.unit.config.runs import make_config

FAR = "http://10.0.0.7:8000"
OWN = {"engines": 2, "engine_nodes": 2, "placement": "disaggregated", "remote_engines": True}


def problems(**sections: dict[str, object]) -> list[str]:
    return list(endpoint_problems(make_config(**sections)))


@pytest.mark.parametrize("endpoint", ["unix:/a", "http://127.0.0.1:80", "http://[::1]:80"])
def test_an_engine_of_this_machine_needs_no_consent(endpoint: str) -> None:
    assert problems(rollout={"endpoints": [endpoint]}) == []


@pytest.mark.parametrize(
    ("rollout", "message"),
    [
        ({}, r"'http://10\.0\.0\.7:8000' is another machine, and rollout\.remote_engines=false"),
        ({"remote_engines": True}, r"another machine, and rollout\.token_file is not set"),
    ],
)
def test_another_machine_needs_consent_and_a_token(
    rollout: dict[str, object], message: str
) -> None:
    (problem,) = problems(rollout={"endpoints": [FAR], **rollout})
    assert re.search(message, problem)


def test_with_both_another_machine_is_taken(tmp_path: Path) -> None:
    consent = {"remote_engines": True, "token_file": str(tmp_path / "token")}
    assert problems(rollout={"endpoints": [FAR], **consent}) == []


@pytest.mark.parametrize(
    "endpoint",
    [
        "http://0.0.0.0:80",
        "http://[::]:80",
        "https://host:80",
        "http://me:pw@host:80",
        "http://host",
    ],
)
def test_what_is_no_address_of_one_machine_is_refused(endpoint: str, tmp_path: Path) -> None:
    consent = {"remote_engines": True, "token_file": str(tmp_path / "token")}
    (problem,) = problems(rollout={"endpoints": [endpoint], **consent})
    assert "http://host:port" in problem
    assert "pw" not in problem


@pytest.mark.parametrize(
    ("rollout", "resharding", "message"),
    [
        ({"remote_engines": False}, {}, "rollout.remote_engines=false"),
        ({"engines": 3}, {}, "must divide rollout.engines=3"),
        ({"placement": "colocated"}, {}, "needs rollout.placement=disaggregated"),
        ({}, {"transport": "vllm_nccl"}, "resharding.transport=vllm_nccl meets on 127.0.0.1"),
    ],
)
def test_engine_nodes_that_cannot_work_are_refused(
    rollout: dict[str, object], resharding: dict[str, object], message: str
) -> None:
    assert problems(rollout=OWN) == []
    (problem,) = problems(rollout=OWN | rollout, resharding=resharding)
    assert message in problem


def test_engines_that_nobody_started_are_missed() -> None:
    (problem,) = missing_endpoints(make_config(rollout=OWN))
    assert "sbatch examples/qwen32b/run.sh" in problem
    given = OWN | {"endpoints": ["http://a:1", "http://b:1"]}
    assert list(missing_endpoints(make_config(rollout=given))) == []
    assert list(missing_endpoints(make_config())) == []


def test_weights_go_through_the_run_directory_where_memory_is_not_shared() -> None:
    assert make_config().on_one_machine
    assert not make_config(rollout={"remote_engines": True}).on_one_machine
    assert not make_config(parallel={"nodes": 2}).on_one_machine


def test_the_smoke_configuration_is_sound() -> None:
    config = load_config(REPOSITORY / "examples/qwen32b/cpu_smoke.yaml")
    assert list(endpoint_problems(config)) == []
    assert (config.parallel.nodes, config.rollout.engine_nodes) == (2, 2)
