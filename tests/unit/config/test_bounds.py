"""Every number of a configuration has bounds: what no run could mean is refused with its key."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import get_args

import pytest
from pydantic import BaseModel

from megatron_dapo.config import ConfigError, load_config
from megatron_dapo.config.evaluation import EvaluationSet
from megatron_dapo.config.schema import RunConfig
from megatron_dapo.config.section import LONGEST_SECONDS, MOST
from tests.unit.config.runs import write_run

SIGNED = ("reward.correct", "reward.incorrect", "rollout.top_k")


def is_number(kind: object) -> bool:
    return kind in (int, float) or any(map(is_number, get_args(kind)))


def numbers(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Keys that take a number, also those of an evaluation set."""
    for name, field in section.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from numbers(kind, f"{prefix}{name}.")
        elif kind == dict[get_args(kind)[0], EvaluationSet] if len(get_args(kind)) == 2 else False:
            yield from numbers(EvaluationSet, f"{prefix}{name}.aime.")
        elif is_number(kind):
            yield prefix + name


NUMBERS = sorted(numbers(RunConfig))


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("run"))


def refusal(file: Path, key: str, value: object) -> str:
    """The one message about `key`."""
    more = ["evaluation.sets.aime.path=x.jsonl"] if ".sets." in key else []
    with pytest.raises(ConfigError) as caught:
        load_config(file, [*more, f"{key}={value}"])
    (problem,) = caught.value.problems
    assert problem.startswith(f"{key}="), problem
    return problem


def test_all_numbers_are_found() -> None:
    assert len(NUMBERS) > 80
    assert {"seed", "rollout.heartbeat_seconds", "evaluation.sets.aime.temperature"} < {*NUMBERS}


@pytest.mark.parametrize("key", NUMBERS)
def test_what_is_no_finite_number_and_what_no_run_could_mean_is_refused(
    file: Path, key: str
) -> None:
    for value in (".nan", ".inf", "-.inf", "'nan'", "'inf'", "true"):
        refusal(file, key, value)
    for value in ("1e30", "-1e30"):
        refusal(file, key, value)
    assert "less than" in refusal(file, key, 10**12)
    if key not in SIGNED:
        refusal(file, key, -1)


TIMES: Mapping[str, float] = {
    "parallel.timeout_seconds": 1,
    "resharding.timeout_seconds": 1,
    "rollout.startup_timeout_seconds": 1,
    "rollout.request_timeout_seconds": 1,
    "reward.cpu_limit_seconds": 1,
    "rollout.heartbeat_seconds": 0.01,
    "rollout.heartbeat_timeout_seconds": 0.01,
    "reward.time_limit_seconds": 0.01,
    "sampling.max_seconds": 0.01,
}
"""Key -> its least value."""


@pytest.mark.parametrize("key", TIMES)
def test_times_are_longer_than_nothing_and_shorter_than_for_ever(file: Path, key: str) -> None:
    for value in (0, 1e-9, -5, LONGEST_SECONDS + 1):
        refusal(file, key, value)
    for value in (TIMES[key], LONGEST_SECONDS):
        load_config(file, [f"{key}={value}"])


def test_every_time_is_among_them() -> None:
    times = {key for key in NUMBERS if key.endswith("_seconds")}
    assert times - {"parallel.stall_seconds"} == {*TIMES}


@pytest.mark.parametrize("key", ["checkpoint.every", "checkpoint.keep_every", "evaluation.every"])
def test_intervals_may_be_off_and_are_whole(file: Path, key: str) -> None:
    for value in (0, MOST):
        load_config(file, [f"{key}={value}"])
    for value in (-1, MOST + 1, 0.5):
        refusal(file, key, value)


def test_the_message_says_what_is_allowed_and_what_the_key_means(file: Path) -> None:
    told = refusal(file, "rollout.heartbeat_seconds", 1e-9)
    assert "greater than or equal to 0.01" in told
    assert "Between two questions to each engine whether it lives." in told


def test_defaults_are_within_their_bounds(file: Path) -> None:
    assert all(math.isfinite(value) for value in load_config(file).optimizer.model_dump().values())
