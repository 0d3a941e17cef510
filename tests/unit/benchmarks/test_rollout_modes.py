"""The product's scheduler on simulated engines: exactly once, fresh enough, and hardly idle.

All times are simulated, so every comparison is exact and the same on a slow machine.
"""

from __future__ import annotations

import dataclasses
import pickle
from collections import Counter
from functools import cache

import pytest

from benchmarks.rollout_modes import (
    CONTINUE,
    MODES,
    REFERENCE,
    Mode,
    failures,
    outcome,
    run_mode,
    sized,
    table,
)
from benchmarks.simulated_engines import PROMPT_TOKENS, LengthLaw, identity
from benchmarks.simulated_loop import simulate
from benchmarks.simulated_run import Account, Failure, Scenario, StepRecord, account

SMALL = Scenario(
    engines=4,
    slots=16,
    prompts_per_step=16,
    group_size=8,
    train_seconds_per_token=1.6e-4,
    steps=9,
    warm_up_steps=3,
    lengths=LengthLaw(median_tokens=1500, within_group=0.6),
)
BY_NAME = {mode.name: mode for mode in MODES}


@cache
def records_of(name: str) -> tuple[list[StepRecord], list[dict[str, float]]]:
    return simulate(run_mode(SMALL, BY_NAME[name]))


def account_of(name: str) -> Account:
    return account(records_of(name)[0], SMALL)


def check_exactly_once(records: list[StepRecord], scenario: Scenario) -> None:
    """Each step trains on its number of whole, mixed groups; no draw is trained on twice."""
    draws: Counter[int] = Counter()
    for record in records:
        assert len(record.groups) == scenario.prompts_per_step
        for group in record.groups:
            assert group.mixed
            assert len(group.responses) == scenario.group_size
            members = [response.sample_index for response in group.responses]
            assert members == list(range(scenario.group_size))
            for response in group.responses:
                draws[identity(response)] += 1
                length = response.token_ids[0]
                assert len(response.token_ids) == min(length, scenario.max_blocks)
                assert len(response.rollout_logprobs) == len(response.token_ids)
    assert len(draws) == sum(len(record.lengths) for record in records)
    assert set(draws.values()) == {1}


@pytest.mark.parametrize("name", BY_NAME)
def test_every_draw_is_trained_on_once_and_whole(name: str) -> None:
    check_exactly_once(records_of(name)[0], SMALL)


@pytest.mark.parametrize("name", BY_NAME)
def test_no_token_is_older_than_the_mode_allows(name: str) -> None:
    records, _ = records_of(name)
    ages = [age for record in records for age in record.staleness]
    assert min(ages) >= 0
    assert max(ages) <= BY_NAME[name].max_staleness


@pytest.mark.parametrize("name", set(BY_NAME) - {"reference"})
def test_what_the_scheduler_says_of_staleness_is_true(name: str) -> None:
    records, metrics = records_of(name)
    for record, told in zip(records, metrics, strict=True):
        assert told["rollout/staleness/max"] == max(record.staleness)
        mean = sum(record.staleness) / len(record.staleness)
        assert told["rollout/staleness/mean"] == pytest.approx(mean)


def test_a_mode_is_repeated_exactly() -> None:
    again, metrics = simulate(run_mode(SMALL, CONTINUE))
    assert (again, metrics) == records_of(CONTINUE.name)


def test_async_leaves_engines_less_idle_than_any_sync_mode_and_is_faster() -> None:
    sync = [account_of(mode.name) for mode in MODES if mode.rollout.get("mode", "sync") == "sync"]
    assert len(sync) == 4
    for name in ("async 1", "async 2", "async 4"):
        assert account_of(name).engines_idle < min(one.engines_idle for one in sync)
        assert account_of(name).step_seconds < min(one.step_seconds for one in sync)


def test_more_staleness_never_makes_async_slower() -> None:
    seconds = [account_of(f"async {staleness}").step_seconds for staleness in (1, 2, 4)]
    assert seconds[1] < seconds[0]
    assert seconds[2] <= 1.05 * seconds[1]


def test_training_beside_sampling_is_faster_than_after_it() -> None:
    assert account_of("one step off").step_seconds < account_of("drop").step_seconds


def test_only_the_reference_throws_a_third_away() -> None:
    reference = account_of("reference").generated_per_trained
    for name in set(BY_NAME) - {"reference"}:
        assert reference / account_of(name).generated_per_trained > 1.2, name


@pytest.mark.parametrize("name", ["drop", "carry + continue", "async 2"])
def test_64_engines_and_8192_responses_survive_deaths_hangs_and_slow_ones(name: str) -> None:
    # Short responses keep the test short; what counts here is how many there are.
    scenario = dataclasses.replace(
        sized(0.9),
        steps=1 if name == "drop" else 2,
        warm_up_steps=0,
        lengths=LengthLaw(median_tokens=500, within_group=0.5),
        train_seconds_per_token=1e-6,
        failures=(
            *(Failure(5.0 + number, number, "death") for number in range(6)),
            *(Failure(7.0 + number, number, "hang") for number in range(10, 14)),
            *(Failure(3.0, number, "slow") for number in range(20, 30)),
        ),
    )
    records, _ = simulate(run_mode(scenario, BY_NAME[name]))
    check_exactly_once(records, scenario)
    assert sum(len(record.lengths) for record in records) == scenario.steps * 8192


def test_with_drop_the_groups_do_not_depend_on_the_engines() -> None:
    few = dataclasses.replace(SMALL, steps=4)
    other = dataclasses.replace(
        few, engines=7, slots=5, failures=(Failure(60.0, 3, "death"), Failure(9.0, 0, "slow"))
    )
    mode = BY_NAME["drop"]
    first, second = (simulate(run_mode(scenario, mode))[0] for scenario in (few, other))
    trained = [[[r.token_ids for r in g.responses] for g in one.groups] for one in first]
    assert trained == [[[r.token_ids for r in g.responses] for g in one.groups] for one in second]


def test_the_account_speaks_of_the_steps_after_the_warm_up() -> None:
    scenario = dataclasses.replace(SMALL, steps=3, warm_up_steps=1, engines=1, slots=10)
    record = StepRecord(
        seconds=100.0,
        train_seconds=40.0,
        trained_tokens=2000,
        decoded_tokens=6000.0,
        slot_seconds=250.0,
        lengths=(500, 1500),
        staleness=(0, 2),
        groups=(),
    )
    cold = dataclasses.replace(record, seconds=1e6, decoded_tokens=1e9, staleness=(9, 9))
    found = account([cold, record, record], scenario)
    assert found.step_seconds == 100
    assert found.generated_per_trained == 3
    assert found.engines_idle == pytest.approx(0.75)
    assert found.trainer_idle == pytest.approx(0.6)
    assert found.staleness_mean == 1
    assert found.staleness_max == 2
    assert found.staleness_histogram == {0: 0.5, 2: 0.5}


def test_missed_bars_are_told_and_a_good_run_misses_none() -> None:
    base = account_of("async 4")
    good = {mode.name: dataclasses.replace(base, staleness_max=0, length_ratio=1) for mode in MODES}
    good[REFERENCE.name] = dataclasses.replace(
        good[REFERENCE.name], generated_per_trained=1.51 * base.generated_per_trained
    )
    good[CONTINUE.name] = dataclasses.replace(good[CONTINUE.name], engines_idle=0.9)
    assert failures(good) == []
    bad = good | {
        "async 2": dataclasses.replace(base, staleness_max=3, length_ratio=0.9, engines_idle=0.95),
        REFERENCE.name: good["drop"],
    }
    missed = failures(bad)
    assert len(missed) == 4
    assert any("saves 1.000x" in line for line in missed)
    assert any("3 versions old" in line for line in missed)


def test_the_reference_stays_the_reference_in_another_process() -> None:
    quick = dataclasses.replace(SMALL, steps=2, warm_up_steps=0)
    sent = pickle.loads(pickle.dumps(REFERENCE))
    records, metrics = simulate(run_mode(quick, sent))
    assert metrics == []
    assert records[0].decoded_tokens > 2.5 * records[0].trained_tokens


def test_the_table_names_every_mode() -> None:
    quick = dataclasses.replace(SMALL, steps=2, warm_up_steps=0)
    outcomes = [outcome(quick, mode) for mode in (REFERENCE, Mode("mine", {"mode": "sync"}))]
    lines = table(outcomes).splitlines()
    assert lines[2].startswith("| reference |")
    assert lines[3].startswith("| mine |")
    assert len({line.count("|") for line in lines}) == 1


def test_prompts_of_the_simulation_have_the_length_that_engines_expect() -> None:
    assert {len(prompt.token_ids) for prompt in SMALL.prompts} == {PROMPT_TOKENS}
